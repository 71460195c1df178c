"""Codes of two and three bits: the PTX of their operands, and products on heavy-tailed rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from collegium.dummy.encoders import write_half
from collegium.experts.triton import grouped as ops
from collegium.experts.triton.packing import pack_gguf, unpack_gguf
from collegium.experts.triton.tiles.problem import TileChoice
from collegium.formats.gguf import KINDS
from collegium.kernels import low_bits_ptx as ptx
from collegium.testing.compare import heavy_tailed, relative_error
from collegium.types import ActivationSpec
from integers import random_blocks
from products import grouped_gemm_reference
from ptx import LANES, halves, run

LOW_BITS = ("Q2_K", "Q3_K", "IQ1_S", "IQ1_M", "TQ1_0", "TQ2_0")
UNIT = 2.0**-44
TILE = TileChoice(block_n=64, block_t=16, warps=4, stages=2)
BYTES = torch.arange(256).view(8, LANES)
# Where a lane of three bits holds the codes of eight steps: (lane, first bit), by half.
THREE_BITS = (
    ((0, 0), (0, 6), (0, 3), (0, 9), (0, 12), (1, 0), (1, 3), (1, 9)),
    ((2, 0), (2, 6), (2, 3), (2, 9), (2, 12), (1, 6), (1, 12)),
)


def words_of(values: torch.Tensor | float) -> torch.Tensor:
    """Return words whose halves are both bfloat16 ``values``, int64, at least ``[LANES]``."""
    numbers = torch.as_tensor(values, dtype=torch.float32)
    assert torch.equal(numbers.bfloat16().float(), numbers)
    bits = (numbers.bfloat16().view(torch.int16).long() & 0xFFFF).expand(numbers.shape or (LANES,))
    return bits | bits << 16


def both(word: torch.Tensor) -> torch.Tensor:
    """Return the number that both halves of a word are."""
    low, high = halves(word, torch.bfloat16)
    assert torch.equal(low, high)
    return low.double()


@pytest.mark.parametrize("group", range(4))
def test_steps_become_multipliers_and_offsets(group: int) -> None:
    word = BYTES << (8 * group) | 0x5A5A5A5A & ~(255 << (8 * group))
    low, high = BYTES & 15, BYTES >> 4
    multiplier = 2.0 ** (89 - 2 * group)

    ratio = torch.tensor(-1.40625 * 2.0**85)
    found = run(ptx.MINIMUM_STEPS_TO_FACTORS.value, {"$8": word, "$9": words_of(ratio) & 0xFFFF0000 | 0x3C00})
    assert torch.equal(both(found[f"${group}"]), low * multiplier)
    offsets = (high * -1.40625 * UNIT).bfloat16().double()
    assert torch.equal(both(found[f"${4 + group}"]), offsets)

    found = run(ptx.SHIFTED_STEPS_TO_FACTORS.value, {"$12": word})
    assert torch.equal(both(found[f"${group}"]), low * multiplier)
    for output, bit in ((4, 4), (8, 5)):
        shifted = torch.where(BYTES >> bit & 1 == 1, -1.125, -0.875)
        assert torch.equal(both(found[f"${output + group}"]), low * shifted.double() * UNIT)

    step = (BYTES & 63) - 32
    found = run(ptx.SIGNED_STEPS_TO_FACTORS.value, {"$8": word & 0x3F3F3F3F})
    assert torch.equal(both(found[f"${group}"]), step * 2.0 ** (89 - 3 * (group // 2)))
    assert torch.equal(both(found[f"${4 + group}"]), step * -4.0 * UNIT)


def operands(text: str, lanes: int, words: list[torch.Tensor], shifts: tuple[int, ...]) -> list[torch.Tensor]:
    """Return what PTX makes of words with steps 3, 5, 7 and 11 and offsets of -1, -2, -3 and -4 units."""
    inputs = {f"${8 + i}": word for i, word in enumerate(words)}
    for group, step in enumerate((3, 5, 7, 11)):
        inputs[f"${8 + lanes + 2 * group}"] = words_of(step * 2.0 ** (89 - shifts[group]))
        inputs[f"${16 + lanes + 2 * group}"] = words_of(-(group + 1) * UNIT)
    found = run(text, inputs)
    return [torch.stack([half.double() for half in halves(found[f"${i}"], torch.bfloat16)]) for i in range(8)]


def wanted(codes: torch.Tensor, step: int) -> torch.Tensor:
    group = step % 4
    return (codes * (3, 5, 7, 11)[group] - (group + 1)) * UNIT


def test_every_lane_of_two_bits() -> None:
    low = torch.arange(1 << 16).view(-1, LANES)
    high = low.flip(0)
    found = operands(ptx.TWO_BITS.value, 1, [low | high << 16], (0, 2, 4, 6))
    for step in range(8):
        codes = torch.stack((low, high)) >> 2 * step & 3
        assert torch.equal(found[step], wanted(codes, step))


def test_every_lane_of_three_bits() -> None:
    low = torch.stack([torch.randperm(1 << 16).view(-1, LANES) for _ in range(3)])
    high = torch.stack([torch.randperm(1 << 16).view(-1, LANES) for _ in range(3)])
    words = list(low | high << 16)
    both_lanes = torch.stack((low, high), dim=1)
    first = operands(ptx.THREE_BITS_FIRST.value, 2, words[:2], (0, 0, 3, 3))
    second = operands(ptx.THREE_BITS_SECOND.value, 3, words, (0, 0, 3, 3))
    for found, places in zip((first, second), THREE_BITS, strict=True):
        for step, (lane, bit) in enumerate(places):
            assert torch.equal(found[step], wanted(both_lanes[lane] >> bit & 7, step))
    last = sum((both_lanes[bit] >> 15 & 1) << bit for bit in range(3))
    assert isinstance(last, torch.Tensor)
    assert torch.equal(second[7], wanted(last, 7))


@pytest.mark.parametrize("kind", LOW_BITS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 256), (40, 320), (70, 768)])
@pytest.mark.parametrize("interleave", [False, True])
def test_gate_up_on_heavy_tailed_rows(kind: str, rows: int, columns: int, interleave: bool) -> None:
    payload = random_blocks(kind, 3, 2, rows, columns)
    bias = torch.randn(3, 2, rows)
    packed = pack_gguf(payload, bias)
    assert packed.layout.low_bits
    offsets = torch.tensor([0, 3, 3, 22])
    x = heavy_tailed(22, columns, seed=6).bfloat16()
    x[1] = torch.nan
    found = torch.full((24, rows), torch.nan)
    tile = replace(TILE, interleave_gate_up=interleave)
    ops.grouped_gemm(x, packed, offsets, ops.tile_list(offsets, 22, tile), found[:22], activation=ActivationSpec())
    weights = payload.decode()
    truth = grouped_gemm_reference(x, weights, offsets, bias=bias, activation=ActivationSpec())
    swapped = grouped_gemm_reference(x, weights.flip(1), offsets, bias=bias.flip(1), activation=ActivationSpec())
    assert bool(found[1].isnan().all())
    kept = [row for row in range(22) if row != 1]
    bound = 1e-2 if kind == "Q2_K" else 2e-5
    assert relative_error(found[kept], truth[kept]) < bound < relative_error(found[kept], swapped[kept])
    assert bool(found[22:].isnan().all())


def test_minima_without_scales() -> None:
    """A block whose scale is zero leaves its minimum; a ratio up to 2^40 is a bfloat16 number."""
    payload = random_blocks("Q2_K", 2, 1, 40, 512)
    for half, rows, at, value in (
        (0, slice(10), 0, 0.0), (0, slice(5, 15), 1, 2.0**-24), (0, slice(20, 22), slice(None), 0.0),
        (1, slice(8, 14), 0, 0.0), (1, slice(13, 15), 1, 65504.0), (1, slice(21, 25), slice(None), 0.0),
    ):  # fmt: skip
        write_half("Q2_K", payload.blocks[:, :, rows, at], half, torch.tensor(value))
    payload.blocks[:, :, 3, 1, KINDS["Q2_K"].halves[0] + 1] ^= 128  # a sign
    packed, offsets = pack_gguf(payload, None), torch.tensor([0, 3, 9])
    x, found = heavy_tailed(9, 512, seed=6).bfloat16(), torch.empty(9, 40)
    ops.grouped_gemm(x, packed, offsets, ops.tile_list(offsets, 9, TILE), found)
    truth = grouped_gemm_reference(x, payload.decode(), offsets)
    assert bool((found[:, 21] == 0).all()), "both are zero"
    assert all(relative_error(found[:, row], truth[:, row]) < 2e-2 for row in range(40) if row != 21)


def test_error_of_natural_two_bit_weights() -> None:
    """Minima of about the size of weights: a ratio and weights that are rounded to bfloat16."""
    steps = torch.randint(4, 16, (1, 1, 64, 4, 16), dtype=torch.uint8)
    payload = random_blocks("Q2_K", 1, 1, 64, 1024)
    payload.blocks[..., :16] = steps | steps << 4
    for index in range(2):
        write_half("Q2_K", payload.blocks, index, 0.01 + 0.005 * torch.rand(payload.blocks.shape[:-1]))
    unpacked = unpack_gguf(pack_gguf(payload, None))
    error = relative_error(unpacked.weights(), payload.decode())
    assert 0 < error < 4e-3
