from __future__ import annotations

from functools import partial

import pytest

from ranks import run_ranks
from split_layers import compare


@pytest.mark.parametrize("world", [2, 4])
def test_a_layer_over_ranks_has_the_bits_of_one_layer(world: int) -> None:
    assert run_ranks(partial(compare, dispatcher="symm_mem"), world, seconds=300) == [[]] * world
