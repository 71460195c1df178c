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
from ..base import ExpertKernel, PackedWeights, map_tensors, refuse_codes
from .decode import PlainMatrix
from .grouped import cut_rows, fast_activate, starts_of, tokens_of
from .panels import COLUMNS, TASK, TENSORS, FusedMatrix, as_fused, missing_requirement, scratch_bytes
from .stored import by_row, flat, refuse_faults

__all__ = ["CpuFused", "FusedExperts", "pack_fused"]

_NAMES = [form.name for form in formats.FORMATS if form.name not in DTYPES]
_LOW = 0x0F0F0F0F0F0F0F0F  # low nibbles of eight bytes
_LARGEST = 127  # exponent field of 1, which the largest scale of a row of MXFP4 becomes
_FLOATS = {"values": torch.zeros(16, device="cpu"), "bits": 8, "floats": True}


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedExperts(PackedWeights):
    """Both matrices as the kernel reads them, gate and up apart where their columns or tables differ.

    The memory of a batch is torch's own.
    """

    gate_up: tuple[FusedMatrix, ...]
    down: FusedMatrix
    activation: ActivationSpec

    def run(self, batch: ContiguousBatch, memory: Memory | None = None) -> Tensor:
        """Return ``[R, H]`` float32; rows of dropped assignments are not written."""
        refuse_codes(batch, CpuFused.name)
        rows = torch.empty(batch.source.numel(), self.down.rows, dtype=torch.float32, device=batch.x.device)
        with torch.inference_mode():
            for own, spans in cut_rows(batch):
                x = tokens_of(batch, own)
                where = starts_of(spans)
                inner = [matrix.multiply(x, *where)[:, : matrix.rows] for matrix in self.gate_up]
                inner = torch.cat(inner, dim=1) if len(inner) > 1 else inner[0]
                hidden = fast_activate(inner, self.activation).to(x.dtype)
                rows[own] = self.down.multiply(hidden, *where)[:, : self.down.rows]
        return rows

    def _map_tensors(self, change: Callable[[Tensor], Tensor]) -> FusedExperts:
        *gate_up, down = (map_tensors(matrix, change, *TENSORS) for matrix in (*self.gate_up, self.down))
        return FusedExperts(gate_up=tuple(gate_up), down=down, activation=self.activation)


