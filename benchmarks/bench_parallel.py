"""Time layers whose experts are split over the GPUs of this host, slowest rank, beside floors of the same run.

A layer call (tokens and routing in, output out) runs in a CUDA graph over several different inputs. Before each repeat
all ranks wait for each other on the device; of each repeat the slowest rank counts, of the repeats the median. Rows:

    layer     the whole layer; its output was compared with FP32 truth, and bit for bit with a layer of one rank, or,
              with a reduced combine, with itself once more; so is a peer's (``--peer``)
    exchange  the same without the experts: post, pull, sort, collect; not of the pipeline mega
    kernels   the kernels of both by name (``--kernels``): microseconds of a call that each adds to those before it,
              median over ranks; what runs while an earlier kernel still does is not counted twice
    nccl      two all_to_all_single, of the bytes that exchange sends to other ranks, there and back
    copy      what one GPU reads of another one while all do, by a kernel or by the copy engines, whichever is faster

Floors: the busiest rank's weights at the measured bandwidth, its products at the measured rate, and what it reads from
others at the measured speed of ``copy``. Rows are written as they are measured; the program ends with 1 where a check
failed, and then has no time for that case.

    python benchmarks/bench_parallel.py
    python benchmarks/bench_parallel.py --pipeline split mega --tokens 1 8 64 128
    python benchmarks/bench_parallel.py --pipeline split mega --recipes fp8_block:fp8_group128 --peer
    python benchmarks/bench_parallel.py --pipeline split --halves --tokens 512 2048 8192
    torchrun --nproc-per-node 2 benchmarks/bench_parallel.py --shapes dsv3 --tokens 1 128 2048
"""

from __future__ import annotations

import argparse
import copy
import csv
import gc
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, profiler
from torch.multiprocessing.spawn import spawn

from collegium import Limits, MoELayer, Overrides, Problem, plan, probe
from collegium.commands.bench import TOLERANCES, experts_error, named_layer, recipe_of
from collegium.commands.measure import driver_version, input_sets, measure_ceilings, random_routing, version_of
from collegium.dummy.weights import random_weights
from collegium.experts import PackedWeights
from collegium.ops.quantize import activation_format
from collegium.parallel.placement import linear
from collegium.parallel.rendezvous import rendezvous_of, timeout_seconds
from collegium.pipelines import PipelineParts, SplitKind
from collegium.pipelines.mega import MAX_TOKENS
from collegium.planning import expert_bytes
from collegium.runtime.memory import alloc
from collegium.runtime.symmetric import SymmetricWorkspace
from mega_moe import MegaMoe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from collegium.commands.measure import Ceilings
    from collegium.experts import Tiling
    from collegium.runtime.memory import Memory
    from collegium.types import ContiguousBatch, ExpertWeights, MoESpec, Routing

