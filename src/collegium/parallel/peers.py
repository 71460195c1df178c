"""Host side of ``kernels/peer.py``: what one pass knows of its peers, and the three steps, in torch and as kernels.

Shape letters: T tokens of this rank, B the most tokens of a rank, W ranks, K experts per token, H width, G scales.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..errors import RankError
from ..ops.weighted_sum import weighted_sum
from ..runtime.launch import dense_rows, launch, overlaps, power_at_least
from .meeting import LOOK

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from ..types import Routing
    from .expert_map import ExpertMap

__all__ = [
    "HEAD_BYTES",
    "MOST_PEERS",
    "Peers",
    "Returned",
    "Sent",
    "collect",
    "post",
    "pull",
    "raise_status",
    "release",
]

HEAD_BYTES = 2048
MOST_PEERS = 64
# Words of the head; kernels/peer.py has the same.
_POSTS, _ROWS, _EPOCH, _PULL_FAILED, _COLLECT_FAILED, STATUS = 0, 64, 128, 131, 132, 133
_PHASES = {_PULL_FAILED: "dispatch", _COLLECT_FAILED: "combine"}
_LATE, _OTHER_CALL, _GAVE_UP = 1, 2, 3
_FEW = 8  # tokens of a rank that are copied to every other one
_PROGRAMS = 1024  # some eight to a multiprocessor: enough loads on their way to fill NVLink


@dataclass(frozen=True, kw_only=True, slots=True)
class Peers:
    """What a pass of layer number ``layer`` knows. bound: B. seconds: how long a rank waits for another one.

    head: ``[256]`` int64, the flags and counters of this rank. deltas: ``[W + 1]`` int64, bytes from this rank's block
    to each peer's, and the address of the host's word. blocks: the bytes of every rank's block, for torch. ranks: as
    torch's default group numbers them. alone: every peer is this rank itself, which is how kernels are compiled
    without the others. gone: asks for the places of those whose process has ended.
    """

    rank: int
    ranks: tuple[int, ...]
    layer: int
    bound: int
    seconds: float
    head: Tensor
    deltas: Tensor
    blocks: tuple[Tensor, ...] = ()
    alone: bool = False
    gone: Callable[[], tuple[int, ...]] = tuple

    @property
    def world(self) -> int:
        """W."""
        return len(self.ranks)

    def at(self, own: Tensor, rank: int) -> Tensor:
        """Return what ``rank`` has where this rank has the contiguous ``own``."""
        start = own.data_ptr() - self.blocks[self.rank].data_ptr()
        return self.blocks[rank][start : start + own.numel() * own.element_size()].view(own.dtype).view(own.shape)

    @property
    def where(self) -> dict[str, int]:
        """Return the flag a rank writes at each peer: ``own + peer * step``."""
        return {"own": 0, "step": 1} if self.alone else {"own": self.rank, "step": 0}


class Sent(NamedTuple):
    """Tokens and where they go: x ``[B, C]``, scale ``[B, G]`` or None, ids ``[B, K]`` int32, weights or None.

    ids: what peers read of a rank are places (``ExpertMap.choose``), what it pulls are slots here, or -1.
    """

    x: Tensor
    scale: Tensor | None
    ids: Tensor
    weights: Tensor | None


class Returned(NamedTuple):
    """What peers read of this rank's experts: rows ``[W * B * K, H]``, and slots ``[W * B, K]`` int64, whose."""

    rows: Tensor
    slots: Tensor


