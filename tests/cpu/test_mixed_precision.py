"""ModelOpt's mixed precision: layers may differ in format, the projections of one expert may not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file, save_file

from collegium import ConfigError, load_layer
from collegium.commands.inspect import inspect_model
from toys import write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path


def mixed(path: Path, eight: str) -> str:
    """Write an NVFP4 checkpoint whose modules with ``eight`` in their names are FP8 per tensor."""
    out, layers = {}, {}
    for name, algorithm in (("nvfp4", "NVFP4"), ("fp8_tensor", "FP8")):
        write_checkpoint(path, "qwen3_moe", name, "modelopt")
        for tensor, value in load_file(path / "model.safetensors").items():
            if (eight in tensor) == (algorithm == "FP8") or ".experts." not in tensor:
                out[tensor] = value
                if ".experts." in tensor:
                    layers[tensor.partition("_proj")[0] + "_proj"] = {"quant_algo": algorithm}
    save_file(out, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    block = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": block}))
    return str(path)


def test_layers_of_two_formats(tmp_path: Path) -> None:
    path = mixed(tmp_path, ".layers.1.")
    found = [load_layer(path, layer, device="cpu").spec.weight_format for layer in (0, 1)]
    assert found == ["nvfp4", "fp8_tensor"]


def test_projections_of_two_formats_are_refused_by_name(tmp_path: Path) -> None:
    path = mixed(tmp_path, "down_proj")
    for ask in (lambda: load_layer(path, 0, device="cpu"), lambda: inspect_model(path, device="cpu")):
        with pytest.raises(ConfigError, match=r"projections differ in format: .*gate_proj nvfp4.*down_proj fp8_tensor"):
            ask()
