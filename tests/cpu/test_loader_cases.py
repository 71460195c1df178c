"""What a loader of experts must cope with: slices of every size, stacks of every kind, scales of every place.

Widths that no power of two divides, scales shared or apart, replicas, streaming, and checkpoints of 46,000 tensors.
"""

from __future__ import annotations

import json
import re
import struct
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from collegium.checkpoint import Checkpoint, CheckpointLayer, audit, describe_checkpoint, load_all, load_experts
from collegium.encoding import encode_experts
from collegium.errors import (
    BadScaleError,
    ConfigError,
    InputError,
    PlanError,
    SpecError,
    TensorMismatchError,
    UnknownTensorError,
)
from collegium.formats import by_name
from collegium.formats.unquantised import as_stored
from collegium.layer import MoELayer
from collegium.loading import load_layer
from collegium.parallel.placement import linear, tensor_parallel
from collegium.placement import Placement
from collegium.planning import plan
from collegium.problem import DeviceFacts, Overrides, Problem
from collegium.types import ActivationSpec, ExpertWeights, MoESpec, Routing, RoutingSpec
from raising import assert_values, raises_with
from toys import TinySize, write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

WIDTHS = (80, 160, 192, 320, 704, 1408, 2112)
# a scale or a byte covers so many columns, so a slice must end there
STEPS = {"bf16": 1, "fp8_tensor": 1, "fp8_channel": 1, "fp8_block": 128, "mxfp4": 32, "mxfp8": 32, "nvfp4": 16}


def rewrite(path: Path, **changed: Tensor | None) -> Checkpoint:
    """Change, add or remove (None) tensors of a toy checkpoint."""
    tensors = load_file(path / "model.safetensors")
    for name, tensor in changed.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, path / "model.safetensors")
    return Checkpoint.open(path)


def configure(path: Path, **entries: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **entries}))


@pytest.mark.each_choice
@pytest.mark.parametrize("tp_size", [2, 4, 8])
@pytest.mark.parametrize("wide", WIDTHS)
@pytest.mark.parametrize("name", list(STEPS))
def test_slices_of_odd_widths(tmp_path: Path, name: str, wide: int, tp_size: int) -> None:
    size = TinySize(hidden=32, intermediate=wide, experts=1, top_k=1, layers=1)
    tiny = write_checkpoint(tmp_path, "mixtral", name, size=size)
    checkpoint = Checkpoint.open(tmp_path)
    layer = CheckpointLayer.open(checkpoint, 0)
    fits = wide % tp_size == 0 and (wide // tp_size) % STEPS[name] == 0
    if not fits:
        with pytest.raises(InputError, match=rf"tp_size={tp_size}.*intermediate_size={wide}.*pad=True"):
            load_experts(layer, tensor_parallel(1, 0, tp_size))
    ranks = [load_experts(layer, tensor_parallel(1, r, tp_size), pad=not fits) for r in range(tp_size)]
    room = {r.down.shape[-1] for r in ranks}
    assert len(room) == 1
    assert room.pop() % STEPS[name] == 0
    gate, up, down = (p.decode()[0] for p in tiny.experts[0])
    parts = (
        torch.cat([r.gate_up.decode()[0, 0] for r in ranks]),
        torch.cat([r.gate_up.decode()[0, 1] for r in ranks]),
        torch.cat([r.down.decode()[0] for r in ranks], 1).mT,
    )
    for found, wanted in zip(parts, (gate, up, down.mT), strict=True):
        assert torch.equal(found[:wide], wanted)
        assert not found[wide:].any()
        assert not any(bool(r.gate_up.faults().any()) or bool(r.down.faults().any()) for r in ranks)


def test_padded_slices_with_biases_sum_correctly(tmp_path: Path) -> None:
    size = TinySize(hidden=64, intermediate=96, experts=3, top_k=2, layers=1)
    write_checkpoint(tmp_path, "gpt_oss", "mxfp4", size=size)
    checkpoint = Checkpoint.open(tmp_path)
    spec = describe_checkpoint(checkpoint)
    x = torch.randn(7, 64)
    routing = Routing(
        topk_ids=torch.stack([torch.randperm(3)[:2] for _ in range(7)]), topk_weights=torch.rand(7, 2) + 0.1
    )

    def run(weights: ExpertWeights[Any]) -> Tensor:
        own = MoESpec(
            hidden_size=64, intermediate_size=weights.down.shape[-1], num_experts=3, weight_format="mxfp4",
            expert_bias=True, activation=spec.activation, routing=RoutingSpec(top_k=2),
        )  # fmt: skip
        problem = Problem(spec=own, device=DeviceFacts(kind="cpu"), dtype="fp32")
        return MoELayer(weights, plan(problem))(x, routing=routing)

    layer = CheckpointLayer.open(checkpoint, 0)
    whole = run(load_experts(layer, linear(3)))
    parts = [run(load_experts(layer, tensor_parallel(3, r, 2), pad=True)) for r in range(2)]
    assert load_experts(layer, tensor_parallel(3, 1, 2), pad=True).down.shape == (3, 64, 64)
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-5, atol=1e-4)


