"""A layer whose experts are in host memory next to the same layer with all experts on the GPU.

First the bits: graphs of both layers are replayed with other inputs and experts each time, and outputs are compared.
Then times of replayed graphs: "hits" repeats inputs whose experts stay in the slots, "misses" goes through inputs with
other experts. The floor of a pass is the larger of the resident layer's time and missed bytes over the bandwidth from
host memory, the better one of copy engine and kernel. Needs a GPU.

    python benchmarks/bench_paging.py
    python benchmarks/bench_paging.py --recipes mxfp4:bf16 --tokens 1 8 64 --resident 0.25 --check
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import torch

from collegium import Limits, MoELayer, Overrides, Problem, Routing, plan, probe
from collegium.commands.bench import named_layer, random_inputs, recipe_of
from collegium.commands.measure import driver_version, graph_pool, prepare_pass, take_turns, timed_once, version_of
from collegium.dummy.weights import random_weights
from collegium.graphs import capture
from collegium.ops import paging

if TYPE_CHECKING:
    from torch import Tensor

    from collegium import MoESpec

RESULTS = Path(__file__).parent / "results" / "paging_h100.csv"
RECIPES = ("mxfp4:bf16", "mxfp4:fp8_token", "fp8_block:fp8_group128", "bf16")
TOKENS = (1, 8, 64, 512, 2048)
PROGRAMS = (8, 16, 32, 64, 132)
HEAD = ("gpu", "driver", "torch", "triton", "commit", "command", "shape", "weights", "activations", "slots", "experts")
COLUMNS = ("tokens", "case", "us resident", "us paged", "missed MB", "GB/s", "us floor", "ratio", "same bits")


class Layers(NamedTuple):
    """The layer with all experts on the GPU, and the one with slots for some of them."""

    whole: MoELayer
    paged: MoELayer


def layers_of(spec: MoESpec, recipe: tuple[str, str], most: int, resident: float, policy: str) -> Layers:
    """Return the layers of one recipe; resident: the fraction of experts with a slot."""
    device = torch.device("cuda")
    weights = random_weights(spec, device)
    problem = Problem(spec=spec, device=probe("cuda"), limits=Limits(max_tokens=most))
    overrides = Overrides(activation_format=recipe[1])
    whole = MoELayer(weights, plan(problem, overrides))
    slots = max(spec.routing.top_k, round(resident * spec.num_experts))
    limits = Limits(max_tokens=most, gpu_bytes=slots * whole.experts.slot_bytes)
    paged_plan = plan(replace(problem, limits=limits), replace(overrides, paging=policy))
    return Layers(whole, MoELayer(weights, paged_plan))


def inputs_of(spec: MoESpec, tokens: int, seed: int) -> list[tuple[Tensor, Routing]]:
    """Return the inputs of a pass."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return random_inputs(tokens, spec, "uniform", generator)


def same_bits(layers: Layers, tokens: list[int], steps: int) -> dict[int, bool]:
    """Return, by number of tokens, whether graphs of the paged layer write what the resident layer does."""
    spec = layers.whole.spec
    runner = capture(layers.paged, tokens, routing_input="routing")
    same = dict.fromkeys(tokens, True)
    for seed in range(steps):
        for count in tokens:
            for x, routing in inputs_of(spec, count, seed):
                wanted = layers.whole(x, routing=routing)
                for found in (runner(x, routing=routing), layers.paged(x, routing=routing)):
                    same[count] &= torch.equal(found, wanted)
    return same


def bandwidths(layer: MoELayer) -> dict[str, float]:
    """Return bytes a second from host memory to slots: by copy engine, and by the kernel with some programs."""
    experts: Any = layer.experts
    device = layer.device
    source, target = max(
        zip(experts.store.tensors, experts.segments.targets, strict=True), key=lambda pair: pair[1].nbytes
    )
    slots = target.shape[0]
    rates: dict[str, float] = {}
    seconds = min(timed_once(partial(target.copy_, source[-slots:], non_blocking=True), device) for _ in range(4))
    rates["copy engine"] = target.nbytes / seconds
    tables = experts.tables
    tables.slot_expert.fill_(-1)
    tables.expert_slot.fill_(-1)
    tables.round_start.fill_(slots)
    tables.round_start[0] = 0
    tables.copy_expert[:slots] = torch.arange(slots, device=device)
    tables.copy_slot[:slots] = torch.arange(slots, device=device)
    for programs in PROGRAMS:
        with patch.object(paging, "_PROGRAMS", programs):
            copy = partial(paging.copy_experts, experts.segments, tables, 0)
            copy()
            seconds = min(timed_once(copy, device) for _ in range(4))
        rates[f"kernel {programs}"] = slots * experts.slot_bytes / seconds
    return rates


