"""Variants of the large-batch kernel of four-bit weights: edits of its text, compiled in parallel and timed in turns.

The first variant of a recipe is the kernel as it is, with which the others must have the same bits. An edit that no
longer applies raises ValueError. Whole layers with uniform routing, in CUDA graphs.

    python benchmarks/bench_w4_variants.py --out variants.csv --commit "$(git rev-parse --short HEAD)"
    python benchmarks/bench_w4_variants.py --recipes mxfp4:bf16 --tokens 2048
    python benchmarks/bench_w4_variants.py --compile     only compile, which needs no GPU
"""

from __future__ import annotations

import argparse
import csv
import datetime
import multiprocessing
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench_w4_prefill import HEAD, MODELS, plan_of
from collegium.commands.bench import check_output, named_layer, random_inputs, recipe_of
from collegium.commands.measure import (
    driver_version,
    floor_of,
    graph_pool,
    measure_ceilings,
    prepare_pass,
    take_turns,
    version_of,
)
from collegium.dummy.weights import random_weights
from collegium.experts.triton import tiling, w4_prefill
from collegium.kernels import enums
from collegium.layer import MoELayer
from collegium.runtime.nvrtc import CudaKernel, compiled

COLUMNS = ("weights", "activations", "shape", "routing", "tokens", "variant", "us", "floor_us", "same_bits")


class Variant(NamedTuple):
    """Edits of the kernel's text, each found once, and the tokens of the widest tile; 0: as chosen."""

    edits: tuple[tuple[str, str], ...] = ()
    max_tokens: int = 0


# ptxas puts the decoding of the next operands between the four products of a step, so the second one starts some 60
# instructions after the first. It moves nothing across a branch whose condition it does not know.
PRODUCTS_FIRST = (
    (
        "// d = the product of 64 weight rows and N tokens of a pass,",
        """__device__ __forceinline__ void fix_order(u32 sixteen) {
    asm volatile("{ .reg .pred p;\\n"
                 "again: setp.eq.u32 p, %0, 16;\\n"
                 "@p bra done;\\n"
                 "nanosleep.u32 64;\\n"
                 "bra again;\\n"
                 "done: }" ::"r"(sixteen) : "memory");
}

// d = the product of 64 weight rows and N tokens of a pass,""",
    ),
    ("constexpr bool LATE = FEW_REGISTERS && PASSES > 1;", "constexpr bool LATE = true;"),
    ("            if (LATE) codes = ", "            fix_order(r.sixteen);\n            if (LATE) codes = "),
)
# The lists of the next tile are read when so many K blocks of this one are left to copy, not STAGES - 1.
DRAWN_EARLY = (("z.k_blocks - (STAGES - 1))", "z.k_blocks - 8)"),)
# Both row tiles are decoded before a turn, and the scales of a piece are read once for both: half of these reads of
# shared memory. Registers have room for it up to 144 tokens.
SHARED_SCALES = (
    (
        "// Sums of all K blocks where tokens have a scale for each.\n",
        """constexpr int shared_piece_of(int tokens) {
    int most = tokens > 128 ? 24 : tokens > 112 ? 32 : 56, pieces = (tokens + most - 1) / most;
    while (tokens % (8 * pieces)) pieces++;
    return tokens / pieces;
}

template <int FIRST, int N> __device__ __forceinline__ void add_pieces_of_both(
    float (&acc)[ROW_TILES][N / 2], float (&d)[shared_piece_of(N) / 2], float (&e)[shared_piece_of(N) / 2],
    const Operands& a, const Operands& b, const u8* stage, const float* scales, int group
) {
    constexpr int PIECE = shared_piece_of(N), NEXT = FIRST + PIECE;
    float of_token[PIECE / 8][2];
#pragma unroll
    for (int j = 0; j < PIECE / 8; j++) {
        const int eights = FIRST / 8 + j, second = eights % 2;
        if (second == 0 && j + 1 < PIECE / 8) {
            float4 four = *(const float4*)(scales + 8 * eights);
            of_token[j][0] = four.x, of_token[j][1] = four.y, of_token[j + 1][0] = four.z, of_token[j + 1][1] = four.w;
        } else if (second == 0 || j == 0) {
            float2 two = *(const float2*)(scales + 8 * eights - 6 * second);
            of_token[j][0] = two.x, of_token[j][1] = two.y;
        }
    }
    await_products<1>();
#pragma unroll
    for (int i = 0; i < PIECE / 2; i++) {
        float& sum = acc[0][FIRST / 2 + i];
        sum = fmaf(d[i], of_token[i / 4][i % 2], sum);
    }
    if constexpr (NEXT < N) multiply_piece<NEXT, PIECE>(d, a, stage);
    await_products<(NEXT < N)>();
#pragma unroll
    for (int i = 0; i < PIECE / 2; i++) {
        float& sum = acc[1][FIRST / 2 + i];
        sum = fmaf(e[i], of_token[i / 4][i % 2], sum);
    }
    if constexpr (NEXT < N) {
        multiply_piece<NEXT, PIECE>(e, b, stage);
        if (NEXT + PIECE == N) pass_turn(group);
        add_pieces_of_both<NEXT, N>(acc, d, e, a, b, stage, scales, group);
    }
}

template <int N> __device__ __forceinline__ void add_scaled_tiles(
    const u8* stage, const float* scales, const Reader& r, float (&acc)[ROW_TILES][N / 2]
) {
    constexpr int PIECE = shared_piece_of(N);
    int group = threadIdx.x / 128;
    Operands a, b;
    float d[PIECE / 2], e[PIECE / 2];
    decode(load_codes(stage, r, 0), 0, r.selector, r.sixteen, a[0]);
    decode(load_codes(stage, r, 1), 0, r.selector, r.sixteen, b[0]);
    wait_turn(group);
    multiply_piece<0, PIECE>(d, a, stage);
    multiply_piece<0, PIECE>(e, b, stage);
    add_pieces_of_both<0, N>(acc, d, e, a, b, stage, scales, group);
}

// Sums of all K blocks where tokens have a scale for each.
""",
    ),
    (
        "            add_scaled_block<N>(stage, scales, r, acc);\n",
        "            add_scaled_block<N>(stage, scales, r, acc);\n"
        "        } else if constexpr (!SPLIT && N <= 144) {\n"
        "            add_scaled_tiles<N>(stage, scales, r, acc);\n",
    ),
)
NOW = {"now": Variant()}
FIRST = {"products first": Variant(PRODUCTS_FIRST)}
# Shape, and variants, by recipe.
CASES: dict[str, tuple[str, dict[str, Variant]]] = {
    "mxfp4:fp8_token": ("qwen3_235b", NOW | FIRST | {"drawn early": Variant(DRAWN_EARLY)}),
    "mxfp4:fp8_group128": (
        "qwen3_235b",
        NOW
        | {
            "scales read once": Variant(SHARED_SCALES),
            "scales read once, at most 144 tokens": Variant(SHARED_SCALES, 144),
        },
    ),
    "mxfp4:bf16": (
        "gptoss120b",
        NOW
        | FIRST
        | {
            "drawn early": Variant(DRAWN_EARLY),
            "at most 80 tokens": Variant(max_tokens=80),
            "at most 80 tokens, drawn early, products first": Variant(DRAWN_EARLY + PRODUCTS_FIRST, 80),
        },
    ),
    "nvfp4:bf16": ("qwen3_235b", NOW | FIRST),
    "nvfp4:fp8_token": ("qwen3_235b", NOW | FIRST),
    "int4_affine:bf16": ("qwen3_235b", NOW | FIRST),
}
# OPERAND, X_GROUPS, WEIGHT, SCALE and WORDS of recipes.
CONSTANTS = {
    "mxfp4:fp8_token": (0, 0, enums.E2M1_E8M0, enums.NO_SCALE, 1),
    "mxfp4:fp8_group128": (0, 1, enums.E2M1_E8M0, enums.NO_SCALE, 1),
    "mxfp4:bf16": (1, 0, enums.E2M1_LANES, enums.E8M0_SCALE, 1),
    "nvfp4:bf16": (1, 0, enums.E2M1_LANES, enums.E4M3_SCALE, 1),
    "nvfp4:fp8_token": (0, 0, enums.E2M1_E4M3, enums.NO_SCALE, 2),
    "int4_affine:bf16": (1, 0, enums.INT4_LANES, enums.ZERO_SCALE, 1),
}


