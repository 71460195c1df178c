"""Ranks leave and join while the others' processes go on.

The ranks that are left find each other at the door (``parallel/liveness.py``) of the lowest of them, which is
another one
where that is gone too, form torch's default process group anew over the store behind it, say what they still hold, and
agree on where every expert is to be. What a rank holds it keeps, bit by bit; what nobody holds any more is read from
the checkpoint, and nothing else. Then the same layers answer again, with the bits they always had.
"""

from __future__ import annotations

import pickle
import time
from dataclasses import replace
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

_ROOM = "collegium/elastic"
_round = 0  # groups this process has formed or tried to, the same for all its members
_admitted = 0  # newcomers that were let in through this process's door


class _Members(NamedTuple):
    """What the lowest rank tells all others. old: those of the ranks before that go on. new: how many joined."""

    old: tuple[int, ...]
    new: int
    round: int


def address() -> str:
    """Return where a new process may ``join``, once this one is rank 0."""
    door = local_endpoint()
    return f"{door.address}:{door.port}"


def reader_of(
    path: str | os.PathLike[str] | Checkpoint, *, weight_format: str | None = None, device: torch.device | str = "cpu"
) -> Reader:
    """Return what reads experts of a layer, by number, from the checkpoint at ``path``, and none of the others."""
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint.open(path)

    def read(layer: Any, ids: tuple[int, ...]) -> ExpertWeights[Any]:
        opened = CheckpointLayer.open(checkpoint, layer)
        convert = weight_format is not None
        weights = load_experts(opened, Placement(expert_ids=ids), device=device, convert=convert)
        return encoded(weights, weight_format)

    return read


def spread_experts(held: Sequence[tuple[int, ...]], experts: int) -> tuple[tuple[int, ...], ...]:
    """Return what every rank is to hold: what it has, what nobody has on the ranks with fewest, an even share for all.

    Replicas stay where they are; a rank that has nothing takes from the fullest until they differ by one at most.
    """
    made = [list(own) for own in held]
    there = set[int]().union(*map(set, made))
    for expert in sorted(set(range(experts)) - there):
        min(made, key=len).append(expert)
    empty = [rank for rank, own in enumerate(held) if not own]
    while empty:
        least, most = min((made[rank] for rank in empty), key=len), max(made, key=len)
        movable = [expert for expert in most if expert not in least]
        if len(most) - len(least) < 2 or not movable:
            break
        most.remove(movable[-1])
        least.append(movable[-1])
    return tuple(map(tuple, made))


def regroup(
    layers: Mapping[Any, MoELayer],
    lost: Sequence[int] = (),
    *,
    read: Reader | None = None,
    joining: int = 0,
    spare: int | None = None,
) -> tuple[int, int]:
    """Go on without the ranks ``lost``, or with ``joining`` new ones; return this process's new rank and world size.

    All members call it, those of torch's default group that are left, with the same layers by name, in the same order;
    ``RankError.ranks`` says who is lost. read: what nobody holds any more, by name of the layer (``reader_of`` takes
    the layer's number). spare: empty slots of a rank, as many as before when None. The layers are changed in place: a
    layer of its own rank alone goes on with ``local`` and the combine ``exact``, and CUDA graphs of them are captured
    anew. While a layer's experts change slots it takes its packed bytes once more. Balancers are closed before and made
    again.

    Raises RankError where another member does not come in time, and InputError on every rank for layers that cannot
    go on: experts that nobody holds without ``read``, slices (tp_size above 1), process groups of one's own.
    """
    for name, layer in layers.items():
        _refuse(name, layer)
    members, store, me = _gather(set(lost), joining)
    rank, size = members.old.index(me), len(members.old) + members.new
    _replace_group(store, rank, size, members.round)
    own = {
        name: (_held(layer), layer.spec.num_experts, _spare(layer, spare), _same(layer))
        for name, layer in layers.items()
    }
    for name, placed in _agreed(own, read is not None).items():
        layer, chosen = layers[name], layers[name].plan
        combine = chosen.problem.combine if placed is not None else "exact"  # nothing comes back from another rank
        problem = replace(chosen.problem, placement=placed, combine=combine)
        choice = Overrides(
            kernel=chosen.kernel,
            activation_format=chosen.activation_format,
            dispatcher=chosen.dispatcher if placed is not None and chosen.dispatcher != "local" else None,
        )
        layer.replan(plan(problem, choice), _repacked(name, layer, placed, read))
    return rank, size


