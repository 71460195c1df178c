"""A layer with unmerged adapters next to the same layer without: 8 adapters of rank 16, 1 to 128 tokens.

A time counts only if tokens without an adapter have the bits of the layer without adapters, and the first, middle and
last token are near FP32 truth. ``none``: every token has id -1. ``one``: all tokens have the same adapter. ``mixed``:
each token has one of the adapters. Passes are replayed CUDA graphs ("graph"), or calls queued one after the other
("eager"). "bytes" is the least that a pass can read with adapters over the least without: the matrices of every adapter
and expert that occur, and the weights of every expert that occurs. Needs a GPU.

    python benchmarks/bench_adapters.py
    python benchmarks/bench_adapters.py --recipes mxfp4:fp8_token --tokens 1 16 128
"""

from __future__ import annotations

import argparse
import copy
import csv
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from collegium import ExpertAdapter, ExpertAdapters, Limits, LowRankPair, MoELayer, Overrides, Problem, plan, probe
from collegium.commands.bench import TOLERANCES, named_layer, random_inputs, recipe_of
from collegium.commands.measure import driver_version, graph_pool, prepare_pass, take_turns, version_of
from collegium.dummy.weights import random_weights
from collegium.ops.quantize import activation_format

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from collegium import MoESpec, Routing

RESULTS = Path(__file__).parent / "results" / "adapters_h100.csv"
RECIPES = ("bf16", "fp8_block:fp8_group128", "mxfp4:fp8_token", "mxfp4")
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
CHOICES = ("none", "one", "mixed")
CALLS = ("graph", "eager")
HEAD = ("gpu", "driver", "torch", "triton", "commit", "command", "shape", "adapters", "rank", "weights", "activations")
COLUMNS = ("tokens", "calls", "choice", "us without", "us with", "ratio", "bytes", "error", "same bits")


class Case(NamedTuple):
    """One input: tokens, experts, and by choice the adapter of each token."""

    x: Tensor
    routing: Routing
    ids: dict[str, Tensor]


class Layers(NamedTuple):
    """A layer without adapters, the same packed experts with adapters, and the truth with adapters."""

    without: MoELayer
    adapted: MoELayer
    truth: MoELayer


def random_adapters(spec: MoESpec, count: int, rank: int, device: torch.device) -> ExpertAdapters:
    """Return adapters whose changes have about a third of the weights' size."""
    generator = torch.Generator(device).manual_seed(3)

    def pair(rows: int, columns: int) -> LowRankPair:
        options: Any = {"device": device, "generator": generator, "dtype": torch.bfloat16}
        a = torch.randn(spec.num_experts, rank, columns, **options) * columns**-0.5
        b = torch.randn(spec.num_experts, rows, rank, **options) * (0.33 * rank**-0.5)
        return LowRankPair(a=a, b=b)

    hidden, inner = spec.hidden_size, spec.intermediate_size
    return ExpertAdapters(
        tuple(
            ExpertAdapter(
                name=f"adapter{n}", gate=pair(inner, hidden), up=pair(inner, hidden), down=pair(hidden, inner)
            )
            for n in range(count)
        )
    )


def layers_of(spec: MoESpec, recipe: tuple[str, str], adapters: ExpertAdapters, most: int) -> Layers:
    """Return the layers of one recipe."""
    device = torch.device("cuda")
    weights = random_weights(spec, device)
    problem = Problem(spec=spec, device=probe("cuda"), limits=Limits(max_tokens=most))
    without = MoELayer(weights, plan(problem, Overrides(activation_format=recipe[1])))
    truth = MoELayer(weights, plan(problem, Overrides(kernel="reference", activation_format="fp32")))
    adapted = copy.copy(without)
    adapted.set_adapters(adapters)
    truth.set_adapters(adapters)
    return Layers(without, adapted, truth)


def cases_of(spec: MoESpec, tokens: int, adapters: int, device: torch.device) -> list[Case]:
    """Return the inputs of one pass."""
    generator = torch.Generator(device).manual_seed(tokens)
    cases: list[Case] = []
    for number, (x, routing) in enumerate(random_inputs(tokens, spec, "uniform", generator)):
        ids = {
            "none": torch.full((tokens,), -1, device=device),
            "one": torch.full((tokens,), number % adapters, device=device),
            "mixed": torch.randint(adapters, (tokens,), device=device, generator=generator),
        }
        cases.append(Case(x, routing, ids))
    return cases


