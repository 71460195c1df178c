"""What a user can get wrong: each command ends with one message of ours and exit code 1, before it builds anything."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from collegium import cli
from collegium.commands import generate as writing, inspect as inspecting, memory_check
from collegium.commands.bench import bench
from collegium.commands.memory_check import bytes_per_weight, check_free_memory, free_bytes, layer_needs
from collegium.commands.plot import check_picture
from collegium.commands.printing import print_json
from collegium.errors import InputError
from collegium.runtime.devices import probe
from commands import command
from quantised_models import write_model
from raising import raises_with
from run_commands import write_gguf

SHIPPED = Path(__file__).resolve().parents[2] / "demo" / "fables-16m"
ON_MODELS = ("generate", "inspect", "plan", "verify", "quantize", "calibrate", "bench", "bench-model", "tune", "demo")


@pytest.fixture
def said(monkeypatch, capsys):
    """Run a command line that must fail; return its one message."""

    def fail(*words: str) -> str:
        monkeypatch.setattr("sys.argv", ["collegium", *words])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        found = capsys.readouterr()
        assert stop.value.code == 1
        assert found.out == ""
        assert "Traceback" not in found.err
        return " ".join(found.err.split())

    return fail


def on(command: str, model: Path) -> list[str]:
    """The command on a model, with what it needs beside it."""
    words = [command, "--model", str(model)] if command == "demo" else [command, str(model)]
    if command == "quantize":
        return [*words, "--to", "mxfp4", "--out", str(model.parent / "out")]
    return [*words, "--device", "cpu"]


def damaged(folder: Path, config: str | None) -> Path:
    folder.mkdir()
    for name in ("tokenizer.json", "model.safetensors"):
        (folder / name).symlink_to(SHIPPED / name)
    if config is not None:
        (folder / "config.json").write_text(config)
    return folder


@pytest.mark.parametrize("command", ON_MODELS)
def test_a_folder_that_is_no_model(command, tmp_path, said):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("hello")
    assert "nowhere" in said(*on(command, tmp_path / "nowhere"))
    for name in ("empty", "file.txt"):
        message = said(*on(command, tmp_path / name))
        assert message.partition(":")[0].endswith("Error"), message
        assert name in message


@pytest.mark.parametrize("command", ON_MODELS)
@pytest.mark.parametrize(
    ("config", "text"),
    [
        (None, "config.json"),
        ('{"model_type": ', "not a valid JSON object"),
        ("[1, 2]", "it is a list, not an object"),
        ('{"hidden_size": 8}', "model_type"),
    ],
    ids=["none", "cut off", "a list", "no model_type"],
)
def test_a_config_that_says_nothing(command, config, text, tmp_path, said):
    message = said(*on(command, damaged(tmp_path / "model", config)))
    if config is None and command == "verify":
        text = "model_type"  # it asks the family first
    assert text in message


@pytest.mark.parametrize("command", ["generate", "bench-model", "demo"])
def test_config_value_of_wrong_type(command, tmp_path, said):
    config = json.loads((SHIPPED / "config.json").read_text()) | {"num_experts": "many"}
    assert "num_experts" in said(*on(command, damaged(tmp_path / "model", json.dumps(config))))


@pytest.mark.parametrize("command", [c for c in ON_MODELS if c != "quantize"])
@pytest.mark.parametrize("device", ["gpu", "cuda:97"])
def test_a_device_that_is_not_there(command, device, said):
    words = [command, "--device", device] if command == "demo" else [command, str(SHIPPED), "--device", device]
    message = said(*words)
    assert message.startswith(f"InputError: device '{device}'")
    assert "allowed: cpu" in message


@pytest.mark.parametrize("command", ["generate", "plan", "verify", "bench", "bench-model", "tune"])
def test_a_format_that_is_not_known(command, said):
    message = said(command, str(SHIPPED), "--device", "cpu", "--format", "fp3")
    assert re.match("SpecError: .*'fp3'.*bf16", message)


@pytest.mark.parametrize("command", ["bench", "bench-model", "tune"])
def test_unknown_activation_format(command, said):
    message = said(command, str(SHIPPED), "--device", "cpu", "--format", "bf16:fp3")
    assert re.match("(Spec|Input)Error: .*'fp3'.*fp8_token", message)


def test_a_gguf_file_without_a_tokenizer(tmp_path, said):
    write_gguf(tmp_path / "tiny.gguf")
    for path in (tmp_path / "tiny.gguf", tmp_path):
        message = said("generate", str(path), "--device", "cpu")
        assert message.startswith("InputError")
        assert "tokenizer.json" in message
    assert re.match("[A-Za-z]+Error: .*folder", said(*on("quantize", tmp_path / "tiny.gguf")))


def test_a_tokenizer_of_another_model(tmp_path, said):
    """97 tokens have embeddings, the shipped tokenizer gives far larger ids."""
    folder = write_model(tmp_path / "model")
    shutil.copy(SHIPPED / "tokenizer.json", folder)
    message = said("generate", str(folder), "--device", "cpu", "--tokens", "2")
    assert "0 to 96" in message
    assert "tokenizer.json" in message
    assert "error" in json.loads(command("generate", folder, "--device", "cpu", "--json")[1])


def test_text_needs_tokenizer_and_tokens(tmp_path, said, monkeypatch):
    monkeypatch.setattr("collegium.integrations.transformers.loading", None)  # nothing is loaded before
    folder = damaged(tmp_path / "model", (SHIPPED / "config.json").read_text())
    (folder / "tokenizer.json").unlink()
    assert re.match("InputError: .*tokenizer.json", said("generate", str(folder), "--device", "cpu"))
    (folder / "tokenizer.json").write_text("{")
    assert re.match("[A-Za-z]+Error: .*tokenizer", said("generate", str(folder), "--device", "cpu"))
    monkeypatch.undo()
    with pytest.raises(InputError):
        writing.Writer(torch.nn.Linear(1, 1), SHIPPED).encode("")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("bench", "65536x65536x64x2", "--tokens", "1"), "bench 65536x65536x64x2: needs "),
        (("bench", "64x32x6x2", "--tokens", "99999999999"), "batches "),
        (("bench-model", str(SHIPPED), "--batches", "1"), "bench-model"),
    ],
)
def test_sizes_beyond_memory_are_refused(words, text, said, monkeypatch):
    monkeypatch.setattr("collegium.commands.bench.random_weights", None)
    monkeypatch.setattr("collegium.commands.bench.random_inputs", None)
    if words[0] == "bench-model":
        monkeypatch.setattr(memory_check, "free_bytes", lambda _: 1e6)
    message = said(*words, "--device", "cpu")
    assert message.startswith("InputError")
    assert text in message
    assert re.search(r"[0-9.]+ [GM]B free", message)


def test_tune_refused_when_gpu_memory_insufficient(monkeypatch):
    from collegium.commands import tune as tuning
    from collegium.problem import DeviceFacts

    facts = DeviceFacts(kind="cuda", name="H200", capability=(9, 0), memory=140 << 30)
    monkeypatch.setattr(tuning, "probe", lambda _: facts)
    monkeypatch.setattr(tuning, "random_weights", None)
    monkeypatch.setattr(memory_check, "free_bytes", lambda _: 8e9)
    with raises_with(InputError, "6.0 GB", "8.0 GB"):
        tuning.tune("dsv3", ("mxfp4", "bf16"), tokens=(1,))


def test_memory_check_counts_actual_bytes():
    assert bytes_per_weight("bf16") == 2
    assert 0.53 < bytes_per_weight("mxfp4") < 0.54
    facts = probe("cpu")
    free = free_bytes(facts)
    assert 1e8 < free <= facts.memory
    check_free_memory("x", {"weights": free / 2}, facts)
    with raises_with(InputError, "x: ", "weights", "cpu", "GB"):
        check_free_memory("x", {"weights": 2 * facts.memory}, facts)
    seen: list[dict[str, float]] = []
    true = layer_needs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("collegium.commands.bench.layer_needs", lambda *a, **k: seen.append(true(*a, **k)) or {})
        bench("64x32x6x2", [("bf16", "bf16"), ("nvfp4", "bf16")], tokens=(1, 9), device="cpu", rounds=1)
    weights = 6 * 3 * 64 * 32 * 2, 6 * 3 * 64 * 32 * bytes_per_weight("nvfp4")
    assert seen[0]["weights"] == pytest.approx(sum(weights), rel=0.01)
    assert seen[0]["packed copies"] == pytest.approx(weights[1], rel=0.01)
    assert seen[0]["batches"] == 4 * 64 * 8 * (1 + 9)


def test_impossible_pictures_are_refused_first(tmp_path, said, monkeypatch):
    monkeypatch.setattr("collegium.commands.bench.bench", None)

    def plot(path: str) -> str:
        return said("bench", "64x32x6x2", "--device", "cpu", "--plot", path)

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert re.match("MissingExtraError: matplotlib", plot("x.png"))
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    for name, text in (
        ("nowhere/x.png", "nowhere"),
        ("x.xyz", "png"),
        ("x", "png"),
        ("a.png", "a.png"),
    ):
        (tmp_path / "a.png").mkdir(exist_ok=True)
        with pytest.raises(InputError, match=text):
            check_picture(str(tmp_path / name))
    check_picture(str(tmp_path / "b.png"))
    assert not (tmp_path / "b.png").exists()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (PermissionError(13, "Permission denied", "model.safetensors"), "PermissionError: "),
        (OSError(28, "No space left on device"), "OSError: [Errno 28]"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"), "MemoryError: CUDA out of memory"),
        (MemoryError(), "MemoryError: out of memory"),
    ],
)
def test_system_errors_are_single_messages(error, text, said, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(inspecting, "plan_model", refuse)
    assert said("plan", str(SHIPPED)).startswith(text)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full")
@pytest.mark.each_choice
@pytest.mark.parametrize(
    ("where", "code", "text"),
    [
        (">&-", 0, ""),
        ("--json >&-", 0, ""),
        ("--kernel nothing >&-", 1, "PlanError: kernel 'nothing' was forced"),
        ("--kernel nothing 2>&-", 1, ""),
        ("--kernel nothing --json >/dev/full", 1, "PlanError: kernel 'nothing' was forced"),
        (">/dev/full", 1, "OSError: [Errno 28]"),
        ("--json >/dev/full", 1, "OSError: [Errno 28]"),
    ],
)
@pytest.mark.parametrize("at_once", [False, True])
def test_unwritable_stream_gives_no_traceback(where, code, text, at_once, monkeypatch):
    if at_once:
        monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    else:  # the usual case: a process writes what is left when it ends
        monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    line = f"{sys.executable} -m collegium plan {SHIPPED} --device cpu {where}"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(text)
    assert bool(done.stderr) == bool(text)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_internal_errors_keep_their_traceback(monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("shapes")

    monkeypatch.setattr(inspecting, "plan_model", broken)
    monkeypatch.setattr("sys.argv", ["collegium", "plan", str(SHIPPED)])
    with pytest.raises(RuntimeError, match="shapes"):
        cli.main()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc to see how far a process is")
def test_interrupt_gives_no_traceback(tmp_path):
    shutil.copytree(SHIPPED, tmp_path / "model")
    # Who runs the tests in the background of a script has them ignore the signal.
    command = ["env", "--default-signal=INT", sys.executable, "-m", "collegium", "demo", "--device", "cpu"]
    command += ["--model", str(tmp_path / "model")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        maps = Path(f"/proc/{running.pid}/maps")
        while running.poll() is None and maps.exists() and "tokenizers" not in maps.read_text():
            time.sleep(0.2)
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=60)
    assert running.returncode in (130, -signal.SIGINT)  # a shell reports both as 130
    assert "Traceback" not in err


def test_named_model_writes_to_current_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["collegium", "quantize", "fables-16m", "--to", "mxfp4"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert (tmp_path / "fables-16m-mxfp4" / "config.json").exists()
    assert not (SHIPPED.parent / "fables-16m-mxfp4").exists()


@pytest.mark.parametrize("text", ["[]", '{"eos_token_id": "x"}', "{"])
def test_invalid_generation_config_is_named(text, said, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(SHIPPED, folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "generation_config.json").write_text(text)
    message = said("generate", str(folder), "--tokens", "1", "--device", "cpu")
    assert message.startswith("ConfigError")
    assert "generation_config.json" in message


def test_absent_attention_and_huge_seeds(said, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(SHIPPED, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | {"_attn_implementation": "flash_attention_2"}))
    assert "FlashAttention" in said("generate", str(folder), "--tokens", "1", "--device", "cpu")
    assert "--seed: 99999" in said("generate", str(SHIPPED), "--seed", "9" * 30, "--device", "cpu")


def test_json_output_replaces_nonfinite_numbers(capsys):
    print_json({"a": [float("inf"), 1.5], "b": {"c": float("nan")}})
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5], "b": {"c": None}}
