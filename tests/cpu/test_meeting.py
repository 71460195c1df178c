"""Ranks that tell each other something: everyone hears everyone, and who does not come is named in time."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
from torch import distributed

from collegium import InputError, Placement, RankError
from collegium.parallel.groups import check_ranks, group_named
from collegium.parallel.rendezvous import Rendezvous, rendezvous_of, timeout_seconds
from raising import assert_values, raises_with
from ranks import run_ranks


def _exchange(rank: int) -> Any:
    own = rendezvous_of()
    found = [own.exchange((rank, turn), "turns") for turn in range(20)]
    # A second meeting of the same ranks starts from nothing.
    return found, Rendezvous().exchange(rank * 10, "again")


def test_everyone_hears_everyone_in_order() -> None:
    for found, again in run_ranks(_exchange, 3):
        assert found == [[(r, turn) for r in range(3)] for turn in range(20)]
        assert again == [0, 10, 20]


def _late(rank: int) -> Any:
    timeout_seconds(1.0)
    started = time.monotonic()
    if rank == 2:
        time.sleep(3)
        return None
    try:
        rendezvous_of().exchange(rank, "dispatch of layer 7")
    except RankError as error:
        return error.ranks, error.phase, str(error), time.monotonic() - started
    return None


def test_absent_ranks_are_named_in_time() -> None:
    for found in run_ranks(_late, 3)[:2]:
        ranks, phase, said, seconds = found
        assert (ranks, phase) == ((2,), "dispatch of layer 7")
        assert "rank 2 did not come to 'dispatch of layer 7' within 1 s" in said
        assert 0.9 <= seconds < 2.5


class _Broken:
    """A store whose host ends before the request ``broken``, for the rank that asks through it."""

    def __init__(self, store: Any, broken: str) -> None:
        self.store, self.broken = store, broken

    def __getattr__(self, name: str) -> Any:
        if name == self.broken:
            raise distributed.DistNetworkError("Connection reset by peer")
        return getattr(self.store, name)


def _without_store(rank: int, broken: str) -> Any:
    own = rendezvous_of()
    before = [own.exchange((rank, turn), "turns") for turn in range(4)]
    timeout_seconds(1.0)
    if rank == 0:
        own.store = _Broken(own.store, broken)
    try:
        before.append(own.exchange("last", "turns"))
    except RankError as error:
        return before, error.ranks, str(error)
    return before, None, ""


@pytest.mark.parametrize("broken", ["set", "multi_get", "delete_key"])
def test_lost_store_raises_rank_error(broken: str) -> None:
    before, ranks, said = run_ranks(partial(_without_store, broken=broken), 2)[0]
    assert before[:4] == [[(r, turn) for r in range(2)] for turn in range(4)]
    if broken == "delete_key":
        assert before[4:] == [["last", "last"]]
        assert ranks is None
    else:
        assert len(before) == 4
        assert ranks == (0, 1)
        assert "did not come to 'turns'" in said


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf"), 1e12, "3"])
def test_invalid_timeout_refused(wrong: Any) -> None:
    with raises_with(InputError, "timeout_seconds"):
        timeout_seconds(wrong)
    assert timeout_seconds() > 0


def _elsewhere(rank: int) -> Any:
    errors: list[str] = []
    for asked in (
        lambda: rendezvous_of().exchange(0, "layer 1" if rank else "layer 0"),
        lambda: rendezvous_of().agree(rank // 2, "plan"),
        lambda: check_ranks("all_gather", Placement(rank=0, world_size=3, expert_ids=(0,))),
        lambda: group_named("nobody"),
    ):
        try:
            asked()
        except (RankError, InputError) as error:
            errors.append(str(error))
    return errors


def test_ranks_in_different_calls_are_told() -> None:
    found = run_ranks(_elsewhere, 3)
    assert "rank 1, 2 is at 'layer 1' while this rank is at 'layer 0'" in found[0][0]
    assert "rank 0 is at 'layer 0' while this rank is at 'layer 1'" in found[2][0]
    for own in found:
        assert_values(own[1], "plan", "ranks 0 and 2", "0 and 1")
    assert_values(found[1][2], "all_gather", "rank 0 of 3, experts 0", "rank 1 of 3")
    assert "no process group is called 'nobody'" in found[0][-1]
