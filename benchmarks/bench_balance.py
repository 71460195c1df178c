"""What the placement policies reach: on the recorded trace, and on random heavy-tailed loads.

The trace is judged on the half that the policy was not shown, as ``collegium balance simulate`` does it. The random
loads are those of 256 experts on 8 ranks with 32 spare slots, from consecutive experts a rank. Prints and saves both.

    python benchmarks/bench_balance.py
"""

from __future__ import annotations

import argparse
import csv
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np

from collegium.balance import POLICIES, LoadTrace, balancedness, moves, widened
from collegium.balance.simulate import simulate
from collegium.parallel.placement import linear

HERE = Path(__file__).parent
RESULTS, TRACE = HERE / "results" / "balance.csv", HERE / "traces" / "fables-16m.safetensors"
RANKS, REPLICAS = 4, (0, 8, 32)
LOADS, EXPERTS, WIDE_RANKS, SPARE = 60, 256, 8, 32


def of_trace() -> list[dict[str, object]]:
    """Return a row for each policy and count of replicas: means over layers, in the half it was not shown."""
    trace = LoadTrace.open(TRACE)
    start = linear(trace.counts.shape[2], 0, RANKS).ranks
    return [
        {
            "load": TRACE.stem,
            "policy": policy.name,
            "ranks": RANKS,
            "replicas": row.replicas,
            "before": round(row.later.before, 3),
            "after": round(row.later.after, 3),
            "busiest_percent": round(-100 * row.later.saved, 1),
            "moved": row.moved_experts,
            "moved_mb": round(row.moved_bytes / 1e6, 1),
        }
        for policy in POLICIES
        for row in simulate(trace, start, REPLICAS, policy=policy.name).rows
    ]


def of_random_loads() -> list[dict[str, object]]:
    """Return a row for each policy: means over the loads."""
    start = widened(linear(EXPERTS, 0, WIDE_RANKS).ranks, (EXPERTS + SPARE) // WIDE_RANKS)
    rows: list[dict[str, object]] = []
    for policy in POLICIES:
        drawn, before, after, moved = np.random.default_rng(3), [], [], []
        for _ in range(LOADS):
            load = np.ceil(drawn.pareto(1.2, EXPERTS) * 100)
            made = policy.place(load, start)
            before.append(balancedness(load, start))
            after.append(balancedness(load, made))
            moved.append(len(moves(start, made)))
        rows.append(
            {
                "load": f"{LOADS} random",
                "policy": policy.name,
                "ranks": WIDE_RANKS,
                "replicas": SPARE,
                "before": round(float(np.mean(before)), 3),
                "after": round(float(np.mean(after)), 3),
                "moved": round(float(np.mean(moved))),
            }
        )
    return rows


def main() -> None:
    """Write the rows."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = of_trace() + of_random_loads()
    asked = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    about = {"machine": platform.processor() or platform.machine(), "numpy": np.__version__, "commit": commit}
    about["command"] = "python benchmarks/bench_balance.py"
    with RESULTS.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*about, *rows[0]], lineterminator="\n")
        writer.writeheader()
        writer.writerows([about | row for row in rows])
    sys.stdout.write(RESULTS.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
