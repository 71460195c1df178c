"""What NVRTC makes of the large-batch product of four-bit weights: registers, products that run on, and their operands.

No GPU is needed.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("triton")  # its wheel brings the disassembler

from collegium.experts.triton.w4_prefill import source_of
from collegium.kernels import enums
from collegium.runtime.nvrtc import compiled, nvrtc_found
from grids import mainly
from sass import early_accesses, early_writes, instructions, product_loops

if TYPE_CHECKING:
    from pathlib import Path

if not nvrtc_found():
    pytest.skip("needs NVRTC", allow_module_level=True)

GATE_UP = {
    "MAX_TOKENS": 160, "OPERAND": 0, "X_GROUPS": 0, "WEIGHT": enums.E2M1_E8M0, "SCALE": enums.NO_SCALE, "WORDS": 1,
    "OUT": 1, "PROJECTIONS": 2, "ACTIVATION": 0, "FAST": 0, "HAS_LIMIT": 0, "HAS_ROW_OFFSETS": 0, "BIAS": 0,
    "ALIGNED": 1,
}  # fmt: skip
DOWN = GATE_UP | {"PROJECTIONS": 1, "ACTIVATION": -1}
NVFP4 = {"WEIGHT": enums.E2M1_E4M3, "WORDS": 2}
NVFP4_GROUPS = NVFP4 | {"X_GROUPS": 1, "MAX_TOKENS": 112}
NARROW = {"MAX_TOKENS": 80}
E2M1 = {"OPERAND": 1, "WEIGHT": enums.E2M1_LANES}
INT4 = {"OPERAND": 1, "WEIGHT": enums.INT4_LANES}
OAI = {"ACTIVATION": 1, "HAS_LIMIT": 1, "BIAS": 1}
# One of each way to decode; the others are exhaustive.
MAIN = (
    GATE_UP | {"ACTIVATION": 1, "HAS_LIMIT": 1, "BIAS": 1, "FAST": 1},
    GATE_UP | {"X_GROUPS": 1},
    GATE_UP | NVFP4,
    DOWN | NVFP4_GROUPS,
    DOWN | E2M1 | {"SCALE": enums.E8M0_SCALE, "BIAS": 1, "HAS_ROW_OFFSETS": 1},
    GATE_UP | E2M1 | {"SCALE": enums.E4M3_SCALE},
    GATE_UP | INT4 | {"SCALE": enums.ZERO_SCALE} | OAI,
    GATE_UP | INT4 | {"SCALE": enums.ZERO_SCALE, "WORDS": 4},
)
CASES = mainly(
    (
        GATE_UP,
        GATE_UP | {"ACTIVATION": 1, "HAS_LIMIT": 1, "BIAS": 1, "FAST": 1},
        GATE_UP | {"OUT": 3, "ALIGNED": 0, "ACTIVATION": 3},
        DOWN,
        DOWN | {"HAS_ROW_OFFSETS": 1, "BIAS": 3},
        DOWN | {"OUT": 2, "ACTIVATION": 6},
        GATE_UP | {"X_GROUPS": 1},
        DOWN | {"X_GROUPS": 1, "BIAS": 1, "HAS_ROW_OFFSETS": 1},
        GATE_UP | {"X_GROUPS": 1, "OUT": 3, "ALIGNED": 0, "ACTIVATION": 1, "HAS_LIMIT": 1},
        GATE_UP | NVFP4,
        DOWN | NVFP4 | {"HAS_ROW_OFFSETS": 1},
        GATE_UP | NVFP4_GROUPS,
        DOWN | NVFP4_GROUPS,
        GATE_UP | E2M1 | {"SCALE": enums.E8M0_SCALE} | OAI,
        DOWN | E2M1 | {"SCALE": enums.E8M0_SCALE, "BIAS": 1, "HAS_ROW_OFFSETS": 1},
        GATE_UP | E2M1 | {"SCALE": enums.E8M0_SCALE} | NARROW,
        GATE_UP | E2M1 | {"SCALE": enums.E4M3_SCALE},
        DOWN | E2M1 | {"SCALE": enums.E4M3_SCALE, "OUT": 3, "ALIGNED": 0},
        GATE_UP | INT4 | {"SCALE": enums.GROUP_SCALE},
        GATE_UP | INT4 | {"SCALE": enums.ZERO_SCALE} | OAI,
        DOWN | INT4 | {"SCALE": enums.ZERO_SCALE, "BIAS": 1},
        GATE_UP | INT4 | {"SCALE": enums.PAIR_SCALE, "WORDS": 2},
        DOWN | INT4 | {"SCALE": enums.GROUP_SCALE, "WORDS": 4},
        GATE_UP | INT4 | {"SCALE": enums.ZERO_SCALE, "WORDS": 4},
    ),
    MAIN,
)
# Instructions of a product loop, for a stage, and products among them, of two row tiles.
SIZES = {
    (0, enums.E2M1_E8M0): (230, 8),
    (0, enums.E2M1_E4M3): (400, 16),
    (1, enums.E2M1_LANES, enums.E8M0_SCALE): (420, 16),
    (1, enums.E2M1_LANES, enums.E4M3_SCALE): (270, 8),
    (1, enums.INT4_LANES): (460, 16),
}


@pytest.mark.parametrize("constants", CASES, ids=range(len(CASES)))
def test_products_run_on_without_spills(constants: dict[str, int], tmp_path: Path) -> None:
    code, log = compiled(source_of(constants), "w4_prefill", constants, "--ptxas-options=-v")
    assert "C7510" not in log, "products wait for each other"
    assert "C7511" not in log, "products wait for each other"
    assert "C7512" not in log, "products wait for each other"
    assert "0 bytes spill stores, 0 bytes spill loads" in log, log
    assert "Used 168 registers" in log, "a launch of 384 threads has no more"
    path = tmp_path / "w4_prefill.cubin"
    path.write_bytes(code)
    found = instructions(path)
    key = (constants["OPERAND"], constants["WEIGHT"])
    most, products = SIZES[key] if key in SIZES else SIZES[(*key, constants["SCALE"])]
    names = Counter(instruction.name.partition(".")[0] for instruction in found)
    assert {"HGMMA" if constants["OPERAND"] else "QGMMA", "UTMALDG", "USETMAXREG", "STSM"} - (
        {"STSM"} if not constants["ALIGNED"] else set()
    ) <= set(names)
    # At the two meetings of the cluster; barriers of its scope would flush caches at every step.
    assert names["MEMBAR"] <= 5
    assert names["CCTL"] <= 2
    assert names["ACQBULK"] == 1
    assert early_accesses(found) == []
    loops = product_loops(found)
    groups = constants["X_GROUPS"]
    assert len(loops) == constants["MAX_TOKENS"] // 16
    for loop in loops:
        counts = Counter(instruction.name.partition(".")[0] for instruction in loop)
        assert (counts["QGMMA"] + counts["HGMMA"]) % products == 0
        pieces = (counts["QGMMA"] + counts["HGMMA"]) // products
        assert pieces == 1 or (groups and pieces <= 5)
        # A sum in units of its last factor is multiplied by a ratio, at most once for every quarter of a K block, and a
        # scaled product is added to its sum.
        assert len(loop) - counts["FMUL"] - counts["FFMA"] < most + 30 * pieces * groups
        # Both row tiles of many tokens are multiplied in a turn.
        assert counts["BAR"] == (4 if pieces > 1 else 0) or constants["WEIGHT"] == enums.E2M1_E4M3
        assert counts["LDL"] + counts["STL"] == 0
        assert early_writes(loop) == []
