"""One projection of all experts as the kernel in ``kernels.cpu_fused``, compiled by Numba, reads it."""

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

__all__ = ["COLUMNS", "TASK", "FusedMatrix", "as_fused", "missing_requirement", "scratch_bytes"]

TASK = 64  # rows of weights that are decoded at once
COLUMNS = 32  # columns of a tile
_PLAIN_BYTES = 64  # of sixteen rows and a pair of columns in bfloat16; codes take up to 32
# In the order of ``kernels.cpu_fused.SCALES``; uint8 is E8M0.
_SCALES = (torch.uint8, torch.float8_e4m3fn, torch.int8, torch.bfloat16, torch.float16, torch.float32)
_UNREAD = torch.zeros(1, 16, device="cpu")  # scales and values of numbers that have none
# With these settings Numba compiles nothing, or without AVX, which ends the process.
_SWITCHES = {"DISABLE_JIT": 1, "ENABLE_AVX": 0, "CPU_NAME": "generic"}
TENSORS = ("codes", "scales", "supers", "values", "order", "factors", "bias")


def missing_requirement() -> str | None:
    """Return what this machine needs to run the kernel, and how to get it, or None."""
    if sys.platform != "linux" or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return (
            f"the CPU has {torch.backends.cpu.get_cpu_capability()} on {sys.platform}; it needs AVX2 or AVX512 on linux"
        )
    if not find_spec("numba"):
        return "Numba is not installed; install it with: pip install 'collegium[cpu]'"
    settings = import_module("numba.core.config")
    for name, value in _SWITCHES.items():
        if getattr(settings, name) == value:
            return f"NUMBA_{name}={value} is set, and Numba cannot compile the kernel with it; unset it"
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedMatrix:
    """One projection of all experts, sixteen rows side by side, for codes of b bits.

    codes: uint8 ``[E, Np/16, Kp/2, 4 b]``, in the layout of ``kernels.cpu_fused``; b is 16 for numbers in rows. scales:
    ``[E, Np/16, G, 16]``, or ``[E, Np/16, G, 32]`` followed by what ``shift`` names (``SHIFTS`` there). supers:
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

    @property
    def by_expert(self) -> tuple[str, ...]:
        """The tensors with a row for each expert; plain numbers share scales and values that nothing reads."""
        plain = self.codes.shape[-1] == _PLAIN_BYTES
        return tuple(name for name in TENSORS if not (plain and name in ("scales", "values")))

    def multiply(self, x: Tensor, experts: Tensor, bounds: Tensor) -> Tensor:
        """Return ``[r, Np]`` float32 for ``x [r, K]`` bfloat16 or float16; columns from N on mean nothing.

        experts: int64, those that have rows. bounds: int64, where the rows of each begin, and the end.
        """
        if x.dtype == torch.float16:
            return self._multiply_halves(x, experts, bounds)
        kernel: Any = import_module("collegium.kernels.cpu_fused")
        tiles, threads = kernel.has_tiles(), torch.get_num_threads()
        panels, pairs, panel_bytes = self.codes.shape[1:]
        x = self._arrange(x, experts, bounds, 2 * pairs)
        x = x if kernel.PAIR_BYTES == 4 else x.float()
        allocate = torch.empty if tiles else torch.zeros
        out = allocate(x.shape[0], panels * 16, dtype=torch.float32, device=x.device)
        scratch = torch.empty(threads, scratch_bytes(2 * pairs), dtype=torch.uint8, device=x.device)
        tensors = {
            **{name: getattr(self, name) for name in TENSORS},
            "experts": experts,
            "bounds": bounds,
            "x": x.contiguous(),
            "out": out,
            "scratch": scratch,
        }
        blocks = panels * 16 // TASK
        fields = {
            **{name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None},
            "tasks": experts.numel() * blocks,
            "blocks": blocks,
            "bits": panel_bytes // 4,
            "pairs": pairs,
            "kind": _SCALES.index(self.scales.dtype),
            "shift": kernel.SHIFTS.index(self.shift),
            "tiles": tiles,
            "line": self.scales[0, 0, 0].nbytes,
            "group": self.group,
            "groups": self.scales.shape[2],
            "floats": self.floats,
        }
        kernel.run(np.array([fields.get(name, 0) for name in kernel.FIELDS], dtype=np.int64), threads)
        return out

    def _arrange(self, x: Tensor, experts: Tensor, bounds: Tensor, padded_cols: int) -> Tensor:
        """Return ``x`` in the order of each expert's columns, or padded to ``padded_cols``."""
        if self.order is None:
            return x if x.shape[1] == padded_cols else functional.pad(x, (0, padded_cols - x.shape[1]))
        by_expert = zip(functional.pad(x, (0, 1)).split(bounds.diff().tolist()), self.order[experts], strict=True)
        return torch.cat([rows.index_select(1, order) for rows, order in by_expert])

    def _multiply_halves(self, x: Tensor, experts: Tensor, bounds: Tensor) -> Tensor:
        """Multiply float16 rows: each number is exactly the sum of two bfloat16 numbers, which become two rows."""
        upper = x.bfloat16()
        # Nothing is left of an infinity.
        lower = (x.float() - upper.float()).nan_to_num(0.0, 0.0, 0.0).bfloat16()
        rows = torch.stack((upper, lower), 1).flatten(0, 1)
        out = replace(self, bias=None).multiply(rows, experts, 2 * bounds).unflatten(0, (-1, 2)).sum(1)
        return out if self.bias is None else out + self.bias[experts].repeat_interleave(bounds.diff(), 0)


def as_fused(matrix: PlainMatrix | CodeMatrix, bias: Tensor | None) -> FusedMatrix | None:
    """Return a matrix of bfloat16 numbers in place, or None for other numbers and sizes that the kernel cannot read.

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
