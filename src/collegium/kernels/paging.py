"""Experts in host memory: which slots of the GPU hold which of them, and the copies that change it.

A pass needs some experts. Those in a slot are hits, the others are misses, and each miss gets a slot: first those of
experts that the pass does not need, in the order of their scores, then those of hits. Misses are numbered in the order
of experts.

A pass runs in rounds. The first one has the hits, while missing experts arrive in slots that the pass does not need;
the later ones have the misses, as many as there are slots. Where products take long, the slots are two groups by the
order in which they are given up: misses fill one group while the experts of the other one are multiplied. A pass of few
tokens has a single round, behind its copies.

Shape letters: T tokens, K experts per token, E experts, S slots.
"""

import triton
import triton.language as tl

from .tiles import pdl_wait

__all__ = ["copy_kernel", "decide_kernel", "mark_kernel", "place_kernel"]

_CHUNK = tl.constexpr(16384)  # bytes of a work item of copy_kernel; CHUNK_BYTES of ops/paging.py


@triton.jit
def _valid_expert(ids, index, inside, experts):
    """Return the expert of each assignment, 0 where there is none, and whether there is one."""
    expert_id = tl.load(ids + index, mask=inside, other=-1)
    # Compared before the conversion: truncation must not turn an invalid id into a valid one.
    valid = inside & (expert_id >= 0) & (expert_id < experts)
    return tl.where(valid, expert_id, 0).to(tl.int32), valid


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["ids"])
def mark_kernel(ids, needed, count, experts, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Write 1 to ``needed [E]`` for the expert of each of ``count`` assignments; every program takes BLOCK of them."""
    pdl_wait(PDL)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert, valid = _valid_expert(ids, index, index < count, experts)
    # Several assignments store the same value.
    tl.store(needed + expert, 1, mask=valid)


@triton.jit
def _rank_slots(tables, slot_count, BLOCK_S: tl.constexpr):
    """Return slot numbers ``[BLOCK_S]`` and in which order they are given up, which is also written to ``order``.

    Empty slots come first, then those of experts with low scores, then those of needed experts.
    """
    CHUNK: tl.constexpr = 16
    slot = tl.arange(0, BLOCK_S)
    inside = slot < slot_count
    expert = tl.load(tables.slot_expert + slot, mask=inside, other=-1)
    held = inside & (expert >= 0)
    score = tl.load(tables.scores + expert, mask=held, other=float("-inf"))
    needed = tl.load(tables.needed + expert, mask=held, other=0)
    key = tl.where(needed != 0, float("inf"), score)
    tl.store(tables.keys + slot, key, mask=inside)
    tl.debug_barrier()
    rank = tl.zeros([BLOCK_S], tl.int32)
    for start in range(0, slot_count, CHUNK):
        other = start + tl.arange(0, CHUNK)
        other_key = tl.load(tables.keys + other, mask=other < slot_count, other=float("inf"))
        earlier = (other_key[None, :] < key[:, None]) | (
            (other_key[None, :] == key[:, None]) & (other[None, :] < slot[:, None])
        )
        rank += tl.sum((earlier & (other[None, :] < slot_count)).to(tl.int32), 1)
    tl.store(tables.order + rank, slot, mask=inside)
    return slot, rank


@triton.jit
def _fill_slots(
    tables,
    expert,
    missing,
    misses,
    slot_count,
    half,
    FIRST_MISS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Give every missing expert a slot, list its copy, and write who is in the slots after the pass.

    Returns round times S plus slot ``[BLOCK_E]`` of the missing experts.
    """
    slot, rank = _rank_slots(tables, slot_count, BLOCK_S)
    number = tl.cumsum(missing.to(tl.int32), 0) - 1
    tl.store(tables.copy_expert + number, expert, mask=missing)
    tl.debug_barrier()
    position = number % slot_count
    turn = FIRST_MISS + number // slot_count * GROUPS + (position >= half).to(tl.int32)
    target = tl.load(tables.order + position, mask=missing, other=0)
    tl.store(tables.copy_slot + number, target, mask=missing)
    # The last copy to each slot decides who stays.
    changed = (slot < slot_count) & (rank < misses)
    last = rank + (misses - 1 - rank) // slot_count * slot_count
    evicted = tl.load(tables.slot_expert + slot, mask=changed, other=-1)
    tl.store(tables.expert_slot + evicted, -1, mask=changed & (evicted >= 0))
    tl.debug_barrier()
    arrived = tl.load(tables.copy_expert + last, mask=changed, other=0)
    tl.store(tables.slot_expert + slot, arrived, mask=changed)
    tl.store(tables.expert_slot + arrived, slot, mask=changed)
    return turn * slot_count + target


@triton.jit
def _write_rounds(
    tables,
    hits,
    misses,
    slot_count,
    half,
    ROUNDS: tl.constexpr,
    FIRST_MISS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Write the number of the first copy of each round, of all copies behind them, and how many are ready at once."""
    for turn in tl.static_range(ROUNDS + 1):
        if turn <= FIRST_MISS:
            tl.store(tables.round_start + turn, 0)
        else:
            start = (turn - FIRST_MISS) // GROUPS * slot_count + (turn - FIRST_MISS) % GROUPS * half
            tl.store(tables.round_start + turn, tl.minimum(misses, start))
    tl.store(tables.ready, tl.minimum(misses, tl.minimum(slot_count - hits, half)))


@triton.jit
def _write_slot_ids(ids, slot_ids, place, index, inside, experts, slot_count, count, ROUNDS: tl.constexpr):
    """Write the slot of each assignment in its round, -1 in the others; ``place [E]`` is round times S plus slot."""
    expert, valid = _valid_expert(ids, index, inside, experts)
    where = tl.load(place + expert, mask=valid, other=-1)
    for turn in tl.static_range(ROUNDS):
        local = where - turn * slot_count
        slot = tl.where(valid & (local >= 0) & (local < slot_count), local, -1)
        tl.store(slot_ids + turn * count.to(tl.int64) + index, slot, mask=inside)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["ids"])
def decide_kernel(
    ids,
    slot_ids,
    tables,
    update,
    experts,
    slot_count,
    half,
    count,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ROUNDS: tl.constexpr,
    FIRST_MISS: tl.constexpr,
    GROUPS: tl.constexpr,
    MARKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Decide, in one program, where the experts of a pass are.

    tables: ``PagingTables``. update: ``ScoreUpdate``. ids: integers ``[T * K]``, count of them. slot_ids: int32
    ``[ROUNDS, T * K]``. half: slots of the first of GROUPS groups. FIRST_MISS: the first round with
    misses. MARKED: ``mark_kernel`` has written ``needed``, and ``place_kernel`` will write ``slot_ids``.
    """
    pdl_wait(PDL)
    if not MARKED:
        for start in range(0, count, BLOCK):
            index = start + tl.arange(0, BLOCK)
            chosen, valid = _valid_expert(ids, index, index < count, experts)
            tl.store(tables.needed + chosen, 1, mask=valid)
        tl.debug_barrier()
    expert = tl.arange(0, BLOCK_E)
    exists = expert < experts
    needed = tl.load(tables.needed + expert, mask=exists, other=0) != 0
    slot = tl.load(tables.expert_slot + expert, mask=exists, other=-1)
    score = tl.load(tables.scores + expert, mask=exists, other=0.0)
    score = tl.where(
        needed,
        score * update.needed_factor + update.needed_step,
        score * update.other_factor + update.other_step,
    )
    tl.store(tables.scores + expert, score, mask=exists)
    missing = needed & (slot < 0)
    misses = tl.sum(missing.to(tl.int32), 0)
    hits = tl.sum(needed.to(tl.int32), 0) - misses
    place = tl.where(needed, slot, -1)
    tl.debug_barrier()
    if misses > 0:
        filled = _fill_slots(tables, expert, missing, misses, slot_count, half, FIRST_MISS, GROUPS, BLOCK_S)
        place = tl.where(missing, filled, place)
    tl.store(tables.place + expert, place, mask=exists)
    tl.store(tables.needed + expert, 0, mask=exists)
    _write_rounds(tables, hits, misses, slot_count, half, ROUNDS, FIRST_MISS, GROUPS)
    tl.store(tables.counters, tl.load(tables.counters) + hits)
    tl.store(tables.counters + 1, tl.load(tables.counters + 1) + misses)
    if not MARKED:
        tl.debug_barrier()
        for start in range(0, count, BLOCK):
            index = start + tl.arange(0, BLOCK)
            _write_slot_ids(ids, slot_ids, tables.place, index, index < count, experts, slot_count, count, ROUNDS)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["ids"])
def place_kernel(
    ids, slot_ids, place, experts, slot_count, count, BLOCK: tl.constexpr, ROUNDS: tl.constexpr, PDL: tl.constexpr
):
    """Write ``slot_ids`` of BLOCK assignments for each program, after ``decide_kernel``."""
    pdl_wait(PDL)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _write_slot_ids(ids, slot_ids, place, index, index < count, experts, slot_count, count, ROUNDS)


@triton.jit
def _copy_aligned(source, target, size):
    """Copy ``size`` bytes, at most _CHUNK, where 16 divides it and both addresses: 16 bytes a load, many in flight."""
    word = tl.arange(0, _CHUNK // 4)
    read = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16)
    write = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), 16)
    inside = word < tl.multiple_of(size // 4, 4)
    tl.store(write + word, tl.load(read + word, mask=inside, cache_modifier=".cg"), mask=inside)


@triton.jit
def _copy_bytes(source, target, size):
    """Copy ``size`` bytes with any alignment."""
    COUNT: tl.constexpr = 512
    read, write = source.to(tl.pointer_type(tl.int8)), target.to(tl.pointer_type(tl.int8))
    for start in range(0, size, COUNT):
        byte = start + tl.arange(0, COUNT)
        tl.store(write + byte, tl.load(read + byte, mask=byte < size), mask=byte < size)


@triton.jit(do_not_specialize_on_alignment=["start", "stop"])
def copy_kernel(
    segments,
    copy_expert,
    copy_slot,
    start,
    stop,
    chunks,
    programs,
    BLOCK_SEGMENTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy experts from host memory to their slots; ``programs`` programs share the chunks.

    start, stop: int32 ``[1]``, the numbers of the first copy and of the one behind the last. segments: int64
    ``[BLOCK_SEGMENTS, 4]``, for each tensor of an expert: its address in host memory, that in the slots, bytes of an
    expert, and the number of the first chunk; unused rows have chunks beyond. chunks: of an expert.
    """
    pdl_wait(PDL)
    first = tl.load(start)
    items = (tl.load(stop) - first) * chunks
    segment = tl.arange(0, BLOCK_SEGMENTS)
    starts = tl.load(segments + segment * 4 + 3)
    for item in range(tl.program_id(0), items, programs):
        number = first + item // chunks
        chunk = item % chunks
        row = segments + (tl.sum((starts <= chunk).to(tl.int32), 0) - 1) * 4
        size = tl.load(row + 2)
        offset = (chunk - tl.load(row + 3)) * _CHUNK
        source = tl.load(row) + tl.load(copy_expert + number) * size + offset
        target = tl.load(row + 1) + tl.load(copy_slot + number) * size + offset
        rest = tl.minimum(size - offset, _CHUNK).to(tl.int32)
        if (source | target | rest) % 16 == 0:
            _copy_aligned(source, target, rest)
        else:
            _copy_bytes(source, target, rest)
