"""Exchange of tokens and rows between ranks that read each other's memory.

Symmetric memory has the same layout on every rank. A flag is one 64-bit word that its writer stores in the reader's
memory and the reader polls: epoch (19 bits), layer (12), top-k (8), tokens (24), or -1 from a rank that gave up. The
writer's earlier stores are visible to a reader of the flag.

Why no second buffer is needed: a rank posts pass n + 1 after its ``collect`` of pass n, which waited for every peer's
rows of n, which follow that peer's ``pull`` of n; so the tokens sent in n may be overwritten. Rows of n + 1 are written
after ``pull`` of n + 1, which waited for every peer's post of n + 1, which follows that peer's ``collect`` of n; so
the rows of n may be overwritten, whether peers read them where they were computed or they were stored in the memory of
the token's rank, as sums may be. The same flag covers such stores: the kernel that made them has ended before
``collect`` begins, which releases the flag to the whole system. A kernel begins after the end of the previous one
(``gdc_wait``), and one program writes all its flags.

Plain loads in ``head`` read words that no program of the same kernel writes, so all threads of a program get the same
value; words that change are read with atomics, whose one value every thread gets.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from . import enums
from .arguments import CodeRows, InputRows
from .peer_arguments import (
    Assignments,
    CombineBuffers,
    ExpertMapArgs,
    Peers,
    RankRows,
    RouterOutput,
    SourceTokens,
    TokenRows,
)
from .quantize import load_rows, store_codes
from .tiles import pdl_wait

__all__ = [
    "EPOCH",
    "LATE",
    "POSTS",
    "PULL_FAILED",
    "ROWS",
    "announce",
    "check_flags",
    "collect_kernel",
    "combine_token",
    "flag_pointers",
    "local_slots_of",
    "next_epoch",
    "now",
    "pass_tag",
    "peer_pointer",
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
_COLLECT_FAILED = tl.constexpr(enums.HEAD_COLLECT_FAILED)
_STATUS = tl.constexpr(enums.HEAD_STATUS)
LATE = tl.constexpr(enums.FAULT_LATE)
_OTHER_CALL = tl.constexpr(enums.FAULT_OTHER_CALL)
_GAVE_UP = tl.constexpr(enums.FAULT_GAVE_UP)


@triton.jit
def peer_pointer(pointer, delta, MULTIPLE: tl.constexpr):
    """Return the counterpart of ``pointer`` at a peer whose memory is ``delta`` bytes, whole MULTIPLEs, away."""
    nbytes: tl.constexpr = pointer.dtype.element_ty.primitive_bitwidth // 8
    return pointer + tl.multiple_of(delta // nbytes, MULTIPLE)


@triton.jit
def flag_pointers(peers: Peers, flag_offset, flag_stride, PEERS: tl.constexpr):
    """Return pointers ``[PEERS]`` to this rank's first flag at every peer; call it long before writing the flags."""
    peer = tl.arange(0, PEERS)
    deltas = tl.load(peers.deltas + peer, mask=peer < peers.world, other=0)
    return peers.head + flag_offset + peer * flag_stride + deltas // 8


@triton.jit
def publish(flags, FIRST: tl.constexpr, world, word):
    """Write ``word`` to this rank's flag at every peer, after all reads and writes of this program.

    flags: of ``flag_pointers``. FIRST: POSTS or ROWS.
    """
    PEERS: tl.constexpr = flags.shape[0]
    inside = tl.arange(0, PEERS) < world
    tl.atomic_xchg(flags + FIRST, tl.zeros([PEERS], tl.int64) + word, mask=inside, sem="release", scope="sys")


@triton.jit
def next_epoch(head):
    """Return the epoch of the pass that begins, -1 if this rank gave up; call it before ``announce`` writes it."""
    before = tl.load(head + EPOCH)
    failed = tl.load(head + PULL_FAILED) + tl.load(head + _COLLECT_FAILED)
    return tl.where((before < 0) | (failed > 0), -1, (before + 1) & 0x7FFFF)


