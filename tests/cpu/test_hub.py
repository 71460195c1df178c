from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

import collegium
from collegium.checkpoint import Checkpoint, with_adapter
from collegium.errors import CheckpointError, InputError, MissingExtraError
from collegium.integrations.transformers import load_model
from collegium.locate import locate, missing_files
from commands import command
from hub_server import COMMIT, Hub, hub_of
from raising import raises_with

SHIPPED = Path(__file__).resolve().parents[2] / "demo" / "fables-16m"
DESCRIPTION = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}


def cached(cache: Path, repository: str, source: Path, *, revision: str = "main", commit: str = COMMIT) -> Path:
    """Put a repository into a cache folder as huggingface_hub does: blobs, links to them, and a ref."""
    store = cache / f"models--{repository.replace('/', '--')}"
    snapshot = store / "snapshots" / commit
    for folder in (store / "blobs", store / "refs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        blob = store / "blobs" / f"{commit}-{file.name}"
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    (store / "refs" / revision).parent.mkdir(parents=True, exist_ok=True)
    (store / "refs" / revision).write_text(commit)
    return snapshot


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """Serve the shipped model in two shards, with the files that must not be fetched."""
    files = {name: (SHIPPED / name).read_bytes() for name in DESCRIPTION}
    tensors = load_file(SHIPPED / "model.safetensors")
    shards = {f"model-{i}.safetensors": dict(list(tensors.items())[i::2]) for i in range(2)}
    for name, part in shards.items():
        save_file(part, tmp_path / name)
        files[name] = (tmp_path / name).read_bytes()
    weight_map = {key: name for name, part in shards.items() for key in part}
    files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    unwanted = "modeling_fables.py", "pytorch_model.bin", "original/model.safetensors", "consolidated.safetensors"
    with hub_of("org/fables", files | dict.fromkeys(unwanted, b"never"), ("main", "v2")) as running:
        yield running


def run(hub: Hub, home: Path, *words: str, offline: str = "0") -> subprocess.CompletedProcess[str]:
    """Run Python with this Hub as the network and an empty cache."""
    settings = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": offline, "HF_HUB_DISABLE_XET": "1"}
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.run(
        [sys.executable, *words],
        env=os.environ | settings | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        cwd=home.parent,
        capture_output=True,
        text=True,
        check=False,
    )


def output(name: str | Path, layer: int = 2) -> torch.Tensor:
    loaded = collegium.load_layer(name, layer, device="cpu", dtype="fp32")
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(3))
    return loaded(x)


@pytest.mark.parametrize("name", ["fables-16m", "org/fables", "org/fables@v2", f"org/fables@{COMMIT}"])
def test_names_load_everywhere(name: str, cache: Path) -> None:
    cached(cache, "org/fables", SHIPPED)
    cached(cache, "org/fables", SHIPPED, revision="v2", commit=40 * "2")
    assert torch.equal(output(name), output(SHIPPED))
    assert set(Checkpoint.open(name).tensors) == set(Checkpoint.open(SHIPPED).tensors)
    code, out, _ = command("plan", name, "--device", "cpu", "--json")
    assert (code, json.loads(out)["expert_bytes"]) == (0, 294912)


def test_whole_model_by_name(cache: Path) -> None:
    model, same = load_model("fables-16m", device="cpu"), load_model(SHIPPED, device="cpu")
    ids = torch.arange(7)[None]
    assert torch.equal(model(ids).logits, same(ids).logits)


