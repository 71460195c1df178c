"""What the compiler makes of the large-batch product: copies, products and warps of their own on sm_90, no spills.

No GPU is needed. The compiler runs in a process of its own, because the interpreter of the other tests takes
Triton's place in this one.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from compiling import compile_apart

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)

BASE = {
    "SCALE": 1, "TERMS": 1, "X_SCALE": 1, "ROW_SCALE": False, "BIAS": False, "PARTS": 2, "KIND": 0,
    "HAS_LIMIT": False, "CODES": 0, "ROUND": True, "K_BLOCKS": 56, "BLOCK_T": 128, "BLOCK_K": 128, "GROUP_T": 8,
    "STAGES": 4, "SPECIALIZE": True, "ASM": True, "row_places": None, "PLACED": 0,
}  # fmt: skip
CODES = {"CODES": 1}
DOWN = {"PARTS": 1, "KIND": -1, "K_BLOCKS": 16}
TOKEN = {"SCALE": 0, "X_SCALE": 2, "ROW_SCALE": True}
CHANNEL = {"SCALE": 0, "ROW_SCALE": True, "BIAS": True, "CODES": 2}
PLAIN = {"SCALE": 0, "X_SCALE": 0, "BLOCK_K": 64}
PORTABLE = {"SPECIALIZE": False, "STAGES": 3}
# Weights that were decoded first: rows of a factor for each group of columns.
GROUPS = PLAIN | {"SCALE": 4, "BLOCK_K": 128, "STAGES": 2}
TWO_TERMS = GROUPS | {"BLOCK_K": 64, "TERMS": 2}
ONE, TWO = {"K_BLOCKS": 1}, {"K_BLOCKS": 2}  # steps of the K loop

# (architecture, operands, changes, the tensor core's instruction, most stack bytes)
CASES: tuple[tuple[int, str, dict[str, Any], str, int], ...] = (
    (90, "fp8e4nv", CODES, "QGMMA", 0),
    (90, "fp8e4nv", DOWN, "QGMMA", 0),
    (90, "fp8e4nv", TOKEN, "QGMMA", 0),
    (90, "fp8e4nv", CHANNEL, "QGMMA", 0),
    (90, "bf16", PLAIN, "HGMMA", 0),
    (90, "bf16", PLAIN | DOWN | {"BIAS": True}, "HGMMA", 0),
    (90, "fp8e4nv", CODES | ONE, "QGMMA", 0),
    (90, "fp8e4nv", DOWN | ONE, "QGMMA", 0),
    (90, "fp8e4nv", DOWN | TWO, "QGMMA", 0),
    (90, "fp8e4nv", TOKEN | ONE, "QGMMA", 0),
    (90, "fp8e4nv", CHANNEL | ONE | {"STAGES": 3}, "QGMMA", 0),
    (90, "bf16", PLAIN | ONE, "HGMMA", 0),
    (90, "bf16", PLAIN | DOWN | ONE, "HGMMA", 0),
    (90, "fp16", PLAIN | {"ROW_SCALE": True}, "HGMMA", 0),
    (90, "fp16", PLAIN | DOWN | {"ROW_SCALE": True}, "HGMMA", 0),
    (90, "bf16", GROUPS, "HGMMA", 0),
    (90, "bf16", GROUPS | DOWN | {"BIAS": True}, "HGMMA", 0),
    (90, "bf16", GROUPS | ONE, "HGMMA", 0),
    (90, "fp16", GROUPS | DOWN, "HGMMA", 0),
    (90, "bf16", TWO_TERMS, "HGMMA", 0),
    (90, "fp16", TWO_TERMS | DOWN, "HGMMA", 0),
    (90, "bf16", TWO_TERMS | {"BLOCK_K": 32, "STAGES": 4}, "HGMMA", 0),
    (80, "bf16", PLAIN | PORTABLE, "HMMA", 256),
    (80, "bf16", PLAIN | PORTABLE | ONE, "HMMA", 256),
    (100, "bf16", PLAIN | PORTABLE, "UTCHMMA", 0),
    (100, "fp8e4nv", PORTABLE, "UTCQMMA", 64),
    (100, "fp8e4nv", PORTABLE | ONE, "UTCQMMA", 64),
)

_PROGRAM = """
import json, re, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from collegium.kernels.prefill import prefill_kernel as kernel

