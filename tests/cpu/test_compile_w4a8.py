"""What the compiler makes of four-bit weights and E4M3 rows: operands decoded in registers, few instructions.

No GPU is needed; the compiler runs in a process of its own (see test_compile.py).
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from compiling import compile_selected, compiler_release, grid, skip_other_compilers

skip_other_compilers()

BASE = {
    "WEIGHT": 6, "X_SCALE": 2, "BIAS": False, "GATHER": True, "PROJECTIONS": 2, "ACTIVATION": 0, "HAS_LIMIT": False,
    "K_BLOCKS": 32, "ASM": True, "WARPS": 4, "BLOCK_N": 64, "BLOCK_T": 16, "BLOCK_K": 128, "GROUP_T": 8, "DEPTH": 1,
    "STAGES": 4,
    "NARROW": False, "TOP_K": 0, "EARLY": False, "PDL": False,
}  # fmt: skip
INT4, NVFP4, SCALED = {"WEIGHT": 7}, {"WEIGHT": 8}, {"WEIGHT": 9}
PAIRS, FLOATS = {"WEIGHT": 10}, {"WEIGHT": 11}
GROUPS, ACROSS = {"X_SCALE": 1}, {"X_SCALE": 3}
DOWN = {"PROJECTIONS": 1, "ACTIVATION": -1, "GATHER": False, "BIAS": True, "EARLY": True, "PDL": True}
TALL = {"BLOCK_N": 128}
PAIRED = {"BLOCK_T": 64, "NARROW": True, "DEPTH": 2, "STAGES": 3}
OAI = {"ACTIVATION": 2, "BIAS": True, "HAS_LIMIT": True}
WIDE = {"BLOCK_N": 128, "BLOCK_T": 128, "WARPS": 8, "STAGES": 3}

# (architecture, changes, most instructions in a step of the K loop, most registers, most KiB of shared memory)
CASES: tuple[tuple[int, dict[str, Any], int, int, int], ...] = (
    (90, {}, 150, 72, 22),
    (90, DOWN, 150, 64, 22),
    (90, {"TOP_K": 8, "PDL": True}, 150, 72, 22),
    (90, TALL, 230, 104, 36),
    (90, {"DEPTH": 2, "STAGES": 3}, 245, 80, 30),
    (90, {"DEPTH": 4, "STAGES": 2}, 430, 96, 34),
    (90, WIDE | {"NARROW": True}, 165, 216, 68),
    (90, TALL | {"BLOCK_T": 64, "NARROW": True, "REGISTERS": 168}, 230, 168, 58),
    (90, TALL | {"BLOCK_T": 128, "NARROW": True}, 230, 255, 90),
    (90, GROUPS, 200, 80, 22),
    (90, ACROSS | WIDE, 275, 240, 68),
    (90, ACROSS | WIDE | DOWN | {"BLOCK_T": 64, "STAGES": 4}, 210, 140, 58),
    (90, ACROSS | TALL | {"BLOCK_T": 64, "STAGES": 4}, 330, 240, 58),
    (90, ACROSS | TALL | PAIRED, 590, 255, 82),
    (90, ACROSS | TALL | PAIRED | OAI | {"K_BLOCKS": 23}, 620, 255, 82),
    (90, ACROSS | TALL | PAIRED | DOWN | {"K_BLOCKS": 23}, 660, 255, 82),
    (90, ACROSS | NVFP4 | WIDE, 350, 255, 92),
    (90, INT4, 215, 72, 22),
    (90, NVFP4, 215, 96, 23),
    (90, NVFP4 | TALL, 340, 128, 37),
    (90, PAIRS, 285, 80, 23),
    (90, PAIRS | TALL | GROUPS, 490, 144, 37),
    (90, PAIRS | {"BLOCK_T": 64}, 400, 255, 48),
    (90, PAIRS | WIDE | {"BLOCK_T": 64} | GROUPS, 470, 255, 62),
    (90, FLOATS, 300, 80, 24),
    (89, {}, 220, 80, 22),
    (100, {}, 400, 96, 32),
    (100, SCALED | TALL | {"BLOCK_T": 64}, 0, 255, 80),
)
# Where Triton 3.9 needs more than 3.6: by index of the case, the bounds of its code.
CASES_OF_39 = {2: (152, 72, 22), 5: (430, 102, 34), 19: (345, 128, 37), 20: (289, 80, 23), 24: (302, 80, 24)}
PRODUCT = {89: "QMMA", 90: "QGMMA", 100: "UTCQMMA"}

_PROGRAM = """
import json, re, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from collegium.kernels.w4a8 import w4a8_kernel as kernel
from product_sources import product_source

tool = triton.__path__[0] + "/backends/nvidia/bin/cuobjdump"
types = {"tokens.x": "*fp8e4nv", "tokens.scale": "*fp32", "tokens.sums": "*u8", "weights.packed": "*u8"}
types |= {"weights.row_scale": "*fp32", "weights.bias": "*bf16", "out": "*bf16"}
types |= {"source": "*i64", "expert_offsets": "*i64", "tile_expert": "*i32", "tile_row": "*i64"}
found = []
for arch, constants, most in json.load(sys.stdin):
    types["weights.scale"] = {7: "*fp32", 9: "*u8", 11: "*fp32"}.get(constants["WEIGHT"], "*i32")
    source = product_source(kernel, constants, types, {"n_out", "tokens.stride"})
    options = {"num_warps": constants["WARPS"], "maxnreg": most}
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout
        sass = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True).stdout
    registers, stack = map(int, re.search(r"REG:(\\d+) STACK:(\\d+)", usage).groups())
    lines = [(int(a, 16), t) for a, t in re.findall(r"/\\*([0-9a-f]{4,})\\*/ +([@A-Z][^;]*);", sass)]
    loops = []
    for at, text in lines:
        jump = re.search(r"BRA .*?0x([0-9a-f]+)", text)
        if jump and int(jump[1], 16) < at:
            body = [t for a, t in lines if int(jump[1], 16) <= a <= at]
            if any("QGMMA" in t or "QMMA" in t for t in body):
                loops.append(body)
    ptx = built.asm["ptx"]
    if "ld.relaxed.cta" in ptx and "griddepcontrol.wait" in ptx:
        assert ptx.index("griddepcontrol.wait") < ptx.index("ld.relaxed.cta"), "scales are read before they are written"
    scaled = "kind::mxf8f6f4.block_scale" in built.asm["ptx"]
    body = min(loops, key=len, default=[])
    found.append([registers, stack, built.metadata.shared, body, [t for _, t in lines], scaled])
