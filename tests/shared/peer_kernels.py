"""The kernels that ranks exchange tokens and rows with, against torch, and what they do when a rank does not come."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed

from collegium.errors import InputError, RankError
from collegium.ops.permute import permute
from collegium.ops.weighted_sum import weighted_sum
from collegium.parallel.combine import ReducedCombine
from collegium.parallel.expert_map import ExpertMap
from collegium.parallel.peers import PeerBuffers, Returned, Sent, collect, post, pull, reduce
from collegium.parallel.rendezvous import rendezvous_of, timeout_seconds
from collegium.parallel.symmetric_buffer import SymmetricBuffers, symmetric_buffers
from collegium.placement import Placement
from collegium.runtime.memory import Memory, Region, memory_map
from collegium.types import Routing
from rough_tokens import rough_tokens, same, unmet

__all__ = ["exchange", "lose", "refused"]

EXPERTS, WIDTH, GROUPS, MOST = 5, 72, 2, 9
TURNS = ((3, 1, 0, 9), (0, 4, 2, 1), (9, 9, 9, 9), (1, 0, 0, 0))


def _device(rank: int) -> torch.device:
    return torch.device("cuda", rank) if distributed.get_backend() == "nccl" else torch.device("cpu")


def _placement(rank: int, world: int) -> Placement:
    """Replicas, and ranks that hold different numbers of experts."""
    ranks = tuple(tuple(e for e in range(EXPERTS) if e % world == r or e == 2) for r in range(world))
    return Placement(rank=rank, world_size=world, expert_ids=ranks[rank], ranks=ranks)


def _joined(rank: int, top_k: int) -> tuple[SymmetricBuffers, int, Any, ExpertMap]:
    world, device = distributed.get_world_size(), _device(rank)
    rows = world * MOST * top_k
    sizes = {"x": 4 * WIDTH * MOST, "scale": 4 * GROUPS * MOST, "ids": 4 * top_k * MOST, "weights": 4 * top_k * MOST}
    regions = [Region(f"sent/{name}", size) for name, size in sizes.items()]
    regions += [Region(f"own/{name}", world * size) for name, size in sizes.items()]
    places = memory_map(
        (
            *regions,
            Region("back/rows", 4 * rows * WIDTH),
            Region("back/slots", 8 * rows),
            Region("back/sums", 2 * world * MOST * WIDTH),
        )
    )
    blocks = symmetric_buffers("", device)
    return blocks, blocks.register_layer(places), places, ExpertMap(_placement(rank, world), EXPERTS, device)


def _given(turn: int, rank: int, tokens: int, top_k: int, device: torch.device) -> tuple[torch.Tensor, Routing]:
    x, own = rough_tokens(tokens, EXPERTS, top_k, WIDTH, seed=100 * turn + rank)
    return x.to(device), Routing(topk_ids=own.topk_ids.to(device), topk_weights=own.topk_weights.to(device))


def _expert(x: torch.Tensor, expert: int) -> torch.Tensor:
    return x * (expert + 1.5)


def _taken(memory: Memory, name: str, rows: int, top_k: int) -> Sent:
    own = memory.part(name)
    shapes = {"x": WIDTH, "scale": GROUPS, "ids": top_k, "weights": top_k}
    made = {
        key: own.alloc(key, (rows, size), torch.int32 if key == "ids" else torch.float32)
        for key, size in shapes.items()
    }
    return Sent(**made)


def _pass(
    peers: PeerBuffers, memory: Memory, table: ExpertMap, x: torch.Tensor, routing: Routing, *, reduced: bool = False
) -> tuple[Sent, torch.Tensor]:
    """Run one pass whose experts multiply; return what was pulled, and the sums, of parts in FP16 where reduced.

    The interpreter rounds to BF16 wrongly.
    """
    (tokens, top_k), world = routing.topk_ids.shape, peers.world
    sent, own = _taken(memory, "sent", peers.bound, top_k), _taken(memory, "own", world * peers.bound, top_k)
    assert sent.scale is not None
    for poisoned in (*own, sent.x):
        assert poisoned is not None
        poisoned.fill_(float("nan") if poisoned.is_floating_point() else 1 << 30)
    sent.x[:tokens], sent.scale[:tokens] = x, x[:, :GROUPS]
    post(peers, sent, routing, table)
    pull(peers, sent, own, table)
    order = permute(own.ids, table.width)
    made = memory.part("back").alloc("rows", (own.ids.numel(), WIDTH), torch.float32)
    made.fill_(float("nan"))
    held = table.slots[peers.rank]
    offsets = order.expert_offsets.tolist()
    for slot, expert in enumerate(held):
        span = slice(offsets[slot], offsets[slot + 1])
        made[span] = _expert(own.x[order.source[span]], expert)
    slots = memory.part("back").alloc("slots", tuple(order.slots.shape), torch.int64).copy_(order.slots)
    out = torch.full((tokens, WIDTH), float("inf"), device=x.device)
    if reduced:
        sums = memory.part("back").alloc("sums", (own.ids.shape[0], WIDTH), torch.float16)
        # What a peer that is ahead wrote already is not to be lost, so poison is what the last pass left.
        reduce(peers, made, order.slots, own.weights, sums)
        collect(peers, sent, Returned(sums, None), None, table, out, shared=x)
        return own, out
    collect(peers, sent, Returned(made, slots), routing.topk_weights, table, out, shared=x)
    return own, out


def _copied(own: Sent) -> Sent:
    assert own.scale is not None
    return Sent(own.x.clone(), own.scale.clone(), own.ids.clone(), None)


def _wanted(x: torch.Tensor, routing: Routing) -> torch.Tensor:
    ids = routing.topk_ids
    rows = torch.stack(
        [_expert(x[t], int(e)) for t, own in enumerate(ids.tolist()) for e in own] or [x.new_zeros(WIDTH)]
    )
    rows = rows[: ids.numel()]
    return weighted_sum(rows, ids, routing.topk_weights, torch.float32, shared=x, experts=EXPERTS)


def _wanted_of_parts(x: torch.Tensor, routing: Routing, table: ExpertMap, world: int) -> torch.Tensor:
    """Return the definition: each rank's sum rounded to FP16, added in the order of ranks in float32."""
    ids = routing.topk_ids
    if not ids.numel():
        return torch.zeros_like(x)
    rows = torch.stack([_expert(x[t], int(e)) for t, own in enumerate(ids.tolist()) for e in own])
    wire, places = ReducedCombine(dtype=torch.float16, hidden=WIDTH, form=None), table.choose(ids)
    slots, line = torch.arange(ids.numel(), device=x.device).view(ids.shape), torch.arange(len(x), device=x.device)
    own = [torch.where((places >= 0) & (places // table.width == rank), slots, -1) for rank in range(world)]
    parts = torch.cat([wire.parts(rows, each, routing.topk_weights) for each in own])
    lost = (places < -1).any(dim=1)
    lines = [
        torch.where(lost, -2, torch.where((each >= 0).any(1), line + rank * len(x), -1))
        for rank, each in enumerate(own)
    ]
    return wire.sum(parts, torch.stack(lines, 1), dtype=torch.float32, shared=x)


def exchange(rank: int) -> list[str]:
    """Return what the kernels do otherwise than torch and than one rank, over several passes and two layers."""
    world, device, faults = distributed.get_world_size(), _device(rank), list[str]()
    for top_k in (3, 1):
        blocks, layer, places, table = _joined(rank, top_k)
        table.recording.fill_(1)
        for turn, counts in enumerate(TURNS):
            tokens = counts[rank]
            x, routing = _given(turn, rank, tokens, top_k, device)
            pulled: list[Sent] = []
            wanted = _wanted(x, routing), _wanted_of_parts(x, routing, table, world)
            if tokens > 4 and same(*wanted):
                faults.append(f"top-{top_k}, {counts}: parts are not rounded")
            ways = (True, False) if device.type == "cpu" else (False, False)
            for torch_alone, reduced in product(ways, (False, True)):
                space = blocks.acquire()
                memory = space.memory(places)
                peers, _ = blocks.sync_pass(layer, tokens, top_k, MOST)
                peers = peers if torch_alone else replace(peers, blocks=())
                own, out = _pass(peers, memory, table, x, routing, reduced=reduced)
                pulled.append(_copied(own))
                blocks.release(space)
                blocks.check()
                if not same(out, wanted[reduced]):
                    faults.append(f"top-{top_k}, {counts}, torch {torch_alone}, reduced {reduced}: other sums")
            if not torch.equal(pulled[0].ids, pulled[-1].ids):
                faults.append(f"top-{top_k}, {counts}: other slots")
            used = (pulled[0].ids >= 0).any(dim=1)
            for name in ("x", "scale"):
                first, second = (getattr(each, name)[used] for each in (pulled[0], pulled[-1]))
                if not torch.equal(first, second) or not bool(first.isfinite().all()):
                    faults.append(f"top-{top_k}, {counts}: other {name}")
            few = max(counts[:world]) <= 8 or (1 - 1 / world) ** top_k <= 1 / 16  # then nobody asks
            if not few and not bool(pulled[-1].x[~used].isnan().all()):
                faults.append(f"top-{top_k}, {counts}: tokens came that have no expert here")
        ids = torch.cat(
            [_given(turn, rank, counts[rank], top_k, device)[1].topk_ids for turn, counts in enumerate(TURNS)]
        )
        known = ids[(ids >= 0) & (ids < EXPERTS)]
        if table.load.tolist() != (4 * torch.bincount(known.cpu(), minlength=EXPERTS)).tolist():
            faults.append(f"top-{top_k}: load {table.load.tolist()}")
    assert world <= 4
    return faults


def lose(rank: int) -> list[str]:
    """Return errors and output where the last rank does not come to a pass, then where all go on with a new block."""
    world, device, found = distributed.get_world_size(), _device(rank), list[str]()
    timeout_seconds(30)
    blocks, layer, places, table = _joined(rank, 2)

    def run(seconds: float) -> torch.Tensor:
        x, routing = _given(1, rank, 4, 2, device)
        space = blocks.acquire()
        try:
            peers, _ = blocks.sync_pass(layer, 4, 2, MOST)
            peers = replace(peers, blocks=(), seconds=seconds)
            return _pass(peers, space.memory(places), table, x, routing)[1]
        finally:
            blocks.release(space)

    short = 5e-6 if device.type == "cpu" else 0.5  # an interpreted look at the clock is a microsecond
    assert bool(run(30).isfinite().any())
    if rank != world - 1:
        out = run_alone(blocks, layer, places, table, rank, short)
        found.append(f"all NaN {bool(out.isnan().all())}")
    rendezvous_of().exchange(None, "everybody who came has given up")
    if rank == world - 1:
        out = run_alone(blocks, layer, places, table, rank, 30)
        found.append(f"all NaN {bool(out.isnan().all())}")
    try:
        blocks.check()
        found.append("no error")
    except RankError as error:
        found.append(f"{error.phase}; ranks {error.ranks}; {error}")
    blocks.renew()
    found.append(f"renewed {bool(run(30).isfinite().any())}")
    blocks.check()
    return found


def run_alone(
    blocks: SymmetricBuffers, layer: int, places: Any, table: ExpertMap, rank: int, seconds: float
) -> torch.Tensor:
    """Run a pass whose ranks agreed on nothing before."""
    device = _device(rank)
    x, routing = _given(1, rank, 4, 2, device)
    space = blocks.acquire()
    try:
        memory = space.memory(places)
        peers = unmet(space, blocks.ranks, layer=layer, seconds=seconds)
        return _pass(peers, memory, table, x, routing)[1]
    finally:
        blocks.release(space)


def refused(rank: int) -> str:
    """Return the error where the driver refuses the last rank's memory; then the ranks agree on a block."""

    def zeroed(tensor: torch.Tensor) -> torch.Tensor:
        if rank == distributed.get_world_size() - 1:
            raise RuntimeError("the driver says no")
        return tensor.fill_(0)

    error = "none"
    with patch.object(torch.Tensor, "zero_", zeroed):
        try:
            _joined(rank, 2)
        except InputError as found:
            error = str(found)
    blocks, _, places, _ = _joined(rank, 2)
    assert blocks.nbytes >= places.nbytes
    return error
