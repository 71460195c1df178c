"""Threads that call layers at the same time get the bits a single caller gets.

``python tests/gpu/stress_threads.py --seconds 30 --together 8 --out threads.csv`` runs every recipe with four threads
on one stream and on streams of their own, with one layer and with two, while one more thread replays a captured graph.
Each recipe is a process of its own, ``--together`` of them at a time. The threads start on layers that nothing was
compiled for yet.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import random
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from collegium import (
    ExpertWeights,
    Limits,
    MoELayer,
    MoESpec,
    Overrides,
    PlanError,
    Problem,
    RouterWeights,
    RoutingSpec,
    SharedSpec,
    SharedWeights,
    encode_experts,
    plan,
    probe,
)
from collegium.formats import FORMATS
from collegium.ops.quantize import ACTIVATION_FORMATS
from collegium.testing.compare import heavy_tailed, random_experts

THREADS = 4
EXPERTS, HIDDEN, WIDE = 8, 256, 128
# One token, few, a small batch, one that runs as a large batch, and one that takes several passes.
TOKENS = (1, 2, 9, 65, 512, 700)
LIMITS = Limits(max_tokens=512)


def spec_of(weights: str) -> MoESpec:
    return MoESpec(
        hidden_size=HIDDEN,
        intermediate_size=WIDE,
        num_experts=EXPERTS,
        routing=RoutingSpec(top_k=2),
        weight_format=weights,
        shared=SharedSpec(intermediate_size=WIDE),
    )


def problem_of(spec: MoESpec, activations: str, limits: Limits = LIMITS) -> Problem:
    """Return the problem of a layer on this GPU whose tokens have the dtype of ``activations``, or else bfloat16."""
    dtype = activations if activations in ("bf16", "fp16") else "bf16"
    return Problem(spec=spec, device=probe("cuda"), limits=limits, dtype=dtype)


def experts_of(weights: str, experts: int, wide: int, hidden: int, seed: int) -> ExpertWeights[Any]:
    """Return random experts on this GPU."""
    coded = encode_experts(random_experts(experts, 2, wide, hidden, seed=seed), weights)
    return replace(coded, gate_up=coded.gate_up.to("cuda"), down=coded.down.to("cuda"))


def recipes() -> list[tuple[str, str]]:
    """Return every pair of formats that a Triton kernel runs here."""
    found: list[tuple[str, str]] = []
    names = [f.name for f in ACTIVATION_FORMATS if f.name != "fp32"]
    for weights, activations in itertools.product([f.name for f in FORMATS if not f.read_only], names):
        try:
            kernel = plan(problem_of(spec_of(weights), activations), Overrides(activation_format=activations)).kernel
        except PlanError:
            continue
        if kernel != "reference":
            found.append((weights, activations))
    return found


def layer_of(weights: str, activations: str, seed: int) -> MoELayer:
    return MoELayer(
        experts_of(weights, EXPERTS, WIDE, HIDDEN, seed),
        plan(problem_of(spec_of(weights), activations), Overrides(activation_format=activations)),
        router=RouterWeights(weight=heavy_tailed(EXPERTS, HIDDEN, seed=seed + 1).cuda()),
        shared=SharedWeights(experts=experts_of(weights, 1, WIDE, HIDDEN, seed + 2)),
    )


class Caller(threading.Thread):
    """Calls layers in a random order; all outputs for one input must have the bits of the first."""

    def __init__(self, number: int, layers: list[MoELayer], inputs: list[torch.Tensor], own: bool, end: float) -> None:
        super().__init__(daemon=True)
        self.number, self.layers, self.inputs, self.end_at = number, layers, inputs, end
        self.stream = torch.cuda.Stream() if own else None
        self.first: dict[tuple[int, int], torch.Tensor] = {}
        self.calls, self.different, self.error = 0, 0, ""

    def run(self) -> None:
        try:
            with nullcontext() if self.stream is None else torch.cuda.stream(self.stream), torch.inference_mode():
                self._call()
        except BaseException as error:
            self.error = f"{type(error).__name__}: {error}"

    def _call(self) -> None:
        draw = random.Random(self.number)
        while True:
            picked = [(draw.randrange(len(self.layers)), draw.randrange(len(self.inputs))) for _ in range(16)]
            # All are queued before the first is looked at, so that passes of several threads run together.
            found = [self.layers[which](self.inputs[size]) for which, size in picked]
            for key, out in zip(picked, found, strict=True):
                self.different += not torch.equal(out, self.first.setdefault(key, out))
                self.calls += 1
            # The first round compiles, which may take longer than all the rest.
            if time.monotonic() > self.end_at:
                return


class Replayer(threading.Thread):
    """Replays a graph on a stream of its own."""

    def __init__(self, layer: MoELayer, x: torch.Tensor, end: float) -> None:
        super().__init__(daemon=True)
        self.stream, self.end_at, self.x = torch.cuda.Stream(), end, x
        self.graph, self.different, self.error = torch.cuda.CUDAGraph(), 0, ""
        for _ in range(3):
            self.wanted = layer(x)
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            self.out = layer(x)

    def run(self) -> None:
        try:
            with torch.cuda.stream(self.stream), torch.inference_mode():
                while time.monotonic() < self.end_at:
                    self.out.fill_(torch.nan)
                    self.graph.replay()
                    self.different += not torch.equal(self.out, self.wanted)
        except BaseException as error:
            self.error = f"{type(error).__name__}: {error}"


def stress(weights: str, activations: str, own_streams: bool, layers: int, seconds: float) -> tuple[int, int, str]:
    """Return calls, outputs with other bits than a single caller's, and the first error."""
    made = [layer_of(weights, activations, seed=10 * number) for number in range(layers)]
    inputs = [heavy_tailed(tokens, HIDDEN, seed=tokens).to("cuda", torch.bfloat16) for tokens in TOKENS]
    if activations == "fp16":
        inputs = [x.half() for x in inputs]
    other = layer_of(weights, activations, seed=7)
    capturable = other.plan.capturable
    torch.cuda.synchronize()
    end = time.monotonic() + seconds
    replayer = [Replayer(other, inputs[2], end)] if capturable else []
    callers = [Caller(number, made, inputs, own_streams, end) for number in range(THREADS)]
    for thread in (*callers, *replayer):
        thread.start()
    for thread in (*callers, *replayer):
        thread.join()
    errors = [thread.error for thread in (*callers, *replayer) if thread.error]
    if errors:
        return sum(c.calls for c in callers), -1, errors[0]
    torch.cuda.synchronize()
    different = sum(thread.different for thread in (*callers, *replayer))
    with torch.inference_mode():
        for which, size in itertools.product(range(layers), range(len(inputs))):
            wanted = made[which](inputs[size])
            different += sum(not torch.equal(wanted, c.first.get((which, size), wanted)) for c in callers)
    return sum(c.calls for c in callers), different, ""


