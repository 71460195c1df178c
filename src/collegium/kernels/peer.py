"""Tokens to the ranks that need them and rows back, by reading the peers' memory.

Every rank has the same regions at the same places of a block; ``deltas [R + 1]`` holds the bytes from this rank's block
to each peer's, and, last, the address of a word of the host. A flag is one 64-bit word that its writer puts into the
reader's memory and the reader polls: epoch (19 bits), layer (12), top-k (8), tokens (24), or -1 from a rank that gave
up. Whatever the peers wrote before a flag is seen after it.

What keeps them from overwriting what a peer still reads, without a second buffer: a rank posts pass n + 1 after its
``collect`` of n, which waited for every peer's rows of n, which follow that peer's ``pull`` of n; so what was sent in
n is free. And rows of n + 1 are written after ``pull`` of n + 1, which waited for every peer's post of n + 1, which
follows that peer's ``collect`` of n; so rows of n are free, wherever they are: read where they were computed, or stored
in their owner's memory, as sums may be. Stores are told by the same flag: their kernel has ended, and they are done,
before ``collect`` begins, which releases the flag to the whole system. A kernel begins after the end of the one before
it (``gdc_wait``), and all its flags are written by one program.

Plain loads in ``HEAD`` are of words that no program of the same kernel writes, so all threads of a program agree on
them; words that change are read with atomics, whose one value every thread gets.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

from . import enums
from .arguments import CodeFormat, CodeRows, InputRows
from .quantize import load_rows, store_codes

__all__ = [
    "COLLECT_FAILED",
    "EPOCH",
    "LATE",
    "POSTS",
    "PULL_FAILED",
    "ROWS",
    "announce",
    "check_flags",
    "collect_kernel",
    "collect_token",
    "fault",
    "flag_places",
    "next_epoch",
    "now",
    "post_kernel",
    "publish",
    "pull_kernel",
    "reduce_kernel",
    "report",
    "send_kernel",
    "send_token",
    "wait_for_flags",
    "wait_for_rows",
]

POSTS = tl.constexpr(enums.HEAD_POSTS)
ROWS = tl.constexpr(enums.HEAD_ROWS)
EPOCH = tl.constexpr(enums.HEAD_EPOCH)
_TICKET = tl.constexpr(enums.HEAD_TICKET)
_CLOCK = tl.constexpr(enums.HEAD_CLOCK)
PULL_FAILED = tl.constexpr(enums.HEAD_PULL_FAILED)
COLLECT_FAILED = tl.constexpr(enums.HEAD_COLLECT_FAILED)
_STATUS = tl.constexpr(enums.HEAD_STATUS)
LATE = tl.constexpr(enums.FAULT_LATE)
_OTHER_CALL = tl.constexpr(enums.FAULT_OTHER_CALL)
_GAVE_UP = tl.constexpr(enums.FAULT_GAVE_UP)


@triton.jit
def flag_places(head, deltas, flag_offset, flag_stride, world, PEERS: tl.constexpr):
    """Return where the first of this rank's flags is at every peer; to be read long before they are written."""
    peer = tl.arange(0, PEERS)
    return head + flag_offset + peer * flag_stride + tl.load(deltas + peer, mask=peer < world, other=0) // 8


@triton.jit
def publish(places, flags: tl.constexpr, world, word):
    """Write ``word`` to the flag of this rank at every peer, after everything this program has seen or written."""
    PEERS: tl.constexpr = places.shape[0]
    inside = tl.arange(0, PEERS) < world
    tl.atomic_xchg(places + flags, tl.zeros([PEERS], tl.int64) + word, mask=inside, sem="release", scope="sys")


@triton.jit
def next_epoch(head):
    """Return the epoch of the pass that begins, -1 where this rank gave up; before ``announce`` writes it."""
    before = tl.load(head + EPOCH)
    failed = tl.load(head + PULL_FAILED) + tl.load(head + COLLECT_FAILED)
    return tl.where((before < 0) | (failed > 0), -1, (before + 1) & 0x7FFFF)


@triton.jit
def now(head, ASM: tl.constexpr):
    """Return a time in nanoseconds that all threads agree on; without ``ASM`` a poll counts as a microsecond."""
    if ASM:
        tl.atomic_max(head + _CLOCK, globaltimer(), sem="relaxed")
        return tl.atomic_add(head + _CLOCK, tl.zeros([], tl.int64), sem="relaxed")
    return tl.atomic_add(head + _CLOCK, tl.full([], 1000, tl.int64), sem="relaxed")


