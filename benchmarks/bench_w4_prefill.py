"""Whole layers of four-bit weights: large batches in ``w4_prefill`` and in small tiles, and the floor.

Both run the same weights and tokens. Bits must be equal, and the output must match FP32. With ``--steps`` every step of
the large batch is timed alone, too, with its bytes and the share of its time that they take at the measured bandwidth.
Times are of CUDA graphs that take turns.

    python benchmarks/bench_w4_prefill.py --shapes dsv3 qwen3_235b --tokens 512 2048 8192 --steps
    python benchmarks/bench_w4_prefill.py --recipe mxfp4:bf16 --shapes gptoss120b minimax_m2
"""

from __future__ import annotations

import argparse
import csv
import datetime
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from collegium.commands.bench import SHAPES, check_output, named_layer, planned_layer, random_inputs, recipe_of
from collegium.commands.measure import (
    Ceilings,
    driver_version,
    floor_of,
    graph_pool,
    measure_ceilings,
    prepare_pass,
    take_turns,
    version_of,
)
from collegium.dummy.weights import random_weights
from collegium.experts.triton.grouped import tile_list
from collegium.experts.triton.tiling import product_format
from collegium.experts.triton.w4_prefill import w4_prefill_gemm
from collegium.layer import MoELayer
from collegium.ops.operand import operand
from collegium.ops.scatter import scatter_rows
from collegium.parallel.local import Local
from collegium.planning import kernel_named, plan
from collegium.problem import Overrides
from collegium.runtime.devices import probe

if TYPE_CHECKING:
    from torch import Tensor

    from collegium.experts.triton.packed import PackedExperts
    from collegium.planning import Plan
    from collegium.types import MoESpec, Routing

MODELS = SHAPES | {  # H, I, E, top-k
    "minimax_m2": (3072, 1536, 256, 8),
    "qwen3_235b": (4096, 1536, 128, 8),
    "glm_4_5_air": (4096, 1408, 128, 8),
}
Inputs = list[tuple["Tensor", "Routing"]]
HEAD = ("gpu", "driver", "torch", "triton", "date", "commit", "command")
COLUMNS = (
    "weights",
    "activations",
    "shape",
    "routing",
    "tokens",
    "large_us",
    "small_us",
    "floor_us",
    "bound",
    "same_bits",
)


def plan_of(spec: MoESpec, recipe: tuple[str, str], tiles: Any, max_tokens: int) -> Plan:
    """Return the plan of a layer whose batches all run in small or in large tiles."""
    planned = planned_layer(spec, recipe, probe(torch.device("cuda")), max_tokens)
    return plan(planned.problem, Overrides(activation_format=recipe[1], tiles=tiles))


def layers_of(spec: MoESpec, recipe: tuple[str, str], weights: Any, counts: dict[int, Inputs]) -> dict[str, MoELayer]:
    """Return a layer for each family of tiles, which has compiled its kernels."""
    layers: dict[str, MoELayer] = {}
    for tiles in ("large", "small"):
        layers[tiles] = MoELayer(weights, plan_of(spec, recipe, tiles, max(counts)))
        for tokens, inputs in counts.items():
            start = time.perf_counter()
            with torch.inference_mode():
                for x, routing in inputs:
                    layers[tiles](x, routing=routing)
            torch.cuda.synchronize()
            print(f"  {tiles}, {tokens} tokens: first calls took {time.perf_counter() - start:.1f} s", flush=True)
    return layers


class Step(NamedTuple):
    """A step of a large batch, and the bytes it reads and writes, each once."""

    run: Callable[[], object]
    nbytes: int


