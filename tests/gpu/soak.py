"""Captured graphs of random layers give the bits of eager calls and of parts of the batch, for as long as asked.

``python tests/gpu/soak.py --seconds 1800 --together 8`` draws formats, sizes, token counts and skews of the routing, in
so many processes side by side. A graph is captured for each of a few token counts of a layer and replayed with other
tokens and routings, some of them NaN; every replay must have the bits of an eager call, and so must any rows of it
that are called alone. Exit code 1: an output differed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))

import torch
from stress_threads import experts_of, problem_of, recipes
from torch import Tensor

from collegium import Limits, MoELayer, MoESpec, Overrides, Routing, RoutingSpec, plan
from collegium.commands.measure import ROUTINGS, random_routing
from collegium.formats.unquantised import DTYPES
from collegium.testing.compare import heavy_tailed
from rough_tokens import same

MOST = 2048
GRAPHS, REPLAYS = 5, 8


class Captured(NamedTuple):
    """A graph of one pass, and the memory it reads and writes."""

    graph: torch.cuda.CUDAGraph
    x: Tensor
    routing: Routing
    out: Tensor


def drawn_layer(draw: random.Random, weights: str, activations: str) -> MoELayer:
    """Return a layer of random sizes."""
    hidden, wide, experts = draw.choice((256, 384, 640)), draw.choice((128, 256, 384)), draw.choice((1, 4, 8, 33, 64))
    spec = MoESpec(
        hidden_size=hidden,
        intermediate_size=wide,
        num_experts=experts,
        routing=RoutingSpec(top_k=min(draw.choice((1, 2, 4)), max(1, experts // 2))),
        weight_format=weights,
    )
    # Batches of any size in w4_prefill, half of the time.
    on_hopper = torch.cuda.get_device_capability() == (9, 0)
    in_registers = (activations == "bf16" and weights.startswith(("mxfp4", "nvfp4", "int4"))) or (
        activations in ("fp8_token", "fp8_group128") and weights in ("mxfp4", "nvfp4")
    )
    tiles = draw.choice((None, "large")) if on_hopper and in_registers else None
    overrides = Overrides(activation_format=activations, tiles=tiles)
    made = plan(problem_of(spec, activations, Limits(max_tokens=MOST)), overrides)
    return MoELayer(experts_of(weights, experts, wide, hidden, seed=draw.randrange(1 << 30)), made)


def drawn_inputs(draw: random.Random, layer: MoELayer, tokens: int) -> tuple[Tensor, Routing]:
    """Return random tokens and a random routing of them; now and then a token is NaN."""
    spec, seed = layer.plan.problem.spec, draw.randrange(1 << 30)
    x = heavy_tailed(tokens, spec.hidden_size, seed=seed).to("cuda", DTYPES[layer.plan.problem.dtype])
    style = draw.choice(ROUTINGS) if spec.num_experts > 1 else "uniform"
    routing = random_routing(tokens, spec, style, torch.Generator("cuda").manual_seed(seed))
    if draw.random() < 0.2:
        x[draw.randrange(tokens)] = torch.nan
    return x, routing


def captured(layer: MoELayer, x: Tensor, routing: Routing) -> Captured:
    """Return a graph of ``layer(x, routing=routing)``."""
    for _ in range(2):
        layer(x, routing=routing)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x, routing=routing)
    return Captured(graph, x, routing, out)


def rows_of(x: Tensor, routing: Routing, rows: slice) -> tuple[Tensor, Routing]:
    """Return some rows of a batch as a batch."""
    return x[rows].clone(), Routing(topk_ids=routing.topk_ids[rows], topk_weights=routing.topk_weights[rows])


def checked(draw: random.Random, layer: MoELayer, one: Captured) -> int:
    """Replay a graph with new tokens and return how many of two comparisons failed."""
    tokens = one.x.shape[0]
    x, routing = drawn_inputs(draw, layer, tokens)
    one.x.copy_(x)
    one.routing.topk_ids.copy_(routing.topk_ids)
    one.routing.topk_weights.copy_(routing.topk_weights)
    one.out.fill_(torch.nan)
    one.graph.replay()
    wrong = int(not same(one.out, layer(x, routing=routing)))
    first = draw.randrange(tokens)
    rows = slice(first, first + draw.randint(1, tokens - first))
    own, chosen = rows_of(x, routing, rows)
    return wrong + int(not same(layer(own, routing=chosen), one.out[rows]))


def soaked(seed: int, *, seconds: float) -> Counter[str]:
    """Return how many replays there were of each pair of formats, and under ``different`` how many of them differed."""
    draw, found, end = random.Random(seed), Counter[str](), time.monotonic() + seconds
    pairs = recipes()
    with torch.inference_mode():
        while time.monotonic() < end:
            weights, activations = draw.choice(pairs)
            layer = drawn_layer(draw, weights, activations)
            assert layer.plan.capturable, layer.plan.explain()
            sizes = [min(MOST, int(2 ** draw.uniform(0, 11.2))) for _ in range(GRAPHS)]
            graphs = [captured(layer, *drawn_inputs(draw, layer, tokens)) for tokens in sizes]
            for number in range(REPLAYS * GRAPHS):
                wrong = checked(draw, layer, graphs[number % GRAPHS])
                found[f"{weights} x {activations}"] += 1
                found["different"] += wrong
                if wrong:
                    spec, tokens = layer.plan.problem.spec, sizes[number % GRAPHS]
                    print(f"seed {seed}: {weights} x {activations}, {tokens} tokens of {spec}: differs", flush=True)
    return found


def main() -> int:
    """Soak in several processes and print what was replayed; 1 where an output differed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--together", type=int, default=8, help="processes side by side")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    seeds = range(asked.seed, asked.seed + asked.together)
    with ProcessPoolExecutor(asked.together, mp_context=get_context("spawn")) as pool:
        found = sum(pool.map(partial(soaked, seconds=asked.seconds), seeds), Counter[str]())
    different, replays = found.pop("different", 0), found.total()
    for pair, count in sorted(found.items()):
        print(f"{pair}: {count:,} replays")
    print(f"{replays:,} replays of {len(found)} pairs of formats, {different} outputs differed")
    return int(different > 0 or not replays)


if __name__ == "__main__":
    sys.exit(main())