def post(peers: Peers, sent: Sent, routing: Routing, table: ExpertMap) -> None:
    """Write ids, and weights, where peers read them, and tell every peer that this pass began.

    The tokens are in ``sent`` already. Counts the ids in ``table.load`` where that is asked for.
    """
    ids, (tokens, top_k) = routing.topk_ids, routing.topk_ids.shape
    if not sent.x.is_cuda and peers.blocks:
        sent.ids[:tokens] = table.choose(ids).to(torch.int32)
        if sent.weights is not None:
            sent.weights[:tokens] = routing.topk_weights
        table.record(ids)
        epoch = int(peers.head[_EPOCH])
        ended = epoch < 0
        peers.head[_EPOCH] = epoch = -1 if ended else (epoch + 1) & 0x7FFFF
        _tell(peers, _POSTS, -1 if ended else epoch << 44 | peers.layer << 32 | top_k << 24 | tokens)
        return
    from ..kernels.peer import post_kernel

    ids = dense_rows(ids)
    weights = ids if sent.weights is None else dense_rows(routing.topk_weights)
    block = min(1024, power_at_least(tokens * top_k, 32))
    args = (
        peers.head, ids, weights, sent.ids, sent.ids if sent.weights is None else sent.weights,
        table.places, table.copies, table.load, table.recording, peers.deltas,
        tokens * top_k, ids.stride(0), weights.stride(0), table.num_experts, table.places.shape[1],
        peers.layer, peers.rank, peers.where["own"], peers.where["step"], peers.world,
    )  # fmt: skip
    constants = {"TOP_K": top_k, "PEERS": power_at_least(peers.world), "BLOCK": block}
    constants |= {"WEIGHTS": sent.weights is not None, "PDL": overlaps(sent.x)}
    launch(post_kernel, (max(1, -(-tokens * top_k // block)),), args, constants, num_warps=max(1, min(4, block // 256)))


def pull(peers: Peers, sent: Sent, own: Sent, table: ExpertMap) -> None:
    """Write ``own``, of W * B rows: every rank's tokens that have an assignment here, and the local slots of all ids.

    An assignment that is elsewhere, or of nobody, gets -1. On a CPU a rank that is late, or is in another call, is a
    RankError; on a GPU it is found by ``raise_status``.
    """
    top_k = sent.ids.shape[1]
    if not sent.x.is_cuda and peers.blocks:
        for rank in range(peers.world):
            _pull_rank(peers, rank, sent, own, table)
        return
    from ..kernels.peer import pull_kernel

    sent_x, x = _words(sent.x), _words(own.x)
    words, groups = x.shape[1], 1 if own.scale is None else own.scale.shape[1]
    block = min(4096, power_at_least(words, 32))
    args = (
        peers.head, sent_x, sent.ids if sent.scale is None else sent.scale, sent.ids,
        sent.ids if sent.weights is None else sent.weights,
        x, own.ids if own.scale is None else own.scale, own.ids, own.ids if own.weights is None else own.weights,
        peers.deltas, words, groups, peers.bound, table.width,
        peers.layer, _microseconds(peers), peers.rank, peers.world,
    )  # fmt: skip
    constants = {"TOP_K": top_k, "BLOCK_K": power_at_least(top_k), "BLOCK": block, "STEPS": -(-words // block)}
    constants |= {"BLOCK_G": power_at_least(groups), "SCALES": own.scale is not None}
    constants |= {"WEIGHTS": own.weights is not None, "ALL": peers.bound <= _FEW, "ASM": sent.x.is_cuda}
    constants |= {"PDL": overlaps(sent.x)}
    grid = (min(peers.bound, max(1, _PROGRAMS // peers.world)), peers.world)
    launch(pull_kernel, grid, args, constants, num_warps=4 if block >= 512 else 1)


def collect(
    peers: Peers,
    sent: Sent,
    returned: Returned,
    weights: Tensor | None,
    table: ExpertMap,
    out: Tensor,
    shared: Tensor | None = None,
) -> Tensor:
    """Write ``out [T, H]`` and return it: what ``weighted_sum`` makes of the rows that all ranks computed.

    weights: ``[T, K]`` floating, or None for ones. shared: ``[T, H]`` floating, added last.
    """
    (tokens, width), top_k = out.shape, sent.ids.shape[1]
    if not out.is_cuda and peers.blocks:
        places = sent.ids[:tokens]
        rows, most = _rows_of(peers, places, returned, table), table.width * peers.world
        return weighted_sum(rows, places, weights, out.dtype, shared=shared, out=out, experts=most)
    from ..kernels.peer import collect_kernel

    factors = sent.ids if weights is None else dense_rows(weights)
    added = returned.rows if shared is None else dense_rows(shared)
    block = min(power_at_least(width, 32), 1024 if tokens >= 64 else 256)
    args = (
        peers.head, returned.rows, returned.slots, sent.ids, factors, added, out, peers.deltas,
        tokens, peers.bound, width, factors.stride(0), added.stride(0), table.width,
        _microseconds(peers), peers.rank, peers.where["own"], peers.where["step"], peers.world,
    )  # fmt: skip
    constants = {"TOP_K": top_k, "BLOCK_K": power_at_least(top_k), "PEERS": power_at_least(peers.world), "BLOCK": block}
    constants |= {
        "WEIGHTS": weights is not None,
        "SHARED": shared is not None,
        "EVEN": width % 16 == 0,
        "FULL": width % block == 0,
    }
    constants |= {"ASM": out.is_cuda, "PDL": overlaps(out)}
    columns = -(-width // block)
    grid = (columns, max(1, min(tokens, _PROGRAMS // columns)))
    warps = max(1, min(4, block // 256))
    launch(collect_kernel, grid, args, constants, num_warps=warps, enable_fp_fusion=False)
    return out


def raise_status(
    heads: Sequence[Tensor], ranks: tuple[int, ...], own: int, ask: Callable[[], tuple[int, ...]] = tuple
) -> None:
    """Raise the RankError that the head of rank ``own`` of ``heads`` notes; return where it notes none.

    Where a peer gave up before, for another rank, its head says why. ask: for the places of those whose process has
    ended, who are named whatever was noted.
    """
    code, seen, wanted = heads[own][STATUS : STATUS + 3].tolist()
    if not code:
        return
    gone = ask()
    for _ in ranks:
        if gone or code & 255 != _GAVE_UP:
            break
        why = heads[code >> 16][STATUS : STATUS + 3].tolist()
        if not why[0] or why[0] >> 16 == own:
            break
        own, (code, seen, wanted) = code >> 16, why
    what, phase, peer = code & 255, _PHASES[code >> 8 & 255], ranks[code >> 16]
    lost = tuple(ranks[place] for place in gone) or (peer,)
    said = (
        f"rank {', '.join(map(str, lost))} has ended"
        if gone
        else {
            _LATE: f"rank {peer} did not come within the time a rank waits; it ended, hangs or makes other calls",
            _OTHER_CALL: (
                f"rank {peer} is in another call: it brings {seen & 0xFFFFFF} tokens, top-{seen >> 24 & 255}, to layer "
                f"{seen >> 32 & 0xFFF}, while this rank is in layer {wanted >> 8 & 0xFFF}, top-{wanted & 255}; every "
                "rank makes the same calls in the same order, and replays graphs that were captured together"
            ),
            _GAVE_UP: f"rank {peer} gave up before this rank did, and says why",
        }[what]
    )
    raise RankError(
        f"symm_mem {phase} on rank {ranks[own]}: {said}. Output since then is NaN. Ranks that are left may plan anew "
        "(collegium.balance.elastic), or all call renew() of layer.workspaces and go on",
        ranks=lost,
        phase=f"symm_mem {phase}",
    )


def release(head: Tensor, places: Sequence[int], word: Tensor, side: torch.cuda.Stream) -> None:
    """Let kernels of this rank that wait for the ranks at ``places`` give up now.

    The copy engines write ``word``, -1 in pinned memory, to the flags on the stream ``side``: kernels that wait may
    hold every multiprocessor, and giving out pinned memory may wait for them.
    """
    with torch.cuda.stream(side):
        for flag in (flags + place for flags in (_POSTS, _ROWS) for place in places):
            head[flag : flag + 1].copy_(word, non_blocking=True)


def _microseconds(peers: Peers) -> int:
    return min(int(peers.seconds * 1e6), 2**31 - 1)


def _words(x: Tensor) -> Tensor:
    """Return ``x [R, C]`` in the widest words that its rows are made of."""
    size = x.shape[1] * x.element_size()
    return x.view(torch.int32 if size % 4 == 0 else torch.int16 if size % 2 == 0 else torch.uint8)


def _tell(peers: Peers, flags: int, word: int) -> None:
    for rank in range(peers.world):
        peers.at(peers.head, rank)[flags + peers.rank] = word


def _seen(peers: Peers, flags: int, rank: int, phase: str) -> int:
    """Return the flag of ``rank`` once it is of this pass; RankError, which every peer is told, where it never is."""
    epoch, started = int(peers.head[_EPOCH]), time.monotonic()
    look = started + LOOK
    while True:
        seen, now = int(peers.head[flags + rank]), time.monotonic()
        late = now - started > peers.seconds
        if now > look:
            look, late = now + LOOK, late or rank in peers.gone()
        if epoch < 0 or seen < 0 or seen >> 44 == epoch or late:
            break
        time.sleep(2e-5)
    if epoch >= 0 and seen >= 0 and seen >> 44 == epoch:
        return seen
    _give_up(peers, _GAVE_UP if seen < 0 else _LATE, phase, rank, seen)
    raise AssertionError


def _give_up(peers: Peers, what: int, phase: str, rank: int, seen: int, wanted: int = 0) -> None:
    peers.head[_EPOCH] = -1
    number = next(key for key, name in _PHASES.items() if name == phase)
    peers.head[STATUS : STATUS + 3] = torch.tensor([what | number << 8 | rank << 16, seen, wanted])
    for flags in (_POSTS, _ROWS):
        _tell(peers, flags, -1)
    heads = [peers.at(peers.head, place) for place in range(peers.world)]
    raise_status(heads, peers.ranks, peers.rank, peers.gone)


def _pull_rank(peers: Peers, rank: int, sent: Sent, own: Sent, table: ExpertMap) -> None:
    top_k = sent.ids.shape[1]
    seen, tag = _seen(peers, _POSTS, rank, "dispatch"), peers.layer << 8 | top_k
    tokens = seen & 0xFFFFFF
    if seen >> 24 & 0xFFFFF != tag or tokens > peers.bound:
        _give_up(peers, _OTHER_CALL, "dispatch", rank, seen, tag)
    slots = peers.at(sent.ids, rank)[:tokens] - peers.rank * table.width
    slots = torch.where((slots >= 0) & (slots < table.width), slots, -1)
    first = rank * peers.bound
    own.ids[first : first + peers.bound] = -1
    own.ids[first : first + tokens] = slots
    used = (slots >= 0).any(dim=1).nonzero().squeeze(1)
    parts: Mapping[str, tuple[Tensor | None, Tensor | None]] = {
        name: (getattr(sent, name), getattr(own, name)) for name in ("x", "scale", "weights")
    }
    for theirs, ours in parts.values():
        if theirs is not None and ours is not None:
            ours[first + used] = peers.at(theirs, rank)[used]


def _rows_of(peers: Peers, places: Tensor, returned: Returned, table: ExpertMap) -> Tensor:
    """Return the row of each of this rank's assignments ``[T * K, H]``; what no rank computed is not written."""
    _tell(peers, _ROWS, int(peers.head[_EPOCH]) << 44)
    for rank in range(peers.world):
        _seen(peers, _ROWS, rank, "combine")
    first, tokens = peers.rank * peers.bound, places.shape[0]
    places = places.reshape(-1)
    made = returned.rows.new_empty(places.numel(), returned.rows.shape[1])
    for rank in range(peers.world):
        asked = (places >= 0).logical_and(places // table.width == rank).nonzero().squeeze(1)
        slots = peers.at(returned.slots, rank)[first : first + tokens].reshape(-1)[asked]
        made[asked] = peers.at(returned.rows, rank)[slots]
    return made