def test_padding_refused_without_zero_code(tmp_path: Path) -> None:
    write_checkpoint(
        tmp_path, "mixtral", "int4_group", size=TinySize(hidden=64, intermediate=96, experts=1, top_k=1, layers=1)
    )
    checkpoint = Checkpoint.open(tmp_path)
    with raises_with(InputError, "tp_size=2", "intermediate_size=96"):
        load_experts(CheckpointLayer.open(checkpoint, 0), tensor_parallel(1, 0, 2), pad=True)


def test_remote_experts_are_not_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "mixtral", "nvfp4", size=TinySize(hidden=64, intermediate=64, experts=8, layers=1))
    checkpoint = Checkpoint.open(tmp_path)
    weights = load_experts(CheckpointLayer.open(checkpoint, 0), Placement(expert_ids=(6,)))
    held = weights.gate_up.nbytes + weights.down.nbytes
    assert checkpoint.bytes_read <= held


def test_replicas_load_on_every_rank(tmp_path: Path) -> None:
    tiny = write_checkpoint(tmp_path, "mixtral", size=TinySize(hidden=64, intermediate=64, experts=4, layers=1))
    checkpoint = Checkpoint.open(tmp_path)
    slots = ((0, 1, 3), (2, 3, 0))  # experts 0 and 3 are on both ranks, in other slots
    for ids in slots:
        weights = load_experts(CheckpointLayer.open(checkpoint, 0), Placement(expert_ids=ids))
        assert torch.equal(weights.down.decode(), tiny.experts[0][2].decode()[list(ids)])


@pytest.mark.parametrize("ids", [(2, 1), (3,)])
def test_spare_slots_copy_the_first_expert(tmp_path: Path, ids: tuple[int, ...]) -> None:
    tiny = write_checkpoint(tmp_path, "mixtral", size=TinySize(hidden=64, intermediate=64, experts=4, layers=1))
    weights = load_experts(CheckpointLayer.open(Checkpoint.open(tmp_path), 0), Placement(expert_ids=ids, spare=2))
    held = [*ids, ids[0], ids[0]]
    assert torch.equal(weights.down.decode(), tiny.experts[0][2].decode()[held])
    for half in (0, 1):
        assert torch.equal(weights.gate_up.decode()[:, half], tiny.experts[0][half].decode()[held])
    small = encode_experts(weights, "nvfp4")  # which refuses what is not finite
    assert torch.equal(small.down[len(held) - 1].decode(), small.down[0].decode())


def test_load_all_streams_numbered_layers(tmp_path: Path) -> None:
    tiny = write_checkpoint(tmp_path, "deepseek_v3", "fp8_block", size=TinySize(layers=3))
    checkpoint = Checkpoint.open(tmp_path)
    stream = load_all(checkpoint, linear(4))
    before = checkpoint.bytes_read
    index, first = next(stream)
    assert index == 1
    assert checkpoint.bytes_read - before <= first.gate_up.nbytes + first.down.nbytes
    assert [index for index, _ in stream] == [2]
    assert sorted(tiny.experts) == [1, 2]


