"""Host side of ``kernels/peer.py``: the steps of a pass whose ranks read each other's memory.

Each step runs as a kernel, or in torch on a CPU whose processes map the same files (``peers_in_torch.py``).

Shape letters: T tokens of this rank, B the maximum number of tokens of a rank, W ranks, K experts per token, H width,
G scales of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..kernels.enums import HEAD_BYTES, MAX_PEERS
from ..ops.quantize import REORDERED
from ..ops.rows import QuantizedRows, SourceRows
from ..runtime.launch import launch, overlaps, power_at_least, row_contiguous
from . import peers_in_torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ..ops.quantize import ActivationFormat
    from ..types import Routing
    from .expert_map import ExpertMap

__all__ = [
    "HEAD_BYTES",
    "MAX_PEERS",
    "PeerBuffers",
    "Returned",
    "TokenBuffers",
    "collect",
    "post",
    "prefetch_all",
    "pull",
    "reduce",
    "send",
]

# Choices of a GPU; none changes a bit of the output, and all ranks need the same PUSH.
COPY_ALL_TOKENS = 8  # up to so many tokens of a rank are copied to every other rank
COPY_ALL_WASTE = 1 / 16  # and any number, where at most this share of the copies is expected to be unused
FUSED_SEND_TOKENS = 128  # up to so many tokens one kernel writes and posts: its programs, one a token, run at once
PUSH = True  # ranks write sums to the owner of the token; reading them would take one more round trip
# Programs that run at once on 132 multiprocessors, limited by their registers.
PULL_PROGRAMS = 1056
REDUCE_PROGRAMS = 1056  # also of programs that collect sums
COLLECT_PROGRAMS = 792
COLLECT_BLOCK = 1024  # columns of a program from 64 tokens on


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerBuffers:
    """What one pass of a layer needs to reach its peers.

    ranks: numbers in torch's default group. layer: number of the layer. bound: B. timeout: seconds that a rank waits
    for another one. head: ``[256]`` int64, flags and counters of this rank. deltas: ``[W + 1]`` int64, bytes from this
    rank's block to each peer's, and the address of the host's status word. blocks: the bytes of every rank's block, for
    torch. alone: every peer is this rank itself, which is how kernels are compiled without the others. dead_ranks:
    returns the group ranks whose process has ended.
    """

    rank: int
    ranks: tuple[int, ...]
    layer: int
    bound: int
    timeout: float
    head: Tensor
    deltas: Tensor
    blocks: tuple[Tensor, ...] = ()
    alone: bool = False
    dead_ranks: Callable[[], tuple[int, ...]] = tuple

    @property
    def world(self) -> int:
        """W."""
        return len(self.ranks)

    def at(self, tensor: Tensor, rank: int) -> Tensor:
        """Return the counterpart of the contiguous ``tensor`` of this rank in the block of ``rank``."""
        start = tensor.data_ptr() - self.blocks[self.rank].data_ptr()
        nbytes = tensor.numel() * tensor.element_size()
        return self.blocks[rank][start : start + nbytes].view(tensor.dtype).view(tensor.shape)

    @property
    def flag_offset(self) -> int:
        """Offset of the flag that this rank writes at peer 0; see ``flag_stride``."""
        return 0 if self.alone else self.rank

    @property
    def flag_stride(self) -> int:
        """Difference of the offsets of the flags that this rank writes at consecutive peers."""
        return 1 if self.alone else 0

    @property
    def timeout_us(self) -> int:
        """The timeout in microseconds, as kernels count it."""
        return min(int(self.timeout * 1e6), 2**31 - 1)


class TokenBuffers(NamedTuple):
    """Tokens that this rank sends (B rows) or has pulled from all ranks (W * B rows).

    x: ``[rows, C]``, tokens or codes. scale: ``[rows, G]`` or None. ids: ``[rows, K]`` int32, physical ids of tokens to
    send (``ExpertMap.choose``), local slots or -1 of pulled ones. weights: ``[rows, K]`` or None.
    """

    x: Tensor
    scale: Tensor | None
    ids: Tensor
    weights: Tensor | None


class Returned(NamedTuple):
    """Results that ``collect`` adds up.

    With slots ``[W * B, K]`` int64: rows ``[W * B * K, H]`` that peers read; slots name them. Without slots: rows are
    the sums ``[W * B, H]`` that ``reduce`` writes, or, if stored, ``[B * K, H]``, the rows of this rank's assignments
    that the experts of all ranks wrote here, which only kernels can read.
    """

    rows: Tensor
    slots: Tensor | None
    stored: bool = False


def _in_torch(peers: PeerBuffers, tensor: Tensor) -> bool:
    """Return whether torch performs the steps of this pass."""
    return not tensor.is_cuda and bool(peers.blocks)


def send(
    peers: PeerBuffers,
    x: Tensor,
    sent: TokenBuffers,
    routing: Routing,
    table: ExpertMap,
    activation_format: ActivationFormat,
    order: int,
) -> None:
    """Write ``x [T, H]`` to ``sent`` in an activation format, with its columns in ``order``, and post the pass.

    For few tokens one kernel does both.
    """
    tokens = x.shape[0]
    padded_cols = sent.x.shape[1]
    if tokens > FUSED_SEND_TOKENS:
        target = QuantizedRows(
            codes=sent.x[:tokens],
            shape=(tokens, padded_cols),
            scales=None if sent.scale is None else sent.scale[:tokens],
        )
        activation_format.write(SourceRows(row_contiguous(x), None, None, order), target)
        post(peers, sent, routing, table)
        return
    from ..kernels.peer import send_kernel

    rows = row_contiguous(x)
    scales = sent.ids if sent.scale is None else sent.scale
    top_k = sent.ids.shape[1]
    block = power_at_least(padded_cols, max(32, activation_format.group or 0))
    args = (
        *_post_args(peers, sent, routing, table),
        *(rows, sent.x, scales),
        *(x.shape[1], rows.stride(0), scales.shape[1], padded_cols),
    )
    constants = {
        "TOP_K": top_k,
        "PEERS": power_at_least(peers.world),
        "BLOCK_K": power_at_least(top_k),
        "WEIGHTS": sent.weights is not None,
        "PDL": overlaps(sent.x),
        "BLOCK": block,
        "CODES": activation_format.e4m3,
        "GROUP": activation_format.group or block,
        "POWER": activation_format.power,
        "ROUND": not x.is_cuda,
        "REORDER": order == REORDERED,
    }
    launch(send_kernel, (max(1, tokens),), args, constants, num_warps=max(1, min(16, block // 512)))


def post(peers: PeerBuffers, sent: TokenBuffers, routing: Routing, table: ExpertMap) -> None:
    """Write physical ids and weights to ``sent``, and notify every peer that this pass has begun.

    The tokens are in ``sent`` already. Adds the ids to ``table.load`` while the table records.
    """
    if _in_torch(peers, sent.x):
        peers_in_torch.post(peers, sent, routing, table)
        return
    from ..kernels.peer import post_kernel

    tokens, top_k = routing.topk_ids.shape
    block = min(1024, power_at_least(tokens * top_k, 32))
    constants = {
        "TOP_K": top_k,
        "PEERS": power_at_least(peers.world),
        "BLOCK": block,
        "WEIGHTS": sent.weights is not None,
        "PDL": overlaps(sent.x),
    }
    args = _post_args(peers, sent, routing, table)
    programs = max(1, -(-tokens * top_k // block))
    launch(post_kernel, (programs,), args, constants, num_warps=max(1, min(4, block // 256)))


def _post_args(peers: PeerBuffers, sent: TokenBuffers, routing: Routing, table: ExpertMap) -> tuple[Any, ...]:
    """Return the arguments that ``post_kernel`` and ``send_kernel`` have in common."""
    ids = row_contiguous(routing.topk_ids)
    weights = ids if sent.weights is None else row_contiguous(routing.topk_weights)
    return (
        *(peers.head, ids, weights),
        *(sent.ids, sent.ids if sent.weights is None else sent.weights),
        *(table.physical_ids, table.replica_counts, table.load, table.recording, peers.deltas),
        *(ids.numel(), ids.stride(0), weights.stride(0), table.num_experts, table.physical_ids.shape[1]),
        *(peers.layer, peers.rank, peers.flag_offset, peers.flag_stride, peers.world),
    )


def prefetch_all(world: int, top_k: int, max_tokens: int) -> bool:
    """Return whether all tokens are pulled, whether needed or not, if no rank has more than ``max_tokens``."""
    return max_tokens <= COPY_ALL_TOKENS or (1 - 1 / world) ** top_k <= COPY_ALL_WASTE


def pull(peers: PeerBuffers, sent: TokenBuffers, pulled: TokenBuffers, table: ExpertMap) -> None:
    """Copy the tokens of every rank that have a local assignment to ``pulled``, and the local slots of all ids.

    Assignments of other ranks, and invalid ones, get slot -1. On a CPU a rank that is late or in another call is a
    RankError; on a GPU ``raise_status`` reports it.
    """
    if _in_torch(peers, sent.x):
        peers_in_torch.pull(peers, sent, pulled, table)
        return
    from ..kernels.peer import pull_kernel

    top_k = sent.ids.shape[1]
    sent_words = _as_words(sent.x)
    pulled_words = _as_words(pulled.x)
    words = pulled_words.shape[1]
    groups = 1 if pulled.scale is None else pulled.scale.shape[1]
    block = min(4096, power_at_least(words, 32))
    args = (
        peers.head,
        *(sent_words, sent.ids if sent.scale is None else sent.scale),
        *(sent.ids, sent.ids if sent.weights is None else sent.weights),
        *(pulled_words, pulled.ids if pulled.scale is None else pulled.scale),
        *(pulled.ids, pulled.ids if pulled.weights is None else pulled.weights),
        *(peers.deltas, words, groups, peers.bound, table.width),
        *(peers.layer, peers.timeout_us, peers.rank, peers.world),
    )
    constants = {
        "TOP_K": top_k,
        "BLOCK_K": power_at_least(top_k),
        "BLOCK": block,
        "STEPS": -(-words // block),
        "BLOCK_G": power_at_least(groups),
        "SCALES": pulled.scale is not None,
        "WEIGHTS": pulled.weights is not None,
        "ALL": prefetch_all(peers.world, top_k, peers.bound),
        "ASM": sent.x.is_cuda,
        "PDL": overlaps(sent.x),
    }
    grid = (min(peers.bound, max(1, PULL_PROGRAMS // peers.world)), peers.world)
    launch(pull_kernel, grid, args, constants, num_warps=4 if block >= 512 else 1)


def reduce(peers: PeerBuffers, rows: Tensor, slots: Tensor, weights: Tensor | None, sums: Tensor) -> None:
    """Write ``sums [W * B, H]``: ``weighted_sum`` over this rank's rows of each pulled token.

    rows: ``[R, H]``. slots: ``[W * B, K]`` int64, the row of each assignment, -1 for assignments of other ranks.
    weights: ``[W * B, K]`` float32, or None for ones. With PUSH the sums are written to the memory of the token's rank.
    """
    if _in_torch(peers, rows):
        peers_in_torch.reduce(peers, rows, slots, weights, sums)
        return
    from ..kernels.peer import reduce_kernel

    tokens, width = sums.shape
    top_k = slots.shape[1]
    tiling = _column_tiling(tokens, width, REDUCE_PROGRAMS)
    args = (
        *(rows, slots, slots if weights is None else weights, sums),
        *(peers.deltas, peers.bound, width, peers.rank, peers.world),
    )
    constants = {
        **tiling.constants,
        "TOP_K": top_k,
        "BLOCK_K": power_at_least(top_k),
        "WEIGHTS": weights is not None,
        "PUSH": PUSH,
        "PDL": overlaps(rows),
    }
    launch(reduce_kernel, tiling.grid, args, constants, num_warps=tiling.warps, enable_fp_fusion=False)


def collect(
    peers: PeerBuffers,
    sent: TokenBuffers,
    returned: Returned,
    weights: Tensor | None,
    table: ExpertMap,
    out: Tensor,
    shared: Tensor | None = None,
) -> Tensor:
    """Write ``out [T, H]`` and return it: ``weighted_sum`` over the results of all ranks, in slot order.

    weights: ``[T, K]`` floating, or None for ones. shared: ``[T, H]`` floating, added last. Partial sums are added in
    the order of ranks, without weights.
    """
    if _in_torch(peers, out):
        return peers_in_torch.collect(peers, sent, returned, weights, table, out, shared)
    from ..kernels.peer import collect_kernel

    tokens, width = out.shape
    top_k = sent.ids.shape[1]
    sums = returned.slots is None and not returned.stored
    factors = sent.ids if weights is None or sums else row_contiguous(weights)
    shared_rows = returned.rows if shared is None else row_contiguous(shared)
    tiling = _column_tiling(tokens, width, REDUCE_PROGRAMS if sums else COLLECT_PROGRAMS)
    args = (
        *(peers.head, returned.rows, sent.ids if returned.slots is None else returned.slots),
        *(sent.ids, factors, shared_rows, out, peers.deltas),
        *(tokens, peers.bound, width, factors.stride(0), shared_rows.stride(0), table.width),
        *(peers.timeout_us, peers.rank, peers.flag_offset, peers.flag_stride, peers.world),
    )
    constants = {
        **tiling.constants,
        "TOP_K": top_k,
        "BLOCK_K": power_at_least(top_k),
        "PEERS": power_at_least(peers.world),
        "WEIGHTS": weights is not None and not sums,
        "SHARED": shared is not None,
        "SUMS": sums,
        "PUSH": returned.stored or (sums and PUSH),
        "ASM": out.is_cuda,
        "PDL": overlaps(out),
    }
    launch(collect_kernel, tiling.grid, args, constants, num_warps=tiling.warps, enable_fp_fusion=False)
    return out


class _ColumnTiling(NamedTuple):
    """Launch parameters of programs that each serve a block of columns of some tokens."""

    constants: dict[str, Any]
    grid: tuple[int, int]
    warps: int


def _column_tiling(tokens: int, width: int, max_programs: int) -> _ColumnTiling:
    # Small batches spread a token over more programs.
    block = min(power_at_least(width, 32), COLLECT_BLOCK if tokens >= 64 else 256)
    blocks = -(-width // block)
    return _ColumnTiling(
        constants={"BLOCK": block, "EVEN": width % 16 == 0, "FULL": width % block == 0},
        grid=(blocks, max(1, min(tokens, max_programs // blocks))),
        warps=max(1, min(4, block // 256)),
    )


def _as_words(x: Tensor) -> Tensor:
    """Return ``x [R, C]`` as the largest integers, of up to 32 bits, that divide its rows."""
    nbytes = x.shape[1] * x.element_size()
    if nbytes % 4 == 0:
        return x.view(torch.int32)
    return x.view(torch.int16 if nbytes % 2 == 0 else torch.uint8)
