"""``collegium bench`` of two commits in turns, on one machine in one run: what a change costs, or brings.

    git worktree add /tmp/before COMMIT
    python benchmarks/compare_commits.py --base /tmp/before/src --out compared.csv

Rounds alternate which commit goes first. A row holds the best round of each, since what else runs can only add time.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

SHAPES = ("qwen3_30b", "gptoss120b", "v4_flash", "dsv3")
RECIPES = ("bf16", "fp8_block:fp8_group128", "mxfp4", "mxfp4:fp8_token")
TOKENS = "1,8,64,512,4096"
OURS = Path(__file__).resolve().parents[1] / "src"
HEAD = (
    "shape",
    "weights",
    "activations",
    "tokens",
    "before_us",
    "after_us",
    "ratio",
    "gpu",
    "driver",
    "torch",
    "triton",
)


def measured(source: Path, shape: str, recipes: list[str], tokens: str) -> list[dict[str, object]]:
    """Return the rows of ``collegium bench --json`` with the package in ``source``."""
    formats = [part for recipe in recipes for part in ("--format", recipe)]
    command = [sys.executable, "-m", "collegium", "bench", shape, *formats, "--tokens", tokens, "--json"]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} with {source}:\n{done.stderr[-2000:]}")
    report = json.loads(done.stdout)
    facts = {name: report[name] for name in ("device", "driver", "torch", "triton")}
    return [{**row, **facts} for row in report["rows"]]


def main() -> int:
    """Write the CSV file; return 1 when the median of the ratios, or a ratio, is above what is allowed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="src folder of the other commit")
    parser.add_argument("--shapes", nargs="*", default=SHAPES)
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES))
    parser.add_argument("--tokens", default=TOKENS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--allowed", type=float, default=1.02)
    parser.add_argument("--commits", nargs=2, default=["", ""], help="names of both commits, for the file")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    rows: list[tuple[object, ...]] = []
    if asked.out:
        with asked.out.open("w", newline="") as file:
            csv.writer(file).writerow([*HEAD, "before", "commit", "command"])
    for shape in asked.shapes:
        found = compared(shape, asked)
        rows += found
        for row in found:
            numbers = (f"{number:.3f}" for number in row[4:7])
            print(*row[:4], *numbers, "SLOWER" if row[6] > asked.allowed else "", flush=True)
        if asked.out:
            command = f"python benchmarks/compare_commits.py --rounds {asked.rounds} --tokens {asked.tokens}"
            with asked.out.open("a", newline="") as file:
                csv.writer(file).writerows([*row, *asked.commits, command] for row in found)
    ratios = [float(str(row[6])) for row in rows]
    print(f"{len(rows)} rows: median {statistics.median(ratios):.4f}, worst {max(ratios):.4f}, allowed {asked.allowed}")
    return int(max(ratios) > asked.allowed)


def compared(shape: str, asked: argparse.Namespace) -> list[Any]:
    """Return the rows of one shape: key, microseconds before and after, their ratio, and the machine's facts."""
    best: dict[tuple[str, ...], dict[str, float]] = {}
    facts: list[object] = []
    for turn in range(asked.rounds):
        order = [("before", asked.base), ("after", OURS)]
        for name, source in order if turn % 2 == 0 else order[::-1]:
            for row in measured(source, shape, asked.recipes, asked.tokens):
                key = (shape, str(row["weights"]), str(row["activations"]), str(row["tokens"]))
                held = best.setdefault(key, {})
                held[name] = min(held.get(name, float("inf")), round(1e6 * float(str(row["seconds"])), 3))
                facts = [row[fact] for fact in ("device", "driver", "torch", "triton")]
    return [(*key, t["before"], t["after"], round(t["after"] / t["before"], 4), *facts) for key, t in best.items()]


if __name__ == "__main__":
    sys.exit(main())
