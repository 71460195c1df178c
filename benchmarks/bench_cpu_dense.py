"""How long torch takes for a dense layer in bfloat16 on this CPU, beside the same in float32 with the conversion.

Where a CPU has no instructions for bfloat16, ``load_model`` and ``cpu_grouped`` go by this. Both products are judged by
float64 first. Prints and saves milliseconds, two threads, the median of many runs.

    python benchmarks/bench_cpu_dense.py
"""

from __future__ import annotations

import argparse
import csv
import statistics
import subprocess
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import collegium
from collegium.integrations.transformers import wide_linear

RESULTS = Path(__file__).parent / "results" / "cpu-dense.csv"
COLUMNS, LAYERS = 2048, 8  # of other weights each, so that they come from memory
TOKENS = (1, 2, 4, 6, 8, 12, 16, 64, 512)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    wide_linear._ROWS = 1  # any number of rows in float32
    rows: list[list[object]] = []
    with torch.inference_mode():
        for width in (512, 2048):
            plain = [nn.Linear(COLUMNS, width, bias=False, dtype=torch.bfloat16) for _ in range(LAYERS)]
            for tokens in TOKENS:
                x = torch.randn(tokens, COLUMNS).bfloat16()
                times: dict[str, list[float]] = {"bfloat16": [], "float32": []}
                for turn in range(6):
                    for what, kind in (("bfloat16", nn.Linear.forward), ("float32", wide_linear.WideLinear.forward)):
                        for layer in plain:
                            start = time.perf_counter()
                            found = kind(layer, x)
                            times[what].append(time.perf_counter() - start)
                            if turn == 0:
                                wanted = x.double() @ layer.weight.double().t()
                                error = float((found - wanted).norm() / wanted.norm())
                                if error > 0.004:
                                    raise SystemExit(f"{what}, {tokens} tokens: relative L2 error {error}")
                medians = [statistics.median(own[LAYERS:]) * 1e3 for own in times.values()]
                rows.append([f"{width} x {COLUMNS}", tokens, *(f"{own:.3f}" for own in medians)])
    table = Table(title=f"ms, two threads, {collegium.probe('cpu').name}", title_justify="left", box=None)
    for head in ("layer", "tokens", "bfloat16", "float32"):
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(*map(str, row))
    Console().print(table)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    kind = torch.backends.cpu.get_cpu_capability().lower()
    facts = [
        f"{collegium.probe('cpu').name} ({kind})",
        torch.__version__,
        commit,
        "python benchmarks/bench_cpu_dense.py",
    ]
    with RESULTS.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["cpu", "torch", "commit", "command", "layer", "tokens", "bfloat16_ms", "float32_ms"])
        writer.writerows([*facts, *row] for row in rows)


if __name__ == "__main__":
    main()
