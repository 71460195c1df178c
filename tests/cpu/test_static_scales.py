"""Scales of activations that a checkpoint's calibration found, asked for: as published, against plain arithmetic."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from collegium import load_layer
from collegium.balance import elastic
from collegium.checkpoint import Checkpoint, CheckpointLayer, audit, load_experts
from collegium.commands.bench import bench
from collegium.commands.verify import verify_model
from collegium.errors import BadScaleError, InputError, MissingTensorError, PlanError
from collegium.experts import reference
from collegium.integrations.transformers import layers_of, load_model
from collegium.layer import MoELayer
from collegium.loading import load_routed
from collegium.ops.quantize import formats_within
from collegium.parallel.local import Local
from collegium.parallel.placement import linear
from collegium.placement import Placement
from collegium.planning import kernel_named, plan
from collegium.problem import DeviceFacts, Limits, Overrides, Problem
from collegium.testing.compare import heavy_tailed, relative_error, uneven_ids
from collegium.types import ExpertWeights, Routing
from commands import command
from raising import assert_values, raises_with
from toys import TinySize, write_checkpoint

SIZE = TinySize(hidden=192, intermediate=160, experts=4, top_k=2, layers=2)
SHIPPED = Path(__file__).resolve().parents[2] / "demo" / "fables-16m"
BASE = "model.layers.{layer}.block_sparse_moe.experts.{expert}.{which}."
# Storage to the suffix of its scales, and whether they divide.
STORAGES = {
    ("fp8_tensor", "compressed-tensors"): (".input_scale", False),
    ("fp8_tensor", "modelopt"): (".input_scale", False),
    ("nvfp4", "compressed-tensors"): (".input_global_scale", True),
    ("nvfp4", "modelopt"): (".input_scale", False),
}
MOST = {"fp8_tensor": 448.0, "nvfp4": 2688.0}
STATIC = {"fp8_tensor": "fp8_static", "nvfp4": "nvfp4_static"}


def rewrite(folder: Path, changed: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(folder / "model.safetensors") | changed
    kept = {name: tensor.clone().contiguous() for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")


def calibrated(folder: Path, name: str, storage: str) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Write a Mixtral with scales of its own for every projection; return the largest of gate_up and down by layer.

    Those of down are far from those of gate_up, experts differ by up to 4, and the largest is in the middle.
    """
    write_checkpoint(folder, "mixtral", name, storage, size=SIZE)
    suffix, divides = STORAGES[name, storage]
    changed: dict[str, torch.Tensor | None] = {}
    largest = {}
    for layer in range(SIZE.layers):
        first = torch.tensor([0.5, 2.0, 1.0, 0.7]) * (3.0 + layer) / MOST[name]
        second = torch.tensor([1.0, 0.9, 4.0, 2.0]) * (0.3 + layer) / MOST[name]
        up = first if storage == "compressed-tensors" else first * 0.8
        for expert in range(SIZE.experts):
            for which, scales in (("w1", first), ("w3", up), ("w2", second)):
                scale = scales[expert].reciprocal() if divides else scales[expert]
                stored = BASE.format(layer=layer, expert=expert, which=which)[:-1] + suffix
                changed[stored] = scale.reshape([1] if divides else [])
        # What is stored is rounded once more where it divides.
        largest[layer] = tuple(
            (s.reciprocal().reciprocal() if divides else s).max() for s in (torch.maximum(first, up), second)
        )
    rewrite(folder, changed)
    return largest


