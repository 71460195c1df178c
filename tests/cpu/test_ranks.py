"""One argument splits a layer: every way to share experts, from checkpoints on disk, against one rank."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

from collegium import InputError, Ranks, load_layer
from collegium.checkpoint.reader import Checkpoint
from collegium.loading import load_routed
from family_cases import CASES, build
from whole_models import in_bf16
from rank_cases import FOLDERS, compare_loaded, refusals
from ranks import run_ranks

# A shared expert, biases with slices of 24 columns, and weights in blocks that slices must fill up.
FAMILIES = ("deepseek_v3", "gpt_oss")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: Any) -> list[Path]:
    paths = [tmp_path_factory.mktemp("ranks") / name for name in FAMILIES]
    for path in paths:
        build(CASES[path.name], path)
        in_bf16(path)
    return paths


@pytest.mark.parametrize("world", [2, 4])
def test_every_way_to_share_a_layer_gives_what_one_rank_does(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    monkeypatch.setenv(FOLDERS, os.pathsep.join(map(str, folders)))
    assert run_ranks(compare_loaded, world, seconds=200) == [[]] * world
