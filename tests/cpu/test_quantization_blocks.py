"""What a quantisation block declares: where it lies, what it covers, and algorithms by their names.

Files on disk go through the layer, inspect and verify; ModelOpt's own functions pack and judge its integers.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from collegium.checkpoint import Checkpoint, CheckpointLayer, audit, load_experts
from collegium.commands.inspect import inspect_model
from collegium.commands.verify import verify_model
from collegium.errors import BadScaleError, ConfigError, TensorMismatchError, UnknownTensorError
from collegium.loading import load_layer
from collegium.models import declared_format, quantization_block, without_quantization
from collegium.parallel.placement import linear
from collegium.problem import Overrides
from quantised_layers import BASE, COMMANDS, CONFIG, GATE, ROUTER, check, everything, rewrite, write
from quantised_matrices import GROUP, KINDS
from raising import raises_with
from toys import TinySize, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

EXPERT = "model.layers.0.mlp.experts.0.up_proj"
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}


def configure(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


def nested(keys: tuple[str, ...], config: dict[str, Any], block: dict[str, Any]) -> dict[str, Any]:
    """A config whose text part, with its quantisation block, lies below ``keys``."""
    inner = {**config, "quantization_config": block}
    for key in reversed(keys):
        inner = {"model_type": config["model_type"], key: inner}
    return inner


PLACES = [
    (), ("text_config",), ("llm_config",), ("language_config",), ("thinker_config",), ("thinker_config", "text_config"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "name"), [*zip(PLACES, ("modelopt nvfp4", "ct int4", "auto-round") * 2, strict=True)])
def test_blocks_in_nested_configs(tmp_path: Path, keys: tuple[str, ...], name: str) -> None:
    written = write(tmp_path, KINDS[name], everything)
    block = KINDS[name].block([])
    config = nested(keys, CONFIG, block)
    (tmp_path / "config.json").write_text(json.dumps(config))
    check(written)
    assert quantization_block(config) == block
    assert quantization_block(without_quantization(config)) is None


def test_outer_block_around_a_text_config(tmp_path: Path) -> None:
    """The same block twice is one; two that differ are refused, naming both places."""
    written = write(tmp_path, KINDS["gptq"], everything)
    block = KINDS["gptq"].block([])
    config = {**nested(("thinker_config", "text_config"), CONFIG, block), "quantization_config": block}
    (tmp_path / "config.json").write_text(json.dumps(config))
    check(written)
    other = {**config, "quantization_config": {**block, "sym": False}}
    (tmp_path / "config.json").write_text(json.dumps(other))
    for command in COMMANDS:
        with pytest.raises(ConfigError, match=r"quantization_config and thinker_config.text_config."):
            command(str(tmp_path))


def test_skip_lists_relative_to_text_model() -> None:
    """A block inside the text config may name modules without the wrapper's prefix; one at the top may not."""
    block = {**NVFP4, "ignore": ["model.layers.0.*", r"re:model\.layers\.1\..*"]}
    inside = {"model_type": "x", "dtype": "bfloat16", "text_config": {"quantization_config": block}}
    for layer in (0, 1):
        path = f"language_model.model.layers.{layer}.mlp.experts.0.up_proj"
        assert declared_format(inside, path).format == "bf16"
        assert declared_format({"quantization_config": block}, path).format == "nvfp4"
    assert declared_format(inside, "language_model.model.layers.2.mlp.experts.0.up_proj").format == "nvfp4"


def test_separate_files_beside_nested_blocks(tmp_path: Path) -> None:
    """A separate file counts where no part of the config has a block."""
    written = write(tmp_path, KINDS["modelopt nvfp4"], everything)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_moe", "llm_config": CONFIG}))
    entry = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    separate = {"producer": {"name": "modelopt"}, "quantization": entry}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(separate))
    check(written)
    (tmp_path / "hf_quant_config.json").unlink()
    written = write(tmp_path, KINDS["auto-round"], everything)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "quantization_config.json").write_text(json.dumps(KINDS["auto-round"].block([])))
    check(written)


SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
CACHES: list[dict[str, Any]] = [
    {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME, "format": "dense"},
    {"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME, "quantization_status": "frozen"},
    {"quant_method": "modelopt", "quant_algo": None, "kv_cache_scheme": SCHEME},
    {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
    {"kv_cache_quant_algo": "NVFP4"},
    {"producer": {"name": "modelopt"}, "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}},
]


@pytest.mark.parametrize("block", CACHES)
def test_blocks_of_the_cache_alone(tmp_path: Path, block: dict[str, Any]) -> None:
    written = write(tmp_path, KINDS["gptq"], lambda path: False)
    configure(tmp_path, lambda config: config.update(quantization_config=block))
    check(written)
    write(tmp_path, KINDS["ct fp8 channel"], everything)
    configure(tmp_path, lambda config: config.update(quantization_config=block))
    for command in COMMANDS:
        with raises_with(ConfigError, "config.json", "bf16"):
            command(str(tmp_path))


def test_cache_alone_in_a_separate_file(tmp_path: Path) -> None:
    written = write(tmp_path, KINDS["gptq"], lambda path: False)
    configure(tmp_path, lambda config: config.pop("quantization_config"))
    entry = {"quant_algo": None, "kv_cache_quant_algo": "FP8", "exclude_modules": []}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": entry}))
    check(written)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": None}}))
    with pytest.raises(ConfigError, match="quant_algo is 'NONE'"):
        load_layer(tmp_path, 0, device="cpu")


AUTO = KINDS["auto-round"].block([])


@pytest.mark.parametrize(
    ("change", "declared"),
    [
        ({}, ("int4_group", "gptq")),
        ({"quant_method": "intel/auto-round", "packing_format": None, "backend": "auto_round:gptq:exllamav2"},
         ("int4_group", "gptq")),
        ({"packing_format": None, "backend": "auto_round:exllamav2", "sym": False}, ("int4_affine", "gptq_v2")),
        ({"packing_format": None, "backend": "auto"}, ("int4_group", "gptq")),
        ({"sym": False}, ("int4_affine", "gptq")),
        ({"bits": 8}, ("int8_affine", "gptq")),
        ({"packing_format": "auto_round:auto_awq", "sym": False}, ("int4_affine", "awq")),
        ({"packing_format": "auto_round:gptqmodel"}, ("int4_group", "gptq_v2")),
        ({"extra_config": {EXPERT: {"bits": 16}}}, ("bf16", None)),
        ({"extra_config": {EXPERT: {"bits": 8, "sym": False}}}, ("int8_affine", "gptq")),
        ({"extra_config": {"model.layers.0.mlp.experts": {"bits": 16}}}, ("bf16", None)),
        ({"extra_config": {r".*experts\.\d+\.up_proj": {"bits": 16}}}, ("bf16", None)),
        ({"extra_config": {r".*experts.*": {"bits": 16}, EXPERT: {"bits": 8}}}, ("int8_affine", "gptq")),
        ({"extra_config": {EXPERT + "_norm": {"bits": 16}}}, ("int4_group", "gptq")),
        ({"block_name_to_quantize": ["model.layers"]}, ("int4_group", "gptq")),
        ({"block_name_to_quantize": "model.layers,model.visual"}, ("int4_group", "gptq")),
        ({"to_quant_block_names": [["model.visual.blocks"]]}, ("bf16", None)),
        ({"modules_to_not_convert": ["experts"]}, ("bf16", None)),
    ],
)  # fmt: skip
def test_what_auto_round_declares(change: dict[str, Any], declared: tuple[str, str | None]) -> None:
    entry = declared_format({"dtype": "bfloat16", "quantization_config": {**AUTO, **change}}, EXPERT)
    assert (entry.format, entry.storage) == declared


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"packing_format": "auto_round:llm_compressor"}, "packing_format is 'auto_round:llm_compressor', allowed are"),
        ({"bits": 3}, "bits is 3, allowed are 4, 8"),
        ({"data_type": "mx_fp"}, "data_type is 'mx_fp', allowed are 'int'"),
        ({"act_bits": 8}, "act_bits is 8, allowed are None, 16, 32"),
        ({"packing_format": "auto_round:auto_awq", "bits": 8}, "bits is 8, allowed are 4"),
        ({"super_bits": 6}, "super_bits is 6"),
        ({"extra_config": ["lm_head"]}, "extra_config is"),
        ({"extra_config": {EXPERT: 16}}, "allowed is an object"),
        ({"block_name_to_quantize": [1]}, "block_name_to_quantize is"),
    ],
)
def test_what_auto_round_is_refused(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    write(tmp_path, KINDS["auto-round"], everything)
    configure(tmp_path, lambda config: config["quantization_config"].update(change))
    for command in COMMANDS:
        with pytest.raises(ConfigError, match=text):
            command(str(tmp_path))


def test_overrides_of_single_modules(tmp_path: Path) -> None:
    """Experts in four bits, the shared expert in eight, router and gate in 16: each by an entry of its kind."""
    kind, wide = KINDS["auto-round"], KINDS["auto-round 8 bits"]
    written = write(tmp_path, kind, lambda path: path not in (ROUTER, GATE))
    changed: dict[str, Tensor | None] = {}
    for name in ("gate_proj", "up_proj", "down_proj"):
        path = f"{BASE}shared_expert.{name}"
        parts, written.values[path] = wide.write(written.values[path])
        changed |= {f"{path}.{suffix}": part.contiguous().clone() for suffix, part in parts.items()}
    rewrite(tmp_path, changed)
    extra = {ROUTER: {"bits": 16}, GATE: {"bits": 16}, r".*mlp\.shared_expert\..*": {"bits": 8, "sym": False}}
    configure(tmp_path, lambda config: config["quantization_config"].update(extra_config=extra))
    check(written)


def test_lists_of_what_gptq_quantises() -> None:
    block = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    listed = {**block, "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.experts"]]}
    for path, form in ((EXPERT, "int4_group"), (ROUTER, "bf16")):
        assert declared_format({"dtype": "bfloat16", "quantization_config": listed}, path).format == form


