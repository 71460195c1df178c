"""An output dtype, a router dtype and weights apart from the dtype of the input; what contradicts a plan is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from collegium import (
    ActivationSpec,
    InputError,
    LatentWeights,
    Limits,
    MoELayer,
    MoESpec,
    Overrides,
    PlanError,
    Problem,
    RouterWeights,
    Routing,
    RoutingSpec,
    SharedSpec,
    SharedWeights,
    SpecError,
    encode_experts,
    plan,
    probe,
)
from collegium.formats.unquantised import DTYPES
from collegium.parallel.placement import expert_ids_of, linear
from collegium.testing.compare import heavy_tailed, random_experts, relative_error, uneven_ids
from collegium.types import ActivationKind
from raising import raises_with
from ranks import run_ranks
from truth import moe_truth

E, H, INNER, T, K = 7, 64, 48, 9, 3


def problem_of(weights: str = "fp32", **changes: Any) -> Problem:
    spec_changes = {
        name: changes.pop(name) for name in ("routing", "activation", "shared", "latent_size") if name in changes
    }
    spec = MoESpec(
        **{
            "hidden_size": H,
            "intermediate_size": INNER,
            "num_experts": E,
            "routing": RoutingSpec(top_k=K),
            "weight_format": weights,
            **spec_changes,
        }
    )
    return Problem(**{"spec": spec, "device": probe("cpu"), "limits": Limits(max_tokens=8), "dtype": "bf16", **changes})


def inputs(tokens: int = T) -> tuple[torch.Tensor, Routing]:
    ids = uneven_ids(tokens, K, E, seed=3)
    ids[::4, 0] = -1
    weights = heavy_tailed(tokens, K, seed=4, channels=False).abs()
    return heavy_tailed(tokens, H, seed=5), Routing(topk_ids=ids, topk_weights=weights)


def truth_of(x: torch.Tensor, weights: Any, routing: Routing, *, swapped: bool = False) -> torch.Tensor:
    gate_up = weights.gate_up.decode()
    gate_up = gate_up.flip(1) if swapped else gate_up
    return moe_truth(x, gate_up, weights.down.decode(), routing.topk_ids, routing.topk_weights, ActivationSpec())


@pytest.mark.parametrize(
    ("weights", "dtype", "out_dtype", "bound"),
    [
        ("fp32", "bf16", "fp32", 0.01),
        ("bf16", "fp32", "bf16", 0.004),
        ("mxfp4", "fp32", "fp16", 1e-3),
        ("bf16", "fp32", "fp32", 1e-5),  # parameters of another dtype than the input
        ("fp32", "fp16", None, 3e-3),
    ],
)
def test_the_output_has_its_own_dtype(weights: str, dtype: str, out_dtype: Any, bound: float) -> None:
    made = encode_experts(random_experts(E, 2, INNER, H, seed=1), weights)
    chosen = plan(problem_of(weights, dtype=dtype, out_dtype=out_dtype))
    layer = MoELayer(made, chosen)
    x, routing = inputs()
    x = x.to(DTYPES[dtype])
    found = layer(x, routing=routing)
    assert (layer.input_dtype, layer.output_dtype) == (x.dtype, found.dtype) == (x.dtype, DTYPES[out_dtype or dtype])
    assert relative_error(found, truth_of(x, made, routing)) < bound
    assert relative_error(found, truth_of(x, made, routing, swapped=True)) > 0.3
    out = torch.empty(T, H, dtype=found.dtype)
    assert layer(x, routing=routing, out=out) is out
    assert torch.equal(out, found)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x, routing=routing), found)
    if out_dtype is not None and out_dtype != dtype:
        assert f"{dtype} input, {out_dtype} output" in chosen.explain()
        assert chosen.to_json()["out_dtype"] == out_dtype
        with pytest.raises(InputError, match=rf"out .*{x.dtype}.*{out_dtype}.*Problem\(out"):
            layer(x, routing=routing, out=torch.empty_like(x))
    else:
        assert "output" not in chosen.explain()
    layer.warm_up()


def test_float32_keeps_what_bfloat16_rounds_away() -> None:
    made = random_experts(E, 2, INNER, H, seed=1)
    x, routing = inputs()
    outputs = [
        MoELayer(made, plan(problem_of(out_dtype=name)))(x.bfloat16(), routing=routing) for name in (None, "fp32")
    ]
    assert torch.equal(outputs[1].bfloat16(), outputs[0])
    assert not torch.equal(outputs[1], outputs[0].float())


def test_rows_by_expert_have_output_dtype() -> None:
    made = random_experts(E, 2, INNER, H, seed=1)
    x = heavy_tailed(E * 4, H, seed=2).view(E, 4, H).bfloat16()
    counts = torch.arange(E) % 4
    for kernel in ("reference", "cpu_grouped"):
        layer = MoELayer(made, plan(problem_of(out_dtype="fp32"), Overrides(kernel=kernel)))
        found = layer.run_batched(x, counts)
        assert found.dtype == torch.float32
        tokens = x.view(-1, H)
        ids = torch.where(torch.arange(4) < counts[:, None], torch.arange(E)[:, None], -1).view(-1, 1)
        wanted = truth_of(tokens, made, Routing(topk_ids=ids, topk_weights=torch.ones(len(ids), 1)))
        filled = ids.view(E, 4) >= 0
        assert relative_error(found[filled], wanted.view(E, 4, H)[filled]) < 0.02


@pytest.mark.parametrize("latent", [False, True])
def test_shared_experts_and_latent_widths(latent: bool) -> None:
    made, shared = random_experts(E, 2, INNER, 32 if latent else H, seed=1), random_experts(1, 2, 40, H, seed=9)
    sizes: dict[str, Any] = {"shared": SharedSpec(intermediate_size=40)}
    projections = None
    if latent:
        sizes["latent_size"] = 32
        projections = LatentWeights(down=heavy_tailed(32, H, seed=6) / 8, up=heavy_tailed(H, 32, seed=7) / 6)
    layer = MoELayer(
        made,
        plan(problem_of(out_dtype="fp32", **sizes)),
        shared=SharedWeights(experts=shared),
        latent=projections,
    )
    x, routing = inputs()
    x = x.bfloat16()
    found = layer(x, routing=routing)
    rows = x if projections is None else (x.float() @ projections.down.T.bfloat16().float()).bfloat16()
    wanted = truth_of(rows, made, routing)
    if projections is not None:
        wanted = wanted @ projections.up.T.double()
    one = Routing(topk_ids=torch.zeros(T, 1, dtype=torch.int64), topk_weights=torch.ones(T, 1))
    wanted = wanted + truth_of(x, shared, one)
    assert found.dtype == torch.float32
    assert relative_error(found, wanted) < 0.01


def _ranks(rank: int) -> list[float]:
    made = random_experts(E, 2, INNER, H, seed=1)
    place = linear(E, rank, 2)
    x, routing = inputs(T + rank)
    x = x.bfloat16()
    whole = MoELayer(made, plan(problem_of(out_dtype="fp32", limits=Limits(max_tokens=16))))(x, routing=routing)
    errors = []
    for name in ("all_to_all", "all_gather", "all_to_all_fixed"):
        problem = problem_of(out_dtype="fp32", placement=place, limits=Limits(max_tokens=16))
        layer = MoELayer(expert_ids_of(made, place.expert_ids), plan(problem, Overrides(dispatcher=name)))
        found = layer(x, routing=routing)
        errors.append(relative_error(found, whole) if found.dtype == torch.float32 else 9.0)
    return errors


def test_over_ranks() -> None:
    for errors in run_ranks(_ranks, 2):
        assert max(errors) < 1e-6


@pytest.mark.parametrize("rounded", ["bf16", "fp16"])
def test_the_router_has_its_own_dtype(rounded: str) -> None:
    made = random_experts(E, 2, INNER, H, seed=1)
    router = RouterWeights(weight=heavy_tailed(E, H, seed=2, channels=False))
    x, _ = inputs()
    rule = RoutingSpec(top_k=K, score="sigmoid", round_logits=rounded)  # type: ignore[arg-type]
    layer = MoELayer(made, plan(problem_of(dtype="fp32", routing=rule)), router=router)
    logits = (x @ router.weight.T).to(DTYPES[rounded])
    wanted = layer(x, router_logits=logits)
    assert relative_error(layer(x), wanted) < 2e-3
    exact = MoELayer(made, plan(problem_of(dtype="fp32", routing=replace(rule, round_logits=False))), router=router)
    assert not torch.equal(layer(x), exact(x))
    assert re.search(rf"logits .*{rounded}", layer.plan.explain())
    with raises_with(SpecError, "round_logits", "'float32'", "False", "True"):
        RoutingSpec(top_k=K, round_logits="float32")  # type: ignore[arg-type]


def test_unknown_dtypes_are_refused() -> None:
    with raises_with(SpecError, "out_dtype", "'fp8'", "None", "bf16", "fp16", "fp32"):
        problem_of(out_dtype="fp8")
    layer = MoELayer(random_experts(E, 2, INNER, H, seed=1), plan(problem_of()))
    x, routing = inputs()
    with raises_with(InputError, "out", "torch.float64"):
        layer(x.bfloat16(), routing=routing, out=torch.empty(T, H, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["swiglu", "gelu"])
@pytest.mark.parametrize("weights", ["fp32", "mxfp4"])
def test_a_cpu_has_no_approximate_functions(kind: ActivationKind, weights: str) -> None:
    problem = problem_of(weights, activation=ActivationSpec(kind=kind, fast=True))
    with pytest.raises(PlanError, match=r"cpu_grouped: fast=True.*\n.*reference: fast=True"):
        plan(problem)
    gpu = replace(problem.device, kind="cuda", capability=(9, 0))
    assert (
        "with fast math" in plan(replace(problem_of("bf16", activation=problem.spec.activation), device=gpu)).explain()
    )


@pytest.mark.parametrize(
    ("changes", "overrides", "text"),
    [
        ({}, Overrides(kernel="reference"), "kernel reference, not cpu_grouped"),
        ({"weights": "mxfp4"}, Overrides(kernel="cpu_grouped"), "weight_format mxfp4, not fp32"),
        ({"activation": ActivationSpec(limit=2.0)}, None, "limit=2.0"),
        ({"dtype": "fp16"}, None, "dtype fp16, not bf16"),
    ],
)
def test_replan_refuses_what_is_not_packed(changes: dict[str, Any], overrides: Any, text: str) -> None:
    layer = MoELayer(random_experts(E, 2, INNER, H, seed=1), plan(problem_of()))
    x, routing = inputs()
    x = x.bfloat16()
    before = layer(x, routing=routing)
    with raises_with(InputError, "replan", text, "swap"):
        layer.replan(plan(problem_of(**changes), overrides), layer.experts)
    assert torch.equal(layer(x, routing=routing), before)
    layer.replan(plan(problem_of(limits=Limits(max_tokens=3))), layer.experts)
    assert torch.equal(layer(x, routing=routing), before)
