"""GGUF kinds of two and three bits as they are stored, in the order of ``kernels/low_bits.py``, for bfloat16 tokens.

Shape letters: E experts, P parts, N output rows, K input columns, B K blocks, n rows at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from ....formats.gguf import Gguf
from ....kernels import enums
from ..layout import LANES, Lanes
from ..matrix import PackedMatrix
from .common import Unpacked, empty_weight, row_batches

__all__ = ["LOW_BIT_KINDS", "pack_low_bits", "unpack_low_bits"]

_BLOCK = 256
_SMALLEST_HALF = 2.0**-24
_RATIO_UNIT = 2.0**85  # of ratios of a minimum to a scale
# Where lanes of three bits hold the codes of eight steps, by half: (lane, first bit). The last code has bits 15.
_THREE_BITS = (
    ((0, 0), (0, 6), (0, 3), (0, 9), (0, 12), (1, 0), (1, 3), (1, 9)),
    ((2, 0), (2, 6), (2, 3), (2, 9), (2, 12), (1, 6), (1, 12)),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Packing:
    """How a kind is packed.

    layout: without sizes. numbers: function from a payload ``[n, blocks, bytes]`` to its numbers, float16 ``[n, B]`` or
    int32 with ratios. steps: function to bytes of runs of 16 columns, uint8 ``[n, B, 16]``, or None.
    """

    layout: Lanes
    numbers: Callable[[Gguf], Tensor]
    steps: Callable[[Gguf], Tensor] | None = None


def pack_low_bits(payload: Gguf, bias: Tensor | None) -> PackedMatrix:
    """Put codes, steps and block numbers of ``payload [E, P, N, K]`` in the kernel's order; raises InputError if empty.

    Values are exact, but for Q2_K: the ratio of a block's minimum to its scale becomes a bfloat16 number, and so does
    each weight in the kernel.
    """
    packing = LOW_BIT_KINDS[payload.kind.title]
    layout = packing.layout.of(payload.shape)
    experts, parts, n_out, _ = layout.shape
    if prod(layout.values_shape) == 0:
        raise empty_weight(layout.shape)
    device, blocks = payload.blocks.device, layout.k_blocks
    lanes = torch.empty(layout.values_shape, dtype=torch.int16, device=device)
    scale = torch.zeros((experts, parts, blocks, layout.scale_words), dtype=torch.int32, device=device)
    steps, numbers = _split_scale(scale, layout)
    mask = (1 << layout.code_bits) - 1  # the shifts of IQ1 are in its steps
    for some, span in row_batches(experts, n_out, parts * blocks * _BLOCK, device):
        stored = payload.blocks[some, :, span]
        rows = replace(payload, shape=(*stored.shape[:3], blocks * _BLOCK), blocks=stored.contiguous())
        lead = stored.shape[:3]
        codes = _in_steps((rows.codes() & mask).view(*lead, blocks, _BLOCK))
        pack = _two_bit_lanes if layout.weight == enums.TWO_BIT_LANES else _three_bit_lanes
        lanes[some, :, :, span] = pack(codes.to(torch.int32)).to(torch.int16).transpose(2, 3)
        numbers[some, :, :, span] = packing.numbers(rows).view(*lead, blocks).transpose(2, 3)
        if packing.steps is not None:
            # The bytes of groups of one lane are a word.
            by_lane = packing.steps(rows).view(*lead, blocks, 4, 4).transpose(-1, -2)
            words = by_lane.contiguous().view(torch.int32).squeeze(-1)
            steps[some, :, :, span] = words.transpose(2, 3)
    report = f"{payload.kind.title} in {layout.bits:g} bits a weight"
    return PackedMatrix(layout=layout, values=lanes, scale=scale, bias=bias, report=report)


def unpack_low_bits(packed: PackedMatrix) -> Unpacked:
    """Return codes, and scales, zero points and minima of 8 columns each."""
    layout, scale = packed.layout, packed.scale
    assert isinstance(layout, Lanes)
    assert scale is not None
    columns = layout.shape[3]
    by_row = packed.values.transpose(2, 3).to(torch.int32) & 0xFFFF
    read = _read_two_bits if layout.weight == enums.TWO_BIT_LANES else _read_three_bits
    codes = _in_columns(read(by_row)).flatten(3)[..., :columns].to(torch.uint8)
    kind = layout.scale_kind
    words, first = (tensor.transpose(2, 3).contiguous() for tensor in _split_scale(scale, layout))
    numbers = (first.view(torch.float16)[..., 0::2] if kind == enums.MINIMUM_STEPS else first).double().unsqueeze(-1)
    runs = torch.ones((*first.shape, 16), dtype=torch.int32, device=scale.device)
    if layout.words:
        runs = words.view(torch.uint8).unflatten(-1, (4, 4)).transpose(-1, -2).flatten(-2).to(torch.int32)
    steps = (runs - 32 if kind == enums.SIGNED_STEPS else runs & 15).double()
    minima = None
    if kind == enums.MINIMUM_STEPS:
        ratio = (first & -65536).view(torch.float32).double().unsqueeze(-1) / -_RATIO_UNIT
        minima = ((runs >> 4) * ratio).float().bfloat16().double() * numbers

    def by_eight(numbers: Tensor) -> Tensor:
        return numbers.repeat_interleave(2, dim=-1).flatten(3)

    return Unpacked(
        codes=codes,
        scales=by_eight(steps * numbers),
        group=8,
        zeros=_zero_points(runs, kind).flatten(3),
        minima=None if minima is None else by_eight(minima),
    )


def _split_scale(scale: Tensor, layout: Lanes) -> tuple[Tensor, Tensor]:
    """Return views of the words of steps ``[E, P, B, N, 4 or 0]`` and of numbers, float16 or int32 ``[E, P, B, N]``."""
    n_out = layout.shape[2]
    steps = scale[..., : layout.words * n_out].unflatten(-1, (n_out, layout.words))
    numbers = scale[..., layout.words * n_out :]
    if layout.scale_kind != enums.MINIMUM_STEPS:
        numbers = numbers.view(torch.float16)[..., :n_out]
    return steps, numbers


def _zero_points(runs: Tensor, kind: int) -> Tensor:
    """Return the zero points of the first and the last eight columns of runs, float64 ``[..., 2]``, from step bytes."""
    if kind == enums.SHIFTED_STEPS:
        bits = torch.stack((runs >> 4 & 1, runs >> 5 & 1), dim=-1)
        return 0.875 + 0.25 * bits.double()
    zero = {enums.SIGNED_STEPS: 4.0, enums.MINIMUM_STEPS: 0.0}.get(kind, 1.0)
    return torch.full((*runs.shape, 2), zero, dtype=torch.float64, device=runs.device)


# Codes of a block in the order of the kernel: halves, steps, positions in a step.


def _in_steps(codes: Tensor) -> Tensor:
    """Return ``[..., 256]`` as ``[..., 2, 8, 16]``."""
    lead = codes.dim() - 1
    # Column: group, lane, half, upper bit of the step, high, low. Position: half, step, high, lane, low.
    split = codes.unflatten(-1, (4, 4, 2, 2, 2, 2))
    order = [lead + axis for axis in (2, 3, 0, 4, 1, 5)]
    return split.permute(*range(lead), *order).reshape(*codes.shape[:-1], 2, 8, 16)


def _in_columns(codes: Tensor) -> Tensor:
    """Return ``[..., 2, 8, 16]`` as ``[..., 256]``: the inverse of ``_in_steps``."""
    lead = codes.dim() - 3
    split = codes.reshape(*codes.shape[:-3], 2, 2, 4, 2, 4, 2)
    order = [lead + axis for axis in (2, 4, 0, 1, 3, 5)]
    return split.permute(*range(lead), *order).reshape(*codes.shape[:-3], 256)


def _two_bit_lanes(codes: Tensor) -> Tensor:
    shifts = torch.arange(0, 16, 2, dtype=torch.int32, device=codes.device).unsqueeze(-1)
    return (codes << shifts).sum(-2, dtype=torch.int32).flatten(-2)


def _read_two_bits(lanes: Tensor) -> Tensor:
    shifts = torch.arange(0, 16, 2, dtype=torch.int32, device=lanes.device).unsqueeze(-1)
    return (lanes.unflatten(-1, (2, 1, 16)) >> shifts) & 3


def _three_bit_lanes(codes: Tensor) -> Tensor:
    lanes = [torch.zeros_like(codes[..., 0, 0, :]) for _ in range(3)]
    for half, places in enumerate(_THREE_BITS):
        for step, (lane, bit) in enumerate(places):
            lanes[lane] |= codes[..., half, step, :] << bit
    for bit, lane in enumerate(lanes):
        lane |= (codes[..., 1, 7, :] >> bit & 1) << 15
    return torch.cat(lanes, dim=-1)


def _read_three_bits(lanes: Tensor) -> Tensor:
    three = lanes.chunk(3, dim=-1)
    halves = [torch.stack([three[lane] >> bit & 7 for lane, bit in places], dim=-2) for places in _THREE_BITS]
    last = sum((three[bit] >> 15 & 1) << bit for bit in range(3))
    assert isinstance(last, Tensor)
    return torch.stack((halves[0], torch.cat((halves[1], last.unsqueeze(-2)), dim=-2)), dim=-3)


# Numbers and steps of blocks.


def _block_numbers(payload: Gguf) -> Tensor:
    halves, _ = payload.lines()
    return halves[:, 0]


def _ratio_words(payload: Gguf) -> Tensor:
    """Return words with the block's number and, above it, the ratio of its minimum to it."""
    halves, _ = payload.lines()
    number, minimum = halves.unbind(1)
    # A number of zero leaves the minimum alone; ``_minimum_steps`` clears the steps.
    number = torch.where(number == 0, _SMALLEST_HALF, number)
    ratio = (minimum.float() / number.float() * -_RATIO_UNIT).bfloat16()
    return torch.stack((number, ratio.view(torch.float16)), dim=-1).view(torch.int32).squeeze(-1)


