"""The kernels of large batches on a CPU: their text compiled as C++ with ``sm90_on_cpu.hpp`` in place of ``sm90.cu``.

``install`` puts them in place of the GPU's for tests without one, where Triton's interpreter runs the other kernels.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import threading
from functools import cache
from itertools import accumulate, islice
from operator import mul
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from torch import Tensor

from collegium.experts.triton import prefill, w4_prefill
from collegium.experts.triton.tiles.problem import TileChoice
from collegium.runtime.nvrtc import Boxes, Elements
from once import once

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from collegium.runtime.nvrtc import CudaKernel

__all__ = ["FP8", "TILE", "install"]

TILE = TileChoice(block_n=128, block_t=192, warps=12, stages=5, group_t=2, programs=2)  # of one cluster
# What the kernel is compiled for: gate and up in FP8 blocks.
FP8 = {
    "OPERAND": 0, "OUT": 1, "SCALE": 1, "TERMS": 1, "X_SCALE": 1, "ROW_SCALE": 0, "PROJECTIONS": 2,
    "ACTIVATION": 0, "FAST": 0, "HAS_LIMIT": 0, "CODES": 0, "ROUND": 0, "HAS_ROW_OFFSETS": 0, "BIAS": 0, "ALIGNED": 1,
}  # fmt: skip

_HERE = Path(__file__)
_alone = threading.Lock()  # the cluster's memory is the library's
_FOLDER = Path(prefill.__file__).parents[2] / "kernels"
_MAX_RANK = 5  # dimensions of a tensor map


class _Text(NamedTuple):
    """A kernel. parts: of its text, by operand. threads: of a block. counters: a tensor, zeros before and after."""

    parts: tuple[tuple[str, ...], ...]
    threads: int
    counters: int
    entry: str


_PREFILL = """
extern "C" void run(
    const Map* x, const Map* w, int* counters, const ScalesAndBias* n, const Out* o, const Lists* lists, const Sizes* z
) {
    run_cluster([&] { prefill(*x, *w, counters, *n, *o, *lists, *z); });
}
"""


_W4_PREFILL = """
extern "C" void run(
    const TokenMaps* tokens, const Map* codes, const Map* scales, int* counters, const Parameters* p, const Out* o,
    const Lists* lists, const Sizes* z
) {
    run_cluster([&] { w4_prefill(*tokens, *codes, *scales, counters, *p, *o, *lists, *z); });
}
"""
_TEXTS = {
    "prefill": _Text((prefill.SOURCE_FILES,) * 3, 512, 2, _PREFILL),
    "w4_prefill": _Text((w4_prefill.parts_of(0), w4_prefill.parts_of(1)), 384, 3, _W4_PREFILL),
}


class _Map(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_void_p),
        *((name, ctypes.c_longlong) for name in ("row_bytes", "count", "stride")),
        ("box", ctypes.c_int),
        ("size", ctypes.c_int),
        ("swizzle", ctypes.c_int),
        ("shape", ctypes.c_longlong * _MAX_RANK),
        ("steps", ctypes.c_longlong * _MAX_RANK),
        ("sides", ctypes.c_int * _MAX_RANK),
    )


def install() -> None:
    """Let products of large batches of this process run on the CPU."""
    prefill.__dict__["start"] = _start
    w4_prefill.__dict__["start"] = _start


def _start(
    kernel: CudaKernel,
    constants: Mapping[str, int],
    sizes: tuple[int, int],
    tensors: tuple[Tensor, *tuple[Tensor | None, ...]],
    forms: Sequence[Any],
) -> None:
    """Run the kernel in one cluster of two blocks; what it takes is in memory of the CPU."""
    if which("g++") is None:
        pytest.skip("needs g++ to run the kernel of large batches on a CPU")
    assert all(tensor is None or tensor.device.type == "cpu" for tensor in tensors)
    text = _TEXTS[kernel.name]
    assert sizes[1] == text.threads
    assert kernel.shared == 227 * 1024
    counters = tensors[text.counters]
    assert isinstance(counters, Tensor)
    assert counters.tolist() == [0, 0]
    left = iter(tensors)
    given = [_given(form, left) for form in forms]
    run = _library(_source(text, constants["OPERAND"]), *constants.items(), ("BLOCK_THREADS", text.threads)).run
    with _alone:
        run(*(each if isinstance(each, ctypes.c_void_p) else ctypes.byref(each) for each in given))
    assert counters.tolist() == [0, 0], "counters are left as they were found"
    assert next(left, None) is None, "every tensor is an argument"


def _given(form: Any, left: Iterator[Tensor | None]) -> Any:
    if isinstance(form, Boxes | Elements):
        return _map_of(form, next(left))
    if isinstance(form, tuple):
        rows = next(left)
        return (_Map * len(form))(*(_map_of(boxes, rows) for boxes in form))
    if not isinstance(form, int):
        return form
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in islice(left, form)]
    return ctypes.c_void_p(pointers[0]) if form == 1 else (ctypes.c_void_p * form)(*pointers)


def _map_of(form: Boxes | Elements, array: Tensor | None) -> _Map:
    assert array is not None
    if isinstance(form, Boxes):
        assert array.dtype == form.dtype
        row_bytes = form.columns * array.element_size()
        return _Map(rows=array.data_ptr(), row_bytes=row_bytes, count=form.height, stride=form.step, box=form.box)
    assert array.is_contiguous()
    steps = (form.size, *form.steps) if form.steps else tuple(accumulate(form.shape[:-1], mul, initial=form.size))
    last = sum(step * (side - 1) for step, side in zip(steps, form.shape, strict=True))
    assert last + form.size == array.nbytes
    found = _Map(rows=array.data_ptr(), size=form.size, swizzle=form.swizzle)
    padding = (1,) * (_MAX_RANK - len(form.shape))
    found.shape[:] = form.shape + padding
    found.steps[:] = steps + padding
    found.sides[:] = form.box + padding
    return found


def _source(text: _Text, operand: int) -> str:
    parts = "".join((_FOLDER / name).read_text(encoding="utf-8") for name in text.parts[operand][1:])
    return f'#include "{_HERE.with_name("sm90_on_cpu.hpp")}"\n{parts}{text.entry}'


@cache
def _library(text: str, *constants: tuple[str, int]) -> Any:
    path = once(f"{text}{constants}", ".so", lambda new: _compile(text, constants, new))
    if path is not None:
        return ctypes.CDLL(str(path))
    with tempfile.TemporaryDirectory() as folder:
        _compile(text, constants, Path(folder) / "made.so")
        return ctypes.CDLL(f"{folder}/made.so")  # which stays in memory


def _compile(text: str, constants: tuple[tuple[str, int], ...], library: Path) -> None:
    options = [f"-D{name}={value}" for name, value in constants]
    command = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", *options, "-x", "c++", "-", "-o", str(library)]
    subprocess.run(command, input=text, text=True, check=True)
