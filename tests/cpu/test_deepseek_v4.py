"""DeepSeek-V4 as it is published: routed experts in three formats, FP8 shared experts, hash tables."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from collegium.errors import ConfigError, TensorMismatchError, UnknownTensorError
from collegium.experts import CpuFused, CpuGrouped
from collegium.integrations.transformers import load_model
from collegium.loading import load_layer
from commands import command
from published_v4 import EXPERTS, HASHED, LAYERS, ROUTED, VOCABULARY, write, write_v41

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from collegium.problem import ExpertsProblem

D = 192


@pytest.mark.parametrize("kind", list(ROUTED))
def test_published_layout_loads_and_verifies(tmp_path: Path, kind: str) -> None:
    toy = write(tmp_path, kind)
    code, output, said = command("inspect", tmp_path, "--device", "cpu", "--json")
    assert code == 0, said
    found = json.loads(output)
    assert [(row["layer"], row["format"]) for row in found["moe_layers"]] == [(i, kind) for i in range(LAYERS)]
    meant = ("different global scales; both are kept exactly", "have static activation scales, which")
    said = [text for text in found["findings"] if not any(part in text for part in meant)]
    # the shared experts, and attention of the first layer; the next token's predictor is no part of the model
    assert [text.partition(" run ")[0] for text in said] == ["16 matrices outside the experts (16 fp8_block)"]
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


@pytest.mark.parametrize("kind", ["mxfp4", "fp8_block"])
def test_v41_loads_and_verifies(tmp_path: Path, kind: str) -> None:
    toy = write_v41(tmp_path, kind)
    code, output, said = command("inspect", tmp_path, "--device", "cpu", "--json")
    assert code == 0, said
    found = json.loads(output)
    assert [(row["layer"], row["format"]) for row in found["moe_layers"]] == [(i, kind) for i in range(LAYERS)]
    x = torch.randn(9, D) / torch.rand(9, 1).clamp(min=0.05).sqrt()
    for index in (0, LAYERS - 1):
        layer = load_layer(tmp_path, index, dtype="fp32", device="cpu")
        wanted = toy.wanted(index, x, x)
        assert (layer(x) - wanted).abs().max() <= 2e-5 * wanted.abs().max()
        # The bias of image tokens chooses other experts; a caller that has some routes them.
        bias = toy.tensors[f"layers.{index}.ffn.gate.bias"].clone()
        toy.tensors[f"layers.{index}.ffn.gate.bias"] = toy.tensors[f"layers.{index}.ffn.gate.bias_vl"]
        other = toy.wanted(index, x, x)
        toy.tensors[f"layers.{index}.ffn.gate.bias"] = bias
        assert (other - wanted).abs().max() > 0.1 * wanted.abs().max()
    code, output, said = command("verify", tmp_path, "--device", "cpu", "--all", "--json")
    assert code == 0, said
    toy.config["quantization_config"]["weight_block_size"] = [128, 128]
    toy.save()
    with pytest.raises(TensorMismatchError):
        load_layer(tmp_path, 0, dtype="fp32", device="cpu")


def test_whole_v41_models_are_refused(tmp_path: Path) -> None:
    write_v41(tmp_path)
    with pytest.raises(ConfigError, match="'deepseek_v41' cannot be loaded as a whole model"):
        load_model(str(tmp_path), device="cpu")


def _but_fp8_blocks(self: CpuGrouped, problem: ExpertsProblem) -> str | None:
    return "it takes no FP8 blocks" if problem.weight_format == "fp8_block" else None


def test_shared_experts_with_another_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the kernels of four-bit weights take no others."""
    toy = write(tmp_path)
    monkeypatch.setattr(CpuGrouped, "refuse", _but_fp8_blocks)
    monkeypatch.setattr(CpuFused, "refuse", lambda *_: "not on this machine")
    layer = load_layer(tmp_path, 4, dtype="fp32", device="cpu")
    assert layer.plan.kernel == "cpu_grouped"
    x = torch.randn(9, D)
    wanted = toy.wanted(4, x, x)
    for _ in range(2):
        assert (layer(x) - wanted).abs().max() <= 2e-5 * wanted.abs().max()
    force = ("--device", "cpu", "--kernel", "cpu_grouped", "--json")
    code, output, said = command("verify", tmp_path, *force)
    assert code == 0, said
    assert {(row["part"], row["kernel"]) for row in json.loads(output)["layers"]} == {
        ("experts", "cpu_grouped"), ("shared", "reference"),
    }  # fmt: skip