@pytest.mark.parametrize("name", ["int4_awq", "w4a8_awq"])
@pytest.mark.parametrize("rows", [96, 160])
def test_integers_as_modelopt_packs_them(tmp_path: Path, name: str, rows: int) -> None:
    utils = pytest.importorskip("modelopt.torch.export.quant_utils")
    torch.manual_seed(2)
    size = TinySize(hidden=rows, intermediate=64, experts=2, layers=1)
    tiny = write_checkpoint(tmp_path, "mixtral", "int4_group", "modelopt", size=size)
    for which, path in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        payload = tiny.experts[0][("gate", "up", "down").index(which)]
        for expert in range(2):
            base = f"model.layers.0.block_sparse_moe.experts.{expert}.{path}."
            scale = tiny.tensors[f"{base}weight_scale"].float()
            packed = utils.to_quantized_weight(payload.decode()[expert], scale, name, block_size=GROUP)
            assert torch.equal(packed, tiny.tensors[f"{base}weight"])
    weights = load_experts(CheckpointLayer.open(Checkpoint.open(tmp_path), 0), linear(2))
    assert torch.equal(weights.down.decode(), tiny.experts[0][2].decode())
    assert torch.equal(weights.gate_up.decode()[:, 1], tiny.experts[0][1].decode())


@pytest.mark.parametrize("name", ["w4a8_nvfp4_fp8", "w4a8_mxfp4_fp8"])
def test_four_bits_as_modelopt_packs_them(tmp_path: Path, name: str) -> None:
    """ModelOpt quantises the experts and decodes them; the layer loads the same bits."""
    pytest.importorskip("modelopt.torch.export.quant_utils")
    from modelopt.torch.quantization.qtensor import MXFP4QTensor, NVFP4QTensor

    form = "nvfp4" if "nvfp4" in name else "mxfp4"
    kind = KINDS[f"modelopt {form} w4a8"]
    wanted: dict[str, Tensor] = {}

    def convert(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        if form == "mxfp4":
            codes, scale = MXFP4QTensor.quantize(weight, block_size=32)
            scale = scale.reshape(*weight.shape[:-1], -1)
            values = codes.dequantize(dtype=torch.float32, scale=scale, block_sizes={-1: 32})
            return {"weight": codes._quantized_data, "weight_scale": scale}, values
        whole = weight.abs().amax() / 448
        scale = NVFP4QTensor.get_weights_scaling_factor(weight, 16, whole)[0]
        codes = NVFP4QTensor.quantize(weight, 16, scale, whole)[0]
        values = codes.dequantize(dtype=torch.float32, scale=scale, double_scale=whole, block_sizes={-1: 16})
        return {"weight": codes._quantized_data, "weight_scale": scale, "weight_scale_2": whole}, values

    written = write(tmp_path, kind, everything)
    changed: dict[str, Tensor | None] = {}
    for path, values in written.values.items():
        if ".experts." in path:
            parts, wanted[path] = convert(values)
            changed |= {f"{path}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    rewrite(tmp_path, changed)
    written.values |= wanted
    check(written)
    weights = load_experts(CheckpointLayer.open(Checkpoint.open(tmp_path), 0), linear(8))
    for expert in range(8):
        torch.testing.assert_close(
            weights.down.decode()[expert], wanted[f"{BASE}experts.{expert}.down_proj"], rtol=0, atol=0
        )


@pytest.mark.parametrize(("algorithm", "most"), [("W4A8_NVFP4_FP8", 448.0), ("NVFP4", 448.0 * 6)])
def test_static_scales_of_w4a8(tmp_path: Path, algorithm: str, most: float) -> None:
    """The scale of FP8 activations lets 448 times itself through, that of NVFP4 activations 6 * 448 times."""
    write(tmp_path, KINDS["modelopt nvfp4"], everything)
    configure(tmp_path, lambda config: config["quantization_config"].update(quant_algo=algorithm))
    force = Overrides(activation_format="fp8_static", kernel="reference")
    layer = load_layer(tmp_path, 0, device="cpu", overrides=force)
    assert layer.experts.input_reach == (0.5 * most, 0.5 * most)
    static = "fp8_static" if algorithm.startswith("W4A8") else "nvfp4_static"
    assert any(f"--activations {static} uses" in text for text in audit(Checkpoint.open(tmp_path)).findings)


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        ("pre_quant_scale", "input factors"),
        ("svdquant_lora_a", "a low-rank correction"),
        ("weight_offset", "an offset of weights"),
        ("input_offset", "an offset of activations"),
    ],
)
def test_inputs_that_would_be_transformed(tmp_path: Path, suffix: str, text: str) -> None:
    """Present and not applied is an error, in experts, shared expert and router alike."""
    for path, message in ((EXPERT, text), (f"{BASE}shared_expert.up_proj", suffix), (ROUTER, suffix)):
        write(tmp_path, KINDS["modelopt nvfp4"], everything)
        configure(tmp_path, lambda config: config["quantization_config"].update(quant_algo="NVFP4_AWQ"))
        check_loads = load_layer(tmp_path, 0, device="cpu")
        assert check_loads.spec.weight_format == "nvfp4"
        rewrite(tmp_path, {f"{path}.{suffix}": torch.ones(160)})
        for command in COMMANDS:
            with pytest.raises(UnknownTensorError, match=message):
                command(str(tmp_path))


