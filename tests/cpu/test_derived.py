"""Model types without a file: derived from the class of the installed transformers, from files to answers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

from collegium.commands.inspect import inspect_model
from collegium.commands.quantize import quantize_model
from collegium.commands.verify import verify_model
from collegium.errors import CheckpointError, ConfigError
from collegium.integrations.transformers.loading import load_model_in
from collegium.loading import load_layer
from collegium.models import FAMILIES, derived_family
from collegium.models.derived import class_layers
from collegium.models.derived.stored_names import stored_names
from derived_cases import CASES, IDS, WHOLE_ONLY, blocks, build
from tiny_configs import tiny_config

if TYPE_CHECKING:
    from pathlib import Path

LAYERS = [name for name in CASES if name not in WHOLE_ONLY]


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 2e-5) -> None:
    """Float32 against float32: only the order of sums differs."""
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= tolerance * wanted.abs().max()


def test_the_cases_have_no_file() -> None:
    assert not {kind for family in FAMILIES for kind in family.model_types} & set(CASES)


@pytest.mark.parametrize("original", [True, False], ids=["published", "in memory"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_compute_what_the_class_does(tmp_path: Path, name: str, original: bool) -> None:
    model = build(name, tmp_path, original=original)
    wanted = blocks(model)
    report = inspect_model(str(tmp_path), device="cpu")
    assert [layer.layer for layer in report.report.layers] == list(wanted)
    assert report.family == name
    assert report.origin is not None
    assert type(model).__name__ in report.origin
    assert report.origin.endswith("checked")
    x = torch.randn(1, 40, 32) * (1 + 7 * (torch.rand(1, 40, 1) > 0.8))
    for number, block in wanted.items():
        layer = load_layer(tmp_path, number, dtype="fp32", device="cpu")
        with torch.no_grad():
            truth = block(x)
            truth = truth[0] if isinstance(truth, tuple) else truth
            close(layer(x), truth.reshape(x.shape))


@pytest.mark.parametrize("name", CASES)
def test_whole_models_answer_like_the_class(tmp_path: Path, name: str) -> None:
    model = build(name, tmp_path)
    ours = load_model_in("fp32", str(tmp_path), device="cpu")
    with torch.no_grad():
        close(ours(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("name", WHOLE_ONLY)
def test_unknown_routers_need_whole_models(tmp_path: Path, name: str) -> None:
    model = build(name, tmp_path)
    report = inspect_model(str(tmp_path), device="cpu")
    assert report.to_json()["score"] is None
    with pytest.raises(ConfigError, match=r"load_model\(\)"):
        load_layer(tmp_path, min(blocks(model)), device="cpu")
    with pytest.raises(ConfigError, match=r"load_model\(\)"):
        load_layer(tmp_path, min(blocks(model)), device="cpu", weights="dummy")


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("afmoe", "mxfp4"),
        ("afmoe", "fp8_channel"),
        ("hy_v4", "mxfp4"),
        ("kolibri1", "mxfp4"),
        ("jetmoe", "mxfp4"),
    ],
)
def test_quantised_copies_load_and_verify(tmp_path: Path, name: str, target: str) -> None:
    model = build(name, tmp_path / "from", moe_intermediate_size=32, intermediate_size=64)
    quantize_model(str(tmp_path / "from"), target, str(tmp_path / "to"))
    report = inspect_model(str(tmp_path / "to"), device="cpu")
    assert {layer.stored.name for layer in report.report.layers} == {target}
    assert verify_model(str(tmp_path / "to"), device="cpu").passed
    ours = load_model_in("fp32", str(tmp_path / "to"), device="cpu")
    with torch.no_grad():
        found, wanted = ours(IDS).logits, model(IDS).logits
    assert 1e-4 < (found - wanted).norm() / wanted.norm() < 0.4


def test_swapped_projections_differ(tmp_path: Path) -> None:
    model = build("afmoe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    swap = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    for name in [name for name in tensors if ".experts." in name]:
        kind = name.split(".")[-2]
        if kind == "gate_proj":
            other = name.replace(kind, swap[kind])
            tensors[name], tensors[other] = tensors[other], tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ours = load_model_in("fp32", str(tmp_path), device="cpu")
    with torch.no_grad():
        assert (ours(IDS).logits - model(IDS).logits).abs().max() > 1e-2 * model(IDS).logits.abs().max()


def test_alternating_rows_of_files_found() -> None:
    """The names that are derived of gpt-oss, the only class with such rows, which has a file."""
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_local_experts": 4, "num_hidden_layers": 1}
    model = class_layers.build("gpt_oss", {"vocab_size": 64, "num_attention_heads": 2, "head_dim": 16, **sizes})
    names = stored_names(model, model.layers[0])
    assert (names.interleaved, names.transposed) == (True, True)
    assert names.stacked == {"gate_up": "mlp.experts.gate_up_proj", "down": "mlp.experts.down_proj"}


def test_tensors_unknown_to_the_class_refused(tmp_path: Path) -> None:
    build("afmoe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.router.second.weight"] = torch.zeros(8, 32)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.router\.second\.weight"):
        load_layer(tmp_path, 1, device="cpu")


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"model_type": "nllb-moe", "num_experts": 4}, "experts.expert_0"),
        ({"model_type": "afmoe", "num_experts": "many"}, "num_experts"),
        ({"model_type": "afmoe", "num_experts": 8, "num_hidden_layers": 1 << 30}, "num_hidden_layers is 1073741824"),
        ({"model_type": "afmoe", "num_experts": 8, "hidden_size": 1 << 17, "head_dim": 16}, "numbers, allowed are"),
    ],
)
def test_underivable_models_refused_by_name(tmp_path: Path, entries: dict[str, object], named: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(entries))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=named):
        load_layer(tmp_path, 0, device="cpu")


def test_several_experts_modules_refused() -> None:
    """ERNIE-4.5-VL, which has a file, has experts of text and of image tokens in a layer."""
    with pytest.raises(ConfigError, match=r"vision_moe\.experts"):
        derived_family({"model_type": "ernie4_5_vl_moe"})


def test_blocks_with_unread_tensors_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that changes nothing on random numbers could change something on others."""
    module = pytest.importorskip("transformers.models.afmoe.modeling_afmoe")
    init: Any = module.AfmoeSparseMoeBlock.__init__

    def with_tensor(block: Any, *arguments: object, **named: object) -> None:
        init(block, *arguments, **named)
        block.second = torch.nn.Linear(3, 5, bias=False)

    monkeypatch.setattr(module.AfmoeSparseMoeBlock, "__init__", with_tensor)
    model = build("afmoe", tmp_path, route_scale=1.3)  # families are cached by config
    with pytest.raises(ConfigError, match=r"second\.weight"):
        load_layer(tmp_path, min(blocks(model)), device="cpu")


