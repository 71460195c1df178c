"""Ranks leave and join while the others' processes go on.

The remaining ranks find each other at the endpoint (``parallel/liveness.py``) of the lowest of them, or of the next one
if that is gone too. They create torch's default process group again over the store there, exchange which experts they
still hold, and agree on a new placement. Each rank keeps the experts that it holds, bit by bit; only experts that no
rank holds any more are read from the checkpoint. Then the same layers serve again, with the same bits as before.
"""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed

from ..checkpoint.layer_view import CheckpointLayer
from ..checkpoint.loader import load_experts
from ..checkpoint.reader import Checkpoint
from ..encoding import encoded
from ..errors import InputError, RankError
from ..parallel.liveness import Endpoint, is_dead, local_endpoint, store_at
from ..parallel.rendezvous import rendezvous_of, timeout_seconds
from ..parallel.symmetric_buffer import release_symmetric_buffers
from ..placement import Placement
from ..planning import kernel_named, plan
from ..problem import Overrides
from ..stages.checks import check_weights

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from ..experts import PackedWeights
    from ..layer import MoELayer
    from ..types import ExpertWeights

    Reader = Callable[[Any, tuple[int, ...]], ExpertWeights[Any]]

__all__ = ["address", "join", "reader_of", "regroup", "spread_experts"]

_PREFIX = "collegium/elastic"
_round = 0  # groups this process has formed or tried to form, the same for all members
_admitted = 0  # newcomers that were admitted at this process's endpoint


class _Members(NamedTuple):
    """What the lowest rank sends to all others.

    remaining: previous ranks that go on. joined: number of new processes. round: number of the new group.
    """

    remaining: tuple[int, ...]
    joined: int
    round: int

    @property
    def size(self) -> int:
        """World size of the new group."""
        return len(self.remaining) + self.joined


@dataclass(frozen=True, kw_only=True, slots=True)
class _Holding:
    """What one rank holds of a layer.

    expert_ids: in the order of slots. experts: number of experts of the layer. spare: requested empty slots.
    """

    expert_ids: tuple[int, ...]
    experts: int
    spare: int
    same_tokens: bool


def address() -> str:
    """Return the address where a new process may ``join``, if this process is rank 0."""
    endpoint = local_endpoint()
    return f"{endpoint.address}:{endpoint.port}"


def reader_of(
    path: str | os.PathLike[str] | Checkpoint, *, weight_format: str | None = None, device: torch.device | str = "cpu"
) -> Reader:
    """Return a function that reads the given experts of a layer, by number, from the checkpoint at ``path``."""
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint.open(path)

    def read(layer: Any, ids: tuple[int, ...]) -> ExpertWeights[Any]:
        view = CheckpointLayer.open(checkpoint, layer)
        convert = weight_format is not None
        weights = load_experts(view, Placement(expert_ids=ids), device=device, convert=convert)
        return encoded(weights, weight_format)

    return read


def spread_experts(rank_ids: Sequence[tuple[int, ...]], experts: int) -> tuple[tuple[int, ...], ...]:
    """Return the new experts of every rank, given those it holds; experts without a rank go to the emptiest ranks.

    Replicas stay. A rank without experts takes some from the fullest ranks until they differ by at most one.
    """
    result = [list(ids) for ids in rank_ids]
    present = set[int]().union(*map(set, result))
    for expert in sorted(set(range(experts)) - present):
        min(result, key=len).append(expert)
    empty = [rank for rank, ids in enumerate(rank_ids) if not ids]
    while empty:
        smallest = min((result[rank] for rank in empty), key=len)
        fullest = max(result, key=len)
        movable = [expert for expert in fullest if expert not in smallest]
        if len(fullest) - len(smallest) < 2 or not movable:
            break
        fullest.remove(movable[-1])
        smallest.append(movable[-1])
    return tuple(map(tuple, result))


