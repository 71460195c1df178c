"""The audit: one broken checkpoint a case, and the words of each refusal."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from collegium.checkpoint import Checkpoint, CheckpointLayer, audit, describe_checkpoint, load_experts
from collegium.errors import (
    BadScaleError,
    CheckpointError,
    ConfigError,
    DuplicateTensorError,
    MissingTensorError,
    TensorMismatchError,
    UnknownTensorError,
)
from collegium.parallel.placement import linear
from raising import raises_with
from toys import TinySize, combinations, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    Change = Callable[[dict[str, Tensor]], None]

SIZE = TinySize(hidden=96, intermediate=64, experts=4, layers=2)
PATH = "model.layers.1.mlp.experts."
STACK = "model.layers.1.mlp.experts."


def rewrite(folder: Path, change: Change, config: dict[str, object] | None = None) -> Checkpoint:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    if config is not None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return Checkpoint.open(folder)


def refused(checkpoint: Checkpoint, error: type[CheckpointError], text: str, layer: int = 1) -> None:
    """Both the audit and the loader must refuse, in the same words."""
    with pytest.raises(error, match=text):
        audit(checkpoint)
    with pytest.raises(error, match=text):
        load_experts(CheckpointLayer.open(checkpoint, layer), linear(4))


def drop(*names: str) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in names:
            del tensors[name]

    return change


def put(name: str, make: Callable[[Tensor], Tensor]) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = make(tensors[name]).contiguous()

    return change


def one_bad(value: float | int) -> Callable[[Tensor], Tensor]:
    def make(tensor: Tensor) -> Tensor:
        flat = tensor.clone()
        if flat.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
            flat.view(torch.uint8).view(-1)[-1] = int(value)
        else:
            flat.view(-1)[-1] = value
        return flat

    return make


@pytest.mark.each_choice
@pytest.mark.parametrize(("family", "name", "storage", "stacked"), combinations())
def test_good_checkpoints_pass(tmp_path: Path, family: str, name: str, storage: str, stacked: bool) -> None:
    tiny = write_checkpoint(tmp_path, family, name, storage, size=SIZE, stacked=stacked)
    report = audit(Checkpoint.open(tmp_path))
    assert [entry.layer for entry in report.layers] == list(tiny.experts)
    for entry in report.layers:
        assert (entry.stored.name, entry.stored.stacked, entry.experts) == (name, stacked, 4)
    assert sum(count for count, _ in report.roles.values()) == len(tiny.tensors)
    assert sum(size for _, size in report.roles.values()) == sum(t.nbytes for t in tiny.tensors.values())
    assert report.roles["experts"][1] == sum(entry.nbytes for entry in report.layers)
    assert ("shared" in report.roles) == (family == "deepseek_v3")


@pytest.mark.parametrize(
    ("name", "change", "error", "text"),
    [
        ("bf16", drop(f"{PATH}2.up_proj.weight"), MissingTensorError,
         r"layer 1, expert 2, up: .*experts.2.up_proj.weight missing"),
        ("nvfp4", drop(f"{PATH}2.down_proj.weight_scale"), MissingTensorError,
         r"layer 1, expert 2, down: .*weight_scale missing; nvfp4"),
        ("bf16", drop(*(f"{PATH}1.{p}_proj.weight" for p in ("gate", "up", "down"))), MissingTensorError,
         r"layer 1, expert 1: no tensor at all; 3 of 4 experts"),
        ("bf16", drop(*(f"{PATH}3.{p}_proj.weight" for p in ("gate", "up", "down"))), ConfigError,
         r"experts 0 to 2 \(3\), config.json has num_experts=4"),
        ("bf16", put(f"{PATH}0.down_proj.weight", lambda t: t.mT), TensorMismatchError,
         r"layer 1, expert 0, down: weight is \(64, 96\), bf16 with N=96 and K=64 needs \(96, 64\)"),
        ("bf16", put(f"{PATH}0.down_proj.weight", lambda t: t.half()), TensorMismatchError,
         r"layer 1, expert 0, down: .* is F16, bf16 allows BF16"),
        ("mxfp4", put(f"{PATH}3.down_proj.scale", lambda t: t.view(torch.uint8).repeat_interleave(2, 1).view(t.dtype)),
         TensorMismatchError,
         r"expert 3, down: scale is \(96, 4\), mxfp4 with N=96 and K=64 needs \(96, 2\); "
         r"4 would be group 16, is this nvfp4\?"),
        ("mxfp4", put(f"{PATH}1.gate_proj.scale", one_bad(255)), BadScaleError,
         r"layer 1, expert 1, gate: a scale of mxfp4 is forbidden.*0 to 254"),
        ("mxfp8", put(f"{PATH}1.up_proj.weight_scale", one_bad(255)), BadScaleError, r"expert 1, up: .*mxfp8"),
        ("nvfp4", put(f"{PATH}2.gate_proj.weight_scale", one_bad(0x7F)), BadScaleError, r"expert 2, gate: .*nvfp4"),
        ("nvfp4", put(f"{PATH}2.up_proj.weight_scale_2", lambda t: -t), BadScaleError, r"expert 2, up: .*nvfp4"),
        ("fp8_block", put(f"{PATH}2.up_proj.weight_scale_inv", one_bad(float("nan"))), BadScaleError, r"expert 2, up"),
        ("fp8_block", put(f"{PATH}2.up_proj.weight_scale_inv", one_bad(float("inf"))), BadScaleError, r"expert 2, up"),
        ("fp8_tensor", put(f"{PATH}0.down_proj.weight_scale", lambda t: t * 0), BadScaleError, r"expert 0, down"),
        ("fp8_channel", put(f"{PATH}0.down_proj.weight_scale", one_bad(-1.0)), BadScaleError, r"expert 0, down"),
        ("int4_group", put(f"{PATH}0.down_proj.weight_scale", one_bad(float("nan"))), BadScaleError, r"expert 0, down"),
        ("int4_group", put(f"{PATH}0.down_proj.weight_shape", lambda t: t + 1), TensorMismatchError,
         r"weight_shape is \[97, 65\], the config implies \[96, 64\]"),
        ("int4_group", put(f"{PATH}0.down_proj.weight_scale", lambda t: t.float()), TensorMismatchError,
         r"weight_scale differs in dtype"),
        ("bf16", put(f"{PATH}0.down_proj.weight", one_bad(float("nan"))), BadScaleError,
         r"expert 0, down: .* holds NaN or infinity"),
    ],
)  # fmt: skip
def test_broken_experts(tmp_path: Path, name: str, change: Change, error: type[CheckpointError], text: str) -> None:
    storage = {"mxfp4": "deepseek-v4"}.get(name)
    write_checkpoint(tmp_path, "qwen3_moe", name, storage, size=SIZE)
    refused(rewrite(tmp_path, change), error, text)


def extra(name: str) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = torch.zeros(2)

    return change


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (f"{PATH}0.gate_proj.bias", r"gate_proj.bias is not known to qwen3_moe in bf16.*known suffixes are"),
        (f"{PATH}0.w1.weight", r"experts.0.w1.weight is in the MoE block, qwen3_moe has no such tensor"),
        (f"{PATH}01.gate_proj.weight", r"experts.01.gate_proj.weight is in the MoE block"),
        (f"{PATH}0.gate_proj.weight_g_idx", r"weight_g_idx: an activation order of the columns"),
        (f"{PATH}0.gate_proj.weight_zero_point", r"weight_zero_point: a zero point, where the config declares no"),
        (f"{PATH}9.gate_proj.weight", r"experts \[9\] are in the files, config.json has num_experts=4"),
    ],
)
def test_unknown_tensors(tmp_path: Path, name: str, text: str) -> None:
    write_checkpoint(tmp_path, size=SIZE)
    refused(rewrite(tmp_path, extra(name)), UnknownTensorError, text)


def test_stacked_and_single_at_once(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, size=SIZE)
    checkpoint = rewrite(tmp_path, extra(f"{STACK}gate_up_proj"))
    refused(checkpoint, DuplicateTensorError, "stored both one by one and stacked")


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (put(f"{STACK}down_proj_scales", one_bad(255)), BadScaleError, r"layer 1, expert 3, down: .*mxfp4"),
        (put(f"{STACK}gate_up_proj_scales", one_bad(255)), BadScaleError, r"layer 1, expert 3, up: .*mxfp4"),
        (
            drop(f"{STACK}down_proj_bias"),
            MissingTensorError,
            r"down_proj_bias missing; gpt_oss experts have biases",
        ),
        (
            put(f"{STACK}down_proj_bias", one_bad(float("nan"))),
            BadScaleError,
            r"down_proj_bias holds NaN.*\[3\]",
        ),
        (
            put(f"{STACK}gate_up_proj_bias", lambda t: t[:, 1:]),
            TensorMismatchError,
            r"BF16 \(4, 127\), needed",
        ),
        (
            put(f"{STACK}down_proj_blocks", lambda t: t[:3]),
            TensorMismatchError,
            r"down_proj_blocks is \(3, 96, 2, 16\), for 3 experts; .*num_experts=4, which 3 of 4 tensors match",
        ),
        (drop(f"{STACK}down_proj_blocks"), MissingTensorError, r"down: .*down_proj_blocks missing"),
        (extra(f"{STACK}down_proj_zeros"), UnknownTensorError, r"down_proj_zeros is not known to gpt_oss"),
    ],
)
def test_broken_stacks(tmp_path: Path, change: Change, error: type[CheckpointError], text: str) -> None:
    write_checkpoint(tmp_path, "gpt_oss", "mxfp4", size=SIZE)
    refused(rewrite(tmp_path, change), error, text)


@pytest.mark.parametrize(
    ("name", "config", "text"),
    [
        ("nvfp4", {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
         r"looks like nvfp4; config.json declares fp8_block \(fp8\), which needs .weight \+ .weight_scale_inv"),
        ("nvfp4", {"quantization_config": None}, r"looks like nvfp4; config.json declares bf16"),
        ("fp8_block", {"quantization_config": None}, r"looks like fp8_block or fp8_tensor; config.json declares bf16"),
        ("bf16", {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
         r"looks like bf16; config.json declares fp8_block"),
    ],
)  # fmt: skip
def test_config_contradicts_tensors(tmp_path: Path, name: str, config: dict[str, object], text: str) -> None:
    write_checkpoint(tmp_path, size=SIZE, format_name=name)
    checkpoint = rewrite(tmp_path, lambda tensors: None, config)
    with pytest.raises(ConfigError, match=text):
        audit(checkpoint)
    with pytest.raises(ConfigError, match=text):
        describe_checkpoint(checkpoint)


def test_config_sizes_contradict_tensors(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "mixtral", size=SIZE)
    checkpoint = rewrite(tmp_path, lambda tensors: None, {"intermediate_size": 128})
    with raises_with(TensorMismatchError, "gate", "(64, 96)", "(128, 96)"):
        audit(checkpoint)


def test_wrong_family_says_where_experts_are(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "mixtral", size=SIZE)
    table = {"model_type": "qwen3_moe", "moe_intermediate_size": 64}
    with raises_with(MissingTensorError, "'model.layers.0.mlp.experts.'"):
        audit(rewrite(tmp_path, lambda tensors: None, table))


def test_lists_up_to_twenty_problems(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, size=TinySize(hidden=32, intermediate=32, experts=16, layers=1))
    names = [f"model.layers.0.mlp.experts.{e}.{p}_proj.weight" for e in range(1, 9) for p in ("gate", "up", "down")]
    checkpoint = rewrite(tmp_path, drop(*[n for n in names if ".8.gate" not in n]))
    with pytest.raises(MissingTensorError) as caught:
        audit(checkpoint)
    assert str(caught.value).count("\n- ") == 9
    checkpoint = rewrite(
        tmp_path, lambda t: t.update({f"model.layers.0.mlp.experts.{i}.x": torch.zeros(1) for i in range(30)})
    )
    with pytest.raises(UnknownTensorError, match=r"39 problems") as caught:
        audit(checkpoint)
    assert str(caught.value).count("\n- ") == 21
    assert "- and 19 more" in str(caught.value)


def test_unequal_global_scales_reported_and_preserved(tmp_path: Path) -> None:
    tiny = write_checkpoint(tmp_path, "mixtral", "nvfp4", size=SIZE)
    checkpoint = Checkpoint.open(tmp_path)
    report = audit(checkpoint)
    assert report.findings[1:] == tuple(
        f"layer {layer}: gate and up of 4 of 4 experts have different global scales; both are kept exactly"
        for layer in (0, 1)
    )
    weights = load_experts(CheckpointLayer.open(checkpoint, 0), linear(4))
    gate, up, _ = tiny.experts[0]
    assert torch.equal(weights.gate_up.tensors()["global_scale"][:, 0], gate.tensors()["global_scale"])
    assert torch.equal(weights.gate_up.tensors()["global_scale"][:, 1], up.tensors()["global_scale"])
    prefix = "model.layers.0.block_sparse_moe.experts."

    def equalise(tensors: dict[str, Tensor]) -> None:
        for e in range(4):
            tensors[f"{prefix}{e}.w3.weight_scale_2"] = tensors[f"{prefix}{e}.w1.weight_scale_2"].clone()

    assert [f.split(":")[0] for f in audit(rewrite(tmp_path, equalise)).findings[1:]] == ["layer 1"]


def test_shallow_audit_reads_nothing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_moe", "nvfp4", size=SIZE)
    checkpoint = rewrite(tmp_path, put(f"{PATH}2.up_proj.weight_scale_2", lambda t: -t))
    assert not audit(checkpoint, deep=False).deep
    assert checkpoint.bytes_read == 0


def test_prediction_layers_are_not_experts(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "deepseek_v3", size=SIZE)
    checkpoint = rewrite(tmp_path, extra("model.layers.2.mlp.experts.0.gate_proj.weight"))
    assert audit(checkpoint).roles["beyond the last layer"] == (1, 8)
