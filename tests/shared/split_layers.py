"""Layers whose experts are split over ranks, against one layer that holds them all."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from torch import distributed

from collegium import (
    Choice,
    InputError,
    LatentWeights,
    Limits,
    MoELayer,
    MoESpec,
    Problem,
    RankError,
    RouterWeights,
    Routing,
    RoutingSpec,
    SharedSpec,
    SharedWeights,
    encode_experts,
    plan,
    probe,
)
from collegium.parallel.meeting import meeting_of, timeout_seconds
from collegium.parallel.placement import linear, round_robin
from collegium.testing.compare import heavy_tailed, random_experts, uneven_ids

__all__ = ["RECIPES", "compare", "deserted", "disagree", "replayed"]

EXPERTS, WIDE, HIDDEN = 7, 128, 128
RECIPES = (
    ("bf16", "bf16", "bf16"),
    ("fp32", "fp32", "fp32"),
    ("mxfp4", "bf16", "bf16"),
    ("fp8_block", "fp8_group128", "bf16"),
)
# How many tokens each rank brings; ranks beyond repeat the list.
TURNS = ((3, 11, 1, 6), (0, 9, 4, 0), (0, 0, 0, 0), (1, 1, 1, 1), (30, 2, 17, 64), (64, 0, 0, 0))
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"routing": RoutingSpec(top_k=3)},
    "shared": {"routing": RoutingSpec(top_k=3), "shared": SharedSpec(intermediate_size=WIDE)},
    "on input": {"routing": RoutingSpec(top_k=1, score="sigmoid", renormalise=False, weight_on_input=True)},
    "latent": {"routing": RoutingSpec(top_k=2), "latent_size": 64, "latent_norm_eps": 1e-5},
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def _taken(weights: Any, ids: tuple[int, ...]) -> Any:
    index = list(ids)
    cut = {name: _rows(getattr(weights, name), index) for name in ("gate_up", "down")}
    return replace(weights, **cut)


def _rows(payload: Any, index: list[int]) -> Any:
    own = {name: value[index] for name, value in payload.tensors().items()}
    return replace(payload, **own, shape=(len(index), *payload.shape[1:]))


def _layer(
    kind: str, recipe: tuple[str, str, str], device: str, placement: Any = None, dispatcher: str | None = None
) -> MoELayer:
    weights, activations, dtype = recipe
    spec = MoESpec(
        hidden_size=HIDDEN, intermediate_size=WIDE, num_experts=EXPERTS, weight_format=weights, **KINDS[kind]
    )
    inner = spec.expert_hidden_size
    whole = encode_experts(random_experts(EXPERTS, 2, WIDE, inner, seed=1), weights)
    held = whole if placement is None else _taken(whole, placement.expert_ids)
    shared = encode_experts(random_experts(1, 2, WIDE, HIDDEN, seed=5), weights) if spec.shared else None
    latent = None
    if spec.latent_size:
        down, up = heavy_tailed(inner, HIDDEN, seed=6) / HIDDEN**0.5, heavy_tailed(HIDDEN, inner, seed=7) / inner**0.5
        latent = LatentWeights(
            down=down.to(device), up=up.to(device), norm=torch.ones(inner, device=device), norm_eps=1e-5
        )
    limits = Limits(max_tokens=64 if placement is not None else 1024)
    problem: Any = Problem(spec=spec, device=probe(device), limits=limits, dtype=dtype, placement=placement)

    def sent(own: Any) -> Any:
        return replace(own, gate_up=own.gate_up.to(device), down=own.down.to(device))

    return MoELayer(
        sent(held),
        plan(problem, Choice(activation_format=activations, dispatcher=dispatcher)),
        router=RouterWeights(weight=heavy_tailed(EXPERTS, HIDDEN, seed=8).to(device)),
        shared=None if shared is None else SharedWeights(experts=sent(shared)),
        latent=latent,
    )


_kept: list[MoELayer] = []  # until the process ends, as a program keeps its model


def compare(rank: int, dispatcher: str = "all_gather", kinds: tuple[str, ...] = tuple(KINDS)) -> list[str]:
    """Return what differs between this rank's output and its part of one layer's that was given all ranks' tokens."""
    world, faults = distributed.get_world_size(), list[str]()
    timeout_seconds(60)  # a rank may still compile
    device = f"cuda:{rank}" if distributed.get_backend() == "nccl" else "cpu"
    for kind in kinds:
        for recipe in RECIPES:
            whole = _layer(kind, recipe, device)
            for place in (linear, round_robin):
                layer = _layer(kind, recipe, device, place(EXPERTS, rank, world), dispatcher)
                _kept.append(layer)
                assert layer.plan.dispatcher == dispatcher
                assert layer.experts.key is not None or layer.plan.kernel in ("reference", "cpu_grouped")
                for turn in TURNS:
                    counts = [turn[r % len(turn)] for r in range(world)]
                    faults += [
                        f"{kind} {recipe} {place.__name__} {turn}: {f}" for f in _turn(layer, whole, counts, rank)
                    ]
    return faults


