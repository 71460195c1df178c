"""The shared expert: for its kernel one expert that every token goes to, with a sigmoid gate if the model has one.

A plan may instead merge it with the routed experts: it is then split by intermediate width into experts as wide as the
routed ones, which are packed after them.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..encoding import as_payloads
from ..errors import InputError
from ..experts import ExpertKernel, PackedWeights
from ..formats.payload import Payload
from ..ops.linear import sigmoid_gate
from ..ops.quantize import activation_format
from ..planning import Plan, kernel_named
from ..problem import Problem
from ..runtime.memory import Memory, part
from ..sharing import forced_shared_error
from ..types import ActivationSpec, ContiguousBatch, ExpertWeights, SharedWeights, format_names
from .checks import check_presence, check_tensor, check_weights
from .modules import RowFunction, SharedModule

__all__ = [
    "SharedExpert",
    "check_apart",
    "check_shared",
    "check_shared_unchanged",
    "merge_shared",
    "pack_shared",
    "shared_of",
    "slice_shared",
    "split_shared",
]

P = TypeVar("P", bound=Payload)


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedExpert:
    """The packed shared expert of a layer.

    rows: ``[max_tokens + 1]`` int64; the source rows of every batch are the first T of them. bounds:
    ``[max_tokens + 1, 2]``; row T is (0, T), the expert offsets of T tokens. gate: ``[1, D]`` float32 or None.
    """

    experts: PackedWeights
    rows: Tensor
    bounds: Tensor
    gate: Tensor | None

    def __call__(self, x: Tensor, memory: Memory | None = None) -> Tensor:
        """Return ``[T, D]``, which is added to the routed experts' sum for ``x [T, D]``."""
        tokens = x.shape[0]
        batch = ContiguousBatch(x=x, source=self.rows[:tokens], expert_offsets=self.bounds[tokens])
        out = self.experts.run(batch, part(memory, "shared"))
        if self.gate is None:
            return out
        return sigmoid_gate(x, self.gate, out, memory=part(memory, "gate"))

    def with_activation(self, activation: ActivationSpec) -> "SharedExpert":
        """Return the same weights with another activation."""
        return replace(self, experts=self.experts.with_activation(activation))

    def variants(self, tokens: int) -> frozenset[Hashable]:
        """Return what a batch of ``tokens`` tokens needs compiled."""
        return self.experts.tiling.variants(tokens, unsorted=False)


def shared_of(
    plan: Plan,
    weights: ExpertWeights[Payload],
    shared: SharedWeights[Payload] | SharedWeights[Tensor] | RowFunction | None,
    after_expert: object,
) -> SharedExpert | SharedModule | None:
    """Return the shared expert that a layer of ``plan`` runs on this rank, packed or the caller's, or None.

    weights: the routed experts, which contain a merged shared expert. Raises InputError where they disagree.
    """
    if shared is not None and not isinstance(shared, SharedWeights):
        if not callable(shared) or plan.problem.spec.shared is not None:
            raise InputError(
                f"shared: found a {type(shared).__name__}, and the spec has {plan.problem.spec.shared or 'none'}; "
                "allowed: SharedWeights for a spec with SharedSpec(...), or a function or module for one without"
            )
        if plan.overrides.shared == "merged":
            raise InputError(
                f"shared: found a {type(shared).__name__} and Overrides(shared={plan.overrides.shared!r}), which is "
                "for SharedWeights; allowed: None, 'sequential', 'overlapped', 'side_stream', or 'sliced' with the "
                "dispatcher partial"
            )
        return SharedModule(function=shared) if plan.adds_shared else None
    payloads = None if shared is None else SharedWeights(experts=as_payloads(shared.experts), gate=shared.gate)
    check_shared(plan, weights, payloads, after_expert)
    if payloads is None or not plan.adds_shared:
        return None
    return pack_shared(payloads, plan.problem, kernel_named(str(plan.shared_kernel)))


def check_apart(plan: Plan) -> None:
    """Raise InputError where the shared expert's output cannot be returned apart from the routed experts' sums."""
    if plan.merged_shared_experts:
        raise InputError(
            f"shared_and_routed: the plan merges the shared expert into {plan.merged_shared_experts} routed experts; "
            "plan with Overrides(shared='sequential')"
        )


