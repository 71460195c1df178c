"""One call from a checkpoint to layers that run: read, audit, plan, pack."""

import os
from dataclasses import replace
from typing import Any, Literal, Never

import torch

from .checkpoint.activation_scales import input_reach
from .checkpoint.audit import check_dense_layers
from .checkpoint.layer_view import CheckpointLayer
from .checkpoint.loader import load_experts
from .checkpoint.non_expert_weights import check_non_expert_weights, load_latent, load_router, load_shared
from .checkpoint.problems import raise_if_any
from .checkpoint.reader import Checkpoint
from .encoding import encoded
from .errors import InputError
from .formats.payload import Payload
from .layer import MoELayer
from .parallel.fingerprint import fingerprint
from .parallel.placement import linear
from .parallel.ranks import Ranks
from .placement import Placement
from .planning import plan
from .problem import DeviceFacts, Limits, Overrides, Problem
from .runtime.arguments import Dtype, dtype_name, refuse_others
from .runtime.devices import plain_torch, probe
from .types import ExpertWeights, MoESpec

__all__ = ["asked_activations", "load_layer", "load_routed"]


@plain_torch()
def load_layer(  # noqa: PLR0913  every option of a layer that is read from disk
    path: str | os.PathLike[str] | Checkpoint,
    layer: int,
    *,
    weight_format: str | None = None,
    overrides: Overrides | None = None,
    device: torch.device | str | Ranks | None = None,
    dtype: Dtype | torch.dtype = "bf16",
    limits: Limits | None = None,
    checked: bool = False,
    download: bool = False,
    **others: Never,
) -> MoELayer:
    """Load MoE layer ``layer`` of the checkpoint at ``path``, or of an open one: router, experts and shared expert.

    path: a folder or file, ``fables-16m`` for the shipped model, or an id of the Hugging Face Hub (``org/name`` or
    ``org/name@revision``) in the local cache; an existing path wins. download: fetch what the cache lacks.
    weight_format: encode the experts into this format instead of the published one. overrides, limits: as ``plan``.
    device: the best of this machine when None; Ranks: this rank's part of a layer whose experts several share, read
    from disk without the others'. dtype: of the layer's input and output, a name or a torch.dtype. checked: as
    ``MoELayer``.
    Raises the CheckpointErrors of the audit, InputError for a layer without experts, PlanError, and with Ranks
    InputError on every rank where they read different checkpoints or limits, RankError where one does not come.
    """
    refuse_others(load_layer, others)
    dtype = dtype_name("load_layer", dtype)
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint.open(path, download=download)
    opened = CheckpointLayer.open(checkpoint, layer)
    facts, placement = _placed(opened, device, limits=limits, dtype=dtype, format=weight_format, overrides=overrides)
    weights = _experts(opened, weight_format, facts.place, placement, overrides)
    raise_if_any(checkpoint, [*check_dense_layers(checkpoint), *check_non_expert_weights(opened)])
    problem = _problem(opened.spec, weights, facts, placement, limits=limits or Limits(), dtype=dtype)
    return MoELayer(
        weights,
        plan(problem, overrides),
        router=load_router(opened, device=facts.place),
        shared=load_shared(opened, device=facts.place, activations=asked_activations(overrides)),
        latent=load_latent(opened, device=facts.place),
        checked=checked,
    )


@plain_torch()
def load_routed(
    layer: CheckpointLayer,
    *,
    weight_format: str | None = None,
    overrides: Overrides | None = None,
    device: torch.device | str | Ranks | None = None,
    limits: Limits | None = None,
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16",
    placement: Placement | None = None,
) -> MoELayer:
    """Load only the routed experts of an opened layer, for a caller that keeps router and shared expert.

    placement: the experts and the slice of them that this rank reads and holds; with
    ``overrides=Overrides(dispatcher="partial")`` the layer gives this rank's part of the sum. None: what Ranks as
    ``device``
    say, or all. Other arguments and errors as ``load_layer``; the layer takes a routing or logits at every call.
    """
    facts, own = _placed(layer, device, limits=limits, dtype=dtype, format=weight_format, overrides=overrides)
    if placement is not None and own is not None:
        raise InputError(
            f"load_routed: Ranks and the placement {placement} were given; one of the two says who holds what"
        )
    placement = placement or own
    weights = _experts(layer, weight_format, facts.place, placement, overrides)
    problem = _problem(layer.spec.routed_alone(), weights, facts, placement, limits=limits or Limits(), dtype=dtype)
    return MoELayer(weights, plan(problem, overrides))


def _placed(
    layer: CheckpointLayer, device: torch.device | str | Ranks | None, **asked: Any
) -> tuple[DeviceFacts, Placement | None]:
    """Return the device and the part of the layer that are this rank's, once all ranks agree on what they load.

    asked: by name what has to be the same too.
    """
    if not isinstance(device, Ranks):
        return probe(device), None
    placement = device.placement(layer.spec.num_experts)
    same = fingerprint(layer.checkpoint, layer.expert_tensors.infos())
    device.agree({"checkpoint": same, **asked}, f"loading layer {layer.number}")
    return probe(device.device), placement if device.groups or device.spare else None


def _problem(
    spec: MoESpec, weights: ExpertWeights[Payload], facts: DeviceFacts, placement: Placement | None, **asked: Any
) -> Problem:
    if placement is not None:
        # Read with padding up to whole groups, a slice is wider than its share.
        placement = replace(placement, slice_size=weights.down.shape[-1])
    return Problem(spec=replace(spec, **weights.formats), device=facts, placement=placement, **asked)


def asked_activations(overrides: Overrides | None) -> str:
    """Return the activation format that ``overrides`` asks for, or one without scales where it asks for none."""
    # What is no Overrides is refused by the plan.
    return getattr(overrides, "activation_format", None) or "fp32"


def _experts(
    layer: CheckpointLayer,
    weight_format: str | None,
    place: str,
    placement: Placement | None,
    overrides: Overrides | None,
) -> ExpertWeights[Payload]:
    """Read the experts of ``placement``, or all, on the device ``place``, encoded if asked.

    Static scales of activations are those of all experts, so that bits do not depend on who holds them.
    """
    held = placement or linear(layer.spec.num_experts, 0, 1)
    everyone = (source for _, source in layer.sources())
    reach = input_reach(layer.checkpoint, everyone, layer.both_stored, asked_activations(overrides))
    weights = load_experts(layer, held, device=place, pad=held.tp_size > 1, convert=weight_format is not None)
    weights = replace(weights, input_reach=reach)
    return encoded(weights, weight_format)
