"""One layer with tiles of your choice, two or more pairs of them beside each other.

``collegium tune`` times each product by itself; here the whole layer runs, with the kernels between the products. A
pair is the tile of gate and up, and that of down, as ``BLOCK_N x BLOCK_T``, then ``w`` warps, ``s`` stages, and where
they are wanted ``d`` K blocks of a step, ``g`` token tiles that share a pass, ``r`` most registers, ``st``
gate and up interleaved, ``j`` a fused K block:

    python benchmarks/bench_tiles.py v4_flash mxfp4 fp8_group128 --pair 128x64,w4,s3,d2 128x64,w4,s4

The tiles that the layer would choose come first. A time counts only where all pairs give the same bits and the error
against FP32 truth is that of the recipe. Needs a GPU.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from collegium.commands.bench import check_output, named_layer, planned_layer, random_inputs
from collegium.commands.measure import driver_version, graph_pool, prepare_pass, take_turns, version_of
from collegium.dummy.weights import random_weights
from collegium.errors import CollegiumError
from collegium.experts.triton.tiles.problem import TileChoice
from collegium.formats.unquantised import DTYPES
from collegium.layer import MoELayer
from collegium.runtime.devices import probe

if TYPE_CHECKING:
    from collections.abc import Callable

RESULTS = Path(__file__).parent / "results" / "tiles_h200.csv"
HEAD = ("gpu", "driver", "torch", "triton", "commit", "command", "layer", "weights", "activations", "tokens")
_LETTERS = {"w": "warps", "s": "stages", "d": "depth", "g": "group_t", "r": "registers"}


def tile_of(text: str, like: TileChoice) -> TileChoice:
    """Return the tile that ``text`` says, which starts as early as ``like``; ValueError for what it cannot say."""
    sizes, *more = text.split(",")
    block_n, _, block_t = sizes.partition("x")
    given: dict[str, Any] = {"interleave_gate_up": "st" in more, "fuse_k_block": "j" in more}
    given |= {_LETTERS[part[0]]: int(part[1:]) for part in more if part not in ("st", "j")}
    tall = int(block_t) >= 64
    return TileChoice(block_n=int(block_n), block_t=int(block_t), narrow=tall, overlap=like.overlap, **given)


def said(tile: TileChoice) -> str:
    """Return ``tile`` as ``tile_of`` reads it."""
    parts = [
        f"{tile.block_n}x{tile.block_t}",
        f"w{tile.warps}",
        f"s{tile.stages}",
        f"d{tile.depth}",
        f"g{tile.group_t}",
    ]
    parts += [f"r{tile.registers}"] if tile.registers else []
    return ",".join([*parts, *(["st"] if tile.interleave_gate_up else []), *(["j"] if tile.fuse_k_block else [])])


def measured(args: argparse.Namespace, tokens: int) -> dict[tuple[str, str], float]:
    """Return the microseconds of the layer with its own choice of tiles and with each pair."""
    facts = probe("cuda")
    place = torch.device(facts.place)
    spec = named_layer(args.layer)[1]
    plan = planned_layer(spec, (args.weights, args.activations), facts, tokens)
    weights = random_weights(plan.problem.spec, place)
    layer: Any = MoELayer(weights, plan)
    packed, rows = layer.experts, tokens * spec.routing.top_k
    if packed.tiling.large(rows):
        raise CollegiumError(f"bench_tiles: {tokens} tokens run with the tiles of large batches, which are not chosen")
    dtype = DTYPES[plan.problem.dtype]
    made = random_inputs(tokens, spec, "uniform", torch.Generator(place).manual_seed(1))
    inputs = [(x.to(dtype), routing) for x, routing in made]
    own = packed.tiling.pair(rows)
    pairs = list(dict.fromkeys([own, *(tuple(map(tile_of, pair, own)) for pair in args.pair)]))
    wanted = layer(inputs[0][0], routing=inputs[0][1])
    check_output(f"{args.layer}, {tokens} tokens", layer, weights, inputs[0])
    passes: dict[Any, Callable[[], object]] = {}
    pool, kept = graph_pool(place), []
    for pair in pairs:
        kept.append(dict(layer.__dict__))  # a captured pass goes on with the buffers it had
        layer.replan(plan, replace(packed, tiles=pair))
        if not torch.equal(layer(inputs[0][0], routing=inputs[0][1]), wanted):
            raise CollegiumError(f"bench_tiles: {said(pair[0])} and {said(pair[1])} give other bits; please report it")
        passes[pair] = prepare_pass([partial(layer, x, routing=routing) for x, routing in inputs], place, pool=pool)
    times = take_turns(passes, place, rounds=9)
    return {(said(pair[0]), said(pair[1])): 1e6 * times[pair] / len(inputs) for pair in pairs}


def main() -> None:
    """Measure, print and add the rows to the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("layer", help="as collegium bench takes it")
    parser.add_argument("weights")
    parser.add_argument("activations")
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048])
    parser.add_argument("--pair", nargs=2, action="append", default=[], metavar=("GATE_UP", "DOWN"))
    parser.add_argument("--out", type=Path, help=f"add rows to this file, for instance {RESULTS.name}")
    asked = parser.parse_args()
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    about = [torch.cuda.get_device_name(), driver_version(torch.device("cuda")), torch.__version__]
    about += [
        version_of("triton"),
        commit or "unknown",
        " ".join(["python", "benchmarks/bench_tiles.py", *sys.argv[1:]]),
    ]
    for tokens in asked.tokens:
        for (first, second), time in measured(asked, tokens).items():
            row = [*about, asked.layer, asked.weights, asked.activations, tokens, first, second, f"{time:.1f}"]
            print(*row[6:], flush=True)
            if asked.out:
                fresh = not asked.out.exists()
                with asked.out.open("a", newline="", encoding="utf-8") as file:
                    csv.writer(file).writerows([[*HEAD, "gate_up", "down", "us"], row] if fresh else [row])


if __name__ == "__main__":
    main()
