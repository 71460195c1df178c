"""Experts that move between ranks while layers serve, and layers of one rank beside them."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from typing import Any

import torch
from torch import distributed

from collegium import (
    ActivationSpec,
    ExpertWeights,
    Limits,
    MoELayer,
    MoESpec,
    Overrides,
    Placement,
    Problem,
    Routing,
    RoutingSpec,
    encode_experts,
    plan,
    probe,
)
from collegium.balance.balancer import Balancer
from collegium.balance.metrics import Metrics
from collegium.balance.policy import policy_named
from collegium.formats import Fp32
from collegium.testing.compare import heavy_tailed, random_experts, uneven_ids
from damaged_moves import DamagingBalancer
from ranks import error_of
from split_layers import taken

__all__ = [
    "HIDDEN",
    "RECIPES",
    "by_policy",
    "placement",
    "random_slots",
    "rebalance",
    "refused",
    "served_while_moving",
    "split_layer",
    "whole_weights",
]

WIDE, HIDDEN, TOP_K = 128, 128, 3
# Weight format, activation format, dtype. "whole": numbers so small that every sum is exact, whatever its order. On a
# CPU the bits of other rows depend on how many rows an expert has, and replicas share them; on a GPU they never do.
RECIPES = {
    "whole": ("fp32", "fp32", "fp32"),
    "bf16": ("bf16", "bf16", "bf16"),
    "mxfp4": ("mxfp4", "bf16", "bf16"),
    "fp8_block": ("fp8_block", "fp8_group128", "bf16"),
}
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def whole_weights(recipe: str, experts: int, seed: int) -> ExpertWeights[Any]:
    """Return all experts of a layer."""
    if recipe != "whole":
        return encode_experts(random_experts(experts, 2, WIDE, HIDDEN, seed=seed), RECIPES[recipe][0])
    own, wide, hidden = torch.Generator().manual_seed(seed), 32, 32
    up = torch.randint(-1, 2, (experts, 1, wide, hidden), generator=own).float()
    down = torch.randint(-1, 2, (experts, hidden, wide), generator=own).float()
    return ExpertWeights(
        gate_up=Fp32(shape=tuple(up.shape), values=up), down=Fp32(shape=tuple(down.shape), values=down)
    )


def placement(experts: int, rank: int, world: int, spare: int) -> Placement:
    """Return experts in a mixed order, the last rank having fewest, and one replica where there are several ranks."""
    ids = list(range(experts))
    random.Random(experts).shuffle(ids)
    own = [tuple(ids[r::world]) for r in range(world)]
    own[-1] = tuple(dict.fromkeys(own[-1] + own[0][:1]))
    return Placement(rank=rank, world_size=world, expert_ids=own[rank], ranks=tuple(own), spare=spare)


def split_layer(
    recipe: str,
    weights: ExpertWeights[Any],
    device: str,
    placed: Placement | None,
    dispatcher: str | None = None,
    **wished: Any,
) -> MoELayer:
    """Return a layer of the experts of ``placed``, of all where it is None; spare slots hold the first expert."""
    form, act, dtype = RECIPES[recipe]
    experts, hidden, wide = weights.down.shape
    spec = MoESpec(
        hidden_size=hidden,
        intermediate_size=wide,
        num_experts=experts,
        routing=RoutingSpec(top_k=TOP_K),
        activation=ActivationSpec(kind="relu2" if recipe == "whole" else "swiglu"),
        weight_format=form,
    )
    held = weights if placed is None else taken(weights, placed.expert_ids + placed.expert_ids[:1] * placed.spare)
    limits = Limits(max_tokens=64 if placed is not None else 512)
    problem: Any = Problem(spec=spec, device=probe(device), limits=limits, dtype=dtype, placement=placed)
    sent = replace(held, gate_up=held.gate_up.to(device), down=held.down.to(device))
    return MoELayer(sent, plan(problem, Overrides(activation_format=act, dispatcher=dispatcher, **wished)))


def random_slots(experts: int, room: tuple[int, ...], chance: random.Random, *, replicas: bool) -> Any:
    """Return experts for ranks with ``room`` slots, one of which stays empty; every expert somewhere."""
    own: list[set[int]] = [set() for _ in room]
    for expert in chance.sample(range(experts), experts):
        free = [rank for rank, held in enumerate(own) if len(held) < room[rank] - 1]
        own[chance.choice(free)].add(expert)
    for rank, held in enumerate(own):
        while replicas and len(held) < room[rank] - 1 and chance.random() < 0.7:
            held.add(chance.randrange(experts))
    return tuple(tuple(held) for held in own)


def _inputs(recipe: str, counts: list[int], experts: int, hidden: int, seed: int) -> tuple[torch.Tensor, Routing]:
    total = sum(counts)
    if recipe == "whole":
        x = torch.randint(-2, 3, (total, hidden), generator=torch.Generator().manual_seed(seed)).float()
    else:
        x = heavy_tailed(total, hidden, seed=seed)
    ids = uneven_ids(total, TOP_K, experts, seed=seed)
    ids[1::5, 0] = -1
    given = heavy_tailed(*ids.shape, seed=seed + 1, channels=False).abs()
    return x, Routing(topk_ids=ids, topk_weights=given)


def rebalance(
    rank: int,
    *,
    recipe: str,
    times: int,
    replicas: bool,
    spoil: int = 0,
    every: int = 1,
    dispatcher: str | None = None,
    same: bool = False,
) -> Any:
    """Move experts ``times`` times at random between calls; return what differs from layers of one rank, and counts.

    same: every rank is called with the tokens of all, in more than one pass. spoil: every so many rebalances one
    arriving bit is flipped on the last rank.
    """
    world, experts, names = distributed.get_world_size(), 7, ("first", "second")
    device = f"cuda:{rank}" if distributed.get_backend() == "nccl" else "cpu"
    dtype = _DTYPES[RECIPES[recipe][2]]
    whole, layers = {}, {}
    for seed, name in enumerate(names):
        weights = whole_weights(recipe, experts, seed)
        whole[name] = split_layer(recipe, weights, device, None)
        placed = replace(placement(experts, rank, world, 2 if replicas else 1), same_tokens=same)
        layers[name] = split_layer(recipe, weights, device, placed, dispatcher)
    counts = [(3, 0, 7, 1)[r % 4] * (1 + 9 * same) for r in range(world)]
    x, routing = _inputs(recipe, counts, experts, whole["first"].spec.hidden_size, 5)
    x, start = x.to(device, dtype), sum(counts[:rank])
    own = slice(None) if same else slice(start, start + counts[rank])
    ids, given = routing.topk_ids.to(device), routing.topk_weights.to(device)
    truth = {n: whole[n](x, routing=Routing(topk_ids=ids, topk_weights=given))[own] for n in names}
    mine = Routing(topk_ids=ids[own], topk_weights=given[own])

    balancer, chance, faults, calls = DamagingBalancer(layers, every=every), random.Random(1), list[str](), 0
    rooms = {n: tuple(len(h) + p.spare for h in p.ranks) for n in names if (p := layers[n].plan.problem.placement)}
    spoiled, wanted = 0, 0

    def flip(parts: tuple[torch.Tensor, ...]) -> None:
        part = parts[len(parts) // 2].view(torch.uint8).reshape(-1)
        part[part.numel() // 3] ^= 4
        balancer.damage(None)

    for turn in range(times):
        name = names[turn % 2]
        before = balancer.counts.given_up
        slots = random_slots(experts, rooms[name], chance, replicas=replicas)
        table = layers[name].dispatcher.expert_map
        needs = any(set(s) - set(h) for s, h in zip(slots[-1:], table.slots[-1:], strict=True))
        hurt = bool(spoil) and turn % spoil == 0 and needs
        spoiled += hurt
        if hurt and rank == world - 1:
            balancer.damage(flip)
        balancer.plan({name: slots})
        while True:
            balancer.step()
            for each in names if turn % 16 == 0 else (name,):
                found = layers[each](x[own], routing=mine)
                calls += 1
                if not torch.equal(found, truth[each]):
                    faults.append(f"turn {turn}, {each}: {int((found != truth[each]).any(1).sum())} rows differ")
            if balancer.idle:
                break
        assert (balancer.counts.given_up > before) == hurt
        if not hurt:
            wanted += 1
            assert [set(s) - {-1} for s in table.slots] == [set(s) for s in slots]
    stall = balancer.stall
    balancer.close()
    return faults, {
        "calls": calls,
        "moved": balancer.counts.moved,
        "switched": balancer.counts.switched,
        "given_up": balancer.counts.given_up,
        "spoiled": spoiled,
        "stall": stall,
    }


def _graph(call: Any) -> Any:
    """Return what replays ``call``."""
    for _ in range(4):  # compiled, recorded, repeated
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def served_while_moving(rank: int, *, recipes: tuple[str, ...], times: int) -> list[str]:
    """Return what differs where one CUDA graph of layers over symm_mem is replayed while their experts move.

    Each replay has other tokens in its inputs. On a CPU the layers are called.
    """
    world, experts, faults = distributed.get_world_size(), 7, list[str]()
    device = torch.device(f"cuda:{rank}" if distributed.get_backend() == "nccl" else "cpu")
    layers, wholes = dict[str, MoELayer](), dict[str, MoELayer]()
    for name in recipes:
        weights = whole_weights(name, experts, 0)
        wholes[name] = split_layer(name, weights, str(device), None)
        placed = placement(experts, rank, world, 2)
        layers[name] = split_layer(name, weights, str(device), placed, "symm_mem")
    maps: dict[str, Any] = {name: layer.dispatcher.expert_map for name, layer in layers.items()}  # type: ignore[attr-defined]
    tokens, first = 5, wholes[recipes[0]]
    x = torch.zeros(tokens, first.spec.hidden_size, dtype=first.input_dtype, device=device)
    ids = torch.zeros(tokens, TOP_K, dtype=torch.int64, device=device)
    routing = Routing(topk_ids=ids, topk_weights=torch.zeros(tokens, TOP_K, device=device))
    outs = {name: torch.empty_like(x) for name in recipes}

    def call() -> None:
        for name, layer in layers.items():
            layer(x, routing=routing, out=outs[name])

    replay = _graph(call) if device.type == "cuda" else call
    balancer, chance, served = Balancer(layers, every=2), random.Random(3), 0
    balancer.record()
    counted = torch.zeros(experts, dtype=torch.int64)
    room = tuple(len(held) + 2 for held in placement(experts, rank, world, 2).ranks)
    span = slice(tokens * rank, tokens * (rank + 1))
    for turn in range(times):
        name = recipes[turn % len(recipes)]
        wanted = random_slots(experts, room, chance, replicas=True)
        balancer.plan({name: wanted})
        while True:
            served += 1
            all_x, given = _inputs(name if name == "whole" else "bf16", [tokens] * world, experts, x.shape[1], served)
            counted += torch.bincount(given.topk_ids[given.topk_ids >= 0].reshape(-1), minlength=experts)[:experts]
            all_x, all_ids, all_weights = all_x.to(x), given.topk_ids.to(device), given.topk_weights.to(device)
            x.copy_(all_x[span])
            ids.copy_(all_ids[span])
            routing.topk_weights.copy_(all_weights[span])
            for out in outs.values():
                out.fill_(float("nan"))
            replay()
            everyone = Routing(topk_ids=all_ids, topk_weights=all_weights)
            wrong = [n for n in recipes if not torch.equal(outs[n], wholes[n](all_x, routing=everyone)[span])]
            faults += [f"rebalance {turn}, call {served}: {each} differs" for each in wrong]
            balancer.step()
            if balancer.idle:
                break
        if [set(own) - {-1} for own in maps[name].slots] != [set(own) for own in wanted]:
            faults.append(f"rebalance {turn}: {name} holds {maps[name].slots}, asked for {wanted}")
    if not all(torch.equal(own[:experts].cpu(), counted) for own in balancer.loads()):
        faults.append(f"counted {balancer.loads().tolist()}, asked for {counted.tolist()}")
    balancer.close()
    for layer in layers.values():
        layer.check()
    return faults


def refused(rank: int) -> list[str]:
    """Return the errors of layers that cannot be balanced."""
    world = distributed.get_world_size()
    weights = whole_weights("whole", 5, 0)
    tight = split_layer("whole", weights, "cpu", placement(5, rank, world, 0))
    loose = split_layer("whole", weights, "cpu", placement(5, rank, world, 1))
    # One rank has other bytes than the other one that has the replica.
    other = split_layer("whole", weights, "cpu", placement(5, rank, world, 1))
    if rank:
        other.experts.stored()[0].neg_()
    good = Balancer({"a": loose}, every=1)
    wrong: list[Any] = [
        lambda: Balancer({"a": tight}),
        lambda: Balancer({"a": other}),
        lambda: good.plan({"b": ()}),
        lambda: good.plan({"a": ((0, 1, 2, 3, 4), (0,))}),
        lambda: good.plan({"a": ((0, 1, 2), (2, 3))}),
    ]
    errors = [error_of(ask) for ask in wrong]
    # Its slots hold other bytes now than those whose checksums were taken.
    held = placement(5, rank, world, 1).expert_ids
    loose.swap(taken(weights, held + held[:1]))
    errors.append(error_of(lambda: good.plan({"a": ((0, 1, 2), (3, 4))})))
    good.close()
    return errors


def by_policy(rank: int, *, policy: str, dispatcher: str | None = None) -> Any:
    """Serve tokens that like two experts of one rank; return faults, loads, slots before and after, and counts."""
    world, experts = distributed.get_world_size(), 8
    weights = whole_weights("whole", experts, 3)
    whole = split_layer("whole", weights, "cpu", None)
    ids = tuple(tuple(range(r * experts // world, (r + 1) * experts // world)) for r in range(world))
    placed = Placement(rank=rank, world_size=world, expert_ids=ids[rank], ranks=ids, spare=2)
    layer = split_layer("whole", weights, "cpu", placed, dispatcher)
    told = Metrics()
    table, before, faults = layer.dispatcher.expert_map, layer.dispatcher.expert_map.slots, list[str]()
    place = policy_named(policy).place

    def aside(load: Any, slots: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            faults.append("the steps wait for the policy")
        return place(load, slots)

    balancer = Balancer({"only": layer}, aside, interval=10, every=2, metrics=told)
    tokens, made = 12, torch.Generator().manual_seed(rank)
    x = torch.randint(-2, 3, (tokens, 32), generator=made).float()
    chosen = torch.randint(2, experts, (tokens, TOP_K), generator=made)
    chosen[:, 0], chosen[: tokens // 2, 1] = 0, 1
    routing = Routing(topk_ids=chosen, topk_weights=torch.rand(chosen.shape, generator=made))
    truth = whole(x, routing=routing)
    for call in range(60):
        if not torch.equal(layer(x, routing=routing), truth):
            faults.append(f"call {call}")
        balancer.step()
    loads = balancer.loads()[0]
    balancer.record(False)
    layer(x, routing=routing)
    assert torch.equal(balancer.loads()[0], loads)
    balancer.close()
    return faults, loads.tolist(), before, table.slots, balancer.counts, told.text()
