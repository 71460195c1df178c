"""Loading one MoE layer: peak memory beside the local weights, and bytes read by one rank of eight.

Writes a checkpoint of one layer in the asked format and sizes, then loads it in fresh processes and prints the growth
of the peak resident size. Refuses to print when what was loaded is not what was written.

    python benchmarks/bench_load.py --family mixtral --format bf16 --hidden 2048 --intermediate 768 --experts 64
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import collegium
from collegium.checkpoint.layer_view import CheckpointLayer
from collegium.checkpoint.loader import load_experts
from collegium.checkpoint.reader import Checkpoint
from collegium.parallel.placement import linear

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
from toys import TinySize, write_checkpoint

RESULTS = Path(__file__).parent / "results" / "load.csv"
MIB = 1 << 20


def resident(field: str) -> int:
    """Return VmHWM (peak) or VmRSS (now) of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; this benchmark needs Linux")


def one_rank(folder: str, rank: int, world: int) -> dict[str, object]:
    """Load the share of one rank in this process and say what it cost."""
    checkpoint = Checkpoint.open(folder)
    layer = CheckpointLayer.open(checkpoint)
    experts = layer.spec.num_experts
    placement = linear(experts, rank, world)
    warm = load_experts(layer, linear(experts, 0, experts))
    del warm
    checkpoint.bytes_read = 0
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before, start = resident("VmRSS"), time.perf_counter()
    weights = load_experts(layer, placement)
    seconds = time.perf_counter() - start
    peak = resident("VmHWM") - before
    digest = sum(int(t.view(torch.uint8).long().sum()) for t in weights.down.tensors().values())
    expert_bytes = sum(
        i.nbytes for n, i in checkpoint.tensors.items() if f".layers.{layer.number}." in n and ".experts." in n
    )
    return {
        "peak": peak,
        "local": weights.gate_up.nbytes + weights.down.nbytes,
        "read": checkpoint.bytes_read,
        "stored": expert_bytes,
        "largest": max(i.nbytes for n, i in checkpoint.tensors.items() if ".experts." in n),
        "seconds": seconds,
        "digest": digest,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="mixtral")
    parser.add_argument("--formats", default="bf16,fp8_block,mxfp4,nvfp4")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--child", nargs=3, metavar=("FOLDER", "RANK", "WORLD"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        folder, rank, world = options.child
        sys.stdout.write(json.dumps(one_rank(folder, int(rank), int(world))))
        return
    size = TinySize(
        hidden=options.hidden, intermediate=options.intermediate, experts=options.experts, top_k=2, layers=2
    )
    rows: list[dict[str, object]] = []
    for name in options.formats.split(","):
        with tempfile.TemporaryDirectory() as folder:
            written = write_checkpoint(Path(folder), options.family, name, size=size)
            expected = sum(
                int(t.view(torch.uint8).long().sum())
                for t in written.experts[min(written.experts)][2].tensors().values()
            )
            del written
            for world in (1, 8):
                command = [sys.executable, __file__, "--child", folder, "0", str(world)]
                found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                if world == 1 and found["digest"] != expected:
                    raise SystemExit(f"{name}: what was loaded is not what was written; no figures")
                rows.append({"format": name, "world": world, **found})
    show(rows)
    save(rows, options)


def show(rows: list[dict[str, object]]) -> None:
    table = Table(title="loading one layer (MiB)", title_justify="left", box=None)
    for name in (
        "format",
        "ranks",
        "local",
        "peak growth",
        "beyond local",
        "largest tensor",
        "read / stored",
        "s",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        local, peak, largest, read, stored = (int(row[k]) for k in ("local", "peak", "largest", "read", "stored"))
        table.add_row(
            str(row["format"]),
            str(row["world"]),
            f"{local / MIB:.1f}",
            f"{peak / MIB:.1f}",
            f"{(peak - local) / MIB:.1f}",
            f"{largest / MIB:.1f}",
            f"{read / stored:.3f}",
            f"{float(row['seconds']):.2f}",
        )
    Console().print(table)


def save(rows: list[dict[str, object]], options: argparse.Namespace) -> None:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    facts = {
        "machine": collegium.probe("cpu").name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit,
        "command": " ".join(["python", "benchmarks/bench_load.py", *sys.argv[1:]]),
        "sizes": f"D={options.hidden} I={options.intermediate} E={options.experts} {options.family}",
    }
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*facts, *(k for k in rows[0] if k != "digest")], extrasaction="ignore")
        writer.writeheader()
        writer.writerows({**facts, **row} for row in rows)


if __name__ == "__main__":
    main()