@triton.jit
def pass_tag(epoch, layer, TOP_K: tl.constexpr):
    """Return the upper bits, all but the tokens, of the flag that posts a pass."""
    return (epoch << 20) | (layer.to(tl.int64) << 8) | TOP_K


@triton.jit
def now(head, ASM: tl.constexpr):
    """Return a time in nanoseconds that all threads agree on; without ``ASM`` a call advances it by a microsecond."""
    if ASM:
        tl.atomic_max(head + _CLOCK, globaltimer(), sem="relaxed")
        return tl.atomic_add(head + _CLOCK, tl.zeros([], tl.int64), sem="relaxed")
    return tl.atomic_add(head + _CLOCK, tl.full([], 1000, tl.int64), sem="relaxed")


@triton.jit
def wait_for_flags(head, FIRST: tl.constexpr, first, count, epoch, timeout, PEERS: tl.constexpr, ASM: tl.constexpr):
    """Return the flags ``[PEERS]`` of peers ``first`` to ``first + count - 1``.

    Waits until all are of ``epoch``, one rank gave up, or the timeout, in microseconds, has passed. FIRST: POSTS or
    ROWS.
    """
    peer = tl.arange(0, PEERS)
    inside = peer < count
    pointers = head + FIRST + first + peer
    zeros = tl.zeros([PEERS], tl.int64)
    flags = tl.atomic_add(pointers, zeros, mask=inside, sem="acquire", scope="sys")
    waiting = tl.max((inside & ((flags >> 44) != epoch)).to(tl.int32), 0)
    given_up = tl.max((inside & (flags < 0)).to(tl.int32), 0)
    if (waiting > 0) & (given_up == 0):
        start = now(head, ASM)
        elapsed = start - start
        while (waiting > 0) & (given_up == 0) & (elapsed <= timeout.to(tl.int64) * 1000):
            polls = 0
            # Reading the clock is one more memory access, so it is read rarely.
            while (waiting > 0) & (given_up == 0) & (polls < 32):
                flags = tl.atomic_add(pointers, zeros, mask=inside, sem="acquire", scope="sys")
                waiting = tl.max((inside & ((flags >> 44) != epoch)).to(tl.int32), 0)
                given_up = tl.max((inside & (flags < 0)).to(tl.int32), 0)
                polls += 1
            elapsed = now(head, ASM) - start
    return flags


@triton.jit
def _fault(flag, epoch):
    """Return what is wrong with a flag that should be of this epoch."""
    return tl.where(flag < 0, _GAVE_UP, tl.where((flag >> 44) != epoch, LATE, _OTHER_CALL))


@triton.jit
def report(peers: Peers, FAILED: tl.constexpr, peer, reason, flag, expected):
    """Record that this rank gives up, for the next kernels and for the host; only the first reason is recorded.

    FAILED: the word of ``head`` for the phase that failed. flag, expected: what was read and what it should be.
    """
    head = peers.head
    code = reason + FAILED * 256 + peer * 65536
    before = tl.atomic_cas(head + _STATUS, tl.zeros([], tl.int64), code.to(tl.int64), sem="relaxed")
    if before == 0:
        tl.store(head + _STATUS + 1, flag)
        tl.store(head + _STATUS + 2, expected)
        host = tl.load(peers.deltas + peers.world).to(tl.pointer_type(tl.int64))
        tl.store(host, code.to(tl.int64))
    tl.store(head + FAILED, tl.full([], 1, tl.int64))


@triton.jit
def check_flags(peers: Peers, FAILED: tl.constexpr, flags, bad, epoch, expected):
    """Return whether no flag is ``bad [PEERS]``; otherwise this rank gives up and reports the first bad one."""
    PEERS: tl.constexpr = flags.shape[0]
    peer = tl.arange(0, PEERS)
    bad &= peer < peers.world
    fine = tl.max(bad.to(tl.int32), 0) == 0
    if not fine:
        first = tl.min(tl.where(bad, peer, PEERS), 0)
        flag = tl.sum(tl.where(peer == first, flags, 0), 0)
        report(peers, FAILED, first, _fault(flag, epoch), flag, expected)
    return fine


