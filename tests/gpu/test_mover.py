"""Experts move between GPUs while layers serve, with every packed format; captured graphs follow a switched map."""

from __future__ import annotations

from functools import partial

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from collegium import Placement
from collegium.balance.checksum import checksum
from collegium.parallel.expert_map import ExpertMap
from moving import RECIPES, rebalance, served_while_moving
from ranks import run_ranks

two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@two
@pytest.mark.parametrize("recipe", sorted(set(RECIPES) - {"whole"}))
def test_random_rebalances_with_replicas_preserve_bits(recipe: str) -> None:
    world = min(torch.cuda.device_count(), 4)
    work = partial(rebalance, recipe=recipe, times=150, replicas=True, spoil=25)
    for faults, counts in run_ranks(work, world, "nccl", seconds=500):
        assert not faults
        assert counts["given_up"] == counts["spoiled"] > 0
        # The stall of a switch: two small copies on the device.
        assert counts["stall"] < 0.002 * counts["switched"]


@two
def test_symmetric_memory_graph_follows_moves() -> None:
    world = min(torch.cuda.device_count(), 4)
    work = partial(served_while_moving, recipes=("mxfp4", "fp8_block", "bf16"), times=60)
    assert run_ranks(work, world, "nccl", seconds=120) == [[]] * world


def test_a_captured_graph_follows_a_switch() -> None:
    ranks = ((0, 1, 2), (2, 3))
    placed = Placement(rank=0, world_size=2, expert_ids=ranks[0], ranks=ranks, spare=1)
    table = ExpertMap(placed, 4, "cuda")
    ids = torch.tensor([[0, 1], [2, 3], [2, -1], [3, 9]], device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        table.choose(ids)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        places = table.choose(ids)
    graph.replay()
    assert torch.equal(places, table.choose(ids))
    before = places.clone()
    slots = ((0, 1, -1, 3), (2, -1, -1, -1))
    table.switch(slots, table.tables(slots).to(torch.device("cuda")))
    graph.replay()
    assert torch.equal(places, table.choose(ids))
    assert not torch.equal(places, before)


def test_device_checksum_matches_cpu_without_synchronising() -> None:
    parts = (torch.randint(0, 256, (3_000_001,), dtype=torch.uint8), torch.randn(77, 33).to(torch.bfloat16))
    sent = tuple(part.cuda() for part in parts)
    checksum(sent)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = checksum(sent)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found.cpu(), checksum(parts))