def fused(path: Path, name: str, suffixes: tuple[str, ...]) -> dict[str, Tensor]:
    """Turn a toy checkpoint of single experts into stacks under the fused names."""
    write_checkpoint(path, "qwen3_moe", name, size=TinySize(hidden=64, intermediate=48, experts=3, layers=1))
    tensors, base = load_file(path / "model.safetensors"), "model.layers.0.mlp.experts."
    out = {n: t for n, t in tensors.items() if ".experts." not in n}
    for suffix in suffixes:
        each = [[tensors[f"{base}{e}.{p}_proj{suffix}"] for e in range(3)] for p in ("gate", "up", "down")]
        gate, up, down = (torch.stack(list(t)) for t in each)
        plain = "" if suffix == ".weight" else suffix
        both = torch.cat((gate, up), 1) if gate.dim() > 1 else torch.stack((gate, up), 1)
        out |= {f"{base}gate_up_proj{plain}": both, f"{base}down_proj{plain}": down}
    save_file({n: t.contiguous() for n, t in out.items()}, path / "model.safetensors")
    return tensors


def test_joint_row_scales_are_split(tmp_path: Path) -> None:
    tensors = fused(tmp_path, "fp8_channel", (".weight", ".weight_scale"))
    checkpoint = Checkpoint.open(tmp_path)
    audit(checkpoint)
    base = "model.layers.0.mlp.experts.2."
    weights = load_experts(CheckpointLayer.open(checkpoint, 0), tensor_parallel(3, 1, 2))
    for half, name in enumerate(("gate_proj", "up_proj")):
        wanted = tensors[f"{base}{name}.weight"].float() * tensors[f"{base}{name}.weight_scale"].float()
        assert torch.equal(weights.gate_up.decode()[2, half], wanted[24:])


def test_row_scales_of_slices(tmp_path: Path) -> None:
    size = TinySize(hidden=64, intermediate=48, experts=3, layers=1)
    tiny = write_checkpoint(tmp_path, "mixtral", "fp8_channel", size=size)
    checkpoint = Checkpoint.open(tmp_path)
    gate, up, down = tiny.experts[0]
    for rank in (0, 1):
        weights = load_experts(CheckpointLayer.open(checkpoint, 0), tensor_parallel(3, rank, 2))
        part = slice(24 * rank, 24 * rank + 24)
        assert torch.equal(weights.down.scales, down.scales)
        assert torch.equal(weights.gate_up.scales, torch.stack((gate.scales[:, part], up.scales[:, part]), 1))
        assert torch.equal(weights.down.decode(), down.decode()[..., part])


@pytest.mark.parametrize("transposed", [False, True])
def test_stacks_load_in_both_orientations(tmp_path: Path, transposed: bool) -> None:
    tensors = fused(tmp_path, "bf16", (".weight",))
    base = "model.layers.0.mlp.experts."
    if transposed:  # the table of Qwen3-VL lies in the same file
        stacks = load_file(tmp_path / "model.safetensors")
        turned = {n: stacks[n].mT.contiguous() for n in (f"{base}gate_up_proj", f"{base}down_proj")}
        rewrite(tmp_path, **turned)
    checkpoint = Checkpoint.open(tmp_path)
    weights = load_experts(CheckpointLayer.open(checkpoint, 0), linear(3))
    for e in range(3):
        assert torch.equal(weights.gate_up[e][1].decode(torch.bfloat16), tensors[f"{base}{e}.up_proj.weight"])
        assert torch.equal(weights.down[e].decode(torch.bfloat16), tensors[f"{base}{e}.down_proj.weight"])


