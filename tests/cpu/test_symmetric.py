from __future__ import annotations

import glob

import pytest

from ranks import run_ranks
from symmetric import exchange


@pytest.mark.parametrize("world", [2, 4])
def test_peers_reach_regions(world: int) -> None:
    before = set(glob.glob("/dev/shm/collegium-*"))
    answers = run_ranks(exchange, world)
    assert len({tuple(offsets) for offsets, _, _ in answers}) == 1
    for rank, (_, errors, found) in enumerate(answers):
        assert found == world * (world + 1) / 2
        assert [error.partition(",")[0] for error in errors] == [
            "symmetric memory: every rank needs the same bytes",
        ], rank
        assert f"rank {world - 1}: {256 * world}" in errors[0]
    assert set(glob.glob("/dev/shm/collegium-*")) <= before, "no file is left behind"
