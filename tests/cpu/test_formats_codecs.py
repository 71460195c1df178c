"""Every byte of every scalar codec, judged against the formula of its standard."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st

from collegium.formats import codecs


def bits(x: torch.Tensor) -> list[int]:
    return x.float().view(torch.int32).flatten().tolist()


def e4m3(byte: int) -> float:
    """The value of an E4M3 byte by the OFP8 definition."""
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


def test_e4m3_values_all_bytes() -> None:
    values = codecs.e4m3_values(torch.device("cpu"))
    for byte, value in enumerate(values.tolist()):
        truth = e4m3(byte)
        assert (math.isnan(value) and math.isnan(truth)) or value == truth
        assert math.isnan(truth) or math.copysign(1, value) == (-1 if byte & 0x80 else 1)
    nan = codecs.e4m3_is_nan(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn))
    assert nan.nonzero().flatten().tolist() == [0x7F, 0xFF]


def test_e8m0_values_all_bytes() -> None:
    values = codecs.e8m0_values(torch.device("cpu"))
    assert values[:255].tolist() == [2.0 ** (b - 127) for b in range(255)]
    assert math.isnan(values[255].item())
    raw = torch.arange(256, dtype=torch.uint8)
    typed = raw.view(torch.float8_e8m0fnu).float()
    assert torch.equal(typed[:255], codecs.look_up(codecs.e8m0_values(raw.device), raw)[:255])


def test_e2m1_pairs_all_bytes() -> None:
    table = codecs.e2m1_pairs(torch.device("cpu"))
    pairs = codecs.look_up(table, torch.arange(256, dtype=torch.uint8)).view(torch.float32).view(256, 2)
    for byte in range(256):
        truth = torch.tensor([codecs.E2M1_VALUES[byte & 15], codecs.E2M1_VALUES[byte >> 4]])
        assert bits(pairs[byte]) == bits(truth), f"byte {byte:#x}"


def test_e2m1_codes_returns_every_code() -> None:
    values = torch.tensor(codecs.E2M1_VALUES)
    assert codecs.e2m1_codes(values.clone()).tolist() == list(range(16))


@pytest.mark.parametrize(
    ("value", "code"),
    [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6), (6.0, 7), (7.9, 7), (1e30, 7)],
)
def test_e2m1_codes_round_half_to_even(value: float, code: int) -> None:
    below, above = (math.nextafter(value, to) for to in (0.0, math.inf))
    x = torch.tensor([value, -value, below, above], dtype=torch.float32)
    codes = codecs.e2m1_codes(x).tolist()
    assert codes[:2] == [code, code | 8]


@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=32))
def test_e2m1_codes_is_the_nearest(values: list[float]) -> None:
    x = torch.tensor(values)
    codes = codecs.e2m1_codes(x.clone()).tolist()
    for value, code in zip(values, codes, strict=True):
        distances = [abs(value - other) for other in codecs.E2M1_VALUES]
        assert distances[code] == min(distances)
        assert code >> 3 == (math.copysign(1, value) < 0)
        ties = [abs(v) for v, d in zip(codecs.E2M1_VALUES, distances, strict=True) if d == min(distances)]
        assert len(set(ties)) == 1 or code % 2 == 0


def test_e2m1_codes_leaves_its_input_alone() -> None:
    x = torch.linspace(-7, 7, 29)
    kept = x.clone()
    codecs.e2m1_codes(x)
    assert torch.equal(x, kept)


@given(st.lists(st.integers(0, 15), min_size=2, max_size=40).filter(lambda c: len(c) % 2 == 0))
def test_nibbles_round_trip(codes: list[int]) -> None:
    packed = codecs.pack_nibbles(torch.tensor(codes, dtype=torch.uint8))
    assert packed.tolist() == [low + 16 * high for low, high in zip(codes[::2], codes[1::2], strict=True)]
    assert codecs.unpack_nibbles(packed).tolist() == codes


@given(st.floats(2.0**-149, 2.0**127, width=32, allow_subnormal=True))
def test_floor_log2_is_exact(value: float) -> None:
    exponent = int(codecs.floor_log2(torch.tensor(value)))
    assert 2.0**exponent <= value < 2.0 ** (exponent + 1)


def test_power_of_two_is_exact() -> None:
    exponents = torch.arange(-126, 128, dtype=torch.int32)
    assert codecs.power_of_two(exponents).tolist() == [2.0**e for e in range(-126, 128)]


def test_e8m0_codes_edges() -> None:
    amax = torch.tensor([0.0, 6.0, 4.0, 3.9999998, 2.0**-149, 3.4e38])
    assert codecs.e8m0_codes(amax, 2).tolist() == [127, 127, 127, 126, 0, 252]


@pytest.mark.parametrize("power_of_two", [False, True])
def test_fp8_scales(power_of_two: bool) -> None:
    amax = torch.tensor([0.0, 448.0, 449.0, 896.0, 1.0, 2.0**-140])
    expected = [1.0, 1.0, 2.0, 2.0, 2.0**-8, 2.0**-126]
    if not power_of_two:
        expected = [1.0, 1.0, (amax[2] / 448).item(), 2.0, (amax[4] / 448).item(), 2.0**-126]
    assert codecs.fp8_scales(amax, exponent_only=power_of_two).tolist() == expected


def test_decode_rows_covers_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "_CPU_CHUNK", 20)
    truth = torch.arange(3 * 5 * 7, dtype=torch.float32).view(3, 5, 7)
    wide = torch.nn.functional.pad(truth.view(15, 7), (0, 4), value=9.0)
    out = codecs.decode_rows((3, 5, 7), torch.bfloat16, truth.device, lambda a, b: wide[a:b])
    assert torch.equal(out, truth.bfloat16())
