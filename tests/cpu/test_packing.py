"""Packed weights unpack to the codes and scales of the payload, in logical order, for every layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from collegium.dummy.encoders import write_half
from collegium.experts.triton import packing
from collegium.experts.triton.packing import common, interleave, w4a8
from collegium.experts.triton.tiles.fitted import FITS
from collegium.formats import Bf16, Fp16, Int4Group
from collegium.formats.codecs import E2M1_VALUES, unpack_nibbles
from collegium.formats.fp8_block import Fp8Block
from collegium.formats.gguf import KINDS
from collegium.kernels.enums import E8M0_SCALE, GROUP_SCALE
from collegium.testing.compare import random_experts, relative_error
from integers import encoded, random_blocks

SHAPES = [(2, 2, 40, 320), (3, 1, 72, 336)]
E2M1 = torch.tensor(E2M1_VALUES, dtype=torch.float64)
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
CODECS = {
    "e2m1": (interleave.E2M1, 16),
    "e2m1_half": (interleave.E2M1_HALF, 16),
    "int4": (interleave.INT4, 16),
    "eight_bits": (interleave.EIGHT_BITS, 256),
}


@pytest.fixture(autouse=True, params=[1 << 12, 1 << 20])
def batch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack a few rows of one expert at a time, and several experts."""
    monkeypatch.setattr(common, "_CPU_BATCH", request.param)


def payload_of(name: str, shape: tuple[int, ...], group: int = 128) -> Any:
    return encoded(random_experts(*shape, seed=1), name, group).gate_up


def nibbles(payload: Any) -> torch.Tensor:
    return unpack_nibbles(payload.codes)[..., : payload.shape[-1]]


def exact(payload: Any) -> torch.Tensor:
    return payload.decode().double()


@pytest.mark.parametrize("name", CODECS)
def test_lane_codecs(name: str) -> None:
    codec, count = CODECS[name]
    codes = torch.randint(0, count, (500, 3, 4, 32), dtype=torch.int32)
    lanes = codec.pack(codes).to(torch.int16)  # as they are stored
    assert lanes.shape[-1] == 32 * (2 if count == 256 else 1)
    assert torch.equal(codec.unpack(lanes.int() & 0xFFFF).int(), codes)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("half", [False, True])
def test_plain_round_trip(shape: tuple[int, ...], half: bool) -> None:
    weight = random_experts(*shape, seed=1).gate_up.decode()
    for payload in (Bf16.encode(weight), Fp16.encode(weight)):
        unpacked = packing.unpack_plain(packing.pack_plain(payload, None, half=half))
        assert torch.equal(unpacked.weights(), exact(payload))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("name", ["fp8_block", "fp8_channel", "fp8_tensor"])
def test_fp8_round_trip(name: str, native: bool, shape: tuple[int, ...]) -> None:
    payload = payload_of(name, shape)
    pack = packing.pack_fp8_block if name == "fp8_block" else packing.pack_fp8_rows
    unpacked = packing.unpack_fp8(pack(payload, None, native=native))
    assert torch.equal(unpacked.codes, payload.codes.view(torch.uint8))
    assert torch.equal(unpacked.weights(E4M3).float(), payload.decode())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block", [(32, 32), (64, 64), (1, 128), (16, 96), (128, 64), (5, 256)])
@pytest.mark.parametrize("power", [False, True])
def test_fp8_blocks_of_other_sizes(block: tuple[int, int], power: bool, shape: tuple[int, ...]) -> None:
    weight = random_experts(*shape, seed=1).gate_up.decode()
    weight[0, 0, : block[0], : block[1]] = 0.0
    payload = Fp8Block.encode(weight, block=block, power_of_two=power)
    payload.scales[0, 0, 0, 0] = 0.0  # of codes that are zero
    for native, half in ((True, False), (False, False), (False, True)):
        packed = packing.pack_fp8_block(payload, None, native=native, half=half)
        as_mx = packed.layout.scale_kind == E8M0_SCALE
        assert as_mx == (power and not native)
        unpacked = packing.unpack_mx(packed, half=half) if as_mx else packing.unpack_fp8(packed)
        assert torch.equal(unpacked.codes, payload.codes.view(torch.uint8))
        assert torch.equal(unpacked.weights(E4M3).float(), payload.decode())
        assert f"{block[0]} x {block[1]}" in str(packed.report)