def _equal(found: torch.Tensor, wanted: torch.Tensor, *, alone: bool) -> bool:
    """Return whether the bits are the same; on a CPU only where the experts are alone.

    There the bits of what torch computes beside them (router, shared expert, projections) depend on how many tokens a
    rank has.
    """
    nan = found.isnan()
    found, wanted = found.nan_to_num(7.0).float(), wanted.masked_fill(wanted.isnan() & nan, 7.0).float()
    if found.is_cuda or alone:
        return torch.equal(found, wanted)
    return bool((found - wanted).norm() <= 0.005 * wanted.norm())


def _turn(layer: MoELayer, whole: MoELayer, counts: list[int], rank: int) -> list[str]:
    device, dtype = layer.handle.device, layer.input_dtype
    x = heavy_tailed(sum(counts), HIDDEN, seed=sum(counts) + 1).to(device, dtype)
    start = sum(counts[:rank])
    own = slice(start, start + counts[rank])
    faults: list[str] = []
    if not _equal(layer(x[own]), whole(x)[own], alone=False):
        faults.append("by its own router")
    top_k = layer.spec.routing.top_k
    ids = uneven_ids(sum(counts), top_k, EXPERTS, seed=9).to(device)
    ids[1::4, 0], ids[2::9, -1] = -1, EXPERTS + 2
    given = heavy_tailed(*ids.shape, seed=10, channels=False).abs().to(device)
    wanted = whole(x, routing=Routing(topk_ids=ids, topk_weights=given))[own]
    found = layer(x[own], routing=Routing(topk_ids=ids[own], topk_weights=given[own]))
    if not _equal(found, wanted, alone=layer.shared is None and layer.latent is None):
        faults.append("by a routing with ids of nobody")
    return faults


def _first(tokens: int, top_k: int) -> Routing:
    return Routing(topk_ids=torch.arange(top_k).repeat(tokens, 1), topk_weights=torch.ones(tokens, top_k))


def disagree(rank: int, dispatcher: str = "all_gather") -> list[str]:
    """Return the errors of a rank whose neighbours ask for something else."""
    world, errors = distributed.get_world_size(), list[str]()
    layer = _layer("shared", RECIPES[1], "cpu", linear(EXPERTS, rank, world), dispatcher)
    asks: list[Any] = [
        lambda: layer(torch.zeros(65 if rank == 1 else 5, HIDDEN)),
        lambda: layer(torch.zeros(2, HIDDEN), routing=_first(2, 3 - (rank == 0))),
        lambda: _layer("plain", RECIPES[rank % 2], "cpu", linear(EXPERTS, rank, world), dispatcher),
        lambda: _layer("plain", RECIPES[1], "cpu", linear(EXPERTS, 0, world + 1), dispatcher),
    ]
    for ask in asks:
        try:
            ask()
            errors.append("none")
        except InputError as error:
            errors.append(str(error))
    # Nothing was left half done: the layer still answers.
    assert bool(layer(torch.ones(3, HIDDEN)).isfinite().all())
    return errors


GRAPHED = (("plain", RECIPES[0]), ("shared", ("mxfp4", "fp8_token", "bf16")), ("plain", RECIPES[3]))


