"""Quantizing a checkpoint: peak memory beside the checkpoint's size, and speed.

Writes a synthetic BF16 checkpoint, quantizes it in fresh processes, and prints the peak resident
size of the process and how much of it stood before the first expert was read. Refuses to print when a loaded expert of
the result is not what encoding the source's gives.

    python benchmarks/bench_quantize.py --layers 3 --formats mxfp4,nvfp4,fp8_block,int4_group
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
from collegium.checkpoint.writer import Shard
from collegium.commands.quantize import quantize_model
from collegium.formats import by_name
from collegium.placement import Placement
from collegium.testing.compare import heavy_tailed

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
from toys import TinySize, tiny_config

RESULTS = Path(__file__).parent / "results" / "quantize.csv"
MIB = 1 << 20


def resident(field: str) -> int:
    """Return VmHWM (peak) or VmRSS (now) of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; this benchmark needs Linux")


def write_source(folder: Path, size: TinySize, vocabulary: int) -> int:
    """Write the checkpoint one tensor at a time and return the bytes of one layer's experts."""
    (folder / "config.json").write_text(json.dumps(tiny_config("qwen3_moe", "bf16", "plain", size)))
    wide, narrow = (size.intermediate, size.hidden), (size.hidden, size.intermediate)
    shapes = {"model.embed_tokens.weight": (vocabulary, size.hidden)}
    for layer in range(size.layers):
        head = f"model.layers.{layer}.mlp."
        shapes[f"{head}gate.weight"] = (size.experts, size.hidden)
        for expert in range(size.experts):
            for name, shape in (("gate_proj", wide), ("up_proj", wide), ("down_proj", narrow)):
                shapes[f"{head}experts.{expert}.{name}.weight"] = shape
    with Shard(folder / "model.safetensors", {name: ("BF16", shape) for name, shape in shapes.items()}) as shard:
        for seed, (name, shape) in enumerate(shapes.items()):
            shard.put(name, (heavy_tailed(*shape, seed=seed, channels=False) * shape[1] ** -0.5).bfloat16())
    return 6 * size.experts * size.intermediate * size.hidden


def convert(source: str, name: str, out: str) -> dict[str, object]:
    """Quantize in this process and say what it cost."""
    before, start = resident("VmRSS"), time.perf_counter()
    report = quantize_model(source, name, out)
    seconds = time.perf_counter() - start
    return {
        "before": before,
        "peak": resident("VmHWM"),
        "source": report.source_nbytes,
        "written": report.nbytes,
        "error": max(layer.error for layer in report.layers),
        "seconds": seconds,
    }


def one_expert(folder: str, layer: int, expert: int) -> torch.Tensor:
    opened = CheckpointLayer.open(Checkpoint.open(folder), layer)
    return load_experts(opened, Placement(expert_ids=(expert,))).down[0].decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="mxfp4,nvfp4,fp8_block,int4_group")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=50_000)
    parser.add_argument("--child", nargs=3, metavar=("SOURCE", "FORMAT", "OUT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        sys.stdout.write(json.dumps(convert(*options.child)))
        return
    size = TinySize(
        hidden=options.hidden,
        intermediate=options.intermediate,
        experts=options.experts,
        top_k=2,
        layers=options.layers,
    )
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as room:
        source = Path(room) / "source"
        source.mkdir()
        layer_bytes = write_source(source, size, options.vocabulary)
        for name in options.formats.split(","):
            out = str(Path(room) / name)
            command = [sys.executable, __file__, "--child", str(source), name, out]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            last = (size.layers - 1, size.experts - 1)
            true = one_expert(str(source), *last)
            options_of = {"global_divides": True} if name == "nvfp4" else {}
            wanted = by_name(name).encode(true, **options_of).decode()
            if not torch.equal(one_expert(out, *last), wanted):
                raise SystemExit(f"{name}: what was written is not the encoded source; no figures")
            rows.append({"format": name, "layer": layer_bytes, **found})
    show(rows)
    save(rows, options)


def show(rows: list[dict[str, object]]) -> None:
    table = Table(title="quantizing a checkpoint (MiB)", title_justify="left", box=None)
    for name in ("format", "source", "one layer", "written", "peak", "before", "error", "s"):
        table.add_column(name, justify="right")
    for row in rows:
        sizes = [f"{int(str(row[k])) / MIB:.0f}" for k in ("source", "layer", "written", "peak", "before")]
        table.add_row(
            str(row["format"]), *sizes, f"{float(str(row['error'])):.3%}", f"{float(str(row['seconds'])):.1f}"
        )
    Console().print(table)


def save(rows: list[dict[str, object]], options: argparse.Namespace) -> None:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    facts = {
        "machine": collegium.probe("cpu").name,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit,
        "command": " ".join(["python", "benchmarks/bench_quantize.py", *sys.argv[1:]]),
        "sizes": f"D={options.hidden} I={options.intermediate} E={options.experts} L={options.layers} qwen3_moe",
    }
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*facts, *rows[0]])
        writer.writeheader()
        writer.writerows({**facts, **row} for row in rows)


if __name__ == "__main__":
    main()
