"""Every option of the public entries changes the plan, is named in it, or is refused by name."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, get_type_hints

import pytest
import torch

from collegium import (
    ActivationSpec,
    DeviceFacts,
    InputError,
    Limits,
    MoELayer,
    MoEOptions,
    MoESpec,
    Overrides,
    PlanError,
    Problem,
    RouterWeights,
    Routing,
    RoutingSpec,
    SharedSpec,
    load_layer,
    load_model,
    moe_plan,
    plan,
    probe,
)
from collegium.layer_builder import BuilderOptions, LayerBuilder
from collegium.parallel.placement import linear, tensor_parallel
from collegium.problem import PAGING, ExpertsProblem
from collegium.testing.compare import heavy_tailed, random_experts
from raising import raises_with

if TYPE_CHECKING:
    from collections.abc import Callable

H200 = DeviceFacts(kind="cuda", name="NVIDIA H200", capability=(9, 0), memory=141 << 30, sms=132, peers=8)
SPEC = MoESpec(hidden_size=256, intermediate_size=256, num_experts=8, routing=RoutingSpec(top_k=2))
SHARED = replace(SPEC, shared=SharedSpec(intermediate_size=256))
NVFP4 = replace(SPEC, weight_format="nvfp4")
RANKS = linear(8, 1, 4)

ONE_EXPERT = 3 * 2 * 256 * 256  # bytes

# By option: a problem that the option applies to, and overrides that force it.
FORCED: dict[str, tuple[MoESpec, Any, dict[str, Any]]] = {
    "kernel": (SPEC, None, {"kernel": "reference"}),
    "activation_format": (NVFP4, None, {"activation_format": "fp8_token"}),
    "dispatcher": (SPEC, RANKS, {"dispatcher": "all_gather"}),
    "pipeline": (SPEC, None, {"pipeline": "split"}),
    "combine": (SPEC, RANKS, {"combine": "reduced", "dispatcher": "all_to_all"}),
    "shared": (SHARED, None, {"shared": "merged"}),
    "microbatches": (SPEC, RANKS, {"microbatches": 2, "allow_slow": True, "dispatcher": "all_to_all"}),
    "tiles": (SPEC, None, {"tiles": "small"}),
    "unequal_scales": (NVFP4, None, {"unequal_scales": "largest", "activation_format": "nvfp4_static"}),
    "paging": (SPEC, None, {"paging": PAGING[-1]}),
    "allow_slow": (SPEC, RANKS, {"microbatches": 2, "allow_slow": True, "dispatcher": "all_to_all"}),
}
# Overrides of a layer to which they do not apply: printed all the same.
IDLE: dict[str, Any] = {"shared": "merged", "allow_slow": True}


def test_table_has_every_override() -> None:
    assert {*FORCED} == {option.name for option in fields(Overrides)}


@pytest.mark.parametrize("option", FORCED)
def test_overrides_are_named(option: str) -> None:
    spec, placement, options = FORCED[option]
    overrides = Overrides(**options)
    limits = Limits(gpu_bytes=4 * ONE_EXPERT) if option == "paging" else Limits()
    made = plan(Problem(spec=spec, device=H200, placement=placement, limits=limits), overrides)
    line = next(line for line in made.explain().splitlines() if line.startswith("forced "))
    assert f"{option}={options[option]!r}" in line
    assert "changes nothing" not in line
    assert made.overrides == overrides


@pytest.mark.parametrize("option", IDLE)
def test_overrides_without_effect_are_named(option: str) -> None:
    problem = Problem(spec=SPEC, device=H200)
    with raises_with(PlanError, "reduced", "local"):
        plan(problem, Overrides(combine="reduced"))
    text = plan(problem, Overrides(**{option: IDLE[option]})).explain()
    assert f"{option}={IDLE[option]!r} (changes nothing here)" in text
    assert "forced" not in plan(problem).explain()


@pytest.mark.parametrize("option", ["max_tokens", "rank_tokens"])
def test_limits_are_named(option: str) -> None:
    options: dict[str, Any] = {"max_tokens": 777, option: 77}
    limits = Limits(**options)
    problem = Problem(spec=SPEC, device=H200, limits=limits, placement=linear(8, 0, 4))
    assert "77" in plan(problem, Overrides(dispatcher="all_to_all_fixed")).explain()
    assert ("limits all_to_all_fixed alone" in plan(problem).explain()) == (option == "rank_tokens")


def test_gpu_memory_limit_is_named() -> None:
    assert [option.name for option in fields(Limits)] == ["max_tokens", "rank_tokens", "gpu_bytes"]
    texts = [
        plan(Problem(spec=SPEC, device=H200, limits=Limits(gpu_bytes=count * ONE_EXPERT))).explain() for count in (4, 9)
    ]
    assert "paging     4 of 8 experts on the GPU" in texts[0]
    assert f"paging     none: all experts fit into gpu_bytes={9 * ONE_EXPERT:,}" in texts[1]
    problem = Problem(spec=SPEC, device=H200, limits=Limits(gpu_bytes=9 * ONE_EXPERT))
    assert f"paging={PAGING[-1]!r} (changes nothing here)" in plan(problem, Overrides(paging=PAGING[-1])).explain()


# By field of a problem: values that change what the plan prints.
DESCRIBED: dict[str, Any] = {
    "spec": replace(SPEC, intermediate_size=512),
    "device": replace(H200, name="NVIDIA H100"),
    "limits": Limits(max_tokens=16),
    "dtype": "fp16",
    "activation_format": "fp8_token",
    "placement": tensor_parallel(8, 0, 2),
    "graph": True,
    "out_dtype": "fp32",
    "tiles": "small",
}
# Set by the plan, or an override for ranks that has a test above.
DERIVED = {"combine", "sent_as", "shared_slices", "gpu_slots"}


def test_table_has_every_problem_field() -> None:
    assert {*DESCRIBED, *DERIVED} == {option.name for option in fields(Problem)}
    assert {option.name for option in fields(ExpertsProblem)} >= {"tiles", "dtype"}


@pytest.mark.parametrize("option", DESCRIBED)
def test_problems_are_described(option: str) -> None:
    weights = "fp8_tensor" if option == "activation_format" else "bf16"
    problem, value = Problem(spec=replace(SPEC, weight_format=weights), device=H200), DESCRIBED[option]
    changed = plan(replace(problem, **{option: value}))
    if option == "tiles":
        assert changed.token_ranges != plan(replace(problem, tiles="large")).token_ranges
    else:
        assert changed.explain() != plan(problem).explain()


def swapped(x: torch.Tensor, logits: torch.Tensor | None, top_k: int) -> Routing:
    """Choose the first experts for every token."""
    ids = torch.arange(top_k).repeat(len(x), 1)
    return Routing(topk_ids=ids, topk_weights=torch.full(ids.shape, 0.5))


def gate(x: torch.Tensor) -> torch.Tensor:
    """Return logits."""
    return x[:, :8].float()


def mlp(x: torch.Tensor) -> torch.Tensor:
    """Stand for a shared expert, an input transform and a change of experts' rows."""
    return 2 * x


