"""LoRA adapters as PEFT writes them, merged into what is read: a model on disk against the merged model's numbers."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

from collegium import load_layer
from collegium.checkpoint import Checkpoint, CheckpointLayer, TensorStream, audit, load_experts, with_adapter
from collegium.errors import (
    BadScaleError,
    CheckpointError,
    ConfigError,
    DuplicateTensorError,
    MissingTensorError,
    TensorMismatchError,
)
from collegium.integrations.transformers import load_model
from collegium.integrations.transformers.loading import load_model_in
from collegium.parallel.fingerprint import fingerprint
from collegium.parallel.placement import linear
from collegium.placement import Placement
from collegium.testing.compare import heavy_tailed
from commands import command
from family_cases import CASES, build
from lora_files import ALPHA, KINDS, LAYERS, PROJECTIONS, RANK, E, H, model_of, stacks, write
from raising import assert_values, raises_with

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor


def merge(model: Any, adapter: dict[str, Tensor], scale: float) -> None:
    """Add to the model's own parameters, in float64, rounded once."""
    for layer, block in enumerate(model.model.layers):
        head, experts = f"base_model.model.model.layers.{layer}.", block.mlp.experts
        wanted = {
            "mlp.experts.base_layer": experts.gate_up_proj,
            "mlp.experts": experts.down_proj,
            "self_attn.q_proj": block.self_attn.q_proj.weight,
        }
        for path, parameter in wanted.items():
            a, b = (adapter[f"{head}{path}.lora_{half}.weight"].double() for half in "AB")
            if parameter.dim() == 2:
                added = b @ a
            else:
                a, b = a.reshape(E, -1, a.shape[-1]), b.reshape(b.shape[0], -1, E)
                form = "o r e, e r i -> e i o" if experts.is_transposed else "o r e, e r i -> e o i"
                added = torch.einsum(form, b, a)
            with torch.no_grad():
                parameter.copy_((parameter.double() + scale * added).to(parameter.dtype))


