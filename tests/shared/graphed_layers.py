"""Layers over GPUs that read each other's memory: in graphs, and where a neighbour does not come."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import distributed

from collegium import RankError, Routing
from collegium.parallel.placement import linear
from collegium.parallel.rendezvous import rendezvous_of, timeout_seconds
from collegium.testing.compare import heavy_tailed, uneven_ids
from split_layers import EXPERTS, HIDDEN, RECIPES, equal, kept, layer_of

__all__ = ["deserted", "replayed"]

FOUR_BITS = ("mxfp4", "fp8_token", "bf16")
GRAPHED = (("plain", RECIPES[0]), ("shared", FOUR_BITS), ("plain", RECIPES[3]))
# The second one of these does without the kernel that the others have: all of them run in one block.
FUSED = (
    ("plain", FOUR_BITS, "mega"),
    ("shared", FOUR_BITS, "split"),
    ("shared", FOUR_BITS, "mega"),
    ("plain", RECIPES[3], "mega"),
)


def replayed(rank: int, combine: str = "exact", *, fused: bool = False) -> list[str]:
    """Return what differs where a graph of several layers is replayed, each time with other tokens in its inputs.

    With an exact combine from one rank's layers, otherwise from those that exchange by collectives. fused: layers of
    the pipeline mega, and one that is not.
    """
    kinds = FUSED if fused else [(kind, recipe, None) for kind, recipe in GRAPHED]
    world, faults = distributed.get_world_size(), list[str]()
    device = torch.device("cuda", rank)
    placed: dict[str, Any] = {"placement": linear(EXPERTS, rank, world), "combine": combine}
    layers = [layer_of(k, r, str(device), dispatcher="symm_mem", pipeline=way, **placed) for k, r, way in kinds]
    assert [layer.plan.pipelines for layer in layers if fused] == [(way,) for _, _, way in kinds if fused]
    judged: dict[str, Any] = {} if combine == "exact" else placed | {"dispatcher": "all_to_all"}
    judges = [layer_of(k, recipe, str(device), **judged) for k, recipe, _ in kinds]
    kept.extend(layers)
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
            for place, judge in enumerate(judges):
                wanted = _judged(judge, (everyone, Routing(topk_ids=all_ids, topk_weights=given)), (x, own), span)
                for found in y[2 * place : 2 * place + 2]:
                    if not equal(found, wanted, exact=True):
                        faults.append(f"{kinds[place]} {counts}, replay {replay}")
            if replay % 10 == 0:  # eager calls between replays share block and flags
                eager = layers[0](x, routing=own)
                if not equal(eager, y[0], exact=True):
                    faults.append(f"{counts}, eager after replay {replay}")
        for layer in layers:
            layer.check()
    return faults


def _judged(layer: Any, whole: tuple[Any, Routing], own: tuple[Any, Routing], span: slice) -> torch.Tensor:
    """Return what ``layer`` makes of a rank's tokens: of all, if it is of one rank, and this rank's are in ``span``."""
    x, routing = whole if layer.plan.problem.placement is None else own
    made = layer(x, routing=routing)
    return made[span] if layer.plan.problem.placement is None else made


def deserted(rank: int, *, fused: bool = False) -> list[str]:
    """Return what a rank sees, and after how long, whose neighbour does not come: in a graph, then in an eager call.

    fused: from a layer of the pipeline mega.
    """
    found, device = list[str](), torch.device("cuda", rank)
    timeout_seconds(30)
    placed = linear(EXPERTS, rank, distributed.get_world_size())
    asked: dict[str, Any] = {"dispatcher": "symm_mem", "pipeline": "mega" if fused else None}
    layer = layer_of("plain", FOUR_BITS if fused else RECIPES[0], str(device), placed, **asked)
    kept.append(layer)
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
    rendezvous_of().exchange(None, "all have replayed once")
    started = time.monotonic()
    if rank == 0:
        graph.replay()
        found.append(_error(layer.check))
        assert bool(y.isnan().all()), "no number after a rank was lost"
        found.append(_error(lambda: layer(x)))
        assert time.monotonic() - started < 20, "bounded"
    rendezvous_of().exchange(None, "the first rank has given up")
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
