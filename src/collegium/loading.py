"""From a checkpoint to layers that run, in one call: read, audit, plan, pack."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Never

import torch

from .adapters import ExpertAdapters
from .checkpoint.activation_scales import ScaleRequest, input_reach
from .checkpoint.audit import check_dense_layers
from .checkpoint.expert_adapters import read_expert_adapters
from .checkpoint.layer_view import CheckpointLayer
from .checkpoint.layout import local_range
from .checkpoint.loader import load_experts
from .checkpoint.non_expert_weights import check_non_expert_weights, load_latent, load_router, load_shared
from .checkpoint.problems import raise_if_any
from .checkpoint.reader import Checkpoint
from .checkpoint.stored_format import StoredFormat
from .dummy.weights import random_latent, random_router, random_shared, random_weights
from .encoding import encoded
from .errors import ConfigError, InputError
from .execution.layer_comparison import experts_may_repeat
from .experts.base import map_tensors
from .formats import by_name
from .formats.payload import Payload
from .layer import MoELayer
from .models import Family, describe, family_of, text_of
from .parallel.fingerprint import fingerprint
from .parallel.placement import linear
from .parallel.ranks import Ranks
from .placement import Placement
from .planning import Plan, plan
from .problem import DeviceFacts, Limits, Overrides, Problem
from .runtime.arguments import Dtype, dtype_name, refuse_others
from .runtime.devices import plain_torch, probe
from .stages.modules import RowFunction
from .stages.shared import merge_shared, slice_shared
from .types import ExpertWeights, LatentWeights, MoESpec, RouterModule, RouterWeights, SharedWeights

__all__ = [
    "assemble",
    "dummy_layer",
    "dummy_routed",
    "load_adapters",
    "load_layer",
    "load_routed",
    "problem_of",
    "scale_request",
    "with_weight_format",
]


@plain_torch()
def load_layer(  # noqa: PLR0913  flat: calls pass few of these, and an options object would lengthen each
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
    weights: Literal["files", "dummy"] = "files",
    **others: Never,
) -> MoELayer:
    """Load MoE layer ``layer`` of the checkpoint at ``path``, or of an open one: router, experts and shared expert.

    path: a folder or file, ``fables-16m`` for the shipped model, or an id of the Hugging Face Hub (``org/name`` or
    ``org/name@revision``) in the local cache; an existing path wins. download: fetch what the cache lacks.
    weight_format: encode the experts into this format instead of the published one. overrides, limits: as ``plan``.
    device: the best of this machine when None; Ranks: this rank's part of a layer whose experts several ranks share;
    experts of other ranks are not read. dtype: of the layer's input and output, a name or a torch.dtype. checked: as
    ``MoELayer``. weights: ``dummy`` reads only ``config.json``, and fills the layer with random numbers, for start-up
    and benchmarks without files; an expert has the same numbers on any number of ranks that split the experts.
    Raises the CheckpointErrors of the audit, InputError for a layer without experts, PlanError, and with Ranks
    InputError on every rank where they read different checkpoints or limits, RankError where one does not respond.
    """
    refuse_others(load_layer, others)
    dtype = dtype_name("load_layer", dtype)
    if weights == "dummy":
        config = (path if isinstance(path, Checkpoint) else Checkpoint.open_config(path, download=download)).config
        _refuse_derived(family_of(config), layer, str(path))
        spec = with_weight_format(describe(config, layer), weight_format)
        vocabulary = text_of(config).get("vocab_size")
        dummy = dummy_layer(
            spec,
            device,
            overrides=overrides,
            limits=limits,
            dtype=dtype,
            checked=checked,
            vocabulary=vocabulary if isinstance(vocabulary, int) else 0,
        )
        return _numbered(dummy, layer)
    if weights != "files":
        raise InputError(f"load_layer: weights={weights!r} was passed; allowed: 'files', 'dummy'")
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint.open(path, download=download)
    view = CheckpointLayer.open(checkpoint, layer)
    _refuse_derived(view.index.family, view.number, str(checkpoint.path))
    facts, placement = _device_and_placement(
        view, device, limits=limits, dtype=dtype, format=weight_format, overrides=overrides
    )
    experts = _load_experts(view, weight_format, _experts_place(facts, limits), placement, overrides)
    raise_if_any(checkpoint, [*check_dense_layers(checkpoint), *check_non_expert_weights(view)])
    shared = load_shared(view, device=facts.place, scales=scale_request(overrides))
    router, latent = load_router(view, device=facts.place), load_latent(view, device=facts.place)
    problem = problem_of(view.spec, experts, shared, facts, placement, limits=limits or Limits(), dtype=dtype)
    built = assemble(problem, overrides, experts, router=router, shared=shared, latent=latent, checked=checked)
    return _numbered(built, layer)


def _refuse_derived(family: Family, layer: int, path: str) -> None:
    """Raise ConfigError for a layer of a derived family that could not be proved to be the class's block."""
    reason = family.refusal(layer)
    if reason is not None:
        raise ConfigError(
            f"{path}: layer {layer} of model_type {family.name!r} cannot be loaded alone: {reason}. Load the whole "
            "model with load_model(), which runs the router of its class in transformers and the experts with Collegium"
        )