def join(
    where: str,
    names: Sequence[Any],
    build: Callable[[Any, Placement], MoELayer],
    *,
    backend: str = "gloo",
    patience: float = 60.0,
) -> dict[Any, MoELayer]:
    """Become a rank of the group whose rank 0 is at ``where`` (``address``), once it calls ``regroup(joining=...)``.

    names: of the layers, as the members have them. build: makes the layer for the placement it is given, as with
    ``load_routed``; this process has no process group yet. patience: seconds to wait to be let in. Raises RankError.
    """
    global _round
    host, _, port = where.rpartition(":")
    try:
        store = store_at(Endpoint("", host, int(port)), timeout_seconds())
        number = store.add(f"{_ROOM}/newcomers", 1)
        store.set(f"{_ROOM}/newcomer {number}", b"here")
        key = f"{_ROOM}/let in {number}"
        store.wait([key], timedelta(seconds=patience))
        members, place = pickle.loads(store.get(key))
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"join: nobody let this process in at {where} within {patience:g} s; ask for address() of the group's rank "
            "0, whose members call regroup(joining=1)",
            ranks=(0,),
            phase="join",
        ) from error
    _round = members.round
    _form(backend, store, members.round, len(members.old) + place, len(members.old) + members.new)
    placements = _agreed(dict.fromkeys(names), True)
    return {name: build(name, placed) for name, placed in placements.items() if placed is not None}


def _refuse(name: Any, layer: MoELayer) -> None:
    placed = layer.plan.problem.placement
    if layer.plan.merged_shared_experts:
        raise InputError(
            f"regroup: layer {name} has its shared expert among the routed ones, as "
            f"{layer.plan.merged_shared_experts} of them, which ranks cannot share; load it with "
            "Overrides(shared='apart')"
        )
    if placed is not None and (placed.tp_size > 1 or placed.group or getattr(layer.dispatcher, "map", None) is None):
        raise InputError(
            f"regroup: layer {name} is {placed} with dispatcher {layer.plan.dispatcher}; it works for whole experts "
            "over torch's default process group, by a dispatcher with a map"
        )


def _held(layer: MoELayer) -> tuple[int, ...]:
    """Return this rank's experts in the order of their slots."""
    table: Any = getattr(layer.dispatcher, "map", None)
    if table is None:
        return layer.plan.problem.local_experts
    return tuple(expert for expert in table.slots[table.rank] if expert != -1)


def _spare(layer: MoELayer, asked: int | None) -> int:
    placed = layer.plan.problem.placement
    return asked if asked is not None else 0 if placed is None else placed.spare


def _same(layer: MoELayer) -> bool:
    """Return whether all ranks call the layer with the same tokens."""
    placed = layer.plan.problem.placement
    return placed is not None and placed.same_tokens


def _agreed(own: Mapping[Any, Any], readable: bool) -> dict[Any, Placement | None]:
    """Return every layer's placement, None for a rank alone, from what all ranks hold."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    told = rendezvous_of().exchange((list(own.items()), readable), "regroup: what every rank holds")
    if any([name for name, _ in items] != list(own) for items, _ in told):
        said = "; ".join(f"rank {place}: {[name for name, _ in items]}" for place, (items, _) in enumerate(told))
        raise InputError(f"regroup: every rank needs the same layers in the same order, found {said}")
    made: dict[Any, Placement | None] = {}
    for name in own:
        known = [dict(items)[name] for items, _ in told]
        _, experts, spare, same = next(each for each in known if each is not None)
        held = [() if each is None else each[0] for each in known]
        nowhere = sorted(set(range(experts)).difference(*held))
        if nowhere and not all(can for _, can in told):
            raise InputError(
                f"regroup: layer {name}, experts {nowhere[:8]} are on no rank that is left, and not every rank was "
                "given read= to read them from the checkpoint; pass reader_of(path)"
            )
        ranks = spread_experts(held, experts)
        made[name] = Placement(
            rank=rank, world_size=size, expert_ids=ranks[rank], ranks=ranks, spare=spare, same_tokens=same
        )
    return made if size > 1 else dict.fromkeys(own)


def _repacked(name: Any, layer: MoELayer, placed: Placement | None, read: Reader | None) -> PackedWeights:
    """Return the layer's packed experts in the slots of ``placed``; only what is not here is read."""
    ids = tuple(range(layer.spec.num_experts)) if placed is None else placed.expert_ids
    table: Any = getattr(layer.dispatcher, "map", None)
    slots = layer.plan.problem.local_experts if table is None else table.slots[table.rank]
    here = {expert: slot for slot, expert in enumerate(slots) if expert != -1}
    missing = tuple(expert for expert in ids if expert not in here)
    made = layer.experts.resized(len(ids) + (0 if placed is None else placed.spare))
    fresh: PackedWeights | None = None
    if missing:
        assert read is not None  # agreed on
        asked = replace(layer.plan.problem.routed, experts=len(missing))
        own = replace(read(name, missing), input_reach=layer.experts.input_reach)
        check_weights(own, asked)
        fresh = kernel_named(layer.plan.kernel).pack(own, asked)
    for slot, expert in enumerate(ids):
        taken = fresh.take(missing.index(expert)) if fresh and expert in missing else layer.experts.take(here[expert])
        made.put(slot, taken)
    for slot in range(len(ids), made.slots()[0].shape[0]):
        made.put(slot, made.take(0))
    return made