def regroup(
    layers: Mapping[Any, MoELayer],
    lost: Sequence[int] = (),
    *,
    read: Reader | None = None,
    joining: int = 0,
    spare: int | None = None,
) -> tuple[int, int]:
    """Go on without the ranks ``lost``, or with ``joining`` new ones; return this process's new rank and world size.

    All remaining members of torch's default group call it, with the same layers by name, in the same order;
    ``RankError.ranks`` names the lost ranks. read: reads experts that no rank holds any more, by name of the layer
    (``reader_of`` expects the layer's number). spare: empty slots of a rank; None: as many as before. The layers are
    changed in place: a layer of a single remaining rank goes on with the dispatcher ``local`` and the combine
    ``exact``, and CUDA graphs have to be captured again. While a layer's experts change slots, its packed weights are
    in memory twice. Close Balancers before, and create new ones afterwards.

    Raises RankError where another member does not respond in time, and InputError on every rank for layers that cannot
    go on: experts that no rank holds without ``read``, slices (tp_size above 1), process groups of the caller.
    """
    for name, layer in layers.items():
        _refuse(name, layer)
    members, store, old_rank = _gather(set(lost), joining)
    rank = members.remaining.index(old_rank)
    _replace_group(store, rank, members.size, members.round)
    holdings: dict[Any, _Holding | None] = {name: _holding(layer, spare) for name, layer in layers.items()}
    for name, placement in _agree_on_placements(holdings, read is not None).items():
        layer = layers[name]
        old_plan = layer.plan
        # A single rank receives nothing from other ranks.
        combine = old_plan.problem.combine if placement is not None else "exact"
        keeps_dispatcher = placement is not None and old_plan.dispatcher != "local"
        problem = replace(old_plan.problem, placement=placement, combine=combine)
        overrides = Overrides(
            kernel=old_plan.kernel,
            activation_format=old_plan.activation_format,
            dispatcher=old_plan.dispatcher if keeps_dispatcher else None,
        )
        layer.replan(plan(problem, overrides), _repack(name, layer, placement, read))
    return rank, members.size


def join(
    where: str,
    names: Sequence[Any],
    build: Callable[[Any, Placement], MoELayer],
    *,
    backend: str = "gloo",
    patience: float = 60.0,
) -> dict[Any, MoELayer]:
    """Become a rank of the group whose rank 0 is at ``where`` (``address``), once it calls ``regroup(joining=...)``.

    names: of the layers, as the members have them. build: builds a layer for its placement, for instance with
    ``load_routed``; this process has no process group yet. patience: seconds to wait for admission. Raises RankError.
    """
    global _round
    host, _, port = where.rpartition(":")
    try:
        store = store_at(Endpoint("", host, int(port)), timeout_seconds())
        number = store.add(f"{_PREFIX}/newcomers", 1)
        store.set(f"{_PREFIX}/newcomer {number}", b"here")
        key = f"{_PREFIX}/let in {number}"
        store.wait([key], timedelta(seconds=patience))
        members, index = pickle.loads(store.get(key))
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"join: nobody let this process in at {where} within {patience:g} s; ask for address() of the group's rank "
            "0, whose members call regroup(joining=1)",
            ranks=(0,),
            phase="join",
        ) from error
    _round = members.round
    _create_group(backend, store, members.round, len(members.remaining) + index, members.size)
    placements = _agree_on_placements(dict.fromkeys(names), True)
    return {name: build(name, placement) for name, placement in placements.items() if placement is not None}


def _refuse(name: Any, layer: MoELayer) -> None:
    """Raise InputError for layers that cannot change ranks."""
    merged = layer.plan.merged_shared_experts
    if merged:
        raise InputError(
            f"regroup: layer {name} has its shared expert among the routed ones, as {merged} of them, which ranks "
            "cannot share; load it with Overrides(shared='sequential')"
        )
    placement = layer.plan.problem.placement
    if placement is None:
        return
    if placement.tp_size > 1 or placement.group or layer.dispatcher.expert_map is None:
        raise InputError(
            f"regroup: layer {name} is {placement} with dispatcher {layer.plan.dispatcher}; it works for whole experts "
            "over torch's default process group, by a dispatcher with a map"
        )


def _holding(layer: MoELayer, spare: int | None) -> _Holding:
    placement = layer.plan.problem.placement
    if spare is None:
        spare = 0 if placement is None else placement.spare
    return _Holding(
        expert_ids=tuple(expert for expert in _local_slots(layer) if expert != -1),
        experts=layer.spec.num_experts,
        spare=spare,
        same_tokens=placement is not None and placement.same_tokens,
    )


