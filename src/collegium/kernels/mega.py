"""A whole pass over ranks that read each other's memory in one kernel: tokens out, experts, rows back, sums.

All programs run at the same time, and do the three phases one after the other: let peers read this rank's tokens; bring
those of this rank's experts here and multiply; add up. In the middle one, tasks have one order on a rank, and program p
takes tasks p, p + programs, and so on: chunks of tokens first, which are counted and copied, then pieces of both
products. Whatever a task waits for is of a peer's first phase or comes before it in the order, so the first task that
is not done can always go on, and no phase ends with a barrier of all programs but where counts are needed.

A row is named by its assignment, ``(rank * bound + token) * TOP_K + k``: its token's codes, its own middle row and the
place it goes back to follow from that, so nothing is sorted. Each expert has a list of its assignments; which of them
comes first depends on time, and no bit does, since no row's bits depend on its neighbours. An expert's rows in tiles of
BLOCK_T are a *unit*. The program that ends the last piece of a unit's first product quantises its rows for the second.

Flags between ranks, the epoch, what a late rank does to everybody, and why no buffer is needed twice are those of
``peer.py``; here every rank's post is seen before any row is stored. Counters of this rank begin at zero: the first
phase clears them, before this rank's own post, which all programs wait for. The interpreter runs programs one after
the other, so there each rank has one, and ranks that share a process run FIRST to LAST phase by phase.
"""

import triton
import triton.language as tl

from . import enums
from .arguments import (
    ActivationBounds,
    CodeFormat,
    CodeRows,
    InputRows,
    OperandFormat,
    Projections,
    Tile,
    Tokens,
    Weights,
    WeightStrides,
)
from .grouped_gemm import grouped_tile
from .peer import (
    EPOCH,
    LATE,
    POSTS,
    PULL_FAILED,
    ROWS,
    announce,
    check_flags,
    collect_token,
    flag_places,
    next_epoch,
    now,
    publish,
    report,
    send_token,
    wait_for_flags,
    wait_for_rows,
)
from .quantize import load_rows, store_codes
from .w4a8 import w4a8_tile

__all__ = ["mega_kernel"]

NO_ACTIVATION = tl.constexpr(enums.NO_ACTIVATION)
BLOCK_SCALE = tl.constexpr(enums.BLOCK_SCALE)
E4M3_E4M3 = tl.constexpr(enums.E4M3_E4M3)
# Words of the counters; then one for each expert and each unit.
PULLED = tl.constexpr(0)  # chunks that are listed and copied
FINISHED = tl.constexpr(1)  # programs without a task left
TICKETS = tl.constexpr(2)  # tasks that have a program, beside the first one of each
_FIXED = tl.constexpr(3)


@triton.jit
def _unit_at(unit, last, needed, counts, lists, capacity, local_slots, BLOCK_T: tl.constexpr):
    """Return expert, place of its first assignment on the list, the assignments and how many there are of a unit.

    last, needed: units of each expert, and of all up to it. Assignments beyond the end are 0.
    """
    before = tl.sum(tl.where(last <= unit, (1 << 32) + needed.to(tl.int64), 0), 0)
    expert = tl.minimum(before >> 32, local_slots - 1)
    begin = (unit - (before & 0xFFFFFFFF).to(tl.int32)) * BLOCK_T
    t = tl.arange(0, BLOCK_T)
    row = tl.load(lists + expert * capacity + begin + t, mask=t < capacity - begin, other=0)
    here = tl.minimum(tl.load(counts + expert) - begin, BLOCK_T)
    return expert, begin, tl.where(t < here, row, 0).to(tl.int64), here


@triton.jit
def _reached(word, target, head, deltas, limit, rank, world, ASM: tl.constexpr):
    """Return whether ``word`` of this rank is ``target`` at least, once it is or this rank gives up.

    What other programs did before they counted is seen after it. A program waits for peers in other programs too, and
    twice as long as those, so that they name who is late.
    """
    none = tl.zeros([], tl.int32)
    value = tl.atomic_add(word, none, sem="acquire", scope="gpu")
    if value < target:
        start = now(head, ASM)
        late = start - start
        failed = late
        while (value < target) & (failed == 0) & (late <= limit.to(tl.int64) * 2000):
            polls = 0
            while (value < target) & (polls < 32):
                value = tl.atomic_add(word, none, sem="acquire", scope="gpu")
                polls += 1
            failed = tl.atomic_add(head + PULL_FAILED, tl.zeros([], tl.int64), sem="relaxed")
            late = now(head, ASM) - start
        if value < target:
            report(head, deltas, PULL_FAILED, world, rank, LATE, start - start + value, start - start + target)
    return value >= target


