"""Order assignments by expert: which token each row reads, and where each assignment's row is.

Shape letters: T tokens, K experts per token, E experts, R = T*K rows.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.arguments import PermutationFormat
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
_COUNTERS = 3  # of ``TileRows.used``


class Owners(NamedTuple):
    """The ranks of the sorted assignments: N of each rank in turn, whose rows return to it.

    rows: ``[N, H]`` of this rank. deltas: ``[W]`` int64 or longer, bytes from them to each rank's, in its memory.
    """

    rows: Tensor
    deltas: Tensor

    def row_offsets(self, assignment: Tensor) -> Tensor:
        """Return where the row of each assignment is written, in elements from the first of ``rows``."""
        count, width = self.rows.shape
        rank = torch.div(assignment, count, rounding_mode="floor")
        base = torch.div(self.deltas[rank], self.rows.element_size(), rounding_mode="floor")
        return base + (assignment - rank * count) * width


@dataclass(frozen=True, kw_only=True, slots=True)
class Permutation:
    """Rows sorted by expert, then token, then slot; dropped assignments come last. Indices are int64.

    source: ``[T*K]``, row r belongs to token ``source[r]``.
    expert_offsets: ``[E+1]``, expert e owns rows ``expert_offsets[e]:expert_offsets[e+1]``; rows from
        ``expert_offsets[E]`` on are dropped assignments.
    slots: ``[T, K]``, the row of assignment (t, k), -1 where its id is -1, or -2 where it is dropped for any other id.
    weights_by_row: ``[T*K]`` float32, ``input_weights`` in row order with 0 for dropped rows, or None.
    tiles: a tile list for each requested row count.
    row_offsets: ``[T*K]``, where row r is written (``Owners``), NOWHERE for dropped rows, or None.
    """

    source: Tensor
    expert_offsets: Tensor
    slots: Tensor
    weights_by_row: Tensor | None = None
    tiles: tuple[TileRows, ...] = ()
    row_offsets: Tensor | None = None


def tile_count(rows: int, experts: int, block_t: int) -> int:
    """Return the most tiles of ``block_t`` rows that ``rows`` rows of at most ``experts`` experts can need."""
    used = min(rows, experts)
    return (rows - used) // block_t + used


def permute_regions(
    rows: int, experts: int, *, block_t: tuple[int, ...] = (16, 16), weights: bool = False, row_offsets: bool = False
) -> Regions:
    """Return the most bytes ``permute`` takes for any count of assignments up to ``rows``, to ``experts`` experts.

    block_t: the fewest rows of a tile, for each list that may be requested. weights, row_offsets: whether
    ``input_weights`` and ``owners`` may be passed.
    """
    # All sizes grow with the rows but the counts, which are largest where every program has one block.
    max_counted = min(rows, _BLOCK * _PROGRAMS)
    return elementwise_max(
        *(
            sizes(_buffers(count, experts, block_t, weights=weights, row_offsets=row_offsets))
            for count in (rows, max_counted)
        )
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
    owners: requests ``row_offsets``, at no extra launch.
    memory: where kernels take "order", "owners", "weights_by_row" and "counts".
    Raises ``InputError`` for wrong shapes or dtypes. Reads nothing on the host.
    """
    _check(topk_ids, num_experts, input_weights, block_t)
    if not on_device(topk_ids):
        return _reference(topk_ids, num_experts, input_weights, block_t, owners)
    # Imported here: Triton exists for Linux only, and everything except launches works without it.
    from ..kernels import permute as kernels

    tokens, top_k = topk_ids.shape
    rows = tokens * top_k
    ids = row_contiguous(topk_ids)
    weights = None if input_weights is None else row_contiguous(input_weights)
    weight_stride = 0 if weights is None else weights.stride(0)
    result, scratch = _allocate(
        memory, ids, num_experts, block_t, weights=weights is not None, row_offsets=owners is not None
    )
    outputs = _outputs(result, owners, rows, num_experts)
    block_e, pdl = power_at_least(num_experts, 16), overlaps(ids)
    block_t_a, block_t_b = (*block_t, 0, 0)[:2]
    element_bytes = 0 if owners is None else owners.rows.element_size()
    permutation_format = PermutationFormat(top_k, block_e, block_t_a, block_t_b, element_bytes)
    if scratch is None:
        block = power_at_least(rows, 32)
        args = (ids, weights, *outputs, ids.stride(0), weight_stride)
        constants = {"BLOCK": block, "FORMAT": permutation_format, "PDL": pdl}
        launch(kernels.permute_kernel, (1,), args, constants, num_warps=block // 32)
        return result
    range_size, programs = _ranges(rows)
    args = (ids, result.slots, scratch, rows, num_experts, range_size, ids.stride(0))
    constants = {"BLOCK": _BLOCK, "TOP_K": top_k, "BLOCK_E": block_e, "PDL": pdl}
    launch(kernels.count_kernel, (programs,), args, constants, num_warps=4)
    blocks = 1 if range_size == _BLOCK else 2
    block_p = max(2, min(power_at_least(programs), blocks * 8192 // block_e))
    args = (scratch, weights, *outputs, range_size, weight_stride)
    constants = {"BLOCK": blocks * _BLOCK, "BLOCK_P": block_p, "FORMAT": permutation_format, "PDL": pdl}
    launch(kernels.scatter_kernel, (programs,), args, constants, num_warps=4 * blocks)
    return result


def _outputs(result: Permutation, owners: Owners | None, rows: int, num_experts: int) -> tuple[Any, ...]:
    """Return the arguments for what both kernels write, and its sizes."""
    lists: list[Tensor | None] = []
    counts: list[int] = []
    for tiles in result.tiles:
        count = tiles.row.numel()
        # The kernel writes ``used`` behind the experts; the address of no experts would be null.
        lists += [tiles.expert if count else tiles.used, tiles.row]
        counts.append(count)
    lists += [None] * (4 - len(lists))
    counts += [0] * (2 - len(counts))
    remote: tuple[Any, ...] = (None, None, None, None)
    if owners is not None:
        remote = (result.row_offsets, owners.deltas, *owners.rows.shape)
    permutation = (result.source, result.slots, result.expert_offsets, result.weights_by_row)
    return (*permutation, *lists, *remote, rows, num_experts, *counts)


def _reference(
    ids: Tensor, num_experts: int, input_weights: Tensor | None, block_t: tuple[int, ...], owners: Owners | None
) -> Permutation:
    """Return the result of the kernels, in torch."""
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
        row_offsets=None if owners is None else torch.where(keys < num_experts, owners.row_offsets(order), NOWHERE),
    )


def _buffers(rows: int, experts: int, block_t: tuple[int, ...], *, weights: bool, row_offsets: bool = False) -> Buffers:
    """Return what kernels write for ``rows`` assignments.

    order: sources, slots, expert offsets, row offsets and the first rows of tiles, one after the other. owners: the
    experts of tiles, and ``TileRows.used`` behind those of each list. counts: scratch that two kernels share.
    """
    tiles = sum(tile_count(rows, experts, size) for size in block_t)
    buffers: Buffers = {"order": (((2 + row_offsets) * rows + experts + 1 + tiles,), torch.int64)}
    if block_t:
        buffers["owners"] = (tiles + _COUNTERS * len(block_t),), torch.int32
    if weights:
        buffers["weights_by_row"] = (rows,), torch.float32
    if rows > _ALONE:
        buffers["counts"] = (_ranges(rows)[1] * power_at_least(experts, 16),), torch.int32
    return buffers


def _allocate(
    memory: Memory | None,
    ids: Tensor,
    experts: int,
    block_t: tuple[int, ...],
    *,
    weights: bool,
    row_offsets: bool,
) -> tuple[Permutation, Tensor | None]:
    """Return uninitialised results for ``ids [T, K]``, and the counts that two kernels share, or None."""
    rows = ids.numel()
    buffers = _buffers(rows, experts, block_t, weights=weights, row_offsets=row_offsets)
    tensors = allocate(memory, buffers, ids.device)
    counts = [tile_count(rows, experts, size) for size in block_t]
    lengths = [rows, rows, experts + 1, rows if row_offsets else 0, *counts]
    source, slots, expert_offsets, offsets, *first_rows = tensors["order"].split(lengths)
    owners = tensors["owners"].split([n for count in counts for n in (count, _COUNTERS)]) if block_t else ()
    result = Permutation(
        source=source,
        expert_offsets=expert_offsets,
        slots=slots.view(ids.shape),
        weights_by_row=tensors.get("weights_by_row"),
        tiles=tuple(
            TileRows(block_t=size, expert=expert, row=first, used=used)
            for size, expert, first, used in zip(block_t, owners[::2], first_rows, owners[1::2], strict=True)
        ),
        row_offsets=offsets if row_offsets and rows else None,
    )
    return result, tensors.get("counts")


def _ranges(rows: int) -> tuple[int, int]:
    """Return how many assignments a program of a large batch takes, in whole blocks, and the number of programs."""
    range_size = -(-rows // (_BLOCK * _PROGRAMS)) * _BLOCK
    return range_size, -(-rows // range_size)


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
    counters = torch.cat([last[-1:], last.new_zeros(_COUNTERS - 1)]).to(torch.int32)
    return TileRows(block_t=block_t, expert=owner, row=torch.where(used, row, 0), used=counters)


def _check(ids: Tensor, num_experts: int, weights: Tensor | None, block_t: tuple[int, ...]) -> None:
    whole = not ids.is_floating_point() and ids.dtype != torch.bool
    require_input(whole and ids.dim() == 2 and ids.shape[1] >= 1, "topk_ids", ids, "[T, K >= 1] integers")
    require_input(num_experts >= 1, "num_experts", num_experts, "at least 1")
    if weights is not None:
        fits = weights.shape == ids.shape and weights.is_floating_point()
        require_input(fits, "input_weights", weights, f"floating {tuple(ids.shape)} like topk_ids")
    fits = len(block_t) <= 2 and min(block_t, default=1) >= 1
    require_input(fits, "block_t", block_t, "at most two row counts of at least 1")
