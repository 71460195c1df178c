"""Operations take no more memory than they declare, for every smaller batch too."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from collegium.ops import permute as permutation
from collegium.ops.linear import linear, linear_regions
from collegium.ops.operand import operand, operand_regions
from collegium.ops.permute import permute, permute_regions
from collegium.ops.quantize import AS_IS, PADDED, REORDERED
from collegium.ops.route import route, route_regions
from collegium.ops.weighted_sum import weighted_sum, weighted_sum_regions
from collegium.types import RoutingSpec
from compiling import compile_apart
from memories import Noted

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

# (most assignments, experts, least rows of a tile of each list)
ORDERS = [
    (1, 1, (16, 16)),
    (256, 17, (16, 16)),
    (257, 17, (16,)),
    (700, 512, (16, 64)),
    (16384, 8, (16, 16)),
    (16385, 60, (16, 16)),
    (33000, 256, (128, 16)),
    (1000, 60, ()),
]
# (most rows, columns, format, order, gathered, dtype of x)
OPERANDS = [
    (70, columns, name, order, gathered, dtype)
    for columns in (1, 33, 128, 300)
    for name, order in (
        (None, AS_IS),
        ("bf16", AS_IS),
        ("fp16", AS_IS),
        ("fp32", AS_IS),
        ("fp8_group128", AS_IS),
        ("fp8_group128_pow2", PADDED),
        ("fp8_token", REORDERED),
        ("mxfp8", AS_IS),
        ("nvfp4", AS_IS),
    )
    for gathered in (False, True)
    for dtype in ("float32", "bfloat16")
]

# (most tokens, columns in, columns out): the last has more columns than any sums are kept apart for.
PRODUCTS = [(3000, 7168, 256), (3000, 2048, 3), (300, 40, 3), (70, 4096, 1), (600, 1024, 4096), (3, 128, 300_000)]

# What each operation takes in smaller batches, as beside a GPU: the sizes of every name.
_PROGRAM = """
import json, sys
import torch
from launches import pretending
from memories import Noted
from collegium.ops.linear import linear
from collegium.ops.operand import operand
from collegium.ops.permute import permute
from collegium.ops.route import route
from collegium.ops.weighted_sum import weighted_sum
from collegium.types import RoutingSpec