tool = triton.__path__[0] + "/backends/nvidia/bin/cuobjdump"
even = {"n_out", "k_in", "x_stride", "n_step", "weight_rows"}
found = []
for arch, operand, constants in json.load(sys.stdin):
    types = dict.fromkeys(("x_scale", "scale", "row_scale", "out_scale"), "*fp32")
    types |= dict.fromkeys(("expert_offsets", "tile_row"), "*i64")
    types |= dict.fromkeys(("tile_expert", "tiles_used"), "*i32")
    types |= dict.fromkeys(("limit", "alpha", "gate_bound", "up_bound"), "fp32")
    types |= {"bias": "*bf16", "out": "*fp8e4nv" if constants["CODES"] else "*fp16" if operand == "fp16" else "*bf16"}
    types["x"] = types["weight"] = "*" + operand
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    aligned = [i for i, n in enumerate(names) if signature[n].startswith("*") or n in even]
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    warps = 4 if constants["SPECIALIZE"] else 8
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout
        sass = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True).stdout
    registers, stack = map(int, re.search(r"REG:(\\d+) STACK:(\\d+)", usage).groups())
    codes = sorted(set(re.findall(r"\\b(HGMMA|QGMMA|HMMA|UTC[A-Z]+|UTMALDG|USETMAXREG|LDL|STL)\\b", sass)))
    # Half of the tokens a copy: descriptor and copy agree, and no group that multiplies shifts its rows once more.
    code = built.asm["ttgir"]
    shifted = re.search(r"arith.addi [^\\n]*%c64_i32[^\\n]*array<i32: [12]>", code)
    halves = f"tensordesc<tensor<64x{constants['BLOCK_K']}x" in code and (shifted is None or constants["SCALE"] == 4)
    # How many barriers are invalidated (in one of the three groups alone), and made at those places.
    made = re.findall(r"SYNCS\\.EXCH\\.64 URZ, \\[UR\\d+(?:\\+0x(?:8|10|18))?\\],", sass)
    dead = [built.asm["ptx"].count("mbarrier.inval"), len(made)]
    found.append([registers, stack, built.metadata.shared, built.metadata.num_warps, codes, halves, dead])
print("RESULT" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def compiled() -> list[Any]:
    return compile_apart(_PROGRAM, [[arch, operand, BASE | changes] for arch, operand, changes, *_ in CASES])


@pytest.mark.parametrize("index", range(len(CASES)), ids=[f"sm{c[0]}-{c[1]}-{i}" for i, c in enumerate(CASES)])
def test_instructions_registers_and_shared_memory(compiled: list[Any], index: int) -> None:
    arch, _, changes, wanted, most_stack = CASES[index]
    registers, stack, shared, warps, codes, halves, dead = compiled[index]
    assert wanted in codes
    assert stack <= most_stack
    assert shared <= 227 * 1024
    assert ("UTMALDG" in codes) == (arch >= 90)
    if changes.get("SPECIALIZE", True):
        # One group of four warps copies and two multiply; registers move from the first to the others.
        assert warps == 12
        assert halves
        assert registers == 168
        assert "USETMAXREG" in codes
        assert not {"LDL", "STL"} & set(codes), "registers spill"
        # Two barriers a copy take the place of each one that is invalidated: they are made and never used.
        stages = changes.get("STAGES", BASE["STAGES"])
        assert dead == [stages, 2 * (1 + 2 * changes.get("TERMS", 1)) * stages]
