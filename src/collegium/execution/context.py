"""What a plan builds: dispatcher, pipelines, the memory map of a pass, and the handshake between ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import pipelines as pipeline_table
from ..experts import PackedWeights
from ..parallel import Dispatcher, wrapped_for
from ..parallel.input_check import InputCheck, input_check
from ..parallel.slices import Slices
from ..pipelines import Pipeline, PipelineParts
from ..planning import Plan, dispatcher_named, token_ranges
from ..runtime.memory import MemoryMap, Workspaces, memory_map, shared_workspaces
from ..runtime.pass_order import PassOrder
from .handshake import Handshake, handshake_of

__all__ = ["ExecutionContext", "build_context"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionContext:
    """What runs the packed experts of one layer.

    plan: with the token ranges of the packed experts. pipelines: with the largest number of tokens each serves, None
    for any. chunk_tokens: larger batches run in several passes; None: never, because all ranks call together and
    another rank might have fewer passes. after_expert: applied to the experts' rows. pass_order: of passes that change
    the experts' slots.
    """

    plan: Plan
    device: torch.device
    dispatcher: Dispatcher
    handshake: Handshake
    pipelines: tuple[tuple[int | None, Pipeline], ...]
    memory_map: MemoryMap
    chunk_tokens: int | None
    after_expert: Callable[[Tensor], Tensor] | None
    pass_order: PassOrder | None = None

    def workspaces(self) -> Workspaces | Any:
        """Return what lends the memory of passes: the ranks' shared block, the GPU's pool, or None on a CPU."""
        if self.handshake.workspaces is not None:
            return self.handshake.workspaces
        if self.device.type == "cuda" and self.plan.capturable:
            return shared_workspaces(self.device, self.memory_map.nbytes)
        return None

    def input_check(self, *, checked: bool) -> InputCheck | None:
        """Return what compares the inputs of ranks that need the same inputs, None where there are none."""
        layer = self.dispatcher.number if isinstance(self.dispatcher, Slices) else 0
        return input_check(self.plan.problem.placement, self.plan.dispatcher, checked=checked, layer=layer)


def build_context(
    plan: Plan, experts: PackedWeights, device: torch.device, after_expert: Callable[[Tensor], Tensor] | None
) -> ExecutionContext:
    """Build what runs ``experts`` according to ``plan``; all ranks that share the experts call it together."""
    problem, tiling = plan.routed_problem, experts.tiling
    kind = wrapped_for(dispatcher_named(plan.dispatcher), problem)
    # The last row serves empty batches, and batches that packing finds to be faster sorted.
    *rows, last_row = pipeline_table.PIPELINES
    pipeline_kinds = [*(row for row in rows if row.name in plan.pipelines), last_row]
    plan = plan.with_token_ranges(token_ranges(pipeline_kinds, kind, tiling, problem))
    dispatcher = kind.build(problem)
    parts = PipelineParts(
        experts=experts,
        dispatcher=dispatcher,
        top_k=problem.spec.routing.top_k,
        num_experts=len(problem.local_experts),
        after_expert=after_expert,
        overlap_shared=bool(plan.shared_overlap),
        half_batches=problem.limits.max_tokens if plan.microbatches == 2 else 0,
    )
    pipelines = tuple((row.max_tokens(tiling, parts.top_k), row.build(parts)) for row in pipeline_kinds)
    regions_map = memory_map(plan.regions)
    return ExecutionContext(
        plan=plan,
        device=device,
        dispatcher=dispatcher,
        handshake=handshake_of(dispatcher, regions_map),
        pipelines=pipelines,
        memory_map=regions_map,
        chunk_tokens=None if kind.collective else problem.limits.max_tokens,
        after_expert=after_expert,
        pass_order=experts.pass_order,
    )
