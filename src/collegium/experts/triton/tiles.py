"""Which tile a grouped product runs with: problem -> candidates -> score, a pure function of sizes.

The score is an estimate in microseconds from three terms a tile pays (weight bytes, token bytes, tensor-core work)
and how well its programs fill the machine. Nothing in it depends on data, and the K block is no choice: it belongs to
the format, so every token count adds in the same order. Shape letters: R rows, E experts.
"""

import math
from dataclasses import replace
from functools import lru_cache
from itertools import product

from ...errors import PlanError
from ...runtime.machine import Machine
from .decoded_tiles import decoded_candidates, decoded_score, dequantize_threshold
from .four_bit_tiles import four_bit_candidates, four_bit_score
from .tile_choice import TileChoice, TileProblem, TunedTiles, starts_early

__all__ = ["BAND", "candidates", "choose", "large_from", "nearest", "prefill_tile", "score"]


BAND = 128  # weight rows a tile of a large batch holds twice
_SMALL = 1 << 22  # weights that a small expert has in a product
_LONG = 512  # columns that such a product has at least: shorter ones decode little
_SHARED_PASS = 8  # token tiles of one expert in a large batch that share a pass over its weights


def nearest(tuned: TunedTiles, rows: int) -> TileChoice | None:
    """Return the tile measured nearest to ``rows``, or None when all were measured more than a factor of two away."""
    close = [(max(rows, at) / max(1, min(rows, at)), tile) for at, tile in tuned]
    ratio, tile = min(close, key=lambda pair: pair[0], default=(math.inf, None))
    return tile if ratio <= 2 else None


def candidates(problem: TileProblem, machine: Machine) -> tuple[TileChoice, ...]:
    """Return every tile whose buffers and accumulators fit."""
    found: list[TileChoice] = []
    if problem.decoded:
        return (four_bit_candidates if problem.x_bits == 8 else decoded_candidates)(problem, machine)
    overlap, hit = starts_early(problem, machine), problem.experts_hit
    for block_t in (16, 32, 64, 128, 256):
        # Where every expert has one tile, programs in a row share its tokens and read neighbours in memory.
        group_t = 1 if problem.rows <= block_t * hit else 8
        for block_n, warps, stacked in product((64, 128), (4, 8), (False, True)):
            # Stacking gains only with eight warps and few tokens.
            if stacked and (problem.parts == 1 or (block_n, warps) != (128, 8)):
                continue
            tile = TileChoice(
                block_n=block_n,
                block_t=block_t,
                warps=warps,
                stages=1,
                group_t=group_t,
                stacked=stacked,
                overlap=overlap,
            )
            used = _accumulators(problem, tile)
            if used <= 128 and not (warps == 8 and used < (8 if block_t <= 32 else 16)):
                stages = _stages(problem, machine, tile)
                found += [replace(tile, stages=count, narrow=machine.copies and block_t >= 64) for count in stages]
    deep = _deep(problem, machine)
    return tuple(found) if deep is None else (*found, deep)


def score(problem: TileProblem, tile: TileChoice, machine: Machine) -> float:
    """Return the estimated microseconds of ``problem`` with ``tile``."""
    if problem.decoded:
        return (four_bit_score if problem.x_bits == 8 else decoded_score)(problem, tile, machine)
    hit, weights = problem.experts_hit, problem.weight_bytes
    if tile == _deep(problem, machine):
        return weights / machine.bandwidth
    each = problem.rows / hit
    # A tile less than full at the end of every expert: half of one on average, a whole one when all rows fit.
    tiles = hit * (1.0 if each <= tile.block_t / 2 else each / tile.block_t + 0.5)
    columns = math.ceil(problem.n_out / tile.columns)
    # Weights come from memory once and from the L2 cache, four times as fast, for every further token tile; the
    # tokens of a tile come from the L2 cache for every column tile.
    again = max(0.0, tiles / hit - 1.0) * weights + columns * problem.rows * problem.k_in * problem.x_bits / 8
    memory = weights / machine.bandwidth + again / (4 * machine.bandwidth)
    math_time = tiles * columns * _program(problem, tile, machine)
    programs = tiles * columns
    waves = programs / (machine.sms * _resident(problem, tile, machine))
    # The last wave is only partly full: with few waves that is felt, with many it is not.
    filled = waves / math.ceil(waves) if waves > 1 else 1.0
    # One multiprocessor reads 1.5 times its share at most, however many others have nothing to do.
    one = tile.weight_rows(problem) * problem.k_in * problem.weight_bits / 8
    memory = max(memory, one * machine.sms / (1.5 * machine.bandwidth)) * _slower(problem, tile, waves)
    return max(memory, math_time) / filled**0.5 + 0.25 * min(memory, math_time)