orders, operands, products = json.load(sys.stdin)
found = {"order": [], "operand": [], "product": [], "route": [], "sum": []}
with pretending() as launches:
    for most, experts, least in orders:
        counts = {0, 1, 2, experts, 128, 255, 256, 257, 16384, 16385, 16512, most // 2, most - 1, most}
        for rows in sorted(count for count in counts if count <= most):
            ids, weights = torch.zeros(rows, 1, dtype=torch.int64), torch.zeros(rows, 1)
            lists = [(), tuple(least), tuple(2 * size for size in least)[:1], tuple(size + 24 for size in least)]
            for block_t in lists:
                for given in (None, weights):
                    memory = Noted()
                    permute(ids, experts, input_weights=given, block_t=block_t, memory=memory.part("order"))
                    found["order"].append([[most, experts, least], rows, memory.sizes])
    for case in operands:
        most, columns, name, order, gathered, dtype = case
        for rows in (0, 1, 2, 63, 64, 65, most):
            x, memory = torch.zeros(rows, columns, dtype=getattr(torch, dtype)), Noted()
            source = torch.zeros(rows, dtype=torch.int64) if gathered else None
            operand(x, name, source=source, order=order, x_ready=True, memory=memory.part("x"))
            found["operand"].append([case, rows, memory.sizes])
    for most, inside, outside in products:
        weight = torch.zeros(outside, inside)
        for tokens in sorted({0, *(2**i for i in range(12)), *(2**i + 1 for i in range(12)), most - 1, most}):
            if tokens <= most:
                memory = Noted()
                linear(torch.zeros(tokens, inside), weight, memory=memory)
                found["product"].append([[most, inside, outside], tokens, memory.sizes])
    for tokens in (0, 1, 5, 300):
        memory, logits = Noted(), torch.zeros(tokens, 9)
        ids = route(logits, RoutingSpec(top_k=3), memory=memory).topk_ids
        found["route"].append([300, tokens, memory.sizes])
        memory = Noted()
        weighted_sum(torch.zeros(tokens * 3, 40), ids, None, torch.bfloat16, memory=memory)
        found["sum"].append([300, tokens, memory.sizes])
    assert launches.found
print("RESULT" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def beside_a_gpu() -> Any:
    return compile_apart(_PROGRAM, [ORDERS, OPERANDS, PRODUCTS])


def check_bound(taken: dict[str, int], declared: dict[str, int], part: str) -> None:
    for name, size in taken.items():
        assert size <= declared[name.removeprefix(part)], name


@needs_triton
def test_order_regions(beside_a_gpu: Any) -> None:
    seen: dict[str, int] = {}
    for (most, experts, least), rows, sizes in beside_a_gpu["order"]:
        check_bound(sizes, permute_regions(most, experts, block_t=tuple(least), weights=True), "order/")
        if rows == most:
            seen[f"{most} {experts}"] = max(seen.get(f"{most} {experts}", 0), sum(sizes.values()))
    for most, experts, least in ORDERS:
        if most not in (16385, 33000):  # fewer assignments have more counts than these
            regions = permute_regions(most, experts, block_t=least, weights=True)
            assert sum(regions.values()) == seen[f"{most} {experts}"]


@needs_triton
def test_operand_regions(beside_a_gpu: Any) -> None:
    for (most, columns, name, order, gathered, dtype), rows, sizes in beside_a_gpu["operand"]:
        regions = operand_regions(most, columns, name, order=order, gathered=gathered, dtype=getattr(torch, dtype))
        check_bound(sizes, regions, "x/")
        if rows == most:
            assert {f"x/{own}": size for own, size in regions.items()} == sizes


@needs_triton
def test_product_regions(beside_a_gpu: Any) -> None:
    seen: dict[str, dict[str, int]] = {}
    for (most, inside, outside), _, sizes in beside_a_gpu["product"]:
        check_bound(sizes, linear_regions(most, inside, outside, torch.float32), "")
        found = seen.setdefault(f"{most} {inside} {outside}", {})
        found |= {name: max(size, found.get(name, 0)) for name, size in sizes.items()}
    for most, inside, outside in PRODUCTS:
        regions = linear_regions(most, inside, outside, torch.float32)
        assert {name: size for name, size in regions.items() if size} == seen[f"{most} {inside} {outside}"]
        assert "out" not in linear_regions(most, inside, outside, None)
        assert regions.get("sums", 0) <= 32 << 20


@needs_triton
def test_routings_and_sums(beside_a_gpu: Any) -> None:
    for most, tokens, sizes in beside_a_gpu["route"]:
        check_bound(sizes, route_regions(most, 3), "")
        assert tokens < most or sizes == route_regions(most, 3)
    for most, tokens, sizes in beside_a_gpu["sum"]:
        check_bound(sizes, weighted_sum_regions(most, 40, torch.bfloat16), "")
        assert tokens < most or sizes == weighted_sum_regions(most, 40, torch.bfloat16)


def test_permute_counts_bound_all_batches() -> None:
    """The table of one batch is no bound; what is declared is."""
    tables = {rows: permutation._buffers(rows, 8, (), weights=False)["counts"][0][0] * 4 for rows in range(257, 70000)}
    assert tables[16384] > tables[16385]
    most = 0
    for rows, size in tables.items():
        most = max(most, size)
        if rows % 499 == 0 or rows in (16384, 16385):
            assert permute_regions(rows, 8)["counts"] == most


@pytest.mark.parametrize("experts", [1, 7, 64])
def test_permute_tiles_bound_smaller_batches(experts: int) -> None:
    most = permute_regions(600, experts, block_t=(16, 16), weights=True)
    for rows in range(601):
        for block_t in ((), (16,), (16, 16), (17, 64), (128, 24)):
            check_bound(permute_regions(rows, experts, block_t=block_t), most, "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the plain path of the CPU")
def test_plain_code_takes_nothing() -> None:
    memory, logits, x = Noted(), torch.randn(30, 9), torch.randn(30, 40)
    routing = route(logits, RoutingSpec(top_k=4), memory=memory)
    order = permute(routing.topk_ids, 9, input_weights=routing.topk_weights, block_t=(16, 32), memory=memory)
    rows, _ = operand(x, "fp8_token", source=order.source, order=REORDERED, x_ready=True, memory=memory)
    weighted_sum(rows.float(), order.slots, None, torch.float32, memory=memory)
    linear(x, torch.randn(9, 40), memory=memory)
    assert not memory.sizes
