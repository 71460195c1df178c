"""Microseconds of a layer over the GPUs of one host that runs batches whole, and as two halves.

    python benchmarks/bench_microbatches.py
    python benchmarks/bench_microbatches.py --shape dsv3 --recipe fp8_block:fp8_group128 --tokens 1024 4096 8192
    torchrun --nproc-per-node 8 benchmarks/bench_microbatches.py --shape dsv3

Calls are not captured by a CUDA graph: these dispatchers read sizes on the host. Prints CSV: the median of
the slowest rank in every round, rows for each expert in a whole batch, and the whole batch's time over that of halves.
Plans refuse halves without ``allow_slow``, which is set here.
"""

from __future__ import annotations

import argparse
import os
import statistics
from dataclasses import replace
from typing import Any

import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn

from collegium import Limits, MoELayer, Overrides, Problem, plan, probe
from collegium.commands.bench import named_layer, recipe_of
from collegium.dummy.weights import random_router, random_weights
from collegium.parallel.placement import linear
from collegium.parallel.rendezvous import rendezvous_of, timeout_seconds

_WARM_UP = 5  # calls before the first measured one


def main() -> None:
    """Run on every GPU of this host, or as the ranks of torchrun."""
    args = _arguments()
    if "RANK" in os.environ:
        _rank(int(os.environ["LOCAL_RANK"]), args, int(os.environ["WORLD_SIZE"]))
        return
    world = args.gpus or torch.cuda.device_count()
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(args.port)}
    spawn(_rank, args=(args, world), nprocs=world)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3_30b", help="as in collegium bench")
    parser.add_argument("--recipe", default="bf16", help="weights, or weights:activations")
    parser.add_argument("--dispatchers", nargs="+", default=["all_to_all", "all_gather"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512, 2048, 8192], help="of each rank")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--gpus", type=int, default=0, help="instead of all")
    parser.add_argument("--port", type=int, default=29511)
    return parser.parse_args()


def _rank(local_rank: int, args: argparse.Namespace, world: int) -> None:
    """Measure all cases as one rank; all ranks go through them in the same order."""
    torch.cuda.set_device(local_rank)
    rank = int(os.environ.get("RANK", local_rank))
    distributed.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=world)
    timeout_seconds(120)
    if rank == 0:
        print("gpu,shape,recipe,dispatcher,ranks,tokens,rows_per_expert,us_whole,us_halves,whole_over_halves,same_bits")
    for dispatcher in args.dispatchers:
        for tokens in args.tokens:
            _case(args, dispatcher, tokens)
    distributed.destroy_process_group()


def _case(args: argparse.Namespace, dispatcher: str, tokens: int) -> None:
    """Print the times of whole batches and halves, measured in turn, so that the GPUs are equally warm."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device())
    weight_format, activations = recipe_of(args.recipe)
    name, spec = named_layer(args.shape)
    spec = replace(spec, weight_format=weight_format)
    placement = linear(spec.num_experts, rank, world)
    problem = Problem(
        spec=spec, device=probe(str(device)), limits=Limits(max_tokens=tokens), placement=placement, dtype="bf16"
    )
    weights = random_weights(spec, device, experts=placement.expert_ids)
    whole = Overrides(dispatcher=dispatcher, activation_format=activations)
    layers = [
        MoELayer(weights, plan(problem, overrides), router=random_router(spec, device))
        for overrides in (whole, replace(whole, microbatches=2, allow_slow=True))
    ]
    generator = torch.Generator(device).manual_seed(rank)
    x = torch.randn(tokens, spec.hidden_size, device=device, generator=generator).bfloat16()
    outputs = [layer(x) for layer in layers for _ in range(_WARM_UP)]
    same = torch.equal(outputs[0], outputs[-1])
    times: list[list[float]] = [[], []]
    for _ in range(args.rounds):
        for layer, found in zip(layers, times, strict=True):
            found.append(max(_all_ranks(_microseconds(layer, x))))
    whole_time, halves_time = (statistics.median(found) for found in times)
    rows = tokens * world * spec.routing.top_k // spec.num_experts
    if all(_all_ranks(same)) and rank == 0:
        values = (whole_time, halves_time, whole_time / halves_time)
        listed = ",".join(f"{value:.3f}" for value in values)
        gpu = torch.cuda.get_device_name(device)
        print(f"{gpu},{name},{args.recipe},{dispatcher},{world},{tokens},{rows},{listed},True", flush=True)
    elif rank == 0:
        print(f"{dispatcher}, {tokens} tokens: halves and whole batches differ", flush=True)


def _microseconds(layer: MoELayer, x: torch.Tensor) -> float:
    """Return the time of a call that all ranks begin together."""
    _all_ranks(None)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    layer(x)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000


def _all_ranks(value: Any) -> list[Any]:
    """Return the ``value`` of every rank."""
    return rendezvous_of().exchange(value, "benchmark")


if __name__ == "__main__":
    main()
