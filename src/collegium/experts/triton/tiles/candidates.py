"""The tiles that fit a machine, for each kind of operands."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from ....runtime.machine import Machine
from .fitted import DEEP, FOUR_BIT, DecodedTiles, decoded_tiles
from .problem import Operands, TileChoice, TileProblem, starts_early

__all__ = ["TALL", "accumulators", "candidates", "deep_tile", "resident_by_registers"]

TALL = 64  # rows of a tile from which on transposing its scales pays
_RESERVED = 4096  # bytes of shared memory that are no stage
_MAX_ACCUMULATORS = 128  # registers of a thread
_DEEP_BLOCK_T = {2: 64, 3: 32}  # by the K blocks of a step, for more than a few rows
_THREE_PROGRAMS = 168  # registers of a thread with which three programs of four warps fit


def candidates(problem: TileProblem, machine: Machine) -> tuple[TileChoice, ...]:
    """Return every tile whose buffers and accumulators fit."""
    return tuple(_CANDIDATES[problem.kind](problem, machine))


def _stored_candidates(problem: TileProblem, machine: Machine) -> Iterator[TileChoice]:
    overlap = starts_early(problem, machine)
    for block_t, (block_n, warps, interleave) in product(
        (16, 32, 64, 128, 256), product((64, 128), (4, 8), (False, True))
    ):
        # Stacking gains only with eight warps and few tokens.
        if interleave and (problem.parts == 1 or (block_n, warps) != (128, 8)):
            continue
        tile = TileChoice(
            block_n=block_n,
            block_t=block_t,
            warps=warps,
            stages=1,
            group_t=_group_t(problem, block_t),
            interleave_gate_up=interleave,
            overlap=overlap,
            narrow=machine.copies and block_t >= 64,
        )
        registers = accumulators(problem, tile)
        too_few = warps == 8 and registers < (8 if block_t <= 32 else 16)
        if registers <= _MAX_ACCUMULATORS and not too_few:
            for stages in _stage_counts(problem, machine, tile):
                yield replace(tile, stages=stages)
    deep = deep_tile(problem, machine)
    if deep is not None:
        yield deep


def _group_t(problem: TileProblem, block_t: int) -> int:
    """Return how many token tiles share a pass over the weights.

    Where every expert has one tile, programs in a row share its tokens and read neighbours in memory.
    """
    return 1 if problem.rows <= block_t * problem.experts_hit else 8


def _stage_counts(problem: TileProblem, machine: Machine, tile: TileChoice) -> tuple[int, ...]:
    shared = machine.shared - _RESERVED
    stage = tile.stage_bytes(problem)
    # Two programs on a multiprocessor hide each other's waits better than more stages of one.
    fitting = int(shared / stage)
    for programs, min_stages in ((3, 4), (2, 3)):
        if int(shared / programs / stage) >= min_stages:
            fitting = int(shared / programs / stage)
            break
    stages = min(4, fitting)
    if stages < 2:
        return ()
    rows = tile.weight_rows(problem)
    deep = min(6 if tile.warps == 4 else 5, int(shared / 2 / stage))
    short = problem.k_in < 12 * problem.block_k
    few = tile.block_t == 16 and problem.rows <= 8 * problem.experts_hit
    alone = few and tile.warps == 4 and problem.k_in >= 20 * problem.block_k and 8 * stage <= shared
    if rows == 64 and alone and problem.n_out * problem.experts_hit <= 128 * machine.sms:
        return (stages, 8)  # hardly more than one program on a multiprocessor
    if rows != 128 or tile.block_t > 32 or deep <= stages or short:
        return (stages,)
    if tile.warps != 8 and rows <= tile.block_n:
        return (stages,)
    # Two operands of few tokens: two programs with more stages, or one with eight, are sometimes better than three.
    return (stages, deep, 8) if alone and rows > tile.block_n else (stages, deep)


def deep_tile(problem: TileProblem, machine: Machine) -> TileChoice | None:
    """Return the tile that was the fastest for few rows per expert, or None.

    It reads two K blocks, or three, before the first is multiplied.
    """
    blocks = math.ceil(problem.k_in / problem.block_k)
    rows_per_expert = problem.rows_per_expert
    depth = next((count for count in (2, 3) if blocks % count == 0), 0)
    few = rows_per_expert <= DEEP.few_rows
    if not machine.copies or not depth or rows_per_expert > DEEP.max_rows:
        return None
    if blocks < (3 * depth if few else DEEP.min_blocks):
        return None
    block_t = 16 if few else _DEEP_BLOCK_T[depth]
    tile = TileChoice(
        block_n=64,
        block_t=block_t,
        warps=4,
        stages=3,
        group_t=_group_t(problem, block_t),
        interleave_gate_up=problem.parts == 2,
        overlap=starts_early(problem, machine),
        narrow=block_t >= 64,
        depth=depth,
    )
    # Three programs of three stages share a multiprocessor, or two of four: the latter where three would wait anyway.
    programs = problem.experts_hit * math.ceil(problem.n_out / tile.columns)
    three = machine.sms < programs <= 3 * machine.sms or depth == 3 or blocks < 16 or not few
    tile = replace(tile, stages=3 if three else 4)
    return tile if tile.stages * depth * tile.stage_bytes(problem) <= machine.shared - _RESERVED else None


def accumulators(problem: TileProblem, tile: TileChoice) -> float:
    """Return the registers of a thread for sums."""
    rows = tile.weight_rows(problem) + (tile.block_n if problem.promoted else 0)
    return rows * tile.block_t / (32 * tile.warps)


def _decoded_candidates(problem: TileProblem, machine: Machine) -> Iterator[TileChoice]:
    """Yield every tile that is the best one for some count of rows and fits."""
    known = decoded_tiles(problem)
    for block_t, fit in known.tiles.items():
        if not machine.copies and block_t > known.max_block_t:
            continue
        warps, registers = fit.warps, fit.registers
        if not machine.copies:
            # Other tensor cores have operands in shared memory or fewer accumulators a thread. Measured by compiling.
            registers = 0
            many = problem.operands == 2 or (problem.quartered and block_t == 32)
            warps = 8 if many or (problem.low_bits and block_t == 32) else 4
        # One operand per part, with half of the weight rows.
        separate = block_t == 64 and problem.promoted and not machine.copies
        interleave = problem.parts == 2 and not separate
        for block_n in _decoded_block_n(known, block_t, warps, separate=separate):
            tile = TileChoice(
                block_n=block_n,
                block_t=block_t,
                warps=warps,
                stages=2,
                interleave_gate_up=interleave,
                overlap=starts_early(problem, machine),
                narrow=machine.copies and block_t >= 64,
                registers=registers,
                fuse_k_block=machine.copies
                and not problem.quartered
                and not problem.low_bits
                and _fuses_k_block(known, problem, block_n, block_t),
            )
            max_stages = 3 if separate or warps == 8 or problem.low_bits else 4
            stages = _decoded_stages(problem, machine, tile, max_stages)
            if stages:
                yield replace(tile, stages=stages)


def _decoded_block_n(known: DecodedTiles, block_t: int, warps: int, *, separate: bool) -> tuple[int, ...]:
    if separate:
        return (64,)
    return (64, 128) if block_t == 16 and warps == 4 and known.block_n_64 else (128,)


def _fuses_k_block(known: DecodedTiles, problem: TileProblem, block_n: int, block_t: int) -> bool:
    """Return whether a tile multiplies the quarters of a K block as one product."""
    if block_t == 64:
        return known.fuse_at_64_interleaved if problem.parts == 2 else known.fuse_at_64
    return known.fuse_64x16 or (block_n, block_t) != (64, 16)


def _decoded_stages(problem: TileProblem, machine: Machine, tile: TileChoice, max_stages: int) -> int:
    """Return the stages that fit, 0 where fewer than two do."""
    # Weights leave shared memory for registers a step before tokens do.
    weights = tile.weight_rows(problem) * problem.weight_bits / 8 * problem.block_k
    tokens = tile.block_t * problem.x_bits / 8 * problem.block_k
    if 2 * tokens + weights > machine.shared:
        return 0
    program = (machine.shared + 1024) / resident_by_registers(tile) - 1024
    return max(2, min(max_stages, int((program + weights) / (tokens + weights))))


def resident_by_registers(tile: TileChoice) -> int:
    """Return how many programs of a decoding tile the registers of a multiprocessor have room for."""
    return 3 if tile.registers == _THREE_PROGRAMS or tile.block_t == 16 else 2


def _four_bit_candidates(problem: TileProblem, machine: Machine) -> Iterator[TileChoice]:
    limits = FOUR_BIT.max_block_t_promoted if problem.promoted else FOUR_BIT.max_block_t
    if problem.quartered:
        limits = {shape: max(steps) for shape, steps in FOUR_BIT.quartered.items()}
    for block_t, ((block_n, warps), max_block_t) in product((16, 32, 64, 128, 256), limits.items()):
        if block_t <= max_block_t and not (machine.scaled and block_n < 128):
            yield from _four_bit_tiles(problem, machine, block_n=block_n, block_t=block_t, warps=warps)


def _four_bit_tiles(
    problem: TileProblem, machine: Machine, *, block_n: int, block_t: int, warps: int
) -> Iterator[TileChoice]:
    """Yield the tiles of one shape: with one K block a step, and with more."""
    tile = TileChoice(
        block_n=block_n,
        block_t=block_t,
        warps=warps,
        stages=1,
        group_t=_four_bit_group_t(problem, block_n, block_t),
        overlap=starts_early(problem, machine),
    )
    fitting = int((machine.shared - _RESERVED) / tile.stage_bytes(problem))
    # A tile of 128 rows whose weights take several products decodes so long that a fifth stage has nothing to hide.
    busy = block_n > 64 and (problem.quartered or problem.operands == 2)
    max_stages = 4 if block_t > 32 or busy else 5
    if block_t > 128:
        max_stages = 3
    tall = machine.copies and not busy and (block_n, block_t, warps) == (128, 64, 4)
    if tall and not problem.promoted:
        # The registers of gate and up after the loop would leave room for two programs only.
        tile = replace(tile, registers=_THREE_PROGRAMS)
    # A quarter of a K block by few rows is copied in pieces too small to be prefetched.
    tile = replace(tile, narrow=machine.copies and block_t >= 64 and not problem.quartered)
    stages = min(max_stages, fitting)
    if stages >= 2:
        yield replace(tile, stages=stages)
    # Few rows: fewer instructions per block, which the score does not include; tuning measures them last.
    # Tall: one of two blocks is read and decoded while the other one is multiplied.
    depths: tuple[int, ...] = ()
    if block_t <= 32 and not problem.quartered and not machine.scaled:
        depths = (2, 4)
    elif tall and problem.promoted:
        depths = (2,)
    for depth in depths:
        if min(problem.k_in // problem.block_k, fitting) >= 2 * depth:
            yield replace(tile, stages=min(1 + 4 // depth, fitting // depth), depth=depth)


def _four_bit_group_t(problem: TileProblem, block_n: int, block_t: int) -> int:
    """Return how many token tiles share a pass over the weights.

    Tiles of many tokens use the weights that the tiles next to them have just read; those of 64 weight rows, and of
    tokens where a weight takes two products, read neighbours in memory.
    """
    if block_t == 128 and problem.operands == 1:
        return 32
    return 1 if block_n == 64 or problem.quartered or (block_t == 16 and problem.operands == 2) else 8


_CANDIDATES = {
    Operands.STORED: _stored_candidates,
    Operands.DECODED: _decoded_candidates,
    Operands.FOUR_BIT: _four_bit_candidates,
}
