"""Families without a class to compare with: toy checkpoints under the published names, judged by plain arithmetic.

The references here are written from the published descriptions of the models and share no code with the package.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from collegium.checkpoint import Checkpoint, CheckpointLayer, audit, describe_checkpoint
from collegium.errors import ConfigError, InputError, SpecError
from collegium.formats import by_name
from collegium.loading import load_layer
from collegium.models import describe, moe_layers
from raising import raises_with

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

D, WIDE, EXPERTS, TOKENS = 64, 32, 6, 13
ARCTIC = {
    "model_type": "arctic", "hidden_size": D, "intermediate_size": WIDE, "num_hidden_layers": 3, "hidden_act": "silu",
    "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "moe_layer_frequency": 2, "parallel_attn_mlp_res": True,
    "moe_eval_capacity_factor": 1, "moe_train_capacity_factor": 1, "moe_token_dropping": True, "use_residual": True,
    "enable_expert_tensor_parallelism": True, "torch_dtype": "float32",
}  # fmt: skip
STEP3 = {
    "model_type": "step3_vl",
    "text_config": {
        "model_type": "step3_text", "hidden_size": D, "moe_intermediate_size": WIDE, "num_hidden_layers": 4,
        "moe_num_experts": EXPERTS, "moe_top_k": 3, "share_expert_dim": 40, "moe_layers_enum": "2,3",
        "norm_expert_weight": False, "torch_dtype": "float32",
    },
}  # fmt: skip
KIMI_K3 = {
    "model_type": "kimi_k3",
    "text_config": {
        "model_type": "kimi_linear", "hidden_size": D, "moe_intermediate_size": WIDE, "num_hidden_layers": 3,
        "num_experts": EXPERTS, "num_experts_per_token": 3, "num_shared_experts": 2, "first_k_dense_replace": 1,
        "moe_layer_freq": 1, "routed_expert_hidden_size": 32, "latent_moe_use_norm": True, "rms_norm_eps": 1e-5,
        "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
        "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "topk_group": 1,
        "topk_method": "noaux_tc", "routed_scaling_factor": 1.5, "torch_dtype": "float32", "output_scores": False,
    },
}  # fmt: skip
DEEPSEEK_V4 = {
    "model_type": "deepseek_v4", "hidden_size": D, "moe_intermediate_size": WIDE, "num_hidden_layers": 4,
    "n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": 2, "num_hash_layers": 3,
    "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 1.5,
    "swiglu_limit": 1.25, "hidden_act": "silu", "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
        "modules_to_not_convert": ["shared_experts"],
    },
}  # fmt: skip
VL2 = {
    "model_type": "deepseek_vl_v2",
    "language_config": {
        "model_type": "deepseek_v2", "hidden_size": D, "moe_intermediate_size": WIDE, "num_hidden_layers": 3,
        "n_routed_experts": EXPERTS, "n_shared_experts": 2, "num_experts_per_tok": 3, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
        "routed_scaling_factor": 2.0, "torch_dtype": "float32",
    },
}  # fmt: skip
TEXT_01 = {
    "model_type": "minimax_text_01", "hidden_size": D, "intermediate_size": WIDE, "num_hidden_layers": 2,
    "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "hidden_act": "silu", "shared_intermediate_size": [0],
    "shared_moe_mode": "sigmoid", "torch_dtype": "float32",
}  # fmt: skip


def randn(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape) * scale


def experts(base: str, names: tuple[str, str, str], width: int = D) -> dict[str, Tensor]:
    """One tensor an expert and projection: gate, up, down."""
    shapes = ((WIDE, width), (WIDE, width), (width, WIDE))
    return {
        f"{base}{e}.{name}.weight": randn(*shape, scale=0.5)
        for e in range(EXPERTS)
        for name, shape in zip(names, shapes, strict=True)
    }


def dense(base: str, names: tuple[str, str, str], wide: int) -> dict[str, Tensor]:
    shapes = ((wide, D), (wide, D), (D, wide))
    return {f"{base}{name}.weight": randn(*shape, scale=0.5) for name, shape in zip(names, shapes, strict=True)}


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return gate / (1 + torch.exp(-gate)) * up


def situ(gate: Tensor, up: Tensor) -> Tensor:
    return 4 * torch.tanh(gate / 4) / (1 + torch.exp(-gate)) * 25 * torch.tanh(up / 25)


def clamped(gate: Tensor, up: Tensor) -> Tensor:
    return swiglu(gate.clamp(max=1.25), up.clamp(-1.25, 1.25))


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, act: Callable[[Tensor, Tensor], Tensor] = swiglu) -> Tensor:
    return act(x @ gate.T, x @ up.T) @ down.T


def mix(x: Tensor, ids: Tensor, weights: Tensor, expert: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Sum the weighted outputs token by token."""
    rows = [
        sum(w * expert(int(e), row[None])[0] for e, w in zip(chosen, share, strict=True))
        for row, chosen, share in zip(x, ids, weights, strict=True)
    ]
    return torch.stack(rows)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Toy:
    """config, MoE layers, tensors by name, and what a layer computes for ``x [T, D]`` and token ids ``[T]``."""

    config: dict[str, Any]
    layers: tuple[int, ...]
    tensors: dict[str, Tensor]
    wanted: Callable[[int, Tensor, Tensor], Tensor]


