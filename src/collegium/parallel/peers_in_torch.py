"""The steps of ``peers.py`` in torch, for a CPU whose processes map the same files; and errors of all devices.

Shape letters as in ``peers.py``. Flags and words of a rank's head are those of ``kernels/enums.py``.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from ..errors import RankError
from ..kernels.enums import (
    FAULT_GAVE_UP,
    FAULT_LATE,
    FAULT_OTHER_CALL,
    HEAD_COLLECT_FAILED,
    HEAD_EPOCH,
    HEAD_POSTS,
    HEAD_PULL_FAILED,
    HEAD_ROWS,
    HEAD_STATUS,
)
from ..ops.weighted_sum import weighted_sum
from .rendezvous import LOOK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from ..types import Routing
    from .expert_map import ExpertMap
    from .peers import PeerBuffers, Returned, TokenBuffers

__all__ = ["abort_waiting_kernels", "collect", "post", "pull", "raise_status", "reduce"]

_PHASES = {HEAD_PULL_FAILED: "dispatch", HEAD_COLLECT_FAILED: "combine"}


def raise_status(
    heads: Sequence[Tensor], ranks: tuple[int, ...], rank: int, dead_ranks: Callable[[], tuple[int, ...]] = tuple
) -> None:
    """Raise the RankError that the head of group rank ``rank`` records; return if it records none.

    If a peer had given up before, because of another rank, its head holds the cause. dead_ranks: returns the group
    ranks whose process has ended; these are named whatever was recorded.
    """
    code, flag, expected = heads[rank][HEAD_STATUS : HEAD_STATUS + 3].tolist()
    if not code:
        return
    dead = dead_ranks()
    for _ in ranks:
        if dead or code & 255 != FAULT_GAVE_UP:
            break
        cause = heads[code >> 16][HEAD_STATUS : HEAD_STATUS + 3].tolist()
        if not cause[0] or cause[0] >> 16 == rank:
            break
        rank = code >> 16
        code, flag, expected = cause
    phase = _PHASES[code >> 8 & 255]
    peer = ranks[code >> 16]
    lost = tuple(ranks[index] for index in dead) or (peer,)
    if dead:
        reason = f"rank {', '.join(map(str, lost))} has ended"
    else:
        reason = _describe_fault(code & 255, peer, flag, expected)
    raise RankError(
        f"symm_mem {phase} on rank {ranks[rank]}: {reason}. Output since then is NaN. Ranks that are left may plan "
        "anew (collegium.balance.elastic), or all call renew() of layer.workspaces and go on",
        ranks=lost,
        phase=f"symm_mem {phase}",
    )


def _describe_fault(fault: int, peer: int, flag: int, expected: int) -> str:
    if fault == FAULT_LATE:
        return f"rank {peer} did not come within the time a rank waits; it ended, hangs or makes other calls"
    if fault == FAULT_OTHER_CALL:
        return (
            f"rank {peer} is in another call: it brings {flag & 0xFFFFFF} tokens, top-{flag >> 24 & 255}, to layer "
            f"{flag >> 32 & 0xFFF}, while this rank is in layer {expected >> 8 & 0xFFF}, top-{expected & 255}; every "
            "rank makes the same calls in the same order, and replays graphs that were captured together"
        )
    return f"rank {peer} gave up before this rank did, and reports the reason"


def abort_waiting_kernels(head: Tensor, ranks: Sequence[int], minus_one: Tensor, stream: torch.cuda.Stream) -> None:
    """Make kernels of this rank that wait for the group ranks ``ranks`` give up now.

    minus_one: a pinned int64 of -1, which the copy engines write to the flags on ``stream``. Kernels that wait may
    occupy every multiprocessor, and allocating pinned memory may wait for them.
    """
    with torch.cuda.stream(stream):
        for flags in (HEAD_POSTS, HEAD_ROWS):
            for rank in ranks:
                head[flags + rank : flags + rank + 1].copy_(minus_one, non_blocking=True)


def _write_flags(peers: PeerBuffers, flags: int, word: int) -> None:
    """Write ``word`` to the flag of this rank at every peer."""
    for rank in range(peers.world):
        peers.at(peers.head, rank)[flags + peers.rank] = word


def _wait_for_flag(peers: PeerBuffers, flags: int, rank: int, phase: str) -> int:
    """Return the flag of ``rank`` once it is of this pass; raise RankError, on every rank, if it never is."""
    epoch = int(peers.head[HEAD_EPOCH])
    started = time.monotonic()
    next_check = started + LOOK
    while True:
        flag = int(peers.head[flags + rank])
        now = time.monotonic()
        late = now - started > peers.timeout
        if now > next_check:
            next_check = now + LOOK
            late = late or rank in peers.dead_ranks()
        if epoch < 0 or flag < 0 or flag >> 44 == epoch or late:
            break
        time.sleep(2e-5)
    if epoch >= 0 and flag >= 0 and flag >> 44 == epoch:
        return flag
    _give_up(peers, FAULT_GAVE_UP if flag < 0 else FAULT_LATE, phase, rank, flag)
    raise AssertionError


def _give_up(peers: PeerBuffers, fault: int, phase: str, rank: int, flag: int, expected: int = 0) -> None:
    """Record the fault, notify every peer, and raise the RankError."""
    peers.head[HEAD_EPOCH] = -1
    failed_word = next(word for word, name in _PHASES.items() if name == phase)
    status = [fault | failed_word << 8 | rank << 16, flag, expected]
    peers.head[HEAD_STATUS : HEAD_STATUS + 3] = torch.tensor(status)
    for flags in (HEAD_POSTS, HEAD_ROWS):
        _write_flags(peers, flags, -1)
    heads = [peers.at(peers.head, index) for index in range(peers.world)]
    raise_status(heads, peers.ranks, peers.rank, peers.dead_ranks)


def post(peers: PeerBuffers, sent: TokenBuffers, routing: Routing, table: ExpertMap) -> None:
    """Perform ``peers.post``."""
    tokens, top_k = routing.topk_ids.shape
    sent.ids[:tokens] = table.choose(routing.topk_ids).to(torch.int32)
    if sent.weights is not None:
        sent.weights[:tokens] = routing.topk_weights
    table.record(routing.topk_ids)
    epoch = int(peers.head[HEAD_EPOCH])
    if epoch < 0:
        peers.head[HEAD_EPOCH] = -1
        _write_flags(peers, HEAD_POSTS, -1)
        return
    epoch = (epoch + 1) & 0x7FFFF
    peers.head[HEAD_EPOCH] = epoch
    _write_flags(peers, HEAD_POSTS, epoch << 44 | peers.layer << 32 | top_k << 24 | tokens)


def pull(peers: PeerBuffers, sent: TokenBuffers, pulled: TokenBuffers, table: ExpertMap) -> None:
    """Perform ``peers.pull``."""
    for rank in range(peers.world):
        _pull_rank(peers, rank, sent, pulled, table)


def _pull_rank(peers: PeerBuffers, rank: int, sent: TokenBuffers, pulled: TokenBuffers, table: ExpertMap) -> None:
    top_k = sent.ids.shape[1]
    flag = _wait_for_flag(peers, HEAD_POSTS, rank, "dispatch")
    expected = peers.layer << 8 | top_k
    tokens = flag & 0xFFFFFF
    if flag >> 24 & 0xFFFFF != expected or tokens > peers.bound:
        _give_up(peers, FAULT_OTHER_CALL, "dispatch", rank, flag, expected)
    slots = peers.at(sent.ids, rank)[:tokens] - peers.rank * table.width
    slots = torch.where((slots >= 0) & (slots < table.width), slots, -1)
    first = rank * peers.bound
    pulled.ids[first : first + peers.bound] = -1
    pulled.ids[first : first + tokens] = slots
    needed = (slots >= 0).any(dim=1).nonzero().squeeze(1)
    for source, target in ((sent.x, pulled.x), (sent.scale, pulled.scale), (sent.weights, pulled.weights)):
        if source is not None and target is not None:
            target[first + needed] = peers.at(source, rank)[needed]


def reduce(peers: PeerBuffers, rows: Tensor, slots: Tensor, weights: Tensor | None, sums: Tensor) -> None:
    """Perform ``peers.reduce``."""
    for rank in range(peers.world):
        tokens = slice(rank * peers.bound, (rank + 1) * peers.bound)
        rank_weights = None if weights is None else weights[tokens]
        partial = weighted_sum(rows, slots[tokens], rank_weights, sums.dtype)
        peers.at(sums, rank)[peers.rank * peers.bound : (peers.rank + 1) * peers.bound] = partial


def collect(
    peers: PeerBuffers,
    sent: TokenBuffers,
    returned: Returned,
    weights: Tensor | None,
    table: ExpertMap,
    out: Tensor,
    shared: Tensor | None,
) -> Tensor:
    """Perform ``peers.collect``."""
    physical_ids = sent.ids[: out.shape[0]]
    _wait_for_all(peers)
    if returned.slots is None:
        slots = _sum_slots(peers, physical_ids, table)
        return weighted_sum(returned.rows, slots, None, out.dtype, shared=shared, out=out)
    rows = _read_rows(peers, physical_ids, returned.rows, returned.slots, table)
    experts = table.width * peers.world
    return weighted_sum(rows, physical_ids, weights, out.dtype, shared=shared, out=out, experts=experts)


def _wait_for_all(peers: PeerBuffers) -> None:
    """Notify every peer that its rows are complete, and wait for the same of every peer."""
    _write_flags(peers, HEAD_ROWS, int(peers.head[HEAD_EPOCH]) << 44)
    for rank in range(peers.world):
        _wait_for_flag(peers, HEAD_ROWS, rank, "combine")


def _read_rows(peers: PeerBuffers, physical_ids: Tensor, rows: Tensor, slots: Tensor, table: ExpertMap) -> Tensor:
    """Return the row of each of this rank's assignments ``[T * K, H]``; rows that no rank computed are undefined."""
    first = peers.rank * peers.bound
    last = first + physical_ids.shape[0]
    ids = physical_ids.reshape(-1)
    collected = rows.new_empty(ids.numel(), rows.shape[1])
    for rank in range(peers.world):
        computed = (ids >= 0).logical_and(ids // table.width == rank).nonzero().squeeze(1)
        row = peers.at(slots, rank)[first:last].reshape(-1)[computed]
        collected[computed] = peers.at(rows, rank)[row]
    return collected


def _sum_slots(peers: PeerBuffers, physical_ids: Tensor, table: ExpertMap) -> Tensor:
    """Return ``[T, W]``, the row of each rank's partial sum; -1 for none, -2 for tokens with invalid ids."""
    rank = torch.arange(peers.world, device=physical_ids.device)
    contributes = ((physical_ids // table.width)[:, :, None] == rank).any(dim=1)
    row = torch.arange(physical_ids.shape[0], device=physical_ids.device)[:, None] + rank * peers.bound
    invalid = (physical_ids < -1).any(dim=1, keepdim=True)
    return torch.where(invalid, -2, torch.where(contributes, row, -1))