def _slower(problem: TileProblem, tile: TileChoice, waves: float) -> float:
    """Return how many times longer a tile of undecoded weights takes to read them than the best one."""
    rows = tile.weight_rows(problem)
    factor = 1 + 0.08 / (tile.stages - 1)
    if waves <= 1 and rows > tile.block_n:
        return factor * 1.08  # one wave: two operands a step keep fewer bytes in flight than one of eight warps
    if rows == 256:
        factor *= 1.09 if tile.block_t == 32 else 1.03
    return factor * (1.03 if rows == 64 or (tile.stacked and problem.x_bits == 8) else 1.0)


@lru_cache(maxsize=1 << 16)  # scoring every candidate takes some 60 microseconds, at every forward pass
def choose(problem: TileProblem, machine: Machine) -> TileChoice:
    """Return the candidate of least score; raises PlanError when nothing fits the machine."""
    found = candidates(problem, machine)
    if not found:
        raise PlanError(
            f"tiles: no tile of a product with block_k={problem.block_k} and {problem.parts} parts fits "
            f"{machine.shared:,} bytes of shared memory; use the reference kernel on this GPU"
        )
    return min(found, key=lambda tile: score(problem, tile, machine))


def _deep(problem: TileProblem, machine: Machine) -> TileChoice | None:
    """Return the tile that was fastest where an expert has few rows, up to 40, or None.

    It reads two K blocks, or three, before the first is multiplied. Measured beside the tiles that are scored, for 1 to
    1,024 tokens of seven layers on an H100, 2026-11-25; it scores as if it took no longer than its weights.
    """
    blocks, each = math.ceil(problem.k_in / problem.block_k), problem.rows / problem.experts_hit
    depth = next((count for count in (2, 3) if blocks % count == 0), 0)
    if not (machine.copies and depth and each <= 40 and blocks >= (12 if each > 8 else 3 * depth)):
        return None
    block_t = 16 if each <= 8 else 64 if depth == 2 else 32
    stacked, group_t = problem.parts == 2, 1 if problem.rows <= block_t * problem.experts_hit else 8
    tile = TileChoice(block_n=64, block_t=block_t, warps=4, stages=3, group_t=group_t, stacked=stacked, depth=depth)
    # Three programs of three stages share a multiprocessor, or two of four: the latter where three would wait anyway.
    programs = problem.experts_hit * math.ceil(problem.n_out / tile.columns)
    three = machine.sms < programs <= 3 * machine.sms or depth == 3 or blocks < 16 or each > 8
    tile = replace(tile, overlap=starts_early(problem, machine), narrow=block_t >= 64, stages=3 if three else 4)
    return tile if tile.stages * depth * tile.stage_bytes(problem) <= machine.shared - 4096 else None


def prefill_tile(problem: TileProblem, machine: Machine) -> TileChoice | None:
    """Return the tile of ``prefill_gemm`` for ``problem`` where that is the faster product, otherwise None.

    It needs a Hopper GPU with NVRTC, operands of one width, or weights that are decoded to 16 bits first, rows of a
    multiple of 16 bytes, and enough rows for each expert.
    """
    if problem.decoded:
        fits = problem.x_bits >= 16 and problem.k_in % 8 == 0 and problem.k_in >= _LONG
        least = dequantize_threshold(problem, machine)
    else:
        same = problem.weight_bits == problem.x_bits and problem.block_k * problem.x_bits == 1024
        fits, least = same and problem.k_in * problem.x_bits % 128 == 0, large_from(problem, machine)
    fits = fits and machine.compiles and problem.experts * problem.parts * problem.n_out < 1 << 31
    if not fits or problem.rows < least * problem.experts:
        return None
    # Three groups of warps multiply 64 rows each; two blocks share their tokens.
    programs = machine.sms // 2 * 2
    return TileChoice(block_n=BAND, block_t=192, warps=12, stages=5, group_t=_SHARED_PASS, programs=programs)