def arctic() -> Toy:
    base, w = "model.layers.1.block_sparse_moe.", ("w1", "w3", "w2")
    t = {**experts(f"{base}experts.", w), f"{base}gate.weight": randn(EXPERTS, D)}
    # the residual MLP reads another input and is not the layer's
    t |= dense("model.layers.1.residual_mlp.", w, D)

    def wanted(layer: int, x: Tensor, ids: Tensor) -> Tensor:
        del layer, ids
        share, chosen = torch.softmax(x @ t[f"{base}gate.weight"].T, 1).topk(2)
        return mix(
            x, chosen, share / share.sum(1, keepdim=True),
            lambda e, row: mlp(row, *(t[f"{base}experts.{e}.{n}.weight"] for n in w)),
        )  # fmt: skip

    return Toy(config=ARCTIC, layers=(1,), tensors=t, wanted=wanted)


def minimax_text_01() -> Toy:
    t: dict[str, Tensor] = {}
    w = ("w1", "w3", "w2")
    for layer in (0, 1):
        base = f"language_model.model.layers.{layer}.block_sparse_moe."
        t |= {**experts(f"{base}experts.", w), f"{base}gate.weight": randn(EXPERTS, D)}

    def wanted(layer: int, x: Tensor, ids: Tensor) -> Tensor:
        del ids
        base = f"language_model.model.layers.{layer}.block_sparse_moe."
        share, chosen = torch.softmax(x @ t[f"{base}gate.weight"].T, 1).topk(2)
        return mix(
            x, chosen, share / share.sum(1, keepdim=True),
            lambda e, row: mlp(row, *(t[f"{base}experts.{e}.{n}.weight"] for n in w)),
        )  # fmt: skip

    return Toy(config=TEXT_01, layers=(0, 1), tensors=t, wanted=wanted)


def step3() -> Toy:
    t: dict[str, Tensor] = {}
    names = ("gate_proj", "up_proj", "down_proj")
    for layer in (2, 3):
        base = f"model.layers.{layer}."
        shapes = ((WIDE, D), (WIDE, D), (D, WIDE))
        t |= {f"{base}moe.{n}.weight": randn(EXPERTS, *s, scale=0.5) for n, s in zip(names, shapes, strict=True)}
        t |= {f"{base}moe.gate.weight": randn(EXPERTS, D), **dense(f"{base}share_expert.", names, 40)}

    def wanted(layer: int, x: Tensor, ids: Tensor) -> Tensor:
        del ids
        base = f"model.layers.{layer}."
        share, chosen = torch.softmax(x @ t[f"{base}moe.gate.weight"].T, 1).topk(3)
        routed = mix(x, chosen, share, lambda e, row: mlp(row, *(t[f"{base}moe.{n}.weight"][e] for n in names)))
        return routed + mlp(x, *(t[f"{base}share_expert.{n}.weight"] for n in names))

    return Toy(config=STEP3, layers=(2, 3), tensors=t, wanted=wanted)


