"""The command line on the shipped model: tables for people, JSON for programs, one message for errors."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from collegium import cli, locate as locating
from collegium.checkpoint.reader import read_config
from collegium.commands import demo, generate as writing
from collegium.commands.demo import RECIPES
from collegium.errors import CheckpointError
from collegium.formats import FORMATS
from collegium.integrations.transformers import load_model
from collegium.models import describe
from collegium.problem import DeviceFacts
from raising import raises_with

RUNNER = CliRunner()
SHIPPED = Path(__file__).resolve().parents[2] / "demo" / "fables-16m"


def run(*arguments: str):
    result = RUNNER.invoke(cli.app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def failing(monkeypatch, capsys, *arguments: str) -> str:
    monkeypatch.setattr("sys.argv", ["collegium", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 1
    return " ".join(capsys.readouterr().err.split())


def test_plan_reads_the_config_alone(tmp_path):
    shutil.copy(SHIPPED / "config.json", tmp_path)
    found = json.loads(run("plan", str(tmp_path), "--device", "cpu", "--json"))
    assert found["kernel"] == "cpu_grouped"
    assert found["weight_format"] == "bf16"
    assert "reference" in [r["name"] for r in found["refusals"] if r["what"] == "kernel"]
    other = json.loads(run("plan", str(tmp_path), "--device", "cpu", "--format", "mxfp4", "--json"))
    assert 0.25 < other["expert_bytes"] / found["expert_bytes"] < 0.29
    assert "cpu_grouped" in run("plan", str(tmp_path), "--device", "cpu")


def test_inspect_tells_formats_sizes_and_plan():
    found = json.loads(run("inspect", str(SHIPPED), "--device", "cpu", "--json"))
    assert found["plan"]["kernel"] == "cpu_grouped"
    config = json.loads((SHIPPED / "config.json").read_text())
    assert found["num_experts"] == config["num_experts"]
    assert len(found["moe_layers"]) == config["num_hidden_layers"]
    expert = 3 * config["hidden_size"] * config["moe_intermediate_size"] * 2
    assert found["expert_tensor_bytes"] == expert * config["num_experts"] * config["num_hidden_layers"]
    assert found["findings"] == []
    assert "qwen3_moe" in run("inspect", str(SHIPPED), "--device", "cpu")


def test_generate_writes_the_same_text_twice():
    arguments = ("generate", str(SHIPPED), "--tokens", "12", "--device", "cpu", "--format", "mxfp8", "--json")
    first, second = json.loads(run(*arguments)), json.loads(run(*arguments))
    assert first["text"] == second["text"]
    assert first["text"].startswith("Once upon a time")
    assert len(first["text"]) > len("Once upon a time") + 12


def test_the_shipped_model_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert locating.shipped_model() == SHIPPED.resolve()
    assert locating.locate("fables-16m") == SHIPPED.resolve()
    assert json.loads(run("plan", "fables-16m", "--device", "cpu", "--json"))["expert_bytes"] == 294912
    (tmp_path / "fables-16m").mkdir()  # a folder of that name comes first
    assert locating.locate("fables-16m") == Path("fables-16m")


def test_installed_packages_have_the_model(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "collegium"
    monkeypatch.setattr(locating, "__file__", str(package / "locate.py"))
    monkeypatch.chdir(tmp_path)
    with raises_with(CheckpointError, "fables-16m"):
        locating.shipped_model()
    shutil.copytree(SHIPPED, package / "shipped" / "fables-16m")
    assert locating.shipped_model() == package / "shipped" / "fables-16m"


@pytest.mark.exhaustive
def test_demo_covers_every_format():
    found = json.loads(run("demo", "--device", "cpu", "--tokens", "4", "--json"))
    rows = {(row["weights"], row["activations"]): row for row in found["rows"]}
    assert set(rows) == set(RECIPES)
    assert {f.name for f in FORMATS if not f.read_only} - {"fp32"} == {weights for weights, _ in RECIPES}
    assert all(math.isfinite(row["perplexity"]) for row in rows.values())
    base = rows["bf16", "bf16"]
    assert base["layer_error"] < 0.01
    for name, low, high in (
        ("fp8_block", 0.01, 0.06),
        ("mxfp8", 0.01, 0.06),
        ("nvfp4", 0.05, 0.2),
        ("mxfp4", 0.08, 0.25),
    ):
        row = rows[name, "bf16"]
        assert low < row["layer_error"] < high, name
        assert row["expert_bytes"] < 0.56 * base["expert_bytes"]
        assert 0.97 < row["perplexity_ratio"] < 1.3
    assert rows["nvfp4", "nvfp4"]["layer_error"] > rows["nvfp4", "bf16"]["layer_error"]
    assert rows["nvfp4", "nvfp4"]["kernel"] == "reference"


def test_the_demo_warms_up_before_timing(monkeypatch):
    """The demo timed compilation: 11.9 tokens a second for BF16 and 388 for another format on one GPU."""
    done: list[object] = []

    def warm(layers, progress=None):
        kinds = {(layer.spec.weight_format, layer.plan.activation_format) for layer in layers}
        done.append(("compiled", *kinds))
        if progress is not None:
            progress(3, 12, "9 tokens")

    def write(self, prompt, tokens, **how):
        made = write.true(self, prompt, tokens, **how)
        done.append(("written", made.tokens_per_second))
        return made

    write.true = writing.Writer.write
    said: list[str] = []
    monkeypatch.setattr(demo, "warm_up", warm)
    monkeypatch.setattr(writing.Writer, "write", write)
    monkeypatch.setattr(demo, "RECIPES", demo.RECIPES[7:9])
    report = demo.run_demo(SHIPPED, device="cpu", tokens=5, windows=1, progress=lambda *step: said.append(step[2]))
    assert [what[0] for what in done] == ["compiled"] + 2 * ["compiled", "written", "written"]
    assert [what[1] for what in done if what[0] == "compiled"][1:] == [("mxfp4", "bf16"), ("nvfp4", "bf16")]
    assert [row.tokens_per_second for row in report.rows] == [done[3][1], done[6][1]]
    assert any(text.startswith("mxfp4 x bf16: ") and "3 of 12" in text for text in said)


def test_few_kernels_are_compiled():
    spec = describe(read_config(SHIPPED))
    hopper = DeviceFacts(kind="cuda", name="H200", capability=(9, 0), memory=140 << 30)
    passes = {r: demo._limits(spec, hopper, r).max_tokens for r in RECIPES}
    assert passes["bf16", "bf16"] == passes["mxfp4", "fp8_group128"] == 4
    assert passes["nvfp4", "nvfp4"] == 4, "Triton's kernels multiply its numbers"
    assert {demo._limits(spec, DeviceFacts(kind="cpu"), r).max_tokens for r in RECIPES} == {4096}


def test_rate_excludes_the_first_token(monkeypatch):
    """A clock that only the model's passes move: a prompt of 100 seconds, steps of one."""
    model = load_model(str(SHIPPED), device="cpu")
    writer = writing.Writer(model, SHIPPED)
    clock = [0.0]

    def forward(module, args, keywords, out):
        clock[0] += 100.0 if args[0].shape[1] > 1 else 1.0

    model.register_forward_hook(forward, with_kwargs=True)
    monkeypatch.setattr(writing.time, "perf_counter", lambda: clock[0])
    made = writer.write("The old king", 6)
    assert made.tokens == 6
    assert (made.first_token_seconds, made.tokens_per_second) == (100.0, 1.0)
    assert writer.write("The old king", 1).tokens_per_second == 0.01


