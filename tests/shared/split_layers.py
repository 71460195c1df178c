"""Layers whose experts are split over ranks, against one layer that holds them all."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed

from collegium import (
    ExpertWeights,
    LatentWeights,
    Limits,
    MoELayer,
    MoESpec,
    Overrides,
    Placement,
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
from collegium.parallel import wrapped_for
from collegium.parallel.placement import linear, round_robin
from collegium.parallel.rendezvous import timeout_seconds
from collegium.planning import dispatcher_named
from collegium.testing.compare import heavy_tailed, random_experts, uneven_ids
from ranks import error_of

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "EXPERTS",
    "HIDDEN",
    "RECIPES",
    "absent",
    "compare",
    "disagree",
    "equal",
    "kept",
    "layer_of",
    "replicated",
    "taken",
    "taken_by",
]

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
    "on input": {"routing": RoutingSpec(top_k=1, score="sigmoid", renormalize=False, weight_on_input=True)},
    "latent": {"routing": RoutingSpec(top_k=2), "latent_size": 64, "latent_norm_eps": 1e-5},
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def replicated(num_experts: int, rank: int, world: int) -> Placement:
    """Return round-robin experts, those of the next rank once more, expert 0 everywhere, and two spare slots."""
    ranks: list[tuple[int, ...]] = []
    for own in range(world):
        held = (*range(own, num_experts, world), *range((own + 1) % world, num_experts, 2 * world), 0)
        ranks.append(tuple(dict.fromkeys(held[::-1])))
    return Placement(rank=rank, world_size=world, expert_ids=ranks[rank], ranks=tuple(ranks), spare=2)


def taken_by(weights: ExpertWeights[Any], placement: Placement) -> ExpertWeights[Any]:
    """Return what ``placement`` holds of ``weights``."""
    # Whatever is in a spare slot, nobody reads it.
    return taken(weights, [*placement.expert_ids, *[EXPERTS - 1] * placement.spare])


def taken(weights: ExpertWeights[Any], ids: Sequence[int]) -> ExpertWeights[Any]:
    """Return the experts ``ids`` of ``weights``, in that order."""

    def rows(payload: Any) -> Any:
        own = {name: value[list(ids)] for name, value in payload.tensors().items()}
        return replace(payload, **own, shape=(len(ids), *payload.shape[1:]))

    biases = {"gate_up_bias": weights.gate_up_bias, "down_bias": weights.down_bias}
    kept = {name: None if bias is None else bias[list(ids)] for name, bias in biases.items()}
    return replace(weights, gate_up=rows(weights.gate_up), down=rows(weights.down), **kept)


def layer_of(
    kind: str, recipe: tuple[str, str, str], device: str, placement: Placement | None = None, **asked: Any
) -> MoELayer:
    """Return one rank's layer, or the whole one. asked: max_tokens, room for tokens, graph, and overrides."""
    dtype: Any
    weights, activations, dtype = recipe
    spec = MoESpec(
        hidden_size=HIDDEN, intermediate_size=WIDE, num_experts=EXPERTS, weight_format=weights, **KINDS[kind]
    )
    inner = spec.expert_hidden_size
    whole = encode_experts(random_experts(EXPERTS, 2, WIDE, inner, seed=1), weights)
    held = whole if placement is None else taken_by(whole, placement)
    shared = encode_experts(random_experts(1, 2, WIDE, HIDDEN, seed=5), weights) if spec.shared else None
    latent = None
    if spec.latent_size:
        down, up = heavy_tailed(inner, HIDDEN, seed=6) / HIDDEN**0.5, heavy_tailed(HIDDEN, inner, seed=7) / inner**0.5
        latent = LatentWeights(
            down=down.to(device), up=up.to(device), norm=torch.ones(inner, device=device), norm_eps=1e-5
        )
    max_tokens = asked.pop("max_tokens", 64 if placement is not None else 1024)
    limits = Limits(max_tokens=max_tokens, rank_tokens=asked.pop("room", None))
    graph = asked.pop("graph", False)
    problem = Problem(spec=spec, device=probe(device), limits=limits, dtype=dtype, placement=placement, graph=graph)

    def sent(own: Any) -> Any:
        return replace(own, gate_up=own.gate_up.to(device), down=own.down.to(device))

    return MoELayer(
        sent(held),
        plan(problem, Overrides(activation_format=activations, **asked)),
        router=RouterWeights(weight=heavy_tailed(EXPERTS, HIDDEN, seed=8).to(device)),
        shared=None if shared is None else SharedWeights(experts=sent(shared)),
        latent=latent,
    )


PLACES = (linear, round_robin, replicated)
kept: list[MoELayer] = []  # until the process ends, as a program keeps its model


