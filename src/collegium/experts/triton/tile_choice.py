"""What a grouped product is and how it is cut: the words of tile choice. Shape letters: R rows, E experts."""

from dataclasses import dataclass

from ...runtime.machine import Machine

__all__ = ["TileChoice", "TileProblem", "TunedTiles", "starts_early"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TileProblem:
    """One grouped product: R rows of K inputs over E experts of ``parts`` times ``n_out`` outputs.

    weight_bits: stored bits a weight. x_bits: bits of an activation. decoded: weights are decoded in registers.
    promoted: the product is scaled inside the K loop, which needs a second accumulator. quartered: each quarter of the
    K block is a product of its own, scaled by itself. running: instead, the sum is in units of the last factor, in
    place. operands: products a weight takes, 2 when it is decoded to a sum.
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

    @property
    def experts_hit(self) -> float:
        """How many experts random rows are likely to have."""
        missed = (1 - 1 / self.experts) ** self.rows if self.experts > 1 else 0.0
        return max(1.0, self.experts * (1 - missed))

    @property
    def weight_bytes(self) -> float:
        """The bytes of those experts' weights."""
        return self.experts_hit * self.parts * self.n_out * self.k_in * self.weight_bits / 8


@dataclass(frozen=True, kw_only=True, slots=True)
class TileChoice:
    """How one grouped product is cut and launched.

    block_n: weight rows of an operand. stacked: half of them are gate and half up of the same columns, otherwise
    every part has an operand of its own. block_t: rows. group_t: token tiles that share a pass over the weights.
    overlap: it may start while the kernel before it ends. programs: how many share the tiles of a large batch;
    0: one for each tile. narrow: few rows run as a tile of half or a quarter of block_t. depth: K blocks that
    a step of the loop multiplies; beside weights of 8 and 16 bits it divides K, and a tile has one operand. registers:
    most of a thread, where more would leave room for fewer programs; 0: what the compiler takes. joined: the quarters
    of a K block are one product.
    """

    block_n: int
    block_t: int
    warps: int
    stages: int
    group_t: int = 8
    stacked: bool = False
    overlap: bool = False
    programs: int = 0
    narrow: bool = False
    depth: int = 1
    registers: int = 0
    joined: bool = False

    @property
    def columns(self) -> int:
        """Output columns of a program."""
        return self.block_n // 2 if self.stacked else self.block_n

    def weight_rows(self, problem: TileProblem) -> int:
        """Return the weight rows of a program."""
        return self.block_n * (1 if self.stacked else problem.parts)

    def stage_bytes(self, problem: TileProblem) -> float:
        """Return the shared memory of one K block."""
        weights = self.weight_rows(problem) * problem.weight_bits
        return problem.block_k * (weights + self.block_t * problem.x_bits) / 8


TunedTiles = tuple[tuple[int, TileChoice], ...]  # (rows, the tile measured to be best there), rows ascending


def starts_early(problem: TileProblem, machine: Machine) -> bool:
    """Return whether the product may start while the kernel before it ends."""
    # A product gains by starting before the kernel before it ends; a long one that decodes its weights can lose.
    return machine.pdl and (not problem.decoded or problem.weight_bytes < 4.5e8)
