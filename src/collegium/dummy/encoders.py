"""Encoders for read-only formats (GPTQ, AWQ, GGUF, bitsandbytes), for benchmarks with random weights."""

from dataclasses import replace
from functools import partial
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..formats import Bnb4, Gguf, Int4Affine, Int4Ordered, Int8Affine, Int8Ordered
from ..formats.codecs import in_groups, pack_nibbles, unpack_nibbles
from ..formats.gguf import KINDS

__all__ = ["ENCODERS", "affine", "nf4", "ordered", "q4_k", "q8_0", "random_blocks", "write_half"]

# The quantiles of a normal distribution that bitsandbytes uses (``functional.py``).
_NF4_TABLE = (
    -1.0,
    -0.6961928,
    -0.52507305,
    -0.3949175,
    -0.28444138,
    -0.18477343,
    -0.091050036,
    0.0,
    0.0795803,
    0.1609302,
    0.2461123,
    0.33791524,
    0.44070983,
    0.562617,
    0.72295684,
    1.0,
)


def affine(weight: Tensor, bits: int, group: int = 128, dtype: torch.dtype = torch.float16) -> Int4Affine | Int8Affine:
    """Encode ``weight [..., N, K]`` as integers with a scale (in ``dtype``) and a zero point per group."""
    columns = weight.shape[-1]
    max_code = (1 << bits) - 1
    groups = in_groups(weight.float(), min(group, columns))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / max_code).clamp(min=1e-6).to(dtype)
    zeros = (-low / scales.float()).round().clamp(0, max_code)
    codes = (groups / scales.float().unsqueeze(-1) + zeros.unsqueeze(-1)).round().clamp(0, max_code)
    kind = Int4Affine if bits == 4 else Int8Affine
    return kind(
        shape=tuple(weight.shape),
        codes=_pack(codes.to(torch.uint8).flatten(-2)[..., :columns], bits),
        scales=scales,
        zeros=zeros.to(torch.uint8),
        group_size=min(group, columns),
    )