@plain_torch()
def load_adapters(
    path: str | os.PathLike[str] | Checkpoint,
    layer: int,
    adapters: Sequence[str | os.PathLike[str]],
    *,
    experts_only: bool = False,
    download: bool = False,
) -> ExpertAdapters:
    """Read LoRA adapters of PEFT for layer ``layer`` of the checkpoint at ``path``, for ``MoELayer.set_adapters``.

    path: as ``load_layer``; its weights may be quantised. adapters: folders or Hub ids, in the order of adapter ids.
    Ranks and scales may differ between adapters, experts and projections (``rank_pattern``, ``alpha_pattern``).
    experts_only: leave out what adapters change outside the routed experts, with a warning in the log. download: fetch
    what the cache lacks. Raises ConfigError for options that are not implemented, for modules outside the experts and
    where no adapter changes this layer, and the errors of ``checkpoint.with_adapter``.
    """
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint.open(path, download=download)
    by_layer = read_expert_adapters(checkpoint, adapters, layer=layer, experts_only=experts_only, download=download)
    if layer not in by_layer:
        names = ", ".join(map(str, adapters)) or "none"
        raise ConfigError(f"{checkpoint.path}: no adapter changes the experts of layer {layer}; found {names}")
    return by_layer[layer]


def assemble(
    problem: Problem,
    overrides: Overrides | None,
    weights: ExpertWeights[Payload],
    *,
    router: RouterWeights | RouterModule | RowFunction | None,
    shared: SharedWeights[Payload] | RowFunction | None,
    latent: LatentWeights | RowFunction | None,
    checked: bool,
    after_expert: RowFunction | None = None,
) -> MoELayer:
    """Plan ``problem`` and return its layer; the shared expert is merged or sliced where the plan does that."""
    layer_plan = plan(problem, overrides)
    weights = _weights_for(layer_plan, weights)
    if isinstance(shared, SharedWeights) and layer_plan.merged_shared_experts:
        weights = merge_shared(layer_plan, weights, shared)
        shared = None
    elif isinstance(shared, SharedWeights) and layer_plan.problem.shared_slices > 1:
        shared = slice_shared(layer_plan, shared)
    return MoELayer(
        weights,
        layer_plan,
        router=router,
        shared=shared,
        latent=latent,
        after_expert=after_expert,
        checked=checked,
    )


