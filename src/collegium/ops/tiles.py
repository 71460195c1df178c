"""Which tile a grouped product runs with: problem -> candidates -> score, a pure function of sizes.

The score is an estimate in microseconds from three terms a tile pays (weight bytes, token bytes, tensor-core work)
and how well its programs fill the machine. Nothing in it depends on data, and the K block is no choice: it belongs to
the format, so every token count adds in the same order. Shape letters: R rows, E experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec

import torch

from ..errors import PlanError

__all__ = [
    "Machine",
    "TileChoice",
    "TileProblem",
    "candidates",
    "choose",
    "machine_at",
    "machine_of",
    "score",
]

_SHARED = {(8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (12, 0): 99, (12, 1): 99}  # KiB a block may take


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What the score needs of a GPU.

    sms: multiprocessors. shared: bytes of shared memory one of them has for a block. bandwidth: bytes a microsecond.
    rate: bf16 FLOP a microsecond; FP8 runs twice as fast where ``fp8`` says the tensor cores have it.
    copies: tiles come by the tensor memory accelerator (Hopper). specialises: the compiler gives copies and products
    warps of their own, as Triton 3.6 does on Hopper.
    """

    sms: int = 132
    shared: int = 227 * 1024
    bandwidth: float = 4.33e6
    rate: float = 7.9e8
    fp8: bool = True
    copies: bool = False
    specialises: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TileProblem:
    """One grouped product: R rows of K inputs over E experts of ``parts`` times ``n_out`` outputs.

    weight_bits: stored bits a weight. x_bits: bits of an activation. decoded: weights are decoded in registers.
    promoted: the product is scaled inside the K loop, which needs a second accumulator.
    """

    rows: int
    experts: int
    n_out: int
    k_in: int
    parts: int
    block_k: int
    weight_bits: float = 16
    x_bits: int = 16
    decoded: bool = False
    promoted: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TileChoice:
    """block_n: output columns of each part; block_t: rows; group_t: token tiles that share a pass over the weights.

    programs: how many share the tiles, each taking the next in turn; 0: one for each tile.
    """

    block_n: int
    block_t: int
    warps: int
    stages: int
    group_t: int = 8
    programs: int = 0


def machine_of(capability: tuple[int, int], sms: int) -> Machine:
    """Return the machine of a CUDA ``capability`` with ``sms`` multiprocessors."""
    shared = _SHARED.get(capability, 227 if capability >= (9, 0) else 99) * 1024
    hopper = capability == (9, 0)
    # Looked at by its version alone: Triton exists for Linux only, and a plan needs none of it.
    specialises = hopper and find_spec("triton") is not None and version("triton").startswith("3.6.")
    return Machine(sms=sms, shared=shared, fp8=capability >= (8, 9), copies=hopper, specialises=specialises)


def machine_at(device: torch.device) -> Machine:
    """Return the machine of a CUDA ``device``; on a CPU (the interpreter) the defaults."""
    if device.type != "cuda":
        return Machine()
    facts = torch.cuda.get_device_properties(device)
    return machine_of((facts.major, facts.minor), facts.multi_processor_count)


def candidates(problem: TileProblem, machine: Machine) -> tuple[TileChoice, ...]:
    """Return every tile whose buffers and accumulators fit."""
    found: list[TileChoice] = []
    for block_t in (16, 32, 64, 128, 256):
        for block_n in (64, 128):
            for warps in (4, 8):
                # A warp decodes the weight rows it multiplies: with other numbers, warps decode the same rows twice.
                if problem.decoded and block_n != 16 * warps:
                    continue
                if not _registers_fit(problem, block_n, block_t, warps):
                    continue
                stages = _stages(problem, machine, block_n, block_t)
                if stages >= 2:
                    found.append(TileChoice(block_n=block_n, block_t=block_t, warps=warps, stages=stages))
    return tuple(found)


