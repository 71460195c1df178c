"""Descriptors of the tile choice: a grouped product and a tile. Shape letters: R rows, E experts."""

from dataclasses import dataclass
from enum import Enum

from ....runtime.machine import Machine

__all__ = ["Operands", "TileChoice", "TileProblem", "TunedTiles", "starts_early"]


class Operands(Enum):
    """Where the operands of the tensor cores come from."""

    STORED = "stored"  # weights are multiplied as they are stored
    DECODED = "decoded"  # weights are decoded to 16 bits in registers
    FOUR_BIT = "four_bit"  # four-bit weights are decoded to E4M3 in registers


@dataclass(frozen=True, kw_only=True, slots=True)
class TileProblem:
    """One grouped product: R rows of K inputs over E experts of ``parts`` times ``n_out`` outputs.

    weight_bits: stored bits of a weight. x_bits: bits of an activation. decoded: weights are decoded in registers.
    promoted: the product is scaled inside the K loop, which needs a second accumulator. quartered: each quarter of the
    K block is a separate product with its scale. running: instead, the sum is kept in units of the last factor, in
    place. operands: products per weight, 2 where a weight is decoded to a sum. in_registers: large batches too decode
    the weights in registers.
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
    quartered: bool = False
    running: bool = False
    operands: int = 1
    in_registers: bool = False

    @property
    def low_bits(self) -> bool:
        """Whether codes have two or three bits, whose K blocks are those of GGUF."""
        return self.block_k > 128

    @property
    def kind(self) -> Operands:
        """Where the operands come from."""
        if not self.decoded:
            return Operands.STORED
        return Operands.FOUR_BIT if self.x_bits == 8 else Operands.DECODED

    @property
    def experts_hit(self) -> float:
        """Expected number of experts with rows, for random routing."""
        missed = (1 - 1 / self.experts) ** self.rows if self.experts > 1 else 0.0
        return max(1.0, self.experts * (1 - missed))

    @property
    def rows_per_expert(self) -> float:
        """Expected rows of an expert that has any."""
        return self.rows / self.experts_hit

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights of those experts."""
        return self.experts_hit * self.parts * self.n_out * self.k_in * self.weight_bits / 8


@dataclass(frozen=True, kw_only=True, slots=True)
class TileChoice:
    """How one grouped product is cut and launched.

    block_n: weight rows of an operand. interleave_gate_up: half of them are gate and half up of the same columns,
    otherwise every part has a separate operand. block_t: rows. group_t: token tiles that share a pass over the weights.
    overlap: the kernel may start before the previous one ends. programs: number of programs that share the tiles of a
    large batch; 0: one program per tile. narrow: few rows run as a tile of half or a quarter of block_t. depth: K
    blocks that a step of the loop multiplies; with weights of 8 and 16 bits it divides K, and a tile has one operand.
    registers: limit per thread, set where more would leave room for fewer programs; 0: no limit. fuse_k_block: the
    quarters of a K block are one product.
    """

    block_n: int
    block_t: int
    warps: int
    stages: int
    group_t: int = 8
    interleave_gate_up: bool = False
    overlap: bool = False
    programs: int = 0
    narrow: bool = False
    depth: int = 1
    registers: int = 0
    fuse_k_block: bool = False

    @property
    def columns(self) -> int:
        """Output columns of a program."""
        return self.block_n // 2 if self.interleave_gate_up else self.block_n

    def weight_rows(self, problem: TileProblem) -> int:
        """Return the weight rows of a program."""
        return self.block_n * (1 if self.interleave_gate_up else problem.parts)

    def stage_bytes(self, problem: TileProblem) -> float:
        """Return the shared memory of one K block."""
        weights = self.weight_rows(problem) * problem.weight_bits
        return problem.block_k * (weights + self.block_t * problem.x_bits) / 8


TunedTiles = tuple[tuple[int, TileChoice], ...]  # (rows, the fastest measured tile there), rows ascending


def starts_early(problem: TileProblem, machine: Machine) -> bool:
    """Return whether the product may start before the previous kernel ends.

    A product gains by starting early, except long ones that decode their weights, which can lose.
    """
    return machine.pdl and (not problem.decoded or problem.weight_bytes < 4.5e8)
