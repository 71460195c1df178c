from __future__ import annotations

from functools import partial

import pytest
import torch

from raising import assert_values

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from graphed_layers import deserted, replayed
from peer_kernels import exchange, lose
from ranks import run_ranks
from split_layers import compare

WORLD = min(torch.cuda.device_count(), 4)
pytestmark = pytest.mark.skipif(WORLD < 2, reason="needs two GPUs")


def test_kernels_exchange_what_one_rank_computes() -> None:
    assert run_ranks(exchange, WORLD, "nccl", seconds=120) == [[]] * WORLD


def test_absent_ranks_are_named() -> None:
    first, last = run_ranks(lose, 2, "nccl", seconds=120)
    assert first[0] == last[0] == "all NaN True"
    assert first[1].startswith("symm_mem dispatch; ranks (1,); symm_mem dispatch on rank 0: rank 1 did not come within")
    assert last[1].startswith("symm_mem combine; ranks (0,); symm_mem combine on rank 1: rank 0 gave up before")
    assert first[2] == last[2] == "renewed True"


def test_ranks_equal_one_layer() -> None:
    assert run_ranks(partial(compare, dispatchers=("symm_mem",)), WORLD, "nccl", seconds=300) == [[]] * WORLD


@pytest.mark.parametrize("combine", ["exact", "reduced"])
def test_graph_matches_one_layer_or_collectives(combine: str) -> None:
    assert run_ranks(partial(replayed, combine=combine), WORLD, "nccl", seconds=300) == [[]] * WORLD


def test_absent_neighbour_reported_in_bounded_time() -> None:
    first, last = run_ranks(deserted, 2, "nccl", seconds=120)
    assert_values(first[0], "symm_mem dispatch", "rank 0", "rank 1")
    assert first[1] == first[0], "and again at the next call"
    assert_values(last[0], "symm_mem combine", "rank 1", "rank 0")
    assert_values(first[2], "symm_mem dispatch", "rank 1", "1 s")