def pack_shared(shared: SharedWeights[Payload], problem: Problem, kernel: ExpertKernel) -> SharedExpert:
    """Pack the shared expert for ``kernel``."""
    rows = torch.arange(problem.limits.max_tokens + 1, device=shared.experts.down.device)
    return SharedExpert(
        experts=kernel.pack(shared.experts, problem.shared()),
        rows=rows,
        bounds=torch.stack((torch.zeros_like(rows), rows), dim=1),
        gate=None if shared.gate is None else shared.gate.detach().float(),
    )


def merge_shared(
    plan: Plan,
    weights: ExpertWeights[Payload] | ExpertWeights[Tensor],
    shared: SharedWeights[Payload] | SharedWeights[Tensor],
) -> ExpertWeights[Payload]:
    """Return the experts that a layer of ``plan`` packs: the routed ones, then the shared expert, split to their width.

    Call it where ``plan.merged_shared_experts`` is not 0, and build the layer without ``shared``. Raises InputError
    where weights and plan disagree, and PlanError where the stored weights cannot be joined.
    """
    count = plan.merged_shared_experts
    if not count:
        raise InputError(
            "merge_shared: the plan runs the shared expert separately; pass it to MoELayer as shared=, or plan with "
            "Overrides(shared='merged')"
        )
    routed, shared_expert = as_payloads(weights), as_payloads(shared.experts)
    check_weights(routed, plan.problem.routed)
    check_weights(shared_expert, plan.problem.shared())
    form = activation_format(plan.activation_format)
    if form.static and not form.by_expert and shared_expert.input_reach != routed.input_reach:
        raise forced_shared_error(
            "merged",
            f"found static activation scales for inputs up to {shared_expert.input_reach}, those of the routed experts "
            f"go up to {routed.input_reach}",
        )
    try:
        pieces = [routed, split_shared(shared_expert, count)]
        gate_up = _concatenated([piece.gate_up for piece in pieces])
        down = _concatenated([piece.down for piece in pieces])
    except InputError as error:
        raise forced_shared_error("merged", str(error)) from error
    reach = None
    if form.by_expert:
        reach = torch.cat([piece.expert_reach for piece in pieces if piece.expert_reach is not None])
    return replace(routed, gate_up=gate_up, down=down, expert_reach=reach)


def check_shared(
    plan: Plan, weights: ExpertWeights[Payload], shared: SharedWeights[Payload] | None, after_expert: object
) -> None:
    """Compare the shared expert that a layer is built from with its plan; raises InputError.

    On ranks that do not add it, it may be missing. Raises PlanError where ``after_expert`` would be applied to a merged
    shared expert.
    """
    spec = plan.problem.spec
    if shared is None and not plan.adds_shared:
        return
    if plan.merged_shared_experts:
        experts, planned = weights.gate_up.shape[0], plan.routed_problem.slots
        if shared is not None or experts != planned:
            raise InputError(
                f"shared: the plan merges the shared expert with the routed experts, {planned} in all, and found "
                f"{experts} experts {'without' if shared is None else 'and'} shared= weights; build "
                "MoELayer(collegium.merge_shared(plan, weights, shared), plan), without shared="
            )
        if after_expert is not None:
            raise forced_shared_error("merged", "after_expert is for the rows of the routed experts alone")
        return
    check_presence("shared", required=spec.shared is not None, present=shared is not None)
    if spec.shared is None or shared is None:
        return
    gate_shape = (1, spec.hidden_size) if spec.shared.gated else None
    check_tensor("shared", "gate", shared.gate, gate_shape, f"gated={spec.shared.gated}")
    shared_problem = plan.problem.shared()
    gate_up, down = shared.experts.gate_up.name, shared.experts.down.name
    if (gate_up, down) != shared_problem.formats:
        raise InputError(
            f"shared: the payloads are {format_names((gate_up, down))}, the plan is for "
            f"{format_names(shared_problem.formats)}; plan with SharedSpec(weight_format={gate_up!r}, "
            f"down_format={down!r})"
        )
    check_weights(shared.experts, shared_problem)


