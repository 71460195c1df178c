"""Whole models with random weights: a row for each way of running the experts, and no time for wrong ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("transformers")

from collegium import cli
from collegium.commands import bench_model as model_bench
from collegium.commands.bench_model import bench_model
from collegium.errors import InputError
from raising import assert_values, raises_with
from tiny_models import tiny_config

WAYS = ["eager", "grouped_mm", "collegium bf16", "collegium mxfp4", "collegium mxfp4:fp8_token"]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_every_way_decodes_and_is_right(tmp_path: Path, family: str) -> None:
    report = bench_model(str(tiny_config(tmp_path, family)), batches=(2, 1), layers=1, device="cpu", rounds=1)
    assert report.model == tmp_path.name
    assert report.layers == 1
    assert 1e5 < report.parameters < 1e6
    assert [(row.experts, row.batch) for row in report.rows] == [
        (way, batch) for ways in (WAYS[:3], WAYS[3:4], WAYS[4:]) for batch in (2, 1) for way in ways
    ]
    for row in report.rows:
        assert not row.note
        assert row.error is not None
        assert row.error <= (0.06 if row.experts.endswith("fp8_token") else 0.01)
        assert row.seconds is not None
        assert row.tokens_per_second == row.batch / row.seconds > 0


def test_wrong_experts_get_no_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[int] = []
    true = model_bench.random_weights

    def another(*given: object, **more: object) -> object:
        asked.append(1)
        return true(*given, **more | {"seed": len(asked)})  # other experts at every call, so what runs is not the truth

    monkeypatch.setattr(model_bench, "random_weights", another)
    folder = tiny_config(tmp_path, "qwen3_moe")
    rows = bench_model(str(folder), [("mxfp4", "bf16"), ("nothing", "")], batches=(1,), device="cpu", rounds=1).rows
    notes = {row.experts: row.note for row in rows}
    assert all(row.seconds and not row.note for row in rows[:3])
    assert all(row.seconds is None and row.tokens_per_second is None for row in rows[3:])
    assert_values(notes["collegium mxfp4"], "FP32", "0.01")
    assert notes["collegium nothing"].startswith("absent: ")
    assert "mxfp4" in notes["collegium nothing"]


def test_nothing_starts_after_time_limit(tmp_path: Path) -> None:
    rows = bench_model(str(tiny_config(tmp_path, "gpt_oss")), batches=(1,), device="cpu", rounds=1, seconds=0).rows
    assert {row.note for row in rows[:3]} == {"no time left"}
    assert not any(row.seconds for row in rows)


def test_models_without_experts_refused(tmp_path: Path) -> None:
    with raises_with(InputError, "'mixtral'", "qwen3_30b", "gpt_oss_20b", "config.json"):
        bench_model("mixtral", device="cpu")
    with raises_with(InputError, tmp_path):
        bench_model(str(tiny_config(tmp_path, "llama")), device="cpu")


def test_prints_table_or_json(tmp_path: Path) -> None:
    folder = str(tiny_config(tmp_path, "qwen3_moe"))
    options = ["bench-model", folder, "--format", "mxfp4", "--batches", "1", "--layers", "1", "--device", "cpu"]
    shown = CliRunner().invoke(cli.app, options)
    assert shown.exit_code == 0, shown.output
    assert all(way in shown.output for way in WAYS[:4])
    assert WAYS[4] not in shown.output
    found = json.loads(CliRunner().invoke(cli.app, [*options, "--json"]).stdout)
    assert found["layers"] == 1
    assert [row["experts"] for row in found["rows"]] == WAYS[:4]
    assert all(row["tokens_per_second"] > 0 for row in found["rows"])


def test_checkpoint_folder_gives_only_sizes() -> None:
    folder = Path(__file__).resolve().parents[2] / "demo" / "fables-16m"
    report = bench_model(str(folder), [("mxfp4", "bf16")], batches=(1,), layers=2, device="cpu", rounds=1)
    assert [row.note for row in report.rows] == [""] * len(report.rows)
    assert all(row.tokens_per_second for row in report.rows)
