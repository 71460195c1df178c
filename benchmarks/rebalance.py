"""Serve layers whose experts are split over ranks, rebalance them meanwhile, and say what that costs the serving.

Every rank replays one CUDA graph of all layers over and over (on a CPU it calls them), with tokens that like some
experts (zipf, the same ones in every batch, others in every layer). After ``--steps`` steps the policy is asked
through Balancer and experts move while the steps go on, ``--rounds`` times, each time as if other experts were liked;
then as many steps again. Then one more expert moves, and a bit of it is flipped as it arrives. Every output of every
step is compared, bit by bit, with the first one for the same batch. A row:

    before_us, during_us, after_us   a step, median over steps, slowest rank (_max: its longest one)
    stall_us      what the switches of maps took on the serving stream, all together, most of any rank
    added_us      how much longer all steps during the move took than as many steps before, most of any rank
    move_s        from asking the policy to the last switch, serving meanwhile
    same_bits     whether every output of every step, the damaged move included, had the bits of the first
    caught        whether the damaged move was given up on every rank

    python benchmarks/rebalance.py                                            all GPUs of this host
    python benchmarks/rebalance.py --rounds 25 --steps 40                     25 times 8 layers
    python benchmarks/rebalance.py --device cpu --shape 256x128x16x4 --tokens 32 --steps 40 --spare 1

With one spare slot experts change places and are not copied. On a CPU the bits of a row depend on how many rows its
expert has, which copies share, so bits are the same only then.
"""

from __future__ import annotations

import argparse
import csv
import gc
import itertools
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn

from collegium import Limits, MoELayer, Overrides, Problem, Routing, plan, probe
from collegium.balance.balancer import Balancer
from collegium.balance.mover import Mover
from collegium.balance.policy import policy_named
from collegium.balance.slots import balancedness
from collegium.commands.bench import named_layer, recipe_of
from collegium.commands.measure import driver_version, version_of
from collegium.dummy.weights import random_weights
from collegium.parallel.placement import linear
from collegium.parallel.rendezvous import rendezvous_of, timeout_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from collegium.types import ExpertWeights

RESULTS = Path(__file__).parent / "results" / "rebalance.csv"
COLUMNS = (
    *("gpu", "driver", "torch", "triton", "commit", "command"),
    *("shape", "weights", "activations", "dispatcher", "policy", "ranks", "layers", "spare", "tokens", "steps"),
    *("before_us", "before_us_max", "during_us", "during_us_max", "after_us", "after_us_max", "during_steps"),
    *("stall_us", "added_us", "move_s", "switches", "moved_experts", "moved_bytes"),
    *("balanced_before", "balanced_after", "same_bits", "caught"),
)


class DamagingMover(Mover):
    """Calls ``damage`` with the tensors of each expert that arrives, if set."""

    damage: Callable[[tuple[Tensor, ...]], None] | None = None

    def _verify(self, parts: tuple[Tensor, ...], expected: Tensor) -> Tensor:
        if self.damage is not None:
            self.damage(parts)
        return super()._verify(parts, expected)


class DamagingBalancer(Balancer):
    """A Balancer whose arriving experts can be damaged before their checksum is verified."""

    mover_type = DamagingMover

    def damage(self, change: Callable[[tuple[Tensor, ...]], None]) -> None:
        """Let ``change`` modify what arrives on this rank."""
        assert isinstance(self._mover, DamagingMover)
        self._mover.damage = change


BATCHES, AHEAD = 6, 2  # different inputs; steps that the host may be ahead of the device


