"""FP8 blocks of other sizes than 128 x 128 as kernels, in Triton's interpreter, against FP32 truth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from collegium import MoELayer, Overrides, RouterWeights
from collegium.errors import InputError
from collegium.experts.reference import Reference
from collegium.experts.triton.tiles.problem import TileChoice
from collegium.formats.fp8_block import Fp8Block
from collegium.formats.unquantised import DTYPES
from collegium.parallel.local import Local
from collegium.planning import kernel_named, plan
from collegium.problem import DeviceFacts, Limits, Problem
from collegium.testing.compare import heavy_tailed, random_experts, relative_error, uneven_ids
from collegium.types import ContiguousBatch, ExpertWeights, MoESpec, Routing, RoutingSpec
from memories import Poisoned
from raising import raises_with

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("tests/gpu makes these comparisons on the device", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

HOPPER = DeviceFacts(kind="cuda", capability=(9, 0))
BLOCKS = [(32, 32), (64, 64), (1, 128)]
CASES = [
    *((block, False, name) for block in BLOCKS for name in ("bf16", "fp8_group128")),
    ((32, 32), True, "bf16"),
    ((40, 96), True, "fp16"),
    ((64, 64), False, "fp16"),
    ((32, 32), True, "mxfp8"),
    ((64, 64), True, "fp8_token"),
]
TILE = TileChoice(block_n=32, block_t=16, warps=4, stages=2, group_t=2)
TILES = {
    "apart": TILE,
    "fused": replace(TILE, fuse_k_block=True),
    "interleaved": replace(TILE, interleave_gate_up=True),
}
EXPERTS, HIDDEN, WIDE = 3, 176, 112


def weights_of(block: tuple[int, int], *, power: bool) -> ExpertWeights[Any]:
    plain = random_experts(EXPERTS, 2, WIDE, HIDDEN, seed=1, bias=True)
    # Blocks differ by up to 2^6.
    steps = torch.exp2(torch.randint(-3, 4, (EXPERTS, 2, WIDE // 16, HIDDEN // 16)).float())
    gate_up = plain.gate_up.decode() * steps.repeat_interleave(16, 2).repeat_interleave(16, 3)
    payloads = [Fp8Block.encode(matrix, block=block, power_of_two=power) for matrix in (gate_up, plain.down.decode())]
    return replace(plain, gate_up=payloads[0], down=payloads[1])


def problem_of(activations: str) -> Problem:
    spec = MoESpec(
        hidden_size=HIDDEN,
        intermediate_size=WIDE,
        num_experts=EXPERTS,
        routing=RoutingSpec(top_k=2),
        weight_format="fp8_block",
        expert_bias=True,
    )
    dtype: Any = activations if activations in ("fp16", "bf16") else "fp32"
    limits = Limits(max_tokens=64)
    return Problem(spec=spec, device=HOPPER, limits=limits, activation_format=activations, dtype=dtype)


def batch_of(dtype: str) -> tuple[ContiguousBatch, Routing]:
    x = heavy_tailed(7, HIDDEN, seed=3).to(DTYPES[dtype])
    routing = Routing(topk_ids=uneven_ids(7, 2, EXPERTS, seed=2), topk_weights=torch.rand(7, 2))
    return Local(num_experts=EXPERTS).dispatch(x, routing)[0], routing


@pytest.mark.parametrize(("block", "power", "activations"), CASES)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.each_choice("activations", "tile")
def test_experts_match_reference(block: tuple[int, int], power: bool, activations: str, tile: str) -> None:
    problem, weights = problem_of(activations), weights_of(block, power=power)
    packed: Any = kernel_named("triton_fp8").pack(weights, problem.routed)
    packed = replace(packed, tiles=(TILES[tile], replace(TILES[tile], interleave_gate_up=False)))
    batch, routing = batch_of(problem.dtype)
    found = packed.run(batch, Poisoned())
    exact = Reference().pack(weights, problem.routed).run(batch)
    # The interpreter truncates numbers that it stores in bfloat16.
    bound = {"bf16": 1e-2, "fp16": 2e-3}.get(activations, 1e-6)
    assert relative_error(found, exact) < bound
    truth = Reference().pack(weights, replace(problem, activation_format="fp32").routed).run(batch)
    assert relative_error(found, truth) < 0.06
    swapped = replace(weights, gate_up=replace(weights.gate_up, **flipped(weights.gate_up)))
    other = Reference().pack(swapped, replace(problem, activation_format="fp32").routed).run(batch)
    assert relative_error(found, other) > 0.3
    unsorted = packed.run_unsorted(batch.x[:2], routing.topk_ids[:2].contiguous(), Poisoned())
    places = torch.argsort(torch.argsort(routing.topk_ids.flatten(), stable=True))[:4]
    assert torch.equal(found[places], unsorted)


def flipped(payload: Any) -> dict[str, torch.Tensor]:
    return {
        "codes": payload.codes.view(torch.uint8).flip(1).view(payload.codes.dtype),
        "scales": payload.scales.flip(1),
    }


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("activations", ["bf16", "fp8_group128"])
def test_deep_steps_have_equal_bits(block: tuple[int, int], activations: str) -> None:
    """One accumulator and several K blocks in a step of the loop."""
    problem, weights = problem_of(activations), weights_of(block, power=False)
    packed: Any = kernel_named("triton_fp8").pack(weights, problem.routed)
    batch, _ = batch_of(problem.dtype)
    depth = 1 if packed.gate_up.layout.decoded else next(n for n in (3, 2) if packed.gate_up.layout.k_blocks % n == 0)
    deep = replace(TILES["interleaved"], depth=depth)
    tall = replace(TILE, block_t=32)
    results = [
        replace(packed, tiles=(first, tall)).run(batch, Poisoned())
        for first in (deep, replace(deep, depth=1, block_n=64))
    ]
    assert torch.equal(*results)


def test_other_blocks_are_refused() -> None:
    weights = weights_of((32, 48), power=False)
    with raises_with(InputError, "(32, 48)", "32 columns", "reference"):
        kernel_named("triton_fp8").pack(weights, problem_of("bf16").routed)
    cpu = replace(problem_of("bf16"), device=DeviceFacts(kind="cpu"))
    layer = MoELayer(
        weights,
        plan(cpu, Overrides(kernel="reference")),
        router=RouterWeights(weight=heavy_tailed(EXPERTS, HIDDEN, seed=4)),
    )
    assert bool(layer(batch_of("bf16")[0].x).isfinite().all())


def test_large_tiles_wait_for_whole_blocks() -> None:
    """Large tiles take powers of two; with float32 scales all batches run in small tiles, and the layer says so."""
    problem = replace(problem_of("bf16"), limits=Limits(max_tokens=8192))
    for power in (False, True):
        packed: Any = kernel_named("triton_fp8").pack(weights_of((32, 32), power=power), problem.routed)
        assert packed.gate_up.layout.runs_large == power
        assert "FP8 in blocks of 32 x 32" in packed.summary("bf16")
