from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import distributed

from raising import assert_values

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from collegium import Routing
from collegium.parallel.placement import linear
from collegium.testing.compare import heavy_tailed, relative_error, uneven_ids
from ranks import error_of, run_ranks
from split_layers import EXPERTS, HIDDEN, RECIPES, compare, layer_of, replicated

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
WORLD = min(torch.cuda.device_count(), 4)
FIXED = "all_to_all_fixed"


def test_ranks_equal_one_layer() -> None:
    asked = partial(compare, dispatchers=("all_to_all", FIXED))
    assert run_ranks(asked, WORLD, "nccl", seconds=400) == [[]] * WORLD


def _routing(tokens: int, device: str, seed: int) -> Routing:
    ids = uneven_ids(tokens, 3, EXPERTS, seed=seed)
    ids[1::4, 0], ids[2::9, -1] = -1, EXPERTS + 2
    weights = heavy_tailed(*ids.shape, seed=seed + 1, channels=False).abs()
    return Routing(topk_ids=ids.to(device), topk_weights=weights.to(device))


def _same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    nan = found.isnan()
    return torch.equal(nan, wanted.isnan()) and torch.equal(found.nan_to_num(1), wanted.nan_to_num(1))


def _replayed(rank: int) -> list[str]:
    """Return what a captured layer computes otherwise than one layer that holds every expert."""
    world, faults, device = distributed.get_world_size(), list[str](), f"cuda:{rank}"
    for recipe in (RECIPES[0], RECIPES[2], RECIPES[3]):
        whole = layer_of("plain", recipe, device)
        for combine in ("exact", "reduced"):
            place = replicated(EXPERTS, rank, world)
            layer = layer_of("plain", recipe, device, place, dispatcher=FIXED, combine=combine, graph=True)
            tokens = 5 + 8 * rank
            x = torch.zeros(tokens, HIDDEN, device=device, dtype=layer.input_dtype)
            routing = _routing(tokens, device, seed=0)
            layer(x, routing=routing)
            graph, out = torch.cuda.CUDAGraph(), torch.empty_like(x)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                layer(x, routing=routing, out=out)
            for seed in range(5):
                x.copy_(heavy_tailed(tokens, HIDDEN, seed=seed + 10 * rank))
                other = _routing(tokens, device, seed=seed + 10 * rank)
                routing.topk_ids.copy_(other.topk_ids)
                routing.topk_weights.copy_(other.topk_weights)
                graph.replay()
                torch.cuda.synchronize()
                wanted, eager = whole(x, routing=other), layer(x, routing=other)
                if not _same(out, eager):
                    faults.append(f"{recipe} {combine} {seed}: replay and eager differ")
                if combine == "exact" and not _same(out, wanted):
                    faults.append(f"{recipe} {seed}: not the bits of one layer")
                kept = ~wanted.isnan().any(dim=1)
                if relative_error(out[kept].cpu(), wanted[kept].cpu()) > 0.01:
                    faults.append(f"{recipe} {combine} {seed}: far from one layer")
            layer.check()
            graph.reset()
    return faults


def test_fixed_capacity_graph_matches_one_layer() -> None:
    assert run_ranks(_replayed, WORLD, "nccl", seconds=400) == [[]] * WORLD


def _overflows(rank: int) -> tuple[list[int], list[str]]:
    """Return the NaN rows of a replay in which rank 1 sends more than there is room for, and what is raised then."""
    world, device = distributed.get_world_size(), f"cuda:{rank}"
    place = linear(EXPERTS, rank, world)
    layer: Any = layer_of("plain", RECIPES[0], device, place, dispatcher=FIXED, graph=True, room=4)
    x = heavy_tailed(6, HIDDEN, seed=1).to(device, layer.input_dtype)
    ids = torch.full((6, 3), -1, device=device)
    routing = Routing(topk_ids=ids, topk_weights=torch.ones(6, 3, device=device))
    ids[:3, 0] = 0
    layer(x, routing=routing)
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        layer(x, routing=routing, out=out)
    ids[:, 0] = 0 if rank == 1 else -1
    graph.replay()
    torch.cuda.synchronize()
    lost = out.isnan().any(dim=1).nonzero().flatten().tolist()
    said = [error_of(ask) for ask in (layer.check, layer.check, lambda: layer(x, routing=routing))]
    graph.reset()
    return lost, said


def test_replay_overflow_raises_on_every_rank() -> None:
    for rank, (lost, said) in enumerate(run_ranks(_overflows, WORLD, "nccl", seconds=200)):
        assert lost == ([4, 5] if rank == 1 else [])
        assert_values(said[0], "NaN", "rank 1: 2")
        assert said[1] == "none"
        assert said[2] != "none"


def _reduced(rank: int) -> list[float]:
    world, device, found = distributed.get_world_size(), f"cuda:{rank}", list[float]()
    x = heavy_tailed(40, HIDDEN, seed=4).to(device)
    for recipe in (RECIPES[0], RECIPES[3]):
        whole = layer_of("shared", recipe, device)
        truth = whole(x.to(whole.input_dtype)).float()
        for name in ("all_gather", "all_to_all", FIXED):
            for combine in ("reduced", "reduced_fp8"):
                layer = layer_of(
                    "shared", recipe, device, linear(EXPERTS, rank, world), dispatcher=name, combine=combine
                )
                out = [layer(x.to(layer.input_dtype)).float() for _ in range(2)]
                assert torch.equal(*out)
                found.append(relative_error(out[0].cpu(), truth.cpu()) / (0.006 if combine == "reduced" else 0.04))
    return found


def test_reduced_sums_within_documented_error() -> None:
    for found in run_ranks(_reduced, WORLD, "nccl", seconds=300):
        assert max(found) < 1, found


def _too_many(rank: int) -> list[str]:
    """Return what ranks say of more tokens than layers are planned for, which one of them brings."""
    world, device, said = distributed.get_world_size(), f"cuda:{rank}", list[str]()
    for name, kind in product(("all_to_all", "all_gather", FIXED, "symm_mem"), ("plain", "latent")):
        layer = layer_of(kind, RECIPES[0], device, linear(EXPERTS, rank, world), dispatcher=name)
        x = torch.zeros(65 if rank == 0 else 3, HIDDEN, device=device, dtype=layer.input_dtype)
        said.append(f"{name} {kind}: {error_of(partial(layer, x))}")
        if not bool(layer(x[:3]).isfinite().all()):
            said.append(f"{name} {kind}: no output after it")
    return said


def test_too_many_tokens_raise_on_ranks() -> None:
    for said in run_ranks(_too_many, WORLD, "nccl", seconds=200):
        assert len(said) == 8
        assert all("InputError" in text and "65" in text for text in said), said