def kimi_k3() -> Toy:
    t: dict[str, Tensor] = {}
    w, names = ("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj")
    for layer in (1, 2):
        base = f"language_model.model.layers.{layer}.block_sparse_moe."
        t |= {**experts(f"{base}experts.", w, width=32), **dense(f"{base}shared_experts.", names, 2 * WIDE)}
        t |= {
            f"{base}gate.weight": randn(EXPERTS, D, scale=0.2),
            f"{base}gate.e_score_correction_bias": randn(EXPERTS, scale=0.3),
            f"{base}routed_expert_down_proj.weight": randn(32, D, scale=0.2),
            f"{base}routed_expert_norm.weight": 1 + randn(32, scale=0.3),
            f"{base}routed_expert_up_proj.weight": randn(D, 32, scale=0.2),
        }

    def wanted(layer: int, x: Tensor, ids: Tensor) -> Tensor:
        del ids
        base = f"language_model.model.layers.{layer}.block_sparse_moe."
        scores = torch.sigmoid(x @ t[f"{base}gate.weight"].T)
        chosen = (scores + t[f"{base}gate.e_score_correction_bias"]).topk(3).indices
        share = scores.gather(1, chosen)
        share = share / (share.sum(1, keepdim=True) + 1e-20) * 1.5
        low = x @ t[f"{base}routed_expert_down_proj.weight"].T
        routed = mix(
            low, chosen, share, lambda e, row: mlp(row, *(t[f"{base}experts.{e}.{n}.weight"] for n in w), situ)
        )
        routed = routed / (routed.square().mean(1, keepdim=True) + 1e-5).sqrt() * t[f"{base}routed_expert_norm.weight"]
        routed = routed @ t[f"{base}routed_expert_up_proj.weight"].T
        return routed + mlp(x, *(t[f"{base}shared_experts.{n}.weight"] for n in names), situ)

    return Toy(config=KIMI_K3, layers=(1, 2), tensors=t, wanted=wanted)


def deepseek_vl2() -> Toy:
    """The largest model: sigmoid scores with a bias that chooses experts."""
    t: dict[str, Tensor] = {}
    names = ("gate_proj", "up_proj", "down_proj")
    for layer in (1, 2):
        base = f"language.model.layers.{layer}.mlp."
        t |= {**experts(f"{base}experts.", names), **dense(f"{base}shared_experts.", names, 2 * WIDE)}
        t[f"{base}gate.weight"] = randn(EXPERTS, D, scale=0.2)
        t[f"{base}gate.e_score_correction_bias"] = randn(EXPERTS, scale=0.3)

    def wanted(layer: int, x: Tensor, ids: Tensor) -> Tensor:
        del ids
        base = f"language.model.layers.{layer}.mlp."
        scores = torch.sigmoid(x @ t[f"{base}gate.weight"].T)
        chosen = (scores + t[f"{base}gate.e_score_correction_bias"]).topk(3).indices
        share = scores.gather(1, chosen)
        share = share / (share.sum(1, keepdim=True) + 1e-20) * 2.0
        routed = mix(x, chosen, share, lambda e, row: mlp(row, *(t[f"{base}experts.{e}.{n}.weight"] for n in names)))
        return routed + mlp(x, *(t[f"{base}shared_experts.{n}.weight"] for n in names))

    return Toy(config=VL2, layers=(1, 2), tensors=t, wanted=wanted)


def deepseek_ocr() -> Toy:
    """Softmax scores that are not renormalised, as in the smaller models."""
    toy = deepseek_vl2()
    language = {**VL2["language_config"], "topk_method": "greedy", "norm_topk_prob": False}
    language.pop("scoring_func")
    t = {name: tensor for name, tensor in toy.tensors.items() if "e_score" not in name}
    names = ("gate_proj", "up_proj", "down_proj")

    def wanted(layer: int, x: Tensor, ids: Tensor) -> Tensor:
        del ids
        base = f"language.model.layers.{layer}.mlp."
        share, chosen = torch.softmax(x @ t[f"{base}gate.weight"].T, 1).topk(3)
        routed = mix(
            x, chosen, 2.0 * share, lambda e, row: mlp(row, *(t[f"{base}experts.{e}.{n}.weight"] for n in names))
        )
        return routed + mlp(x, *(t[f"{base}shared_experts.{n}.weight"] for n in names))

    config = {"model_type": "deepseek_vl_v2", "language_config": language}
    return Toy(config=config, layers=(1, 2), tensors=t, wanted=wanted)


