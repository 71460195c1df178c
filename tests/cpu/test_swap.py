"""Other experts in a layer that was built, recorded, compiled or captured before: never the old ones again."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from collegium import (
    DeviceFacts,
    InputError,
    Limits,
    MoELayer,
    MoESpec,
    Overrides,
    PlanError,
    Problem,
    RouterWeights,
    RoutingSpec,
    SharedSpec,
    SharedWeights,
    encode_experts,
    plan,
)
from collegium.execution import executor
from collegium.formats import Bf16
from collegium.testing.compare import heavy_tailed, random_experts
from raising import raises_with
from ranks import run_ranks
from split_layers import taken

E, H, INNER = 6, 64, 32
FORMATS = ("bf16", "mxfp4", "fp8_block", "bf16", "nvfp4")


def experts_of(seed: int, weight_format: str = "bf16", inner: int = INNER) -> Any:
    return encode_experts(random_experts(E, 2, inner, H, seed=seed), weight_format)


def layer_of(weights: Any, force: Overrides | None = None, *, shared: bool = True, **more: Any) -> MoELayer:
    spec = MoESpec(
        hidden_size=H,
        intermediate_size=INNER,
        num_experts=E,
        routing=RoutingSpec(top_k=2),
        weight_format=weights.down.name,
        shared=SharedSpec(intermediate_size=INNER, weight_format="bf16") if shared else None,
    )
    problem = Problem(spec=spec, device=DeviceFacts(kind="cpu"), limits=Limits(max_tokens=16))
    dense = encode_experts(random_experts(1, 2, INNER, H, seed=8), "bf16")
    return MoELayer(
        weights,
        plan(problem, force),
        router=RouterWeights(weight=heavy_tailed(E, H, seed=9)),
        shared=SharedWeights(experts=dense) if shared else None,
        **more,
    )


@pytest.mark.parametrize("shared", [True, False])
def test_layers_continue_with_swapped_experts(shared: bool) -> None:
    layer, x = layer_of(experts_of(1), shared=shared), heavy_tailed(23, H, seed=2).bfloat16()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))
    seen = [layer(x)]
    for seed, weight_format in enumerate(FORMATS, start=2):
        weights = experts_of(seed, weight_format)
        for force in (None,) if shared else (None, Overrides(kernel="reference")):
            layer.swap(weights, force)
            fresh = layer_of(weights, force, shared=shared)
            wanted = fresh(x)
            assert torch.equal(layer(x), wanted)
            assert torch.equal(layer(x[:1]), fresh(x[:1]))
            assert torch.equal(compiled(x), wanted)
            # Its dispatcher is forced now, which is one more reason against the others.
            assert replace(layer.plan, refusals=()) == replace(fresh.plan, refusals=())
            assert layer.spec == fresh.spec
            assert str(layer) == str(fresh)
        assert not any(torch.equal(wanted, other) for other in seen)
        seen.append(wanted)
    # What was copied before goes on as it was.
    old = copy.deepcopy(layer)
    layer.swap(experts_of(1))
    assert torch.equal(layer(x), seen[0])
    assert torch.equal(old(x), seen[-1])


def test_what_was_recorded_is_forgotten() -> None:
    layer = layer_of(experts_of(1))
    before = layer._executor.replay
    layer.swap(experts_of(2))
    assert layer._executor.replay is not before


@pytest.mark.parametrize("how", ["a pass", "rows packed by expert"])
def test_captured_layers_keep_their_experts(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = layer_of(experts_of(1)), heavy_tailed(5, H, seed=2).bfloat16()
    wanted = layer(x)
    with monkeypatch.context() as patched:
        patched.setattr(executor, "is_capturing", lambda _: True)
        if how == "a pass":
            layer(x)
        else:
            layer.run_batched(x.new_zeros(E, 1, H), torch.ones(E, dtype=torch.int64))
    with raises_with(InputError, "CUDA"):
        layer.swap(experts_of(2))
    assert torch.equal(layer(x), wanted)
    one = layer_of(experts_of(1))
    one.swap(experts_of(2))  # a graph of one layer is not a graph of another


def test_refused_swaps_change_nothing() -> None:
    layer, x = layer_of(experts_of(1)), heavy_tailed(5, H, seed=2).bfloat16()
    wanted, before = layer(x), layer.plan
    good = experts_of(2)
    far = replace(good, **{name: getattr(good, name).to("meta") for name in ("gate_up", "down")})
    for weights, force, error, text in (
        (
            experts_of(2, inner=48),
            None,
            InputError,
            r"gate_up: the payload's logical shape is \(6, 2, 48, 64\), the spec",
        ),
        (replace(good, gate_up=good.gate_up[:5], down=good.down[:5]), None, InputError, r"\(5, 2, 32, 64\), the spec"),
        (replace(good, down_bias=torch.zeros(E, H)), None, InputError, "down_bias: found"),
        (far, None, InputError, "the weights are on meta, the layer is on cpu, not captured"),
        (good, Overrides(kernel="triton_bf16"), PlanError, "no kernel runs bf16 weights"),
        (
            good,
            Overrides(activation_format="fp8_token"),
            InputError,
            "the shared expert is packed for cpu_grouped and bf16",
        ),
    ):
        with pytest.raises(error, match=text):
            layer.swap(weights, force)
    assert torch.equal(layer(x), wanted)
    assert layer.plan is before
    alone = layer_of(experts_of(1), shared=False)
    alone.swap(good, Overrides(activation_format="fp8_token"))
    assert alone.plan.kernel == "reference"
    assert torch.equal(alone(x), layer_of(good, Overrides(activation_format="fp8_token"), shared=False)(x))


def test_experts_cannot_be_assigned() -> None:
    layer, x = layer_of(experts_of(1), after_expert=lambda rows: 2 * rows), heavy_tailed(5, H, seed=2).bfloat16()
    wanted = layer(x)
    for name, value in (("experts", layer_of(experts_of(2)).experts), ("after_expert", None)):
        with raises_with(InputError, name, "swap(weights)"):
            setattr(layer, name, value)
    assert torch.equal(layer(x), wanted)
    layer.swap(experts_of(2))
    assert torch.equal(layer(x), layer_of(experts_of(2), after_expert=lambda rows: 2 * rows)(x))


def _swapped(rank: int) -> list[str]:
    """Return what differs between a layer over ranks and one layer, both with other experts in other formats."""
    from collegium.parallel.placement import linear

    placed, wrong = linear(E, rank, 2), list[str]()
    x = heavy_tailed(3 + rank, H, seed=rank).bfloat16()
    one = layer_of(experts_of(1), shared=False)
    layer = MoELayer(
        taken(experts_of(1), placed.expert_ids),
        plan(replace(one.plan.problem, placement=placed)),
        router=one.router,
    )
    layer(x)
    for seed, weight_format in enumerate(("mxfp4", "bf16"), start=2):
        one.swap(experts_of(seed, weight_format), Overrides(kernel="reference"))
        layer.swap(taken(experts_of(seed, weight_format), placed.expert_ids), Overrides(kernel="reference"))
        if not torch.equal(layer(x), one(x)):
            wrong.append(weight_format)
    return wrong


def test_swap_on_ranks_matches_one_rank() -> None:
    assert run_ranks(_swapped, 2) == [[], []]


def test_replaced_weights_equal_the_checkpoint() -> None:
    """The format that holds numbers as they are keeps them: nothing of the old experts is left in a pass."""
    layer, x = layer_of(experts_of(1), shared=False), heavy_tailed(5, H, seed=2).bfloat16()
    zeros = experts_of(1)
    zeros = replace(zeros, down=Bf16(values=torch.zeros_like(zeros.down.values), shape=zeros.down.shape))
    layer.swap(zeros)
    assert not layer(x).any()
