"""plan() is pure, explains itself, obeys or refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from collegium import (
    ActivationSpec,
    Choice,
    DeviceFacts,
    InputError,
    MoESpec,
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
from collegium.planning import expert_bytes
from collegium.testing.compare import random_experts

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


def test_every_candidate_is_chosen_or_refused_with_a_reason(monkeypatch):
    monkeypatch.setattr(panels, "find_spec", lambda name: None)
    made = plan(problem())
    assert made.kernel == "cpu_grouped"
    assert {r.name for r in made.refusals if r.what == "kernel"} == {k.name for k in KERNELS} - {"cpu_grouped"}
    reasons = {r.name: r.reason for r in made.refusals}
    assert "cpu_grouped is before it" in reasons["reference"]
    assert reasons["triton_w4a16"] == "asked for cpu; it needs a CUDA GPU"
    assert reasons["direct"] == "asked for cpu; it needs a CUDA GPU"
    assert "Choice(dispatcher='partial')" in reasons["partial"]
    for piece in ("17 experts", "top-3", "cpu_grouped", "mxfp4", "refused    reference"):
        assert piece in made.explain()


def test_planning_for_another_machine_needs_no_gpu():
    made = plan(problem(H200))
    assert made.kernel == "triton_w4a16"
    assert made.capturable
    assert any(r.name == "cpu_grouped" and "cuda" in r.reason for r in made.refusals)


def test_a_forced_choice_is_obeyed_or_refused_never_replaced():
    assert plan(problem(), Choice(kernel="reference")).kernel == "reference"
    with pytest.raises(PlanError, match=r"cpu_grouped.*cuda"):
        plan(problem(H200), Choice(kernel="cpu_grouped"))
    with pytest.raises(PlanError, match=r"known kernels: .*cpu_grouped, reference"):
        plan(problem(), Choice(kernel="marlin"))
    with pytest.raises(InputError, match="fp8_group128"):
        plan(problem(), Choice(activation_format="fp7"))


def test_a_quantised_activation_format_goes_to_a_kernel_that_applies_it():
    made = plan(problem(), Choice(activation_format="fp8_group128"))
    assert made.kernel == "reference"
    assert made.problem.activation_format == "fp8_group128"
    assert any(r.name == "cpu_grouped" and "fp8_group128" in r.reason for r in made.refusals)


@pytest.mark.parametrize("weight_format", [f.name for f in FORMATS if f.name != "fp32"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_format_has_a_kernel_on_a_gpu_beside_both_16_bit_dtypes(weight_format, dtype):
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
def test_planned_bytes_are_the_bytes_of_the_weights(weight_format, sizes):
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


def test_the_routed_experts_alone_are_a_layer_of_their_width():
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
        (lambda: RoutingSpec(top_k=2, kept_groups=3, groups=2), "kept_groups"),
        (lambda: ActivationSpec(kind="situ", limit=3.0), "limit"),
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
