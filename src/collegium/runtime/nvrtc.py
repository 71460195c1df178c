"""Kernels in CUDA: compile them with NVRTC, which PyTorch brings, keep what was compiled, and start them.

NVRTC and the driver are called through ctypes, so nothing is built when the package is installed.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import PlanError
from .launch import Step, noted
from .user_cache import cache_folder, write_atomic

__all__ = ["Boxes", "CudaKernel", "compiled", "nvrtc_found", "start"]

# The driver's numbers: element types of a tensor map and its other settings, a function's most shared memory, and a
# mode of capturing that forbids nothing.
_ELEMENTS = {torch.float8_e4m3fn: 0, torch.float16: 6, torch.bfloat16: 9}
_SWIZZLE_128, _PROMOTE_256, _MOST_SHARED, _RELAXED = 3, 3, 8, 2
_ACROSS = 128  # bytes of a row that one copy takes
_Tensors = tuple[Tensor, *tuple[Tensor | None, ...]]


class Boxes(NamedTuple):
    """An argument for copies of boxes of ``box`` rows by 128 bytes: ``height`` rows of ``columns`` numbers.

    step: bytes from row to row, a multiple of 16.
    """

    dtype: torch.dtype
    height: int
    columns: int
    step: int
    box: int


class CudaKernel:
    """A kernel in CUDA: compiled once for each set of constants, loaded once for each of them and each device.

    name: of its function. source: returns its text for some constants. shared: bytes of shared memory of a block.
    """

    def __init__(self, name: str, source: Any, shared: int) -> None:
        self._name, self._source, self.shared = name, source, shared
        self._loaded: dict[tuple[Any, ...], ctypes.c_void_p] = {}
        self._locks: dict[tuple[Any, ...], threading.Lock] = {}

    def on(self, device: torch.device, constants: Mapping[str, int]) -> ctypes.c_void_p:
        """Return the function for ``constants`` on ``device``, which is the current one."""
        key = (device.index, *constants.values())
        found = self._loaded.get(key)
        if found is None:
            with self._locks.setdefault(key, threading.Lock()):
                found = self._loaded[key] = self._loaded.get(key) or self._load(constants)
        return found

    def _load(self, constants: Mapping[str, int]) -> ctypes.c_void_p:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        code = _kept(self._source(constants), self._name, constants)
        mode = ctypes.c_int(_RELAXED)  # it may be loaded while a graph is captured, and is no part of it
        _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        try:
            _done(_driver().cuModuleLoadData(ctypes.byref(module), code), f"loading {self._name}")
            _done(_driver().cuModuleGetFunction(ctypes.byref(function), module, self._name.encode()), self._name)
            _done(_driver().cuFuncSetAttribute(function, _MOST_SHARED, self.shared), f"shared memory of {self._name}")
        finally:
            _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        return function


def start(
    kernel: CudaKernel, constants: Mapping[str, int], sizes: tuple[int, int], tensors: _Tensors, forms: Sequence[Any]
) -> None:
    """Run a kernel on the current stream of the first tensor's device; sizes: blocks, and threads of one.

    forms: of the kernel's arguments. ``Boxes`` take one of the tensors, a number takes so many, as pointers side by
    side, and a ctypes structure none. Raises PlanError where NVRTC or the driver refuses.
    """
    device, addresses = tensors[0].device, tuple(None if each is None else each.data_ptr() for each in tensors)
    with torch.cuda.device(device):
        stream = torch._C._cuda_getCurrentRawStream(device.index)  # pyright: ignore[reportPrivateUsage]
        function, call = kernel.on(device, constants), _starter(kernel.shared, forms, addresses)
        call(function, *sizes, stream, *addresses)
    noted(Step(call, (function, *sizes, stream), tensors))


def _starter(shared: int, forms: Sequence[Any], first: tuple[int | None, ...]) -> Callable[..., None]:
    """Return what starts a function: with arguments made once for the addresses ``first``, for others made anew."""

    def made(addresses: tuple[int | None, ...]) -> list[Any]:
        left = iter(addresses)
        return [_argument(form, left) for form in forms]

    def call(function: ctypes.c_void_p, blocks: int, threads: int, stream: int, *addresses: int | None) -> None:
        given = held if addresses == first else made(addresses)
        there = (ctypes.c_void_p * len(given))(*(ctypes.addressof(each) for each in given))
        at = ctypes.c_void_p(stream)
        code = _driver().cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, shared, at, there, None)
        _done(code, "starting a kernel")

    held = made(first)
    return call


def nvrtc_found() -> bool:
    """Return whether kernels in CUDA can be compiled here."""
    return _nvrtc() is not None


def compiled(text: str, name: str, constants: Mapping[str, int], *options: str) -> tuple[bytes, str]:
    """Return machine code for sm_90a, and what the compiler says; needs no GPU. Raises PlanError with its words."""
    nvrtc, program, size = _nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    if nvrtc is None:
        raise PlanError(f"{name} is a kernel in CUDA, and NVRTC was not found; install nvidia-cuda-nvrtc")
    asked = ["--gpu-architecture=sm_90a", "--std=c++17", "-default-device", "--diag-suppress=128", *options]
    asked += [f"-D{constant}={value}" for constant, value in constants.items()]
    given = (ctypes.c_char_p * len(asked))(*[option.encode() for option in asked])
    made = nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), f"{name}.cu".encode(), 0, None, None)
    _done(made, "nvrtcCreateProgram")
    try:
        failed = nvrtc.nvrtcCompileProgram(program, len(asked), given)
        _done(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)), "nvrtcGetProgramLogSize")
        log = ctypes.create_string_buffer(size.value)
        _done(nvrtc.nvrtcGetProgramLog(program, log), "nvrtcGetProgramLog")
        said = log.value.decode()
        _done(failed, f"NVRTC does not compile {name}: {said}")
        _done(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
        code = ctypes.create_string_buffer(size.value)
        _done(nvrtc.nvrtcGetCUBIN(program, code), "nvrtcGetCUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw, said


def _kept(text: str, name: str, constants: Mapping[str, int]) -> bytes:
    """Return machine code from the user's cache, or compile it and put it there.

    A file begins with the digest of its code; another one, or a folder that cannot be used, costs the second that
    compiling takes and nothing else.
    """
    nvrtc, major, minor = _nvrtc(), ctypes.c_int(), ctypes.c_int()
    if nvrtc is not None:
        nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    asked = repr((text, major.value, minor.value, torch.version.cuda, dict(constants)))
    path = cache_folder("kernels") / f"{name}-{hashlib.sha256(asked.encode()).hexdigest()[:32]}.cubin"
    with suppress(OSError):
        held = path.read_bytes()
        if hashlib.sha256(held[32:]).digest() == held[:32]:
            return held[32:]
    code, _ = compiled(text, name, constants)
    with suppress(OSError):
        write_atomic(path, hashlib.sha256(code).digest() + code)
    return code


def _argument(form: Any, addresses: Iterator[int | None]) -> Any:
    """Return a value of ctypes that lives as long as the caller holds it."""
    if isinstance(form, Boxes):
        return _tensor_map(form, next(addresses))
    return (ctypes.c_void_p * form)(*islice(addresses, form)) if isinstance(form, int) else form


def _tensor_map(rows: Boxes, address: int | None) -> Any:
    """Describe rows for the tensor memory accelerator; what lies outside of them is read as zero."""
    room = (ctypes.c_uint64 * 24)()
    made = (ctypes.c_uint64 * 16).from_buffer(room, -ctypes.addressof(room) % 64)
    wide, narrow = ctypes.c_uint64, ctypes.c_uint32
    code = _driver().cuTensorMapEncodeTiled(
        ctypes.byref(made), _ELEMENTS[rows.dtype], 2, ctypes.c_void_p(address),
        (wide * 2)(rows.columns, rows.height), (wide * 1)(rows.step),
        (narrow * 2)(_ACROSS // rows.dtype.itemsize, rows.box), (narrow * 2)(1, 1), 0, _SWIZZLE_128, _PROMOTE_256, 0,
    )  # fmt: skip
    _done(code, f"describing {rows} for the tensor memory accelerator")
    return made


def _done(code: int, what: str) -> None:
    if code:
        raise PlanError(f"{what}: CUDA's error {code}; Overrides(kernel='reference') runs without kernels")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _nvrtc() -> ctypes.CDLL | None:
    """Return NVRTC of the CUDA that torch was built for: from a wheel beside torch, or as the system finds it."""
    spec = find_spec("nvidia")
    major = (torch.version.cuda or "13").partition(".")[0]
    folders = [Path(place) for place in (spec.submodule_search_locations or ())] if spec is not None else []
    names = [str(path) for folder in folders for path in folder.glob(f"*/lib/libnvrtc.so.{major}")]
    for name in (*names, f"libnvrtc.so.{major}"):
        with suppress(OSError):
            for other in sorted(Path(name).parent.glob(f"libnvrtc-builtins.so.{major}*")) if name in names else ():
                ctypes.CDLL(str(other), ctypes.RTLD_GLOBAL)  # NVRTC asks for it by name alone
            return ctypes.CDLL(name)
    return None