def test_revisions_differ(cache: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(SHIPPED, changed)
    tensors = load_file(changed / "model.safetensors")
    save_file({name: 2 * tensor for name, tensor in tensors.items()}, changed / "model.safetensors")
    cached(cache, "org/fables", SHIPPED)
    cached(cache, "org/fables", changed, revision="refs/pr/7", commit=40 * "7")
    assert torch.equal(output("org/fables"), output(SHIPPED))
    assert torch.equal(output("org/fables@refs/pr/7"), output(changed))
    opened = Checkpoint.open("org/fables", revision="refs/pr/7")
    assert opened.folder.name == 40 * "7"
    with pytest.raises(CheckpointError, match="org/fables@v9"):
        locate("org/fables@v9")
    for wrong in ({"name": "org/fables@a", "revision": "b"}, {"name": "fables-16m", "revision": "b"}):
        with pytest.raises(InputError, match="revision"):
            locate(**wrong)


def test_cached_adapter(cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "lora"
    folder.mkdir()
    name = "model.layers.0.self_attn.q_proj"
    rows, columns = Checkpoint.open(SHIPPED).info(f"{name}.weight").shape
    half = {"lora_A": torch.randn(2, columns), "lora_B": torch.randn(rows, 2)}
    save_file(
        {f"base_model.model.{name}.{key}.weight": value for key, value in half.items()},
        folder / "adapter_model.safetensors",
    )
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    cached(cache, "me/lora", folder)
    merged = with_adapter(Checkpoint.open("fables-16m"), "me/lora").read(f"{name}.weight")
    base = load_file(SHIPPED / "model.safetensors")[f"{name}.weight"].double()
    truth = base + 2 * half["lora_B"].double() @ half["lora_A"].double()
    torch.testing.assert_close(merged.double(), truth, rtol=2**-8, atol=1e-6)


def test_a_folder_wins(cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cached(cache, "org/fables", SHIPPED)
    shutil.copytree(SHIPPED, tmp_path / "org" / "other")
    assert locate("org/other") == Path("org/other")
    assert not caplog.records
    (tmp_path / "org" / "fables").mkdir()
    assert locate("org/fables") == Path("org/fables")
    assert [record.args for record in caplog.records] == [("org/fables",)]


def test_partly_cached(cache: Path, tmp_path: Path) -> None:
    snapshot = cached(cache, "org/fables", SHIPPED)
    (snapshot / "model.safetensors").unlink()
    assert missing_files(snapshot) == ["model.safetensors"]
    with raises_with(CheckpointError, "model.safetensors", "org/fables"):
        Checkpoint.open("org/fables")
    code, _, _ = command("plan", "org/fables", "--device", "cpu")  # reads config.json alone
    assert code == 0


def test_nothing_installed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", None)
    with pytest.raises(MissingExtraError, match=r"collegium\[transformers\]"):
        locate("org/fables")
    assert locate("fables-16m") == SHIPPED.resolve()
    assert locate("some/where/else") == Path("some/where/else")


def test_command_downloads(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    refused = run(hub, home, "-m", "collegium", "inspect", "org/fables", "--json")
    assert refused.returncode == 1
    assert json.loads(refused.stdout)["error"]["kind"] == "CheckpointError"
    assert hub.fetched == []
    planned = run(hub, home, "-m", "collegium", "plan", "org/fables", "--download")
    assert planned.returncode == 0
    assert "Fetching" in planned.stderr
    assert set(hub.fetched) == DESCRIPTION | {"model.safetensors.index.json"}
    hub.fetched.clear()
    whole = run(hub, home, "-m", "collegium", "inspect", "org/fables", "--download", "--json")
    assert (whole.returncode, whole.stderr) == (0, "")
    assert json.loads(whole.stdout)["moe_layers"]
    assert set(hub.fetched) == {"model-0.safetensors", "model-1.safetensors"}


def test_python_downloads_and_resumes(hub: Hub, tmp_path: Path) -> None:
    hub.break_off = "model-1.safetensors"
    program = "import collegium, torch; layer = collegium.load_layer('org/fables@v2', 2, device='cpu', download=True);"
    done = run(hub, tmp_path / "home", "-c", program + "print(layer.plan.kernel)")
    assert (done.returncode, done.stdout) == (0, "cpu_grouped\n")
    assert hub.ranges
    assert not {"modeling_fables.py", "pytorch_model.bin", "original/model.safetensors"} & set(hub.fetched)
    offline = run(hub, tmp_path / "home", "-m", "collegium", "inspect", "org/fables@v2", "--no-deep", offline="1")
    assert offline.returncode == 0


def test_failed_downloads(hub: Hub, tmp_path: Path) -> None:
    for words, offline in ((("org/fables",), "1"), (("org/nothing",), "0"), (("org/fables@v9",), "0")):
        done = run(hub, tmp_path / "home", "-m", "collegium", "plan", *words, "--download", "--json", offline=offline)
        error = json.loads(done.stdout)["error"]
        assert (done.returncode, error["kind"]) == (1, "CheckpointError")
        assert f"hf download {words[0].partition('@')[0]}" in error["message"]
        assert ("HF_HUB_OFFLINE" in error["message"]) == (offline == "1")
