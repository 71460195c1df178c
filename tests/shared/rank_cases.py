"""Layers loaded from disk by ranks, against one layer that holds everything."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from collegium import Limits, Overrides, Ranks, Routing, load_layer
from collegium.checkpoint.reader import Checkpoint
from collegium.parallel.rendezvous import timeout_seconds
from collegium.testing.compare import heavy_tailed
from family_cases import CASES, build
from ranks import error_of
from whole_models import in_bf16

__all__ = ["FOLDERS", "built", "compare_loaded", "refusals", "replayed", "sequences_in_parts"]

FOLDERS = "COLLEGIUM_TEST_FOLDERS"  # where the ranks of a test find its checkpoints


def built(parent: Path, *families: str) -> list[Path]:
    """Return folders in ``parent`` with a small BF16 checkpoint of each of ``families``.

    Their widths are multiples of 32, as published ones are: rows of others have bits of their own on some CPUs.
    """
    for name in families:
        text = CASES[name].text
        wider = {key: 32 * -(-text[key] // 32) for key in text if "intermediate_size" in key} | {"hidden_size": 64}
        build(replace(CASES[name], text={**text, **wider}), parent / name)
        in_bf16(parent / name)
    return [parent / name for name in families]


def _device(rank: int) -> str:
    return f"cuda:{rank}" if "nccl" in distributed.get_backend_config() else "cpu"


def _inputs(layer: Any, tokens: int, seed: int) -> tuple[torch.Tensor, Routing]:
    spec, device = layer.spec, layer.handle.device
    x = heavy_tailed(tokens, spec.hidden_size, seed=seed).to(device, layer.input_dtype)
    generator = torch.Generator().manual_seed(seed)
    # The last expert is hot, and the first is nobody's.
    scores = torch.rand(tokens, spec.num_experts, generator=generator)
    scores[:, -1] += 0.5
    scores[:, 0] -= 9.0
    ids = scores.topk(spec.routing.top_k).indices
    ids[1::5, -1], ids[3::7, 0] = -1, spec.num_experts + 2
    weights = torch.rand(ids.shape, generator=generator)
    return x, Routing(topk_ids=ids.to(device), topk_weights=weights.to(device))


def _faults(layer: Any, whole: Any, ranks: Ranks, tokens: int) -> list[str]:
    """Return what is not as promised for ``tokens`` tokens a rank; slices have other bits."""
    faults: list[str] = []
    own = 0 if ranks.same_tokens else ranks.rank
    count = tokens if ranks.same_tokens else (tokens * (ranks.rank + 1)) % 13  # another number on every rank
    x, routing = _inputs(whole, count, seed=17 * tokens + own)
    # Beside the experts (router, shared expert) a CPU's bits depend on how many tokens there are.
    exact = ranks.slices == 1 and (whole.shared is None or ranks.same_tokens or x.is_cuda)
    for what, asked in (("by its own router", {}), ("by a routing", {"routing": routing})):
        found, wanted = layer(x, **asked), whole(x, **asked)
        if not torch.equal(found.isnan(), wanted.isnan()):
            faults.append(f"{what}: other rows are NaN")
        found, wanted = found.nan_to_num(7.0), wanted.nan_to_num(7.0)
        if exact and not torch.equal(found, wanted):
            faults.append(f"{what}: {tokens} tokens have other bits")
        if not bool((found.float() - wanted.float()).norm() <= 0.01 * wanted.float().norm()):
            faults.append(f"{what}: {tokens} tokens are far off")
        if not torch.equal(layer(x, **asked).nan_to_num(7.0), found):
            faults.append(f"{what}: {tokens} tokens have other bits the second time")
    return faults


def _ways(world: int) -> list[tuple[str, Ranks]]:
    ways = [
        ("same tokens", Ranks.of(same_tokens=True)),
        ("same tokens by symm_mem", Ranks.of(same_tokens=True, replicas=1)),
        ("round robin, replicas", Ranks.of(order="round_robin", replicas=1, spare=1)),
        ("slices", Ranks.of(slices=world)),
    ]
    if world == 2:
        ways.append(("slices and nothing else", Ranks.of(experts=1, same_tokens=True)))
    else:
        kind = "cuda" if "nccl" in distributed.get_backend_config() else "cpu"
        mesh = init_device_mesh(kind, (2, 2), mesh_dim_names=("copies", "experts"))
        ways += [
            ("both", Ranks.of(slices=2)),
            ("both, same tokens", Ranks.of(experts=2, same_tokens=True, replicas=1)),
            ("mesh of copies", Ranks.of(mesh, experts="experts", same_tokens=True)),
            ("mesh of both", Ranks.of(mesh, experts="copies", slices="experts")),
        ]
    return ways


def sequences_in_parts(rank: int) -> list[str]:
    """Return what is wrong where sequences are cut over context-parallel ranks, four in all, of two kinds of meshes.

    Each data-parallel pair has a sequence of its own, of which each of the two has a part.
    """
    folder, device, faults = os.environ[FOLDERS].split(os.pathsep)[0], _device(rank), list[str]()
    mesh = init_device_mesh(torch.device(device).type, (2, 2), mesh_dim_names=("data", "context"))
    turned = init_device_mesh(torch.device(device).type, (2, 2), mesh_dim_names=("context", "data"))
    alone = init_device_mesh(torch.device(device).type, (2, 2), mesh_dim_names=("copy", "context"))
    cut = init_device_mesh(torch.device(device).type, (1, 2, 2), mesh_dim_names=("data", "context", "tensor"))
    whole = load_layer(folder, 1, device=device)
    for what, ranks, wanted in (
        ("mesh", Ranks.of(mesh, experts="data", context="context"), (rank, 4, rank % 2, 2)),
        ("turned", Ranks.of(turned, experts="data", context="context"), (rank, 4, rank // 2, 2)),
        ("context alone", Ranks.of(alone, context="context"), (rank % 2, 2, rank % 2, 2)),
        (
            "with slices",
            Ranks.of(cut, experts="data", slices="tensor", context="context"),
            (rank // 2, 2, rank // 2, 2),
        ),
        ("numbers", Ranks.of(context=2), (rank, 4, rank % 2, 2)),
        ("all of one sequence", Ranks.of(context=4, order="round_robin"), (rank, 4, rank, 4)),
        ("numbers and slices", Ranks.of(slices=2, context=2), (rank // 2, 2, rank // 2, 2)),
        ("none", Ranks.of(), (rank, 4, 0, 1)),
        ("mesh again", Ranks.of(mesh, experts="data", context="context"), (rank, 4, rank % 2, 2)),
    ):
        found = (ranks.rank, ranks.world_size, ranks.context_rank, ranks.contexts)
        if found != wanted:
            faults.append(f"{what}: {found} instead of {wanted}")
        layer = load_layer(folder, 1, device=ranks)
        _kept.append(layer)
        for seed, tokens in ((1, 11), (2, 1), (3, 26)):
            # Ranks of a slice group bring the same tokens.
            x = _inputs(
                whole, tokens, seed=10 * seed + (rank // 2 if ranks.slices == 1 and ranks.contexts == 2 else 0)
            )[0]
            part = torch.arange(tokens, device=device).tensor_split(ranks.contexts)[ranks.context_rank]
            made, right = layer(x[part]), whole(x)[part]
            alike = torch.equal(made, right)
            if ranks.slices > 1:
                alike = bool((made.float() - right.float()).norm() <= 0.01 * right.float().norm())
            if not alike:
                faults.append(f"{what}: {tokens} tokens in {ranks.contexts} parts are not those of one rank")
    return faults


_kept: list[Any] = []  # until the process ends, as a program keeps its model


def compare_loaded(rank: int) -> list[str]:
    """Return what is wrong with layers of the checkpoints in the environment's list, for every way to share them."""
    world, device, faults = distributed.get_world_size(), _device(rank), list[str]()
    for folder in os.environ[FOLDERS].split(os.pathsep):
        for name, ranks in _ways(world):
            assert ranks.device == device
            # Two layers, and two sizes of passes: with 5 a batch of the same tokens is cut.
            for number, most in ((1, 64), (2, 5 if ranks.same_tokens else 64)):
                checkpoint = Checkpoint.open(folder)
                force = Overrides(dispatcher="symm_mem" if "symm_mem" in name else None)
                layer = load_layer(checkpoint, number, device=ranks, limits=Limits(max_tokens=most), overrides=force)
                whole = load_layer(folder, number, device=device)
                _kept.append(layer)
                for tokens in (11, 1, 3, 0, 26):
                    faults += [
                        f"{Path(folder).name} {name} layer {number}: {fault}"
                        for fault in _faults(layer, whole, ranks, tokens)
                    ]
    return faults


