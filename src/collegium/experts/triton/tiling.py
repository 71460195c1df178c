"""How batches of Triton's grouped products are cut, and the memory they take: functions of sizes alone."""

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec

import torch

from ...formats import by_name
from ...formats.unquantised import DTYPES
from ...ops.columns import SUMS
from ...ops.operand import operand_regions
from ...ops.permute import tile_count
from ...ops.quantize import ACTIVATION_FORMATS, ActivationFormat, activation_format
from ...ops.rows import transposed_scale_stride
from ...ops.scatter import scatter_regions
from ...problem import ExpertsProblem, Tiles
from ...runtime.launch import power_at_least
from ...runtime.machine import Machine
from ...runtime.memory import Regions, elementwise_max, with_prefix
from ..base import Tiling
from .layout import Layout
from .tiles.candidates import TALL
from .tiles.choice import LARGE_BLOCK_N, choose, nearest, prefill_tile
from .tiles.problem import TileChoice, TileProblem, TunedTiles

__all__ = [
    "CODES",
    "DECODED",
    "ProductTiling",
    "TilePair",
    "operand_format",
    "product_format",
    "product_regions",
    "reads_transposed_scales",
    "refuse_machine",
]

# Multiplied as E4M3 codes, and as 16-bit numbers that are codes times the scales of their groups.
CODES = tuple(form.name for form in ACTIVATION_FORMATS if form.operand_format is not None and form.operand_format.e4m3)
DECODED = tuple(
    form.name for form in ACTIVATION_FORMATS if form.operand_format is not None and not form.operand_format.e4m3
)

SMALL, LARGE = "small tiles", "large tiles"
_MAX_UNSORTED = 16  # assignments that may each take a separate tile
_SORT_TIME = 4.0  # microseconds of ordering a small batch
_MIN_BLOCK_T = 16  # tokens of the smallest tile, of which a batch needs the most

TilePair = tuple[TileChoice, TileChoice]


def operand_format(name: str) -> ActivationFormat | None:
    """Return the format of the quantised rows that are multiplied, or None where rows keep their dtype."""
    return activation_format(name).operand_format


