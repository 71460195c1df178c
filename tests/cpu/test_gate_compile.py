"""What the compiler makes of gated rows, norms and the routing kernel: no spills, and no fused multiply-adds of rows.

No GPU is needed; which variants there are is what the host code asks for (see ``launches.py``).
"""

from __future__ import annotations

from typing import Any

import pytest

from compiling import compile_apart, skip_other_compilers

skip_other_compilers()

_PROGRAM = """
import json, re, subprocess, tempfile, sys
import torch, triton
from launches import pretending
from collegium.ops.linear import sigmoid_gate
from collegium.ops.rms_norm import rms_norm
from collegium.ops.route import route
from collegium.types import RoutingSpec

tool = triton.__path__[0] + "/backends/nvidia/bin/cuobjdump"
counts, widths = json.load(sys.stdin)
rules = (
    RoutingSpec(top_k=2, score="sparsemixer", renormalize=False),
    RoutingSpec(top_k=8, expert_scale=True, renormalize_floor=1e-12),
)
found = []
for major in (8, 9, 10):
    with pretending((major, 0)) as launches:
        for tokens in counts:
            for width in widths:
                x = torch.zeros(tokens, width, dtype=torch.bfloat16)
                sigmoid_gate(x, torch.zeros(1, width), x)
                rms_norm(x, None, 1e-6)
                rms_norm(x.float(), torch.ones(width), 1e-6)
            for rule in rules:
                route(torch.zeros(tokens, 128), rule, expert_scale=torch.ones(128) if rule.expert_scale else None)
    for variant in launches.found.values():
        name = variant.kernel.__name__
        if name == "linear_kernel":
            continue
        built = variant.compile(launches.target)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
            binary.write(built.asm["cubin"])
            binary.flush()
            usage = subprocess.run([tool, "-res-usage", binary.name], capture_output=True, text=True).stdout
            sass = subprocess.run([tool, "-sass", binary.name], capture_output=True, text=True).stdout
        registers, stack = map(int, re.search(r"REG:(\\\\d+) STACK:(\\\\d+)", usage).groups())
        codes = re.findall(r"\\\\b(DFMA|DMUL|DADD|FMUL|FADD|LDL|STL|ACQBULK|PREEXIT)", sass)
        facts = {code: codes.count(code) for code in codes}
        own = {key: variant.arguments.get(key) for key in ("PARTS", "BLOCK", "STEPS", "ROUTING")}
        found.append([major, name, own, registers, stack, facts])
print("RESULT" + json.dumps(found))
""".replace("\\\\", "\\")


@pytest.fixture(scope="module")
def compiled() -> list[Any]:
    return compile_apart(_PROGRAM, [[1, 100], [2048, 5120]])


@pytest.mark.parametrize(("kernel", "most"), [("gate_rows_kernel", 64), ("rms_norm_kernel", 128), ("route_kernel", 96)])
def test_kernels_fit_into_registers(kernel: str, most: int, compiled: list[Any]) -> None:
    rows = [row for row in compiled if row[1] == kernel]
    assert {row[0] for row in rows} == {8, 9, 10}
    for major, _, own, registers, stack, codes in rows:
        says = f"sm_{major}0 {own}: {registers} registers, {stack} bytes of stack, {codes}"
        assert registers <= most, says
        assert stack == 0, says
        assert not {"LDL", "STL"} & set(codes), says
        assert {"ACQBULK", "PREEXIT"} <= set(codes) if major > 8 else "ACQBULK" not in codes, says


def test_gates_add_in_order_evaluate_fp64(compiled: list[Any]) -> None:
    rows = [row for row in compiled if row[1] == "gate_rows_kernel"]
    assert {(row[2]["PARTS"], row[2]["BLOCK"]) for row in rows} == {(32, 256), (32, 2048), (27, 256), (27, 2048)}
    for _, _, own, _, _, codes in rows:
        assert codes["FADD"] >= own["PARTS"] - 1
        assert codes["DFMA"] >= 10
