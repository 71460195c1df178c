"""inspect, verify and the loader see all of a layer: router, biases, shared expert, stacks, dense layers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from collegium.errors import BadScaleError, CheckpointError, ConfigError, MissingTensorError, TensorMismatchError
from collegium.loading import load_layer
from commands import command
from raising import assert_values, raises_with
from toys import TinySize, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    Change = Callable[[dict[str, Tensor]], None]

SIZE = TinySize(hidden=96, intermediate=64, experts=4, layers=3)
GATE = "model.layers.2.mlp.gate.weight"
BIAS = "model.layers.2.mlp.gate.e_score_correction_bias"
SHARED = "model.layers.2.mlp.shared_experts."


def rewrite(folder: Path, change: Change, config: Callable[[dict[str, Any]], None] | None = None) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    if config is not None:
        entries = json.loads((folder / "config.json").read_text())
        config(entries)
        (folder / "config.json").write_text(json.dumps(entries))


def inspect(folder: Path, *options: str) -> tuple[int, str]:
    code, _, said = command("inspect", folder, "--device", "cpu", *options)
    return code, said


def findings(folder: Path) -> list[str]:
    code, output, said = command("inspect", folder, "--device", "cpu", "--json")
    assert code == 0, said
    return json.loads(output)["findings"]


def refused(folder: Path, error: type[CheckpointError], *texts: str, layer: int = 2, headers: bool) -> None:
    """inspect, verify and load_layer refuse in the same words; headers: inspect does without reading a tensor too."""
    said = [inspect(folder), command("verify", folder, "--device", "cpu")[::2]]
    said += [inspect(folder, "--no-deep")] if headers else []
    for code, words in said:
        assert code == 1
        assert all(text in words for text in texts), words
    for _ in range(2):
        with pytest.raises(error) as caught:
            load_layer(folder, layer, device="cpu")
        assert all(text in str(caught.value) for text in texts)


def put(name: str, make: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors: tensors.update({name: make(tensors[name])})


def drop(name: str) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return change


def last(value: float) -> Callable[[Tensor], Tensor]:
    def make(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[-1] = value
        return tensor

    return make


SHAPES = {
    "router": (GATE, lambda t: t[:3], ("is BF16 (3, 96)", "needed is BF16, F16 or F32 (4, 96)")),
    "router turned": (GATE, lambda t: t.mT, ("is BF16 (96, 4)", "needed is BF16, F16 or F32 (4, 96)")),
    "correction bias": (BIAS, lambda t: t[:3], ("is F32 (3,)", "needed is BF16, F16 or F32 (4,)")),
    "shared gate": (f"{SHARED}gate_proj.weight", lambda t: t[:-1], ("weight is (63, 96)", "needs (64, 96)")),
    "shared up turned": (f"{SHARED}up_proj.weight", lambda t: t.mT, ("weight is (96, 64)", "needs (64, 96)")),
    "shared down": (f"{SHARED}down_proj.weight", lambda t: t[:, :32], ("weight is (96, 32)", "needs (96, 64)")),
}


@pytest.mark.parametrize("case", list(SHAPES))
def test_wrong_shapes_are_named(tmp_path: Path, case: str) -> None:
    name, make, texts = SHAPES[case]
    write_checkpoint(tmp_path, "deepseek_v3", "bf16", size=SIZE)
    rewrite(tmp_path, put(name, make))
    refused(tmp_path, TensorMismatchError, "layer 2", name, *texts, headers=True)
    load_layer(tmp_path, 1, device="cpu")


def test_router_of_integers_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "deepseek_v3", "bf16", size=SIZE)
    rewrite(tmp_path, put(GATE, lambda tensor: tensor.int()))
    refused(tmp_path, ConfigError, "layer 2, router", "I32", "bf16", headers=True)
    load_layer(tmp_path, 1, device="cpu")


@pytest.mark.parametrize("name", [GATE, BIAS, f"{SHARED}up_proj.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_named(tmp_path: Path, name: str, value: float) -> None:
    write_checkpoint(tmp_path, "deepseek_v3", "nvfp4", "compressed-tensors", size=SIZE)
    rewrite(tmp_path, put(name, last(value)))
    refused(tmp_path, BadScaleError, name, "NaN or infinity", headers=False)


def test_quantised_shared_expert_scales_are_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "deepseek_v3", "fp8_channel", "compressed-tensors", size=SIZE)
    path = f"{SHARED}down_proj"

    def change(tensors: dict[str, Tensor]) -> None:
        for which in ("gate_proj", "up_proj", "down_proj"):
            for layer in (1, 2):
                own = f"model.layers.{layer}.mlp.shared_experts.{which}"
                weight = tensors[f"{own}.weight"].float()
                tensors[f"{own}.weight"] = (weight / 0.25).to(torch.float8_e4m3fn)
                tensors[f"{own}.weight_scale"] = torch.full((len(weight), 1), 0.25)

    def config(entries: dict[str, Any]) -> None:
        entries["quantization_config"]["ignore"] = ["lm_head", "re:.*mlp.gate$"]

    rewrite(tmp_path, change, config)
    assert [found.partition(" run ")[0] for found in findings(tmp_path)] == [
        "6 matrices outside the experts (6 fp8_channel)"
    ]
    load_layer(tmp_path, 2, device="cpu")
    rewrite(tmp_path, put(f"{path}.weight_scale", last(float("nan"))))
    refused(tmp_path, BadScaleError, "layer 2, shared expert, down", f"{path}.weight_scale", headers=False)
    rewrite(tmp_path, drop(f"{path}.weight_scale"))
    refused(tmp_path, MissingTensorError, f"{path}.weight_scale missing", headers=True)
    rewrite(tmp_path, drop(f"{path}.weight"))
    refused(tmp_path, MissingTensorError, f"{path} missing", headers=True)


def test_biases_and_factors_of_a_router(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "oss", "gpt_oss", "mxfp4", size=SIZE)
    name = "model.layers.2.mlp.router.bias"
    rewrite(tmp_path / "oss", put(name, last(float("nan"))))
    refused(tmp_path / "oss", BadScaleError, name, "NaN or infinity", headers=False)
    rewrite(tmp_path / "oss", put(name, lambda t: t[:2]))
    refused(tmp_path / "oss", TensorMismatchError, name, "is F32 (2,)", "(4,)", headers=True)


def gemma(folder: Path) -> None:
    """Gemma-4, whose router has a factor of its input and one of each expert."""
    config = {
        "model_type": "gemma4", "text_config": {
            "model_type": "gemma4_text", "hidden_size": 96, "moe_intermediate_size": 64, "num_hidden_layers": 2,
            "num_experts": 4, "top_k_experts": 2, "enable_moe_block": True, "rms_norm_eps": 1e-6,
            "hidden_activation": "gelu_pytorch_tanh",
        },
        "dtype": "bfloat16",
    }  # fmt: skip
    tensors: dict[str, Tensor] = {}
    for layer in range(2):
        head = f"model.language_model.layers.{layer}."
        tensors |= {
            f"{head}experts.gate_up_proj": torch.randn(4, 128, 96).bfloat16() * 0.1,
            f"{head}experts.down_proj": torch.randn(4, 96, 64).bfloat16() * 0.1,
            f"{head}router.proj.weight": torch.randn(4, 96).bfloat16(),
            f"{head}router.scale": torch.ones(96).bfloat16(),
            f"{head}router.per_expert_scale": torch.ones(4).bfloat16(),
        }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("tail", ["per_expert_scale", "scale"])
def test_factors_of_a_router(tmp_path: Path, tail: str) -> None:
    gemma(tmp_path)
    assert findings(tmp_path) == []
    name = f"model.language_model.layers.1.router.{tail}"
    rewrite(tmp_path, put(name, last(float("inf"))))
    refused(tmp_path, BadScaleError, name, "NaN or infinity", layer=1, headers=False)
    rewrite(tmp_path, put(name, lambda t: t[:3]))
    refused(tmp_path, TensorMismatchError, name, "is BF16 (3,)", layer=1, headers=True)


@pytest.mark.parametrize("part", ["gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_scales"])
def test_missing_expert_names_the_stack(tmp_path: Path, part: str) -> None:
    write_checkpoint(tmp_path, "gpt_oss", "mxfp4", size=SIZE)
    name = f"model.layers.1.mlp.experts.{part}"
    rewrite(tmp_path, put(name, lambda t: t[:3]))
    texts = (name, "for 3 experts", "num_experts=4", "3 of 4 tensors match")
    refused(tmp_path, TensorMismatchError, *texts, layer=1, headers=True)
    assert "pruned" not in inspect(tmp_path)[1]


def test_missing_expert_names_the_bias(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "gpt_oss", "mxfp4", size=SIZE)
    name = "model.layers.1.mlp.experts.down_proj_bias"
    rewrite(tmp_path, put(name, lambda t: t[:3]))
    refused(tmp_path, TensorMismatchError, name, "(3, 96), needed is", "(4, 96)", layer=1, headers=True)


def test_pruned_stacks_are_detected(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "gpt_oss", "mxfp4", size=SIZE)

    def change(tensors: dict[str, Tensor]) -> None:
        tensors.update({n: t[:3] for n, t in tensors.items() if ".layers.1.mlp.experts." in n})

    rewrite(tmp_path, change)
    refused(tmp_path, ConfigError, "experts 0 to 2 (3)", "num_experts=4", "pruned", layer=1, headers=True)


def test_experts_in_layer_declared_dense_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_moe", "bf16", size=SIZE)
    rewrite(tmp_path, lambda _: None, lambda c: c.update(mlp_only_layers=[1]))
    for name in ("inspect", "verify"):
        code, _, said = command(name, tmp_path, "--device", "cpu")
        assert code == 1
        assert_values(said, "layer 1", "config.json")
        assert_values(said, "model.layers.1.mlp.experts.0.down_proj.weight", "11 more")
        assert "[0, 2]" in said


def test_experts_in_last_layer_declared_dense(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_moe", "bf16", size=SIZE)
    rewrite(tmp_path, lambda _: None, lambda c: c.update(mlp_only_layers=[2]))
    assert_values(inspect(tmp_path)[1], "layer 2", "config.json")


def test_mtp_layers_are_not_dense_layers(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "deepseek_v3", "bf16", size=SIZE)
    rewrite(
        tmp_path,
        lambda t: t.update({n.replace("layers.2.", "layers.3."): v.clone() for n, v in t.items() if "layers.2." in n}),
    )
    assert inspect(tmp_path)[0] == 0


def test_dense_layer_declared_sparse_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_moe", "bf16", size=SIZE)

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if ".layers.2." in n]:
            del tensors[name]
        for which, shape in (("gate_proj", (64, 96)), ("up_proj", (64, 96)), ("down_proj", (96, 64))):
            tensors[f"model.layers.2.mlp.{which}.weight"] = torch.randn(shape).bfloat16()

    rewrite(tmp_path, change)
    texts = ("layer 2: no tensor starts with", "model.layers.2.mlp.down_proj.weight", "dense")
    for code, said in (inspect(tmp_path), inspect(tmp_path, "--no-deep")):
        assert code == 1
        assert all(text in said for text in texts), said
    with pytest.raises(MissingTensorError, match="dense"):
        load_layer(tmp_path, 2, device="cpu")


MIXED = {
    "one expert": lambda path: ".2." in path,
    "one projection of one expert": lambda path: path.endswith("experts.3.w3"),
}


@pytest.mark.parametrize("case", list(MIXED))
@pytest.mark.parametrize("other", ["FP8", None])
def test_mixed_precision_layer_refused_by_name(tmp_path: Path, case: str, other: str | None) -> None:
    write_checkpoint(tmp_path, "mixtral", "nvfp4", "modelopt", size=SIZE)
    paths = [
        f"model.layers.{i}.block_sparse_moe.experts.{e}.{p}"
        for i in range(3)
        for e in range(4)
        for p in ("w1", "w3", "w2")
    ]
    turned = {path for path in paths if ".layers.1." in path and MIXED[case](path)}
    layers = {path: {"quant_algo": "NVFP4", "group_size": 16} for path in paths if path not in turned}
    layers |= {path: {"quant_algo": other} for path in turned if other is not None}

    def change(tensors: dict[str, Tensor]) -> None:
        for path in turned:
            rows, columns = tensors[f"{path}.weight"].shape
            for suffix in (".weight", ".weight_scale", ".weight_scale_2", ".input_scale"):
                del tensors[f"{path}{suffix}"]
            weight = torch.randn(rows, 2 * columns)
            tensors[f"{path}.weight"] = weight.bfloat16() if other is None else weight.to(torch.float8_e4m3fn)
            if other is not None:
                tensors[f"{path}.weight_scale"] = torch.tensor(0.5)

    block = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    rewrite(tmp_path, change, lambda c: c.update(quantization_config=block))
    texts = ("layer 1: ", "differ in format", "they must share one", "layers may differ from each other")
    for code, said in (inspect(tmp_path), command("verify", tmp_path, "--device", "cpu")[::2]):
        assert code == 1
        assert all(text in said for text in texts), said
        assert any(path in said for path in turned)
    with raises_with(ConfigError, "layer 1"):
        load_layer(tmp_path, 1, device="cpu")
    load_layer(tmp_path, 2, device="cpu")


OUTSIDE = {
    "router": ("mlp.gate.weight", lambda t: t[:3], "(3, 64), needed is"),
    "router turned": ("mlp.gate.weight", lambda t: t.mT, "(64, 4), needed is"),
    "shared expert": ("mlp.shared_expert.up_proj.weight", lambda t: t[:5], "weight is (5, 64)"),
    "shared expert's gate": ("mlp.shared_expert_gate.weight", lambda t: t[:, :3], "(1, 3), needed is"),
}


@pytest.mark.parametrize("case", list(OUTSIDE))
def test_whole_models_name_wrong_shapes(tmp_path: Path, case: str) -> None:
    """transformers keeps these tensors in a whole model, and would end in torch's words."""
    transformers = pytest.importorskip("transformers")
    from collegium.integrations.transformers import load_model

    torch.manual_seed(0)
    config = transformers.Qwen2MoeConfig(
        vocab_size=40, hidden_size=64, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=96, moe_intermediate_size=32, shared_expert_intermediate_size=48, num_experts=4,
        num_experts_per_tok=2, max_position_embeddings=64,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    load_model(str(tmp_path), device="cpu")
    tail, make, text = OUTSIDE[case]
    name = f"model.layers.2.{tail}"
    rewrite(tmp_path, put(name, make))
    for _ in range(2):
        with pytest.raises(TensorMismatchError) as caught:
            load_model(str(tmp_path), device="cpu")
        assert name in str(caught.value)
        assert text in str(caught.value)
