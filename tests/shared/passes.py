"""What every kernel of grouped products must show of whole passes, on the device its weights are packed on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from collegium.parallel.local import Local
from collegium.testing.compare import heavy_tailed, uneven_ids
from collegium.types import Routing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["check_replay_with_another_routing", "check_rows_stand_alone"]


def check_rows_stand_alone(packed: Any, sizes: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> None:
    """Assert that the first token's bits are the same alone and in batches of ``sizes`` tokens, top-4."""
    experts, _, _, hidden = packed.gate_up.layout.shape
    device, most = packed.gate_up.values.device, max(sizes)
    x = heavy_tailed(most, hidden, seed=3).to(device, dtype)
    ids = uneven_ids(most, 4, experts, seed=2).to(device)
    weight = torch.rand(most, 4, device=device)
    local = Local(num_experts=experts)

    def outputs(tokens: int) -> Tensor:
        batch, handle = local.dispatch(x[:tokens], Routing(topk_ids=ids[:tokens], topk_weights=weight[:tokens]))
        return local.combine(packed.run(batch), handle)

    alone = outputs(1)
    assert bool(torch.isfinite(alone).all())
    for tokens in sizes:
        assert torch.equal(outputs(tokens)[:1], alone), tokens


def check_replay_with_another_routing(packed: Any) -> None:
    """Assert that a captured pass of 32 tokens follows ids that change between replays, with the bits of eager."""
    experts, _, _, hidden = packed.gate_up.layout.shape
    local = Local(num_experts=experts)
    x = heavy_tailed(32, hidden, seed=3).bfloat16().cuda()
    weight = torch.rand(32, 4, device="cuda")
    ids = uneven_ids(32, 4, experts, seed=2).cuda()

    def layer() -> Tensor:
        batch, handle = local.dispatch(x, Routing(topk_ids=ids, topk_weights=weight))
        return local.combine(packed.run(batch), handle)

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = layer()
    for seed in (5, 6):
        ids.copy_(uneven_ids(32, 4, experts, seed=seed))
        graph.replay()
        assert torch.equal(replayed, layer())
