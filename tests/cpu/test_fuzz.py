"""A short run of the fuzzer, and proof that it sees what it hunts for."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fuzz
from collegium.errors import ConfigError
from tracked import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits memory and time as Linux does")


def test_short_fuzz_run_finds_no_faults(tmp_path: Path) -> None:
    kinds: set[str] = set()
    for seed in range(5_000_000, 5_000_250):
        folder = tmp_path / str(seed)
        folder.mkdir()
        outcome = fuzz.run_one(seed, folder)
        assert outcome.kind != "FAULT", f"seed {seed}: {outcome.text}"
        kinds.add(outcome.kind)
    assert {"accepted", "ConfigError", "HostileFileError", "MissingTensorError", "BadScaleError"} <= kinds


def test_a_seed_is_one_input() -> None:
    first, second = fuzz.damaged(77), fuzz.damaged(77)
    assert first == second
    assert len({str(fuzz.damaged(seed)[1]) for seed in range(60)}) > 15


def grow(_: Any) -> None:
    torch.empty(2 * fuzz.ROOM, dtype=torch.uint8)


def spin(_: Any) -> None:
    while True:
        pass


def miss(_: Any) -> None:
    raise KeyError("hidden_size")


def refuse(_: Any) -> None:
    raise ConfigError("named")


@pytest.mark.parametrize(
    ("what", "kind"), [(grow, "FAULT"), (spin, "FAULT"), (miss, "FAULT"), (refuse, "ConfigError"), (len, "FAULT")]
)
def test_faults_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: Any, kind: str) -> None:
    monkeypatch.setattr(fuzz, "try_folder", what)
    monkeypatch.setattr(fuzz, "DEADLINE", 0.3)
    assert fuzz.run_one(1, tmp_path).kind == kind


def test_the_page_counts_what_was_run() -> None:
    rows = list(csv.DictReader((ROOT / "benchmarks" / "results" / "fuzz.csv").read_text().splitlines()))
    page = (ROOT / "docs" / "hostile-files.md").read_text(encoding="utf-8")
    found = re.search(r"ran ([\d,]+) inputs: .*?,? and ([\d,]+) (?:was|were) (?:a )?faults?", page.replace("\n", " "))
    assert found is not None
    assert int(found[1].replace(",", "")) == sum(int(row["inputs"]) for row in rows)
    assert int(found[2].replace(",", "")) == sum(int(row["faults"]) for row in rows)
    assert int(rows[-1]["faults"]) == 0