def deepseek_v4() -> Toy:
    """MXFP4 experts as published: packed signed bytes and E8M0 scales, two nibbles a byte, the low one first."""
    t: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    w, vocabulary = ("w1", "w3", "w2"), 20
    mxfp4 = by_name("mxfp4")
    for layer in range(4):
        base = f"layers.{layer}.ffn."
        for name, weight in experts(f"{base}experts.", w).items():
            payload = mxfp4.encode(weight)
            stored, path = payload.tensors(), name.removesuffix(".weight")
            plain[name] = payload.decode()
            t[name] = stored["codes"][..., : weight.shape[1] // 2].contiguous().view(torch.int8)
            t[f"{path}.scale"] = stored["scales"].contiguous().view(torch.float8_e8m0fnu)
        t |= dense(f"{base}shared_experts.", w, WIDE)
        t[f"{base}gate.weight"] = randn(EXPERTS, D, scale=0.3)
        if layer < 3:
            t[f"{base}gate.tid2eid"] = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(vocabulary)])
        else:
            t[f"{base}gate.bias"] = randn(EXPERTS, scale=0.4)

    def wanted(layer: int, x: Tensor, ids: Tensor) -> Tensor:
        base = f"layers.{layer}.ffn."
        scores = functional.softplus(x @ t[f"{base}gate.weight"].T).sqrt()
        chosen = t[f"{base}gate.tid2eid"][ids] if layer < 3 else (scores + t[f"{base}gate.bias"]).topk(2).indices
        share = scores.gather(1, chosen)
        share = share / (share.sum(1, keepdim=True) + 1e-20) * 1.5
        routed = mix(
            x, chosen, share, lambda e, row: mlp(row, *(plain[f"{base}experts.{e}.{n}.weight"] for n in w), clamped)
        )
        return routed + mlp(x, *(t[f"{base}shared_experts.{n}.weight"] for n in w), clamped)

    return Toy(config=DEEPSEEK_V4, layers=(0, 1, 2, 3), tensors=t, wanted=wanted)


PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "published_configs.json").read_text())


@pytest.mark.parametrize("case", PUBLISHED, ids=[case["repo"] for case in PUBLISHED])
def test_published_configs_describe_model_sizes(case: dict[str, Any]) -> None:
    """The configs hold the entries that concern experts; what is expected was collected from other sources."""
    spec, wanted = describe(case["config"]), case["expected"]
    found = {
        "hidden_size": spec.hidden_size, "expert_hidden_size": spec.expert_hidden_size,
        "intermediate_size": spec.intermediate_size, "num_experts": spec.num_experts, "top_k": spec.routing.top_k,
        "moe_layers": len(moe_layers(case["config"])), "scale": spec.routing.scale,
        "shared": None if spec.shared is None else spec.shared.intermediate_size,
        "correction_bias": spec.routing.correction_bias, "renormalize": spec.routing.renormalize,
    }  # fmt: skip
    unknown = {"scale": 1.0} if wanted["scale"] is None else {}
    unknown |= {"renormalize": found["renormalize"]} if wanted["renormalize"] is None else {}
    assert found == {**wanted, **unknown}


TOYS = {f.__name__: f for f in (arctic, minimax_text_01, step3, kimi_k3, deepseek_vl2, deepseek_ocr, deepseek_v4)}


