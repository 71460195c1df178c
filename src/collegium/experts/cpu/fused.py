"""Experts of codes of four to eight bits on a CPU with AVX2 or more, decoded in the cache and multiplied by Numba.

For the rows of one expert, with bfloat16 x::

    q  = bfloat16(x * input_weight)
    gu = (weights(gate_up) @ q.T) * factor + bias      weights and q bfloat16, sums and the rest float32
    h  = bfloat16(activation(gu))
    y  = (weights(down) @ h.T) * factor + bias         float32

A row's bits depend on the row and the machine alone, not on other rows, nor on the threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ... import formats
from ...errors import InputError
from ...formats.codecs import E2M1_VALUES, pack_nibbles, relative_e8m0, unpack_nibbles
from ...formats.unquantised import DTYPES
from ...problem import ExpertsProblem
from ...runtime.memory import Memory, Regions
from ...types import ActivationSpec, ContiguousBatch, ExpertWeights
from ..base import ExpertKernel, PackedWeights, map_tensors, refuse_codes, refuse_fast
from .decode import PlainMatrix
from .grouped import add_changes, cut_rows, fast_activate, starts_of, tokens_of
from .panels import COLUMNS, TASK, FusedMatrix, as_fused, missing_requirement, scratch_bytes
from .stored import by_row, flat, refuse_faults

__all__ = ["CpuFused", "FusedExperts", "pack_fused"]

_NAMES = [form.name for form in formats.FORMATS if form.name not in DTYPES]
_LOW = 0x0F0F0F0F0F0F0F0F  # low nibbles of eight bytes
_LARGEST = 127  # exponent field of 1, which the largest scale of a row of MXFP4 becomes
_NO_VALUES = torch.zeros(16, device="cpu")  # of E4M3 codes


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedExperts(PackedWeights):
    """Both matrices as the kernel reads them, gate and up separate where their columns or tables differ.

    torch allocates the memory of a batch.
    """

    gate_up: tuple[FusedMatrix, ...]
    down: FusedMatrix
    activation: ActivationSpec

    def run(self, batch: ContiguousBatch, memory: Memory | None = None) -> Tensor:
        """Return ``[R, H]`` float32; rows of dropped assignments are not written."""
        refuse_codes(batch, CpuFused.name)
        rows = torch.empty(batch.source.numel(), self.down.rows, dtype=torch.float32, device=batch.x.device)
        with torch.inference_mode():
            for chunk, spans in cut_rows(batch):
                x = tokens_of(batch, chunk)
                experts, starts = starts_of(spans)
                products = [matrix.multiply(x, experts, starts)[:, : matrix.rows] for matrix in self.gate_up]
                gate_up = torch.cat(products, dim=1) if len(products) > 1 else products[0]
                add_changes(batch, "gate_up", chunk, spans, x, gate_up)
                hidden = fast_activate(gate_up, self.activation).to(x.dtype)
                rows[chunk] = self.down.multiply(hidden, experts, starts)[:, : self.down.rows]
                add_changes(batch, "down", chunk, spans, hidden, rows[chunk])
        return rows

    def _map_tensors(self, change: Callable[[Tensor], Tensor]) -> FusedExperts:
        *gate_up, down = (map_tensors(matrix, change, *matrix.by_expert) for matrix in (*self.gate_up, self.down))
        return FusedExperts(gate_up=tuple(gate_up), down=down, activation=self.activation)


class CpuFused(ExpertKernel):
    """Codes of four to eight bits and activations of 16 on a CPU with AVX2, AVX-512 or AMX."""

    name = "cpu_fused"

    def refuse(self, problem: ExpertsProblem) -> str | None:
        """Refuse other devices, weights and activations, machines without AVX2, and a missing Numba."""
        activations = problem.activation_format
        if problem.device.kind != "cpu":
            return f"the device is {problem.device.kind}; supported: cpu"
        # The library multiplies plain numbers, but with codes in the other matrix no other kernel runs both products.
        plain: tuple[str, ...] = ()
        if problem.mixed and set(problem.formats) & set(_NAMES):
            plain = ("bf16",) if problem.dtype == "fp16" else ("bf16", "fp16", "fp32")
        for form in problem.formats:
            if form not in (*_NAMES, *plain):
                return f"the weights are {form}; supported: {', '.join(_NAMES)}"
        if formats.Bnb4.name in problem.formats and (problem.hidden % 2 or problem.intermediate % 2):
            return f"the weights are bnb4 of widths {problem.hidden} and {problem.intermediate}; supported: even widths"
        if activations not in ("bf16", "fp16") or problem.dtype != activations:
            return (
                f"activation format {activations} was requested for {problem.dtype} input; supported: bf16 or fp16 for "
                "both"
            )
        return refuse_fast(problem) or missing_requirement()

    def repacks(self, weight_format: str, activation_format: str) -> bool:
        """Return True: codes are laid out in panels."""
        return True

    def regions(self, problem: ExpertsProblem) -> Regions:
        """Return the decoded rows of each thread, and the rows of the largest batch all routed to one expert."""
        # Groups of a part of the columns in activation order are padded to the largest.
        ordered = any(formats.by_name(form).ordered_columns for form in problem.formats)
        longest = max(problem.hidden, problem.intermediate) * (3 if ordered else 1)
        threads = max(problem.device.threads, torch.get_num_threads())
        # Per row: x gathered, padded and in another order, gate_up, its activation in two precisions, the result
        # twice. Float16 takes two rows.
        row = 4 * (8 * (problem.hidden + TASK) + (2 * problem.parts + 7) * (problem.intermediate + TASK))
        row *= 2 if problem.dtype == "fp16" else 1
        return {"tile": threads * scratch_bytes(longest), "rows": max(1, problem.rows) * row}

    def pack(self, weights: ExpertWeights[formats.Payload], problem: ExpertsProblem) -> FusedExperts:
        """Re-lay the codes, one expert at a time.

        Biases become float32. Raises BadScaleError for scales or codes the format forbids.
        """
        parts = _parts(weights.gate_up, weights.gate_up_bias)
        return FusedExperts(
            gate_up=tuple(pack_fused(payload, bias, "gate_up") for payload, bias in parts),
            down=pack_fused(weights.down, weights.down_bias, "down"),
            activation=problem.activation,
        )


def _parts(payload: formats.Payload, bias: Tensor | None) -> list[tuple[formats.Payload, Tensor | None]]:
    """Return ``payload [E, P, N, K]`` and its bias, or those of each part where tables or orders of columns differ."""
    tensors = payload.tensors()
    by_matrix = [tensor for name, tensor in tensors.items() if name in ("table", "group_of")]
    if all(bool((tensor == tensor[:, :1]).all()) for tensor in by_matrix):
        return [(payload, bias)]

    def part(index: int) -> tuple[formats.Payload, Tensor | None]:
        shape = (payload.shape[0], *payload.shape[2:])
        matrix = replace(payload, shape=shape, **{name: tensor[:, index] for name, tensor in tensors.items()})
        return matrix, None if bias is None else bias[:, index]

    return [part(index) for index in range(payload.shape[1])]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scales:
    """Scales of a payload and the meaning of its codes.

    lines: ``[E, N, G, 1]``, or ``[E, N, G, 2]`` with what ``shift`` names in second place. values: what the lower four
    bits of a code mean, as ``FusedMatrix.values``. group: columns of a scale. bits: of a code. shift, floats, factors,
    order: as in ``FusedMatrix``. supers: ``[E, N, Kp/256, 1 or 2]`` or None.
    """

    lines: Tensor
    values: Tensor
    group: int
    bits: int = 4
    shift: str = "none"
    floats: bool = False
    factors: Tensor | None = None
    order: Tensor | None = None
    supers: Tensor | None = None


def pack_fused(payload: formats.Payload, bias: Tensor | None, name: str) -> FusedMatrix:
    """Return ``payload`` of logical shape ``[E, N, K]`` or ``[E, P, N, K]`` as the kernel reads it; parts become rows.

    Plain numbers are rounded to bfloat16. Raises BadScaleError for scales or codes the format forbids.
    """
    if isinstance(payload, formats.Bf16 | formats.Fp16 | formats.Fp32):
        return _plain_fused(payload, bias)
    if isinstance(payload, formats.Gguf) and not payload.kind.terms:
        payload = formats.MxFp4.from_parts({".weight": payload.blocks}, storage="gguf", shape=payload.shape)
    refuse_faults(payload, name)
    scales = _scales_of(payload)
    experts, bits = payload.shape[0], scales.bits
    rows = scales.lines.shape[1]
    columns = payload.shape[-1] if scales.order is None else scales.order.shape[1]
    pairs = -(-columns // COLUMNS) * COLUMNS // 2
    height = -(-rows // TASK) * TASK
    group = 2 * pairs if scales.group >= columns else scales.group
    groups = -(-2 * pairs // group)
    supers = scales.supers

    def codes_of(expert: int) -> Tensor:
        return _to_panels(_codes(payload, expert, bits, scales.order), bits, height, pairs)

    def supers_of(expert: int) -> Tensor:
        assert supers is not None
        return _to_scale_panels(supers[expert], height, supers.shape[2])

    return FusedMatrix(
        codes=_stack_experts(experts, codes_of),
        scales=_stack_experts(experts, lambda expert: _to_scale_panels(scales.lines[expert], height, groups)),
        supers=None if supers is None else _stack_experts(experts, supers_of),
        values=scales.values.float().expand(experts, 16).contiguous(),
        order=scales.order,
        factors=_pad_rows(scales.factors, experts, height),
        bias=_pad_rows(bias, experts, height),
        shift=scales.shift,
        floats=scales.floats,
        rows=rows,
        group=group // 2,
    )


def _pad_rows(tensor: Tensor | None, experts: int, height: int) -> Tensor | None:
    """Return one float32 for each row of each expert, ``[E, height]``, with zeros beyond its rows."""
    if tensor is None:
        return None
    by_row = tensor.reshape(experts, -1).float().contiguous()
    return functional.pad(by_row, (0, height - by_row.shape[1]))


def _plain_fused(payload: formats.Bf16 | formats.Fp16 | formats.Fp32, bias: Tensor | None) -> FusedMatrix:
    """Return plain numbers as bfloat16, in whole tasks of rows and whole tiles of columns."""
    values = flat(payload.values).bfloat16()
    experts, rows, columns = values.shape
    padded = functional.pad(values, (0, -columns % COLUMNS, 0, -rows % TASK))
    matrix = as_fused(PlainMatrix(values=padded.contiguous()), _pad_rows(bias, experts, padded.shape[1]))
    assert matrix is not None
    return replace(matrix, rows=rows)


def _scales_of(payload: formats.Payload) -> _Scales:
    """Return the scales of a payload that is not plain."""
    match payload:
        case formats.MxFp4():
            lines, largest = relative_e8m0(flat(payload.scales), _LARGEST)
            return _Scales(lines=lines[..., None], values=torch.tensor(E2M1_VALUES), group=32, factors=largest)
        case formats.NvFp4():
            scale = payload.global_scale.float()
            factors = by_row(scale.reciprocal() if payload.global_divides else scale, payload.shape)
            lines = flat(payload.scales).view(torch.float8_e4m3fn)
            return _Scales(lines=lines[..., None], values=torch.tensor(E2M1_VALUES), group=16, factors=factors)
        case formats.MxFp8() | formats.Fp8Block() | formats.Fp8Channel() | formats.Fp8Tensor():
            return _e4m3_scales(payload)
        case formats.Int4Affine() | formats.Int8Affine() | formats.Int4Ordered() | formats.Int8Ordered():
            return _integer_scales(payload)
        case formats.Gguf():
            return _gguf_scales(payload)
        case formats.Bnb4():
            values = payload.table.reshape(payload.shape[0], -1, 16)[:, 0]
            return _Scales(lines=_plain(flat(payload.scales))[..., None], values=values, group=payload.group_size)
        case _:
            assert isinstance(payload, formats.Int4Group)
            values = torch.arange(16.0) - 8
            return _Scales(lines=_plain(flat(payload.scales))[..., None], values=values, group=payload.group_size)


def _e4m3_scales(payload: formats.MxFp8 | formats.Fp8Block | formats.Fp8Channel | formats.Fp8Tensor) -> _Scales:
    """Return scales times 2^8, since the kernel reads E4M3 codes as 2^-8 of their value."""
    factors = None
    group = payload.shape[-1]
    match payload:
        case formats.MxFp8():
            lines, factors = relative_e8m0(flat(payload.scales), _LARGEST + 8)
            group = 32
        case formats.Fp8Block():
            rows, group = payload.block
            if group % 2:
                raise InputError(f"fp8_block: blocks of {payload.block} found; {CpuFused.name} takes even widths")
            lines = payload.scales.float().repeat_interleave(rows, dim=-2)[..., : payload.shape[-2], :] * 2**8
            lines = flat(lines)
        case _:
            tensor = isinstance(payload, formats.Fp8Tensor)
            factors = by_row(payload.scale, payload.shape) if tensor else payload.scales
            lines = torch.full((payload.shape[0], factors.numel() // payload.shape[0], 1), 2.0**8)
    return _Scales(lines=lines[..., None], values=_NO_VALUES, group=group, bits=8, floats=True, factors=factors)


def _integer_scales(
    payload: formats.Int4Affine | formats.Int8Affine | formats.Int4Ordered | formats.Int8Ordered,
) -> _Scales:
    experts, numbers = payload.shape[0], torch.arange(16.0)
    stored = _plain(flat(payload.scales))
    # Zeros are at most 255, which bfloat16 represents exactly.
    lines = torch.stack((stored, flat(payload.zeros).to(stored.dtype)), dim=-1)
    scales = _Scales(lines=lines, values=numbers, group=payload.group_size, bits=payload.bits, shift="zeros")
    if isinstance(payload, formats.Int4Affine | formats.Int8Affine):
        return scales
    group_of = payload.group_of.reshape(experts, -1, payload.shape[-1])[:, 0].long()
    order, size = _order(group_of, payload.group_size)
    group = functional.pad(group_of, (0, 1)).gather(1, order[:, ::size])[:, None, :, None]
    lines = lines.gather(2, group.expand(-1, lines.shape[1], -1, 2))
    return replace(scales, lines=lines, group=size, order=order)


def _gguf_scales(payload: formats.Gguf) -> _Scales:
    kind = payload.kind
    halves, steps = payload.lines()
    two = halves.shape[-1] > 1
    supers = _plain(halves).view(payload.shape[0], -1, payload.blocks.shape[-2], halves.shape[-1])
    scales = _Scales(
        lines=supers,
        values=kind.values,
        group=kind.elements,
        bits=kind.bits,
        shift="offsets" if two else "none",
    )
    if steps is None:
        return scales
    # Steps of a second half are subtracted.
    lines = steps * torch.tensor([1, -1], dtype=torch.int8)[: halves.shape[-1]]
    lines = lines.view(*supers.shape[:2], -1, halves.shape[-1])
    return replace(scales, lines=lines, supers=supers, group=kind.elements // steps.shape[1])


def _order(group_of: Tensor, largest: int) -> tuple[Tensor, int]:
    """Return the column in each place, int64 ``[E, Kp]`` with K for none, and how many places share a scale.

    group_of: int64 ``[E, K]``. The columns of a group are contiguous, in whole runs of at most ``largest``.
    """
    experts, columns = group_of.shape
    by_group = group_of.argsort(dim=1, stable=True)
    groups = group_of.gather(1, by_group)
    ranks = torch.arange(columns) - torch.searchsorted(groups, groups)
    size = -(-min(largest, int(ranks.max()) + 1) // 2) * 2
    runs = (ranks % size == 0).cumsum(1)
    order = torch.full((experts, -(-int(runs.max()) * size // COLUMNS) * COLUMNS), columns)
    return order.scatter_(1, (runs - 1) * size + ranks % size, by_group), size


def _codes(payload: Any, expert: int, bits: int, order: Tensor | None) -> Tensor:
    """Return uint8 codes ``[N, any]`` of an expert in its ``order``: pairs of four bits, the first low, or bytes."""
    unpacked = isinstance(payload, formats.Gguf)
    codes = payload[expert].codes() if unpacked else payload.codes[expert]
    codes = codes.view(torch.uint8).reshape(-1, codes.shape[-1])
    if order is not None:
        codes = (unpack_nibbles(codes) if bits == 4 else codes)[:, : payload.shape[-1]]
        codes = functional.pad(codes, (0, 1)).index_select(1, order[expert])
        unpacked = True
    return pack_nibbles(codes) if bits == 4 and unpacked else codes


def _stack_experts(count: int, of_expert: Callable[[int], Tensor]) -> Tensor:
    """Return ``[count, ...]`` of ``of_expert(i)``, one at a time."""
    first = of_expert(0)
    stack = first.new_empty(count, *first.shape)
    for i in range(count):
        stack[i] = of_expert(i) if i else first
    return stack


def _to_scale_panels(stored: Tensor, height: int, count: int) -> Tensor:
    """Return ``[N, n, w]`` as ``[height / 16, count, 16 w]``: w times a number of sixteen rows, padded with zeros."""
    padded = stored.new_zeros(height, count, stored.shape[2])
    padded[: stored.shape[0], : stored.shape[1]] = stored[:, :count]
    return padded.view(-1, 16, count, stored.shape[2]).permute(0, 2, 3, 1).flatten(2)


def _to_panels(codes: Tensor, bits: int, height: int, pairs: int) -> Tensor:
    """Return the codes of an expert as ``[height / 16, pairs, 4 bits]``, in the layout of ``kernels.cpu_fused``."""
    padded_cols = pairs if bits == 4 else 2 * pairs
    padded = codes.new_zeros(height, padded_cols)
    padded[: codes.shape[0], : codes.shape[1]] = codes[:, :padded_cols]
    if bits == 4:
        by_pair = padded.view(-1, 16, pairs).transpose(1, 2).contiguous().view(torch.int64)
        first, second = by_pair.split(1, dim=-1)
        even = first & _LOW | (second & _LOW) << 4
        odd = first >> 4 & _LOW | second & ~_LOW
        return torch.stack((even.view(torch.uint8), odd.view(torch.uint8)), dim=-1).flatten(2)
    by_pair = padded.view(torch.int16).view(-1, 16, pairs).transpose(1, 2).contiguous().view(torch.uint8)
    if bits == 8:
        return by_pair
    planes = [by_pair[..., :16] & 15 | by_pair[..., 16:] << 4]
    for plane in range(4, bits):
        eight = (by_pair >> plane & 1).unflatten(2, (4, 8)) << torch.arange(8, dtype=torch.uint8)
        planes.append(eight.sum(-1, dtype=torch.uint8))
    return torch.cat(planes, dim=-1)


def _plain(scales: Tensor) -> Tensor:
    """Return scales with plain NaNs: rounding to bfloat16 would carry into the sign of a NaN of many ones."""
    return scales.masked_fill(scales.isnan(), torch.nan)
