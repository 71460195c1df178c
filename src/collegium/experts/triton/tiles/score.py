"""Estimated microseconds of a product with a tile, for each kind of operands.

Three terms make up an estimate: weight bytes, token bytes and tensor-core work, with how well the programs fill the
machine. ``fitted`` holds the constants.
"""

import math

from ....runtime.machine import Machine
from .candidates import TALL, accumulators, deep_tile, resident_by_registers
from .fitted import DECODED, EIGHT_BITS, FOUR_BIT, STORED, decoded_tiles
from .problem import Operands, TileChoice, TileProblem

__all__ = ["score"]


def score(problem: TileProblem, tile: TileChoice, machine: Machine) -> float:
    """Return the estimated microseconds of ``problem`` with ``tile``."""
    return _SCORES[problem.kind](problem, tile, machine)


def _token_tiles(rows_per_expert: float, block_t: int) -> float:
    """Return the token tiles of an expert: half of the last one is empty on average, or all rows fit into one."""
    return 1.0 if rows_per_expert <= block_t / 2 else rows_per_expert / block_t + 0.5


def _stored_score(problem: TileProblem, tile: TileChoice, machine: Machine) -> float:
    hit, weights = problem.experts_hit, problem.weight_bytes
    if tile == deep_tile(problem, machine):
        return weights / machine.bandwidth  # measured as the fastest: as if it took no longer than its weights
    tiles = hit * _token_tiles(problem.rows_per_expert, tile.block_t)
    columns = math.ceil(problem.n_out / tile.columns)
    # Weights come from memory once and from the L2 cache for every further token tile; the tokens of a tile come from
    # the L2 cache for every column tile.
    cached = max(0.0, tiles / hit - 1.0) * weights + columns * problem.rows * problem.k_in * problem.x_bits / 8
    memory = weights / machine.bandwidth + cached / (STORED.l2_speed * machine.bandwidth)
    programs = tiles * columns
    math_time = programs * _stored_program(problem, tile, machine)
    waves = programs / (machine.sms * _stored_resident(problem, tile, machine))
    # The last wave is partly full: with few waves that costs time, with many it does not.
    fill = waves / math.ceil(waves) if waves > 1 else 1.0
    # One multiprocessor reads a limited share of the bandwidth, however many others are idle.
    program_bytes = tile.weight_rows(problem) * problem.k_in * problem.weight_bits / 8
    memory = max(memory, program_bytes * machine.sms / (STORED.sm_share * machine.bandwidth))
    memory *= _stored_slowdown(problem, tile, waves)
    return max(memory, math_time) / fill**0.5 + STORED.overlap * min(memory, math_time)


def _stored_slowdown(problem: TileProblem, tile: TileChoice, waves: float) -> float:
    """Return how much longer a tile takes to read weights than the best one."""
    rows = tile.weight_rows(problem)
    factor = 1 + STORED.stage / (tile.stages - 1)
    if waves <= 1 and rows > tile.block_n:
        return factor * STORED.one_wave  # two operands a step keep fewer bytes in flight than one of eight warps
    if rows == 256:
        factor *= STORED.rows_256_32 if tile.block_t == 32 else STORED.rows_256
    return factor * (STORED.rows_64 if rows == 64 or (tile.interleave_gate_up and problem.x_bits == 8) else 1.0)


def _stored_resident(problem: TileProblem, tile: TileChoice, machine: Machine) -> int:
    """Return how many programs share a multiprocessor."""
    by_shared = int(machine.shared / (tile.stages * tile.stage_bytes(problem) + 1024))
    registers = 64 + accumulators(problem, tile)
    return max(1, min(by_shared, int(65536 / (registers * 32 * tile.warps))))


def _stored_program(problem: TileProblem, tile: TileChoice, machine: Machine) -> float:
    """Return the microseconds of one program with the whole machine behind it."""
    rows = tile.weight_rows(problem)
    weights = rows * problem.k_in
    area = rows * tile.block_t
    share = STORED.rate * (area / (256 * 128)) ** STORED.area_exponent
    rate = machine.rate
    if problem.x_bits == 8 and machine.fp8:
        # With a scale in the loop every product is waited for, and more warps on less area wait longer.
        rate *= 2
        share *= STORED.fp8_large if tile.block_t <= 64 and area / tile.warps >= 2048 else STORED.fp8_small
        share *= STORED.fp8_pair if rows > tile.block_n and (tile.warps, tile.block_t) == (4, 64) else 1.0
    return 2 * weights * tile.block_t / (rate * share)


def _decoded_score(problem: TileProblem, tile: TileChoice, machine: Machine) -> float:
    hit, rows_per_expert = problem.experts_hit, problem.rows_per_expert
    weights = problem.weight_bytes
    tiles = _token_tiles(rows_per_expert, tile.block_t)
    columns = math.ceil(problem.n_out / tile.columns)
    # Weights and tokens come from the L2 cache for every further tile.
    cached = (tiles - 1.0) * weights + columns * problem.rows * problem.k_in * problem.x_bits / 8
    if 7 * rows_per_expert < tile.block_t:
        slowdown = DECODED.tall
    else:
        slowdown = DECODED.large if problem.weight_bits > EIGHT_BITS and tile.block_n == 128 else 1.0
    memory = (weights + cached / DECODED.l2_speed) / machine.bandwidth * slowdown
    per_sm = hit * tiles * columns / machine.sms
    work = per_sm * tile.weight_rows(problem) * problem.k_in / 16384 * _decoded_step(problem, tile, rows_per_expert)
    if tile.block_n == 64 and tile.block_t == 16:
        factor = _small_tile_factor(problem, per_sm)
        work *= factor
        memory *= factor if problem.quartered and problem.running else 1.0
    if per_sm < 4:
        work /= max(per_sm / math.ceil(per_sm), DECODED.min_fill)
    waves = per_sm / resident_by_registers(tile)
    if waves > 1:
        # The last wave is partly full: with few waves that costs time, with many it does not.
        work /= (waves / math.ceil(waves)) ** 0.5
    return max(memory, work) + DECODED.overlap * min(memory, work)


