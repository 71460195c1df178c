"""Whether the weights a layer is built from are those its spec describes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from .formats.payload import Payload
    from .types import ExpertWeights, LatentWeights, MoESpec, RouterWeights, SharedWeights

__all__ = ["check_extras", "check_weights"]


def check_weights(weights: ExpertWeights[Payload], spec: MoESpec) -> None:
    """Compare shapes, formats and biases of experts with the spec; raises InputError."""
    experts, parts = spec.num_experts, spec.gate_up_parts
    wide, hidden = spec.intermediate_size, spec.expert_hidden_size
    wanted = {"gate_up": (experts, parts, wide, hidden), "down": (experts, hidden, wide)}
    for name, shape in wanted.items():
        payload: Payload = getattr(weights, name)
        if payload.shape != shape:
            raise InputError(
                f"{name}: the payload's logical shape is {payload.shape}, the spec needs {shape} "
                f"(E={experts}, P={parts}, I={wide}, H={hidden})"
            )
        if payload.name != spec.weight_format:
            raise InputError(f"{name}: the payload is {payload.name}, the spec says {spec.weight_format}")
    biases = {"gate_up_bias": (experts, parts, wide), "down_bias": (experts, hidden)}
    for name, shape in biases.items():
        bias: Tensor | None = getattr(weights, name)
        found = None if bias is None else tuple(bias.shape)
        allowed = shape if spec.expert_bias else None
        if found != allowed:
            raise InputError(
                f"{name}: found {found or 'none'}, the spec (expert_bias={spec.expert_bias}) needs {allowed or 'none'}"
            )


def check_extras(
    spec: MoESpec,
    router: RouterWeights | None,
    shared: SharedWeights[Payload] | None,
    latent: LatentWeights | None,
) -> None:
    """Compare what a layer is given beside its experts with the spec; raises InputError."""
    for name, asked, given in (
        ("shared", spec.shared is not None, shared is not None),
        ("latent", spec.latent_size is not None, latent is not None),
    ):
        if asked != given:
            needs = "needs" if asked else "has no place for"
            raise InputError(f"{name}: the spec {needs} {name} weights, they were {'given' if given else 'not given'}")
    if spec.shared is not None and shared is not None and (shared.gate is not None) != spec.shared.gated:
        raise InputError(
            f"shared: gate {'given' if shared.gate is not None else 'missing'}, spec gated={spec.shared.gated}"
        )
    if router is None:
        return
    if tuple(router.weight.shape) != (spec.num_experts, spec.hidden_size):
        raise InputError(
            f"router: weight has shape {tuple(router.weight.shape)}, the spec needs "
            f"({spec.num_experts}, {spec.hidden_size})"
        )
    if (router.correction_bias is not None) != spec.routing.correction_bias:
        raise InputError(
            f"router: correction bias {'given' if router.correction_bias is not None else 'missing'}, the spec says "
            f"correction_bias={spec.routing.correction_bias}"
        )
