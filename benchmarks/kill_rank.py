"""Kill one of several ranks with SIGKILL while they serve: how long until the others report it, and answer again.

Each rank holds its experts of the first layers of the shipped model; every call is compared bit by bit with the same
layers on one rank. The survivors name the lost rank, form a new group, read from the checkpoint what nobody holds any
more, and go on. Nothing but an error is printed where one hangs, reports late, names another rank or answers wrongly.

    python benchmarks/kill_rank.py --ranks 4 --kill 0                  gloo, on a CPU
    python benchmarks/kill_rank.py --ranks 2 --kill 1 --device cuda    NCCL, a GPU for each rank
    python benchmarks/kill_rank.py --ranks 4 --kill 2 --dispatcher symm_mem    over memory that all ranks map
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from collegium import Limits, MoELayer, Overrides, Placement, RankError, Routing, probe
from collegium.balance.elastic import reader_of, regroup
from collegium.checkpoint.layer_view import CheckpointLayer
from collegium.checkpoint.reader import Checkpoint
from collegium.loading import load_routed
from collegium.parallel.placement import round_robin
from collegium.parallel.rendezvous import timeout_seconds
from collegium.testing.compare import heavy_tailed, uneven_ids

RESULTS = Path(__file__).parent / "results" / "kill_rank.csv"
MODEL = Path(__file__).parents[1] / "demo" / "fables-16m"
LAYERS, TOKENS, CALLS_AFTER = (0, 1, 5), (5, 0, 17, 2), 30
# An aborted communicator must not take the process with it, and no monitor may kill what waits for the abort.
NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}


def loaded(
    checkpoint: Checkpoint, number: int, device: str, placement: Placement | None = None, dispatcher: str | None = None
) -> MoELayer:
    """Return a layer's routed experts: this rank's, or all."""
    opened, limits = CheckpointLayer.open(checkpoint, number), Limits(max_tokens=128)
    return load_routed(
        opened, device=device, limits=limits, placement=placement, overrides=Overrides(dispatcher=dispatcher)
    )


def inputs(size: int, spec: Any, device: str) -> tuple[torch.Tensor, Routing, list[int]]:
    """Return the tokens of all of ``size`` ranks, their routing, and how many each brings."""
    counts = [TOKENS[rank % len(TOKENS)] for rank in range(size)]
    x = heavy_tailed(sum(counts), spec.hidden_size, seed=size).to(device, torch.bfloat16)
    ids = uneven_ids(sum(counts), spec.routing.top_k, spec.num_experts, seed=size).to(device)
    given = heavy_tailed(*ids.shape, seed=size + 9, channels=False).abs().to(device)
    return x, Routing(topk_ids=ids, topk_weights=given), counts


class Traffic:
    """What a rank serves, and the right answers of layers that hold every expert."""

    def __init__(self, layers: dict[int, MoELayer], whole: dict[int, MoELayer], rank: int, size: int) -> None:
        spec = layers[LAYERS[0]].spec
        x, routing, counts = inputs(size, spec, str(layers[LAYERS[0]].handle.device))
        placed = layers[LAYERS[0]].plan.problem.placement
        same = placed is not None and placed.same_tokens
        own = slice(None) if same else slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        self.layers, self.x = layers, x[own]
        self.routing = Routing(topk_ids=routing.topk_ids[own], topk_weights=routing.topk_weights[own])
        self.truth = {name: layer(x, routing=routing)[own] for name, layer in whole.items()}

    def wrong(self) -> int:
        """Call every layer once; return the rows that differ."""
        found = {name: layer(self.x, routing=self.routing) for name, layer in self.layers.items()}
        return sum(int((found[name] != self.truth[name]).any(1).sum()) for name in found)


def serve(rank: int, args: argparse.Namespace, port: int, folder: str, answers: Any) -> None:
    """Serve until a rank is gone, go on without it, and say how that went."""
    torch.set_num_threads(1)
    device, backend = "cpu", "gloo"
    if args.device == "cuda":
        os.environ.update(NCCL)
        torch.cuda.set_device(rank)
        device, backend = f"cuda:{rank}", "nccl"
    timeout_seconds(args.timeout)
    where = f"tcp://127.0.0.1:{port}"
    # NCCL's watchdog ends what waits on the device for a rank that is gone; half the time leaves room to report.
    bound = timedelta(seconds=max(1.0, args.timeout / 2 if backend == "nccl" else args.timeout))
    distributed.init_process_group(backend, init_method=where, rank=rank, world_size=args.ranks, timeout=bound)
    checkpoint, killed = Checkpoint.open(args.model), Path(folder) / "killed"
    whole = {number: loaded(checkpoint, number, device) for number in LAYERS}
    experts = whole[LAYERS[0]].spec.num_experts
    placed = replace(round_robin(experts, rank, args.ranks), same_tokens=args.same_tokens)
    layers = {number: loaded(checkpoint, number, device, placed, args.dispatcher) for number in LAYERS}
    traffic = Traffic(layers, whole, rank, args.ranks)

    def end() -> None:
        killed.write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == args.kill:
        threading.Timer(args.after, end).start()
    wrong = calls = 0
    try:
        until = time.monotonic() + args.after + 60
        while time.monotonic() < until:
            wrong, calls = wrong + traffic.wrong(), calls + 1
    except RankError as error:
        raised, lost = time.time(), error
    checkpoint.bytes_read = 0
    new = regroup(layers, lost.ranks, read=reader_of(checkpoint, device=device))
    grouped, read = time.time(), checkpoint.bytes_read
    after = Traffic(layers, whole, *new)
    first = time.time()
    wrong += after.wrong()
    answered = time.time() - (first - grouped)  # without the time in which the right answers were computed
    for _ in range(CALLS_AFTER):
        wrong += after.wrong()
    at = float(killed.read_text())
    answers.put(
        {
            "rank": rank,
            "named": lost.ranks,
            "phase": lost.phase,
            "raised_s": round(raised - at, 3),
            "answers_s": round(answered - at, 3),
            "calls_before": calls,
            "calls_after": CALLS_AFTER + 1,
            "wrong_rows": wrong,
            "bytes_read": read,
            "dispatcher": layers[LAYERS[0]].plan.dispatcher,
        }
    )
    distributed.barrier()
    distributed.destroy_process_group()


def main() -> int:
    """Start the ranks, wait for the survivors, and write what they say."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kill", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dispatcher", help="instead of the one that the plan prefers")
    parser.add_argument("--same-tokens", action="store_true", help="every rank is called with the tokens of all")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds a rank waits for another")
    parser.add_argument("--after", type=float, default=2.0, help="seconds of load before the kill")
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--csv", type=Path, default=RESULTS)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    parser.add_argument("--commit", default=commit.strip() or "unknown")
    args = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch prints a stack for every socket that breaks
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Ranks on a CPU are copies of a process that imported everything once; a copy must not find CUDA in use.
    context: Any = get_context("spawn" if args.device == "cuda" else "forkserver")
    if args.device != "cuda":
        context.set_forkserver_preload(["torch._dynamo", "torch.distributed.device_mesh", "collegium.balance.elastic"])
    answers: Any = context.Queue()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        jobs = [context.Process(target=serve, args=(r, args, port, folder, answers)) for r in range(args.ranks)]
        for job in jobs:
            job.start()
        try:
            rows = [answers.get(timeout=120 + 4 * args.timeout) for _ in range(args.ranks - 1)]
        finally:
            for job in jobs:
                job.join(timeout=20 if rows else 0)
                job.kill()
    faults = [
        row for row in rows if row["wrong_rows"] or row["named"] != (args.kill,) or row["raised_s"] > args.timeout
    ]
    ended = [job.exitcode for rank, job in enumerate(jobs) if rank != args.kill]
    if faults or any(ended):
        print(f"faults: {faults}; survivors ended with {ended}", file=sys.stderr)
        return 1
    cuda = args.device == "cuda"
    head = {
        "machine": torch.cuda.get_device_name() if cuda else probe("cpu").name or platform.machine(),
        "torch": torch.__version__,
        "commit": args.commit,
        "command": f"python benchmarks/kill_rank.py --ranks {args.ranks} --kill {args.kill} --device {args.device}"
        + (f" --dispatcher {args.dispatcher}" if args.dispatcher else "")
        + (" --same-tokens" if args.same_tokens else ""),
        "timeout_s": args.timeout,
        "ranks": args.ranks,
        "killed": args.kill,
    }
    new = not args.csv.exists()
    with args.csv.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*head, *(key for key in rows[0] if key != "named")], lineterminator="\n")
        if new:
            writer.writeheader()
        for row in sorted(rows, key=lambda row: row["rank"]):
            named = row.pop("named")
            writer.writerow(head | row)
            print(f"rank {row['rank']}: rank {named[0]} is gone, reported after {row['raised_s']} s in"
                  f" {row['phase']!r}, answers after {row['answers_s']} s, {row['bytes_read']:,} bytes read,"
                  f" {row['calls_after']} calls after it, {row['wrong_rows']} wrong rows")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
