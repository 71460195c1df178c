"""The reader: dtypes, slices, and bytes counted."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import save_file

from collegium.checkpoint import Checkpoint
from collegium.errors import CheckpointError, ConfigError, InputError, MissingTensorError
from raising import raises_with

if TYPE_CHECKING:
    from pathlib import Path

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_reads_bitwise(tmp_path: Path, dtype: torch.dtype) -> None:
    top = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, top, (5, 8 * dtype.itemsize), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    tensor = raw.view(dtype)
    save_file({"pad": torch.zeros(3, dtype=torch.uint8), "x": tensor}, tmp_path / "model.safetensors")
    found = Checkpoint.open(tmp_path).read("x")
    assert found.dtype == dtype
    assert found.shape == tensor.shape
    assert torch.equal(found.view(torch.uint8), raw)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_slices_read_only_their_bytes(tmp_path: Path, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 5), min_size=0, max_size=4))
    whole = torch.arange(max(1, torch.Size(shape).numel()), dtype=torch.int32)[: torch.Size(shape).numel()].reshape(
        shape
    )
    cuts = []
    for n in shape[: data.draw(st.integers(0, len(shape)))]:
        start = data.draw(st.integers(0, n))
        cuts.append(slice(start, data.draw(st.integers(start, n))))
    save_file({"x": whole.clone()}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    found, wanted = checkpoint.read_slice("x", cuts), whole[tuple(cuts)] if cuts else whole
    assert torch.equal(found, wanted)
    assert checkpoint.bytes_read == 4 * wanted.numel()


def test_bad_slices_and_names(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(4, 3)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path / "model.safetensors")
    for cut in (slice(0, 5), slice(-1, 2), slice(3, 2), slice(0, 4, 2)):
        with raises_with(InputError, "axis 0", "4", "step 1"):
            checkpoint.read_slice("x", (cut,))
    with raises_with(InputError, "3 slices"):
        checkpoint.read_slice("x", (slice(0, 1),) * 3)
    with raises_with(MissingTensorError, "'y'"):
        checkpoint.read("y")
    assert checkpoint.bytes_read == 0


def test_index_is_the_authority(tmp_path: Path) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "named.safetensors")
    save_file({"x": torch.zeros(2), "y": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"not a file of ours")
    table = {"weight_map": {"x": "named.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(table))
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.read("x").tolist() == [1, 1]
    assert "y" not in checkpoint
    assert "x" in checkpoint


def test_separate_modelopt_config_is_merged(tmp_path: Path) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    block = {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": block}))
    assert Checkpoint.open(tmp_path).config["quantization_config"] == {"quant_method": "modelopt", **block}
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with raises_with(ConfigError, "'quantization'"):
        Checkpoint.open(tmp_path)


def opening(path: Path | str, text: str, error: type[CheckpointError] = CheckpointError) -> None:
    with pytest.raises(error, match=text):
        Checkpoint.open(path)


@pytest.mark.parametrize("name", ["model.gguf", "model.safetensors", "model.safetensors.index.json", "config.json"])
def test_dangling_links_are_named(tmp_path: Path, name: str) -> None:
    if name == "config.json":
        save_file({"x": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / name).symlink_to("../../blobs/0123")  # what an interrupted download leaves in the cache
    opening(tmp_path, rf"{name}: cannot be (read|opened) \(No such file or directory\); check that the download")


def test_os_errors_become_checkpoint_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opening("x" * 5000, r"cannot be read \(File name too long\); check")

    def closed(path: object, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:  # root reads everything
        patch.setattr("collegium.checkpoint.reader.read_json", closed)
        (tmp_path / "config.json").write_text("{}")
        save_file({"x": torch.ones(2)}, tmp_path / "model.safetensors")
        opening(tmp_path, r"config.json: cannot be read \(Permission denied\); check")


def test_missing_index_gives_advice(tmp_path: Path) -> None:
    opening(tmp_path, "found nothing; download the model again")
    save_file({"x": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    text = "found model-00001-of-00002.safetensors; download model.safetensors.index.json, or name the one file"
    opening(tmp_path, text)
    assert "x" in Checkpoint.open(tmp_path / "model-00001-of-00002.safetensors")
