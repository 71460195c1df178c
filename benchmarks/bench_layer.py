"""Time real layer shapes with ``collegium bench`` and keep the rows as CSV; or sweep the tiles of their products.

The first writes ``benchmarks/results/layers_h200.csv``, recipe by recipe, each beside the floor of this machine; a
recipe whose output is not what FP32 truth says has no times, is named, and the program ends with 1. The second prints
one line of JSON for each tile that ``collegium tune`` would measure, best guess of the cost model first. In the last
two recipes take turns, since a card slows down as it warms. Only recipes that draw as much power should: a clock that
others hold down is no clock of a model that runs one of them.

    python benchmarks/bench_layer.py
    python benchmarks/bench_layer.py --shapes qwen3_30b --recipes mxfp4:fp8_token --tokens 1 512 --sweep 12
    python benchmarks/bench_layer.py --recipes gguf@Q8_0:bf16 int4_affine@32:bf16
    python benchmarks/bench_layer.py --shapes qwen3_30b --recipes bf16:bf16,fp16:fp16 mxfp4:bf16,mxfp4:fp16
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from collegium.commands.bench import SHAPES, TOKENS, bench, recipe_of
from collegium.commands.measure import ROUTINGS, measure_ceilings
from collegium.commands.tune import packed_layer, tile_times
from collegium.dummy.encoders import ENCODERS, affine, q4_k, q8_0, random_blocks

if TYPE_CHECKING:
    from collegium.commands.measure import Ceilings

RECIPES = ("bf16:bf16", "fp8_block:fp8_group128", "mxfp4:bf16", "mxfp4:fp8_token", "nvfp4:bf16", "nvfp4:fp8_token")
RESULTS = Path(__file__).parent / "results" / "layers_h200.csv"
PLACE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
_PLAIN = dict(ENCODERS)
KINDS = {"Q4_K": q4_k, "Q8_0": q8_0}
TILE = ("block_n", "block_t", "warps", "stages", "group_t", "interleave_gate_up", "overlap")


def encoded_as(weights: str) -> str:
    """Return the format that ``weights`` begins with, encoded as the kind of GGUF or the group size behind @."""
    name, _, how = weights.partition("@")
    if how:
        kind = KINDS.get(how) or partial(random_blocks, how)
        ENCODERS[name] = kind if name == "gguf" else partial(affine, bits=int(name[3]), group=int(how))
    elif name in _PLAIN:
        ENCODERS[name] = _PLAIN[name]
    return name


def measured(shape: str, texts: list[str], args: argparse.Namespace, ceilings: Ceilings) -> list[dict[str, Any]]:
    """Return a row for each token count and recipe of ``texts``, which take turns."""
    pairs = [recipe_of(text) for text in texts]
    asked = [(encoded_as(weights), activations) for weights, activations in pairs]
    stored = {name: weights for (name, _), (weights, _) in zip(asked, pairs, strict=True)}
    if len(stored) < len({weights for weights, _ in pairs}):
        raise SystemExit(f"{' '.join(texts)}: a format that is stored in two ways cannot take turns with itself")
    report = bench(shape, asked, tokens=args.tokens, routing=args.routing, ceilings=ceilings, rounds=args.rounds)
    said = [f"{name} {' '.join(map(str, getattr(args, name.strip('-'))))}" for name in ("--shapes", "--recipes")]
    head = {"gpu": report.device, "driver": report.driver, "torch": report.torch, "triton": report.triton}
    head |= {"commit": args.commit, "command": " ".join(["python benchmarks/bench_layer.py", *said])}
    head |= {"shape": report.shape, "routing": report.routing}
    rows: list[dict[str, Any]] = []
    for row in report.rows:
        found = {
            "weights": stored[row.weights],
            "activations": row.activations,
            "tokens": row.tokens,
            "layer_us": round(1e6 * row.seconds, 1),
            "floor_us": round(1e6 * row.floor_seconds, 1),
            "layer_over_floor": round(1 / row.of_floor, 2),
            "bound": row.bound,
            "error": round(row.error, 5),
            "kernel": row.kernel,
        }
        print(report.shape, *found.values(), flush=True)
        rows.append(head | found)
    return rows


def swept(shape: str, recipe: tuple[str, str], args: argparse.Namespace) -> None:
    """Print the time of every tile of both products."""
    name, problem, packed = packed_layer(shape, recipe, max(args.tokens))
    for tokens in args.tokens:
        found = tile_times(packed, problem, tokens, candidates=args.sweep, rounds=args.rounds)
        for product, (chosen, times) in found.items():
            for tile, seconds in times.items():
                row: dict[str, Any] = {"shape": name, "recipe": ":".join(recipe), "tokens": tokens, "product": product}
                row |= {"us": round(1e6 * seconds, 2), "chosen": tile == chosen}
                print(json.dumps(row | {key: getattr(tile, key) for key in TILE}), flush=True)


def main() -> int:
    args = _options()
    started, failed = time.time(), 0
    ceilings = measure_ceilings(PLACE)
    print(ceilings, flush=True)
    rows: list[dict[str, Any]] = []
    for shape, recipes in ((shape, group.split(",")) for shape in args.shapes for group in args.recipes):
        if time.time() - started > args.seconds:
            print(f"{shape} {' '.join(recipes)}: no time left", flush=True)
            continue
        try:
            if args.sweep:
                for weights, activations in map(recipe_of, recipes):
                    swept(shape, (encoded_as(weights), activations), args)
            else:
                rows += measured(shape, recipes, args, ceilings)
                _write(args.out, rows)
        except Exception as fault:  # the other recipes are still measured
            failed += 1
            print(f"{shape} {' '.join(recipes)}: {type(fault).__name__}: {fault}", flush=True)
        gc.collect()
        if PLACE.type == "cuda":
            torch.cuda.empty_cache()
    print(f"done after {time.time() - started:.0f} s, {failed} failed", flush=True)
    return int(failed > 0)


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="as collegium bench takes them")
    parser.add_argument(
        "--recipes",
        nargs="+",
        default=RECIPES,
        help="weights:activations, several in turns by commas; weights as gguf@Q8_0 or int4_affine@32 too",
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--routing", default="uniform", choices=ROUTINGS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sweep", type=int, default=0, help="time this many tiles of each product instead")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further recipe after this long")
    parser.add_argument("--out", type=Path, default=RESULTS)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    parser.add_argument("--commit", default=commit.strip() or "unknown")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
