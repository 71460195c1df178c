"""What exporters do with scales: stacks stored input-first, one scale for two halves, several rows, many configs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from collegium.checkpoint import Checkpoint, CheckpointLayer, audit, load_experts, load_shared
from collegium.errors import ConfigError, InputError, TensorMismatchError, UnknownTensorError
from collegium.formats import Fp8Tensor, Int4Affine, MxFp8, NvFp4
from collegium.models import declared_format
from collegium.parallel.placement import linear, tensor_parallel
from raising import raises_with
from toys import TinySize, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

SIZE = TinySize(hidden=96, intermediate=64, experts=3, top_k=2, layers=1)
STACK = "model.layers.0.mlp.experts."
SINGLE = "model.layers.0.block_sparse_moe.experts."


def rewrite(
    folder: Path, change: Callable[[dict[str, Tensor]], None], block: dict[str, Any] | None = None
) -> Checkpoint:
    file, config = folder / "model.safetensors", folder / "config.json"
    tensors = load_file(file)
    change(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, file)
    if block is not None:
        config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": block}))
    return Checkpoint.open(folder)


def heavy(*shape: int) -> Tensor:
    return torch.randn(shape) / torch.rand(shape).clamp(min=0.05).sqrt()


def write_stack(folder: Path, name: str, scale_shape: str) -> dict[str, Any]:
    """Write gpt-oss experts as ModelOpt exports a stack; return the encoded rows (gate and up alternate)."""
    write_checkpoint(folder, "gpt_oss", "bf16", size=SIZE)
    form = {"nvfp4": NvFp4, "fp8_tensor": Fp8Tensor}[name]
    shapes = {"gate_up_proj": (3, 128, 96), "down_proj": (3, 96, 64)}
    payloads: dict[str, Any] = {}

    def change(tensors: dict[str, Tensor]) -> None:
        for proj, shape in shapes.items():
            if form is NvFp4:
                shared = None if scale_shape == "each" else torch.tensor(0.0125)
                payload = NvFp4.encode(heavy(*shape), global_scale=shared)
                tensors[f"{STACK}{proj}_weight_scale"] = payload.scales.mT
                tensors[f"{STACK}{proj}_weight_scale_2"] = payload.global_scale if shared is None else shared
            else:
                weight = heavy(*shape)
                payload = Fp8Tensor.encode(weight)
                scale = payload.scale
                if scale_shape == "halves" and proj == "gate_up_proj":
                    parts = Fp8Tensor.encode(weight.view(3, 64, 2, 96).transpose(1, 2))
                    payload, scale = parts, parts.scale
                tensors[f"{STACK}{proj}_weight_scale"] = scale
            payloads[proj] = payload
            codes = payload.codes
            if codes.dim() == 4:
                codes = codes.transpose(1, 2).reshape(3, 128, 96)
            tensors[f"{STACK}{proj}"] = codes.mT
            tensors[f"{STACK}{proj}_input_scale"] = torch.tensor(0.5)

    algorithm = {"nvfp4": "NVFP4", "fp8_tensor": "FP8"}[name]
    rewrite(folder, change, {"quant_method": "modelopt", "quant_algo": algorithm, "exclude_modules": ["*router*"]})
    return payloads


@pytest.mark.parametrize(
    ("name", "scale_shape"), [("nvfp4", "each"), ("nvfp4", "one"), ("fp8_tensor", "each"), ("fp8_tensor", "halves")]
)
def test_modelopt_stacks_are_input_first(tmp_path: Path, name: str, scale_shape: str) -> None:
    payloads = write_stack(tmp_path, name, scale_shape)
    checkpoint = Checkpoint.open(tmp_path)
    stored = CheckpointLayer.open(checkpoint).stored
    assert (stored.name, stored.storage, stored.stacked) == (name, "modelopt-stack", True)
    assert audit(checkpoint).layers[0].experts == 3
    layer = CheckpointLayer.open(checkpoint, 0)
    weights = load_experts(layer, linear(3))
    both = payloads["gate_up_proj"].decode()
    gate, up = (both[:, 0], both[:, 1]) if both.dim() == 4 else (both[:, 0::2], both[:, 1::2])
    assert torch.equal(weights.gate_up.decode()[:, 0], gate)
    assert torch.equal(weights.gate_up.decode()[:, 1], up)
    assert torch.equal(weights.down.decode(), payloads["down_proj"].decode())
    half = load_experts(layer, tensor_parallel(3, 1, 2))
    assert torch.equal(half.gate_up.decode()[:, 1], up[:, 32:])
    assert torch.equal(half.down.decode(), payloads["down_proj"].decode()[..., 32:])


def test_wrongly_oriented_stack_refused(tmp_path: Path) -> None:
    write_stack(tmp_path, "nvfp4", "each")
    turned = f"{STACK}down_proj_weight_scale"
    checkpoint = rewrite(tmp_path, lambda t: t.update({turned: t[turned].mT}))
    with raises_with(TensorMismatchError, "down", "(3, 96, 4)", "nvfp4", "(3, 4, 96)"):
        audit(checkpoint)


@pytest.mark.parametrize("rows", [2, 32])
def test_mxfp8_scale_rows_cover_several_rows(tmp_path: Path, rows: int) -> None:
    tiny = write_checkpoint(tmp_path, "mixtral", "mxfp8", "modelopt", size=SIZE)
    kept: dict[str, Tensor] = {}

    def change(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            if name.endswith(".weight_scale"):
                kept[name] = tensors[name] = tensors[name][::rows]

    checkpoint = rewrite(tmp_path, change)
    audit(checkpoint)
    layer = CheckpointLayer.open(checkpoint, 0)
    weights = load_experts(layer, linear(3))
    for e in range(3):
        for half, name in enumerate(("w1", "w3")):
            codes = tiny.experts[0][half][e].tensors()["codes"].float()
            spread = torch.exp2(kept[f"{SINGLE}{e}.{name}.weight_scale"].float() - 127)
            truth = codes * spread.repeat_interleave(rows, 0).repeat_interleave(32, 1)
            assert torch.equal(weights.gate_up[e].decode()[half], truth)
    part = load_experts(layer, tensor_parallel(3, 1, 2))
    assert torch.equal(part.gate_up.decode(), weights.gate_up.decode()[:, :, 32:])
    assert torch.equal(part.down.decode(), weights.down.decode()[..., 32:])
    name = f"{SINGLE}0.w2.weight_scale"
    with raises_with(TensorMismatchError, "expert 0, down", "(5, 2)"):
        audit(rewrite(tmp_path, lambda t: t.update({name: torch.full((5, 2), 127, dtype=torch.uint8)})))


def test_slices_through_mxfp8_scale_rows_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "mixtral", "mxfp8", "modelopt", size=SIZE)
    names = [f"{SINGLE}{e}.{p}.weight_scale" for e in range(3) for p in ("w1", "w3")]
    checkpoint = rewrite(tmp_path, lambda t: t.update({n: t[n][:1] for n in names}))
    with raises_with(InputError, "0", "32", "64"):
        load_experts(CheckpointLayer.open(checkpoint, 0), tensor_parallel(3, 0, 2))


def check_padding(checkpoint: Checkpoint, ranks: int) -> None:
    """Slices that do not fall on groups, filled up with zeros, join to the whole."""
    layer = CheckpointLayer.open(checkpoint, 0)
    whole = load_experts(layer, linear(3))
    parts = [load_experts(layer, tensor_parallel(3, rank, ranks), pad=True) for rank in range(ranks)]
    gate_up = torch.cat([part.gate_up.decode() for part in parts], dim=2)
    down = torch.cat([part.down.decode() for part in parts], dim=2)
    wide = layer.spec.intermediate_size
    assert gate_up.shape[2] > wide
    assert torch.equal(gate_up[:, :, :wide], whole.gate_up.decode())
    assert torch.equal(down[..., :wide], whole.down.decode())
    assert gate_up[:, :, wide:].abs().max() == down[..., wide:].abs().max() == 0


@pytest.mark.parametrize("name", ["nvfp4", "fp8_tensor"])
def test_padded_slices_of_input_first_stacks(tmp_path: Path, name: str) -> None:
    write_stack(tmp_path, name, "each")
    check_padding(Checkpoint.open(tmp_path), 3)


def test_padded_slices_of_repeated_scale_rows(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "mixtral", "mxfp8", "modelopt", size=SIZE)
    names = [f"{SINGLE}{e}.{p}.weight_scale" for e in range(3) for p in ("w1", "w3", "w2")]
    check_padding(rewrite(tmp_path, lambda t: t.update({n: t[n][::2] for n in names})), 3)


def test_gate_and_up_fp8_scales_separate(tmp_path: Path) -> None:
    tiny = write_checkpoint(tmp_path, "mixtral", "fp8_tensor", "compressed-tensors", size=SIZE)
    checkpoint = rewrite(tmp_path, lambda t: t.update({f"{SINGLE}1.w3.weight_scale": torch.tensor([7.5])}))
    weights = load_experts(CheckpointLayer.open(checkpoint, 0), linear(3))
    gate, up, _ = tiny.experts[0]
    assert torch.equal(weights.gate_up.decode()[1, 0], gate[1].decode())
    assert torch.equal(weights.gate_up.decode()[1, 1], up[1].tensors()["codes"].float() * 7.5)


EXPERT = "model.layers.0.block_sparse_moe.experts.{}.w1"


def test_mixed_precision_names_layers_or_projections() -> None:
    layers = {
        "model.layers.0.block_sparse_moe.experts.1.w1": {"quant_algo": "nvfp4", "group_size": 16},
        "model.layers.0.block_sparse_moe.experts": {"quant_algo": "FP8"},
        "model.layers.1.block_sparse_moe": {"quant_algo": "MXFP8"},
    }
    config = {
        "dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers,
            "exclude_modules": ["*.experts.2.*"],
        },
    }  # fmt: skip
    assert declared_format(config, EXPERT.format(0)).format == "fp8_tensor"
    assert declared_format(config, EXPERT.format(1)).format == "nvfp4"
    assert declared_format(config, EXPERT.format(2)).format == "bf16"
    assert declared_format(config, EXPERT.format(0).replace("layers.0", "layers.1")).format == "mxfp8"
    assert declared_format(config, EXPERT.format(0).replace("layers.0", "layers.11")).format == "bf16"


def test_layers_of_different_formats_load(tmp_path: Path) -> None:
    size = TinySize(hidden=96, intermediate=64, experts=3, top_k=2, layers=2)
    nv = write_checkpoint(tmp_path / "nv", "mixtral", "nvfp4", "modelopt", size=size)
    mx = write_checkpoint(tmp_path / "mx", "mixtral", "mxfp8", "modelopt", size=size, seed=1)
    tensors = {n: t for n, t in nv.tensors.items() if ".layers.1." not in n}
    tensors |= {n: t for n, t in mx.tensors.items() if ".layers.1." in n}
    block = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            **{f"model.layers.0.block_sparse_moe.experts.{e}.{p}": {"quant_algo": "NVFP4"}
               for e in range(3) for p in ("w1", "w2", "w3")},
            "model.layers.1.block_sparse_moe.experts": {"quant_algo": "MXFP8"},
        },
    }  # fmt: skip
    folder = tmp_path / "both"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**nv.config, "quantization_config": block}))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    checkpoint = Checkpoint.open(folder)
    assert [entry.stored.name for entry in audit(checkpoint).layers] == ["nvfp4", "mxfp8"]
    for layer, tiny in ((0, nv), (1, mx)):
        weights = load_experts(CheckpointLayer.open(checkpoint, layer), linear(3))
        assert torch.equal(weights.down.decode(), tiny.experts[layer][2].decode())


def write_asymmetric(folder: Path, **weights: object) -> dict[str, Any]:
    """Write asymmetric INT4 as compressed-tensors does, beside a shared expert that is ignored."""
    write_checkpoint(folder, "deepseek_v3", "bf16", size=TinySize(hidden=96, intermediate=64, experts=3, layers=2))
    payloads: dict[str, Any] = {}
    head = "model.layers.1.mlp.experts."

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.startswith(head)]:
            path = name.removesuffix(".weight")
            rows, columns = tensors.pop(name).shape
            parts = {
                ".weight_packed": torch.randint(-(2**31), 2**31 - 1, (rows, columns // 8), dtype=torch.int32),
                ".weight_scale": (torch.rand(rows, columns // 32) + 0.1).bfloat16(),
                ".weight_zero_point": torch.randint(-(2**31), 2**31 - 1, (rows // 8, columns // 32), dtype=torch.int32),
                ".weight_shape": torch.tensor([rows, columns]),
            }
            payloads[path.removeprefix(head)] = Int4Affine.from_parts(
                parts, storage="compressed-tensors-asymmetric", shape=(rows, columns), group_size=32
            )
            tensors.update({path + suffix: part for suffix, part in parts.items()})

    arguments = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False, **weights}
    group = {"targets": ["re:.*mlp.experts.*"], "weights": arguments}
    other = {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}
    rewrite(
        folder,
        change,
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": other, "group_1": group},
            "ignore": ["re:.*shared_experts.*"],
        },
    )
    return payloads


def test_asymmetric_integers_load_beside_other_groups(tmp_path: Path) -> None:
    payloads = write_asymmetric(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    stored = audit(checkpoint).layers[0].stored
    assert (stored.name, stored.storage, stored.group) == ("int4_affine", "compressed-tensors-asymmetric", 32)
    layer = CheckpointLayer.open(checkpoint, 1)
    weights = load_experts(layer, linear(3))
    half = load_experts(layer, tensor_parallel(3, 1, 2))
    for e in range(3):
        up, down = (payloads[f"{e}.{name}"].decode() for name in ("up_proj", "down_proj"))
        assert torch.equal(weights.gate_up.decode()[e, 1], up)
        assert torch.equal(weights.down.decode()[e], down)
        assert torch.equal(half.gate_up.decode()[e, 1], up[32:])
        assert torch.equal(half.down.decode()[e], down[:, 32:])
    shared = load_shared(layer)
    assert shared is not None
    assert shared.experts.down.name == "bf16"


def test_missing_and_undeclared_zero_points(tmp_path: Path) -> None:
    write_asymmetric(tmp_path)
    zeros = [n for n in load_file(tmp_path / "model.safetensors") if n.endswith("zero_point")]
    first = zeros[0]
    short = rewrite(tmp_path, lambda t: t.update({first: t[first][:1]}))
    with raises_with(TensorMismatchError, "1", "int4_affine"):
        audit(short)
    gone = rewrite(tmp_path, lambda t: [t.pop(name) for name in zeros] and None)
    with pytest.raises(ConfigError, match=r"int4_affine .*weight_zero_point"):
        audit(gone)
    write_asymmetric(tmp_path, symmetric=True)
    with raises_with(UnknownTensorError, "zero_point"):
        audit(Checkpoint.open(tmp_path))


def test_mxfp8_keeps_its_declared_form() -> None:
    """One scale row a row stays what it was."""
    part = MxFp8.storages[1].parts[1]
    assert part.fitted("U8", (64, 3), 64) is part
    assert part.fitted("U8", (16, 3), 64).stored_shape(64, 96) == (16, 3)
    assert part.fitted("U8", (5, 3), 64).stored_shape(64, 96) == (64, 3)
