"""Our NVFP4, MXFP4 and MXFP8 against ModelOpt, which writes such files, bit for bit.

ModelOpt's NVFP4 drops the sign of E2M1's negative zero, so there numbers are compared.
"""

from __future__ import annotations

import warnings

import pytest
import torch

from collegium.formats import MxFp4, MxFp8, NvFp4

pytest.importorskip("modelopt", reason="ModelOpt is published for Linux only")

with warnings.catch_warnings():
    # ModelOpt warns on import about every transformers release newer than itself.
    warnings.filterwarnings("ignore", message="transformers .* is not tested", category=UserWarning)
    from modelopt.torch.quantization.qtensor import MXFP4QTensor, MXFP8QTensor, NVFP4QTensor


def any_bytes(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8)


def any_e4m3(*shape: int) -> torch.Tensor:
    raw = any_bytes(*shape)
    return torch.where((raw & 0x7F) == 0x7F, raw & 0xF0, raw).view(torch.float8_e4m3fn)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.view(torch.int32), right.view(torch.int32))


def test_nvfp4_decode_as_modelopt() -> None:
    parts = {
        ".weight": any_bytes(12, 32),
        ".weight_scale": any_bytes(12, 4, low=1, high=0x7F).view(torch.float8_e4m3fn),
        ".weight_scale_2": torch.tensor(0.0123),
    }
    stored = NVFP4QTensor(torch.Size((12, 64)), torch.float32, parts[".weight"])
    theirs = stored.dequantize(
        dtype=torch.float32,
        scale=parts[".weight_scale"],
        double_scale=parts[".weight_scale_2"],
        block_sizes={-1: 16},
    )
    assert torch.equal(NvFp4.from_parts(parts, storage="modelopt", shape=(12, 64)).decode(), theirs)


def test_mxfp4_decode_as_modelopt() -> None:
    codes, scales = any_bytes(12, 32), any_bytes(12, 2, low=0, high=250)
    stored = MXFP4QTensor(torch.Size((12, 64)), torch.float32, codes)
    theirs = stored.dequantize(dtype=torch.float32, scale=scales, block_sizes={-1: 32})
    assert same_bits(MxFp4(shape=(12, 64), codes=codes, scales=scales).decode(), theirs)


def test_mxfp8_decode_as_modelopt() -> None:
    codes, scales = any_e4m3(12, 64), any_bytes(12, 2, low=0, high=240)
    theirs = MXFP8QTensor(torch.Size((12, 64)), torch.float32, codes).dequantize(dtype=torch.float32, scale=scales)
    assert same_bits(MxFp8(shape=(12, 64), codes=codes, scales=scales).decode(), theirs)


def test_nvfp4_encode_as_modelopt() -> None:
    weight = torch.randn(24, 96) * torch.exp(2 * torch.randn(24, 1))
    weight[3, :32] = 0
    stored, scales, global_scale = NVFP4QTensor.quantize(weight.clone(), 16)
    ours = NvFp4.encode(weight)
    assert torch.equal(ours.global_scale, global_scale)
    assert torch.equal(ours.scales.view(torch.uint8), scales.view(torch.uint8))
    assert torch.equal(ours.codes, stored._quantized_data)


def test_mxfp4_encode_as_modelopt() -> None:
    """OCP rounds the exponent of amax down, ModelOpt up from 1.5 times a power of two: below that they are one.

    Random weights have no ties, which ModelOpt would round down.
    """
    weight = torch.rand(64, 64) - 0.5
    weight[:, ::32] = (1 + torch.rand(64, 2) * 0.5) * torch.exp2(torch.randint(0, 9, (64, 2)).float())
    ours = MxFp4.encode(weight)
    stored, scales = MXFP4QTensor.quantize(weight.clone(), 32)
    assert torch.equal(ours.scales.flatten(), scales.flatten())
    theirs = stored.dequantize(dtype=torch.float32, scale=scales, block_sizes={-1: 32})
    assert torch.equal(ours.decode(), theirs)


def test_mxfp8_encode_as_modelopt() -> None:
    weight = torch.rand(64, 64) - 0.5
    # ModelOpt's exponent is the one that avoids saturation; up to 1.75 times a power of two nothing saturates.
    weight[:, ::32] = (1 + torch.rand(64, 2) * 0.75) * torch.exp2(torch.randint(0, 9, (64, 2)).float())
    ours = MxFp8.encode(weight)
    stored, scales = MXFP8QTensor.quantize(weight.clone())
    assert torch.equal(ours.scales, scales)
    assert torch.equal(ours.codes.view(torch.uint8), stored._quantized_data.view(torch.uint8))
