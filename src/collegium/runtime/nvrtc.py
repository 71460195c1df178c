"""Compile kernels in CUDA with NVRTC, which PyTorch installs, cache the machine code, and launch them.

NVRTC and the driver are called through ctypes, so the package has no build step.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from importlib.util import find_spec
from itertools import accumulate, islice
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import PlanError
from .launch import Step, noted
from .user_cache import cache_folder, write_atomic

__all__ = ["Boxes", "CudaKernel", "Elements", "compiled", "nvrtc_found", "start"]

# Constants of the CUDA driver.
_ELEMENT_TYPES = {torch.float8_e4m3fn: 0, torch.float16: 6, torch.bfloat16: 9}  # CUtensorMapDataType
_WORD_TYPES = {4: 2, 8: 4}  # CUtensorMapDataType of unsigned integers, by bytes
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # CUtensorMapSwizzle, by bytes
_L2_PROMOTION_256B = 3
_MAX_DYNAMIC_SHARED_SIZE = 8  # CUfunction_attribute
_CAPTURE_MODE_RELAXED = 2
_BOX_BYTES = 128  # bytes of a row that one copy takes
_PROGRAMMATIC_SERIALIZATION = 6  # CUlaunchAttributeID
_Tensors = tuple[Tensor, *tuple[Tensor | None, ...]]


class Boxes(NamedTuple):
    """A kernel argument: a tensor map that copies boxes of ``box`` rows by 128 bytes.

    height, columns: of the matrix. step: bytes from row to row, a multiple of 16.
    """

    dtype: torch.dtype
    height: int
    columns: int
    step: int
    box: int


class Elements(NamedTuple):
    """A kernel argument: a tensor map that copies boxes of an array, innermost dimension first.

    size: bytes of an element, 4 or 8. shape: of the array, in elements. box: of a copy, at most 256 in each dimension.
    steps: bytes from element to element of all dimensions but the first, multiples of 16; without them the array is
    contiguous. swizzle: bytes of a box's innermost dimension, 32 or 64, which is swizzled; 0: none.
    """

    size: int
    shape: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...] = ()
    swizzle: int = 0


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: a number that names it, and the value, which has 64 bytes."""

    _fields_ = (("name", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig: blocks, threads of one, bytes of shared memory, the stream and the attributes."""

    _fields_ = (
        ("blocks", ctypes.c_uint * 3),
        ("threads", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


# A kernel may start while the one before it in the stream ends, and waits for it itself (sm90.cu, wait_for_previous).
_STARTS_EARLY = _LaunchAttribute(_PROGRAMMATIC_SERIALIZATION, 0, (ctypes.c_int * 16)(1))


class CudaKernel:
    """A kernel in CUDA, compiled once for each set of constants, and loaded once for each set and device.

    name: of its function. source: returns the source text for given constants. shared: bytes of shared memory of a
    block.
    """

    def __init__(self, name: str, source: Any, shared: int) -> None:
        self.shared = shared
        self.name = name
        self.source = source
        self._loaded: dict[tuple[Any, ...], ctypes.c_void_p] = {}
        self._locks: dict[tuple[Any, ...], threading.Lock] = {}

    def on(self, device: torch.device, constants: Mapping[str, int]) -> ctypes.c_void_p:
        """Return the function for ``constants`` on ``device``, which is the current one."""
        key = (device.index, *constants.values())
        function = self._loaded.get(key)
        if function is None:
            with self._locks.setdefault(key, threading.Lock()):
                function = self._loaded.get(key) or self._load(constants)
                self._loaded[key] = function
        return function

    def machine_code(self, constants: Mapping[str, int]) -> bytes:
        """Return machine code for ``constants`` from the user's cache, or compile it; needs no GPU."""
        return _cached_code(self.source(constants), self.name, constants)

    def _load(self, constants: Mapping[str, int]) -> ctypes.c_void_p:
        module = ctypes.c_void_p()
        function = ctypes.c_void_p()
        code = self.machine_code(constants)
        mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)  # it may be loaded while a graph is captured, and is no part of it
        _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        try:
            _check(_driver().cuModuleLoadData(ctypes.byref(module), code), f"loading {self.name}")
            _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, self.name.encode()), self.name)
            _check(
                _driver().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_SIZE, self.shared),
                f"shared memory of {self.name}",
            )
        finally:
            _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        return function


