"""Mixed precision in files: layers may differ in format, and down from gate and up; nothing else may."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from collegium import CheckpointError, ConfigError, Overrides, Placement, Ranks, Routing, load_layer
from collegium.checkpoint import Checkpoint, CheckpointLayer, load_experts
from collegium.checkpoint.adapter import with_adapter
from collegium.commands.inspect import inspect_model, plan_model
from collegium.commands.quantize import quantize_model
from collegium.commands.verify import verify_model
from collegium.loading import load_routed
from raising import raises_with
from ranks import run_ranks
from toys import write_checkpoint
from truth import moe_truth

if TYPE_CHECKING:
    from pathlib import Path

    from collegium import MoELayer


def mixed(path: Path, *eight: str, family: str = "qwen3_moe") -> str:
    """Write an NVFP4 checkpoint whose modules with one of ``eight`` in their names are FP8 per tensor."""
    out, layers = {}, {}
    for name, algorithm in (("nvfp4", "NVFP4"), ("fp8_tensor", "FP8")):
        write_checkpoint(path, family, name, "modelopt")
        for tensor, value in load_file(path / "model.safetensors").items():
            inside = ".experts." in tensor
            if any(one in tensor for one in eight) == (algorithm == "FP8") or not inside:
                out[tensor] = value
                if inside:
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


TABLE = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def decoded(tensors: dict[str, torch.Tensor], path: str) -> torch.Tensor:
    """Return a matrix of ModelOpt's NVFP4 or FP8 in float64, from the bytes alone."""
    codes, scale = tensors[f"{path}.weight"], tensors[f"{path}.weight_scale"].double()
    if codes.dtype == torch.float8_e4m3fn:
        return codes.double() * scale
    values = TABLE[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()]
    return values * scale.repeat_interleave(16, -1) * tensors[f"{path}.weight_scale_2"].double()


