"""Whole models over ranks: in processes that form a group themselves, and through the command under torchrun."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from family_cases import CASES, build
from rank_cases import FOLDERS
from rank_models import compare_models
from ranks import run_ranks
from whole_models import in_bf16

# Plain; a shared expert beside the experts; biases; whole blocks with router, shared expert and weights on the input.
FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: Any) -> list[Path]:
    paths = [tmp_path_factory.mktemp("models") / name for name in FAMILIES]
    for path in paths:
        build(CASES[path.name], path)
        in_bf16(path)
    return paths


@pytest.mark.parametrize("world", [2, 4])
def test_a_model_over_ranks_writes_what_one_process_does(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    monkeypatch.setenv(FOLDERS, os.pathsep.join(map(str, folders if world == 2 else folders[1:2])))
    assert run_ranks(compare_models, world, seconds=200) == [[]] * world