# By option of a layer, what the plan prints.
LAYER: dict[str, tuple[Any, str]] = {
    "router": (gate, "gate gate"),
    "shared": (mlp, "shared_experts mlp"),
    "latent": (mlp, "routed_input_transform mlp"),
    "choose": (swapped, "choose swapped"),
    "after_expert": (mlp, "after_expert mlp"),
    "checked": (True, "checked    every call"),
}


def _layer(**options: Any) -> MoELayer:
    spec = replace(SPEC, latent_size=256) if "latent" in options else SPEC
    problem = Problem(spec=replace(spec, weight_format="fp32"), device=probe("cpu"), dtype="fp32")
    options = {"router": RouterWeights(weight=heavy_tailed(8, 256, seed=1))} | options
    return MoELayer(random_experts(8, 2, 256, 256, seed=2), plan(problem), **options)


def test_table_has_every_layer_option() -> None:
    names = [*inspect.signature(MoELayer.__init__).parameters]
    assert names == ["self", "weights", "plan", *LAYER]


@pytest.mark.parametrize("option", LAYER)
def test_layer_options_are_named(option: str) -> None:
    value, text = LAYER[option]
    layer = _layer(**{option: value})
    assert text in layer.plan.explain()
    assert text in repr(layer)
    assert text not in _layer().plan.explain()


def test_later_options_are_named() -> None:
    layer = _layer()
    layer.checked, layer.choose = True, swapped
    assert "checked    every call" in layer.plan.explain()
    assert "choose swapped" in layer.plan.explain()
    layer.checked, layer.choose = False, None
    assert layer.plan.explain() == _layer().plan.explain()


# What plans describe, or where weights come from.
LOADED = {"weight_format", "dtype", "limits", "overrides", "checked", "device"}
BUILT = {"spec", "placement", "stored", "shared_stored", "router", "shared", "latent", *LOADED}
FILES = {"path", "layer", "adapter", "adapters", "progress", "download", "weights", "others"}


@pytest.mark.parametrize(
    ("entry", "names"),
    [
        (load_layer, LOADED | {"path", "layer", "download", "weights", "others"}),
        (load_model, LOADED - {"checked"} | FILES),
    ],
)
def test_options_of_loading_are_known(entry: Callable[..., Any], names: set[str]) -> None:
    assert {*inspect.signature(entry).parameters} - names - {"layer"} == set()


def test_builder_options_are_known() -> None:
    names = {*inspect.signature(LayerBuilder.__init__).parameters, *get_type_hints(BuilderOptions)}
    assert names - {"self", "options"} == BUILT