def dummy_layer(
    spec: MoESpec,
    device: torch.device | str | Ranks | None,
    placement: Placement | None = None,
    *,
    router: bool | RouterWeights | RouterModule | RowFunction | None = True,
    vocabulary: int = 0,
    **options: Any,
) -> MoELayer:
    """Return a layer of ``spec`` with random weights in its formats.

    placement: this rank's, instead of that of Ranks as ``device``. router: whether the layer has one, or the caller's.
    vocabulary: rows of a hash table. options: overrides, limits, dtype and checked, as ``load_layer`` takes them;
    shared, latent, after_expert: functions of the caller, as ``MoELayer`` takes them.
    """
    functions = {name: options.pop(name, None) for name in ("shared", "latent", "after_expert")}
    if isinstance(device, Ranks):
        facts = probe(device.device)
        device.agree({"spec": spec, **{name: str(value) for name, value in options.items()}}, "building a dummy layer")
        every = device.placement(spec.num_experts)
        placement = every if device.groups or device.spare else None
    else:
        facts = probe(device)
    place = torch.device(facts.place)
    local = placement or linear(spec.num_experts)
    formats = [by_name(name) for name in spec.formats]
    first, second = (StoredFormat(name=form.name, storage=form.storages[0].name) for form in formats)
    _, width = local_range(spec, (first, second), local, pad=local.tp_size > 1)
    slots = local.expert_ids + local.expert_ids[:1] * local.spare
    weights = random_weights(spec, place, local.tp_rank, experts=slots, width=width)
    if weights.down_bias is not None and local.tp_rank:
        weights = replace(weights, down_bias=torch.zeros_like(weights.down_bias))
    if isinstance(router, bool):
        router = random_router(spec, place, vocabulary=vocabulary) if router else None
    shared = random_shared(spec, place)
    limits = options.get("limits") or Limits()
    problem = problem_of(spec, weights, shared, facts, placement, limits=limits, dtype=options["dtype"])
    with experts_may_repeat():
        return assemble(
            problem,
            options["overrides"],
            weights,
            router=router,
            shared=shared if functions["shared"] is None else functions["shared"],
            latent=random_latent(spec, place) if functions["latent"] is None else functions["latent"],
            checked=options["checked"],
            after_expert=functions["after_expert"],
        )


@plain_torch()
def dummy_routed(
    config: Mapping[str, object],
    layer: int,
    *,
    weight_format: str | None = None,
    overrides: Overrides | None = None,
    device: torch.device | str | Ranks | None = None,
    limits: Limits | None = None,
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16",
    after_expert: RowFunction | None = None,
) -> MoELayer:
    """Return layer ``layer`` of a ``config.json`` as ``load_routed`` does, with random weights."""
    built = dummy_layer(
        with_weight_format(describe(config, layer), weight_format).routed_alone(),
        device,
        router=False,
        overrides=overrides,
        limits=limits,
        dtype=dtype,
        checked=False,
        after_expert=after_expert,
    )
    return _numbered(built, layer)


def _numbered(built: MoELayer, number: int) -> MoELayer:
    built.layer_id = number
    return built


def with_weight_format(spec: MoESpec, weight_format: str | None) -> MoESpec:
    """Return ``spec`` with its routed experts in ``weight_format``; the shared expert keeps its format."""
    if weight_format is None:
        return spec
    shared = spec.shared
    if shared is not None:
        alone = spec.shared_alone()
        shared = replace(shared, weight_format=alone.weight_format, down_format=alone.down_format)
    return replace(spec, weight_format=by_name(weight_format).name, down_format=None, shared=shared)


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
    after_expert: RowFunction | None = None,
) -> MoELayer:
    """Load only the routed experts of an opened layer, for a caller that runs router and shared expert itself.

    placement: the experts and the slice of them that this rank reads; with
    ``overrides=Overrides(dispatcher="partial")`` the layer returns this rank's part of the sum. None: the placement of
    Ranks as ``device``, or all experts. after_expert: as ``MoELayer``. Other arguments and errors as ``load_layer``;
    every call of the layer needs a routing or logits.
    """
    facts, rank_placement = _device_and_placement(
        layer, device, limits=limits, dtype=dtype, format=weight_format, overrides=overrides
    )
    if placement is not None and rank_placement is not None:
        raise InputError(
            f"load_routed: Ranks and the placement {placement} were given, and each determines the experts of this "
            "rank; give one of them"
        )
    placement = placement or rank_placement
    weights = _load_experts(layer, weight_format, _experts_place(facts, limits), placement, overrides)
    spec = layer.spec.routed_alone()
    problem = problem_of(spec, weights, None, facts, placement, limits=limits or Limits(), dtype=dtype)
    layer_plan = plan(problem, overrides)
    built = MoELayer(_weights_for(layer_plan, weights), layer_plan, after_expert=after_expert)
    return _numbered(built, layer.number)


