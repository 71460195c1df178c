"""Absent and null config entries: a config without them describes what the model's own configuration class takes.

Every class of the installed transformers that a family answers to is asked, entry by entry; nothing here repeats the
tables of defaults.
"""

from __future__ import annotations

import json
import random
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from collegium import load_layer
from collegium.checkpoint import Checkpoint, audit
from collegium.commands.bench import named_layer
from collegium.commands.inspect import inspect_model, plan_model
from collegium.errors import ConfigError, MissingTensorError, SpecError
from collegium.integrations.transformers import load_model
from collegium.integrations.transformers.loading import load_model_in
from collegium.models import FAMILIES, describe, family_of, moe_layers, text_of
from family_cases import CASES, IDS, build
from raising import raises_with
from whole_models import eager

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

transformers = pytest.importorskip("transformers")

TYPES = [name for family in FAMILIES for name in family.model_types if not name.startswith("gguf:")]
CLASSES = [name for name in TYPES if name in transformers.CONFIG_MAPPING]
# Values without which the class's default describes no MoE layer.
NEEDED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gemma4": {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64},
    "hunyuan_v1_moe": {"num_experts": 8},
}
NEEDED["gemma4_text"] = NEEDED["gemma4"]
WITHOUT_CLASS = {
    "arctic", "deepseek_v41", "deepseek_vl_v2", "kimi_k2", "kimi_k3", "minimax_m1", "minimax_m3", "minimax_text_01",
    "minimax_vl_01", "step3_text", "step3_vl", "step3p7_text",
}  # fmt: skip


def text(config: dict[str, Any]) -> dict[str, Any]:
    """Return the text part of a config, which the caller may change."""
    part: Any = text_of(config)
    return part


