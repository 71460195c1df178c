"""Both products of one layer with packed weights: decoded in registers for every tile, and decoded once into memory.

Where the second way is the faster one is what ``dequantize_threshold`` in ``experts/triton/tiles/choice.py`` says.
A time counts only if both ways give the same bits. Needs a Hopper GPU.

    python benchmarks/bench_expanded.py
    python benchmarks/bench_expanded.py --formats nvfp4 fp8_block --rows 512 1024
    python benchmarks/bench_expanded.py --formats mxfp4 nvfp4 fp8_block bnb4 --rows 288 384 512 640 1024 1536 2048
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from collegium.commands.bench import named_layer
from collegium.commands.measure import driver_version, version_of
from collegium.dummy.weights import random_weights
from collegium.experts import KERNELS
from collegium.experts.triton.tiles import choice as tiles
from collegium.parallel.local import Local
from collegium.problem import Problem
from collegium.runtime.devices import probe
from collegium.types import Routing

if TYPE_CHECKING:
    from collections.abc import Callable

    from collegium.experts.triton.packed import PackedExperts
    from collegium.types import ContiguousBatch, MoESpec

RESULTS = Path(__file__).parent / "results" / "expanded_h200.csv"
FORMATS = ("bf16", "mxfp4", "nvfp4", "fp8_block")
ROWS = (32, 64, 128, 256, 512, 2048)


def layers() -> dict[str, MoESpec]:
    """Return a layer of many small experts, and one of few large ones (Mixtral 8x7B)."""
    small = named_layer("qwen3_30b")[1]
    large = replace(
        small, hidden_size=4096, intermediate_size=14336, num_experts=8, routing=replace(small.routing, top_k=2)
    )
    return {"qwen3_30b": small, "4096x14336x8x2": large}


def packed_as(spec: MoESpec) -> PackedExperts:
    """Return random experts of ``spec``."""
    problem = Problem(spec=spec, device=probe("cuda"), activation_format="bf16")
    kernel: Any = next(k for k in KERNELS if k.name.startswith("triton") and k.refuse(problem.routed) is None)
    return kernel.pack(random_weights(spec, torch.device("cuda")), problem.routed)


def batch_of(spec: MoESpec, rows: int) -> ContiguousBatch:
    """Return random tokens with ``rows`` rows for an expert on average."""
    tokens = rows * spec.num_experts // spec.routing.top_k
    x = torch.randn(tokens, spec.hidden_size, device="cuda").bfloat16()
    ids = torch.rand(tokens, spec.num_experts, device="cuda").topk(spec.routing.top_k, dim=1).indices
    routing = Routing(topk_ids=ids, topk_weights=torch.ones(ids.shape, device="cuda"))
    return Local(num_experts=spec.num_experts).dispatch(x, routing)[0]


def microseconds(call: Callable[[], object], count: int = 10) -> float:
    """Return the mean of ``count`` calls after one more."""
    call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count * 1000


def main() -> None:
    """Measure every format, write and print the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, help="rows of an expert on average")
    parser.add_argument("--out", type=Path, default=RESULTS)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    parser.add_argument("--commit", default=commit.strip() or "unknown")
    asked = parser.parse_args()
    tiles.dequantize_threshold = lambda *_: 1
    device = torch.device("cuda")
    about = [torch.cuda.get_device_name(), driver_version(device), torch.__version__, version_of("triton")]
    about += [asked.commit, " ".join(["python", "benchmarks/bench_expanded.py", *sys.argv[1:]])]
    found: list[list[object]] = []
    for layer, spec in layers().items():
        for name in asked.formats:
            packed = packed_as(replace(spec, weight_format=name))
            small = packed if name == "bf16" else replace(packed, machine=replace(packed.machine, compiles=False))
            for rows in asked.rows:
                batch = batch_of(spec, rows)
                stop = int(batch.expert_offsets[-1])
                same = torch.equal(packed.run(batch)[:stop], small.run(batch)[:stop])
                times = [microseconds(lambda way=way, batch=batch: way.run(batch)) for way in (small, packed)]
                shown = [f"{time:.0f}" if same else "" for time in times]
                found.append([*about, layer, name, rows, *(["", shown[1]] if name == "bf16" else shown), same])
                print(*found[-1][-6:], flush=True)
    with asked.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        head = ["gpu", "driver", "torch", "triton", "commit", "command", "layer", "weights", "rows an expert"]
        writer.writerow([*head, "decoded in registers us", "decoded once us", "same bits"])
        writer.writerows(found)


if __name__ == "__main__":
    main()