@triton.jit
def wait_for_flags(head, flags: tl.constexpr, first, count, epoch, limit, PEERS: tl.constexpr, ASM: tl.constexpr):
    """Return the flags of ``count`` peers from ``first`` on once all are of ``epoch``, or one gave up, or it is late.

    limit: in microseconds.
    """
    peer = tl.arange(0, PEERS)
    inside = peer < count
    place = head + flags + first + peer
    none = tl.zeros([PEERS], tl.int64)
    values = tl.atomic_add(place, none, mask=inside, sem="acquire", scope="sys")
    waiting = tl.max((inside & ((values >> 44) != epoch)).to(tl.int32), 0)
    given_up = tl.max((inside & (values < 0)).to(tl.int32), 0)
    if (waiting > 0) & (given_up == 0):
        start = now(head, ASM)
        late = start - start
        while (waiting > 0) & (given_up == 0) & (late <= limit.to(tl.int64) * 1000):
            polls = 0
            # The clock is one more word to ask, so it is asked rarely.
            while (waiting > 0) & (given_up == 0) & (polls < 32):
                values = tl.atomic_add(place, none, mask=inside, sem="acquire", scope="sys")
                waiting = tl.max((inside & ((values >> 44) != epoch)).to(tl.int32), 0)
                given_up = tl.max((inside & (values < 0)).to(tl.int32), 0)
                polls += 1
            late = now(head, ASM) - start
    return values


@triton.jit
def fault(flag, epoch):
    """Return what is wrong with a flag that should be of this epoch."""
    return tl.where(flag < 0, _GAVE_UP, tl.where((flag >> 44) != epoch, LATE, _OTHER_CALL))


@triton.jit
def report(head, deltas, failed: tl.constexpr, world, peer, reason, flag, expected):
    """Note that this rank gives up, for the kernels after this one and for the host; the first reason stays."""
    code = reason + failed * 256 + peer * 65536
    before = tl.atomic_cas(head + _STATUS, tl.zeros([], tl.int64), code.to(tl.int64), sem="relaxed")
    if before == 0:
        tl.store(head + _STATUS + 1, flag)
        tl.store(head + _STATUS + 2, expected)
        host = tl.load(deltas + world).to(tl.pointer_type(tl.int64))
        tl.store(host, code.to(tl.int64))
    tl.store(head + failed, tl.full([], 1, tl.int64))


@triton.jit
def check_flags(head, deltas, failed: tl.constexpr, world, values, bad, epoch, expected):
    """Return whether no flag of ``seen`` is ``bad``; this rank gives up because of the first one that is."""
    PEERS: tl.constexpr = values.shape[0]
    peer = tl.arange(0, PEERS)
    bad &= peer < world
    fine = tl.max(bad.to(tl.int32), 0) == 0
    if not fine:
        first = tl.min(tl.where(bad, peer, PEERS), 0)
        word = tl.sum(tl.where(peer == first, values, 0), 0)
        report(head, deltas, failed, world, first, fault(word, epoch), word, expected)
    return fine


