"""The command line as people and programs meet it: quick help, ids of models, other machines, pipes and JSON."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from collegium.commands import verify
from collegium.commands.bench import bench
from commands import command

SHIPPED = Path(__file__).resolve().parents[2] / "demo" / "fables-16m"


def collegium(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "collegium", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environ)


MISTAKES = ((), ("nothing",))


@pytest.mark.parametrize("words", [*MISTAKES, ("generate", "--help"), ("balance", "-h"), ("--version",)])
def test_help_and_usage_errors_skip_torch(words: tuple[str, ...]) -> None:
    program = """
import sys
from collegium.cli import main
try:
    main()
except SystemExit as end:
    code = end.code
loaded = {"torch", "numpy", "transformers", "safetensors"} & sys.modules.keys()
sys.exit(f"loaded {loaded}" if loaded else code)
"""
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert done.returncode == (2 if words in MISTAKES else 0), done.stderr


def test_packages_load_lazily() -> None:
    program = """
import collegium, sys
assert "torch" not in sys.modules
from collegium import Overrides, PlanError
assert "torch" not in sys.modules
import collegium.planning
assert collegium.plan is collegium.planning.plan
assert collegium.formats.FORMATS is collegium.FORMATS
assert set(collegium.__all__) <= set(dir(collegium))
try:
    collegium.nothing
except AttributeError as error:
    assert "'nothing'" in str(error)
from collegium import *
assert callable(load_layer)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_version_matches_package() -> None:
    import collegium as package

    assert collegium("--version").stdout == f"collegium {package.__version__}\n"


@pytest.mark.parametrize(
    ("words", "code", "kind", "text"),
    [
        (("plan", "nowhere"), 1, "ConfigError", "nowhere: config.json is missing"),
        (("plan", "org/nothing"), 1, "CheckpointError", "hf download org/nothing"),
        (("plan", str(SHIPPED), "--format", "fp3"), 1, "SpecError", "weight format 'fp3' is not known"),
        (("plan", str(SHIPPED), "--nope"), 2, "UsageError", "No such option: --nope"),
        (("plan",), 2, "UsageError", "Missing argument"),
        (("generate", str(SHIPPED), "--device", "cuda:97"), 1, "InputError", "allowed: cpu"),
    ],
)
def test_errors_are_json_with_json_flag(words: tuple[str, ...], code: int, kind: str, text: str) -> None:
    ended, out, said = command(*words, "--json")
    found = json.loads(out)
    assert (ended, set(found), found["error"]["kind"]) == (code, {"error"}, kind)
    assert text in found["error"]["message"]
    assert said == ""


def test_failed_checks_keep_their_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("verify", str(SHIPPED), "--device", "cpu", "--experts", "1", "--json")
    assert command(*words)[0] == 0
    monkeypatch.setattr(verify.VerifyReport, "passed", property(lambda self: False))
    code, out, _ = command(*words)
    assert code == 1
    assert json.loads(out)["layers"]


def test_cached_models_are_found_by_id(tmp_path: Path) -> None:
    held = tmp_path / "models--org--fables"
    folder = held / "snapshots" / ("0" * 40)
    shutil.copytree(SHIPPED, folder)
    (held / "refs").mkdir()
    (held / "refs" / "main").write_text("0" * 40)
    done = collegium("plan", "org/fables", "--device", "cpu", "--json", HF_HUB_CACHE=str(tmp_path))
    assert json.loads(done.stdout)["kernel"] == "cpu_grouped"
    # A folder of that name comes before the cache.
    (tmp_path / "org" / "fables").mkdir(parents=True)
    words = [sys.executable, "-m", "collegium", "plan", "org/fables"]
    source = str(Path(__file__).resolve().parents[2] / "src")
    given = os.environ | {"HF_HUB_CACHE": str(tmp_path), "PYTHONPATH": source}
    here = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, env=given)
    assert "org/fables" in here.stderr
    assert "config.json" in here.stderr


@pytest.mark.parametrize(
    ("device", "kernel"), [("h200", "triton_bf16"), ("B200", "triton_bf16"), ("cpu", "cpu_grouped")]
)
def test_plan_for_absent_device(device: str, kernel: str) -> None:
    found = json.loads(command("plan", str(SHIPPED), "--device", device, "--json")[1])
    assert found["kernel"] == kernel
    if device != "cpu":
        assert device.upper() in found["device_name"]


def test_pipes_get_plain_whole_lines(tmp_path: Path) -> None:
    folder = tmp_path / ("[bold]a model [/] with a long name " + 9 * "and more ")
    shutil.copytree(SHIPPED, folder)
    done = collegium("inspect", str(folder), "--device", "cpu", "--no-deep", FORCE_COLOR="")
    assert str(folder) in done.stdout
    assert "\x1b" not in done.stdout
    widest = max(len(line) for line in command("plan", str(folder), "--device", "h200")[1].splitlines())
    assert widest > 150


def test_generate_stdout_is_only_text() -> None:
    words = ("--device", "cpu", "--tokens", "5", "--kernel", "reference", "--prompt", "The old king")
    _, out, said = command("generate", str(SHIPPED), *words)
    assert out.startswith("The old king")
    assert "tokens/s" not in out
    assert "tokens/s" in said
    refused = command("generate", str(SHIPPED), *words, "--activations", "mxfp8", "--kernel", "cpu_grouped", "--json")
    assert json.loads(refused[1])["error"]["kind"] == "PlanError"


def test_bench_sizes_on_a_cpu() -> None:
    report: Any = bench("64x32x6x2", [("bf16", "bf16")], device="cpu", rounds=1)
    assert [row.tokens for row in report.rows] == [1, 8, 32, 128, 512]


@pytest.mark.parametrize(
    "weights",
    [
        "int4_affine",
        "int8_ordered",
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("int4_ordered", "int8_affine")),
    ],
)
def test_bench_covers_read_only_formats(weights: str) -> None:
    report: Any = bench("256x128x6x2", [(weights, "bf16")], tokens=[3], device="cpu", rounds=1)
    assert [(row.weights, row.error < 0.02) for row in report.rows] == [(weights, True)]
