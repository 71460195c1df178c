"""Weights for the grouped product: four-bit codes re-laid into sixteen-bit lanes, scales by K block.

A lane holds the codes of columns k, k + q, k + 2q and k + 3q of one row, q a quarter of the K block, at the bits
that ``kernels/decode.py`` names; lanes of E4M3 codes hold k and k + q, and after all of those k + 2q and k + 3q. Rows
of a K block are beside each other, so a tile is one run of memory. Packing goes row by row in small chunks:
temporary memory stays under 64 MiB whatever the layer's size.

Shape letters: E experts, P parts, N output rows, K input columns, B K blocks.
"""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...errors import InputError
from ...formats.bnb4 import Bnb4
from ...formats.codecs import power_of_two, relative_e8m0, unpack_nibbles
from ...formats.fp8_block import Fp8Block
from ...formats.fp8_channel import Fp8Channel
from ...formats.fp8_tensor import Fp8Tensor
from ...formats.gguf import Gguf
from ...formats.int4_group import Int4Group
from ...formats.int_affine import Int4Affine, Int4Ordered, Int8Affine, Int8Ordered
from ...formats.mxfp4 import MxFp4
from ...formats.mxfp8 import MxFp8
from ...formats.nvfp4 import NvFp4
from ...formats.unquantised import Bf16, Fp16
from ...kernels import enums
from .layout import LANES, ROWS, Lanes, Layout, Rows
from .matrix import PackedMatrix

Integers = Int4Group | Int4Affine | Int8Affine | Int4Ordered | Int8Ordered

__all__ = [
    "add_projection_dim",
    "by_word",
    "column_order",
    "int4_scales",
    "pack_bnb4",
    "pack_fp8_block",
    "pack_fp8_rows",
    "pack_gguf",
    "pack_int",
    "pack_mx",
    "pack_nvfp4",
    "pack_plain",
]

_CHUNK = 1 << 20  # codes re-laid at a time
_LEAST = 2.0**-80


def pack_plain(payload: Bf16 | Fp16, bias: Tensor | None, *, half: bool = False) -> PackedMatrix:
    """Take values ``[E, P, N, K]`` as they are (copied only if not contiguous).

    half: bfloat16 becomes float16 over a power of two for each row, which is applied after the sum. Numbers below 2^-32
    of their row's largest are rounded, nothing else. Beside float16 without it, tokens do.
    """
    layout, values, row_scale = ROWS["plain"].of(payload.shape), payload.values, None
    if isinstance(payload, Fp16):
        layout = replace(layout, halved=not half)
    elif half:
        values = values.new_empty(payload.shape, dtype=torch.float16)
        row_scale = values.new_empty(payload.shape[:3], dtype=torch.float32)
        for own, rows, scale in zip(payload.values, values, row_scale, strict=True):
            # The largest of a row comes to lie between 2^14 and 2^15.
            power = (torch.frexp(own.abs().amax(-1).float()).exponent - 15).clamp(-126, 113)
            rows.copy_(own.float() * power_of_two(-power).unsqueeze(-1))
            scale.copy_(power_of_two(power))
    return PackedMatrix(layout=layout, values=values.contiguous(), row_scale=row_scale, bias=bias)


