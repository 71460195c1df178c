"""Integers with zero points as GPTQ and AWQ publish them, made of given weights."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from collegium.encoding import encode_experts
from collegium.formats import Int4Affine, Int4Ordered, Int8Affine, Int8Ordered
from collegium.formats.codecs import in_groups, pack_nibbles, unpack_nibbles

if TYPE_CHECKING:
    from torch import Tensor

    from collegium.types import ExpertWeights

__all__ = ["affine", "encoded", "ordered"]


def affine(weight: Tensor, bits: int, group: int, dtype: torch.dtype = torch.float16) -> Any:
    """Return ``weight [..., N, K]`` as Int4Affine or Int8Affine: each group's range over all codes."""
    columns = weight.shape[-1]
    group = min(group, columns)
    groups = in_groups(weight.float(), group)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / ((1 << bits) - 1)).clamp(min=1e-6).to(dtype)
    zeros = (-low / scales.float()).round().clamp(0, (1 << bits) - 1)
    codes = groups / scales.float().unsqueeze(-1) + zeros.unsqueeze(-1)
    codes = codes.round().clamp(0, (1 << bits) - 1).to(torch.uint8).flatten(-2)[..., :columns]
    stored = pack_nibbles(torch.nn.functional.pad(codes, (0, columns % 2))) if bits == 4 else codes.contiguous()
    kind: Any = Int4Affine if bits == 4 else Int8Affine
    shape = tuple(weight.shape)
    return kind(shape=shape, codes=stored, scales=scales, zeros=zeros.to(torch.uint8), group_size=group)


def ordered(weight: Tensor, bits: int, group: int, seed: int = 0) -> Any:
    """Return ``weight [E, P, N, K]`` or ``[E, N, K]`` as GPTQ leaves it with ``desc_act``: a random order an expert."""
    experts, columns = weight.shape[0], weight.shape[-1]
    made = torch.Generator().manual_seed(seed)
    group_of = torch.empty(experts, columns, dtype=torch.int32)
    payload: Any = None
    for expert, own in enumerate(weight):
        order = torch.randperm(columns, generator=made)
        one = affine(own[..., order], bits, group)
        codes = (unpack_nibbles(one.codes) if bits == 4 else one.codes)[..., order.argsort()]
        one = replace(one, codes=pack_nibbles(codes) if bits == 4 else codes)
        group_of[expert, order] = (torch.arange(columns) // one.group_size).int()
        payload = one.repeated(experts) if payload is None else payload
        payload.put(expert, one)
    kind: Any = Int4Ordered if bits == 4 else Int8Ordered
    every = group_of if weight.dim() == 3 else group_of[:, None].repeat(1, weight.shape[1], 1)
    fields = {name: getattr(payload, name) for name in ("shape", "codes", "scales", "zeros", "group_size")}
    return kind(**fields, group_of=every)


def encoded(plain: ExpertWeights[Any], name: str, group: int = 128) -> ExpertWeights[Any]:
    """Return the experts in the format ``name``, in those that are only read too."""
    if not name.endswith(("_affine", "_ordered")):
        return encode_experts(plain, name)
    kind: Any = affine if name.endswith("_affine") else ordered
    gate_up, down = (kind(part.decode(), int(name[3]), group) for part in (plain.gate_up, plain.down))
    return replace(plain, gate_up=gate_up, down=down)
