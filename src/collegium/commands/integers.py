"""Weights as GPTQ, AWQ and GGUF files have them, for measurements: formats that are only read have no encoder."""

from dataclasses import replace
from functools import partial
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..formats import Bnb4, Gguf, Int4Affine, Int4Ordered, Int8Affine, Int8Ordered
from ..formats.codecs import in_groups, pack_nibbles, unpack_nibbles

__all__ = ["ENCODERS", "affine", "nf4", "ordered", "q4_k", "q8_0"]

# The quantiles of a normal distribution that bitsandbytes has (``functional.py``).
_nf4 = [-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0]
_nf4 += [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]


def affine(weight: Tensor, bits: int, group: int = 128, dtype: torch.dtype = torch.float16) -> Int4Affine | Int8Affine:
    """Return ``weight [..., N, K]`` in integers: each group's range over all codes, scales in ``dtype``."""
    columns, most = weight.shape[-1], (1 << bits) - 1
    groups = in_groups(weight.float(), min(group, columns))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / most).clamp(min=1e-6).to(dtype)
    zeros = (-low / scales.float()).round().clamp(0, most)
    codes = (groups / scales.float().unsqueeze(-1) + zeros.unsqueeze(-1)).round().clamp(0, most)
    kind = Int4Affine if bits == 4 else Int8Affine
    return kind(
        shape=tuple(weight.shape),
        codes=_packed(codes.to(torch.uint8).flatten(-2)[..., :columns], bits),
        scales=scales,
        zeros=zeros.to(torch.uint8),
        group_size=min(group, columns),
    )


def ordered(weight: Tensor, bits: int, group: int = 128, seed: int = 0) -> Int4Ordered | Int8Ordered:
    """Return ``weight [..., N, K]`` with columns that one random order assigns to groups."""
    columns = weight.shape[-1]
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(seed)).to(weight.device)
    plain = affine(weight[..., order], bits, group)
    codes = (unpack_nibbles(plain.codes) if bits == 4 else plain.codes)[..., order.argsort()]
    group_of = (order.argsort() // plain.group_size).int().expand(*weight.shape[:-2], columns).contiguous()
    kind: Any = Int4Ordered if bits == 4 else Int8Ordered
    tensors = replace(plain, codes=_packed(codes, bits)).tensors()
    return kind(shape=plain.shape, group_size=plain.group_size, group_of=group_of, **tensors)


def q4_k(weight: Tensor) -> Gguf:
    """Return ``weight [..., N, K]`` in blocks of Q4_K: the range of each run of 32, in steps of the block's largest."""
    columns = weight.shape[-1]
    runs = functional.pad(weight.float(), (0, -columns % 256)).unflatten(-1, (-1, 8, 32))
    low = runs.amin(-1).clamp(max=0)
    lines = torch.stack(((runs.amax(-1) - low) / 15, -low), dim=-1)
    halves = (lines.amax(-2) / 63).half()
    units = halves.float().clamp(min=1e-7).unsqueeze(-2)
    steps = (lines / units).round().clamp(0, 63)
    scales, minima = (steps * units).unsqueeze(-2).unbind(-1)
    codes = ((runs + minima) / scales.clamp(min=1e-7)).round().clamp(0, 15).to(torch.uint8)
    first, last = steps.to(torch.uint8).split(4, dim=-2)
    six = torch.cat((first | last >> 4 << 6, (last & 15) << torch.tensor([0, 4], device=weight.device)), dim=-2)
    twelve = (*six[..., :4, :].unbind(-1), six[..., 4:, :].sum(-1))
    low, high = codes.unflatten(-2, (4, 2)).unbind(-2)
    parts = (halves.view(torch.uint8), *twelve, (low | high << 4).flatten(-2))
    return Gguf(shape=tuple(weight.shape), blocks=torch.cat([part.to(torch.uint8) for part in parts], dim=-1))


def q8_0(weight: Tensor) -> Gguf:
    """Return ``weight [..., N, K]`` in blocks of Q8_0: the largest of each run of 32 becomes 127."""
    runs = in_groups(functional.pad(weight.float(), (0, -weight.shape[-1] % 32)), 32)
    halves = (runs.abs().amax(-1, keepdim=True) / 127).half()
    codes = (runs / halves.float().clamp(min=1e-7)).round().clamp(-127, 127).to(torch.int8)
    return Gguf(
        shape=tuple(weight.shape), blocks=torch.cat([part.view(torch.uint8) for part in (halves, codes)], dim=-1)
    )


def nf4(weight: Tensor) -> Bnb4:
    """Return ``weight [..., N, K]`` as codes of the nearest number of NF4 times the largest of 64 columns."""
    (*lead, columns), size = weight.shape, gcd(64, weight.shape[-1])
    groups, table = in_groups(weight.float(), size), torch.tensor(_nf4, device=weight.device)
    scales = groups.abs().amax(-1)
    near = torch.bucketize(groups / scales.clamp(min=1e-9).unsqueeze(-1), (table[1:] + table[:-1]) / 2)
    codes = _packed(near.to(torch.uint8).flatten(-2)[..., :columns], 4)
    numbers = table.expand(*lead[:-1], 16).contiguous()
    return Bnb4(shape=tuple(weight.shape), codes=codes, scales=scales, table=numbers, group_size=size)


# By the name of the format; of GGUF the commonest kind.
ENCODERS = {
    Int4Affine.name: partial(affine, bits=4),
    Int8Affine.name: partial(affine, bits=8),
    Int4Ordered.name: partial(ordered, bits=4),
    Int8Ordered.name: partial(ordered, bits=8),
    Gguf.name: q4_k,
    Bnb4.name: nf4,
}


def _packed(codes: Tensor, bits: int) -> Tensor:
    return pack_nibbles(functional.pad(codes, (0, codes.shape[-1] % 2))) if bits == 4 else codes.contiguous()