@pytest.mark.parametrize("option", sorted(LOADED - {"device"}))
def test_loaded_layers_are_described(option: str) -> None:
    values: dict[str, tuple[Any, str]] = {
        "weight_format": ("nvfp4", "weights nvfp4"),
        "dtype": ("fp16", "activations fp16"),
        "limits": (Limits(max_tokens=33), "for 33 tokens"),
        "overrides": (Overrides(kernel="reference"), "forced     kernel='reference'"),
        "checked": (True, "checked    every call"),
    }
    value, text = values[option]
    layer = load_layer("fables-16m", 0, device="cpu", **{option: value})
    assert text in layer.plan.explain()
    assert text not in load_layer("fables-16m", 0, device="cpu").plan.explain()


X = heavy_tailed(3, 256, seed=4).to(torch.bfloat16)
IDS = torch.tensor([[0, 1], [2, 3], [1, 0]])


def _moe(**options: Any) -> str:
    """Return the plan of ``moe`` as text. stored: bf16, fp8 or nvfp4 weights. x: tokens. Others are MoEOptions."""
    stored = options.pop("stored", "bf16")
    x = options.pop("x", X)
    matrices: list[Any] = [
        torch.zeros(8, 512, 256, dtype=torch.bfloat16),
        torch.zeros(8, 256, 256, dtype=torch.bfloat16),
    ]
    if stored == "fp8":
        matrices = [matrix.to(torch.float8_e4m3fn) for matrix in matrices]
        options = {"w1_scale": torch.ones(8, 4, 2), "w2_scale": torch.ones(8, 2, 2)} | options
    elif stored == "nvfp4":
        matrices = [torch.zeros(*matrix.shape[:-1], 128, dtype=torch.uint8) for matrix in matrices]
        scales = [torch.ones(*matrix.shape[:-1], 16, dtype=torch.float8_e4m3fn) for matrix in matrices]
        options = dict(zip(("w1_scale", "w2_scale"), scales, strict=True)) | options
        options = dict.fromkeys(("w1_global_scale", "w2_global_scale"), torch.ones(8)) | options
    return moe_plan(x, matrices[0], matrices[1], IDS, options=MoEOptions(**options)).explain()


# By option of moe(): a value that changes the plan, or one that is refused by name. Blocks change no choice.
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "w1_scale": ({"stored": "fp8"}, {"w1_scale": torch.ones(8, 512), "w2_scale": torch.ones(8, 256)}),
    "w2_scale": ({"stored": "fp8"}, {"w2_scale": torch.ones(8, 256)}),
    "a1_scale": ({"x": X}, {"a1_scale": torch.ones(3, 2), "stored": "fp8"}),
    "a2_scale": ({"stored": "fp8", "a1_scale": 0.5}, {"a2_scale": 0.25}),
    "apply_router_weight_on_input": ({}, {"apply_router_weight_on_input": True}),
    "out_dtype": ({}, {"out_dtype": torch.float32}),
    "overrides": ({}, {"overrides": Overrides(kernel="reference")}),
}
REFUSED: dict[str, dict[str, Any]] = {
    "w1_scale": {"w1_scale": torch.ones(8, 4, 2)},
    "w2_scale": {"w2_scale": torch.ones(8, 2, 2)},
    "w1_global_scale": {"w1_global_scale": torch.ones(8)},
    "w2_global_scale": {"w2_global_scale": torch.ones(8)},
    "block_shape": {"block_shape": (64, 64)},
    "a1_scale": {"a1_scale": torch.ones(5)},
    "a2_scale": {"a2_scale": torch.ones(5), "a1_scale": torch.ones(3), "stored": "fp8"},
    "expert_map": {"expert_map": torch.zeros(8)},
    "global_num_experts": {"global_num_experts": 9},
    "inplace": {"inplace": True, "out_dtype": torch.float32},
    "out": {"inplace": True, "out": X},
}


def test_tables_have_every_moe_option() -> None:
    assert {*CHANGES, *REFUSED} == {option.name for option in fields(MoEOptions)}


@pytest.mark.parametrize("option", CHANGES)
def test_moe_options_change_plans(option: str) -> None:
    common, changed = CHANGES[option]
    assert _moe(**common, **changed) != _moe(**common)


@pytest.mark.parametrize("option", REFUSED)
def test_moe_options_refused_by_name(option: str) -> None:
    with raises_with(InputError, option):
        _moe(**REFUSED[option])


def test_moe_plans_describe_weights() -> None:
    text = _moe(stored="nvfp4", overrides=Overrides(kernel="reference"))
    assert "weights nvfp4, activations bf16" in text
    assert (
        "swiglu limit 7"
        in moe_plan(
            X, torch.zeros(8, 512, 256), torch.zeros(8, 256, 256), IDS, activation=ActivationSpec(limit=7.0)
        ).explain()
    )
