"""The layer against a float64 truth that shares no code with it, for every format, activation and ugly size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from collegium import (
    ActivationSpec,
    DeviceFacts,
    InputError,
    LatentWeights,
    Limits,
    MoELayer,
    MoESpec,
    Overrides,
    Problem,
    RouterWeights,
    Routing,
    RoutingError,
    RoutingSpec,
    SharedSpec,
    SharedWeights,
    encode_experts,
    moe,
    plan,
)
from collegium.formats import FORMATS
from collegium.formats.unquantised import DTYPES
from collegium.ops.linear import linear
from collegium.ops.quantize import ACTIVATION_FORMATS
from collegium.ops.route import route
from collegium.stages.call import Call
from collegium.testing.compare import heavy_tailed, random_experts, relative_error, uneven_ids
from collegium.types import ACTIVATION_KINDS
from raising import raises_with
from truth import moe_truth

CPU = DeviceFacts(kind="cpu", threads=1)
KERNEL_NAMES = ["cpu_grouped", "reference"]  # what runs here; tests/gpu has the others
# Relative L2 error of the layer output against float64 on the dequantised weights.
BOUNDS = {"bf16": 0.01, "fp16": 0.002, "fp32": 1e-5}
SHAPES = [(17, 90, 56, 3), (5, 176, 33, 1), (8, 128, 130, 4)]


def truth_of(x, weights, ids, topk_weights, activation):
    biases = None if weights.down_bias is None else (weights.gate_up_bias, weights.down_bias)
    return moe_truth(x, weights.gate_up.decode(), weights.down.decode(), ids, topk_weights, activation, biases)


def problem_of(experts, hidden, wide, top_k, *, weight_format="fp32", dtype="fp32", bias=False, **more):
    spec = MoESpec(
        hidden_size=hidden,
        intermediate_size=wide,
        num_experts=experts,
        routing=RoutingSpec(top_k=top_k),
        weight_format=weight_format,
        expert_bias=bias,
        **more,
    )
    return Problem(spec=spec, device=CPU, limits=Limits(max_tokens=64), dtype=dtype)


@pytest.mark.each_choice
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kernel", KERNEL_NAMES)
@pytest.mark.parametrize("weight_format", [f.name for f in FORMATS if not f.read_only])
def test_layer_matches_truth_on_dequantised_weights(weight_format, kernel, shape):
    experts, hidden, wide, top_k = shape
    weights = encode_experts(random_experts(experts, 2, wide, hidden, seed=1), weight_format)
    problem = problem_of(experts, hidden, wide, top_k, weight_format=weight_format, dtype="bf16")
    layer = MoELayer(weights, plan(problem, Overrides(kernel=kernel)))
    x = heavy_tailed(23, hidden, seed=2).bfloat16()
    ids = uneven_ids(23, top_k, experts, seed=3)
    topk_weights = torch.rand(23, top_k) + 0.1
    found = layer(x, routing=Routing(topk_ids=ids, topk_weights=topk_weights))
    assert found.shape == x.shape
    assert found.dtype == x.dtype
    truth = truth_of(x, weights, ids, topk_weights, ActivationSpec())
    assert relative_error(found, truth) < BOUNDS["bf16"]


@pytest.mark.each_choice
@pytest.mark.parametrize("kernel", KERNEL_NAMES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
def test_every_activation_with_and_without_bias(kind, bias, kernel):
    limit = 0.7 if kind in ("swiglu", "swiglu_oai", "swiglu_step") else None
    activation = ActivationSpec(kind=kind, limit=limit, beta=0.5)
    weights = random_experts(5, 2 if activation.gated else 1, 33, 48, seed=4, bias=bias)
    problem = problem_of(5, 48, 33, 2, bias=bias, activation=activation)
    x, ids, topk_weights = heavy_tailed(9, 48, seed=5), uneven_ids(9, 2, 5, seed=6), torch.rand(9, 2)
    found = MoELayer(weights, plan(problem, Overrides(kernel=kernel)))(
        x, routing=Routing(topk_ids=ids, topk_weights=topk_weights)
    )
    assert relative_error(found, truth_of(x, weights, ids, topk_weights, activation)) < 1e-5


@pytest.mark.parametrize("name", [f.name for f in ACTIVATION_FORMATS])
def test_reference_recipe_quantises_both_activations(name):
    """The error must be what two roundings of this format cost: neither none nor much more."""
    weights = encode_experts(random_experts(8, 2, 96, 160, seed=7), "mxfp4")
    problem = problem_of(8, 160, 96, 2, weight_format="mxfp4")
    layer = MoELayer(weights, plan(problem, Overrides(kernel="reference", activation_format=name)))
    assert layer.plan.activation_format == name
    x, ids, topk_weights = (
        heavy_tailed(31, 160, seed=8),
        uneven_ids(31, 2, 8, seed=9),
        torch.rand(31, 2) + 0.1,
    )
    found = layer(x, routing=Routing(topk_ids=ids, topk_weights=topk_weights))
    error = relative_error(found, truth_of(x, weights, ids, topk_weights, ActivationSpec()))
    low, high = {
        "fp32": (0, 1e-5),
        "bf16": (5e-4, 0.01),
        "fp16": (5e-5, 0.002),
        "nvfp4": (0.05, 0.35),
        "nvfp4_static": (0.05, 0.35),
        "nvfp4_expert": (0.05, 0.35),
    }.get(name, (0.01, 0.08))
    assert low <= error < high


def test_gate_and_up_are_not_interchangeable():
    weights = random_experts(4, 2, 32, 64, seed=10)
    x, ids, ones = heavy_tailed(8, 64, seed=11), uneven_ids(8, 2, 4, seed=12), torch.ones(8, 2)
    swapped = moe(x, weights.gate_up.decode().flip(1), weights.down.decode(), ids, ones)
    right = moe(x, weights.gate_up.decode(), weights.down.decode(), ids, ones)
    truth = truth_of(x, weights, ids, ones, ActivationSpec())
    assert relative_error(right, truth) < 1e-5
    assert relative_error(swapped, truth) > 0.2


@pytest.mark.parametrize("name", ["x", "gate_up", "down", "topk_ids", "topk_weights"])
def test_what_is_no_tensor_is_named(name):
    weights = random_experts(4, 2, 32, 64, seed=10)
    given = {"x": heavy_tailed(2, 64, seed=11), "gate_up": weights.gate_up, "down": weights.down}
    given |= {"topk_ids": uneven_ids(2, 2, 4, seed=12), "topk_weights": torch.ones(2, 2)}
    with pytest.raises(InputError, match=f"moe: {name} is a list; allowed: a tensor"):
        moe(**{**given, name: [[1.0, 2.0]]})


@pytest.mark.parametrize("kernel", KERNEL_NAMES)
def test_zero_tokens_and_one_hot_expert(kernel):
    weights = random_experts(6, 2, 24, 40, seed=13)
    layer = MoELayer(weights, plan(problem_of(6, 40, 24, 1), Overrides(kernel=kernel)))
    empty = layer(
        torch.empty(0, 40),
        routing=Routing(topk_ids=torch.empty(0, 1, dtype=torch.int64), topk_weights=torch.empty(0, 1)),
    )
    assert empty.shape == (0, 40)
    for tokens in (1, 50):
        x, ids, ones = heavy_tailed(tokens, 40, seed=14), torch.full((tokens, 1), 5), torch.ones(tokens, 1)
        found = layer(x, routing=Routing(topk_ids=ids, topk_weights=ones))
        assert relative_error(found, truth_of(x, weights, ids, ones, ActivationSpec())) < 1e-5


@pytest.mark.parametrize("kernel", KERNEL_NAMES)
def test_batches_over_max_tokens_are_chunked(kernel):
    weights = random_experts(6, 2, 24, 40, seed=15)
    x, ids, w = heavy_tailed(50, 40, seed=16), uneven_ids(50, 2, 6, seed=17), torch.rand(50, 2)
    whole = problem_of(6, 40, 24, 2)
    pieces = replace(whole, limits=Limits(max_tokens=16))
    routing = Routing(topk_ids=ids, topk_weights=w)
    one, many = (MoELayer(weights, plan(p, Overrides(kernel=kernel)))(x, routing=routing) for p in (whole, pieces))
    assert relative_error(many, truth_of(x, weights, ids, w, ActivationSpec())) < 1e-5
    if kernel == "reference":
        assert relative_error(one, many) < 1e-6


@pytest.mark.parametrize("kernel", KERNEL_NAMES)
def test_non_contiguous_and_batched_input(kernel):
    weights = random_experts(6, 2, 24, 40, seed=18)
    layer = MoELayer(weights, plan(problem_of(6, 40, 24, 2), Overrides(kernel=kernel)))
    wide = heavy_tailed(12, 80, seed=19)
    x = wide[:, ::2]
    ids, w = uneven_ids(12, 2, 6, seed=20), torch.rand(12, 2)
    routing = Routing(topk_ids=ids, topk_weights=w)
    expected = layer(x.contiguous(), routing=routing)
    assert torch.equal(layer(x, routing=routing), expected)
    assert torch.equal(layer(x.reshape(3, 4, 40), routing=routing).reshape(12, 40), expected)


@pytest.mark.parametrize("kernel", KERNEL_NAMES)
def test_dropped_assignments_ignore_poison(kernel):
    weights = random_experts(6, 2, 24, 40, seed=21)
    layer = MoELayer(weights, plan(problem_of(6, 40, 24, 2), Overrides(kernel=kernel)))
    x, w = heavy_tailed(4, 40, seed=22), torch.ones(4, 2)
    ids = torch.tensor([[0, -1], [2, 2], [99, 3], [-1, -1]])
    x[3], w[0, 1], w[3] = torch.nan, torch.nan, torch.inf
    found = layer(x, routing=Routing(topk_ids=ids, topk_weights=w))
    truth = truth_of(x[:2], weights, ids[:2], w[:2].nan_to_num(), ActivationSpec())
    assert relative_error(found[:2], truth) < 1e-5
    assert found[2].isnan().all()
    assert torch.equal(found[3], torch.zeros(40))
    checked = MoELayer(weights, layer.plan, checked=True)
    with raises_with(RoutingError, "token 1", "slot 1", "2"):
        checked(x[:2], routing=Routing(topk_ids=ids[:2], topk_weights=w[:2]))
    with pytest.raises(RoutingError, match="99"):
        checked(x, routing=Routing(topk_ids=ids, topk_weights=w))


@pytest.mark.parametrize("kernel", KERNEL_NAMES)
def test_router_weight_on_the_input(kernel):
    weights = random_experts(6, 2, 24, 40, seed=23)
    problem = problem_of(6, 40, 24, 1)
    on_input = replace(problem, spec=replace(problem.spec, routing=RoutingSpec(top_k=1, weight_on_input=True)))
    x, ids, w = heavy_tailed(7, 40, seed=24), uneven_ids(7, 1, 6, seed=25), torch.rand(7, 1) + 0.5
    found = MoELayer(weights, plan(on_input, Overrides(kernel=kernel)))(
        x, routing=Routing(topk_ids=ids, topk_weights=w)
    )
    truth = truth_of(x * w, weights, ids, torch.ones(7, 1), ActivationSpec())
    assert relative_error(found, truth) < 1e-5


def test_own_router_shared_expert_and_gate():
    weights, shared = random_experts(6, 2, 24, 40, seed=26), random_experts(1, 2, 56, 40, seed=27)
    problem = problem_of(6, 40, 24, 2, shared=SharedSpec(intermediate_size=56, gated=True))
    router, gate = heavy_tailed(6, 40, seed=28), heavy_tailed(1, 40, seed=29)
    layer = MoELayer(
        weights,
        plan(problem),
        router=RouterWeights(weight=router),
        shared=SharedWeights(experts=shared, gate=gate),
    )
    x = heavy_tailed(11, 40, seed=30)
    probabilities = torch.softmax(x.double() @ router.double().T, dim=-1)
    top = probabilities.topk(2)
    w = top.values / top.values.sum(-1, keepdim=True)
    routed = truth_of(x, weights, top.indices, w, ActivationSpec())
    dense = truth_of(x, shared, torch.zeros(11, 1, dtype=torch.int64), torch.ones(11, 1), ActivationSpec())
    truth = routed + torch.sigmoid(x.double() @ gate.double().T) * dense
    assert relative_error(layer(x), truth) < 1e-5
    assert relative_error(layer(x, router_logits=x @ router.T), truth) < 1e-5
    with pytest.raises(InputError, match="shared"):
        MoELayer(weights, plan(problem))


@pytest.mark.parametrize("kernel", KERNEL_NAMES)
@pytest.mark.parametrize("most", [8192, 4])
@pytest.mark.parametrize("latent", [False, True])
def test_out_may_alias_the_input(kernel, most, latent):
    sizes = {"latent_size": 32} if latent else {}
    inside = 32 if latent else 40
    weights, shared = random_experts(6, 2, 24, inside, seed=26), random_experts(1, 2, 56, 40, seed=27)
    problem = problem_of(6, 40, 24, 2, shared=SharedSpec(intermediate_size=56, gated=True), **sizes)
    layer = MoELayer(
        weights,
        plan(replace(problem, limits=Limits(max_tokens=most)), Overrides(kernel=kernel)),
        router=RouterWeights(weight=heavy_tailed(6, 40, seed=28)),
        shared=SharedWeights(experts=shared, gate=heavy_tailed(1, 40, seed=29)),
        latent=LatentWeights(down=heavy_tailed(32, 40, seed=31), up=heavy_tailed(40, 32, seed=32)) if latent else None,
    )
    x = heavy_tailed(11, 40, seed=30)
    wanted = layer(x)
    for _ in range(3):
        own = x.clone()
        assert layer(own, out=own) is own
        assert torch.equal(own, wanted)


def test_router_dtype_is_converted_once():
    weights = random_experts(6, 2, 24, 40, seed=26)
    problem = problem_of(6, 40, 24, 2)
    router = RouterWeights(weight=heavy_tailed(6, 40, seed=28).bfloat16(), bias=torch.rand(6).half())
    layer = MoELayer(weights, plan(problem), router=router)
    assert layer.router.weight.dtype == layer.router.bias.dtype == torch.float32
    x = heavy_tailed(11, 40, seed=30)
    # The layer's own product: a library's has other bits on some processors.
    logits = linear(x, router.weight.float(), router.bias.float())
    assert torch.equal(layer(x), layer(x, router_logits=logits))
    own = torch.rand(6, 40)
    assert MoELayer(weights, plan(problem), router=RouterWeights(weight=own)).router.weight.data_ptr() == own.data_ptr()


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("bias", [False, True])
def test_router_logits_are_rounded(dtype, bias):
    kind = DTYPES[dtype]
    weights = encode_experts(random_experts(16, 2, 24, 64, seed=26), dtype)
    # Whole numbers, whose sums are exact in any order: rounding alone tells the two layers apart.
    generator = torch.Generator().manual_seed(4)
    x = torch.randint(-9, 10, (200, 64), generator=generator).to(kind)
    router = RouterWeights(
        weight=torch.randint(-7, 8, (16, 64), generator=generator) / 16,
        bias=torch.randint(-50, 50, (16,), generator=generator) / 64 if bias else None,
    )
    exact = x.double() @ router.weight.double().T + (0 if router.bias is None else router.bias.double())
    rounded = exact.to(kind)
    outputs = []
    for asked, logits in ((False, exact.float()), (True, rounded)):
        problem = problem_of(16, 64, 24, 2, weight_format=dtype, dtype=dtype)
        rule = RoutingSpec(top_k=2, score="sigmoid", round_logits=asked)
        layer = MoELayer(weights, plan(replace(problem, spec=replace(problem.spec, routing=rule))), router=router)
        found = [layer(x), layer(x), layer(x[:1]), layer(x, router_logits=logits)]
        assert torch.equal(found[0], found[3])
        assert torch.equal(found[0], found[1])
        assert torch.equal(layer._executor.router(Call(x)).topk_ids, route(logits, rule).topk_ids)
        # Logits from outside stay as they are.
        assert torch.equal(layer(x, router_logits=exact.float()), outputs[0] if outputs else found[0])
        outputs.append(found[0])
    alike = [torch.equal(a, b) for a, b in zip(*outputs, strict=True)]
    assert bool((exact == rounded).all()) == (dtype == "fp32" or (dtype == "fp16" and not bias))
    assert all(alike) or dtype != "fp32"
    assert not all(alike) or dtype != "bf16"


def test_an_assignment_forgets_recorded_launches():
    layer = MoELayer(random_experts(6, 2, 24, 40, seed=26), plan(problem_of(6, 40, 24, 2)))
    for name, value in (("workspaces", None), ("checked", True), ("router", None), ("_context", layer._context)):
        before = layer._executor.replay
        setattr(layer, name, value)
        assert layer._executor.replay is not before


def test_latent_width_with_norm():
    weights = random_experts(6, 2, 24, 40, seed=31)
    problem = problem_of(6, 72, 24, 2, latent_size=40)
    down, up, norm = (
        heavy_tailed(40, 72, seed=32) / 9,
        heavy_tailed(72, 40, seed=33) / 6,
        torch.rand(40) + 0.5,
    )
    layer = MoELayer(weights, plan(problem), latent=LatentWeights(down=down, up=up, norm=norm, norm_eps=1e-5))
    x, ids, w = heavy_tailed(9, 72, seed=34), uneven_ids(9, 2, 6, seed=35), torch.rand(9, 2)
    found = layer(x, routing=Routing(topk_ids=ids, topk_weights=w))
    inner = truth_of(x @ down.T, weights, ids, w, ActivationSpec())
    inner = inner / (inner.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.double()
    assert relative_error(found, inner @ up.double().T) < 1e-5


@pytest.mark.parametrize("kernel", KERNEL_NAMES)
def test_runs_repeat_bit_for_bit(kernel):
    weights = encode_experts(random_experts(6, 2, 48, 64, seed=36), "nvfp4")
    layer = MoELayer(
        weights, plan(problem_of(6, 64, 48, 2, weight_format="nvfp4", dtype="bf16"), Overrides(kernel=kernel))
    )
    x, ids, w = heavy_tailed(33, 64, seed=37).bfloat16(), uneven_ids(33, 2, 6, seed=38), torch.rand(33, 2)
    routing = Routing(topk_ids=ids, topk_weights=w)
    assert torch.equal(layer(x, routing=routing), layer(x, routing=routing))


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (torch.zeros(3, 41), r"x has shape \(3, 41\).*hidden_size=40"),
        (torch.zeros(3, 40, dtype=torch.bfloat16), "bfloat16.*planned for fp32"),
    ],
)
def test_wrong_input_names_what_is_allowed(x, text):
    layer = MoELayer(random_experts(6, 2, 24, 40, seed=39), plan(problem_of(6, 40, 24, 2)))
    with pytest.raises(InputError, match=text):
        layer(x, routing=Routing(topk_ids=torch.zeros(3, 2, dtype=torch.int64), topk_weights=torch.ones(3, 2)))
    with raises_with(InputError, "router_logits", "routing"):
        layer(torch.zeros(3, 40))


def test_logits_beside_a_routing_are_refused():
    """One of the two would be ignored."""
    layer = MoELayer(random_experts(6, 2, 24, 40, seed=39), plan(problem_of(6, 40, 24, 2)))
    x, logits = torch.randn(3, 40), torch.randn(3, 6)
    with raises_with(InputError, "router_logits"):
        layer(x, router_logits=logits, routing=layer.route(x, router_logits=logits))


def test_weights_contradicting_the_spec_refused():
    weights = random_experts(6, 2, 24, 40, seed=40)
    with pytest.raises(InputError, match=r"\(6, 2, 24, 40\).*\(7, 2, 24, 40\)"):
        MoELayer(weights, plan(problem_of(7, 40, 24, 2)))
    with raises_with(InputError, "fp32", "mxfp4"):
        MoELayer(weights, plan(problem_of(6, 40, 24, 2, weight_format="mxfp4")))
    with pytest.raises(InputError, match="gate_up_bias"):
        MoELayer(weights, plan(problem_of(6, 40, 24, 2, bias=True)))


def test_plans_name_the_shared_kernel():
    hopper = DeviceFacts(kind="cuda", name="H200", capability=(9, 0), memory=140 << 30)
    for own, said in (("bf16", "triton_w4a16, triton_bf16 for the shared expert"), ("mxfp4", None)):
        spec = MoESpec(
            hidden_size=128,
            intermediate_size=128,
            num_experts=3,
            routing=RoutingSpec(top_k=2),
            weight_format="mxfp4",
            shared=SharedSpec(intermediate_size=128, weight_format=own),
        )
        shared = SharedWeights(experts=encode_experts(random_experts(1, 2, 128, 128, seed=2), own))
        weights = encode_experts(random_experts(3, 2, 128, 128, seed=1), "mxfp4")
        text = repr(MoELayer(weights, plan(Problem(spec=spec, device=hopper)), shared=shared))
        assert (said or "") in text
        assert ("for the shared expert" in text) == (said is not None)
