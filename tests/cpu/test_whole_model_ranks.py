"""Whole models over ranks: in processes that form a group themselves, and through the command under torchrun."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from commands import command, torchrun
from raising import assert_values
from rank_cases import FOLDERS, built
from rank_models import by_command, compare_models, one_computes_wrongly, one_fails
from ranks import run_ranks
from tiny_models import tiny_config

SHIPPED = Path(__file__).resolve().parents[2] / "demo" / "fables-16m"
# Plain; a shared expert beside the experts; biases; whole blocks with router, shared expert and weights on the input.
FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: Any) -> list[Path]:
    return built(tmp_path_factory.mktemp("models"), *FAMILIES)


@pytest.mark.parametrize("world", [2, 4])
def test_model_over_ranks_matches_one_process(folders: list[Path], monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    monkeypatch.setenv(FOLDERS, os.pathsep.join(map(str, folders if world == 2 else folders[1:2])))
    assert run_ranks(compare_models, world, seconds=200) == [[]] * world


def test_torchrun_generate_matches_one_process() -> None:
    asked = ("generate", SHIPPED, "--tokens", 20, "--prompt", "The old king", "--json")
    code, said, errors = torchrun(*asked)
    assert code == 0, errors
    found, wanted = json.loads(said), json.loads(command(*asked)[1])  # one object: the other rank prints nothing
    assert (found["text"], found["tokens"]) == (wanted["text"], wanted["tokens"])


def test_ranks_verify_into_one_report(folders: list[Path]) -> None:
    code, said, errors = torchrun("verify", folders[1], "--experts", 3, "--json")
    assert code == 0, errors
    found, wanted = json.loads(said), json.loads(command("verify", folders[1], "--experts", 3, "--json")[1])
    parts = [(row["layer"], row["part"]) for row in found["layers"]]
    assert parts == [(1, "experts"), (1, "shared"), (2, "experts"), (2, "shared")]
    for mine, theirs in zip(found["layers"], wanted["layers"], strict=True):
        assert {**mine, "error": 0, "worst": 0, "worst_error": 0} == {
            **theirs,
            "error": 0,
            "worst": 0,
            "worst_error": 0,
        }
        assert 0.5 * theirs["error"] < mine["error"] < 2 * theirs["error"]


def test_every_rank_reports_one_ranks_error(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDERS, str(folders[1]))
    for passed, proofs in run_ranks(one_computes_wrongly, 2):
        assert not passed
        assert [proof[:2] for proof in proofs] == [(1, "experts"), (1, "shared"), (2, "experts"), (2, "shared")]
        for _, part, worst, right, checked in proofs:
            # Experts 4 to 7 are rank 1's; the shared expert is on both.
            assert (right, checked) == (False, 4 if part == "experts" else 1)
            assert worst >= 4 or part == "shared"


def test_ranks_measure_sequences_of_their_own(tmp_path: Path) -> None:
    folder = tiny_config(tmp_path, "gpt_oss")
    code, said, errors = torchrun(
        "bench-model", folder, "--format", "mxfp4", "--batches", "2", "--parallel", "data", "--json"
    )
    assert code == 0, errors
    report = json.loads(said)
    assert (report["ranks"], {row["batch"] for row in report["rows"]}) == (2, {4})
    assert [row["experts"] for row in report["rows"]] == ["eager", "grouped_mm", "collegium bf16", "collegium mxfp4"]
    assert all(row["seconds"] and 0 < row["error"] < 0.01 for row in report["rows"]), report


def test_existing_process_group_is_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDERS, str(SHIPPED))
    first, other = run_ranks(by_command, 2)
    for (code, said, _), prompt in zip(first, ("Once", "The old king"), strict=True):
        wanted = command(
            "generate", SHIPPED, "--tokens", 6, "--device", "cpu", "--prompt", prompt, "--temperature", 1, "--json"
        )
        assert (code, json.loads(said)["text"]) == (0, json.loads(wanted[1])["text"])
    assert [(code, said) for code, said, _ in other] == [(0, ""), (0, "")]


def test_a_rank_that_fails_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDERS, str(SHIPPED))
    first, other = run_ranks(one_fails, 2)
    assert_values(other[0], "RankError", "rank 0", "'same_tokens dispatch'", "2 s")
    assert first[1] == other[1] == 1
    assert "CheckpointError" in first[3]
    assert_values(other[3], "RankError", "rank 0")
    assert other[4] < 30


@pytest.mark.parametrize(
    ("environ", "arguments", "says"),
    [
        ({"WORLD_SIZE": "2"}, ("generate", SHIPPED), "WORLD_SIZE=2 is set and RANK, LOCAL_RANK, MASTER_ADDR, MASTER_P"),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "two"}, ("verify", SHIPPED), "WORLD_SIZE='two' is set"),
        ({"RANK": "3"}, ("generate", SHIPPED), "RANK=3 and WORLD_SIZE=2 are set"),
        ({}, ("generate", SHIPPED, "--device", "cuda:1"), "device 'cuda:1' was requested on 2 ranks"),
        ({}, ("inspect", SHIPPED), "inspect was started on 2 ranks; generate, verify and bench-model run on several"),
        ({}, ("generate", SHIPPED), "which another program has; choose another with --master-port"),
    ],
)
def test_invalid_launch_gives_one_error(
    environ: dict[str, str], arguments: tuple[object, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        whole = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
        whole |= {"MASTER_PORT": str(taken.getsockname()[1])}
        given = environ if environ.keys() == {"WORLD_SIZE"} else whole | environ
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        code, out, said = command(*arguments)
    assert (code, out) == (1, "")
    assert says in said
    assert "InputError" in said


def test_waiting_for_ranks_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collegium.parallel.torchrun.PATIENCE", 1.0)
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    for name, value in {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
    }.items():
        monkeypatch.setenv(name, str(value))
    code, _, said = command("generate", SHIPPED)
    assert code == 1
    assert_values(said, "RankError", "rank 0 of 2", "localhost")