@triton.jit
def _send_routing(
    routing: RouterOutput, expert_map: ExpertMapArgs, sent: TokenRows, assignment, inside, rank, TOP_K: tl.constexpr
):
    """Write the physical id of each ``assignment [N]``, and its weight if it is sent, and count its expert.

    A physical id is -1 for an id of -1, and -2 for any other id that is no expert.
    """
    token = (assignment // TOP_K).to(tl.int64)
    # As int64, a large id does not wrap to a small one, and no unsigned id is -1.
    pointers = routing.ids + token * routing.id_stride + assignment % TOP_K
    expert_id = tl.load(pointers, mask=inside, other=-1).to(tl.int64)
    is_valid = (expert_id >= 0) & (expert_id < expert_map.num_experts)
    expert = tl.where(is_valid, expert_id, 0)
    if expert_map.max_replicas == 1:
        # Without replicas there is one load less to wait for.
        physical_id = tl.load(expert_map.physical_ids + expert)
    else:
        replica = (assignment // TOP_K + rank) % tl.load(expert_map.replica_counts + expert)
        physical_id = tl.load(expert_map.physical_ids + expert * expert_map.max_replicas + replica)
    physical_id = tl.where(is_valid, physical_id, tl.where(expert_id == -1, -1, -2))
    tl.store(sent.ids + assignment, physical_id, mask=inside)
    if sent.weights is not None:
        pointers = routing.weights + token * routing.weight_stride + assignment % TOP_K
        weight = tl.load(pointers, mask=inside, other=0.0)
        tl.store(sent.weights + assignment, weight.to(tl.float32), mask=inside)
    if tl.load(expert_map.recording) != 0:
        ones = tl.full(expert.shape, 1, tl.int64)
        tl.atomic_add(expert_map.load + expert, ones, mask=is_valid, sem="relaxed")


@triton.jit
def announce(head, flags, epoch, count, layer, world, TOP_K: tl.constexpr):
    """Post, in the last program that gets here, a pass of ``count`` assignments to every peer.

    flags: of ``flag_pointers``. epoch: of ``next_epoch``, in every program.
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
    token,
    routing: RouterOutput,
    expert_map: ExpertMapArgs,
    source: SourceTokens,
    sent: TokenRows,
    rank,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Write one token, of at most BLOCK columns, and its physical ids to ``sent``.

    FORMAT: the ``CodeFormat`` of the token's codes; None: the token is written in the dtype of ``sent.x``.
    """
    k = tl.arange(0, BLOCK_K)
    assignment = token * TOP_K + k
    inside = (k < TOP_K) & (assignment < routing.count)
    _send_routing(routing, expert_map, sent, assignment, inside, rank, TOP_K)
    row = token.to(tl.int64) + tl.arange(0, 1)
    column = tl.arange(0, BLOCK)
    tokens = routing.count // TOP_K
    rows = InputRows(x=source.x, index=None, weights=None, rows=tokens, columns=source.columns, stride=source.stride)
    value = load_rows(rows, row, column)
    padded_columns = source.padded_columns
    if FORMAT is not None:
        out = CodeRows(
            codes=sent.x,
            scales=sent.scale,
            rows=tokens,
            columns=padded_columns,
            groups=source.groups,
            scale_stride=None,
        )
        store_codes(value, out, row, column, 0, None, FORMAT)
    else:
        inside = (row < tokens)[:, None] & (column < padded_columns)[None, :]
        pointers = sent.x + row[:, None] * padded_columns + column[None, :]
        tl.store(pointers, value.to(sent.x.dtype.element_ty), mask=inside)


# Arguments that differ between passes, layers and ranks.
_COUNTS = (
    "layer",
    "timeout",
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
    peers: Peers,
    ids,
    weights,
    expert_map: ExpertMapArgs,
    sent: TokenRows,
    count,
    id_stride,
    weight_stride,
    layer,
    rank,
    flag_offset,
    flag_stride,
    TOP_K: tl.constexpr,
    PEERS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the physical ids, and weights if they are sent, of ``count`` assignments, and post the pass to every peer.

    ids to weight_stride: as in ``RouterOutput``. The previous kernel has written the tokens.
    """
    pdl_wait(PDL)
    flags = flag_pointers(peers, flag_offset, flag_stride, PEERS)
    epoch = next_epoch(peers.head)
    routing = RouterOutput(ids=ids, weights=weights, count=count, id_stride=id_stride, weight_stride=weight_stride)
    assignment = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _send_routing(routing, expert_map, sent, assignment, assignment < count, rank, TOP_K)
    announce(peers.head, flags, epoch, count, layer, peers.world, TOP_K)


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=("ids", "weights"))
def send_kernel(
    peers: Peers,
    ids,
    weights,
    expert_map: ExpertMapArgs,
    source: SourceTokens,
    sent: TokenRows,
    count,
    id_stride,
    weight_stride,
    layer,
    rank,
    flag_offset,
    flag_stride,
    TOP_K: tl.constexpr,
    PEERS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the tokens, and do what ``post_kernel`` does: each program for one token, of at most BLOCK columns.

    FORMAT: as in ``send_token``.
    """
    pdl_wait(PDL)
    flags = flag_pointers(peers, flag_offset, flag_stride, PEERS)
    epoch = next_epoch(peers.head)
    routing = RouterOutput(ids=ids, weights=weights, count=count, id_stride=id_stride, weight_stride=weight_stride)
    send_token(tl.program_id(0), routing, expert_map, source, sent, rank, TOP_K, BLOCK_K, BLOCK, FORMAT)
    announce(peers.head, flags, epoch, count, layer, peers.world, TOP_K)


@triton.jit
def local_slots_of(physical_id, local_slots, rank):
    """Return the local slot of each physical id, and whether it is one of this rank."""
    slot = physical_id - rank * local_slots
    is_local = (physical_id >= 0) & (slot >= 0) & (slot < local_slots)
    return slot, is_local


@triton.jit
def _posted_tokens(peers: Peers, peer, layer, bound, timeout, TOP_K: tl.constexpr, ASM: tl.constexpr):
    """Return the number of tokens, int64, that ``peer`` posts; 0 if this rank has given up or gives up here."""
    epoch = tl.load(peers.head + EPOCH)
    tokens = tl.zeros([], tl.int64)
    if epoch >= 0:
        flag = tl.sum(wait_for_flags(peers.head, POSTS, peer, 1, epoch, timeout, 1, ASM), 0)
        tag = pass_tag(epoch, layer, TOP_K)
        posted = flag & 0xFFFFFF
        if ((flag >> 24) == tag) & (posted <= bound):
            tokens = posted
        else:
            report(peers, PULL_FAILED, peer, _fault(flag, epoch), flag, tag)
    return tokens


@triton.jit
def _copy_token(
    sent: TokenRows,
    pulled: TokenRows,
    delta,
    token,
    row,
    words,
    groups,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Copy ``token`` of the peer that is ``delta`` bytes away to ``row`` of ``pulled``; see ``pull_kernel``."""
    source = peer_pointer(sent.x, delta, 16)
    for step in tl.static_range(STEPS):
        word = step * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(source + token * words + word, mask=word < words)
        tl.store(pulled.x + row * words + word, value, mask=word < words)
    if pulled.scale is not None:
        group = tl.arange(0, BLOCK_G)
        pointers = peer_pointer(sent.scale, delta, 64) + token * groups + group
        tl.store(pulled.scale + row * groups + group, tl.load(pointers, mask=group < groups), mask=group < groups)


@triton.jit(do_not_specialize=_COUNTS)
def pull_kernel(
    peers: Peers,
    sent: TokenRows,
    pulled: TokenRows,
    words,
    groups,
    bound,
    local_slots,
    layer,
    timeout,
    rank,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    COPY_ALL: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy the tokens of every rank that have a local assignment, and write the local slots of all assignments.

    Program (p, r) copies every num_programs(0)-th token of a rank. sent: with ``x [B, words]``, of this rank. pulled:
    ``[W * B, .]`` rows; ids: the local slot of each assignment, -1 for assignments of other ranks. Rows of tokens
    without a local assignment are not written, unless COPY_ALL: tokens are copied before their ids have arrived, which
    saves a round trip.
    """
    pdl_wait(PDL)
    # Local tokens last, and each rank begins with another peer.
    peer = (tl.program_id(1) + rank + 1) % peers.world
    delta = tl.load(peers.deltas + peer)
    tokens = _posted_tokens(peers, peer, layer, bound, timeout, TOP_K, ASM)
    k = tl.arange(0, BLOCK_K)
    token = tl.program_id(0).to(tl.int64)
    while token < bound:
        # A bound, since Triton's interpreter takes no mask that was combined with a scalar.
        inside = k < tl.where(token < tokens, TOP_K, 0)
        physical_id = tl.load(peer_pointer(sent.ids, delta, 64) + token * TOP_K + k, mask=inside, other=-1)
        slot, is_local = local_slots_of(physical_id, local_slots, rank)
        row = peer * bound + token
        tl.store(pulled.ids + row * TOP_K + k, tl.where(is_local, slot, -1), mask=k < TOP_K)
        if pulled.weights is not None:
            weight = tl.load(peer_pointer(sent.weights, delta, 64) + token * TOP_K + k, mask=inside, other=0.0)
            tl.store(pulled.weights + row * TOP_K + k, weight, mask=k < TOP_K)
        if (token < tokens) & (COPY_ALL | (tl.max(is_local.to(tl.int32), 0) > 0)):
            _copy_token(sent, pulled, delta, token, row, words, groups, BLOCK, STEPS, BLOCK_G)
        token += tl.num_programs(0)


@triton.jit
def wait_for_rows(peers: Peers, epoch, timeout, PEERS: tl.constexpr, ASM: tl.constexpr):
    """Return whether every rank did its part of pass ``epoch``; waits as ``wait_for_flags`` does."""
    flags = wait_for_flags(peers.head, ROWS, 0, peers.world, epoch, timeout, PEERS, ASM)
    return check_flags(peers, _COLLECT_FAILED, flags, (flags >> 44) != epoch, epoch, epoch << 20)


_NO_ROW = tl.constexpr(-(1 << 62))  # offset of a missing row


@triton.jit
def _product(value, factor, FUSING: tl.constexpr):
    """Return the product rounded to float32, also where the compiler fuses multiplications and additions (FUSING)."""
    if FUSING:
        both, _ = tl.broadcast(factor, value)
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [value, both], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return value * factor


@triton.jit
def _weighted_sum(
    rows, offset, factor, index, column, inside, COUNT: tl.constexpr, COLUMNS: tl.constexpr, FUSING: tl.constexpr
):
    """Return the float32 sum of ``factor`` times the rows at ``offset``, in the order of ``index``.

    offset, factor, index: ``[N]``, of which ``index`` 0 to COUNT - 1 are added. column, inside: ``[COLUMNS.size]``.
    Offsets are divided by 16 where COLUMNS.aligned, so that the compiler knows that 16 divides them. A missing row
    counts as zeros, times its factor, 0 or NaN.
    """
    BLOCK: tl.constexpr = COLUMNS.size
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(COUNT):
        row = tl.sum(tl.where(index == i, offset, 0), 0)
        # The load is unconditional: a conditional one would have to finish before the next one starts.
        pointers = rows + tl.where(row == _NO_ROW, 0, row) * (16 if COLUMNS.aligned else 1) + column
        value = tl.load(pointers) if COLUMNS.full else tl.load(pointers, mask=inside, other=0.0)
        value = tl.where(row == _NO_ROW, 0.0, value.to(tl.float32))
        total = total + _product(value, tl.sum(tl.where(index == i, factor, 0.0), 0), FUSING)
    return total


@triton.jit(do_not_specialize=_COUNTS)
def reduce_kernel(
    rows,
    slots,
    weights,
    sums,
    deltas,
    bound,
    width,
    rank,
    world,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    PUSH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the weighted sum of this rank's rows of each pulled token, in slot order, rounded once.

    rows: ``[R, width]``. slots: int64 ``[W * B, TOP_K]`` and weights, the same shape or None for ones: token t of rank
    r is in line ``r * bound + t``. sums: ``[W * B, width]``, of the same lines; with PUSH in the memory of rank r, line
    ``rank * bound + t``. Nothing is written for tokens without a local assignment, nor to ranks without tokens.
    Compiled without fused multiply-adds.
    """
    pdl_wait(PDL)
    column = tl.program_id(0) * COLUMNS.size + tl.arange(0, COLUMNS.size)
    inside = column < width
    k = tl.arange(0, BLOCK_K)
    index = tl.program_id(1)
    while index < bound * world:
        # Consecutive programs serve different ranks, so that remote and local writes overlap throughout.
        peer = index % world
        token = index // world
        line = (peer * bound + token).to(tl.int64)
        slot = tl.load(slots + line * TOP_K + k, mask=k < TOP_K, other=-1)
        if tl.max(slot, 0) >= 0:
            factor = tl.full([BLOCK_K], 1.0, tl.float32)
            if weights is not None:
                factor = tl.load(weights + line * TOP_K + k, mask=k < TOP_K, other=0.0)
            factor = tl.where(slot >= 0, factor, tl.where(slot == -1, 0.0, float("nan")))
            offset = tl.where(slot >= 0, slot * width // (16 if COLUMNS.aligned else 1), _NO_ROW)
            total = _weighted_sum(rows, offset, factor, k, column, inside, TOP_K, COLUMNS, False)
            target = sums
            if PUSH:
                line = rank.to(tl.int64) * bound + token
                target = peer_pointer(sums, tl.load(deltas + peer), 16)
            tl.store(target + line * width + column, total.to(sums.dtype.element_ty), mask=inside)
        index += tl.num_programs(1)


@triton.jit
def _sum_of_ranks(
    buffers: CombineBuffers,
    ranks: RankRows,
    physical_id,
    token,
    column,
    complete,
    PEERS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PUSH: tl.constexpr,
    FUSING: tl.constexpr,
):
    """Return the sum, in the order of ranks, of what ``reduce_kernel`` wrote for a token; see ``combine_token``."""
    peer = tl.arange(0, PEERS)
    is_at_peer = (physical_id >= 0)[:, None] & ((physical_id // ranks.local_slots)[:, None] == peer[None, :])
    present = (tl.max(is_at_peer.to(tl.int32), 0) > 0) & complete
    offset = (peer * ranks.bound + token) * buffers.width
    if not PUSH:
        delta = tl.load(ranks.deltas + peer, mask=present, other=0)
        nbytes: tl.constexpr = buffers.rows.dtype.element_ty.primitive_bitwidth // 8
        offset = delta // nbytes + (ranks.rank * ranks.bound + token) * buffers.width
    valid = (tl.min(physical_id, 0) >= -1) & complete
    factor = tl.where(valid, tl.where(present, 1.0, 0.0), float("nan"))
    offset = tl.where(present, offset // (16 if COLUMNS.aligned else 1), _NO_ROW)
    return _weighted_sum(buffers.rows, offset, factor, peer, column, column < buffers.width, PEERS, COLUMNS, FUSING)


@triton.jit
def _sum_of_rows(
    buffers: CombineBuffers,
    assignments: Assignments,
    ranks: RankRows,
    physical_id,
    token,
    column,
    complete,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    FUSING: tl.constexpr,
):
    """Return the weighted sum, in slot order, of the rows of a token's assignments; see ``combine_token``."""
    k = tl.arange(0, BLOCK_K)
    # Not ``(physical_id >= 0) & complete``: Triton's interpreter takes no mask that was combined with a scalar.
    present = tl.where(complete, physical_id, -1) >= 0
    offset = (token * TOP_K + k) * buffers.width
    if assignments.slots is not None:
        delta = tl.load(ranks.deltas + tl.maximum(physical_id, 0) // ranks.local_slots)
        pointers = assignments.slots + delta // 8 + (ranks.rank * ranks.bound + token) * TOP_K + k
        slot = tl.load(pointers, mask=present, other=-2)
        present &= slot >= 0
        nbytes: tl.constexpr = buffers.rows.dtype.element_ty.primitive_bitwidth // 8
        offset = delta // nbytes + slot * buffers.width
    factor = tl.full([BLOCK_K], 1.0, tl.float32)
    if assignments.weights is not None:
        pointers = assignments.weights + token * assignments.weight_stride + k
        factor = tl.load(pointers, mask=k < TOP_K, other=0.0).to(tl.float32)
    factor = tl.where(present, factor, tl.where((physical_id == -1) & complete, 0.0, float("nan")))
    offset = tl.where(present, offset // (16 if COLUMNS.aligned else 1), _NO_ROW)
    return _weighted_sum(buffers.rows, offset, factor, k, column, column < buffers.width, TOP_K, COLUMNS, FUSING)


@triton.jit
def combine_token(
    buffers: CombineBuffers,
    assignments: Assignments,
    ranks: RankRows,
    token,
    column,
    complete,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PEERS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUMS: tl.constexpr,
    PUSH: tl.constexpr,
    FUSING: tl.constexpr,
):
    """Write the columns ``column [COLUMNS.size]`` of one token's sum as in ``collect_kernel``; NaN unless ``complete``.

    FUSING: the kernel is compiled with fused multiply-adds, which the sum must not use.
    """
    k = tl.arange(0, BLOCK_K)
    # One load for all assignments: a round trip to the peers takes long.
    physical_id = tl.load(assignments.sent_ids + token * TOP_K + k, mask=k < TOP_K, other=-1)
    if SUMS:
        total = _sum_of_ranks(buffers, ranks, physical_id, token, column, complete, PEERS, COLUMNS, PUSH, FUSING)
    else:
        total = _sum_of_rows(
            buffers, assignments, ranks, physical_id, token, column, complete, TOP_K, BLOCK_K, COLUMNS, FUSING
        )
    inside = column < buffers.width
    if buffers.shared is not None:
        pointers = buffers.shared + token * buffers.shared_stride + column
        total = total + tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    tl.store(buffers.out + token * buffers.width + column, total.to(buffers.out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=("slots", "weights"))
def collect_kernel(
    peers: Peers,
    buffers: CombineBuffers,
    slots,
    weights,
    sent_ids,
    tokens,
    bound,
    weight_stride,
    local_slots,
    timeout,
    rank,
    flag_offset,
    flag_stride,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PEERS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUMS: tl.constexpr,
    PUSH: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the weighted sums of this rank's ``tokens``, from the results of all ranks.

    slots, weights, sent_ids: ``Assignments``. SUMS: the rows are sums of ``reduce_kernel``, with its PUSH; those of
    ranks with an assignment of the token are added, in the order of ranks. Formulas, the order of additions, and the
    meaning of -1 and of invalid ids are those of ``weighted_sum_kernel``; everything is NaN if a rank gave up. Compiled
    without fused multiply-adds.
    """
    pdl_wait(PDL)
    epoch = tl.load(peers.head + EPOCH)
    failed = tl.load(peers.head + PULL_FAILED)
    complete = (epoch >= 0) & (failed == 0)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        flags = flag_pointers(peers, flag_offset, flag_stride, PEERS)
        publish(flags, ROWS, peers.world, tl.where(complete, epoch << 44, -1))
    if complete:
        complete = wait_for_rows(peers, epoch, timeout, PEERS, ASM)
    column = tl.program_id(0) * COLUMNS.size + tl.arange(0, COLUMNS.size)
    token = tl.program_id(1).to(tl.int64)
    assignments = Assignments(sent_ids=sent_ids, slots=slots, weights=weights, weight_stride=weight_stride)
    ranks = RankRows(deltas=peers.deltas, bound=bound, local_slots=local_slots, rank=rank)
    while token < tokens:
        combine_token(
            buffers, assignments, ranks, token, column, complete, TOP_K, BLOCK_K, PEERS, COLUMNS, SUMS, PUSH, False
        )
        token += tl.num_programs(1)
