"""DeepSeek-V4 as it is published, small: names and dtypes on disk, and what a layer computes.

Bytes are drawn and decoded here by tables and powers of two, without the package's formats.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

__all__ = ["EXPERTS", "HASHED", "LAYERS", "ROUTED", "VOCABULARY", "Toy", "write", "write_v41"]

EXPERTS, TOP_K, VOCABULARY, LAYERS, HASHED = 6, 2, 40, 5, 3
LIMIT = 1.25
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def config(kind: str, width: int, wide: int) -> dict[str, Any]:
    block: dict[str, Any] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    }  # fmt: skip
    if kind == "nvfp4":
        block |= {"moe_quant_algo": "NVFP4", "ignore": ["mtp.*"]}
    return {
        "model_type": "deepseek_v4", "hidden_size": width, "moe_intermediate_size": wide, "num_hidden_layers": LAYERS,
        "n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": TOP_K, "vocab_size": VOCABULARY,
        "num_hash_layers": HASHED, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True,
        "routed_scaling_factor": 1.5, "swiglu_limit": LIMIT, "hidden_act": "silu", "torch_dtype": "bfloat16",
        "expert_dtype": "fp8" if kind == "fp8_block" else "fp4", "quantization_config": block,
    }  # fmt: skip


def powers(*shape: int) -> Tensor:
    """E8M0 bytes of 2^-8 to 2^-5."""
    return torch.randint(119, 123, shape, dtype=torch.uint8)


def nibbles(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    raw = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    return raw, E2M1[torch.stack((raw & 15, raw >> 4), -1).flatten(1).long()]


def mxfp4(path: str, rows: int, columns: int) -> tuple[dict[str, Tensor], Tensor]:
    raw, values = nibbles(rows, columns)
    scale = powers(rows, columns // 32)
    stored = {f"{path}.weight": raw.view(torch.int8), f"{path}.scale": scale.view(torch.float8_e8m0fnu)}
    return stored, values * torch.exp2(scale.float() - 127).repeat_interleave(32, 1)


def nvfp4(path: str, rows: int, columns: int) -> tuple[dict[str, Tensor], Tensor]:
    raw, values = nibbles(rows, columns)
    scale = (torch.rand(rows, columns // 16) * 400 + 40).to(torch.float8_e4m3fn)
    whole = torch.rand(()) * 1e-4 + 5e-5
    stored = {
        f"{path}.weight": raw, f"{path}.weight_scale": scale, f"{path}.weight_scale_2": whole,
        f"{path}.input_scale": torch.tensor(1.0),
    }  # fmt: skip
    return stored, values * (scale.float() * whole).repeat_interleave(16, 1)


def fp8(
    path: str, rows: int, columns: int, *, typed: bool = True, block: int = 128
) -> tuple[dict[str, Tensor], Tensor]:
    codes = (torch.randn(rows, columns) * 8).to(torch.float8_e4m3fn)
    scale = powers(-(-rows // block), -(-columns // block)) - 3
    factor = torch.exp2(scale.float() - 127)
    spread = factor.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
    return {f"{path}.weight": codes, f"{path}.scale": scale.view(torch.float8_e8m0fnu) if typed else factor}, (
        codes.float() * spread
    )


ROUTED: dict[str, Callable[..., tuple[dict[str, Tensor], Tensor]]] = {
    "mxfp4": mxfp4,
    "nvfp4": nvfp4,
    "fp8_block": lambda *args: fp8(*args, typed=False),
}


@dataclass
class Toy:
    """What was written, and the decoded weights by name."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    plain: dict[str, Tensor]
    hashed: int = HASHED

    def save(self) -> None:
        (self.folder / "config.json").write_text(json.dumps(self.config))
        save_file({n: t.contiguous() for n, t in self.tensors.items()}, self.folder / "model.safetensors")

    def wanted(self, layer: int, x: Tensor, ids: Tensor) -> Tensor:
        base = f"layers.{layer}.ffn."
        scores = functional.softplus(x @ self.tensors[f"{base}gate.weight"].float().T).sqrt()
        if layer < self.hashed:
            chosen = self.tensors[f"{base}gate.tid2eid"][ids]
        else:
            chosen = (scores + self.tensors[f"{base}gate.bias"]).topk(TOP_K).indices
        share = scores.gather(1, chosen)
        share = share / (share.sum(1, keepdim=True) + 1e-20) * 1.5
        rows = [self.mlp(f"{base}shared_experts.", row) for row in x]
        for token, row in enumerate(x):
            for expert, weight in zip(chosen[token].tolist(), share[token], strict=True):
                rows[token] = rows[token] + weight * self.mlp(f"{base}experts.{expert}.", row)
        return torch.stack(rows)

    def mlp(self, path: str, row: Tensor) -> Tensor:
        gate, up = (self.plain[f"{path}{name}"] @ row for name in ("w1", "w3"))
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return self.plain[f"{path}w2"] @ (gate * torch.sigmoid(gate) * up)