def _gather(lost: set[int], joining: int) -> tuple[_Members, Any, int]:
    """Return who goes on, the store they meet in, and this process's rank before."""
    global _round
    _round += 1
    meeting = rendezvous_of()
    doors, me = meeting.endpoints, meeting.rank
    if not doors and meeting.size > 1:
        raise InputError("regroup: these ranks never met, so nobody knows another's door; build a split layer first")
    while True:
        left = [rank for rank in range(meeting.size) if rank not in lost]
        if me not in left:
            raise InputError(f"regroup: this process is rank {me}, which is among those lost: {sorted(lost)}")
        leader = left[0]
        if leader == me:
            return _lead(left, doors, joining, me)
        try:
            store = store_at(doors[leader], timeout_seconds())
            store.set(f"{_ROOM}/{_round}/here {me}", b"here")
            # The leader waits for who notices last twice as long as a wait may be, and for newcomers once.
            store.wait([f"{_ROOM}/{_round}/members"], timedelta(seconds=4 * timeout_seconds()))
            members = pickle.loads(store.get(f"{_ROOM}/{_round}/members"))
        except RuntimeError as error:
            if is_dead(doors[leader]):
                lost.add(leader)
                continue
            raise _late((leader,)) from error
        if me not in members.old:
            raise _late(members.old)
        return members, store, me


def _lead(left: list[int], doors: Sequence[Endpoint], joining: int, me: int) -> tuple[_Members, Any, int]:
    """Wait for the others that are left, and for newcomers, at this process's own door; tell them who came."""
    global _admitted
    store, came = store_at(local_endpoint(), timeout_seconds()), [me]
    until = time.monotonic() + 2 * timeout_seconds()
    for rank in left[1:]:
        while not store.check([f"{_ROOM}/{_round}/here {rank}"]):
            if is_dead(doors[rank]) or time.monotonic() > until:
                break
            time.sleep(0.01)
        else:
            came.append(rank)
    until = time.monotonic() + timeout_seconds()
    new: list[int] = []
    while len(new) < joining and time.monotonic() < until:
        if store.check([f"{_ROOM}/newcomer {_admitted + 1}"]):
            _admitted += 1
            new.append(_admitted)
        else:
            time.sleep(0.01)
    members = _Members(tuple(came), len(new), _round)
    for place, number in enumerate(new):
        store.set(f"{_ROOM}/let in {number}", pickle.dumps((members, place)))
    store.set(f"{_ROOM}/{_round}/members", pickle.dumps(members))
    return members, store, me


def _late(ranks: tuple[int, ...]) -> RankError:
    return RankError(
        f"regroup: rank {', '.join(map(str, ranks))} went on without this one, or does not answer; start this process "
        "again and let it join",
        ranks=ranks,
        phase="regroup",
    )


def _replace_group(store: Any, rank: int, size: int, number: int) -> None:
    """Drop torch's default group and make it anew of those who are left.

    What was queued on a communicator of NCCL that lost a rank never ends; it is aborted.
    """
    backend: str = distributed.get_backend_config()
    if "nccl" in backend:
        distributed.distributed_c10d._abort_process_group()  # pyright: ignore[reportPrivateUsage]
    else:
        distributed.destroy_process_group()
    release_symmetric_buffers()
    _form(backend, store, number, rank, size)


def _form(backend: str, store: Any, number: int, rank: int, size: int) -> None:
    """Make torch's default group number ``number`` of this process's members.

    torch names groups by a count that starts anew, and its symmetric memory takes a name for the group it first knew.
    """
    made: Any = distributed.PrefixStore  # pyright: ignore[reportPrivateImportUsage] - torch documents it
    world: Any = distributed.distributed_c10d._world  # pyright: ignore[reportPrivateUsage]
    world.group_count = number << 20
    distributed.init_process_group(
        backend,
        store=made(f"{_ROOM}/{number}/group", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=max(timeout_seconds(), 1.0)),
    )