def nbytes_of(*tensors: Tensor | None) -> int:
    """Return the bytes of ``tensors``."""
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def steps_of(layer_plan: Plan, packed: PackedExperts, case: tuple[Tensor, Routing]) -> dict[str, Step]:
    """Return every step of a large batch by itself, and in parentheses another way to do the step before it."""
    x, routing = case
    local = Local(num_experts=layer_plan.problem.spec.num_experts)
    rows = routing.topk_ids.numel()
    large = packed.tiling.large(rows)
    assert large is not None
    dispatch = partial(local.dispatch, x, routing, block_t=packed.tiling.block_t(rows))
    batch, handle = dispatch()
    source, offsets, slots = batch.source, batch.expert_offsets, batch.slots
    assert slots is not None
    tiles = tile_list(offsets, rows, large[0])
    order = packed.gate_up.layout.row_order
    matrices = (packed.gate_up, packed.down)
    x_form, h_form = (
        product_format(form, matrix.layout, large[0]) for form, matrix in zip(packed.forms, matrices, strict=True)
    )
    scatter = partial(scatter_rows, x, x_form, slots, rows, order=order)
    codes, scale = scatter()
    middle = torch.empty(rows, packed.gate_up.layout.shape[2], dtype=torch.bfloat16, device=x.device)
    out = torch.empty(rows, packed.down.layout.shape[2], dtype=torch.bfloat16, device=x.device)
    activation = packed.activation
    gate_up = partial(
        w4_prefill_gemm, codes, packed.gate_up, offsets, tiles, middle, x_scale=scale, activation=activation
    )
    gate_up()
    quantise = partial(operand, middle, h_form, order=order)
    h, h_scale = quantise()
    down = partial(w4_prefill_gemm, h, packed.down, offsets, tiles, out, x_scale=h_scale)
    down()
    token_bytes = nbytes_of(x, slots, codes, scale)
    gate_up_bytes, down_bytes = (matrix.layout.nbytes for matrix in matrices)
    steps = {
        "dispatch": Step(dispatch, nbytes_of(routing.topk_ids, source, slots)),
        "tokens": Step(scatter, token_bytes),
        "(each row by itself)": Step(
            partial(operand, x, x_form, source=source, order=order), nbytes_of(x, source, codes, scale)
        ),
        "gate and up": Step(gate_up, gate_up_bytes + nbytes_of(codes, scale, middle)),
        "middle": Step(quantise, nbytes_of(middle, h, h_scale)),
        "down": Step(down, down_bytes + nbytes_of(h, h_scale, out)),
        "combine": Step(partial(local.combine, out, handle), nbytes_of(out, slots) + 4 * x.numel()),
    }
    if h is middle:
        del steps["middle"]
    return steps


def times_of_steps(layer_plan: Plan, packed: PackedExperts, inputs: Inputs) -> dict[str, tuple[float, float]]:
    """Return the seconds and the bytes of every step."""
    device = torch.device("cuda")
    each = [steps_of(layer_plan, packed, case) for case in inputs]
    pool = graph_pool(device)
    passes = {name: prepare_pass([steps[name].run for steps in each], device, pool=pool) for name in each[0]}
    times = take_turns(passes, device)
    return {name: (times[name] / len(each), statistics.fmean(steps[name].nbytes for steps in each)) for name in each[0]}


def print_steps(case: str, steps: dict[str, tuple[float, float]], ceilings: Ceilings) -> None:
    """Print a line for each step: its time, its bytes, and the share of its time that they take at full bandwidth."""
    for name, (seconds, nbytes) in steps.items():
        share = nbytes / ceilings.bandwidth / seconds
        print(f"  {case} {name:22} {1e6 * seconds:8.1f} us {1e-6 * nbytes:8.1f} MB {share:6.1%}", flush=True)


