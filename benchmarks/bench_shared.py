"""Whole layers with a router and a shared expert: one more routed expert, on a stream of its own, or after the others.

A time counts only if the layer is near FP32 truth and has the bits of the shared expert that runs apart; pieces of a
wide one are rounded one by one, and are only near it. Passes are replayed CUDA graphs ("graph"), or calls that are
queued one after the other ("eager"). Needs a Hopper GPU.

    python benchmarks/bench_shared.py
    python benchmarks/bench_shared.py --layers deepseek_v3 --tokens 1 8 128
"""

from __future__ import annotations

import argparse
import csv
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from collegium import (
    Limits,
    MoELayer,
    Overrides,
    Problem,
    RouterWeights,
    SharedSpec,
    SharedWeights,
    merge_shared,
    plan,
    probe,
)
from collegium.commands.bench import TOLERANCES, named_layer
from collegium.commands.measure import driver_version, graph_pool, input_sets, prepare_pass, take_turns, version_of
from collegium.dummy.weights import random_weights
from collegium.ops.quantize import activation_format

if TYPE_CHECKING:
    from torch import Tensor

    from collegium import MoESpec, Plan

RESULTS = Path(__file__).parent / "results" / "shared_h200.csv"
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048)
# The committed results have the former names: "apart" for "sequential", "beside" for "side_stream".
WAYS: tuple[Any, ...] = ("merged", "side_stream", "sequential")


class Shape(NamedTuple):
    """A layer of a published model: its routed experts, formats of weights and activations, and the shared expert."""

    routed: str
    weights: str
    activations: str
    shared: SharedSpec
    merges: bool = True


LAYERS = {
    "deepseek_v3": Shape("dsv3", "fp8_block", "fp8_group128", SharedSpec(intermediate_size=2048)),
    "glm_4.5_air": Shape("4096x1408x128x8", "bf16", "bf16", SharedSpec(intermediate_size=1408)),
    "v4_flash": Shape(
        "v4_flash", "mxfp4", "fp8_token", SharedSpec(intermediate_size=2048, weight_format="fp8_block"), merges=False
    ),
    "qwen3_next": Shape("2048x512x512x10", "bf16", "bf16", SharedSpec(intermediate_size=512, gated=True), merges=False),
    "deepseek_v2_lite": Shape("2048x1408x64x6", "bf16", "bf16", SharedSpec(intermediate_size=2816)),
}


def layers_of(shape: Shape, most: int) -> dict[str, MoELayer]:
    """Return the layer for each way to run its shared expert, and a judge that computes in float32."""
    device, facts = torch.device("cuda"), probe("cuda")
    spec: MoESpec = named_layer(shape.routed)[1]
    spec = replace(spec, weight_format=shape.weights, shared=shape.shared)
    problem = Problem(spec=spec, device=facts, limits=Limits(max_tokens=most))
    routed, alone = random_weights(replace(spec, shared=None), device), random_weights(spec.shared_alone(), device, 5)
    made = torch.Generator(device).manual_seed(7)
    router = torch.randn(spec.num_experts, spec.hidden_size, device=device, generator=made) * spec.hidden_size**-0.5
    gate = torch.randn(1, spec.hidden_size, device=device, generator=made) * spec.hidden_size**-0.5
    shared = SharedWeights(experts=alone, gate=gate if shape.shared.gated else None)

    def layer(chosen: Plan) -> MoELayer:
        if chosen.merged_shared_experts:
            return MoELayer(merge_shared(chosen, routed, shared), chosen, router=RouterWeights(weight=router))
        return MoELayer(routed, chosen, router=RouterWeights(weight=router), shared=shared)

    ways: list[Any] = [way for way in WAYS if way != "merged" or shape.merges]
    found = {way: layer(plan(problem, Overrides(activation_format=shape.activations, shared=way))) for way in ways}
    exact = Overrides(kernel="reference", activation_format="fp32", shared="sequential")
    return found | {"truth": layer(plan(problem, exact))}


def away(found: Tensor, truth: Tensor) -> float:
    """Return the relative L2 error; infinite where something is not finite."""
    finite = bool(found.isfinite().all())
    return float((found.float() - truth.float()).norm() / truth.float().norm()) if finite else float("inf")


def main() -> None:
    """Measure every layer, write and print the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), choices=list(LAYERS))
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    device = torch.device("cuda")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    about = [torch.cuda.get_device_name(), driver_version(device), torch.__version__, version_of("triton")]
    about += [commit.strip() or "unknown", "python benchmarks/bench_shared.py"]
    rows: list[list[object]] = []
    for name in asked.layers:
        shape = LAYERS[name]
        layers = layers_of(shape, max(asked.tokens))
        truth = layers.pop("truth")
        allowed, pool = TOLERANCES[activation_format(shape.activations).bits], graph_pool(device)
        for tokens in asked.tokens:
            made, size = torch.Generator(device).manual_seed(tokens), (tokens, truth.spec.hidden_size)
            xs = [torch.randn(size, device=device, generator=made).bfloat16() for _ in range(input_sets(tokens))]
            kinds = [(way, kind) for kind in ("graph", "eager") for way in layers]
            outs = {key: [torch.empty_like(x) for x in xs] for key in kinds}
            calls = {
                key: [partial(layers[key[0]], x, out=out) for x, out in zip(xs, outs[key], strict=True)]
                for key in kinds
            }
            passes = {
                key: prepare_pass(own, device, capture=key[1] == "graph", pool=pool) for key, own in calls.items()
            }
            times = take_turns(passes, device, rounds=5)
            with torch.inference_mode():
                right = away(outs["sequential", "eager"][0][:3], truth(xs[0][:3])) <= allowed
            for (way, kind), seconds in times.items():
                pairs = list(zip(outs[way, kind], outs["sequential", "eager"], strict=True))
                same = all(torch.equal(*pair) for pair in pairs)
                counts = right and (
                    same or (layers[way].plan.merged_shared_experts > 1 and all(away(*p) <= allowed for p in pairs))
                )
                shown = f"{seconds / len(xs) * 1e6:.1f}" if counts else ""
                rows.append([*about, name, shape.weights, shape.activations, tokens, way, kind, shown, same])
                print(*rows[-1][-7:], flush=True)
        del layers, truth
        torch.cuda.empty_cache()
    with asked.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        head = ["gpu", "driver", "torch", "triton", "commit", "command", "layer", "weights", "activations", "tokens"]
        writer.writerow([*head, "shared expert", "calls", "us", "same bits"])
        writer.writerows(rows)


if __name__ == "__main__":
    main()