class Serving:
    """One rank's layers, its inputs, and the steps that were served."""

    def __init__(self, layers: list[MoELayer], args: argparse.Namespace, rank: int) -> None:
        spec, self.device = layers[0].spec, layers[0].handle.device
        self.layers, tokens, shape = layers, args.tokens, (BATCHES, args.tokens, spec.hidden_size)
        own = torch.Generator(self.device).manual_seed(100 + rank)
        self._x = torch.randn(shape, device=self.device, generator=own).bfloat16()
        ids: list[Tensor] = []
        for number in range(len(layers)):
            # Which experts are liked is the same on every rank.
            liked = torch.randperm(spec.num_experts, generator=torch.Generator().manual_seed(number)).to(self.device)
            weight = ((liked + 1).float() ** -args.skew).expand(BATCHES * tokens, spec.num_experts)
            ids.append(torch.multinomial(weight, spec.routing.top_k, generator=own).view(BATCHES, tokens, -1))
        self._ids = torch.stack(ids, dim=1)
        self.x, self.ids = self._x[0].clone(), self._ids[0].clone()
        given = torch.rand(tokens, spec.routing.top_k, device=self.device, generator=own) + 0.1
        self._routings = [Routing(topk_ids=own, topk_weights=given) for own in self.ids]
        self.out = torch.full((len(layers), *shape[1:]), float("nan"), dtype=torch.bfloat16, device=self.device)
        self._first: list[Tensor | None] = [None] * BATCHES
        self.wrong = torch.zeros((), dtype=torch.int64, device=self.device)
        self.count, self._ends, self.seconds = 0, list[Any](), list[float]()
        self._run: Any = self._call
        self._call()
        self._call()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.inference_mode(), torch.cuda.graph(graph):
                self._call()
            self._run = graph.replay

    def step(self, balancer: Balancer | None = None) -> None:
        """Serve the next batch, compare it, and let ``balancer`` do what is due."""
        batch = self.count % BATCHES
        self.count += 1
        with torch.inference_mode():
            self.x.copy_(self._x[batch])
            self.ids.copy_(self._ids[batch])
            self._run()
            first = self._first[batch]
            if first is None:
                self._first[batch] = self.out.clone()
            else:
                self.wrong += (self.out.view(torch.int16) != first.view(torch.int16)).any()
        if balancer is not None:
            balancer.step()
        self._timed()

    def phase(self) -> list[float]:
        """Return the seconds of every step since the last call, and begin anew."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            self.seconds = [a.elapsed_time(b) / 1e3 for a, b in zip(self._ends, self._ends[1:], strict=False)]
        else:
            self.seconds = [b - a for a, b in zip(self._ends, self._ends[1:], strict=False)]
        self._ends = self._ends[-1:]
        return self.seconds

    def _timed(self) -> None:
        if self.device.type != "cuda":
            self._ends.append(time.perf_counter())
            return
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        self._ends.append(end)
        if len(self._ends) > AHEAD:
            self._ends[-1 - AHEAD].synchronize()  # as a server that reads its tokens

    def _call(self) -> None:
        for layer, routing, out in zip(self.layers, self._routings, self.out, strict=True):
            layer(self.x, routing=routing, out=out)


class Bench:
    """One rank's side; all ranks go through the same recipes and steps."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device, self.started = args, device, time.monotonic()
        self.rank, self.world = distributed.get_rank(), distributed.get_world_size()
        on_gpu = device.type == "cuda"
        self.head = {
            "gpu": torch.cuda.get_device_name(device) if on_gpu else "",
            "driver": driver_version(device) + ("" if on_gpu else f" on {probe('cpu').name}"),
            "torch": torch.__version__,
            "triton": version_of("triton"),
            "commit": args.commit,
            "command": " ".join(["python", "benchmarks/rebalance.py", *sys.argv[1:]]),
        }

    def everybody(self, value: Any, what: str) -> list[Any]:
        """Return what every rank gives."""
        return rendezvous_of().exchange(value, what)

    def say(self, text: str) -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(f"[{time.monotonic() - self.started:.0f} s] {text}", flush=True)

    def layers(self, recipe: str) -> list[MoELayer]:
        """Return the layers, each with weights of its own, empty slots on every rank."""
        weights_name, activations = recipe_of(recipe)
        spec = replace(named_layer(self.args.shape)[1], weight_format=weights_name)
        placed = replace(linear(spec.num_experts, self.rank, self.world), spare=self.args.spare)
        problem = Problem(
            spec=spec,
            device=probe(str(self.device)),
            limits=Limits(max_tokens=self.args.tokens),
            placement=placed,
            graph=self.device.type == "cuda",
        )
        chosen = plan(problem, Overrides(activation_format=activations, dispatcher=self.args.dispatcher))
        made: list[MoELayer] = []
        for number in range(self.args.layers):
            whole = random_weights(spec, self.device, seed=number)
            made.append(MoELayer(_held(whole, placed.expert_ids + placed.expert_ids[:1] * placed.spare), chosen))
            self.say(f"layer {number} is there")
        self.say(chosen.explain())
        return made

    def recipe(self, text: str) -> bool:
        """Measure one recipe and write its row; return whether every check passed."""
        args, layers = self.args, self.layers(text)
        named, place = dict(enumerate(layers)), policy_named(args.policy).place
        maps: list[Any] = [layer.dispatcher.expert_map for layer in layers]  # pyright: ignore[reportAttributeAccessIssue]
        serving = Serving(layers, args, self.rank)
        shown = itertools.count()

        def asked_of(load: Any, slots: Any) -> Any:
            turn = next(shown) // len(layers)
            return place(numpy.roll(load, 7 * turn), slots) if turn < args.rounds else None

        balancer = DamagingBalancer(named, asked_of, interval=args.steps)
        start = [own.slots for own in maps]
        for _ in range(BATCHES + 2):
            serving.step()
        serving.phase()
        for _ in range(args.steps - 1):
            serving.step(balancer)
        before, asked = serving.phase(), time.monotonic()
        # All ranks stop at the same step: what they know of the time is agreed on.
        left = min(self.everybody(args.seconds + self.started - time.monotonic(), "seconds left"))
        most = int(
            min(5000 * args.rounds, max(100, left / (1.5 * max(self.everybody(statistics.median(before), "a step")))))
        )
        calls = 0
        for turn in range(args.rounds):
            # The first was asked for at the last step; the next ones at every so many steps when nothing moves.
            least = calls + (args.steps + 12 if turn else 12)
            while calls < most and (calls < least or not balancer.idle):
                serving.step(balancer)
                calls += 1
        during, took = serving.phase(), time.monotonic() - asked
        stall, idle = balancer.stall, balancer.idle
        loads = balancer.loads().double().numpy()
        if not idle or not balancer.counts.switched:
            why = "nothing was moved" if idle else f"not over, {left:.0f} s were left for it; give more --seconds"
            self.say(f"after {calls} steps: {why}; not measured")
            balancer.close()
            return False
        balancer.record(False)
        for _ in range(args.steps):
            serving.step()
        after = serving.phase()
        moved, nbytes, switches = balancer.counts.moved, balancer.counts.moved_bytes, balancer.counts.switched
        caught = self.damaged(serving, balancer, maps[0])
        balancer.close()
        for layer in layers:
            layer.check()
        now = [own.slots for own in maps]
        wrong = int(serving.wrong)
        added = sum(during) - len(during) * statistics.median(before)
        own = (before, during, after, stall, added, took, moved, nbytes, wrong, caught)
        told = self.everybody(own, "measured")
        micro = {
            f"{name}_us{end}": round(1e6 * max(what(each[at]) for each in told), 1)
            for at, name in enumerate(("before", "during", "after"))
            for end, what in (("", statistics.median), ("_max", max))
        }
        weights_name, activations = recipe_of(text)
        row = self.head | micro | {
            "shape": args.shape, "weights": weights_name, "activations": activations,
            "dispatcher": layers[0].plan.dispatcher, "policy": args.policy, "ranks": self.world,
            "layers": len(layers), "spare": args.spare, "tokens": args.tokens, "steps": args.steps,
            "during_steps": len(during),
            "stall_us": round(1e6 * max(each[3] for each in told), 1),
            "added_us": round(1e6 * max(each[4] for each in told), 1),
            "move_s": round(max(each[5] for each in told), 3), "switches": switches,
            "moved_experts": sum(each[6] for each in told), "moved_bytes": sum(each[7] for each in told),
            "balanced_before": round(statistics.mean(map(balancedness, loads, start)), 4),
            "balanced_after": round(statistics.mean(map(balancedness, loads, now)), 4),
            "same_bits": not any(each[8] for each in told), "caught": all(each[9] for each in told),
        }  # fmt: skip
        self.say(" ".join(f"{key}={row[key]}" for key in COLUMNS[6:]))
        if self.rank == 0:
            new = not args.out.exists()
            with args.out.open("a", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                if new:
                    writer.writeheader()
                writer.writerow(row)
        return bool(row["same_bits"] and row["caught"])

    def damaged(self, serving: Serving, balancer: DamagingBalancer, table: Any) -> bool:
        """Move one more expert to the last rank, with a bit of it flipped; return whether all gave it up."""
        slots, last = table.slots, self.world - 1
        expert = next(e for e in slots[0] if e not in (-1, *slots[last]))
        wanted = [tuple(e for e in own if e != -1) for own in slots]
        wanted[last] = (*wanted[last], expert)

        def flip(parts: tuple[Tensor, ...]) -> None:
            raw = max(parts, key=lambda part: part.numel()).view(torch.uint8).reshape(-1)
            raw[raw.numel() // 3] ^= 16

        if self.rank == last:
            balancer.damage(flip)
        given_up = balancer.counts.given_up
        balancer.plan({0: tuple(wanted)})
        for _ in range(400):
            if balancer.idle:
                break
            serving.step(balancer)
        for _ in range(BATCHES):
            serving.step()
        return balancer.counts.given_up == given_up + 1 and table.slots == slots


def _held(weights: ExpertWeights[Any], ids: tuple[int, ...]) -> ExpertWeights[Any]:
    def taken(payload: Any) -> Any:
        own = {name: value[list(ids)] for name, value in payload.tensors().items()}
        return replace(payload, **own, shape=(len(ids), *payload.shape[1:]))

    return replace(weights, gate_up=taken(weights.gate_up), down=taken(weights.down))


def _run(rank: int, args: argparse.Namespace, world: int) -> None:
    on_gpu = args.device == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    timeout_seconds(60)  # a rank may still compile
    distributed.init_process_group("nccl" if on_gpu else "gloo", rank=rank, world_size=world, timeout=timedelta(0, 120))
    bench, good = Bench(args, device), True
    for recipe in args.recipes:
        if max(bench.everybody(time.monotonic() - bench.started, "time")) > args.seconds:
            bench.say(f"no time left for {recipe}")
            break
        good = bench.recipe(recipe) and good
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
    distributed.barrier()
    distributed.destroy_process_group()
    if not good:
        sys.exit(1)


def main() -> int:
    """Start a process for each rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="dsv3", help="as collegium bench takes it")
    parser.add_argument("--recipes", nargs="+", default=["mxfp4:fp8_token", "fp8_block:fp8_group128"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a rank")
    parser.add_argument("--spare", type=int, default=2, help="empty slots of a rank; one is for moving")
    parser.add_argument("--skew", type=float, default=1.2, help="expert i is drawn with weight i ** -skew")
    parser.add_argument("--policy", default="least_moves")
    parser.add_argument("--steps", type=int, default=400, help="steps before, after, and between rounds")
    parser.add_argument("--rounds", type=int, default=1, help="how often all layers are rebalanced")
    parser.add_argument("--dispatcher", help="instead of the one that the plan prefers")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ranks", type=int, default=0, help="this many instead of all GPUs, or 2 on a CPU")
    parser.add_argument("--seconds", type=float, default=300, help="begin no further recipe after this long")
    parser.add_argument("--out", type=Path, default=RESULTS)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    parser.add_argument("--commit", default=commit.strip() or "unknown")
    args = parser.parse_args()
    world = args.ranks or (torch.cuda.device_count() if args.device == "cuda" else 2)
    if world < 2 or (args.device == "cuda" and torch.cuda.device_count() < world):
        print(
            f"asked for {world} ranks on {args.device}, found {torch.cuda.device_count()} GPUs; needed are two or more"
        )
        return 1
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29537")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    spawn(_run, args=(args, world), nprocs=world)
    return 0


if __name__ == "__main__":
    sys.exit(main())