def compare(rank: int, dispatchers: tuple[str, ...], **others: Any) -> list[str]:
    """Return what differs between this rank's output and its part of one layer's that was given all ranks' tokens."""
    world, faults = distributed.get_world_size(), list[str]()
    device = f"cuda:{rank}" if distributed.get_backend() == "nccl" else "cpu"
    for number, (kind, recipe) in enumerate(product(KINDS, RECIPES)):
        turns = _turns(layer_of(kind, recipe, device), rank, world)
        # A GPU is fast enough for all of them; four kinds and three placements meet every recipe in turn.
        for place in PLACES if device != "cpu" else (PLACES[(number + number // 4) % 3],):
            for name in dispatchers:
                layer = layer_of(kind, recipe, device, place(EXPERTS, rank, world), dispatcher=name, **others)
                kept.append(layer)
                assert layer.plan.dispatcher == name
                row, top_k = wrapped_for(dispatcher_named(name), layer.plan.problem), layer.spec.routing.top_k
                assert row.rows(layer.plan.problem, 50) == layer.dispatcher.rows(50, top_k), "tiles as planned"
                assert layer.experts.key is not None or layer.plan.kernel in ("reference", "cpu_grouped", "cpu_fused")
                quantised = recipe[1].startswith("fp8") and kind != "on input"
                quantised &= name != "symm_mem" or device != "cpu"  # whose CPU path is for tests alone
                assert ("codes" in layer.plan.wire_format) == quantised, layer.plan.wire_format
                faults += [
                    f"{kind} {recipe} {place.__name__} {name} {fault}"
                    for turn in turns
                    for fault in _faults(layer, turn)
                ]
    return faults


def equal(found: torch.Tensor, wanted: torch.Tensor, *, exact: bool) -> bool:
    """Return whether the bits are the same, or nearly where torch's libraries round as many rows as they are given."""
    nan = found.isnan()
    if not torch.equal(nan, wanted.isnan()):
        return False
    found, wanted = found.masked_fill(nan, 7.0).float(), wanted.masked_fill(nan, 7.0).float()
    return torch.equal(found, wanted) if exact else bool((found - wanted).norm() <= 0.01 * wanted.norm())


class Turn(NamedTuple):
    """What one rank brings, and what it gets from a layer that is given every rank's tokens."""

    counts: list[int]
    x: torch.Tensor
    routing: Routing
    routed: torch.Tensor
    given: torch.Tensor


def _turns(whole: MoELayer, rank: int, world: int) -> list[Turn]:
    device, dtype, top_k = whole.handle.device, whole.input_dtype, whole.spec.routing.top_k
    found: list[Turn] = []
    for turn in TURNS:
        counts = [turn[r % len(turn)] for r in range(world)]
        start = sum(counts[:rank])
        own = slice(start, start + counts[rank])
        x = heavy_tailed(sum(counts), HIDDEN, seed=sum(counts) + 1).to(device, dtype)
        ids = uneven_ids(sum(counts), top_k, EXPERTS, seed=9).to(device)
        ids[1::4, 0], ids[2::9, -1] = -1, EXPERTS + 2
        weights = heavy_tailed(*ids.shape, seed=10, channels=False).abs().to(device)
        weights[5::7, 0] = torch.nan
        given = whole(x, routing=Routing(topk_ids=ids, topk_weights=weights))[own]
        routing = Routing(topk_ids=ids[own], topk_weights=weights[own])
        found.append(Turn(counts=counts, x=x[own], routing=routing, routed=whole(x)[own], given=given))
    return found


def _faults(layer: MoELayer, turn: Turn) -> list[str]:
    faults, placed, on_gpu = list[str](), layer.plan.problem.placement, turn.x.is_cuda
    # On a CPU an expert's bits depend on how many rows it has: copies of an expert share its rows out, and a shared
    # expert has those of one rank.
    whole, ours = placed is not None and sum(map(len, placed.ranks)) == EXPERTS, layer.plan.kernel.startswith("triton")
    exact = (whole or ours) and (layer.shared is None or (ours and on_gpu))
    if not equal(layer(turn.x), turn.routed, exact=exact):
        faults.append(f"{turn.counts} by its own router")
    if not equal(layer(turn.x, routing=turn.routing), turn.given, exact=exact):
        faults.append(f"{turn.counts} by a routing with ids of nobody")
    return faults


def absent(rank: int) -> Any:
    """Return whom each rank names, and after how long, where the last one is late and they wait for unequal times."""
    world = distributed.get_world_size()
    layer = layer_of("plain", RECIPES[1], "cpu", linear(EXPERTS, rank, world), dispatcher="symm_mem")
    layer(torch.ones(3, HIDDEN))
    timeout_seconds(1 if rank == 0 else 20)
    if rank == world - 1:
        time.sleep(4)
    started, found = time.monotonic(), list[Any]()
    for _ in range(2):  # and ever after
        try:
            layer(torch.ones(3, HIDDEN))
        except RankError as error:
            found.append((error.ranks, error.phase, str(error)))
    took = time.monotonic() - started
    timeout_seconds(20)
    blocks: Any = layer.workspaces
    blocks.renew()
    return found, took, bool(layer(torch.ones(3, HIDDEN)).isfinite().all())


def _first(tokens: int, top_k: int) -> Routing:
    return Routing(topk_ids=torch.arange(top_k).repeat(tokens, 1), topk_weights=torch.ones(tokens, top_k))


def disagree(rank: int, name: str) -> list[str]:
    """Return the errors of a rank whose neighbours ask for something else."""
    world = distributed.get_world_size()
    layer = layer_of("shared", RECIPES[1], "cpu", linear(EXPERTS, rank, world), dispatcher=name)
    next_one = layer_of("shared", RECIPES[1], "cpu", linear(EXPERTS, rank, world), dispatcher=name)
    asks: list[Any] = [
        lambda: layer(torch.zeros(65 if rank == 1 else 5, HIDDEN)),
        lambda: layer(torch.zeros(2, HIDDEN), routing=_first(2, 3 - (rank == 0))),
        lambda: layer_of("plain", RECIPES[rank % 2], "cpu", linear(EXPERTS, rank, world), dispatcher=name),
        lambda: layer_of("plain", RECIPES[1], "cpu", linear(EXPERTS, 0, world + 1), dispatcher=name),
        lambda: (next_one if rank else layer)(torch.zeros(4, HIDDEN)),
    ]
    errors = [error_of(ask) for ask in asks]
    # Nothing was left half done: the layer still answers.
    assert bool(layer(torch.ones(3, HIDDEN)).isfinite().all())
    return errors