def refusals(rank: int) -> dict[str, str]:
    """Return the errors of ranks that ask for what cannot be, or for different things."""
    timeout_seconds(3)
    world, folder = distributed.get_world_size(), os.environ[FOLDERS].split(os.pathsep)[0]
    _, other, trained = os.environ[FOLDERS].split(os.pathsep)
    kind = "cuda" if "nccl" in distributed.get_backend_config() else "cpu"
    mesh = init_device_mesh(kind, (world,), mesh_dim_names=("experts",))
    asks: dict[str, Any] = {
        "does not multiply": lambda: Ranks.of(experts=3, slices=2),
        "nothing left": lambda: Ranks.of(slices=world + 1),
        "other on one rank": lambda: Ranks.of(spare=rank),
        "no such dimension": lambda: Ranks.of(mesh, experts="model"),
        "a name without a mesh": lambda: Ranks.of(experts="experts"),
        "no such context": lambda: Ranks.of(mesh, context="prefill"),
        "a context of experts": lambda: Ranks.of(mesh, experts="experts", context="experts"),
        "a context without a mesh": lambda: Ranks.of(context="experts"),
        "contexts that do not divide": lambda: Ranks.of(context=world + 1),
        "contexts of the same tokens": lambda: Ranks.of(context=world, same_tokens=True),
        "contexts on one rank": lambda: Ranks.of(context=1 + rank),
        "more ranks than experts": lambda: Ranks.of().placement(world - 1),
        "map": lambda: Ranks.of(order=((0, 1), (1,)) + ((2,),) * (world - 2)).placement(5),
        "too many replicas": lambda: load_layer(folder, 1, device=Ranks.of(replicas=9)),
        "another order": lambda: Ranks.of(order="middle").placement(8),  # type: ignore[arg-type]
        "no mesh": lambda: Ranks.of("cpu"),  # type: ignore[arg-type]
        "other checkpoints": lambda: load_layer(other if rank else folder, 1, device=Ranks.of()),
        "other weights": lambda: load_layer(trained if rank else folder, 1, device=Ranks.of()),
        "other limits": lambda: load_layer(folder, 1, device=Ranks.of(), limits=Limits(max_tokens=9 - rank % 2)),
    }
    found = {name: error_of(ask) for name, ask in asks.items()}
    layer = load_layer(folder, 1, device=Ranks.of(same_tokens=True))
    x = torch.ones(4 + rank, layer.spec.hidden_size, dtype=layer.input_dtype, device=_device(rank))
    found["other tokens"] = error_of(lambda: layer(x))
    # Nothing is left half done: the ranks go on.
    assert bool(layer(x[:4]).isfinite().all())
    sliced = Ranks.of(slices=world)
    found["other slices"] = error_of(lambda: load_layer(other if rank else folder, 1, device=sliced))
    layer = load_layer(folder, 1, device=sliced)
    found["other tokens of slices"] = error_of(lambda: layer(x))
    second = load_layer(folder, 2, device=sliced)
    found["another layer of slices"] = error_of(lambda: (second if rank else layer)(x[:4]))
    assert bool(layer(x[:4]).isfinite().all())
    return found


