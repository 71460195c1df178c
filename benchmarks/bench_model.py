"""Tokens a second of whole models with random weights, as ``collegium bench-model`` takes them, kept as CSV.

python benchmarks/bench_model.py qwen3_30b gpt_oss_20b --batches 1 32 --layers 24
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import collegium
from collegium.commands.bench import recipe_of
from collegium.commands.bench_model import RECIPES, bench_model

RESULTS = Path(__file__).parent / "results" / "models_h200.csv"


def rows_of(what: str, args: argparse.Namespace, seconds: float) -> list[dict[str, Any]]:
    """Measure one model and return a row for each way of running its experts."""
    recipes = [recipe_of(recipe) for recipe in args.formats] or RECIPES
    report = bench_model(what, recipes, batches=args.batches, layers=args.layers, rounds=args.rounds, seconds=seconds)
    said = ["--batches", *map(str, args.batches), *(["--layers", str(args.layers)] if args.layers else [])]
    said += ["--formats", *args.formats] if args.formats else []
    head = {"gpu": report.device, "driver": report.driver, "torch": report.torch, "triton": report.triton}
    head |= {"transformers": report.transformers, "collegium": collegium.__version__, "commit": args.commit}
    head |= {"command": " ".join(["python benchmarks/bench_model.py", *args.models, *said])}
    head |= {"model": report.model, "layers": report.layers}
    return [
        head
        | {
            "batch": row.batch,
            "experts": row.experts,
            "graph": row.graph,
            "error": "" if row.error is None else round(row.error, 5),
            "ms_per_step": "" if row.seconds is None else round(1e3 * row.seconds, 3),
            "tokens_per_second": "" if row.tokens_per_second is None else round(row.tokens_per_second, 1),
            "note": row.note,
        }
        for row in report.rows
    ]


def main() -> int:
    args = _options()
    started = time.time()
    rows: list[dict[str, Any]] = []
    for what in args.models:
        rows += rows_of(what, args, args.seconds - (time.time() - started))
        print(*(row for row in rows if row["model"] == rows[-1]["model"]), sep="\n", flush=True)
        with args.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    print(f"done after {time.time() - started:.0f} s")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="as collegium bench-model takes them")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--formats", nargs="*", default=[], help="ours besides bf16, weights:activations")
    parser.add_argument("--layers", type=int, help="at most this many layers")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further measurement after this long")
    parser.add_argument("--out", type=Path, default=RESULTS)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    parser.add_argument("--commit", default=commit.strip() or "unknown")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