def test_mismatched_stack_names_both_shapes(tmp_path: Path) -> None:
    fused(tmp_path, "bf16", (".weight",))
    name = "model.layers.0.mlp.experts.down_proj"
    checkpoint = rewrite(tmp_path, **{name: torch.zeros(3, 64, 47, dtype=torch.bfloat16)})
    with pytest.raises(TensorMismatchError, match=r"\(3, 64, 47\).*\(3, 64, 48\)"):
        audit(checkpoint)


def test_gate_and_up_scales_stay_separate(tmp_path: Path) -> None:
    tiny = write_checkpoint(tmp_path, "mixtral", "fp8_tensor", size=TinySize(experts=2, layers=1))
    base = "model.layers.0.block_sparse_moe.experts.0."
    gate, up = (tiny.tensors[f"{base}{n}.weight_scale"] for n in ("w1", "w3"))
    assert gate != up
    checkpoint = Checkpoint.open(tmp_path)
    weights = load_experts(CheckpointLayer.open(checkpoint, 0), linear(2))
    assert torch.equal(weights.gate_up.decode()[0, 1], tiny.experts[0][1].decode()[0])


@pytest.mark.parametrize(
    ("storage", "suffix"), [("compressed-tensors", ".input_global_scale"), ("modelopt", ".input_scale")]
)
def test_unequal_activation_scales_are_refused(tmp_path: Path, storage: str, suffix: str) -> None:
    write_checkpoint(tmp_path, "mixtral", "nvfp4", storage, size=TinySize(experts=2, layers=1))
    base = "model.layers.0.block_sparse_moe.experts.1."
    one, static = torch.tensor(0.25), Overrides(activation_format="nvfp4_static")
    same = {f"{base}w1{suffix}": one, f"{base}w3{suffix}": one * (1 + 1e-6), f"{base}w2{suffix}": one * 3}
    remarks = [f for f in audit(rewrite(tmp_path, **same)).findings if "activation" in f]
    assert len(remarks) == 1
    assert "--activations nvfp4_static" in remarks[0]
    other = rewrite(tmp_path, **{f"{base}w3{suffix}": one * 1.001})
    findings = " ".join(audit(other).findings)
    assert "1 experts" in findings
    assert_values(findings, "expert 1, up", "unequal_scales='largest'")
    with raises_with(BadScaleError, "layer 0", "expert 1, up", "unequal_scales='largest'"):
        load_layer(other, 0, device="cpu", overrides=static)
    layer = load_layer(other, 0, device="cpu", overrides=replace(static, unequal_scales="largest"))
    assert layer.plan.overrides.unequal_scales == "largest"
    assert re.search(r"activations nvfp4_static \(.*larger", str(layer))
    load_layer(other, 0, device="cpu")  # nothing uses the scales
    with raises_with(PlanError, "unequal_scales='largest'", "bf16", "nvfp4_static"):
        load_layer(other, 0, device="cpu", overrides=Overrides(unequal_scales="largest"))
    with raises_with(SpecError, "unequal_scales", "smallest", "largest"):
        Overrides(unequal_scales=cast("Any", "smallest"))
    wrong = rewrite(tmp_path, **{f"{base}w2{suffix}": one * -4, f"{base}w3{suffix}": one})
    assert f"w2{suffix} is -1" in " ".join(audit(wrong).findings)
    with raises_with(BadScaleError, "w2", "-1"):
        load_layer(wrong, 0, device="cpu", overrides=static)


@pytest.mark.parametrize(
    ("suffix", "error", "text"),
    [
        (".weight_zero_point", UnknownTensorError, "zero point"),
        (".weight_g_idx", TensorMismatchError, r"\(4,\).*int4_group.*\(256,\)"),
    ],
)
def test_undeclared_int4_zeros_and_indices_refused(
    tmp_path: Path, suffix: str, error: type[Exception], text: str
) -> None:
    write_checkpoint(tmp_path, "mixtral", "int4_group", size=TinySize(experts=2, layers=1))
    name = f"model.layers.0.block_sparse_moe.experts.1.w1{suffix}"
    with pytest.raises(error, match=text):
        audit(rewrite(tmp_path, **{name: torch.zeros(4, dtype=torch.int32)}))


