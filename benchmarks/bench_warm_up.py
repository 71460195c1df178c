"""How long warming up a layer takes: with an empty compile cache, and in a new process with a full one.

    TRITON_CACHE_DIR=$(mktemp -d) python benchmarks/bench_warm_up.py dsv3 fp8_block:fp8_group128

Run it twice with the same cache: the first time is cold, the second is warm. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace

import torch
from triton import knobs

from collegium.bench import random_weights, spec_of
from collegium.devices import probe
from collegium.layer import MoELayer
from collegium.plan import plan
from collegium.types import Choice, Limits, Problem
from collegium.warming import warm_up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what")
    parser.add_argument("recipe")
    args = parser.parse_args()
    weights, _, activations = args.recipe.partition(":")
    name, plain = spec_of(args.what)
    spec = replace(plain, weight_format=weights)
    compiled: list[str] = []
    loaded: list[str] = []

    def after(*, repr: str, **_: object) -> None:
        compiled.append(repr)

    def load(*_: object, **__: object) -> None:
        loaded.append("")

    knobs.runtime.jit_post_compile_hook = after
    knobs.runtime.kernel_load_start_hook.add(load)
    problem = Problem(spec=spec, device=probe("cuda"), limits=Limits(max_tokens=8192))
    made = plan(problem, Choice(activation_format=activations or "bf16"))
    layer = MoELayer(random_weights(spec, torch.device("cuda")), made)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    batches = warm_up([layer])
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    row = {"shape": name, "recipe": args.recipe, "kernel": made.kernel, "batches": batches}
    row |= {"compiled": len(compiled), "loaded": len(loaded), "seconds": round(seconds, 2)}
    print(json.dumps(row))


if __name__ == "__main__":
    main()