def seen(x: torch.Tensor, scale: torch.Tensor, name: str) -> torch.Tensor:
    """What a product sees of rows, in float32: codes of the one scale, times it."""
    if name == "fp8_tensor":
        return (x * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    groups = x.unflatten(1, (-1, 16))
    own = (groups.abs().amax(2, keepdim=True) / (6 * scale)).clamp(2.0**-9, 448).to(torch.float8_e4m3fn).float()
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    size = (groups * (1 / (own * scale))).abs()
    away = (size[..., None] - table).abs() + torch.tensor([0, 1e-7] * 4)  # of two as near the even code
    return (torch.copysign(table[away.argmin(-1)], groups) * (own * scale)).flatten(1)


def judged(
    x: torch.Tensor, weights: ExpertWeights[Any], routing: Routing, scales: tuple[torch.Tensor, torch.Tensor], name: str
) -> torch.Tensor:
    """The layer in float32, an assignment at a time, with both scales applied here."""
    out = torch.zeros(x.shape)
    rows = seen(x, scales[0], name)
    for token, slot in ((t, k) for t in range(x.shape[0]) for k in range(SIZE.top_k)):
        expert = int(routing.topk_ids[token, slot])
        gate, up = weights.gate_up[expert].decode() @ rows[token]
        between = seen((gate * torch.sigmoid(gate) * up)[None], scales[1], name)[0]
        out[token] += routing.topk_weights[token, slot] * (weights.down[expert].decode() @ between)
    return out


def tokens() -> tuple[torch.Tensor, Routing]:
    """Rows from far below the scales' smallest code to far above their largest."""
    x = heavy_tailed(24, SIZE.hidden, seed=2) * torch.logspace(-7, 2, 24)[:, None]
    return x, Routing(topk_ids=uneven_ids(24, 2, SIZE.experts, seed=3), topk_weights=torch.rand(24, 2) + 0.1)


@pytest.mark.parametrize(("name", "storage"), list(STORAGES))
def test_layers_use_the_largest_scales(tmp_path: Path, name: str, storage: str) -> None:
    largest = calibrated(tmp_path, name, storage)
    x, routing = tokens()
    for layer, scales in largest.items():
        made = load_layer(
            tmp_path,
            layer,
            device="cpu",
            dtype="fp32",
            overrides=Overrides(activation_format=STATIC[name], unequal_scales="largest"),
        )
        weights = load_experts(CheckpointLayer.open(Checkpoint.open(tmp_path), layer), linear(SIZE.experts))
        found, wanted = made(x, routing=routing), judged(x, weights, routing, scales, name)
        size = wanted.norm(dim=1)
        assert (size == 0).any(), "nothing underflows"
        assert torch.equal(found.norm(dim=1) == 0, size == 0)
        # A sum of another order rounds to the neighbour now and then.
        rows = size > 0
        assert relative_error(found[rows], wanted[rows]) < 2e-3
        for other in ((scales[1], scales[0]), (scales[0] / 4, scales[1]), (scales[0], scales[1] / 4)):
            assert relative_error(judged(x, weights, routing, other, name), wanted) > 0.02, "the judge tells nothing"
        seen_most = seen(x, scales[0], name).abs().amax()
        assert seen_most <= scales[0] * MOST[name] * 1.0001 < x.abs().amax(), "nothing saturates"
        # Asked for nothing, rows have scales of their own.
        dynamic = load_layer(
            tmp_path, layer, device="cpu", dtype="fp32", overrides=Overrides(activation_format="fp8_token")
        )
        own = dynamic(x, routing=routing)
        assert (own.norm(dim=1) > 0).all()
        assert relative_error(own, wanted) > 0.1
        told = f"scales     {float(scales[0]):g} before gate_up, {float(scales[1]):g} before down"
        assert told in str(made)
        assert "scales  " not in str(dynamic)


def test_scales_serve_both_formats(tmp_path: Path) -> None:
    """A scale says how large numbers may be; 448 and 6 * 448 are the largest codes."""
    largest = calibrated(tmp_path, "fp8_tensor", "modelopt")
    for wish, ratio in (("fp8_static", 1), ("nvfp4_static", 6)):
        force = Overrides(activation_format=wish, unequal_scales="largest")
        made: Any = load_layer(tmp_path, 1, device="cpu", weight_format="mxfp4", overrides=force)
        forms = made.experts.activations
        assert [form.scale for form in forms] == pytest.approx([float(s) / ratio for s in largest[1]], rel=1e-7)


@pytest.mark.parametrize("each", [True, False])
def test_stacks_with_one_or_many_scales(tmp_path: Path, each: bool) -> None:
    """As ModelOpt stores experts that are stacked input-first."""
    write_checkpoint(tmp_path, "gpt_oss", "bf16", size=replace(SIZE, layers=1))
    base, changed = "model.layers.0.mlp.experts.", dict[str, torch.Tensor | None]()
    values = {"gate_up_proj": 0.01, "down_proj": 0.003}
    for which, (rows, columns) in {"gate_up_proj": (320, 192), "down_proj": (192, 160)}.items():
        weight = torch.randn(4, rows, columns) * columns**-0.5
        scale = weight.abs().amax((1, 2)) / 448
        changed[base + which] = (weight / scale[:, None, None]).to(torch.float8_e4m3fn).mT
        changed[base + which + "_weight_scale"] = scale
        own = torch.tensor([0.2, 1.0, 0.4, 0.3]) * values[which]
        changed[base + which + "_input_scale"] = own if each else own.max()
    rewrite(tmp_path, changed)
    config = json.loads((tmp_path / "config.json").read_text())
    block = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["*router*"]}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": block}))
    made: Any = load_layer(
        tmp_path, 0, device="cpu", overrides=Overrides(activation_format="fp8_static", unequal_scales="largest")
    )
    assert [form.scale for form in made.experts.activations] == pytest.approx([0.01, 0.003], rel=1e-6)


