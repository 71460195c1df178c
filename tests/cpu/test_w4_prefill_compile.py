"""What NVRTC makes of the large-batch product of MXFP4 weights: registers, products that run on, and their operands.

No GPU is needed.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("triton")  # its wheel brings the disassembler

from collegium.experts.triton.w4_prefill import source_of
from collegium.runtime.nvrtc import compiled, nvrtc_found
from sass import early_accesses, early_writes, instructions, product_loops

if TYPE_CHECKING:
    from pathlib import Path

if not nvrtc_found():
    pytest.skip("needs NVRTC", allow_module_level=True)

GATE_UP = {
    "OPERAND": 0, "X_GROUPS": 0, "OUT": 1, "PARTS": 2, "KIND": 0, "FAST": 0, "HAS_LIMIT": 0, "PLACED": 0, "BIAS": 0,
    "ALIGNED": 1,
}  # fmt: skip
DOWN = GATE_UP | {"PARTS": 1, "KIND": -1}
CASES = (
    GATE_UP,
    GATE_UP | {"KIND": 1, "HAS_LIMIT": 1, "BIAS": 1, "FAST": 1},
    GATE_UP | {"OUT": 3, "ALIGNED": 0, "KIND": 3},
    DOWN,
    DOWN | {"PLACED": 1, "BIAS": 3},
    DOWN | {"OUT": 2, "KIND": 6},
    GATE_UP | {"X_GROUPS": 1},
    DOWN | {"X_GROUPS": 1, "BIAS": 1, "PLACED": 1},
    GATE_UP | {"X_GROUPS": 1, "OUT": 3, "ALIGNED": 0, "KIND": 1, "HAS_LIMIT": 1},
)
WIDTHS = (10, 8)  # 16 to 160 tokens; to 128 where K blocks have scales


@pytest.mark.parametrize("constants", CASES, ids=range(len(CASES)))
def test_products_run_on_without_spills(constants: dict[str, int], tmp_path: Path) -> None:
    code, log = compiled(source_of(constants), "w4_prefill", constants, "--ptxas-options=-v")
    assert "C7510" not in log, "products wait for each other"
    assert "C7511" not in log, "products wait for each other"
    assert "0 bytes spill stores, 0 bytes spill loads" in log, log
    assert "Used 168 registers" in log, "a launch of 384 threads has no more"
    path = tmp_path / "w4_prefill.cubin"
    path.write_bytes(code)
    found = instructions(path)
    names = Counter(instruction.name.partition(".")[0] for instruction in found)
    assert {"QGMMA", "UTMALDG", "USETMAXREG", "STSM"} - ({"STSM"} if not constants["ALIGNED"] else set()) <= set(names)
    # At the two meetings of the cluster; barriers of its scope would flush caches at every step.
    assert names["MEMBAR"] <= 5
    assert names["CCTL"] <= 2
    assert names["ACQBULK"] == 1
    assert early_accesses(found) == []
    loops = product_loops(found)
    groups = constants["X_GROUPS"]
    assert len(loops) == WIDTHS[groups]
    for loop in loops:
        counts = Counter(instruction.name.partition(".")[0] for instruction in loop)
        assert counts["QGMMA"] == 8, "two row tiles, four instructions each"
        assert len(loop) < (360 if groups else 230)
        assert counts["LDL"] + counts["STL"] == 0
        assert early_writes(loop) == []
