"""What NVRTC makes of the product of large batches: products of the tensor core that run on, and no spills in a loop.

No GPU is needed.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from collegium.experts.triton.prefill import source_of
from collegium.runtime.nvrtc import compiled, nvrtc_found
from prefill_on_cpu import FP8
from sass import early_accesses, instructions

triton = pytest.importorskip("triton")  # its wheel brings the disassembler
if not nvrtc_found():
    pytest.skip("needs NVRTC", allow_module_level=True)

CODES = {"CODES": 1, "ROUND": 1}
DOWN = {"PROJECTIONS": 1, "ACTIVATION": -1}
TOKEN = {"SCALE": 0, "X_SCALE": 2, "ROW_SCALE": 1}
CHANNEL = {"SCALE": 0, "ROW_SCALE": 1, "BIAS": 1, "CODES": 2}
PLAIN = {"OPERAND": 1, "SCALE": 0, "X_SCALE": 0}
HALF = PLAIN | {"OPERAND": 2, "OUT": 2}
# Weights that were decoded first: a factor for each row and group of columns; two terms of numbers that are looked up.
GROUPS = {"OPERAND": 1, "SCALE": 4, "X_SCALE": 0}
TERMS = GROUPS | {"TERMS": 2}
CASES: tuple[dict[str, Any], ...] = (
    {},  # rows that torch quantises, with given scales
    CODES,
    CODES | {"HAS_LIMIT": 1, "ACTIVATION": 1, "BIAS": 1},
    CODES | {"ACTIVATION": 4, "ALIGNED": 0},
    DOWN,
    DOWN | {"HAS_ROW_OFFSETS": 1, "BIAS": 1},
    DOWN | {"CODES": 2, "ACTIVATION": 6},
    TOKEN,
    TOKEN | DOWN | {"OUT": 3, "ALIGNED": 0},
    CHANNEL,
    CHANNEL | DOWN,
    PLAIN,
    PLAIN | DOWN | {"BIAS": 3, "HAS_ROW_OFFSETS": 1},
    PLAIN | {"FAST": 1, "ACTIVATION": 5},
    PLAIN | {"ROW_SCALE": 1, "X_SCALE": 2, "OUT": 3, "ALIGNED": 0},
    PLAIN | DOWN | {"ROW_SCALE": 1, "X_SCALE": 2},
    HALF,
    HALF | DOWN | {"ROW_SCALE": 1, "X_SCALE": 2},
    GROUPS,
    GROUPS | DOWN | {"BIAS": 1},
    GROUPS | DOWN | {"OPERAND": 2, "OUT": 2},
    TERMS,
    TERMS | DOWN | {"OPERAND": 2, "OUT": 2},
)


@pytest.mark.parametrize("changes", CASES, ids=range(len(CASES)))
def test_instructions_registers_and_spills(changes: dict[str, Any], tmp_path: Path) -> None:
    constants = FP8 | changes
    code, said = compiled(source_of(constants), "prefill", constants, "--ptxas-options=-v")
    path = tmp_path / "prefill.cubin"
    path.write_bytes(code)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    sass = subprocess.run([tool, "-sass", path], capture_output=True, text=True, check=True).stdout
    assert "C7510" not in said, "products wait for each other"
    assert "C7511" not in said, "products wait for each other"
    spilled = re.search(r"(\d+) bytes spill stores", said)
    assert spilled is not None
    assert int(spilled[1]) <= 128, said
    codes = re.findall(r"\b(HGMMA|QGMMA|UTMALDG|USETMAXREG|MEMBAR|CCTL)\b", sass)
    assert {"QGMMA" if constants["OPERAND"] == 0 else "HGMMA", "UTMALDG", "USETMAXREG"} <= set(codes)
    # At the two meetings of the cluster; barriers of its scope would flush caches at every step.
    assert codes.count("MEMBAR") <= 5
    assert codes.count("CCTL") <= 2
    found = instructions(path)
    assert any(instruction.name == "ACQBULK" for instruction in found)
    assert early_accesses(found) == []
    # No register is spilled between two products of one loop.
    body = [line for line in sass.splitlines() if re.search(r"\b(HGMMA|QGMMA|LDL|STL|BRA)\b", line)]
    for before, line, after in zip(body, body[1:], body[2:], strict=False):
        if re.search(r"\b(LDL|STL)\b", line):
            assert not ("GMMA" in before and "GMMA" in after), line
