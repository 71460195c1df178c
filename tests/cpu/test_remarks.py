"""Findings of ``collegium inspect`` where decoded weights are implausible, and none where they are fine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from collegium.formats import FORMATS
from commands import command
from toys import TinySize, combinations, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

SIZE = TinySize(hidden=192, intermediate=160, experts=4, layers=3)
WRITTEN = [form for form in FORMATS if not form.read_only]


def findings(folder: Path) -> list[str]:
    code, output, said = command("inspect", folder, "--device", "cpu", "--json")
    assert code == 0, said
    return json.loads(output)["findings"]


def rewrite(folder: Path, suffix: str, make: Callable[[Tensor], Tensor], *where: str) -> None:
    """Change the tensors whose names end in ``suffix`` and hold all of ``where``."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    chosen = [n for n in tensors if n.endswith(suffix) and all(part in n for part in where)]
    assert chosen
    tensors |= {n: make(tensors[n]).contiguous() for n in chosen}
    save_file(tensors, file)


def published(folder: Path, name: str, storage: str, *, family: str = "qwen3_moe") -> None:
    """Write a checkpoint whose weights have the size of published ones, about 0.02."""
    write_checkpoint(folder, family, name, storage, size=SIZE)
    scales = {
        "fp8_block": ("weight_scale_inv", lambda t: t * 0.01), "nvfp4": ("_global_scale", lambda t: t / 0.01),
        "fp8_channel": ("weight_scale", lambda t: t * 0.01), "int4_group": ("weight_scale", lambda t: t * 0.01),
    }  # fmt: skip
    if name == "nvfp4" and storage == "modelopt":
        rewrite(folder, "weight_scale_2", lambda t: t * 0.01)
    elif name in ("mxfp4", "mxfp8"):
        suffix = {"gpt-oss": "_scales", "deepseek-v4": ".scale"}.get(storage, "weight_scale")
        rewrite(folder, suffix, lambda t: (t.view(torch.uint8) - 7).view(t.dtype))
    elif name in scales:
        rewrite(folder, *scales[name])
    else:
        rewrite(folder, ".weight", lambda t: (t.float() * 0.01).to(t.dtype), ".experts.")


@pytest.mark.each_choice
@pytest.mark.parametrize(("family", "name", "storage", "stacked"), combinations())
def test_toys_are_plausible(tmp_path: Path, family: str, name: str, storage: str, stacked: bool) -> None:
    write_checkpoint(tmp_path, family, name, storage, size=SIZE, stacked=stacked)
    facts = ("different global scales; both are kept exactly", "the experts have static activation scales, which")
    assert [text for text in findings(tmp_path) if not any(fact in text for fact in facts)] == []


def e8m0(scales: Tensor) -> Tensor:
    return (254 - scales.view(torch.uint8)).view(scales.dtype)


UPSIDE_DOWN = {
    "nvfp4, compressed-tensors": ("nvfp4", "compressed-tensors", ".weight_global_scale", torch.reciprocal),
    "nvfp4, ModelOpt": ("nvfp4", "modelopt", ".weight_scale_2", torch.reciprocal),
    "fp8 blocks": ("fp8_block", "finegrained-fp8", ".weight_scale_inv", torch.reciprocal),
    "fp8 channels": ("fp8_channel", "compressed-tensors", ".weight_scale", torch.reciprocal),
    "integers": ("int4_group", "compressed-tensors", ".weight_scale", torch.reciprocal),
    "mxfp4": ("mxfp4", "compressed-tensors", ".weight_scale", e8m0),
    "mxfp8": ("mxfp8", "modelopt", ".weight_scale", e8m0),
    "1e15 times as large": ("nvfp4", "modelopt", ".weight_scale_2", lambda t: t * 1e15),
    "1e15 times as small": ("nvfp4", "modelopt", ".weight_scale_2", lambda t: t * 1e-15),
    "unquantised, 1e15 times as large": ("bf16", "plain", ".weight", lambda t: t * 1e15),
}  # fmt: skip