def _local_slots(layer: MoELayer) -> tuple[int, ...]:
    """Return the expert in each slot of this rank, -1 for an empty slot."""
    expert_map = layer.dispatcher.expert_map
    if expert_map is None:
        return layer.plan.problem.local_experts
    return expert_map.slots[expert_map.rank]


def _agree_on_placements(holdings: Mapping[Any, _Holding | None], readable: bool) -> dict[Any, Placement | None]:
    """Exchange the holdings of all ranks; return the placement of every layer, None for a single rank.

    holdings: by name of the layer, None in a new process. readable: whether this rank can read missing experts.
    """
    rank = distributed.get_rank()
    size = distributed.get_world_size()
    reports = rendezvous_of().exchange((list(holdings.items()), readable), "regroup: what every rank holds")
    rank_names = [[name for name, _ in items] for items, _ in reports]
    if any(names != list(holdings) for names in rank_names):
        listing = "; ".join(f"rank {index}: {names}" for index, names in enumerate(rank_names))
        raise InputError(f"regroup: every rank needs the same layers in the same order, found {listing}")
    all_readable = all(can_read for _, can_read in reports)
    placements: dict[Any, Placement | None] = {}
    for name in holdings:
        rank_holdings: list[_Holding | None] = [dict(items)[name] for items, _ in reports]
        layer = next(holding for holding in rank_holdings if holding is not None)
        rank_ids = [() if holding is None else holding.expert_ids for holding in rank_holdings]
        missing = sorted(set(range(layer.experts)).difference(*rank_ids))
        if missing and not all_readable:
            raise InputError(
                f"regroup: layer {name}, experts {missing[:8]} are on no rank that is left, and not every rank was "
                "given read= to read them from the checkpoint; pass reader_of(path)"
            )
        ranks = spread_experts(rank_ids, layer.experts)
        placements[name] = Placement(
            rank=rank,
            world_size=size,
            expert_ids=ranks[rank],
            ranks=ranks,
            spare=layer.spare,
            same_tokens=layer.same_tokens,
        )
    return placements if size > 1 else dict.fromkeys(holdings)


def _repack(name: Any, layer: MoELayer, placement: Placement | None, read: Reader | None) -> PackedWeights:
    """Return the layer's packed experts in the slots of ``placement``; only experts of other ranks are read."""
    ids = tuple(range(layer.spec.num_experts)) if placement is None else placement.expert_ids
    slot_of = {expert: slot for slot, expert in enumerate(_local_slots(layer)) if expert != -1}
    missing = tuple(expert for expert in ids if expert not in slot_of)
    packed = layer.experts.resized(len(ids) + (0 if placement is None else placement.spare))
    read_experts: PackedWeights | None = None
    if missing:
        assert read is not None  # all ranks have agreed on it
        problem = replace(layer.plan.problem.routed, experts=len(missing))
        weights = replace(read(name, missing), input_reach=layer.experts.input_reach)
        check_weights(weights, problem)
        read_experts = kernel_named(layer.plan.kernel).pack(weights, problem)
    for slot, expert in enumerate(ids):
        if read_experts is not None and expert in missing:
            packed.put(slot, read_experts.take(missing.index(expert)))
        else:
            packed.put(slot, layer.experts.take(slot_of[expert]))
    for slot in range(len(ids), packed.slots()[0].shape[0]):
        packed.put(slot, packed.take(0))
    return packed