def write(folder: Path, kind: str = "mxfp4", *, width: int = 192, wide: int = 160) -> Toy:
    """Write a checkpoint whose routed experts are ``kind``; no size of it is a multiple of 128 unless asked for."""
    torch.manual_seed(5)
    toy = Toy(folder=folder, config=config(kind, width, wide), tensors={}, plain={})
    for layer in range(LAYERS):
        base = f"layers.{layer}.ffn."
        makers = [(f"{base}experts.{e}.", ROUTED[kind]) for e in range(EXPERTS)] + [(f"{base}shared_experts.", fp8)]
        for path, make in makers:
            for name, shape in (("w1", (wide, width)), ("w3", (wide, width)), ("w2", (width, wide))):
                stored, toy.plain[f"{path}{name}"] = make(f"{path}{name}", *shape)
                toy.tensors |= stored
        toy.tensors[f"{base}gate.weight"] = (torch.randn(EXPERTS, width) * 0.3).bfloat16()
        if layer < HASHED:
            rows = [torch.randperm(EXPERTS)[:TOP_K] for _ in range(VOCABULARY)]
            toy.tensors[f"{base}gate.tid2eid"] = torch.stack(rows)
        else:
            toy.tensors[f"{base}gate.bias"] = torch.randn(EXPERTS) * 0.4
    # what is published with the layers: multi-token prediction, and attention in FP8 blocks
    toy.tensors |= mxfp4("mtp.0.ffn.experts.0.w1", wide, width)[0] | fp8("layers.0.attn.wq_a", 128, width)[0]
    toy.save()
    return toy


def write_v41(folder: Path, kind: str = "mxfp4", *, width: int = 192, wide: int = 160) -> Toy:
    """Write a checkpoint of V4.1: a nested config, FP8 in blocks of 32 x 32, no hash layers, biases of image tokens."""
    toy = write(folder, kind, width=width, wide=wide)
    toy.hashed = 0
    text = {key: value for key, value in toy.config.items() if key not in ("model_type", "quantization_config")}
    text |= {"dspark_n_routed_experts": 4, "dspark_num_experts_per_tok": 1, "num_nextn_predict_layers": 1}
    text.pop("num_hash_layers")
    block = toy.config["quantization_config"] | {
        "weight_block_size": [32, 32],
        "expert_dtype": text.pop("expert_dtype"),
    }
    toy.config = {"model_type": "deepseek_v41", "text_config": text, "quantization_config": block}
    for layer in range(LAYERS):
        base = f"layers.{layer}.ffn."
        toy.tensors.pop(f"{base}gate.tid2eid", None)
        toy.tensors[f"{base}gate.bias"] = torch.randn(EXPERTS) * 0.4
        toy.tensors[f"{base}gate.bias_vl"] = torch.randn(EXPERTS) * 4
        paths = [f"{base}shared_experts."]
        paths += [f"{base}experts.{e}." for e in range(EXPERTS)] if kind == "fp8_block" else []
        for path in paths:
            for name, shape in (("w1", (wide, width)), ("w3", (wide, width)), ("w2", (width, wide))):
                stored, toy.plain[f"{path}{name}"] = fp8(f"{path}{name}", *shape, block=32)
                toy.tensors |= stored
    toy.tensors |= fp8("layers.0.attn.wq_a", 128, width, block=32)[0]
    toy.tensors["layers.1.engram.q_weight"] = torch.ones(8).bfloat16()
    toy.tensors["vision.layers.0.ffn.w1.weight"] = torch.ones(8, 8).bfloat16()
    toy.save()
    return toy
