"""An engine that loads, shards, serves and updates layers through its own names and modules, on 1, 2 and 4 ranks."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ranks import run_ranks
from toy_engine import random_model, save
from toy_engine_cases import FOLDER, batched_faults, served_faults

if TYPE_CHECKING:
    from toy_engine import Mode


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of a model in both formats."""
    parent = tmp_path_factory.mktemp("engine")
    for name in ("bf16", "fp8_block"):
        (parent / name).mkdir()
        save(random_model(name), parent / name)
    return parent


@pytest.mark.parametrize("weight_format", ["bf16", "fp8_block"])
def test_one_rank(folders: Path, weight_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, FOLDER, str(folders))
    assert served_faults(0, weight_format=weight_format, mode="experts") == []


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("weight_format", "mode"), [("fp8_block", "experts"), ("bf16", "slices")])
def test_engine_over_ranks(
    folders: Path, weight_format: str, mode: Mode, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, FOLDER, str(folders))
    run = partial(served_faults, weight_format=weight_format, mode=mode)
    assert run_ranks(run, world) == [[]] * world


def test_experts_behind_a_low_latency_dispatcher() -> None:
    assert batched_faults("cpu") == []
