"""Layers of GGUF architectures with the metadata and tensors that converters write, against decoded numbers.

The truth is computed in float64 by llama.cpp's rule for each architecture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch

from collegium import Overrides, load_layer
from collegium.checkpoint import Checkpoint, audit
from collegium.errors import ConfigError, MissingTensorError, UnknownTensorError
from gguf_files import add
from raising import raises_with

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

H, N, E, K = 512, 256, 8, 3


class Case(NamedTuple):
    """A file: metadata of the architecture, and what its routing means.

    kinds: of gate and up, down, and the shared expert. shared: width of the shared expert, 0 for none. layers: those
    with experts. on_input: weights multiply the experts' input. gated: experts have a gate, else a squared ReLU.
    """

    arch: str
    entries: dict[str, Any]
    kinds: tuple[str, str, str] = ("Q4_K", "Q6_K", "Q8_0")
    shared: int = 0
    sigmoid: bool = False
    norm: bool = True
    bias: bool = False
    groups: tuple[int, int] = (1, 1)
    scale: float = 1.0
    layers: tuple[int, ...] = (0, 1)
    on_input: bool = False
    gated: bool = True


WIDTH = {"expert_feed_forward_length": N}
LING = {
    **WIDTH, "leading_dense_block_count": 1, "expert_shared_feed_forward_length": N, "expert_shared_count": 1,
    "expert_weights_scale": 2.5, "expert_group_count": 4, "expert_group_used_count": 2, "nextn_predict_layers": 1,
}  # fmt: skip
ERNIE = {**WIDTH, "leading_dense_block_count": 1, "interleave_moe_layer_step": 1}
HUNYUAN = {**WIDTH, "expert_shared_feed_forward_length": N}
CASES = {
    "Qwen2": Case("qwen2moe", {**WIDTH, "expert_shared_feed_forward_length": 512}, shared=512, norm=False),
    "Qwen2, no widths": Case(
        "qwen2moe", {"feed_forward_length": K * N}, ("Q2_K", "IQ4_NL", "Q4_0"), shared=K * N, norm=False
    ),
    "ERNIE": Case(
        "ernie4_5-moe", {**ERNIE, "expert_shared_count": 2, "expert_shared_feed_forward_length": 2 * N}, shared=2 * N,
        bias=True, layers=(1,),
    ),
    "ERNIE, no bias": Case("ernie4_5-moe", {**ERNIE, "expert_shared_count": 0}, ("IQ3_S", "Q5_1", "F16"), layers=(1,)),
    "ERNIE, steps": Case(
        "ernie4_5-moe", {**ERNIE, "leading_dense_block_count": 0, "interleave_moe_layer_step": 2}, bias=True,
        layers=(1,),
    ),
    "Hunyuan": Case("hunyuan-moe", {**HUNYUAN, "expert_shared_count": 1}, ("Q3_K", "Q5_K", "Q6_K"), shared=N),
    "Hunyuan, no count": Case("hunyuan-moe", HUNYUAN, shared=N),
    "Ling": Case(
        "bailingmoe2", {**LING, "expert_weights_norm": True, "expert_gating_func": 2}, ("Q4_K", "Q5_K", "Q8_0"),
        shared=N, sigmoid=True, bias=True, groups=(4, 2), scale=2.5, layers=(1,),
    ),
    "Ling, not renormalised": Case(
        "bailingmoe2", {**LING, "expert_gating_func": 2}, shared=N, sigmoid=True, norm=False, bias=True, groups=(4, 2),
        scale=2.5, layers=(1,),
    ),
    "MiniMax": Case(
        "minimax-m2", {**WIDTH, "expert_gating_func": 2}, ("IQ2_XXS", "Q2_K", "Q8_0"), sigmoid=True, bias=True
    ),
    "LFM2": Case(
        "lfm2moe", {**WIDTH, "expert_gating_func": 2, "leading_dense_block_count": 1}, ("Q4_0", "Q6_K", "Q8_0"),
        sigmoid=True, bias=True, layers=(1,),
    ),
    "Kimi": Case(
        "kimi-linear",
        {
            **WIDTH, "expert_gating_func": 2, "leading_dense_block_count": 1, "expert_shared_count": 2,
            "expert_weights_scale": 2.446,
        },
        shared=2 * N, sigmoid=True, bias=True, scale=2.446, layers=(1,),
    ),
    "Qwen3-Next": Case(
        "qwen3next", {**WIDTH, "expert_shared_feed_forward_length": 512}, ("IQ4_XS", "Q5_K", "Q8_0"), shared=512
    ),
    "Qwen3-Next, no widths": Case("qwen3next", {"feed_forward_length": K * N}, shared=K * N),
    "Qwen3.5": Case(
        "qwen35moe", {**WIDTH, "expert_shared_feed_forward_length": N, "nextn_predict_layers": 1}, shared=N
    ),
    "Llama-4": Case(
        "llama4", {**WIDTH, "interleave_moe_layer_step": 2}, ("Q3_K", "Q4_K", "Q8_0"), shared=N, sigmoid=True,
        norm=False, on_input=True, layers=(1,),
    ),
    "Nemotron": Case(
        "nemotron_h_moe",
        {
            **WIDTH, "feed_forward_length": [0, N], "expert_shared_count": 1, "expert_shared_feed_forward_length": 512,
            "expert_weights_norm": True, "expert_weights_scale": 2.5, "expert_group_count": 4,
            "expert_group_used_count": 2,
        },
        ("Q5_K", "Q4_K", "Q8_0"), shared=512, sigmoid=True, bias=True, scale=2.5, groups=(4, 2), gated=False,
        layers=(1,),
    ),
}  # fmt: skip


def write(
    path: Path, case: Case, *, without: tuple[str, ...] = (), more: dict[str, tuple[int, ...]] | None = None
) -> dict[str, Tensor]:
    """Write a model of two layers and those ahead; return the decoded tensors of layer 1.

    without: tensors of each layer to leave out. more: shapes of further tensors of each layer.
    """
    writer = gguf.GGUFWriter(path, case.arch)
    ahead = case.entries.get("nextn_predict_layers", 0)
    writer.add_block_count(2 + ahead)
    writer.add_embedding_length(H)
    writer.add_expert_count(E)
    writer.add_expert_used_count(K)
    for key, value in case.entries.items():
        method = {bool: writer.add_bool, float: writer.add_float32, list: writer.add_array}.get(
            type(value), writer.add_uint32
        )
        method(f"{case.arch}.{key}", value)
    rng = np.random.default_rng(7)
    upper, lower, shared = case.kinds
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        "ffn_gate_exps.weight": (upper, (E, N, H)),
        "ffn_up_exps.weight": (upper, (E, N, H)),
        "ffn_down_exps.weight": (lower, (E, H, N)),
    }
    if case.shared:
        tensors["ffn_gate_shexp.weight"] = shared, (case.shared, H)
        tensors["ffn_up_shexp.weight"] = shared, (case.shared, H)
        tensors["ffn_down_shexp.weight"] = shared, (H, case.shared)
    if not case.gated:
        tensors = {name: entry for name, entry in tensors.items() if "ffn_gate" not in name}
    plain: dict[str, tuple[float, tuple[int, ...]]] = {"ffn_gate_inp.weight": (0.05, (E, H))}
    if case.arch in ("qwen2moe", "qwen3next", "qwen35moe"):
        plain["ffn_gate_inp_shexp.weight"] = 0.05, (H,)
    if case.bias:
        plain["exp_probs_b.bias"] = 0.5, (E,)
    plain |= {name: (1.0, shape) for name, shape in (more or {}).items()}
    truth: dict[str, Tensor] = {}
    for layer in (*case.layers, *range(2, 2 + ahead)):
        decoded = {
            name: add(writer, f"blk.{layer}.{name}", kind, rng, shape)
            for name, (kind, shape) in tensors.items()
            if name not in without
        }
        for name, (factor, shape) in plain.items():
            if name not in without:
                values = (rng.standard_t(3, shape) * factor).astype(np.float32)
                writer.add_tensor(f"blk.{layer}.{name}", values)
                decoded[name] = torch.from_numpy(values)
        if layer == 1:
            truth = decoded
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return truth


def mlp(x: Tensor, gate: Tensor | None, up: Tensor, down: Tensor) -> Tensor:
    if gate is None:
        return torch.relu(x @ up.T) ** 2 @ down.T
    hidden = x @ gate.T
    return (hidden * torch.sigmoid(hidden) * (x @ up.T)) @ down.T


def layer_truth(case: Case, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
    """Compute the layer in float64."""
    w = {name.split(".")[0]: tensor.double() for name, tensor in tensors.items()}
    x = x.double()
    logits = x @ w["ffn_gate_inp"].T
    scores = torch.sigmoid(logits) if case.sigmoid else torch.softmax(logits, -1)
    choice = scores + w["exp_probs_b"] if case.bias else scores
    count, used = case.groups
    if count > 1:
        grouped = choice.view(len(x), count, -1)
        kept = grouped.topk(2, -1).values.sum(-1).topk(used, -1).indices
        allowed = torch.zeros(len(x), count, dtype=torch.bool).scatter_(1, kept, value=True)
        choice = grouped.masked_fill(~allowed.unsqueeze(-1), -torch.inf).view(len(x), -1)
    ids = choice.topk(K, -1).indices
    weights = scores.gather(-1, ids)
    weights = case.scale * (weights / weights.sum(-1, keepdim=True) if case.norm else weights)
    dense = torch.zeros_like(scores).scatter_(1, ids, weights)
    gates = w["ffn_gate_exps"] if case.gated else [None] * E
    stacks = [(gates[e], w["ffn_up_exps"][e], w["ffn_down_exps"][e]) for e in range(E)]
    if case.on_input:
        experts = [mlp(x * dense[:, e, None], *stack) for e, stack in enumerate(stacks)]
        dense = (dense > 0).double()
    else:
        experts = [mlp(x, *stack) for stack in stacks]
    y = torch.einsum("te,eth->th", dense, torch.stack(experts))
    if case.shared:
        extra = mlp(x, w.get("ffn_gate_shexp"), w["ffn_up_shexp"], w["ffn_down_shexp"])
        gate = w.get("ffn_gate_inp_shexp")
        y = y + (extra if gate is None else extra * torch.sigmoid(x @ gate.reshape(-1, 1)))
    return y


@pytest.mark.parametrize("name", list(CASES))
def test_layers_of_converted_files(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    path = tmp_path / "model.gguf"
    tensors = write(path, case)
    assert tuple(entry.layer for entry in audit(Checkpoint.open(path)).layers) == case.layers
    x = torch.randn(19, H, generator=torch.Generator().manual_seed(1))
    truth = layer_truth(case, tensors, x)
    layer = load_layer(path, 1, dtype="fp32", device="cpu", overrides=Overrides(kernel="reference"))
    assert float((layer(x).double() - truth).norm() / truth.norm()) < 1e-5
    fast = load_layer(path, 1, device="cpu")
    logits = x @ tensors["ffn_gate_inp.weight"].T
    found = fast(x.bfloat16(), router_logits=logits)
    wanted = layer(x.bfloat16().float(), router_logits=logits)
    assert float((found.float() - wanted).norm() / wanted.norm()) < 1e-2


def test_shared_gate_of_two_dimensions(tmp_path: Path) -> None:
    """Converters that do not squeeze the row write it as a matrix."""
    case = CASES["Qwen2"]
    path = tmp_path / "model.gguf"
    tensors = write(path, case, more={"ffn_gate_inp_shexp.weight": (1, H)})
    x = torch.randn(5, H, generator=torch.Generator().manual_seed(2))
    layer = load_layer(path, 1, dtype="fp32", device="cpu", overrides=Overrides(kernel="reference"))
    truth = layer_truth(case, tensors, x)
    assert float((layer(x).double() - truth).norm() / truth.norm()) < 1e-5


@pytest.mark.parametrize(("name", "missing"), [
    ("MiniMax", "exp_probs_b.bias"), ("Qwen2", "ffn_gate_inp_shexp.weight"), ("Hunyuan", "ffn_up_shexp.weight"),
])  # fmt: skip
def test_required_tensor_is_missed(tmp_path: Path, name: str, missing: str) -> None:
    path = tmp_path / "model.gguf"
    write(path, CASES[name], without=(missing,))
    with pytest.raises(MissingTensorError) as caught:
        load_layer(path, 1, device="cpu")
    assert missing.partition(".")[0] in str(caught.value)


@pytest.mark.parametrize(("name", "tensor", "shape"), [
    ("Qwen2", "exp_probs_b.bias", (E,)),
    ("Hunyuan", "exp_probs_b.bias", (E,)),
    ("Hunyuan", "ffn_gate_inp_shexp.weight", (H,)),
    ("ERNIE, no bias", "ffn_up_shexp.weight", (N, H)),
    ("ERNIE", "ffn_gate_inp_shexp.weight", (H,)),
    ("Ling", "ffn_gate_inp.bias", (E,)),
    ("MiniMax", "ffn_up_shexp.weight", (N, H)),
    ("Llama-4", "exp_probs_b.bias", (E,)),
    ("LFM2", "ffn_up_shexp.weight", (N, H)),
    ("Nemotron", "ffn_gate_shexp.weight", (512, H)),
])  # fmt: skip
def test_unused_tensor_is_named(tmp_path: Path, name: str, tensor: str, shape: tuple[int, ...]) -> None:
    path = tmp_path / "model.gguf"
    write(path, CASES[name], more={tensor: shape})
    with pytest.raises(UnknownTensorError) as caught:
        load_layer(path, 1, device="cpu")
    assert tensor.partition(".")[0] in str(caught.value)


@pytest.mark.parametrize(("name", "key"), [
    ("Ling", "expert_gating_func"), ("MiniMax", "expert_gating_func"), ("Hunyuan", "expert_shared_feed_forward_length"),
    ("LFM2", "expert_gating_func"), ("Kimi", "expert_gating_func"), ("Llama-4", "interleave_moe_layer_step"),
    ("Nemotron", "feed_forward_length"),
])  # fmt: skip
def test_required_metadata_is_missed(tmp_path: Path, name: str, key: str) -> None:
    case = CASES[name]
    path = tmp_path / "model.gguf"
    write(path, case._replace(entries={k: v for k, v in case.entries.items() if k != key}))
    with raises_with(ConfigError, key):
        load_layer(path, 1, device="cpu")


def test_latent_experts_are_refused(tmp_path: Path) -> None:
    case = CASES["Nemotron"]
    path = tmp_path / "model.gguf"
    write(path, case._replace(entries={**case.entries, "moe_latent_size": 64}))
    with raises_with(ConfigError, "moe_latent_size"):
        load_layer(path, 1, device="cpu")


def _write_gemma(path: Path, rng: np.random.Generator) -> dict[str, Tensor]:
    """Write one layer of Gemma-4 with fused gate and up; return the decoded tensors by name."""
    writer = gguf.GGUFWriter(path, "gemma4")
    writer.add_block_count(1)
    writer.add_embedding_length(H)
    writer.add_expert_count(E)
    writer.add_expert_used_count(K)
    writer.add_expert_feed_forward_length(N)
    writer.add_array("gemma4.feed_forward_length", [2 * N])
    writer.add_layer_norm_rms_eps(1e-6)
    stacks = {"ffn_gate_up_exps": ("Q4_K", (E, 2 * N, H)), "ffn_down_exps": ("Q8_0", (E, H, N))}
    decoded = {name: add(writer, f"blk.0.{name}.weight", kind, rng, shape) for name, (kind, shape) in stacks.items()}
    plain = {
        "ffn_gate_inp.weight": (0.5, (E, H)), "ffn_gate_inp.scale": (1.0, (H,)), "ffn_down_exps.scale": (1.0, (E,)),
        "ffn_gate.weight": (1.0, (2 * N, H)), "ffn_up.weight": (1.0, (2 * N, H)), "ffn_down.weight": (1.0, (H, 2 * N)),
        "ffn_norm.weight": (1.0, (H,)), "pre_ffw_norm_2.weight": (1.0, (H,)), "post_ffw_norm_1.weight": (1.0, (H,)),
    }  # fmt: skip
    for name, (factor, shape) in plain.items():
        values = (rng.standard_t(3, shape) * factor).astype(np.float32)
        writer.add_tensor(f"blk.0.{name}", values)
        decoded[name] = torch.from_numpy(values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return decoded


def test_gemma_layers_route_another_input(tmp_path: Path) -> None:
    """The router normalises and scales its input; a factor of each expert multiplies its output; GELU, not SiLU."""
    path = tmp_path / "model.gguf"
    w = {name: tensor.double() for name, tensor in _write_gemma(path, np.random.default_rng(3)).items()}
    generator = torch.Generator().manual_seed(4)
    x, seen = torch.randn(2, 19, H, generator=generator)
    layer = load_layer(path, 0, dtype="fp32", device="cpu", overrides=Overrides(kernel="reference"))
    rows = seen.double()
    rows = rows / (rows.square().mean(-1, keepdim=True) + 1e-6).sqrt() * H**-0.5 * w["ffn_gate_inp.scale"]
    scores = torch.softmax(rows @ w["ffn_gate_inp.weight"].T, -1)
    share, ids = scores.topk(K, -1)
    share = share / share.sum(-1, keepdim=True)
    wanted = torch.zeros(19, H, dtype=torch.float64)
    for token in range(19):
        for expert, part in zip(ids[token].tolist(), share[token], strict=True):
            gate, up = (w["ffn_gate_up_exps"][expert] @ x[token].double()).chunk(2)
            hidden = torch.nn.functional.gelu(gate, approximate="tanh") * up
            wanted[token] += part * w["ffn_down_exps.scale"][expert] * (w["ffn_down_exps"][expert] @ hidden)
    found = layer(x, router_input=seen).double()
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5