class CpuFused(ExpertKernel):
    """Codes of four to eight bits and activations of 16 on a CPU with AVX2, AVX-512 or AMX."""

    name = "cpu_fused"

    def refuse(self, problem: ExpertsProblem) -> str | None:
        """Refuse other devices, weights and activations, machines without AVX2, and a missing Numba."""
        asked = problem.activation_format
        if problem.device.kind != "cpu":
            return f"asked for {problem.device.kind}; it needs a CPU"
        # Plain numbers are multiplied by the library, but next to codes they have no kernel that runs both products.
        plain = () if problem.dtype == "fp16" else ("fp16", "fp32")
        beside_codes = ("bf16", *plain) if problem.mixed and set(problem.formats) & set(_NAMES) else ()
        for form in problem.formats:
            if form not in (*_NAMES, *beside_codes):
                return f"asked for {form} weights; it takes {', '.join(_NAMES)}"
        if formats.Bnb4.name in problem.formats and (problem.hidden % 2 or problem.intermediate % 2):
            return f"asked for bnb4 and widths {problem.hidden} and {problem.intermediate}; it takes even ones"
        if asked not in ("bf16", "fp16") or problem.dtype != asked:
            return f"asked for {asked} activations and {problem.dtype} input; it takes bf16 or fp16 for both"
        return missing_requirement()

    def regions(self, problem: ExpertsProblem) -> Regions:
        """Return the decoded rows of each thread, and the rows of the largest batch all routed to one expert."""
        # Groups of a part of the columns in activation order are filled up to the largest.
        ordered = any(form.endswith("_ordered") for form in problem.formats)
        longest = max(problem.hidden, problem.intermediate) * (3 if ordered else 1)
        threads = max(problem.device.threads, torch.get_num_threads())
        # Per row: x gathered, filled up and in another order, gate_up, its activation in two precisions, the result
        # twice. Float16 takes two rows.
        row = 4 * (8 * (problem.hidden + TASK) + (2 * problem.parts + 7) * (problem.intermediate + TASK))
        row *= 2 if problem.dtype == "fp16" else 1
        return {"tile": threads * scratch_bytes(longest), "rows": max(1, problem.rows) * row}

    def pack(self, weights: ExpertWeights[formats.Payload], problem: ExpertsProblem) -> FusedExperts:
        """Lay the codes out anew, one expert at a time.

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
    stored = payload.tensors()
    own = [tensor for name, tensor in stored.items() if name in ("table", "group_of")]
    if all(bool((tensor == tensor[:, :1]).all()) for tensor in own):
        return [(payload, bias)]

    def part(index: int) -> tuple[formats.Payload, Tensor | None]:
        tensors = {name: tensor[:, index] for name, tensor in stored.items()}
        made = replace(payload, shape=(payload.shape[0], *payload.shape[2:]), **tensors)
        return made, None if bias is None else bias[:, index]

    return [part(index) for index in range(payload.shape[1])]


def pack_fused(payload: formats.Payload, bias: Tensor | None, name: str) -> FusedMatrix:
    """Return ``payload`` of logical shape ``[E, N, K]`` or ``[E, P, N, K]`` as the kernel reads it; parts become rows.

    Plain numbers are rounded to bfloat16. Raises BadScaleError for scales or codes the format forbids.
    """
    if isinstance(payload, formats.Bf16 | formats.Fp16 | formats.Fp32):
        return _plain_fused(payload, bias)
    if isinstance(payload, formats.Gguf) and not payload.kind.halves:
        payload = formats.MxFp4.from_parts({".weight": payload.blocks}, storage="gguf", shape=payload.shape)
    refuse_faults(payload, name)
    lines, more = _lines(payload)
    experts, order, factors, supers = payload.shape[0], more.get("order"), more.get("factors"), more.pop("supers", None)
    columns, bits = payload.shape[-1] if order is None else order.shape[1], more.pop("bits", 4)
    pairs, height = -(-columns // COLUMNS) * COLUMNS // 2, -(-lines.shape[1] // TASK) * TASK
    size = 2 * pairs if more["group"] >= columns else more["group"]

    def per_row(tensor: Tensor | None) -> Tensor | None:
        wide = None if tensor is None else tensor.reshape(experts, -1).float().contiguous()
        return None if wide is None else functional.pad(wide, (0, height - wide.shape[1]))

    more |= {"rows": lines.shape[1], "group": size // 2, "factors": per_row(factors), "bias": per_row(bias)}
    return FusedMatrix(
        codes=_stack_experts(
            experts, lambda expert: _to_panels(_codes(payload, expert, bits, order), bits, height, pairs)
        ),
        scales=_stack_experts(experts, lambda expert: _to_scale_panels(lines[expert], height, -(-2 * pairs // size))),
        supers=None
        if supers is None
        else _stack_experts(experts, lambda e: _to_scale_panels(supers[e], height, supers.shape[2])),
        values=more.pop("values").float().expand(experts, 16).contiguous(),
        **more,
    )


def _plain_fused(payload: formats.Bf16 | formats.Fp16 | formats.Fp32, bias: Tensor | None) -> FusedMatrix:
    """Return plain numbers as bfloat16, in whole tasks of rows and whole tiles of columns."""
    values = flat(payload.values).bfloat16()
    experts, rows, columns = values.shape
    filled = functional.pad(values, (0, -columns % COLUMNS, 0, -rows % TASK))
    wide = None if bias is None else functional.pad(bias.reshape(experts, -1).float(), (0, -rows % TASK))
    made = as_fused(PlainMatrix(values=filled.contiguous()), wide)
    assert made is not None
    return replace(made, rows=rows)


def _lines(payload: formats.Payload) -> tuple[Tensor, dict[str, Any]]:
    """Return the scales ``[E, N, G, 1]``, or ``[E, N, G, 2]`` with what is behind them, and more of a ``FusedMatrix``.

    Its group is in columns, its supers are ``[E, N, Kp/256, 1 or 2]``; bits: of a code that has not four.
    """
    experts, numbers = payload.shape[0], torch.arange(16.0)
    match payload:
        case formats.MxFp4():
            lines, largest = relative_e8m0(flat(payload.scales), _LARGEST)
            return lines[..., None], {"values": torch.tensor(E2M1_VALUES), "group": 32, "factors": largest}
        case formats.NvFp4():
            scale = payload.global_scale.float()
            factors = by_row(scale.reciprocal() if payload.global_divides else scale, payload.shape)
            lines = flat(payload.scales).view(torch.float8_e4m3fn)
            return lines[..., None], {"values": torch.tensor(E2M1_VALUES), "group": 16, "factors": factors}
        case formats.MxFp8():
            lines, largest = relative_e8m0(flat(payload.scales), _LARGEST + 8)
            return lines[..., None], {**_FLOATS, "group": 32, "factors": largest}
        case formats.Fp8Block():
            rows, columns = payload.block
            if columns % 2:
                raise InputError(f"fp8_block: blocks of {payload.block} found; {CpuFused.name} takes even widths")
            lines = payload.scales.float().repeat_interleave(rows, dim=-2)[..., : payload.shape[-2], :] * 2**8
            return flat(lines)[..., None], {**_FLOATS, "group": columns}
        case formats.Fp8Channel() | formats.Fp8Tensor():
            own = by_row(payload.scale, payload.shape) if isinstance(payload, formats.Fp8Tensor) else payload.scales
            lines = torch.full((experts, own.numel() // experts, 1, 1), 2.0**8)
            return lines, {**_FLOATS, "group": payload.shape[-1], "factors": own}
        case formats.Int4Affine() | formats.Int8Affine() | formats.Int4Ordered() | formats.Int8Ordered():
            scales = _plain(flat(payload.scales))
            # Zeros are at most 255, which bfloat16 holds.
            lines = torch.stack((scales, flat(payload.zeros).to(scales.dtype)), dim=-1)
            more = {"values": numbers, "bits": payload.bits, "shift": "zeros", "group": payload.group_size}
            if isinstance(payload, formats.Int4Affine | formats.Int8Affine):
                return lines, more
            group_of = payload.group_of.reshape(experts, -1, payload.shape[-1])[:, 0].long()
            order, size = _order(group_of, payload.group_size)
            own = functional.pad(group_of, (0, 1)).gather(1, order[:, ::size])[:, None, :, None]
            return lines.gather(2, own.expand(-1, lines.shape[1], -1, 2)), {**more, "order": order, "group": size}
        case formats.Gguf():
            halves, steps = payload.lines()
            supers = _plain(halves).view(experts, -1, payload.blocks.shape[-2], halves.shape[-1])
            more: dict[str, Any] = {"values": numbers - payload.kind.zero, "bits": payload.kind.bits}
            more |= {"group": payload.kind.elements, "shift": "offsets" if halves.shape[-1] > 1 else "none"}
            if steps is None:
                return supers, more
            # Steps of a second half are subtracted.
            lines = steps * torch.tensor([1, -1], dtype=torch.int8)[: halves.shape[-1]]
            more |= {"supers": supers, "group": payload.kind.elements // steps.shape[1]}
            return lines.view(*supers.shape[:2], -1, halves.shape[-1]), more
        case _:
            assert isinstance(payload, formats.Int4Group | formats.Bnb4)
            values = payload.table.reshape(experts, -1, 16)[:, 0] if isinstance(payload, formats.Bnb4) else numbers - 8
            return _plain(flat(payload.scales))[..., None], {"values": values, "group": payload.group_size}


def _order(group_of: Tensor, largest: int) -> tuple[Tensor, int]:
    """Return which of K columns lies in which place, int64 ``[E, Kp]`` with K for none, and how many share a scale.

    group_of: int64 ``[E, K]``. The columns of a group lie side by side, in whole runs of at most ``largest``.
    """
    experts, columns = group_of.shape
    by_group = group_of.argsort(dim=1, stable=True)
    found = group_of.gather(1, by_group)
    ranks = torch.arange(columns) - torch.searchsorted(found, found)
    size = -(-min(largest, int(ranks.max()) + 1) // 2) * 2
    runs = (ranks % size == 0).cumsum(1)
    order = torch.full((experts, -(-int(runs.max()) * size // COLUMNS) * COLUMNS), columns)
    return order.scatter_(1, (runs - 1) * size + ranks % size, by_group), size


def _codes(payload: Any, expert: int, bits: int, order: Tensor | None) -> Tensor:
    """Return uint8 codes ``[N, any]`` of an expert in its ``order``: pairs of four bits, the first low, or bytes."""
    codes = payload[expert].codes() if isinstance(payload, formats.Gguf) else payload.codes[expert]
    codes = codes.view(torch.uint8).reshape(-1, codes.shape[-1])
    if order is not None:
        codes = (unpack_nibbles(codes) if bits == 4 else codes)[:, : payload.shape[-1]]
        codes = functional.pad(codes, (0, 1)).index_select(1, order[expert])
    return pack_nibbles(codes) if bits == 4 and (order is not None or isinstance(payload, formats.Gguf)) else codes


def _stack_experts(count: int, make: Callable[[int], Tensor]) -> Tensor:
    """Return ``[count, ...]`` of ``make(i)``, one at a time."""
    first = make(0)
    made = first.new_empty(count, *first.shape)
    for i in range(count):
        made[i] = make(i) if i else first
    return made


def _to_scale_panels(stored: Tensor, height: int, count: int) -> Tensor:
    """Return ``[N, n, w]`` as ``[height / 16, count, 16 w]``: w times a number of sixteen rows; zeros fill up."""
    made = stored.new_zeros(height, count, stored.shape[2])
    made[: stored.shape[0], : stored.shape[1]] = stored[:, :count]
    return made.view(-1, 16, count, stored.shape[2]).permute(0, 2, 3, 1).flatten(2)


def _to_panels(codes: Tensor, bits: int, height: int, pairs: int) -> Tensor:
    """Return the codes of an expert as ``[height / 16, pairs, 4 bits]``, in the layout of ``kernels.cpu_fused``."""
    wide = pairs if bits == 4 else 2 * pairs
    made = codes.new_zeros(height, wide)
    made[: codes.shape[0], : codes.shape[1]] = codes[:, :wide]
    if bits == 4:
        first, second = made.view(-1, 16, pairs).transpose(1, 2).contiguous().view(torch.int64).split(1, dim=-1)
        even, odd = first & _LOW | (second & _LOW) << 4, first >> 4 & _LOW | second & ~_LOW
        return torch.stack((even.view(torch.uint8), odd.view(torch.uint8)), dim=-1).flatten(2)
    made = made.view(torch.int16).view(-1, 16, pairs).transpose(1, 2).contiguous().view(torch.uint8)
    planes = [made] if bits == 8 else [made[..., :16] & 15 | made[..., 16:] << 4]
    for plane in range(4, bits if bits < 8 else 4):
        eight = (made >> plane & 1).unflatten(2, (4, 8)) << torch.arange(8, dtype=torch.uint8)
        planes.append(eight.sum(-1, dtype=torch.uint8))
    return torch.cat(planes, dim=-1)


def _plain(scales: Tensor) -> Tensor:
    """Return scales with plain NaNs: rounding to bfloat16 would carry into the sign of a NaN of many ones."""
    return scales.masked_fill(scales.isnan(), torch.nan)
