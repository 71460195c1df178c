"""GGUF blocks of any kind as integers of four or eight bits, for 16-bit tokens.

Shape letters: E experts, P parts, N output rows, K input columns, B K blocks, G groups.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from ....formats.codecs import look_up
from ....formats.gguf import Gguf
from ....formats.mxfp4 import MxFp4
from ....kernels import enums
from ..layout import LANES, Lanes, Layout
from ..matrix import PackedMatrix
from .common import Unpacked, from_scale_words
from .interleave import EIGHT_BITS, INT4, deinterleave, interleave
from .low_bits import LOW_BIT_KINDS, pack_low_bits, unpack_low_bits
from .mx import pack_mx, unpack_mx
from .units import flush_codes, flush_scales

__all__ = ["pack_gguf", "unpack_gguf"]

_SHORT_RUN = 16  # columns of a scale, of which four fill a K block of 64
_MAX_COUNT = 42  # three times this and one are within a code


def pack_gguf(payload: Gguf, bias: Tensor | None, *, half: bool = False) -> PackedMatrix:
    """Interleave blocks as integers of four or eight bits; halves and steps are exact.

    Without a second half, codes lose their zero; with one they stay as they are. MXFP4 is packed by ``pack_mx``. Codes
    that name numbers of a table become these numbers, with a float32 scale for each run of columns if they have steps.
    With bfloat16 tokens, kinds of two and three bits without a grid keep their bits (``pack_low_bits``). With float16
    tokens Q2_K becomes the nearest multiples of a float32 scale for each 16 columns (``_nearest_multiples``).
    """
    kind, shape = payload.kind, payload.shape
    experts, parts, n_out, _ = shape
    if not half and kind.title in LOW_BIT_KINDS:
        return pack_low_bits(payload, bias)
    if not kind.terms:
        packed = pack_mx(MxFp4.from_parts({".weight": payload.blocks}, storage="gguf", shape=shape), bias, half=half)
        return replace(packed, report=_report(kind.title, packed.layout))
    layout = _layout(payload)
    device = payload.blocks.device
    shape = (experts, parts, layout.k_blocks, layout.words, n_out)
    scale = torch.empty(shape, dtype=torch.int32, device=device)
    for expert in range(experts):
        for part in range(parts):
            scale[expert, part].copy_(_scale_words(payload[expert][part], layout).permute(1, 2, 0))
    rows = _Rows(payload=payload, layout=layout)
    codec = EIGHT_BITS if layout.code_bits == 8 else INT4
    # Columns beyond K have scales of 1, and their rows of x are zero.
    values = interleave(layout, codec, rows.of, device=device)
    if layout.scale_kind == enums.GROUP_SCALE:
        scale = scale.view(torch.float32)
    return PackedMatrix(layout=layout, values=values, scale=scale, bias=bias, report=_report(kind.title, layout))


def unpack_gguf(packed: PackedMatrix, *, half: bool = False) -> Unpacked:
    """Return codes, and the scales and minima of each quarter of a K block; half: as in ``pack_gguf``."""
    layout, words = packed.layout, packed.scale
    assert isinstance(layout, Lanes)
    assert words is not None
    if layout.scale_kind == enums.E8M0_SCALE:
        return unpack_mx(packed, half=half)
    if layout.low_bits:
        return unpack_low_bits(packed)
    codes = deinterleave(packed.values, layout, EIGHT_BITS if layout.code_bits == 8 else INT4)
    if layout.scale_kind == enums.STEP_SCALE:
        # One word of two halves, the second one negative, then a word of four steps for each half.
        halves = from_scale_words(words[:, :, :, :1], torch.float16).double().unflatten(-1, (-1, 2))
        steps = [from_scale_words(words[:, :, :, 1:2], torch.int8)]
        if layout.minima:
            steps.append(from_scale_words(words[:, :, :, 2:], torch.uint8))
        terms = [(halves[..., i, None] * s.double().unflatten(-1, (-1, 4))).flatten(-2) for i, s in enumerate(steps)]
        scales, minima = terms[0], -terms[1] if layout.minima else None
    elif layout.scale_kind == enums.GROUP_SCALE:
        scales, minima = from_scale_words(words, torch.float32).double(), None
    else:
        halves = from_scale_words(words, torch.float16).double()
        scales = halves[..., 0::2] if layout.minima else halves
        # A minimum is added to the product of the code.
        minima = -halves[..., 1::2] if layout.minima else None
    zeros = None if layout.minima else torch.full(scales.shape, _zero_code(layout), device=codes.device)
    return Unpacked(codes=codes, scales=scales, group=layout.block_k // 4, zeros=zeros, minima=minima)


def _layout(payload: Gguf) -> Lanes:
    kind = payload.kind
    two, stepped, refitted = kind.terms == 2, kind.steps is not None, _is_refitted(payload)
    layout = LANES["int8" if kind.bits > 4 or kind.numbers or refitted else "int4"].of(payload.shape)
    block_k = 64 if kind.run == _SHORT_RUN else 128
    if stepped and (kind.numbers or refitted):
        return replace(layout, scale_kind=enums.GROUP_SCALE, words=4, block_k=block_k, quartered=True)
    return replace(
        layout,
        scale_kind=enums.STEP_SCALE if stepped else enums.HALF_SCALE,
        words=2 + two if stepped else 2 + 2 * two,
        block_k=block_k,
        quartered=not (two and stepped),
    )


def _is_refitted(payload: Gguf) -> bool:
    """Whether the blocks have a minimum for each short run (Q2_K), which no layout has."""
    return payload.kind.terms == 2 and payload.kind.run == _SHORT_RUN


def _zero_code(layout: Lanes) -> int:
    """Return the code of zero where there is no minimum."""
    if layout.code_bits == 4:
        return 8
    return 32 if layout.scale_kind == enums.STEP_SCALE else 128


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """Rows of codes of blocks as ``layout`` holds them."""

    payload: Gguf
    layout: Lanes

    def of(self, experts: slice, span: slice) -> Tensor:
        """Return codes uint8 ``[e, P, n, K]``, without those of scales that are no unit."""
        payload, kind = self.payload, self.payload.kind
        stored = payload.blocks[experts, :, span]
        some = replace(payload, blocks=stored.flatten(0, 2))
        codes = self._codes(some)
        if not self.layout.minima or kind.steps is None:
            scales = _group_scales(some)
            zero = kind.zero if self.layout.minima else _zero_code(self.layout)
            codes = flush_codes(codes, scales, codes.shape[1] // scales.shape[1], zero)
        return codes[:, : payload.shape[3]].unflatten(0, stored.shape[:3])

    def _codes(self, payload: Gguf) -> Tensor:
        """Return codes ``[N, blocks * elements]`` of blocks ``[N, ., bytes]``."""
        kind, blocks = payload.kind, payload.blocks
        codes = kind.codes(blocks.reshape(-1, kind.nbytes)).view(blocks.shape[0], -1)
        if self.layout.minima:
            return codes
        zero = _zero_code(self.layout)
        if kind.terms == 2:
            _, count, offset = _nearest_multiples(payload)
            by_run = codes.view(*count.shape, -1) * count.unsqueeze(-1) - offset.unsqueeze(-1) + zero
            return by_run.to(torch.uint8).view(codes.shape)
        if kind.numbers is None:
            return codes + (zero - kind.zero)
        return look_up(torch.tensor(kind.numbers, device=codes.device).add(zero).to(torch.uint8), codes)


def _report(title: str, layout: Layout) -> str:
    return f"{title} in {layout.bits:g} bits a weight"


def _scale_words(payload: Gguf, layout: Lanes) -> Tensor:
    """Return the scale words int32 ``[N, B, words]`` of blocks ``[N, ., bytes]``."""
    if layout.scale_kind == enums.GROUP_SCALE:
        return _pad_words(flush_scales(_group_scales(payload)), layout)
    rows = payload.shape[0]
    halves, steps = payload.lines()
    flushed = flush_scales(halves)
    if steps is None:
        words = torch.cat((flushed[:, :1], halves[:, 1:]), dim=1)
        # A half serves the quarters of all K blocks of its elements.
        return _pad_words(words.repeat_interleave(payload.kind.elements // 32, dim=0).view(rows, -1), layout)
    # With two halves, a factor of zero clears its steps; with one, codes are flushed and steps are factors too.
    two = halves.shape[1] == 2
    steps = steps * (halves == flushed).unsqueeze(1) if two else steps + (steps == 0)
    # Steps of a second half are subtracted.
    first = functional.pad(flushed, (0, 2 - flushed.shape[1])) * flushed.new_tensor([1, -1])
    words = [first.view(torch.int32).view(rows, -1, 1).repeat_interleave(steps.shape[1] // 4, dim=1)]
    words += [step.contiguous().view(torch.int32).view(rows, -1, 1) for step in steps.unbind(2)]
    return torch.cat(words, dim=-1)[:, : layout.k_blocks]


def _group_scales(payload: Gguf) -> Tensor:
    """Return the float32 scales ``[N, G]`` of the packed codes of blocks ``[N, ., bytes]``."""
    if _is_refitted(payload):
        return _nearest_multiples(payload)[0]
    halves, steps = payload.lines()
    scales = halves[:, :1].float() * (1 if steps is None else steps[..., 0])
    return (scales * payload.kind.unit).view(payload.blocks.shape[0], -1)


def _nearest_multiples(payload: Gguf) -> tuple[Tensor, Tensor, Tensor]:
    """Return float32 scales and int16 counts and offsets ``[N, G]``: scale * (count * code - offset) is near a weight.

    A weight of Q2_K is factor * code - minimum. The scale is factor / count for the count of which the minimum is
    nearest to a multiple; on average, weights are about as near as bfloat16 numbers. Codes are within -128 and 127.
    """
    halves, steps = payload.lines()
    assert steps is not None
    factor, minimum = (halves.float().unsqueeze(1) * steps).view(payload.blocks.shape[0], -1, 2).unbind(-1)
    ratio = minimum / factor
    # Where the minimum is far larger than the factor.
    scale = minimum / 120
    count = (120 * (factor / minimum)).nan_to_num(0.0).clamp(-2, 2).round()
    offset = torch.full_like(count, 120.0)
    error = torch.full_like(ratio, torch.inf)
    for trial in range(1, _MAX_COUNT + 1):
        multiple = (ratio * trial).round()
        distance = ((ratio * trial - multiple) / trial).abs()
        nearer = (multiple <= 128) & (3 * trial - multiple <= 127) & (distance < error)
        error = torch.where(nearer, distance, error)
        scale = torch.where(nearer, factor / trial, scale)
        count = torch.where(nearer, float(trial), count)
        offset = torch.where(nearer, multiple, offset)
    return scale, count.to(torch.int16), offset.to(torch.int16)


def _pad_words(scales: Tensor, layout: Lanes) -> Tensor:
    """Return scales ``[N, any]`` as int32 ``[N, B, words]``, padded with ones."""
    missing = layout.k_blocks * layout.words * 4 // scales.element_size() - scales.shape[1]
    padded = functional.pad(scales, (0, missing), value=1.0).contiguous()
    return padded.view(torch.int32).view(-1, layout.k_blocks, layout.words)