@pytest.mark.parametrize("name", ["modelopt nvfp4", "ct nvfp4", "fp8 tensor", "ct fp8 tensor"])
@pytest.mark.parametrize("value", [torch.inf, 0.0, -1.0, torch.nan, None])
def test_input_scales_that_nothing_uses(tmp_path: Path, name: str, value: float | None) -> None:
    """All commands pass with a remark, and all refuse once static activations would use the scale."""
    written = write(tmp_path, KINDS[name], everything)
    stored = load_file(tmp_path / "model.safetensors")
    suffixes = ("input_scale", "input_global_scale", "activation_scale")
    scale = next(n for n in stored if EXPERT in n and n.endswith(suffixes))
    bad = torch.tensor(3.0) if value is None else torch.tensor(value)
    rewrite(tmp_path, {scale: bad.reshape(stored[scale].shape)})
    check(written)
    report = inspect_model(str(tmp_path), device="cpu").report
    assert any("static activation scales" in text for text in report.findings)
    if value is not None:
        assert any(f"{scale} is" in text and "static activations, which would use" in text for text in report.findings)
    static = "nvfp4_static" if "nvfp4" in name else "fp8_static"
    if value is None and name != "ct nvfp4" and not name.startswith("ct"):
        return  # different scales of gate and up: the larger one is used
    force = Overrides(activation_format=static, kernel="reference")
    for command in (load_layer, lambda path, _, **more: verify_model(str(path), **more)):
        with pytest.raises(BadScaleError, match=f"expert 0, up: {scale} is"):
            command(tmp_path, 0, device="cpu", overrides=force)


@pytest.mark.parametrize("shape", [(0,), (7,), (2, 2)])
def test_input_scales_of_another_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    written = write(tmp_path, KINDS["modelopt fp8"], everything)
    rewrite(tmp_path, {f"{EXPERT}.input_scale": torch.ones(shape)})
    check(written)
    force = Overrides(activation_format="fp8_static", kernel="reference")
    with raises_with(TensorMismatchError, "expert 0, up", "input_scale"):
        load_layer(tmp_path, 0, device="cpu", overrides=force)


def test_dense_layers_with_experts(tmp_path: Path) -> None:
    """Every command refuses a file with experts in a layer that the config calls dense."""
    write_checkpoint(tmp_path, "qwen3_moe", size=TinySize(layers=2))
    configure(tmp_path, lambda config: config.update(mlp_only_layers=[1]))
    for command in COMMANDS:
        with raises_with(ConfigError, "layer 1", "config.json"):
            command(str(tmp_path))
