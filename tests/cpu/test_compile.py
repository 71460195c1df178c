"""What the compiler makes of the kernels for sm_80, sm_90 and sm_100: instructions, registers, no spills.

No GPU is needed. The compiler runs in a process of its own, because the interpreter of the other tests takes
Triton's place in this one.
"""

from __future__ import annotations

from typing import Any

import pytest

from collegium.kernels.enums import FAST_MATH
from compiling import compile_selected, grid, skip_other_compilers

skip_other_compilers()

BASE = {
    "WEIGHT": 0, "SCALE": 0, "WORDS": 1, "X_SCALE": 0, "ROW_SCALE": False, "BIAS": False, "GATHER": True,
    "PROJECTIONS": 2, "ACTIVATION": 0, "HAS_LIMIT": False, "EVEN_K": True, "ASM": True, "GROUP_T": 8, "K_BLOCKS": 32,
    "NARROW": False, "BLOCK_N": 64, "BLOCK_T": 16, "BLOCK_K": 128, "STAGES": 4, "INTERLEAVED": False, "TOP_K": 0,
    "EARLY": False, "PDL": True, "FUSED": False,
    "DEPTH": 1,
}  # fmt: skip
PLAIN = {"BLOCK_K": 64}
FLOAT32 = {"BLOCK_K": 32}  # tokens too, and TF32x3
BLOCKS = {"WEIGHT": 2, "SCALE": 1, "X_SCALE": 1}
MXFP4 = {"WEIGHT": 3, "SCALE": 2, "ROW_SCALE": True}
NVFP4 = {"WEIGHT": 3, "SCALE": 3, "ROW_SCALE": True, "BLOCK_K": 64}
NVFP4_ROWS = NVFP4 | {"X_SCALE": 2}  # rows in NVFP4 too, decoded but for their scales
INT4 = {"WEIGHT": 4, "SCALE": 5, "WORDS": 2}
ZEROS = {"WEIGHT": 4, "SCALE": 6}
INT8 = {"WEIGHT": 5, "SCALE": 6}
FOUR = {"WORDS": 4}
# Blocks of GGUF: float16 scales, and steps of 16 and 32 columns, with minima and without.
Q4_0, Q8_0 = ({"WEIGHT": weight, "SCALE": 7, "WORDS": 2} for weight in (4, 5))
Q4_1, Q5_1 = ({"WEIGHT": weight, "SCALE": 7, "WORDS": 4, "X_SCALE": 2, "HALF": True} for weight in (4, 5))
Q4_K, Q5_K = ({"WEIGHT": weight, "SCALE": 8, "WORDS": 3, "X_SCALE": 2, "HALF": True} for weight in (4, 5))
Q3_K, Q6_K = ({"WEIGHT": weight, "SCALE": 8, "WORDS": 2, "BLOCK_K": 64} for weight in (4, 5))
IQ3_S = {"WEIGHT": 5, "SCALE": 4, "WORDS": 4}
IQ2_XS = IQ3_S | {"BLOCK_K": 64}
# Two and three bits, with steps and minima, steps and shifts, signed steps, and without steps.
Q2_K, IQ1_S = ({"WEIGHT": 13, "SCALE": scale, "WORDS": 4, "BLOCK_K": 256} for scale in (10, 11))
Q3_LANES = {"WEIGHT": 14, "SCALE": 12, "WORDS": 4, "BLOCK_K": 256}
TQ2_0 = {"WEIGHT": 13, "SCALE": 9, "BLOCK_K": 256}
EIGHT_WARPS = {"BLOCK_N": 128, "warps": 8}
LOOKED_UP = {"WEIGHT": 12, "SCALE": 4, "WORDS": 2}  # numbers of bitsandbytes
MXFP8 = {"WEIGHT": 1, "SCALE": 2, "ROW_SCALE": True}
W8A16 = {"WEIGHT": 1, "SCALE": 1}
# FP8 blocks of other sizes: float32 scales of 128, 64 or 32 columns of a row.
ROW_GROUPS = {"WEIGHT": 1, "SCALE": 4}
CODES_OF_32, CODES_OF_64, CODES_OF_128 = (
    {"WEIGHT": 2, "SCALE": 4, "X_SCALE": 1, "BLOCK_K": columns} for columns in (32, 64, 128)
)
INTERLEAVED = {"INTERLEAVED": True, "BLOCK_N": 128}
DEEP = {"INTERLEAVED": True, "DEPTH": 2, "STAGES": 3}
ALONE = {"PDL": False}
DIRECT = {"TOP_K": 8}
EARLY = {"EARLY": True}
WIDE = {"BLOCK_N": 128, "BLOCK_T": 128, "STAGES": 3, "warps": 8, "NARROW": True}
NARROW = {"BLOCK_T": 64, "NARROW": True}
FUSED = {"FUSED": True}
MIDDLE = {"BLOCK_N": 128, "BLOCK_T": 64, "NARROW": True, "FUSED": True}
TALL = MIDDLE | {"BLOCK_T": 128, "STAGES": 3}
QUARTERED, HIGH = MIDDLE | {"FUSED": False, "STAGES": 3}, TALL | {"FUSED": False, "STAGES": 2}
CLOSE = {"REGISTERS": 168, "STAGES": 3, "STACK": 80}  # what is kept elsewhere costs less than a program less
DOWN = {"PROJECTIONS": 1, "ACTIVATION": -1, "BLOCK_N": 128}
HALF = {"HALF": True}