def start(
    kernel: CudaKernel, constants: Mapping[str, int], sizes: tuple[int, int], tensors: _Tensors, forms: Sequence[Any]
) -> None:
    """Run a kernel on the current stream of the first tensor's device; sizes: blocks, and threads of one.

    The kernel starts while the one before it in the stream ends, so it calls ``wait_for_previous`` (sm90.cu) before it
    reads what others write, or writes. forms: of its arguments. ``Boxes`` and ``Elements`` take one of the tensors, a
    tuple of ``Boxes`` takes one for all of its maps, a number takes so many, as pointers side by side, and a ctypes
    structure none. Raises PlanError where NVRTC or the driver refuses.
    """
    device = tensors[0].device
    addresses = tuple(None if tensor is None else tensor.data_ptr() for tensor in tensors)
    with torch.cuda.device(device):
        stream = torch._C._cuda_getCurrentRawStream(device.index)  # pyright: ignore[reportPrivateUsage]
        function = kernel.on(device, constants)
        call = _starter(kernel.shared, forms, addresses)
        call(function, *sizes, stream, *addresses)
    noted(Step(call, (function, *sizes, stream), tensors))


def _starter(shared: int, forms: Sequence[Any], first: tuple[int | None, ...]) -> Callable[..., None]:
    """Return a function that launches a kernel; arguments for the addresses ``first`` are created only once."""

    def arguments_for(addresses: tuple[int | None, ...]) -> list[Any]:
        remaining = iter(addresses)
        return [_argument(form, remaining) for form in forms]

    def call(function: ctypes.c_void_p, blocks: int, threads: int, stream: int, *addresses: int | None) -> None:
        arguments = first_arguments if addresses == first else arguments_for(addresses)
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        config = _LaunchConfig(
            (blocks, 1, 1), (threads, 1, 1), shared, stream, ctypes.pointer(_STARTS_EARLY), attribute_count=1
        )
        code = _driver().cuLaunchKernelEx(ctypes.byref(config), function, pointers, None)
        _check(code, "starting a kernel")

    first_arguments = arguments_for(first)
    return call


def nvrtc_found() -> bool:
    """Return whether NVRTC is installed, so that kernels in CUDA can be compiled."""
    return _nvrtc() is not None


