"""MXFP4, NVFP4 and INT4 experts on a CPU with AVX-512: decoded into the cache and multiplied there, by Numba.

For the rows of one expert, with bfloat16 x::

    q  = bfloat16(x * input_weight)
    gu = (weights(gate_up) @ q.T) * factor + bias      weights and q bfloat16, sums and the rest float32
    h  = bfloat16(activation(gu))
    y  = (weights(down) @ h.T) * factor + bias         float32

A row's bits depend on the row and the machine alone, not on other rows, nor on the threads. Shape letters: E experts,
N output rows, Np those filled up to a task, K input columns, Kp those filled up to a tile, G groups.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from ...errors import SpecError
from ...formats import Int4Affine, Int4Group, MxFp4, NvFp4
from ...formats.codecs import E2M1_VALUES, relative_e8m0
from ..base import ExpertKernel, Packed, Tiling, refuse_codes, with_each
from .grouped import cut_experts, fast_activate
from .stored import by_row, flat, refuse_faults

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ...formats import Payload
    from ...problem import ExpertsProblem
    from ...runtime.memory import Memory, Regions
    from ...types import ActivationSpec, ContiguousBatch, ExpertWeights

__all__ = ["CpuW4A16", "FusedExperts", "FusedMatrix", "pack_fused"]

_FORMATS = (MxFp4, NvFp4, Int4Group, Int4Affine)
_TASK = 64  # rows of weights that are decoded at once
_COLUMNS = 32  # columns of a tile
_LARGEST = 127  # exponent field of 1, which the largest scale of a row of MXFP4 becomes


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedMatrix:
    """One projection of all experts, sixteen rows side by side.

    codes: uint8 ``[E, Np/16, Kp/2, 16]``, columns 2k (low nibble) and 2k + 1 of a row. scales: ``[E, Np/16, G, 16]``,
    in what ``kind`` says (``kernels.cpu_w4a16.SCALES``). zeros: uint8 like scales, or None.
    values: float32 ``[16]``, what a code means. factors: float32 ``[E, Np]`` of the result, or None. bias: likewise.
    rows, columns: N and K. group: pairs of columns of a scale.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    values: Tensor
    factors: Tensor | None
    bias: Tensor | None
    kind: str
    rows: int
    columns: int
    group: int

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that have a row for each expert."""
        own = (t for t in (self.codes, self.scales, self.zeros, self.factors, self.bias) if t is not None)
        return sum(t.numel() * t.element_size() for t in own)

    def each(self, change: Callable[[Tensor], Tensor]) -> FusedMatrix:
        """Return the matrix with ``change(tensor)`` for each tensor that has a row for each expert."""
        return with_each(self, change, "codes", "scales", "zeros", "factors", "bias")

    def multiply(self, x: Tensor, experts: Tensor, bounds: Tensor) -> Tensor:
        """Return ``[r, Np]`` float32 for ``x [r, K]`` bfloat16; columns from N on mean nothing.

        experts: int64, those that have rows. bounds: int64, where the rows of each begin, and the end.
        """
        kernel: Any = import_module("collegium.kernels.cpu_w4a16")
        tiles, threads = kernel.has_tiles(), torch.get_num_threads()
        panels, pairs = self.codes.shape[1:3]
        if x.shape[1] != 2 * pairs:
            x = functional.pad(x, (0, 2 * pairs - x.shape[1]))
        x = (x if tiles else x.float()).contiguous()
        out = (torch.empty if tiles else torch.zeros)(x.shape[0], panels * 16, dtype=torch.float32)
        scratch = torch.empty(threads, _scratch_bytes(2 * pairs), dtype=torch.uint8)
        fields = {
            "tasks": experts.numel() * panels * 16 // _TASK,
            "blocks": panels * 16 // _TASK,
            "kind": kernel.SCALES.index(self.kind),
            "group": self.group,
            "groups": self.scales.shape[2],
            "pairs": pairs,
            "x_stride": x.stride(0) * x.element_size(),
            "scratch_stride": scratch.stride(0),
            "tiles": tiles,
        }
        tensors: dict[str, Tensor | None] = {
            "experts": experts,
            "bounds": bounds,
            "x": x,
            "out": out,
            "scratch": scratch,
        }
        for name in ("codes", "scales", "zeros", "values", "factors", "bias"):
            tensors[name] = getattr(self, name)
        fields |= {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None}
        kernel.run(np.array([fields.get(name, 0) for name in kernel.FIELDS], dtype=np.int64), threads)
        return out


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedExperts(Packed):
    """Both matrices as the kernel reads them; the memory of a batch is torch's own."""

    gate_up: FusedMatrix
    down: FusedMatrix
    activation: ActivationSpec

    @property
    def nbytes(self) -> int:
        """Bytes of both matrices and the biases."""
        return self.gate_up.nbytes + self.down.nbytes

    def run(self, batch: ContiguousBatch, memory: Memory | None = None) -> Tensor:
        """Return ``[R, H]`` float32; rows of dropped assignments are not written."""
        refuse_codes(batch, CpuW4A16.name)
        rows = torch.empty(batch.source.numel(), self.down.rows, dtype=torch.float32)
        offsets: list[int] = batch.expert_offsets.tolist()
        with torch.inference_mode():
            for first, last in cut_experts(offsets):
                start, stop = offsets[first], offsets[last]
                x = batch.x.index_select(0, batch.source[start:stop])
                if batch.input_weights is not None:
                    x = (x.float() * batch.input_weights[start:stop, None]).to(x.dtype)
                active = [first + i for i, (a, b) in enumerate(pairwise(offsets[first : last + 1])) if b > a]
                bounds = torch.tensor([*(offsets[e] - start for e in active), stop - start])
                where = torch.tensor(active), bounds
                inner = self.gate_up.multiply(x, *where)[:, : self.gate_up.rows]
                hidden = fast_activate(inner, self.activation).to(x.dtype)
                rows[start:stop] = self.down.multiply(hidden, *where)[:, : self.down.rows]
        return rows

    def _each(self, change: Callable[[Tensor], Tensor]) -> FusedExperts:
        return FusedExperts(gate_up=self.gate_up.each(change), down=self.down.each(change), activation=self.activation)


