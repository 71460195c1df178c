"""How many bytes a pass takes to other ranks and back: what of its tokens goes there, and what that is in bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .combine import reduced_of
from .wire import TokenWire, message_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from ..problem import Problem
    from .expert_map import ExpertMap

__all__ = ["NOTHING", "Away", "Traffic", "away", "back_bytes", "there_bytes"]


class Away(NamedTuple):
    """What of one rank's tokens other ranks get in a pass.

    tokens: that it brings. most: that any rank brings. copies: tokens, once for each other rank they go to. rows:
    assignments that other ranks compute.
    """

    tokens: int
    most: int
    copies: int
    rows: int


class Traffic(NamedTuple):
    """Bytes between one rank and the others for its tokens: there, and back."""

    dispatch: int
    combine: int


NOTHING = Traffic(0, 0)


def away(table: ExpertMap, ids: Tensor, most: int | None = None) -> Away:
    """Return what of this rank's tokens with ``ids [T, K]`` goes to other ranks; waits for the device.

    most: tokens of the rank that brings the most, T when None.
    """
    places = table.choose(ids)
    rank = torch.where(places < 0, -1, places // table.width)
    others = (rank >= 0) & (rank != table.rank)
    each = torch.arange(table.world_size, device=ids.device)
    copies = (((rank[:, :, None] == each) & others[:, :, None]).any(dim=1)).sum()
    tokens = ids.shape[0]
    return Away(tokens, tokens if most is None else most, int(copies), int(others.sum()))


def there_bytes(problem: Problem) -> int:
    """Return the bytes of a token's message of a collective."""
    return message_bytes(TokenWire.of(problem).columns(problem.spec.routing.top_k))


def back_bytes(problem: Problem) -> int:
    """Return the bytes of what comes back at once: a row of the experts, or a rank's sum."""
    reduced = reduced_of(problem)
    if reduced is not None:
        return message_bytes(reduced.columns())
    # Experts return float32, or BF16 where that loses nothing, which a CPU decides by the weights.
    narrow = problem.dtype == "bf16" and problem.device.kind == "cuda"
    return problem.spec.expert_hidden_size * (2 if narrow else 4)
