"""A NaN, or an id that is no expert, is seen in its token's row and nowhere else: whole layers on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from collegium import (
    LatentWeights,
    Limits,
    MoELayer,
    MoESpec,
    Overrides,
    Problem,
    RouterWeights,
    Routing,
    RoutingSpec,
    SharedSpec,
    SharedWeights,
    encode_experts,
    moe,
    plan,
    probe,
)
from collegium.errors import RoutingError
from collegium.ops.quantize import ACTIVATION_FORMATS
from collegium.testing.compare import heavy_tailed, random_experts
from collegium.types import ACTIVATION_KINDS, ActivationSpec
from poisons import INFINITY, NAN, check_not_here, check_seen, poisons
from raising import raises_with

E, H, WIDE, K = 6, 160, 96, 2
KERNELS = ("cpu_grouped", "reference")


def build(kernel: str = "cpu_grouped", activations: str | None = None, *, spec: Any = None, **extras: Any) -> MoELayer:
    facts: dict[str, Any] = {"hidden_size": H, "routing": RoutingSpec(top_k=K), **(spec or {})}
    made = MoESpec(intermediate_size=WIDE, num_experts=E, weight_format="bf16", **facts)
    experts = random_experts(E, made.gate_up_parts, WIDE, made.expert_hidden_size, seed=1)
    problem = Problem(spec=made, device=probe("cpu"), limits=Limits(max_tokens=64))
    chosen = plan(problem, Overrides(kernel=kernel, activation_format=activations))
    return MoELayer(encode_experts(experts, "bf16"), chosen, **extras)


def tokens(count: int) -> torch.Tensor:
    return heavy_tailed(count, H, seed=2).bfloat16()


def nan_rows(found: torch.Tensor) -> list[int]:
    """Return the tokens whose row is NaN throughout, when all others are finite."""
    lost = found.isnan().all(dim=1)
    assert found[~lost].isfinite().all()
    return lost.nonzero().flatten().tolist()


@pytest.mark.parametrize("count", [1, 2, 23])
@pytest.mark.parametrize("kernel", KERNELS)
def test_wrong_tokens_poison_their_row(kernel: str, count: int) -> None:
    layer = build(kernel)
    for poison in poisons(layer, tokens(count), count // 2, seed=3):
        # The CPU's library sums in another order when an expert has another count of rows.
        check_seen(layer, poison, exact=False)
    check_not_here(layer, tokens(max(count, 2)))


@pytest.mark.parametrize("activations", [form.name for form in ACTIVATION_FORMATS])
def test_nan_visible_through_every_activation_format(activations: str) -> None:
    layer = build("reference", activations)
    for poison in poisons(layer, tokens(9), 4, seed=3):
        check_seen(layer, poison, exact=False)


@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_activation_hides_it(kind: Any, kernel: str) -> None:
    limit = 2.0 if kind in ("swiglu", "swiglu_oai", "swiglu_step") else None
    layer = build(kernel, spec={"activation": ActivationSpec(kind=kind, limit=limit)})
    for poison in poisons(layer, tokens(5), 1, seed=3):
        # A bounded activation makes a number of an infinity, in plain code too.
        if poison.name not in ("x inf", "x -inf"):
            check_seen(layer, poison, exact=False)


@pytest.mark.parametrize("kernel", KERNELS)
def test_weights_on_the_input(kernel: str) -> None:
    layer = build(kernel, spec={"routing": RoutingSpec(top_k=K, weight_on_input=True)})
    for poison in poisons(layer, tokens(7), 3, seed=3):
        check_seen(layer, poison, exact=False)
    check_not_here(layer, tokens(7))


def test_shared_expert_does_not_hide_nan() -> None:
    shared = encode_experts(random_experts(1, 2, 64, H, seed=4), "bf16")
    layer = build(
        spec={"shared": SharedSpec(intermediate_size=64, gated=True)},
        shared=SharedWeights(experts=shared, gate=heavy_tailed(1, H, seed=5)),
    )
    for poison in poisons(layer, tokens(7), 3, seed=3):
        check_seen(layer, poison, exact=False)


def test_latent_width_and_norm() -> None:
    latent = LatentWeights(
        down=heavy_tailed(128, H, seed=5) / 12, up=heavy_tailed(H, 128, seed=6) / 11, norm=torch.rand(128) + 0.5
    )
    layer = build(spec={"latent_size": 128, "latent_norm_eps": latent.norm_eps}, latent=latent)
    for poison in poisons(layer, tokens(7), 3, seed=3):
        # The norm makes 0 and NaN of infinities: their row is not finite, but not NaN throughout.
        if "inf" not in poison.name:
            check_seen(layer, poison, exact=False)


@pytest.mark.parametrize("count", [1, 9])
def test_the_layers_own_router_shows_it(count: int) -> None:
    layer = build(router=RouterWeights(weight=heavy_tailed(E, H, seed=6), bias=torch.zeros(E)))
    x = tokens(count)
    assert nan_rows(layer(x)) == []
    bad = x.clone()
    bad[0, 3] = NAN
    assert nan_rows(layer(bad)) == [0]
    for name in ("weight", "bias"):
        broken = {"weight": heavy_tailed(E, H, seed=6), "bias": torch.zeros(E)}
        broken[name].view(-1)[7 % broken[name].numel()] = NAN
        assert nan_rows(build(router=RouterWeights(**broken))(x)) == list(range(count)), name


BIASED = [
    RoutingSpec(top_k=K, score="sigmoid", correction_bias=True, renormalize_eps=1e-20),
    RoutingSpec(top_k=K, score="softmax", correction_bias=True, renormalize=False),
    RoutingSpec(top_k=K, score="sqrt_softplus", correction_bias=True, scale=2.5),
    RoutingSpec(top_k=K, score="sigmoid", correction_bias=True, groups=3, topk_groups=1, group_score="top2_sum"),
    RoutingSpec(top_k=K, score="softmax", correction_bias=True, renormalize_floor=1e-12),
]


@pytest.mark.parametrize("routing", BIASED)
def test_nan_correction_bias_poisons_all_tokens(routing: RoutingSpec) -> None:
    """It ranks first in every row, so plain code chooses by it; which expert it names says nothing."""
    weight, bias, x = heavy_tailed(E, H, seed=6), torch.randn(E) * 0.01, tokens(9)
    router = RouterWeights(weight=weight, correction_bias=bias)
    assert nan_rows(build(spec={"routing": routing}, router=router)(x)) == []
    bad = bias.index_fill(0, torch.tensor([4]), NAN)
    layer = build(spec={"routing": routing}, router=RouterWeights(weight=weight, correction_bias=bad))
    assert nan_rows(layer(x)) == list(range(9))
    layer = build(spec={"routing": routing}, router=RouterWeights(weight=weight, correction_bias=bad), checked=True)
    with raises_with(RoutingError, "expert 4", "6", "NaN"):
        layer(x)


def test_nan_expert_scales_poison_their_tokens() -> None:
    spec = {"routing": RoutingSpec(top_k=K, expert_scale=True)}
    weight, x = heavy_tailed(E, H, seed=6), tokens(23)
    scale = torch.rand(E) + 0.5
    clean = build(spec=spec, router=RouterWeights(weight=weight, expert_scale=scale))(x)
    hit = ((x.float() @ weight.T).topk(K).indices == 4).any(dim=1)
    assert 0 < int(hit.sum()) < 23
    scale[4] = NAN
    found = build(spec=spec, router=RouterWeights(weight=weight, expert_scale=scale))(x)
    assert nan_rows(found) == hit.nonzero().flatten().tolist()
    assert torch.equal(found[~hit], clean[~hit])


def test_hash_routing_exposes_unknown_ids() -> None:
    table = torch.stack([torch.randperm(E)[:K] for _ in range(50)])
    weight, x, ids = heavy_tailed(E, H, seed=6), tokens(9), torch.arange(9)
    spec = {"routing": RoutingSpec(top_k=K, score="sqrt_softplus", hash_routing=True)}
    clean = build(spec=spec, router=RouterWeights(weight=weight, hash_table=table))(x, token_ids=ids)
    table[4, 1], table[5, 0] = E, -2
    layer = build(spec=spec, router=RouterWeights(weight=weight, hash_table=table))
    ids[7], ids[8] = 50, -1
    found = layer(x, token_ids=ids)
    assert nan_rows(found) == [4, 5, 7, 8]
    torch.testing.assert_close(found[[0, 1, 2, 3, 6]], clean[[0, 1, 2, 3, 6]], rtol=0.02, atol=0.02)


def test_custom_routing_exposes_bad_values() -> None:
    weights = torch.rand(9, K) + 0.1
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(9)])
    weights[2, 1], ids[5, 0], ids[6, 1], weights[6, 1] = NAN, E, -1, NAN
    router = RouterWeights(weight=heavy_tailed(E, H, seed=6))
    layer = build(router=router, choose=lambda *_: (ids, weights))
    assert nan_rows(layer(tokens(9))) == [2, 5]
    layer = build(router=router, choose=lambda *_: (ids, weights), checked=True)
    with raises_with(RoutingError, "token 5", "slot 0", "6"):
        layer(tokens(9))


def test_repeated_expert_is_added_twice() -> None:
    layer, x = build(), tokens(3)
    ids, weights = torch.tensor([[2, 2], [1, 0], [5, 5]]), torch.tensor([[0.25, 0.5], [1.0, 1.0], [1.0, -1.0]])
    found = layer(x, routing=Routing(topk_ids=ids, topk_weights=weights))
    once = layer(x, routing=Routing(topk_ids=torch.tensor([[2, -1]] * 3), topk_weights=torch.tensor([[0.75, NAN]] * 3)))
    torch.testing.assert_close(found[0], once[0], rtol=0.02, atol=0.02)
    assert not found[2].any()


def test_moe_shows_it() -> None:
    made, x = random_experts(E, 2, WIDE, H, seed=1), tokens(5)
    ids, weights = torch.tensor([[0, 1]] * 5), torch.ones(5, 2)
    ids[1, 0], ids[3, 1] = E, -1
    weights[2, 1], weights[3, 1], weights[4, 0] = NAN, NAN, INFINITY
    found = moe(x, made.gate_up.decode().bfloat16(), made.down.decode().bfloat16(), ids, weights)
    assert found[[1, 2]].isnan().all()
    assert found[[0, 3]].isfinite().all()
    assert found[4].isinf().all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_checked_refuses_by_name(kernel: str) -> None:
    layer, free = build(kernel, checked=True), build(kernel)
    seen = set()
    for poison in poisons(layer, tokens(9), 4, seed=3):
        if poison.name.startswith("x "):
            continue
        assert torch.equal(layer(**poison.clean), free(**poison.clean))
        with pytest.raises(RoutingError, match="token 4") as caught:
            layer(**poison.call)
        seen.add(str(caught.value).split(":")[0])
    assert seen == {"topk_ids", "topk_weights", "router logits"}
