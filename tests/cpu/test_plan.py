"""plan() is pure, explains itself, obeys or refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from collegium import (
    ActivationSpec,
    DeviceFacts,
    InputError,
    Limits,
    MoESpec,
    Overrides,
    Placement,
    PlanError,
    Problem,
    RoutingSpec,
    SharedSpec,
    SpecError,
    encode_experts,
    plan,
)
from collegium.experts import KERNELS
from collegium.experts.cpu import panels
from collegium.formats import FORMATS
from collegium.parallel.placement import linear
from collegium.planning import expert_bytes
from collegium.testing.compare import random_experts
from raising import raises_with

CPU = DeviceFacts(kind="cpu", threads=2)
H200 = DeviceFacts(kind="cuda", name="NVIDIA H200", capability=(9, 0), memory=141 << 30)


def problem(device=CPU, **more):
    spec = MoESpec(
        hidden_size=2880,
        intermediate_size=1408,
        num_experts=17,
        routing=RoutingSpec(top_k=3),
        weight_format="mxfp4",
        **more,
    )
    return Problem(spec=spec, device=device)


def test_unchosen_candidates_have_refusal_reasons(monkeypatch):
    monkeypatch.setattr(panels, "find_spec", lambda name: None)
    made = plan(problem())
    assert made.kernel == "cpu_grouped"
    assert {r.name for r in made.refusals if r.what == "kernel"} == {k.name for k in KERNELS} - {"cpu_grouped"}
    reasons = {r.name: r.reason for r in made.refusals}
    assert "cpu_grouped" in reasons["reference"]
    for name in ("triton_w4a16", "direct"):
        assert "cpu" in reasons[name]
        assert "CUDA GPU" in reasons[name]
    assert "Overrides(dispatcher='partial')" in reasons["partial"]
    for piece in ("17 experts", "top-3", "cpu_grouped", "mxfp4", "refused    reference"):
        assert piece in made.explain()


def test_planning_for_gpu_needs_no_gpu():
    made = plan(problem(H200))
    assert made.kernel == "triton_w4a16"
    assert made.capturable
    assert any(r.name == "cpu_grouped" and "cuda" in r.reason for r in made.refusals)


def test_forced_choices_are_never_replaced():
    assert plan(problem(), Overrides(kernel="reference")).kernel == "reference"
    with pytest.raises(PlanError, match=r"cpu_grouped.*cuda"):
        plan(problem(H200), Overrides(kernel="cpu_grouped"))
    with raises_with(PlanError, "cpu_grouped"):
        plan(problem(), Overrides(kernel="marlin"))
    with pytest.raises(InputError, match="fp8_group128"):
        plan(problem(), Overrides(activation_format="fp7"))


def test_quantised_activations_choose_kernels():
    made = plan(problem(), Overrides(activation_format="fp8_group128"))
    assert made.kernel == "reference"
    assert made.problem.activation_format == "fp8_group128"
    assert any(r.name == "cpu_grouped" and "fp8_group128" in r.reason for r in made.refusals)


@pytest.mark.parametrize("weight_format", [f.name for f in FORMATS if f.name != "fp32"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_format_has_a_gpu_kernel(weight_format, dtype):
    spec = MoESpec(
        hidden_size=256, intermediate_size=128, num_experts=4, routing=RoutingSpec(top_k=2), weight_format=weight_format
    )  # fmt: skip
    for capability in ((8, 0), (9, 0), (10, 0)):
        device = DeviceFacts(kind="cuda", capability=capability, memory=1 << 36)
        made = plan(Problem(spec=spec, device=device, dtype=dtype))
        assert made.kernel.startswith("triton_")
        assert made.activation_format == dtype


@pytest.mark.parametrize("weight_format", [f.name for f in FORMATS if not f.read_only])
@pytest.mark.parametrize("sizes", [(90, 56), (176, 33), (256, 192)], ids=str)
def test_planned_bytes_match_weight_bytes(weight_format, sizes):
    hidden, wide = sizes
    weights = encode_experts(random_experts(3, 2, wide, hidden, seed=1), weight_format)
    spec = MoESpec(
        hidden_size=hidden,
        intermediate_size=wide,
        num_experts=3,
        routing=RoutingSpec(top_k=1),
        weight_format=weight_format,
    )
    assert 3 * expert_bytes(spec) == weights.gate_up.nbytes + weights.down.nbytes


def test_routed_experts_form_a_layer():
    whole = problem().spec
    latent = replace(
        whole,
        latent_size=24,
        latent_norm_eps=1e-6,
        shared=SharedSpec(intermediate_size=8),
        routing=RoutingSpec(top_k=2, score="sigmoid", correction_bias=True, scale=2.5),
    )
    assert latent.routed_alone() == replace(whole, hidden_size=24, routing=RoutingSpec(top_k=2))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: RoutingSpec(top_k=0), "top_k"),
        (lambda: RoutingSpec(top_k=2, topk_groups=3, groups=2), "topk_groups"),
        (lambda: ActivationSpec(kind="situ", limit=3.0), "limit"),
        (lambda: replace(problem().spec, latent_size=-5), "latent_size: found -5, allowed: a whole number, at least 1"),
        (lambda: Limits(max_tokens=1 << 63), "max_tokens: found 9223372036854775808, allowed: at least 1"),
        (lambda: Limits(max_tokens=2.5), "max_tokens: found 2.5, allowed: at least 1, a whole number"),  # type: ignore[arg-type]
        (lambda: Limits(max_tokens=True), "max_tokens: found True, allowed: at least 1, a whole number"),
        (lambda: Limits(rank_tokens=2.0), "rank_tokens: found 2.0, allowed: None, or 1 to"),  # type: ignore[arg-type]
        (lambda: problem(DeviceFacts(kind="mps")), "device kind: found 'mps', allowed: cpu, cuda"),  # type: ignore[arg-type]
        (
            lambda: plan(problem(shared=SharedSpec(intermediate_size=32, weight_format="fp7"))),
            "'fp7'.*mxfp4",
        ),
        (lambda: replace(linear(4, 0, 2), slice_size=-3), "slice_size: .*-3"),
        (
            lambda: replace(problem(), placement=replace(linear(4, 0, 2), ranks=((0, 1), (2, 17)))),
            r"placement.expert_ids: .*\[17\].*0 to 16",
        ),
        (lambda: ActivationSpec(kind="swish"), "swiglu_oai"),  # type: ignore[arg-type]
        (
            lambda: (
                problem(shared=None, latent_size=None, expert_bias=False)
                and MoESpec(hidden_size=4, intermediate_size=4, num_experts=2, routing=RoutingSpec(top_k=3))
            ),
            "num_experts=2",
        ),
    ],
)
def test_specs_that_contradict_themselves(make, text):
    with pytest.raises(SpecError, match=text):
        make()


SMALL = MoESpec(hidden_size=32, intermediate_size=32, num_experts=4, routing=RoutingSpec(top_k=2))
NEIGHBOURS = replace(H200, sms=132, peers=2)
WITH_NORM = replace(SMALL, latent_size=32, latent_norm_eps=1e-6)


@pytest.mark.parametrize("ids", [((0, 1, 2, 3), (2, 3, 0, 1)), ((0, 1, 2, 3), (0, 1)), ((0, 1, 2, 3),) * 2])
def test_ranks_plan_one_dispatcher(ids):
    placed = [Placement(rank=rank, world_size=2, expert_ids=ids[rank], ranks=ids) for rank in range(2)]
    found = {plan(Problem(spec=SMALL, device=NEIGHBOURS, placement=each)).dispatcher for each in placed}
    assert found == {"local" if ids[0] == ids[1] else "symm_mem"}


@pytest.mark.parametrize("graph", [False, True])
def test_room_for_the_same_tokens(graph):
    placed = replace(linear(4, 0, 2), same_tokens=True)
    asked = Problem(spec=SMALL, device=H200, placement=placed, graph=graph)
    for room in (1, 32, 64):
        assert plan(replace(asked, limits=Limits(max_tokens=64, rank_tokens=room))).problem.limits.rank_tokens == room


def test_shared_experts_on_the_slow_kernel():
    spec = replace(SMALL, shared=SharedSpec(intermediate_size=32, weight_format="fp32"))
    for placed, peers in ((None, 1), (linear(4, 0, 2), 1), (linear(4, 0, 2), 2)):
        asked = Problem(spec=spec, device=replace(NEIGHBOURS, peers=peers), placement=placed)
        made = plan(asked)
        assert (made.kernel, made.shared_kernel) == ("triton_bf16", "reference")
        assert (made.capturable, made.side_stream_tokens) == (False, 0)
        with raises_with(PlanError, "triton_bf16", "reference", "graph"):
            plan(replace(asked, graph=True))
    # A wish for an activation format is no wish for the slow kernel.
    four = replace(SMALL, weight_format="mxfp4", shared=SharedSpec(intermediate_size=32, weight_format="bf16"))
    with raises_with(PlanError, "triton_w4a8", "bf16", "fp8_token"):
        plan(Problem(spec=four, device=H200), Overrides(activation_format="fp8_token"))


@pytest.mark.parametrize("more", [{"spec": WITH_NORM}, {"combine": "reduced"}, {"placement": linear(2, 2, 3)}])
def test_plans_suggest_only_valid_overrides(more):
    asked = Problem(**{"spec": SMALL, "device": CPU, "placement": linear(4, 0, 2), **more})
    if "placement" in more:
        asked = replace(asked, spec=replace(SMALL, num_experts=2))
    with pytest.raises(PlanError):
        plan(asked, Overrides(dispatcher="partial"))
    try:
        said = plan(asked).explain()
    except PlanError as error:
        said = str(error)
    assert "Overrides(dispatcher='partial')" not in said
