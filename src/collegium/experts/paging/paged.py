"""Experts of which slots on the GPU hold some, and host memory all."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...errors import InputError
from ...kernels.arguments import PagingTables
from ...ops.paging import Segments, new_tables, segments_of
from ...problem import ExpertsProblem
from ...runtime.pass_order import PassOrder
from ...types import ActivationSpec, ExpertWeights
from ..base import ExpertKernel, PackedWeights, Product, Tiling
from .host_store import HostStore, pack_to_host
from .policy import Policy

__all__ = ["PagedExperts", "pack_paged"]

_REFUSED = (
    "the experts of this layer are in host memory, with slots for some of them on the GPU (Limits(gpu_bytes=...)); "
    "{} is for layers whose experts are all on the GPU. Load the layer without gpu_bytes, or call forward"
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PagedExperts(PackedWeights):
    """All experts of a layer in ``store``, and those that ``tables`` lists in the slots of ``resident``.

    The pipeline ``paged`` runs them, slots in place of experts, one pass at a time (``order``).
    """

    resident: PackedWeights
    store: HostStore
    tables: PagingTables
    segments: Segments
    policy: Policy
    order: PassOrder

    @property
    def report(self) -> object | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What packing rounded."""
        return self.resident.report

    @property
    def input_reach(self) -> tuple[float, float] | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The largest inputs of static activations."""
        return self.resident.input_reach

    @property
    def tiling(self) -> Tiling:
        """How batches are cut."""
        return self.resident.tiling

    @property
    def key(self) -> Hashable:
        """Everything besides the tiling that selects kernel variants."""
        return self.resident.key, len(self.tables.expert_slot), len(self.tables.slot_expert)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one expert."""
        return self.resident.slot_bytes

    @property
    def pass_order(self) -> PassOrder:
        """The order of passes, which change the slots."""
        return self.order

    @property
    def hits_and_misses(self) -> tuple[int, int]:
        """Needed experts of all passes until now that had a slot, and that were copied; waits for the device."""
        hits, misses = self.tables.counters.tolist()
        return hits, misses

    def set_scores(self, scores: Tensor) -> None:
        """Let experts with low ``scores [E]``, floating, lose their slots first; policies but ``static`` change them.

        No pass may run meanwhile. Raises InputError for another shape or numbers that are not finite.
        """
        experts = self.tables.scores.numel()
        if scores.shape != (experts,) or not bool(scores.float().isfinite().all()):
            raise InputError(f"set_scores: scores are {tuple(scores.shape)}, allowed: ({experts},), finite")
        with torch.inference_mode(False):
            self.tables.scores.copy_(scores)

    def summary(self, activations: str) -> str:
        """Return printed lines: scales, the report, and the packed bytes on either side."""
        slots, experts = len(self.tables.slot_expert), len(self.tables.expert_slot)
        size = self.slot_bytes
        return (
            self.resident.summary(activations)
            + f"\npacked     {slots * size:,} bytes of {slots} slots on the GPU, {experts * size:,} of {experts} "
            "experts in host memory"
        )

    def products(self) -> tuple[Product, ...]:
        """Return the products whose tiles can be measured, of the slots."""
        return self.resident.products()

    def with_measured(self, tables: Mapping[str, Any]) -> PagedExperts:
        """Return the same experts with measured tiles."""
        return replace(self, resident=self.resident.with_measured(tables))

    def with_activation(self, activation: ActivationSpec) -> PagedExperts:
        """Return the same experts and slots with another activation between the products."""
        return replace(self, resident=self.resident.with_activation(activation))

    def run(self, *_: Any, **__: Any) -> NoReturn:
        """Raise InputError: experts are known by their slots."""
        raise InputError(_REFUSED.format("a call with rows that are already sorted"))

    def run_unsorted(self, *_: Any, **__: Any) -> NoReturn:
        """Raise InputError: experts are known by their slots."""
        raise InputError(_REFUSED.format("a call with unsorted rows"))

    def _map_tensors(self, change: Callable[[Tensor], Tensor]) -> NoReturn:
        raise InputError(_REFUSED.format("reading or replacing packed experts"))

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Raise InputError: the tables have addresses of host memory."""
        raise InputError(_REFUSED.format("copy.deepcopy") + "; copy.copy(layer) shares the experts")

    def __reduce__(self) -> NoReturn:
        """Raise InputError: host memory is page-locked in one process."""
        raise InputError(_REFUSED.format("pickle"))


def pack_paged(
    kernel: ExpertKernel,
    weights: ExpertWeights[Any],
    problem: ExpertsProblem,
    policy: Policy,
    device: torch.device,
) -> PagedExperts:
    """Return ``weights`` of all experts, on any device, paged through the slots of ``problem`` on ``device``."""
    packed = pack_to_host(kernel, weights, problem, device)
    return PagedExperts(
        resident=packed.resident,
        store=packed.store,
        tables=new_tables(weights.down.shape[0], problem.experts, device),
        segments=segments_of(packed.store.tensors, packed.resident.slots()),
        policy=policy,
        order=PassOrder(device),
    )
