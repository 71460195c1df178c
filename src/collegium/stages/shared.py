"""The shared expert: to its kernel one expert that every token goes to, with a sigmoid gate where the model has one.

Where the plan merges it with the routed experts it is cut by its intermediate width into experts as wide as theirs,
which are packed behind them; nothing of it is then run here.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import InputError
from ..experts import ExpertKernel, Packed
from ..formats.payload import Payload
from ..ops.linear import linear
from ..planning import Plan, kernel_named, plan
from ..problem import Problem, Refusal
from ..runtime.memory import Memory, part
from ..sharing import not_merged
from ..types import ContiguousBatch, ExpertWeights, SharedWeights
from .checks import check_weights

__all__ = ["SharedExpert", "pack_shared", "packed_again", "settled"]

P = TypeVar("P", bound=Payload)


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedExpert:
    """The packed shared expert of a layer.

    rows: ``[max_tokens + 1]`` int64, every batch is the first rows in order; bounds: ``[max_tokens + 1, 2]``, row T is
    (0, T). gate: ``[1, D]`` float32 or None.
    """

    experts: Packed
    rows: Tensor
    bounds: Tensor
    gate: Tensor | None

    def __call__(self, x: Tensor, memory: Memory | None = None) -> Tensor:
        """Return ``[T, D]``, what is added to the routed experts' sum for ``x [T, D]``."""
        tokens = x.shape[0]
        batch = ContiguousBatch(x=x, source=self.rows[:tokens], expert_offsets=self.bounds[tokens])
        out = self.experts.run(batch, part(memory, "shared"))
        if self.gate is None:
            return out
        gate = linear(x, self.gate, memory=part(memory, "gate"))
        # In float64: torch's float32 sigmoid gives the last rows of a batch other bits on a CPU.
        return torch.sigmoid(gate.double()).float() * out

    def variants(self, tokens: int) -> frozenset[Hashable]:
        """Return what has to be compiled for a batch of ``tokens`` tokens."""
        return self.experts.tiling.variants(tokens, unsorted=False)


def pack_shared(shared: SharedWeights[Payload], problem: Problem, kernel: ExpertKernel) -> SharedExpert:
    """Pack the shared expert for ``kernel``."""
    asked = problem.shared()
    rows = torch.arange(problem.limits.max_tokens + 1, device=shared.experts.down.device)
    return SharedExpert(
        experts=kernel.pack(shared.experts, asked),
        rows=rows,
        bounds=torch.stack((torch.zeros_like(rows), rows), dim=1),
        gate=None if shared.gate is None else shared.gate.detach().float(),
    )


def settled(
    made: Plan, weights: ExpertWeights[Payload], shared: SharedWeights[Payload], after_expert: object
) -> tuple[Plan, ExpertWeights[Payload], SharedWeights[Payload] | None]:
    """Return the plan for the shared expert as it is stored, what is packed as routed experts, and what is apart.

    after_expert: what else is done to the rows of routed experts. Raises PlanError where no kernel runs it, or where it
    was to be merged and cannot be, and InputError when weights and spec disagree.
    """
    spec, found = made.problem.spec, shared.experts.down.name
    if spec.shared is not None and found != (spec.shared.weight_format or spec.weight_format):
        spec = replace(spec, shared=replace(spec.shared, weight_format=found))
        made = plan(replace(made.problem, spec=spec), made.force)
    check_weights(shared.experts, made.problem.shared())
    if not made.merged:
        return made, weights, shared
    reason = "after_expert is for the rows of the routed experts alone"
    if after_expert is None:
        try:
            return made, _behind(weights, _cut(shared.experts, made.merged)), None
        except InputError as error:
            reason = str(error)
    if made.force.shared == "merged":
        raise not_merged(reason)
    again = plan(made.problem, replace(made.force, shared="apart"))
    kept = tuple(refusal for refusal in again.refusals if refusal.what != "shared")
    why = Refusal(what="shared", name="merged", reason=reason)
    return replace(again, refusals=(*kept, why), force=made.force), weights, shared


def packed_again(old: Packed, before: Plan, weights: ExpertWeights[Payload], made: Plan) -> Packed:
    """Return ``weights`` packed as ``made`` says; a shared expert that is merged into ``old`` is taken from there.

    before: the plan of ``old``. Raises InputError where the shared expert would need another packing.
    """
    own, kernel, first = before.problem.spec.shared, kernel_named(made.kernel), weights.down.shape[0]
    ways = [(each.shared_kernel, each.merged, own and each.problem.shared()) for each in (before, made)]
    if ways[0] == ways[1] and not made.merged:
        return kernel.pack(weights, made.problem.routed)
    if ways[0] == ways[1]:
        # Any expert keeps the place until the packed one is put there.
        other = ExpertWeights(gate_up=weights.gate_up[:1], down=weights.down[:1])
        packed = kernel.pack(_behind(weights, [other] * made.merged), made.inside.routed)
        if list(map(_kind, old.slots())) == list(map(_kind, packed.slots())):
            for slot in range(first, first + made.merged):
                packed.put(slot, old.take(slot))
            return packed
    found, wanted = (f"{each.shared_kernel} and {each.activation_format} activations" for each in (before, made))
    raise InputError(
        f"swap: the shared expert is packed for {found}, merged into {before.merged}; beside these weights it would "
        f"need {wanted}, merged into {made.merged}, or another layout; force what it has, or load another layer"
    )


def _cut(shared: ExpertWeights[Payload], count: int) -> list[ExpertWeights[Payload]]:
    """Return the shared expert as ``count`` experts; raises InputError where its width is cut inside a group."""
    if count == 1:
        return [shared]
    wide = shared.down.shape[-1] // count
    cuts = [(start, start + wide) for start in range(0, count * wide, wide)]
    return [ExpertWeights(gate_up=shared.gate_up.rows(*own), down=shared.down.columns(*own)) for own in cuts]


def _behind(weights: ExpertWeights[Payload], more: Sequence[ExpertWeights[Payload]]) -> ExpertWeights[Payload]:
    every = weights, *more
    return ExpertWeights(gate_up=_joined([own.gate_up for own in every]), down=_joined([own.down for own in every]))


def _joined(payloads: Sequence[P]) -> P:
    """Return all experts of ``payloads`` in one; raises InputError where they are stored in different ways."""
    kinds, counts = [_stored(each) for each in payloads], [each.shape[0] for each in payloads]
    for kind in kinds[1:]:
        if kind != kinds[0]:
            raise InputError(f"the shared expert is stored as {kind}, the routed ones as {kinds[0]}")
    made = {k: own.new_empty((sum(counts), *own.shape[1:])) for k, own in payloads[0].tensors().items()}
    start = 0
    for each, count in zip(payloads, counts, strict=True):
        for key, tensor in each.tensors().items():
            made[key][start : start + count].copy_(tensor)
        start += count
    return replace(payloads[0], shape=(start, *payloads[0].shape[1:]), **made)


def _stored(payload: Payload) -> dict[str, Any]:
    """Return everything about one expert of ``payload`` but its numbers."""
    named = {field.name: getattr(payload, field.name) for field in fields(payload)}
    return {k: _kind(own) if isinstance(own, torch.Tensor) else own for k, own in named.items() if k != "shape"}


def _kind(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape[1:]), tensor.dtype
