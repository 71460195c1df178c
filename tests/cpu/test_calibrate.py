"""``collegium calibrate``: the largest inputs of experts on a text, stored as ModelOpt and compressed-tensors do."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from collegium import load_layer
from collegium.checkpoint import Checkpoint, CheckpointLayer, audit, load_experts
from collegium.commands import calibrate as calibrating
from collegium.commands.calibrate import calibrate_model
from collegium.errors import InputError
from collegium.integrations.transformers import layers_of, load_model
from collegium.parallel.placement import linear
from collegium.problem import Overrides
from collegium.testing.compare import activate_float64, heavy_tailed, relative_error
from collegium.types import ActivationSpec
from commands import command
from quantised_models import write_model
from raising import raises_with
from toys import TinySize, write_checkpoint

if TYPE_CHECKING:
    from collegium.types import ExpertWeights

pytest.importorskip("tokenizers")

WORDS = [f"w{number}" for number in range(90)]
SHIPPED = Path(__file__).resolve().parents[2] / "demo" / "fables-16m"


def with_text(folder: Path) -> Path:
    """Give a model of 97 tokens a tokenizer of words, and a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    numbers = torch.randint(90, (70,), generator=torch.Generator().manual_seed(0)).tolist()
    (folder / "heldout.txt").write_text(" ".join(WORDS[number] for number in numbers))
    return folder


def modelopt_model(folder: Path) -> Path:
    pytest.importorskip("modelopt", reason="ModelOpt is published for Linux only")
    return with_text(write_model(folder, "modelopt", "nvfp4"))


def largest_inputs(folder: Path, tokens: int, steps: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Return the largest inputs of gate_up and of down by layer and expert, in float64 from the layers' inputs."""
    loaded: Any = load_model(folder, device="cpu", overrides=Overrides(kernel="reference"))
    checkpoint = Checkpoint.open(folder)
    found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    hooks: list[Any] = []
    for number, layer in enumerate(layers_of(loaded)):
        weights = load_experts(CheckpointLayer.open(checkpoint, number), linear(5))
        found[number] = torch.zeros(5), torch.zeros(5)

        def record(_: Any, args: Any, kwargs: Any, number: int = number, weights: ExpertWeights[Any] = weights) -> None:
            for token, ids in zip(args[0].reshape(-1, args[0].shape[-1]), kwargs["routing"].topk_ids, strict=True):
                for expert in ids.tolist():
                    both = weights.gate_up[expert].decode().double() @ token.double()
                    middle = activate_float64(both, ActivationSpec())
                    for largest, values in zip(found[number], (token, middle), strict=True):
                        largest[expert] = max(largest[expert], values.abs().amax())

        hooks.append(layer.register_forward_pre_hook(record, with_kwargs=True))
    ids = torch.tensor([[WORDS.index(word) for word in (folder / "heldout.txt").read_text().split()]])
    with torch.inference_mode():
        for step in range(steps):
            loaded(ids[:, step * tokens : (step + 1) * tokens], use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def test_scales_are_those_of_modelopt(tmp_path: Path) -> None:
    """Scales by its names, replacing those of the files, from its formula; weights are not copied twice."""
    folder = modelopt_model(tmp_path / "model")
    report = calibrate_model(str(folder), tokens=32, device="cpu")
    out = Path(report.path)
    assert out == tmp_path / "model-calibrated"
    assert (report.activations, report.tokens, report.scales) == (("nvfp4_static",), 64, 3 * 5 * 3)
    wanted = largest_inputs(folder, 32, 2)
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    scales = load_file(out / "model-input-scales.safetensors")
    assert {name for name, file in index.items() if file == "model-input-scales.safetensors"} == set(scales)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="transformers .* is not tested", category=UserWarning)
        from modelopt.torch.quantization.qtensor import NVFP4QTensor
    for layer, (gate_up, down) in wanted.items():
        for expert in range(5):
            base = f"model.layers.{layer}.mlp.experts.{expert}."
            first, second = scales[f"{base}gate_proj.input_scale"], scales[f"{base}down_proj.input_scale"]
            assert torch.equal(first, scales[f"{base}up_proj.input_scale"])
            assert (first.shape, first.dtype) == (torch.Size([]), torch.float32)
            quantizer = SimpleNamespace(is_enabled=True, export_amax=gate_up[expert].clone, maxbound=6.0)
            assert torch.equal(first, NVFP4QTensor.get_activation_scaling_factor(quantizer))
            assert float(second) == pytest.approx(float(down[expert]) / 2688, rel=1e-5)
    before, after = Checkpoint.open(folder), Checkpoint.open(out)
    assert set(before.tensors) == set(after.tensors)
    kept = [name for name in before.tensors if not name.endswith("input_scale")]
    for name in kept[::7]:
        one, other = (side.read(name).reshape(-1).view(torch.uint8) for side in (before, after))
        assert torch.equal(one, other), name
    audit(after)


def test_calibrated_model_runs_with_its_scales(tmp_path: Path) -> None:
    """Both formats from one folder: calibrated scales and those of each row, which a word of the plan tells apart."""
    folder = with_text(write_model(tmp_path / "model", "compressed-tensors", "nvfp4"))
    out = tmp_path / "calibrated"
    code, text, errors = command(
        "calibrate", folder, "--out", out, "--tokens", "32", "--steps", "1", "--device", "cpu", "--json"
    )
    assert code == 0, errors
    report = json.loads(text)
    assert report["linked"] == ["model.safetensors"]
    assert (out / "model.safetensors").stat().st_ino == (folder / "model.safetensors").stat().st_ino
    wanted = largest_inputs(folder, 32, 1)
    scales = load_file(out / "model-input-scales.safetensors")
    name = "model.layers.1.mlp.experts.3.up_proj.input_global_scale"
    assert scales[name].shape == (1,)
    assert float(scales[name]) == pytest.approx(2688 / float(wanted[1][0][3]), rel=1e-6)
    row = report["layers"][1]
    assert (row["gate_up"], row["unreached"]) == (pytest.approx(float(wanted[1][0].max())), [])
    plain = load_layer(folder, 1, device="cpu", dtype="fp32")
    static, dynamic = (
        load_layer(out, 1, device="cpu", dtype="fp32", overrides=Overrides(activation_format=name))
        for name in ("nvfp4_static", "nvfp4")
    )
    reach = static.experts.input_reach
    assert reach == pytest.approx([float(inputs.max()) for inputs in wanted[1]], rel=1e-5)
    assert (static.plan.activation_format, dynamic.plan.activation_format) == ("nvfp4_static", "nvfp4")
    x = heavy_tailed(12, 128, seed=1)
    x *= reach[0] / x.abs().max()
    outputs = [layer(x) for layer in (plain, static, dynamic)]
    assert 0.01 < relative_error(outputs[1], outputs[0]) < 0.35
    assert 0.01 < relative_error(outputs[2], outputs[0]) < 0.35
    assert not torch.equal(outputs[1], outputs[2])
    code, text, errors = command("verify", out, "--device", "cpu", "--activations", "nvfp4_static", "--json")
    assert code == 0, errors
    assert json.loads(text)["passed"]


def test_unreached_experts_get_the_largest(tmp_path: Path) -> None:
    folder = with_text(write_model(tmp_path / "model", "compressed-tensors", "nvfp4"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 1}))
    tensors = load_file(folder / "model.safetensors")
    gate = tensors["model.layers.0.mlp.gate.weight"]
    gate[2:] = gate[:1]
    gate[1] = -gate[0]  # every token goes to expert 0 or 1, the first of equal logits
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    report = calibrate_model(str(folder), tokens=32, device="cpu")
    row = report.layers[0]
    assert row.unreached
    assert len(row.unreached) < 5
    scales = load_file(Path(report.path) / "model-input-scales.safetensors")
    for expert in row.unreached:
        name = f"model.layers.0.mlp.experts.{expert}.down_proj.input_global_scale"
        assert float(scales[name]) == pytest.approx(2688 / row.down, rel=1e-6)
    load_layer(report.path, 0, device="cpu", overrides=Overrides(activation_format="nvfp4_static"))


