"""Layers over ranks that run a batch as two halves, against the same layers that run it whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import distributed

from collegium import Routing
from collegium.parallel.placement import linear, round_robin
from collegium.testing.compare import heavy_tailed, relative_error, uneven_ids
from split_layers import DTYPES, EXPERTS, HIDDEN, RECIPES, equal, kept, layer_of

if TYPE_CHECKING:
    from collegium import MoELayer

__all__ = ["MAX_TOKENS", "compare_halves"]

MAX_TOKENS = 1024
# How many tokens each rank brings; ranks beyond repeat the list.
COUNTS = ((9, 4, 1, 30), (0, 5, 2, 0), (1, 1, 0, 1), (0, 0, 0, 0), (64, 3, 33, 2))
CASES = (("plain", RECIPES[2]), ("shared", RECIPES[0]), ("on input", RECIPES[1]), ("latent", RECIPES[3]))


def _inputs(layer: MoELayer, tokens: int, seed: int) -> tuple[torch.Tensor, Routing]:
    x = heavy_tailed(tokens, HIDDEN, seed=seed).to(layer.device, layer.input_dtype)
    ids = uneven_ids(tokens, layer.spec.routing.top_k, EXPERTS, seed=seed + 1)
    ids[1::4, 0] = -1
    weights = heavy_tailed(*ids.shape, seed=seed + 2, channels=False).abs()
    return x, Routing(topk_ids=ids.to(layer.device), topk_weights=weights.to(layer.device))


def compare_halves(rank: int, name: str, device: str = "cpu", repeats: int = 1) -> list[str]:
    """Return where two halves differ from a whole batch, and where they are farther from the FP32 truth.

    name: of the dispatcher. Triton's kernels have to give the same bits on a GPU.
    """
    world, faults = distributed.get_world_size(), list[str]()
    place = f"cuda:{rank}" if device == "cuda" else device
    for number, (kind, recipe) in enumerate(CASES):
        truth_layer = layer_of(kind, RECIPES[1], place)
        placement = (linear, round_robin)[number % 2](EXPERTS, rank, world)
        options = {"dispatcher": name, "max_tokens": MAX_TOKENS}
        one = layer_of(kind, recipe, place, placement, **options)
        two = layer_of(kind, recipe, place, placement, microbatches=2, allow_slow=True, **options)
        kept.extend((one, two))
        exact = device == "cuda" and one.plan.kernel.startswith("triton")
        assert (one.plan.microbatches, two.plan.microbatches) == (1, 2)
        for turn, counts in enumerate(COUNTS * repeats):
            x, routing = _inputs(one, counts[rank % len(counts)], seed=100 * turn + rank)
            whole, halves = one(x, routing=routing), two(x, routing=routing)
            what = f"{kind} {recipe} {counts}"
            if not equal(halves, whole, exact=exact):
                faults.append(f"{what}: halves differ from the whole batch")
            if not equal(two(x), one(x), exact=exact):
                faults.append(f"{what}: halves differ from the whole batch, by the layer's router")
            truth = truth_layer(x.to(DTYPES["fp32"]), routing=routing)
            if x.shape[0] and relative_error(halves, truth) > 1.05 * relative_error(whole, truth) + 1e-6:
                faults.append(f"{what}: error {relative_error(halves, truth)}, not {relative_error(whole, truth)}")
    return faults
