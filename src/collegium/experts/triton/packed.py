"""Both products of a batch: what is packed, with which tiles they run, and in how much memory.

Shape letters: T tokens, R rows, E experts, P parts (2: gate and up; 1), N outputs of a part, K inputs.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from ...ops.operand import operand
from ...ops.permute import tile_count
from ...ops.quantize import activation_format
from ...runtime.launch import usual_rows
from ...runtime.workspace import empty
from .grouped import TileList, grouped_gemm, tile_list
from .prefill import prefill_bytes, prefill_experts, prefill_tile
from .tiles import TileChoice, choose, nearest

if TYPE_CHECKING:
    from torch import Tensor

    from ...runtime.machine import Machine
    from ...types import ActivationSpec, ContiguousBatch, Problem
    from .matrix import PackedMatrix
    from .tiles import TileProblem, TunedTiles

__all__ = [
    "PackedExperts",
    "chosen_tiles",
    "few_tokens",
    "large_from",
    "large_tile",
    "refuse_machine",
    "run_assignments",
    "run_experts",
    "temporary_bytes",
    "variant_key",
    "with_tiles",
]

_FEW = 16  # most assignments that each take a tile of their own
_ORDERED = 4.0  # microseconds that ordering a small batch takes


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedExperts:
    """Both matrices of all experts and what runs between them.

    activations: name of a format whose codes are E4M3, or None to multiply in the dtype of x.
    tiles: the two tiles to use instead of the choice made from the sizes, or None.
    report: what packing rounded, where it can. tuned: for each product, tiles measured at some row counts, which
        replace the choice near those; see ``tile_file.py``. decided: what was chosen, by rows.
    """

    gate_up: PackedMatrix
    down: PackedMatrix
    activation: ActivationSpec
    machine: Machine
    activations: str | None = None
    tiles: tuple[TileChoice, TileChoice] | None = None
    report: object | None = None
    tuned: tuple[TunedTiles, TunedTiles] = ((), ())
    decided: dict[int, tuple[TileChoice | None, tuple[TileChoice, TileChoice]]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def problem_of(self, matrix: PackedMatrix, rows: int) -> TileProblem:
        """Return what tile choice asks about ``rows`` rows of one of the two products."""
        groups = self.activations is not None and activation_format(self.activations).group > 0
        return matrix.layout.problem(rows, 8 if self.activations else 16, groups)

    def block_t(self, rows: int) -> tuple[int, ...]:
        """Return the row counts whose token tiles ``run_experts`` will ask for."""
        if rows == 0 or large_tile(self, rows) is not None:
            return ()
        return tuple(dict.fromkeys(tile.block_t for tile in chosen_tiles(self, rows)))


def run_experts(batch: ContiguousBatch, packed: PackedExperts) -> Tensor:
    """Return ``[R, H]``: both products of every row, in bfloat16 for bfloat16 x and in float32 otherwise.

    Rounding a row to bfloat16 adds 0.17 % of its size at most to the layer's error, and halves the largest traffic
    of a big batch. Nothing waits for the device; rows from ``expert_offsets[E]`` on are uninitialised.
    """
    source = batch.source
    rows = source.numel()
    out = empty((rows, packed.down.layout.shape[2]), _result_dtype(batch.x), batch.x.device)
    if rows == 0:
        return out
    x, offsets = usual_rows(batch.x), batch.expert_offsets
    large = large_tile(packed, rows)
    if large is not None:
        return prefill_experts(replace(batch, x=x), packed, tile_list(offsets, rows, large), out)
    first, second = chosen_tiles(packed, rows)
    tiles = _listed(batch, first)
    same = second.block_t == first.block_t
    pair = tiles, replace(tiles, tile=second) if same else _listed(batch, second)
    # A weight belongs to a row, so weighted rows are gathered; others are gathered by the product.
    weighted = batch.input_weights is not None
    rows_in = operand(
        x,
        packed.activations,
        source=source if weighted else None,
        weights=batch.input_weights,
        order=packed.gate_up.layout.row_order,
        late=batch.settled and not weighted,
    )
    return _both(rows_in, packed, offsets, pair, out, source=None if weighted else source)


def run_assignments(x: Tensor, ids: Tensor, packed: PackedExperts) -> Tensor:
    """Return ``[T * K, H]``: what ``run_experts`` returns for few assignments, in their own order and not sorted.

    ids: contiguous ``[T, K]`` integers; rows of ids outside ``0..E-1`` are uninitialised.
    """
    x, (tokens, top_k) = usual_rows(x), ids.shape
    out = empty((tokens * top_k, packed.down.layout.shape[2]), _result_dtype(x), x.device)
    first, second = (replace(tile, overlap=packed.machine.pdl) for tile in chosen_tiles(packed, ids.numel()))
    rows_in = operand(x, packed.activations, order=packed.gate_up.layout.row_order)
    # Where the tokens were quantised, which waits for the routing, the ids were there before the product's turn.
    quantised = packed.activations is not None
    tiles = TileList(expert=ids, row=ids, count=ids.numel(), tile=first, top_k=top_k, early=quantised)
    return _both(rows_in, packed, ids, (tiles, replace(tiles, tile=second)), out, source=ids)


def _both(
    rows_in: tuple[Tensor, Tensor | None],
    packed: PackedExperts,
    offsets: Tensor,
    tiles: tuple[TileList, TileList],
    out: Tensor,
    *,
    source: Tensor | None,
) -> Tensor:
    """Write ``out`` and return it: both products of ``rows_in``, which are codes and scales or rows and None."""
    x, x_scale = rows_in
    dtype = out.dtype if packed.activations else x.dtype
    middle = empty((out.shape[0], packed.gate_up.layout.shape[2]), dtype, x.device)
    grouped_gemm(
        x, packed.gate_up, offsets, tiles[0], middle, source=source, x_scale=x_scale, activation=packed.activation
    )
    codes, scale = operand(middle, packed.activations, order=packed.down.layout.row_order)
    # What was listed was there before the first product began, which waited for the kernel before it.
    return grouped_gemm(codes, packed.down, offsets, replace(tiles[1], early=True), out, x_scale=scale)


def _result_dtype(x: Tensor) -> torch.dtype:
    return torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32


def refuse_machine(problem: Problem) -> str | None:
    """Return why Triton's grouped product cannot serve the device or the ranks of ``problem``, or None."""
    device = problem.device
    if problem.world_size * problem.tp_size > 1:
        return f"asked for world_size={problem.world_size} and tp_size={problem.tp_size}; it runs on one rank only"
    if device.kind != "cuda":
        return f"asked for {device.kind}; it needs a CUDA GPU"
    if device.capability is not None and device.capability < (8, 0):
        return f"found sm_{device.capability[0]}{device.capability[1]}; it needs sm_80 (Ampere) or later"
    if find_spec("triton") is None:
        return "found no Triton; install the package triton to use it"
    return None


