"""What a rank launches to reach its peers: it fits in the plan's memory, and compiles for sm_90 as it is meant to.

No GPU is needed: launches are noted (see ``launches.py``), and every peer is this rank itself, as in warming up.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from compiling import compile_selected, grid

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)

CASES = (
    ("fp8_block", "fp8_group128", 7168, False, "exact"),
    ("mxfp4", "fp8_token", 4096, False, "exact"),
    ("mxfp4", "fp8_token", 2880, False, "reduced"),
    ("fp8_block", "fp8_group128", 7168, False, "reduced"),
    ("bf16", "bf16", 1024, False, "exact"),
    ("bf16", "bf16", 1024, True, "reduced"),
)

_PROGRAM = """
import json, re, subprocess, sys, tempfile
from dataclasses import replace
import torch, triton
from launches import layer_on, pretending
from collegium import Overrides, DeviceFacts, Limits, MoESpec, Problem, Routing, RoutingSpec, plan
from collegium.parallel.combine import reduced_combine
from collegium.parallel.expert_map import ExpertMap
from collegium.parallel.local import Local
from collegium.parallel.placement import linear
from collegium.parallel.symm_mem import SymmMem
from collegium.pipelines import PipelineParts
from collegium.pipelines.split import SplitKind
from collegium.runtime.memory import Arena, memory_map

tool = triton.__path__[0] + "/backends/nvidia/bin/cuobjdump"
found = []
for weights, activations, hidden, carried, combine in json.load(sys.stdin):
    placed, top_k = linear(8, 1, 2), 1 if carried else 6
    rule = RoutingSpec(top_k=top_k, weight_on_input=carried, renormalize=not carried)
    spec = MoESpec(hidden_size=hidden, intermediate_size=256, num_experts=8, weight_format=weights, routing=rule)
    facts = DeviceFacts(kind="cuda", name="pretended", capability=(9, 0), memory=1 << 36, sms=132)
    problem = Problem(spec=spec, device=facts, limits=Limits(max_tokens=600), placement=placed, graph=True)
    chosen = plan(problem, Overrides(activation_format=activations, combine=combine))
    assert chosen.dispatcher == "symm_mem" and chosen.capturable, chosen
    with pretending((9, 0)) as launches, torch.inference_mode():
        packed = layer_on(replace(spec, num_experts=4, routing=replace(rule, top_k=1)), activations).experts
        table = ExpertMap(placed, 8, "cpu")
        inner = Local(num_experts=4, weight_on_input=carried)
        reduced = reduced_combine(chosen.problem)
        reach = SymmMem(inner=inner, expert_map=table, limit=600, blocks=None, on_gpu=True, reduced=reduced)
        run = SplitKind().build(PipelineParts(experts=packed, dispatcher=reach, top_k=top_k, num_experts=4))
        memory = Arena(torch.empty(chosen.workspace_bytes, dtype=torch.uint8), memory_map(chosen.regions))
        for tokens in (0, 1, 8, 65, 600):
            x = torch.zeros(tokens, hidden, dtype=torch.bfloat16)
            ids = torch.zeros(tokens, top_k, dtype=torch.int64)
            routing = Routing(topk_ids=ids, topk_weights=torch.ones(tokens, top_k))
            run(x, routing, memory, dtype=x.dtype, shared=lambda x=x: x, out=torch.empty_like(x))
    rows = []
    for variant in launches.found.values():
        # Of the others those that store rows at their owners, or say where that is.
        sorts = getattr(variant.arguments.get("FORMAT"), "element_bytes", 0)
        row_map = getattr(variant.arguments.get("ROWS"), "row_map", variant.arguments.get("HAS_ROW_OFFSETS"))
        stores = row_map or sorts
        if variant.kernel.__module__ != "collegium.kernels.peer" and not stores:
            continue
        made = variant.compile(launches.target)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(made.asm["cubin"])
            file.flush()
            sass = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True).stdout
            used = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout
        registers = int(re.search(r"REG:(\\d+)", used).group(1))
        codes = re.findall(r"\\b(LDL|STL|LDG[.A-Z0-9]*|STG[.A-Z0-9]*|ATOMG[.A-Z0-9]*|MEMBAR[.A-Z]*|ACQBULK)\\b", sass)
        rows.append([variant.kernel.__name__, variant.kernel.__name__ + str(variant.options), registers, codes])
    quantised = (v for v in launches.found.values() if v.kernel.__name__ == "e4m3_kernel")
    formats = sorted({v.arguments["FORMAT"].group for v in quantised})
    found.append([rows, formats])
print("RESULT" + json.dumps(found))
"""


_PRODUCTS = {"grouped_gemm_kernel", "w4a8_kernel", "prefill", "w4_prefill"}
_STORING = _PRODUCTS | {"permute_kernel", "scatter_kernel"}


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[int, Any]:
    test = "test_kernels_load_sixteen_bytes"
    return compile_selected(request, test, _PROGRAM, [list(case) for case in CASES])


each_case = grid(CASES, lambda *case: [case[0], case[4]], lambda *case: "-".join(map(str, case)))


@each_case
def test_kernels_load_sixteen_bytes(compiled: dict[int, Any], index: int) -> None:
    rows = [row for row in compiled[index][0] if row[0] not in _STORING]
    back = {"reduce_kernel", "collect_kernel"} if CASES[index][4] == "reduced" else {"collect_kernel"}
    assert {name for name, *_ in rows} == {"post_kernel", "send_kernel", "pull_kernel"} | back
    assert len(rows) <= 12, "each kernel is compiled for few kinds of calls"
    for name, where, registers, codes in rows:
        assert not {"LDL", "STL"} & set(codes), f"{where}: registers spill"
        assert registers <= 128, where
        assert "ACQBULK" in codes, f"{where}: it may begin while the kernel before it ends"
        if name not in ("post_kernel", "send_kernel"):
            assert "LDG.E.128" in codes, where
            assert "STG.E.128" in codes, where
        if name in ("pull_kernel", "collect_kernel"):
            # Flags are acquired from the whole system, where only the poster pays for a release.
            assert any(code.startswith("ATOMG.E.ADD.64.STRONG.SYS") for code in codes), where
        if name in ("pull_kernel", "reduce_kernel"):
            assert not any(code.startswith("MEMBAR") for code in codes), where
        else:
            assert codes.count("MEMBAR.ALL.SYS") == 1, f"{where}: one fence for the flags of all peers"


@each_case
def test_products_store_sixteen_bytes(compiled: dict[int, Any], index: int) -> None:
    rows = [row for row in compiled[index][0] if row[0] in _STORING]
    if CASES[index][4] == "reduced":
        assert not rows, "sums go back, and rows stay"
        return
    names = {name for name, *_ in rows}
    assert names & _PRODUCTS
    assert {"permute_kernel", "scatter_kernel"} <= names
    for name, where, _, codes in rows:
        assert not {"LDL", "STL"} & set(codes), f"{where}: registers spill"
        if name in _PRODUCTS:
            stores = [code for code in codes if code.startswith("STG")]
            places = sum(code.startswith("LDG.E.64") for code in codes)
            if name == "prefill":
                stores.remove("STG.E"), stores.remove("STG.E")  # the two counters
            elif name == "w4_prefill":
                # Besides the counters, a wait without an end writes to an address that ends the kernel.
                stores = [code.replace(".EF", "") for code in stores if code != "STG.E"]
            assert set(stores) == {"STG.E.128"}, where
            assert 1 <= places <= len(stores) + 2, f"{where}: a place is read once for 16 bytes at most"