def write(path: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Checkpoint:
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return Checkpoint.open(path)


@pytest.mark.parametrize("name", list(TOYS))
def test_published_layouts_load_and_compute(tmp_path: Path, name: str) -> None:
    torch.manual_seed(11)
    toy = TOYS[name]()
    checkpoint = write(tmp_path, toy.config, toy.tensors)
    assert moe_layers(checkpoint.config) == toy.layers
    assert [layer.layer for layer in audit(checkpoint).layers] == list(toy.layers)
    x, ids = randn(TOKENS, D), torch.randint(0, 20, (TOKENS,))
    for index in toy.layers:
        layer = load_layer(tmp_path, index, dtype="fp32", device="cpu")
        found = layer(x, token_ids=ids if layer.spec.routing.hash_routing else None)
        wanted = toy.wanted(index, x, ids)
        assert (found - wanted).abs().max() <= 2e-5 * wanted.abs().max()


def test_kimi_k3_loads_compressed_mxfp4(tmp_path: Path) -> None:
    """The published experts are MXFP4, the rest is not, below ``language_model.model``."""
    torch.manual_seed(12)
    toy = kimi_k3()
    ignore = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*routed_expert_(down|up)_proj.*"]
    arguments = {"type": "float", "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True}
    block = {
        "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "ignore": ignore,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": arguments}},
    }  # fmt: skip
    config = {**toy.config, "text_config": {**toy.config["text_config"], "quantization_config": block}}
    tensors = dict(toy.tensors)
    for name in list(tensors):
        if ".experts." in name:
            payload = by_name("mxfp4").encode(tensors.pop(name))
            stored, path = payload.tensors(), name.removesuffix(".weight")
            toy.tensors[name] = payload.decode()
            tensors[f"{path}.weight_packed"] = stored["codes"][..., : payload.shape[1] // 2]
            tensors[f"{path}.weight_scale"] = stored["scales"]
    checkpoint = write(tmp_path, config, tensors)
    assert describe_checkpoint(checkpoint).weight_format == "mxfp4"
    x = randn(TOKENS, D)
    layer = load_layer(tmp_path, 2, dtype="fp32", device="cpu")
    wanted = toy.wanted(2, x, x)
    assert (layer(x) - wanted).abs().max() <= 2e-5 * wanted.abs().max()


@pytest.mark.parametrize(
    "prefix", ["thinker.model.", "language_model.model.", "model.language_model.", "language_model.", ""]
)
def test_text_model_under_known_prefixes(tmp_path: Path, prefix: str) -> None:
    torch.manual_seed(13)
    inner = {
        "model_type": "qwen3_omni_moe_text", "hidden_size": D, "moe_intermediate_size": WIDE, "num_experts": EXPERTS,
        "num_experts_per_tok": 2, "num_hidden_layers": 2, "norm_topk_prob": True, "dtype": "float32",
    }  # fmt: skip
    config = {"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": inner}}
    names = ("gate_proj", "up_proj", "down_proj")
    t: dict[str, Tensor] = {}
    for layer in (0, 1):
        base = f"{prefix}layers.{layer}.mlp."
        t |= {**experts(f"{base}experts.", names), f"{base}gate.weight": randn(EXPERTS, D)}
    # another stack of layers in the same files is none of the text model's
    t |= experts("talker.model.layers.0.mlp.experts.", names)
    write(tmp_path, config, t)
    x = randn(TOKENS, D)
    base = f"{prefix}layers.1.mlp."
    share, chosen = torch.softmax(x @ t[f"{base}gate.weight"].T, 1).topk(2)
    wanted = mix(
        x, chosen, share / share.sum(1, keepdim=True),
        lambda e, row: mlp(row, *(t[f"{base}experts.{e}.{n}.weight"] for n in names)),
    )  # fmt: skip
    found = load_layer(tmp_path, 1, dtype="fp32", device="cpu")(x)
    assert (found - wanted).abs().max() <= 2e-5 * wanted.abs().max()


def qwen3_vl(square: bool) -> tuple[dict[str, Any], Tensor, Tensor]:
    """A stack stored input-first; square: H == 2I, where the shape of gate and up cannot tell."""
    hidden = 2 * WIDE if square else D + 32
    text = {
        "model_type": "qwen3_vl_moe_text", "hidden_size": hidden, "moe_intermediate_size": WIDE,
        "num_experts": EXPERTS, "num_experts_per_tok": 2, "num_hidden_layers": 1, "dtype": "float32",
    }  # fmt: skip
    config = {"model_type": "qwen3_vl_moe", "text_config": text}
    return config, randn(EXPERTS, hidden, 2 * WIDE), randn(EXPERTS, WIDE, hidden)


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("transposed", [True, False])
def test_vl_stack_orientation_is_detected(tmp_path: Path, square: bool, transposed: bool) -> None:
    from collegium.checkpoint import load_experts
    from collegium.parallel.placement import linear

    config, both, down = qwen3_vl(square)
    base = "model.language_model.layers.0.mlp."
    turn = (lambda w: w) if transposed else (lambda w: w.mT)
    checkpoint = write(
        tmp_path, config,
        {
            f"{base}experts.gate_up_proj": turn(both), f"{base}experts.down_proj": turn(down),
            f"{base}gate.weight": randn(EXPERTS, both.shape[1]),
        },
    )  # fmt: skip
    weights = load_experts(CheckpointLayer.open(checkpoint, 0), linear(EXPERTS))
    assert torch.equal(weights.gate_up.decode()[:, 1], both[..., WIDE:].mT)
    assert torch.equal(weights.down.decode(), down.mT)


