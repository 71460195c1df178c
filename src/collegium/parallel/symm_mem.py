"""Expert parallelism over symmetric memory: GPUs of one host read each other's memory; no collective, capturable.

A pass writes its tokens, quantised once where the experts multiply codes, and notifies its peers; pulls the tokens that
have a local assignment from each peer, once each; sorts and computes like a single rank; and collects the rows of its
tokens from the ranks that computed them, in slot order. So the bits are those of a single rank. With a reduced combine
each rank adds up its rows of a token instead, and the token's rank adds these sums. Every wait has a timeout: if a rank
does not respond or is in another call, the output is NaN, the others are notified, and the host raises RankError.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Self

import torch

from ..formats.unquantised import DTYPES
from ..ops.permute import Owners, permute_regions
from ..ops.quantize import AS_IS, PADDED, activation_format, cast_name, quantize_regions
from ..ops.weighted_sum import weighted_sum_regions
from ..runtime.memory import FreshMemory, alloc, elementwise_max, part, with_prefix
from ..types import Routing
from .combine import describe_return, reduced_combine, return_bytes
from .expert_map import ExpertMap
from .expert_parallel import number_layer, refuse_split
from .local import Local, LocalKind
from .message_format import describe_tokens
from .partial import PartialKind, share
from .peers import (
    HEAD_BYTES,
    MAX_PEERS,
    PeerBuffers,
    Returned,
    TokenBuffers,
    collect,
    post,
    prefetch_all,
    pull,
    reduce,
    send,
)
from .symmetric_buffer import PeerArena, SymmetricBuffers, symmetric_buffers
from .traffic import OutgoingTokens, Traffic

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from ..problem import Problem
    from ..runtime.memory import Memory, MemoryMap, Regions
    from ..types import ContiguousBatch
    from .combine import ReducedCombine

__all__ = ["STORE_REMOTE", "Posted", "SymmMem", "SymmMemHandle", "SymmMemKind"]

# Experts that support it write each row to the rank of its token while they compute, instead of having it read.
STORE_REMOTE = True


class Posted(NamedTuple):
    """A pass whose tokens peers may read.

    weights: ``[T, K]`` of this rank's tokens. dtype: of the tokens. order: of the columns of codes.
    """

    peers: PeerBuffers
    sent: TokenBuffers
    weights: Tensor
    dtype: torch.dtype
    order: int


class SymmMemHandle(NamedTuple):
    """What ``combine`` needs.

    slots: ``[W * B, K]``, the local row of every rank's assignments. tokens: of this rank. pulled_weights: of all
    ranks' tokens ``[W * B, K]``, None where this rank does not multiply by them. stored: the experts write rows to the
    ranks of their tokens.
    """

    posted: Posted
    slots: Tensor
    tokens: int
    pulled_weights: Tensor | None
    stored: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SymmMem:
    """Exchanges tokens and rows through symmetric memory.

    limit: maximum number of tokens of a rank. on_gpu: kernels do the exchange, otherwise torch. reduced: None where
    each row returns.
    """

    inner: Local
    expert_map: ExpertMap
    limit: int
    blocks: SymmetricBuffers
    on_gpu: bool
    reduced: ReducedCombine | None = None

    def rows(self, tokens: int, top_k: int) -> int:
        """Return this rank's share of the assignments of ``tokens`` tokens on every rank."""
        assignments = tokens * self.expert_map.world_size * top_k
        return share(assignments, self.inner.num_experts, self.expert_map.num_experts)

    def register_layer(self, layout: MemoryMap) -> int:
        """Reserve a layer's regions and return its number; all ranks call it together."""
        return self.blocks.register_layer(layout)

    def sync_pass(self, memory: Memory, layer: int, tokens: int, top_k: int, *, shares: int = 1) -> Hashable:
        """Agree with the peers on the pass that runs in ``memory``; return a key that equal passes have in common."""
        assert isinstance(memory, PeerArena)
        memory.peers, key = self.blocks.sync_pass(layer, tokens, top_k, self.limit, shares=shares)
        return key

    def sync_call(self, layer: int, tokens: int, top_k: int, *, shares: int = 1) -> None:
        """Agree as in ``sync_pass``, without a pass that follows; the device is not involved."""
        self.blocks.sync_pass(layer, tokens, top_k, self.limit, shares=shares)

    def send(
        self, x: Tensor, routing: Routing, memory: Memory | None = None, *, codes: tuple[str, int] | None = None
    ) -> Posted:
        """Post ``x [T, H]``. codes: format and column order that the experts multiply, None for tokens."""
        memory = memory or FreshMemory(x.device)
        tokens, top_k = routing.topk_ids.shape
        peers = self.peers_of(memory, tokens, x.device)
        weight_on_input = self.inner.weight_on_input
        if codes is None or weight_on_input:
            format_name, order = cast_name(x.dtype), AS_IS
        else:
            format_name, order = codes
        row_format = activation_format(format_name)
        sent_memory = part(memory, "sent")
        # All ranks allocate the maximum number of tokens, since a rank derives peers' addresses from local ones.
        buffers = {
            name: alloc(sent_memory, name, shape, dtype, x.device)
            for name, (shape, dtype) in row_format.buffers(
                peers.bound, row_format.padded_columns(x.shape[1], order)
            ).items()
        }
        weights = None
        if weight_on_input or self.reduced is not None:
            weights = alloc(sent_memory, "weights", (peers.bound, top_k), torch.float32, x.device)
        sent = TokenBuffers(
            x=buffers["codes"],
            scale=buffers.get("scales"),
            ids=alloc(sent_memory, "ids", (peers.bound, top_k), torch.int32, x.device),
            weights=weights,
        )
        if peers.bound and self.on_gpu:
            send(peers, x, sent, routing, self.expert_map, row_format, order)
        elif peers.bound:
            sent.x[:tokens] = x
            post(peers, sent, routing, self.expert_map)
        return Posted(peers, sent, routing.topk_weights, x.dtype, order)

    def receive(
        self,
        posted: Posted,
        memory: Memory | None = None,
        *,
        block_t: tuple[int, ...] = (),
        storing: tuple[int, torch.dtype] | None = None,
    ) -> tuple[ContiguousBatch, SymmMemHandle]:
        """Pull the tokens of this rank's experts and sort their assignments; see ``SymmetricDispatcher``."""
        peers, sent = posted.peers, posted.sent
        memory = memory or FreshMemory(sent.x.device)
        pulled = _alloc_pulled(sent, peers.world, memory)
        if peers.bound:
            pull(peers, sent, pulled, self.expert_map)
        owners = self._owners(posted, memory, storing)
        # Without pulled weights the sort does not read any.
        weights = posted.weights if pulled.weights is None else pulled.weights
        batch, inner = self.inner.dispatch(
            pulled.x, Routing(topk_ids=pulled.ids, topk_weights=weights), memory, block_t=block_t, owners=owners
        )
        batch = replace(
            batch,
            scale=pulled.scale,
            dtype=posted.dtype,
            rows=self.expected_rows(posted),
            order=posted.order,
            x_ready=False,
        )
        return batch, SymmMemHandle(
            posted=posted,
            slots=inner.slots,
            tokens=posted.weights.shape[0],
            pulled_weights=inner.weights,
            stored=owners is not None,
        )

    def _owners(self, posted: Posted, memory: Memory, storing: tuple[int, torch.dtype] | None) -> Owners | None:
        """Return where experts write the rows of other ranks' tokens, None where those ranks read the rows."""
        peers, sent = posted.peers, posted.sent
        if not STORE_REMOTE or storing is None or not self.on_gpu or self.reduced is not None or not peers.bound:
            return None
        width, dtype = storing
        shape = peers.bound * sent.ids.shape[1], width
        return Owners(alloc(part(memory, "experts"), "rows", shape, dtype, sent.x.device), peers.deltas)

    def dispatch(
        self, x: Tensor, routing: Routing, memory: Memory | None = None, *, block_t: tuple[int, ...] = ()
    ) -> tuple[ContiguousBatch, SymmMemHandle]:
        """Send and receive; tokens travel unquantised."""
        return self.receive(self.send(x, routing, memory), memory, block_t=block_t)

    def send_back(
        self, rows: Tensor, handle: SymmMemHandle, memory: Memory | None = None, *, overlap: bool = False
    ) -> Tensor:
        """Return ``rows``, which the experts stored at their owners or ``combine`` reads from the peers."""
        return rows

    def combine(
        self,
        rows: Tensor,
        handle: SymmMemHandle,
        memory: Memory | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        shared: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return ``[T, H]`` of this rank's tokens; except in a reduced combine with the bits of a single rank."""
        posted = handle.posted
        peers, sent = posted.peers, posted.sent
        if out is None:
            out = alloc(memory, "sum", (handle.tokens, rows.shape[1]), dtype, rows.device)
        if not peers.bound:
            return out
        if self.reduced is not None:
            shape = handle.slots.shape[0], rows.shape[1]
            sums = alloc(part(memory, "back"), "sums", shape, self.reduced.dtype, rows.device)
            reduce(peers, rows.contiguous(), handle.slots, handle.pulled_weights, sums)
            return collect(peers, sent, Returned(sums, None), None, self.expert_map, out, shared)
        if handle.stored:
            returned = Returned(rows, None, stored=True)
        else:
            returned = Returned(
                self._in_symmetric_memory(rows, "rows", memory),
                self._in_symmetric_memory(handle.slots, "slots", memory),
            )
        weights = None if self.inner.weight_on_input else posted.weights
        return collect(peers, sent, returned, weights, self.expert_map, out, shared)

    def expected_rows(self, posted: Posted) -> int:
        """Return the expected number of local rows."""
        return self.rows(posted.peers.bound, posted.sent.ids.shape[1])

    def for_halves(self) -> Self:
        """Return this dispatcher."""
        return self

    def check(self) -> None:
        """Wait for the device, and raise the RankError of a failed pass, since which the output is NaN."""
        self.blocks.check()

    def peers_of(self, memory: Memory, tokens: int, device: torch.device) -> PeerBuffers:
        """Return what a pass of ``tokens`` local tokens, which runs in ``memory``, needs to reach its peers."""
        if isinstance(memory, PeerArena):
            assert memory.peers is not None
            return memory.peers
        # Peers cannot read this memory: it serves to compile kernels, and this rank acts as every peer.
        with torch.inference_mode(False):
            head = torch.zeros(HEAD_BYTES // 8, dtype=torch.int64, device=device)
            deltas = torch.zeros(self.expert_map.world_size + 1, dtype=torch.int64, device=device)
            deltas[-1] = head.data_ptr() + HEAD_BYTES - 8
        ranks = tuple(range(self.expert_map.world_size))
        return PeerBuffers(rank=0, ranks=ranks, layer=0, bound=tokens, timeout=1, head=head, deltas=deltas, alone=True)

    def _in_symmetric_memory(self, tensor: Tensor, name: str, memory: Memory | None) -> Tensor:
        """Return ``tensor`` if peers can read it, otherwise a copy that they can read.

        Results of torch or of a user's function lie outside the shared block.
        """
        if not isinstance(memory, PeerArena):
            return tensor
        start = memory.block.data_ptr()
        if start <= tensor.data_ptr() < start + memory.block.numel() and tensor.is_contiguous():
            return tensor
        if self.on_gpu:
            return memory.part("experts").alloc("rows", tuple(tensor.shape), tensor.dtype).copy_(tensor)
        return memory.part("back").alloc(name, tuple(tensor.shape), tensor.dtype).copy_(tensor)


def _alloc_pulled(sent: TokenBuffers, world: int, memory: Memory) -> TokenBuffers:
    """Return buffers for the tokens of all ranks."""

    def pulled(name: str, tensor: Tensor) -> Tensor:
        shape = world * tensor.shape[0], tensor.shape[1]
        return alloc(memory, name, shape, tensor.dtype, tensor.device)

    return TokenBuffers(
        x=pulled("x", sent.x),
        scale=None if sent.scale is None else pulled("scale", sent.scale),
        ids=pulled("ids", sent.ids),
        weights=None if sent.weights is None else pulled("weights", sent.weights),
    )


class SymmMemKind:
    """The kind of ``SymmMem``: GPUs of one host; on a CPU, for tests of the protocol, only on request."""

    name = "symm_mem"
    capturable = True
    collective = True
    symmetric = True
    overlaps = "dispatch"
    no_half_batches = "kernels of two halves would wait for each other's ranks while they occupy the GPU"
    fixed_messages = False
    partial_sums = False

    def refuse(self, problem: Problem, *, requested: bool) -> str | None:
        """Refuse what ``refuse_split`` refuses, too many ranks or tokens, a CPU, and several hosts."""
        reason = refuse_split(problem)
        placement = problem.placement
        if reason is not None or placement is None:
            return reason
        world = placement.world_size
        top_k = problem.spec.routing.top_k
        max_tokens = problem.limits.max_tokens
        if world > MAX_PEERS or top_k > 255 or max_tokens >= 1 << 24:
            return (
                f"{world} ranks, top-{top_k} and {max_tokens} tokens were requested; its flags hold {MAX_PEERS} ranks, "
                "top-255 and 16,777,215 tokens"
            )
        if problem.combine not in ("exact", "reduced"):
            return f"combine {problem.combine} was requested; it writes sums unquantised"
        if requested:
            return None
        if problem.device.kind != "cuda":
            return (
                "the device is a cpu; it is for GPUs that read each other's memory; "
                "Overrides(dispatcher='symm_mem') tries it"
            )
        reachable = problem.device.peers
        if reachable is not None and reachable < world:
            return (
                f"{world} ranks were requested; {reachable} GPUs of this host reach each other's memory; "
                "Overrides(dispatcher='symm_mem') tries it where each process sees only one GPU"
            )
        return None

    def wire_format(self, problem: Problem) -> str:
        """Describe what travels; on a CPU unquantised tokens."""
        sent = problem if problem.device.kind == "cuda" else replace(problem, sent_as=None)
        return f"{describe_tokens(sent)} once to each rank of their experts, {describe_return(problem)}"

    def rows(self, problem: Problem, tokens: int) -> int:
        """Return this rank's share of the assignments of ``tokens`` tokens on every rank."""
        return PartialKind().rows(problem, tokens * problem.world_size)

    def capacity(self, problem: Problem) -> int:
        """Return the number of assignments of ``max_tokens`` tokens on every rank: all may fall on this rank."""
        return LocalKind().capacity(problem) * problem.world_size

    def batch_tokens(self, problem: Problem) -> int:
        """Return ``max_tokens`` tokens of every rank."""
        return problem.limits.max_tokens * problem.world_size

    def regions(self, problem: Problem, *, lists: bool) -> Regions:
        """Return the regions of sent and pulled tokens, their permutation, and results; the same on every rank."""
        routing = problem.spec.routing
        tokens = problem.limits.max_tokens
        width = problem.spec.expert_hidden_size
        world = problem.world_size
        reduced = reduced_combine(problem)
        sent = _sent_regions(problem)
        regions = with_prefix("sent", sent)
        for name, pulled_name in _PULLED_NAMES.items():
            if name in sent:
                regions[pulled_name] = sent[name] * world
        rows = tokens * routing.top_k * world
        placement = problem.placement
        order = permute_regions(
            rows,
            max(1, placement.width if placement else 1),
            block_t=(16, 16) if lists else (),
            weights=routing.weight_on_input,
            row_offsets=reduced is None and problem.device.kind == "cuda",
        )
        for name, size in order.items():
            regions[name] = max(size, regions.get(name, 0))
        if reduced is not None:
            regions["back/sums"] = world * tokens * width * reduced.dtype.itemsize
        elif problem.device.kind == "cpu":
            regions["back/rows"] = 4 * rows * width
            regions["back/slots"] = 8 * rows
        if problem.spec.latent_size is not None:
            regions |= weighted_sum_regions(tokens, width, torch.float32)
        return regions

    def traffic(self, problem: Problem, away: OutgoingTokens) -> Traffic:
        """Return the bytes of all tokens' ids and weights, of the copies of tokens, and of the rows that are read."""
        top_k = problem.spec.routing.top_k
        world = problem.world_size
        sent_as = problem.sent_as if problem.device.kind == "cuda" else None
        row_format = activation_format(sent_as or problem.dtype)
        order = PADDED if sent_as else AS_IS
        token_bytes = sum(quantize_regions(1, problem.spec.expert_hidden_size, row_format.name, order=order).values())
        all_copies = away.tokens * (world - 1)
        id_bytes = all_copies * top_k * 4 * (2 if _sends_weights(problem) else 1)
        copies = all_copies if prefetch_all(world, top_k, away.max_tokens) else away.copies
        dispatch = copies * token_bytes + id_bytes
        if problem.combine == "exact":
            return Traffic(dispatch, away.rows * (return_bytes(problem) + 8))
        return Traffic(dispatch, away.copies * problem.spec.expert_hidden_size * DTYPES[problem.dtype].itemsize)

    def build(self, problem: Problem) -> SymmMem:
        """Return the dispatcher; all ranks call it together.

        Raises InputError where torch.distributed has other ranks than the placement.
        """
        placement, _ = number_layer(self.name, problem)
        device = torch.device(problem.device.place)
        return SymmMem(
            inner=Local(num_experts=problem.slots, weight_on_input=problem.spec.routing.weight_on_input),
            expert_map=ExpertMap(placement, problem.spec.num_experts, device),
            limit=problem.limits.max_tokens,
            blocks=symmetric_buffers(placement.group, device),
            on_gpu=device.type == "cuda",
            reduced=reduced_combine(problem),
        )


# The region of pulled tokens for each region of sent ones.
_PULLED_NAMES = {"codes": "x", "ids": "ids", "scales": "scale", "weights": "weights"}


def _sends_weights(problem: Problem) -> bool:
    return problem.spec.routing.weight_on_input or problem.combine != "exact"


def _sent_regions(problem: Problem) -> Regions:
    """Return the regions of the tokens that one rank sends."""
    tokens = problem.limits.max_tokens
    width = problem.spec.expert_hidden_size
    id_bytes = 4 * tokens * problem.spec.routing.top_k
    regions = quantize_regions(tokens, width, cast_name(DTYPES[problem.dtype]))
    format_name = problem.activation_format or problem.dtype
    if activation_format(format_name).e4m3:
        regions = elementwise_max(regions, quantize_regions(tokens, width, format_name, order=PADDED))
    regions["ids"] = id_bytes
    if _sends_weights(problem):
        regions["weights"] = id_bytes
    return regions
