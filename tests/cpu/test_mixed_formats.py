"""Experts whose gate and up have one format and whose down has another: every kernel against float64."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from collegium import (
    DeviceFacts,
    ExpertWeights,
    Limits,
    MoELayer,
    MoESpec,
    Overrides,
    Placement,
    PlanError,
    Problem,
    RouterWeights,
    Routing,
    RoutingSpec,
    SharedSpec,
    SharedWeights,
    encode_experts,
    merge_shared,
    plan,
)
from collegium.errors import InputError
from collegium.experts.triton.tiles import choice as tiles
from collegium.formats.unquantised import DTYPES
from collegium.parallel.local import Local
from collegium.planning import kernel_named
from collegium.runtime.machine import Machine
from collegium.testing.compare import heavy_tailed, random_experts, relative_error, uneven_ids
from collegium.types import ActivationSpec
from integers import encoded
from memories import Noted, Poisoned
from raising import raises_with
from truth import moe_truth

E, H, WIDE, K = 5, 160, 96, 2
CPU = DeviceFacts(kind="cpu")
HOPPER = DeviceFacts(kind="cuda", name="H200", capability=(9, 0), memory=140 << 30, sms=132)
AMPERE = DeviceFacts(kind="cuda", name="A100", capability=(8, 0), memory=80 << 30, sms=108)
BLACKWELL = DeviceFacts(kind="cuda", name="B200", capability=(10, 0), memory=180 << 30, sms=148)
ACT = ActivationSpec(limit=4.0)


def weights_in(first: str, second: str, *, experts: int = E, bias: bool = True, seed: int = 1) -> ExpertWeights[Any]:
    """Return heavy-tailed experts with gate and up in one format and down in another."""
    given = random_experts(experts, 2, WIDE, H, seed=seed, bias=bias)
    return replace(encoded(given, first, 32), down=encoded(given, second, 32).down)


def problem_of(weights: ExpertWeights[Any], device: DeviceFacts, dtype: Any = "bf16", **more: Any) -> Problem:
    spec = MoESpec(
        hidden_size=H,
        intermediate_size=WIDE,
        num_experts=weights.down.shape[0],
        routing=RoutingSpec(top_k=K),
        activation=ACT,
        expert_bias=weights.down_bias is not None,
        **weights.formats,
    )
    return Problem(spec=spec, device=device, dtype=dtype, limits=Limits(max_tokens=64), **more)


def truth_of(x: torch.Tensor, routing: Routing, weights: ExpertWeights[Any]) -> torch.Tensor:
    biases = None if weights.down_bias is None else (weights.gate_up_bias, weights.down_bias)
    matrices = weights.gate_up.decode(), weights.down.decode()
    return moe_truth(x.float(), *matrices, routing.topk_ids, routing.topk_weights, ACT, biases)  # type: ignore[arg-type]


def routing_of(tokens: int) -> Routing:
    """Return a routing with a hot expert, one that nobody chooses, and a slot that is not here."""
    ids = uneven_ids(tokens, K, E, seed=2)
    if tokens > 2:
        ids[ids == E - 1] = 0
        ids[:, 1] = torch.where(ids[:, 0] == ids[:, 1], (ids[:, 0] + 1) % (E - 1), ids[:, 1])
        ids[1, 1] = -1
    weights = torch.rand(tokens, K, generator=torch.Generator().manual_seed(4))
    return Routing(topk_ids=ids, topk_weights=weights)


ON_CPU = [
    ("nvfp4", "fp8_tensor"), ("fp8_channel", "mxfp4"), ("bf16", "int4_group"), ("gguf", "fp16"),
    ("int4_ordered", "bf16"), ("fp8_block", "int8_ordered"), ("bnb4", "fp32"), ("mxfp8", "nvfp4"),
    ("int8_affine", "gguf"),
]  # fmt: skip
ONLY_FUSED = {"gguf", "bnb4", "int4_ordered", "int8_ordered", "int8_affine"}
ON_GPU = [
    ("nvfp4", "fp8_tensor", "bf16", "bf16", "triton_w4a16", "triton_fp8"),
    ("nvfp4", "fp8_tensor", "fp8_token", "bf16", "triton_w4a8", "triton_fp8"),
    ("nvfp4", "fp8_tensor", "fp8_group128", "bf16", "triton_w4a8", "triton_fp8"),
    ("fp8_channel", "nvfp4", "fp8_group128_pow2", "bf16", "triton_fp8", "triton_w4a8"),
    ("fp8_block", "mxfp4", "fp8_token", "fp16", "triton_fp8", "triton_w4a8"),
    ("mxfp4", "int4_group", "fp8_group128", "bf16", "triton_w4a8", "triton_w4a8"),
    ("mxfp4", "bf16", "bf16", "bf16", "triton_w4a16", "triton_bf16"),
    ("bf16", "gguf", "bf16", "bf16", "triton_bf16", "triton_w4a16"),
    ("gguf", "fp16", "bf16", "bf16", "triton_w4a16", "triton_bf16"),
    ("fp16", "mxfp8", "fp16", "fp16", "triton_bf16", "triton_fp8"),
    ("bnb4", "int8_affine", "bf16", "bf16", "triton_w4a16", "triton_w8a16"),
    ("int8_affine", "fp8_block", "bf16", "bf16", "triton_w8a16", "triton_fp8"),
]
BOUNDS = {"bf16": 0.012, "fp16": 0.003, "fp32": 1e-5}


@pytest.mark.each_choice
@pytest.mark.parametrize("kernel", ["cpu_fused", "cpu_grouped", "reference"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("first", "second"), ON_CPU)
def test_kernels_of_a_cpu(first: str, second: str, dtype: Any, kernel: str) -> None:
    weights = weights_in(first, second)
    problem = problem_of(weights, CPU, dtype)
    try:
        made = plan(problem, Overrides(kernel=kernel))
    except PlanError:
        assert dtype == "fp32" if kernel == "cpu_fused" else {first, second} & ONLY_FUSED
        return
    assert f"{kernel} for gate_up, {kernel} for down" in made.explain()
    layer = MoELayer(weights, made)
    for tokens in (0, 1, 23):
        x, routing = heavy_tailed(tokens, H, seed=3).to(DTYPES[dtype]), routing_of(tokens)
        found = layer(x, routing=routing)
        assert found.shape == (tokens, H)
        assert relative_error(found, truth_of(x, routing, weights)) < BOUNDS[dtype]


@pytest.mark.each_choice("first", "second")
@pytest.mark.parametrize("device", [HOPPER, AMPERE, BLACKWELL], ids=lambda facts: facts.name)
@pytest.mark.parametrize(("first", "second", "act", "dtype", "one", "two"), ON_GPU)
def test_kernels_of_a_gpu(
    first: str, second: str, act: str, dtype: Any, one: str, two: str, device: DeviceFacts
) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("these are run in Triton's interpreter")
    weights = weights_in(first, second)
    problem = problem_of(weights, device, dtype, activation_format=act)
    if act.startswith("fp8") and device is AMPERE:
        with raises_with(PlanError, "sm_89"):
            plan(problem, Overrides(kernel=one))
        return
    made = plan(problem)
    assert (made.kernel, made.down_kernel) == (one, two)
    text = made.explain()
    assert f"{one} for gate_up, {two} for down" in text
    assert f"weights {first} (gate_up) and {second} (down)" in text
    packed = kernel_named(one).pack(weights, made.problem.routed)
    assert packed.tiling.family(4) == kernel_named(one).tiling(made.problem.routed).family(4)
    for tokens in (1, 17) if device is HOPPER else (5,):
        x, routing = heavy_tailed(tokens, H, seed=3).to(DTYPES[dtype]), routing_of(tokens)
        batch = Local(num_experts=E).dispatch(x, routing)[0]
        rows = packed.run(batch, Poisoned())
        noted = Noted()
        packed.run(batch, noted)
        planned = kernel_named(one).regions(replace(made.problem.routed, tokens=tokens, rows=tokens * K))
        assert {name: size for name, size in noted.sizes.items() if size > planned.get(name, 0)} == {}
        count = int(batch.expert_offsets[-1])
        owners = torch.repeat_interleave(torch.arange(E), batch.expert_offsets.diff())
        alone = Routing(topk_ids=owners[:, None], topk_weights=torch.ones(count, 1))
        truth = truth_of(x[batch.source[:count]], alone, weights)
        assert relative_error(rows[:count], truth) < (0.06 if act.startswith("fp8") else BOUNDS["bf16"])
    layer = MoELayer(weights, made)
    for tokens in (0, 1, 17) if device is HOPPER else ():
        x, routing = heavy_tailed(tokens, H, seed=3).to(DTYPES[dtype]), routing_of(tokens)
        found = layer(x, routing=routing)
        assert relative_error(found, truth_of(x, routing, weights)) < 0.06 if tokens else found.shape == (0, H)


@pytest.mark.parametrize(
    ("first", "second"), [("mxfp4", "bf16"), ("bf16", "nvfp4"), ("nvfp4", "fp8_channel"), ("fp8_tensor", "mxfp8")]
)
def test_tiles_of_large_batches(first: str, second: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the kernel of large batches runs in C++ on the CPU here")
    for name in ("dequantize_threshold", "large_from"):
        monkeypatch.setattr(tiles, name, lambda *_: 1)
    monkeypatch.setattr(tiles, "_MIN_K", 8)
    weights = weights_in(first, second)
    problem = problem_of(weights, HOPPER)
    small: Any = kernel_named(plan(problem).kernel).pack(
        weights, problem_of(weights, HOPPER, activation_format="bf16").routed
    )
    large = replace(small, machine=Machine(copies=True, compiles=True))
    x, routing = heavy_tailed(40, H, seed=3).bfloat16(), routing_of(40)
    batch = Local(num_experts=E).dispatch(x, routing)[0]
    count = int(batch.expert_offsets[-1])
    assert large.tiling.family(count) == "large tiles"
    wanted, found = small.run(batch), large.run(batch)  # torch fills fresh memory with NaN here
    # The multiplication on this CPU adds in another order than the tensor core's small tiles.
    assert relative_error(found[:count], wanted[:count].double()) < 0.01
    owners = torch.repeat_interleave(torch.arange(E), batch.expert_offsets.diff())
    alone = Routing(topk_ids=owners[:, None], topk_weights=torch.ones(count, 1))
    assert relative_error(found[:count], truth_of(x[batch.source[:count]], alone, weights)) < BOUNDS["bf16"]


def test_a_plan_counts_both_formats() -> None:
    pairs = [("bf16", "bf16"), ("nvfp4", "nvfp4"), ("nvfp4", "bf16"), ("bf16", "nvfp4")]
    sizes = {pair: plan(problem_of(weights_in(*pair), CPU)).expert_bytes for pair in pairs}
    assert sizes["nvfp4", "bf16"] < sizes["bf16", "nvfp4"] < sizes["bf16", "bf16"]
    assert sum(list(sizes.values())[:2]) == sum(list(sizes.values())[2:])
    weights = weights_in("nvfp4", "fp8_tensor", bias=False)
    made = plan(problem_of(weights, CPU))
    stored = sum(part.nbytes for part in (weights.gate_up, weights.down))
    assert abs(made.expert_bytes * E - stored) <= 16 * E
    entries = made.to_json()
    assert (entries["weight_format"], entries["down_format"]) == ("nvfp4", "fp8_tensor")


@pytest.mark.parametrize(
    ("first", "second", "act", "line"),
    [
        ("nvfp4", "gguf", "fp8_token", "activation format fp8_token.* down .*gguf.* bf16 or fp16"),
        ("gguf", "nvfp4", "fp8_token", "activation format fp8_token.* gguf .*bf16 or fp16"),
        ("int4_group", "int4_ordered", "bf16", "gate_up and down .*int4_ordered.* both"),
        ("bf16", "fp32", "bf16", "down .*fp32"),
    ],
)
def test_unsupported_format_pairs_give_reasons(first: str, second: str, act: str, line: str) -> None:
    problem = problem_of(weights_in(first, second), HOPPER, activation_format=act, graph=True)
    with pytest.raises(PlanError) as refusal:
        plan(problem)
    assert re.search(line, str(refusal.value))


def test_mega_is_refused_by_name() -> None:
    weights = weights_in("mxfp4", "fp8_tensor", bias=False)
    ids = ((0, 1, 2), (3, 4))
    placement = Placement(rank=0, world_size=2, expert_ids=ids[0], ranks=ids)
    device = replace(HOPPER, peers=2)
    problem = problem_of(weights, device, placement=placement, activation_format="fp8_token")
    with raises_with(PlanError, "mxfp4", "gate_up", "fp8_tensor"):
        plan(problem, Overrides(pipeline="mega", dispatcher="symm_mem"))
    made = plan(problem, Overrides(dispatcher="symm_mem"))
    assert "mega" not in made.pipelines
    assert made.down_kernel == "triton_fp8"


def test_formats_and_payloads_have_to_agree() -> None:
    weights = weights_in("nvfp4", "fp8_tensor")
    made = plan(problem_of(weights, CPU))
    for wrong, name in ((weights_in("nvfp4", "nvfp4"), "down"), (weights_in("fp8_tensor", "fp8_tensor"), "gate_up")):
        with raises_with(InputError, name, "payload"):
            MoELayer(wrong, made)


def test_swap_to_mixed_formats_and_back() -> None:
    plain, mixed = weights_in("bf16", "bf16"), weights_in("mxfp4", "fp8_channel", seed=9)
    layer = MoELayer(plain, plan(problem_of(plain, CPU)))
    x, routing = heavy_tailed(9, H, seed=3).bfloat16(), routing_of(9)
    before = layer(x, routing=routing)
    layer.swap(mixed)
    assert layer.spec.formats == ("mxfp4", "fp8_channel")
    assert relative_error(layer(x, routing=routing), truth_of(x, routing, mixed)) < BOUNDS["bf16"]
    layer.swap(plain)
    assert torch.equal(layer(x, routing=routing), before)


def test_copies_and_moved_experts() -> None:
    weights = weights_in("nvfp4", "fp8_tensor")
    layer = MoELayer(weights, plan(problem_of(weights, CPU)))
    x, routing = heavy_tailed(9, H, seed=3).bfloat16(), routing_of(9)
    wanted = layer(x, routing=routing)
    assert torch.equal(copy.deepcopy(layer)(x, routing=routing), wanted)
    fresh = layer.experts.resized(E)
    for slot in range(E):
        fresh.put(slot, layer.experts.take(E - 1 - slot))
    turned = torch.where(routing.topk_ids < 0, -1, E - 1 - routing.topk_ids)
    layer.replan(layer.plan, fresh)
    moved = layer(x, routing=replace(routing, topk_ids=turned))
    assert relative_error(moved, wanted.double()) < 1e-2
    assert relative_error(layer(x, routing=routing), wanted.double()) > 0.1


@pytest.mark.each_choice
@pytest.mark.parametrize("way", ["merged", "sequential"])
@pytest.mark.parametrize("shared", [("nvfp4", "fp8_tensor"), ("bf16", "bf16"), ("mxfp4", "bf16")])
def test_a_shared_expert_beside_mixed_ones(shared: tuple[str, str], way: Any) -> None:
    routed = weights_in("nvfp4", "fp8_tensor", bias=False)
    own = weights_in(*shared, experts=1, bias=False, seed=7)
    problem = problem_of(routed, CPU)
    asked = SharedSpec(intermediate_size=WIDE, **own.formats)
    problem = replace(problem, spec=replace(problem.spec, shared=asked))
    if way == "merged" and shared != ("nvfp4", "fp8_tensor"):
        with pytest.raises(PlanError, match=f"weights: found {shared[0]}"):
            plan(problem, Overrides(shared="merged"))
        return
    given = SharedWeights(experts=own)
    router = RouterWeights(weight=heavy_tailed(E, H, seed=5))
    made = plan(problem, Overrides(shared=way))
    if way == "merged":
        layer = MoELayer(merge_shared(made, routed, given), made, router=router)
    else:
        layer = MoELayer(routed, made, router=router, shared=given)
    x, routing = heavy_tailed(9, H, seed=3).bfloat16(), routing_of(9)
    every = Routing(topk_ids=torch.zeros(9, 1, dtype=torch.int64), topk_weights=torch.ones(9, 1))
    truth = truth_of(x, routing, routed) + truth_of(x, every, own)
    assert relative_error(layer(x, routing=routing), truth) < BOUNDS["bf16"]


def test_shared_expert_inherits_routed_formats() -> None:
    spec = problem_of(weights_in("nvfp4", "fp8_tensor"), CPU).spec
    alone = {
        (None, None): ("nvfp4", "fp8_tensor"),
        ("bf16", None): ("bf16", "bf16"),
        ("bf16", "mxfp4"): ("bf16", "mxfp4"),
        (None, "mxfp4"): ("nvfp4", "mxfp4"),
    }
    for (first, second), formats in alone.items():
        shared = SharedSpec(intermediate_size=WIDE, weight_format=first, down_format=second)
        assert replace(spec, shared=shared).shared_alone().formats == formats


def test_encoding_keeps_what_has_the_format() -> None:
    weights = weights_in("nvfp4", "fp8_tensor")
    made = encode_experts(weights, "fp8_tensor")
    assert made.formats == {"weight_format": "fp8_tensor", "down_format": None}
    assert torch.equal(made.down.codes.view(torch.uint8), weights.down.codes.view(torch.uint8))
