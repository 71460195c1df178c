"""What ranks that read each other's memory are tried with: rough tokens, passes nobody agreed on, equal bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from collegium.parallel.peers import PeerBuffers
from collegium.testing.compare import heavy_tailed
from collegium.types import Routing

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["rough_tokens", "same", "unmet"]


def rough_tokens(
    tokens: int, experts: int, top_k: int, width: int, *, seed: int, hot: bool = False
) -> tuple[Tensor, Routing]:
    """Return tokens in float32, and a routing with ids of -1 and of nobody; hot: every token has expert 0."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=generator).argsort(dim=1)[:, :top_k]
    if hot:
        ids[:, 0] = 0
    ids = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.15, -1)
    ids = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.04, (1 << 40) + 1)
    weights = heavy_tailed(max(1, tokens), top_k, seed=seed + 7, channels=False)[:tokens]
    return heavy_tailed(max(1, tokens), width, seed=seed)[:tokens], Routing(topk_ids=ids, topk_weights=weights)


def unmet(space: Any, ranks: tuple[int, ...], *, layer: int, seconds: float) -> PeerBuffers:
    """Return the peers of a pass of 4 tokens in ``space`` that the ranks did not agree on before."""
    return PeerBuffers(
        rank=space.rank,
        ranks=ranks,
        layer=layer,
        bound=4,
        seconds=seconds,
        head=space.head,
        deltas=space.deltas,
    )


def same(found: Tensor, wanted: Tensor) -> bool:
    """Return whether the bits are the same, NaN for NaN."""
    return torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0)) and torch.equal(found.isnan(), wanted.isnan())