@triton.jit
def _done(word):
    """Count one at ``word`` after all that this program did, and return how many there were before."""
    tl.debug_barrier()
    return tl.atomic_add(word, tl.full([], 1, tl.int32), sem="acq_rel", scope="gpu")


@triton.jit
def _pull_chunk(
    peer, first, token_count, sent_x, sent_scale, sent_places, x, scale, counts, pulled, lists, deltas,
    bound, capacity, local_slots, rank, words, groups,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
    BLOCK_G: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """List the assignments of CHUNK tokens of a peer that has ``found``, and copy those tokens that have one here.

    ALL: tokens are copied without asking first, which would be one more way there and back.
    """
    token = first.to(tl.int64) + tl.arange(0, CHUNK)
    k = tl.arange(0, BLOCK_K)
    delta = tl.load(deltas + peer)
    line = peer * bound + token
    brought = token < token_count
    there = sent_places + tl.multiple_of(delta // 4, 64)
    place = tl.load(there + token[:, None] * TOP_K + k[None, :], mask=brought[:, None] & (k < TOP_K)[None, :], other=-1)
    slot = place - rank * local_slots
    here = (place >= 0) & (slot >= 0) & (slot < local_slots)
    if not ALL:
        brought = tl.max(here.to(tl.int32), 1) > 0
    # All of it is on its way before anything that was read is waited for.
    group = tl.arange(0, BLOCK_G)[None, :]
    scaled = brought[:, None] & (group < groups)
    value = tl.load(sent_scale + tl.multiple_of(delta // 4, 64) + token[:, None] * groups + group, mask=scaled)
    codes = sent_x + tl.multiple_of(delta // 4, 64)
    for step in tl.static_range(STEPS):
        word = (step * BLOCK + tl.arange(0, BLOCK))[None, :]
        inside = brought[:, None] & (word < words)
        tl.store(x + line[:, None] * words + word, tl.load(codes + token[:, None] * words + word, mask=inside), inside)
    tl.store(scale + line[:, None] * groups + group, value, mask=scaled)
    slot = tl.where(here, slot, 0)
    index = tl.atomic_add(counts + slot, tl.full(slot.shape, 1, tl.int32), mask=here, sem="relaxed", scope="gpu")
    assignment = line[:, None] * TOP_K + k[None, :]
    tl.store(lists + slot.to(tl.int64) * capacity + index, assignment.to(tl.int32), mask=here)
    _done(pulled)


@triton.jit
def _multiply(
    codes, scale, weight, weight_scale, factor, bias, expert, band, row, here, n_out, k_in, k_wide, tiles,
    clamp, alpha, gate_bound, up_bound,
    WEIGHT: tl.constexpr, X_SCALE: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr, KIND: tl.constexpr,
    HAS_LIMIT: tl.constexpr, K_BLOCKS: tl.constexpr, EVEN_K: tl.constexpr, ASM: tl.constexpr, WARPS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Return the results of a unit's rows for a band of weight rows, and their columns."""
    FORMAT: tl.constexpr = OperandFormat(
        weight=WEIGHT,
        scale=BLOCK_SCALE,
        words=1,
        x_scale=X_SCALE,
        row_scale=False,
        bias=BIAS,
        k_blocks=K_BLOCKS,
        block_k=BLOCK,
        even_k=EVEN_K,
    )
    PROJ: tl.constexpr = Projections(count=PARTS, activation=KIND, has_limit=HAS_LIMIT)
    TILE: tl.constexpr = Tile(
        block_n=BLOCK_N,
        block_t=BLOCK_T,
        group_t=1,
        narrow=False,
        depth=DEPTH,
        stages=STAGES,
        interleave_gate_up=PARTS == 2,
        fuse_k_block=False,
        warps=WARPS,
    )
    tokens = Tokens(x=codes, scale=scale, sums=codes, stride=k_wide, scale_stride=1)
    weights = Weights(packed=weight, scale=weight_scale, row_scale=factor, bias=bias)
    bounds = ActivationBounds(limit=clamp, alpha=alpha, gate_bound=gate_bound, up_bound=up_bound)
    if WEIGHT == E4M3_E4M3:
        COLUMNS: tl.constexpr = BLOCK_N // PARTS
        strides = WeightStrides(row=k_in, k_block=BLOCK, matrix=n_out * k_in, scale_rows=tl.cdiv(n_out, 128))
        result = grouped_tile(
            tokens, weights, strides, bounds, expert, band * COLUMNS, row, here, n_out, k_in, FORMAT, PROJ, TILE,
            BLOCK_T, ASM, False,
        )  # fmt: skip
        column = band * COLUMNS + tl.arange(0, COLUMNS)
    else:
        result, column = w4a8_tile(
            tokens, weights, bounds, expert, band * BLOCK_N, row, 0, here, n_out, tiles, FORMAT, PROJ, TILE,
            BLOCK_T, ASM, False,
        )  # fmt: skip
    return result, column


@triton.jit
def _quantise_unit(
    members, count, middle, codes, scales, capacity, inner, padded_cols, groups,
    AT_ONCE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, POWER: tl.constexpr, ROUND: tl.constexpr,
    REORDER: tl.constexpr,
):  # fmt: skip
    """Write the codes and scales of the ``count`` middle rows whose assignments ``members`` points to."""
    # Plus nothing, which the compiler does not know: places of columns would be kept in registers from task to task.
    column = tl.arange(0, BLOCK) + tl.multiple_of(count >> 31, 128)
    first = count - count
    source = InputRows(x=middle, index=None, weights=None, rows=capacity, columns=inner, stride=inner)
    out = CodeRows(codes=codes, scales=scales, rows=capacity, columns=padded_cols, groups=groups, scale_stride=None)
    FORMAT: tl.constexpr = CodeFormat(
        group=GROUP, power_of_two=POWER, e8m0=False, reorder=REORDER, software_rounding=ROUND
    )
    while first < count:
        index = first + tl.arange(0, AT_ONCE)
        row = tl.load(members + index, mask=index < count, other=0).to(tl.int64)
        row = tl.where(index < count, row, capacity)
        value = load_rows(source, row, column)
        store_codes(value, out, row, column, 0, None, FORMAT)
        first += AT_ONCE


_COUNTS = (
    "count",
    "bound",
    "id_stride",
    "weight_stride",
    "layer",
    "limit",
    "rank",
    "flag_offset",
    "flag_stride",
    "cleared",
)


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=("ids", "weights"))
def mega_kernel(
    head, deltas, ids, weights, places, copies, load, recording,
    x, sent_codes, sent_words, sent_scale, sent_places, pulled_codes, pulled_words, pulled_scale, counters, lists,
    middle, codes, scales, up_weight, up_scale, up_factor, up_bias, down_weight, down_scale, down_factor, down_bias,
    rows, shared, out,
    count, bound, id_stride, weight_stride, experts, spread, layer, limit, rank, flag_offset, flag_stride, world,
    local_slots, cleared,
    columns, x_stride, x_wide, x_groups, inner, inner_wide, inner_groups, width, up_bands, down_bands, up_tiles,
    down_tiles, shared_stride, clamp, alpha, gate_bound, up_bound,
    FIRST: tl.constexpr, LAST: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, PEERS: tl.constexpr,
    BLOCK_E: tl.constexpr, CHUNK: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_W: tl.constexpr, STEPS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_I: tl.constexpr, AT_ONCE: tl.constexpr, X_GROUP: tl.constexpr,
    INNER_GROUP: tl.constexpr, POWER: tl.constexpr, REORDER: tl.constexpr, WEIGHT: tl.constexpr,
    X_SCALE: tl.constexpr, INNER_SCALE: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr, KIND: tl.constexpr,
    HAS_LIMIT: tl.constexpr, UP_BLOCKS: tl.constexpr, DOWN_BLOCKS: tl.constexpr, UP_EVEN: tl.constexpr,
    DOWN_EVEN: tl.constexpr, WARPS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr, UP_DEPTH: tl.constexpr,
    DOWN_DEPTH: tl.constexpr, STAGES: tl.constexpr, ALL: tl.constexpr,
    PLACED: tl.constexpr, BLOCK_C: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr, SHARED: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Write ``out [T, width]``, the weighted sums of this rank's tokens ``x [T, columns]``; count is T * TOP_K.

    What peers read or write: sent_codes ``[bound, x_wide]`` E4M3, sent_scale ``[bound, x_groups]``, sent_places
    ``[bound, TOP_K]``, rows ``[bound * TOP_K, width]``. Of this rank alone: pulled_codes and pulled_scale of all ranks'
    tokens; counters int32, of which ``cleared`` are in use; lists int32 ``[held, world * bound * TOP_K]``; and for each
    assignment middle ``[., inner]``, codes ``[., inner_wide]`` and scales ``[., inner_groups]``. sent_words and
    pulled_words are the codes as int32. Weights as in ``w4a8_kernel``, or E4M3 codes in blocks as in
    ``grouped_gemm_kernel``; X_SCALE and INNER_SCALE as their X_SCALE. up_bands, down_bands: pieces of a product, each
    of BLOCK_N weight rows, in which gate and up take turns. places to recording: as in ``post_kernel``. up_tiles,
    down_tiles: row_tiles of packed weights. UP_DEPTH, DOWN_DEPTH: DEPTH of
    ``w4a8_kernel``. ALL: as in ``_pull_chunk``.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    ROUND: tl.constexpr = not ASM
    flags = flag_places(head, deltas, flag_offset, flag_stride, world, PEERS)
    if FIRST == 1:
        epoch = next_epoch(head)
        start = program * 256
        while start < cleared:
            word = start + tl.arange(0, 256)
            tl.store(counters + word, tl.zeros([256], tl.int32), mask=word < cleared)
            start += programs * 256
        token = program
        while token < count // TOP_K:
            send_token(
                token, ids, weights, sent_places, weights, places, copies, load, recording, count, id_stride,
                weight_stride, experts, spread, rank, x, sent_codes, sent_scale, columns, x_stride, x_groups, x_wide,
                TOP_K, BLOCK_K, False, BLOCK_X, True, X_GROUP, POWER, ROUND, REORDER,
            )  # fmt: skip
            token += programs
        announce(head, flags, epoch, count, layer, world, TOP_K)
    else:
        epoch = tl.load(head + EPOCH)

    if FIRST <= 2 and LAST >= 2:
        if epoch >= 0:
            capacity = world * bound * TOP_K
            blocks = tl.cdiv(bound, CHUNK)
            chunks = blocks * world
            counts = counters + _FIXED
            units = counts + local_slots
            lost = tl.zeros([], tl.int32)
            # After that of this rank all its counters are zero.
            flags_read = wait_for_flags(head, POSTS, 0, world, epoch, limit, PEERS, ASM)
            tl.debug_barrier()
            tag = (epoch << 20) | (layer.to(tl.int64) << 8) | TOP_K
            peers = tl.arange(0, PEERS)
            bad = ((flags_read >> 24) != tag) | ((flags_read & 0xFFFFFF) > bound)
            ready = check_flags(head, deltas, PULL_FAILED, world, flags_read, bad, epoch, tag)
            if ready:
                chunk = program
                while chunk < chunks:
                    # Own tokens last, and each rank begins with another one.
                    peer = (chunk % world + rank + 1) % world
                    token_count = tl.sum(tl.where(peers == peer, flags_read & 0xFFFFFF, 0), 0)
                    _pull_chunk(
                        peer, chunk // world * CHUNK, token_count, sent_words, sent_scale, sent_places, pulled_words,
                        pulled_scale, counts, counters + PULLED, lists, deltas, bound, capacity, local_slots, rank,
                        x_wide // 4, x_groups, TOP_K, BLOCK_K, CHUNK, BLOCK_W, STEPS, BLOCK_G, ALL,
                    )  # fmt: skip
                    chunk += programs
                ready = _reached(counters + PULLED, chunks, head, deltas, limit, rank, world, ASM)
            if ready:
                index = tl.arange(0, BLOCK_E)
                total = tl.load(counts + index, mask=index < local_slots, other=0)
                needed = (total + BLOCK_T - 1) // BLOCK_T
                last = tl.cumsum(needed, 0)
                total_units = tl.sum(needed, 0)
                t = tl.arange(0, BLOCK_T)
                # All first products come before all second ones, so that hardly any of these waits.
                ups = total_units * up_bands
                tasks = ups + total_units * down_bands
                task = program
                while task < ups:
                    unit = task // up_bands
                    expert, begin, row, here = _unit_at(
                        unit, last, needed, counts, lists, capacity, local_slots, BLOCK_T
                    )
                    result, column = _multiply(
                        pulled_codes, pulled_scale, up_weight, up_scale, up_factor, up_bias, expert, task % up_bands,
                        row // TOP_K, here, inner, columns, x_wide, up_tiles, clamp, alpha, gate_bound, up_bound,
                        WEIGHT, X_SCALE, BIAS, PARTS, KIND, HAS_LIMIT, UP_BLOCKS, UP_EVEN, ASM, WARPS, BLOCK_N,
                        BLOCK_T, BLOCK, UP_DEPTH, STAGES,
                    )  # fmt: skip
                    in_bounds = (column < inner)[:, None] & (t < here)[None, :]
                    there = middle + row[None, :] * inner + column[:, None]
                    tl.store(there, result.to(middle.dtype.element_ty), mask=in_bounds)
                    if _done(units + unit) == up_bands - 1:
                        _quantise_unit(
                            lists + expert * capacity + begin, here, middle, codes, scales, capacity, inner,
                            inner_wide, inner_groups, AT_ONCE, BLOCK_I, INNER_GROUP, POWER, ROUND, REORDER,
                        )  # fmt: skip
                        _done(units + unit)
                    task = programs + tl.atomic_add(counters + TICKETS, 1, sem="relaxed", scope="gpu")
                while task < tasks:
                    unit = (task - ups) // down_bands
                    expert, begin, row, here = _unit_at(
                        unit, last, needed, counts, lists, capacity, local_slots, BLOCK_T
                    )
                    ready = _reached(units + unit, up_bands + 1, head, deltas, limit, rank, world, ASM)
                    if ready:
                        result, column = _multiply(
                            codes, scales, down_weight, down_scale, down_factor, down_bias, expert,
                            (task - ups) % down_bands, row, here, width, inner, inner_wide, down_tiles, clamp, alpha,
                            gate_bound, up_bound, WEIGHT, INNER_SCALE, BIAS, 1, NO_ACTIVATION, False, DOWN_BLOCKS,
                            DOWN_EVEN, ASM, WARPS, BLOCK_N, BLOCK_T, BLOCK,
                            DOWN_DEPTH, STAGES,
                        )  # fmt: skip
                        peer = row // (bound * TOP_K)
                        apart = tl.load(deltas + peer) // (rows.dtype.element_ty.primitive_bitwidth // 8)
                        place = tl.multiple_of(apart + (row - peer * (bound * TOP_K)) * width, PLACED)
                        in_bounds = (column < width)[:, None] & (t < here)[None, :]
                        there = rows + place[None, :] + column[:, None]
                        tl.store(there, result.to(rows.dtype.element_ty), mask=in_bounds)
                    task = programs + tl.atomic_add(counters + TICKETS, 1, sem="relaxed", scope="gpu")
                    lost += tl.where(ready, 0, 1)
            else:
                lost += 1
            tl.debug_barrier()
            # To the whole system, since rows went to other ranks. Who gave up is counted above those who ended.
            one = 1 + (tl.minimum(lost, 1) << 16)
            ended = one + tl.atomic_add(counters + FINISHED, one, sem="acq_rel", scope="sys")
            if (ended & 0xFFFF) == programs:
                publish(flags, ROWS, world, tl.where(ended >> 16 == 0, epoch << 44, -1))
        elif program == 0:
            publish(flags, ROWS, world, epoch)

    if LAST == 3:
        fine = epoch >= 0
        if fine:
            fine = wait_for_rows(head, deltas, epoch, limit, world, PEERS, ASM)
            tl.debug_barrier()
        pieces = tl.cdiv(width, BLOCK_C)
        turn = program
        while turn < count // TOP_K * pieces:
            column = turn % pieces * BLOCK_C + tl.arange(0, BLOCK_C)
            collect_token(
                (turn // pieces).to(tl.int64), column, fine, rows, sent_places, sent_places, weights, shared, out,
                deltas, bound, width, weight_stride, shared_stride, local_slots, rank,
                TOP_K, BLOCK_K, PEERS, BLOCK_C, True, SHARED, EVEN, FULL, False, True, ASM,
            )  # fmt: skip
            turn += programs