@pytest.mark.parametrize(("pair", "difference"), [(False, r"(9\.\d+e-04|1\.0\de-03)"), (True, "inf")])
def test_a_changed_class_is_not_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, pair: bool, difference: str
) -> None:
    """The block is rewritten only while its class computes what the replacement does."""
    module = pytest.importorskip("transformers.models.jetmoe.modeling_jetmoe")
    forward = module.JetMoeMoE.forward

    def scaled(block: object, x: torch.Tensor) -> object:
        out = 1.001 * forward(block, x)
        return (out, None) if pair else out

    monkeypatch.setattr(module.JetMoeMoE, "forward", scaled)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "jetmoe", "num_local_experts": 6}))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"JetMoeMoE .*{difference}"):
        load_layer(tmp_path, 0, device="cpu")


def test_experts_in_two_lists_are_refused(tmp_path: Path) -> None:
    """Encoder and decoder of DiffusionGemma have experts in layers of the same numbers."""
    transformers: Any = pytest.importorskip("transformers")
    if "diffusion_gemma" not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no diffusion_gemma")
    config = tiny_config(transformers, "diffusion_gemma")
    transformers.DiffusionGemmaForBlockDiffusion(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_model_in("fp32", str(tmp_path), device="cpu")
    assert "encoder" in str(caught.value)
    assert "decoder" in str(caught.value)