def _one_recipe(weights: str, activations: str, seconds: float) -> int:
    sys.setswitchinterval(1e-5)
    failed = 0
    for own_streams, layers in itertools.product((False, True), (1, 2)):
        calls, different, error = stress(weights, activations, own_streams, layers, seconds)
        failed += bool(error) or different > 0 or not calls
        row = [weights, activations, "own" if own_streams else "one", layers, THREADS, seconds, calls, different, error]
        csv.writer(sys.stdout).writerow(row)
        sys.stdout.flush()
    return failed


def _store(path: Path, mode: str, rows: list[list[object]]) -> None:
    with path.open(mode, newline="") as file:
        csv.writer(file).writerows(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--together", type=int, default=4)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--recipe", nargs=2)
    asked = parser.parse_args()
    if asked.recipe:
        weights, activations = asked.recipe
        return _one_recipe(weights, activations, asked.seconds)
    waiting, running, failed = recipes(), [], 0
    head = ["weights", "activations", "streams", "layers", "threads", "seconds", "calls", "different", "error"]
    facts = [torch.cuda.get_device_name(), torch.__version__, asked.commit]
    if asked.out:
        _store(asked.out, "w", [[*head, "gpu", "torch", "commit", "command"]])
    # Encoding weights on every core in every process would take longer than the test.
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    while waiting or running:
        while waiting and len(running) < asked.together:
            recipe = waiting.pop(0)
            command = [sys.executable, __file__, "--seconds", str(asked.seconds), "--recipe", *recipe]
            running.append((recipe, subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=alone)))
        recipe, process = running.pop(0)
        text, _ = process.communicate()
        command = f"python {sys.argv[0]} --seconds {asked.seconds:g}"
        if asked.out:
            _store(asked.out, "a", [[*row, *facts, command] for row in csv.reader(text.splitlines())])
        failed += process.returncode != 0
        print(f"{' x '.join(recipe)}: exit {process.returncode}\n{text}", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
