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
    rule, e, d, h = spec.routing, spec.num_experts, spec.hidden_size, spec.expert_hidden_size
    if spec.shared is not None and shared is not None:
        _check_tensor(
            "shared", "gate", shared.gate, (1, d) if spec.shared.gated else None, f"gated={spec.shared.gated}"
        )
    if latent is not None:
        _check_tensor("latent", "down", latent.down, (h, d), f"latent_size={h}")
        _check_tensor("latent", "up", latent.up, (d, h), f"latent_size={h}")
        if latent.norm is not None or spec.latent_norm_eps is not None:
            _check_tensor("latent", "norm", latent.norm, (h,), f"latent_norm_eps={spec.latent_norm_eps}")
    if router is None:
        return
    _check_tensor("router", "weight", router.weight, (e, d), f"num_experts={e}, hidden_size={d}")
    if router.bias is not None:
        _check_tensor("router", "bias", router.bias, (e,), f"num_experts={e}")
    flag, wanted = rule.correction_bias, (e,) if rule.correction_bias else None
    _check_tensor("router", "correction bias", router.correction_bias, wanted, f"correction_bias={flag}")
    wanted = (e,) if rule.expert_scale else None
    _check_tensor("router", "expert scale", router.expert_scale, wanted, f"expert_scale={rule.expert_scale}")
    table = router.hash_table
    rows = 1 if table is None or table.dim() != 2 else table.shape[0]
    wanted = (rows, rule.top_k) if rule.hash_routing else None
    _check_tensor("router", "hash table", table, wanted, f"hash_routing={rule.hash_routing}, top_k={rule.top_k}")


def _check_tensor(whose: str, name: str, tensor: Tensor | None, wanted: tuple[int, ...] | None, says: str) -> None:
    found = None if tensor is None else tuple(tensor.shape)
    if found is None and wanted is not None:
        raise InputError(f"{whose}: {name} missing, the spec says {says}; give one of shape {wanted}")
    if found != wanted:
        raise InputError(
            f"{whose}: {name} has shape {found}, the spec ({says}) needs {wanted or 'none'}; give what the spec says"
        )
