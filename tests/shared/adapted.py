"""Adapters of experts with heavy-tailed matrices, and the truth of a layer whose tokens have them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from collegium.adapters import ExpertAdapter, ExpertAdapters, LowRankPair, PackedAdapters
from collegium.testing.compare import heavy_tailed
from truth import moe_truth

if TYPE_CHECKING:
    from torch import Tensor

    from collegium.types import ActivationSpec

__all__ = ["adapted_truth", "packed_adapters", "random_adapters"]


def random_adapters(
    ranks: tuple[int, ...], experts: int, intermediate: int, hidden: int, *, gated: bool = True, seed: int = 0
) -> ExpertAdapters:
    """Return an adapter of each rank, about as large as the weights; scales differ by expert and projection.

    The second adapter, if there is one, has another rank for down, and none for up.
    """

    def pair(rank: int, rows: int, columns: int, at: int) -> LowRankPair:
        a = heavy_tailed(experts, rank, columns, seed=at, channels=False) / columns**0.5
        b = heavy_tailed(experts, rows, rank, seed=at + 1, channels=False) / rank**0.5
        return LowRankPair(a=a, b=b, scale=0.5 + torch.arange(experts) % 3 / 2)

    adapters: list[ExpertAdapter] = []
    for number, rank in enumerate(ranks):
        at = seed + 10 * number
        second = number == 1
        adapters.append(
            ExpertAdapter(
                name=f"adapter{number}",
                gate=pair(rank, intermediate, hidden, at) if gated else None,
                up=None if second and gated else pair(rank, intermediate, hidden, at + 2),
                down=pair(rank + 1 if second else rank, hidden, intermediate, at + 4),
            )
        )
    return ExpertAdapters(tuple(adapters))


def packed_adapters(
    adapters: ExpertAdapters,
    dtype: torch.dtype = torch.bfloat16,
    *,
    gated: bool = True,
    device: str | torch.device = "cpu",
) -> PackedAdapters:
    """Return ``adapters`` as a layer packs them."""
    down = adapters.adapters[0].down
    assert down is not None
    experts, hidden, _ = down.b.shape
    return PackedAdapters.pack(
        adapters,
        experts=experts,
        gated=gated,
        intermediate=down.a.shape[2],
        hidden=hidden,
        dtype=dtype,
        device=torch.device(device),
    )


def adapted_truth(
    x: Tensor,
    weights: tuple[Tensor, Tensor],
    ids: Tensor,
    topk_weights: Tensor,
    adapters: ExpertAdapters,
    adapter_ids: Tensor,
    activation: ActivationSpec,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Return the float64 output of merged weights, those of each token's adapter, with A and B rounded to ``dtype``."""
    out = torch.zeros(x.shape[0], weights[1].shape[1], dtype=torch.float64)
    for number in range(-1, len(adapters)):
        rows = (adapter_ids == number).nonzero()[:, 0]
        gate_up, down = (tensor.double().clone() for tensor in weights)
        if number >= 0:
            adapter = adapters.adapters[number]
            names = ("gate", "up") if gate_up.shape[1] == 2 else ("up",)
            for part, name in enumerate(names):
                if name in adapter.pairs:
                    gate_up[:, part] += _change(adapter.pairs[name], dtype)
            if adapter.down is not None:
                down += _change(adapter.down, dtype)
        out[rows] = moe_truth(x[rows], gate_up, down, ids[rows], topk_weights[rows], activation)
    return out


def _change(pair: LowRankPair, dtype: torch.dtype) -> Tensor:
    a, b = (tensor.to(dtype).double() for tensor in (pair.a, pair.b))
    scale = torch.as_tensor(pair.scale).double().expand(a.shape[0])
    return scale[:, None, None] * (b @ a)
