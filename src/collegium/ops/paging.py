"""Experts in host memory: decide which of them are in the slots of the GPU, and copy those that are missing.

Nothing waits for the device, so a CUDA graph captures both steps. Shape letters: T tokens, K experts per token,
E experts, S slots, N rounds.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..kernels.arguments import PagingTables, ScoreUpdate
from ..runtime.launch import launch, on_device, overlaps, power_at_least
from ..runtime.memory import Memory, Regions
from .buffers import Buffers, allocate, sizes
from .checks import require_input

__all__ = [
    "CHUNK_BYTES",
    "Schedule",
    "Segments",
    "copy_experts",
    "decide",
    "decide_regions",
    "new_tables",
    "schedule",
    "segments_of",
]

CHUNK_BYTES = 16384  # of a work item of the copy
_ALONE = 1024  # assignments up to which one program does everything
_BLOCK = 1024
_PROGRAMS = 16  # of the copy: more would take multiprocessors from the products, and the link is full
_COLUMNS = 4  # of a segment
_COPIES_DOMINATE = 256  # rows of an expert up to which multiplying it takes less than a tenth of the time of its copy


class Schedule(NamedTuple):
    """The rounds of a pass, which follow from sizes.

    rounds: N. first_miss: the first one with experts that are copied; the one before it, if any, has the experts in
    slots. groups: of slots. With two, round r may run while the copies of round r + 1 are made, and those once round
    r - 1 has ended; with one, all but those that are ``ready`` wait for the round before. half: slots of the first
    group.
    """

    rounds: int
    first_miss: int
    groups: int
    half: int


def schedule(assignments: int, experts: int, slots: int, *, serial: bool = False) -> Schedule:
    """Return the rounds of a pass with any routing of ``assignments`` assignments, through slots that are never empty.

    serial: one round behind its copies, for a pass that needs at most as many experts as there are slots.
    """
    needed = min(assignments, experts)
    if serial and needed <= slots:
        return Schedule(1, 0, 1, slots)
    missing = min(needed, experts - slots)
    if slots == 1 or assignments <= _COPIES_DOMINATE * needed:
        return Schedule(1 + -(-missing // slots), 1, 1, slots)
    half = slots - slots // 2
    whole, rest = divmod(missing, slots)
    return Schedule(1 + 2 * whole + (rest > 0) + (rest > half), 1, 2, half)


def new_tables(experts: int, slots: int, device: torch.device, scores: Tensor | None = None) -> PagingTables:
    """Return the tables of ``slots`` slots that hold the first experts. scores: ``[E]``; None: zeros."""

    def filled(count: int, value: int = -1, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full((count,), value, dtype=dtype, device=device)

    # Inference tensors could not be written outside inference mode.
    with torch.inference_mode(False):
        number = torch.arange(experts, dtype=torch.int32, device=device)
        start = filled(experts, 0, torch.float32) if scores is None else scores.to(device, torch.float32, copy=True)
        return PagingTables(
            expert_slot=torch.where(number < slots, number, -1),
            slot_expert=number[:slots].clone(),
            scores=start,
            needed=filled(experts, 0),
            counters=filled(2, 0, torch.int64),
            place=filled(experts),
            copy_expert=filled(experts),
            copy_slot=filled(experts),
            round_start=filled(2 * experts + 4, 0),
            keys=filled(slots, 0, torch.float32),
            order=filled(slots, 0),
            ready=filled(1, 0),
        )


def decide_regions(assignments: int, experts: int, slots: int) -> Regions:
    """Return the most bytes that ``decide`` takes for any count of assignments up to ``assignments``."""
    return sizes(_buffers(schedule(assignments, experts, slots).rounds, assignments))


def decide(
    topk_ids: Tensor, tables: PagingTables, update: ScoreUpdate, rounds: Schedule, memory: Memory | None = None
) -> Tensor:
    """Return ``[N, T, K]`` int32, the slot of each assignment in its round and -1 in the others; change ``tables``.

    topk_ids: ``[T, K]`` integers; ids outside ``0..E-1`` have no slot. rounds: of ``schedule``. The experts of a round
    are in their slots once ``copy_experts`` has run for it and all rounds before. memory: where kernels take
    "slot_ids". Raises InputError for wrong shapes and dtypes.
    """
    whole = not topk_ids.is_floating_point() and topk_ids.dtype != torch.bool
    require_input(whole and topk_ids.dim() == 2, "topk_ids", topk_ids, "[T, K] integers")
    experts, slots, count = tables.expert_slot.numel(), tables.slot_expert.numel(), topk_ids.numel()
    ids = topk_ids.contiguous()
    slot_ids = allocate(memory, _buffers(rounds.rounds, count), ids.device)["slot_ids"]
    slot_ids = slot_ids.view(rounds.rounds, *ids.shape)
    if not on_device(ids):
        _decide_reference(ids, slot_ids, tables, update, rounds)
        return slot_ids
    # Imported here: Triton exists for Linux only, and everything except launches works without it.
    from ..kernels import paging as kernels

    pdl, marked = overlaps(ids), count > _ALONE
    grid = (-(-count // _BLOCK),)
    if marked:
        launch(kernels.mark_kernel, grid, (ids, tables.needed, count, experts), {"BLOCK": _BLOCK, "PDL": pdl})
    constants = {
        "BLOCK": min(_BLOCK, power_at_least(count, 32)),
        "BLOCK_E": power_at_least(experts, 32),
        "BLOCK_S": power_at_least(slots, 32),
        "ROUNDS": rounds.rounds,
        "FIRST_MISS": rounds.first_miss,
        "GROUPS": rounds.groups,
        "MARKED": marked,
        "PDL": pdl,
    }
    args = (ids, slot_ids, tables, update, experts, slots, rounds.half, count)
    # Without fused multiply-adds, scores have the bits of the reference.
    launch(kernels.decide_kernel, (1,), args, constants, num_warps=8, enable_fp_fusion=False)
    if marked:
        args = (ids, slot_ids, tables.place, experts, slots, count)
        launch(kernels.place_kernel, grid, args, {"BLOCK": _BLOCK, "ROUNDS": rounds.rounds, "PDL": pdl})
    return slot_ids


class Segments(NamedTuple):
    """The tensors of packed experts, in host memory and in the slots.

    table: int64 ``[B, 4]`` on the device, as ``copy_kernel`` takes it. chunks: of an expert. sources ``[E, ...]``,
    targets ``[S, ...]``: the tensors, of the same dtypes.
    """

    table: Tensor
    chunks: int
    sources: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]


def segments_of(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Segments:
    """Return the segments that copy expert e of each of ``sources`` to a slot of the matching tensor of ``targets``.

    All are contiguous; sources are on the device, or in pinned host memory that it can read.
    """
    rows: list[list[int]] = []
    chunks = 0
    for source, target in zip(sources, targets, strict=True):
        fits = source.shape[1:] == target.shape[1:] and source.dtype == target.dtype
        require_input(fits and source.is_contiguous(), "source", source, f"contiguous experts like {target.shape}")
        require_input(target.is_contiguous(), "target", target, "contiguous")
        size = source[0].numel() * source.element_size()
        rows.append([source.data_ptr(), target.data_ptr(), size, chunks])
        chunks += -(-size // CHUNK_BYTES)
    unused = power_at_least(len(rows), 2) - len(rows)
    rows += [[0, 0, 0, chunks + 1]] * unused
    with torch.inference_mode(False):
        table = torch.tensor(rows, dtype=torch.int64).view(-1, _COLUMNS).to(targets[0].device)
    return Segments(table=table, chunks=chunks, sources=tuple(sources), targets=tuple(targets))


def copy_experts(
    segments: Segments, tables: PagingTables, turn: int, which: Literal["all", "ready", "waiting"] = "all"
) -> None:
    """Copy the missing experts of round ``turn``, as ``decide`` listed them, to their slots.

    which: of round 1, those whose slot no expert of round 0 is in, or the others. The kernel reads host memory itself,
    since only the device has the list.
    """
    start = tables.ready if which == "waiting" else tables.round_start[turn : turn + 1]
    stop = tables.ready if which == "ready" else tables.round_start[turn + 1 : turn + 2]
    if not on_device(segments.table):
        span = slice(int(start), int(stop))
        experts, slots = tables.copy_expert[span].long(), tables.copy_slot[span].long()
        for source, target in zip(segments.sources, segments.targets, strict=True):
            target[slots] = source[experts]
        return
    from ..kernels.paging import copy_kernel

    args = (segments.table, tables.copy_expert, tables.copy_slot, start, stop, segments.chunks, _PROGRAMS)
    constants = {"BLOCK_SEGMENTS": segments.table.shape[0], "PDL": overlaps(segments.table)}
    launch(copy_kernel, (_PROGRAMS,), args, constants, num_warps=4)


def _buffers(rounds: int, assignments: int) -> Buffers:
    return {"slot_ids": ((rounds * assignments,), torch.int32)}


def _decide_reference(
    ids: Tensor, slot_ids: Tensor, tables: PagingTables, update: ScoreUpdate, rounds: Schedule
) -> None:
    """Do what the kernels do, in torch and on the host."""
    experts, slots = tables.expert_slot.numel(), tables.slot_expert.numel()
    valid = (ids >= 0) & (ids < experts)
    needed = torch.zeros(experts, dtype=torch.bool)
    needed[ids[valid].long().cpu()] = True
    scores = tables.scores.cpu()
    met = scores * update.needed_factor + update.needed_step
    tables.scores.copy_(torch.where(needed, met, scores * update.other_factor + update.other_step))
    score, slot_of, contents = (t.tolist() for t in (tables.scores, tables.expert_slot, tables.slot_expert))
    wanted = needed.nonzero().flatten().tolist()
    missing = [expert for expert in wanted if slot_of[expert] < 0]

    def key(slot: int) -> tuple[float, int]:
        expert = contents[slot]
        if expert < 0:
            return float("-inf"), slot
        return (float("inf") if needed[expert] else score[expert]), slot

    order = sorted(range(slots), key=key)
    place = [slot_of[expert] if needed[expert] else -1 for expert in range(experts)]
    for number, expert in enumerate(missing):
        position = number % slots
        slot = order[position]
        turn = rounds.first_miss + rounds.groups * (number // slots) + (position >= rounds.half)
        place[expert] = turn * slots + slot
        tables.copy_expert[number], tables.copy_slot[number] = expert, slot
        if contents[slot] >= 0:
            slot_of[contents[slot]] = -1
        contents[slot], slot_of[expert] = expert, slot
    for turn in range(rounds.rounds + 1):
        later = max(0, turn - rounds.first_miss)
        start = later // rounds.groups * slots + later % rounds.groups * rounds.half
        tables.round_start[turn] = min(len(missing), start)
    tables.ready.fill_(min(len(missing), slots - len(wanted) + len(missing), rounds.half))
    for table, values in ((tables.place, place), (tables.expert_slot, slot_of), (tables.slot_expert, contents)):
        table.copy_(torch.tensor(values))
    tables.counters.add_(torch.tensor([len(wanted) - len(missing), len(missing)], device=ids.device))
    where = tables.place[ids.masked_fill(~valid, 0).long()].masked_fill(~valid, -1)
    for turn, local in enumerate(slot_ids):
        local.copy_(torch.where(where.div(slots, rounding_mode="floor") == turn, where % slots, -1))
