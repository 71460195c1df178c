"""The worked examples of the format pages, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from collegium.formats import Bf16, Fp8Block, Fp8Channel, Fp8Tensor, Int4Group, MxFp4, MxFp8, NvFp4, codecs

EXAMPLES: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "format_examples.json").read_text())


def raw(*items: str) -> torch.Tensor:
    return torch.tensor([int(item, 16) for item in items], dtype=torch.uint8)


def e4m3(rows: list[list[str]]) -> torch.Tensor:
    return torch.stack([raw(*row) for row in rows]).view(torch.float8_e4m3fn)


def words(*items: str) -> list[int]:
    return [int(item, 16) for item in items]


def bits(values: torch.Tensor) -> list[int]:
    return [n & 0xFFFFFFFF for n in values.float().view(torch.int32).flatten().tolist()]


def same_bits(found: torch.Tensor, expected: Any) -> bool:
    return bits(found) == bits(torch.tensor(expected, dtype=torch.float32))


def test_bf16_example() -> None:
    case = EXAMPLES["bf16"]
    data = torch.frombuffer(bytearray.fromhex(case["bytes_hex_le"]), dtype=torch.bfloat16)
    payload = Bf16.from_parts({".weight": data.view(2, 2)}, storage="plain", shape=(2, 2))
    assert same_bits(payload.decode(), case["values"])


def test_e4m3fn_example() -> None:
    case = EXAMPLES["e4m3fn"]
    values = codecs.look_up(codecs.e4m3_values(torch.device("cpu")), raw(*case["bytes"]))
    assert case["values"][-1] == "nan"
    assert values[-1].isnan()
    assert same_bits(values[:-1], case["values"][:-1])


def test_e8m0_example() -> None:
    case = EXAMPLES["e8m0"]
    values = codecs.look_up(codecs.e8m0_values(torch.device("cpu")), raw(*case["bytes"]))
    assert bits(values[:-1]) == words(*case["bits_f32_hex"][:-1])
    assert values[-1].isnan()


def test_e2m1_example() -> None:
    assert same_bits(torch.tensor(codecs.E2M1_VALUES), EXAMPLES["e2m1"]["values"])


def test_fp8_block() -> None:
    case = EXAMPLES["fp8_block"]
    parts = {
        ".weight": e4m3(case["weight_bytes_rows"]),
        ".weight_scale_inv": torch.tensor(case["weight_scale_inv"]),
    }
    shape, block = tuple(case["weight_shape"]), tuple(case["block"])
    payload = Fp8Block.from_parts(parts, storage="finegrained-fp8", shape=shape, block=block)
    assert same_bits(payload.decode(), case["values"])


def test_fp8_per_tensor_keeps_both_scales() -> None:
    case = EXAMPLES["fp8_per_tensor"]
    codes = torch.stack([raw(case["gate_byte"]), raw(case["up_byte"])]).view(torch.float8_e4m3fn)
    parts = {
        ".weight": codes.view(2, 1, 1),
        ".weight_scale": torch.tensor([case["gate_weight_scale"], case["up_weight_scale"]]),
    }
    values = Fp8Tensor.from_parts(parts, storage="modelopt", shape=(2, 1, 1)).decode()
    assert values.flatten().tolist() == [case["values"]["gate"], case["values"]["up"]]
    fused = codecs.e4m3_codes(values.flatten() / 0.5).view(torch.uint8).tolist()
    assert fused == [int(case["fused_with_scale_0.5"][half], 16) for half in ("gate_byte", "up_byte")]


@pytest.mark.parametrize("stored", [(2, 1), (2,)])
def test_fp8_per_channel(stored: tuple[int, ...]) -> None:
    case = EXAMPLES["fp8_per_channel"]
    scales = torch.tensor(case["weight_scale"]).reshape(stored)
    parts = {".weight": e4m3(case["weight_bytes_rows"]), ".weight_scale": scales}
    payload = Fp8Channel.from_parts(parts, storage="compressed-tensors", shape=(2, 2))
    assert same_bits(payload.decode(), case["values"])


def test_mxfp4_block() -> None:
    case = EXAMPLES["mxfp4_block"]
    blocks = torch.tensor(list(bytes.fromhex(case["block_bytes_hex"])), dtype=torch.uint8)
    parts = {"_blocks": blocks.view(1, 1, 16), "_scales": raw(case["scale_byte"]).view(1, 1)}
    payload = MxFp4.from_parts(parts, storage="gpt-oss", shape=(1, 32))
    assert same_bits(payload.decode(), case["values"])


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("typed", [True, False])
def test_mxfp4_deepseek_v4(signed: bool, typed: bool) -> None:
    case = EXAMPLES["mxfp4_deepseek_v4"]
    weight = torch.tensor([case["weight_int8"]], dtype=torch.int8)
    assert weight.view(torch.uint8).flatten().tolist() == words(*case["weight_bytes"])
    scale = raw(case["scale_byte"]).view(1, 1)
    parts = {
        ".weight": weight if signed else weight.view(torch.uint8),
        ".scale": scale.view(torch.float8_e8m0fnu) if typed else scale,
    }
    payload = MxFp4.from_parts(parts, storage="deepseek-v4", shape=(1, 4))
    assert same_bits(payload.decode(), case["values"])


@pytest.mark.parametrize(
    ("storage", "suffix"),
    [
        ("modelopt", ".weight_scale"),
        ("compressed-tensors", ".weight_scale"),
        ("minimax-m3", ".weight_scale_inv"),
    ],
)
def test_mxfp8_example(storage: str, suffix: str) -> None:
    case = EXAMPLES["mxfp8"]
    parts = {".weight": e4m3([case["weight_bytes"]]), suffix: raw(case["scale_byte"]).view(1, 1)}
    payload = MxFp8.from_parts(parts, storage=storage, shape=(1, 4))
    assert same_bits(payload.decode(), case["values"])


def test_nvfp4_modelopt() -> None:
    case = EXAMPLES["nvfp4_modelopt"]
    parts = {
        ".weight": raw(case["weight_byte"]).view(1, 1),
        ".weight_scale": e4m3([[case["weight_scale_byte"]]]),
        ".weight_scale_2": torch.tensor(case["weight_scale_2"]),
    }
    assert bits(parts[".weight_scale_2"]) == words(case["weight_scale_2_f32"])
    payload = NvFp4.from_parts(parts, storage="modelopt", shape=(1, 2))
    assert bits(payload.decode()) == words(*case["values_f32_hex"])
    assert [b >> 16 for b in bits(payload.decode(torch.bfloat16))] == words(*case["values_bf16_hex"])


def test_nvfp4_compressed_tensors_divides() -> None:
    case = EXAMPLES["nvfp4_compressed_tensors"]
    parts = {
        ".weight_packed": raw(case["weight_packed_byte"]).view(1, 1),
        ".weight_scale": e4m3([[case["weight_scale_byte"]]]),
        ".weight_global_scale": torch.tensor([case["weight_global_scale"]]),
    }
    payload = NvFp4.from_parts(parts, storage="compressed-tensors", shape=(1, 2))
    assert bits(payload.decode()) == words(*case["values_divide_f32_hex"])
    assert [b >> 16 for b in bits(payload.decode(torch.bfloat16))] == words(*case["values_bf16_hex"])
    # The step itself, seen through code 2 (the number one), is the quotient and not the reciprocal product.
    one = NvFp4.from_parts(
        {**parts, ".weight_packed": raw("0x22").view(1, 1)}, storage="compressed-tensors", shape=(1, 2)
    )
    assert bits(one.decode())[0] == words(case["block_scale_divide_f32_hex"])[0]
    assert words(case["block_scale_divide_f32_hex"]) != words(case["block_scale_times_reciprocal_f32_hex"])


def test_int4_pack_quantized() -> None:
    case = EXAMPLES["int4_pack_quantized"]
    parts = {
        ".weight_packed": torch.tensor([[case["word_i32"]]], dtype=torch.int32),
        ".weight_scale": torch.tensor([[case["scale"]]], dtype=torch.bfloat16),
        ".weight_shape": torch.tensor([1, 8]),
    }
    payload = Int4Group.from_parts(parts, storage="compressed-tensors", shape=(1, 8))
    assert bytes(payload.codes.flatten().tolist()).hex() == case["bytes_hex_le"]
    assert [q * case["scale"] for q in case["q"]] == case["values"]
    assert same_bits(payload.decode(), case["values"])
