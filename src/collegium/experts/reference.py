"""The reference kernel: any format, any activation, CPU and GPU; slow and exact.

For each row of expert e, with A the activation format (static ones have a scale for each of the two places) and float32
for everything else::

    q  = A(x * input_weight)                    quantise and dequantise
    gu = q @ decode(gate_up[e]).T + bias        [P, I]
    h  = A(activation(gu))                      [I]
    y  = h @ decode(down[e]).T + bias           [H]

An adapter's changes are added to gu, from ``x * input_weight``, and to y, from the activation, neither quantised. One
expert's weights are decoded at a time. All other kernels are tested against this one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from ..formats.payload import Payload
from ..ops.activation import activate
from ..ops.quantize import ActivationFormat, QuantizedRows, formats_within
from ..problem import ExpertsProblem
from ..runtime.memory import Memory, Regions
from ..types import ActivationSpec, ContiguousBatch, ExpertWeights
from .base import ExpertKernel, PackedWeights, map_tensors, refuse_codes, refuse_fast, require_expert_reach

__all__ = ["Observer", "Reference", "ReferenceExperts"]

Observer = Callable[[int, Tensor, Tensor], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceExperts(PackedWeights):
    """The weights as they are stored.

    observer: called with an expert, its input rows ``[R, H]`` and its rows between the products ``[R, I]``, both
    float32 before they are quantised; for calibration.
    """

    weights: ExpertWeights[Payload]
    activation: ActivationSpec
    activations: tuple[ActivationFormat, ActivationFormat]
    input_reach: tuple[float, float] | None = None
    observer: Observer | None = field(default=None, compare=False, repr=False)

    def run(self, batch: ContiguousBatch, memory: Memory | None = None) -> Tensor:
        """Return ``[R, H]`` float32; rows of dropped assignments are zero. torch allocates the memory."""
        form = self.activations[0]
        refuse_codes(batch, Reference.name, form.name if form.e4m3 else None)
        hidden = self.weights.down.shape[-2]
        rows = torch.zeros(batch.source.numel(), hidden, dtype=torch.float32, device=batch.x.device)
        offsets: list[int] = batch.expert_offsets.tolist()
        for expert, (start, stop) in enumerate(pairwise(offsets)):
            if stop > start:
                rows[start:stop] = _one_expert(batch, self, expert, slice(start, stop))
        return rows

    def reach_of(self, slot: int) -> tuple[float, float] | None:
        """Return the largest inputs of ``slot`` that do not saturate."""
        if not self.activations[0].by_expert:
            return self.input_reach
        before_gate_up, before_down = self.forms_of(slot)
        return before_gate_up.largest_input, before_down.largest_input

    def forms_of(self, expert: int) -> tuple[ActivationFormat, ActivationFormat]:
        """Return the formats of an expert's rows, with its scales where each expert has some."""
        first, second = self.activations
        reach = self.weights.expert_reach
        if not first.by_expert or reach is None:
            return self.activations
        before_gate_up, before_down = reach[expert].tolist()
        return first.within(before_gate_up), second.within(before_down)

    def _map_tensors(self, change: Callable[[Tensor], Tensor]) -> ReferenceExperts:
        def changed(payload: Payload) -> Payload:
            result = map_tensors(payload, change, *payload.tensors())
            count = next(iter(result.tensors().values())).shape[0]
            return replace(result, shape=(count, *payload.shape[1:]))

        weights = replace(self.weights, gate_up=changed(self.weights.gate_up), down=changed(self.weights.down))
        return replace(self, weights=map_tensors(weights, change, "gate_up_bias", "down_bias", "expert_reach"))


class Reference(ExpertKernel):
    """Ground truth of all other kernels; reads the expert offsets on the host, so no CUDA graph can capture it."""

    name = "reference"
    takes_codes = True

    def refuse(self, problem: ExpertsProblem) -> str | None:
        """Refuse approximate activation functions."""
        return refuse_fast(problem)

    def regions(self, problem: ExpertsProblem) -> Regions:
        """Return the decoded weights of one expert, and the rows of the largest batch all routed to one expert."""
        hidden, intermediate = problem.hidden, problem.intermediate
        row = 2 * hidden + (problem.parts + 1) * intermediate
        return {"decoded": 4 * intermediate * hidden * problem.parts, "rows": 4 * problem.rows * row}

    def pack(self, weights: ExpertWeights[Payload], problem: ExpertsProblem) -> ReferenceExperts:
        """Return the weights as they are."""
        forms = formats_within(problem.activation_format, weights.input_reach)
        reach = weights.input_reach if forms[0].static else None
        require_expert_reach(weights, forms[0])
        by_expert = weights.expert_reach if forms[0].by_expert else None
        weights = replace(weights, expert_reach=None if by_expert is None else by_expert.to(weights.down.device))
        return ReferenceExperts(weights=weights, activation=problem.activation, activations=forms, input_reach=reach)


def _one_expert(batch: ContiguousBatch, packed: ReferenceExperts, expert: int, span: slice) -> Tensor:
    weights = packed.weights
    source, (form, between) = batch.source[span], packed.forms_of(expert)
    x = batch.x[source]
    if batch.input_weights is not None:
        x = (x.float() * batch.input_weights[span, None]).to(x.dtype)
    tokens = x
    if batch.scale is None:
        x = form.round_trip(x)
    else:
        x = form.dequantize(QuantizedRows(codes=x, shape=(x.shape[0], x.shape[1]), scales=batch.scale[source]))
    gate_up = weights.gate_up[expert].decode()
    parts, intermediate, hidden = gate_up.shape
    both = x @ gate_up.reshape(parts * intermediate, hidden).T
    both = both.view(-1, parts, intermediate)
    if weights.gate_up_bias is not None:
        both = both + weights.gate_up_bias[expert].float()
    rows = [(expert, slice(0, source.numel()))]
    if batch.adapters is not None:
        ids = batch.adapters.ids[source]
        batch.adapters.packed.gate_up.add_to(both.view(-1, parts * intermediate), tokens, ids, rows)
    hidden = activate(both, packed.activation)
    if packed.observer is not None:
        packed.observer(expert, tokens.float(), hidden)
    if batch.middle_scale is not None:
        between = between.with_row_scales(batch.middle_scale[source])
    inner = between.round_trip(hidden)
    out = inner @ weights.down[expert].decode().T
    if weights.down_bias is not None:
        out = out + weights.down_bias[expert].float()
    if batch.adapters is not None:
        batch.adapters.packed.down.add_to(out, hidden, batch.adapters.ids[source], rows)
    return out
