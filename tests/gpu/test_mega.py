"""Passes over ranks in one kernel: virtual ranks on one GPU, and real ones."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch

from raising import assert_values

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from collegium import Routing
from collegium.kernels.enums import PHASE_COMBINE, PHASE_PUBLISH
from collegium.pipelines import mega
from collegium.pipelines.mega import Mega
from collegium.runtime.launch import launch
from graphed_layers import deserted, replayed
from mega_ranks import CASES, Case, Ranks, given
from ranks import run_ranks
from rough_tokens import same

WORLD = min(torch.cuda.device_count(), 4)
several = pytest.mark.skipif(WORLD < 2, reason="needs two GPUs")
hopper = pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU")
pytestmark = hopper
TURNS = ((3, 1, 0, 6), (0, 5, 2, 1), (1, 0, 0, 0), (70, 3, 9, 4), (33, 300, 12, 128), (600, 0, 600, 77))
WIDER = Case(1024, 512, 4)


@pytest.mark.parametrize(("case", "world"), list(product((*CASES, WIDER), (2, 4))))
def test_virtual_ranks_equal_one_rank_bitwise(case: Case, world: int) -> None:
    ranks = Ranks(case, world, "cuda", most=600)
    for turn, counts in enumerate(TURNS):
        for dtype in (torch.float32, torch.bfloat16):
            inputs = ranks.each(lambda r, n=counts, t=turn: given(case, 10 * t + r, n[r], hot=t % 3 == 2))
            for rank, (out, own) in enumerate(zip(ranks.everybody(inputs, dtype), inputs, strict=True)):
                assert same(out, ranks.wanted(own, dtype)), (counts, rank, dtype)


@pytest.mark.parametrize("case", [CASES[0], WIDER])
def test_concurrent_ranks_equal_one_rank_bitwise(case: Case) -> None:
    world = 2
    ranks = Ranks(case, world, "cuda", most=600)
    # As many programs of each rank as fit beside those of the other one.
    for rank, own in enumerate(ranks.pipelines):
        machine = own.parts.experts.machine  # pyright: ignore[reportAttributeAccessIssue]
        packed = replace(own.parts.experts, machine=replace(machine, sms=machine.sms // world))  # pyright: ignore
        ranks.pipelines[rank] = Mega(parts=replace(own.parts, experts=packed))
    streams = [torch.cuda.Stream() for _ in range(world)]
    for turn in range(60):
        counts = TURNS[turn % len(TURNS)]
        if max(counts[:world]) == 0:
            continue
        inputs = ranks.each(lambda r, n=counts, t=turn: given(case, 10 * t + r, n[r], hot=t % 3 == 2))
        if turn < len(TURNS):  # compiled, so that both are launched at once
            for rank, own in enumerate(inputs):
                ranks.begin([x.shape[0] for x, _ in inputs], seconds=1e-4)
                with patch.object(mega, "launch", _beside_others):
                    ranks.phase(rank, own, torch.empty_like(own[0]).float(), (PHASE_PUBLISH, PHASE_COMBINE))
            ranks.forget()
        outs = [torch.full(x.shape, torch.inf, device="cuda") for x, _ in inputs]
        wanted = [ranks.wanted(own) for own in inputs]
        ranks.begin([x.shape[0] for x, _ in inputs], seconds=10)
        torch.cuda.synchronize()
        for rank, own in enumerate(inputs):
            with torch.cuda.stream(streams[rank]), patch.object(mega, "launch", _beside_others):
                ranks.phase(rank, own, outs[rank], (PHASE_PUBLISH, PHASE_COMBINE))
        torch.cuda.synchronize()
        for rank in range(world):
            assert same(outs[rank], wanted[rank]), (turn, rank)


def _beside_others(*args: Any, **options: Any) -> None:
    """Launch without the promise that a whole grid is alone on the GPU."""
    launch(*args, **options | {"launch_cooperative_grid": False})


def test_self_peer_launch_equals_one_rank() -> None:
    # Every peer is this rank, so tokens whose experts are all here get their sums, each rank's share of them alike.
    ranks = Ranks(WIDER, 2, "cuda", most=600)
    place = ranks.tables[0].slots[0]
    here = [expert for expert in place if expert >= 0 and sum(expert in own for own in ranks.tables[0].slots) == 1]
    for turn in range(40):
        tokens = (1, 7, 40, 130, 600)[turn % 5]
        x, routing = given(WIDER, turn, tokens)
        ids = torch.tensor(here)[torch.randint(len(here), routing.topk_ids.shape)].cuda()
        own = x.cuda(), Routing(topk_ids=ids, topk_weights=routing.topk_weights.cuda())
        out = torch.full(x.shape, torch.inf, device="cuda")
        ranks.begin([tokens, tokens], seconds=10)
        memory = ranks.memories[0]
        assert memory.peers is not None
        deltas = torch.zeros_like(memory.peers.deltas)
        deltas[-1] = ranks.mirrors[0].data_ptr()
        memory.peers = replace(memory.peers, deltas=deltas, alone=True)
        ranks.phase(0, own, out, (PHASE_PUBLISH, PHASE_COMBINE))
        assert same(out, ranks.wanted(own)), (turn, tokens)


@several
def test_graph_over_ranks_equals_one_layer() -> None:
    assert run_ranks(partial(replayed, fused=True), WORLD, "nccl", seconds=400) == [[]] * WORLD


@several
def test_absent_neighbour_reported_in_bounded_time() -> None:
    first, last = run_ranks(partial(deserted, fused=True), 2, "nccl", seconds=200)
    assert_values(first[0], "symm_mem dispatch", "rank 0", "rank 1")
    assert first[1] == first[0], "and again at the next call"
    assert_values(last[0], "symm_mem combine", "rank 1", "rank 0")
    assert_values(first[2], "symm_mem dispatch", "rank 1", "1 s")
