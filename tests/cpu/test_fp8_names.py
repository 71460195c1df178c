"""FP8 under the names of transformers and Mistral: one tensor for an expert and stacks, per matrix and in blocks.

The same files go through the layer, inspect and verify; truth is float64 arithmetic on the stored codes.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from collegium.checkpoint import Checkpoint, CheckpointLayer, audit, load_experts
from collegium.commands.inspect import inspect_model
from collegium.commands.verify import verify_model
from collegium.errors import CheckpointError, ConfigError, MissingTensorError, TensorMismatchError
from collegium.loading import load_layer
from collegium.parallel.placement import linear, tensor_parallel
from collegium.problem import Overrides
from raising import raises_with

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

E, K, D = 3, 2, 160
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
BASE = "model.layers.0.mlp."
STATIC = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def config(width: int, block: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe", "hidden_size": D, "moe_intermediate_size": width, "intermediate_size": 64,
        "num_experts": E, "num_experts_per_tok": K, "norm_topk_prob": True, "num_hidden_layers": 1,
        "hidden_act": "silu", "vocab_size": 64, "dtype": "bfloat16", "quantization_config": block, **more,
    }  # fmt: skip


def heavy(*shape: int) -> Tensor:
    return torch.randn(shape) * torch.exp(0.7 * torch.randn(*shape[:-1], 1)) * shape[-1] ** -0.5


def per_matrix(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale and numbers of one matrix."""
    scale = weight.abs().amax() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return codes, scale, codes.float() * scale


def in_blocks(weight: Tensor, *, power: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = weight.shape
    padded = functional.pad(weight, (0, -columns % 128, 0, -rows % 128))
    scale = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).abs().amax((1, 3)) / 448
    scale = torch.exp2(scale.log2().ceil()) if power else scale
    factor = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    codes = (weight / factor).to(torch.float8_e4m3fn)
    return codes, scale, codes.float() * factor


def experts(width: int) -> dict[str, Tensor]:
    """Random matrices by projection, ``[E, N, K]``; up is far smaller than gate, so that their scales differ."""
    shapes = {"gate_proj": (width, D), "up_proj": (width, D), "down_proj": (D, width)}
    sizes = {"gate_proj": 1.0, "up_proj": 0.2, "down_proj": 3.0}
    return {name: heavy(E, *shape) * sizes[name] for name, shape in shapes.items()}