# (architecture, weights, changes, the tensor core's instruction, most registers, most KiB of shared memory)
CASES: tuple[tuple[int, str, dict[str, Any], str, int, int], ...] = (
    (90, "bf16", PLAIN, "HGMMA", 64, 74),
    (90, "bf16", PLAIN | WIDE, "HGMMA", 255, 146),
    (90, "bf16", PLAIN | DEEP, "HGMMA", 128, 64),
    (90, "bf16", PLAIN | DEEP | {"DEPTH": 3, "K_BLOCKS": 45}, "HGMMA", 128, 96),
    (90, "bf16", PLAIN | DEEP | NARROW, "HGMMA", 168, 100),
    (90, "fp32", FLOAT32, "HGMMA", 128, 60),
    (90, "fp32", FLOAT32 | DEEP, "HGMMA", 128, 60),
    (90, "fp32", FLOAT32 | NARROW, "HGMMA", 224, 100),
    (90, "fp32", FLOAT32 | DOWN | NARROW | {"warps": 8}, "HGMMA", 168, 100),
    (90, "e4m3", BLOCKS | DEEP, "QGMMA", 128, 64),
    (90, "e4m3", BLOCKS | DEEP | {"STAGES": 4}, "QGMMA", 128, 84),
    (90, "e4m3", BLOCKS | DEEP | NARROW, "QGMMA", 248, 100),
    (90, "e4m3", BLOCKS | DOWN | DEEP | {"INTERLEAVED": False, "BLOCK_N": 64}, "QGMMA", 128, 64),
    (90, "e4m3", BLOCKS, "QGMMA", 96, 75),
    (90, "e4m3", BLOCKS | EARLY, "QGMMA", 96, 75),
    (90, "e4m3", BLOCKS | NARROW | {"BLOCK_N": 128, "warps": 8}, "QGMMA", 255, 170),
    (90, "e4m3", BLOCKS | NARROW | {"BLOCK_N": 128, "PROJECTIONS": 1, "ACTIVATION": -1}, "QGMMA", 255, 170),
    (90, "e4m3", BLOCKS | DIRECT | EARLY, "QGMMA", 96, 75),
    (90, "bf16", PLAIN | DIRECT, "HGMMA", 64, 74),
    (90, "bf16", PLAIN | DIRECT | EARLY, "HGMMA", 64, 74),
    (90, "i16", MXFP4, "HGMMA", 104, 43),
    (90, "i16", MXFP4 | DIRECT, "HGMMA", 104, 43),
    (90, "i16", NVFP4, "HGMMA", 72, 23),
    (90, "i16", NVFP4_ROWS, "HGMMA", 72, 23),
    (90, "i16", NVFP4_ROWS | DIRECT | EARLY, "HGMMA", 72, 23),
    (90, "i16", NVFP4_ROWS | DOWN | MIDDLE, "HGMMA", 168, 50),
    (90, "i16", NVFP4_ROWS | INTERLEAVED | TALL | {"STAGES": 4}, "HGMMA", 255, 80),
    (90, "i16", INT4, "HGMMA", 148, 45),
    (90, "i16", MXFP8, "HGMMA", 112, 67),
    (90, "i16", W8A16, "HGMMA", 96, 67),
    (90, "bf16", PLAIN | INTERLEAVED | {"warps": 8}, "HGMMA", 64, 74),
    (90, "bf16", PLAIN | INTERLEAVED | {"warps": 8, "ACTIVATION": FAST_MATH}, "HGMMA", 64, 74),
    (90, "e4m3", BLOCKS | INTERLEAVED | {"warps": 8}, "QGMMA", 80, 75),
    (90, "i16", MXFP4 | INTERLEAVED, "HGMMA", 128, 43),
    (90, "i16", NVFP4 | INTERLEAVED, "HGMMA", 96, 23),
    (90, "i16", MXFP8 | INTERLEAVED, "HGMMA", 128, 67),
    (90, "i16", ROW_GROUPS | FUSED, "HGMMA", 128, 70),
    (90, "i16", ROW_GROUPS | INTERLEAVED | MIDDLE | {"warps": 8, "REGISTERS": 128, "STAGES": 3}, "HGMMA", 128, 84),
    (90, "i16", ROW_GROUPS | {"WORDS": 2} | INTERLEAVED, "HGMMA", 128, 70),
    (90, "i16", ROW_GROUPS | FOUR | DIRECT | HALF, "HGMMA", 144, 74),
    (90, "i16", ROW_GROUPS | FOUR | INTERLEAVED | {"BLOCK_T": 32}, "HGMMA", 184, 90),
    (90, "i16", ROW_GROUPS | {"WORDS": 2} | DOWN | {"BLOCK_T": 32}, "HGMMA", 168, 90),
    (90, "e4m3", CODES_OF_32 | DEEP, "QGMMA", 128, 40),
    (90, "e4m3", CODES_OF_64, "QGMMA", 128, 75),
    (90, "e4m3", CODES_OF_64 | DEEP | NARROW, "QGMMA", 248, 100),
    (90, "e4m3", CODES_OF_64 | NARROW | {"BLOCK_N": 128, "warps": 8}, "QGMMA", 255, 170),
    (90, "e4m3", CODES_OF_128 | INTERLEAVED | {"warps": 8}, "QGMMA", 96, 75),
    (90, "e4m3", CODES_OF_128 | DEEP | NARROW, "QGMMA", 255, 100),
    (90, "i16", INT4 | INTERLEAVED, "HGMMA", 168, 45),
    (90, "i16", ZEROS, "HGMMA", 148, 45),
    (90, "i16", ZEROS | FOUR, "HGMMA", 176, 54),
    (90, "i16", ZEROS | INTERLEAVED | HALF, "HGMMA", 168, 45),
    (90, "i16", ZEROS | DIRECT | HALF, "HGMMA", 148, 45),
    (90, "i16", INT8, "HGMMA", 148, 69),
    (90, "i16", INT8 | FOUR | INTERLEAVED, "HGMMA", 168, 71),
    (90, "i16", INT8 | HALF, "HGMMA", 148, 69),
    (90, "i16", MXFP4 | INTERLEAVED | FUSED, "HGMMA", 168, 43),
    (90, "i16", MXFP4 | INTERLEAVED | MIDDLE | CLOSE, "HGMMA", 168, 66),
    (90, "i16", MXFP4 | DOWN | MIDDLE | CLOSE, "HGMMA", 168, 66),
    (90, "i16", MXFP4 | INTERLEAVED | TALL, "HGMMA", 255, 113),
    (90, "i16", MXFP4 | DOWN | TALL, "HGMMA", 255, 113),
    (90, "i16", NVFP4 | INTERLEAVED | TALL | {"STAGES": 4}, "HGMMA", 255, 80),
    (90, "i16", NVFP4 | DOWN | MIDDLE, "HGMMA", 168, 50),
    (90, "i16", ZEROS | INTERLEAVED | FUSED | CLOSE | {"BLOCK_T": 32}, "HGMMA", 168, 58),
    (90, "i16", ZEROS | INTERLEAVED | QUARTERED | {"REGISTERS": 168}, "HGMMA", 168, 68),
    (90, "i16", ZEROS | INTERLEAVED | MIDDLE | HALF, "HGMMA", 255, 90),
    (90, "i16", ZEROS | INTERLEAVED | TALL, "HGMMA", 255, 114),
    (90, "i16", INT8 | INTERLEAVED | TALL | {"STAGES": 2, "STACK": 32}, "HGMMA", 255, 81),
    (90, "i16", INT8 | INTERLEAVED | MIDDLE | {"STAGES": 3}, "HGMMA", 255, 84),
    (90, "i16", INT8 | DOWN | MIDDLE | {"STAGES": 3, "HALF": True}, "HGMMA", 255, 84),
    (90, "i16", W8A16 | INTERLEAVED | MIDDLE | {"warps": 8, "REGISTERS": 128, "STAGES": 3}, "HGMMA", 128, 84),
    (90, "i16", MXFP8 | DOWN | MIDDLE | {"warps": 8, "REGISTERS": 128, "STAGES": 3}, "HGMMA", 128, 84),
    (90, "i16", MXFP4 | INTERLEAVED | HALF, "HGMMA", 128, 43),
    (90, "i16", MXFP4 | DIRECT | HALF, "HGMMA", 112, 43),
    (90, "i16", MXFP4 | INTERLEAVED | MIDDLE | CLOSE | HALF, "HGMMA", 168, 66),
    (90, "i16", MXFP4 | DOWN | MIDDLE | CLOSE | HALF, "HGMMA", 168, 66),
    (90, "i16", MXFP4 | INTERLEAVED | TALL | HALF, "HGMMA", 255, 113),
    (90, "i16", NVFP4 | INTERLEAVED | HALF, "HGMMA", 96, 23),
    (90, "i16", NVFP4 | INTERLEAVED | TALL | {"STAGES": 4} | HALF, "HGMMA", 255, 80),
    (90, "i16", W8A16 | INTERLEAVED | MIDDLE | {"warps": 8, "REGISTERS": 128, "STAGES": 3} | HALF, "HGMMA", 128, 84),
    (90, "i16", MXFP8 | DOWN | MIDDLE | {"warps": 8, "REGISTERS": 128, "STAGES": 3} | HALF, "HGMMA", 128, 84),
    (90, "fp16", PLAIN | {"ROW_SCALE": True} | HALF, "HGMMA", 64, 74),
    (90, "i16", Q4_K | INTERLEAVED | FUSED | {"BLOCK_T": 32}, "HGMMA", 255, 70),
    (90, "i16", Q5_K | INTERLEAVED | FUSED | {"BLOCK_T": 32}, "HGMMA", 255, 96),
    (90, "i16", Q4_K | INTERLEAVED | MIDDLE | {"STAGES": 4}, "HGMMA", 255, 109),
    (90, "i16", Q5_K | DOWN | MIDDLE | {"STAGES": 3}, "HGMMA", 255, 96),
    (90, "i16", Q4_1 | INTERLEAVED | QUARTERED | {"REGISTERS": 168, "STACK": 48}, "HGMMA", 168, 90),
    (90, "i16", Q4_K, "HGMMA", 184, 50),
    (90, "i16", Q4_K | DIRECT, "HGMMA", 184, 50),
    (90, "i16", Q4_K | INTERLEAVED, "HGMMA", 184, 49),
    (90, "i16", Q4_0 | INTERLEAVED, "HGMMA", 168, 45),
    (90, "i16", Q4_1, "HGMMA", 184, 58),
    (90, "i16", Q5_1 | INTERLEAVED, "HGMMA", 192, 104),
    (90, "i16", Q5_K | INTERLEAVED, "HGMMA", 192, 104),
    (90, "i16", Q5_K | DOWN | {"BLOCK_T": 32}, "HGMMA", 255, 120),
    (90, "i16", Q6_K | INTERLEAVED, "HGMMA", 128, 52),
    (90, "i16", Q6_K | DIRECT | HALF, "HGMMA", 128, 52),
    (90, "i16", Q3_K | INTERLEAVED, "HGMMA", 128, 52),
    (90, "i16", Q3_K | INTERLEAVED | HIGH | {"STAGES": 4}, "HGMMA", 255, 94),
    (90, "i16", IQ3_S | INTERLEAVED, "HGMMA", 192, 104),
    (90, "i16", IQ3_S | DOWN | HIGH | HALF, "HGMMA", 255, 88),
    (90, "i16", IQ2_XS | INTERLEAVED, "HGMMA", 128, 60),
    (90, "i16", IQ2_XS | DIRECT | HALF, "HGMMA", 128, 60),
    (90, "i16", IQ2_XS | INTERLEAVED | HIGH | {"STAGES": 4}, "HGMMA", 255, 100),
    (90, "i16", Q8_0 | DOWN, "HGMMA", 168, 104),
    (90, "i16", Q4_0 | INTERLEAVED | QUARTERED | {"REGISTERS": 168}, "HGMMA", 168, 68),
    (90, "i16", INT4 | DOWN | QUARTERED | {"REGISTERS": 168}, "HGMMA", 168, 68),
    (90, "i16", ZEROS | FOUR | INTERLEAVED | QUARTERED | {"REGISTERS": 168, "HALF": True}, "HGMMA", 168, 76),
    (90, "i16", Q8_0 | INTERLEAVED | QUARTERED, "HGMMA", 184, 84),
    (90, "i16", Q8_0 | INTERLEAVED | HIGH, "HGMMA", 255, 84),
    (90, "i16", INT8 | FOUR | DOWN | HIGH | HALF, "HGMMA", 255, 88),
    (90, "i16", Q6_K | INTERLEAVED | HIGH | {"STAGES": 4}, "HGMMA", 255, 94),
    (90, "i16", Q2_K | INTERLEAVED | {"BLOCK_N": 64}, "HGMMA", 120, 50),
    (90, "i16", Q2_K | INTERLEAVED | {"REGISTERS": 168, "STAGES": 3}, "HGMMA", 168, 50),
    (90, "i16", Q2_K | DOWN | EIGHT_WARPS | {"BLOCK_T": 32, "REGISTERS": 128}, "HGMMA", 128, 100),
    (90, "i16", Q2_K | INTERLEAVED | EIGHT_WARPS | NARROW | {"STAGES": 3}, "HGMMA", 208, 120),
    (90, "i16", Q2_K | DIRECT | INTERLEAVED | {"BLOCK_N": 64}, "HGMMA", 120, 50),
    (90, "i16", IQ1_S | INTERLEAVED | {"BLOCK_N": 64}, "HGMMA", 128, 50),
    (90, "i16", IQ1_S | DOWN | {"REGISTERS": 168, "STAGES": 3, "STACK": 16}, "HGMMA", 168, 50),
    (90, "i16", IQ1_S | INTERLEAVED | EIGHT_WARPS | NARROW | {"STAGES": 3}, "HGMMA", 208, 120),
    (90, "i16", Q3_LANES | INTERLEAVED | {"BLOCK_N": 64}, "HGMMA", 128, 56),
    (90, "i16", Q3_LANES | DIRECT | DOWN | {"BLOCK_N": 64}, "HGMMA", 128, 56),
    (90, "i16", Q3_LANES | INTERLEAVED | {"REGISTERS": 168, "STAGES": 3}, "HGMMA", 168, 58),
    (90, "i16", Q3_LANES | DOWN | EIGHT_WARPS | NARROW | {"STAGES": 3}, "HGMMA", 208, 128),
    (90, "i16", TQ2_0 | INTERLEAVED | {"REGISTERS": 128, "STAGES": 3}, "HGMMA", 128, 46),
    (90, "i16", TQ2_0 | DIRECT | INTERLEAVED | {"BLOCK_N": 64}, "HGMMA", 96, 50),
    (90, "i16", LOOKED_UP, "HGMMA", 184, 80),
    (90, "i16", LOOKED_UP | DIRECT | HALF, "HGMMA", 184, 80),
    (90, "i16", LOOKED_UP | FOUR | INTERLEAVED, "HGMMA", 200, 115),
    (80, "bf16", PLAIN | ALONE, "HMMA", 128, 74),
    (80, "fp32", FLOAT32 | ALONE, "HMMA", 168, 74),
    (80, "i16", ZEROS | ALONE, "HMMA", 168, 50),
    (80, "i16", INT8 | ALONE | HALF, "HMMA", 168, 90),
    (80, "i16", Q4_K | ALONE, "HMMA", 188, 50),
    (80, "i16", Q5_K | ALONE | INTERLEAVED, "HMMA", 255, 100),
    (80, "i16", Q6_K | ALONE, "HMMA", 168, 50),
    (80, "i16", Q8_0 | ALONE | {"STAGES": 3}, "HMMA", 184, 90),
    (80, "i16", INT4 | ALONE | INTERLEAVED | QUARTERED, "HMMA", 192, 60),
    (80, "i16", Q8_0 | ALONE | DOWN | QUARTERED, "HMMA", 200, 90),
    (80, "i16", LOOKED_UP | ALONE | INTERLEAVED | {"warps": 8}, "HMMA", 200, 90),
    (80, "i16", Q2_K | ALONE | INTERLEAVED | {"STAGES": 3}, "HMMA", 216, 50),
    (80, "i16", IQ1_S | ALONE | DOWN | EIGHT_WARPS | {"BLOCK_T": 32, "STAGES": 2}, "HMMA", 208, 50),
    (80, "i16", Q3_LANES | ALONE | {"STAGES": 2}, "HMMA", 255, 60),
    (80, "bf16", PLAIN | ALONE | INTERLEAVED, "HMMA", 128, 74),
    (80, "i16", MXFP4 | ALONE, "HMMA", 168, 50),
    (80, "i16", MXFP4 | ALONE | INTERLEAVED | HALF, "HMMA", 168, 50),
    (80, "i16", NVFP4 | ALONE | HALF, "HMMA", 168, 50),
    (80, "i16", NVFP4_ROWS | ALONE, "HMMA", 168, 50),
    (80, "i16", MXFP8 | ALONE | HALF, "HMMA", 168, 75),
    (80, "i16", INT4 | ALONE, "HMMA", 168, 50),
    (100, "bf16", PLAIN, "UTC", 128, 90),
    (100, "fp32", FLOAT32, "UTC", 128, 90),
    (100, "e4m3", BLOCKS, "UTC", 168, 90),
    (100, "e4m3", CODES_OF_64, "UTC", 168, 90),
    (100, "i16", ROW_GROUPS | FOUR, "UTC", 168, 90),
    (100, "i16", MXFP4, "UTC", 168, 90),
    (100, "i16", MXFP4 | HALF, "UTC", 168, 90),
    (100, "i16", NVFP4 | HALF, "UTC", 168, 90),
    (100, "i16", NVFP4_ROWS, "UTC", 168, 90),
    (100, "i16", ZEROS, "UTC", 168, 90),
    (100, "i16", INT8, "UTC", 168, 110),
    (100, "i16", Q4_K, "UTC", 192, 90),
    (100, "i16", Q5_K, "UTC", 192, 110),
    (100, "i16", Q6_K, "UTC", 168, 90),
    (100, "i16", Q8_0, "UTC", 168, 110),
    (100, "i16", Q2_K | INTERLEAVED, "UTC", 208, 90),
    (100, "i16", Q3_LANES | INTERLEAVED | EIGHT_WARPS, "UTC", 208, 110),
    (100, "i16", LOOKED_UP | INTERLEAVED | {"warps": 8}, "UTC", 200, 110),
)

