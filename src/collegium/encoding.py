"""Experts in another weight format."""

from dataclasses import replace

from .formats import by_name
from .formats.payload import Payload
from .types import ExpertWeights

__all__ = ["encode_experts"]


def encode_experts(weights: ExpertWeights[Payload], weight_format: str) -> ExpertWeights[Payload]:
    """Encode every expert into ``weight_format``, one expert at a time; biases stay as they are.

    Raises SpecError for an unknown format name.
    """
    target = by_name(weight_format)
    return replace(weights, gate_up=_encode(weights.gate_up, target), down=_encode(weights.down, target))


def _encode(source: Payload, target: type[Payload]) -> Payload:
    first = target.encode(source[0].decode())
    out = first.repeated(source.shape[0])
    for expert in range(source.shape[0]):
        out.put(expert, target.encode(source[expert].decode()))
    return out