def close(found: Tensor, wanted: Tensor) -> None:
    """Equal, but for sums that float32 rounds to the other side of a tie."""
    step = torch.finfo(wanted.dtype).eps * (4 if wanted.dtype == torch.float32 else 1)
    far = (found.double() - wanted.double()).abs() > step * wanted.double().abs().clamp(min=1.0)
    assert not bool(far.any())
    assert wanted.dtype == torch.float32 or int((found != wanted).sum()) <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_adapter_matches_merged_model(
    kind: str, dtype: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of(kind, tmp_path / "base", dtype)
    tensors = stacks(model)
    adapter = write(tmp_path / "adapter", tensors)
    merge(model, tensors, ALPHA / RANK)
    model.save_pretrained(tmp_path / "merged")
    base, wanted = Checkpoint.open(tmp_path / "base"), Checkpoint.open(tmp_path / "merged")
    found = with_adapter(base, adapter)
    assert_values(caplog.text, "rank 3", "2.33333", "10 experts", "0 to 1", "q_proj")
    assert sorted(found.tensors) == sorted(wanted.tensors)
    for name in wanted.tensors:
        close(found.read(name), wanted.read(name))
    changed = [name for name in wanted.tensors if not torch.equal(found.read(name), base.read(name))]
    assert sum("experts" in name for name in changed) == LAYERS * (2 if kind == "gpt_oss" else 3 * E)
    assert sum("q_proj" in name for name in changed) == LAYERS
    for number in range(LAYERS):
        whole = load_experts(CheckpointLayer.open(found, number), linear(E))
        parts = [load_experts(CheckpointLayer.open(found, number), linear(E, rank, 3)) for rank in range(3)]
        for which in ("gate_up", "down"):
            joined = torch.cat([getattr(part, which).decode() for part in parts])
            assert torch.equal(joined, getattr(whole, which).decode())


def test_streamed_tensors_are_merged(tmp_path: Path) -> None:
    adapter = write(tmp_path / "adapter", stacks(model_of("gpt_oss", tmp_path / "base")))
    base = Checkpoint.open(tmp_path / "base")
    arrived = TensorStream(base.config, [(name, base.read(name)) for name in reversed([*base.tensors])])
    found, wanted = (with_adapter(each, adapter) for each in (arrived.checkpoint, base))
    for name in base.tensors:
        assert torch.equal(found.read(name), wanted.read(name))
    for number in range(LAYERS):
        opened = (CheckpointLayer.open(each, number) for each in (found, wanted))
        assert len({fingerprint(layer.checkpoint, layer.expert_tensors.infos()) for layer in opened}) == 1


def test_tp_slices_match_whole_bitwise(tmp_path: Path) -> None:
    model = model_of("gpt_oss", tmp_path / "base")
    found = with_adapter(Checkpoint.open(tmp_path / "base"), write(tmp_path / "adapter", stacks(model)))
    layer = CheckpointLayer.open(found, 1)
    whole = load_experts(layer, Placement(expert_ids=(3, 1)))
    for rank in range(2):
        half = load_experts(layer, Placement(expert_ids=(3, 1), tp_rank=rank, tp_size=2))
        cut = slice(rank * H // 2, (rank + 1) * H // 2)
        assert torch.equal(half.gate_up.decode(), whole.gate_up.decode()[:, :, cut])
        assert torch.equal(half.down.decode(), whole.down.decode()[..., cut])


@pytest.mark.parametrize("kind", KINDS)
def test_logits_match_merged_model(kind: str, tmp_path: Path) -> None:
    model = model_of(kind, tmp_path / "base", torch.float32)
    tensors = stacks(model)
    adapter = write(tmp_path / "adapter", tensors, use_rslora=True)
    ids = torch.arange(20).view(2, 10)
    with torch.inference_mode():
        plain = model(ids).logits
        merge(model, tensors, ALPHA / RANK**0.5)
        wanted = model(ids).logits
        for _ in range(2):
            found = load_model_in("fp32", tmp_path / "base", device="cpu", adapter=adapter)(ids).logits
            assert float((found - wanted).norm() / wanted.norm()) < 1e-5
        assert float((plain - wanted).norm() / wanted.norm()) > 0.1


@pytest.mark.parametrize("wrapped", [False, True])
def test_single_experts_and_wrapped_bases(wrapped: bool, tmp_path: Path) -> None:
    model_of("qwen3_moe", tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    plain, tensors = load_file(file), dict[str, torch.Tensor]()
    for name, weight in plain.items():
        if ".experts." in name and ".3." in name:
            head = f"base_model.model.{name.removesuffix('weight')}"
            tensors[f"{head}lora_A.weight"] = heavy_tailed(RANK, weight.shape[1], seed=len(tensors)).bfloat16()
            tensors[f"{head}lora_B.weight"] = heavy_tailed(weight.shape[0], RANK, seed=len(tensors)).bfloat16()
    assert len(tensors) == 6 * LAYERS
    if wrapped:
        names = {n: n.replace("_proj.", "_proj.base_layer.") if ".experts.3." in n else n for n in plain}
        save_file({f"base_model.model.{names[n]}": t for n, t in plain.items()}, file, metadata={"format": "pt"})
    base = Checkpoint.open(tmp_path / "base")
    audit(base)
    found = with_adapter(base, write(tmp_path / "adapter", tensors, target_modules=list(PROJECTIONS)))
    for name, weight in plain.items():
        head = f"base_model.model.{name.removesuffix('weight')}"
        if f"{head}lora_A.weight" in tensors:
            a, b = (tensors[f"{head}lora_{half}.weight"].double() for half in "AB")
            close(found.read(name), (weight.double() + ALPHA / RANK * (b @ a)).bfloat16())
        else:
            assert torch.equal(found.read(name), weight)
    x = heavy_tailed(6, H, seed=1).bfloat16()
    one, other = (load_layer(each, 1, device="cpu")(x) for each in (base, found))
    assert not torch.equal(one, other)


def test_wrapped_and_plain_names_are_duplicates(tmp_path: Path) -> None:
    model_of("qwen3_moe", tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    name = "model.layers.0.mlp.experts.0.gate_proj"
    tensors = load_file(file)
    tensors[f"{name}.base_layer.weight"] = tensors[f"{name}.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    with raises_with(DuplicateTensorError, "base_layer"):
        Checkpoint.open(tmp_path / "base")


def test_generate_matches_merged_model(tmp_path: Path) -> None:
    model = model_of("qwen3_moe", tmp_path / "base")
    tensors = stacks(model)
    adapter = write(tmp_path / "adapter", tensors)
    merge(model, tensors, ALPHA / RANK)
    model.save_pretrained(tmp_path / "merged")
    letters = tokenizers.models.WordLevel({chr(65 + at): at for at in range(40)}, unk_token="A")
    own = tokenizers.Tokenizer(letters)
    own.pre_tokenizer, own.decoder = tokenizers.pre_tokenizers.Split("", "isolated"), tokenizers.decoders.Fuse()
    texts: list[str] = []
    for folder, more in (("merged", ()), ("base", ("--adapter", adapter)), ("base", ())):
        own.save(str(tmp_path / folder / "tokenizer.json"))
        asked = ("generate", tmp_path / folder, "--prompt", "DEF", "--tokens", 16, "--device", "cpu", "--json")
        code, out, said = command(*asked, *more)
        assert code == 0, (said, out)
        texts.append(json.loads(out)["text"])
    assert texts[0] == texts[1] != texts[2]
    code, _, said = command("generate", tmp_path / "base", "--adapter", tmp_path / "absent", "--device", "cpu")
    assert code == 1
    assert "absent/adapter_config.json" in said


FIRST = "base_model.model.model.layers.0.mlp.experts"


def save_q_proj(tensors: dict[str, Tensor]) -> None:
    """Put ``q_proj`` of the first layer into the adapter in full, next to its pair."""
    tensors["base_model.model.model.layers.0.self_attn.q_proj.weight"] = torch.ones(24, 24)


FAULTS: dict[str, tuple[type[CheckpointError], str, Callable[[dict[str, Tensor]], object], dict[str, Any]]] = {
    "half": (MissingTensorError, r"experts\.lora_B\.weight missing", lambda t: t.pop(f"{FIRST}.lora_B.weight"), {}),
    "rank": (
        TensorMismatchError,
        r"gate_up_proj: lora_A and lora_B are \(15, 24\).*\(20, 24\)",
        lambda _: None,
        {"r": 4},
    ),
    "nan": (BadScaleError, "holds NaN", lambda t: t[f"{FIRST}.lora_A.weight"].fill_(torch.nan), {}),
    "target": (
        ConfigError,
        r"the adapter has model\.layers\.0\.mlp\.down_proj, the checkpoint no model\.layers\.0\.mlp\.down_proj\.weight",
        lambda t: t.update(
            {
                "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight": torch.ones(RANK, 4),
                "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight": torch.ones(4, RANK),
            }
        ),
        {},
    ),
    "magnitude": (
        ConfigError,
        "lora_magnitude_vector.*known are",
        lambda t: t.update({f"{FIRST}.lora_magnitude_vector.weight": torch.ones(4)}),
        {},
    ),
    "dora": (ConfigError, "use_dora=True is not implemented.*merge_and_unload", lambda _: None, {"use_dora": True}),
    "bias": (ConfigError, "bias='all' is not implemented", lambda _: None, {"bias": "all"}),
    "pissa": (ConfigError, "init_lora_weights='pissa'", lambda _: None, {"init_lora_weights": "pissa"}),
    "pattern": (ConfigError, "rank_pattern=", lambda _: None, {"rank_pattern": {"q_proj": 0}}),
    "alphas": (ConfigError, "alpha_pattern=", lambda _: None, {"alpha_pattern": {"q_proj": "8"}}),
    "expression": (ConfigError, "pattern.*cannot be used", lambda _: None, {"rank_pattern": {"q_proj(": 3}}),
    "ranks": (TensorMismatchError, r"q_proj.*\(8, 24\)", lambda _: None, {"rank_pattern": {"q_proj": 8}}),
    "excluded": (ConfigError, "q_proj.*exclude_modules", lambda _: None, {"exclude_modules": ["q_proj"]}),
    "layers": (ConfigError, "q_proj.*layers_to_transform", lambda _: None, {"layers_to_transform": [1]}),
    "saved": (ConfigError, "q_proj.*modules_to_save", save_q_proj, {"modules_to_save": ["q_proj"]}),
    "lost": (MissingTensorError, "lm_head.*no such tensor", lambda _: None, {"modules_to_save": ["lm_head"]}),
    "whole": (ConfigError, r"q_proj\.weight.*modules_to_save", save_q_proj, {}),
    "none": (ConfigError, "r=0", lambda _: None, {"r": 0}),
    "infinite": (ConfigError, "lora_alpha=inf", lambda _: None, {"lora_alpha": float("inf")}),
    "empty": (MissingTensorError, "holds no lora_A and lora_B", lambda t: t.clear(), {}),
    "old": (
        TensorMismatchError,
        r"gate_up_proj.*\(15, 40\) and \(24, 15\).*does not swap",
        lambda _: None,
        {"peft_version": "0.18.1"},
    ),
    "unknown": (ConfigError, "peft_version is no release", lambda _: None, {"peft_version": "0.19.0.dev0"}),
    "versionless": (ConfigError, "peft_version is no release", lambda _: None, {"peft_version": None}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_unmergeable_adapters_refused_by_name(fault: str, tmp_path: Path) -> None:
    kind, message, edit, config = FAULTS[fault]
    tensors = stacks(model_of("qwen3_moe", tmp_path / "base"))
    with_adapter(Checkpoint.open(tmp_path / "base"), write(tmp_path / "adapter", tensors))
    edit(tensors)
    with pytest.raises(kind, match=message):
        load_model(tmp_path / "base", device="cpu", adapter=write(tmp_path / "adapter", tensors, **config))


def test_layers_outside_the_text_model(tmp_path: Path) -> None:
    model_of("qwen3_moe", tmp_path / "base")
    file, path = tmp_path / "base" / "model.safetensors", "layers.0.mlp.experts.3.gate_proj"
    plain = load_file(file)
    plain[f"mtp.{path}.weight"] = heavy_tailed(20, H, seed=9).bfloat16()
    save_file(plain, file, metadata={"format": "pt"})
    pair = {"A": heavy_tailed(RANK, H, seed=3), "B": heavy_tailed(20, RANK, seed=4)}
    tensors = {f"base_model.model.mtp.{path}.lora_{half}.weight": tensor for half, tensor in pair.items()}
    found = with_adapter(Checkpoint.open(tmp_path / "base"), write(tmp_path / "adapter", tensors))
    added = ALPHA / RANK * (pair["B"].double() @ pair["A"].double())
    close(found.read(f"mtp.{path}.weight"), (plain[f"mtp.{path}.weight"].double() + added).bfloat16())
    assert torch.equal(found.read(f"model.{path}.weight"), plain[f"model.{path}.weight"])


@pytest.mark.parametrize("wide", [24, 32])
def test_stack_parameters_are_named(tmp_path: Path, wide: int) -> None:
    """Up and down of experts without a gate may have the same size; the configuration settles which a pair is of."""
    case = CASES["nemotron_h"]
    build(replace(case, text={**case.text, "moe_intermediate_size": wide}), tmp_path / "base")
    head = "base_model.model.model.layers.1.mixer.experts"
    base = Checkpoint.open(tmp_path / "base")
    for target, rows, columns in (("up", wide, 32), ("down", 32, wide)):
        tensors = {
            f"{head}.lora_A.weight": heavy_tailed(8 * RANK, columns, seed=1),
            f"{head}.lora_B.weight": heavy_tailed(rows, 8 * RANK, seed=2),
        }
        entries = {"target_modules": [], "target_parameters": [f"experts.{target}_proj"]}
        found = with_adapter(base, write(tmp_path / "adapter", tensors, **entries))
        a, b = (tensor.double() for tensor in tensors.values())
        added = ALPHA / RANK * (b.view(rows, RANK, 8)[..., 2] @ a.view(8, RANK, columns)[2])
        for which in ("up", "down"):
            name = f"backbone.layers.1.mixer.experts.2.{which}_proj.weight"
            weight = base.read(name)
            close(found.read(name), (weight.double() + added).to(weight.dtype) if which == target else weight)
        with raises_with(ConfigError, "1", "up_proj", "down_proj"):
            with_adapter(base, write(tmp_path / "adapter", tensors, target_parameters=None))


def test_quantised_experts_refused_with_advice(tmp_path: Path) -> None:
    tensors = stacks(model_of("qwen3_moe", tmp_path / "base"))
    adapter = write(tmp_path / "adapter", tensors)
    assert command("quantize", tmp_path / "base", "--to", "fp8_channel", "--out", tmp_path / "fp8")[0] == 0
    with raises_with(ConfigError, "F8_E4M3", "BF16", "bf16"):
        with_adapter(Checkpoint.open(tmp_path / "fp8"), adapter)
    layers = [
        load_layer(with_adapter(Checkpoint.open(tmp_path / "base"), adapter), 0, device="cpu", weight_format=form)
        for form in (None, "fp8_channel")
    ]
    x = heavy_tailed(9, H, seed=3).bfloat16()
    one, two = (layer(x).float() for layer in layers)
    assert 0 < float((one - two).norm() / one.norm()) < 0.2


def test_fingerprint_covers_adapter(tmp_path: Path) -> None:
    tensors = stacks(model_of("qwen3_moe", tmp_path / "base"))
    base = Checkpoint.open(tmp_path / "base")
    seen: list[str] = []
    for name in ("one", "same", "other"):
        if name == "other":
            tensors[f"{FIRST}.lora_B.weight"][0, 0] += 1
        layer = CheckpointLayer.open(with_adapter(base, write(tmp_path / name, tensors)), 1)
        seen.append(fingerprint(layer.checkpoint, layer.expert_tensors.infos()))
    plain = CheckpointLayer.open(base, 1)
    assert seen[0] == seen[1]
    assert len({*seen, fingerprint(base, plain.expert_tensors.infos())}) == 3


def test_scale_applies_only_to_adapter(tmp_path: Path) -> None:
    tensors = stacks(model_of("gpt_oss", tmp_path / "base", torch.float32))
    base, name = Checkpoint.open(tmp_path / "base"), "model.layers.0.mlp.experts.down_proj"
    added = [
        with_adapter(base, write(tmp_path / "adapter", tensors, **entries)).read(name).double() - base.read(name)
        for entries in ({"lora_alpha": 3}, {"lora_alpha": 12}, {"lora_alpha": 3, "use_rslora": True})
    ]
    for other, factor in zip(added[1:], (4, RANK**0.5), strict=True):
        assert float((other - factor * added[0]).norm() / other.norm()) < 1e-5


def added_of(tensors: dict[str, Tensor], path: str) -> Tensor:
    """B @ A of a module, in float64."""
    a, b = (tensors[f"base_model.model.{path}.lora_{half}.weight"].double() for half in "AB")
    return b @ a


# Patterns, the rank and the alpha that PEFT gives q_proj of layer 1, and those that it gives the others.
PATTERNS: dict[str, tuple[dict[str, Any], tuple[int, float], tuple[int, float]]] = {
    "plain": ({"rank_pattern": {"1.self_attn.q_proj": 5}}, (5, ALPHA), (RANK, ALPHA)),
    "first match wins": (
        {"rank_pattern": {r"layers\.1\..*q_proj": 5, "q_proj": 4}, "alpha_pattern": {"q_proj": 2}},
        (5, 2.0),
        (4, 2.0),
    ),
    "anchored at a dot": (
        {"rank_pattern": {"proj": 9, "_proj": 9, "attn.q_proj": 9, "self_attn.q": 9}},
        (3, 7.0),
        (3, 7.0),
    ),
    "from the beginning": ({"alpha_pattern": {r"^model\.layers\.1\.self_attn\.q_proj": 3}}, (3, 3.0), (3, 7.0)),
    "alternatives": ({"rank_pattern": {"k_proj|1.self_attn.q_proj": 6}}, (6, 7.0), (3, 7.0)),
    "a whole name": ({"alpha_pattern": {"model.layers.1.self_attn.q_proj": 0.5}}, (3, 0.5), (3, 7.0)),
    "parameters do not count": ({"rank_pattern": {"q_proj.weight": 9}}, (3, 7.0), (3, 7.0)),
}


@pytest.mark.parametrize("rooted", [False, True])
@pytest.mark.parametrize("case", PATTERNS)
def test_patterns_of_ranks_and_alphas(case: str, rooted: bool, tmp_path: Path) -> None:
    entries, *ranks = PATTERNS[case]
    model_of("qwen3_moe", tmp_path / "base", torch.float32)
    paths = ["model.layers.1.self_attn.q_proj", "model.layers.0.self_attn.q_proj"]
    tensors = dict[str, torch.Tensor]()
    for path, (rank, _) in zip(paths, ranks, strict=True):
        tensors[f"base_model.model.{path}.lora_A.weight"] = heavy_tailed(rank, H, seed=rank)
        tensors[f"base_model.model.{path}.lora_B.weight"] = heavy_tailed(24, rank, seed=rank + 1)
    base = Checkpoint.open(tmp_path / "base")
    found = with_adapter(base, write(tmp_path / "adapter", tensors, use_rslora=rooted, **entries))
    for path, (rank, alpha) in zip(paths, ranks, strict=True):
        scale = alpha / (rank**0.5 if rooted else rank)
        close(
            found.read(f"{path}.weight"),
            (base.read(f"{path}.weight").double() + scale * added_of(tensors, path)).float(),
        )


def test_alpha_pattern_matches_stack_parameters(tmp_path: Path) -> None:
    model = model_of("gpt_oss", tmp_path / "base", torch.float32)
    tensors = stacks(model)
    base = Checkpoint.open(tmp_path / "base")
    one = with_adapter(base, write(tmp_path / "one", tensors))
    two = with_adapter(base, write(tmp_path / "two", tensors, alpha_pattern={r"0\.mlp\.experts\.down_proj": 2 * ALPHA}))
    for layer in range(LAYERS):
        for which in ("gate_up_proj", "down_proj"):
            name = f"model.layers.{layer}.mlp.experts.{which}"
            steps = [found.read(name).double() - base.read(name) for found in (one, two)]
            factor = 2 if (layer, which) == (0, "down_proj") else 1
            assert float((steps[1] - factor * steps[0]).norm() / steps[1].norm()) < 1e-5


def test_rank_and_alpha_default_to_8(tmp_path: Path) -> None:
    model_of("qwen3_moe", tmp_path / "base", torch.float32)
    path = "model.layers.0.self_attn.q_proj"
    tensors = {
        f"base_model.model.{path}.lora_A.weight": heavy_tailed(8, H, seed=1),
        f"base_model.model.{path}.lora_B.weight": heavy_tailed(24, 8, seed=2),
    }
    adapter = write(tmp_path / "adapter", tensors)
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "target_modules": ["q_proj"]}))
    base = Checkpoint.open(tmp_path / "base")
    wanted = base.read(f"{path}.weight").double() + added_of(tensors, path)
    close(with_adapter(base, adapter).read(f"{path}.weight"), wanted.float())


# Entries, and which of q_proj and k_proj of layers 0 and 1 PEFT attaches an adapter to.
SELECTED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "a list": ({"target_modules": ["q_proj", "k_proj"]}, {"0q", "0k", "1q", "1k"}),
    "an expression": ({"target_modules": r".*\.(q|k)_proj", "exclude_modules": r".*0.*k_proj"}, {"0q", "1q", "1k"}),
    "all": ({"target_modules": "all-linear", "exclude_modules": ["k_proj"]}, {"0q", "1q"}),
    "excluded by a tail": (
        {"target_modules": ["q_proj", "k_proj"], "exclude_modules": ["0.self_attn.k_proj"]},
        {"0q", "1q", "1k"},
    ),
    "layers": ({"target_modules": ["q_proj", "k_proj"], "layers_to_transform": 1}, {"1q", "1k"}),
    "layers below a pattern": (
        {"target_modules": ["q_proj", "k_proj"], "layers_to_transform": [0], "layers_pattern": ["h", "layers"]},
        {"0q", "0k"},
    ),
    "a whole name in no layer": (
        {"target_modules": ["model.layers.0.self_attn.q_proj", "q_proj", "k_proj"], "layers_to_transform": [1]},
        {"0q", "1q", "1k"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SELECTED)
def test_module_selection_matches_peft(case: str, tmp_path: Path) -> None:
    """Every pair that an entry selects is merged, and every one that an entry excludes is refused."""
    entries, selected = SELECTED[case]
    model_of("qwen3_moe", tmp_path / "base", torch.float32)
    base = Checkpoint.open(tmp_path / "base")
    for layer, which in ((0, "q"), (0, "k"), (1, "q"), (1, "k")):
        path = f"model.layers.{layer}.self_attn.{which}_proj"
        tensors = {
            f"base_model.model.{path}.lora_A.weight": heavy_tailed(RANK, H, seed=1),
            f"base_model.model.{path}.lora_B.weight": heavy_tailed(base.info(f"{path}.weight").shape[0], RANK, seed=2),
        }
        adapter = write(tmp_path / "adapter", tensors, target_parameters=None, **entries)
        if f"{layer}{which}" not in selected:
            with pytest.raises(ConfigError, match=rf"{which}_proj.*(exclude_modules|layers_to_transform)"):
                with_adapter(base, adapter)
            continue
        wanted = base.read(f"{path}.weight").double() + ALPHA / RANK * added_of(tensors, path)
        close(with_adapter(base, adapter).read(f"{path}.weight"), wanted.float())


@pytest.mark.parametrize("case", SELECTED)
def test_peft_selects_the_same_modules(case: str) -> None:
    peft = pytest.importorskip("peft")
    exists = importlib.import_module("peft.tuners.tuners_utils").check_target_module_exists
    entries, selected = SELECTED[case]
    if entries["target_modules"] == "all-linear":
        entries = entries | {"target_modules": ["q_proj", "k_proj"]}  # what PEFT makes of it for this model
    config = peft.LoraConfig(**entries)
    keys = {f"{layer}{which}": f"model.layers.{layer}.self_attn.{which}_proj" for layer in range(2) for which in "qk"}
    found = {short for short, key in keys.items() if exists(config, key)}
    assert found == selected


@pytest.mark.parametrize("case", PATTERNS)
def test_peft_matches_patterns_alike(case: str) -> None:
    pytest.importorskip("peft")
    match = importlib.import_module("peft.utils.other").get_pattern_key
    entries, *wanted = PATTERNS[case]
    ranks, alphas = entries.get("rank_pattern", {}), entries.get("alpha_pattern", {})
    for layer, pair in ((1, wanted[0]), (0, wanted[1])):
        key = f"model.layers.{layer}.self_attn.q_proj"
        assert (ranks.get(match(ranks, key), RANK), alphas.get(match(alphas, key), ALPHA)) == pair


def test_untargeted_pairs_merged_with_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = stacks(model_of("qwen3_moe", tmp_path / "base"))
    base = Checkpoint.open(tmp_path / "base")
    found = with_adapter(base, write(tmp_path / "adapter", tensors, target_modules=["k_proj"]))
    assert_values(caplog.text, "model.layers.0.self_attn.q_proj", "1 more")
    name = "model.layers.1.self_attn.q_proj.weight"
    assert not torch.equal(found.read(name), base.read(name))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_modules_to_save_replace_base_weights(dtype: torch.dtype, tmp_path: Path) -> None:
    model = model_of("qwen3_moe", tmp_path / "base", dtype)
    tensors = stacks(model)
    head, norm = heavy_tailed(40, H, seed=3), heavy_tailed(H, 1, seed=4)[:, 0].contiguous()
    tensors |= {"base_model.model.lm_head.weight": head, "base_model.model.model.norm.weight": norm}
    # What PEFT writes next to the adapter of an embedding: the base weight itself.
    path, base = "model.layers.0.self_attn.q_proj", Checkpoint.open(tmp_path / "base")
    tensors[f"base_model.model.{path}.base_layer.weight"] = base.read(f"{path}.weight")
    found = with_adapter(base, write(tmp_path / "adapter", tensors, modules_to_save=["lm_head", "norm"]))
    assert torch.equal(found.read("lm_head.weight"), head.to(dtype))
    assert torch.equal(found.read_slice("lm_head.weight", (slice(3, 7), slice(0, 5))), head[3:7, :5].to(dtype))
    assert torch.equal(found.read("model.norm.weight"), norm.to(dtype))
    close(
        found.read(f"{path}.weight"),
        (base.read(f"{path}.weight").double() + ALPHA / RANK * added_of(tensors, path)).to(dtype),
    )
    wrong = tensors | {"base_model.model.lm_head.weight": heavy_tailed(41, H, seed=3)}
    with pytest.raises(TensorMismatchError, match=r"\(41, 24\).*\(40, 24\)"):
        with_adapter(base, write(tmp_path / "wrong", wrong, modules_to_save=["lm_head", "norm"]))


def test_adapter_on_tied_head_refused(tmp_path: Path) -> None:
    model_of("qwen3_moe", tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    tensors = {
        "base_model.model.lm_head.lora_A.weight": heavy_tailed(RANK, H, seed=1),
        "base_model.model.lm_head.lora_B.weight": heavy_tailed(40, RANK, seed=2),
    }
    adapter = write(tmp_path / "adapter", tensors, target_modules=["lm_head"])
    with_adapter(Checkpoint.open(tmp_path / "base"), adapter)
    (tmp_path / "base" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(ConfigError, match=r"lm_head.*tie_word_embeddings"):
        with_adapter(Checkpoint.open(tmp_path / "base"), adapter)


def test_adapters_stack_in_sequence(tmp_path: Path) -> None:
    tensors = stacks(model_of("qwen3_moe", tmp_path / "base", torch.float32))
    base = Checkpoint.open(tmp_path / "base")
    first = write(tmp_path / "first", tensors)
    second = write(tmp_path / "second", tensors, lora_alpha=-2 * ALPHA)
    found = with_adapter(with_adapter(base, first), second)
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.experts.4.down_proj.weight"):
        once = with_adapter(base, first).read(name).double() - base.read(name)
        assert float((found.read(name).double() - base.read(name) + once).norm() / once.norm()) < 1e-5
    assert len({found.merged, with_adapter(base, first).merged, with_adapter(base, second).merged}) == 3


def test_a_convolution_is_no_matrix(tmp_path: Path) -> None:
    model_of("qwen3_moe", tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    save_file(load_file(file) | {"model.layers.0.conv1d.weight": torch.ones(6, 1, 4)}, file, metadata={"format": "pt"})
    tensors = {
        "base_model.model.model.layers.0.conv1d.lora_A.weight": torch.ones(RANK, 4),
        "base_model.model.model.layers.0.conv1d.lora_B.weight": torch.ones(1, RANK),
    }
    with raises_with(ConfigError, "(6, 1, 4)"):
        with_adapter(
            Checkpoint.open(tmp_path / "base"), write(tmp_path / "adapter", tensors, target_modules=["conv1d"])
        )


def test_files_that_take_no_adapter(tmp_path: Path) -> None:
    tensors = stacks(model_of("qwen3_moe", tmp_path / "base"))
    adapter, base = write(tmp_path / "adapter", tensors), Checkpoint.open(tmp_path / "base")
    with pytest.raises(ConfigError, match="GGUF"):
        with_adapter(Checkpoint(tmp_path / "model.gguf", {"model_type": "gguf:llama"}, {}), adapter)
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"adapter_model\.bin"):
        with_adapter(base, adapter)


@pytest.mark.parametrize("name", [
    "model.layers.1.self_attn.q_proj.lora_{}.weight",
    "base_model.model.base_model.model.model.layers.1.self_attn.q_proj.lora_{}.weight",
    "base_model.model.model.language_model.layers.1.self_attn.q_proj.lora_{}.weight",
    "base_model.model.language_model.model.layers.1.self_attn.q_proj.lora_{}.weight",
    "base_model.model.layers.1.self_attn.q_proj.lora_{}.weight",
    "base_model.model.model.layers.1.self_attn.q_proj.lora_{}.default.weight",
    "base_model.model._orig_mod.model.layers.1._checkpoint_wrapped_module.self_attn.q_proj.lora_{}.weight",
])  # fmt: skip
def test_prefixes_and_wrappers_in_names(name: str, tmp_path: Path) -> None:
    model_of("qwen3_moe", tmp_path / "base", torch.float32)
    a, b = heavy_tailed(RANK, H, seed=1), heavy_tailed(24, RANK, seed=2)
    adapter = write(tmp_path / "adapter", {name.format("A"): a, name.format("B"): b})
    base, key = Checkpoint.open(tmp_path / "base"), "model.layers.1.self_attn.q_proj.weight"
    close(
        with_adapter(base, adapter).read(key),
        (base.read(key).double() + ALPHA / RANK * (b.double() @ a.double())).float(),
    )
    prefix = "base_model.model.thinker.model.layers.1.self_attn.q_proj.lora_"
    pair = {name.format("A"): a, name.format("B"): b, f"{prefix}A.weight": a.clone(), f"{prefix}B.weight": b.clone()}
    with pytest.raises(DuplicateTensorError, match="q_proj"):
        with_adapter(base, write(tmp_path / "twice", pair))
