"""How long warming up a layer takes: with an empty compile cache (cold), and in a new process with a full one (warm).

Each row is a process of its own with a cache of its own. They start side by side, but the part that is timed waits for
a lock, so no two run at the same time.

    python benchmarks/bench_warm_up.py dsv3/fp8_block:fp8_group128 qwen3_30b/mxfp4:bf16
"""

from __future__ import annotations

import argparse
import csv
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from triton import knobs

from collegium.commands.bench import named_layer, recipe_of
from collegium.commands.measure import driver_version, version_of
from collegium.dummy.weights import random_weights
from collegium.layer import MoELayer
from collegium.planning import plan
from collegium.problem import Limits, Overrides, Problem
from collegium.runtime.devices import probe
from collegium.runtime.warm_up import warm_up

RESULTS = Path(__file__).parent / "results" / "warm_up_h200.csv"
CASES = ("dsv3/fp8_block:fp8_group128", "qwen3_30b/mxfp4:fp8_token", "qwen3_30b/mxfp4:bf16", "qwen3_30b/bf16:bf16")
PLACE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def measured(case: str, lock: str) -> dict[str, Any]:
    """Warm up one layer in this process."""
    what, _, recipe = case.partition("/")
    weights, activations = recipe_of(recipe)
    name, plain = named_layer(what)
    spec = replace(plain, weight_format=weights)
    compiled: list[str] = []
    loaded: list[str] = []

    def after(*, repr: str, **_: object) -> None:
        compiled.append(repr)

    def load(*_: object, **__: object) -> None:
        loaded.append("")

    problem = Problem(spec=spec, device=probe(PLACE.type), limits=Limits(max_tokens=8192))
    made = plan(problem, Overrides(activation_format=activations))
    layer = MoELayer(random_weights(spec, PLACE), made)
    _wait()
    knobs.runtime.jit_post_compile_hook = after
    knobs.runtime.kernel_load_start_hook.add(load)
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        begin = time.perf_counter()
        batches = warm_up([layer])
        _wait()
        seconds = time.perf_counter() - begin
    row = {"shape": name, "recipe": recipe, "kernel": made.kernel, "batches": batches}
    return row | {"compiled": len(compiled), "loaded": len(loaded), "seconds": round(seconds, 2)}


def _wait() -> None:
    if PLACE.type == "cuda":
        torch.cuda.synchronize()


def main() -> int:
    args = _options()
    if args.lock:
        print(json.dumps(measured(args.cases[0], args.lock)))
        return 0
    said = " ".join(["python benchmarks/bench_warm_up.py", *args.cases])
    head = {"gpu": probe(PLACE).name or PLACE.type, "driver": driver_version(PLACE), "torch": torch.__version__}
    head |= {"triton": version_of("triton"), "commit": args.commit, "command": said}
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for cache in ("cold", "warm"):
            running = {case: _child(case, Path(folder) / str(place)) for place, case in enumerate(args.cases)}
            for case, child in running.items():
                text, fault = child.communicate()
                if child.returncode:
                    print(f"{case} {cache}: {fault.strip().splitlines()[-1:]}", flush=True)
                    continue
                rows[case, cache] = head | {"cache": cache} | json.loads(text.splitlines()[-1])
                print(text.splitlines()[-1], cache, flush=True)
    if rows:
        with args.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(next(iter(rows.values()))), lineterminator="\n")
            writer.writeheader()
            writer.writerows(
                rows[case, cache] for case in args.cases for cache in ("cold", "warm") if (case, cache) in rows
            )
    return int(len(rows) < 2 * len(args.cases))


def _child(case: str, cache: Path) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, case, "--lock", str(cache.parent / "lock")]
    surroundings = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    return subprocess.Popen(command, env=surroundings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=CASES, help="shape/weights:activations")
    parser.add_argument("--lock", help="measure one case here, while this file is locked")
    parser.add_argument("--out", type=Path, default=RESULTS)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    parser.add_argument("--commit", default=commit.strip() or "unknown")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
