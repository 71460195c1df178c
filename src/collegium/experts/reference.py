"""The reference experts kernel: any format, any activation, CPU and GPU, exactly the recipe and nothing clever.

For each row of expert e, with A the activation format and float32 for everything else::

    q  = A(x * input_weight)                    quantise and dequantise
    gu = q @ decode(gate_up[e]).T + bias        [P, I]
    h  = A(activation(gu))                      [I]
    y  = h @ decode(down[e]).T + bias           [H]

One expert's weights are decoded at a time. Every other kernel is judged against this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from ..ops.activation import activate
from ..ops.quantize import activation_format

if TYPE_CHECKING:
    from torch import Tensor

    from ..formats.payload import Payload
    from ..ops.quantize import ActivationFormat
    from ..types import ActivationSpec, ContiguousBatch, ExpertWeights, Problem

__all__ = ["Reference"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Packed:
    weights: ExpertWeights[Payload]
    activation: ActivationSpec
    activations: ActivationFormat


class Reference:
    """Judge of all other kernels; reads the expert offsets on the host, so it cannot be captured in a CUDA graph."""

    name = "reference"
    capturable = False

    def refuse(self, problem: Problem) -> str | None:
        """Refuse nothing but a problem spread over several ranks."""
        if problem.world_size * problem.tp_size > 1:
            return f"asked for world_size={problem.world_size} and tp_size={problem.tp_size}; it runs on one rank only"
        return None

    def workspace_bytes(self, problem: Problem) -> int:
        """Decoded weights of one expert, and the rows of the largest batch all routed to one expert."""
        spec = problem.spec
        hidden, wide = spec.expert_hidden_size, spec.intermediate_size
        rows = problem.limits.max_tokens * spec.routing.top_k
        weights = wide * hidden * max(spec.gate_up_parts, 1)
        return 4 * (weights + rows * (2 * hidden + (spec.gate_up_parts + 1) * wide))

    def pack(self, weights: ExpertWeights[Payload], problem: Problem) -> _Packed:
        """Keep the weights as they are."""
        name = problem.activation_format or problem.dtype
        return _Packed(weights=weights, activation=problem.spec.activation, activations=activation_format(name))

    def run(self, batch: ContiguousBatch, packed: _Packed) -> Tensor:
        """Return ``[R, H]`` float32; rows of dropped assignments are zero."""
        hidden = packed.weights.down.shape[-2]
        rows = torch.zeros(batch.source.numel(), hidden, dtype=torch.float32, device=batch.x.device)
        offsets: list[int] = batch.expert_offsets.tolist()
        for expert, (start, stop) in enumerate(pairwise(offsets)):
            if stop > start:
                rows[start:stop] = _one_expert(batch, packed, expert, slice(start, stop))
        return rows


def _one_expert(batch: ContiguousBatch, packed: _Packed, expert: int, span: slice) -> Tensor:
    weights = packed.weights
    x = batch.x[batch.source[span]]
    if batch.input_weights is not None:
        x = (x.float() * batch.input_weights[span, None]).to(x.dtype)
    gate_up = weights.gate_up[expert].decode()
    parts, wide, hidden = gate_up.shape
    both = packed.activations.round_trip(x) @ gate_up.reshape(parts * wide, hidden).T
    both = both.view(-1, parts, wide)
    if weights.gate_up_bias is not None:
        both = both + weights.gate_up_bias[expert].float()
    inner = packed.activations.round_trip(activate(both, packed.activation))
    out = inner @ weights.down[expert].decode().T
    if weights.down_bias is not None:
        out = out + weights.down_bias[expert].float()
    return out