def test_ranks_use_scales_of_all_experts(tmp_path: Path) -> None:
    """Else bits would depend on who holds which expert."""
    calibrated(tmp_path, "fp8_tensor", "compressed-tensors")
    opened = CheckpointLayer.open(Checkpoint.open(tmp_path), 1)
    x, routing = tokens()
    whole: Any = load_routed(
        opened,
        device="cpu",
        dtype="fp32",
        overrides=Overrides(activation_format="fp8_static", unequal_scales="largest"),
    )
    parts = torch.zeros(x.shape)
    ranks = ((3, 0), (1,), (2,))
    for rank, held in enumerate(ranks):
        placed = Placement(rank=rank, world_size=3, expert_ids=held, ranks=ranks)
        force = Overrides(activation_format="fp8_static", dispatcher="partial")
        part: Any = load_routed(opened, device="cpu", dtype="fp32", overrides=force, placement=placed)
        assert part.experts.input_reach == whole.experts.input_reach
        # A plan knows no scale, so tokens travel as they are.
        assert part.plan.problem.sent_as is None
        parts += part(x, routing=routing)
        if rank == 0:
            # What a rank reads later, when another is gone, is packed with the scales it has.
            own: Any = elastic._repack(1, part, None, elastic.reader_of(tmp_path))
            assert own.input_reach == whole.experts.input_reach
            assert own.weights.down.shape[0] == 4
    assert relative_error(parts, whole(x, routing=routing)) < 1e-6


# The interpreter computes with numpy, which warns of overflows.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", ["fp8_tensor", "nvfp4"])
def test_tensor_core_kernels_match_reference_codes(tmp_path: Path, name: str) -> None:
    """In Triton's interpreter, beside the reference: small tiles and unsorted, FP8 weights and four bits."""
    if torch.cuda.is_available():
        pytest.skip("tests/gpu makes this comparison on the device")
    pytest.importorskip("triton")
    calibrated(tmp_path, name, "modelopt")
    opened = CheckpointLayer.open(Checkpoint.open(tmp_path), 0)
    loaded: Any = load_routed(
        opened, device="cpu", overrides=Overrides(activation_format="fp8_static", unequal_scales="largest")
    )
    weights = replace(load_experts(opened, linear(4)), input_reach=loaded.experts.input_reach)
    spec = opened.spec.routed_alone()
    facts = DeviceFacts(kind="cuda", capability=(9, 0))
    problem = Problem(spec=spec, device=facts, limits=Limits(max_tokens=64), activation_format="fp8_static")
    made = plan(problem)
    assert made.kernel == {"fp8_tensor": "triton_fp8", "nvfp4": "triton_w4a8"}[name]
    packed: Any = kernel_named(made.kernel).pack(weights, problem.routed)
    assert [form.scale for form in packed.forms] == [form.scale for form in loaded.experts.activations]
    x, routing = tokens()
    x, routing = x[::2].bfloat16(), Routing(topk_ids=routing.topk_ids[::2], topk_weights=routing.topk_weights[::2])
    batch = Local(num_experts=4).dispatch(x, routing)[0]
    found, wanted = packed.run(batch).float(), loaded.experts.run(batch)
    zero = (wanted == 0).all(dim=1)
    assert 0 < int(zero.sum()) < len(zero)
    assert (found[zero] == 0).all()
    # Rows between the products are rounded to bfloat16 first, and some of them then to the neighbouring code.
    assert relative_error(found[~zero], wanted[~zero]) < 0.02
    few = slice(7, 10)
    part = Routing(topk_ids=routing.topk_ids[few], topk_weights=routing.topk_weights[few])
    rows = packed.run_unsorted(x[few], part.topk_ids.contiguous()).float().view(3, 2, -1)
    assert relative_error((rows * part.topk_weights[..., None]).sum(1), loaded(x[few], routing=part)) < 0.02
    # Other scales need no other kernel, and tokens of other ranks do not come as codes.
    other = replace(packed, input_reach=(1.0, 2.0))
    assert (other.key, other.tiling) == (packed.key, packed.tiling)
    assert packed.input_codes is None


