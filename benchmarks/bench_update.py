"""Write new weights into a running layer: bytes a second, for experts one at a time and in stacks.

    python benchmarks/bench_update.py --shape qwen3_30b --format mxfp4 --sent bf16

Prints one line for each way: bytes as sent, seconds for load, seconds for finish, gigabytes a second. Both are timed to
the end of their work on the GPU, checksums included. ``--out FILE --commit HASH`` appends the lines to a CSV file.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from collegium import LayerBuilder, Limits, Overrides, WeightUpdater
from collegium.checkpoint.writer import matrix_parts
from collegium.commands.bench import named_layer
from collegium.commands.measure import driver_version, version_of
from collegium.dummy.weights import random_weights
from collegium.formats import by_name
from collegium.runtime.devices import probe

if TYPE_CHECKING:
    from torch import Tensor

# Storages whose tensors ``matrix_parts`` can write.
_STORAGES = {"mxfp4": "compressed-tensors", "nvfp4": "modelopt"}


def tensors_of(weights: Any, *, single: bool) -> list[tuple[str, Tensor, Any, int | None]]:
    """Return the tensors as a trainer sends them: (parameter, tensor, shard, expert)."""
    form = by_name(weights.down.name)
    storage = next(s for s in form.storages if s.name == _STORAGES.get(form.name, form.storages[0].name))
    rows: list[tuple[str, Tensor, Any, int | None]] = []
    for expert in range(weights.down.shape[0]):
        matrices = {"w1": weights.gate_up[expert][0], "w3": weights.gate_up[expert][1], "w2": weights.down[expert]}
        for shard, matrix in matrices.items():
            for suffix, part in matrix_parts(matrix, storage).items():
                rows.append((suffix.lstrip("._"), part, shard, expert))
    if single:
        return rows
    stacks: dict[tuple[str, Any], list[Tensor]] = {}
    for name, part, shard, _ in rows:
        stacks.setdefault((name, shard), []).append(part)
    return [(name, torch.stack(parts), shard, None) for (name, shard), parts in stacks.items()]


def main() -> None:
    """Measure both ways of sending."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", default="qwen3_30b")
    parser.add_argument("--format", default="bf16", help="of the layer")
    parser.add_argument("--sent", default=None, help="format of the new weights, default that of the layer")
    parser.add_argument("--activations", default=None)
    parser.add_argument("--device", default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="a CSV file to append to")
    parser.add_argument("--commit", default="", help="for the file")
    options = parser.parse_args()
    place = torch.device(probe(options.device).place)
    sent = options.sent or options.format
    spec = replace(named_layer(options.shape)[1], weight_format=options.format)
    layer = LayerBuilder(
        spec,
        device=str(place),
        router=False,
        limits=Limits(max_tokens=64),
        overrides=Overrides(activation_format=options.activations),
    ).finish("dummy")
    weights = random_weights(replace(spec, weight_format=sent), place, 1)
    updater = WeightUpdater(layer, stored=sent)
    for single in (True, False):
        tensors = tensors_of(weights, single=single)
        nbytes = sum(tensor.numel() * tensor.element_size() for _, tensor, _, _ in tensors)
        times = [time_update(updater, tensors, place) for _ in range(options.rounds)]
        load_time, finish_time = min(times, key=sum)
        row = {
            "shape": options.shape,
            "kernel": layer.plan.kernel,
            "format": options.format,
            "sent": sent,
            "tensors": "single" if single else "stacked",
            "calls": len(tensors),
            "gigabytes": f"{nbytes / 1e9:.3f}",
            "load_seconds": f"{load_time:.4f}",
            "finish_seconds": f"{finish_time:.4f}",
            "gigabytes_per_second": f"{nbytes / (load_time + finish_time) / 1e9:.2f}",
        }
        print(" ".join(f"{name}={value}" for name, value in row.items()))
        if options.out is not None:
            append(options.out, row, place, options.commit)


def time_update(updater: WeightUpdater, tensors: list[tuple[str, Tensor, Any, int | None]], place: torch.device) -> Any:
    """Return the seconds of all loads and of finish."""
    synchronize = torch.cuda.synchronize if place.type == "cuda" else torch.get_num_threads
    synchronize()
    start = time.perf_counter()
    for name, tensor, shard, expert in tensors:
        updater.load(name, tensor, shard=shard, expert=expert)
    synchronize()
    loaded = time.perf_counter()
    updater.finish()
    synchronize()
    return loaded - start, time.perf_counter() - loaded


def append(path: Path, row: dict[str, Any], place: torch.device, commit: str) -> None:
    """Append ``row`` with date, device, versions, commit and command to a CSV file."""
    is_new = not path.exists()
    facts = {
        "gpu": torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu",
        "driver": driver_version(place) if place.type == "cuda" else "",
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "commit": commit,
        "command": " ".join(["python", "benchmarks/bench_update.py", *sys.argv[1:]]),
    }
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*facts, *row], lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(facts | row)


if __name__ == "__main__":
    main()
