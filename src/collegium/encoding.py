"""Experts in another weight format."""

from dataclasses import replace

from .formats import by_name
from .formats.payload import Payload
from .types import ExpertWeights

__all__ = ["encode_experts", "encoded"]


def encode_experts(weights: ExpertWeights[Payload], weight_format: str) -> ExpertWeights[Payload]:
    """Encode every expert into ``weight_format``, one expert at a time; biases stay as they are.

    A projection that has the format keeps its bits. Raises SpecError for an unknown format name.
    """
    target = by_name(weight_format)
    return replace(weights, gate_up=_encode(weights.gate_up, target), down=_encode(weights.down, target))


def encoded(weights: ExpertWeights[Payload], weight_format: str | None) -> ExpertWeights[Payload]:
    """Return ``weights`` in ``weight_format``: encoded unless both projections have it, or it is None."""
    if weight_format is None or weights.gate_up.name == weights.down.name == weight_format:
        return weights
    return encode_experts(weights, weight_format)


def _encode(source: Payload, target: type[Payload]) -> Payload:
    if source.name == target.name:
        return source
    first = target.encode(source[0].decode())
    out = first.repeated(source.shape[0])
    for expert in range(source.shape[0]):
        out.put(expert, target.encode(source[expert].decode()))
    return out
