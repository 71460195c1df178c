"""A whole pass over ranks that read each other's memory in one kernel: publish tokens, compute, combine.

All programs run at the same time and go through three phases: let peers read this rank's tokens; pull the tokens of
this rank's experts and multiply; sum up. The middle phase is a sequence of work items in the same order on all
programs: first blocks of tokens, which are listed and copied, then tiles of the first products, then tiles of the
second ones. An item waits only for the first phase of peers and for earlier items. So the first unfinished item can
always proceed, and only the counts of assignments need a barrier of all programs.

A row is identified by its assignment, ``(rank * bound + token) * top_k + k``, which gives the row of its token's codes,
its row between the products, and the offset where its result goes, so nothing is sorted. Each expert has a list of its
assignments. Their order varies, which changes no bit, since no row's bits depend on other rows. The rows of an expert
in steps of ``block_t`` are its *m_tiles*; an *n_tile* is ``block_n`` weight rows. The program that finishes the last
n_tile of an m_tile's first product quantises its rows for the second one.

Flags between ranks, the epoch, the effect of a late rank, and why one buffer is enough: see ``peer.py``; here every
rank's post is read before any row is stored. The counters of this rank must be zero: the first phase clears them before
this rank's post, which all programs wait for. Triton's interpreter runs one program after the other, so there each rank
has one program, and ranks of one process run phase by phase.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import enums
from .arguments import ActivationBounds, CodeRows, InputRows, Tokens, Weights, WeightStrides
from .grouped_gemm import grouped_tile
from .peer import (
    EPOCH,
    LATE,
    POSTS,
    PULL_FAILED,
    ROWS,
    announce,
    check_flags,
    combine_token,
    flag_pointers,
    local_slots_of,
    next_epoch,
    now,
    pass_tag,
    peer_pointer,
    publish,
    report,
    send_token,
    wait_for_flags,
    wait_for_rows,
)
from .peer_arguments import (
    Assignments,
    CombineBuffers,
    ExpertMapArgs,
    PassCounts,
    Peers,
    Product,
    RankRows,
    RouterOutput,
    Scratch,
    SourceTokens,
    TokenRows,
)
from .quantize import load_rows, store_codes
from .w4a8 import w4a8_tile

__all__ = ["mega_kernel"]

PHASE_PUBLISH = tl.constexpr(enums.PHASE_PUBLISH)
PHASE_COMPUTE = tl.constexpr(enums.PHASE_COMPUTE)
PHASE_COMBINE = tl.constexpr(enums.PHASE_COMBINE)
E4M3_E4M3 = tl.constexpr(enums.E4M3_E4M3)
# The first counters; one for each expert (its assignments) and one for each m_tile (its finished n_tiles) follow.
_PULLED = tl.constexpr(0)  # token blocks that are listed and copied
_FINISHED = tl.constexpr(1)  # programs without a further item
_TICKETS = tl.constexpr(2)  # items that have a program, apart from the first one of each program
_FIXED = tl.constexpr(3)


class _MTiles(NamedTuple):
    """The m_tiles of all experts, in the order of experts.

    needed, last: ``[slots]``, m_tiles of each expert, and of all experts up to it. capacity: assignments of all ranks.
    up_items: tiles of all first products. items: of all first and second ones.
    """

    needed: Any
    last: Any
    capacity: Any
    up_items: Any
    items: Any


@triton.jit
def _m_tiles_of(scratch: Scratch, capacity, up_n_tiles, down_n_tiles, BLOCK_SLOTS: tl.constexpr, BLOCK_T: tl.constexpr):
    """Return the _MTiles of this pass, once all token blocks are listed."""
    slot = tl.arange(0, BLOCK_SLOTS)
    count = tl.load(scratch.counters + _FIXED + slot, mask=slot < scratch.local_slots, other=0)
    needed = (count + BLOCK_T - 1) // BLOCK_T
    last = tl.cumsum(needed, 0)
    total = tl.sum(needed, 0)
    up_items = total * up_n_tiles
    items = up_items + total * down_n_tiles
    return _MTiles(needed=needed, last=last, capacity=capacity, up_items=up_items, items=items)


@triton.jit
def _m_tile_at(m_tile, tiles: _MTiles, scratch: Scratch, BLOCK_T: tl.constexpr):
    """Return expert, index of the first assignment on its list, the assignments ``[BLOCK_T]`` and their number.

    Assignments beyond the number are 0.
    """
    before = tl.sum(tl.where(tiles.last <= m_tile, (1 << 32) + tiles.needed.to(tl.int64), 0), 0)
    expert = tl.minimum(before >> 32, scratch.local_slots - 1)
    first = (m_tile - (before & 0xFFFFFFFF).to(tl.int32)) * BLOCK_T
    t = tl.arange(0, BLOCK_T)
    pointers = scratch.lists + expert * tiles.capacity + first + t
    row = tl.load(pointers, mask=t < tiles.capacity - first, other=0)
    count = tl.minimum(tl.load(scratch.counters + _FIXED + expert) - first, BLOCK_T)
    return expert, first, tl.where(t < count, row, 0).to(tl.int64), count


@triton.jit
def _wait_for_counter(counter, target, peers: Peers, current: PassCounts, ASM: tl.constexpr):
    """Return whether ``counter`` has reached ``target``; waits until it has or this rank gives up.

    What other programs did before they counted is visible afterwards. The timeout is twice that of a wait for a peer:
    other programs wait for peers too, and report the rank that is late.
    """
    head = peers.head
    zero = tl.zeros([], tl.int32)
    value = tl.atomic_add(counter, zero, sem="acquire", scope="gpu")
    if value < target:
        start = now(head, ASM)
        elapsed = start - start
        failed = elapsed
        while (value < target) & (failed == 0) & (elapsed <= current.timeout.to(tl.int64) * 2000):
            polls = 0
            while (value < target) & (polls < 32):
                value = tl.atomic_add(counter, zero, sem="acquire", scope="gpu")
                polls += 1
            failed = tl.atomic_add(head + PULL_FAILED, tl.zeros([], tl.int64), sem="relaxed")
            elapsed = now(head, ASM) - start
        if value < target:
            report(peers, PULL_FAILED, current.rank, LATE, start - start + value, start - start + target)
    return value >= target


@triton.jit
def _count_up(counter):
    """Add one to ``counter`` after everything this program did, and return its previous value."""
    tl.debug_barrier()
    return tl.atomic_add(counter, tl.full([], 1, tl.int32), sem="acq_rel", scope="gpu")


@triton.jit
def _next_item(scratch: Scratch):
    """Return the next item without a program; the first items, one for each program, were never handed out here."""
    return tl.num_programs(0) + tl.atomic_add(scratch.counters + _TICKETS, 1, sem="relaxed", scope="gpu")


@triton.jit
def _pull_block(
    peer,
    first,
    token_count,
    peers: Peers,
    source: SourceTokens,
    sent: TokenRows,
    pulled: TokenRows,
    scratch: Scratch,
    current: PassCounts,
    capacity,
    FORMAT: tl.constexpr,
):
    """List the local assignments of a block of tokens of ``peer``, which has ``token_count``, and copy the tokens."""
    TOP_K: tl.constexpr = FORMAT.top_k
    BLOCK: tl.constexpr = FORMAT.blocks.words
    COPIES: tl.constexpr = FORMAT.blocks.copies
    token = first.to(tl.int64) + tl.arange(0, FORMAT.blocks.tokens)
    k = tl.arange(0, FORMAT.blocks.assignments)
    delta = tl.load(peers.deltas + peer)
    row = peer * current.bound + token
    copied = token < token_count
    pointers = peer_pointer(sent.ids, delta, 64) + token[:, None] * TOP_K + k[None, :]
    physical_id = tl.load(pointers, mask=copied[:, None] & (k < TOP_K)[None, :], other=-1)
    slot, is_local = local_slots_of(physical_id, scratch.local_slots, current.rank)
    if not FORMAT.copy_all:
        copied = tl.max(is_local.to(tl.int32), 1) > 0
    # All loads are issued before the first result is used.
    group = tl.arange(0, FORMAT.blocks.groups)[None, :]
    group_inside = copied[:, None] & (group < source.groups)
    scale = tl.load(peer_pointer(sent.scale, delta, 64) + token[:, None] * source.groups + group, mask=group_inside)
    words = source.padded_columns // 4
    sent_words = peer_pointer(sent.x.to(tl.pointer_type(tl.int32), bitcast=True), delta, 64)
    pulled_words = pulled.x.to(tl.pointer_type(tl.int32), bitcast=True)
    for step in tl.static_range(COPIES):
        word = (step * BLOCK + tl.arange(0, BLOCK))[None, :]
        inside = copied[:, None] & (word < words)
        value = tl.load(sent_words + token[:, None] * words + word, mask=inside)
        tl.store(pulled_words + row[:, None] * words + word, value, inside)
    tl.store(pulled.scale + row[:, None] * source.groups + group, scale, mask=group_inside)
    slot = tl.where(is_local, slot, 0)
    ones = tl.full(slot.shape, 1, tl.int32)
    index = tl.atomic_add(scratch.counters + _FIXED + slot, ones, mask=is_local, sem="relaxed", scope="gpu")
    assignment = row[:, None] * TOP_K + k[None, :]
    tl.store(scratch.lists + slot.to(tl.int64) * capacity + index, assignment.to(tl.int32), mask=is_local)
    _count_up(scratch.counters + _PULLED)


@triton.jit
def _pull(
    flags,
    peers: Peers,
    source: SourceTokens,
    sent: TokenRows,
    pulled: TokenRows,
    scratch: Scratch,
    current: PassCounts,
    capacity,
    FORMAT: tl.constexpr,
):
    """Pull all tokens of this rank's experts; return whether all programs have. flags: the posts of all peers."""
    rank_index = tl.arange(0, FORMAT.blocks.ranks)
    blocks = tl.cdiv(current.bound, FORMAT.blocks.tokens) * peers.world
    block = tl.program_id(0)
    while block < blocks:
        # Local tokens last, and each rank begins with another peer.
        peer = (block % peers.world + current.rank + 1) % peers.world
        first = block // peers.world * FORMAT.blocks.tokens
        token_count = tl.sum(tl.where(rank_index == peer, flags & 0xFFFFFF, 0), 0)
        _pull_block(peer, first, token_count, peers, source, sent, pulled, scratch, current, capacity, FORMAT)
        block += tl.num_programs(0)
    return _wait_for_counter(scratch.counters + _PULLED, blocks, peers, current, FORMAT.asm)