def compiled(text: str, name: str, constants: Mapping[str, int], *options: str) -> tuple[bytes, str]:
    """Return machine code for sm_90a, and the compiler's log; needs no GPU. Raises PlanError with the log."""
    nvrtc = _nvrtc()
    if nvrtc is None:
        raise PlanError(f"{name} is a kernel in CUDA, and NVRTC was not found; install nvidia-cuda-nvrtc")
    arguments = ["--gpu-architecture=sm_90a", "--std=c++17", "-default-device", "--diag-suppress=128", *options]
    arguments += [f"-D{constant}={value}" for constant, value in constants.items()]
    argument_array = (ctypes.c_char_p * len(arguments))(*[argument.encode() for argument in arguments])
    program = ctypes.c_void_p()
    size = ctypes.c_size_t()
    created = nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), f"{name}.cu".encode(), 0, None, None)
    _check(created, "nvrtcCreateProgram")
    try:
        result = nvrtc.nvrtcCompileProgram(program, len(arguments), argument_array)
        _check(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)), "nvrtcGetProgramLogSize")
        log_buffer = ctypes.create_string_buffer(size.value)
        _check(nvrtc.nvrtcGetProgramLog(program, log_buffer), "nvrtcGetProgramLog")
        log = log_buffer.value.decode()
        _check(result, f"NVRTC does not compile {name}: {log}")
        _check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
        code = ctypes.create_string_buffer(size.value)
        _check(nvrtc.nvrtcGetCUBIN(program, code), "nvrtcGetCUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw, log


def _cached_code(text: str, name: str, constants: Mapping[str, int]) -> bytes:
    """Return machine code from the user's cache, or compile it and store it there.

    A file begins with the digest of its code; a damaged file, or a folder that cannot be used, costs only the second
    that compiling takes.
    """
    nvrtc = _nvrtc()
    major = ctypes.c_int()
    minor = ctypes.c_int()
    if nvrtc is not None:
        nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    key = repr((text, major.value, minor.value, torch.version.cuda, dict(constants)))
    path = cache_folder("kernels") / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"
    with suppress(OSError):
        content = path.read_bytes()
        if hashlib.sha256(content[32:]).digest() == content[:32]:
            return content[32:]
    code, _ = compiled(text, name, constants)
    with suppress(OSError):
        write_atomic(path, hashlib.sha256(code).digest() + code)
    return code


def _argument(form: Any, addresses: Iterator[int | None]) -> Any:
    """Return a ctypes value for an argument; the caller keeps it alive."""
    if isinstance(form, Boxes | Elements):
        return _tensor_maps((form,), next(addresses))
    if isinstance(form, tuple):
        return _tensor_maps(form, next(addresses))
    return (ctypes.c_void_p * form)(*islice(addresses, form)) if isinstance(form, int) else form


@lru_cache(maxsize=1024)
def _tensor_maps(forms: tuple[Boxes | Elements, ...], address: int | None) -> Any:
    """Return tensor maps of one tensor, one after the other; elements outside of it are read as zero.

    A map depends on ``forms`` and ``address`` alone and launches copy it, so those of weights are written once.
    """
    # A tensor map has 16 words and is aligned to 64 bytes.
    storage = (ctypes.c_uint64 * (16 * len(forms) + 8))()
    maps = (ctypes.c_uint64 * (16 * len(forms))).from_buffer(storage, -ctypes.addressof(storage) % 64)
    for index, form in enumerate(forms):
        target = ctypes.addressof(maps) + 128 * index
        if isinstance(form, Boxes):
            _encode_boxes(target, form, address)
        else:
            _encode_elements(target, form, address)
    return maps


def _encode_boxes(tensor_map: int, rows: Boxes, address: int | None) -> None:
    """Write the tensor map of rows whose boxes are swizzled."""
    shape = (rows.columns, rows.height)
    box = (_BOX_BYTES // rows.dtype.itemsize, rows.box)
    _encode(tensor_map, _ELEMENT_TYPES[rows.dtype], address, shape, (rows.step,), box, _SWIZZLES[_BOX_BYTES])


def _encode_elements(tensor_map: int, array: Elements, address: int | None) -> None:
    """Write the tensor map of an array."""
    steps = array.steps or tuple(accumulate(array.shape[:-1], mul, initial=array.size))[1:]
    swizzle = _SWIZZLES[array.swizzle]
    _encode(tensor_map, _WORD_TYPES[array.size], address, array.shape, steps, array.box, swizzle)


def _encode(
    tensor_map: int,
    element_type: int,
    address: int | None,
    shape: Sequence[int],
    steps: Sequence[int],
    box: Sequence[int],
    swizzle: int,
) -> None:
    """Write a tensor map for the tensor memory accelerator. steps: bytes, of all dimensions but the first."""
    rank = len(shape)
    interleave = 0
    out_of_bounds_fill = 0
    code = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(tensor_map),
        element_type,
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*shape),
        (ctypes.c_uint64 * (rank - 1))(*steps),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*([1] * rank)),
        interleave,
        swizzle,
        _L2_PROMOTION_256B,
        out_of_bounds_fill,
    )
    _check(code, f"describing {tuple(shape)} to the tensor memory accelerator")


def _check(code: int, what: str) -> None:
    if code:
        raise PlanError(f"{what}: CUDA's error {code}; Overrides(kernel='reference') runs without kernels")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _nvrtc() -> ctypes.CDLL | None:
    """Return NVRTC of torch's CUDA version: from a wheel installed with torch, or from the system's library path."""
    spec = find_spec("nvidia")
    major = (torch.version.cuda or "13").partition(".")[0]
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
    libraries = [path for folder in folders for path in folder.glob(f"*/lib/libnvrtc.so.{major}")]
    for library in libraries:
        with suppress(OSError):
            for builtins in sorted(library.parent.glob(f"libnvrtc-builtins.so.{major}*")):
                ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)  # NVRTC loads it by name, without a path
            return ctypes.CDLL(str(library))
    with suppress(OSError):
        return ctypes.CDLL(f"libnvrtc.so.{major}")
    return None