def _gather(lost: set[int], joining: int) -> tuple[_Members, Any, int]:
    """Return the members of the new group, the store they meet in, and this process's previous rank."""
    global _round
    _round += 1
    rendezvous = rendezvous_of()
    endpoints = rendezvous.endpoints
    old_rank = rendezvous.rank
    if not endpoints and rendezvous.size > 1:
        raise InputError("regroup: these ranks never met, so no rank has another's address; build a split layer first")
    while True:
        remaining = [rank for rank in range(rendezvous.size) if rank not in lost]
        if old_rank not in remaining:
            raise InputError(f"regroup: this process is rank {old_rank}, which is among those lost: {sorted(lost)}")
        leader = remaining[0]
        if leader == old_rank:
            return _lead(remaining, endpoints, joining, old_rank)
        try:
            store = store_at(endpoints[leader], timeout_seconds())
            store.set(f"{_PREFIX}/{_round}/here {old_rank}", b"here")
            # The leader waits two timeouts for ranks that detect the loss last, and one for newcomers.
            store.wait([f"{_PREFIX}/{_round}/members"], timedelta(seconds=4 * timeout_seconds()))
            members = pickle.loads(store.get(f"{_PREFIX}/{_round}/members"))
        except RuntimeError as error:
            if is_dead(endpoints[leader]):
                lost.add(leader)
                continue
            raise _left_behind((leader,)) from error
        if old_rank not in members.remaining:
            raise _left_behind(members.remaining)
        return members, store, old_rank


def _lead(
    remaining: list[int], endpoints: Sequence[Endpoint], joining: int, old_rank: int
) -> tuple[_Members, Any, int]:
    """Wait at this process's endpoint for the other remaining ranks and for newcomers; send them the members."""
    store = store_at(local_endpoint(), timeout_seconds())
    present = [old_rank, *_wait_for_ranks(store, remaining[1:], endpoints)]
    newcomers = _admit(store, joining)
    members = _Members(tuple(present), len(newcomers), _round)
    for index, number in enumerate(newcomers):
        store.set(f"{_PREFIX}/let in {number}", pickle.dumps((members, index)))
    store.set(f"{_PREFIX}/{_round}/members", pickle.dumps(members))
    return members, store, old_rank


def _wait_for_ranks(store: Any, ranks: Sequence[int], endpoints: Sequence[Endpoint]) -> list[int]:
    """Return those of ``ranks`` that come in time."""
    deadline = time.monotonic() + 2 * timeout_seconds()
    present: list[int] = []
    for rank in ranks:
        while not store.check([f"{_PREFIX}/{_round}/here {rank}"]):
            if is_dead(endpoints[rank]) or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        else:
            present.append(rank)
    return present


def _admit(store: Any, joining: int) -> list[int]:
    """Return the numbers of up to ``joining`` newcomers that come in time."""
    global _admitted
    deadline = time.monotonic() + timeout_seconds()
    newcomers: list[int] = []
    while len(newcomers) < joining and time.monotonic() < deadline:
        if store.check([f"{_PREFIX}/newcomer {_admitted + 1}"]):
            _admitted += 1
            newcomers.append(_admitted)
        else:
            time.sleep(0.01)
    return newcomers


def _left_behind(ranks: tuple[int, ...]) -> RankError:
    return RankError(
        f"regroup: rank {', '.join(map(str, ranks))} went on without this one, or does not answer; start this process "
        "again and let it join",
        ranks=ranks,
        phase="regroup",
    )


def _replace_group(store: Any, rank: int, size: int, number: int) -> None:
    """Destroy torch's default group and create it again with the remaining members.

    Work that is queued on a communicator of NCCL that lost a rank never ends, so NCCL is aborted.
    """
    backend: str = distributed.get_backend_config()
    if "nccl" in backend:
        distributed.distributed_c10d._abort_process_group()  # pyright: ignore[reportPrivateUsage]
    else:
        distributed.destroy_process_group()
    release_symmetric_buffers()
    _create_group(backend, store, number, rank, size)


def _create_group(backend: str, store: Any, number: int, rank: int, size: int) -> None:
    """Create torch's default group number ``number`` of this process's members.

    torch names groups by a count that starts at 0 again, and its symmetric memory identifies groups by name, so the
    count is set to a fresh range.
    """
    prefix_store: Any = distributed.PrefixStore  # pyright: ignore[reportPrivateImportUsage] - torch documents it
    world: Any = distributed.distributed_c10d._world  # pyright: ignore[reportPrivateUsage]
    world.group_count = number << 20
    distributed.init_process_group(
        backend,
        store=prefix_store(f"{_PREFIX}/{number}/group", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=max(timeout_seconds(), 1.0)),
    )