class CpuW4A16(ExpertKernel):
    """Four-bit weights and bfloat16 activations on a CPU with AVX-512, with AMX where there is one."""

    name = "cpu_w4a16"
    capturable = False
    takes_codes = False

    def refuse(self, problem: ExpertsProblem) -> str | None:
        """Refuse other devices, weights and activations, machines without AVX-512, and a missing Numba."""
        asked, names = problem.activation_format, [known.name for known in _FORMATS]
        if problem.device.kind != "cpu":
            return f"asked for {problem.device.kind}; it needs a CPU"
        if problem.weight_format not in names:
            return f"asked for {problem.weight_format} weights; it takes {', '.join(names)}"
        if asked != "bf16" or problem.dtype != "bf16":
            return f"asked for {asked} activations and {problem.dtype} input; it takes bf16 for both"
        if sys.platform != "linux" or torch.backends.cpu.get_cpu_capability() != "AVX512":
            found = f"{torch.backends.cpu.get_cpu_capability()} on {sys.platform}"
            return f"found {found}; it needs AVX512 on linux"
        if find_spec("numba") is None:
            return "found no Numba; install it with: pip install 'collegium[cpu]'"
        return None

    def tiling(self, problem: ExpertsProblem) -> Tiling:
        """Return no tiles of tokens: one expert after the other."""
        return Tiling()

    def regions(self, problem: ExpertsProblem) -> Regions:
        """Return the decoded rows of each thread, and the rows of the largest batch all routed to one expert."""
        longest = max(problem.hidden, problem.intermediate)
        threads = max(problem.device.threads, torch.get_num_threads())
        return {"tile": threads * _scratch_bytes(longest), "rows": max(1, problem.rows) * _row_bytes(problem)}

    def pack(self, weights: ExpertWeights[Payload], problem: ExpertsProblem) -> FusedExperts:
        """Lay the codes out anew, one expert at a time.

        Biases become float32, and so do scales of INT4 that are not bfloat16. Raises BadScaleError for scales or codes
        the format forbids.
        """
        return FusedExperts(
            gate_up=pack_fused(weights.gate_up, weights.gate_up_bias, "gate_up"),
            down=pack_fused(weights.down, weights.down_bias, "down"),
            activation=problem.activation,
        )


