"""Routing of GGUF files: gating function, bias that chooses the experts, and tensors that nothing would use.

The truth is llama.cpp's rule (``build_moe_ffn``) in float64: scores, plus the bias to choose, without it to weigh.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch

from collegium import load_layer
from collegium.checkpoint import Checkpoint, audit
from collegium.commands.inspect import inspect_model, plan_model
from collegium.errors import ConfigError, MissingTensorError, UnknownTensorError
from raising import raises_with

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

E, H, N, K = 8, 100, 72, 3
FLASH = 154880


def tensors_of(arch: str, layer: int, *, bias: bool) -> dict[str, NDArray[np.float32]]:
    """Make one layer with heavy tails; the bias prefers experts that the scores do not."""
    rng = np.random.default_rng(11)
    shapes = {"ffn_gate_inp": (E, H), "ffn_gate_exps": (E, N, H), "ffn_up_exps": (E, N, H), "ffn_down_exps": (E, H, N)}
    if arch == "glm4moe":
        shapes |= {"ffn_gate_shexp": (N, H), "ffn_up_shexp": (N, H), "ffn_down_shexp": (H, N)}
    made = {
        f"blk.{layer}.{name}.weight": rng.standard_t(3, shape) * (0.05 if name == "ffn_gate_inp" else 0.1)
        for name, shape in shapes.items()
    }
    if bias:
        made[f"blk.{layer}.exp_probs_b.bias"] = rng.standard_normal(E) * 0.5
    return {name: value.astype(np.float32) for name, value in made.items()}


def write(
    path: Path,
    arch: str,
    entries: dict[str, Any],
    *,
    bias: bool = True,
    layers: int = 1,
    more: dict[str, tuple[int, ...]] | None = None,
) -> dict[str, NDArray[np.float32]]:
    """Write a file whose last layer alone has experts; more: shapes of further tensors. Returns its tensors."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(layers)
    writer.add_embedding_length(H)
    writer.add_expert_count(E)
    writer.add_expert_used_count(K)
    writer.add_expert_feed_forward_length(N)
    if layers > 1:
        writer.add_leading_dense_block_count(layers - 1)
    if arch == "glm4moe":
        writer.add_expert_shared_count(1)
    for key, value in entries.items():
        if key == "tokens":
            writer.add_token_list([b"a"] * value)
            continue
        add = {bool: writer.add_bool, float: writer.add_float32}.get(type(value), writer.add_uint32)
        add(f"{arch}.{key}", value)
    made = tensors_of(arch, layers - 1, bias=bias)
    rng = np.random.default_rng(12)
    made |= {name: rng.standard_normal(shape).astype(np.float32) for name, shape in (more or {}).items()}
    for name, tensor in made.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return made