def temporary_bytes(problem: Problem, *, codes: bool) -> int:
    """Return the bytes one pass takes at most: routing and tile lists, middle and result rows, E4M3 codes of both."""
    spec, tokens = problem.spec, problem.limits.max_tokens
    rows = tokens * spec.routing.top_k
    result = 2 if problem.dtype == "bf16" else 4
    total = 1 << 16  # what rounding a few dozen buffers up to whole blocks can take
    # Ids, weights, slots, sources, input weights, offsets and the counts of up to 128 programs, then two tile lists.
    total += rows * (12 + 8 + 8 + 4) + 8 * (spec.num_experts + 8) * min(130, 2 + rows // 128)
    total += 2 * 12 * tile_count(rows, spec.num_experts, 16)
    total += _product_bytes(problem, rows, spec.intermediate_size, codes) + rows * result * spec.expert_hidden_size
    total += prefill_bytes(problem, codes=codes)
    if spec.shared is not None:
        wide = spec.shared.intermediate_size
        # Its own large batch puts rows, or codes and scales of them, in order too.
        total += _product_bytes(problem, tokens, wide, codes) + tokens * ((2 + result) * spec.hidden_size + 24)
    return total


def _product_bytes(problem: Problem, rows: int, wide: int, codes: bool) -> int:
    """Bytes of the rows between two products and, where they are quantised, of both products' codes and scales."""
    middle = 4 if codes and problem.dtype != "bf16" else 2
    total = rows * middle * wide
    hidden = problem.spec.expert_hidden_size
    weighted = problem.spec.routing.weight_on_input
    if codes:
        # A float32 scale for 128 codes at least, and codes up to whole 128.
        taken = rows if weighted else min(rows, problem.limits.max_tokens)
        return total + taken * (hidden + 128 + hidden // 32 + 4) + rows * (wide + 128 + wide // 32 + 4)
    return total + (rows * hidden * middle if weighted else 0)


def _listed(batch: ContiguousBatch, tile: TileChoice) -> TileList:
    """Return the tile list that came with the batch, or make it."""
    for made in batch.tiles:
        if made.block_t == tile.block_t:
            return TileList(expert=made.expert, row=made.row, count=made.row.numel(), tile=tile)
    return tile_list(batch.expert_offsets, batch.source.numel(), tile)


def few_tokens(packed: PackedExperts, top_k: int) -> int:
    """Return the most tokens of ``top_k`` assignments that run unsorted, each assignment in a tile of its own.

    Assignments of one expert then read its weights each for itself. For random routings that must take less time than
    ordering the rows would; one token never asks for an expert twice.
    """
    experts = packed.gate_up.layout.shape[0]
    each = packed.gate_up.values.nbytes + packed.down.values.nbytes
    most = 0
    for tokens in range(1, _FEW // top_k + 1):
        hit = experts * (1 - (1 - min(1.0, top_k / experts)) ** tokens)
        if tokens > 1 and (tokens * top_k - hit) * each / experts > _ORDERED * packed.machine.bandwidth:
            break
        most = tokens
    return most


def large_tile(packed: PackedExperts, rows: int) -> TileChoice | None:
    """Return the tile of both products of a large batch, or None where the small-batch product runs."""
    return _decided(packed, rows)[0]


def large_from(packed: PackedExperts, limit: int) -> int | None:
    """Return the least count of rows, up to ``limit``, that runs as a large batch, or None when none does."""
    if large_tile(packed, limit) is None:
        return None
    return bisect_left(range(limit), True, key=lambda rows: large_tile(packed, rows) is not None)


def chosen_tiles(packed: PackedExperts, rows: int) -> tuple[TileChoice, TileChoice]:
    """Return the tiles of both small-batch products for a batch of ``rows`` rows."""
    return _decided(packed, rows)[1]


def _decided(packed: PackedExperts, rows: int) -> tuple[TileChoice | None, tuple[TileChoice, TileChoice]]:
    """Return both decisions, made once for each count of rows: a small batch ends sooner than they take."""
    found = packed.decided.get(rows)
    if found is None:
        first, second = packed.problem_of(packed.gate_up, rows), packed.problem_of(packed.down, rows)
        aligned = packed.gate_up.values.data_ptr() % 16 == 0 == packed.down.values.data_ptr() % 16
        large = prefill_tile(second, packed.machine) and prefill_tile(first, packed.machine)
        tiles = packed.tiles or (
            nearest(packed.tuned[0], rows) or choose(first, packed.machine),
            nearest(packed.tuned[1], rows) or choose(second, packed.machine),
        )
        found = packed.decided[rows] = (large if aligned and packed.tiles is None else None, tiles)
    return found


def variant_key(packed: PackedExperts) -> tuple[object, ...]:
    """Return what decides which kernel variants these experts need: equal keys, the same variants."""
    key: list[object] = [packed.activation, packed.machine, packed.activations, packed.tiles, packed.tuned]
    for matrix in (packed.gate_up, packed.down):
        key += [matrix.layout]
        for tensor in (matrix.values, matrix.scale, matrix.row_scale, matrix.bias):
            key.append(None if tensor is None else (tensor.dtype, tensor.shape, tensor.data_ptr() % 16))
    return tuple(key)


def with_tiles(packed: PackedExperts, tiles: tuple[TileChoice, TileChoice]) -> PackedExperts:
    """Return ``packed`` with fixed tiles instead of the choice made from the sizes."""
    return replace(packed, tiles=tiles)