def measure(layers: Layers, tokens: int, rate: float, *, same: bool) -> list[tuple[object, ...]]:
    """Return the rows of one number of tokens. rate: bytes a second from host memory."""
    device, spec = layers.whole.device, layers.whole.spec
    experts: Any = layers.paged.experts
    cases = inputs_of(spec, tokens, 1)
    slots = experts.tables.slot_expert.numel()
    hot = [(x, replace(routing, topk_ids=_hot(routing.topk_ids, slots))) for x, routing in cases[:1]]
    rows: list[tuple[object, ...]] = []
    for name, inputs in (("hits", hot), ("misses", cases)):
        pool = graph_pool(device)
        passes: dict[str, Any] = {}
        for key, layer in (("whole", layers.whole), ("paged", layers.paged)):
            calls = [partial(layer, x, routing=routing, out=torch.empty_like(x)) for x, routing in inputs]
            passes[key] = prepare_pass(calls, device, capture=True, pool=pool)
        passes["paged"]()
        before = experts.hits_and_misses[1]
        for _ in range(3):
            passes["paged"]()
        missed = (experts.hits_and_misses[1] - before) / 3 / len(inputs) * experts.slot_bytes
        times = {key: value / len(inputs) for key, value in take_turns(passes, device, rounds=3).items()}
        floor = max(times["whole"], missed / rate)
        shown = [f"{1e6 * value:.1f}" for value in (times["whole"], times["paged"])]
        ratio = f"{times['paged'] / floor:.3f}" if same else ""
        rows.append(
            (tokens, name, *shown, f"{missed / 1e6:.1f}", f"{rate / 1e9:.1f}", f"{1e6 * floor:.1f}", ratio, same)
        )
    return rows


def _hot(ids: Tensor, slots: int) -> Tensor:
    """Return ids of which all are below ``slots``, and those of a token distinct."""
    token = torch.arange(ids.shape[0], device=ids.device)[:, None]
    return ((token * ids.shape[1] + torch.arange(ids.shape[1], device=ids.device)) % slots).to(ids.dtype)


def main() -> None:
    """Compare, measure and write the rows of every recipe."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--shape", default="gptoss120b")
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--resident", type=float, default=0.5, help="fraction of the experts with a slot")
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--steps", type=int, default=4, help="times that inputs change in the comparison")
    parser.add_argument("--check", action="store_true", help="compare bits only")
    parser.add_argument("--commit", default="", help="recorded where there is no repository; default: that of git")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    device = torch.device("cuda")
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = options.commit or subprocess.run(command, capture_output=True, text=True, check=False).stdout
    about = [torch.cuda.get_device_name(), driver_version(device), torch.__version__, version_of("triton")]
    about += [commit.strip() or "unknown", " ".join(["python", *sys.argv]), options.shape]
    with torch.inference_mode():
        for text in options.recipes:
            recipe = recipe_of(text)
            spec = replace(named_layer(options.shape)[1], weight_format=recipe[0])
            layers = layers_of(spec, recipe, max(options.tokens), options.resident, options.policy)
            same = same_bits(layers, list(options.tokens), options.steps)
            slots = layers.paged.plan.problem.slots
            print(text, f"{slots} of {spec.num_experts} experts, same bits:", same, flush=True)
            if options.check:
                continue
            rates = bandwidths(layers.paged)
            print(text, ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in rates.items()), flush=True)
            # The measurement of the bandwidth left other experts in the slots than the tables list.
            layers = Layers(layers.whole, MoELayer(random_weights(spec, device), layers.paged.plan))
            for tokens in options.tokens:
                rows = measure(layers, tokens, max(rates.values()), same=same[tokens])
                append(options.out, [[*about, *recipe, slots, spec.num_experts, *row] for row in rows])
            del layers
            torch.cuda.empty_cache()


def append(path: Path, rows: list[list[object]]) -> None:
    """Print ``rows`` and add them to the file."""
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow([*HEAD, *COLUMNS])
        writer.writerows(rows)
    for row in rows:
        print(*row[-len(COLUMNS) - 4 :], flush=True)


if __name__ == "__main__":
    main()