def measure_model(
    shape: str, recipe: tuple[str, str], asked: argparse.Namespace, ceilings: Ceilings
) -> list[tuple[Any, ...]]:
    """Check and time one model in a recipe's formats; return the values of ``COLUMNS`` for each case."""
    device = torch.device("cuda")
    _, spec = named_layer("x".join(map(str, MODELS[shape])))
    spec = replace(spec, weight_format=recipe[0])
    weights = random_weights(spec, device)
    generator = torch.Generator(device).manual_seed(1)
    rows: list[tuple[Any, ...]] = []
    for style in asked.routing:
        counts = {tokens: random_inputs(tokens, spec, style, generator) for tokens in asked.tokens}
        layers = layers_of(spec, recipe, weights, counts)
        pool = graph_pool(device)
        for tokens, inputs in counts.items():
            case = f"{shape} {':'.join(recipe)} {style} {tokens}"
            with torch.inference_mode():
                outputs = [[layer(x, routing=routing) for x, routing in inputs] for layer in layers.values()]
            same = all(torch.equal(*pair) for pair in zip(*outputs, strict=True))
            errors = [check_output(case, layer, weights, inputs[0]) for layer in layers.values()]
            del outputs
            passes = {
                way: prepare_pass([partial(layer, x, routing=r) for x, r in inputs], device, pool=pool)
                for way, layer in layers.items()
            }
            times = {way: seconds / len(inputs) for way, seconds in take_turns(passes, device).items()}
            floor = floor_of(spec, recipe[1], [routing for _, routing in inputs], ceilings)
            shown = [f"{way} {1e6 * s:8.1f} us {s / floor.seconds:5.2f}x floor" for way, s in times.items()]
            bits = "same bits" if same else "OTHER BITS"
            print(
                f"{case}: {', '.join(shown)}, floor {1e6 * floor.seconds:.1f} us ({floor.bound}), {bits}, "
                f"error {errors[0]:.4f}",
                flush=True,
            )
            found = [round(1e6 * seconds, 1) for seconds in (times["large"], times["small"], floor.seconds)]
            rows.append((*recipe, shape, style, tokens, *found, floor.bound, same))
            del passes
        del layers
        if asked.steps:
            large = plan_of(spec, recipe, "large", max(asked.tokens))
            packed = cast("PackedExperts", kernel_named(large.kernel).pack(weights, large.problem.routed))
            for tokens, inputs in counts.items():
                print_steps(f"{shape} {style} {tokens}", times_of_steps(large, packed, inputs), ceilings)
            del packed
        torch.cuda.empty_cache()
    return rows


def write_rows(asked: argparse.Namespace, rows: list[tuple[Any, ...]]) -> None:
    """Append ``rows`` to the file ``asked.out``."""
    path: Path = asked.out
    is_new = not path.exists()
    gpu = (torch.cuda.get_device_name(), driver_version(torch.device("cuda")), torch.__version__, version_of("triton"))
    command = " ".join(["python", "benchmarks/bench_w4_prefill.py", *sys.argv[1:]])
    facts = (*gpu, datetime.datetime.now(tz=datetime.UTC).date().isoformat(), asked.commit, command)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([HEAD + COLUMNS] if is_new else [])
        writer.writerows((*facts, *row) for row in rows)


def main() -> int:
    """Measure every case and print a line for each; 1 where bits differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--recipe", nargs="+", default=["mxfp4:fp8_token"], help="weights:activations")
    parser.add_argument("--shapes", nargs="+", default=["dsv3", "minimax_m2", "qwen3_235b", "glm_4_5_air"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[512, 2048, 8192])
    parser.add_argument("--routing", nargs="+", default=["uniform"])
    parser.add_argument("--steps", action="store_true", help="also time every step by itself")
    parser.add_argument("--out", type=Path, help="a CSV file to append to")
    parser.add_argument("--commit", default="", help="for the file")
    asked = parser.parse_args()
    ceilings = measure_ceilings(torch.device("cuda"))
    print(torch.cuda.get_device_name(), torch.__version__, ceilings, flush=True)
    rows: list[tuple[Any, ...]] = []
    for shape, recipe in product(asked.shapes, asked.recipe):
        print(f"{shape}: {MODELS[shape]}, {recipe}", flush=True)
        rows += measure_model(shape, recipe_of(recipe), asked, ceilings)
        torch.cuda.empty_cache()
    if asked.out:
        write_rows(asked, rows)
    wrong = sum(not row[-1] for row in rows)
    print(f"{wrong} cases with other bits", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
