"""Write new weights into a running layer: bytes a second, for experts one at a time and in stacks.

    python benchmarks/bench_update.py --shape qwen3_30b --format mxfp4 --sent bf16

Prints one line for each way: bytes as sent, seconds for load with its checksum, seconds for finish, gigabytes a second.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from collegium import LayerBuilder, Limits, Overrides, WeightUpdater
from collegium.checkpoint.writer import matrix_parts
from collegium.commands.bench import named_layer
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
    synchronize = torch.cuda.synchronize if place.type == "cuda" else torch.get_num_threads
    for single in (True, False):
        tensors = tensors_of(weights, single=single)
        nbytes = sum(tensor.numel() * tensor.element_size() for _, tensor, _, _ in tensors)
        times: list[tuple[float, float]] = []
        for _ in range(options.rounds):
            synchronize()
            start = time.perf_counter()
            for name, tensor, shard, expert in tensors:
                updater.load(name, tensor, shard=shard, expert=expert)
            synchronize()
            loaded = time.perf_counter()
            updater.finish()
            synchronize()
            times.append((loaded - start, time.perf_counter() - loaded))
        load_time, finish_time = min(times, key=sum)
        print(
            f"{options.shape} {layer.plan.kernel}, {options.format} from {sent}, "
            f"{'single' if single else 'stacked'}: {nbytes / 1e9:.3f} GB, load {load_time:.4f} s, finish "
            f"{finish_time:.4f} s, {nbytes / (load_time + finish_time) / 1e9:.2f} GB/s"
        )


if __name__ == "__main__":
    main()