def test_blocks_beyond_float16_keep_scales() -> None:
    payload = Fp8Block.encode(random_experts(*SHAPES[0], seed=1).gate_up.decode(), block=(32, 32), power_of_two=True)
    payload.scales[1, 0, 0, 0] *= 2.0**30
    assert packing.pack_fp8_block(payload, None, half=True).layout.scale_kind == GROUP_SCALE
    assert packing.pack_fp8_block(payload, None).layout.scale_kind == E8M0_SCALE


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("half", [False, True])
def test_mxfp4_round_trip(shape: tuple[int, ...], half: bool) -> None:
    payload = payload_of("mxfp4", shape)
    unpacked = packing.unpack_mx(packing.pack_mx(payload, None, half=half), half=half)
    assert torch.equal(unpacked.codes, nibbles(payload))
    assert torch.equal(unpacked.weights(E2M1), exact(payload))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("half", [False, True])
def test_mxfp8_round_trip(shape: tuple[int, ...], half: bool) -> None:
    payload = payload_of("mxfp8", shape)
    unpacked = packing.unpack_mx(packing.pack_mx(payload, None, half=half), half=half)
    assert torch.equal(unpacked.codes, payload.codes.view(torch.uint8)[..., : shape[-1]])
    assert torch.equal(unpacked.weights(E4M3), exact(payload))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("half", [False, True])
