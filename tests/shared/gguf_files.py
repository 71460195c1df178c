"""GGUF files of toy models, written by the ``gguf`` package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from collegium.dummy.encoders import write_half
from collegium.formats.gguf import KINDS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

__all__ = ["ARCHITECTURES", "D", "E", "add", "random_blocks", "theirs", "write_gguf"]

D, E = 512, 4


def random_blocks(rng: np.random.Generator, kind: str, *shape: int) -> np.ndarray:
    """Random bytes ``[*shape, K]`` of a kind as stored, every half finite."""
    if kind == "NVFP4":
        blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // 64, 36), dtype=np.uint8)
        blocks[..., :4] = rng.integers(8, 32, (*blocks.shape[:-1], 4))
        return blocks.reshape(*shape[:-1], -1)
    entry = KINDS[kind]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // entry.elements, entry.nbytes), dtype=np.uint8)
    for index in range(entry.terms):
        halves = (rng.standard_normal(blocks.shape[:-1]) * 2**-6).astype(np.float16)
        write_half(kind, torch.from_numpy(blocks), index, torch.from_numpy(halves))
    if not entry.terms:
        blocks[..., 0] = rng.integers(110, 128, blocks.shape[:-1])
    return blocks.reshape(*shape[:-1], -1)


def theirs(raw: np.ndarray, kind: str) -> Tensor:
    return torch.from_numpy(gguf.dequantize(raw, GGMLQuantizationType[kind]))


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3moe": {},
    "llama": {},
    "olmoe": {},
    "deepseek2": {
        "leading_dense_block_count": 1, "expert_shared_count": 1, "expert_gating_func": 2, "expert_weights_scale": 2.5,
        "expert_weights_norm": True, "expert_group_count": 2, "expert_group_used_count": 1,
    },
    "glm4moe": {
        "leading_dense_block_count": 1, "expert_shared_count": 1, "nextn_predict_layers": 1,
        "expert_weights_scale": 1.0, "expert_weights_norm": True,
    },
    "gpt-oss": {},
}  # fmt: skip


def add(writer: GGUFWriter, name: str, kind: str, rng: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    """Write a random tensor of a kind; return its values as the package decodes them."""
    if kind in ("F32", "F16"):
        values = rng.standard_normal(shape).astype({"F32": np.float32, "F16": np.float16}[kind])
        writer.add_tensor(name, values)
        return torch.from_numpy(values.astype(np.float32))
    raw_kind = GGMLQuantizationType[kind]
    if kind == "BF16":
        raw = gguf.quantize(rng.standard_normal(shape).astype(np.float32), raw_kind)
    else:
        raw = random_blocks(rng, kind, *shape)
    writer.add_tensor(name, raw, raw_dtype=raw_kind)
    return theirs(raw, kind)


def write_gguf(
    path: Path,
    arch: str,
    kinds: tuple[str, ...],
    *,
    wide: int = 256,
    fused: bool = False,
    split: str | None = None,
    others: Mapping[str, str] | None = None,
    router: str = "F32",
) -> dict[tuple[int, str], Tensor]:
    """Write a model of two layers (the last is MoE for all); return values of layer 1 by (layer, tensor).

    kinds: of gate and up, and of down, then those of layer 1 if they differ. others: the kinds of tensors that have
    another one, by name.
    """
    others = others or {}
    writer = GGUFWriter(path, arch, **({} if split is None else {"split_max_tensors": 5}))
    writer.add_block_count(2 + ARCHITECTURES[arch].get("nextn_predict_layers", 0))
    writer.add_embedding_length(D)
    writer.add_expert_count(E)
    writer.add_expert_used_count(2)
    if arch == "llama":
        writer.add_feed_forward_length(wide)
    else:
        writer.add_expert_feed_forward_length(wide)
    for key, value in ARCHITECTURES[arch].items():
        method = {bool: writer.add_bool, float: writer.add_float32}.get(type(value), writer.add_uint32)
        method(f"{arch}.{key}", value)
    writer.add_token_list([b"a", b"bc"])
    writer.add_array("tokenizer.ggml.scores", [1.0, 2.0])
    writer.add_string("tokenizer.chat_template", "x" * 70_000)
    rng = np.random.default_rng(3)
    truth: dict[tuple[int, str], Tensor] = {}
    first = ARCHITECTURES[arch].get("leading_dense_block_count", 0)
    for layer in range(first, 2 + ARCHITECTURES[arch].get("nextn_predict_layers", 0)):
        pair = kinds[-2:] if layer == 1 else kinds[:2]
        shapes = {"ffn_gate_exps": (E, wide, D), "ffn_up_exps": (E, wide, D), "ffn_down_exps": (E, D, wide)}
        if fused:
            shapes = {"ffn_gate_up_exps": (E, 2 * wide, D), "ffn_down_exps": (E, D, wide)}
        for name, shape in shapes.items():
            kind = others.get(name, pair[name == "ffn_down_exps"])
            truth[layer, name] = add(writer, f"blk.{layer}.{name}.weight", kind, rng, shape)
        truth[layer, "router"] = add(writer, f"blk.{layer}.ffn_gate_inp.weight", router, rng, (E, D))
        if arch == "gpt-oss":
            add(writer, f"blk.{layer}.ffn_gate_inp.bias", "F32", rng, (E,))
            for name in ("gate", "up", "down"):
                shape = (E, D if name == "down" else wide)
                truth[layer, f"{name}_bias"] = add(writer, f"blk.{layer}.ffn_{name}_exps.bias", "F32", rng, shape)
        if "expert_shared_count" in ARCHITECTURES[arch]:
            add(writer, f"blk.{layer}.exp_probs_b.bias", "F32", rng, (E,))
            for name in ("gate", "up", "down"):
                shape = (D, wide) if name == "down" else (wide, D)
                kind = others.get(f"ffn_{name}_shexp", pair[name == "down"])
                truth[layer, f"{name}_shexp"] = add(writer, f"blk.{layer}.ffn_{name}_shexp.weight", kind, rng, shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return truth