def test_fractional_word_group_size_refused(tmp_path: Path) -> None:
    """As many groups as are stored, so the headers agree with the config."""
    write_checkpoint(tmp_path, "mixtral", "int4_group", size=TinySize(hidden=96, intermediate=96, experts=2, layers=1))
    weights = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 84}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    configure(tmp_path, quantization_config={"quant_method": "compressed-tensors", "config_groups": groups})
    path = "model.layers.0.block_sparse_moe.experts"
    cut = {
        f"{path}.{expert}.{part}.weight_scale": torch.ones(96, 2, dtype=torch.bfloat16)
        for expert in range(2)
        for part in ("w1", "w2", "w3")
    }
    checkpoint = rewrite(tmp_path, **cut)
    values = ("layer 0, expert 0, gate", "int4_group", "group_size", 84, 8)
    with raises_with(TensorMismatchError, *values):
        load_experts(CheckpointLayer.open(checkpoint, 0), linear(2))
    with raises_with(TensorMismatchError, *values):
        audit(checkpoint)


def test_wrong_declared_shape_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "mixtral", "int4_group", size=TinySize(experts=2, layers=1))
    name = "model.layers.0.block_sparse_moe.experts.1.w1.weight_shape"
    checkpoint = rewrite(tmp_path, **{name: torch.tensor([128, 255])})
    with pytest.raises(TensorMismatchError, match=r"w1.weight_shape .*\[128, 255\]"):
        load_experts(CheckpointLayer.open(checkpoint, 0), linear(2))