print("RESULT" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[int, Any]:
    # What gate and up take behind the loop is more than the loop: these tiles may not have it.
    most = [168 if "REGISTERS" in changes else None for _, changes, *_ in CASES]
    asked = [{k: v for k, v in (BASE | changes).items() if k != "REGISTERS"} for _, changes, *_ in CASES]
    rows = [[case[0], *rest] for case, *rest in zip(CASES, asked, most, strict=True)]
    return compile_selected(request, "test_instructions_registers_and_shared_memory", _PROGRAM, rows)


def ran(compiled: dict[int, Any]) -> list[tuple[Any, Any]]:
    """Each case that was compiled, with what was made of it."""
    return [(CASES[index], found) for index, found in compiled.items()]


def facts_of(arch: int, changes: dict[str, Any], *_: Any) -> list[Any]:
    """What ``make test`` compiles at least once."""
    return [
        arch,
        ("X_SCALE and DEPTH", changes.get("X_SCALE"), changes.get("DEPTH")),
        *((name, changes.get(name)) for name in ("WEIGHT", "X_SCALE", "DEPTH", "BLOCK_N", "BLOCK_T", "PROJECTIONS")),
    ]


@grid(CASES, facts_of, lambda arch, *_: f"sm{arch}")
def test_instructions_registers_and_shared_memory(compiled: dict[int, Any], index: int) -> None:
    arch, _, *bounds = CASES[index]
    if compiler_release() == "3.9":
        bounds = CASES_OF_39.get(index, bounds)
    most_instructions, most_registers, most_shared = bounds
    registers, stack, shared, loop, whole, _ = compiled[index]
    assert any(PRODUCT[arch] in text for text in loop or whole)
    assert any("LDGSTS" in text for text in loop or whole), "weights are not prefetched"
    assert stack == 0
    assert not any(text.split()[0] in ("LDL", "STL") for text in whole), "registers spill"
    assert len(loop) <= most_instructions
    assert registers <= most_registers
    assert shared <= most_shared * 1024


def test_group_scales_bypass_shared_memory(compiled: dict[int, Any]) -> None:
    """Two a thread for each eight rows, from one address a K block; none is copied to shared memory first."""
    found = 0
    for (arch, changes, *_), (*_, loop, _, _) in ran(compiled):
        if arch == 90 and changes.get("X_SCALE") == 3:
            found += 1
            rows = max(int(size) for size in re.findall(r"QGMMA\.64x(\d+)", " ".join(loop)))
            loads = [re.search(r"\[(R\d+)", text) for text in loop if text.split()[0].startswith("LDG.E")]
            assert len(loads) == rows // 4 * changes.get("DEPTH", 1)
            assert len({load[1] for load in loads if load}) == changes.get("DEPTH", 1)
    assert found


def test_group_scale_loads_overlap_products(compiled: dict[int, Any]) -> None:
    """Of two K blocks none is waited for with loads still to start."""
    found = 0
    for (_, changes, *_), (*_, loop, _, _) in ran(compiled):
        if changes.get("X_SCALE") == 3 and changes.get("DEPTH") == 2:
            found += 1
            loads = [i for i, text in enumerate(loop) if text.startswith("LDG.E")]
            waits = [i for i, text in enumerate(loop) if "WARPGROUP.DEPBAR" in text]
            assert len(waits) == 2
            assert min(loads) < waits[0]
            assert max(loads) < waits[1]
    assert found


def test_decoded_weights_stay_in_registers(compiled: dict[int, Any]) -> None:
    for (arch, *_), (_, _, _, loop, _, _) in ran(compiled):
        if arch != 90:
            continue
        moved = [text for text in loop if re.search(r"\b(STS|SHFL|LDSM)\b", text)]
        assert not moved, moved
        products = [text for text in loop if "QGMMA" in text]
        # QGMMA sum, weights, tokens: the weights are a register, not a descriptor.
        assert all(text.split(",")[1].strip().startswith("R") for text in products), products


def test_sm100_tensor_cores_apply_block_scales(compiled: dict[int, Any]) -> None:
    for (arch, changes, *_), (*_, scaled) in ran(compiled):
        assert scaled == (arch == 100 and changes.get("WEIGHT") == 9)


def test_products_end_before_registers_change(compiled: dict[int, Any]) -> None:
    for (arch, *_), (_, _, _, loop, *_) in ran(compiled):
        if arch != 90:
            continue
        last = max(i for i, text in enumerate(loop) if "QGMMA" in text)
        waits = [i for i, text in enumerate(loop) if "WARPGROUP.DEPBAR.LE gsb0, 0x0" in text]
        assert max(waits, default=-1) > last, "the loop ends with a product that still reads its registers"