def replayed(rank: int) -> list[str]:
    """Return what differs where a graph of several layers is replayed, each time with other tokens in its inputs."""
    world, faults = distributed.get_world_size(), list[str]()
    timeout_seconds(60)  # a rank may still compile
    device = torch.device("cuda", rank)
    layers = [_layer(k, recipe, str(device), linear(EXPERTS, rank, world), "symm_mem") for k, recipe in GRAPHED]
    wholes = [_layer(k, recipe, str(device)) for k, recipe in GRAPHED]
    _kept.extend(layers)
    for turn in ((3, 11, 1, 6), (0, 9, 4, 0), (1, 1, 1, 1), (64, 30, 2, 17)):
        counts = [turn[r % len(turn)] for r in range(world)]
        start, tokens = sum(counts[:rank]), counts[rank]
        x = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16, device=device)
        ids = torch.zeros(tokens, 3, dtype=torch.int64, device=device)
        own = Routing(topk_ids=ids, topk_weights=torch.zeros(tokens, 3, device=device))
        for _ in range(4):  # compiled, recorded, repeated
            for layer in layers:
                layer(x, routing=own)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = [layer(x, routing=own) for layer in layers for _ in range(2)]
        for replay in range(40):
            everyone = heavy_tailed(sum(counts), HIDDEN, seed=100 * replay + sum(counts)).to(device, torch.bfloat16)
            all_ids = uneven_ids(sum(counts), 3, EXPERTS, seed=replay).to(device)
            all_ids[1::4, 0], all_ids[2::9, -1] = -1, EXPERTS + 2
            given = heavy_tailed(*all_ids.shape, seed=replay + 1, channels=False).abs().to(device)
            span = slice(start, start + tokens)
            x.copy_(everyone[span])
            ids.copy_(all_ids[span])
            own.topk_weights.copy_(given[span])
            for made in y:
                made.fill_(float("nan"))
            graph.replay()
            for place, whole in enumerate(wholes):
                wanted = whole(everyone, routing=Routing(topk_ids=all_ids, topk_weights=given))[span]
                for found in y[2 * place : 2 * place + 2]:
                    if not _equal(found, wanted, alone=True):
                        faults.append(f"{GRAPHED[place]} {counts}, replay {replay}")
            if replay % 10 == 0:  # eager calls between replays share block and flags
                eager = layers[0](x, routing=own)
                if not _equal(eager, y[0], alone=True):
                    faults.append(f"{counts}, eager after replay {replay}")
        for layer in layers:
            layer.check()
    return faults


def deserted(rank: int) -> list[str]:
    """Return what a rank sees, and after how long, whose neighbour does not come: in a graph, then in an eager call."""
    found, device = list[str](), torch.device("cuda", rank)
    timeout_seconds(30)
    layer = _layer("plain", RECIPES[0], str(device), linear(EXPERTS, rank, distributed.get_world_size()), "symm_mem")
    _kept.append(layer)
    x = heavy_tailed(5, HIDDEN, seed=3).to(device, torch.bfloat16)
    layer(x)
    timeout_seconds(1)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = layer(x)
    graph.replay()
    torch.cuda.synchronize()
    assert bool(y.isfinite().all())
    timeout_seconds(30)
    meeting_of().exchange(None, "all have replayed once")
    started = time.monotonic()
    if rank == 0:
        graph.replay()
        found.append(_error(layer.check))
        assert bool(y.isnan().all()), "no number after a rank was lost"
        found.append(_error(lambda: layer(x)))
        assert time.monotonic() - started < 20, "bounded"
    meeting_of().exchange(None, "the first rank has given up")
    if rank != 0:
        graph.replay()
        found.append(_error(layer.check))
        assert bool(y.isnan().all())
        assert time.monotonic() - started < 20, "bounded"
    blocks: Any = layer.workspaces
    blocks.renew()
    again = layer(x)
    layer.check()
    assert bool(again.isfinite().all()), "a new block serves"
    timeout_seconds(1)
    started = time.monotonic()
    if rank == 0:
        found.append(_error(lambda: layer(x)))
        assert time.monotonic() - started < 10, "bounded"
    return found


def _error(call: Any) -> str:
    try:
        call()
    except RankError as error:
        return f"{error.phase}: {error}"
    return "none"