def save(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    tensors[f"{BASE}gate.weight"] = (heavy(E, D) * 5).bfloat16()
    save_file({name: t.contiguous().clone() for name, t in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def check(folder: Path, numbers: dict[str, Tensor]) -> None:
    """The layer computes the truth of ``numbers [E, N, K]``, and inspect and verify pass."""
    x = torch.randn(19, D) * torch.exp(torch.randn(19, 1))
    router = load_file(folder / "model.safetensors")[f"{BASE}gate.weight"].double()
    weights, chosen = torch.softmax(x.double() @ router.T, -1).topk(K)
    weights = weights / weights.sum(1, keepdim=True)
    gate, up, down = (numbers[name].double() for name in PROJECTIONS)
    truth = torch.zeros(19, D, dtype=torch.float64)
    for token in range(19):
        for weight, expert in zip(weights[token], chosen[token], strict=True):
            row = x[token].double()
            inner = functional.silu(gate[expert] @ row) * (up[expert] @ row)
            truth[token] += weight * (down[expert] @ inner)
    layer = load_layer(folder, 0, device="cpu", dtype="fp32", overrides=Overrides(kernel="reference"))
    errors = (layer(x).double() - truth).norm(dim=1) / truth.norm(dim=1)
    assert errors.max() < 1e-5
    inspect_model(str(folder), device="cpu")
    assert verify_model(str(folder), device="cpu").passed


@pytest.mark.parametrize("names", [("weight_scale_inv", "activation_scale"), ("qscale_weight", "qscale_act")])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_for_a_matrix(tmp_path: Path, names: tuple[str, str], shape: tuple[int, ...]) -> None:
    tensors, numbers = dict[str, Any](), dict[str, Any]()
    for name, stack in experts(96).items():
        triples = [per_matrix(weight) for weight in stack]
        numbers[name] = torch.stack([values for _, _, values in triples])
        for expert, (codes, scale, _) in enumerate(triples):
            path = f"{BASE}experts.{expert}.{name}."
            tensors |= {f"{path}weight": codes, path + names[0]: scale.reshape(shape)}
            tensors[path + names[1]] = torch.tensor(0.5 + expert).reshape(shape)
    save(tmp_path, tensors, config(96, STATIC))
    check(tmp_path, numbers)
    layer = load_layer(
        tmp_path, 0, device="cpu", overrides=Overrides(activation_format="fp8_static", kernel="reference")
    )
    assert layer.experts.input_reach == (2.5 * 448, 2.5 * 448)


@pytest.mark.parametrize("shape", [(E,), (E, 1), (E, 1, 1), (E, 2), (E, 2, 1)])
def test_stacks_with_per_matrix_scales(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """transformers leaves room for a scale of gate and one of up."""
    stacks, tensors, numbers = experts(96), dict[str, Any](), dict[str, Any]()
    gate_up = torch.cat((stacks["gate_proj"], stacks["up_proj"]), 1)
    halves = len(shape) > 1 and shape[1] == 2
    parts = [[per_matrix(half) for half in weight.split(96 if halves else 192)] for weight in gate_up]
    both = torch.stack([torch.cat([values for _, _, values in row]) for row in parts])
    numbers["gate_proj"], numbers["up_proj"] = both.split(96, 1)
    tensors[f"{BASE}experts.gate_up_proj"] = torch.stack([torch.cat([codes for codes, _, _ in row]) for row in parts])
    scales = torch.stack([torch.stack([scale for _, scale, _ in row]) for row in parts])
    tensors[f"{BASE}experts.gate_up_proj_scale_inv"] = scales.reshape(shape)
    tensors[f"{BASE}experts.gate_up_proj_activation_scale"] = torch.tensor([0.25, 4.0, 1.0])
    triples = [per_matrix(weight) for weight in stacks["down_proj"]]
    numbers["down_proj"] = torch.stack([values for _, _, values in triples])
    tensors[f"{BASE}experts.down_proj"] = torch.stack([codes for codes, _, _ in triples])
    tensors[f"{BASE}experts.down_proj_scale_inv"] = torch.stack([scale for _, scale, _ in triples])[:, None, None]
    tensors[f"{BASE}experts.down_proj_activation_scale"] = torch.tensor([2.0, 1.0, 0.5])
    save(tmp_path, tensors, config(96, STATIC))
    check(tmp_path, numbers)
    layer = load_layer(
        tmp_path, 0, device="cpu", overrides=Overrides(activation_format="fp8_static", kernel="reference")
    )
    assert layer.experts.input_reach == (4.0 * 448, 2.0 * 448)


def block_stacks(width: int, *, common: bool, power: bool = False) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors and numbers of stacks in blocks; common: one grid over gate and up instead of one for each."""
    stacks, tensors, numbers = experts(width), dict[str, Any](), dict[str, Any]()
    gate_up = torch.cat((stacks["gate_proj"], stacks["up_proj"]), 1)
    size = 2 * width if common else width
    for name, stack, cut in (("gate_up_proj", gate_up, size), ("down_proj", stacks["down_proj"], D)):
        rows = [[in_blocks(part, power=power) for part in weight.split(cut)] for weight in stack]
        codes, scales, values = (torch.stack([torch.cat([row[i] for row in each]) for each in rows]) for i in range(3))
        tensors |= {f"{BASE}experts.{name}": codes, f"{BASE}experts.{name}_scale_inv": scales}
        numbers[name] = values
    numbers["gate_proj"], numbers["up_proj"] = numbers["gate_up_proj"].split(width, 1)
    return tensors, numbers


@pytest.mark.parametrize(("width", "common"), [(128, True), (256, True), (64, False), (40, False), (192, False)])
@pytest.mark.parametrize("stored", ["F32", "E8M0", "U8"])
def test_stacks_in_blocks(tmp_path: Path, width: int, common: bool, stored: str) -> None:
    """Widths that blocks do not divide have a grid of scales for gate and one for up."""
    tensors, numbers = block_stacks(width, common=common, power=stored != "F32")
    for name in tensors if stored != "F32" else ():
        if name.endswith("_scale_inv"):
            raw = (tensors[name].log2() + 127).to(torch.uint8)
            tensors[name] = raw if stored == "U8" else raw.view(torch.float8_e8m0fnu)
    save(tmp_path, tensors, config(width, BLOCKS))
    check(tmp_path, numbers)


def test_slices_of_stacks_in_blocks(tmp_path: Path) -> None:
    tensors, numbers = block_stacks(256, common=True)
    save(tmp_path, tensors, config(256, BLOCKS))
    layer = CheckpointLayer.open(Checkpoint.open(tmp_path), 0)
    assert (layer.stored.storage, layer.stored.stacked) == ("finegrained-fp8-stack", True)
    half = load_experts(layer, tensor_parallel(E, 1, 2))
    assert torch.equal(half.gate_up.decode()[:, 0], numbers["gate_proj"][:, 128:])
    assert torch.equal(half.gate_up.decode()[:, 1], numbers["up_proj"][:, 128:])
    assert torch.equal(half.down.decode(), numbers["down_proj"][..., 128:])


def test_stacks_of_transposed_families(tmp_path: Path) -> None:
    """Llama-4's unquantised stacks are input-first; quantised by transformers they are output-first."""
    stacks = {name.removesuffix("_proj"): stack for name, stack in experts(96).items()}
    base, gate_up = "model.layers.0.feed_forward.", torch.cat((stacks["gate"], stacks["up"]), 1)
    tensors = {f"{base}router.weight": heavy(E, D)}
    numbers: dict[str, Tensor] = {}
    for name, stack in (("gate_up_proj", gate_up), ("down_proj", stacks["down"])):
        triples = [per_matrix(weight) for weight in stack]
        tensors[f"{base}experts.{name}"] = torch.stack([codes for codes, _, _ in triples])
        tensors[f"{base}experts.{name}_scale_inv"] = torch.stack([scale for _, scale, _ in triples])[:, None, None]
        numbers[name] = torch.stack([values for _, _, values in triples])
    for path, shape in (("gate_proj", (64, D)), ("up_proj", (64, D)), ("down_proj", (D, 64))):
        tensors[f"{base}shared_expert.{path}.weight"] = heavy(*shape).bfloat16()
    save_file({name: t.contiguous().clone() for name, t in tensors.items()}, tmp_path / "model.safetensors")
    block = {**STATIC, "activation_scheme": "dynamic", "modules_to_not_convert": ["shared_expert"]}
    llama = {
        "model_type": "llama4_text", "hidden_size": D, "intermediate_size": 96, "num_local_experts": E,
        "num_experts_per_tok": 1, "num_hidden_layers": 1, "interleave_moe_layer_step": 1, "hidden_act": "silu",
        "dtype": "bfloat16", "quantization_config": block,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(llama))
    checkpoint = Checkpoint.open(tmp_path)
    weights = load_experts(CheckpointLayer.open(checkpoint, 0), linear(E))
    gate, up = numbers["gate_up_proj"].split(96, 1)
    assert torch.equal(weights.gate_up.decode(), torch.stack((gate, up), 1))
    assert torch.equal(weights.down.decode(), numbers["down_proj"])


def test_blocks_over_gate_and_up(tmp_path: Path) -> None:
    """A grid that one block shares between gate and up is refused by every command, with the row."""
    tensors, _ = block_stacks(160, common=True)
    name = f"{BASE}experts.gate_up_proj_scale_inv"
    tensors[name] = torch.cat((tensors[name], tensors[name][:, :1]), 1)[:, :3]
    save(tmp_path, tensors, config(160, BLOCKS))
    for command in (
        lambda: load_layer(tmp_path, 0, device="cpu"), lambda: inspect_model(str(tmp_path), deep=False),
        lambda: audit(Checkpoint.open(tmp_path)), lambda: verify_model(str(tmp_path), device="cpu"),
    ):  # fmt: skip
        with raises_with(TensorMismatchError, "row 160", "128"):
            command()


def test_scales_that_are_missing_or_doubled(tmp_path: Path) -> None:
    tensors, _ = block_stacks(128, common=True)
    save(tmp_path, tensors, config(128, BLOCKS))
    stored, name = load_file(tmp_path / "model.safetensors"), f"{BASE}experts.down_proj_scale_inv"
    save_file({n: t for n, t in stored.items() if n != name}, tmp_path / "model.safetensors")
    with pytest.raises(MissingTensorError, match="down_proj_scale_inv missing"):
        load_layer(tmp_path, 0, device="cpu")
    save_file({**stored, f"{BASE}experts.down_proj_weight_scale": stored[name].clone()}, tmp_path / "model.safetensors")
    with raises_with(CheckpointError, "down_proj_weight_scale"):
        load_layer(tmp_path, 0, device="cpu")
    (tmp_path / "config.json").write_text(json.dumps(config(128, {**BLOCKS, "weight_block_size": 128})))
    with pytest.raises(ConfigError, match="weight_block_size is 128"):
        load_layer(tmp_path, 0, device="cpu")
