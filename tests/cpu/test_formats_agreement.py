"""Our decoders and scale rules against the tools that write these files, bit for bit.

transformers and compressed-tensors are test dependencies. Where a tool rounds to BF16, BF16 bits are compared.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from collegium.formats import (
    Fp8Block,
    Fp8Channel,
    Fp8Tensor,
    Int4Affine,
    Int4Group,
    Int4Ordered,
    Int8Affine,
    Int8Ordered,
    MxFp4,
    MxFp8,
    NvFp4,
)
from quantised_matrices import awq, gptq


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    kind = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[left.dtype]
    return left.dtype == right.dtype and torch.equal(left.view(kind), right.contiguous().view(kind))


def any_bytes(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8)


def any_e4m3(*shape: int) -> torch.Tensor:
    raw = any_bytes(*shape)
    return torch.where((raw & 0x7F) == 0x7F, raw & 0xF0, raw).view(torch.float8_e4m3fn)


def positive_e4m3(*shape: int) -> torch.Tensor:
    return any_bytes(*shape, low=1, high=0x7F).view(torch.float8_e4m3fn)


def scheme(**weights: object) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**{"symmetric": True, **weights}))


def decompress(name: str, parts: dict[str, torch.Tensor], **weights: object) -> torch.Tensor:
    kind = BaseCompressor.get_value_from_registry(name)
    return kind.decompress({k.removeprefix("."): v for k, v in parts.items()}, scheme(**weights))["weight"].data


MX4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
MX8 = {**MX4, "num_bits": 8}
NV4 = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "scale_dtype": torch.float8_e4m3fn,
}


def test_mxfp4_decode_as_transformers() -> None:
    blocks, scales = any_bytes(3, 10, 4, 16), any_bytes(3, 10, 4, low=20, high=240)
    parts = {"_blocks": blocks, "_scales": scales}
    ours = MxFp4.from_parts(parts, storage="gpt-oss", shape=(3, 10, 128)).decode(torch.bfloat16)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).transpose(1, 2)
    assert same_bits(ours, theirs)


def test_mxfp4_deepseek_decode_as_transformers() -> None:
    weight, scale = any_bytes(10, 64).view(torch.int8), any_bytes(10, 4, low=0, high=250)
    theirs = Fp8Dequantize(None)._dequantize_one(weight, scale.view(torch.float8_e8m0fnu), torch.float32)
    parts = {".weight": weight, ".scale": scale.view(torch.float8_e8m0fnu)}
    assert same_bits(MxFp4.from_parts(parts, storage="deepseek-v4", shape=(10, 128)).decode(), theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_block_decode_as_transformers(dtype: torch.dtype) -> None:
    parts = {".weight": any_e4m3(256, 384), ".weight_scale_inv": torch.rand(2, 3) + 0.01}
    ours = Fp8Block.from_parts(parts, storage="finegrained-fp8", shape=(256, 384)).decode(dtype)
    theirs = Fp8Dequantize(None)._dequantize_one(parts[".weight"], parts[".weight_scale_inv"], dtype)
    assert same_bits(ours, theirs)


def test_mxfp8_decode_as_transformers() -> None:
    parts = {".weight": any_e4m3(6, 96), ".weight_scale_inv": any_bytes(6, 3, low=0, high=240)}
    ours = MxFp8.from_parts(parts, storage="minimax-m3", shape=(6, 96)).decode()
    theirs = Fp8Dequantize(None)._dequantize_one(parts[".weight"], parts[".weight_scale_inv"], torch.float32)
    assert same_bits(ours, theirs)


def test_fp8_block_pow2_scales_match_transformers() -> None:
    class Config:
        scale_fmt = "ue8m0"
        weight_block_size = (128, 128)

    class Quantizer:
        quantization_config = Config()

    weight = torch.randn(256, 256) * torch.exp(torch.randn(256, 1))
    theirs = Fp8Quantize(Quantizer())._quantize_one("w.weight", weight)
    ours = Fp8Block.encode(weight, power_of_two=True)
    assert torch.equal(ours.scales, theirs["w.weight_scale_inv"].float())
    assert torch.equal(ours.codes.view(torch.uint8), theirs["w.weight"].view(torch.uint8))


def test_nvfp4_decode_as_compressed_tensors() -> None:
    parts = {
        ".weight_packed": any_bytes(12, 32),
        ".weight_scale": positive_e4m3(12, 4),
        ".weight_global_scale": torch.tensor([1234.567]),
    }
    ours = NvFp4.from_parts(parts, storage="compressed-tensors", shape=(12, 64)).decode(torch.bfloat16)
    assert same_bits(ours, decompress("nvfp4-pack-quantized", parts, **NV4))


def test_mxfp4_decode_as_compressed_tensors() -> None:
    parts = {".weight_packed": any_bytes(12, 32), ".weight_scale": any_bytes(12, 2, low=20, high=240)}
    ours = MxFp4.from_parts(parts, storage="compressed-tensors", shape=(12, 64)).decode(torch.bfloat16)
    assert same_bits(ours, decompress("mxfp4-pack-quantized", parts, **MX4))


def test_mxfp8_decode_as_compressed_tensors() -> None:
    parts = {".weight": any_e4m3(12, 64), ".weight_scale": any_bytes(12, 2, low=20, high=240)}
    ours = MxFp8.from_parts(parts, storage="compressed-tensors", shape=(12, 64)).decode(torch.bfloat16)
    assert same_bits(ours, decompress("mxfp8-quantized", parts, **MX8))


@pytest.mark.parametrize("columns", [64, 256])
@pytest.mark.parametrize("strategy", ["group", "channel"])
def test_int4_decode_as_compressed_tensors(columns: int, strategy: str) -> None:
    size = 32 if strategy == "group" else columns
    parts = {
        ".weight_packed": torch.randint(-(2**31), 2**31 - 1, (9, columns // 8), dtype=torch.int32),
        ".weight_scale": (torch.rand(9, columns // size) + 0.1).bfloat16(),
        ".weight_shape": torch.tensor([9, columns]),
    }
    weights = {"num_bits": 4, "type": "int", "strategy": strategy}
    weights |= {"group_size": 32} if strategy == "group" else {}
    ours = Int4Group.from_parts(parts, storage="compressed-tensors", shape=(9, columns)).decode(torch.bfloat16)
    assert torch.equal(ours, decompress("pack-quantized", parts, **weights))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("strategy", ["group", "channel"])
@pytest.mark.parametrize("bits", [4, 8])
def test_integer_decode_as_compressed_tensors(bits: int, strategy: str, symmetric: bool) -> None:
    rows, columns, per = 21, 128, 32 // bits
    size = 32 if strategy == "group" else columns
    parts = {
        ".weight_packed": torch.randint(-(2**31), 2**31 - 1, (rows, columns // per), dtype=torch.int32),
        ".weight_scale": torch.rand(rows, columns // size) + 0.1,
        ".weight_shape": torch.tensor([rows, columns]),
    }
    if not symmetric:
        shape = (-(-rows // per), columns // size)
        parts[".weight_zero_point"] = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)
    weights = {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": symmetric}
    weights |= {"group_size": 32} if strategy == "group" else {}
    storage = "compressed-tensors" if symmetric else "compressed-tensors-asymmetric"
    form = {4: Int4Group if symmetric else Int4Affine, 8: Int8Affine}[bits]
    ours = form.from_parts(parts, storage=storage, shape=(rows, columns)).decode()
    theirs = decompress("pack-quantized", parts, **weights)
    # the library multiplies a negative zero as such; the numbers are equal
    assert torch.equal(ours, theirs)
    if symmetric:
        reversed_groups = torch.arange(columns - 1, -1, -1, dtype=torch.int32) // size
        backwards = {
            **parts,
            ".weight_packed": parts[".weight_packed"].view(torch.uint8).flip(1).contiguous().view(torch.int32),
            ".weight_g_idx": reversed_groups,
        }
        ordered = {4: Int4Ordered, 8: Int8Ordered}[bits].from_parts(
            backwards, storage=storage, shape=(rows, columns), group_size=size
        )
        pairs = ordered.decode().flip(1)
        if bits == 4:  # bytes were reversed, the two codes inside each were not
            pairs = pairs.view(rows, -1, 2).flip(-1).flatten(1)
        assert torch.equal(pairs, theirs)


@pytest.mark.parametrize("strategy", ["group", "channel"])
def test_plain_int8_decode_as_compressed_tensors(strategy: str) -> None:
    size = 32 if strategy == "group" else 96
    codes = any_bytes(9, 96).view(torch.int8)
    parts = {".weight": codes, ".weight_scale": torch.rand(9, 96 // size) + 0.1}
    weights = {"num_bits": 8, "type": "int", "strategy": strategy}
    weights |= {"group_size": 32} if strategy == "group" else {}
    ours = Int8Affine.from_parts(parts, storage="int-quantized", shape=(9, 96)).decode()
    assert torch.equal(ours, decompress("int-quantized", parts, **weights))


def test_fp8_decode_as_compressed_tensors() -> None:
    weights = {"num_bits": 8, "type": "float"}
    codes = any_e4m3(12, 64)
    channel = {".weight": codes, ".weight_scale": torch.rand(12, 1) + 0.1}
    ours = Fp8Channel.from_parts(channel, storage="compressed-tensors", shape=(12, 64)).decode()
    assert same_bits(ours, decompress("float-quantized", channel, strategy="channel", **weights))
    tensor = {".weight": codes, ".weight_scale": torch.tensor([0.37])}
    ours = Fp8Tensor.from_parts(tensor, storage="compressed-tensors", shape=(12, 64)).decode()
    assert same_bits(ours, decompress("float-quantized", tensor, strategy="tensor", **weights))
    block = {".weight": any_e4m3(200, 300), ".weight_scale": torch.rand(2, 3) + 0.1}
    ours = Fp8Block.from_parts(block, storage="compressed-tensors", shape=(200, 300)).decode()
    extra = {"strategy": "block", "block_structure": [128, 128]}
    assert same_bits(ours, decompress("float-quantized", block, **extra, **weights))


def test_nvfp4_encode_as_compressed_tensors() -> None:
    weight = torch.randn(24, 96)
    ours = NvFp4.encode(weight, global_divides=True)
    args = scheme(**NV4).weights
    groups = weight.view(24, 6, 16)
    scales, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args, global_scale=ours.global_scale)
    assert torch.equal(scales.float(), ours.scales.float())
    theirs = quantize(weight, scales, torch.zeros_like(scales), args, global_scale=ours.global_scale)
    ones = torch.ones_like(ours.scales.float()).to(torch.float8_e4m3fn)
    bare = NvFp4(shape=(24, 96), codes=ours.codes, scales=ones, global_scale=torch.tensor(1.0))
    assert torch.equal(bare.decode(), theirs.float())


def test_int4_codes_match_compressed_tensors() -> None:
    weight = torch.randn(16, 128)
    ours = Int4Group.encode(weight, scale_dtype=torch.float32)
    args = scheme(num_bits=4, type="int", strategy="group", group_size=32).weights
    theirs = quantize(weight, ours.scales, torch.zeros_like(ours.scales, dtype=torch.int8), args, dtype=torch.int8)
    bare = Int4Group(shape=(16, 128), codes=ours.codes, scales=torch.ones_like(ours.scales), group_size=32)
    assert torch.equal(bare.decode(), theirs.float())


def test_fp8_scales_as_compressed_tensors() -> None:
    """The library divides by half of its range, 896 / 2 = 448; the quotient is the same number."""
    weight = torch.randn(24, 64)
    args = scheme(num_bits=8, type="float", strategy="channel").weights
    scales, _ = calculate_qparams(weight.amin(-1), weight.amax(-1), args)
    assert torch.equal(Fp8Channel.encode(weight).scales, scales)
    codes = quantize(weight, scales[:, None], torch.zeros_like(scales[:, None]), args, dtype=torch.float8_e4m3fn)
    assert torch.equal(Fp8Channel.encode(weight).codes.view(torch.uint8), codes.view(torch.uint8))


def test_mx_scales_as_compressed_tensors() -> None:
    """OCP rounds the exponent of amax down, the library up from 1.75 times a power of two: below that they are one."""
    weight = torch.rand(64, 64) - 0.5
    weight[:, ::32] = (1 + torch.rand(64, 2) * 0.74) * torch.exp2(torch.randint(0, 9, (64, 2)).float())
    groups = weight.view(64, 2, 32)
    for form, args in ((MxFp4, MX4), (MxFp8, MX8)):
        scales, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme(**args).weights)
        assert torch.equal(scales.float(), torch.exp2(form.encode(weight).scales.float() - 127))


@pytest.mark.parametrize(
    ("pack", "words"),
    [
        # WQLinear_GEMM.from_linear of AutoAWQ 0.2.7.post3
        (awq, {"qweight": "54d618bcac928e6f", "qzeros": "964d3712a962ed5d"}),
        # QuantLinear.pack (qlinear_torch_zp) of AutoRound 0.16.1
        (gptq, {"qweight": "1bfef84750eb1407", "qzeros": "6ad7679ec6e044b8"}),
    ],
)
def test_test_packing_equals_the_tools(pack: Any, words: dict[str, str]) -> None:
    """Tools that cannot be installed beside the others packed this matrix once, from the same codes."""
    weight = (torch.arange(64 * 96) * 37 % 101 - 40).float().view(64, 96)
    stored, _ = pack(weight / 64)
    found = {name: sha256(stored[name].contiguous().numpy().tobytes()).hexdigest()[:16] for name in words}
    assert found == words
