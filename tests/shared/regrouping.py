"""Ranks that leave a group and join it again, while layers keep their bits."""

from __future__ import annotations

import gc
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from collegium import Placement, Routing
from collegium.balance.balancer import Balancer
from collegium.balance.elastic import address, join, regroup
from collegium.testing.compare import uneven_ids
from moving import TOP_K, placement, split_layer, whole_weights
from ranks import error_of
from split_layers import taken

__all__ = ["come_and_go", "copies_suffice", "refused", "shrink", "sums_alone"]

EXPERTS, NAMES = 7, ("first", "second")
_WEIGHTS = {name: whole_weights("whole", EXPERTS, seed) for seed, name in enumerate(NAMES)}


class _Read:
    """Reads experts from what a checkpoint would hold, and remembers which."""

    def __init__(self) -> None:
        self.asked: dict[str, list[int]] = {name: [] for name in NAMES}

    def __call__(self, name: str, ids: tuple[int, ...]) -> Any:
        self.asked[name] += ids
        return taken(_WEIGHTS[name], ids)


def _faults(layers: dict[str, Any], when: str, same: bool = False) -> list[str]:
    """Serve as the rank this process is now; return what differs from layers that hold everything.

    same: with the tokens of all ranks.
    """
    rank, size, found = distributed.get_rank(), distributed.get_world_size(), list[str]()
    counts = [(5, 0, 3, 9)[r % 4] for r in range(size)]
    own = slice(None) if same else slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    made = torch.Generator().manual_seed(size)
    x = torch.randint(-2, 3, (sum(counts), 32), generator=made).float()
    ids = uneven_ids(sum(counts), TOP_K, EXPERTS, seed=size)
    weights = torch.rand(ids.shape, generator=made)
    for name in NAMES:
        whole = split_layer("whole", _WEIGHTS[name], "cpu", None)
        wanted = whole(x, routing=Routing(topk_ids=ids, topk_weights=weights))[own]
        for turn in range(3):
            answer = layers[name](x[own], routing=Routing(topk_ids=ids[own], topk_weights=weights[own]))
            if not torch.equal(answer, wanted):
                found.append(f"{when}, {name}, call {turn}")
    return found


def _layers(rank: int, world: int) -> dict[str, Any]:
    placed = placement(EXPERTS, rank, world, 1)
    return {name: split_layer("whole", _WEIGHTS[name], "cpu", placed) for name in NAMES}


def _alone(folder: str, rank: int) -> None:
    """End as a process group of one, as the caller expects some group."""
    distributed.init_process_group("gloo", init_method=f"file://{folder}/end{rank}", rank=0, world_size=1)


def _build(name: Any, placed: Placement) -> Any:
    return split_layer("whole", _WEIGHTS[name], "cpu", placed)


def come_and_go(rank: int, folder: str) -> Any:
    """Three ranks; the last one leaves, then the first; one is alone; both come back one after the other."""
    notes = Path(folder)
    layers, read, faults = _layers(rank, 3), _Read(), list[str]()
    faults += _faults(layers, "three ranks")
    held = {name: layers[name].plan.problem.placement.expert_ids for name in NAMES}
    kinds: list[str] = []
    if rank == 2:
        distributed.destroy_process_group()
        return _back(notes / "two", faults, read)
    assert regroup(layers, (2,), read=read) == (rank, 2)
    for name in NAMES:
        assert layers[name].plan.problem.placement.expert_ids[: len(held[name])] == held[name]
    faults += _faults(layers, "two ranks")
    lost_first = {name: list(ids) for name, ids in read.asked.items()}
    balancer = Balancer(layers, every=1)
    table = layers["first"].dispatcher.expert_map
    balancer.plan({"first": (table.slots[1], table.slots[0])})
    while not balancer.idle:
        balancer.step()
        faults += _faults(layers, "rebalancing on two ranks")
    balancer.close()
    assert balancer.counts.switched
    if rank == 0:
        distributed.destroy_process_group()
        return _back(notes / "one", faults, read)
    holds = {name: set(layers[name].dispatcher.expert_map.slots[1]) for name in NAMES}
    assert regroup(layers, (0,), read=read) == (0, 1)
    for name in NAMES:
        fresh = read.asked[name][len(lost_first[name]) :]
        assert sorted(fresh) == sorted(set(range(EXPERTS)) - holds[name])
    kinds.append(layers["first"].plan.dispatcher)
    faults += _faults(layers, "one rank")
    for name, size in (("one", 2), ("two", 3)):
        (notes / name).write_text(address())
        time.sleep(0.5)
        assert regroup(layers, joining=1, spare=1) == (0, size)
        kinds.append(layers["first"].plan.dispatcher)
        faults += _faults(layers, f"{size} ranks again")
    return faults, kinds, lost_first


