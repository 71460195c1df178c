from __future__ import annotations

from functools import partial

import pytest

from peer_kernels import exchange, lose
from ranks import run_ranks
from split_layers import compare


@pytest.mark.parametrize("world", [2, 4])
def test_a_layer_over_ranks_has_the_bits_of_one_layer(world: int) -> None:
    assert run_ranks(partial(compare, dispatcher="symm_mem"), world, seconds=300) == [[]] * world


@pytest.mark.parametrize("world", [2, 4])
def test_kernels_exchange_what_torch_does(world: int) -> None:
    assert run_ranks(exchange, world, seconds=300) == [[]] * world


def test_a_rank_that_does_not_come_is_named_and_nobody_gets_a_number() -> None:
    first, last = run_ranks(lose, 2)
    assert first[0] == last[0] == "all NaN True"
    assert first[1].startswith("symm_mem dispatch; ranks (1,); symm_mem dispatch on rank 0: rank 1 did not come within")
    assert last[1].startswith("symm_mem combine; ranks (0,); symm_mem combine on rank 1: rank 0 gave up before")
    assert first[2] == last[2] == "renewed True"