_PROGRAM = """
import json, re, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from collegium.kernels.grouped_gemm import grouped_gemm_kernel as kernel
from product_sources import product_source

tool = triton.__path__[0] + "/backends/nvidia/bin/cuobjdump"
pointers = {"tokens.scale": "fp32", "tokens.sums": "fp16", "weights.row_scale": "fp32", "weights.bias": "bf16"}
pointers |= {"out": "bf16", "source": "i64", "expert_offsets": "i64", "tile_expert": "i32", "tile_row": "i64"}
even = {"n_out", "k_in", "tokens.stride", "strides.row", "strides.k_block", "strides.matrix"}
found = []
for arch, weight, constants, warps, most in json.load(sys.stdin):
    stored = {"e4m3": "fp8e4nv"}.get(weight, weight)
    tokens = "fp16" if constants.pop("HALF", False) else "fp32" if weight == "fp32" else "bf16"
    types = {name: "*" + kind for name, kind in pointers.items()}
    types |= {"weights.packed": "*" + stored, "tokens.x": "*fp8e4nv" if weight == "e4m3" else "*" + tokens}
    types["weights.scale"] = "*fp32" if constants["SCALE"] in (1, 4) else "*i32"
    if constants["WEIGHT"] == 12:
        types["weights.row_scale"] = "*i32"
    if constants["TOP_K"]:  # nothing is sorted: ids, of either width, stand for all lists
        lists = ("source", "expert_offsets", "tile_expert", "tile_row")
        types |= dict.fromkeys(lists, "*i32" if weight == "bf16" else "*i64")
    source = product_source(kernel, constants, types, even)
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps, "maxnreg": most})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout
        sass = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True).stdout
    registers, stack = map(int, re.search(r"REG:(\\d+) STACK:(\\d+)", usage).groups())
    known = r"\\b(HGMMA|QGMMA|HMMA|UTC[A-Z]+|LDGSTS|LDL|STL|HADD2|HFMA2|HMUL2|ACQBULK|PREEXIT|MUFU[.]TANH)\\b"
    codes = sorted(set(re.findall(known, sass)))
    last = sass.rfind("GMMA")
    jump = sass.find("BRA 0x", last)
    waits = "WARPGROUP.DEPBAR.LE gsb0, 0x0" in sass[last:jump]
    # What is read before the wait for the kernel before: a token tile, past the caches of the multiprocessor.
    before = sass[:sass.find("ACQBULK")]
    early = [len(re.findall(pattern, before)) for pattern in (r"LDG\\.E\\S*\\.STRONG\\.GPU", r"\\bLDG|LDGSTS|UTMA")]
    # Lanes ask each other for the words that each of them loaded, which no layout of one number would tell apart.
    code = built.asm["ptx"]
    asked = set(re.findall(r"shfl\\.sync\\.idx\\.b32 \\w+, (%r\\d+),", code))
    straight = bool(asked) and asked <= set(re.findall(r"ld\\.global\\.b32 \\{ (%r\\d+) \\}", code))
    found.append([registers, stack, built.metadata.shared, codes, waits, early, straight])
print("RESULT" + json.dumps(found))
"""