def pack_fused(payload: Payload, bias: Tensor | None, name: str) -> FusedMatrix:
    """Return ``payload`` of logical shape ``[E, N, K]`` or ``[E, P, N, K]`` as the kernel reads it; parts become rows.

    Raises BadScaleError for scales or codes the format forbids and SpecError for a format that is not of four bits.
    """
    refuse_faults(payload, name)
    experts, columns = payload.shape[0], payload.shape[-1]
    values, zeros, factors = torch.tensor(E2M1_VALUES), None, None
    match payload:
        case MxFp4():
            scales, factors = relative_e8m0(flat(payload.scales, experts), _LARGEST)
            kind, group = "e8m0", 32
        case NvFp4():
            scale = payload.global_scale.float()
            factors = by_row(scale.reciprocal() if payload.global_divides else scale, payload.shape)
            scales = flat(payload.scales.view(torch.uint8), experts)
            kind, group = "e4m3", 16
        case Int4Group():
            values, scales = torch.arange(16.0) - 8, _float_scales(payload.scales, experts)
            scales = scales.bfloat16() if payload.scales.dtype == torch.bfloat16 else scales
            kind, group = "bf16" if payload.scales.dtype == torch.bfloat16 else "fp32", payload.group_size
        case Int4Affine():
            values, scales = torch.arange(16.0), _float_scales(payload.scales, experts)
            zeros = flat(payload.zeros, experts)
            kind, group = "zeros", payload.group_size
        case _:
            raise SpecError(f"{name}: format {payload.name!r} is not one of four bits")
    pairs = -(-columns // _COLUMNS) * _COLUMNS // 2
    if group >= columns:
        group = 2 * pairs  # other groups are of a multiple of 8 columns
    groups = -(-2 * pairs // group)
    codes = flat(payload.codes, experts)
    height = -(-codes.shape[1] // _TASK) * _TASK

    def beside(stored: Tensor, count: int) -> Tensor:
        made = stored.new_empty(experts, height // 16, count, 16)
        for expert, own in enumerate(stored):
            own = own[:, :count]
            filled = functional.pad(own, (0, count - own.shape[1], 0, height - own.shape[0]))
            made[expert] = filled.view(-1, 16, count).transpose(1, 2)
        return made

    def per_row(stored: Tensor | None) -> Tensor | None:
        stored = None if stored is None else stored.reshape(experts, -1).float()
        return None if stored is None else functional.pad(stored, (0, height - stored.shape[1]))

    return FusedMatrix(
        codes=beside(codes, pairs),
        scales=beside(scales, groups),
        zeros=None if zeros is None else beside(zeros, groups),
        values=values,
        factors=per_row(factors),
        bias=per_row(bias),
        kind=kind,
        rows=codes.shape[1],
        columns=columns,
        group=group // 2,
    )


def _float_scales(stored: Tensor, experts: int) -> Tensor:
    """Return INT4 scales in float32; rounding carries into the sign of a NaN of many ones, so NaNs are made plain."""
    scales = flat(stored, experts).float()
    return scales.masked_fill(scales.isnan(), torch.nan)


def _scratch_bytes(columns: int) -> int:
    """Bytes of a thread: a task in bfloat16."""
    return 2 * _TASK * (-(-columns // _COLUMNS) * _COLUMNS)


def _row_bytes(problem: ExpertsProblem) -> int:
    hidden, wide = problem.hidden + _TASK, problem.intermediate + _TASK
    # Per row: x gathered and filled up, gate_up, its activation in two precisions, the result twice.
    return 4 * (5 * hidden + (2 * problem.parts + 4) * wide)
