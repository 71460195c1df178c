"""What the compiler makes of a pass in one kernel: all its programs fit on a GPU at once, and it rounds as others do.

No GPU is needed: launches are noted (see ``launches.py``), and every peer is this rank itself, as in warming up.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from compiling import compile_selected, compiler_release, grid, skip_other_compilers

skip_other_compilers()

MOST_SPILLED = {"3.6": 4, "3.9": 8}  # loads and stores of spilled registers, outside the products, by release of Triton
# The same inside the steps of the two products: 3.9 reloads one register a step where a unit has 32 rows.
MOST_SPILLED_IN_STEPS = {"3.6": 0, "3.9": 2}

# Hidden and intermediate size, top-k, activation and weights of DeepSeek-V4-Flash, gpt-oss and DeepSeek-V3, and the
# weight rows of a piece.
CASES = (
    (4096, 2048, 6, "swiglu", "mxfp4", 64),
    (4096, 2048, 6, "swiglu", "mxfp4", 128),
    (2880, 2880, 4, "swiglu_oai", "mxfp4", 128),
    (7168, 2048, 8, "swiglu", "mxfp4", 128),
    (4096, 2048, 6, "swiglu", "nvfp4", 64),
    (7168, 2048, 8, "swiglu", "nvfp4", 128),
    (4096, 2048, 6, "swiglu", "fp8_block", 128),
    (7168, 2048, 8, "swiglu", "fp8_block", 64),
)

_PROGRAM = """
import json, re, subprocess, sys, tempfile
from dataclasses import replace
import torch, triton
from launches import layer_on, pretending
from collegium import ActivationSpec, Overrides, DeviceFacts, Limits, MoESpec, Problem, Routing, RoutingSpec, plan
from collegium.parallel.expert_map import ExpertMap
from collegium.parallel.local import Local
from collegium.parallel.placement import linear
from collegium.parallel.symm_mem import SymmMem
from collegium.pipelines import PipelineParts
from collegium.pipelines import mega
from collegium.pipelines.mega import LAUNCH_CONFIGS, Mega
from collegium.runtime.memory import Arena, memory_map
from collegium.runtime.warm_up import sizes_for

tool = triton.__path__[0] + "/backends/nvidia/bin/cuobjdump"
found = []
for hidden, inner, top_k, kind, weights, wide in json.load(sys.stdin):
    mega.MIN_TILES_PER_SM = 0 if wide == 128 else 1e9
    placed, rule = linear(8, 1, 2), RoutingSpec(top_k=top_k)
    spec = MoESpec(
        hidden_size=hidden, intermediate_size=inner, num_experts=8, weight_format=weights, routing=rule,
        activation=ActivationSpec(kind=kind, limit=7.0 if kind == "swiglu_oai" else None),
    )
    facts = DeviceFacts(kind="cuda", name="pretended", capability=(9, 0), memory=1 << 36, sms=132)
    problem = Problem(spec=spec, device=facts, limits=Limits(max_tokens=600), placement=placed, graph=True)
    act = "fp8_group128" if weights == "fp8_block" else "fp8_token"
    chosen = plan(problem, Overrides(activation_format=act, pipeline="mega"))
    with pretending((9, 0)) as launches, torch.inference_mode():
        small = replace(spec, num_experts=4, routing=replace(rule, top_k=1))
        packed, table = layer_on(small, act).experts, ExpertMap(placed, 8, "cpu")
        reach = SymmMem(inner=Local(num_experts=4), expert_map=table, limit=600, blocks=None, on_gpu=True)
        run = Mega(parts=PipelineParts(experts=packed, dispatcher=reach, top_k=top_k, num_experts=4))
        memory = Arena(torch.empty(chosen.workspace_bytes, dtype=torch.uint8), memory_map(chosen.regions))

        def passed(tokens):
            x, ids = torch.zeros(tokens, hidden, dtype=torch.bfloat16), torch.zeros(tokens, top_k, dtype=torch.int64)
            routing = Routing(topk_ids=ids, topk_weights=torch.ones(tokens, top_k))
            run(x, routing, memory, dtype=x.dtype, shared=lambda: x, out=torch.empty_like(x))

        for tokens in sizes_for(run.variants, 600):
            passed(tokens)
        known = launches.names()
        for tokens in range(1, 601, 7):
            passed(tokens)
        assert launches.names() == known, "warming up compiles every variant"
    rows = []
    for variant in launches.found.values():
        made = variant.compile(launches.target)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(made.asm["cubin"])
            file.flush()
            sass = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True).stdout
            used = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout
        registers = int(re.search(r"REG:(\\d+)", used).group(1))
        lines = [t for t in re.findall(r"/\\*[0-9a-f]{4,}\\*/ +([@A-Z][^;]*;)", sass)]
        tile = variant.arguments["FORMAT"].up_tile
        height = tile.block_t
        rows.append([height, variant.options, registers, made.metadata.shared, lines])
        config = LAUNCH_CONFIGS[run.weight, height, tile.block_n]
        rows[-1] += [config.programs, made.asm["ptx"].count("mul.rn.f32")]
    found.append(rows)
