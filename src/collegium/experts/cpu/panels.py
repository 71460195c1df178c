"""One projection of all experts as the kernel that Numba makes of ``kernels.cpu_fused`` reads it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from .decode import CodeMatrix, PlainMatrix

__all__ = ["COLUMNS", "TASK", "TENSORS", "FusedMatrix", "as_fused", "missing_requirement", "scratch_bytes"]

TASK = 64  # rows of weights that are decoded at once
COLUMNS = 32  # columns of a tile
# In the order of ``kernels.cpu_fused.SCALES``; uint8 is E8M0.
_SCALES = (torch.uint8, torch.float8_e4m3fn, torch.int8, torch.bfloat16, torch.float16, torch.float32)
_UNREAD = torch.zeros(1, 16, device="cpu")  # scales and values of numbers that have none
# With these Numba compiles nothing, or without AVX, which ends the process.
_SWITCHES = {"DISABLE_JIT": 1, "ENABLE_AVX": 0, "CPU_NAME": "generic"}
TENSORS = ("codes", "scales", "supers", "values", "order", "factors", "bias")


def missing_requirement() -> str | None:
    """Return what this machine lacks to run the kernel, and what to do, or None."""
    if sys.platform != "linux" or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return f"found {torch.backends.cpu.get_cpu_capability()} on {sys.platform}; it needs AVX2 or AVX512 on linux"
    if not find_spec("numba"):
        return "found no Numba; install it with: pip install 'collegium[cpu]'"
    settings = import_module("numba.core.config")
    for name, value in _SWITCHES.items():
        if getattr(settings, name) == value:
            return f"found NUMBA_{name}={value}, with which Numba cannot make it; unset it"
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedMatrix:
    """One projection of all experts, sixteen rows side by side, for codes of b bits.

    codes: uint8 ``[E, Np/16, Kp/2, 4 b]``, in the layout of ``kernels.cpu_fused``; b is 16 for numbers in rows. scales:
    ``[E, Np/16, G, 16]``, or ``[E, Np/16, G, 32]`` with what ``shift`` says (``SHIFTS`` there) behind them. supers:
    float16 ``[E, Np/16, Kp/256, 16 or 32]``, which multiply int8 scales, or None. values: float32 ``[E, 16]``, what the
    lower four bits of a code mean; to codes of eight bits the first is added. floats: codes are E4M3, scales for
    2^-8 of what they mean. order: int64 ``[E, Kp]``, the column of x for each column of codes, K for none; None where
    they are in order. factors: float32 ``[E, Np]`` of the result, or None. bias: likewise. rows: N. group: pairs of
    columns of a scale.
    """

    codes: Tensor
    scales: Tensor = _UNREAD[None, None]
    supers: Tensor | None = None
    values: Tensor = _UNREAD
    order: Tensor | None = None
    factors: Tensor | None = None
    bias: Tensor | None
    shift: str = "none"
    floats: bool = False
    rows: int
    group: int

    def multiply(self, x: Tensor, experts: Tensor, bounds: Tensor) -> Tensor:
        """Return ``[r, Np]`` float32 for ``x [r, K]`` bfloat16 or float16; columns from N on mean nothing.

        experts: int64, those that have rows. bounds: int64, where the rows of each begin, and the end.
        """
        if x.dtype == torch.float16:
            return self._multiply_halves(x, experts, bounds)
        kernel: Any = import_module("collegium.kernels.cpu_fused")
        tiles, threads = kernel.has_tiles(), torch.get_num_threads()
        panels, pairs, wide = self.codes.shape[1:]
        if self.order is not None:
            rows = functional.pad(x, (0, 1)).split(bounds.diff().tolist())
            x = torch.cat([own.index_select(1, order) for own, order in zip(rows, self.order[experts], strict=True)])
        elif x.shape[1] != 2 * pairs:
            x = functional.pad(x, (0, 2 * pairs - x.shape[1]))
        x = x if kernel.PAIR_BYTES == 4 else x.float()
        out = (torch.empty if tiles else torch.zeros)(x.shape[0], panels * 16, dtype=torch.float32, device=x.device)
        scratch = torch.empty(threads, scratch_bytes(2 * pairs), dtype=torch.uint8, device=x.device)
        tensors = {name: getattr(self, name) for name in TENSORS}
        tensors |= {"experts": experts, "bounds": bounds, "x": x.contiguous(), "out": out, "scratch": scratch}
        fields = {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None}
        blocks, kind, shift = panels * 16 // TASK, _SCALES.index(self.scales.dtype), kernel.SHIFTS.index(self.shift)
        fields |= {"tasks": experts.numel() * blocks, "blocks": blocks, "bits": wide // 4, "pairs": pairs}
        fields |= {"kind": kind, "shift": shift, "tiles": tiles, "line": self.scales[0, 0, 0].nbytes}
        fields |= {"group": self.group, "groups": self.scales.shape[2], "floats": self.floats}
        kernel.run(np.array([fields.get(name, 0) for name in kernel.FIELDS], dtype=np.int64), threads)
        return out

    def _multiply_halves(self, x: Tensor, experts: Tensor, bounds: Tensor) -> Tensor:
        """Do it for float16: each number is the sum of two bfloat16 numbers, exactly, which are two rows."""
        upper = x.bfloat16()
        # Nothing is left of an infinity.
        lower = (x.float() - upper.float()).nan_to_num(0.0, 0.0, 0.0).bfloat16()
        rows = torch.stack((upper, lower), 1).flatten(0, 1)
        out = replace(self, bias=None).multiply(rows, experts, 2 * bounds).unflatten(0, (-1, 2)).sum(1)
        return out if self.bias is None else out + self.bias[experts].repeat_interleave(bounds.diff(), 0)


def as_fused(matrix: PlainMatrix | CodeMatrix, bias: Tensor | None) -> FusedMatrix | None:
    """Return a matrix of bfloat16 numbers where they lie, or None for others, and sizes that the kernel does not read.

    bias: float32 ``[E, N]`` or None.
    """
    if not isinstance(matrix, PlainMatrix):
        return None
    values = matrix.values
    experts, rows, columns = values.shape
    if values.dtype != torch.bfloat16 or rows % TASK or columns % COLUMNS or not values.is_contiguous():
        return None
    codes = values.view(torch.uint8).view(experts, rows // 16, columns // 2, 64)
    return FusedMatrix(codes=codes, bias=bias, rows=rows, group=columns // 2)


def scratch_bytes(columns: int) -> int:
    """Bytes of a thread: a task in bfloat16."""
    return 2 * TASK * (-(-columns // COLUMNS) * COLUMNS)