def layer_truth(
    made: dict[str, NDArray[np.float32]], layer: int, x: Tensor, *, sigmoid: bool, norm: bool, scale: float = 1.0
) -> Tensor:
    """Compute the layer in float64."""
    w = {
        name.split(".")[2]: torch.from_numpy(t).double() for name, t in made.items() if name.startswith(f"blk.{layer}.")
    }
    x = x.double()
    logits = x @ w["ffn_gate_inp"].T
    scores = torch.sigmoid(logits) if sigmoid else torch.softmax(logits, -1)
    ids = (scores + w.get("exp_probs_b", torch.zeros(E))).topk(K, -1).indices
    weights = scores.gather(-1, ids)
    weights = scale * (weights / weights.sum(-1, keepdim=True) if norm else weights)

    def mlp(row: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        hidden = gate @ row
        return down @ (hidden / (1 + torch.exp(-hidden)) * (up @ row))

    y = torch.zeros_like(x)
    for token, row in enumerate(x):
        for slot in range(K):
            e = int(ids[token, slot])
            y[token] += weights[token, slot] * mlp(row, *(w[f"ffn_{n}_exps"][e] for n in ("gate", "up", "down")))
        if "ffn_up_shexp" in w:
            y[token] += mlp(row, *(w[f"ffn_{n}_shexp"] for n in ("gate", "up", "down")))
    return y


NORM = {"expert_weights_norm": True}
# architecture, metadata, whether the file has the bias, whether scores are sigmoids, whether weights are renormalised
ROUTINGS: dict[str, tuple[str, dict[str, Any], bool, bool, bool]] = {
    "softmax and bias": ("deepseek2", {**NORM, "expert_gating_func": 1}, True, False, True),
    "softmax and bias, not renormalised": ("deepseek2", {"expert_gating_func": 1}, True, False, False),
    "sigmoid and bias": ("deepseek2", {**NORM, "expert_gating_func": 2}, True, True, True),
    "sigmoid alone": ("deepseek2", {**NORM, "expert_gating_func": 2}, False, True, True),
    "nothing": ("deepseek2", NORM, False, False, True),
    "GLM-4.5": ("glm4moe", NORM, True, True, True),
    "GLM-4.5 without an entry": ("glm4moe", {}, True, True, False),
    "GLM-4.5 with softmax": ("glm4moe", {**NORM, "expert_gating_func": 1}, True, False, True),
    "Qwen3": ("qwen3moe", {}, False, False, True),
    "OLMoE": ("olmoe", {}, False, False, False),
}


@pytest.mark.parametrize("name", list(ROUTINGS))
def test_bias_chooses_and_scores_weigh(tmp_path: Path, name: str) -> None:
    arch, entries, bias, sigmoid, norm = ROUTINGS[name]
    path = tmp_path / "model.gguf"
    made = write(path, arch, {**entries, "expert_weights_scale": 1.75}, bias=bias)
    x = torch.randn(19, H, generator=torch.Generator().manual_seed(1))
    truth = layer_truth(made, 0, x, sigmoid=sigmoid, norm=norm, scale=1.75)
    found = load_layer(path, 0, dtype="fp32", device="cpu")(x).double()
    assert float((found - truth).norm() / truth.norm()) < 1e-5
    if bias:  # the bias matters
        bare = {key: value for key, value in made.items() if "exp_probs_b" not in key}
        without = layer_truth(bare, 0, x, sigmoid=sigmoid, norm=norm, scale=1.75)
        assert float((found - without).norm() / truth.norm()) > 0.1
    assert inspect_model(str(path), device="cpu").spec.routing.correction_bias is bias
    assert plan_model(str(path), device="cpu").problem.spec.routing.correction_bias is bias


@pytest.mark.parametrize("layers", [47, 48])
@pytest.mark.parametrize("vocabulary", [{"vocab_size": FLASH}, {"tokens": FLASH}])
def test_flash_files_are_sigmoid(tmp_path: Path, layers: int, vocabulary: dict[str, int]) -> None:
    path = tmp_path / "model.gguf"
    made = write(path, "deepseek2", {**NORM, **vocabulary}, layers=layers)
    x = torch.randn(11, H, generator=torch.Generator().manual_seed(1))
    truth = layer_truth(made, layers - 1, x, sigmoid=True, norm=True)
    found = load_layer(path, layers - 1, dtype="fp32", device="cpu")(x).double()
    assert float((found - truth).norm() / truth.norm()) < 1e-5


@pytest.mark.parametrize("entries", [{}, {"vocab_size": FLASH}, {"vocab_size": 1000, "expert_gating_func": 0}])
def test_bias_without_gating_is_refused(tmp_path: Path, entries: dict[str, int]) -> None:
    path = tmp_path / "model.gguf"
    write(path, "deepseek2", {**NORM, **entries})
    for call in (lambda: load_layer(path, 0), lambda: audit(Checkpoint.open(path)), lambda: plan_model(str(path))):
        with raises_with(ConfigError, "expert_gating_func", "exp_probs_b"):
            call()


def test_required_bias_is_missed(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, "glm4moe", NORM, bias=False)
    with pytest.raises(MissingTensorError, match=r"exp_probs_b\.bias"):
        load_layer(path, 0, device="cpu")


UNUSED = {
    "exp_probs_b.bias": (E,),
    "exp_probs_b.weight": (E,),
    "ffn_gate_inp.bias": (E,),
    "ffn_gate_inp.scale": (H,),
    "ffn_gate_inp_shexp.weight": (H,),
    "ffn_up_shexp.weight": (N, H),
    "ffn_gate.weight": (N, H),
    "ffn_down_exps.scale": (E,),
    "ffn_up_exps.bias": (E, N),
    "ffn_gate_chexps.weight": (E, N, H),
    "ffn_latent_down.weight": (N, H),
    "ffn_norm_exps.weight": (H,),
    "ffn_gate_inp_norm.weight": (H,),
}


@pytest.mark.parametrize("name", list(UNUSED))
@pytest.mark.parametrize("arch", ["qwen3moe", "llama", "olmoe"])
def test_unused_tensor_is_named(tmp_path: Path, name: str, arch: str) -> None:
    path = tmp_path / "model.gguf"
    write(path, arch, {"feed_forward_length": N}, bias=False, more={f"blk.0.{name}": UNUSED[name]})
    # a tensor of a stack has its projection behind it
    stem = name.partition(".")[0].removesuffix("_exps").removeprefix("ffn_")
    for call in (lambda: load_layer(path, 0, device="cpu"), lambda: inspect_model(str(path), deep=False, device="cpu")):
        with pytest.raises(UnknownTensorError) as caught:
            call()
        assert stem in str(caught.value)


def test_tensors_of_the_rest_are_accepted(tmp_path: Path) -> None:
    names = ("attn_q", "attn_gate", "attn_norm", "ffn_norm", "post_ffw_norm", "attn_rot_embd", "nextn.eh_proj")
    more = {f"blk.0.{name}.weight": (H,) for name in names} | {"rope_freqs.weight": (4,), "blk.0.attn_sinks": (2,)}
    path = tmp_path / "model.gguf"
    write(path, "qwen3moe", {}, bias=False, more=more)
    audit(Checkpoint.open(path))
    assert load_layer(path, 0, device="cpu").spec.num_experts == E
