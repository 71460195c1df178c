"""Experts split over the GPUs of one host that read each other's memory: no collective, capturable in a CUDA graph.

A pass posts its own tokens, quantised once where the experts multiply codes, and says so to its peers; pulls from each
peer the tokens that have an assignment here, once each; sorts and computes like a single rank; and collects the rows of
its own tokens from whoever computed them, in slot order. So the bits are those of a single rank. With a reduced combine
each rank instead adds up its rows of a token and hands its owner the sum. Every wait is bounded: where a rank does not
come, or is in another call, output is NaN, the others are told, and the host raises RankError.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..formats.unquantised import DTYPES
from ..ops.permute import Owners, permute_regions
from ..ops.quantize import AS_IS, PADDED, activation_format, cast_name, quantize_regions
from ..ops.weighted_sum import weighted_sum_regions
from ..runtime.memory import FreshMemory, alloc, elementwise_max, part, with_prefix
from ..types import Routing
from .combine import describe_return, reduced_combine, return_bytes
from .expert_map import ExpertMap
from .expert_parallel import checked_placement, refuse_split
from .local import Local, LocalKind
from .message_format import sent_words
from .partial import PartialKind, share
from .peers import HEAD_BYTES, MOST_PEERS, PeerBuffers, Returned, Sent, collect, post, prefetch_all, pull, reduce, send
from .symmetric_buffer import PeerArena, SymmetricBuffers, symmetric_buffers
from .traffic import OutgoingTokens, Traffic

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from ..problem import Problem
    from ..runtime.memory import Memory, MemoryMap, Regions
    from ..types import ContiguousBatch
    from .combine import ReducedCombine

__all__ = ["STORED", "PeersHandle", "Posted", "SymmMem", "SymmMemKind"]

STORED = True  # experts that can store each row at its owner's, beside their products, instead of letting it be read


class Posted(NamedTuple):
    """A pass whose tokens peers may read. dtype: of the tokens; order: of the columns of codes."""

    peers: PeerBuffers
    sent: Sent
    weights: Tensor
    dtype: torch.dtype
    order: int


class PeersHandle(NamedTuple):
    """slots: ``[W * B, K]``, the row of every rank's assignments here. tokens: of this rank.

    arrived: weights of all ranks' tokens ``[W * B, K]``, None where this rank multiplies by none. stored: the experts
    store rows at their owners'.
    """

    posted: Posted
    slots: Tensor
    tokens: int
    arrived: Tensor | None
    stored: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SymmMem:
    """Some experts are here. limit: the most tokens a rank may bring. on_gpu: kernels exchange, and not torch.

    reduced: None where each row comes back.
    """

    inner: Local
    map: ExpertMap
    limit: int
    blocks: SymmetricBuffers
    on_gpu: bool
    reduced: ReducedCombine | None = None

    def rows(self, tokens: int, top_k: int) -> int:
        """Return this rank's share of the assignments of as many tokens on every rank."""
        return share(tokens * self.map.world_size * top_k, self.inner.num_experts, self.map.num_experts)

    def register_layer(self, places: MemoryMap) -> int:
        """Make room for a layer's regions and return its number; all ranks ask at the same time."""
        return self.blocks.register_layer(places)

    def sync_pass(self, memory: Memory, layer: int, tokens: int, top_k: int, *, shares: int = 1) -> Hashable:
        """Agree with the peers on the pass that ``memory`` is for; return what it has in common with passes like it."""
        assert isinstance(memory, PeerArena)
        memory.peers, kind = self.blocks.sync_pass(layer, tokens, top_k, self.limit, shares=shares)
        return kind

    def sync_call(self, layer: int, tokens: int, top_k: int, *, shares: int = 1) -> None:
        """Agree as ``meet`` does, without a pass that follows: nothing on the device knows of it."""
        self.blocks.sync_pass(layer, tokens, top_k, self.limit, shares=shares)

    def send(
        self, x: Tensor, routing: Routing, memory: Memory | None = None, *, codes: tuple[str, int] | None = None
    ) -> Posted:
        """Post ``x [T, H]``. codes: format and order of what the experts multiply, None for tokens."""
        memory = memory or FreshMemory(x.device)
        tokens, top_k = routing.topk_ids.shape
        peers = self.peers_of(memory, tokens, x.device)
        carried, bound = self.inner.weight_on_input, peers.bound
        weighted = carried or self.reduced is not None
        name, order = (cast_name(x.dtype), AS_IS) if codes is None or carried else codes
        form = activation_format(name)
        own = part(memory, "sent")
        wide = form.padded_columns(x.shape[1], order)
        # Room for the most tokens of a rank, since every rank finds its peers' by its own.
        made = {
            key: alloc(own, key, shape, dtype, x.device) for key, (shape, dtype) in form.buffers(bound, wide).items()
        }
        sent = Sent(
            x=made["codes"],
            scale=made.get("scales"),
            ids=alloc(own, "ids", (bound, top_k), torch.int32, x.device),
            weights=alloc(own, "weights", (bound, top_k), torch.float32, x.device) if weighted else None,
        )
        if bound and self.on_gpu:
            send(peers, x, sent, routing, self.map, form, order)
        elif bound:
            sent.x[:tokens] = x
            post(peers, sent, routing, self.map)
        return Posted(peers, sent, routing.topk_weights, x.dtype, order)

    def receive(
        self,
        posted: Posted,
        memory: Memory | None = None,
        *,
        block_t: tuple[int, ...] = (),
        storing: tuple[int, torch.dtype] | None = None,
    ) -> tuple[ContiguousBatch, PeersHandle]:
        """Pull the tokens of this rank's experts and sort their assignments; see ``SymmetricDispatcher``."""
        memory = memory or FreshMemory(posted.sent.x.device)
        peers, sent, world = posted.peers, posted.sent, posted.peers.world
        device = sent.x.device

        def room(name: str, like: Tensor) -> Tensor:
            return alloc(memory, name, (world * like.shape[0], like.shape[1]), like.dtype, device)

        own = Sent(
            x=room("x", sent.x),
            scale=None if sent.scale is None else room("scale", sent.scale),
            ids=room("ids", sent.ids),
            weights=None if sent.weights is None else room("weights", sent.weights),
        )
        if peers.bound:
            pull(peers, sent, own, self.map)
        weights = posted.weights if own.weights is None else own.weights  # not read unless they multiply the input
        owners = None
        if STORED and storing is not None and self.on_gpu and self.reduced is None and peers.bound:
            (width, dtype), count = storing, peers.bound * sent.ids.shape[1]
            back = alloc(part(memory, "experts"), "rows", (count, width), dtype, device)
            owners = Owners(back, peers.deltas)
        batch, inner = self.inner.dispatch(
            own.x, Routing(topk_ids=own.ids, topk_weights=weights), memory, block_t=block_t, owners=owners
        )
        batch = replace(
            batch,
            scale=own.scale,
            dtype=posted.dtype,
            rows=self.expected_rows(posted),
            order=posted.order,
            x_ready=False,
        )
        return batch, PeersHandle(posted, inner.slots, posted.weights.shape[0], inner.weights, owners is not None)

    def dispatch(
        self, x: Tensor, routing: Routing, memory: Memory | None = None, *, block_t: tuple[int, ...] = ()
    ) -> tuple[ContiguousBatch, PeersHandle]:
        """Do both halves; tokens travel as they are."""
        return self.receive(self.send(x, routing, memory), memory, block_t=block_t)

    def combine(
        self,
        rows: Tensor,
        handle: PeersHandle,
        memory: Memory | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        shared: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return ``[T, H]`` of this rank's own tokens, with the bits of a single rank unless it is reduced."""
        posted, tokens = handle.posted, handle.tokens
        if out is None:
            out = alloc(memory, "sum", (tokens, rows.shape[1]), dtype, rows.device)
        if not posted.peers.bound:
            return out
        if self.reduced is not None:
            shape = handle.slots.shape[0], rows.shape[1]
            sums = alloc(part(memory, "back"), "sums", shape, self.reduced.dtype, rows.device)
            reduce(posted.peers, rows.contiguous(), handle.slots, handle.arrived, sums)
            return collect(posted.peers, posted.sent, Returned(sums, None), None, self.map, out, shared)
        if handle.stored:
            returned = Returned(rows, None, stored=True)
        else:
            returned = Returned(self._reachable(rows, "rows", memory), self._reachable(handle.slots, "slots", memory))
        weights = None if self.inner.weight_on_input else posted.weights
        return collect(posted.peers, posted.sent, returned, weights, self.map, out, shared)

    def expected_rows(self, posted: Posted) -> int:
        """Return how many rows are likely to be here."""
        return self.rows(posted.peers.bound, posted.sent.ids.shape[1])

    def check(self) -> None:
        """Wait for the device, and raise the RankError of a pass since which output is NaN, if there was one."""
        self.blocks.check()

    def peers_of(self, memory: Memory, tokens: int, device: torch.device) -> PeerBuffers:
        """Return what a pass of ``tokens`` tokens here, which runs in ``memory``, knows of its peers."""
        if isinstance(memory, PeerArena):
            assert memory.peers is not None
            return memory.peers
        # Memory that peers cannot read: kernels are compiled, and this rank takes every peer's part.
        with torch.inference_mode(False):
            head = torch.zeros(HEAD_BYTES // 8, dtype=torch.int64, device=device)
            deltas = torch.zeros(self.map.world_size + 1, dtype=torch.int64, device=device)
            deltas[-1] = head.data_ptr() + HEAD_BYTES - 8
        ranks = tuple(range(self.map.world_size))
        return PeerBuffers(rank=0, ranks=ranks, layer=0, bound=tokens, seconds=1, head=head, deltas=deltas, alone=True)

    def _reachable(self, made: Tensor, name: str, memory: Memory | None) -> Tensor:
        """Return ``made`` where peers reach it: itself, or a copy of what torch or a user's function made elsewhere."""
        if not isinstance(memory, PeerArena):
            return made
        start = memory.block.data_ptr()
        if start <= made.data_ptr() < start + memory.block.numel() and made.is_contiguous():
            return made
        if self.on_gpu:
            return memory.part("experts").alloc("rows", tuple(made.shape), made.dtype).copy_(made)
        return memory.part("back").alloc(name, tuple(made.shape), made.dtype).copy_(made)


class SymmMemKind:
    """The row of the table: GPUs of one host; on a CPU, for tests of the protocol, only when asked for by name."""

    name = "symm_mem"
    capturable = True
    collective = True
    symmetric = True

    def refuse(self, problem: Problem, *, asked: bool) -> str | None:
        """Refuse what ``refuse_split`` does, slices, ranks with the same tokens, a CPU, and several hosts."""
        reason, placed, device = refuse_split(problem), problem.placement, problem.device
        if reason is not None or placed is None:
            return reason
        if placed.world_size > MOST_PEERS or problem.spec.routing.top_k > 255 or problem.limits.max_tokens >= 1 << 24:
            return (
                f"asked for {placed.world_size} ranks, top-{problem.spec.routing.top_k} and "
                f"{problem.limits.max_tokens} tokens; its flags hold {MOST_PEERS} ranks, top-255 and 16,777,215 tokens"
            )
        if problem.combine not in ("exact", "reduced"):
            return f"asked for the combine {problem.combine}; sums are written as they are added, without codes"
        if asked:
            return None
        if device.kind != "cuda":
            return (
                "asked for cpu; it is for GPUs that read each other's memory; Overrides(dispatcher='symm_mem') tries it"
            )
        if device.peers is not None and device.peers < placed.world_size:
            return (
                f"asked for {placed.world_size} ranks; {device.peers} GPUs of this host reach each other's memory; "
                "Overrides(dispatcher='symm_mem') tries where each process sees its own GPU alone"
            )
        return None

    def wire_format(self, problem: Problem) -> str:
        """Return what travels; on a CPU tokens as they are."""
        sent = problem if problem.device.kind == "cuda" else replace(problem, sent_as=None)
        return f"{sent_words(sent)} once to each rank of their experts, {describe_return(problem)},"

    def rows(self, problem: Problem, tokens: int) -> int:
        """Return this rank's share of the assignments of as many tokens on every rank."""
        return PartialKind().rows(problem, tokens * problem.world_size)

    def capacity(self, problem: Problem) -> int:
        """Return the assignments of ``max_tokens`` tokens on every rank: all may fall on this rank's experts."""
        return LocalKind().capacity(problem) * problem.world_size

    def regions(self, problem: Problem, *, lists: bool) -> Regions:
        """Return what peers read, what is read of them, and the order of it; the same on every rank."""
        rule, tokens, wide = problem.spec.routing, problem.limits.max_tokens, problem.spec.expert_hidden_size
        dtype, placed = DTYPES[problem.dtype], problem.placement
        name, world = problem.activation_format or problem.dtype, problem.world_size
        form = quantize_regions(tokens, wide, cast_name(dtype))
        if activation_format(name).e4m3:
            form = elementwise_max(form, quantize_regions(tokens, wide, name, order=PADDED))
        reduced, sent = reduced_combine(problem), form | {"ids": 4 * tokens * rule.top_k}
        weighted = rule.weight_on_input or reduced is not None
        if weighted:
            sent["weights"] = 4 * tokens * rule.top_k
        pulled = {"x": sent["codes"], "ids": sent["ids"]} | ({"scale": sent["scales"]} if "scales" in sent else {})
        pulled |= {"weights": sent["weights"]} if weighted else {}
        rows, slots = tokens * rule.top_k * world, max(1, placed.width if placed else 1)
        asked = {"weights": rule.weight_on_input, "row_offsets": reduced is None and problem.device.kind == "cuda"}
        order = permute_regions(rows, slots, block_t=(16, 16) if lists else (), **asked)
        made = with_prefix("sent", sent) | {key: size * world for key, size in pulled.items()}
        for key, size in order.items():
            made[key] = max(size, made.get(key, 0))
        if reduced is not None:
            made["back/sums"] = world * tokens * wide * reduced.dtype.itemsize
        elif problem.device.kind == "cpu":
            made |= {"back/rows": 4 * rows * wide, "back/slots": 8 * rows}
        inside = problem.spec.latent_size is not None
        return made | (weighted_sum_regions(tokens, wide, torch.float32) if inside else {})

    def traffic(self, problem: Problem, away: OutgoingTokens) -> Traffic:
        """Return places of all tokens and weights where they travel, a token a copy, and what is read of the rows."""
        rule, world, wide = problem.spec.routing, problem.world_size, problem.spec.expert_hidden_size
        coded = problem.sent_as if problem.device.kind == "cuda" else None
        form = activation_format(coded or problem.dtype)
        token = sum(quantize_regions(1, wide, form.name, order=PADDED if coded else AS_IS).values())
        every = away.tokens * (world - 1)
        weighted = rule.weight_on_input or problem.combine != "exact"
        ids = every * rule.top_k * 4 * (2 if weighted else 1)
        there = (every if prefetch_all(world, rule.top_k, away.most) else away.copies) * token + ids
        if problem.combine == "exact":
            return Traffic(there, away.rows * (return_bytes(problem) + 8))
        return Traffic(there, away.copies * wide * DTYPES[problem.dtype].itemsize)

    def build(self, problem: Problem) -> SymmMem:
        """Return the dispatcher; all ranks build it at the same time.

        Raises InputError on every rank where torch.distributed has other ranks than the placement, or where the ranks
        were planned for different layers.
        """
        placed, _ = checked_placement(self.name, problem)
        device = torch.device(problem.device.place)
        return SymmMem(
            inner=Local(num_experts=problem.slots, weight_on_input=problem.spec.routing.weight_on_input),
            map=ExpertMap(placed, problem.spec.num_experts, device),
            limit=problem.limits.max_tokens,
            blocks=symmetric_buffers(placed.group, device),
            on_gpu=device.type == "cuda",
            reduced=reduced_combine(problem),
        )
