"""Order assignments by expert: which token each row reads, and where each assignment's row is.

Shape letters: T tokens, K experts per token, E experts, R = T*K rows.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.enums import NOWHERE
from ..runtime.launch import launch, on_device, overlaps, power_at_least, row_contiguous
from ..runtime.memory import Memory, Regions, elementwise_max
from ..types import TileRows
from .buffers import Buffers, allocate, sizes
from .checks import require_input

__all__ = ["Owners", "Permutation", "permute", "permute_regions", "tile_count"]

_BLOCK = 128  # assignments whose pairs are counted
_ALONE = 256  # assignments up to which one program does everything
_PROGRAMS = 128


class Owners(NamedTuple):
    """Whose assignments are sorted: N of each rank in turn, whose rows go back to it.

    rows: ``[N, H]`` of this rank. deltas: ``[W]`` int64 or longer, bytes from them to each rank's, in its own memory.
    """

    rows: Tensor
    deltas: Tensor

    def places(self, assignment: Tensor) -> Tensor:
        """Return where the row of each assignment goes, in elements from the first of ``rows``."""
        count, width = self.rows.shape
        rank = torch.div(assignment, count, rounding_mode="floor")
        apart = torch.div(self.deltas[rank], self.rows.element_size(), rounding_mode="floor")
        return apart + (assignment - rank * count) * width


@dataclass(frozen=True, kw_only=True, slots=True)
class Permutation:
    """Rows sorted by expert, then token, then slot; dropped assignments come last. Indices are int64.

    source: ``[T*K]``, row r belongs to token ``source[r]``.
    expert_offsets: ``[E+1]``, expert e owns rows ``expert_offsets[e]:expert_offsets[e+1]``; rows from
        ``expert_offsets[E]`` on are dropped assignments.
    slots: ``[T, K]``, the row of assignment (t, k), -1 where its id is -1, or -2 where it is dropped for any other id.
    weights_by_row: ``[T*K]`` float32, ``input_weights`` in row order with 0 for dropped rows, or None.
    tiles: a tile list for each row count asked for.
    places: ``[T*K]``, where row r is to be written (``Owners``), NOWHERE for dropped rows, or None.
    """

    source: Tensor
    expert_offsets: Tensor
    slots: Tensor
    weights_by_row: Tensor | None = None
    tiles: tuple[TileRows, ...] = ()
    places: Tensor | None = None


def tile_count(rows: int, experts: int, block_t: int) -> int:
    """Return the most tiles of ``block_t`` rows that ``rows`` rows of at most ``experts`` experts can need."""
    used = min(rows, experts)
    return (rows - used) // block_t + used


def permute_regions(
    rows: int, experts: int, *, block_t: tuple[int, ...] = (16, 16), weights: bool = False, places: bool = False
) -> Regions:
    """Return the most bytes ``permute`` takes for any count of assignments up to ``rows``, to ``experts`` experts.

    block_t: the fewest rows that a tile has, for each list that may be asked for. weights, places: whether
    ``input_weights`` and ``owners`` may be given.
    """
    # All sizes grow with the rows but the counts, which are largest where every program has one block.
    max_counted = min(rows, _BLOCK * _PROGRAMS)
    return elementwise_max(
        *(sizes(_buffers(count, experts, block_t, weights=weights, places=places)) for count in (rows, max_counted))
    )


def permute(
    topk_ids: Tensor,
    num_experts: int,
    *,
    input_weights: Tensor | None = None,
    block_t: tuple[int, ...] = (),
    owners: Owners | None = None,
    memory: Memory | None = None,
) -> Permutation:
    """Sort the assignments of ``topk_ids [T, K]`` (integers) by expert, stably.

    input_weights: ``[T, K]`` floating, carried into row order. Ids outside ``0..num_experts-1`` count as
        dropped.
    block_t: at most two row counts to list the token tiles of, at no extra launch.
    owners: asks for ``places``, at no extra launch.
    memory: where kernels take "order", "owners", "weights_by_row" and "counts".
    Raises ``InputError`` for wrong shapes or dtypes. Reads nothing on the host.
    """
    _check(topk_ids, num_experts, input_weights, block_t)
    if not on_device(topk_ids):
        return _reference(topk_ids, num_experts, input_weights, block_t, owners)
    # Imported here: Triton exists for Linux alone, and everything but a launch works without it.
    from ..kernels import permute as kernels

    tokens, top_k = topk_ids.shape
    rows, carried = tokens * top_k, input_weights is not None
    ids = row_contiguous(topk_ids)
    weights = ids if input_weights is None else row_contiguous(input_weights)
    asked = {"weights": carried, "places": owners is not None}
    made, scratch = _allocate(memory, ids, num_experts, block_t, asked)
    lists, listed, counts = [made.source] * 4, [0, 0], [0, 0]
    for index, tiles in enumerate(made.tiles):
        lists[2 * index : 2 * index + 2] = tiles.expert, tiles.row
        listed[index], counts[index] = tiles.block_t, tiles.row.numel()
    by_row = made.source if made.weights_by_row is None else made.weights_by_row
    back = (None,) * 4 if owners is None else (made.places, owners.deltas, *owners.rows.shape)
    held = (made.source, made.slots, made.expert_offsets, by_row, *lists, *back, rows, num_experts, *counts)
    block_e, pdl = power_at_least(num_experts, 16), overlaps(ids)
    reads = {"TOP_K": top_k, "BLOCK_E": block_e}
    writes = {"BLOCK_T_A": listed[0], "BLOCK_T_B": listed[1], "WEIGHTS": carried}
    writes |= {"ITEM": 0 if owners is None else owners.rows.element_size(), "PDL": pdl}
    if scratch is None:
        block = power_at_least(rows, 32)
        args = (ids, weights, *held, ids.stride(0), weights.stride(0))
        launch(kernels.permute_kernel, (1,), args, {"BLOCK": block, **reads, **writes}, num_warps=block // 32)
        return made
    run, programs = _runs(rows)
    args = (ids, made.slots, scratch, rows, num_experts, run, ids.stride(0))
    launch(kernels.count_kernel, (programs,), args, {"BLOCK": _BLOCK, **reads, "PDL": pdl}, num_warps=4)
    wide = 1 if run == _BLOCK else 2
    chunk = max(2, min(power_at_least(programs), wide * 8192 // block_e))
    sizes_at = {"TOP_K": top_k, "BLOCK": wide * _BLOCK, "BLOCK_E": block_e, "CHUNK": chunk}
    args = (scratch, weights if carried else made.source, *held, run, weights.stride(0))
    launch(kernels.scatter_kernel, (programs,), args, {**sizes_at, **writes}, num_warps=4 * wide)
    return made


def _reference(
    ids: Tensor, num_experts: int, input_weights: Tensor | None, block_t: tuple[int, ...], owners: Owners | None
) -> Permutation:
    """Return what the kernels write."""
    tokens, top_k = ids.shape
    ids = ids.to(torch.int64).reshape(-1)
    dropped = (ids < 0) | (ids >= num_experts)
    keys, order = ids.masked_fill(dropped, num_experts).sort(stable=True)
    # A search in the sorted keys instead of a histogram: bincount waits for the device, scatter_add is not
    # ordered.
    offsets = torch.searchsorted(keys, torch.arange(num_experts + 1, device=ids.device))
    rows = torch.arange(tokens * top_k, device=ids.device)
    absent = torch.where(ids == -1, -1, -2)
    slots = torch.where(dropped, absent, torch.empty_like(order).scatter_(0, order, rows))
    weights = None
    if input_weights is not None:
        weights = input_weights.reshape(-1).to(torch.float32).masked_fill(dropped, 0.0).index_select(0, order)
    return Permutation(
        source=torch.div(order, top_k, rounding_mode="floor"),
        expert_offsets=offsets,
        slots=slots.view(tokens, top_k),
        weights_by_row=weights,
        tiles=tuple(_tiles(offsets, size, tile_count(tokens * top_k, num_experts, size)) for size in block_t),
        places=None if owners is None else torch.where(keys < num_experts, owners.places(order), NOWHERE),
    )


def _buffers(rows: int, experts: int, block_t: tuple[int, ...], *, weights: bool, places: bool = False) -> Buffers:
    """Return what kernels write for ``rows`` assignments: their order and the tiles' rows, the tiles' experts, ..."""
    tiles = sum(tile_count(rows, experts, size) for size in block_t)
    buffers: Buffers = {"order": (((2 + places) * rows + experts + 1 + tiles,), torch.int64)}
    if block_t:
        buffers["owners"] = (tiles,), torch.int32
    if weights:
        buffers["weights_by_row"] = (rows,), torch.float32
    if rows > _ALONE:
        buffers["counts"] = (_runs(rows)[1] * power_at_least(experts, 16),), torch.int32
    return buffers


def _allocate(
    memory: Memory | None, ids: Tensor, experts: int, block_t: tuple[int, ...], asked: dict[str, bool]
) -> tuple[Permutation, Tensor | None]:
    """Take what kernels write for ``ids [T, K]``, and what two of them pass counts in, or None.

    asked: weights and places, as ``_buffers`` says.
    """
    rows = ids.numel()
    found = allocate(memory, _buffers(rows, experts, block_t, **asked), ids.device)
    counts = [tile_count(rows, experts, size) for size in block_t]
    placed = rows if asked["places"] else 0
    source, slots, offsets, places, *firsts = found["order"].split([rows, rows, experts + 1, placed, *counts])
    owners = found["owners"].split(counts) if block_t else ()
    made = Permutation(
        source=source,
        expert_offsets=offsets,
        slots=slots.view(ids.shape),
        weights_by_row=found.get("weights_by_row"),
        tiles=tuple(
            TileRows(block_t=size, expert=owner, row=first)
            for size, owner, first in zip(block_t, owners, firsts, strict=True)
        ),
        places=places if placed else None,
    )
    return made, found.get("counts")


def _runs(rows: int) -> tuple[int, int]:
    """Return how many assignments a program of a large batch takes, in whole blocks, and how many programs do."""
    run = -(-rows // (_BLOCK * _PROGRAMS)) * _BLOCK
    return run, -(-rows // run)


def _tiles(expert_offsets: Tensor, block_t: int, count: int) -> TileRows:
    """List ``count`` tiles from ``expert_offsets [E+1]``: an expert's rows in steps of ``block_t``, by expert."""
    needed = (expert_offsets.diff() + block_t - 1).div(block_t, rounding_mode="floor")
    last = needed.cumsum(0)
    tile = torch.arange(count, device=last.device)
    owner = torch.searchsorted(last, tile, right=True)
    used = owner < last.numel()
    safe = owner.clamp(max=last.numel() - 1)
    row = expert_offsets[safe] + (tile - (last - needed)[safe]) * block_t
    owner = torch.where(used, owner, -1).to(torch.int32)
    return TileRows(block_t=block_t, expert=owner, row=torch.where(used, row, 0))


def _check(ids: Tensor, num_experts: int, weights: Tensor | None, block_t: tuple[int, ...]) -> None:
    whole = not ids.is_floating_point() and ids.dtype != torch.bool
    require_input(whole and ids.dim() == 2 and ids.shape[1] >= 1, "topk_ids", ids, "[T, K >= 1] integers")
    require_input(num_experts >= 1, "num_experts", num_experts, "at least 1")
    if weights is not None:
        fits = weights.shape == ids.shape and weights.is_floating_point()
        require_input(fits, "input_weights", weights, f"floating {tuple(ids.shape)} like topk_ids")
    fits = len(block_t) <= 2 and min(block_t, default=1) >= 1
    require_input(fits, "block_t", block_t, "at most two row counts of at least 1")