def ordered(weight: Tensor, bits: int, group: int = 128, seed: int = 0) -> Int4Ordered | Int8Ordered:
    """Encode ``weight [..., N, K]`` as ``affine`` does, with columns assigned to groups in a random order."""
    columns = weight.shape[-1]
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(seed)).to(weight.device)
    plain = affine(weight[..., order], bits, group)
    codes = (unpack_nibbles(plain.codes) if bits == 4 else plain.codes)[..., order.argsort()]
    group_of = (order.argsort() // plain.group_size).int().expand(*weight.shape[:-2], columns).contiguous()
    kind: Any = Int4Ordered if bits == 4 else Int8Ordered
    tensors = replace(plain, codes=_pack(codes, bits)).tensors()
    return kind(shape=plain.shape, group_size=plain.group_size, group_of=group_of, **tensors)


def q4_k(weight: Tensor) -> Gguf:
    """Encode ``weight [..., N, K]`` in Q4_K blocks: 256 columns in runs of 32, each with a 6-bit scale and minimum."""
    columns = weight.shape[-1]
    runs = functional.pad(weight.float(), (0, -columns % 256)).unflatten(-1, (-1, 8, 32))
    low = runs.amin(-1).clamp(max=0)
    scales_minima = torch.stack(((runs.amax(-1) - low) / 15, -low), dim=-1)  # [..., blocks, 8, 2]
    block_scales = (scales_minima.amax(-2) / 63).half()
    units = block_scales.float().clamp(min=1e-7).unsqueeze(-2)
    steps = (scales_minima / units).round().clamp(0, 63)
    scales, minima = (steps * units).unsqueeze(-2).unbind(-1)
    codes = ((runs + minima) / scales.clamp(min=1e-7)).round().clamp(0, 15).to(torch.uint8)
    # Twelve bytes: the 6-bit steps of runs 0 to 3 with the upper bits of runs 4 to 7, then the latter's lower bits.
    first, last = steps.to(torch.uint8).split(4, dim=-2)
    upper = first | last >> 4 << 6
    lower = ((last & 15) << torch.tensor([0, 4], device=weight.device)).sum(-1)
    even, odd = codes.unflatten(-2, (4, 2)).unbind(-2)
    nibbles = (even | odd << 4).flatten(-2)
    parts = (block_scales.view(torch.uint8), *upper.unbind(-1), lower, nibbles)
    return Gguf(shape=tuple(weight.shape), blocks=torch.cat([part.to(torch.uint8) for part in parts], dim=-1))


def q8_0(weight: Tensor) -> Gguf:
    """Encode ``weight [..., N, K]`` in Q8_0 blocks: the maximum of each run of 32 becomes 127."""
    runs = in_groups(functional.pad(weight.float(), (0, -weight.shape[-1] % 32)), 32)
    halves = (runs.abs().amax(-1, keepdim=True) / 127).half()
    codes = (runs / halves.float().clamp(min=1e-7)).round().clamp(-127, 127).to(torch.int8)
    blocks = torch.cat((halves.view(torch.uint8), codes.view(torch.uint8)), dim=-1)
    return Gguf(shape=tuple(weight.shape), blocks=blocks)


def random_blocks(title: str, weight: Tensor) -> Gguf:
    """Return random GGUF blocks of the kind ``title`` in the shape and on the device of ``weight``, with small values.

    Codes and steps are any bytes; block scales are normally distributed.
    """
    kind = KINDS[title]
    shape, device = tuple(weight.shape), weight.device
    count = -(-shape[-1] // kind.elements)
    blocks = torch.randint(0, 256, (*shape[:-1], count, kind.nbytes), dtype=torch.uint8, device=device)
    for index in range(kind.terms):
        halves = torch.randn(blocks.shape[:-1], device=device) / (4000 if kind.steps else 200)
        write_half(title, blocks, index, halves)
    if not kind.terms:
        blocks[..., 0] = 119  # E8M0
    return Gguf(shape=shape, blocks=blocks, title=title)


def write_half(title: str, blocks: Tensor, index: int, half: Tensor) -> None:
    """Write ``half [...]``, rounded to float16, as number ``index`` of blocks ``[..., bytes]`` of a kind, in place."""
    kind = KINDS[title]
    raw = half.half().expand(blocks.shape[:-1]).unsqueeze(-1).contiguous().view(torch.uint8)
    if kind.read_half is None:
        blocks[..., kind.halves[index] : kind.halves[index] + 2] = raw
        return
    # IQ1_M has four bits of it in the upper bits of every second byte of the last eight.
    four = torch.stack((raw & 15, raw >> 4), dim=-1).flatten(-2)
    blocks[..., 49::2] = (blocks[..., 49::2] & 15) | (four << 4)


def nf4(weight: Tensor) -> Bnb4:
    """Encode ``weight [..., N, K]`` in NF4: the nearest table entry, times the maximum of 64 columns."""
    columns = weight.shape[-1]
    group_size = gcd(64, columns)
    groups = in_groups(weight.float(), group_size)
    table = torch.tensor(_NF4_TABLE, device=weight.device)
    scales = groups.abs().amax(-1)
    nearest = torch.bucketize(groups / scales.clamp(min=1e-9).unsqueeze(-1), (table[1:] + table[:-1]) / 2)
    return Bnb4(
        shape=tuple(weight.shape),
        codes=_pack(nearest.to(torch.uint8).flatten(-2)[..., :columns], 4),
        scales=scales,
        table=table.expand(*weight.shape[:-2], 16).contiguous(),
        group_size=group_size,
    )


# By name of the format; for GGUF the most common block type.
ENCODERS = {
    Int4Affine.name: partial(affine, bits=4),
    Int8Affine.name: partial(affine, bits=8),
    Int4Ordered.name: partial(ordered, bits=4),
    Int8Ordered.name: partial(ordered, bits=8),
    Gguf.name: q4_k,
    Bnb4.name: nf4,
}


def _pack(codes: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return codes.contiguous()
    return pack_nibbles(functional.pad(codes, (0, codes.shape[-1] % 2)))