def pack_fp8_block(payload: Fp8Block, bias: Tensor | None, *, native: bool) -> PackedMatrix:
    """Native: take codes as they are, as E4M3 operands; otherwise re-lay them to be decoded to 16 bits.

    Blocks must be whole multiples of 128 x 128; their scales are repeated. Raises InputError for other blocks.
    """
    rows, columns = payload.block
    if rows % 128 or columns % 128:
        raise InputError(
            f"fp8_block: blocks of {payload.block} found, this kernel takes multiples of (128, 128); use the "
            "reference kernel for them"
        )
    layout = (ROWS if native else LANES)["fp8_block"].of(payload.shape)
    scales = payload.scales.float().repeat_interleave(rows // 128, dim=2).repeat_interleave(columns // 128, dim=3)
    scales = scales[:, :, : layout.scale_rows, : layout.k_blocks].contiguous()
    return PackedMatrix(layout=layout, values=_e4m3(payload.codes, layout), scale=scales, bias=bias)


def pack_fp8_rows(payload: Fp8Channel | Fp8Tensor, bias: Tensor | None, *, native: bool) -> PackedMatrix:
    """Take or re-lay codes like ``pack_fp8_block``; the one scale of a row is applied after the sum."""
    layout = (ROWS if native else LANES)["fp8_rows"].of(payload.shape)
    scale = payload.scale.unsqueeze(-1) if isinstance(payload, Fp8Tensor) else payload.scales
    row_scale = scale.float().expand(payload.shape[:3]).contiguous()
    return PackedMatrix(layout=layout, values=_e4m3(payload.codes, layout), row_scale=row_scale, bias=bias)


def pack_mx(payload: MxFp4 | MxFp8, bias: Tensor | None, *, half: bool = False) -> PackedMatrix:
    """Re-lay codes; E8M0 scales are relative to the largest of their row, which is applied after the sum.

    Lanes of MXFP8 decode to code times 2^-120, which the largest scale, 2^120, undoes. A group of MXFP4 below 2^-252 of
    its row's largest decodes to zero, and one below 2^-126 loses low bits: nothing else is rounded. Beside float16
    tokens (half) the largest scale is 2^15 and groups below 2^-24 of it lose low bits, of MXFP8 below 2^-22.
    """
    layout, eight = LANES[payload.name].of(payload.shape), isinstance(payload, MxFp8)
    relative, largest = relative_e8m0(payload.scales, 30 if half else 247 if eight else 253)
    # In float16 lanes decode to code times 2^-14, or 2^-8, of which 2^15 leaves 2 and 128.
    row_scale = largest / (1 if not half else 128 if eight else 2)
    values = _e4m3(payload.codes, layout) if eight else _lanes(payload.codes, layout, 0, _E2M1[half])
    return PackedMatrix(
        layout=layout, values=values, scale=_scale_words(relative, layout), row_scale=row_scale, bias=bias
    )


def pack_nvfp4(payload: NvFp4, bias: Tensor | None, *, half: bool = False) -> PackedMatrix:
    """Re-lay codes; E4M3 group scales stay as they are, the global scale is applied after the sum."""
    layout = LANES["nvfp4"].of(payload.shape)
    own = payload.global_scale.float()
    # Lanes decode to code times 2^-126 and group scales to scale times 2^117, in float16 (half) 2^-14 and 2^7.
    row_scale = (own.reciprocal() if payload.global_divides else own) * (128.0 if half else 512.0)
    row_scale = row_scale.unsqueeze(-1).expand(payload.shape[:3]).contiguous()
    values, scale = _lanes(payload.codes, layout, 0, _E2M1[half]), payload.scales.view(torch.uint8)
    return PackedMatrix(layout=layout, values=values, scale=_scale_words(scale, layout), row_scale=row_scale, bias=bias)


def pack_int(payload: Integers, bias: Tensor | None) -> PackedMatrix:
    """Re-lay codes; sums are in units of a group's scale, which is exact as ``_kept`` says.

    A zero point goes into the low byte of its scale, which a 16-bit number leaves free as a float32. Raises InputError
    when a group is no multiple of 32 columns (and not the whole row), and for zero points beside float32 scales.
    """
    words, dtype = int4_scales(payload)
    order = column_order(payload) if isinstance(payload, Int4Ordered | Int8Ordered) else None
    bits, zeros = (4, None) if isinstance(payload, Int4Group) else (payload.bits, payload.zeros)
    if zeros is not None and payload.scales.dtype == torch.float32:
        # By dtype, not by whether a zero point is found: all ranks of a layer pack alike.
        if bool((zeros != 1 << (bits - 1)).any()):
            raise InputError(
                f"{payload.name}: zero points beside float32 scales found, this kernel takes them beside scales of 16 "
                "bits; use the reference kernel for them"
            )
        zeros = None
    if zeros is not None:
        words, dtype = 4 if words > 1 else 1, torch.float32
    kind = enums.ZERO_SCALE if zeros is not None else enums.PAIR_SCALE if words == 2 else enums.GROUP_SCALE
    layout = replace(LANES[f"int{bits}"].of(payload.shape), scale_kind=kind, words=words, quartered=words > 1)
    experts, parts, n_out, _ = payload.shape
    scale = torch.empty((experts, parts, layout.k_blocks, words, n_out), dtype=dtype, device=payload.codes.device)
    for expert, target in enumerate(scale):
        target.copy_(by_word(payload, _kept(payload.scales[expert]), words, dtype).permute(0, 2, 3, 1))
        if zeros is not None:
            stored = target.view(torch.int32)
            stored |= by_word(payload, zeros[expert], words, torch.int32).permute(0, 2, 3, 1)

    def cleared(found: Tensor, at: tuple[int, int], here: slice) -> Tensor:
        zero = 1 << (bits - 1) if zeros is None else zeros[at][here]
        return _cleared(found, payload.scales[at][here], payload.group_size, zero)

    values = _lanes(payload.codes, layout, 8, _e4m3_lane if bits == 8 else _int4_lane, order, cleared=cleared)
    scale = scale if zeros is None else scale.view(torch.int32)
    return PackedMatrix(layout=layout, values=values, scale=scale, bias=bias, order=order)


def pack_bnb4(payload: Bnb4, bias: Tensor | None, *, half: bool = False) -> PackedMatrix:
    """Re-lay codes; a number of the table is the sum of two operands: 16 bits of it, 22 beside float16 tokens (half).

    A group's float32 product is multiplied by its scale, which is kept exactly.
    """
    size, (experts, parts, n_out, _) = payload.group_size, payload.shape
    layout = replace(LANES["table"].of(payload.shape), words=128 // max(32, min(64, size)))
    scale = payload.scales.new_empty((experts, parts, layout.k_blocks, layout.words, n_out))
    groups = torch.arange(layout.k_blocks * layout.words, device=scale.device) * (128 // layout.words) // size
    for own, target in zip(payload.scales, scale, strict=True):
        picked = own.index_select(-1, groups.clamp(max=own.shape[-1] - 1))
        target.copy_(picked.unflatten(-1, (layout.k_blocks, layout.words)).permute(0, 2, 3, 1))
    first = payload.table.to(torch.float16 if half else torch.bfloat16)
    terms = torch.stack(((payload.table - first.float()).to(first.dtype), first), dim=-1)
    values = _lanes(payload.codes, layout, 0, _int4_lane)
    return PackedMatrix(layout=layout, values=values, scale=scale, row_scale=terms.view(torch.int32)[..., 0], bias=bias)


def pack_gguf(payload: Gguf, bias: Tensor | None, *, half: bool = False) -> PackedMatrix:
    """Re-lay blocks of any kind as integers of four or eight bits, halves and steps kept exactly as they are.

    Without a second half, codes lose their zero; with one they are taken as they are. MXFP4 stays what it is.
    """
    kind, shape = payload.kind, payload.shape
    experts, parts, n_out, _ = shape
    if not kind.halves:
        packed = pack_mx(MxFp4.from_parts({".weight": payload.blocks}, storage="gguf", shape=shape), bias, half=half)
        return replace(packed, report=_stored(kind.title, packed.layout))
    two, stepped, eight = len(kind.halves) == 2, kind.steps is not None, kind.bits > 4
    layout = replace(
        LANES["int8" if eight else "int4"].of(shape),
        scale_kind=enums.STEP_SCALE if stepped else enums.HALF_SCALE,
        words=2 + two if stepped else 2 + 2 * two,
        block_k=64 if kind.title == "Q6_K" else 128,
        quartered=not (two and stepped),
    )
    scale = torch.empty(
        (experts, parts, layout.k_blocks, layout.words, n_out), dtype=torch.int32, device=payload.blocks.device
    )
    for matrix in range(experts * parts):
        at = divmod(matrix, parts)
        scale[at].copy_(_line_words(payload[at[0]][at[1]], layout).permute(1, 2, 0))
    middle = 8 if not eight else 32 if stepped else 128

    def codes(rows: Tensor) -> Tensor:
        found = kind.codes(rows.reshape(-1, kind.nbytes)).view(rows.shape[0], -1)
        if two and stepped:
            return found
        own, zero = _group_scales(replace(payload, blocks=rows)), kind.zero if two else middle
        return _cleared(found + (zero - kind.zero), own, found.shape[1] // own.shape[1], zero)

    values = _lanes(payload.blocks, layout, 0, _e4m3_lane if eight else _int4_lane, unpack=codes)
    return PackedMatrix(layout=layout, values=values, scale=scale, bias=bias, report=_stored(kind.title, layout))


def _stored(title: str, layout: Layout) -> str:
    return f"{title} in {layout.bits:g} bits a weight"


def _line_words(payload: Gguf, layout: Lanes) -> Tensor:
    """Return the scale words int32 ``[N, B, words]`` of blocks ``[N, ., bytes]``."""
    rows, blocks = payload.shape[0], layout.k_blocks
    halves, steps = payload.lines()
    kept = _kept(halves)
    if steps is None:
        return _filled_words(torch.cat((kept[:, :1], halves[:, 1:]), dim=1).view(rows, -1), layout)
    # A factor of zero leaves nothing of two halves' steps; with one half codes are cleared, and steps are factors too.
    steps = steps * (halves == kept).unsqueeze(1) if halves.shape[1] == 2 else steps + (steps == 0)
    # Steps of a second half are subtracted.
    first = functional.pad(kept, (0, 2 - kept.shape[1])) * kept.new_tensor([1, -1])
    words = first.view(torch.int32).view(rows, -1, 1).repeat_interleave(steps.shape[1] // 4, dim=1)
    own = (steps[..., half].contiguous().view(torch.int32).view(rows, -1, 1) for half in range(steps.shape[2]))
    return torch.cat((words, *own), dim=-1)[:, :blocks]


def _group_scales(payload: Gguf) -> Tensor:
    """Return the float32 scales ``[N, G]`` of blocks ``[N, ., bytes]``."""
    halves, steps = payload.lines()
    return (halves[:, :1].float() * (1 if steps is None else steps[..., 0])).view(payload.blocks.shape[0], -1)


def _kept(scales: Tensor) -> Tensor:
    """Return scales, 1 for those up to 2^-80, which are no unit for a sum: their codes are zero (``_cleared``)."""
    return torch.where(scales.abs() <= _LEAST, 1.0, scales)


def _cleared(codes: Tensor, scales: Tensor, size: int, zero: Tensor | int) -> Tensor:
    """Return codes ``[n, K]``, with ``zero`` in groups of ``size`` columns whose scale of ``[n, G]`` is no unit."""
    gone = scales.abs() <= _LEAST
    if not bool(gone.any()):
        return codes
    zeros = torch.as_tensor(zero, device=codes.device).to(codes.dtype).expand_as(gone)
    gone, zeros = (each.repeat_interleave(size, dim=-1)[:, : codes.shape[1]] for each in (gone, zeros))
    return torch.where(gone, zeros, codes)


def _filled_words(scales: Tensor, layout: Lanes) -> Tensor:
    """Return scales ``[N, any]`` as int32 ``[N, B, words]``, filled with ones."""
    short = layout.k_blocks * layout.words * 4 // scales.element_size() - scales.shape[1]
    padded = functional.pad(scales, (0, short), value=1.0).contiguous()
    return padded.view(torch.int32).view(-1, layout.k_blocks, layout.words)


def column_order(payload: Int4Ordered | Int8Ordered) -> Tensor:
    """Return which column of ``payload [E, P, N, K]`` each place holds once groups lie side by side, int32 ``[E, K]``.

    Raises InputError for groups of other sizes, and for parts in different orders.
    """
    order = payload.group_of.argsort(dim=-1, stable=True)
    found = payload.group_of.gather(-1, order)
    place = torch.arange(order.shape[-1], device=order.device)
    if bool((found != place // payload.group_size).any()) or bool((order != order[:, :1]).any()):
        raise InputError(
            f"{payload.name}: found groups of other sizes than {payload.group_size}, or gate and up in orders of their "
            "own; this kernel takes whole matrices in one order, use the reference kernel for others"
        )
    return order[:, 0].to(torch.int32).contiguous()


def int4_scales(payload: Integers) -> tuple[int, torch.dtype]:
    """Return how the scales of a row and K block of 128 columns are stored: how many words, and their dtype.

    One float32, or one for each quarter of the block: four float32, or two int32 of two bfloat16 scales each. Raises
    InputError when a group is no multiple of 32 columns (and not the whole row).
    """
    size, columns = payload.group_size, payload.shape[-1]
    if size % 32 and size < columns:
        raise InputError(
            f"{payload.name}: groups of {size} columns found, this kernel takes multiples of 32 or whole rows; use the "
            "reference kernel for them"
        )
    if size % 128 == 0 or size >= columns:
        return 1, torch.float32
    pairs = payload.scales.dtype == torch.bfloat16 and not isinstance(payload, Int8Affine | Int8Ordered)
    return (2, torch.int32) if pairs else (4, torch.float32)


def by_word(payload: Integers, scales: Tensor, words: int, dtype: torch.dtype) -> Tensor:
    """Return ``[..., B, words]`` for rows ``[..., G]`` of the payload's scales, stored as ``int4_scales`` says."""
    blocks, each = -(-payload.shape[-1] // 128), 1 if words == 1 else 4
    index = torch.arange(blocks * each, device=scales.device) * (128 // each) // payload.group_size
    picked = scales.index_select(-1, index.clamp(max=scales.shape[-1] - 1))
    stored = picked.contiguous().view(torch.int32) if words == 2 else picked.to(dtype)
    return stored.unflatten(-1, (blocks, words))


def add_projection_dim(payload: Any) -> Any:
    """Return a payload ``[E, N, K]`` as ``[E, 1, N, K]`` without copying."""
    experts, *matrix = payload.shape
    tensors = {name: tensor.unsqueeze(1) for name, tensor in payload.tensors().items()}
    return replace(payload, shape=(experts, 1, *matrix), **tensors)


def _e4m3(codes: Tensor, layout: Rows | Lanes) -> Tensor:
    """Return codes as they are, or as lanes."""
    if isinstance(layout, Rows):
        return codes.contiguous()
    return _lanes(codes.view(torch.uint8), layout, 0, _e4m3_lane)


def _scale_words(scales: Tensor, layout: Lanes) -> Tensor:
    """Return scale bytes ``[E, P, N, G]`` as int32 ``[E, P, B, 1, N]``, the four of a K block in a word."""
    experts, parts, n_out, stored = scales.shape
    blocks = layout.k_blocks
    out = torch.empty((experts, parts, blocks, 1, n_out), dtype=torch.int32, device=scales.device)
    for expert in range(experts):
        padded = functional.pad(scales[expert], (0, 4 * blocks - stored))
        out[expert, :, :, 0] = padded.contiguous().view(torch.int32).transpose(-1, -2)
    return out


def _lanes(
    codes: Tensor,
    layout: Lanes,
    zero: int,
    lane: Callable[[Tensor], Tensor],
    order: Tensor | None = None,
    unpack: Callable[[Tensor], Tensor] | None = None,
    cleared: Callable[[Tensor, tuple[int, int], slice], Tensor] | None = None,
) -> Tensor:
    """Return int16 lanes of nibbles ``codes [E, P, N, bytes]``, low nibble first, or of bytes ``[E, P, N, K]``.

    order: ``[E, K]``, which column goes to each place; None: its own. unpack: of codes ``[n, ...]`` stored otherwise,
    bytes ``[n, any]``. cleared: of bytes ``[n, K]``, in the order of order, of which rows of which expert and part.
    """
    unpack = unpack or (unpack_nibbles if layout.code_bits == 4 else torch.Tensor.contiguous)
    experts, parts, n_out, k_in = layout.shape
    blocks, block_k = layout.k_blocks, layout.block_k
    out = torch.empty(layout.values_shape, dtype=layout.stored, device=codes.device)
    step = max(1, _CHUNK // (blocks * block_k))
    for matrix in range(experts * parts):
        at = divmod(matrix, parts)
        source, target = codes[at], out[at]
        for start in range(0, n_out, step):
            here = slice(start, start + step)
            rows = unpack(source[here])[:, :k_in]
            rows = rows if order is None else rows.index_select(1, order[at[0]])
            rows = rows if cleared is None else cleared(rows, at, here)
            padded = functional.pad(rows, (0, blocks * block_k - k_in), value=zero)
            quarters = padded.view(-1, blocks, 4, block_k // 4).to(torch.int32)
            target[:, here] = lane(quarters).to(torch.int16).transpose(0, 1)
    if prod(out.shape) == 0:
        raise InputError(f"packing: a weight of shape {layout.shape} is empty, allowed: at least one row and column")
    return out


def _e2m1_lane(codes: Tensor) -> Tensor:
    a, b, c, d = codes.unbind(2)
    lane = ((a & 8) << 12) | ((a & 7) << 6) | ((b & 8) << 9) | ((b & 7) << 3) | ((c & 8) << 6) | (c & 7)
    return lane | ((d & 8) << 11) | ((d & 4) << 11) | ((d & 3) << 10)


def _e2m1_half_lane(codes: Tensor) -> Tensor:
    a, b, c, d = codes.unbind(2)
    signs = ((a & 8) << 12) | ((b & 8) << 9) | ((c & 8) << 11) | ((d & 8) << 10)
    return signs | ((a & 7) << 9) | ((b & 7) << 6) | ((c & 7) << 3) | (d & 7)


_E2M1 = (_e2m1_lane, _e2m1_half_lane)  # beside bfloat16, and beside float16


def _e4m3_lane(codes: Tensor) -> Tensor:
    a, b, c, d = codes.unbind(2)
    return torch.cat((a | (b << 8), c | (d << 8)), dim=-1)


def _int4_lane(codes: Tensor) -> Tensor:
    a, b, c, d = codes.unbind(2)
    return a | (b << 4) | (c << 8) | (d << 12)
