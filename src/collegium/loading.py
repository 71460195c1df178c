"""One call from a checkpoint to layers that run: read, audit, plan, pack."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from .checkpoint.beside import check_beside, load_latent, load_router, load_shared
from .checkpoint.detect import detect
from .checkpoint.loader import load_experts
from .checkpoint.problems import refuse
from .checkpoint.reader import Checkpoint
from .encoding import encode_experts
from .layer import MoELayer
from .models import describe
from .parallel.placement import linear
from .plan import plan
from .runtime.devices import plain_torch, probe
from .problem import Limits, Problem
from .types import RoutingSpec

if TYPE_CHECKING:
    import os

    import torch

    from .formats.payload import Payload
    from .problem import Choice, DeviceFacts
    from .types import ExpertWeights, MoESpec

__all__ = ["load_layer", "load_routed"]


@plain_torch()
def load_layer(
    path: str | os.PathLike[str] | Checkpoint,
    layer: int,
    *,
    weight_format: str | None = None,
    force: Choice | None = None,
    device: torch.device | str | None = None,
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16",
    limits: Limits | None = None,
    checked: bool = False,
) -> MoELayer:
    """Load MoE layer ``layer`` of the checkpoint at ``path``, or of an open one: router, experts and shared expert.

    weight_format: encode the experts into this format instead of the published one. force, limits: as ``plan``.
    device: the best of this machine when None. dtype: of the layer's input and output. checked: as ``MoELayer``.
    Raises the CheckpointErrors of the audit, InputError for a layer without experts, and PlanError.
    """
    checkpoint, facts = path if isinstance(path, Checkpoint) else Checkpoint.open(path), probe(device)
    spec, weights = _experts(checkpoint, layer, weight_format, facts)
    refuse(checkpoint, check_beside(checkpoint, spec, layer))
    problem = Problem(spec=spec, device=facts, limits=limits or Limits(), dtype=dtype)
    return MoELayer(
        weights,
        plan(problem, force),
        router=load_router(checkpoint, spec, layer, device=facts.place),
        shared=load_shared(checkpoint, spec, layer, device=facts.place),
        latent=load_latent(checkpoint, spec, layer, device=facts.place),
        checked=checked,
    )


@plain_torch()
def load_routed(
    checkpoint: Checkpoint,
    layer: int,
    *,
    weight_format: str | None = None,
    force: Choice | None = None,
    device: torch.device | str | None = None,
    limits: Limits | None = None,
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16",
) -> MoELayer:
    """Load only the routed experts of a layer, for a caller that keeps router and shared expert.

    Arguments and errors as ``load_layer``; the layer takes a routing or logits at every call.
    """
    facts = probe(device)
    spec, weights = _experts(checkpoint, layer, weight_format, facts)
    routed = replace(
        spec,
        hidden_size=spec.expert_hidden_size,
        latent_size=None,
        latent_norm_eps=None,
        shared=None,
        routing=RoutingSpec(top_k=spec.routing.top_k),
    )
    problem = Problem(spec=routed, device=facts, limits=limits or Limits(), dtype=dtype)
    return MoELayer(weights, plan(problem, force))


def _experts(
    checkpoint: Checkpoint, layer: int, weight_format: str | None, facts: DeviceFacts
) -> tuple[MoESpec, ExpertWeights[Payload]]:
    """Read all experts of a layer, encode them if asked, and return them with the spec that describes them."""
    stored = detect(checkpoint.config, checkpoint, layer)
    spec = replace(describe(checkpoint.config, layer), weight_format=stored.name)
    everything = linear(spec.num_experts, 0, 1)
    weights = load_experts(checkpoint, spec, layer, everything, stored=stored, device=facts.place)
    if weight_format is not None and weight_format != weights.down.name:
        weights = encode_experts(weights, weight_format)
    return replace(spec, weight_format=weights.down.name), weights
