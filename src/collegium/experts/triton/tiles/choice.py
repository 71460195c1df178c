"""The tile of a product: a measured one, the candidate with the least score, or that of a large batch."""

import math
from functools import lru_cache

from ....errors import PlanError
from ....runtime.machine import Machine
from .candidates import candidates
from .fitted import DEQUANTIZE, LARGE
from .problem import Operands, TileChoice, TileProblem, TunedTiles
from .score import score

__all__ = [
    "FOUR_BIT_TOKENS",
    "FOUR_BIT_TOKENS_SPLIT",
    "LARGE_BLOCK_N",
    "choose",
    "dequantize_threshold",
    "large_from",
    "nearest",
    "prefill_tile",
]

LARGE_BLOCK_N = 128  # weight rows of an operand of a large batch's tile, which has two
FOUR_BIT_TOKENS = 160  # of the widest tile of four-bit weights in a large batch
FOUR_BIT_TOKENS_SPLIT = 112  # the same of sums of two operands, where each K block of a token has a scale
_FOUR_BIT_ROWS = 256  # weight rows of a block of threads there
_MIN_K = DEQUANTIZE.min_k
_LARGE_GROUP_T = 8  # token tiles of one expert in a large batch that share a pass over its weights


def nearest(tuned: TunedTiles, rows: int) -> TileChoice | None:
    """Return the tile measured nearest to ``rows``, or None where all were measured more than a factor of two away."""
    ratios = [(max(rows, measured) / max(1, min(rows, measured)), tile) for measured, tile in tuned]
    ratio, tile = min(ratios, key=lambda pair: pair[0], default=(math.inf, None))
    return tile if ratio <= 2 else None


@lru_cache(maxsize=1 << 16)  # scoring all candidates takes about 60 microseconds, in every forward pass
def choose(problem: TileProblem, machine: Machine) -> TileChoice:
    """Return the candidate with the least score; raises PlanError where none fits the machine."""
    tiles = candidates(problem, machine)
    if not tiles:
        raise PlanError(
            f"tiles: no tile of a product with block_k={problem.block_k} and {problem.parts} parts fits "
            f"{machine.shared:,} bytes of shared memory; use the reference kernel on this GPU"
        )
    return min(tiles, key=lambda tile: score(problem, tile, machine))


def prefill_tile(problem: TileProblem, machine: Machine, *, always: bool = False) -> TileChoice | None:
    """Return the tile of ``prefill_gemm`` or ``w4_prefill_gemm`` for ``problem`` where it is faster, otherwise None.

    They need a Hopper GPU with NVRTC, operands of one width, weights that are decoded to 16 bits first or in
    registers, rows of a multiple of 16 bytes, and enough rows for each expert. always: with any number of rows.
    """
    if not machine.compiles or problem.experts * problem.parts * problem.n_out >= 1 << 31:
        return None
    # Blocks come in pairs, which share their tokens.
    programs = machine.sms // 2 * 2
    if problem.in_registers:
        if not always and problem.rows < large_from(problem, machine) * problem.experts:
            return None
        # A single K block needs one scale of a token, as rows with one scale do.
        scaled = problem.promoted and problem.k_in > problem.block_k
        return TileChoice(
            block_n=_FOUR_BIT_ROWS,
            block_t=FOUR_BIT_TOKENS_SPLIT if scaled and problem.operands > 1 else FOUR_BIT_TOKENS,
            warps=8,
            stages=5,
            group_t=_LARGE_GROUP_T,
            programs=programs,
        )
    if problem.kind is Operands.FOUR_BIT:
        return None
    if problem.kind is Operands.STORED:
        one_width = problem.weight_bits == problem.x_bits and problem.block_k * problem.x_bits == 1024
        fits = one_width and problem.k_in * problem.x_bits % 128 == 0
        min_rows = large_from(problem, machine)
    else:
        fits = problem.x_bits >= 16 and problem.k_in % 8 == 0 and problem.k_in >= _MIN_K
        min_rows = dequantize_threshold(problem, machine)
    if not fits or (not always and problem.rows < min_rows * problem.experts):
        return None
    # Three groups of warps multiply 64 rows each.
    return TileChoice(block_n=LARGE_BLOCK_N, block_t=192, warps=12, stages=5, group_t=_LARGE_GROUP_T, programs=programs)


def large_from(problem: TileProblem, machine: Machine) -> float:
    """Return the rows of an expert from which on weights that are not decoded to memory run as large batches."""
    block_n = _FOUR_BIT_ROWS if problem.in_registers else LARGE_BLOCK_N
    if problem.in_registers:
        one_operand_scaled = problem.promoted and problem.operands == 1
        min_rows = LARGE.four_bits_scaled if one_operand_scaled else LARGE.four_bits
    elif problem.promoted:
        min_rows = LARGE.promoted
    else:
        min_rows = LARGE.sixteen_bits if problem.x_bits > 8 else LARGE.eight_bits
    enough = problem.experts * problem.parts * problem.n_out >= block_n * machine.sms
    return min_rows * (1 if enough else LARGE.few_experts)


def dequantize_threshold(problem: TileProblem, machine: Machine) -> float:
    """Return the rows of an expert from which on weights are decoded once, into memory, before the products."""
    return DEQUANTIZE.rows(problem) * (1 + DEQUANTIZE.slower_memory * machine.slower)
