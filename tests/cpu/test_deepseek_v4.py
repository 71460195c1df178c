"""DeepSeek-V4 as it is published, names and dtypes on disk: routed experts, FP8 shared experts, hash tables.

Bytes are drawn and decoded here by tables and powers of two, without the package's formats.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from collegium.errors import ConfigError, TensorMismatchError, UnknownTensorError
from collegium.loading import load_layer
from commands import command

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

D, WIDE, EXPERTS, TOP_K, VOCABULARY, LAYERS, HASHED = 192, 160, 6, 2, 40, 5, 3
LIMIT = 1.25
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def config(kind: str) -> dict[str, Any]:
    block: dict[str, Any] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    }  # fmt: skip
    if kind == "nvfp4":
        block |= {"moe_quant_algo": "NVFP4", "ignore": ["mtp.*"]}
    return {
        "model_type": "deepseek_v4", "hidden_size": D, "moe_intermediate_size": WIDE, "num_hidden_layers": LAYERS,
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


def fp8(path: str, rows: int, columns: int, *, typed: bool = True) -> tuple[dict[str, Tensor], Tensor]:
    codes = (torch.randn(rows, columns) * 8).to(torch.float8_e4m3fn)
    scale = powers(-(-rows // 128), -(-columns // 128)) - 3
    factor = torch.exp2(scale.float() - 127)
    spread = factor.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
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

    def save(self) -> None:
        (self.folder / "config.json").write_text(json.dumps(self.config))
        save_file({n: t.contiguous() for n, t in self.tensors.items()}, self.folder / "model.safetensors")

    def wanted(self, layer: int, x: Tensor, ids: Tensor) -> Tensor:
        base = f"layers.{layer}.ffn."
        scores = functional.softplus(x @ self.tensors[f"{base}gate.weight"].float().T).sqrt()
        if layer < HASHED:
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


def write(folder: Path, kind: str = "mxfp4") -> Toy:
    torch.manual_seed(5)
    toy = Toy(folder=folder, config=config(kind), tensors={}, plain={})
    for layer in range(LAYERS):
        base = f"layers.{layer}.ffn."
        makers = [(f"{base}experts.{e}.", ROUTED[kind]) for e in range(EXPERTS)] + [(f"{base}shared_experts.", fp8)]
        for path, make in makers:
            for name, shape in (("w1", (WIDE, D)), ("w3", (WIDE, D)), ("w2", (D, WIDE))):
                stored, toy.plain[f"{path}{name}"] = make(f"{path}{name}", *shape)
                toy.tensors |= stored
        toy.tensors[f"{base}gate.weight"] = (torch.randn(EXPERTS, D) * 0.3).bfloat16()
        if layer < HASHED:
            rows = [torch.randperm(EXPERTS)[:TOP_K] for _ in range(VOCABULARY)]
            toy.tensors[f"{base}gate.tid2eid"] = torch.stack(rows)
        else:
            toy.tensors[f"{base}gate.bias"] = torch.randn(EXPERTS) * 0.4
    # what is published beside the layers: multi-token prediction, and attention in FP8 blocks
    toy.tensors |= mxfp4("mtp.0.ffn.experts.0.w1", WIDE, D)[0] | fp8("layers.0.attn.wq_a", 128, D)[0]
    toy.save()
    return toy


@pytest.mark.parametrize("kind", list(ROUTED))
def test_the_published_layout_is_inspected_loaded_and_verified(tmp_path: Path, kind: str) -> None:
    toy = write(tmp_path, kind)
    code, output, said = command("inspect", tmp_path, "--device", "cpu", "--json")
    assert code == 0, said
    found = json.loads(output)
    assert [(row["layer"], row["format"]) for row in found["moe_layers"]] == [(i, kind) for i in range(LAYERS)]
    assert [text for text in found["findings"] if "different global scales; each keeps its own" not in text] == []
    # heavy tails: the clamp is reached and not everywhere
    x = torch.randn(9, D) / torch.rand(9, 1).clamp(min=0.05).sqrt()
    for index in range(LAYERS):
        layer = load_layer(tmp_path, index, dtype="fp32", device="cpu")
        for tokens in (9, 4):
            ids = torch.randint(0, VOCABULARY, (tokens,))
            wanted = toy.wanted(index, x[:tokens], ids)
            answer = layer(x[:tokens], token_ids=ids if index < HASHED else None)
            assert (answer - wanted).abs().max() <= 2e-5 * wanted.abs().max()
    code, output, said = command("verify", tmp_path, "--device", "cpu", "--all", "--json")
    assert code == 0, said
    rows = json.loads(output)["layers"]
    assert [(r["layer"], r["part"], r["weight_format"]) for r in rows] == [
        row for i in range(LAYERS) for row in ((i, "experts", kind), (i, "shared", "fp8_block"))
    ]


def test_quantize_refuses_it_by_name(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write(tmp_path / "model")
    for name in ("bf16", "nvfp4"):
        code, _, said = command("quantize", tmp_path / "model", "--to", name)
        assert code == 1
        assert "tensors outside the routed experts are quantised" in said
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_shared_expert_may_be_unquantised(tmp_path: Path) -> None:
    toy = write(tmp_path)
    toy.config["quantization_config"]["modules_to_not_convert"] = ["shared_experts"]
    for name in [n for n in toy.tensors if ".shared_experts." in n]:
        tensor = toy.tensors.pop(name)
        if name.endswith(".weight"):
            toy.tensors[name] = torch.randn(tensor.shape).bfloat16() * 0.1
            toy.plain[name.removesuffix(".weight")] = toy.tensors[name].float()
    toy.save()
    assert command("inspect", tmp_path, "--device", "cpu")[0] == 0
    x = torch.randn(5, D)
    wanted = toy.wanted(4, x, x)
    found = load_layer(tmp_path, 4, dtype="fp32", device="cpu")(x)
    assert (found - wanted).abs().max() <= 2e-5 * wanted.abs().max()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda c: c.update(expert_dtype="fp6"), "expert_dtype is 'fp6'"),
        (lambda c: c["quantization_config"].update(moe_quant_algo="IQ3_WIRE"), "moe_quant_algo 'IQ3_WIRE'"),
        (lambda c: c.update(vocab_size="40"), "vocab_size is '40', allowed is an integer"),
    ],
)
def test_entries_that_are_not_known_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], text: str
) -> None:
    toy = write(tmp_path)
    change(toy.config)
    toy.save()
    refused(tmp_path, 0, ConfigError, text)


def refused(folder: Path, layer: int, error: type[Exception], text: str) -> None:
    """The commands and the loader refuse in the same words."""
    for name in ("inspect", "verify"):
        code, _, said = command(name, folder, "--device", "cpu")
        assert code == 1
        assert text in said
    with pytest.raises(error) as caught:
        load_layer(folder, layer, device="cpu")
    assert text in str(caught.value)


def entry(row: int, column: int, value: int) -> Callable[[Tensor], Tensor]:
    def change(table: Tensor) -> Tensor:
        table = table.clone()
        table[row, column] = table[row, 1 - column] if value == -99 else value
        return table

    return change


TABLES = {
    "an expert that does not exist": (entry(7, 1, EXPERTS), "row 7, of token id 7, holds expert 6, experts are 0 to 5"),
    "a negative expert": (entry(11, 0, -3), "row 11, of token id 11, holds expert -3, experts are 0 to 5"),
    "one expert twice": (entry(39, 1, -99), "row 39, of token id 39, holds expert"),
    "too few rows": (lambda t: t[:-1], "has 39 rows, needed are vocab_size=40; token ids from 39 on"),
    "too few columns": (lambda t: t[:, :1], "is I64 (40, 1), needed are integers [vocabulary, top_k=2]"),
    "numbers that are no integers": (lambda t: t.float(), "is F32 (40, 2), needed are integers"),
}


@pytest.mark.parametrize("name", list(TABLES))
def test_a_wrong_hash_table_is_refused_by_name(tmp_path: Path, name: str) -> None:
    change, text = TABLES[name]
    toy = write(tmp_path)
    tensor = "layers.2.ffn.gate.tid2eid"
    toy.tensors[tensor] = change(toy.tensors[tensor])
    toy.save()
    refused(tmp_path, 2, TensorMismatchError, text)
    with pytest.raises(TensorMismatchError, match=tensor):
        load_layer(tmp_path, 2, device="cpu")
    load_layer(tmp_path, 1, device="cpu")


def test_a_longer_hash_table_and_other_integers_are_read(tmp_path: Path) -> None:
    toy = write(tmp_path)
    name = "layers.0.ffn.gate.tid2eid"
    longer = torch.cat((toy.tensors[name], torch.tensor([[0, 1]]))).int()
    toy.tensors[name] = longer
    toy.save()
    assert command("inspect", tmp_path, "--device", "cpu")[0] == 0
    x, ids = torch.randn(5, D), torch.randint(0, VOCABULARY, (5,))
    toy.tensors[name] = longer.long()
    wanted = toy.wanted(0, x, ids)
    found = load_layer(tmp_path, 0, dtype="fp32", device="cpu")(x, token_ids=ids)
    assert (found - wanted).abs().max() <= 2e-5 * wanted.abs().max()


def test_what_the_config_does_not_speak_of_is_not_left_out_in_silence(tmp_path: Path) -> None:
    toy = write(tmp_path)
    toy.config["n_shared_experts"] = 0
    toy.save()
    refused(tmp_path, 0, UnknownTensorError, "layers.0.ffn.shared_experts.w1 is in the files, config.json describes")
    toy.config |= {"n_shared_experts": 1, "num_hash_layers": 2}
    toy.tensors["layers.2.ffn.gate.bias"] = torch.zeros(EXPERTS)
    toy.save()
    refused(tmp_path, 2, UnknownTensorError, "layers.2.ffn.gate.tid2eid is in the files, config.json describes")
