"""Tiles of four-bit weights and E4M3 rows: which there are, and how long each takes."""

import math
from dataclasses import replace

from ...runtime.machine import Machine
from .tile_choice import TileChoice, TileProblem, starts_early

__all__ = ["TALL", "four_bit_candidates", "four_bit_score"]

TALL = 64  # rows of a tile from which on laying scales of groups out for it pays

# Most tokens of four-bit weights and E4M3 rows, by (block_n, warps): more would spill. A scale in the loop takes a
# second accumulator.
_FOUR_BIT = {(64, 4): 128, (128, 4): 128, (128, 8): 256}
_FOUR_BIT_PROMOTED = {(64, 4): 128, (128, 4): 64, (128, 8): 128}
# Nanoseconds of a multiprocessor for 128 quartered weight rows and one K block, by (block_n, warps) and block_t.
_QUARTERED = {(64, 4): {16: 390, 32: 495, 64: 900}, (128, 4): {16: 343}, (128, 8): {16: 445, 32: 640, 64: 850}}
_FOUR_BIT_QUARTERED = {shape: max(steps) for shape, steps in _QUARTERED.items()}


def four_bit_candidates(problem: TileProblem, machine: Machine) -> tuple[TileChoice, ...]:
    """Return every tile whose buffers and accumulators fit."""
    most = _FOUR_BIT_QUARTERED if problem.quartered else _FOUR_BIT_PROMOTED if problem.promoted else _FOUR_BIT
    found: list[TileChoice] = []
    overlap = starts_early(problem, machine)
    for block_t in (16, 32, 64, 128, 256):
        for (block_n, warps), limit in most.items():
            if block_t > limit or (machine.scaled and block_n < 128):
                continue
            # Wide tiles of tokens live off the weights the tiles beside them have just read; narrow ones of weights,
            # and of tokens where a weight takes two products, read neighbours in memory.
            narrow = block_n == 64 or problem.quartered or (block_t == 16 and problem.operands == 2)
            group_t = 32 if block_t == 128 and problem.operands == 1 else 1 if narrow else 8
            tile = TileChoice(block_n=block_n, block_t=block_t, warps=warps, stages=1, group_t=group_t, overlap=overlap)
            fitting = int((machine.shared - 4096) / tile.stage_bytes(problem))
            # A wide tile whose weights take several products decodes so long that a fifth stage has nothing to hide.
            busy = block_n > 64 and (problem.quartered or problem.operands == 2)
            stages = min(3 if block_t > 128 else 4 if block_t > 32 or busy else 5, fitting)
            tall = machine.copies and not busy and (block_n, block_t, warps) == (128, 64, 4)
            if tall and not problem.promoted:
                # What gate and up take after the loop would leave room for two programs only.
                tile = replace(tile, registers=168)
            # A quarter of a K block by few rows is copied in pieces too small to be prefetched.
            narrow = machine.copies and block_t >= 64 and not problem.quartered
            if stages >= 2:
                found.append(replace(tile, stages=stages, narrow=narrow))
            # Few rows: fewer instructions a block, which no score says yet; who measures finds them behind their like.
            # Tall: one of two blocks is read and decoded while the other one is multiplied.
            few = block_t <= 32 and not (problem.quartered or machine.scaled)
            for depth in (2, 4) if few else (2,) if tall and problem.promoted else ():
                if min(problem.k_in // problem.block_k, fitting) >= 2 * depth:
                    stages = min(1 + 4 // depth, fitting // depth)
                    found.append(replace(tile, stages=stages, depth=depth, narrow=narrow))
    return tuple(found)


def four_bit_score(problem: TileProblem, tile: TileChoice, machine: Machine) -> float:
    """Return microseconds, fitted to four models' products on an H200, 2026-11-21."""
    hit = problem.experts_hit
    each = problem.rows / hit
    if problem.quartered:
        tiles = hit * _tiles_of(each, tile.block_t)
    else:
        tiles = hit * (1.0 if each <= tile.block_t / 2 else each / tile.block_t + 0.5)
    columns = math.ceil(problem.n_out / tile.block_n)
    steps = math.ceil(problem.k_in / problem.block_k)
    memory = problem.weight_bytes / machine.bandwidth
    each_sm = tiles * columns / machine.sms
    math_time = each_sm * steps * _four_bit_step(problem, tile) / 1000
    if problem.quartered and each_sm < 4:
        math_time *= math.ceil(each_sm) / each_sm
    # A program by itself: it waits for loads, decoding and products in turn.
    alone = steps * (0.35 + 0.07 * (tile.block_n // 128) + 0.08 * (tile.warps // 8))
    # A kernel of its own lays scales of the first product's rows out for tall tiles. Nothing here says which product
    # it is, so the second one counts it too.
    laid = 6.0 if problem.promoted and tile.block_t >= TALL else 0.0
    # The last programs leave the others' multiprocessors idle.
    return max(memory, math_time, alone) + 0.25 * min(memory, math_time) + 0.7 * alone + laid


def _four_bit_step(problem: TileProblem, tile: TileChoice) -> float:
    """Return nanoseconds of a multiprocessor for a program's K block: decoding, then a token's products and sums."""
    if problem.quartered:
        return _QUARTERED[tile.block_n, tile.warps][tile.block_t] * tile.block_n / 128
    token = 0.8 + 1.75 * problem.operands + 2.0 * problem.promoted
    step = (130 + 60 * problem.operands + token * tile.block_t) * tile.block_n / 128
    if tile.block_n == 64:
        step *= 1.03 if tile.block_t <= 16 and problem.operands == 1 else 1.1 if tile.block_t <= 16 else 1.4
    if tile.depth == 2 and tile.block_t >= TALL:
        step *= 0.86
    if tile.warps == 8:
        step *= 1.05 if tile.block_t <= 16 else 1.4 / problem.operands**0.3
    return step


def _tiles_of(rows: float, block_t: int) -> float:
    """Return the tiles an expert needs on average when assignments fall on experts at random, ``rows`` on each."""
    spread = math.sqrt(2 * rows)
    edges = range(1, 2 + int((rows + 4 * spread) / block_t))
    return 1.0 + sum(0.5 * math.erfc((edge * block_t + 0.5 - rows) / spread) for edge in edges)
