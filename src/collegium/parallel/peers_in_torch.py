"""The steps between ranks in torch, for a CPU whose processes map the same files, and what goes wrong in any of them.

Letters as in ``peers.py``. The words of a rank's head are those of ``kernels/peer.py``.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from ..errors import RankError
from .rendezvous import LOOK

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from .expert_map import ExpertMap
    from .peers import PeerBuffers, Sent

__all__ = [
    "EPOCH",
    "POSTS",
    "STATUS",
    "all_came",
    "lines_of",
    "pull_rank",
    "raise_status",
    "release",
    "rows_of",
    "tell",
]

# Words of the head; kernels/peer.py has the same.
POSTS, _ROWS, EPOCH, _PULL_FAILED, _COLLECT_FAILED, STATUS = 0, 64, 128, 131, 132, 133
_PHASES = {_PULL_FAILED: "dispatch", _COLLECT_FAILED: "combine"}
_LATE, _OTHER_CALL, _GAVE_UP = 1, 2, 3


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
        for flag in (flags + place for flags in (POSTS, _ROWS) for place in places):
            head[flag : flag + 1].copy_(word, non_blocking=True)


def tell(peers: PeerBuffers, flags: int, word: int) -> None:
    """Write ``word`` to the flag of this rank at every peer."""
    for rank in range(peers.world):
        peers.at(peers.head, rank)[flags + peers.rank] = word


def _seen(peers: PeerBuffers, flags: int, rank: int, phase: str) -> int:
    """Return the flag of ``rank`` once it is of this pass; RankError, which every peer is told, where it never is."""
    epoch, started = int(peers.head[EPOCH]), time.monotonic()
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


def _give_up(peers: PeerBuffers, what: int, phase: str, rank: int, seen: int, wanted: int = 0) -> None:
    peers.head[EPOCH] = -1
    number = next(key for key, name in _PHASES.items() if name == phase)
    peers.head[STATUS : STATUS + 3] = torch.tensor([what | number << 8 | rank << 16, seen, wanted])
    for flags in (POSTS, _ROWS):
        tell(peers, flags, -1)
    heads = [peers.at(peers.head, place) for place in range(peers.world)]
    raise_status(heads, peers.ranks, peers.rank, peers.gone)


def pull_rank(peers: PeerBuffers, rank: int, sent: Sent, own: Sent, table: ExpertMap) -> None:
    """Do what ``pull`` says for the tokens of one rank."""
    top_k = sent.ids.shape[1]
    seen, tag = _seen(peers, POSTS, rank, "dispatch"), peers.layer << 8 | top_k
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


def all_came(peers: PeerBuffers) -> None:
    """Tell every peer that what it is to have is there, and wait until all told this rank."""
    tell(peers, _ROWS, int(peers.head[EPOCH]) << 44)
    for rank in range(peers.world):
        _seen(peers, _ROWS, rank, "combine")


def rows_of(peers: PeerBuffers, places: Tensor, rows: Tensor, slots: Tensor, table: ExpertMap) -> Tensor:
    """Return the row of each of this rank's assignments ``[T * K, H]``; what no rank computed is not written."""
    first, tokens = peers.rank * peers.bound, places.shape[0]
    places = places.reshape(-1)
    made = rows.new_empty(places.numel(), rows.shape[1])
    for rank in range(peers.world):
        asked = (places >= 0).logical_and(places // table.width == rank).nonzero().squeeze(1)
        own = peers.at(slots, rank)[first : first + tokens].reshape(-1)[asked]
        made[asked] = peers.at(rows, rank)[own]
    return made


def lines_of(peers: PeerBuffers, places: Tensor, table: ExpertMap) -> Tensor:
    """Return ``[T, W]``, the line of each rank's sum of this rank's tokens; -1 for none, -2 for ids of nobody."""
    rank = torch.arange(peers.world, device=places.device)
    goes = ((places // table.width)[:, :, None] == rank).any(dim=1)
    line = torch.arange(places.shape[0], device=places.device)[:, None] + rank * peers.bound
    lost = (places < -1).any(dim=1, keepdim=True)
    return torch.where(lost, -2, torch.where(goes, line, -1))
