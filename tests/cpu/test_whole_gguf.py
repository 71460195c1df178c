"""Whole models in GGUF files: logits against the model of the decoded numbers, and what the commands make of one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFWriter
from tokenizers import decoders, models, pre_tokenizers

import gguf_files
from collegium.checkpoint import reader
from collegium.errors import ConfigError, MissingTensorError
from collegium.integrations.transformers import load_model
from collegium.integrations.transformers.loading import load_model_in
from commands import command
from integers import random_blocks
from raising import raises_with

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

D, WIDE, EXPERTS, LAYERS, HEADS, KEYS, WIDTH = 256, 128, 4, 2, 4, 2, 64
WORDS = [chr(33 + i) for i in range(93)] + ["ab", "<s>", "</s>"]
SIZES: dict[str, Any] = {
    "hidden_size": D, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KEYS,
    "num_experts_per_tok": 2, "vocab_size": len(WORDS), "max_position_embeddings": 128, "rms_norm_eps": 3e-6,
}  # fmt: skip
ROPE = {"rope_theta": 7e5, "rope_type": "default"}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 7e5,
    "truncate": False,
}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3moe": (
        {"model_type": "qwen3_moe", "num_experts": EXPERTS, "moe_intermediate_size": WIDE, "intermediate_size": 64,
         "head_dim": WIDTH, "norm_topk_prob": True, "rope_parameters": ROPE, "tie_word_embeddings": True},
        {"expert_feed_forward_length": WIDE, "feed_forward_length": 64},
    ),
    "qwen2moe": (
        {"model_type": "qwen2_moe", "num_experts": EXPERTS, "moe_intermediate_size": WIDE, "intermediate_size": 64,
         "shared_expert_intermediate_size": 96, "head_dim": WIDTH, "norm_topk_prob": False, "rope_parameters": ROPE},
        {"expert_feed_forward_length": WIDE, "feed_forward_length": 64, "expert_shared_feed_forward_length": 96},
    ),
    "olmoe": (
        {"model_type": "olmoe", "num_experts": EXPERTS, "intermediate_size": WIDE, "norm_topk_prob": False,
         "rope_parameters": ROPE},
        {"feed_forward_length": WIDE},
    ),
    "llama": (
        {"model_type": "mixtral", "num_local_experts": EXPERTS, "intermediate_size": WIDE, "rope_parameters": ROPE},
        {"feed_forward_length": WIDE},
    ),
    "gpt-oss": (
        {"model_type": "gpt_oss", "num_local_experts": EXPERTS, "intermediate_size": WIDE, "head_dim": WIDTH,
         "sliding_window": 8, "rope_parameters": YARN | {"beta_fast": 32.0, "beta_slow": 1.0}},
        {"expert_feed_forward_length": WIDE, "attention.sliding_window": 8, "rope.scaling.type": "yarn",
         "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
    ),
    "glm4moe": (
        {"model_type": "glm4_moe", "n_routed_experts": EXPERTS, "moe_intermediate_size": WIDE, "intermediate_size": 64,
         "head_dim": WIDTH, "n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
         "norm_topk_prob": True, "n_group": 2, "topk_group": 1, "attention_bias": True, "use_qk_norm": True,
         "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
        {"expert_feed_forward_length": WIDE, "feed_forward_length": 64, "expert_shared_count": 2,
         "leading_dense_block_count": 1, "expert_weights_scale": 1.5, "expert_weights_norm": True,
         "expert_group_count": 2, "expert_group_used_count": 1, "rope.dimension_count": WIDTH // 2,
         "expert_gating_func": 2},
    ),
    "minimax-m2": (
        {"model_type": "minimax_m2", "num_local_experts": EXPERTS, "intermediate_size": WIDE, "head_dim": WIDTH,
         "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
        {"expert_feed_forward_length": WIDE, "rope.dimension_count": WIDTH // 2, "expert_gating_func": 2},
    ),
}  # fmt: skip


def turned(rows: Tensor, heads: int) -> Tensor:
    """Queries or keys as llama.cpp stores those of Llama and Mixtral: the halves of a head in turns."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(rows.shape)


def pieces(arch: str, name: str, value: Tensor) -> dict[str, Tensor]:
    """Return parameter ``name`` of transformers under the names and in the order of a GGUF file."""
    layer = name.split(".")[2] if ".layers." in name else ""
    if ".experts." in name:
        kind = name.rpartition(".")[2]
        suffix = "bias" if kind.endswith("_bias") else "weight"
        if arch == "gpt-oss":
            value = value if suffix == "bias" else value.transpose(1, 2)
            gate, up = (value[:, 0::2], value[:, 1::2])
        else:
            gate, up = value[:, :WIDE], value[:, WIDE:]
        found = {"down": value} if kind.startswith("down") else {"gate": gate, "up": up}
        return {f"blk.{layer}.ffn_{own}_exps.{suffix}": t for own, t in found.items()}
    base, _, suffix = name.rpartition(".")
    if name.endswith(".e_score_correction_bias"):
        return {f"blk.{layer}.exp_probs_b.bias": value}
    if name.endswith(".sinks"):
        return {f"blk.{layer}.attn_sinks.weight": value}
    table = gguf.get_tensor_name_map(next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == arch), LAYERS)
    own = table.get_name(base.replace("mlp.gate", "block_sparse_moe.gate") if arch == "llama" else base)
    assert own is not None, name
    if arch == "llama" and own.endswith(("attn_q", "attn_k")):
        value = turned(value, HEADS if own.endswith("q") else KEYS)
    if own.endswith("ffn_gate_inp_shexp"):
        value = value.squeeze(0)
    return {f"{own}.{suffix}": value}