def _back(note: Path, faults: list[str], read: _Read) -> Any:
    until = time.monotonic() + 60
    while not (note.exists() and note.read_text()):
        assert time.monotonic() < until
        time.sleep(0.05)
    layers = join(note.read_text(), NAMES, _build)
    while True:
        size = distributed.get_world_size()
        faults += _faults(layers, f"joined, {size} ranks")
        if size == 3:
            return faults, [layers["first"].plan.dispatcher], read.asked
        regroup(layers, joining=1)


def shrink(rank: int, folder: str, same: bool) -> Any:
    """Three ranks over symm_mem; the last leaves, then the first, and one is alone; its blocks go as groups do."""
    placed = replace(placement(EXPERTS, rank, 3, 1), same_tokens=same)
    layers: Any = {name: split_layer("whole", _WEIGHTS[name], "cpu", placed, "symm_mem") for name in NAMES}
    read, faults, kinds = _Read(), list[str](), list[str]()
    for size in (3, 2, 1):
        faults += _faults(layers, f"{size} ranks", same)
        kinds.append(layers["first"].plan.dispatcher)
        if size == 1:
            break
        if rank == (2 if size == 3 else 0):
            distributed.destroy_process_group()
            _alone(folder, rank)
            break
        block = weakref.ref(layers["first"].workspaces._block)
        assert block() is layers["second"].workspaces._block
        rank, _ = regroup(layers, (2 if size == 3 else 0,), read=read)
        gc.collect()
        if block() is not None:
            faults.append(f"the block of {size} ranks is still there")
    return faults, kinds


def copies_suffice(rank: int, folder: str) -> Any:
    """Every expert is on two of three ranks; rank 0 leaves and nothing has to be read."""
    ranks = ((0, 1, 2, 3, 4), (5, 6, 0, 1, 2), (3, 4, 5, 6))
    placed = Placement(rank=rank, world_size=3, expert_ids=ranks[rank], ranks=ranks, spare=1)
    layers = {name: split_layer("whole", _WEIGHTS[name], "cpu", placed) for name in NAMES}
    faults = _faults(layers, "three ranks")
    if rank == 0:
        distributed.destroy_process_group()
        _alone(folder, rank)
        return faults
    regroup(layers, (0,))
    return faults + _faults(layers, "two ranks")


def sums_alone(rank: int, folder: str) -> Any:
    """Two ranks send back sums; one leaves, and the other is alone."""
    faults: list[str] = []
    layers: Any = {}
    for name in NAMES:
        combine = "reduced" if name == "first" else "reduced_fp8"
        placed = placement(EXPERTS, rank, 2, 1)
        layers[name] = split_layer("whole", _WEIGHTS[name], "cpu", placed, combine=combine)
        layers[name](torch.ones(3, 32), router_logits=torch.zeros(3, EXPERTS))
    if rank == 0:
        distributed.destroy_process_group()
        _alone(folder, rank)
        return faults, []
    regroup(layers, (0,), read=_Read())
    return faults + _faults(layers, "alone"), [
        (own.plan.dispatcher, own.plan.problem.combine) for own in layers.values()
    ]


def refused(rank: int, folder: str) -> Any:
    """Return the errors of a group that cannot go on as asked; what it has still answers."""
    layers = _layers(rank, 3)
    odd = split_layer("whole", _WEIGHTS["first"], "cpu", placement(EXPERTS, rank, 3, 1))
    placed = odd.plan.problem.placement
    assert placed is not None
    odd.plan = replace(odd.plan, problem=replace(odd.plan.problem, placement=replace(placed, tp_size=2)))
    if rank == 2:
        distributed.destroy_process_group()
        _alone(folder, rank)
        return []
    asks: list[Any] = [
        lambda: regroup({"odd": odd}, (2,)),
        lambda: regroup(layers, (rank, 2)),
        lambda: regroup(layers, (2,)),
        lambda: join("127.0.0.1:1", NAMES, _build, patience=1),
    ]
    errors = [error_of(ask) for ask in asks]
    return errors
