"""What the device runs to decode codes, step by step, beside the numbers that formats say they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

pytest.importorskip("triton")

from collegium.experts.triton.packing import interleave
from collegium.formats.codecs import E2M1_VALUES
from collegium.kernels import decode, decode_ptx
from ptx import LANES, halves, paired, run

if TYPE_CHECKING:
    from torch import Tensor

E2M1 = torch.tensor(E2M1_VALUES)
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
DTYPES = ((torch.bfloat16, "BF16"), (torch.float16, "FP16"))


def text_of(name: str) -> str:
    return getattr(decode_ptx, name).value


def decoded(text: str, both: Tensor, beside: list[Tensor], outputs: int, dtype: torch.dtype) -> list[Tensor]:
    """Return ``[2, LANES]`` numbers of each output: codes of pairs of lanes ``both [2, LANES]``, and words beside."""
    given = {f"${outputs + at}": word for at, word in enumerate([paired(*both), *beside])}
    found = run(text, given | {f"${at}": torch.zeros(LANES, dtype=torch.int64) for at in range(outputs)})
    return [torch.stack(halves(found[f"${at}"], dtype)).float() for at in range(outputs)]


def drawn(most: int, seed: int, quarters: int = 4) -> Tensor:
    """Return codes ``[2, LANES, quarters]`` below ``most``."""
    return torch.randint(0, most, (2, LANES, quarters), generator=torch.Generator().manual_seed(seed))


def lanes_of(codes: Tensor, codec: interleave.LaneCodec) -> Tensor:
    """Return lanes of codes ``[2, LANES, 4]``: ``[2, LANES, 1 or 2]``."""
    return codec.pack(codes.view(-1, 1, 4, 1).int()).view(2, LANES, -1)


@pytest.mark.parametrize(("dtype", "name"), DTYPES, ids=["bf16", "fp16"])
def test_e2m1_decoding(dtype: torch.dtype, name: str) -> None:
    smallest, top = (2.0**-126, 126) if dtype == torch.bfloat16 else (2.0**-14, 15)
    met: set[tuple[int, int]] = set()
    for seed in range(40):
        codes, exponents = drawn(16, seed), top - drawn(20, seed + 100)
        scales = [torch.ldexp(torch.ones(2, LANES), exponents[..., q]).to(dtype) for q in range(4)]
        both = lanes_of(codes, interleave.E2M1_HALF if dtype == torch.float16 else interleave.E2M1)[..., 0]
        found = decoded(text_of(f"E2M1_TO_{name}"), both, [paired(*scale) for scale in scales], 4, dtype)
        for quarter in range(4):
            own = codes[..., quarter]
            wanted = E2M1[own] * smallest * scales[quarter].float()
            assert torch.equal(found[quarter], wanted)
            assert torch.equal(found[quarter].signbit(), own >= 8)
            met |= {(quarter, code) for code in own.flatten().tolist()}
    assert len(met) == 64


@pytest.mark.parametrize(("dtype", "name"), DTYPES, ids=["bf16", "fp16"])
@pytest.mark.parametrize("scaled", [True, False])
def test_e4m3_decoding(dtype: torch.dtype, name: str, scaled: bool) -> None:
    smallest, top = (2.0**-120, 120) if dtype == torch.bfloat16 else (2.0**-8, 15)
    met: set[tuple[int, int]] = set()
    for seed in range(200):
        codes, exponents = drawn(256, seed), top - drawn(15, seed + 500)
        codes = torch.where(codes & 127 == 127, 0, codes)
        scales = [torch.ldexp(torch.ones(2, LANES), exponents[..., q]).to(dtype) for q in range(2)]
        both = lanes_of(codes, interleave.EIGHT_BITS)[..., 0]
        beside = [paired(*scale) for scale in scales] if scaled else []
        found = decoded(text_of(f"E4M3_TO_{name}{'' if scaled else '_UNSCALED'}"), both, beside, 2, dtype)
        for half in range(2):
            own = codes[..., half]
            assert torch.equal(found[half], E4M3[own] * (smallest * scales[half].float() if scaled else 1))
            met |= {(half, code) for code in own.flatten().tolist()}
    assert len(met) == 2 * 254


@pytest.mark.parametrize(("dtype", "name"), DTYPES, ids=["bf16", "fp16"])
def test_int4_decoding(dtype: torch.dtype, name: str) -> None:
    for seed in range(40):
        codes, zeros = drawn(16, seed), drawn(17, seed + 100)
        both = lanes_of(codes, interleave.INT4)[..., 0]
        away = -(1024 + zeros) if dtype == torch.float16 else zeros / -64
        beside = [paired(*away[..., q].to(dtype)) for q in range(4)]
        found = decoded(text_of(f"INT4_TO_{name}"), both, beside, 4, dtype)
        whole = decode.integer_divisor(dtype == torch.float16)
        assert all(torch.equal(found[q] * whole, (codes - zeros)[..., q].float()) for q in range(4))


@pytest.mark.parametrize(("dtype", "name"), DTYPES, ids=["bf16", "fp16"])
def test_int8_decoding(dtype: torch.dtype, name: str) -> None:
    met: set[tuple[int, int]] = set()
    for seed in range(200):
        codes, zeros = drawn(256, seed), drawn(256, seed + 200)
        both = lanes_of(codes, interleave.EIGHT_BITS)[..., 0]
        away = -(1024 + zeros) if dtype == torch.float16 else zeros / -64
        beside = [paired(*away[..., q].to(dtype)) for q in range(2)]
        found = decoded(text_of(f"INT8_TO_{name}"), both, beside, 2, dtype)
        whole = decode.integer_divisor(dtype == torch.float16)
        assert all(torch.equal(found[q] * whole, (codes - zeros)[..., q].float()) for q in range(2))
        met |= {(q, code) for q in range(2) for code in codes[..., q].flatten().tolist()}
    assert len(met) == 512


def test_steps_times_codes() -> None:
    for seed in range(40):
        codes, steps = drawn(16, seed), drawn(64, seed + 100)
        both = lanes_of(codes, interleave.INT4)[..., 0]
        # One word of four bytes for each row, and both lanes of a pair are of one row.
        word = sum(steps[0, :, q] << (8 * q) for q in range(4))
        found = decoded(text_of("FOUR_BITS_TIMES_STEP"), both, [word], 4, torch.float16)
        for quarter in range(4):
            assert torch.equal(found[quarter], (codes[..., quarter] * steps[0, :, quarter]).float())


@pytest.mark.parametrize(("first", "name"), [(0, "LOW_BYTES_TIMES_STEP"), (2, "HIGH_BYTES_TIMES_STEP")])
def test_steps_times_bytes(first: int, name: str) -> None:
    for seed in range(40):
        codes, steps = drawn(32, seed), drawn(64, seed + 100)
        both = lanes_of(codes, interleave.EIGHT_BITS)[..., first // 2]
        word = sum(steps[0, :, q] << (8 * q) for q in range(4))
        found = decoded(text_of(name), both, [word], 2, torch.float16)
        for half in range(2):
            quarter = first + half
            assert torch.equal(found[half], (codes[..., quarter] * steps[0, :, quarter]).float())