def test_shared_expert_is_calibrated(tmp_path: Path) -> None:
    """One scale per matrix of the shared expert too; a layer without its scales would be refused."""
    size = TinySize(hidden=64, intermediate=48, experts=4, top_k=2, layers=2)
    write_checkpoint(tmp_path, "deepseek_v3", "nvfp4", "modelopt", size=size)
    number = CheckpointLayer.open(Checkpoint.open(tmp_path)).number
    tensors = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    base = f"model.layers.{number}.mlp.shared_experts."
    for which in ("gate_proj", "up_proj", "down_proj"):
        from collegium.formats import NvFp4

        made = NvFp4.encode(tensors.pop(f"{base}{which}.weight").float())
        tensors[f"{base}{which}.weight"] = made.codes[:, : made.shape[1] // 2].contiguous()
        tensors[f"{base}{which}.weight_scale"] = made.scales
        tensors[f"{base}{which}.weight_scale_2"] = made.global_scale
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config["quantization_config"]["exclude_modules"] = ["lm_head", "*self_attn*"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = Checkpoint.open(tmp_path)
    view = CheckpointLayer.open(checkpoint, number)
    layer = load_layer(checkpoint, number, device="cpu", dtype="fp32", overrides=Overrides(kernel="reference"))
    x = heavy_tailed(40, 64, seed=4)
    with calibrating._recording({view: layer}) as recorders:
        layer(x)
    assert not layer._forward_pre_hooks
    scales = recorders[0].named_scales()
    assert float(scales[f"{base}up_proj.input_scale"]) == pytest.approx(float(x.abs().max()) / 2688, rel=1e-6)
    assert set(scales) >= {f"{base}{which}.input_scale" for which in ("gate_proj", "up_proj", "down_proj")}
    save_file(tensors | scales, tmp_path / "model.safetensors", {"format": "pt"})
    static = load_layer(
        tmp_path, number, device="cpu", dtype="fp32", overrides=Overrides(activation_format="nvfp4_static")
    )
    assert relative_error(static(x), layer(x)) < 0.35


def test_refusals_come_before_the_model_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrating, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    with raises_with(InputError, "bf16", "fp8_tensor", "nvfp4", "collegium quantize"):
        calibrate_model(str(SHIPPED), out=str(tmp_path / "out"))
    folder = with_text(write_model(tmp_path / "model", "compressed-tensors", "nvfp4"))
    with raises_with(InputError, "nowhere.txt", "--text"):
        calibrate_model(str(folder), str(tmp_path / "nowhere.txt"))
    (tmp_path / "taken").mkdir()
    with raises_with(InputError, "taken exists"):
        calibrate_model(str(folder), out=str(tmp_path / "taken"))


def test_broken_inputs_write_nothing(tmp_path: Path) -> None:
    folder = with_text(write_model(tmp_path / "model", "compressed-tensors", "nvfp4"))
    with raises_with(InputError, "70 tokens", "100"):
        calibrate_model(str(folder), tokens=100, device="cpu")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.post_attention_layernorm.weight"][3] = torch.inf
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(Exception, match=r"layer 1|layernorm") as refusal:
        calibrate_model(str(folder), tokens=32, device="cpu")
    assert type(refusal.value).__module__ == "collegium.errors"
    assert [path.name for path in tmp_path.iterdir() if "calibrated" in path.name] == []
    shutil.rmtree(folder)