def bytes_ratio(case: Case, choice: str, layers: Layers) -> float:
    """Return the least bytes of weights and adapters over those of weights alone."""
    plan, adapters = layers.without.plan, layers.adapted.adapters
    assert adapters is not None
    experts = plan.problem.spec.num_experts
    ids = case.ids[choice]
    active = int(case.routing.topk_ids.unique().numel())
    both = (ids[:, None] * experts + case.routing.topk_ids)[ids >= 0].unique().numel()
    per_pair = adapters.sizes.nbytes / (adapters.count * experts)
    return 1 + both * per_pair / (active * plan.expert_bytes)


def check(case: Case, choice: str, found: Tensor, layers: Layers) -> tuple[float, bool]:
    """Return the error of the first, middle and last token, and whether tokens keep the bits of the plain layer."""
    rows = torch.tensor(sorted({0, len(case.x) // 2, len(case.x) - 1}), device=case.x.device)
    ids = case.ids[choice]
    part = replace(case.routing, topk_ids=case.routing.topk_ids[rows], topk_weights=case.routing.topk_weights[rows])
    truth = layers.truth(case.x[rows], routing=part, adapter_ids=ids[rows]).float()
    finite = bool(found.isfinite().all())
    error = float((found[rows].float() - truth).norm() / truth.norm()) if finite else float("inf")
    # Every second token without an adapter, in a batch whose other tokens have theirs.
    half = ids.clone()
    half[::2] = -1
    mixed = layers.adapted(case.x, routing=case.routing, adapter_ids=half)
    plain = layers.without(case.x, routing=case.routing)
    same = torch.equal(mixed[::2], plain[::2]) and torch.equal(mixed[1::2], found[1::2])
    return error, same


def measure(layers: Layers, cases: list[Case], kinds: list[str]) -> list[tuple[object, ...]]:
    """Return rows from ``tokens`` on, for each of ``kinds`` of calls."""
    device = cases[0].x.device
    outs = {choice: [torch.empty_like(case.x) for case in cases] for choice in ("without", *CHOICES)}
    calls: dict[str, list[Callable[[], object]]] = {
        "without": [
            partial(layers.without, case.x, routing=case.routing, out=out)
            for case, out in zip(cases, outs["without"], strict=True)
        ]
    }
    for choice in CHOICES:
        calls[choice] = [
            partial(layers.adapted, case.x, routing=case.routing, adapter_ids=case.ids[choice], out=out)
            for case, out in zip(cases, outs[choice], strict=True)
        ]
    pool = graph_pool(device)
    rows: list[tuple[object, ...]] = []
    for kind in kinds:
        passes = {key: prepare_pass(own, device, capture=kind == "graph", pool=pool) for key, own in calls.items()}
        times = take_turns(passes, device, rounds=5)
        seconds = {key: value / len(cases) for key, value in times.items()}
        for choice in CHOICES:
            with torch.inference_mode():
                error, same = check(cases[0], choice, outs[choice][0], layers)
            counts = same and error <= TOLERANCES[activation_format(layers.without.plan.activation_format).bits]
            without, adapted = 1e6 * seconds["without"], 1e6 * seconds[choice]
            ratio = f"{adapted / without:.3f}" if counts else ""
            least = sum(bytes_ratio(case, choice, layers) for case in cases) / len(cases)
            shown = f"{without:.1f}", f"{adapted:.1f}" if counts else "", ratio, f"{least:.3f}", f"{error:.4f}", same
            rows.append((len(cases[0].x), kind, choice, *shown))
    return rows


def main() -> None:
    """Measure every recipe, write and print the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--shape", default="qwen3_30b")
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=CALLS)
    parser.add_argument("--commit", default="", help="recorded where there is no repository; default: that of git")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    device = torch.device("cuda")
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = options.commit or subprocess.run(command, capture_output=True, text=True, check=False).stdout
    about = [torch.cuda.get_device_name(), driver_version(device), torch.__version__, version_of("triton")]
    about += [commit.strip() or "unknown", " ".join(["python", *sys.argv]), options.shape]
    rows: list[list[object]] = []
    for text in options.recipes:
        recipe = recipe_of(text)
        spec = replace(named_layer(options.shape)[1], weight_format=recipe[0])
        adapters = random_adapters(spec, options.adapters, options.rank, device)
        layers = layers_of(spec, recipe, adapters, max(options.tokens))
        for tokens in options.tokens:
            cases = cases_of(spec, tokens, options.adapters, device)
            for row in measure(layers, cases, options.calls):
                rows.append([*about, options.adapters, options.rank, *recipe, *row])
                print(*rows[-1][-11:], flush=True)
        del layers, adapters
        torch.cuda.empty_cache()
    with options.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*HEAD, *COLUMNS])
        writer.writerows(rows)


if __name__ == "__main__":
    main()