@triton.jit
def _multiply(
    tokens: Tokens,
    product: Product,
    bounds: ActivationBounds,
    expert,
    n_tile,
    row,
    count,
    n_out,
    k_in,
    FORMAT: tl.constexpr,
    PROJ: tl.constexpr,
    TILE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return the results ``[columns, block_t]`` of an n_tile for the first ``count`` of ``row``, and their columns."""
    weights = Weights(packed=product.packed, scale=product.scale, row_scale=product.row_scale, bias=product.bias)
    if FORMAT.weight == E4M3_E4M3:
        COLUMNS: tl.constexpr = TILE.block_n // PROJ.count
        strides = WeightStrides(row=k_in, k_block=FORMAT.block_k, matrix=n_out * k_in, scale_rows=tl.cdiv(n_out, 128))
        n_first = n_tile * COLUMNS
        result = grouped_tile(
            tokens,
            weights,
            strides,
            bounds,
            None,
            row,
            expert,
            n_first,
            row,
            row,
            count,
            n_out,
            k_in,
            FORMAT,
            PROJ,
            TILE,
            TILE.block_t,
            ASM,
            False,
            False,
            False,
        )
        column = n_first + tl.arange(0, COLUMNS)
    else:
        result, column = w4a8_tile(
            tokens,
            weights,
            bounds,
            None,
            row,
            expert,
            n_tile * TILE.block_n,
            row,
            row,
            0,
            count,
            n_out,
            product.row_tiles,
            FORMAT,
            PROJ,
            TILE,
            TILE.block_t,
            ASM,
            False,
            False,
            False,
        )
    return result, column


@triton.jit
def _quantize_m_tile(members, count, scratch: Scratch, capacity, FORMAT: tl.constexpr):
    """Write the codes and scales of the ``count`` middle rows whose assignments ``members`` points to."""
    ROWS_AT_ONCE: tl.constexpr = FORMAT.blocks.inner_rows
    CODES: tl.constexpr = FORMAT.inner_codes
    # The added zero, unknown to the compiler, keeps column indices from occupying registers across items.
    column = tl.arange(0, FORMAT.blocks.inner_columns) + tl.multiple_of(count >> 31, 128)
    source = InputRows(
        x=scratch.middle, index=None, weights=None, rows=capacity, columns=scratch.columns, stride=scratch.columns
    )
    out = CodeRows(
        codes=scratch.codes,
        scales=scratch.scales,
        rows=capacity,
        columns=scratch.padded_columns,
        groups=scratch.groups,
        scale_stride=None,
    )
    first = count - count
    while first < count:
        index = first + tl.arange(0, ROWS_AT_ONCE)
        row = tl.load(members + index, mask=index < count, other=0).to(tl.int64)
        row = tl.where(index < count, row, capacity)
        value = load_rows(source, row, column)
        store_codes(value, out, row, column, 0, None, CODES)
        first += ROWS_AT_ONCE


@triton.jit
def _first_products(
    tiles: _MTiles,
    source: SourceTokens,
    pulled: TokenRows,
    scratch: Scratch,
    up: Product,
    bounds: ActivationBounds,
    FORMAT: tl.constexpr,
):
    """Compute and quantise the results of the first products; return this program's first item after them."""
    UP: tl.constexpr = FORMAT.up
    PROJ: tl.constexpr = FORMAT.up_projections
    TILE: tl.constexpr = FORMAT.up_tile
    tokens = Tokens(x=pulled.x, scale=pulled.scale, sums=pulled.x, stride=source.padded_columns, scale_stride=1)
    inner = scratch.columns
    t = tl.arange(0, TILE.block_t)
    item = tl.program_id(0)
    while item < tiles.up_items:
        m_tile = item // up.n_tiles
        expert, first, row, count = _m_tile_at(m_tile, tiles, scratch, TILE.block_t)
        result, column = _multiply(
            tokens,
            up,
            bounds,
            expert,
            item % up.n_tiles,
            row // FORMAT.top_k,
            count,
            inner,
            source.columns,
            UP,
            PROJ,
            TILE,
            FORMAT.asm,
        )
        inside = (column < inner)[:, None] & (t < count)[None, :]
        pointers = scratch.middle + row[None, :] * inner + column[:, None]
        tl.store(pointers, result.to(scratch.middle.dtype.element_ty), mask=inside)
        counter = scratch.counters + _FIXED + scratch.local_slots + m_tile
        if _count_up(counter) == up.n_tiles - 1:
            members = scratch.lists + expert * tiles.capacity + first
            _quantize_m_tile(members, count, scratch, tiles.capacity, FORMAT)
            _count_up(counter)
        item = _next_item(scratch)
    return item


@triton.jit
def _store_remote(
    result, column, row, count, peers: Peers, buffers: CombineBuffers, current: PassCounts, FORMAT: tl.constexpr
):
    """Store ``result [columns, block_t]`` at ``rows`` of the ranks of their assignments ``row [block_t]``."""
    rows = buffers.rows
    nbytes: tl.constexpr = rows.dtype.element_ty.primitive_bitwidth // 8
    assignments = current.bound * FORMAT.top_k
    peer = row // assignments
    delta = tl.load(peers.deltas + peer) // nbytes
    offset = delta + (row - peer * assignments) * buffers.width
    offset = tl.multiple_of(offset, 16 if FORMAT.sums.aligned else 1)
    t = tl.arange(0, row.shape[0])
    inside = (column < buffers.width)[:, None] & (t < count)[None, :]
    tl.store(rows + offset[None, :] + column[:, None], result.to(rows.dtype.element_ty), mask=inside)


@triton.jit
def _second_products(
    item,
    tiles: _MTiles,
    peers: Peers,
    scratch: Scratch,
    up: Product,
    down: Product,
    buffers: CombineBuffers,
    bounds: ActivationBounds,
    current: PassCounts,
    FORMAT: tl.constexpr,
):
    """Compute the second products from ``item`` on and store the rows; return how many items failed to start."""
    DOWN: tl.constexpr = FORMAT.down
    PROJ: tl.constexpr = FORMAT.down_projections
    TILE: tl.constexpr = FORMAT.down_tile
    tokens = Tokens(
        x=scratch.codes, scale=scratch.scales, sums=scratch.codes, stride=scratch.padded_columns, scale_stride=1
    )
    failed = tl.zeros([], tl.int32)
    while item < tiles.items:
        m_tile = (item - tiles.up_items) // down.n_tiles
        expert, _, row, count = _m_tile_at(m_tile, tiles, scratch, TILE.block_t)
        counter = scratch.counters + _FIXED + scratch.local_slots + m_tile
        ready = _wait_for_counter(counter, up.n_tiles + 1, peers, current, FORMAT.asm)
        if ready:
            result, column = _multiply(
                tokens,
                down,
                bounds,
                expert,
                (item - tiles.up_items) % down.n_tiles,
                row,
                count,
                buffers.width,
                scratch.columns,
                DOWN,
                PROJ,
                TILE,
                FORMAT.asm,
            )
            _store_remote(result, column, row, count, peers, buffers, current, FORMAT)
        item = _next_item(scratch)
        failed += tl.where(ready, 0, 1)
    return failed


@triton.jit
def _publish_tokens(
    flags,
    peers: Peers,
    routing: RouterOutput,
    expert_map: ExpertMapArgs,
    source: SourceTokens,
    sent: TokenRows,
    scratch: Scratch,
    layer,
    rank,
    counter_words,
    FORMAT: tl.constexpr,
):
    """Phase 1: clear the counters, write this rank's tokens, and post the pass; return its epoch."""
    TOP_K: tl.constexpr = FORMAT.top_k
    CODES: tl.constexpr = FORMAT.token_codes
    epoch = next_epoch(peers.head)
    start = tl.program_id(0) * 256
    while start < counter_words:
        word = start + tl.arange(0, 256)
        tl.store(scratch.counters + word, tl.zeros([256], tl.int32), mask=word < counter_words)
        start += tl.num_programs(0) * 256
    token = tl.program_id(0)
    while token < routing.count // TOP_K:
        send_token(
            token,
            routing,
            expert_map,
            source,
            sent,
            rank,
            TOP_K,
            FORMAT.blocks.assignments,
            FORMAT.blocks.columns,
            CODES,
        )
        token += tl.num_programs(0)
    announce(peers.head, flags, epoch, routing.count, layer, peers.world, TOP_K)
    return epoch


@triton.jit
def _compute(
    flags,
    peers: Peers,
    source: SourceTokens,
    sent: TokenRows,
    pulled: TokenRows,
    scratch: Scratch,
    up: Product,
    down: Product,
    buffers: CombineBuffers,
    bounds: ActivationBounds,
    current: PassCounts,
    FORMAT: tl.constexpr,
):
    """Phase 2: pull tokens, compute both products, store rows at the tokens' ranks, and tell every peer."""
    capacity = peers.world * current.bound * FORMAT.top_k
    epoch = current.epoch
    posts = wait_for_flags(peers.head, POSTS, 0, peers.world, epoch, current.timeout, FORMAT.blocks.ranks, FORMAT.asm)
    # This rank's post is among them, so all its counters are zero.
    tl.debug_barrier()
    tag = pass_tag(epoch, current.layer, FORMAT.top_k)
    bad = ((posts >> 24) != tag) | ((posts & 0xFFFFFF) > current.bound)
    ready = check_flags(peers, PULL_FAILED, posts, bad, epoch, tag)
    if ready:
        ready = _pull(posts, peers, source, sent, pulled, scratch, current, capacity, FORMAT)
    failed = tl.zeros([], tl.int32)
    if ready:
        tiles = _m_tiles_of(scratch, capacity, up.n_tiles, down.n_tiles, FORMAT.blocks.slots, FORMAT.up_tile.block_t)
        # All first products precede all second ones, so that few of these have to wait.
        item = _first_products(tiles, source, pulled, scratch, up, bounds, FORMAT)
        failed += _second_products(item, tiles, peers, scratch, up, down, buffers, bounds, current, FORMAT)
    else:
        failed += 1
    tl.debug_barrier()
    # Released to the whole system, since rows went to other ranks. Programs that gave up are counted in the upper half.
    one = 1 + (tl.minimum(failed, 1) << 16)
    finished = one + tl.atomic_add(scratch.counters + _FINISHED, one, sem="acq_rel", scope="sys")
    if (finished & 0xFFFF) == tl.num_programs(0):
        publish(flags, ROWS, peers.world, tl.where(finished >> 16 == 0, epoch << 44, -1))


@triton.jit
def _combine(
    peers: Peers,
    buffers: CombineBuffers,
    sent: TokenRows,
    routing: RouterOutput,
    local_slots,
    current: PassCounts,
    FORMAT: tl.constexpr,
):
    """Phase 3: write the weighted sums of this rank's tokens."""
    TOP_K: tl.constexpr = FORMAT.top_k
    BLOCK_K: tl.constexpr = FORMAT.blocks.assignments
    PEERS: tl.constexpr = FORMAT.blocks.ranks
    COLUMNS: tl.constexpr = FORMAT.sums
    complete = current.epoch >= 0
    if complete:
        complete = wait_for_rows(peers, current.epoch, current.timeout, PEERS, FORMAT.asm)
        tl.debug_barrier()
    blocks = tl.cdiv(buffers.width, COLUMNS.size)
    assignments = Assignments(
        sent_ids=sent.ids, slots=None, weights=routing.weights, weight_stride=routing.weight_stride
    )
    ranks = RankRows(deltas=peers.deltas, bound=current.bound, local_slots=local_slots, rank=current.rank)
    index = tl.program_id(0)
    while index < routing.count // TOP_K * blocks:
        token = (index // blocks).to(tl.int64)
        column = index % blocks * COLUMNS.size + tl.arange(0, COLUMNS.size)
        combine_token(
            buffers,
            assignments,
            ranks,
            token,
            column,
            complete,
            TOP_K,
            BLOCK_K,
            PEERS,
            COLUMNS,
            False,
            False,
            FORMAT.asm,
        )
        index += tl.num_programs(0)


_COUNTS = (
    "count",
    "bound",
    "id_stride",
    "weight_stride",
    "layer",
    "timeout",
    "rank",
    "flag_offset",
    "flag_stride",
    "counter_words",
)


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=("ids", "weights"))
def mega_kernel(
    peers: Peers,
    ids,
    weights,
    expert_map: ExpertMapArgs,
    source: SourceTokens,
    sent: TokenRows,
    pulled: TokenRows,
    scratch: Scratch,
    up: Product,
    down: Product,
    buffers: CombineBuffers,
    bounds: ActivationBounds,
    count,
    bound,
    id_stride,
    weight_stride,
    layer,
    timeout,
    rank,
    flag_offset,
    flag_stride,
    counter_words,
    FORMAT: tl.constexpr,
):
    """Write the weighted sums ``buffers.out`` of this rank's tokens ``source.x``.

    ids, weights, count and their strides: ``RouterOutput``. Peers access ``sent``, without weights, and
    ``buffers.rows [B * K, width]``, the row of each of this rank's assignments. pulled: of all ranks' tokens, without
    ids and weights. up, down: weights as in ``w4a8_kernel``, or E4M3 codes in blocks as in ``grouped_gemm_kernel``.
    bound to flag_stride: as in ``peer.py``. counter_words: counters that this pass uses. FORMAT: a ``MegaFormat``.
    """
    flags = flag_pointers(peers, flag_offset, flag_stride, FORMAT.blocks.ranks)
    routing = RouterOutput(ids=ids, weights=weights, count=count, id_stride=id_stride, weight_stride=weight_stride)
    if FORMAT.first_phase == PHASE_PUBLISH:
        epoch = _publish_tokens(
            flags, peers, routing, expert_map, source, sent, scratch, layer, rank, counter_words, FORMAT
        )
    else:
        epoch = tl.load(peers.head + EPOCH)
    current = PassCounts(epoch=epoch, layer=layer, bound=bound, rank=rank, timeout=timeout)
    if FORMAT.first_phase <= PHASE_COMPUTE and FORMAT.last_phase >= PHASE_COMPUTE:
        if epoch >= 0:
            _compute(flags, peers, source, sent, pulled, scratch, up, down, buffers, bounds, current, FORMAT)
        elif tl.program_id(0) == 0:
            publish(flags, ROWS, peers.world, epoch)
    if FORMAT.last_phase == PHASE_COMBINE:
        _combine(peers, buffers, sent, routing, scratch.local_slots, current, FORMAT)