def refuse_machine(problem: ExpertsProblem) -> str | None:
    """Return why Triton's grouped product cannot run on the device of ``problem``, or None."""
    device = problem.device
    if device.kind != "cuda":
        return f"the device is {device.kind}; it needs a CUDA GPU"
    if device.capability is not None:
        name = f"sm_{device.capability[0]}{device.capability[1]}"
        if device.capability < (8, 0):
            return f"found {name}; it needs sm_80 (Ampere) or later"
        if problem.activation_format in CODES and device.capability < (8, 9):
            return (
                f"activation format {problem.activation_format} was requested on {name}; E4M3 products need sm_89 or "
                "later"
            )
    if find_spec("triton") is None:
        return "found no Triton; install the package triton to use it"
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductTiling(Tiling):
    """Tiles of both products of a batch, decided once for each count of rows.

    activations: the format of quantised rows, or None. tiles: two tiles to use instead of the choice made
    from the sizes. measured: for each product, tiles measured at some row counts, which replace the choice near those.
    forced: the family of all batches, where the caller chose it. aligned: weights are at multiples of 16 bytes, as the
    tiles of large batches need them.
    """

    gate_up: Layout
    down: Layout
    machine: Machine
    activations: ActivationFormat | None = None
    tiles: TilePair | None = None
    measured: tuple[TunedTiles, TunedTiles] = ((), ())
    forced: Tiles | None = None
    aligned: bool = True
    _decided: dict[int, tuple[TilePair | None, TilePair]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def problem_of(self, layout: Layout, rows: int) -> TileProblem:
        """Return the tile problem of ``rows`` rows of one of the two products."""
        form = self.activations
        bits = form.bits if form else 8 * layout.row_dtype.itemsize
        return layout.problem(rows, bits, form is not None and form.group > 0)

    def large(self, rows: int) -> TilePair | None:
        """Return the large tiles of both products of a large batch, or None where the small tiles run."""
        return self._decide(rows)[0]

    def pair(self, rows: int) -> TilePair:
        """Return the small tiles of both products for a batch of ``rows`` rows."""
        return self._decide(rows)[1]

    def family(self, rows: int, *, unsorted: bool = False) -> str:
        """Return which tiles run ``rows`` rows; unsorted rows have small tiles."""
        return SMALL if unsorted or self.large(rows) is None else LARGE

    def block_t(self, rows: int) -> tuple[int, ...]:
        """Return the row counts whose token tile lists a batch of ``rows`` rows needs."""
        if rows == 0:
            return ()
        return tuple(dict.fromkeys(tile.block_t for tile in self.large(rows) or self.pair(rows)))

    def unsorted_tokens(self, top_k: int) -> int:
        """Return the most tokens of ``top_k`` assignments that run unsorted, each assignment in a separate tile.

        Each assignment of an expert then reads the weights again. For random routing that must take less time than
        ordering the rows would; one token never selects an expert twice.
        """
        experts = self.gate_up.shape[0]
        weight_bytes = self.gate_up.nbytes + self.down.nbytes
        max_tokens = 0
        if self.activations is not None and self.activations.by_expert:
            return 0  # rows are quantised in expert order
        for tokens in range(1, _MAX_UNSORTED // top_k + 1):
            active_experts = experts * (1 - (1 - min(1.0, top_k / experts)) ** tokens)
            repeated_bytes = (tokens * top_k - active_experts) * weight_bytes / experts
            if tokens > 1 and repeated_bytes > _SORT_TIME * self.machine.bandwidth:
                break
            max_tokens = tokens
        return max_tokens

    def variants(self, rows: int, *, unsorted: bool) -> frozenset[Hashable]:
        """Return the tiles of both products, and the sizes that the kernel that orders rows is compiled for."""
        large = None if unsorted else self.large(rows)
        return self._variants_of(large or self.pair(rows), rows, unsorted=unsorted)

    def variants_with_adapters(self, rows: int) -> frozenset[Hashable]:
        """Return the same for a sorted batch with adapters, which has small tiles."""
        return self._variants_of(self.pair(rows), rows, unsorted=False)

    def _variants_of(self, tiles: TilePair, rows: int, *, unsorted: bool) -> frozenset[Hashable]:
        variants: set[Hashable] = {(index, tile, unsorted) for index, tile in enumerate(tiles)}
        variants.add((unsorted, rows.bit_length(), power_at_least(rows), *self.block_t(rows)))
        return frozenset(variants)

    def _decide(self, rows: int) -> tuple[TilePair | None, TilePair]:
        """Return both decisions, from a cache: a small batch takes less time than they do."""
        decision = self._decided.get(rows)
        if decision is None:
            first, second = self.problem_of(self.gate_up, rows), self.problem_of(self.down, rows)
            large = self._large_tiles(first, second)
            tiles = self.tiles or (
                nearest(self.measured[0], rows) or choose(first, self.machine),
                nearest(self.measured[1], rows) or choose(second, self.machine),
            )
            decision = self._decided[rows] = (large, tiles)
        return decision

    def _large_tiles(self, first: TileProblem, second: TileProblem) -> TilePair | None:
        """Return the tiles of both products of a large batch, or None where small tiles are faster or forced."""
        if self.forced == "small" or self.tiles is not None or not self.aligned:
            return None
        if not (self.gate_up.runs_large and self.down.runs_large):
            return None
        always = self.forced == "large"
        tile = prefill_tile(first, self.machine, always=always)
        second_tile = prefill_tile(second, self.machine, always=always)
        return None if tile is None or second_tile is None else (tile, second_tile)


def reads_transposed_scales(form: ActivationFormat | None, layout: Layout, tile: TileChoice | None = None) -> bool:
    """Return whether a product reads the scales of its rows' groups transposed: with ``tile``, or with any tile.

    Tall tiles of four-bit weights load them while those are decoded. Weights of eight bits would wait for them.
    """
    grouped = form is not None and form.group > 0 and layout.k_blocks > 1
    return grouped and layout.decoded and (tile is None or tile.block_t >= TALL)


def product_format(
    form: ActivationFormat | None, layout: Layout, tile: TileChoice | None = None
) -> ActivationFormat | None:
    """Return the format of a product's rows, with transposed scales where the product reads those."""
    if form is None or not reads_transposed_scales(form, layout, tile):
        return form
    return replace(form, transposed_scales=True)


def product_regions(problem: ExpertsProblem, tiling: ProductTiling) -> Regions:
    """Return the memory ``PackedExperts.run`` takes at most: operands, middle rows, result, tile lists."""
    rows, dtype = problem.rows, DTYPES[problem.dtype]
    form = tiling.activations
    result = dtype.itemsize if form is None or dtype == torch.bfloat16 else 4
    intermediate, hidden = problem.intermediate, problem.hidden
    large = tiling.large(rows) is not None
    order, second_order = tiling.gate_up.row_order, tiling.down.row_order
    gathered = problem.weighted or (form is not None and form.by_expert)
    x_rows = rows if gathered else problem.tokens
    x_form = product_format(form, tiling.gate_up) if large else form
    x = operand_regions(x_rows, hidden, x_form, order=order, gathered=gathered, dtype=dtype)
    h = operand_regions(rows, intermediate, product_format(form, tiling.down), order=second_order, dtype=dtype)
    if by_name(problem.weight_format).ordered_columns:
        x["ordered"] = rows * hidden * dtype.itemsize
    x |= _rescaled_regions(tiling.gate_up, rows if large else x_rows, hidden)
    h |= _rescaled_regions(tiling.down, rows, intermediate)
    if form is not None and reads_transposed_scales(form, tiling.gate_up):
        x["across/codes"] = 4 * transposed_scale_stride(rows) * -(-hidden // form.group)
    middle = 4 if form is not None and form.exact_rows else result
    regions: Regions = {"rows": rows * hidden * result, "middle": rows * intermediate * middle}
    count = tile_count(rows, problem.experts, _MIN_BLOCK_T)
    lists = {"expert": 4 * count, "row": 8 * count, "used": 12}
    regions |= with_prefix("first", lists) | with_prefix("second", lists)
    if large:
        # Ordered columns are gathered with their rows, into "ordered".
        if not gathered and "ordered" not in x:
            # Rows are put in order first: those of a single expert are gathered, of others each token is read once.
            if problem.experts == 1:
                ordered = operand_regions(rows, hidden, x_form, order=order, gathered=True, dtype=dtype)
            else:
                ordered = scatter_regions(problem.tokens, rows, hidden, x_form, order=order, dtype=dtype)
            x = elementwise_max(x, ordered)
        regions["scales"] = 4 * rows * -(-intermediate // LARGE_BLOCK_N)
        regions["expanded"] = max(tiling.gate_up.dequantized_bytes, tiling.down.dequantized_bytes)
    return regions | with_prefix("x", x) | with_prefix("h", h)


def _rescaled_regions(layout: Layout, rows: int, columns: int) -> Regions:
    """Return the memory of ``halves_and_sums``, where the weights need it."""
    if not layout.rescaled:
        return {}
    return {"halves": 2 * rows * columns, "scales": 4 * rows, "sums": 2 * SUMS * rows * -(-columns // 128)}