def source_of(variant: Variant, constants: Mapping[str, int]) -> str:
    """Return the kernel's text with a variant's edits; raises ValueError unless each is found once."""
    text = w4_prefill.source_of(constants)
    for found, replacement in variant.edits:
        if text.count(found) != 1:
            msg = f"found {text.count(found)} times, needed once: {found!r}; follow the kernel's text"
            raise ValueError(msg)
        text = text.replace(found, replacement)
    return text


def kernel_of(variant: Variant) -> CudaKernel:
    """Return the kernel with a variant's text."""
    return CudaKernel("w4_prefill", partial(source_of, variant), w4_prefill.KERNEL.shared)


def constants_of(recipe: str, variant: Variant, projections: int) -> dict[str, int]:
    """Return what one of the two products is compiled for, in the kernel's order of constants."""
    names = ("OPERAND", "X_GROUPS", "WEIGHT", "SCALE", "WORDS")
    decoded = dict(zip(names, CONSTANTS[recipe], strict=True))
    epilogue = {"OUT": 1, "PROJECTIONS": projections, "ACTIVATION": 0 if projections == 2 else -1}
    rest = {"FAST": 0, "HAS_LIMIT": 0, "HAS_ROW_OFFSETS": 0, "BIAS": 0, "ALIGNED": 1}
    return {"MAX_TOKENS": variant.max_tokens or 160} | decoded | epilogue | rest


def compile_one(case: tuple[str, str, int]) -> str:
    """Compile a recipe's product into the cache, and return its name."""
    recipe, title, projections = case
    variant = CASES[recipe][1][title]
    kernel_of(variant).machine_code(constants_of(recipe, variant, projections))
    return f"compiled {recipe} {title}, {projections} parts"