def large_from(problem: TileProblem, machine: Machine) -> float:
    """Return the rows of an expert from which on whole weights run with the tiles of large batches.

    From 32 rows on 16-bit weights and E4M3 rows with one scale are level with small tiles on an H200. Where each K
    block is scaled, those wait for every product. Experts too few for half of the multiprocessors need more rows: small
    tiles have more programs.
    """
    least = 16 if problem.promoted else 48 if problem.x_bits > 8 else 40
    return least * (1 if problem.experts * problem.parts * problem.n_out >= BAND * machine.sms else 2.5)


def _stages(problem: TileProblem, machine: Machine, tile: TileChoice) -> tuple[int, ...]:
    room = machine.shared - 4096
    one = tile.stage_bytes(problem)
    # Two programs on a multiprocessor hide each other's waits better than more stages of one.
    fits = next((f for count, least in ((3, 4), (2, 3)) if (f := int(room / count / one)) >= least), int(room / one))
    stages = min(4, fits)
    if stages < 2:
        return ()
    rows, deep = tile.weight_rows(problem), min(6 if tile.warps == 4 else 5, int(room / 2 / one))
    short = problem.k_in < 12 * problem.block_k
    few = tile.block_t == 16 and problem.rows <= 8 * problem.experts_hit
    alone = few and tile.warps == 4 and problem.k_in >= 20 * problem.block_k and 8 * one <= room
    if rows == 64 and alone and problem.n_out * problem.experts_hit <= 128 * machine.sms:
        return (stages, 8)  # hardly more than one program on a multiprocessor
    if rows != 128 or tile.block_t > 32 or deep <= stages or short:
        return (stages,)
    # Wide operands of few tokens: two programs with more stages, or one with eight, are sometimes better than three.
    deeper = (deep, 8) if alone and rows > tile.block_n else (deep,)
    return (stages, *deeper) if tile.warps == 8 or rows > tile.block_n else (stages,)


def _accumulators(problem: TileProblem, tile: TileChoice) -> float:
    copies = tile.weight_rows(problem) + (tile.block_n if problem.promoted else 0)
    return copies * tile.block_t / (32 * tile.warps)


def _resident(problem: TileProblem, tile: TileChoice, machine: Machine) -> int:
    by_shared = int(machine.shared / (tile.stages * tile.stage_bytes(problem) + 1024))
    registers = 64 + _accumulators(problem, tile)
    return max(1, min(by_shared, int(65536 / (registers * 32 * tile.warps))))


def _program(problem: TileProblem, tile: TileChoice, machine: Machine) -> float:
    """Return the microseconds of one program with the whole machine behind it.

    Fitted to products of 4096 x 4096 and 4096 x 2048 over 256 experts on an H200, 2026-11-21.
    """
    rows = tile.weight_rows(problem)
    weights = rows * problem.k_in
    area = rows * tile.block_t
    share = 0.76 * (area / (256 * 128)) ** 0.33
    rate = machine.rate
    if problem.x_bits == 8 and machine.fp8:
        # With a scale in the loop every product is waited for, and more warps on less area wait longer.
        rate *= 2
        share *= 0.75 if tile.block_t <= 64 and area / tile.warps >= 2048 else 0.55
        # Two programs beside each other, one of which multiplies while the other promotes both its sums.
        share *= 1.4 if rows > tile.block_n and (tile.warps, tile.block_t) == (4, 64) else 1.0
    return 2 * weights * tile.block_t / (rate * share)