def _small_tile_factor(problem: TileProblem, per_sm: float) -> float:
    """Return how much longer 64 x 16 tiles take; a few programs per multiprocessor hide each other's waits."""
    quartered = problem.quartered and problem.running
    if quartered:
        few = DECODED.small_programs_quartered
    elif problem.promoted or problem.running:
        few = DECODED.small_programs_scaled
    else:
        few = DECODED.small_programs
    if per_sm < few:
        return DECODED.small_gain
    if quartered:
        return DECODED.small_slowdown_quartered
    return DECODED.small_slowdown_8_bits if problem.weight_bits > EIGHT_BITS else DECODED.small_slowdown


def _decoded_step(problem: TileProblem, tile: TileChoice, rows_per_expert: float) -> float:
    """Return microseconds of a multiprocessor for 16,384 weights."""
    tokens = full = float(tile.block_t)
    if tile.narrow and rows_per_expert > full / 2:
        tokens -= DECODED.narrow_gain * full / (rows_per_expert / full + 0.5)
    elif tile.narrow:
        # Now and then an expert has more rows than the mean. A narrow tile has the registers of the full one.
        fifths = 5 * rows_per_expert / full
        tokens *= 0.35 + 0.25 * min(1.0, max(0.0, 2 * fifths - 2)) + 0.4 * min(1.0, max(0.0, fifths - 2))
    slowdown = DECODED.quartered_8_bits if problem.quartered and problem.weight_bits > EIGHT_BITS else 1.0
    step = DECODED.step + DECODED.step_token * tokens
    return step * slowdown * decoded_tiles(problem).tiles[tile.block_t].slowdown


def _four_bit_score(problem: TileProblem, tile: TileChoice, machine: Machine) -> float:
    expert_tiles = _expected_tiles if problem.quartered else _token_tiles
    tiles = problem.experts_hit * expert_tiles(problem.rows_per_expert, tile.block_t)
    columns = math.ceil(problem.n_out / tile.block_n)
    steps = math.ceil(problem.k_in / problem.block_k)
    memory = problem.weight_bytes / machine.bandwidth
    per_sm = tiles * columns / machine.sms
    math_time = per_sm * steps * _four_bit_step(problem, tile) / 1000
    if problem.quartered and per_sm < 4:
        math_time *= math.ceil(per_sm) / per_sm
    # A program by itself waits for loads, decoding and products in turn.
    block = FOUR_BIT.alone + FOUR_BIT.alone_128 * (tile.block_n // 128) + FOUR_BIT.alone_8_warps * (tile.warps // 8)
    alone = steps * block
    # A separate kernel transposes scales of the first product's rows for tall tiles. The problem does not tell which
    # product it is, so the second one counts it too.
    transpose = FOUR_BIT.transpose if problem.promoted and tile.block_t >= TALL else 0.0
    # The last programs leave other multiprocessors idle.
    idle = FOUR_BIT.alone_added * alone
    return max(memory, math_time, alone) + FOUR_BIT.overlap * min(memory, math_time) + idle + transpose


def _four_bit_step(problem: TileProblem, tile: TileChoice) -> float:
    """Return nanoseconds of a multiprocessor for a program's K block: decoding, then a token's products and sums."""
    if problem.quartered:
        return FOUR_BIT.quartered[tile.block_n, tile.warps][tile.block_t] * tile.block_n / 128
    token = FOUR_BIT.token + FOUR_BIT.token_operand * problem.operands + FOUR_BIT.token_promoted * problem.promoted
    decode = FOUR_BIT.decode + FOUR_BIT.decode_operand * problem.operands
    step = (decode + token * tile.block_t) * tile.block_n / 128
    if tile.block_n == 64 and tile.block_t > 16:
        step *= FOUR_BIT.rows_64
    elif tile.block_n == 64:
        step *= FOUR_BIT.small_one_operand if problem.operands == 1 else FOUR_BIT.small_two_operands
    if tile.depth == 2 and tile.block_t >= TALL:
        step *= FOUR_BIT.tall_depth
    if tile.warps == 8 and tile.block_t <= 16:
        step *= FOUR_BIT.eight_warps_small
    elif tile.warps == 8:
        step *= FOUR_BIT.eight_warps / problem.operands**FOUR_BIT.eight_warps_exponent
    return step


def _expected_tiles(rows_per_expert: float, block_t: int) -> float:
    """Return the expected token tiles of an expert for random routing."""
    spread = math.sqrt(2 * rows_per_expert)
    edges = range(1, 2 + int((rows_per_expert + 4 * spread) / block_t))
    return 1.0 + sum(0.5 * math.erfc((edge * block_t + 0.5 - rows_per_expert) / spread) for edge in edges)


_SCORES = {
    Operands.STORED: _stored_score,
    Operands.DECODED: _decoded_score,
    Operands.FOUR_BIT: _four_bit_score,
}
