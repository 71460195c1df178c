"""One layer under two releases of Triton, in turns, on one GPU in one run: eager calls, captured graphs, bits.

    python benchmarks/compare_tritons.py --other FOLDER --out tritons.csv

FOLDER holds the package of the other release (``FOLDER/triton/``); the installed one is the base. Each release runs in
processes of its own, and rounds alternate which goes first; a row holds the best round of each. Before a time counts,
the output agrees with FP32 truth as in ``collegium bench``. ``same_bits``: whether both releases give equal outputs.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from collegium.commands.bench import check_output, named_layer, planned_layer, random_inputs
from collegium.commands.measure import driver_version, prepare_pass, take_turns, version_of
from collegium.dummy.weights import random_weights
from collegium.layer import MoELayer
from collegium.runtime.devices import probe

SOURCE = Path(__file__).resolve().parents[1] / "src"
RECIPES = (
    "bf16:bf16",
    "fp8_block:bf16",
    "fp8_block:fp8_group128",
    "fp8_channel:fp8_token",
    "mxfp8:bf16",
    "mxfp4:bf16",
    "mxfp4:fp8_token",
    "mxfp4:fp8_group128",
    "nvfp4:bf16",
    "nvfp4:fp8_token",
    "nvfp4:fp8_group128",
    "int4_group:bf16",
    "int4_group:fp8_group128",
    "int4_affine:bf16",
    "int8_affine:bf16",
    "bnb4:bf16",
    "gguf:bf16",
)
HEAD = (
    "shape",
    "weights",
    "activations",
    "tokens",
    "mode",
    "base_us",
    "other_us",
    "ratio",
    "same_bits",
    "base_triton",
    "other_triton",
    "gpu",
    "driver",
    "torch",
    "date",
    "commit",
    "command",
)
CALLS = 100  # eager calls of one timing
REPEATS = 40  # timings, of which the best counts: whatever else the host does only adds time


def eager_microseconds(call: Callable[[], object]) -> float:
    """Return the time of one call of ``CALLS`` eager calls in a row, in microseconds; the best of ``REPEATS``."""
    for _ in range(10):
        call()
    best = float("inf")
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - start) / CALLS)
    return 1e6 * best


def measure(shape: str, recipes: list[str], tokens: list[int], eager_up_to: int, compile_only: bool) -> None:
    """Print a JSON row for each recipe, number of tokens and mode, with the Triton that this process imports.

    compile_only: check outputs and print nothing, so that the kernels are in Triton's cache afterwards.
    """
    device = torch.device("cuda")
    facts = probe(device)
    for recipe in recipes:
        weight_format, _, activations = recipe.partition(":")
        _, spec = named_layer(shape)
        plan = planned_layer(spec, (weight_format, activations), facts, max(tokens))
        weights = random_weights(plan.problem.spec, device)
        layer = MoELayer(weights, plan)
        for count in tokens:
            generator = torch.Generator(device).manual_seed(count)
            inputs = random_inputs(count, plan.problem.spec, "uniform", generator)
            error = check_output(f"{shape} {recipe} {count}", layer, weights, inputs[0])
            if compile_only:
                continue
            calls = [partial(layer, x, routing=routing) for x, routing in inputs]
            with torch.inference_mode():
                digest = hashlib.sha256(calls[0]().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()[:16]
                row = {"recipe": recipe, "tokens": count, "error": error, "bits": digest}
                if count <= eager_up_to:
                    print(json.dumps({**row, "mode": "eager", "us": eager_microseconds(calls[0])}), flush=True)
            replay = prepare_pass(calls, device)
            seconds = take_turns({"graph": replay}, device, rounds=5)["graph"] / len(calls)
            print(json.dumps({**row, "mode": "graph", "us": 1e6 * seconds}), flush=True)
            del replay, calls, inputs
        del layer, weights
        torch.cuda.empty_cache()


def compile_all(options: argparse.Namespace, folder: Path | None) -> None:
    """Compile the kernels of all recipes with the Triton in ``folder``, many recipes at a time."""
    with ThreadPoolExecutor(max_workers=max(1, (os.cpu_count() or 2) - 2)) as pool:
        list(pool.map(lambda recipe: child_rows(options, folder, recipe), options.recipes))


def child_rows(
    options: argparse.Namespace, folder: Path | None, compiled_recipe: str | None = None
) -> tuple[str, list[dict[str, Any]]]:
    """Return the release and the rows of a process that imports Triton from ``folder``, None for the installed one.

    compiled_recipe: only compile this one.
    """
    paths = [str(SOURCE), *([str(folder)] if folder else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    if folder:
        environment["TRITON_CACHE_DIR"] = str(options.cache)
    recipes = [compiled_recipe] if compiled_recipe else options.recipes
    command = [sys.executable, __file__, "--measure", "--shape", options.shape, "--recipes", *recipes]
    command += ["--compile-only"] if compiled_recipe else []
    command += ["--tokens", *map(str, options.tokens), "--eager-up-to", str(options.eager_up_to)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stderr[-3000:]}")
    ask = [sys.executable, "-c", "import triton; print(triton.__version__)"]
    release = subprocess.run(ask, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    return release, [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def compare(options: argparse.Namespace) -> tuple[dict[str, str], dict[tuple[str, int, str], dict[str, Any]]]:
    """Return the releases, and for each recipe, tokens and mode the best time and the bits under each.

    A round that would end after ``options.seconds`` is not begun, so that what was measured is written.
    """
    releases: dict[str, str] = {}
    cells: dict[tuple[str, int, str], dict[str, Any]] = {}
    deadline = time.monotonic() + options.seconds
    for folder in (None, options.other):
        compile_all(options, folder)
    for turn in range(options.rounds):
        started = time.monotonic()
        order: list[tuple[str, Path | None]] = [("base", None), ("other", options.other)]
        for name, folder in order if turn % 2 == 0 else order[::-1]:
            releases[name], rows = child_rows(options, folder)
            for row in rows:
                cell = cells.setdefault((row["recipe"], row["tokens"], row["mode"]), {})
                cell[name] = min(cell.get(name, float("inf")), row["us"])
                cell[f"{name}_bits"] = row["bits"]
        length = time.monotonic() - started
        print(f"round {turn + 1} of {options.rounds}: {length:.0f} s", flush=True)
        if time.monotonic() + length > deadline:
            break
    return releases, cells


def main() -> int:
    """Write the CSV file; 1 when a cell is slower than ``--allowed`` times the base."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, help="folder of the other release of Triton")
    parser.add_argument("--cache", type=Path, default=Path("/tmp/other_triton_cache"), help="its compiled kernels")
    parser.add_argument("--shape", default="qwen3_30b")
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES))
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 8])
    parser.add_argument("--eager-up-to", type=int, default=8, help="most tokens that are timed in eager calls too")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no round that would end later")
    parser.add_argument("--allowed", type=float, default=1.15)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.shape, options.recipes, options.tokens, options.eager_up_to, options.compile_only)
        return 0
    releases, cells = compare(options)
    device = torch.device("cuda")
    machine = (torch.cuda.get_device_name(), driver_version(device), version_of("torch"), time.strftime("%Y-%m-%d"))
    command = f"python benchmarks/compare_tritons.py --shape {options.shape} --rounds {options.rounds}"
    table: list[tuple[object, ...]] = []
    slow = 0
    for (recipe, count, mode), cell in cells.items():
        weights, _, activations = recipe.partition(":")
        ratio = cell["other"] / cell["base"]
        same = cell["base_bits"] == cell["other_bits"]
        slow += ratio > options.allowed
        times = (f"{cell['base']:.2f}", f"{cell['other']:.2f}", f"{ratio:.4f}")
        print(options.shape, recipe, count, mode, *times, "same" if same else "OTHER BITS", flush=True)
        versions = (releases["base"], releases["other"])
        cell_key = (options.shape, weights, activations, count, mode)
        table.append((*cell_key, *times, same, *versions, *machine, options.commit, command))
    if options.out:
        new = not options.out.exists()
        with options.out.open("a", newline="") as file:
            writer = csv.writer(file)
            writer.writerows([HEAD, *table] if new else table)
    print(f"{len(table)} cells, {slow} above {options.allowed} times the base")
    return int(slow > 0)


if __name__ == "__main__":
    sys.exit(main())
