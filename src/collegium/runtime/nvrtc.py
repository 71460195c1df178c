"""Kernels in CUDA: compile them with NVRTC, which PyTorch brings, keep what was compiled, and start them.

NVRTC and the driver are called through ctypes, so nothing is built when the package is installed.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import PlanError
from .cached import cache_folder, write_whole
from .launch import unrepeatable

__all__ = ["Boxes", "CudaKernel", "compiled", "nvrtc_found", "start"]

# The driver's numbers: element types of a tensor map and its other settings, a function's most shared memory, and a
# mode of capturing that forbids nothing.
_ELEMENTS = {torch.float8_e4m3fn: 0, torch.float16: 6, torch.bfloat16: 9}
_SWIZZLE_128, _PROMOTE_256, _MOST_SHARED, _RELAXED = 3, 3, 8, 2
_ACROSS = 128  # bytes of a row that one copy takes


class Boxes(NamedTuple):
    """The argument of a kernel that copies boxes of ``box`` rows by 128 bytes: ``height`` rows of ``columns`` numbers.

    Rows begin ``stride(-2)`` numbers apart, at multiples of 16 bytes.
    """

    tensor: Tensor
    height: int
    columns: int
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
    kernel: CudaKernel, constants: Mapping[str, int], device: torch.device, sizes: tuple[int, int], *arguments: Any
) -> None:
    """Run a kernel on the current stream of ``device``; sizes: blocks, and threads of one.

    Arguments are ``Boxes``, tensors, or ctypes structures. Raises PlanError where NVRTC or the driver refuses.
    """
    with torch.cuda.device(device):
        function = kernel.on(device, constants)
        held = [_argument(each) for each in arguments]
        given = (ctypes.c_void_p * len(held))(*(ctypes.addressof(each) for each in held))
        stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
        blocks, threads = sizes
        code = _driver().cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, kernel.shared, stream, given, None)
    _done(code, "starting a kernel")
    unrepeatable()


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
        write_whole(path, hashlib.sha256(code).digest() + code)
    return code


def _argument(given: Any) -> Any:
    """Return a value of ctypes that lives as long as the caller holds it."""
    if isinstance(given, Boxes):
        return _tensor_map(given)
    return ctypes.c_void_p(given.data_ptr()) if isinstance(given, Tensor) else given


def _tensor_map(rows: Boxes) -> Any:
    """Describe rows for the tensor memory accelerator; what lies outside of them is read as zero."""
    tensor, size = rows.tensor, rows.tensor.element_size()
    room = (ctypes.c_uint64 * 24)()
    made = (ctypes.c_uint64 * 16).from_buffer(room, -ctypes.addressof(room) % 64)
    wide, narrow = ctypes.c_uint64, ctypes.c_uint32
    code = _driver().cuTensorMapEncodeTiled(
        ctypes.byref(made), _ELEMENTS[tensor.dtype], 2, ctypes.c_void_p(tensor.data_ptr()),
        (wide * 2)(rows.columns, rows.height), (wide * 1)(tensor.stride(-2) * size),
        (narrow * 2)(_ACROSS // size, rows.box), (narrow * 2)(1, 1), 0, _SWIZZLE_128, _PROMOTE_256, 0,
    )  # fmt: skip
    _done(code, f"describing {tuple(tensor.shape)} of {tensor.dtype} for the tensor memory accelerator")
    return made


def _done(code: int, what: str) -> None:
    if code:
        raise PlanError(f"{what}: CUDA's error {code}; Choice(kernel='reference') runs without kernels")


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