_LISTS = dict.fromkeys(("row_map", "deltas", "rank_count", "row_width"))
_LISTS["FORMAT"] = {
    "PermutationFormat": {"top_k": 8, "block_e": 256, "block_t_a": 16, "block_t_b": 64, "element_bytes": 0}
}
_LARGE_LIST = {
    "FORMAT": {"PermutationFormat": {"top_k": 8, "block_e": 256, "block_t_a": 160, "block_t_b": 0, "element_bytes": 0}},
    "tile_expert_b": None,
    "tile_row_b": None,
}
_COUNT = {"BLOCK": 128, "TOP_K": 8, "BLOCK_E": 256}
_UNWEIGHTED = {"weights": None, "weights_by_row": None}
_ROUTING = {"score": 2, "top_k": 8, "block_k": 8, "renormalize": True}
_GROUPS = {"block_g": 8, "block_s": 32, "top": 4, "top2_sum": True}
_PLAIN_ROUTE = {
    "ROUTING": {"RoutingFormat": _ROUTING},
    "GROUPS": {"ExpertGroups": _GROUPS},
    "token_ids": None,
    "hash_table": None,
}
_ROUTE = _PLAIN_ROUTE | {"expert_scale": None}
_SQRT_SOFTPLUS = {
    "ROUTING": {"RoutingFormat": _ROUTING | {"score": 3}},
    "GROUPS": {"ExpertGroups": _GROUPS | {"block_g": 1, "block_s": 1024, "top": 0}},
}
_MIXER = {
    "ROUTING": {"RoutingFormat": {"score": 4, "top_k": 2, "block_k": 2, "renormalize": False}},
    "GROUPS": {"ExpertGroups": {"block_g": 1, "block_s": 32, "top": 0, "top2_sum": True}},
    "bias": None,
}
_SUM = {"TOP_K": 8, "BLOCK": 1024, "UNSORTED": False}
_COLUMNS = {"TOP_K": 0, "BLOCK_E": 256, "BLOCK": 1024}
_ROWS = {"BLOCK_R": 2, "BLOCK_C": 1024}
_ALL_ROWS = {"valid_rows": None}
_CODES = {
    "group": 128, "power_of_two": False, "e8m0": False, "reorder": False, "software_rounding": False,
}  # fmt: skip
_STATIC = _ROWS | {"FORMAT": {"CodeFormat": _CODES}}
_VALID_ROWS = _STATIC | {"static_scale": None}
_E4M3 = _VALID_ROWS | _ALL_ROWS
_WHOLE_ROW = {"FORMAT": {"CodeFormat": _CODES | {"group": 8192}}, "BLOCK_C": 8192, "BLOCK_R": 1}
_MXFP8 = {"FORMAT": {"CodeFormat": _CODES | {"group": 32, "power_of_two": True, "e8m0": True}}}
_E8M0 = {"FORMAT": {"CodeFormat": _CODES | {"power_of_two": True, "e8m0": True}}}
_WORD_CODES = _CODES | {"power_of_two": True, "e8m0": True, "words": True}
_WORDS = _ROWS | {
    "FORMAT": {"CodeFormat": _WORD_CODES},
    "PROJ": {"Projections": {"count": 2, "activation": 0, "has_limit": True}},
    "bounds": {"ActivationBounds": {"limit": 7.0, "alpha": 1.0, "gate_bound": 1.0, "up_bound": 1.0}},
}
_MX_WORDS = {"FORMAT": {"CodeFormat": _WORD_CODES | {"group": 32}}}
_SLOTS = {"TOP_K": 8, "BLOCK_K": 8, "BLOCK_C": 4096}
_TO_SLOTS = _SLOTS | {"FORMAT": {"CodeFormat": _CODES}, "static_scale": None}
_REORDERED_ROW = {"FORMAT": {"CodeFormat": _CODES | {"group": 8192, "reorder": True}}, "BLOCK_C": 8192}
_COPY = _SLOTS | {"BLOCK_G": 32}
_BY_ROW = {"scale_stride": None}  # scales are not transposed
_CODES_ALONE = _BY_ROW | {"scales": None, "out_scales": None}
_NVFP4 = {"BLOCK_C": 8192, "index": None, "weights": None, "valid_rows": None, "SOFTWARE_ROUNDING": False}
_DECODED = {"BLOCK_C": 8192, "index": None, "weights": None, "valid_rows": None}
_OF_ROW = {"expert_scales": None, "expert_offsets": None, "BLOCK_E": 16}
_DECIDE = {"BLOCK": 1024, "BLOCK_E": 256, "BLOCK_S": 128, "ROUNDS": 1, "FIRST_MISS": 0, "GROUPS": 1, "MARKED": False}
_TWO_GROUPS = {"ROUNDS": 5, "FIRST_MISS": 1, "GROUPS": 2, "BLOCK_S": 64}
# Small kernels: (file, kernel, types that are not the rule, constants, warps, most registers); FP8 from sm_90 on.
_HALVES = {"halves": "fp16", "scales": "fp32", "sums": "fp16"}
SMALL: tuple[tuple[str, str, dict[str, str], dict[str, Any], int, int], ...] = (
    ("permute", "permute_kernel", {}, {"BLOCK": 32} | _UNWEIGHTED | _LISTS, 1, 96),
    ("permute", "permute_kernel", {"ids": "i32"}, {"BLOCK": 256} | _LISTS, 8, 80),
    ("permute", "permute_kernel", {}, {"BLOCK": 128} | _LISTS, 4, 80),
    ("permute", "count_kernel", {}, _COUNT, 4, 80),
    ("permute", "scatter_kernel", {}, {"BLOCK": 128, "BLOCK_P": 32} | _LISTS, 4, 128),
    ("permute", "scatter_kernel", {}, {"BLOCK": 256, "BLOCK_P": 64} | _LISTS, 8, 128),
    ("permute", "scatter_kernel", {}, {"BLOCK": 256, "BLOCK_P": 64} | _LISTS | _LARGE_LIST, 8, 128),
    ("columns", "columns_kernel", {"out": "bf16"}, _COLUMNS, 4, 48),
    ("columns", "columns_kernel", {"out": "fp16", "x": "fp16"}, _COLUMNS | {"TOP_K": 8}, 4, 48),
    ("columns", "halves_kernel", _HALVES, {"BLOCK": 4096}, 8, 48),
    ("columns", "halves_kernel", _HALVES | {"x": "fp16"}, {"valid_rows": None, "BLOCK": 16384}, 16, 64),
    ("weighted_sum", "weighted_sum_kernel", {}, _SUM, 4, 80),
    ("weighted_sum", "weighted_sum_kernel", {"slots": "i32"}, _SUM | {"UNSORTED": True, "BLOCK": 256}, 1, 80),
    ("route", "route_kernel", {}, _ROUTE, 1, 128),
    ("route", "route_kernel", {}, _ROUTE | _SQRT_SOFTPLUS, 4, 128),
    ("route", "route_kernel", {}, _PLAIN_ROUTE, 1, 128),
    ("route", "route_kernel", {}, _ROUTE | _MIXER, 1, 96),
    ("route", "widen_kernel", {"weights": "bf16", "out_ids": "i64", "out_weights": "fp32"},
     {"TOP_K": 8, "BLOCK_K": 16, "SHARED": 1}, 1, 64),
    ("quantize", "cast_kernel", {"codes": "bf16"}, _ROWS | _ALL_ROWS, 4, 64),
    ("quantize", "e4m3_kernel", {"codes": "fp8e4nv"}, _E4M3, 4, 80),
    ("quantize", "e4m3_kernel", {"codes": "fp8e4nv"}, _VALID_ROWS, 4, 80),
    ("quantize", "e4m3_kernel", {"codes": "fp8e4nv"}, _E4M3 | _WHOLE_ROW, 16, 80),
    ("quantize", "e4m3_kernel", {"codes": "fp8e4nv", "scales": "u8"}, _E4M3 | _MXFP8, 4, 80),
    ("quantize", "e4m3_kernel", {"codes": "fp8e4nv", "scales": "u8"}, _E4M3 | _E8M0, 4, 80),
    ("quantize", "e4m3_kernel", {"codes": "fp8e4nv"}, _STATIC | _ALL_ROWS | _WHOLE_ROW, 16, 80),
    ("quantize", "e4m3_to_slots_kernel", {"codes": "fp8e4nv"}, _TO_SLOTS | _BY_ROW, 4, 80),
    ("quantize", "e4m3_to_slots_kernel", {"codes": "fp8e4nv"}, _TO_SLOTS, 4, 80),
    ("quantize", "e4m3_to_slots_kernel", {"codes": "fp8e4nv"}, _TO_SLOTS | _REORDERED_ROW | _BY_ROW, 8, 80),
    ("quantize", "copy_to_slots_kernel", {"out": "bf16"}, _COPY | _CODES_ALONE, 4, 48),
    ("quantize", "copy_to_slots_kernel", {"x": "u8", "out": "u8", "out_scales": "fp32"}, _COPY | _BY_ROW, 4, 64),
    ("quantize", "activated_words_kernel", {"codes": "fp8e4nv", "scales": "i32"}, _WORDS, 4, 80),
    ("quantize", "activated_words_kernel", {"codes": "fp8e4nv", "scales": "i32"}, _WORDS | _MX_WORDS, 4, 80),
    ("quantize", "mxfp8_decoded_kernel", {"numbers": "bf16"}, _ROWS | _ALL_ROWS, 4, 64),
    ("quantize", "nvfp4_kernel", {"codes": "u8", "scales": "fp8e4nv"}, _NVFP4 | {"static_scale": None}, 16, 96),
    ("quantize", "nvfp4_kernel", {"codes": "u8", "scales": "fp8e4nv"}, _NVFP4, 16, 96),
    ("quantize", "nvfp4_decoded_kernel", {"numbers": "bf16"}, _DECODED | _OF_ROW | {"static_scale": None}, 16, 96),
    ("quantize", "nvfp4_decoded_kernel", {"numbers": "bf16"}, _DECODED | _OF_ROW, 16, 96),
    ("quantize", "nvfp4_decoded_kernel", {"numbers": "bf16"}, _DECODED | {"static_scale": None, "BLOCK_E": 256}, 16,
     96),
    ("paging", "mark_kernel", {}, {"BLOCK": 1024}, 4, 64),
    ("paging", "decide_kernel", {}, _DECIDE, 8, 64),
    ("paging", "decide_kernel", {"ids": "i32"}, _DECIDE | _TWO_GROUPS, 8, 64),
    ("paging", "decide_kernel", {}, _DECIDE | {"MARKED": True, "BLOCK_S": 512, "BLOCK_E": 512}, 8, 128),
    ("paging", "place_kernel", {}, {"BLOCK": 1024, "ROUNDS": 8}, 4, 80),
    ("paging", "copy_kernel", {}, {"BLOCK_SEGMENTS": 8}, 4, 64),
)  # fmt: skip
_POINTERS = {
    **dict.fromkeys(("source", "slots", "expert_offsets", "tile_row_a", "tile_row_b", "ids"), "i64"),
    **dict.fromkeys(("index", "valid_rows"), "i64"),
    **dict.fromkeys(("token_ids", "hash_table", "expert_of"), "i64"),
    **dict.fromkeys(("tile_expert_a", "tile_expert_b", "histograms", "order"), "i32"),
    **dict.fromkeys(("weights", "weights_by_row", "scales", "global_scales", "logits", "bias"), "fp32"),
    **dict.fromkeys(("expert_scale", "expert_scales"), "fp32"),
    **dict.fromkeys(("needed", "slot_ids", "place", "copy_expert", "copy_slot", "start", "stop"), "i32"),
    "segments": "i64",
    **dict.fromkeys(("x", "rows", "shared", "out"), "bf16"),
}

