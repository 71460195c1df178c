"""Routers, shared experts and shared gates in the formats that checkpoints use, entered from files on disk.

Truth is float64 arithmetic on the numbers that plain torch makes of the stored codes.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from collegium.checkpoint import Checkpoint, CheckpointLayer, audit
from collegium.checkpoint.non_expert_weights import load_router, load_shared
from collegium.errors import BadScaleError, CheckpointError, ConfigError, TensorMismatchError, UnknownTensorError
from collegium.loading import load_layer
from quantised_layers import BASE, COMMANDS, CONFIG, GATE, ROUTER, WIDTH, D, E, check, everything, rewrite, write
from quantised_matrices import KINDS

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


def but_the_gate(path: str) -> bool:
    """AWQ packs eight output columns and ModelOpt's INT4 two, of which a gate has one."""
    return path != GATE


ONE_ROW = [name for name in KINDS if name not in ("awq", "auto-round awq", "modelopt int4 w4a8")]


@pytest.mark.parametrize("name", list(KINDS))
def test_router_and_gate_quantised(tmp_path: Path, name: str) -> None:
    check(write(tmp_path, KINDS[name], everything if name in ONE_ROW else but_the_gate))


@pytest.mark.parametrize("name", ["bitsandbytes", "gptq", "fp8 blocks", "ct nvfp4", "auto-round"])
def test_router_alone_quantised(tmp_path: Path, name: str) -> None:
    """Skip lists that cover the experts, and a layer whose experts are in bfloat16."""
    written = write(tmp_path, KINDS[name], lambda path: path in (ROUTER, GATE))
    check(written)
    layer = CheckpointLayer.open(Checkpoint.open(tmp_path), 0)
    router, shared = load_router(layer), load_shared(layer)
    assert torch.equal(router.weight, written.values[ROUTER])
    assert shared is not None
    assert shared.gate is not None
    assert torch.equal(shared.gate, written.values[GATE])
    roles = audit(layer.checkpoint).roles
    assert roles["router"][0] == len([n for n in layer.checkpoint.tensors if n.startswith(ROUTER + ".")])
    assert "other" not in roles


def test_experts_of_bitsandbytes_in_bfloat16(tmp_path: Path) -> None:
    """The package replaces linear modules and lists nothing: what is not quantised has no state of its own."""
    check(write(tmp_path / "experts", KINDS["bitsandbytes"], lambda path: ".experts." not in path, skip=False))
    check(write(tmp_path / "shared", KINDS["bitsandbytes"], lambda path: "shared_expert." not in path, skip=False))
    eight = write(tmp_path / "eight", KINDS["bitsandbytes"], lambda path: False, skip=False)
    block = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}
    (eight.path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": block}))
    check(eight)
    rewrite(eight.path, {f"{BASE}experts.0.up_proj.weight": torch.zeros(WIDTH, D, dtype=torch.int8)})
    with pytest.raises(ConfigError, match="load_in_8bit"):
        load_layer(eight.path, 0, device="cpu")


def test_experts_in_two_storages(tmp_path: Path) -> None:
    """Some in NF4 and some in bfloat16 are no layer of one format."""
    write(tmp_path, KINDS["bitsandbytes"], lambda path: ".experts.0." in path, skip=False)
    for command in COMMANDS:
        with pytest.raises(CheckpointError, match="expert 1, gate"):
            command(str(tmp_path))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "BF16"])
def test_routers_in_gguf_blocks(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("gguf")
    from gguf_files import write_gguf

    truth = write_gguf(tmp_path / "model.gguf", "qwen3moe", ("Q8_0", "Q8_0"), router=kind)
    for command in COMMANDS:
        command(str(tmp_path / "model.gguf"))
    for number in (0, 1):
        router = load_router(CheckpointLayer.open(Checkpoint.open(tmp_path / "model.gguf"), number))
        assert torch.equal(router.weight.float(), truth[number, "router"])


@pytest.mark.parametrize("name", ["gptq", "ct fp8 channel", "bitsandbytes"])
def test_faults_of_routers(tmp_path: Path, name: str) -> None:
    """Every command refuses a part that is missing, of another shape, or that nothing reads."""
    write(tmp_path, KINDS[name], everything)
    before = load_file(tmp_path / "model.safetensors")
    scale = next(n for n in before if n.startswith(ROUTER) and n.endswith(("scales", "weight_scale", "absmax")))

    def refused(kinds: Any, text: str, changed: dict[str, Tensor | None]) -> None:
        save_file(before, tmp_path / "model.safetensors")
        rewrite(tmp_path, changed)
        for command in COMMANDS:
            with pytest.raises(kinds, match=text):
                command(str(tmp_path))

    refused(CheckpointError, "router", {scale: None})
    refused(TensorMismatchError, "router", {scale: before[scale].flatten()[:3].clone()})
    kind, text = (TensorMismatchError, "bias is not zero") if name == "gptq" else (UnknownTensorError, "mlp.gate.bias")
    refused(kind, text, {f"{ROUTER}.bias": torch.ones(E)})
    refused(UnknownTensorError, "mlp.gate.lora_a", {f"{ROUTER}.lora_a": torch.ones(E)})
    refused(BadScaleError, "router", {scale: torch.full_like(before[scale], torch.nan)})
