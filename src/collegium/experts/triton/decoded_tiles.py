"""Tiles of weights that are decoded to 16 bits: which there are, and how long each takes."""

import math
from dataclasses import replace

from ...runtime.machine import Machine
from .tile_choice import TileChoice, TileProblem, starts_early

__all__ = ["decoded_candidates", "decoded_score", "dequantize_threshold"]

# Tiles of 128 weight rows on Hopper by their most tokens: how many times longer than ``_step`` says without it, warps,
# and registers of a thread where the compiler would take so many that a program less fits. H200, 2026-11-24.
_MXFP4 = {16: (1.06, 4, 0), 32: (1.02, 4, 0), 64: (1.04, 4, 168), 128: (1.07, 4, 0)}
_NVFP4 = {16: (1.2, 4, 0), 32: (1.2, 4, 0), 64: (1.14, 4, 0), 128: (1.2, 4, 0)}
_INT4 = {16: (1.0, 4, 0), 32: (1.0, 4, 168), 64: (0.95, 4, 168), 128: (1.05, 4, 0)}
_INT8 = {16: (1.2, 4, 0), 32: (1.4, 4, 168), 64: (1.25, 4, 0), 128: (1.55, 4, 0)}
_FP8 = {16: (1.33, 4, 0), 32: (1.5, 4, 0), 64: (1.4, 8, 128)}
_MINIMA = {16: (1.4, 4, 0), 32: (1.38, 4, 0), 64: (1.4, 4, 0)}
_QUARTERS = {16: (1.0, 4, 0), 32: (1.0, 4, 0)}
# Integers whose sums are in units of a group.
_UNITS4 = {16: (1.0, 4, 0), 64: (1.0, 4, 168)}
_UNITS8 = {16: (1.0, 4, 0), 64: (1.0, 4, 0), 128: (1.15, 4, 0)}


def decoded_candidates(problem: TileProblem, machine: Machine) -> tuple[TileChoice, ...]:
    """Return every tile that is the best one for some count of rows and fits."""
    found: list[TileChoice] = []
    table, stacked = _tiles_of(problem), problem.parts == 2
    for block_t, (_, warps, registers) in table.items():
        if machine.copies:
            joined = not problem.quartered
        elif block_t == 128 or (block_t == 64 and table is _MINIMA):
            continue
        else:
            # Other tensor cores have operands in shared memory or fewer accumulators a thread. Found by compiling.
            joined, registers = False, 0
            warps = 8 if problem.operands == 2 or (problem.quartered and block_t == 32) else 4
        # Apart, quarters leave room for a program more where scales of NVFP4 or zero points take many registers.
        if block_t == 64 and (table is _INT4 or (table is _NVFP4 and stacked)):
            joined = False
        short = block_t == 64 and problem.promoted and not machine.copies
        for block_n in (64,) if short else (128,) if block_t > 16 or warps > 4 or table is _UNITS4 else (64, 128):
            tile = TileChoice(
                block_n=block_n,
                block_t=block_t,
                warps=warps,
                stages=2,
                stacked=stacked and not short,
                overlap=starts_early(problem, machine),
                narrow=machine.copies and block_t >= 64,
                registers=registers,
                joined=joined and (block_t > 16 or table is not _MXFP4 or block_n > 64),
            )
            # Weights leave shared memory for registers a step before tokens do.
            weights = tile.weight_rows(problem) * problem.weight_bits / 8 * problem.block_k
            tokens = block_t * problem.x_bits / 8 * problem.block_k
            fit = int(((machine.shared + 1024) / _resident(tile) - 1024 + weights) / (tokens + weights))
            if 2 * tokens + weights <= machine.shared:
                found.append(replace(tile, stages=max(2, min(3 if short or warps == 8 else 4, fit))))
    return tuple(found)


def decoded_score(problem: TileProblem, tile: TileChoice, machine: Machine) -> float:
    """Return microseconds, fitted to products of four models and eight formats on an H200, 2026-11-24."""
    hit, weights = problem.experts_hit, problem.weight_bytes
    each, running = problem.rows / hit, problem.quartered and problem.running
    # A tile less than full at the end of every expert: half of one on average, a whole one when all rows fit.
    tiles = 1.0 if each <= tile.block_t / 2 else each / tile.block_t + 0.5
    columns = math.ceil(problem.n_out / tile.columns)
    # Weights and tokens come from the L2 cache for every further tile, four times as fast as from memory.
    again = (tiles - 1.0) * weights + columns * problem.rows * problem.k_in * problem.x_bits / 8
    # Few programs of tall tiles, and of many weight rows, have fewer bytes on their way.
    late = 1.1 if 7 * each < tile.block_t else 1.05 if problem.weight_bits > 6 and tile.block_n == 128 else 1.0
    memory = (weights + again / 4) / machine.bandwidth * late
    each_sm = hit * tiles * columns / machine.sms
    work = each_sm * tile.weight_rows(problem) * problem.k_in / 16384 * _step(problem, tile, each)
    if tile.block_n == 64 and tile.block_t == 16:
        # Few programs: two beside each other hide each other's waits.
        few = 8 if running else 2 if problem.promoted or problem.running else 4
        slower = 0.9 if each_sm < few else 1.45 if running else 1.0 if problem.weight_bits > 6 else 1.2
        work, memory = work * slower, memory * (slower if running else 1.0)
    if each_sm < 4:
        work /= max(each_sm / math.ceil(each_sm), 0.5)
    waves = each_sm / _resident(tile)
    if waves > 1:
        # The last wave is only partly full: with few waves that is felt, with many it is not.
        work /= (waves / math.ceil(waves)) ** 0.5
    return max(memory, work) + 0.25 * min(memory, work)


def dequantize_threshold(problem: TileProblem, machine: Machine) -> float:
    """Return the rows of an expert from which on weights are better decoded once, into memory, before the products.

    What is written there and read again takes longer where memory is slower, so more rows have to share it.
    """
    least = 400 if problem.weight_bits > 6 else 640 if _tiles_of(problem) is _NVFP4 else 800
    return (208 if problem.operands == 2 else least) * (1 + 1.4 * machine.slower)


def _step(problem: TileProblem, tile: TileChoice, each: float) -> float:
    """Return microseconds of a multiprocessor for 16,384 weights where experts have ``each`` rows."""
    tokens = full = float(tile.block_t)
    if tile.narrow and each > full / 2:
        tokens -= 0.3125 * full / (each / full + 0.5)
    elif tile.narrow:
        # Now and then an expert has more rows than the mean. A narrow tile has the registers of the wide one.
        part = 5 * each / full
        tokens *= 0.35 + 0.25 * min(1.0, max(0.0, 2 * part - 2)) + 0.4 * min(1.0, max(0.0, part - 2))
    slower = 1.3 if problem.quartered and problem.weight_bits > 6 else 1.0
    return (0.24 + 0.0053 * tokens) * slower * _tiles_of(problem)[tile.block_t][0]


def _tiles_of(problem: TileProblem) -> dict[int, tuple[float, int, int]]:
    if problem.quartered:
        return _QUARTERS if not problem.running else _UNITS8 if problem.weight_bits > 6 else _UNITS4
    if problem.x_bits > 16:
        return _MINIMA
    if problem.block_k < 128:
        return _NVFP4
    if problem.weight_bits > 6:
        return _INT8 if problem.running else _FP8
    return _INT4 if problem.running else _MXFP4


def _resident(tile: TileChoice) -> int:
    """Return how many programs of a tile the registers of a multiprocessor have room for."""
    return 3 if tile.registers == 168 or tile.block_t == 16 else 2
