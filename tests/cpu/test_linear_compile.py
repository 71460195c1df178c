"""What the compiler makes of the products around the experts: instructions that no count of tokens changes, no spills.

No GPU is needed; which variants there are is what the host code asks for (see ``launches.py``).
"""

from __future__ import annotations

from typing import Any

import pytest

from compiling import compile_apart, compiler_release, skip_other_compilers

skip_other_compilers()

# Bytes of stack by release of Triton: of columns that 16 bytes do not hold evenly, and of others (on sm_100 alone).
ODD_STACK = {"3.6": 8, "3.9": 56}
EVEN_STACK = {"3.6": 0, "3.9": 24}

# dtypes of x and of the weight, and how many products of terms a block of K takes
PAIRS = {
    "bfloat16 float32": 3,
    "float16 float32": 5,
    "float32 float32": 6,
    "bfloat16 bfloat16": 1,
    "float16 float16": 1,
}
MACHINES = (8, 9, 10)
# `make test` compiles the pairs with the fewest products of terms, which are the quickest to compile.
FEW = {8: ["bfloat16 bfloat16"], 9: ["bfloat16 float32", "bfloat16 bfloat16"], 10: ["bfloat16 bfloat16"]}
TOKENS = (1, 40, 5000)  # few and many by parts, and whole
SIZES = ((7168, 257), (1000, 60))  # columns in and out; the second is for Hopper alone

_PROGRAM = """
import json, re, subprocess, tempfile, sys
import torch, triton
from launches import pretending
from collegium.ops.linear import linear

tool = triton.__path__[0] + "/backends/nvidia/bin/cuobjdump"
pairs, counts, sizes = json.load(sys.stdin)
found = []
for major in (8, 9, 10):
    for pair in pairs[str(major)]:
        x_dtype, dtype = (getattr(torch, name) for name in pair.split())
        with pretending((major, 0)) as launches:
            for k_in, n_out in sizes[: 1 + (major == 9)]:
                weight, bias = torch.zeros(n_out, k_in, dtype=dtype), torch.zeros(n_out)
                for tokens in counts:
                    x = torch.zeros(1, k_in, dtype=x_dtype).expand(tokens, k_in)
                    linear(x.contiguous() if tokens < 100 else x, weight, bias)
        for variant in launches.found.values():
            built = variant.compile(launches.target)
            with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
                binary.write(built.asm["cubin"])
                binary.flush()
                usage = subprocess.run([tool, "-res-usage", binary.name], capture_output=True, text=True).stdout
                sass = subprocess.run([tool, "-sass", binary.name], capture_output=True, text=True).stdout
            registers, stack = map(int, re.search(r"REG:(\\\\d+) STACK:(\\\\d+)", usage).groups())
            codes = re.findall(r"\\\\b(HGMMA\\\\S+|HMMA\\\\S+|UTCHMMA|LDGSTS|FADD|FFMA|LDL|STL|ACQBULK|PREEXIT)", sass)
            constants = {"PARTS": variant.arguments.get("PARTS")}
            if variant.kernel.__name__ == "linear_kernel":
                constants = variant.arguments["ORDER"]._asdict() | variant.arguments["TILE"]._asdict()
            facts = [registers, stack, built.metadata.shared, {code: codes.count(code) for code in codes}]
            found.append([major, pair, variant.kernel.__name__, constants, *facts])
print("RESULT" + json.dumps(found))
""".replace("\\\\", "\\")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(FEW, id="few"),
        pytest.param({key: list(PAIRS) for key in MACHINES}, id="all", marks=pytest.mark.exhaustive),
    ],
)
def pairs(request: pytest.FixtureRequest) -> dict[int, list[str]]:
    return request.param


@pytest.fixture(scope="module")
def compiled(pairs: dict[int, list[str]]) -> list[Any]:
    return compile_apart(_PROGRAM, [pairs, TOKENS, SIZES])


def test_instructions_do_not_depend_on_tokens(compiled: list[Any], pairs: dict[int, list[str]]) -> None:
    seen: set[tuple[int, str, bool, int]] = set()
    for major, pair, name, constants, registers, stack, shared, codes in compiled:
        says = f"sm_{major}0 {pair} {constants}: {registers} registers, {stack} bytes of stack, {codes}"
        if name != "linear_kernel":
            continue
        seen.add((major, pair, constants["split"], constants["block_t"]))
        terms, tile = PAIRS[pair], constants["block_t"]
        half = "" if pair.endswith("float16 float16") and not pair.startswith("b") else ".BF16"
        odd = constants["program_blocks"] in (1, 16)  # 1000 columns, which no 16 bytes hold evenly
        even = EVEN_STACK[compiler_release()] if major == 10 else 0
        assert stack <= (ODD_STACK[compiler_release()] if odd else even), says
        assert shared <= 100 << 10, says
        assert "LDGSTS" in codes or odd, says  # prefetched
        assert "FFMA" not in codes, says
        # Of a block of 64 columns each step of 16 is one instruction for each product of terms. Loops may be unrolled.
        name, times = {
            8: (f"HMMA.16816.F32{half}", tile // 8),
            9: (f"HGMMA.64x{tile}x16.F32{half}", 1),
            10: ("UTCHMMA", 1),
        }[major]
        assert [code for code in codes if "MMA" in code] == [name], says
        assert codes[name] % (4 * terms * times) == 0, says
        assert {"ACQBULK", "PREEXIT"} <= set(codes) if major > 8 else "ACQBULK" not in codes
    for major in MACHINES:
        for pair in pairs[major]:
            most = 32 if pair.startswith("float32") else 64
            assert {(major, pair, True, 16), (major, pair, True, most), (major, pair, False, most)} <= seen


def test_add_parts_kernel_has_no_products(compiled: list[Any]) -> None:
    adding = [row for row in compiled if row[2] == "add_parts_kernel"]
    assert {row[3]["PARTS"] for row in adding} == {16, 23}
    for _, _, _, constants, registers, stack, _, codes in adding:
        assert stack == 0
        assert registers <= 64, constants
        assert codes["FADD"] >= constants["PARTS"] - 1
        assert "FFMA" not in codes
