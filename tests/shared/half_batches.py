"""Two halves of a batch at the same time: two layers over the same ranks, one set of packed experts, two threads."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from collegium import Overrides, plan
from collegium.parallel.placement import linear
from collegium.testing.compare import heavy_tailed
from split_layers import DTYPES, EXPERTS, HIDDEN, RECIPES, equal, layer_of

if TYPE_CHECKING:
    from torch import Tensor

    from collegium import MoELayer


def halves(rank: int, name: str, device: str = "cpu") -> list[str]:
    """Return what differs from one layer that has every expert and is given the whole batch.

    On a GPU each thread has a stream of its own, and other counts of tokens each turn.
    """
    world, faults = distributed.get_world_size(), list[str]()
    if device == "cuda":
        torch.cuda.set_device(rank)
    place = f"cuda:{rank}" if device == "cuda" else device
    groups = [distributed.new_group(list(range(world))).group_name for _ in range(2)]
    for kind, recipe in (("shared", RECIPES[1]), ("plain", RECIPES[0]), ("latent", RECIPES[2])):
        whole = layer_of(kind, recipe, place)
        placed = replace(linear(EXPERTS, rank, world), group=groups[0])
        one = layer_of(kind, recipe, place, placed, dispatcher=name)
        two = copy.copy(one)
        asked = replace(one.plan.problem, placement=replace(placed, group=groups[1]))
        two.replan(plan(asked, Overrides(dispatcher=name)), one.experts)
        assert two.experts is one.experts
        streams = [torch.cuda.Stream(rank) if device == "cuda" else None for _ in range(2)]
        with ThreadPoolExecutor(2) as pool:
            for turn in range(3 if device == "cpu" else 20):
                x = heavy_tailed(6 + rank + turn // 3, HIDDEN, seed=10 * turn + rank).to(place, DTYPES[recipe[2]])
                parts = zip((one, two), x.tensor_split(2), streams, strict=True)
                found = torch.cat([part.result() for part in [pool.submit(_half, *own) for own in parts]])
                if not equal(found, whole(x), exact=False):
                    faults.append(f"{kind} {recipe}, turn {turn}")
    return faults


def _half(layer: MoELayer, x: Tensor, stream: Any) -> Tensor:
    if stream is None:
        return layer(x)
    stream.wait_stream(torch.cuda.default_stream(x.device))
    with torch.cuda.device(x.device), torch.cuda.stream(stream):
        y = layer(x)
        stream.synchronize()
    return y
