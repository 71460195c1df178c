"""Float32 tokens on a GPU: unquantised weights of any dtype, in Triton's interpreter, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from collegium import ActivationSpec, Overrides
from collegium.encoding import encode_experts
from collegium.experts.triton.tiles.problem import TileChoice
from collegium.parallel.local import Local
from collegium.pipelines import PipelineParts
from collegium.pipelines.direct import Direct
from collegium.planning import kernel_named, plan
from collegium.problem import DeviceFacts, Limits, Problem
from collegium.testing.compare import heavy_tailed, random_experts, relative_error, uneven_ids
from collegium.types import MoESpec, Routing, RoutingSpec
from memories import Poisoned
from truth import moe_truth

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("tests/gpu makes these comparisons on the device", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

WEIGHTS = ("fp32", "bf16", "fp16")
EXPERTS, HIDDEN, WIDE = 4, 112, 80
TILE = TileChoice(block_n=32, block_t=16, warps=4, stages=2, group_t=2)
TILES = (TILE, replace(TILE, interleave_gate_up=True), replace(TILE, interleave_gate_up=True, depth=2))


def problem_of(weights: str, capability: tuple[int, int] = (9, 0), **options: Any) -> Problem:
    spec = MoESpec(
        hidden_size=HIDDEN,
        intermediate_size=WIDE,
        num_experts=EXPERTS,
        routing=RoutingSpec(top_k=2),
        weight_format=weights,
        activation=ActivationSpec(limit=3.0),
        expert_bias=options.pop("bias", False),
    )
    device = DeviceFacts(kind="cuda", capability=capability)
    return Problem(spec=spec, device=device, limits=Limits(max_tokens=64), dtype="fp32", **options)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("tile", TILES, ids=["apart", "interleaved", "deep"])
def test_experts_match_truth(weights: str, tile: TileChoice) -> None:
    problem = problem_of(weights)
    experts = encode_experts(random_experts(EXPERTS, 2, WIDE, HIDDEN, seed=1), weights)
    packed: Any = kernel_named("triton_fp32").pack(experts, problem.routed)
    assert packed.gate_up.values.data_ptr() == experts.gate_up.values.data_ptr(), "weights are used in place"
    packed = replace(packed, tiles=(tile, replace(tile, interleave_gate_up=False, depth=1)))
    x = heavy_tailed(9, HIDDEN, seed=5)
    x[4] = 0.0
    routing = Routing(topk_ids=uneven_ids(9, 2, EXPERTS, seed=3), topk_weights=torch.rand(9, 2) + 0.1)
    local = Local(num_experts=EXPERTS)
    batch, handle = local.dispatch(x, routing)
    rows = packed.run(batch, Poisoned())
    assert rows.dtype == torch.float32
    found = local.combine(rows, handle, dtype=torch.float32)
    matrices = experts.gate_up.decode(), experts.down.decode()
    truth = moe_truth(x, *matrices, routing.topk_ids, routing.topk_weights, ActivationSpec(limit=3.0))
    assert relative_error(found, truth) < 1e-6
    swapped = moe_truth(x, matrices[0].flip(1), matrices[1], routing.topk_ids, routing.topk_weights, ActivationSpec())
    assert relative_error(swapped, truth) > 0.1
    direct = Direct(parts=PipelineParts(experts=packed, dispatcher=local, top_k=2, num_experts=EXPERTS))
    assert torch.equal(direct(x[:2], _first(routing, 2), dtype=torch.float32), found[:2])


def _first(routing: Routing, count: int) -> Routing:
    return Routing(topk_ids=routing.topk_ids[:count].contiguous(), topk_weights=routing.topk_weights[:count])


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_plans_name_the_kernel(weights: str, capability: tuple[int, int]) -> None:
    made = plan(problem_of(weights, capability))
    assert made.kernel == "triton_fp32"
    assert made.capturable
    assert {token_range.tiles for token_range in made.token_ranges} == {"small tiles"}
    assert f"weights {weights}, activations fp32 (multiplied as TF32x3)" in made.explain()
    assert plan(problem_of(weights, capability), Overrides(kernel="reference")).kernel == "reference"
    assert plan(problem_of("mxfp4", capability)).kernel == "reference"
    if weights == "bf16":
        half = replace(problem_of("bf16", capability), dtype="bf16")
        assert plan(half).kernel == "triton_bf16"