def check_shared_unchanged(old: Plan, new: Plan) -> None:
    """Raise InputError unless the shared expert that was packed for ``old`` also serves ``new``."""
    if old.merged_shared_experts or new.merged_shared_experts:
        raise InputError(
            f"swap: the old and the new plan merge the shared expert into {old.merged_shared_experts} and "
            f"{new.merged_shared_experts} routed experts, and only a layer that is built anew can do that. Load the "
            "layer with Overrides(shared='side_stream')"
        )
    if old.problem.spec.shared is None:
        return
    if (old.shared_kernel, old.problem.shared()) != (new.shared_kernel, new.problem.shared()):
        raise InputError(
            f"swap: the shared expert is packed for {old.shared_kernel} and {old.activation_format} activations, with "
            f"the new weights it would need {new.shared_kernel} and {new.activation_format}; force the old choices, or "
            "load another layer"
        )


def slice_shared(plan: Plan, shared: SharedWeights[Payload] | SharedWeights[Tensor]) -> SharedWeights[Payload]:
    """Return this rank's slice of the shared expert's width: rows of gate and up, columns of down.

    Call it with the whole shared expert where ``plan.problem.shared_slices`` is above 1. Raises InputError where
    weights and plan disagree.
    """
    number, count = plan.shared_slice
    experts = as_payloads(shared.experts)
    check_weights(experts, replace(plan.problem, shared_slices=1).shared())
    width = experts.down.shape[-1] // count
    start, stop = number * width, (number + 1) * width
    rows, columns = experts.gate_up.rows(start, stop), experts.down.columns(start, stop)
    return SharedWeights(experts=replace(experts, gate_up=rows, down=columns), gate=shared.gate)


def split_shared(shared: ExpertWeights[Payload], count: int) -> ExpertWeights[Payload]:
    """Return the shared expert as ``count`` experts; raises InputError where that would split a group."""
    pieces = _split_by_width(shared, count)
    gate_up, down = _concatenated([piece.gate_up for piece in pieces]), _concatenated([piece.down for piece in pieces])
    reach = shared.expert_reach
    return replace(shared, gate_up=gate_up, down=down, expert_reach=None if reach is None else reach.repeat(count, 1))


def _split_by_width(shared: ExpertWeights[Payload], count: int) -> list[ExpertWeights[Payload]]:
    """Return the shared expert as ``count`` experts; raises InputError where that would split a group."""
    if count == 1:
        return [shared]
    width = shared.down.shape[-1] // count
    slices = [(start, start + width) for start in range(0, count * width, width)]
    return [
        ExpertWeights(gate_up=shared.gate_up.rows(start, stop), down=shared.down.columns(start, stop))
        for start, stop in slices
    ]


def _concatenated(payloads: Sequence[P]) -> P:
    """Return all experts of ``payloads`` in one payload; raises InputError where they are stored differently."""
    routed, *others = payloads
    routed_storage = _storage(routed)
    for other in others:
        storage = _storage(other)
        if storage != routed_storage:
            differences = [
                f"{key} {value}, not {routed_storage.get(key)}"
                for key, value in storage.items()
                if value != routed_storage.get(key)
            ]
            raise InputError(f"the shared expert is stored with {'; '.join(differences)} as the routed ones")
    tensors = [payload.tensors() for payload in payloads]
    joined = {key: torch.cat([parts[key] for parts in tensors]) for key in tensors[0]}
    experts = sum(payload.shape[0] for payload in payloads)
    return replace(routed, shape=(experts, *routed.shape[1:]), **joined)


def _storage(payload: Payload) -> dict[str, Any]:
    """Return how one expert of ``payload`` is stored: every field but the shape, and of tensors shape and dtype."""
    layouts = {key: (tuple(tensor.shape[1:]), tensor.dtype) for key, tensor in payload.tensors().items()}
    values = {field.name: getattr(payload, field.name) for field in fields(payload) if field.name != "shape"}
    return {**values, **layouts}
