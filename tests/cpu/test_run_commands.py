"""The script that runs every command: it runs a few here, misses none of the pages, and sees what is wrong."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from raising import assert_values

pytest.importorskip("transformers")

import run_commands
from run_commands import PAGES, Case, cases, run_case, shown, uncovered
from tracked import ROOT


def test_quick_run_writes_results(tmp_path: Path) -> None:
    out = tmp_path / "commands.csv"
    assert run_commands.main(["--device", "cpu", "--quick", "--out", str(out), "--commit", "abc1234"]) == 0
    with out.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {row["commit"] for row in rows} == {"abc1234"}
    assert {row["typed"].split()[1] for row in rows} == {"plan", "quantize", "generate"}
    assert [row["exit"] for row in rows if "tiny.gguf" in row["typed"]] == ["1"]
    (written,) = [row for row in rows if "generate model-mxfp4" in row["typed"]]
    assert_values(written["figures"], "tokens/s", "Once upon a time")
    assert all(float(row["seconds"]) > 0 for row in rows)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_documented_command_is_covered(device: str, tmp_path: Path) -> None:
    texts = [(ROOT / page).read_text(encoding="utf-8") for page in PAGES]
    assert len([words for text in texts for words in shown(text)]) > 12
    run = cases(device, tmp_path)
    assert uncovered(texts, run) == []
    assert uncovered(texts, [case for case in run if case.words[0] != "tune"]) == ["tune"]
    assert uncovered(texts, [case for case in run if case.ranks == 1]) == ["torchrun generate MODEL"]
    page = "```bash\ncollegium plan M --kernel x  # why\n```\nand `collegium\nplan --device x --never`, "
    page += "`collegium demo --slowly`\n"
    assert uncovered([page], run) == ["demo --slowly", "plan --device x --never", "plan M --kernel x"]


def test_each_process_sees_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    places = [case.words[case.words.index("--device") + 1] for case in cases("cuda:0", tmp_path) if case.ranks == 2]
    assert places == ["cpu", "cuda"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tokens_per_second": 0.2}, "rates differ"),
        ({"perplexity_ratio": 1.5}, "perplexity is out of band"),
        ({"layer_error": float("nan")}, "layer error is out of band"),
    ],
)
def test_an_implausible_demo_is_seen(change: dict[str, float], text: str) -> None:
    row = {"weights": "w", "activations": "a", "kernel": "k", "tokens_per_second": 100.0}
    rows = [row | {"perplexity_ratio": 1.0, "layer_error": 0.1} for _ in range(12)]
    judge = run_commands._demo(True)
    assert "100.0 tokens/s" in judge({"rows": rows})
    with pytest.raises(ValueError, match=text):
        judge({"rows": [*rows, rows[0] | change]})


@pytest.mark.parametrize(
    ("case", "code", "out", "fault"),
    [
        (Case(words=("plan",)), 1, "", "exit code 1, expected 0"),
        (Case(words=("plan",), code=1, says="why"), 1, "no", "its output has no 'why'"),
        (Case(words=("plan",), within=-1.0), 0, "", "allowed -1"),
        (Case(words=("plan",), judge=json.dumps), 0, "no json", "implausible"),
        (Case(words=("plan",), judge=json.dumps), 0, "{}", ""),
    ],
)
def test_what_goes_wrong_is_a_fault(monkeypatch, tmp_path, case: Case, code: int, out: str, fault: str) -> None:
    done = subprocess.CompletedProcess([sys.executable], code, stdout=out, stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    found = run_case(case, tmp_path)
    assert (fault in found.fault) if fault else not found.fault


def test_a_command_that_hangs_is_stopped(tmp_path: Path) -> None:
    outcome = run_case(Case(words=("plan", "demo"), limit=0.05), tmp_path)
    assert outcome.fault
    assert outcome.code == -1
