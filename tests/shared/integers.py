"""Experts in integers as GPTQ, AWQ and GGUF publish them, made of given weights, and GGUF blocks of random bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from collegium.dummy import encoders as integers
from collegium.dummy.encoders import ENCODERS, affine, write_half
from collegium.encoding import encode_experts
from collegium.formats import Gguf
from collegium.formats.gguf import KINDS

if TYPE_CHECKING:
    from torch import Tensor

    from collegium.types import ExpertWeights

__all__ = ["affine", "encoded", "ordered", "random_blocks"]


def ordered(weight: Tensor, bits: int, group: int) -> Any:
    """Return ``weight [E, ..., N, K]`` as GPTQ leaves it with ``desc_act``: a random order for each expert."""
    payload: Any = None
    for expert, own in enumerate(weight):
        one = integers.ordered(own, bits, group, seed=expert)
        payload = one.repeated(len(weight)) if payload is None else payload
        payload.put(expert, one)
    return payload


def encoded(plain: ExpertWeights[Any], name: str, group: int = 128) -> ExpertWeights[Any]:
    """Return the experts in the format ``name``, in those integers too that are only read."""
    if name not in ENCODERS:
        return encode_experts(plain, name)
    whole: dict[str, Any] = {"gguf": integers.q4_k, "bnb4": integers.nf4}
    kind: Any = whole.get(name) or (affine if name.endswith("_affine") else ordered)
    given = () if name in whole else (int(name[3]), group)
    gate_up, down = (kind(part.decode(), *given) for part in (plain.gate_up, plain.down))
    return replace(plain, gate_up=gate_up, down=down)


def random_blocks(name: str, *shape: int) -> Gguf:
    """Return blocks of a kind whose codes and steps are any bytes; halves give weights of about ``K ** -0.5``."""
    kind, columns = KINDS[name], shape[-1]
    blocks = torch.randint(0, 256, (*shape[:-1], -(-columns // kind.elements), kind.nbytes), dtype=torch.uint8)
    wide = 2 ** (kind.bits - 1) if kind.numbers is None else float(kind.values.abs().max())
    wide = 2 if name == "Q2_K" else wide
    level = columns**-0.5 / wide / (1 if kind.steps is None else 64 if kind.bits == 6 else 32)
    for index, size in zip(range(kind.terms), (level, level * wide), strict=False):
        write_half(name, blocks, index, torch.randn(blocks.shape[:-1]) * size)
    if not kind.terms:
        blocks[..., 0] = torch.randint(118, 122, blocks.shape[:-1])
    return Gguf(shape=shape, blocks=blocks, title=name)