@triton.jit
def _choose(
    assignment, inside, ids, weights, sent_places, sent_weights, places, copies, load, recording,
    id_stride, weight_stride, experts, spread, rank, TOP_K: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Choose the places of assignments, let peers read them, and weights, and count them where that is asked for."""
    token = (assignment // TOP_K).to(tl.int64)
    # In 64 bits a wide id does not become a small one, and no unsigned id is -1.
    expert_id = tl.load(ids + token * id_stride + assignment % TOP_K, mask=inside, other=-1).to(tl.int64)
    known = (expert_id >= 0) & (expert_id < experts)
    expert = tl.where(known, expert_id, 0)
    if spread == 1:
        # Each expert is in one place, which is one question less.
        place = tl.load(places + expert)
    else:
        turn = (assignment // TOP_K + rank) % tl.load(copies + expert)
        place = tl.load(places + expert * spread + turn)
    tl.store(sent_places + assignment, tl.where(known, place, tl.where(expert_id == -1, -1, -2)), mask=inside)
    if WEIGHTS:
        weight = tl.load(weights + token * weight_stride + assignment % TOP_K, mask=inside, other=0.0)
        tl.store(sent_weights + assignment, weight.to(tl.float32), mask=inside)
    if tl.load(recording) != 0:
        tl.atomic_add(load + expert, tl.full(expert.shape, 1, tl.int64), mask=known, sem="relaxed")


@triton.jit
def announce(head, flags, epoch, count, layer, world, TOP_K: tl.constexpr):
    """Tell every peer, in the last program that comes here, that this rank began a pass of ``count`` assignments.

    flags: from ``flag_places``; epoch: from ``next_epoch``, in every program.
    """
    tl.debug_barrier()
    ticket = tl.atomic_add(head + _TICKET, tl.full([], 1, tl.int64), sem="acq_rel", scope="gpu")
    if ticket == tl.num_programs(0) - 1:
        tl.store(head + _TICKET, tl.zeros([], tl.int64))
        tl.store(head + EPOCH, epoch)
        word = (epoch << 44) | (layer.to(tl.int64) << 32) | (TOP_K << 24) | (count // TOP_K).to(tl.int64)
        publish(flags, POSTS, world, tl.where(epoch < 0, -1, word))


@triton.jit
def send_token(
    token, ids, weights, sent_places, sent_weights, places, copies, load, recording,
    count, id_stride, weight_stride, experts, spread, rank, x, codes, scales, columns, x_stride, groups, padded_cols,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr, CODES: tl.constexpr,
    GROUP: tl.constexpr, POWER: tl.constexpr, ROUND: tl.constexpr, REORDER: tl.constexpr,
):  # fmt: skip
    """Let peers read one token, of at most BLOCK columns, and its places. CODES: as ``e4m3_kernel`` writes it."""
    k = tl.arange(0, BLOCK_K)
    assignment = token * TOP_K + k
    _choose(
        assignment, (k < TOP_K) & (assignment < count), ids, weights, sent_places, sent_weights, places, copies, load,
        recording, id_stride, weight_stride, experts, spread, rank, TOP_K, WEIGHTS,
    )  # fmt: skip
    row = token.to(tl.int64) + tl.arange(0, 1)
    column = tl.arange(0, BLOCK)
    tokens = count // TOP_K
    source = InputRows(x=x, index=None, weights=None, rows=tokens, columns=columns, stride=x_stride)
    value = load_rows(source, row, column)
    if CODES:
        out = CodeRows(codes=codes, scales=scales, rows=tokens, columns=padded_cols, groups=groups, scale_stride=None)
        FORMAT: tl.constexpr = CodeFormat(
            group=GROUP, power_of_two=POWER, e8m0=False, reorder=REORDER, software_rounding=ROUND
        )
        store_codes(value, out, row, column, 0, None, FORMAT)
    else:
        inside = (row < tokens)[:, None] & (column < padded_cols)[None, :]
        tl.store(codes + row[:, None] * padded_cols + column[None, :], value.to(codes.dtype.element_ty), mask=inside)


_COUNTS = (
    "layer",
    "limit",
    "tokens",
    "bound",
    "rank",
    "flag_offset",
    "flag_stride",
    "count",
    "id_stride",
    "weight_stride",
)


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=("ids", "weights"))
def post_kernel(
    head, ids, weights, sent_places, sent_weights, places, copies, load, recording, deltas,
    count, id_stride, weight_stride, experts, spread, layer, rank, flag_offset, flag_stride, world,
    TOP_K: tl.constexpr, PEERS: tl.constexpr, BLOCK: tl.constexpr, WEIGHTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Choose places for ``count`` ids, let peers read them, and weights, and tell every peer that this pass began.

    sent_places: the place of each assignment, -1 for an id of -1, -2 for any other that is no expert. places: a row of
    ``spread`` for each expert, of which ``copies`` are different. The tokens were written by a kernel before this one.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    flags, epoch = flag_places(head, deltas, flag_offset, flag_stride, world, PEERS), next_epoch(head)
    assignment = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _choose(
        assignment, assignment < count, ids, weights, sent_places, sent_weights, places, copies, load, recording,
        id_stride, weight_stride, experts, spread, rank, TOP_K, WEIGHTS,
    )  # fmt: skip
    announce(head, flags, epoch, count, layer, world, TOP_K)


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=("ids", "weights"))
def send_kernel(
    head, ids, weights, sent_places, sent_weights, places, copies, load, recording, deltas,
    count, id_stride, weight_stride, experts, spread, layer, rank, flag_offset, flag_stride, world,
    x, codes, scales, columns, x_stride, groups, padded_cols,
    TOP_K: tl.constexpr, PEERS: tl.constexpr, BLOCK_K: tl.constexpr, WEIGHTS: tl.constexpr, PDL: tl.constexpr,
    BLOCK: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr, POWER: tl.constexpr, ROUND: tl.constexpr,
    REORDER: tl.constexpr,
):  # fmt: skip
    """Do what ``post_kernel`` does, and write the tokens before: a program owns one, of at most BLOCK columns.

    CODES: as ``e4m3_kernel`` does; otherwise as ``cast_kernel``.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    flags, epoch = flag_places(head, deltas, flag_offset, flag_stride, world, PEERS), next_epoch(head)
    send_token(
        tl.program_id(0), ids, weights, sent_places, sent_weights, places, copies, load, recording,
        count, id_stride, weight_stride, experts, spread, rank, x, codes, scales, columns, x_stride, groups,
        padded_cols,
        TOP_K, BLOCK_K, WEIGHTS, BLOCK, CODES, GROUP, POWER, ROUND, REORDER,
    )  # fmt: skip
    announce(head, flags, epoch, count, layer, world, TOP_K)


@triton.jit(do_not_specialize=_COUNTS)
def pull_kernel(
    head, sent_x, sent_scale, sent_places, sent_weights, x, scale, ids, weights, deltas,
    words, groups, bound, local_slots, layer, limit, rank, world,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr, BLOCK_G: tl.constexpr,
    SCALES: tl.constexpr, WEIGHTS: tl.constexpr, ALL: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copy every rank's tokens that have an assignment here, ``words`` words each, and write all local ids.

    Program (p, r) takes every so many tokens of rank r. ids ``[world * bound, TOP_K]``: the slot here of each
    assignment, -1 for one that is elsewhere. Rows of x whose token has none here are not written, unless ALL: tokens
    are copied without asking first, which would be one more way there and back. held: slots a rank has.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    # Own tokens last, and each rank begins with another one.
    peer = (tl.program_id(1) + rank + 1) % world
    delta = tl.load(deltas + peer)
    epoch = tl.load(head + EPOCH)
    tokens = tl.zeros([], tl.int64)
    if epoch >= 0:
        flag = tl.sum(wait_for_flags(head, POSTS, peer, 1, epoch, limit, 1, ASM), 0)
        tag = (epoch << 20) | (layer.to(tl.int64) << 8) | TOP_K
        token_count = flag & 0xFFFFFF
        if ((flag >> 24) == tag) & (token_count <= bound):
            tokens = token_count
        else:
            report(head, deltas, PULL_FAILED, world, peer, fault(flag, epoch), flag, tag)
    k = tl.arange(0, BLOCK_K)
    token = tl.program_id(0).to(tl.int64)
    while token < bound:
        live = (k < TOP_K) & (token < tokens)
        place = tl.load(sent_places + tl.multiple_of(delta // 4, 64) + token * TOP_K + k, mask=live, other=-1)
        slot = place - rank * local_slots
        here = (place >= 0) & (slot >= 0) & (slot < local_slots)
        row = peer * bound + token
        tl.store(ids + row * TOP_K + k, tl.where(here, slot, -1), mask=k < TOP_K)
        if WEIGHTS:
            weight = tl.load(sent_weights + tl.multiple_of(delta // 4, 64) + token * TOP_K + k, mask=live, other=0.0)
            tl.store(weights + row * TOP_K + k, weight, mask=k < TOP_K)
        if (token < tokens) & (ALL | (tl.max(here.to(tl.int32), 0) > 0)):
            there = sent_x + tl.multiple_of(delta // (sent_x.dtype.element_ty.primitive_bitwidth // 8), 16)
            for step in tl.static_range(STEPS):
                word = step * BLOCK + tl.arange(0, BLOCK)
                value = tl.load(there + token * words + word, mask=word < words)
                tl.store(x + row * words + word, value, mask=word < words)
            if SCALES:
                group = tl.arange(0, BLOCK_G)
                value = tl.load(
                    sent_scale + tl.multiple_of(delta // 4, 64) + token * groups + group, mask=group < groups
                )
                tl.store(scale + row * groups + group, value, mask=group < groups)
        token += tl.num_programs(0)


@triton.jit
def wait_for_rows(head, deltas, epoch, limit, world, PEERS: tl.constexpr, ASM: tl.constexpr):
    """Return whether every rank did its part of the pass ``epoch``, once all said so or one gave up or is late."""
    values = wait_for_flags(head, ROWS, 0, world, epoch, limit, PEERS, ASM)
    return check_flags(head, deltas, COLLECT_FAILED, world, values, (values >> 44) != epoch, epoch, epoch << 20)


_ABSENT = tl.constexpr(-(1 << 62))  # the offset of a row that is not there


@triton.jit
def _product(value, factor, FUSING: tl.constexpr):
    """Return the product rounded to float32, also where the compiler makes fused multiply-adds of others (FUSING)."""
    if FUSING:
        both, _ = tl.broadcast(factor, value)
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [value, both], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return value * factor


@triton.jit
def _weighted(
    rows, offset, factor, index, column, inside,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr, FUSING: tl.constexpr,
):  # fmt: skip
    """Return ``[BLOCK]`` float32, the sum of ``factor`` times the rows at ``offset`` in the order of ``index``.

    Offsets are in sixteens of elements where EVEN, so that the compiler knows that 16 divides them. What is not there
    is read as 0, which its factor makes 0 or NaN.
    """
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(COUNT):
        row = tl.sum(tl.where(index == i, offset, 0), 0)
        # A load that depends on a condition would be waited for before the next one starts.
        there = rows + tl.where(row == _ABSENT, 0, row) * (16 if EVEN else 1) + column
        value = tl.load(there) if FULL else tl.load(there, mask=inside, other=0.0)
        value = tl.where(row == _ABSENT, 0.0, value.to(tl.float32))
        total = total + _product(value, tl.sum(tl.where(index == i, factor, 0.0), 0), FUSING)
    return total


@triton.jit(do_not_specialize=_COUNTS)
def reduce_kernel(
    rows, slots, weights, sums, deltas, bound, width, rank, world,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr, WEIGHTS: tl.constexpr, EVEN: tl.constexpr,
    FULL: tl.constexpr, PUSH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the weighted sum of this rank's rows of each token it was sent, in slot order, rounded once.

    slots, weights ``[world * bound, TOP_K]``: of rank r's token t in line ``r * bound + t``. sums: of the same lines;
    PUSH: in the memory of rank r, in line ``rank * bound + t``. Nothing is written where no assignment is here, nor to
    a rank that did not come. Compiled without fused multiply-adds.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    k = tl.arange(0, BLOCK_K)
    turn = tl.program_id(1)
    while turn < bound * world:
        # Ranks in turn, so that what is written far away is beside what is written here all the time.
        peer, token = turn % world, turn // world
        line = (peer * bound + token).to(tl.int64)
        slot = tl.load(slots + line * TOP_K + k, mask=k < TOP_K, other=-1)
        if tl.max(slot, 0) >= 0:
            factor = tl.full([BLOCK_K], 1.0, tl.float32)
            if WEIGHTS:
                factor = tl.load(weights + line * TOP_K + k, mask=k < TOP_K, other=0.0)
            factor = tl.where(slot >= 0, factor, tl.where(slot == -1, 0.0, float("nan")))
            offset = tl.where(slot >= 0, slot * width // (16 if EVEN else 1), _ABSENT)
            total = _weighted(rows, offset, factor, k, column, inside, TOP_K, BLOCK, EVEN, FULL, False)
            there = sums
            if PUSH:
                line = rank.to(tl.int64) * bound + token
                delta = tl.load(deltas + peer)
                there += tl.multiple_of(delta // (sums.dtype.element_ty.primitive_bitwidth // 8), 16)
            tl.store(there + line * width + column, total.to(sums.dtype.element_ty), mask=inside)
        turn += tl.num_programs(1)


@triton.jit
def collect_token(
    token, column, complete, rows, slots, sent_places, weights, shared, out, deltas,
    bound, width, weight_stride, shared_stride, local_slots, rank,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, PEERS: tl.constexpr, BLOCK: tl.constexpr, WEIGHTS: tl.constexpr,
    SHARED: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr, SUMS: tl.constexpr, PUSH: tl.constexpr,
    FUSING: tl.constexpr,
):  # fmt: skip
    """Write the columns ``column [BLOCK]`` of one token's sum as ``collect_kernel`` says; NaN where not ``fine``."""
    inside = column < width
    peer = tl.arange(0, PEERS)
    k = tl.arange(0, BLOCK_K)
    nbytes: tl.constexpr = rows.dtype.element_ty.primitive_bitwidth // 8
    # For all assignments at once: the ways to the peers and back are long.
    place = tl.load(sent_places + token * TOP_K + k, mask=k < TOP_K, other=-1)
    if SUMS:
        goes = (place >= 0)[:, None] & ((place // local_slots)[:, None] == peer[None, :])
        present = (tl.max(goes.to(tl.int32), 0) > 0) & complete
        offset = (peer * bound + token) * width
        if not PUSH:
            delta = tl.load(deltas + peer, mask=present, other=0)
            offset = delta // nbytes + (rank * bound + token) * width
        known = (tl.min(place, 0) >= -1) & complete
        factor = tl.where(known, tl.where(present, 1.0, 0.0), float("nan"))
        offset = tl.where(present, offset // (16 if EVEN else 1), _ABSENT)
        total = _weighted(rows, offset, factor, peer, column, inside, PEERS, BLOCK, EVEN, FULL, FUSING)
    else:
        present = (place >= 0) & complete
        offset = (token * TOP_K + k) * width
        if not PUSH:
            delta = tl.load(deltas + tl.maximum(place, 0) // local_slots)
            slot = tl.load(slots + delta // 8 + (rank * bound + token) * TOP_K + k, mask=present, other=-2)
            present &= slot >= 0
            offset = delta // nbytes + slot * width
        factor = tl.full([BLOCK_K], 1.0, tl.float32)
        if WEIGHTS:
            factor = tl.load(weights + token * weight_stride + k, mask=k < TOP_K, other=0.0).to(tl.float32)
        factor = tl.where(present, factor, tl.where((place == -1) & complete, 0.0, float("nan")))
        offset = tl.where(present, offset // (16 if EVEN else 1), _ABSENT)
        total = _weighted(rows, offset, factor, k, column, inside, TOP_K, BLOCK, EVEN, FULL, FUSING)
    if SHARED:
        total = total + tl.load(shared + token * shared_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=("slots", "weights"))
def collect_kernel(
    head, rows, slots, sent_places, weights, shared, out, deltas,
    tokens, bound, width, weight_stride, shared_stride, local_slots, limit, rank, flag_offset, flag_stride, world,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, PEERS: tl.constexpr, BLOCK: tl.constexpr, WEIGHTS: tl.constexpr,
    SHARED: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr, SUMS: tl.constexpr, PUSH: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write ``out [tokens, width]``, the weighted sums of this rank's tokens, from what ranks computed.

    slots ``[world * bound, TOP_K]`` of a rank says which of its rows ``[R, width]`` an assignment is. PUSH: the row of
    each assignment is here, in their order, where its rank stored it. The formulas, the order of every sum and what -1
    and ids of nobody mean are those of ``weighted_sum_kernel``; all of out is NaN where a rank gave up. SUMS: rows are
    what ``reduce_kernel`` wrote, with its PUSH; each rank's that has an assignment is added in the order of ranks.
    held: slots a rank has. EVEN: 16 divides the width. FULL: BLOCK divides it. Compiled without fused multiply-adds.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    epoch = tl.load(head + EPOCH)
    failed = tl.load(head + PULL_FAILED)
    fine = (epoch >= 0) & (failed == 0)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        flags = flag_places(head, deltas, flag_offset, flag_stride, world, PEERS)
        publish(flags, ROWS, world, tl.where(fine, epoch << 44, -1))
    if fine:
        fine = wait_for_rows(head, deltas, epoch, limit, world, PEERS, ASM)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.program_id(1).to(tl.int64)
    while token < tokens:
        collect_token(
            token, column, fine, rows, slots, sent_places, weights, shared, out, deltas,
            bound, width, weight_stride, shared_stride, local_slots, rank,
            TOP_K, BLOCK_K, PEERS, BLOCK, WEIGHTS, SHARED, EVEN, FULL, SUMS, PUSH, False,
        )  # fmt: skip
        token += tl.num_programs(1)
