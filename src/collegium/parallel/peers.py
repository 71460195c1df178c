"""Host side of ``kernels/peer.py``: the steps of a pass whose ranks read each other's memory.

Each step runs as a kernel, or in torch on a CPU whose processes map the same files (``peers_in_torch.py``).

Shape letters: T tokens of this rank, B the maximum number of tokens of a rank, W ranks, K experts per token, H width,
G scales of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..kernels.arguments import CodeFormat
from ..kernels.enums import HEAD_BYTES, MAX_PEERS
from ..kernels.peer_arguments import ColumnBlock, CombineBuffers, ExpertMapArgs, Peers, SourceTokens, TokenRows
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
    "code_format",
    "collect",
    "expert_map_args",
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

    @property
    def kernel_args(self) -> Peers:
        """The part that kernels are compiled for."""
        return Peers(head=self.head, deltas=self.deltas, world=self.world)


class TokenBuffers(NamedTuple):
    """Tokens that this rank sends (B rows) or has pulled from all ranks (W * B rows).

    x: ``[rows, C]``, tokens or codes. scale: ``[rows, G]`` or None. ids: ``[rows, K]`` int32, physical ids of tokens to
    send (``ExpertMap.choose``), local slots or -1 of pulled ones. weights: ``[rows, K]`` or None.
    """

    x: Tensor
    scale: Tensor | None
    ids: Tensor
    weights: Tensor | None

    @property
    def kernel_args(self) -> TokenRows:
        """The buffers as kernels take them."""
        return TokenRows(x=self.x, scale=self.scale, ids=self.ids, weights=self.weights)

    @property
    def kernel_words(self) -> TokenRows:
        """The buffers with the largest integers, of up to 32 bits, that divide the rows of ``x``."""
        nbytes = self.x.shape[1] * self.x.element_size()
        sizes = {0: torch.int32, 2: torch.int16}
        return self.kernel_args._replace(x=self.x.view(sizes.get(nbytes % 4, torch.uint8)))


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
    top_k = sent.ids.shape[1]
    block = power_at_least(padded_cols, max(32, activation_format.group or 0))
    source = SourceTokens(
        x=rows,
        stride=rows.stride(0),
        columns=x.shape[1],
        padded_columns=padded_cols,
        groups=1 if sent.scale is None else sent.scale.shape[1],
    )
    ids = row_contiguous(routing.topk_ids)
    weights = None if sent.weights is None else row_contiguous(routing.topk_weights)
    args = (
        peers.kernel_args,
        *(ids, weights, expert_map_args(table)),
        *(source, sent.kernel_args),
        *_pass_counts(peers, ids, weights),
    )
    constants = {
        "TOP_K": top_k,
        "PEERS": power_at_least(peers.world),
        "BLOCK_K": power_at_least(top_k),
        "BLOCK": block,
        "FORMAT": code_format(activation_format, block, order, x) if activation_format.e4m3 else None,
        "PDL": overlaps(sent.x),
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
        "PDL": overlaps(sent.x),
    }
    ids = row_contiguous(routing.topk_ids)
    weights = None if sent.weights is None else row_contiguous(routing.topk_weights)
    args = (
        peers.kernel_args,
        *(ids, weights, expert_map_args(table)),
        sent.kernel_args._replace(x=None, scale=None),
        *_pass_counts(peers, ids, weights),
    )
    programs = max(1, -(-tokens * top_k // block))
    launch(post_kernel, (programs,), args, constants, num_warps=max(1, min(4, block // 256)))


def code_format(activation_format: ActivationFormat, block: int, order: int, x: Tensor) -> CodeFormat:
    """Return how kernels quantise rows of at most ``block`` columns, on the device of ``x``, to codes in ``order``."""
    return CodeFormat(
        group=activation_format.group or block,
        power_of_two=activation_format.power,
        e8m0=False,
        reorder=order == REORDERED,
        software_rounding=not x.is_cuda,
    )


def expert_map_args(table: ExpertMap) -> ExpertMapArgs:
    """Return ``table`` as kernels take it."""
    return ExpertMapArgs(
        physical_ids=table.physical_ids,
        replica_counts=table.replica_counts,
        load=table.load,
        recording=table.recording,
        num_experts=table.num_experts,
        max_replicas=table.physical_ids.shape[1],
    )


def _pass_counts(peers: PeerBuffers, ids: Tensor, weights: Tensor | None) -> tuple[int, ...]:
    """Return the integers of ``post_kernel`` and ``send_kernel``, from ``count`` to ``flag_stride``."""
    weight_stride = 0 if weights is None else weights.stride(0)
    routing = (ids.numel(), ids.stride(0), weight_stride)
    return (*routing, peers.layer, peers.rank, peers.flag_offset, peers.flag_stride)


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
    pulled_words = pulled.kernel_words
    words = pulled_words.x.shape[1]
    groups = 1 if pulled.scale is None else pulled.scale.shape[1]
    block = min(4096, power_at_least(words, 32))
    args = (
        *(peers.kernel_args, sent.kernel_words, pulled_words),
        *(words, groups, peers.bound, table.width),
        *(peers.layer, peers.timeout_us, peers.rank),
    )
    constants = {
        "TOP_K": top_k,
        "BLOCK_K": power_at_least(top_k),
        "BLOCK": block,
        "STEPS": -(-words // block),
        "BLOCK_G": power_at_least(groups),
        "COPY_ALL": prefetch_all(peers.world, top_k, peers.bound),
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
        *(rows, slots, weights, sums),
        *(peers.deltas, peers.bound, width, peers.rank, peers.world),
    )
    constants = {
        "TOP_K": top_k,
        "BLOCK_K": power_at_least(top_k),
        "COLUMNS": tiling.columns,
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
    factors = None if weights is None or sums else row_contiguous(weights)
    shared_rows = None if shared is None else row_contiguous(shared)
    tiling = _column_tiling(tokens, width, REDUCE_PROGRAMS if sums else COLLECT_PROGRAMS)
    buffers = CombineBuffers(
        rows=returned.rows,
        shared=shared_rows,
        out=out,
        width=width,
        shared_stride=0 if shared_rows is None else shared_rows.stride(0),
    )
    args = (
        *(peers.kernel_args, buffers, returned.slots, factors, sent.ids),
        *(tokens, peers.bound, 0 if factors is None else factors.stride(0), table.width),
        *(peers.timeout_us, peers.rank, peers.flag_offset, peers.flag_stride),
    )
    constants = {
        "TOP_K": top_k,
        "BLOCK_K": power_at_least(top_k),
        "PEERS": power_at_least(peers.world),
        "COLUMNS": tiling.columns,
        "SUMS": sums,
        "PUSH": sums and PUSH,
        "ASM": out.is_cuda,
        "PDL": overlaps(out),
    }
    launch(collect_kernel, tiling.grid, args, constants, num_warps=tiling.warps, enable_fp_fusion=False)
    return out


class _ColumnTiling(NamedTuple):
    """Launch parameters of programs that each serve a block of columns of some tokens."""

    columns: ColumnBlock
    grid: tuple[int, int]
    warps: int


def _column_tiling(tokens: int, width: int, max_programs: int) -> _ColumnTiling:
    # Small batches spread a token over more programs.
    block = min(power_at_least(width, 32), COLLECT_BLOCK if tokens >= 64 else 256)
    blocks = -(-width // block)
    return _ColumnTiling(
        columns=ColumnBlock(size=block, aligned=width % 16 == 0, full=width % block == 0),
        grid=(blocks, max(1, min(tokens, max_programs // blocks))),
        warps=max(1, min(4, block // 256)),
    )
