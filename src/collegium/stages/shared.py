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
from ..experts import ExpertKernel, PackedWeights
from ..formats.payload import Payload
from ..ops.linear import sigmoid_gate
from ..ops.quantize import activation_format
from ..planning import Plan, plan
from ..problem import Problem
from ..runtime.memory import Memory, part
from ..sharing import forced_in_vain
from ..types import ContiguousBatch, ExpertWeights, SharedWeights
from .checks import check_weights

__all__ = ["SharedExpert", "check_shared_unchanged", "pack_shared", "resolve_shared"]

P = TypeVar("P", bound=Payload)


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedExpert:
    """The packed shared expert of a layer.

    rows: ``[max_tokens + 1]`` int64, every batch is the first rows in order; bounds: ``[max_tokens + 1, 2]``, row T is
    (0, T). gate: ``[1, D]`` float32 or None.
    """

    experts: PackedWeights
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
        return sigmoid_gate(x, self.gate, out, memory=part(memory, "gate"))

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


def resolve_shared(
    made: Plan, weights: ExpertWeights[Payload], shared: SharedWeights[Payload], after_expert: object
) -> tuple[Plan, ExpertWeights[Payload], SharedWeights[Payload] | None]:
    """Return the plan for the shared expert as it is stored, what is packed as routed experts, and what is apart.

    after_expert: what else is done to the rows of routed experts. Raises PlanError where no kernel runs it, or where it
    was to be merged and cannot be, and InputError when weights and spec disagree.
    """
    spec, found = made.problem.spec, shared.experts.formats
    wanted = made.problem.shared() if spec.shared is not None else None
    if wanted is not None and spec.shared is not None and wanted.formats != replace(wanted, **found).formats:
        spec = replace(spec, shared=replace(spec.shared, **found))
        made = plan(replace(made.problem, spec=spec), made.overrides)
    check_weights(shared.experts, made.problem.shared())
    if not made.merged:
        return made, weights, shared
    if after_expert is not None:
        raise forced_in_vain("merged", "after_expert is for the rows of the routed experts alone")
    own, routed = shared.experts.input_reach, weights.input_reach
    if activation_format(made.activation_format).static and own != routed:
        reason = f"found static activation scales for inputs up to {own}, those of the routed experts go up to {routed}"
        raise forced_in_vain("merged", reason)
    try:
        return made, _behind(weights, _cut(shared.experts, made.merged)), None
    except InputError as error:
        raise forced_in_vain("merged", str(error)) from error


def check_shared_unchanged(before: Plan, made: Plan) -> None:
    """Raise InputError where the shared expert packed for the plan ``before`` cannot stay as it is in ``made``."""
    if before.merged or made.merged:
        raise InputError(
            f"swap: the shared expert is merged, as {before.merged} of the routed experts, and was to be "
            f"{made.merged} of the new ones; which happens when a layer is built. Load with Overrides(shared='beside')"
        )
    if before.problem.spec.shared is None:
        return
    found, needed = ((own.shared_kernel, own.problem.shared()) for own in (before, made))
    if found != needed:
        raise InputError(
            f"swap: the shared expert is packed for {before.shared_kernel} and {before.activation_format} activations, "
            f"beside these weights it would need {made.shared_kernel} and {made.activation_format}; force what it has, "
            "or load another layer"
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
    return replace(weights, gate_up=_joined([own.gate_up for own in every]), down=_joined([own.down for own in every]))


def _joined(payloads: Sequence[P]) -> P:
    """Return all experts of ``payloads`` in one; raises InputError where they are stored in different ways."""
    kinds = [_stored(each) for each in payloads]
    for kind in kinds[1:]:
        if kind != kinds[0]:
            apart = [f"{k} {own} beside {kinds[0].get(k)}" for k, own in kind.items() if own != kinds[0].get(k)]
            raise InputError(f"the shared expert is stored as {', '.join(apart)} of the routed ones")
    count, tensors = sum(each.shape[0] for each in payloads), [each.tensors() for each in payloads]
    made = {key: torch.cat([each[key] for each in tensors]) for key in tensors[0]}
    return replace(payloads[0], shape=(count, *payloads[0].shape[1:]), **made)


def _stored(payload: Payload) -> dict[str, Any]:
    """Return everything about one expert of ``payload`` but its numbers."""
    named = {field.name: getattr(payload, field.name) for field in fields(payload)}
    kinds = {k: (tuple(t.shape[1:]), t.dtype) for k, t in payload.tensors().items()}
    return {k: kinds.get(k, own) for k, own in named.items() if k != "shape"}