@pytest.mark.parametrize("case", list(UPSIDE_DOWN))
def test_scales_upside_down_are_a_finding(tmp_path: Path, case: str) -> None:
    name, storage, suffix, make = UPSIDE_DOWN[case]
    published(tmp_path, name, storage)
    assert not [text for text in findings(tmp_path) if "inverted" in text]
    rewrite(tmp_path, suffix, make, "layers.1.", ".experts.")
    found = [text for text in findings(tmp_path) if "inverted" in text]
    assert [text.split(":")[0] for text in found] == ["layer 1, gate", "layer 1, up", "layer 1, down"]
    assert all("4 of 4 matrices" in text for text in found)


def test_one_expert_upside_down_is_named(tmp_path: Path) -> None:
    published(tmp_path, "nvfp4", "compressed-tensors")
    rewrite(tmp_path, ".weight_global_scale", torch.reciprocal, "layers.1.", ".experts.2.up_proj")
    found = [text for text in findings(tmp_path) if "inverted" in text]
    assert len(found) == 1
    assert "layer 1, up: 1 of 4 matrices" in found[0]
    assert "layer 1, expert 2, up" in found[0]


def half_rows(tensor: Tensor) -> Tensor:
    raw = tensor.clone()
    raw.view(torch.uint8)[raw.shape[0] // 2 :] = 0x88 if raw.dtype == torch.int32 else 0
    return raw


def half_columns(tensor: Tensor) -> Tensor:
    raw = tensor.clone()
    if raw.dtype == torch.int32:
        raw[:, raw.shape[1] // 2 :] = torch.tensor(-0x77777778, dtype=torch.int32)  # 8 in each nibble
    else:
        raw.view(torch.uint8)[:, raw.view(torch.uint8).shape[1] // 2 :] = 0
    return raw


@pytest.mark.parametrize("make", [half_rows, half_columns])
@pytest.mark.parametrize("form", WRITTEN, ids=lambda form: form.name)
def test_half_zero_matrix_is_reported(tmp_path: Path, form: type, make: Callable[[Tensor], Tensor]) -> None:
    write_checkpoint(tmp_path, "qwen3_moe", form.name, size=SIZE)
    suffix = (
        ".weight"
        if any(n.endswith("experts.0.up_proj.weight") for n in load_file(tmp_path / "model.safetensors"))
        else ".weight_packed"
    )
    rewrite(tmp_path, suffix, make, "layers.2.", ".experts.3.down_proj")
    found = findings(tmp_path)
    found = [text for text in found if "of its weights are zero" in text]
    assert len(found) == 1
    assert found[0].startswith("layer 2, expert 3, down: 5") or found[0].startswith("layer 2, expert 3, down: 4")


@pytest.mark.parametrize("name", ["bf16", "nvfp4", "mxfp4", "fp8_block"])
def test_gate_copied_to_up_is_reported(tmp_path: Path, name: str) -> None:
    tiny = write_checkpoint(tmp_path, "qwen3_moe", name, size=SIZE)
    head = "model.layers.1.mlp.experts.2."
    tensors = load_file(tmp_path / "model.safetensors")
    for key in tiny.tensors:
        if key.startswith(f"{head}gate_proj"):
            tensors[key.replace("gate_proj", "up_proj")] = tensors[key].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    assert any(
        text.startswith("layer 1, expert 2, up: its weights are, byte for byte, those of layer 1, expert 2, gate")
        for text in findings(tmp_path)
    )


def test_a_shared_expert_is_seen_too(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "deepseek_v3", "nvfp4", "compressed-tensors", size=SIZE)
    head = "model.layers.1.mlp.shared_experts."
    rewrite(tmp_path, "gate_proj.weight", lambda t: t * 1e15, head)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{head}up_proj.weight"] = tensors[f"{head}gate_proj.weight"].clone()
    tensors[f"{head}down_proj.weight"][96:] = 0
    save_file(tensors, tmp_path / "model.safetensors")
    found = findings(tmp_path)
    assert any(text.startswith("layer 1, shared expert, gate: 1 of 1 matrices make") for text in found)
    assert any(text.startswith("layer 1, shared expert, up: its weights are, byte for byte") for text in found)
    assert any(text.startswith("layer 1, shared expert, down: 50% of its weights are zero") for text in found)