def test_unknown_scale_strategy_lists_known_ones(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "mixtral", "fp8_channel", size=TinySize(experts=2, layers=1))
    weights = {"type": "float", "num_bits": 8, "strategy": "column", "symmetric": True}
    block = {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"], "weights": weights}}}
    configure(tmp_path, quantization_config=block)
    with pytest.raises(ConfigError, match=r"column.*tensor.*channel.*block"):
        describe_checkpoint(Checkpoint.open(tmp_path))


def test_quantised_separate_gate_up_stacks_load(tmp_path: Path) -> None:
    """Step-3.7 in FP8: three stacks, each with its grid of 128 x 128 blocks."""
    torch.manual_seed(4)
    config = {
        "model_type": "step3p7", "hidden_size": 160, "moe_intermediate_size": 144, "n_routed_experts": 3,
        "num_experts_per_tok": 2, "num_hidden_layers": 4, "share_expert_dim": 64, "moe_layers_enum": "3",
        "quantization_config": {
            "quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["share_expert"],
        },
    }  # fmt: skip
    base, tensors, wanted = "model.layers.3.moe.", dict[str, Any](), dict[str, Any]()
    for name, shape in (("gate_proj", (144, 160)), ("up_proj", (144, 160)), ("down_proj", (160, 144))):
        payload = by_name("fp8_block").encode(torch.randn(3, *shape))
        wanted[name] = payload.decode()
        stored = payload.tensors()
        tensors[f"{base}{name}.weight"] = stored["codes"][..., : shape[0], : shape[1]].contiguous()
        tensors[f"{base}{name}.weight_scale_inv"] = stored["scales" if "scales" in stored else "scale"].contiguous()
    tensors |= {f"{base}gate.weight": torch.randn(3, 160), f"{base}router_bias": torch.randn(3)}
    shared = "model.layers.3.share_expert."
    tensors |= {f"{shared}{n}_proj.weight": torch.zeros(64, 160) for n in ("gate", "up")}
    tensors |= {f"{shared}down_proj.weight": torch.zeros(160, 64)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    spec = describe_checkpoint(checkpoint)
    assert spec.weight_format == "fp8_block"
    audit(checkpoint)
    layer = CheckpointLayer.open(checkpoint, 3)
    weights = load_experts(layer, linear(3))
    assert torch.equal(weights.gate_up.decode()[:, 0], wanted["gate_proj"])
    assert torch.equal(weights.gate_up.decode()[:, 1], wanted["up_proj"])
    assert torch.equal(weights.down.decode(), wanted["down_proj"])
    first, second = (load_experts(layer, tensor_parallel(3, r, 2), pad=True) for r in range(2))
    assert torch.equal(torch.cat((first.down.decode(), second.down.decode()), 2)[..., :144], wanted["down_proj"])


def test_packing_leaves_the_loaded_weights_alone() -> None:
    """A layer may be built twice from the same weights."""
    torch.manual_seed(2)
    weights = ExpertWeights(gate_up=as_stored(torch.randn(4, 2, 24, 32)), down=as_stored(torch.randn(4, 32, 24)))
    spec = MoESpec(
        hidden_size=32, intermediate_size=24, num_experts=4, routing=RoutingSpec(top_k=2), weight_format="fp32",
        activation=ActivationSpec(),
    )  # fmt: skip
    problem = Problem(spec=spec, device=DeviceFacts(kind="cpu"), dtype="fp32")
    x, logits = torch.randn(5, 32), torch.randn(5, 4)
    before = weights.gate_up.decode().clone()
    one, two = (MoELayer(weights, plan(problem))(x, router_logits=logits) for _ in range(2))
    assert torch.equal(one, two)
    assert torch.equal(weights.gate_up.decode(), before)


def test_large_checkpoint_is_inspected_in_seconds(tmp_path: Path) -> None:
    layers, experts = 60, 256
    config = {
        "model_type": "qwen3_moe", "hidden_size": 8, "moe_intermediate_size": 4, "num_experts": experts,
        "num_experts_per_tok": 2, "num_hidden_layers": layers, "dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    header: dict[str, object] = {}
    at = 0
    for layer in range(layers):
        base = f"model.layers.{layer}.mlp."
        names = [(f"{base}gate.weight", [experts, 8])]
        names += [(f"{base}experts.{e}.{p}_proj.weight", [4, 8]) for e in range(experts) for p in ("gate", "up")]
        names += [(f"{base}experts.{e}.down_proj.weight", [8, 4]) for e in range(experts)]
        for name, shape in names:
            size = 2 * shape[0] * shape[1]
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
            at += size
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + bytes(at))
    start = time.perf_counter()
    report = audit(Checkpoint.open(tmp_path), deep=False)
    seconds = time.perf_counter() - start
    assert report.roles["experts"][0] == layers * experts * 3
    assert report.roles["router"][0] == layers
    assert seconds < 20  # about 3 on an idle core; looking through all names for every layer took minutes


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mlp.gate.bias", "layers.1.mlp.gate.bias"),
        ("mlp.experts_norm.weight", "layers.1.mlp.experts_norm.weight"),
        ("mlp.shared_experts.up_proj.bias", "shared_experts.up_proj.bias: bf16"),
    ],
)
def test_unread_block_tensors_are_refused(tmp_path: Path, name: str, text: str) -> None:
    from collegium.loading import load_layer

    write_checkpoint(tmp_path, "deepseek_v3", size=TinySize(hidden=64, intermediate=32, layers=2))
    rewrite(tmp_path, **{f"model.layers.1.{name}": torch.zeros(4)})
    with pytest.raises(UnknownTensorError, match=text):
        load_layer(tmp_path, 1, device="cpu")


@pytest.mark.parametrize(
    "name", ["mlp.gate.weight", "mlp.gate.e_score_correction_bias", "mlp.shared_experts.up_proj.weight"]
)
def test_audit_reports_missing_layer_tensors(tmp_path: Path, name: str) -> None:
    from collegium.errors import MissingTensorError

    write_checkpoint(tmp_path, "deepseek_v3", size=TinySize(hidden=64, intermediate=32, layers=2))
    checkpoint = rewrite(tmp_path, **{f"model.layers.1.{name}": None})
    with pytest.raises(MissingTensorError, match=rf"layer 1: .*{name.removesuffix('.weight')}"):
        audit(checkpoint, deep=False)