MIXTURE = ("Q8_0", "Q4_0", "Q5_1", "F16")
# As in files of two and three bits; blocks of 256 fit in no row of 128 columns, which get blocks of 32.
LOW_BITS = ("Q2_K", "IQ2_XXS", "IQ4_XS", "IQ3_S", "Q3_K", "NVFP4", "TQ2_0", "IQ1_M")


def stored(kind: str, value: Tensor) -> np.ndarray:
    """Return ``value`` as blocks of a kind, or random blocks of a kind that the package cannot write."""
    try:
        return gguf.quantize(value.contiguous().numpy(), GGMLQuantizationType[kind])
    except NotImplementedError:
        if kind == "NVFP4":
            return gguf_files.random_blocks(np.random.default_rng(0), kind, *value.shape)
        return random_blocks(kind, *value.shape).blocks.flatten(-2).numpy()


def whole(arch: str, path: Path, *, drop: str = "", mixture: tuple[str, ...] = MIXTURE, **changes: Any) -> nn.Module:
    """Write a toy model as ``path`` and return the model of transformers that has the decoded numbers, in float32.

    mixture: kinds of the matrices, in turn.
    """
    entries, metadata = KINDS[arch]
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(**(SIZES | entries))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    writer = GGUFWriter(path, arch)
    facts = {
        "context_length": 128, "embedding_length": D, "block_count": LAYERS, "attention.head_count": HEADS,
        "attention.head_count_kv": KEYS, "attention.key_length": WIDTH, "attention.layer_norm_rms_epsilon": 3e-6,
        "rope.freq_base": 7e5, "expert_count": EXPERTS, "expert_used_count": 2,
    }  # fmt: skip
    for key, value in (facts | metadata | changes).items():
        adders = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, bool: writer.add_bool}
        add = adders[type(value)]
        add(f"{arch}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(WORDS)
    writer.add_token_types([1] * 94 + [3, 3])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(94)
    writer.add_eos_token_id(95)
    with torch.no_grad():
        biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
        for at, (name, parameter) in enumerate([*model.named_parameters(), *biases]):
            parameter.copy_(torch.distributions.StudentT(4.0).sample(parameter.shape) / 2**0.5)
            parameter.mul_(parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1)
            kind = mixture[at % len(mixture)] if parameter.dim() > 1 and "bias" not in name else "F32"
            if ".experts." in name and kind == "F16":
                kind = "Q8_0"
            if ".shared_expert" in name:  # gate and up share a kind
                kind = "Q5_1" if ".down" in name else "Q8_0"
            if mixture is LOW_BITS and kind != "F32" and parameter.shape[-1] % 256:
                kind = "IQ4_NL"
            kind = "F32" if name.endswith(("mlp.gate.weight", "router.weight", "shared_expert_gate.weight")) else kind
            decoded = {}
            for own, value in pieces(arch, name, parameter).items():
                if own == drop:
                    continue
                raw = stored(kind, value)
                writer.add_tensor(own, raw, raw_dtype=GGMLQuantizationType[kind])
                decoded[own] = torch.from_numpy(gguf.dequantize(raw, GGMLQuantizationType[kind]).copy())
            put_back(arch, name, parameter, decoded)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model.eval()


def put_back(arch: str, name: str, parameter: Tensor, decoded: dict[str, Tensor]) -> None:
    """Write what a file says of a parameter into it: each number of ``pieces`` where it came from."""
    numbers = torch.arange(parameter.numel(), dtype=torch.float64).view(parameter.shape)
    for own, places in pieces(arch, name, numbers).items():
        if own in decoded:
            parameter.view(-1)[places.long().flatten()] = decoded[own].flatten()


def test_low_bit_mixture_matches_decoded_weights(tmp_path: Path) -> None:
    truth = whole("qwen3moe", tmp_path / "model.gguf", mixture=LOW_BITS)
    ids = torch.arange(40).view(2, 20) * 2
    with torch.inference_mode():
        wanted = truth(ids).logits
        for dtype, most in (("fp32", 1e-5), ("bf16", 0.1)):
            found = load_model_in(dtype, tmp_path / "model.gguf", device="cpu")(ids).logits.float()
            assert float((found - wanted).norm() / wanted.norm()) < most


@pytest.mark.parametrize("arch", KINDS)
def test_matches_model_of_decoded_weights(arch: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    truth = whole(arch, tmp_path / "model.gguf")
    ids = torch.arange(40).view(2, 20) * 2
    with torch.inference_mode():
        wanted = truth(ids).logits
        for path in (tmp_path / "model.gguf", tmp_path):
            model = load_model_in("fp32", path, device="cpu")
            found = model(ids).logits
            assert float((found - wanted).norm() / wanted.norm()) < 1e-5
    assert model.config.eos_token_id == 95
    assert "outside the experts" in caplog.text


def test_qwen2_without_widths_matches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = KINDS["qwen2moe"][0] | {"shared_expert_intermediate_size": 2 * WIDE}
    monkeypatch.setitem(KINDS, "qwen2moe", (entries, {"feed_forward_length": 2 * WIDE}))
    truth = whole("qwen2moe", tmp_path / "model.gguf")
    ids = torch.arange(40).view(2, 20) * 2
    with torch.inference_mode():
        wanted = truth(ids).logits
        found = load_model_in("fp32", tmp_path / "model.gguf", device="cpu")(ids).logits
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5


def test_layers_ahead_are_not_loaded(tmp_path: Path) -> None:
    """The last layer of GLM-4.5's files predicts more tokens."""
    truth = whole("glm4moe", tmp_path / "model.gguf", block_count=LAYERS + 1, nextn_predict_layers=1)
    ids = torch.arange(40).view(2, 20) * 2
    with torch.inference_mode():
        wanted = truth(ids).logits
        found = load_model_in("fp32", tmp_path / "model.gguf", device="cpu")(ids).logits
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5


@pytest.mark.parametrize(("arch", "key", "value"), [
    ("glm4moe", "expert_gating_func", 1), ("minimax-m2", "expert_gating_func", 1),
    ("minimax-m2", "expert_weights_norm", False), ("minimax-m2", "expert_weights_scale", 2.0),
])  # fmt: skip
def test_routing_the_class_lacks(tmp_path: Path, arch: str, key: str, value: Any) -> None:
    whole(arch, tmp_path / "model.gguf", **{key: value})
    with raises_with(ConfigError, key if key == "expert_gating_func" else "expert_weights_norm"):
        load_model(tmp_path / "model.gguf", device="cpu")


@pytest.mark.parametrize("arch", ["qwen3moe", "gpt-oss"])
def test_generated_text_is_reproducible(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole(arch, tmp_path / "model.gguf")
    opened, read = list[str](), reader.read_gguf

    def watched(path: Path) -> Any:
        opened.append(path.name)
        return read(path)

    monkeypatch.setattr(reader, "read_gguf", watched)
    if arch == "gpt-oss":  # whose metadata transformers 5.23 stumbles over
        code, out, _ = command("generate", tmp_path, "--prompt", "abc", "--device", "cpu", "--json")
        assert code == 1
        assert "tokenizer.json" in json.loads(out)["error"]["message"]
        words = models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="!")
        own = tokenizers.Tokenizer(words)
        own.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        own.decoder = decoders.Fuse()
        own.save(str(tmp_path / "tokenizer.json"))
    texts = set()
    for path in (tmp_path / "model.gguf", tmp_path):
        opened.clear()
        code, out, said = command("generate", path, "--prompt", "abc", "--tokens", 6, "--device", "cpu", "--json")
        assert code == 0, (said, out)
        assert opened == ["model.gguf"]  # a header of many tensors takes seconds
        texts.add(json.loads(out)["text"])
    assert len(texts) == 1
    assert texts.pop().startswith("abc")


def test_unsupported_files_refused_by_name(tmp_path: Path) -> None:
    whole("qwen3moe", tmp_path / "a.gguf", **{"rope.scaling.type": "longrope"})
    with raises_with(ConfigError, "rope.scaling.type"):
        load_model(tmp_path / "a.gguf", device="cpu")
    whole("qwen3moe", tmp_path / "c.gguf", block_count=10**6)
    with raises_with(ConfigError, "block_count", "1000000"):
        load_model(tmp_path / "c.gguf", device="cpu")
    whole("qwen3moe", tmp_path / "b.gguf", drop="blk.1.attn_norm.weight")
    with pytest.raises(MissingTensorError, match=r"model\.layers\.1\.input_layernorm\.weight"):
        load_model(tmp_path / "b.gguf", device="cpu")


@pytest.mark.parametrize("arch", KINDS)
def test_inspect_lists_decoded_dense_matrices(arch: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole(arch, tmp_path / "model.gguf")
    code, out, _ = command("inspect", tmp_path / "model.gguf", "--device", "cpu", "--json")
    assert code == 0
    findings = [text for text in json.loads(out)["findings"] if "outside the experts" in text]
    load_model(tmp_path / "model.gguf", device="cpu")
    assert len(findings) == 1
    # attention of both layers, the embeddings and the head are blocks but for those of the kind F16
    assert int(findings[0].split()[0]) > LAYERS
    assert findings[0] in caplog.text