def resolved(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config as the class of its model type completes it; raises what the class raises."""
    whole = transformers.CONFIG_MAPPING[config["model_type"]](**deepcopy(config)).to_dict()
    return json.loads(json.dumps({**whole, "model_type": config["model_type"]}, default=str))


def full(kind: str) -> dict[str, Any]:
    """Return the class's default config with every entry stated, and what an MoE layer needs besides."""
    config = json.loads(json.dumps({**transformers.CONFIG_MAPPING[kind]().to_dict(), "model_type": kind}, default=str))
    text(config).update(NEEDED.get(kind, {}))
    return config


def description(config: dict[str, Any]) -> Any:
    """Return the layers with routed experts and the specs of the first and the last; ConfigError without any."""
    describe(config)
    layers = moe_layers(config)
    return layers, [describe(config, layer) for layer in (layers[0], layers[-1])]


def test_classes_cover_model_types() -> None:
    assert set(TYPES) - set(CLASSES) <= WITHOUT_CLASS


@pytest.mark.parametrize("kind", CLASSES)
def test_absent_entry_has_default(kind: str) -> None:
    config = full(kind)
    wanted = description(config)
    for key in [key for key in text(config) if key != "model_type"]:
        rest = deepcopy(config)
        del text(rest)[key]
        if key in NEEDED.get(kind, {}) and key != "enable_moe_block" and kind != "hunyuan_v1_moe":
            with pytest.raises(ConfigError, match=key):
                describe(rest)
            continue
        try:
            truth = description(resolved(rest))
        except ConfigError:  # no layer has routed experts
            with pytest.raises(ConfigError):
                description(rest)
            continue
        assert description(rest) == truth, key
        if key not in NEEDED.get(kind, {}):
            assert truth == wanted, key


@pytest.mark.parametrize("kind", CLASSES)
def test_absent_entries_have_defaults(kind: str) -> None:
    config, chance = full(kind), random.Random(kind)
    keys = [key for key in text(config) if key not in ("model_type", *NEEDED.get(kind, {}))]
    for share in (0.3, 0.6, 0.9, 1.0):
        rest = deepcopy(config)
        for key in chance.sample(keys, round(share * len(keys))):
            del text(rest)[key]
        assert description(rest) == description(resolved(rest))


WRAPPERS = [name for name in CLASSES if "model_type" in text(full(name)) and text(full(name)) != full(name)]


def changed(value: Any) -> Any:
    """Return another value of the same type, None where the kind has none."""
    if isinstance(value, bool):
        return not value
    return value * 2 if isinstance(value, int) else value * 1.5 if isinstance(value, float) else None


@pytest.mark.parametrize("kind", CLASSES)
def test_alias_states_entry(kind: str) -> None:
    """The class reads some entries under a second name as well."""
    config = full(kind)
    cls = transformers.CONFIG_MAPPING[str(text(config).get("model_type") or kind)]
    for alias, key in cls.attribute_map.items():
        if (kind[:6], alias) == ("step3p", "num_local_experts"):  # a field as well, which the class never reads
            continue
        if key not in text(config) or (value := changed(text(config)[key])) is None:
            continue
        rest = deepcopy(config)
        del text(rest)[key]
        text(rest)[alias] = value
        assert description(rest) == description(resolved(rest)), alias


@pytest.mark.parametrize("kind", CLASSES)
def test_null_is_kept_or_refused(kind: str) -> None:
    config = full(kind)
    for key in [key for key in text(config) if key != "model_type"]:
        nulled = deepcopy(config)
        text(nulled)[key] = None
        try:
            found = description(nulled)
        except (ConfigError, SpecError):
            continue
        try:
            truth = description(resolved(nulled))
        except Exception:
            # Only entries that no experts depend on may be null where the class allows none.
            assert found == description(config), key
            continue
        assert found == truth, key


@pytest.mark.parametrize("kind", WRAPPERS)
def test_wrapper_fixes_text_rules(kind: str) -> None:
    config = full(kind)
    wanted = description(config)
    for stated in (None, "", "another_type"):
        rest = deepcopy(config)
        if stated is None:
            del text(rest)["model_type"]
        else:
            text(rest)["model_type"] = stated
        if kind == "kimi_k25" and stated is not None:  # its text part is of the class it states
            with pytest.raises(ConfigError, match="model_type"):
                describe(rest)
            continue
        assert description(rest) == wanted
    for key in [key for key in text(config) if key != "model_type" and key not in NEEDED.get(kind, {})]:
        rest = deepcopy(config)
        del text(rest)["model_type"]
        del text(rest)[key]
        assert description(rest) == description(resolved(rest)), key


def test_unknown_wrapper_needs_text_type() -> None:
    config = full("qwen3_moe")
    del config["model_type"]
    for key in ("text_config", "language_config", "llm_config", "thinker_config"):
        with pytest.raises(ConfigError, match=r"model_type.*'other'"):
            describe({"model_type": "other", key: config})
        inner = {**config, "model_type": "qwen3_moe", "norm_topk_prob": True}
        assert describe({"model_type": "other", key: inner}).routing.renormalize
    assert family_of({"model_type": "kimi_k25", "text_config": {"model_type": "qwen3_moe"}}).name == "qwen3_moe"


@pytest.mark.parametrize(
    "kind", sorted(WITHOUT_CLASS - {"arctic", "kimi_k2", "minimax_m3", "step3_text", "step3_vl", "step3p7_text"})
)
def test_unknown_defaults_must_be_stated(kind: str) -> None:
    with raises_with(ConfigError, "num_hidden_layers"):
        describe({"model_type": kind})


def test_kimi_k3_states_routing() -> None:
    config = {
        "model_type": "kimi_k3", "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2,
        "num_experts": 8, "num_experts_per_token": 2, "num_shared_experts": 1, "first_k_dense_replace": 1,
        "num_expert_group": 1, "topk_group": 1, "moe_renormalize": True, "routed_scaling_factor": 1.0,
        "hidden_act": "silu",
    }  # fmt: skip
    assert describe(config).routing.scale == 1.0
    for key in set(config) - {"model_type"}:
        with pytest.raises(ConfigError, match=key):
            describe({name: value for name, value in config.items() if name != key})


# checkpoints on disk

ROUTING = ("routed_scaling_factor", "norm_topk_prob", "first_k_dense_replace", "swiglu_limit", "num_hash_layers")


@pytest.mark.parametrize(
    "kind", ["glm4_moe", "glm4_moe_lite", "qwen3_next", "qwen3_vl_moe", "glm5_next", "mimo_v2_flash"]
)
def test_whole_model_has_defaults(tmp_path: Path, kind: str) -> None:
    """``load_model`` and transformers read the same config without the entries of routing."""
    build(CASES[kind], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in (*ROUTING, *(["model_type"] if kind.startswith("qwen3_vl") else [])):
        text(config).pop(key, None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = load_model_in("fp32", str(tmp_path), device="cpu")
    theirs = eager(ours, tmp_path, torch.float32)
    with torch.no_grad():
        found, wanted = ours(IDS).logits, theirs(IDS).logits
    assert (found - wanted).abs().max() <= 2e-5 * wanted.abs().max()


def test_whole_model_needs_its_shared_expert(tmp_path: Path) -> None:
    """The model's class makes a shared expert, so a layer without one would not be the model's."""
    build(CASES["glm4_moe"], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["n_shared_experts"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: t for name, t in tensors.items() if "shared" not in name}, tmp_path / "model.safetensors")
    with pytest.raises(MissingTensorError, match="shared_experts"):
        load_model(str(tmp_path), device="cpu")


E, H, N, K, LAYERS = 12, 100, 72, 3, 2
BASE: dict[str, Any] = {
    "hidden_size": H, "moe_intermediate_size": N, "intermediate_size": N, "num_experts_per_tok": K,
    "num_hidden_layers": LAYERS, "torch_dtype": "float32",
}  # fmt: skip


def heavy(generator: torch.Generator, *shape: int) -> Tensor:
    """Random numbers with tails: some are 20 times the others."""
    values = torch.randn(*shape, generator=generator)
    return values * (1 + 19 * (torch.rand(*shape, generator=generator) < 0.01))


def write(folder: Path, config: dict[str, Any], head: str, *, bias: bool, shared: int) -> dict[str, Tensor]:
    """Write layer 1 of a DeepSeek-V3-like or Qwen3-like model; return its tensors by the name below the layer."""
    generator = torch.Generator().manual_seed(7)
    tensors = {"mlp.gate.weight": heavy(generator, E, H) * 0.3}
    if bias:
        tensors["mlp.gate.e_score_correction_bias"] = torch.randn(E, generator=generator) * 0.4
    paths = [f"mlp.experts.{e}." for e in range(E)] + (["mlp.shared_experts."] if shared else [])
    for path in paths:
        for name, shape in (("gate_proj", (N, H)), ("up_proj", (N, H)), ("down_proj", (H, N))):
            tensors[f"{path}{name}.weight"] = heavy(generator, *shape) * 0.1
    save_file({head + name: tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def mlp(tensors: dict[str, Tensor], path: str, x: Tensor) -> Tensor:
    gate, up, down = (tensors[f"{path}{name}_proj.weight"].double() for name in ("gate", "up", "down"))
    hidden = x @ gate.T
    return (hidden / (1 + torch.exp(-hidden)) * (x @ up.T)) @ down.T


def layer_truth(tensors: dict[str, Tensor], x: Tensor, rule: dict[str, Any]) -> Tensor:
    """Compute the layer in float64 by the rule of the model's code."""
    x = x.double()
    logits = x @ tensors["mlp.gate.weight"].double().T
    scores = torch.sigmoid(logits) if rule["sigmoid"] else torch.softmax(logits, -1)
    chosen = scores + tensors["mlp.gate.e_score_correction_bias"].double() if rule["sigmoid"] else scores
    groups = chosen.view(len(x), rule.get("groups", 1), -1)
    kept = groups.topk(2, -1).values.sum(-1).topk(rule.get("kept", 1), -1).indices
    mask = torch.zeros(groups.shape[:2], dtype=torch.bool).scatter_(1, kept, value=True)
    ids = groups.masked_fill(~mask[..., None], -torch.inf).flatten(1).topk(K, -1).indices
    weights = scores.gather(-1, ids)
    weights = rule["scale"] * (weights / weights.sum(-1, keepdim=True) if rule["renormalize"] else weights)
    y = mlp(tensors, "mlp.shared_experts.", x) if rule.get("shared") else torch.zeros_like(x)
    for token in range(len(x)):
        for slot in range(K):
            row = mlp(tensors, f"mlp.experts.{int(ids[token, slot])}.", x[token : token + 1])
            y[token] += weights[token, slot] * row[0]
    return y


SIGMOID = {"sigmoid": True, "renormalize": True}
SOFTMAX = {"sigmoid": False, "scale": 1.0}
# model type, entries that are stated, rule of the class where the others are absent
ON_DISK: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "deepseek_v3": ("deepseek_v3", {"n_routed_experts": E, "n_group": 6, "first_k_dense_replace": 1},
                    {**SIGMOID, "scale": 2.5, "groups": 6, "kept": 4, "shared": True}),
    "deepseek_v32": ("deepseek_v32", {"n_routed_experts": E, "n_group": 6, "first_k_dense_replace": 0},
                     {**SIGMOID, "scale": 2.5, "groups": 6, "kept": 4}),
    "glm4_moe_lite": ("glm4_moe_lite", {"n_routed_experts": E}, {**SIGMOID, "scale": 1.8, "shared": True}),
    "glm_moe_dsa": ("glm_moe_dsa", {"n_routed_experts": E, "mlp_layer_types": ["dense", "sparse"]},
                    {**SIGMOID, "scale": 2.5}),
    "glm4_moe": ("glm4_moe", {"n_routed_experts": E}, {**SIGMOID, "scale": 1.0}),
    "mimo_v2_flash": ("mimo_v2_flash", {"n_routed_experts": E, "routed_scaling_factor": None},
                      {**SIGMOID, "scale": 1.0}),
    "kimi_linear": ("kimi_linear", {"num_experts": E}, {**SIGMOID, "scale": 2.446}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": E}, {**SOFTMAX, "renormalize": False}),
    "qwen3_omni": ("qwen3_omni_moe_text", {"num_experts": E}, {**SOFTMAX, "renormalize": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", list(ON_DISK))
def test_layer_computes_with_defaults(tmp_path: Path, name: str) -> None:
    kind, stated, rule = ON_DISK[name]
    config = {**BASE, "model_type": kind, **stated}
    tensors = write(tmp_path, config, "model.layers.1.", bias=rule["sigmoid"], shared=int(rule.get("shared", False)))
    x = heavy(torch.Generator().manual_seed(8), 17, H)
    truth = layer_truth(tensors, x, rule)
    found = load_layer(tmp_path, 1, dtype="fp32", device="cpu")(x).double()
    assert float((found - truth).norm() / truth.norm()) < 1e-5
    assert plan_model(str(tmp_path), device="cpu").problem.spec.routing == describe(config).routing
    assert named_layer(str(tmp_path))[1].num_experts == E


@pytest.mark.parametrize(
    ("wrapper", "part", "head", "renormalize"),
    [
        ("qwen3_vl_moe", "text_config", "model.language_model.layers.1.", True),
        ("qwen3_omni_moe", "thinker_config", "thinker.model.layers.1.", True),
        ("other", "llm_config", "language_model.model.layers.1.", False),
        ("other", "language_config", "language_model.model.layers.1.", False),
    ],
)
def test_wrapped_layer_computes_with_defaults(
    tmp_path: Path, wrapper: str, part: str, head: str, renormalize: bool
) -> None:
    inner: dict[str, Any] = {**BASE, "num_experts": E}
    if wrapper == "other":
        inner["model_type"] = "qwen3_moe"
    body = {"text_config": inner} if part == "thinker_config" else inner
    tensors = write(tmp_path, {"model_type": wrapper, part: body}, head, bias=False, shared=0)
    x = heavy(torch.Generator().manual_seed(8), 17, H)
    truth = layer_truth(tensors, x, {**SOFTMAX, "renormalize": renormalize})
    found = load_layer(tmp_path, 1, dtype="fp32", device="cpu")(x).double()
    assert float((found - truth).norm() / truth.norm()) < 1e-5


def test_assumed_shared_expert_is_whole(tmp_path: Path) -> None:
    config = {**BASE, "model_type": "glm4_moe", "n_routed_experts": E}
    tensors = write(tmp_path, config, "model.layers.1.", bias=True, shared=1)
    del tensors["mlp.shared_experts.up_proj.weight"]
    save_file({"model.layers.1." + name: value for name, value in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(MissingTensorError, match=r"shared_experts\.up_proj"):
        load_layer(tmp_path, 1, device="cpu")
    # One file of several cannot tell that no other holds the shared expert.
    bare = {name: value for name, value in tensors.items() if "shared" not in name}
    save_file({"model.layers.1." + name: value for name, value in bare.items()}, tmp_path / "model.safetensors")
    with pytest.raises(MissingTensorError, match="shared_experts"):
        load_layer(tmp_path / "model.safetensors", 1, device="cpu")
    (tmp_path / "config.json").write_text(json.dumps({**config, "n_shared_experts": 1}))
    with pytest.raises(MissingTensorError, match="shared_experts"):
        load_layer(tmp_path, 1, device="cpu")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_layer(tmp_path, 1, device="cpu").spec.shared is None
    shown = inspect_model(str(tmp_path), device="cpu")
    assert shown.spec.shared is None
    assert any("shared expert" in finding for finding in audit(Checkpoint.open(tmp_path)).findings)
