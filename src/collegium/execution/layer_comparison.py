"""Comparing a layer between ranks when it is built (``parallel/layer_check.py``)."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from ..errors import InputError
from ..parallel.expert_parallel import layer_settings
from ..parallel.groups import check_ranks
from ..parallel.layer_check import LayerContribution, SlotWeights, compare_layers, compared_groups
from ..runtime.checksum import row_checksums
from ..stages.shared import SharedExpert

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from torch import Tensor

    from ..experts import PackedWeights
    from ..placement import Placement
    from ..planning import Plan
    from ..stages.latent import Latent
    from ..stages.modules import InputTransform, SharedModule
    from ..types import RouterWeights

__all__ = ["SAMPLED_ELEMENTS", "LayerParts", "compare_with_ranks", "experts_may_repeat", "refusal_reported"]

SAMPLED_ELEMENTS = 4096  # of each tensor of an expert
_experts_may_repeat: ContextVar[bool] = ContextVar("experts_may_repeat", default=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerParts:
    """The weights and options of a layer that the ranks compare. options: by name."""

    experts: PackedWeights
    router: RouterWeights | None
    shared: SharedExpert | SharedModule | None
    latent: Latent | InputTransform | None
    options: Mapping[str, object]


@contextmanager
def experts_may_repeat() -> Generator[None]:
    """In the block, layers may hold the same weights as different experts on different ranks, as dummy weights do."""
    token = _experts_may_repeat.set(True)
    try:
        yield
    finally:
        _experts_may_repeat.reset(token)


def compare_with_ranks(plan: Plan, parts: LayerParts, *, checked: bool) -> None:
    """Compare the layer of ``plan`` with the other ranks; all ranks that share it call it together.

    Waits for the device once. Raises InputError where torch.distributed has other ranks than the placement, and on
    every rank where plans or options differ, and RankError where weights do.
    """
    placement = plan.problem.placement
    groups = compared_groups(placement, plan.dispatcher, checked=checked)
    if placement is None or not groups:
        return
    with refusal_reported(plan, checked=checked), torch.inference_mode():
        check_ranks(plan.dispatcher, placement)
        contribution = _contribution(plan, placement, parts)
    compare_layers(plan.dispatcher, groups, contribution)


@contextmanager
def refusal_reported(plan: Plan, *, checked: bool) -> Generator[None]:
    """Inform the other ranks of an error in the block, so that none waits for this rank to build the layer."""
    try:
        yield
    except Exception as error:  # packing may raise anything
        groups = compared_groups(plan.problem.placement, plan.dispatcher, checked=checked)
        if groups:
            compare_layers(plan.dispatcher, groups, LayerContribution(rank=distributed.get_rank()), error)
        raise


def _settings(plan: Plan, placement: Placement, parts: LayerParts) -> dict[str, Any]:
    """Return what all ranks need to have in common, by name."""
    settings = layer_settings(plan.problem) | dict(parts.options)
    for name in ("world_size", "ranks", "spare", "same_tokens", "tp_size", "slice_size"):
        settings[name] = getattr(placement, name)
    for name in ("kernel", "dispatcher", "pipelines", "merged_shared_experts", "microbatches"):
        settings[name] = getattr(plan, name)
    settings["shared_slices"] = plan.problem.shared_slices
    # Rank 0 alone may add the shared expert to partial sums.
    settings["shared_kernel"] = None if plan.dispatcher == "partial" else plan.shared_kernel
    settings["input_reach"] = parts.experts.input_reach
    settings["packed tensors"] = tuple(
        (str(tensor.dtype), tuple(tensor.shape[1:])) for tensor in _stored(parts.experts)
    )
    return settings


def _contribution(plan: Plan, placement: Placement, parts: LayerParts) -> LayerContribution:
    tensors = _stored(parts.experts)
    # The caller of partial sums runs a shared expert, so ranks may hold slices of it.
    shared = None if plan.dispatcher == "partial" else parts.shared
    whole = _whole_weights(parts.router, shared, parts.latent)
    pending = [*whole.values()]
    ids = placement.expert_ids
    copied = _copied_slots(placement.ranks, ids)
    if tensors:
        pending.append(_samples([tensor[: len(ids)] for tensor in tensors]))
        pending += [_checksum([tensor[slot] for tensor in tensors]) for slot in copied]
    values: list[int] = torch.cat([value.reshape(-1) for value in pending]).tolist() if pending else []
    whole_values, slot_values = values[: len(whole)], values[len(whole) :]
    samples, checksums = slot_values[: len(ids)], slot_values[len(ids) :]
    by_slot = dict(zip(copied, checksums, strict=False))
    return LayerContribution(
        rank=distributed.get_rank(),
        expert_rank=placement.rank,
        slice_rank=placement.tp_rank,
        expert_ids=ids,
        settings=_settings(plan, placement, parts),
        slots=tuple(
            SlotWeights(expert, sample, by_slot.get(slot))
            for slot, (expert, sample) in enumerate(zip(ids, samples, strict=False))
        ),
        whole=dict(zip(whole, whole_values, strict=True)),
        may_repeat=_experts_may_repeat.get(),
    )


def _stored(experts: PackedWeights) -> tuple[Tensor, ...]:
    """Return the tensors that have a row for each slot, none for kernels that pack experts together."""
    try:
        return experts.stored()
    except InputError:
        return ()


def _copied_slots(ranks: Sequence[tuple[int, ...]], ids: tuple[int, ...]) -> list[int]:
    """Return this rank's slots of experts that are in several slots of all ranks."""
    counts = Counter(expert for rank_ids in ranks or (ids,) for expert in rank_ids)
    return [slot for slot, expert in enumerate(ids) if counts[expert] > 1]


