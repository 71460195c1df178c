"""Experts in integers with zero points as GPTQ and AWQ publish them, made of given weights."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from collegium.commands import integers
from collegium.commands.integers import ENCODERS, affine
from collegium.encoding import encode_experts

if TYPE_CHECKING:
    from torch import Tensor

    from collegium.types import ExpertWeights

__all__ = ["affine", "encoded", "ordered"]


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
    kind: Any = affine if name.endswith("_affine") else ordered
    gate_up, down = (kind(part.decode(), int(name[3]), group) for part in (plain.gate_up, plain.down))
    return replace(plain, gate_up=gate_up, down=down)
