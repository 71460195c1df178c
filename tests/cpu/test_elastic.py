"""Ranks that are killed, leave and join: the others name them in time, go on, and keep their bits."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from collegium.balance.elastic import spread_experts
from collegium.parallel.liveness import Endpoint, is_dead, local_endpoint
from raising import assert_values
from ranks import run_ranks
from regrouping import EXPERTS, NAMES, come_and_go, copies_suffice, refused, shrink, sums_alone
from tracked import ROOT


@pytest.mark.parametrize(
    ("ranks", "kill", "more"),
    [
        (4, 0, ()),
        (2, 0, ("--dispatcher", "symm_mem")),
        (4, 1, ("--dispatcher", "symm_mem", "--same-tokens")),
        *(
            pytest.param(ranks, kill, more, marks=pytest.mark.exhaustive)
            for more, kills in {
                (): ((2, 0), (2, 1), (4, 1), (4, 2), (4, 3)),
                ("--dispatcher", "symm_mem"): ((2, 1), (4, 0), (4, 2)),
            }.items()
            for ranks, kill in kills
        ),
    ],
)
def test_survivors_of_a_killed_rank(tmp_path: Path, ranks: int, kill: int, more: tuple[str, ...]) -> None:
    table = tmp_path / "killed.csv"
    said = ["--ranks", str(ranks), "--kill", str(kill), "--after", "1", "--csv", str(table), "--commit", "none", *more]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "kill_rank.py"), *said],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = list(csv.DictReader(table.read_text(encoding="utf-8").splitlines()))
    assert [int(row["rank"]) for row in rows] == [rank for rank in range(ranks) if rank != kill]
    one = 3 * 192 * 256 * 2  # bytes of an expert of the shipped model
    lost = 16 // ranks
    for row in rows:
        assert float(row["raised_s"]) < 10
        assert float(row["answers_s"]) < 20
        assert (row["wrong_rows"], int(row["calls_after"]) > 30) == ("0", True)
        assert int(row["calls_before"]) > 0
        assert row["dispatcher"] == ("local" if ranks == 2 else "symm_mem" if more else "all_to_all")
    # Only what the killed rank alone had was read, once, in each of the three layers.
    assert sum(int(row["bytes_read"]) for row in rows) == 3 * lost * one


def test_ranks_leave_and_join(tmp_path: Path) -> None:
    zero, one, two = run_ranks(partial(come_and_go, folder=str(tmp_path)), 3, seconds=200)
    assert not zero[0] + one[0] + two[0]
    assert one[1] == ["local", "all_to_all", "all_to_all"]
    for name in NAMES:
        # What the first to leave alone had was read by one of the two that were left.
        first = sorted(zero[2][name] + one[2][name])
        assert len(first) == len(set(first)) < EXPERTS


@pytest.mark.parametrize("same", [False, True])
def test_leaving_ranks_free_shared_blocks(tmp_path: Path, same: bool) -> None:
    found = run_ranks(partial(shrink, folder=str(tmp_path), same=same), 3)
    assert [faults for faults, _ in found] == [[]] * 3
    assert found[1][1] == ["symm_mem", "symm_mem", "local"]


def test_remaining_replicas_avoid_reading(tmp_path: Path) -> None:
    assert run_ranks(partial(copies_suffice, folder=str(tmp_path)), 3) == [[]] * 3


def test_a_single_survivor_sends_rows(tmp_path: Path) -> None:
    (_, _), (faults, kinds) = run_ranks(partial(sums_alone, folder=str(tmp_path)), 2)
    assert not faults
    assert kinds == [("local", "exact")] * 2


def test_what_cannot_go_on_is_refused(tmp_path: Path) -> None:
    found = run_ranks(partial(refused, folder=str(tmp_path)), 3)
    for rank, errors in enumerate(found[:2]):
        assert_values(errors[0], "process group")
        assert f"rank {rank}" in errors[1]
        assert_values(errors[2], "experts", "reader_of(path)")
        assert_values(errors[3], "127.0.0.1:1", "1 s")


def test_spreading_preserves_resident_experts() -> None:
    assert spread_experts(((0, 2), (3,)), 5) == ((0, 2, 4), (3, 1))
    made = spread_experts(((4, 0), (3,), ()), 7)
    assert sorted(expert for own in made for expert in own) == list(range(7))
    assert made[0][:2] == (4, 0)
    assert made[1][0] == 3
    assert max(map(len, made)) - min(map(len, made)) <= 1
    # A newcomer takes an even share; replicas stay on different ranks.
    full = spread_experts((tuple(range(6)), tuple(range(6)), ()), 6)
    assert set(range(6)) == {expert for own in full for expert in own}
    assert len(full[2]) >= 3
    assert all(len(set(own)) == len(own) for own in full)


def test_endpoint_detects_dead_process_immediately() -> None:
    assert not is_dead(local_endpoint())
    child = subprocess.Popen(
        [sys.executable, "-c", "import socket, time; s = socket.create_server(('127.0.0.1', 0)); "
         "print(s.getsockname()[1], flush=True); time.sleep(60)"],
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert child.stdout is not None
    door = Endpoint(local_endpoint().host, "127.0.0.1", int(child.stdout.readline()))
    assert not is_dead(door)
    child.kill()
    child.wait()
    started = time.monotonic()
    assert is_dead(door)
    assert time.monotonic() - started < 1
    child.stdout.close()
