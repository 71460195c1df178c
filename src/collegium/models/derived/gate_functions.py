"""Recognise the activation of an experts module of transformers by its values on a grid of inputs."""

from typing import Any

import torch

from ...errors import SpecError
from ...ops.activation import activate
from ...types import ActivationSpec

__all__ = ["activation_of"]


def activation_of(module: Any) -> ActivationSpec:
    """Return the first activation that reproduces the module's gate function on a grid of inputs.

    module: experts of transformers, with ``has_gate`` and ``_apply_gate`` or ``act_fn``. Raises SpecError if none does.
    """
    candidates = _candidates(module)
    for candidate in candidates:
        if _reproduces(module, candidate):
            return candidate
    names = ", ".join(f"{candidate.kind}(limit={candidate.limit})" for candidate in candidates)
    raise SpecError(
        f"{type(module).__name__}: its gate function matches none of the activations tried ({names}); "
        "build a MoELayer with the right ActivationSpec and attach() it"
    )


def _candidates(module: Any) -> list[ActivationSpec]:
    if not module.has_gate:
        return [ActivationSpec(kind=kind) for kind in ("relu2", "silu", "gelu")]
    candidates = [ActivationSpec(kind=kind) for kind in ("swiglu", "geglu", "geglu_tanh")]
    alpha = float(getattr(module, "alpha", None) or 1.702)
    limits = (getattr(module, "limit", None), getattr(module, "swiglu_limit", None))
    for limit in {float(limit) for limit in limits if limit}:
        candidates.append(ActivationSpec(kind="swiglu", limit=limit))
        candidates.append(ActivationSpec(kind="swiglu_oai", limit=limit, alpha=alpha))
    gate_bound, up_bound = (float(getattr(module.config, f"mlp_{part}_softcap", None) or 0) for part in ("gate", "up"))
    if gate_bound and up_bound:
        candidates.append(ActivationSpec(kind="situ", gate_bound=gate_bound, up_bound=up_bound))
    return candidates


def _reproduces(module: Any, candidate: ActivationSpec) -> bool:
    points = torch.linspace(-30, 30, 41)
    if not module.has_gate:
        output = module.act_fn(points[:, None])
        expected = activate(points[:, None, None], candidate)
    else:
        gate, up = torch.meshgrid(points, points, indexing="ij")
        pair = torch.stack([gate.reshape(-1), up.reshape(-1)], dim=1)
        # With one intermediate column, concatenated and interleaved rows are the same.
        output = module._apply_gate(pair)
        expected = activate(pair[:, :, None], candidate)
    return bool(torch.allclose(output.float(), expected, rtol=1e-5, atol=1e-5))