TOKENS = (1, 8, 64, 512, 2048, 8192)
RESULTS = Path(__file__).parent / "results" / "parallel_h200.csv"
COLUMNS = (
    *("gpu", "driver", "torch", "triton", "commit", "command"),
    *("what", "shape", "weights", "activations", "dispatcher", "combine", "ranks", "tokens", "us", "us_min", "us_max"),
    *("floor_weights_us", "floor_math_us", "floor_wire_us", "over_floor", "wire_bytes", "gb_per_s"),
    *("error", "same_bits"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Idle(PackedWeights):
    """Experts that take the time and the memory of none: their rows are whatever was there."""

    real: PackedWeights
    width: int

    @property
    def tiling(self) -> Tiling:
        """Those of the real experts."""
        return self.real.tiling

    @property
    def arriving(self) -> tuple[str, int] | None:
        """As the real experts."""
        return self.real.input_codes

    def run(self, batch: ContiguousBatch, memory: Memory | None = None) -> Tensor:
        """Return rows that nobody computed."""
        return alloc(memory, "rows", (batch.source.numel(), self.width), torch.bfloat16, batch.x.device)


class Halves:
    """Two layers over groups of their own, which share packed experts: each has half the tokens, on its own stream."""

    def __init__(self, layer: MoELayer, group: str) -> None:
        self.layers = layer, copy.copy(layer)
        self.plan, self.spec, self.side = layer.plan, layer.spec, torch.cuda.Stream()
        placed, problem = layer.plan.problem.placement, layer.plan.problem
        assert placed is not None
        force = Overrides(
            activation_format=layer.plan.activation_format, dispatcher=layer.plan.dispatcher, pipeline="split"
        )
        self.layers[1].replan(plan(replace(problem, placement=replace(placed, group=group)), force), layer.experts)

    def __call__(self, x: Tensor, *, routing: Routing, out: Tensor | None = None) -> Tensor:
        """Write both halves of ``out`` and return it."""
        out = torch.empty_like(x) if out is None else out
        here, half = torch.cuda.current_stream(), x.shape[0] // 2
        spans = slice(half), slice(half, None)
        parts = [replace(routing, topk_ids=routing.topk_ids[s], topk_weights=routing.topk_weights[s]) for s in spans]
        self.side.wait_stream(here)
        with torch.cuda.stream(self.side):
            self.layers[1](x[spans[1]], routing=parts[1], out=out[spans[1]])
        self.layers[0](x[spans[0]], routing=parts[0], out=out[spans[0]])
        here.wait_stream(self.side)
        return out

    def check(self) -> None:
        """Raise what a replay could only note."""
        for layer in self.layers:
            layer.check()


class Bench:
    """One rank's side of the program; every rank goes through the same cases in the same order."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.started, self.failed = args, time.monotonic(), 0
        self.rank, self.world = distributed.get_rank(), distributed.get_world_size()
        self.device = torch.device("cuda", self.rank)
        group = distributed.group.WORLD
        assert group is not None
        self.space = SymmetricWorkspace(group, self.device, args.copy_bytes)
        self.ceilings: Ceilings = measure_ceilings(self.device)
        self.head = {
            "gpu": torch.cuda.get_device_name(self.device),
            "driver": driver_version(self.device),
            "torch": torch.__version__,
            "triton": version_of("triton"),
            "commit": args.commit,
            "command": " ".join(["python", "benchmarks/bench_parallel.py", *sys.argv[1:]]),
            "ranks": self.world,
        }
        self.wire = self.copy_speed()
        made: Any = distributed.new_group(list(range(self.world)))
        self.halves: str = made.group_name

    def everybody(self, value: Any, what: str) -> list[Any]:
        """Return what every rank gives."""
        return rendezvous_of().exchange(value, what)

    def say(self, **row: Any) -> None:
        """Print a row and add it to the file, on rank 0."""
        if self.rank:
            return
        row = self.head | row
        print(*(f"{key}={row[key]}" for key in COLUMNS[6:] if key in row), f"[{self.spent():.0f} s]", flush=True)
        new = not self.args.out.exists()
        with self.args.out.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow(row)

    def spent(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self.started

    def timed(self, run: Callable[[], object], what: str, inside: int = 1) -> dict[str, Any]:
        """Return microseconds of one of the ``inside`` things that ``run`` queues: median, least and most."""
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        for _ in range(self.args.repeats):
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            # So long that everything after it is queued before it ends.
            torch.cuda._sleep(1_000_000)  # pyright: ignore[reportPrivateUsage]
            self.space.handle.barrier()
            pair[0].record()
            run()
            pair[1].record()
            marks.append(pair)
        torch.cuda.synchronize()
        own = [1e3 * first.elapsed_time(last) / inside for first, last in marks]
        slowest = [max(each) for each in zip(*self.everybody(own, what), strict=True)]
        return {
            "us": round(statistics.median(slowest), 2),
            "us_min": round(min(slowest), 2),
            "us_max": round(max(slowest), 2),
        }

    def copy_speed(self) -> float:
        """Return the bytes a second that a rank reads of its neighbour while all ranks do."""
        theirs = self.space.blocks[(self.rank + 1) % self.world].view(torch.int32)
        own = torch.empty_like(theirs)
        best = min(
            (self.timed(run, name) for name, run in {
                "copy engines": lambda: own.copy_(theirs),
                "copy kernel": lambda: torch.bitwise_not(theirs, out=own),
            }.items()),
            key=lambda found: found["us"],
        )  # fmt: skip
        speed = own.nbytes / best["us"] * 1e6
        self.say(what="copy", **best, wire_bytes=own.nbytes, gb_per_s=round(speed / 1e9, 1))
        return min(self.everybody(speed, "speed"))

    def graph(self, calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
        """Return all ``calls`` as a graph, after two rounds that compile them."""
        with torch.inference_mode():
            for _ in range(2):
                for call in calls:
                    call()
            torch.cuda.synchronize()
            made = torch.cuda.CUDAGraph()
            with torch.cuda.graph(made):
                for call in calls:
                    call()
        return made

    def recipe(self, shape: str, text: str) -> None:
        """Measure one shape in one recipe for all counts of tokens."""
        weights_name, activations = recipe_of(text)
        name, spec = named_layer(shape)
        spec = replace(spec, weight_format=weights_name)
        most, placed = max(self.args.tokens), linear(spec.num_experts, self.rank, self.world)
        base = Problem(spec=spec, device=probe(str(self.device)), limits=Limits(max_tokens=most))
        whole_weights = random_weights(spec, self.device)
        one = MoELayer(whole_weights, plan(base, Overrides(activation_format=activations)))
        held = _held(whole_weights, placed.expert_ids)
        wishes: dict[str, Any] = {"dispatcher": self.args.dispatcher, "combine": self.args.combine}
        facts = {"shape": name, "weights": weights_name, "activations": activations, "combine": self.args.combine}
        layers: list[tuple[MoELayer | Halves | MegaMoe, dict[str, Any]]] = []
        for pipeline in self.args.pipeline:
            force = Overrides(activation_format=activations, pipeline=pipeline, **wishes)
            limits = Limits(max_tokens=min(most, MAX_TOKENS)) if pipeline == "mega" else base.limits
            layer = MoELayer(held, plan(replace(base, placement=placed, graph=True, limits=limits), force))
            if self.rank == 0:
                print(layer.plan.explain(), flush=True)
            way = layer.plan.dispatcher if pipeline is None else f"{layer.plan.dispatcher}, {pipeline}"
            layers.append((layer, facts | {"dispatcher": way}))
            if self.args.halves and "mega" not in layer.plan.pipelines:
                layers.append((Halves(layer, self.halves), facts | {"dispatcher": f"{way}, two halves"}))
        if self.args.peer and weights_name == "fp8_block":
            try:
                peer = MegaMoe(held, layers[0][0].plan)
                layers.append((peer, facts | {"dispatcher": peer.name}))
            except ImportError as why:
                self.say(what=f"no MegaMoE: {why}", **facts)
        # Those that are compared run one after the other, at the same temperature.
        for tokens, (layer, own) in product(self.args.tokens, layers):
            if isinstance(layer, MoELayer) and tokens > layer.plan.problem.limits.max_tokens:
                self.say(what="too many tokens", **own, tokens=tokens)
                continue
            if max(self.everybody(self.spent(), "time")) > self.args.seconds:
                self.say(what="no time left", **own, tokens=tokens)
                return
            self.case(layer, one, whole_weights, own | {"tokens": tokens})

    def case(
        self, layer: MoELayer | Halves | MegaMoe, one: MoELayer, weights: ExpertWeights[Any], facts: dict[str, Any]
    ) -> None:
        """Check and measure one count of tokens."""
        tokens, spec = facts["tokens"], layer.spec
        generator = torch.Generator(self.device).manual_seed(1000 * self.rank + tokens)
        inputs = [
            (
                torch.randn(tokens, spec.hidden_size, device=self.device, generator=generator).bfloat16(),
                random_routing(tokens, spec, self.args.routing, generator),
            )
            for _ in range(input_sets(tokens))
        ]
        if isinstance(layer, MegaMoe):
            peer: MegaMoe = layer
            inputs = [(x, peer.routed(routing)) for x, routing in inputs]
        outs = [torch.full_like(x, float("nan")) for x, _ in inputs]
        calls = [
            lambda x=x, r=routing, o=out: layer(x, routing=r, out=o)
            for (x, routing), out in zip(inputs, outs, strict=True)
        ]
        graph = self.graph(calls)
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        judge = one if self.args.combine == "exact" and not isinstance(layer, MegaMoe) else layer
        with torch.inference_mode():
            # All of them, also where one differs: ranks call their layer equally often.
            again = [judge(x, routing=r) for x, r in inputs]
            same = all(torch.equal(out, other) for out, other in zip(outs, again, strict=True))
            error = experts_error(outs[0], one.plan.problem, weights, inputs[0])
        layer.check()
        allowed = TOLERANCES[activation_format(layer.plan.activation_format).bits]
        verdicts = self.everybody((error, same), "checked")
        error, same = max(e for e, _ in verdicts), all(s for _, s in verdicts)
        facts = facts | {"error": round(error, 5), "same_bits": same}
        if not same or not error <= allowed:
            self.failed += 1
            self.say(what="layer is wrong, not timed", **facts)
            return
        floors = self.floors(layer, [routing for _, routing in inputs])
        found = self.timed(graph.replay, "layer", len(inputs))
        if self.args.kernels:
            self.kernels(graph, len(inputs), facts, "layer")
        least = max(floors["floor_weights_us"], floors["floor_math_us"], floors["floor_wire_us"])
        self.say(what="layer", **facts, **found, **floors, over_floor=round(found["us"] / least, 3))
        layer.check()
        # Of a pass in one kernel the exchange is no part that could be measured alone.
        alone = isinstance(layer, MoELayer) and "mega" not in layer.plan.pipelines
        if alone and self.args.dispatcher in (None, "symm_mem"):
            self.exchange(layer, inputs, facts, floors["wire_bytes"])

    def exchange(
        self, layer: MoELayer, inputs: list[tuple[Tensor, Routing]], facts: dict[str, Any], nbytes: int
    ) -> None:
        """Measure dispatch and combine alone, and NCCL with the same bytes."""
        layer_of: Any = layer
        before = layer_of._context
        parts: PipelineParts = before.pipelines[-1][1].parts
        idle = Idle(real=layer.experts, width=layer.spec.expert_hidden_size)
        exchange_only = SplitKind().build(replace(parts, experts=idle))
        layer_of._context = replace(before, pipelines=((None, exchange_only),))
        try:
            graph = self.graph([lambda x=x, r=r: layer(x, routing=r) for x, r in inputs])
            found = self.timed(graph.replay, "exchange", len(inputs))
            if self.args.kernels:
                self.kernels(graph, len(inputs), facts, "exchange")
        finally:
            layer_of._context = before
        layer.check()
        facts = {key: value for key, value in facts.items() if key not in ("error", "same_bits")}
        self.say(what="exchange", **facts, **found, wire_bytes=nbytes, gb_per_s=round(nbytes / found["us"] / 1e3, 1))
        there, back = (self.bytes_of(layer, [r for _, r in inputs], way) for way in ("there", "back"))
        sent = [torch.empty(max(256, n // 256 * 256) * self.world // max(1, self.world - 1) // self.world * self.world,
                            dtype=torch.uint8, device=self.device) for n in (there, back)]  # fmt: skip
        received = [torch.empty_like(each) for each in sent]

        def both() -> None:
            for given, taken in zip(sent, received, strict=True):
                distributed.all_to_all_single(taken, given)

        graph = self.graph([both] * 4)
        found = self.timed(graph.replay, "nccl", 4)
        self.say(what="nccl", **facts, **found, wire_bytes=nbytes, gb_per_s=round(nbytes / found["us"] / 1e3, 1))

    def kernels(self, graph: torch.cuda.CUDAGraph, inside: int, facts: dict[str, Any], what: str) -> None:
        """Measure each kernel of ``graph``, which holds ``inside`` passes; what waits for a peer counts as its own."""
        kinds = [profiler.ProfilerActivity.CUDA]
        with profiler.profile(activities=kinds) as seen:
            for _ in range(10):
                self.space.handle.barrier()
                graph.replay()
            torch.cuda.synchronize()
        events: list[Any] = sorted(seen.events() or (), key=_end)
        own, before = dict[str, float](), 0.0
        for event in events:
            if str(event.device_type) == "DeviceType.CUDA" and "barrier_kernel" not in event.name:
                # A kernel may be launched while the one before it runs, and then waits for it.
                since = max(event.time_range.start, before)
                own[event.name] = own.get(event.name, 0.0) + max(0.0, _end(event) - since) / 10 / inside
                before = max(before, _end(event))
        facts = {key: value for key, value in facts.items() if key not in ("error", "same_bits")}
        everyone = self.everybody(own, "kernels")
        most = sorted(((us, key) for key, us in own.items()), reverse=True)
        for _, key in most[:10]:
            times = [each[key] for each in everyone if key in each]
            found = {"us": statistics.median(times), "us_min": min(times), "us_max": max(times)}
            rounded = {name: round(us, 2) for name, us in found.items()}
            self.say(what=f"kernels of {what}: {key[:60]}", **facts, **rounded)

    def bytes_of(self, layer: MoELayer | Halves | MegaMoe, routings: list[Routing], way: str) -> int:
        """Return what this rank sends to others there, or gets from them back, on average; the most of any rank."""
        width = layer.spec.expert_hidden_size
        form = activation_format(layer.plan.activation_format)
        token = width + 4 * (-(-width // form.group) if form.group else 1) if form.e4m3 else 2 * width
        each = layer.spec.num_experts / self.world
        total = 0
        for routing in routings:
            owner = (routing.topk_ids / each).long()
            for rank in range(self.world):
                if rank != self.rank:
                    here = owner == rank
                    tokens = int(here.any(1).sum())
                    back = int(here.sum()) if self.args.combine == "exact" else tokens
                    total += tokens * token if way == "there" else back * 2 * width
        return max(self.everybody(total // len(routings), way))

    def floors(self, layer: MoELayer | Halves | MegaMoe, routings: list[Routing]) -> dict[str, Any]:
        """Return the three floors of the busiest rank, in microseconds, and the bytes it reads of others."""
        spec: MoESpec = layer.spec
        everyone = self.everybody([routing.topk_ids.cpu() for routing in routings], "routings")
        held = torch.tensor(layer.plan.problem.local_experts)
        hits = rows = 0
        for together in zip(*everyone, strict=True):
            ids = torch.cat(list(together))
            here = torch.isin(ids, held)
            hits += ids[here].unique().numel()
            rows += int(here.sum())
        hits, rows = hits / len(routings), rows / len(routings)
        flops = 2 * rows * spec.intermediate_size * spec.expert_hidden_size * (spec.gate_up_parts + 1)
        eight = activation_format(layer.plan.activation_format).bits == 8
        wire = self.bytes_of(layer, routings, "there") + self.bytes_of(layer, routings, "back")
        own = (
            hits * expert_bytes(spec) / self.ceilings.bandwidth,
            flops / (self.ceilings.rate_8 if eight else self.ceilings.rate_16),
            wire / self.wire,
        )
        weights, math, link = (round(1e6 * max(each), 2) for each in zip(*self.everybody(own, "floors"), strict=True))
        return {"floor_weights_us": weights, "floor_math_us": math, "floor_wire_us": link, "wire_bytes": wire}


def _end(event: Any) -> float:
    return event.time_range.end


def _held(weights: ExpertWeights[Any], ids: tuple[int, ...]) -> ExpertWeights[Any]:
    def taken(payload: Any) -> Any:
        own = {name: value[ids[0] : ids[-1] + 1] for name, value in payload.tensors().items()}
        return replace(payload, **own, shape=(len(ids), *payload.shape[1:]))

    return replace(weights, gate_up=taken(weights.gate_up), down=taken(weights.down))


def _run(rank: int, args: argparse.Namespace, world: int) -> None:
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", rank=rank, world_size=world)
    timeout_seconds(60)  # a rank may still compile
    bench = Bench(args)
    if rank == 0:
        print(bench.ceilings, flush=True)
    for shape, recipe in ((shape, recipe) for shape in args.shapes for recipe in args.recipes):
        bench.recipe(shape, recipe)
        gc.collect()
        torch.cuda.empty_cache()
    print(f"rank {rank}: done after {bench.spent():.0f} s, {bench.failed} failed", flush=True)
    failed = bench.failed
    del bench
    distributed.barrier()
    distributed.destroy_process_group()
    if failed:
        sys.exit(1)


def main() -> int:
    args = _options()
    if "RANK" in os.environ:
        _run(int(os.environ["RANK"]), args, int(os.environ["WORLD_SIZE"]))
        return 0
    world = args.gpus or torch.cuda.device_count()
    if world < 2:
        print(f"found {torch.cuda.device_count()} GPUs, needed are two or more")
        return 1
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29531")
    spawn(_run, args=(args, world), nprocs=world)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["v4_flash", "dsv3"], help="as collegium bench takes them")
    parser.add_argument("--recipes", nargs="+", default=["fp8_block:fp8_group128", "mxfp4:fp8_token"])
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, help="tokens of a rank")
    parser.add_argument("--routing", default="uniform", help="as collegium bench takes it")
    parser.add_argument("--dispatcher", default=None, help="instead of the one that the plan prefers")
    parser.add_argument(
        "--pipeline", nargs="+", default=[None], help="instead of the one that the plan prefers: mega, split, or both"
    )
    parser.add_argument("--halves", action="store_true", help="also two half batches beside each other")
    parser.add_argument("--peer", action="store_true", help="also MegaMoE of sgl-deep-gemm, if it is installed")
    parser.add_argument("--combine", default="exact", choices=("exact", "reduced"), help="what comes back")
    parser.add_argument("--kernels", action="store_true", help="also the kernels of layer and exchange, by name")
    parser.add_argument("--gpus", type=int, default=0, help="this many instead of all")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--copy-bytes", type=int, default=256 << 20)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further case after this long")
    parser.add_argument("--out", type=Path, default=RESULTS)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    parser.add_argument("--commit", default=commit.strip() or "unknown")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