def _minimum_steps(payload: Gguf) -> Tensor:
    halves, steps = payload.lines()
    assert steps is not None
    step, minimum = steps.unbind(-1)
    return (step * (halves[:, :1] != 0) | (minimum << 4)).view(torch.uint8)


def _signed_steps(payload: Gguf) -> Tensor:
    _, steps = payload.lines()
    assert steps is not None
    return (steps[..., 0] + 32).view(torch.uint8)


def _shifted_steps(payload: Gguf) -> Tensor:
    _, steps = payload.lines()
    assert steps is not None
    runs = steps[..., 0].repeat_interleave(16 // steps.shape[1], dim=1)
    # Eight columns of a code have one shift, at its bit 3.
    shifts = (payload.codes().view(-1, 16, 2, 8)[..., 0] >> 3).to(torch.int8)
    return (runs | (shifts[..., 0] << 4) | (shifts[..., 1] << 5)).view(torch.uint8)


def _lanes(weight: str, scale_kind: int) -> Lanes:
    return replace(LANES[weight], scale_kind=scale_kind, words=0 if scale_kind == enums.TERNARY_SCALE else 4)


_TERNARY = _Packing(layout=_lanes("two_bits", enums.TERNARY_SCALE), numbers=_block_numbers)
_SHIFTED = _Packing(layout=_lanes("two_bits", enums.SHIFTED_STEPS), numbers=_block_numbers, steps=_shifted_steps)
LOW_BIT_KINDS = {
    "Q2_K": _Packing(layout=_lanes("two_bits", enums.MINIMUM_STEPS), numbers=_ratio_words, steps=_minimum_steps),
    "Q3_K": _Packing(layout=_lanes("three_bits", enums.SIGNED_STEPS), numbers=_block_numbers, steps=_signed_steps),
    "IQ1_S": _SHIFTED,
    "IQ1_M": _SHIFTED,
    "TQ1_0": _TERNARY,
    "TQ2_0": _TERNARY,
}