@pytest.mark.parametrize(
    ("config", "entry", "text"),
    [
        (ARCTIC, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (TEXT_01, {"shared_intermediate_size": [512]}, "shared MLP of this family is not implemented"),
        (DEEPSEEK_V4, {"norm_topk_prob": False}, "norm_topk_prob is False"),
        (DEEPSEEK_V4, {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        (DEEPSEEK_V4, {"swiglu_beta": 0.5}, "swiglu_beta=0.5 is not implemented"),
        (ARCTIC, {"expert_dropout_kind": "top"}, "expert_dropout_kind='top' is not implemented"),
        (ARCTIC, {"num_experts_per_tok": 2, "mlp_bias": True}, "mlp_bias=True is not implemented"),
        (
            DEEPSEEK_V4,
            {"mlp_layer_types": ["hash_moe"]},
            "mlp_layer_types is 'a list of 1', allowed is one entry for each",
        ),
        (DEEPSEEK_V4, {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, allowed is 16384 at most"),
        (ARCTIC, {"num_local_experts": 10**30}, "num_experts is beyond 2.63"),
        (TEXT_01, {"num_experts": EXPERTS + 1}, "num_experts, num_local_experts is '7, 6'"),
    ],
)
def test_config_entries_changing_the_mathematics_refused(
    config: dict[str, Any], entry: dict[str, Any], text: str
) -> None:
    describe(config)
    with pytest.raises(ConfigError, match=text):
        describe({**config, **entry})


def test_separate_router_input_is_required(tmp_path: Path) -> None:
    text = {
        "model_type": "gemma4_text", "hidden_size": D, "moe_intermediate_size": WIDE, "num_experts": EXPERTS,
        "top_k_experts": 2, "num_hidden_layers": 1, "enable_moe_block": True, "dtype": "float32",
        "hidden_activation": "gelu_pytorch_tanh",
    }  # fmt: skip
    base = "model.language_model.layers.0."
    tensors = {
        f"{base}experts.gate_up_proj": randn(EXPERTS, 2 * WIDE, D), f"{base}experts.down_proj": randn(EXPERTS, D, WIDE),
        f"{base}router.proj.weight": randn(EXPERTS, D), f"{base}router.scale": randn(D),
        f"{base}router.per_expert_scale": randn(EXPERTS),
    }  # fmt: skip
    write(tmp_path, {"model_type": "gemma4", "text_config": text}, tensors)
    layer = load_layer(tmp_path, 0, dtype="fp32", device="cpu")
    x = randn(TOKENS, D)
    with pytest.raises(InputError, match="pass router_input"):
        layer(x)
    with raises_with(InputError, "router_input"):
        layer(x, router_input=x[:3])
    assert not torch.equal(layer(x, router_input=x), layer(x, router_input=x.flip(0)))
    one, three = layer(x, router_input=x), layer(x, router_input=3 * x)  # it is normalised
    assert (one - three).abs().max() <= 1e-4 * one.abs().max()


def test_bad_config_entries_raise_config_errors() -> None:
    """Every entry of every published config is replaced by things it cannot be."""
    wrong: list[Any] = [None, -1, 0, 1 << 70, 2.5, "x", "1,2", [], ["a"], [[]], {}, {"a": 1}, True]
    for case in PUBLISHED:
        whole = case["config"]
        inner = whole.get("text_config", whole)
        for key in inner:
            for bad in wrong:
                changed = {**inner, key: bad}
                config = {**whole, "text_config": changed} if "text_config" in whole else changed
                try:
                    describe(config)
                    moe_layers(config)
                except (ConfigError, SpecError):
                    continue