def test_nvfp4_round_trip(shape: tuple[int, ...], half: bool) -> None:
    payload = payload_of("nvfp4", shape)
    unpacked = packing.unpack_nvfp4(packing.pack_nvfp4(payload, None, half=half), half=half)
    assert torch.equal(unpacked.codes, nibbles(payload))
    # Decoding multiplies the two scales first; a product of three rounds differently in the last bit.
    assert torch.allclose(unpacked.weights(E2M1), exact(payload), rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_int4_group(group: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    payload = Int4Group.encode(random_experts(*shape, seed=1).gate_up.decode(), group_size=group)
    payload = replace(payload, scales=payload.scales.to(dtype))
    unpacked = packing.unpack_int(packing.pack_int(payload, None))
    assert torch.equal(unpacked.codes, nibbles(payload))
    assert torch.equal(unpacked.weights().float(), payload.decode())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("name", ["int4_affine", "int8_affine", "int4_ordered", "int8_ordered"])
def test_integers_round_trip(name: str, group: int, shape: tuple[int, ...]) -> None:
    payload = payload_of(name, shape, group)
    packed = packing.pack_int(payload, None)
    unpacked = packing.unpack_int(packed)
    codes = nibbles(payload) if payload.bits == 4 else payload.codes
    assert torch.equal(unpacked.codes, codes)
    assert (packed.order is not None) == name.endswith("_ordered")
    if packed.order is not None:
        # Scales follow the packed order of columns.
        order = packed.order.long()[:, None, None].expand(shape)
        unpacked = replace(unpacked, codes=unpacked.codes.gather(-1, order))
        assert torch.equal(unpacked.weights().float(), payload.decode().gather(-1, order))
    else:
        assert torch.equal(unpacked.weights().float(), payload.decode())


def test_scales_that_are_no_unit() -> None:
    payload = payload_of("int4_affine", SHAPES[0])
    payload.scales[0, 0, ::3] = 0
    unpacked = packing.unpack_int(packing.pack_int(payload, None))
    assert torch.equal(unpacked.weights().float(), payload.decode())
    assert bool((unpacked.scales == 1).any())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("half", [False, True])
def test_bnb4_round_trip(shape: tuple[int, ...], half: bool) -> None:
    payload = payload_of("bnb4", (*shape[:3], 320))
    unpacked = packing.unpack_bnb4(packing.pack_bnb4(payload, None, half=half), half=half)
    assert torch.equal(unpacked.codes, nibbles(payload))
    # Two bfloat16 numbers keep 16 bits of each number of the table, two float16 numbers 22.
    largest = payload.table.abs().amax().double()
    assert bool(((unpacked.numbers - payload.table).abs() <= largest * 2.0 ** (-22 if half else -16)).all())
    tolerance = payload.scales.amax().double() * largest * 2.0 ** (-22 if half else -16)
    assert bool(((unpacked.weights() - exact(payload)).abs() <= tolerance).all())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("zeroed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gguf_round_trip(kind: str, zeroed: bool, shape: tuple[int, ...]) -> None:
    payload = random_blocks(kind, *shape)
    if zeroed and payload.kind.terms:
        write_half(kind, payload.blocks[0, 0, ::3], 0, torch.zeros(()))
    unpacked = packing.unpack_gguf(packing.pack_gguf(payload, None))
    weights = unpacked.weights(None if payload.kind.terms else E2M1)
    if kind == "Q2_K":
        # The nearest multiples of a scale are about as near as bfloat16 numbers.
        assert relative_error(weights, exact(payload)) < 2.5e-3
    elif unpacked.minima is None:
        assert torch.equal(weights.float(), payload.decode())
    else:
        # Decoding rounds the product and the minimum to float32 each.
        error = (weights - exact(payload)).abs()
        assert bool((error <= 2.0**-22 * (weights.abs() + unpacked.minima.abs().amax())).all())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scaled", [False, True])
def test_w4a8_mxfp4(shape: tuple[int, ...], scaled: bool) -> None:
    payload = payload_of("mxfp4", shape)
    packed = packing.pack_w4a8(payload, None, scaled=scaled)
    unpacked = packing.unpack_w4a8(packed)
    assert packed.report is not None
    assert torch.equal(unpacked.codes, nibbles(payload))
    assert torch.equal(unpacked.weights(E2M1), exact(payload))


def test_w4a8_groups_below_row_range() -> None:
    payload = payload_of("mxfp4", SHAPES[0])
    payload.scales[..., ::3] -= 14
    packed = packing.pack_w4a8(payload, None)
    weights = packing.unpack_w4a8(packed).weights(E2M1)
    assert packed.report.beyond > 0
    largest = exact(payload).abs().amax(-1, keepdim=True)
    # Of a group below the range, weights are rounded to a grid 2^-12 of the row's largest power of two.
    assert bool(((weights - exact(payload)).abs() <= largest * 2.0**-12).all())
    assert not torch.equal(weights, exact(payload))


@pytest.mark.parametrize("shape", SHAPES)
def test_w4a8_nvfp4(shape: tuple[int, ...]) -> None:
    payload = payload_of("nvfp4", shape)
    packed = packing.pack_w4a8(payload, None)
    unpacked = packing.unpack_w4a8(packed)
    assert not packed.report.beyond
    assert torch.equal(unpacked.codes & 7, nibbles(payload) & 7)
    assert torch.allclose(unpacked.weights(E2M1), exact(payload), rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_w4a8_int4(group: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    payload = Int4Group.encode(random_experts(*shape, seed=1).gate_up.decode(), group_size=group)
    payload = replace(payload, scales=payload.scales.to(dtype))
    unpacked = packing.unpack_w4a8(packing.pack_w4a8(payload, None))
    assert torch.equal(unpacked.codes, nibbles(payload))
    assert torch.equal(unpacked.weights().float(), payload.decode())


@pytest.mark.parametrize("parts", [1, 2])
def test_row_tiles(parts: int) -> None:
    layout = w4a8.WORDS["mxfp4"].of((3, parts, 100, 128))
    rows = torch.arange(3 * layout.row_tiles * 64).view(3, parts, -1)
    tiles = w4a8._to_tiles(rows)
    assert tiles.shape == (3, layout.row_tiles, 64)
    assert torch.equal(w4a8._from_tiles(tiles, layout), rows[:, :, :100])


def test_measurements_of_fitted_constants_exist(request: pytest.FixtureRequest) -> None:
    results = request.config.rootpath / "benchmarks" / "results"
    files = [results / fit.csv for fit in FITS.values() if fit.csv is not None]
    assert files
    assert all(fit.csv is None or (results / fit.csv).is_file() for fit in FITS.values())
    for path, fit in ((results / fit.csv, fit) for fit in FITS.values() if fit.csv is not None):
        assert fit.gpu in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(("experts", "rows", "codes"), [(5, 7, 3), (5, 7, 40), (5, 3, 300), (1, 9, 10**9)])
def test_batches_cover_all_rows(experts: int, rows: int, codes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "_CPU_BATCH", 100)
    seen = torch.zeros(experts, rows, dtype=torch.int)
    for some, span in common.row_batches(experts, rows, codes, torch.device("cpu")):
        part = seen[some, span]
        assert part.numel() * codes <= 100 or part.numel() == 1
        part += 1
    assert bool((seen == 1).all())