def _experts_place(facts: DeviceFacts, limits: Limits | None) -> str:
    """Return the device that experts are read to: the host if the GPU may not have room for all of them."""
    # The plan refuses limits of another type.
    limited = isinstance(limits, Limits) and limits.gpu_bytes is not None
    return "cpu" if limited else facts.place


def _weights_for(layer_plan: Plan, weights: ExpertWeights[Payload]) -> ExpertWeights[Payload]:
    """Return ``weights`` on the device of the plan, unless they are paged or the device is not present."""
    facts = layer_plan.problem.device
    if layer_plan.paging is not None or facts.index is None or weights.down.device.type == facts.kind:
        return weights

    moved = replace(weights, gate_up=weights.gate_up.to(facts.place), down=weights.down.to(facts.place))
    return map_tensors(moved, lambda tensor: tensor.to(facts.place), "gate_up_bias", "down_bias", "expert_reach")


def _device_and_placement(
    layer: CheckpointLayer, device: torch.device | str | Ranks | None, **options: Any
) -> tuple[DeviceFacts, Placement | None]:
    """Return this rank's device and its part of the layer, once all ranks agree on what they load.

    options: by name, other values that must be equal on all ranks.
    """
    if not isinstance(device, Ranks):
        return probe(device), None
    placement = device.placement(layer.spec.num_experts)
    checkpoint = fingerprint(layer.checkpoint, layer.expert_tensors.infos())
    device.agree({"checkpoint": checkpoint, **options}, f"loading layer {layer.number}")
    return probe(device.device), placement if device.groups or device.spare else None


def problem_of(
    spec: MoESpec,
    weights: ExpertWeights[Payload],
    shared: SharedWeights[Payload] | None,
    facts: DeviceFacts,
    placement: Placement | None,
    **options: Any,
) -> Problem:
    """Return the problem of a layer whose weights were read; options: fields of ``Problem``."""
    if placement is not None:
        # Slices are read with padding to whole groups, so they may be wider than their share.
        placement = replace(placement, slice_size=weights.down.shape[-1])
    return Problem(spec=_stored_spec(spec, weights, shared), device=facts, placement=placement, **options)


def _stored_spec(spec: MoESpec, weights: ExpertWeights[Payload], shared: SharedWeights[Payload] | None) -> MoESpec:
    """Return ``spec`` with the formats in which routed and shared experts are stored."""
    spec = replace(spec, **weights.formats)
    if spec.shared is None or shared is None:
        return spec
    stored = replace(spec, shared=replace(spec.shared, **shared.experts.formats))
    # A shared expert in the routed experts' formats keeps its spec, which names no format.
    return spec if spec.shared_alone().formats == stored.shared_alone().formats else stored


def scale_request(overrides: Overrides | None) -> ScaleRequest:
    """Return which static activation scales ``overrides`` requests: none unless it forces a format that has them."""
    if not isinstance(overrides, Overrides):  # which the plan refuses
        return ScaleRequest()
    return ScaleRequest(activations=overrides.activation_format or "fp32", unequal=overrides.unequal_scales or "refuse")


def _load_experts(
    layer: CheckpointLayer,
    weight_format: str | None,
    place: str,
    placement: Placement | None,
    overrides: Overrides | None,
) -> ExpertWeights[Payload]:
    """Read the experts of ``placement``, or all, to the device ``place``, and encode them into ``weight_format``.

    Static scales of activations are computed over all experts, so that bits do not depend on the placement.
    """
    placement = placement or linear(layer.spec.num_experts, 0, 1)
    sources = (source for _, source in layer.sources())
    request = scale_request(overrides)
    reach = input_reach(layer.checkpoint, sources, layer.both_stored, request)
    weights = load_experts(layer, placement, device=place, pad=placement.tp_size > 1, convert=weight_format is not None)
    if reach is not None:
        slots = placement.expert_ids + placement.expert_ids[:1] * placement.spare
        weights = replace(weights, **reach.fields(slots, request.activations))
    return encoded(weights, weight_format)
