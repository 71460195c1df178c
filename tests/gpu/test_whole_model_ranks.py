"""Layers and whole models over two GPUs and more: bits, text, and CUDA graphs of layers and of decoding."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)
pytest.importorskip("transformers")

from commands import command, torchrun
from rank_cases import FOLDERS, built, compare_loaded, replayed
from rank_models import captures, compare_models
from ranks import run_ranks

SHIPPED = Path(__file__).resolve().parents[2] / "demo" / "fables-16m"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: Any) -> str:
    paths = built(tmp_path_factory.mktemp("ranks"), "deepseek_v3", "gpt_oss")
    return os.pathsep.join(map(str, paths))


@pytest.mark.parametrize("check", [compare_loaded, compare_models, replayed])
def test_several_gpus_give_what_one_does(check: Any, folders: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDERS, folders)
    assert run_ranks(check, 2, "cpu:gloo,cuda:nccl", seconds=500) == [[]] * 2


def test_symmetric_memory_ranks_decode_in_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDERS, str(SHIPPED))
    assert run_ranks(captures, 2, "cpu:gloo,cuda:nccl", seconds=120) == [[]] * 2


@pytest.mark.parametrize("more", [(), ("--format", "mxfp4"), ("--temperature", "1")])
def test_torchrun_generate_matches_one_process(more: tuple[str, ...]) -> None:
    asked = ("generate", str(SHIPPED), "--tokens", "24", "--prompt", "The old king", "--json", *more)
    code, said, errors = torchrun(*asked)
    assert code == 0, errors
    assert json.loads(said)["text"] == json.loads(command(*asked)[1])["text"]