@pytest.mark.parametrize(("kind", "target"), [("mxfp4", "fp8_block"), ("fp8_block", "mxfp4"), ("nvfp4", "mxfp4")])
def test_quantize_matches_published_layout(tmp_path: Path, kind: str, target: str) -> None:
    (tmp_path / "model").mkdir()
    toy = write(tmp_path / "model", kind, width=256, wide=128)
    code, _, said = command("quantize", tmp_path / "model", "--to", target, "--out", tmp_path / "made")
    assert code == 0, said
    made = load_file(tmp_path / "made" / "model-00001-of-00006.safetensors")
    for path in (tmp_path / "made").glob("*.safetensors"):
        made |= load_file(path)
    published = write(tmp_path / "model", target, width=256, wide=128).tensors
    assert {n: (t.dtype, t.shape) for n, t in made.items()} == {n: (t.dtype, t.shape) for n, t in published.items()}
    raw = {n: t for n, t in toy.tensors.items() if ".experts." not in n or n.startswith("mtp.")}
    assert all(torch.equal(made[n].view(torch.uint8), t.view(torch.uint8)) for n, t in raw.items() if t.dim())
    write(tmp_path / "model", kind, width=256, wide=128)
    code, output, said = command("inspect", tmp_path / "made", "--device", "cpu", "--json")
    assert code == 0, said
    assert {row["format"] for row in json.loads(output)["moe_layers"]} == {target}
    x, limit = torch.randn(9, 256), 0.3 if target == "mxfp4" else 0.05
    for index in (0, 4):
        ids = torch.randint(0, VOCABULARY, (9,))
        wanted = toy.wanted(index, x, ids)
        layer = load_layer(tmp_path / "made", index, dtype="fp32", device="cpu")
        found = layer(x, token_ids=ids if index < HASHED else None)
        assert 0 < (found - wanted).norm() < limit * wanted.norm()
    assert command("verify", tmp_path / "made", "--device", "cpu")[0] == 0


def test_quantize_refuses_the_rest_by_name(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write(tmp_path / "model")
    for name in ("bf16", "nvfp4", "int4_group", "fp8_block"):
        code, _, said = command("quantize", tmp_path / "model", "--to", name)
        assert code == 1
        assert f"{name}: " in said
        assert "(192, 160): mxfp4" in said or "multiples of 128" in said
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
def test_unknown_config_entries_refused(tmp_path: Path, change: Callable[[dict[str, Any]], None], text: str) -> None:
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
def test_wrong_hash_table_refused_by_name(tmp_path: Path, name: str) -> None:
    change, text = TABLES[name]
    toy = write(tmp_path)
    tensor = "layers.2.ffn.gate.tid2eid"
    toy.tensors[tensor] = change(toy.tensors[tensor])
    toy.save()
    refused(tmp_path, 2, TensorMismatchError, text)
    with pytest.raises(TensorMismatchError, match=tensor):
        load_layer(tmp_path, 2, device="cpu")
    load_layer(tmp_path, 1, device="cpu")


def test_longer_hash_tables_and_int32_load(tmp_path: Path) -> None:
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


def test_tensors_missing_from_config_reported(tmp_path: Path) -> None:
    toy = write(tmp_path)
    toy.config["n_shared_experts"] = 0
    toy.save()
    refused(tmp_path, 0, UnknownTensorError, "layers.0.ffn.shared_experts.w1 is in the files, config.json describes")
    toy.config |= {"n_shared_experts": 1, "num_hash_layers": 2}
    toy.tensors["layers.2.ffn.gate.bias"] = torch.zeros(EXPERTS)
    toy.save()
    refused(tmp_path, 2, UnknownTensorError, "layers.2.ffn.gate.tid2eid is in the files, config.json describes")