print("RESULT" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[int, Any]:
    test = "test_all_programs_fit_without_spills"
    return compile_selected(request, test, _PROGRAM, [list(case) for case in CASES])


@grid(CASES, lambda *case: [case[4]], lambda *case: "-".join(map(str, case)))
def test_all_programs_fit_without_spills(compiled: dict[int, Any], index: int) -> None:
    assert {row[0] for row in compiled[index]} == ({16, 32, 64} if CASES[index][4] == "mxfp4" else {16, 32})
    assert len(compiled[index]) <= 4, "one for each height of a unit, and one that asks for weights early"
    for _, options, registers, shared, lines, programs, _ in compiled[index]:
        spilled = [at for at, text in enumerate(lines) if re.search(r"\b(LDL|STL)\b", text)]
        products = [at for at, text in enumerate(lines) if "QGMMA" in text]
        assert len(spilled) <= MOST_SPILLED[compiler_release()], "registers spill"
        inside = [at for at in spilled if min(abs(at - product) for product in products) <= 60]
        assert len(inside) <= MOST_SPILLED_IN_STEPS[compiler_release()], "in a step of a product"
        # Registers are given out in eights to each thread; a program takes a KiB of shared memory beside its own.
        assert 65536 // (-(-registers // 8) * 8 * 128) >= programs
        assert 233472 // (shared + 1024) >= programs
        assert options["launch_cooperative_grid"], "what does not fit is an error and no program waits for it"


def test_weights_and_rows_move_16_bytes(compiled: dict[int, Any]) -> None:
    for index, rows in compiled.items():
        for *_, lines, _, _ in rows:
            codes = [text.split()[1 if text.startswith("@") else 0] for text in lines]
            products = [text for text in lines if "QGMMA" in text]
            assert len(products) >= 8, "two products of four steps"
            # QGMMA sum, weights, tokens: four-bit weights are a register, not a descriptor.
            registers = [text.split(",")[1].strip().startswith("R") for text in products]
            assert not any(registers) if CASES[index][4] == "fp8_block" else all(registers), products
            assert "LDGSTS.E.BYPASS.128" in codes, "weights are not prefetched"
            assert "STG.E.128" in codes
            # For the flags of all peers, three times, and where each program ends, whose rows went to them: that may be
            # there twice, for those that gave up.
            assert codes.count("MEMBAR.ALL.SYS") in (4, 5)
            assert any(code.startswith("ATOMG.E.ADD.64.STRONG.SYS") for code in codes), "flags of peers are acquired"
            assert codes.count("CCTL.IVALL") >= codes.count("MEMBAR.ALL.GPU"), "what was read before is read again"


def test_sums_round_each_product(compiled: dict[int, Any]) -> None:
    for index, rows in compiled.items():
        for *_, products in rows:
            # Eight columns of a thread, each times its weight: told to round, it is not fused with the addition.
            assert products == 8 * CASES[index][2]