_SMALL_PROGRAM = """
import importlib, json, re, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from collegium.kernels import arguments

tool = triton.__path__[0] + "/backends/nvidia/bin/cuobjdump"
FLOATS = "eps", "floor", "scale", "jitter", "static_scale"
TABLES = {name: "*i32" for name in arguments.PagingTables._fields}
TABLES |= {"scores": "*fp32", "keys": "*fp32", "counters": "*i64"}
TUPLES = {"tables": arguments.PagingTables(**TABLES), "update": arguments.ScoreUpdate(*["fp32"] * 4)}
even = {"columns", "padded_cols", "x_stride", "up_offset", "width", "row_stride", "shared_stride", "logits_stride"}
found = []
for arch, file, name, pointers, constants, warps in json.load(sys.stdin):
    kernel = getattr(importlib.import_module("collegium.kernels." + file), name)
    # A group of compile-time arguments is {type: fields}.
    for key, value in constants.items():
        if isinstance(value, dict):
            ((group, fields),) = value.items()
            constants[key] = getattr(arguments, group)(**fields)
    types = {n: "*" + kind for n, kind in pointers.items()} | dict.fromkeys(FLOATS, "fp32")
    if file == "quantize":
        types["rows"] = "i32"
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else TUPLES.get(n) or types.get(n, "i32") for n in names}
    aligned = [i for i, n in enumerate(names) if str(signature[n]).startswith("*") or n in even]
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    options = {"num_warps": warps, "enable_fp_fusion": file not in ("route", "weighted_sum", "paging")}
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(built.asm["cubin"])
        binary.flush()
        usage = subprocess.run([tool, "-res-usage", binary.name], capture_output=True, text=True).stdout
        sass = subprocess.run([tool, "-sass", binary.name], capture_output=True, text=True).stdout
    registers, stack = map(int, re.search(r"REG:(\\d+) STACK:(\\d+)", usage).groups())
    codes = re.findall(r"\\b(LDL|STL|FFMA|ACQBULK|PREEXIT|LDG[.A-Z0-9]*|STG[.A-Z0-9]*)\\b", sass)
    found.append([registers, stack, codes])
print("RESULT" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[int, Any]:
    asked = []
    for arch, weight, changes, *_ in CASES:
        constants = BASE | {name: value for name, value in changes.items() if name != "STACK"}
        asked.append([arch, weight, constants, constants.pop("warps", 4), constants.pop("REGISTERS", None)])
    return compile_selected(request, "test_instructions_registers_and_shared_memory", _PROGRAM, asked)


def facts_of(arch: int, _: str, changes: dict[str, Any], *__: Any) -> list[Any]:
    """What ``make test`` compiles at least once: each kind of weights, machine, flag and large tile."""
    tile = (changes.get("BLOCK_N"), changes.get("BLOCK_T"), "FUSED" in changes)
    flags = [name for name in ("HALF", "INTERLEAVED", "EARLY", "TOP_K", "DEPTH", "PROJECTIONS") if name in changes]
    return [arch, (changes.get("WEIGHT"), changes.get("SCALE")), tile, *flags]


@grid(CASES, facts_of, lambda arch, weight, *_: f"sm{arch}-{weight}")
def test_instructions_registers_and_shared_memory(compiled: dict[int, Any], index: int) -> None:
    arch, weight, changes, wanted, most_registers, most_shared = CASES[index]
    registers, stack, shared, codes, waits, (fresh, any_kind), straight = compiled[index]
    assert any(code.startswith(wanted) for code in codes), codes
    assert "LDGSTS" in codes, "weights are not prefetched"
    assert stack <= changes.get("STACK", 0)
    assert stack or not {"LDL", "STL"} & set(codes), "registers spill"
    assert registers <= most_registers
    assert shared <= most_shared * 1024
    # The kernel waits for the one before it and lets the next one in, where the machine can.
    assert {"ACQBULK", "PREEXIT"} <= set(codes) if arch == 90 else arch == 100 or "ACQBULK" not in codes
    if arch == 90:
        # Expert, first row and the end of the expert; unsorted rows have an id alone.
        assert any_kind == fresh == (0 if not changes.get("EARLY") else 1 if changes.get("TOP_K") else 3)
    # A product that reads decoded weights from registers ends before the next step decodes into them.
    assert weight not in ("i16", "u8") or wanted != "HGMMA" or waits
    assert ("MUFU.TANH" in codes) == (changes.get("ACTIVATION", 0) >= FAST_MATH)
    assert straight == (changes.get("WEIGHT") == 12)
    # Codes become numbers two at a time, but for those that are looked up.
    assert weight != "i16" or changes.get("WEIGHT") == 12 or {"HADD2", "HFMA2", "HMUL2"} & set(codes)


FROM_SM89 = "activated_words_kernel", "e4m3_kernel", "e4m3_to_slots_kernel", "nvfp4_kernel"
SMALL_CASES = [(arch, *case) for arch in (80, 90, 100) for case in SMALL if arch > 80 or case[1] not in FROM_SM89]


@pytest.fixture(scope="module")
def small_compiled(request: pytest.FixtureRequest) -> dict[int, Any]:
    asked = []
    for arch, file, name, types, constants, warps, _ in SMALL_CASES:
        asked.append([arch, file, name, _POINTERS | types, constants | {"PDL": arch >= 90}, warps])
    return compile_selected(request, "test_small_kernels_do_not_spill", _SMALL_PROGRAM, asked)


@grid(SMALL_CASES, lambda arch, _, name, *__: [arch, name], lambda arch, _, name, *__: f"sm{arch}-{name}")
def test_small_kernels_do_not_spill(small_compiled: dict[int, Any], index: int) -> None:
    arch, _, name, *_, most_registers = SMALL_CASES[index]
    registers, stack, codes = small_compiled[index]
    assert stack == 0
    assert not {"LDL", "STL"} & set(codes), "registers spill"
    assert registers <= most_registers
    # A kernel waits for the one before it, lets the next one in, and only then touches memory.
    assert codes[:2] == ["ACQBULK", "PREEXIT"] if arch >= 90 else "ACQBULK" not in codes
    if name == "weighted_sum_kernel":
        assert "FFMA" not in codes, "a product is added unrounded"
    if name == "e4m3_to_slots_kernel":
        # Slots, which the kernel before it writes, are read after a second wait, and not from the L1 cache.
        slots = [place for place, code in enumerate(codes) if code.startswith("LDG.E.64.STRONG")]
        waits = [place for place, code in enumerate(codes) if code == "ACQBULK"]
        assert len(slots) == 1
        assert slots[0] > waits[1]
    if name in (
        "weighted_sum_kernel",
        "cast_kernel",
        "e4m3_kernel",
        "e4m3_to_slots_kernel",
        "copy_to_slots_kernel",
        "copy_kernel",
    ):
        assert any(code.startswith("LDG") and ".128" in code for code in codes), codes