def score(problem: TileProblem, tile: TileChoice, machine: Machine) -> float:
    """Return the estimated microseconds of ``problem`` with ``tile``."""
    hit = _experts_hit(problem)
    each = problem.rows / hit
    # A tile less than full at the end of every expert: half of one on average, a whole one when all rows fit.
    tiles = hit * (1.0 if each <= tile.block_t / 2 else each / tile.block_t + 0.5)
    columns = math.ceil(problem.n_out / tile.block_n)
    weights = hit * problem.parts * problem.n_out * problem.k_in * problem.weight_bits / 8
    # Weights come from memory once and from the L2 cache, four times as fast, for every further token tile; the
    # tokens of a tile come from the L2 cache for every column tile.
    again = max(0.0, tiles / hit - 1.0) * weights + columns * tiles * tile.block_t * problem.k_in * problem.x_bits / 8
    memory = weights / machine.bandwidth + again / (4 * machine.bandwidth)
    math_time = tiles * columns * _program(problem, tile, machine)
    programs = tiles * columns
    resident = machine.sms * _resident(problem, tile, machine)
    waves = programs / resident
    # The last wave is only partly full: with few waves that is felt, with many it is not.
    filled = waves / math.ceil(waves) if waves > 1 else 1.0
    return max(memory, math_time) / filled**0.5 + 0.25 * min(memory, math_time)


def choose(problem: TileProblem, machine: Machine) -> TileChoice:
    """Return the candidate of least score; raises PlanError when nothing fits the machine."""
    found = candidates(problem, machine)
    if not found:
        raise PlanError(
            f"tiles: no tile of a product with block_k={problem.block_k} and {problem.parts} parts fits "
            f"{machine.shared:,} bytes of shared memory; use the reference kernel on this GPU"
        )
    return min(found, key=lambda tile: score(problem, tile, machine))


def _experts_hit(problem: TileProblem) -> float:
    missed = (1 - 1 / problem.experts) ** problem.rows if problem.experts > 1 else 0.0
    return max(1.0, problem.experts * (1 - missed))


def _stage_bytes(problem: TileProblem, block_n: int, block_t: int) -> float:
    weights = problem.parts * block_n * problem.weight_bits
    return problem.block_k * (weights + block_t * problem.x_bits) / 8


def _stages(problem: TileProblem, machine: Machine, block_n: int, block_t: int) -> int:
    room = machine.shared - 4096
    one = _stage_bytes(problem, block_n, block_t)
    # Two programs on a multiprocessor hide each other's waits better than more stages of one.
    for programs, least in ((3, 4), (2, 3)):
        if int(room / programs / one) >= least:
            return min(5 if problem.decoded else 4, int(room / programs / one))
    return min(4, int(room / one))


def _accumulators(problem: TileProblem, block_n: int, block_t: int, warps: int) -> float:
    copies = problem.parts + (1 if problem.promoted else 0)
    return copies * block_n * block_t / (32 * warps)


def _registers_fit(problem: TileProblem, block_n: int, block_t: int, warps: int) -> bool:
    used = _accumulators(problem, block_n, block_t, warps)
    # Decoded operands, scales and addresses need room beside the accumulators.
    return used <= (96 if problem.decoded else 128) and not (warps == 8 and used < 16)


def _resident(problem: TileProblem, tile: TileChoice, machine: Machine) -> int:
    by_shared = int(machine.shared / (tile.stages * _stage_bytes(problem, tile.block_n, tile.block_t) + 1024))
    registers = 64 + _accumulators(problem, tile.block_n, tile.block_t, tile.warps)
    return max(1, min(by_shared, int(65536 / (registers * 32 * tile.warps))))


def _program(problem: TileProblem, tile: TileChoice, machine: Machine) -> float:
    """Return the microseconds of one program with the whole machine behind it.

    Fitted to products of 4096 x 4096 and 4096 x 2048 over 256 experts on an H200, 2026-11-21.
    """
    weights = problem.parts * tile.block_n * problem.k_in
    area = problem.parts * tile.block_n * tile.block_t
    if problem.decoded:
        # Decoding costs the same for any number of tokens. A lone accumulator of 64 rows waits for each product, and
        # four of them crowd the registers.
        one = (0.30 + 0.0053 * tile.block_t) * weights / 16384 / machine.sms
        rows = problem.parts * tile.block_n
        crowd = {64: 1.0 if tile.block_t <= 16 else 1.35, 256: 1.08 if tile.block_t > 16 else 1.3}.get(rows, 1.0)
        return one * crowd * (1.3 if tile.block_t >= 128 else 1.0)
    share = 0.76 * (area / (256 * 128)) ** 0.33
    rate = machine.rate
    if problem.x_bits == 8 and machine.fp8:
        # With a scale in the loop every product is waited for, and more warps on less area wait longer.
        rate *= 2
        share *= 0.75 if tile.block_t <= 64 and area / tile.warps >= 2048 else 0.55
    return 2 * weights * tile.block_t / (rate * share)
