"""The benchmark programs run from end to end on a machine without a GPU, and one failure is one row."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiny_models import tiny_config

ROOT = Path(__file__).parents[2]


def rows_of(program: str, *arguments: str, out: Path, code: int = 0) -> list[dict[str, str]]:
    command = [sys.executable, str(ROOT / "benchmarks" / program), *arguments, "--out", str(out), "--commit", "none"]
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    with out.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# Asks every program of a folder for its help, in one process: importing torch takes longer than all of them.
ASK = """
import contextlib, io, runpy, sys
from pathlib import Path
for program in sorted(Path(sys.argv[1]).glob("*.py")):
    if "__main__" not in program.read_text():
        continue
    sys.argv, said = [str(program), "--help"], io.StringIO()
    sys.path.insert(0, str(program.parent))
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        runpy.run_path(str(program), run_name="__main__")
        said.write("it ran")
    print(program.name, said.getvalue().split()[:2], "it ran" in said.getvalue())
"""


def test_every_program_prints_help_without_measuring() -> None:
    pytest.importorskip("transformers")
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'scripts'}"}
    command = [sys.executable, "-c", ASK, str(ROOT / "benchmarks")]
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, check=True)
    files = sorted((ROOT / "benchmarks").glob("*.py"))
    modules = ("mega_moe.py", "vllm_engine.py", "vllm_models.py")  # which are no programs
    names = [own.name for own in files if own.name not in modules]
    assert done.stdout.splitlines() == [f"{name} ['usage:', '{name}'] False" for name in names]


@pytest.mark.exhaustive
def test_rebalance_benchmark_catches_damage(tmp_path):
    given = "--device cpu --shape 128x64x12x3 --layers 3 --tokens 16 --steps 24 --spare 1 --dispatcher symm_mem"
    (row,) = rows_of("rebalance.py", *given.split(), "--recipes", "mxfp4:bf16", out=tmp_path / "rows.csv")
    assert (row["same_bits"], row["caught"], row["ranks"], row["dispatcher"]) == ("True", "True", "2", "symm_mem")
    assert float(row["balanced_after"]) > float(row["balanced_before"])
    assert int(row["switches"]) >= 3
    assert int(row["moved_bytes"]) > 0
    assert 0 < float(row["stall_us"]) < 1e6


def test_bench_layer_writes_row_per_recipe(tmp_path):
    recipes = ("bf16:bf16", "mxfp4:fp8_token", "mxfp4:nothing")
    rows = rows_of(
        "bench_layer.py",
        *("--shapes", "256x128x4x2", "--recipes", *recipes, "--tokens", "1", "--rounds", "1"),
        out=tmp_path / "layers.csv",
        code=1,
    )
    assert [(row["weights"], row["activations"]) for row in rows] == [("bf16", "bf16"), ("mxfp4", "fp8_token")]
    assert all(float(row["layer_us"]) > 0 and float(row["floor_us"]) > 0 for row in rows)


@pytest.mark.exhaustive
def test_generate_benchmark_times_and_refuses(tmp_path):
    pytest.importorskip("transformers")
    given = "--small --layers 1 --batches 2 --tokens 8 --rounds 1 --device cpu"
    names = ("collegium", "collegium_decoder", "grouped_mm", "sonicmoe")
    arguments = (*given.split(), "--implementations", *names)
    rows = rows_of("bench_generate.py", *arguments, out=tmp_path / "rows.csv")
    assert [row["implementation"] for row in rows] == [*names]
    assert all(float(row["error"]) < 0.05 and float(row["tokens_per_second"]) > 0 for row in rows[:3])
    assert rows[3]["note"]  # no kernels package, or no GPU
    assert not rows[3]["tokens_per_second"]


@pytest.mark.exhaustive
def test_absent_peers_are_rows_beside_ours(tmp_path):
    pytest.importorskip("transformers")
    rows = rows_of(
        "peers.py",
        *("--shapes", "256x128x4x2", "--weights", "bf16", "mxfp4", "--tokens", "1", "--rounds", "1"),
        *("--skip", "collegium:mxfp4:bf16"),
        out=tmp_path / "peers.csv",
    )
    timed = [(row["contender"], row["weights"], row["activations"]) for row in rows if row["us"]]
    assert timed == [
        ("collegium", "bf16", "bf16"),
        ("transformers grouped_mm", "bf16", "bf16"),
        ("collegium", "mxfp4", "fp8_group128"),
        ("collegium", "mxfp4", "fp8_token"),
    ]
    notes = {row["contender"]: row["note"] for row in rows if not row["us"]}
    assert set(notes) == {"collegium", "vllm triton", "vllm marlin", "humming"}
    assert all(note.startswith("absent: ") for note in notes.values())


@pytest.mark.exhaustive
def test_whole_models_run_with_each_implementation(tmp_path):
    pytest.importorskip("transformers")
    folder = tiny_config(tmp_path / "tiny", "gpt_oss")
    rows = rows_of(
        "bench_model.py",
        *(str(folder), "--batches", "2", "--rounds", "1", "--formats", "mxfp4", "nothing"),
        out=tmp_path / "models.csv",
    )
    names = ["eager", "grouped_mm", "collegium bf16", "collegium mxfp4", "collegium nothing"]
    assert [row["experts"] for row in rows] == names
    assert all(float(row["tokens_per_second"]) > 0 and float(row["error"]) <= 0.01 for row in rows[:4])
    assert rows[4]["note"].startswith("absent: ")
    assert not rows[4]["tokens_per_second"]
