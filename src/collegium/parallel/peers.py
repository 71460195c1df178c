"""Host side of ``kernels/peer.py``: what one pass knows of its peers, and its steps, in torch and as kernels.

Shape letters: T tokens of this rank, B the most tokens of a rank, W ranks, K experts per token, H width, G scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..ops.quantize import REORDERED
from ..ops.rows import QuantizedRows, SourceRows
from ..ops.weighted_sum import weighted_sum
from ..runtime.launch import launch, overlaps, power_at_least, row_contiguous
from .peers_in_torch import EPOCH, POSTS, all_came, lines_of, pull_rank, rows_of, tell

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ..ops.quantize import ActivationFormat
    from ..types import Routing
    from .expert_map import ExpertMap

__all__ = [
    "HEAD_BYTES",
    "MOST_PEERS",
    "PeerBuffers",
    "Returned",
    "Sent",
    "collect",
    "post",
    "prefetch_all",
    "pull",
    "reduce",
    "send",
]

HEAD_BYTES = 2048
MOST_PEERS = 64
# What a GPU is to decide; no bit of the output depends on any of them, and all ranks need the same PUSH.
FEW = 8  # up to so many tokens of a rank are copied to every other one
WASTE = 1 / 16  # and any number, where no more of them than this share are likely to have no expert there
TOGETHER = 128  # up to so many tokens, of which a program each still runs at once, are written and posted by one kernel
PUSH = True  # ranks write sums to their owner, whose reads would be one more way there and back
# Programs that run at once on 132 multiprocessors, by the registers they take; more would come when others have ended.
PULL_PROGRAMS = 1056
REDUCE_PROGRAMS = 1056  # and those that collect sums
COLLECT_PROGRAMS = 792
COLLECT_BLOCK = 1024  # columns of a program from 64 tokens on


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerBuffers:
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

    @property
    def microseconds(self) -> int:
        """How long a rank waits for another one, as kernels count it."""
        return min(int(self.seconds * 1e6), 2**31 - 1)


class Sent(NamedTuple):
    """Tokens and where they go: x ``[B, C]``, scale ``[B, G]`` or None, ids ``[B, K]`` int32, weights or None.

    ids: what peers read of a rank are places (``ExpertMap.choose``), what it pulls are slots here, or -1.
    """

    x: Tensor
    scale: Tensor | None
    ids: Tensor
    weights: Tensor | None


class Returned(NamedTuple):
    """What comes back: rows ``[W * B * K, H]`` that peers read, and slots ``[W * B, K]`` int64, whose.

    slots None: rows are the sums ``[W * B, H]`` that ``reduce`` writes, or, stored, those ``[B * K, H]`` of this rank's
    assignments that the experts of all ranks stored here; kernels alone take these.
    """

    rows: Tensor
    slots: Tensor | None
    stored: bool = False


def send(
    peers: PeerBuffers, x: Tensor, sent: Sent, routing: Routing, table: ExpertMap, form: ActivationFormat, order: int
) -> None:
    """Write ``x [T, H]`` as ``form`` with its columns in ``order`` where peers read it, and post the pass.

    Few tokens are written by the kernel that posts them.
    """
    tokens, (columns, wide) = x.shape[0], (x.shape[1], sent.x.shape[1])
    if tokens > TOGETHER:
        written = QuantizedRows(
            codes=sent.x[:tokens], shape=(tokens, wide), scales=None if sent.scale is None else sent.scale[:tokens]
        )
        form.write(SourceRows(row_contiguous(x), None, None, order), written)
        post(peers, sent, routing, table)
        return
    from ..kernels.peer import send_kernel

    x, scales = row_contiguous(x), sent.ids if sent.scale is None else sent.scale
    block = power_at_least(wide, max(32, form.group or 0))
    args, constants = _posted(peers, sent, routing, table)
    args += (x, sent.x, scales, columns, x.stride(0), scales.shape[1], wide)
    top_k = sent.ids.shape[1]
    constants = {"TOP_K": top_k, "PEERS": power_at_least(peers.world), "BLOCK_K": power_at_least(top_k)} | constants
    constants |= {"BLOCK": block, "CODES": form.e4m3, "GROUP": form.group or block, "POWER": form.power}
    constants |= {"ROUND": not x.is_cuda, "REORDER": order == REORDERED}
    launch(send_kernel, (max(1, tokens),), args, constants, num_warps=max(1, min(16, block // 512)))


def post(peers: PeerBuffers, sent: Sent, routing: Routing, table: ExpertMap) -> None:
    """Write ids, and weights, where peers read them, and tell every peer that this pass began.

    The tokens are in ``sent`` already. Counts the ids in ``table.load`` where that is asked for.
    """
    ids, (tokens, top_k) = routing.topk_ids, routing.topk_ids.shape
    if not sent.x.is_cuda and peers.blocks:
        sent.ids[:tokens] = table.choose(ids).to(torch.int32)
        if sent.weights is not None:
            sent.weights[:tokens] = routing.topk_weights
        table.record(ids)
        epoch = int(peers.head[EPOCH])
        ended = epoch < 0
        peers.head[EPOCH] = epoch = -1 if ended else (epoch + 1) & 0x7FFFF
        tell(peers, POSTS, -1 if ended else epoch << 44 | peers.layer << 32 | top_k << 24 | tokens)
        return
    from ..kernels.peer import post_kernel

    block = min(1024, power_at_least(tokens * top_k, 32))
    args, constants = _posted(peers, sent, routing, table)
    constants = {"TOP_K": top_k, "PEERS": power_at_least(peers.world), "BLOCK": block} | constants
    launch(post_kernel, (max(1, -(-tokens * top_k // block)),), args, constants, num_warps=max(1, min(4, block // 256)))


def _posted(
    peers: PeerBuffers, sent: Sent, routing: Routing, table: ExpertMap
) -> tuple[tuple[Any, ...], dict[str, bool]]:
    """Return the arguments and constants that both kernels that post have."""
    ids = row_contiguous(routing.topk_ids)
    weights = ids if sent.weights is None else row_contiguous(routing.topk_weights)
    args = (
        peers.head, ids, weights, sent.ids, sent.ids if sent.weights is None else sent.weights,
        table.places, table.copies, table.load, table.recording, peers.deltas,
        ids.numel(), ids.stride(0), weights.stride(0), table.num_experts, table.places.shape[1],
        peers.layer, peers.rank, peers.where["own"], peers.where["step"], peers.world,
    )  # fmt: skip
    return args, {"WEIGHTS": sent.weights is not None, "PDL": overlaps(sent.x)}


def prefetch_all(world: int, top_k: int, most: int) -> bool:
    """Return whether tokens are pulled without a look at where they go, where no rank has more than ``most``."""
    return most <= FEW or (1 - 1 / world) ** top_k <= WASTE


def pull(peers: PeerBuffers, sent: Sent, own: Sent, table: ExpertMap) -> None:
    """Write ``own``, of W * B rows: every rank's tokens that have an assignment here, and the local slots of all ids.

    An assignment that is elsewhere, or of nobody, gets -1. On a CPU a rank that is late, or is in another call, is a
    RankError; on a GPU it is found by ``raise_status``.
    """
    top_k = sent.ids.shape[1]
    if not sent.x.is_cuda and peers.blocks:
        for rank in range(peers.world):
            pull_rank(peers, rank, sent, own, table)
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
        peers.layer, peers.microseconds, peers.rank, peers.world,
    )  # fmt: skip
    constants = {"TOP_K": top_k, "BLOCK_K": power_at_least(top_k), "BLOCK": block, "STEPS": -(-words // block)}
    constants |= {"BLOCK_G": power_at_least(groups), "SCALES": own.scale is not None}
    constants |= {
        "WEIGHTS": own.weights is not None,
        "ALL": prefetch_all(peers.world, top_k, peers.bound),
        "ASM": sent.x.is_cuda,
    }
    constants |= {"PDL": overlaps(sent.x)}
    grid = (min(peers.bound, max(1, PULL_PROGRAMS // peers.world)), peers.world)
    launch(pull_kernel, grid, args, constants, num_warps=4 if block >= 512 else 1)


def reduce(peers: PeerBuffers, rows: Tensor, slots: Tensor, weights: Tensor | None, sums: Tensor) -> None:
    """Write ``sums [W * B, H]``: what ``weighted_sum`` makes of this rank's rows of each token that it was sent.

    rows: ``[R, H]``; slots: ``[W * B, K]`` int64, the row of each assignment, -1 for one that is elsewhere; weights:
    ``[W * B, K]`` float32, or None for ones. Sums of the same place are this rank's, or, with PUSH, of the owner.
    """
    if not rows.is_cuda and peers.blocks:
        for rank in range(peers.world):
            own = slice(rank * peers.bound, (rank + 1) * peers.bound)
            made = weighted_sum(rows, slots[own], None if weights is None else weights[own], sums.dtype)
            peers.at(sums, rank)[peers.rank * peers.bound : (peers.rank + 1) * peers.bound] = made
        return
    from ..kernels.peer import reduce_kernel

    (lines, width), top_k = sums.shape, slots.shape[1]
    factors = slots if weights is None else weights
    args = (rows, slots, factors, sums, peers.deltas, peers.bound, width, peers.rank, peers.world)
    constants, grid, warps = _cut(lines, width, REDUCE_PROGRAMS)
    constants |= {"TOP_K": top_k, "BLOCK_K": power_at_least(top_k), "WEIGHTS": weights is not None, "PUSH": PUSH}
    launch(reduce_kernel, grid, args, constants | {"PDL": overlaps(rows)}, num_warps=warps, enable_fp_fusion=False)


def collect(
    peers: PeerBuffers,
    sent: Sent,
    returned: Returned,
    weights: Tensor | None,
    table: ExpertMap,
    out: Tensor,
    shared: Tensor | None = None,
) -> Tensor:
    """Write ``out [T, H]`` and return it: what ``weighted_sum`` makes of what all ranks computed, in slot order.

    weights: ``[T, K]`` floating, or None for ones. shared: ``[T, H]`` floating, added last. Sums are added in the order
    of ranks, and not weighted again.
    """
    (tokens, width), top_k = out.shape, sent.ids.shape[1]
    sums = returned.slots is None and not returned.stored
    if not out.is_cuda and peers.blocks:
        places = sent.ids[:tokens]
        all_came(peers)
        if returned.slots is None:
            lines = lines_of(peers, places, table)
            return weighted_sum(returned.rows, lines, None, out.dtype, shared=shared, out=out)
        rows, most = rows_of(peers, places, returned.rows, returned.slots, table), table.width * peers.world
        return weighted_sum(rows, places, weights, out.dtype, shared=shared, out=out, experts=most)
    from ..kernels.peer import collect_kernel

    factors = sent.ids if weights is None or sums else row_contiguous(weights)
    added = returned.rows if shared is None else row_contiguous(shared)
    args = (
        peers.head, returned.rows, sent.ids if returned.slots is None else returned.slots, sent.ids, factors, added,
        out, peers.deltas, tokens, peers.bound, width, factors.stride(0), added.stride(0), table.width,
        peers.microseconds, peers.rank, peers.where["own"], peers.where["step"], peers.world,
    )  # fmt: skip
    constants, grid, warps = _cut(tokens, width, REDUCE_PROGRAMS if sums else COLLECT_PROGRAMS)
    constants |= {"TOP_K": top_k, "BLOCK_K": power_at_least(top_k), "PEERS": power_at_least(peers.world)}
    constants |= {"WEIGHTS": weights is not None and not sums, "SHARED": shared is not None}
    constants |= {"SUMS": sums, "PUSH": returned.stored or (sums and PUSH), "ASM": out.is_cuda, "PDL": overlaps(out)}
    launch(collect_kernel, grid, args, constants, num_warps=warps, enable_fp_fusion=False)
    return out


def _cut(lines: int, width: int, programs: int) -> tuple[dict[str, Any], tuple[int, int], int]:
    """Return constants, grid and warps of programs that each own some columns of every so many of ``lines``."""
    # Small batches spread a token over more programs.
    block = min(power_at_least(width, 32), COLLECT_BLOCK if lines >= 64 else 256)
    columns = -(-width // block)
    constants = {"BLOCK": block, "EVEN": width % 16 == 0, "FULL": width % block == 0}
    return constants, (columns, max(1, min(lines, programs // columns))), max(1, min(4, block // 256))


def _words(x: Tensor) -> Tensor:
    """Return ``x [R, C]`` in the widest words that its rows are made of."""
    size = x.shape[1] * x.element_size()
    return x.view(torch.int32 if size % 4 == 0 else torch.int16 if size % 2 == 0 else torch.uint8)
