"""Both products of a batch in small tiles and in large ones: the same bits, and how long they take.

With ``--ablate`` the kernel of large batches runs with parts of its text left out, which gives wrong numbers and tells
what the others cost. Times are of CUDA graphs that take turns; one counts only where the bits are those of small tiles.

    python benchmarks/bench_prefill.py --shapes qwen3_30b --recipes bf16:bf16 --tokens 1024 2048 8192
    python benchmarks/bench_prefill.py --shapes dsv3 --recipes fp8_block:fp8_group128 --tokens 8192 --ablate
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from collegium.commands.bench import named_layer, planned_layer, random_inputs, recipe_of
from collegium.commands.measure import driver_version, graph_pool, prepare_pass, take_turns, version_of
from collegium.dummy.weights import random_weights
from collegium.experts.triton import prefill, tiling
from collegium.experts.triton.tiles import choice as tiles
from collegium.experts.triton.tiles.problem import TileProblem
from collegium.formats.unquantised import DTYPES
from collegium.parallel.local import Local
from collegium.planning import kernel_named
from collegium.runtime.devices import probe
from collegium.runtime.nvrtc import CudaKernel

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from collegium.experts.triton.packed import PackedExperts
    from collegium.planning import Plan
    from collegium.types import ContiguousBatch

RESULTS = Path(__file__).parent / "results" / "prefill_h200.csv"
RECIPES = ("bf16:bf16", "fp8_block:fp8_group128")

# What --ablate leaves out, by pieces of the text.
_SAME = (
    ("t.column * SPAN + SPAN / 2 * rank, units", "0 * t.column, units"),
    ("row + second, full", "row, full"),
    ("step * STEP_K, row", "step % 4 * STEP_K, row"),
    ("step / TERMS * STEP_K, t.row + half", "step % 4 * STEP_K, half"),
)
_NO_PRODUCT = (("multiply(d, x, w, k, added || k > 0);", ";"),)
_NO_SCALING = (("for (int j = 0; j < 16; j++) {\n        float2", "for (int j = 0; j < 16; j += 8) {\n        float2"),)
_NO_FACTORS = (("X_SCALE == 1 && here && i < units ?", "false ?"), ("SCALE && here &&", "false &&"))
ABLATIONS: dict[str, tuple[tuple[str, str], ...]] = {
    "always the same operands": _SAME,
    "no factors loaded": _NO_FACTORS,
    "no products": _NO_PRODUCT,
    "no scaling": _NO_SCALING,
    "copies alone": _NO_PRODUCT + _NO_SCALING,
    "products alone": _SAME + _NO_SCALING,
}


_LARGE = TileProblem(rows=1 << 20, experts=1, n_out=512, k_in=512, parts=1, block_k=64)


def text_of(constants: Mapping[str, int], left_out: tuple[tuple[str, str], ...]) -> str:
    """Return the kernel's text without pieces of it."""
    text = prefill.source_of(constants)
    for piece, instead in left_out:
        assert piece in text, piece
        text = text.replace(piece, instead)
    return text


@contextmanager
def multiplying(left_out: tuple[tuple[str, str], ...]) -> Generator[None]:
    """Multiply every batch by large tiles inside the block, without pieces of their kernel's text."""
    before = tiling.prefill_tile, prefill.KERNEL
    tiling.prefill_tile = lambda _, machine, **__: tiles.prefill_tile(_LARGE, machine)
    if left_out:
        prefill.KERNEL = CudaKernel("prefill", partial(text_of, left_out=left_out), before[1].shared)
    try:
        yield
    finally:
        tiling.prefill_tile, prefill.KERNEL = before


def packed_as(plan: Plan) -> PackedExperts:
    """Return random experts for a plan, which a kernel in Triton runs."""
    weights = random_weights(plan.problem.spec, torch.device("cuda"))
    return cast("PackedExperts", kernel_named(plan.kernel).pack(weights, plan.problem.routed))


def batch_of(plan: Plan, tokens: int) -> ContiguousBatch:
    """Return random tokens, each at random experts."""
    spec = plan.problem.spec
    x, routing = random_inputs(tokens, spec, "uniform", torch.Generator("cuda").manual_seed(0))[0]
    return Local(num_experts=spec.num_experts).dispatch(x.to(DTYPES[plan.problem.dtype]), routing)[0]


def measured(packed: PackedExperts, batch: ContiguousBatch, *, ablate: bool) -> dict[str, tuple[float, bool]]:
    """Return microseconds of both products, and whether the bits are those of small tiles, with each tile."""
    device, stop = batch.x.device, int(batch.expert_offsets[-1])
    small = replace(packed, machine=replace(packed.machine, compiles=False))
    pool = graph_pool(device)
    wanted = small.run(batch)[:stop].clone()
    passes, same = {"small tiles": prepare_pass([partial(small.run, batch)], device, pool=pool)}, {"small tiles": True}
    ways: dict[str, Any] = {"large tiles": multiplying(())}
    ways |= {name: multiplying(left_out) for name, left_out in ABLATIONS.items() if ablate}
    for name, way in ways.items():
        large = replace(packed, machine=packed.machine)  # which decides anew
        with way:
            passes[name] = prepare_pass([partial(large.run, batch)], device, pool=pool)
            same[name] = torch.equal(large.run(batch)[:stop], wanted)
    return {name: (1e6 * time, same[name]) for name, time in take_turns(passes, device).items()}


def main() -> int:
    """Measure every case, write and print the rows; 1 where the kernel gave other bits."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--shapes", nargs="+", default=["qwen3_30b", "dsv3"])
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 8192])
    parser.add_argument("--ablate", action="store_true", help="also leave out parts of the kernel")
    parser.add_argument("--out", type=Path, default=RESULTS)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    parser.add_argument("--commit", default=commit.strip() or "unknown")
    asked = parser.parse_args()
    device = torch.device("cuda")
    about = [torch.cuda.get_device_name(), driver_version(device), torch.__version__, version_of("triton")]
    about += [asked.commit, " ".join(["python", "benchmarks/bench_prefill.py", *sys.argv[1:]])]
    wrong = 0
    with asked.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        head = ["gpu", "driver", "torch", "triton", "commit", "command", "shape", "weights", "activations", "tokens"]
        writer.writerow([*head, "product", "us", "same bits"])
        for shape in asked.shapes:
            for recipe in map(recipe_of, asked.recipes):
                plan = planned_layer(named_layer(shape)[1], recipe, probe(device), max(asked.tokens))
                packed = packed_as(plan)
                for tokens in asked.tokens:
                    for name, (time, same) in measured(packed, batch_of(plan, tokens), ablate=asked.ablate).items():
                        counts = same or name in ABLATIONS
                        wrong += not counts
                        row = [shape, *recipe, tokens, name, f"{time:.1f}" if counts else "", same]
                        writer.writerow([*about, *row])
                        file.flush()
                        print(*row, flush=True)
                del packed
                torch.cuda.empty_cache()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