def report_one(case: tuple[str, str, int]) -> str:
    """Compile a recipe's product, and return what ptxas reports of registers and of products that wait."""
    recipe, title, projections = case
    variant = CASES[recipe][1][title]
    constants = constants_of(recipe, variant, projections)
    _, log = compiled(source_of(variant, constants), "w4_prefill", constants, "--ptxas-options=-v")
    lines = [
        line.partition(":")[2].strip() or line.strip() for line in log.splitlines() if "spill" in line or "C75" in line
    ]
    return f"{recipe} {title}, {projections} parts: {'; '.join(lines)}"


def time_recipe(recipe: str, asked: argparse.Namespace, ceilings: Any) -> list[tuple[Any, ...]]:
    """Check and time the variants of a recipe; return the values of ``COLUMNS``."""
    device = torch.device("cuda")
    shape, variants = CASES[recipe]
    _, spec = named_layer("x".join(map(str, MODELS[shape])))
    formats = recipe_of(recipe)
    spec = replace(spec, weight_format=formats[0])
    weights = random_weights(spec, device)
    generator = torch.Generator(device).manual_seed(1)
    inputs = {tokens: random_inputs(tokens, spec, "uniform", generator) for tokens in asked.tokens}
    passes: dict[int, dict[str, Any]] = {tokens: {} for tokens in inputs}
    wanted: dict[int, list[torch.Tensor]] = {}
    same: dict[tuple[int, str], bool] = {}
    chosen, pool = tiling.prefill_tile, graph_pool(device)
    for title, variant in variants.items():

        def tile_of(*args: Any, tokens: int = variant.max_tokens, **kwargs: Any) -> Any:
            tile = chosen(*args, **kwargs)
            return tile and replace(tile, block_t=tokens or tile.block_t)

        w4_prefill.__dict__["KERNEL"] = kernel_of(variant)
        tiling.__dict__["prefill_tile"] = tile_of
        layer = MoELayer(weights, plan_of(spec, formats, "large", max(asked.tokens)))
        for tokens, cases in inputs.items():
            calls = [partial(layer, x, routing=routing) for x, routing in cases]
            with torch.inference_mode():
                outputs = [call().clone() for call in calls]
            first = wanted.setdefault(tokens, outputs)
            same[tokens, title] = all(torch.equal(*pair) for pair in zip(outputs, first, strict=True))
            passes[tokens][title] = prepare_pass(calls, device, pool=pool)
        if title == next(iter(variants)):
            check_output(recipe, layer, weights, inputs[asked.tokens[0]][0])
    tiling.__dict__["prefill_tile"] = chosen
    rows: list[tuple[Any, ...]] = []
    for tokens, cases in inputs.items():
        floor = floor_of(spec, formats[1], [routing for _, routing in cases], ceilings).seconds
        for title, seconds in take_turns(passes[tokens], device).items():
            us, bits = 1e6 * seconds / len(cases), "same bits" if same[tokens, title] else "OTHER BITS"
            print(
                f"{shape} {recipe} {tokens}: {title:46} {us:8.1f} us {1e-6 * us / floor:5.2f}x floor, {bits}",
                flush=True,
            )
            found = (round(us, 1), round(1e6 * floor, 1), same[tokens, title])
            rows.append((*formats, shape, "uniform", tokens, title, *found))
    return rows


def write_rows(asked: argparse.Namespace, rows: list[tuple[Any, ...]]) -> None:
    """Write ``rows`` to the file ``asked.out``."""
    gpu = (torch.cuda.get_device_name(), driver_version(torch.device("cuda")), torch.__version__, version_of("triton"))
    command = " ".join(["python", "benchmarks/bench_w4_variants.py", *sys.argv[1:]])
    facts = (*gpu, datetime.datetime.now(tz=datetime.UTC).date().isoformat(), asked.commit, command)
    with asked.out.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([HEAD + COLUMNS, *((*facts, *row) for row in rows)])


def main() -> int:
    """Compile and measure every variant and print a line for each; 1 where bits differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--recipes", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 8192])
    parser.add_argument("--jobs", type=int, default=12, help="kernels that are compiled at the same time")
    parser.add_argument("--compile", action="store_true", help="only compile, and report registers")
    parser.add_argument("--out", type=Path, help="a CSV file to write")
    parser.add_argument("--commit", default="", help="for the file")
    asked = parser.parse_args()
    kernels = [(recipe, title, parts) for recipe in asked.recipes for title in CASES[recipe][1] for parts in (2, 1)]
    # Before CUDA starts in this process.
    with multiprocessing.get_context("fork").Pool(asked.jobs) as pool:
        for line in pool.imap(report_one if asked.compile else compile_one, kernels):
            print(line, flush=True)
    if asked.compile:
        return 0
    ceilings = measure_ceilings(torch.device("cuda"))
    print(torch.cuda.get_device_name(), torch.__version__, ceilings, flush=True)
    rows: list[tuple[Any, ...]] = []
    for recipe in asked.recipes:
        rows += time_recipe(recipe, asked, ceilings)
        torch.cuda.empty_cache()
    if asked.out:
        write_rows(asked, rows)
    return 1 if any(not row[-1] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