def test_generate_defaults_to_no_repetition_penalty(monkeypatch):
    """A penalty of 1.2 was multiplied in without a word."""
    prompt = "Once upon a time there was a"  # whose tokens are not as likely as others, which bfloat16 could confuse
    arguments = ("generate", str(SHIPPED), "--tokens", "24", "--device", "cpu", "--json", "--prompt", prompt)
    plain, other = json.loads(run(*arguments)), json.loads(run(*arguments, "--penalty", "1.2"))
    writer = writing.Writer(load_model(str(SHIPPED), device="cpu"), SHIPPED)
    ids = writer.encode(prompt)
    with torch.inference_mode():
        for _ in range(24):
            ids = torch.cat([ids, writer.model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], 1)
    assert plain["text"] == writer.tokenizer.decode(ids[0].tolist())
    assert other["text"] != plain["text"]
    monkeypatch.setattr(demo, "RECIPES", RECIPES[:1])
    assert "repetition penalty 1.2" in run("demo", "--device", "cpu", "--tokens", "1")


def test_it_runs_as_a_module():
    command = [sys.executable, "-m", "collegium", "plan", str(SHIPPED), "--device", "cpu", "--json"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(found.stdout)["kernel"] == "cpu_grouped"


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda f: f.write_bytes(f.read_bytes()[:5000]), "TruncatedFileError"),
        (lambda f: f.write_bytes((1 << 62).to_bytes(8, "little") + f.read_bytes()[8:]), "HostileFileError"),
        (lambda f: f.unlink(), "CheckpointError"),
    ],
    ids=["truncated", "header length", "file gone"],
)
def test_damaged_checkpoint_gives_clear_message(damage, text, tmp_path, monkeypatch, capsys):
    shutil.copytree(SHIPPED, tmp_path / "model")
    damage(tmp_path / "model" / "model.safetensors")
    message = failing(monkeypatch, capsys, "inspect", str(tmp_path / "model"))
    assert message.startswith(text)
    assert "model.safetensors" in message
    assert "Traceback" not in message


def test_unknown_quantization_names_the_known_ones(tmp_path, monkeypatch, capsys):
    shutil.copytree(SHIPPED, tmp_path / "model")
    config = json.loads((SHIPPED / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "telepathy"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    message = failing(monkeypatch, capsys, "plan", str(tmp_path / "model"), "--device", "cpu")
    assert message.startswith("ConfigError")
    assert "telepathy" in message
    assert "compressed-tensors" in message


def test_unusable_forced_kernel_lists_refusals(monkeypatch, capsys):
    arguments = ("plan", str(SHIPPED), "--device", "cpu", "--kernel", "cpu_grouped", "--activations", "nvfp4")
    message = failing(monkeypatch, capsys, *arguments)
    assert message.startswith("PlanError")
    assert "nvfp4" in message
    assert re.search("reference: .*cpu_grouped", message)


@pytest.mark.parametrize("command", ["plan", "inspect"])
def test_a_folder_that_is_not_there(command, tmp_path, monkeypatch, capsys):
    message = failing(monkeypatch, capsys, command, str(tmp_path / "nowhere"))
    assert message.startswith(("ConfigError", "CheckpointError"))
    assert "nowhere" in message