def shipped_in_fp8(folder: Path) -> Path:
    """The shipped model with experts in FP8 and scales that its inputs fit."""
    code, _, said = command("quantize", SHIPPED, "--to", "fp8_tensor", "--out", folder)
    assert code == 0, said
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink()
    paths = [name.removesuffix("weight_scale") for name in tensors if name.endswith("weight_scale")]
    scales = {path + "input_scale": torch.tensor(20.0 / 448) for path in paths}
    save_file(tensors | scales, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_the_commands_take_them_by_name(tmp_path: Path) -> None:
    folder = shipped_in_fp8(tmp_path / "fables-fp8")
    code, out, said = command("inspect", folder, "--device", "cpu", "--json")
    assert code == 0, said
    findings = json.loads(out)["findings"]
    told = "the experts have static activation scales, which --activations fp8_static uses, the largest of a layer; "
    assert findings.count(told + "without it scales are computed per row") == 1
    code, out, said = command("verify", folder, "--device", "cpu", "--activations", "fp8_static", "--json")
    assert code == 0, said
    rows = json.loads(out)["layers"]
    assert {row["activation_format"] for row in rows} == {"fp8_static"}
    code, out, said = command(
        "generate", folder, "--device", "cpu", "--activations", "fp8_static", "--tokens", "6", "--json"
    )
    assert code == 0, said
    model = load_model(
        folder, device="cpu", overrides=Overrides(activation_format="fp8_static", unequal_scales="largest")
    )
    made = layers_of(model)
    assert all(layer.experts.input_reach == pytest.approx((20.0, 20.0)) for layer in made)
    ids = torch.arange(12)[None] + 5
    static = model(ids).logits
    assert relative_error(static, load_model(folder, device="cpu")(ids).logits) < 0.1
    report = bench("192x160x4x2", [("fp8_tensor", "fp8_static"), ("nvfp4", "nvfp4_static")], tokens=[4], device="cpu")
    assert [row.activations for row in report.rows] == ["fp8_static", "nvfp4_static"]


def test_verify_detects_swapped_product_scales(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calibrated(tmp_path, "fp8_tensor", "modelopt")
    force = Overrides(activation_format="fp8_static", unequal_scales="largest")
    assert verify_model(str(tmp_path), device="cpu", overrides=force).passed

    def turned(name: str, reach: Any) -> Any:
        return formats_within(name, reach and reach[::-1])

    monkeypatch.setattr(reference, "formats_within", turned)
    assert not verify_model(str(tmp_path), device="cpu", overrides=force).passed


def test_unusable_checkpoint_scales_refused(tmp_path: Path) -> None:
    calibrated(tmp_path, "fp8_tensor", "compressed-tensors")
    force = Overrides(activation_format="fp8_static")
    before = load_file(tmp_path / "model.safetensors")

    def refused(kind: type[Exception], text: str, **changed: torch.Tensor | None) -> None:
        save_file(before, tmp_path / "model.safetensors")
        rewrite(tmp_path, changed)
        with pytest.raises(kind, match=text):
            load_layer(tmp_path, 1, device="cpu", overrides=force)
        load_layer(tmp_path, 0, device="cpu", overrides=force)
        load_layer(tmp_path, 1, device="cpu")

    one, two = (BASE.format(layer=1, expert=2, which=which) + "input_scale" for which in ("w3", "w2"))
    refused(
        MissingTensorError,
        r"fp8_static was requested: layer 1, expert 2, down has no .input_scale, and 0 more of 12 .*use fp8_token",
        **{two: None},
    )
    told = audit(Checkpoint.open(tmp_path)).findings
    assert_values(" ".join(told), "layer 1, expert 2, down", "0 more")
    every = {name: None for name in before if name.startswith("model.layers.1.") and name.endswith("input_scale")}
    refused(MissingTensorError, r"expert 0, gate has no .input_scale, and 11 more of 12", **every)
    for value in (torch.nan, torch.inf, 0.0, -0.5):
        refused(BadScaleError, r"expert 2, down: .*allowed are finite and positive", **{two: torch.tensor(value)})
    refused(BadScaleError, "expert 2, up.*that of gate is .*they share one input", **{one: before[one] * 1.001})
    refused(
        InputError,
        r"fp8_static: found scale 9.99\S+e-41, .*calibrate",
        **{
            name: torch.tensor(1e-40)
            for name in before
            if name.startswith("model.layers.1.") and name.endswith("input_scale")
        },
    )
    save_file(before, tmp_path / "model.safetensors")
    close = before[one] * (1 + 1e-6)
    rewrite(tmp_path, {one: close})
    load_layer(tmp_path, 1, device="cpu", overrides=force)


def test_shared_expert_has_separate_scales(tmp_path: Path) -> None:
    size = replace(SIZE, layers=2)
    write_checkpoint(tmp_path, "deepseek_v3", "fp8_tensor", "modelopt", size=size)
    number = next(
        iter(
            CheckpointLayer.open(Checkpoint.open(tmp_path)).index.family.moe_layers(
                json.loads((tmp_path / "config.json").read_text())
            )
        )
    )
    tensors = load_file(tmp_path / "model.safetensors")
    routed = {
        name.removesuffix("weight_scale") + "input_scale": torch.tensor(0.02)
        for name in tensors
        if name.endswith("weight_scale")
    }
    rewrite(tmp_path, dict(routed))
    force = Overrides(activation_format="fp8_static", unequal_scales="largest")
    with raises_with(InputError, "bf16"):
        load_layer(tmp_path, number, device="cpu", overrides=force)
    base, changed = f"model.layers.{number}.mlp.shared_experts.", dict[str, torch.Tensor | None]()
    for which, scale in (("gate_proj", 0.05), ("up_proj", 0.04), ("down_proj", 0.3)):
        weight = tensors[f"{base}{which}.weight"].float()
        own = weight.abs().amax() / 448
        changed[f"{base}{which}.weight"] = (weight / own).to(torch.float8_e4m3fn)
        changed[f"{base}{which}.weight_scale"] = own
        changed[f"{base}{which}.input_scale"] = torch.tensor(scale)
    rewrite(tmp_path, changed)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["exclude_modules"] = ["lm_head", "*self_attn*"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    made: Any = load_layer(tmp_path, number, device="cpu", overrides=force)
    assert [form.scale for form in made.experts.activations] == pytest.approx([0.02, 0.02])
    assert [form.scale for form in made.shared.experts.activations] == pytest.approx([0.05, 0.3])
    x = heavy_tailed(5, SIZE.hidden, seed=4).bfloat16()
    dynamic = load_layer(tmp_path, number, device="cpu", overrides=Overrides(activation_format="fp8_token"))
    assert made(x).isfinite().all()
    assert not torch.equal(made(x), dynamic(x))
    merged = replace(force, shared="merged")
    with raises_with(PlanError, "22.4", "shared='sequential'"):
        load_layer(tmp_path, number, device="cpu", overrides=merged)
    load_layer(tmp_path, number, device="cpu", overrides=Overrides(activation_format="fp8_token", shared="merged"))
    same = {name: torch.tensor(0.02) for name in load_file(tmp_path / "model.safetensors") if "input_scale" in name}
    rewrite(tmp_path, dict(same))
    found, apart = (load_layer(tmp_path, number, device="cpu", overrides=own) for own in (merged, force))
    assert found.plan.merged_shared_experts == 1
    assert relative_error(found(x).float(), apart(x).float()) < 0.01
    assert relative_error(made(x).float(), apart(x).float()) > 0.01
    assert re.search(r"\n *scales +0\.02 .*gate_up.* 0\.02 .*down", str(found))
    rewrite(tmp_path, {f"{base}up_proj.input_scale": None})
    with raises_with(MissingTensorError, "input_scale", "0", "3"):
        load_layer(tmp_path, number, device="cpu", overrides=force)


def test_weights_without_scales_refused_by_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "mixtral", "bf16", size=SIZE)
    with raises_with(InputError, "expert 0, gate", "bf16", "fp8_tensor", "fp8_token"):
        load_layer(
            tmp_path, 0, device="cpu", overrides=Overrides(activation_format="fp8_static", unequal_scales="largest")
        )
    opened = CheckpointLayer.open(Checkpoint.open(tmp_path), 0)
    problem = Problem(spec=opened.spec.routed_alone(), device=DeviceFacts(kind="cpu"))
    with raises_with(InputError, "nvfp4_static", "input_reach"):
        MoELayer(load_experts(opened, linear(4)), plan(problem, Overrides(activation_format="nvfp4_static")))
