"""GGUF blocks of any kind as integers of four or eight bits, for 16-bit tokens.

Shape letters: E experts, P parts, N output rows, K input columns, B K blocks, G groups.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from ....formats.gguf import Gguf
from ....formats.mxfp4 import MxFp4
from ....kernels import enums
from ..layout import LANES, Lanes, Layout
from ..matrix import PackedMatrix
from .common import Unpacked, from_scale_words
from .interleave import EIGHT_BITS, INT4, deinterleave, interleave
from .mx import pack_mx, unpack_mx
from .units import flush_codes, flush_scales

__all__ = ["pack_gguf", "unpack_gguf"]


def pack_gguf(payload: Gguf, bias: Tensor | None, *, half: bool = False) -> PackedMatrix:
    """Interleave blocks as integers of four or eight bits; halves and steps are exact.

    Without a second half, codes lose their zero; with one they stay as they are. MXFP4 is packed by ``pack_mx``.
    """
    kind, shape = payload.kind, payload.shape
    experts, parts, n_out, _ = shape
    if not kind.halves:
        packed = pack_mx(MxFp4.from_parts({".weight": payload.blocks}, storage="gguf", shape=shape), bias, half=half)
        return replace(packed, report=_report(kind.title, packed.layout))
    layout = _layout(payload)
    device = payload.blocks.device
    shape = (experts, parts, layout.k_blocks, layout.words, n_out)
    scale = torch.empty(shape, dtype=torch.int32, device=device)
    for expert in range(experts):
        for part in range(parts):
            scale[expert, part].copy_(_scale_words(payload[expert][part], layout).permute(1, 2, 0))
    rows = _Rows(payload=payload, zero=_zero_code(layout))
    values = interleave(layout, EIGHT_BITS if kind.bits > 4 else INT4, rows.of, device=device)
    return PackedMatrix(layout=layout, values=values, scale=scale, bias=bias, report=_report(kind.title, layout))


def unpack_gguf(packed: PackedMatrix, *, half: bool = False) -> Unpacked:
    """Return codes, and the scales and minima of each quarter of a K block; half: as in ``pack_gguf``."""
    layout, words = packed.layout, packed.scale
    assert isinstance(layout, Lanes)
    assert words is not None
    if layout.scale_kind == enums.E8M0_SCALE:
        return unpack_mx(packed, half=half)
    codes = deinterleave(packed.values, layout, EIGHT_BITS if layout.code_bits == 8 else INT4)
    if layout.scale_kind == enums.STEP_SCALE:
        # One word of two halves, the second one negative, then a word of four steps for each half.
        halves = from_scale_words(words[:, :, :, :1], torch.float16).double().unflatten(-1, (-1, 2))
        steps = [from_scale_words(words[:, :, :, 1:2], torch.int8)]
        if layout.minima:
            steps.append(from_scale_words(words[:, :, :, 2:], torch.uint8))
        terms = [(halves[..., i, None] * s.double().unflatten(-1, (-1, 4))).flatten(-2) for i, s in enumerate(steps)]
        scales, minima = terms[0], -terms[1] if layout.minima else None
    else:
        halves = from_scale_words(words, torch.float16).double()
        scales = halves[..., 0::2] if layout.minima else halves
        # A minimum is added to the product of the code.
        minima = -halves[..., 1::2] if layout.minima else None
    zeros = None if layout.minima else torch.full(scales.shape, _zero_code(layout), device=codes.device)
    return Unpacked(codes=codes, scales=scales, group=layout.block_k // 4, zeros=zeros, minima=minima)


def _layout(payload: Gguf) -> Lanes:
    kind = payload.kind
    two, stepped = len(kind.halves) == 2, kind.steps is not None
    return replace(
        LANES["int8" if kind.bits > 4 else "int4"].of(payload.shape),
        scale_kind=enums.STEP_SCALE if stepped else enums.HALF_SCALE,
        words=2 + two if stepped else 2 + 2 * two,
        block_k=64 if kind.title == "Q6_K" else 128,
        quartered=not (two and stepped),
    )


def _zero_code(layout: Lanes) -> int:
    """Return the code of zero where there is no minimum."""
    if layout.code_bits == 4:
        return 8
    return 32 if layout.scale_kind == enums.STEP_SCALE else 128


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """Rows of codes of blocks; zero: the code of zero for one half."""

    payload: Gguf
    zero: int

    def of(self, experts: slice, span: slice) -> Tensor:
        """Return codes uint8 ``[e, P, n, K]``, without those of scales that are no unit."""
        payload, kind = self.payload, self.payload.kind
        stored = payload.blocks[experts, :, span]
        blocks = stored.flatten(0, 2)
        codes = kind.codes(blocks.reshape(-1, kind.nbytes)).view(blocks.shape[0], -1)
        two = len(kind.halves) == 2
        if not (two and kind.steps is not None):
            scales = _group_scales(replace(payload, blocks=blocks))
            zero = kind.zero if two else self.zero
            codes = flush_codes(codes + (zero - kind.zero), scales, codes.shape[1] // scales.shape[1], zero)
        return codes[:, : payload.shape[3]].unflatten(0, stored.shape[:3])


def _report(title: str, layout: Layout) -> str:
    return f"{title} in {layout.bits:g} bits a weight"


def _scale_words(payload: Gguf, layout: Lanes) -> Tensor:
    """Return the scale words int32 ``[N, B, words]`` of blocks ``[N, ., bytes]``."""
    rows = payload.shape[0]
    halves, steps = payload.lines()
    flushed = flush_scales(halves)
    if steps is None:
        return _pad_words(torch.cat((flushed[:, :1], halves[:, 1:]), dim=1).view(rows, -1), layout)
    # With two halves, a factor of zero clears its steps; with one, codes are flushed and steps are factors too.
    two = halves.shape[1] == 2
    steps = steps * (halves == flushed).unsqueeze(1) if two else steps + (steps == 0)
    # Steps of a second half are subtracted.
    first = functional.pad(flushed, (0, 2 - flushed.shape[1])) * flushed.new_tensor([1, -1])
    words = [first.view(torch.int32).view(rows, -1, 1).repeat_interleave(steps.shape[1] // 4, dim=1)]
    words += [step.contiguous().view(torch.int32).view(rows, -1, 1) for step in steps.unbind(2)]
    return torch.cat(words, dim=-1)[:, : layout.k_blocks]


def _group_scales(payload: Gguf) -> Tensor:
    """Return the float32 scales ``[N, G]`` of blocks ``[N, ., bytes]``."""
    halves, steps = payload.lines()
    return (halves[:, :1].float() * (1 if steps is None else steps[..., 0])).view(payload.blocks.shape[0], -1)


def _pad_words(scales: Tensor, layout: Lanes) -> Tensor:
    """Return scales ``[N, any]`` as int32 ``[N, B, words]``, padded with ones."""
    missing = layout.k_blocks * layout.words * 4 // scales.element_size() - scales.shape[1]
    padded = functional.pad(scales, (0, missing), value=1.0).contiguous()
    return padded.view(torch.int32).view(-1, layout.k_blocks, layout.words)
