"""The strategy of one rank: sort the assignments by expert, and weight and sum the rows back in slot order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..ops.permute import permute
from ..ops.weighted_sum import weighted_sum
from ..runtime.workspace import serves
from ..types import ContiguousBatch

if TYPE_CHECKING:
    from torch import Tensor

    from ..types import Routing

__all__ = ["Local", "LocalHandle"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalHandle:
    """What ``combine`` needs: the row of each assignment ``[T, K]`` and the weights it is multiplied by, or None."""

    slots: Tensor
    weights: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Local:
    """All experts live here. weight_on_input: the router weight multiplies the experts' input (Llama-4)."""

    num_experts: int
    weight_on_input: bool = False

    def dispatch(
        self, x: Tensor, routing: Routing, *, block_t: tuple[int, ...] = ()
    ) -> tuple[ContiguousBatch, LocalHandle]:
        """Sort the assignments of ``x [T, H]`` by expert; reads nothing on the host.

        block_t: row counts whose token tiles the batch is to bring.
        """
        carried = routing.topk_weights if self.weight_on_input else None
        order = permute(routing.topk_ids, self.num_experts, input_weights=carried, block_t=block_t)
        batch = ContiguousBatch(
            x=x,
            source=order.source,
            expert_offsets=order.expert_offsets,
            input_weights=order.weights_by_row,
            tiles=order.tiles,
            # Outside a workspace, memory that the order was made from may already have been given away.
            settled=serves(x.device),
        )
        return batch, LocalHandle(slots=order.slots, weights=None if self.weight_on_input else routing.topk_weights)

    def combine(
        self,
        rows: Tensor,
        handle: LocalHandle,
        *,
        dtype: torch.dtype = torch.float32,
        shared: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return ``[T, H]``: the weighted rows of each token summed in slot order, plus ``shared``, rounded once."""
        return weighted_sum(rows, handle.slots, handle.weights, dtype, shared=shared, out=out)