def _whole_weights(
    router: RouterWeights | None, shared: SharedExpert | SharedModule | None, latent: Latent | InputTransform | None
) -> dict[str, Tensor]:
    """Return checksums of the weights that every rank holds, by name, without those of the caller's modules."""
    tensors: dict[str, list[Tensor]] = {}
    if router is not None:
        tensors |= {f"router.{name}": [tensor] for name, tensor in _tensors_of(router).items()}
    if isinstance(shared, SharedExpert):
        tensors["shared.experts"] = list(_stored(shared.experts))
        tensors["shared.gate"] = [] if shared.gate is None else [shared.gate]
    if latent is not None:
        tensors |= {f"latent.{name}": [tensor] for name, tensor in _tensors_of(latent).items()}
    return {name: _checksum(parts) for name, parts in tensors.items() if parts}


def _tensors_of(weights: Any) -> dict[str, Tensor]:
    values = {field.name: getattr(weights, field.name) for field in fields(weights)}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def _checksum(tensors: Sequence[Tensor]) -> Tensor:
    """Return one checksum of ``tensors`` as a scalar on their device."""
    return _folded([row_checksums(tensor[None]) for tensor in tensors])


def _samples(tensors: Sequence[Tensor]) -> Tensor:
    """Return a checksum of some bytes of each slot, ``[S]``."""
    return _folded([row_checksums(_sample(tensor)) for tensor in tensors])


def _folded(checksums: Sequence[Tensor]) -> Tensor:
    """Return one number for checksums of several tensors, in their order."""
    total = torch.zeros_like(checksums[0])
    for value in checksums:
        total = total * 31 + value
    return total


def _sample(tensor: Tensor) -> Tensor:
    """Return up to ``SAMPLED_ELEMENTS`` elements from the middle of each row of ``tensor [S, ...]``."""
    while tensor.dim() > 2 and tensor[0].numel() > SAMPLED_ELEMENTS:
        tensor = tensor[:, tensor.shape[1] // 2]
    if tensor.dim() == 2 and tensor.shape[1] > SAMPLED_ELEMENTS:
        tensor = tensor.narrow(1, (tensor.shape[1] - SAMPLED_ELEMENTS) // 2, SAMPLED_ELEMENTS)
    return tensor
