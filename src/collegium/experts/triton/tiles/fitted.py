"""Constants of the tile choice that were fitted to measurements of one GPU.

Each group names its GPU, its date, and the file in ``benchmarks/results`` with its measurements. ``csv`` is None where
the measurements were not kept; ``basis`` then describes them. Other GPUs use the same constants: a poor estimate costs
time, never a different result.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from .problem import TileProblem

__all__ = [
    "DECODED",
    "DEEP",
    "DEQUANTIZE",
    "FITS",
    "FOUR_BIT",
    "LARGE",
    "STORED",
    "DecodedConstants",
    "DecodedTile",
    "DecodedTiles",
    "DeepConstants",
    "DequantizeConstants",
    "Fit",
    "FourBitConstants",
    "LargeConstants",
    "StoredConstants",
    "decoded_tiles",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Where constants come from: GPU, date, and file in ``benchmarks/results`` or a description."""

    gpu: str
    date: str
    csv: str | None
    basis: str = ""


FITS: Mapping[str, Fit] = MappingProxyType(
    {
        "stored": Fit(
            gpu="H200",
            date="2026-11-21",
            csv=None,
            basis="times of single products by tile, not kept; layers_h200.csv has whole layers with these constants",
        ),
        "deep": Fit(gpu="H100", date="2026-11-25", csv="tiles_h100.csv"),
        "decoded": Fit(gpu="H200", date="2026-11-24", csv="decoded_tiles_h200.csv"),
        "low_bits": Fit(
            gpu="H200",
            date="2026-11-28",
            csv="layers_low_bits_h200.csv",
            basis="single products by tile, 8 and 32 tokens; the file has whole layers before these constants",
        ),
        "four_bit": Fit(
            gpu="H200",
            date="2026-11-21",
            csv=None,
            basis="times of single products by tile, not kept; layers_h200.csv has whole layers with these constants",
        ),
        "four_bit_depth": Fit(gpu="H200", date="2026-11-24", csv="tiles_h200.csv"),
        "large": Fit(gpu="H200", date="2026-11-23", csv="prefill_h200.csv"),
        "large_four_bits": Fit(gpu="H100", date="2026-11-28", csv="w4_prefill_h100.csv"),
        "dequantize": Fit(gpu="H200", date="2026-11-23", csv="expanded_h200.csv"),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredConstants:
    """Weights that are multiplied as stored: products of 4096 x 4096 and 4096 x 2048 over 256 experts.

    l2_speed: bandwidth of the L2 cache over that of memory. sm_share: times its share of the bandwidth that one
    multiprocessor reads when the others are idle. overlap: fraction of the shorter of memory and math time that is not
    hidden. stage: slowdown of two stages, which falls with more. one_wave, rows_256_32, rows_256, rows_64: slowdown of
    reading weights with two operands in one wave, with 256 weight rows and 32 or other tokens, with 64 weight rows or
    interleaved FP8 operands.
    rate, area_exponent: fraction of the peak rate at 256 x 128, and how it grows with the area. fp8_large,
    fp8_small: fraction of it for FP8 rows. fp8_pair: gain of two programs of four warps, where one multiplies while the
    other promotes its sums.
    """

    l2_speed: float = 4
    sm_share: float = 1.5
    overlap: float = 0.25
    stage: float = 0.08
    one_wave: float = 1.08
    rows_256_32: float = 1.09
    rows_256: float = 1.03
    rows_64: float = 1.03
    rate: float = 0.76
    area_exponent: float = 0.33
    fp8_large: float = 0.75
    fp8_small: float = 0.55
    fp8_pair: float = 1.4


STORED = StoredConstants()


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepConstants:
    """Tiles that read several K blocks before the first is multiplied: 1 to 1,024 tokens of seven layers.

    max_rows: rows per expert up to which they are the fastest. few_rows: rows per expert of the smallest tile.
    min_blocks: K blocks from which on they are the fastest beyond few_rows.
    """

    max_rows: int = 40
    few_rows: int = 8
    min_blocks: int = 12


DEEP = DeepConstants()


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodedTile:
    """One tile of 128 weight rows on Hopper.

    slowdown: times the estimate of ``DecodedConstants``. registers: limit per thread where the compiler would take so
    many that one program less fits; 0: no limit.
    """

    slowdown: float
    warps: int = 4
    registers: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodedTiles:
    """Tiles of one kind of weight that is decoded to 16 bits, by tokens.

    max_block_t: most tokens on GPUs without Hopper's products. block_n_64: 16 tokens also run with 64 weight rows.
    fuse_64x16: such a tile fuses the quarters of a K block. fuse_at_64, fuse_at_64_interleaved: tiles of 64 tokens
    fuse them, with one operand per part and with gate and up interleaved; separate quarters leave room for one program
    more where scales of NVFP4 or zero points take many registers.
    """

    tiles: Mapping[int, DecodedTile]
    max_block_t: int = 64
    block_n_64: bool = True
    fuse_64x16: bool = True
    fuse_at_64: bool = True
    fuse_at_64_interleaved: bool = True


_MXFP4 = DecodedTiles(
    tiles={
        16: DecodedTile(slowdown=1.06),
        32: DecodedTile(slowdown=1.02),
        64: DecodedTile(slowdown=1.04, registers=168),
        128: DecodedTile(slowdown=1.07),
    },
    fuse_64x16=False,
)
_NVFP4 = DecodedTiles(
    tiles={
        16: DecodedTile(slowdown=1.2),
        32: DecodedTile(slowdown=1.2),
        64: DecodedTile(slowdown=1.14),
        128: DecodedTile(slowdown=1.2),
    },
    fuse_at_64_interleaved=False,
)
_INT4 = DecodedTiles(
    tiles={
        16: DecodedTile(slowdown=1.0),
        32: DecodedTile(slowdown=1.0, registers=168),
        64: DecodedTile(slowdown=0.95, registers=168),
        128: DecodedTile(slowdown=1.05),
    },
    fuse_at_64=False,
    fuse_at_64_interleaved=False,
)
_INT8 = DecodedTiles(
    tiles={
        16: DecodedTile(slowdown=1.2),
        32: DecodedTile(slowdown=1.4, registers=168),
        64: DecodedTile(slowdown=1.25),
        128: DecodedTile(slowdown=1.55),
    }
)
_FP8 = DecodedTiles(
    tiles={
        16: DecodedTile(slowdown=1.33),
        32: DecodedTile(slowdown=1.5),
        64: DecodedTile(slowdown=1.4, warps=8, registers=128),
    }
)
_MINIMA = DecodedTiles(
    tiles={
        16: DecodedTile(slowdown=1.4),
        32: DecodedTile(slowdown=1.38),
        64: DecodedTile(slowdown=1.4),
    },
    max_block_t=32,
)
_QUARTERS = DecodedTiles(tiles={16: DecodedTile(slowdown=1.0), 32: DecodedTile(slowdown=1.0)})
_QUARTERS_INT4 = DecodedTiles(
    tiles={16: DecodedTile(slowdown=1.0), 64: DecodedTile(slowdown=1.0, registers=168)},
    block_n_64=False,
)
_QUARTERS_INT8 = DecodedTiles(
    tiles={
        16: DecodedTile(slowdown=1.0),
        64: DecodedTile(slowdown=1.0),
        128: DecodedTile(slowdown=1.15),
    }
)


_LOW_BITS = DecodedTiles(
    tiles={
        16: DecodedTile(slowdown=1.15, registers=168),
        32: DecodedTile(slowdown=1.2, warps=8, registers=128),
        64: DecodedTile(slowdown=1.3, warps=8),
    },
    max_block_t=32,
)
# Without steps there is room for a fourth program.
_TERNARY = replace(_LOW_BITS, tiles={**_LOW_BITS.tiles, 16: DecodedTile(slowdown=1.0, registers=128)})


def decoded_tiles(problem: TileProblem) -> DecodedTiles:
    """Return the tiles of weights that are decoded to 16 bits."""
    eight_bits = problem.weight_bits > EIGHT_BITS
    if problem.quartered:
        if not problem.running:
            return _QUARTERS
        return _QUARTERS_INT8 if eight_bits else _QUARTERS_INT4
    if problem.x_bits > 16:
        return _MINIMA
    if problem.low_bits:
        return _LOW_BITS if problem.weight_bits > TERNARY_BITS else _TERNARY
    if problem.block_k < 128:
        return _NVFP4
    if eight_bits:
        return _INT8 if problem.running else _FP8
    return _INT4 if problem.running else _MXFP4


EIGHT_BITS = 6  # a weight of more bits has codes of eight
TERNARY_BITS = 2.25  # a weight of two bits and no steps has fewer


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodedConstants:
    """Weights that are decoded to 16 bits: products of four models in eight formats.

    step, step_token: microseconds of a multiprocessor for 16,384 weights, and those of each token. quartered_8_bits:
    slowdown of products of quarters with eight-bit codes. tall, large: slowdown of memory for tiles with seven times
    the rows of an expert, and for eight-bit weights with 128 rows; few programs have fewer bytes in flight.
    l2_speed, overlap: see ``StoredConstants``. min_fill: least fraction of multiprocessors that counts as busy.
    narrow_gain: rows that a narrow tile saves, as a fraction of the full tile. small_*: 64 x 16 tiles, the programs per
    multiprocessor up to which they are 0.9 times as slow, and their slowdown beyond.
    """

    step: float = 0.24
    step_token: float = 0.0053
    quartered_8_bits: float = 1.3
    tall: float = 1.1
    large: float = 1.05
    l2_speed: float = 4
    overlap: float = 0.25
    min_fill: float = 0.5
    narrow_gain: float = 0.3125
    small_gain: float = 0.9
    small_programs: int = 4
    small_programs_scaled: int = 2
    small_programs_quartered: int = 8
    small_slowdown: float = 1.2
    small_slowdown_8_bits: float = 1.0
    small_slowdown_quartered: float = 1.45


DECODED = DecodedConstants()


@dataclass(frozen=True, kw_only=True, slots=True)
class FourBitConstants:
    """Four-bit weights with E4M3 rows: products of four models.

    max_block_t, max_block_t_promoted: most tokens by (block_n, warps) before registers spill; a scale in the K loop
    takes a second accumulator. quartered: nanoseconds of a multiprocessor for 128 weight rows and one K block in
    quarters, by (block_n, warps) and tokens. decode, decode_operand: nanoseconds of decoding them, and those of each
    operand. token, token_operand, token_promoted: nanoseconds of a token, of each of its products, of its scale.
    alone, alone_128, alone_8_warps: microseconds of a K block of a program without others to hide its waits.
    small_*, rows_64: slowdown of 64 weight rows. eight_warps_*: of eight warps. tall_depth: of two K blocks a step.
    transpose: microseconds of the kernel that transposes scales for tall tiles. overlap: see ``StoredConstants``.
    """

    max_block_t: Mapping[tuple[int, int], int]
    max_block_t_promoted: Mapping[tuple[int, int], int]
    quartered: Mapping[tuple[int, int], Mapping[int, int]]
    decode: float = 130
    decode_operand: float = 60
    token: float = 0.8
    token_operand: float = 1.75
    token_promoted: float = 2.0
    alone: float = 0.35
    alone_128: float = 0.07
    alone_8_warps: float = 0.08
    alone_added: float = 0.7
    small_one_operand: float = 1.03
    small_two_operands: float = 1.1
    rows_64: float = 1.4
    tall_depth: float = 0.86
    eight_warps_small: float = 1.05
    eight_warps: float = 1.4
    eight_warps_exponent: float = 0.3
    transpose: float = 6.0
    overlap: float = 0.25


FOUR_BIT = FourBitConstants(
    max_block_t={(64, 4): 128, (128, 4): 128, (128, 8): 256},
    max_block_t_promoted={(64, 4): 128, (128, 4): 64, (128, 8): 128},
    quartered={
        (64, 4): {16: 390, 32: 495, 64: 900},
        (128, 4): {16: 343},
        (128, 8): {16: 445, 32: 640, 64: 850},
    },
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LargeConstants:
    """Rows per expert from which on operands as stored run with the tiles of large batches.

    From 32 rows on, 16-bit weights and E4M3 rows with one scale are level with small tiles. promoted: where each K
    block is scaled, small tiles wait for every product. four_bits: weights that large batches decode in registers. It
    was measured with MXFP4 and E4M3 rows of one scale: small tiles are 1 to 5 % faster with 16 and 32 rows an expert,
    large ones 9 to 29 % with 64 and more. four_bits_scaled: the same where each K block of a token has a scale, which
    small tiles wait for: large ones are 5 % faster with 16 rows an expert and 8 to 12 % with 32.
    few_experts: factor where experts are too few for half of the multiprocessors, since small tiles have more programs.
    """

    promoted: int = 16
    sixteen_bits: int = 48
    eight_bits: int = 40
    four_bits: int = 48
    four_bits_scaled: int = 16
    few_experts: float = 2.5


LARGE = LargeConstants()


@dataclass(frozen=True, kw_only=True, slots=True)
class DequantizeConstants:
    """Rows per expert from which on weights are better decoded once, into memory, before the products.

    slower_memory: how the threshold grows with ``Machine.slower``, since slower memory needs more rows to share the
    traffic. min_k: fewest columns; shorter products decode little.
    """

    two_operands: int = 208
    eight_bits: int = 400
    nvfp4: int = 640
    four_bits: int = 800
    slower_memory: float = 1.4
    min_k: int = 512

    def rows(self, problem: TileProblem) -> int:
        """Return the threshold with the memory of an H200."""
        if problem.operands == 2:
            return self.two_operands
        if problem.weight_bits > EIGHT_BITS:
            return self.eight_bits
        return self.nvfp4 if decoded_tiles(problem) is _NVFP4 else self.four_bits


DEQUANTIZE = DequantizeConstants()