def truth_of(path: Path, layer: int, x: torch.Tensor, routing: Routing) -> torch.Tensor:
    tensors, out = load_file(path / "model.safetensors"), torch.zeros(x.shape, dtype=torch.float64)
    for row, (ids, weights) in enumerate(zip(routing.topk_ids.tolist(), routing.topk_weights, strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            head = f"model.layers.{layer}.mlp.experts.{expert}."
            gate, up, down = (decoded(tensors, f"{head}{which}_proj") for which in ("gate", "up", "down"))
            inner = gate @ x[row].double()
            inner = inner * torch.sigmoid(inner) * (up @ x[row].double())
            out[row] += weight * (down @ inner)
    return out


def routing_of(layer: MoELayer, tokens: int) -> Routing:
    ids = torch.stack([torch.randperm(layer.spec.num_experts)[: layer.spec.routing.top_k] for _ in range(tokens)])
    return Routing(topk_ids=ids, topk_weights=torch.rand(ids.shape))


def off(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("eight", ["down_proj", "gate_proj up_proj"])
def test_down_in_another_format(tmp_path: Path, eight: str) -> None:
    path = mixed(tmp_path, *eight.split())
    pair = ("nvfp4", "fp8_tensor") if eight == "down_proj" else ("fp8_tensor", "nvfp4")
    seen = inspect_model(path, device="cpu")
    assert seen.spec.formats == pair
    assert dict(seen.lines())["expert format"] == f"gate and up {pair[0]} (modelopt), down {pair[1]} (modelopt)"
    entry: Any = seen.to_json()["moe_layers"]
    assert [(own["format"], own["down_format"]) for own in entry] == [pair, pair]
    assert plan_model(path, device="h200").problem.spec.formats == pair
    for dtype, most in (("fp32", 1e-5), ("bf16", 0.02)):
        layer = load_layer(path, 1, device="cpu", dtype=dtype)
        assert layer.spec.formats == pair
        assert f"weights {pair[0]} (gate_up) and {pair[1]} (down)" in str(layer)
        x, routing = torch.randn(9, layer.spec.hidden_size).to(layer.input_dtype), routing_of(layer, 9)
        assert off(layer(x, routing=routing), truth_of(tmp_path, 1, x, routing)) < most
    report = verify_model(path, device="cpu", experts=None)
    assert {proof.weight_format for proof in report.checks} == {f"{pair[0]} (gate_up) and {pair[1]} (down)"}
    assert all(proof.worst_error <= proof.tolerance for proof in report.checks)


def test_only_declared_mixtures_are_read(tmp_path: Path) -> None:
    path = mixed(tmp_path, "down_proj")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="down"):
        load_layer(path, 0, device="cpu")


def test_gate_and_up_of_two_formats(tmp_path: Path) -> None:
    """Refused as they are, encoded into one format where that is wanted, from float32 and not from one another."""
    path, out = mixed(tmp_path / "in", "up_proj"), str(tmp_path / "out")
    for ask in (lambda: load_layer(path, 0, device="cpu"), lambda: inspect_model(path, device="cpu")):
        with raises_with(ConfigError, "nvfp4", "fp8_tensor") as refusal:
            ask()
        assert f"collegium quantize {path} --to FORMAT" in str(refusal.value)
    quantize_model(path, "bf16", out)
    x = torch.randn(7, load_layer(out, 0, device="cpu").spec.hidden_size)
    for layer in (
        load_layer(out, 0, device="cpu", dtype="fp32"),
        load_layer(path, 0, device="cpu", dtype="fp32", weight_format="bf16"),
    ):
        assert layer.spec.formats == ("bf16", "bf16")
        routing = routing_of(layer, 7)
        assert off(layer(x, routing=routing), truth_of(tmp_path / "in", 0, x, routing)) < 0.006


def test_mixed_expert_formats_refused_by_name(tmp_path: Path) -> None:
    path = mixed(tmp_path, "experts.1.down_proj")
    with raises_with(ConfigError, "experts.0.down_proj", "NVFP4", "experts.1"):
        load_layer(path, 0, device="cpu")


def test_slices_and_ranks_of_mixed_experts(tmp_path: Path) -> None:
    path = mixed(tmp_path, "down_proj")
    whole = load_layer(path, 0, device="cpu", dtype="fp32")
    opened, wide = CheckpointLayer.open(Checkpoint.open(path), 0), whole.spec.intermediate_size
    x, routing = torch.randn(5, whole.spec.hidden_size), routing_of(whole, 5)
    wanted = whole(x, routing=routing)
    every = tuple(range(whole.spec.num_experts))
    for placements in (
        [Placement(rank=r, world_size=2, expert_ids=every[r::2], ranks=(every[::2], every[1::2])) for r in (0, 1)],
        [Placement(expert_ids=every, tp_size=2, tp_rank=r) for r in (0, 1)],
    ):
        total = torch.zeros_like(wanted)
        for placement in placements:
            force = Overrides(dispatcher="partial")
            layer = load_routed(opened, device="cpu", dtype="fp32", placement=placement, overrides=force)
            assert layer.spec.formats == ("nvfp4", "fp8_tensor")
            total += layer(x, routing=routing)
        assert off(total, wanted.double()) < 1e-5
    assert wide % 32 == 0


@pytest.mark.parametrize("target", ["bf16", "mxfp8", "fp8_tensor"])
def test_mixed_experts_quantize_to_one_format(tmp_path: Path, target: str) -> None:
    path, out = mixed(tmp_path / "in", "down_proj"), str(tmp_path / "out")
    report = quantize_model(path, target, out)
    assert report.layers[0].source_format == "nvfp4 (gate_up) and fp8_tensor (down)"
    one, two = load_layer(path, 0, device="cpu", dtype="fp32"), load_layer(out, 0, device="cpu", dtype="fp32")
    assert two.spec.formats == (target, target)
    x, routing = torch.randn(5, one.spec.hidden_size), routing_of(one, 5)
    assert off(two(x, routing=routing), one(x, routing=routing).double()) < 0.06
    assert load_layer(path, 0, device="cpu", weight_format=target).spec.formats == (target, target)


def test_groups_of_compressed_tensors_by_projection(tmp_path: Path) -> None:
    """INT4 gate and up in groups of 32, FP8 down with a scale a row, named by patterns."""
    eight, four = tmp_path / "eight", tmp_path / "four"
    out, groups = {}, {}
    for folder, name, which, targets in (
        (four, "int4_group", ("gate_proj", "up_proj"), "re:.*(gate|up)_proj$"),
        (eight, "fp8_channel", ("down_proj",), "re:.*down_proj$"),
    ):
        write_checkpoint(folder, "qwen3_moe", name, "compressed-tensors")
        scheme = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
        groups[name] = {**scheme, "targets": [targets]}
        found = load_file(folder / "model.safetensors")
        kept = [name for name in found if ".experts." not in name or any(one in name for one in which)]
        out |= {name: found[name] for name in kept}
    config = json.loads((four / "config.json").read_text())
    config["quantization_config"]["config_groups"] = groups
    (four / "config.json").write_text(json.dumps(config))
    save_file(out, four / "model.safetensors")
    layer = load_layer(four, 0, device="cpu", dtype="fp32")
    assert layer.spec.formats == ("int4_group", "fp8_channel")
    parts = [load_layer(folder, 0, device="cpu").spec.weight_format for folder in (eight,)]
    assert parts == ["fp8_channel"]
    opened = CheckpointLayer.open(Checkpoint.open(four), 0)
    weights = load_experts(opened, Placement(expert_ids=tuple(range(layer.spec.num_experts))))
    codes, scales = (out[f"model.layers.0.mlp.experts.2.down_proj.weight{s}"] for s in ("", "_scale"))
    assert torch.equal(weights.down.decode()[2].double(), (codes.double() * scales.double()).float().double())
    x, routing = torch.randn(5, layer.spec.hidden_size), routing_of(layer, 5)
    matrices = weights.gate_up.decode(), weights.down.decode()
    truth = moe_truth(x, *matrices, routing.topk_ids, routing.topk_weights, layer.spec.activation)
    assert off(layer(x, routing=routing), truth) < 1e-5


def test_plain_experts_of_two_dtypes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_moe", "bf16", "plain")
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if "down_proj" in name]:
        tensors[name] = (tensors[name].float() * 1.001).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    layer = load_layer(tmp_path, 0, device="cpu", dtype="fp32")
    assert layer.spec.formats == ("bf16", "fp32")
    x, routing = torch.randn(5, layer.spec.hidden_size), routing_of(layer, 5)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row, (ids, weights) in enumerate(zip(routing.topk_ids.tolist(), routing.topk_weights, strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            head = f"model.layers.0.mlp.experts.{expert}."
            gate, up, down = (tensors[f"{head}{which}_proj.weight"].double() for which in ("gate", "up", "down"))
            inner = gate @ x[row].double()
            out[row] += weight * (down @ (inner * torch.sigmoid(inner) * (up @ x[row].double())))
    assert off(layer(x, routing=routing), out) < 1e-5


def test_static_scales_of_both_products(tmp_path: Path) -> None:
    path = mixed(tmp_path, "down_proj")
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight") and ".experts." in name]:
        tensors[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.02 if "down" in name else 0.004)
    save_file(tensors, tmp_path / "model.safetensors")
    layer = load_layer(path, 0, device="cpu", overrides=Overrides(activation_format="fp8_static"))
    # NVFP4's input scales belong to codes up to 6 times 448, FP8's to codes up to 448.
    assert layer.experts.input_reach == pytest.approx((0.004 * 6 * 448, 0.02 * 448))


def test_a_shared_expert_of_two_formats(tmp_path: Path) -> None:
    path = mixed(tmp_path, "down_proj", family="deepseek_v3")
    tensors, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    layers = config["quantization_config"]["quantized_layers"]
    shared = [name for name in tensors if ".shared_experts." in name]
    for name in shared:
        head, _, tail = name.partition(".shared_experts.")
        module = tail.removesuffix(".weight")
        del tensors[name]
        for own in [own for own in tensors if own.startswith(f"{head}.experts.1.{module}.")]:
            tensors[f"{head}.shared_experts.{own.partition('.experts.1.')[2]}"] = tensors[own].clone()
        layers[f"{head}.shared_experts.{module}"] = layers[f"{head}.experts.1.{module}"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**config, "n_shared_experts": 1}))
    layer = load_layer(path, 1, device="cpu", dtype="fp32")
    assert layer.plan.problem.shared().formats == ("nvfp4", "fp8_tensor")
    head = "model.layers.1.mlp.shared_experts."
    gate, up, down = (decoded(tensors, f"{head}{which}_proj") for which in ("gate", "up", "down"))
    x = torch.randn(3, layer.spec.hidden_size)
    nobody = torch.full((3, layer.spec.routing.top_k), -1)
    found = layer(x, routing=Routing(topk_ids=nobody, topk_weights=torch.zeros(nobody.shape)))
    inner = x.double() @ gate.T
    assert off(found, (inner * torch.sigmoid(inner) * (x.double() @ up.T)) @ down.T) < 1e-5


def _on_ranks(path: str, rank: int) -> list[list[float]]:
    """Return how far off a layer over two ranks is, by dispatcher, and its formats."""
    errors: list[list[float]] = []
    torch.manual_seed(3 + rank)
    alone = load_layer(path, 0, device="cpu", dtype="fp32")
    x = torch.randn(4 + rank, alone.spec.hidden_size)
    wanted = alone(x)
    for slices in (1, 2):
        ranks = Ranks.of(slices=slices) if slices > 1 else Ranks.of()
        layer = load_layer(path, 0, device=ranks, dtype="fp32")
        assert layer.spec.formats == ("nvfp4", "fp8_tensor")
        tokens = x if slices == 1 else torch.ones(3, alone.spec.hidden_size)
        truth = wanted if slices == 1 else alone(tokens)
        errors.append([float((layer(tokens) - truth).norm() / truth.norm())])
    return errors


def test_mixed_experts_over_two_processes(tmp_path: Path) -> None:
    path = mixed(tmp_path, "down_proj")
    for errors in run_ranks(partial(_on_ranks, path), 2):
        assert all(error < 1e-5 for (error,) in errors)


@pytest.mark.parametrize("which", ["gate", "down"])
def test_adapter_only_on_unquantised_product(tmp_path: Path, which: str) -> None:
    """BF16 gate and up take one, FP8 down refuses it by name."""
    model, eight, adapter = tmp_path / "model", tmp_path / "eight", tmp_path / "adapter"
    write_checkpoint(model, "qwen3_moe", "bf16", "plain")
    write_checkpoint(eight, "qwen3_moe", "fp8_channel", "compressed-tensors")
    tensors, others = load_file(model / "model.safetensors"), load_file(eight / "model.safetensors")
    tensors = {name: value for name, value in tensors.items() if "down_proj" not in name}
    tensors |= {name: value for name, value in others.items() if "experts." in name and "down_proj" in name}
    save_file(tensors, model / "model.safetensors")
    config = json.loads((eight / "config.json").read_text())
    block = config["quantization_config"]
    block["config_groups"]["group_0"]["targets"] = ["re:.*down_proj$"]
    (model / "config.json").write_text(json.dumps(config))
    plain = load_layer(model, 0, device="cpu", dtype="fp32")
    assert plain.spec.formats == ("bf16", "fp8_channel")
    hidden, wide = plain.spec.hidden_size, plain.spec.intermediate_size
    rows, columns = (hidden, wide) if which == "down" else (wide, hidden)
    adapter.mkdir()
    a, b = torch.randn(2, columns), torch.randn(rows, 2)
    path = f"model.layers.0.mlp.experts.1.{which}_proj"
    halves = {"A": a, "B": b}
    pair = {f"base_model.model.{path}.lora_{half}.weight": matrix for half, matrix in halves.items()}
    save_file(pair, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2, "bias": "none", "target_modules": [f"{which}_proj"]})
    )
    if which == "down":
        with pytest.raises(ConfigError, match=r"experts\.1\.down_proj"):
            with_adapter(Checkpoint.open(model), adapter)
        return
    layer = load_layer(with_adapter(Checkpoint.open(model), adapter), 0, device="cpu", dtype="fp32")
    weights = load_experts(CheckpointLayer.open(Checkpoint.open(model), 0), Placement(expert_ids=(1,)))
    gate, up, down = (*weights.gate_up.decode()[0].double(), weights.down.decode()[0].double())
    gate = (gate + b.double() @ a.double()).bfloat16().double()
    x = torch.randn(3, hidden)
    ids = torch.full((3, plain.spec.routing.top_k), -1)
    ids[:, 0] = 1
    inner = x.double() @ gate.T
    truth = (inner * torch.sigmoid(inner) * (x.double() @ up.T)) @ down.T
    assert off(layer(x, routing=Routing(topk_ids=ids, topk_weights=torch.ones(ids.shape))), truth) < 2e-3
