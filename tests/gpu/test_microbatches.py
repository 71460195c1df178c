"""Halves of a batch on two streams of each GPU, against whole batches."""

from __future__ import annotations

from functools import partial

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from torch import distributed

from collegium.parallel.placement import linear
from collegium.testing.compare import heavy_tailed
from microbatches import compare_halves
from ranks import run_ranks
from split_layers import EXPERTS, HIDDEN, RECIPES, kept, layer_of

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize("name", ["all_to_all", "all_gather", "all_to_all_fixed"])
def test_halves_equal_whole_batches(name: str) -> None:
    asked = partial(compare_halves, name=name, device="cuda", repeats=20)
    assert run_ranks(asked, 2, "nccl", seconds=400) == [[], []]


def _replayed(rank: int) -> list[str]:
    """Return where replays of captured halves differ from whole batches that are not captured."""
    device, faults, turns = f"cuda:{rank}", list[str](), 6
    placement = linear(EXPERTS, rank, distributed.get_world_size())
    options = {"dispatcher": "all_to_all_fixed", "graph": True}
    for kind, recipe in (("shared", RECIPES[0]), ("plain", RECIPES[3])):
        whole = layer_of(kind, recipe, device, placement, **options)
        halves = layer_of(kind, recipe, device, placement, microbatches=2, allow_slow=True, **options)
        kept.extend((whole, halves))
        tokens = 9 + 2 * rank
        x = torch.zeros(tokens, HIDDEN, device=device, dtype=halves.input_dtype)
        halves(x)
        graph, out = torch.cuda.CUDAGraph(), torch.empty_like(x)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            halves(x, out=out)
        for turn in range(turns):
            x.copy_(heavy_tailed(tokens, HIDDEN, seed=turn + 10 * rank))
            graph.replay()
            torch.cuda.synchronize()
            if not torch.equal(out, whole(x)):
                faults.append(f"{kind} {recipe} {turn}: a replay of halves differs from the whole batch")
        halves.check()
        graph.reset()
    return faults


def test_captured_halves_equal_whole_batches() -> None:
    assert run_ranks(_replayed, 2, "nccl", seconds=400) == [[], []]