def replayed(rank: int) -> list[str]:
    """Return what CUDA graphs of a layer, in slices and for the same tokens, give otherwise than the layer itself.

    Each replay has new tokens. For the same tokens the bits are those of one rank.
    """
    folder, faults = os.environ[FOLDERS].split(os.pathsep)[0], list[str]()
    whole = load_layer(folder, 1, device=_device(rank))
    for ranks, dispatcher in (
        (Ranks.of(slices=distributed.get_world_size()), None),
        (Ranks.of(same_tokens=True), "symm_mem"),
    ):
        layer = load_layer(folder, 1, device=ranks, overrides=Overrides(dispatcher=dispatcher))
        _kept.append(layer)
        assert layer.plan.capturable
        x, _ = _inputs(layer, 12, seed=1)
        out, stream = torch.empty_like(x), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.inference_mode():
            with torch.cuda.stream(stream):
                layer(x, out=out)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                layer(x, out=out)
            for seed in (2, 3, 4):
                x.copy_(_inputs(layer, 12, seed=seed)[0])
                out.fill_(torch.nan)
                graph.replay()
                if not torch.equal(out, layer(x)):
                    faults.append(f"{ranks}: other bits in a replay, seed {seed}")
                if dispatcher and not torch.equal(out, whole(x)):
                    faults.append(f"{ranks}: other bits than one rank, seed {seed}")
        layer.check()
    return faults
