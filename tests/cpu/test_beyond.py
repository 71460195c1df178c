"""Routings that engines have beyond the layer's own rules, built of what the layer gives: kept, replayed, changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from collegium import (
    ActivationSpec,
    DeviceFacts,
    InputError,
    Limits,
    MoELayer,
    MoESpec,
    Problem,
    RouterWeights,
    Routing,
    RoutingError,
    RoutingSpec,
    SharedSpec,
    SharedWeights,
    plan,
)
from collegium.ops.route import route
from collegium.testing.compare import heavy_tailed, random_experts, relative_error
from truth import moe_truth

E, H, WIDE, T = 6, 40, 24, 11
CPU = DeviceFacts(kind="cpu", threads=1)
SPECS: dict[str, Any] = {
    "plain": RoutingSpec(top_k=2),
    "bias and groups": RoutingSpec(top_k=2, score="sigmoid", groups=3, topk_groups=2, correction_bias=True, scale=2.5),
    "hash table": RoutingSpec(top_k=2, score="sqrt_softplus", hash_routing=True),
    "input of its own": RoutingSpec(top_k=2, input_norm_eps=1e-6, expert_scale=True),
    "weight on the input": RoutingSpec(top_k=1, score="sigmoid", renormalize=False, weight_on_input=True),
}


def layer_of(rule: RoutingSpec, most: int = 64, **more: Any) -> MoELayer:
    spec = MoESpec(
        hidden_size=H,
        intermediate_size=WIDE,
        num_experts=E,
        routing=rule,
        weight_format="fp32",
        shared=SharedSpec(intermediate_size=16),
    )
    problem = Problem(spec=spec, device=CPU, limits=Limits(max_tokens=most), dtype="fp32")
    router = RouterWeights(
        weight=heavy_tailed(E, H, seed=3),
        correction_bias=torch.linspace(-0.2, 0.2, E) if rule.correction_bias else None,
        expert_scale=torch.linspace(0.5, 2, E) if rule.expert_scale else None,
        hash_table=torch.arange(20)[:, None].add(torch.arange(2)) % E if rule.hash_routing else None,
    )
    shared = SharedWeights(experts=random_experts(1, 2, 16, H, seed=7))
    return MoELayer(random_experts(E, 2, WIDE, H, seed=1), plan(problem), router=router, shared=shared, **more)


@pytest.mark.parametrize("name", list(SPECS))
@pytest.mark.parametrize("most", [64, 4])
def test_routings_can_be_reused(name: str, most: int) -> None:
    """Rollout routing replay: ids in a byte each, weights as they were, and every bit of the layer's own pass."""
    layer, x = layer_of(SPECS[name], most), heavy_tailed(T, H, seed=2)
    asked: dict[str, Any] = {}
    if SPECS[name].hash_routing:
        asked["token_ids"] = torch.arange(T)
    if SPECS[name].input_norm_eps:
        asked["router_input"] = heavy_tailed(T, H, seed=5)
    for given in (x, x.view(1, T, H)):
        wanted, chosen = layer(given, **asked), layer.route(given, **asked)
        assert chosen.topk_ids.shape == chosen.topk_weights.shape == (T, SPECS[name].top_k)
        kept = replace(chosen, topk_ids=chosen.topk_ids.to(torch.uint8))
        assert torch.equal(layer(given, routing=kept), wanted)
    other = replace(chosen, topk_ids=(chosen.topk_ids + 1) % E)
    assert relative_error(layer(x, routing=other), wanted[0]) > 0.1, "ids that are given decide"


def test_routing_by_others_is_checked() -> None:
    x, logits = heavy_tailed(T, H, seed=2), heavy_tailed(T, E, seed=4)
    layer = layer_of(SPECS["plain"])
    assert torch.equal(layer(x, routing=layer.route(x, router_logits=logits)), layer(x, router_logits=logits))
    rule = layer_of(SPECS["plain"], choose=lambda x, logits, k: (logits.topk(k).indices, torch.ones(len(x), k)))
    assert bool((rule.route(x).topk_weights == 1).all())
    assert torch.equal(rule(x, routing=rule.route(x)), rule(x))
    bad = x.clone()
    bad[3, 0] = torch.nan
    chosen = layer.route(bad)
    assert chosen.topk_ids[3].tolist() == [-2, -2]
    assert torch.equal(layer(bad, routing=chosen).isnan().any(1), torch.arange(T) == 3)
    with pytest.raises(RoutingError, match="token 3"):
        layer_of(SPECS["plain"], checked=True).route(bad)
    with pytest.raises(InputError, match="router_input"):
        layer_of(SPECS["input of its own"]).route(x)
    with pytest.raises(InputError, match="gradient"):
        layer.route(x.clone().requires_grad_())
    with pytest.raises(InputError, match=r"\(11, 39\)"):
        layer.route(x[:, :-1])


def test_zero_experts_return_input_without_rows() -> None:
    """LongCat-Flash: experts from E on return the token itself, which the caller adds with its weight."""
    layer, x = layer_of(SPECS["plain"]), heavy_tailed(T, H, seed=2)
    logits, bias = heavy_tailed(T, E + 4, seed=4), torch.linspace(-0.1, 0.1, E + 4)
    chosen = route(logits, RoutingSpec(top_k=3, renormalize=False, correction_bias=True, scale=6.0), bias=bias)
    real = chosen.topk_ids < E
    assert 0 < int(real.sum()) < real.numel()
    own = replace(chosen, topk_ids=torch.where(real, chosen.topk_ids, -1))
    found = layer(x, routing=own) + x * chosen.topk_weights.masked_fill(real, 0).sum(1, keepdim=True)
    scores = torch.softmax(logits.double(), 1)
    ids = (scores + bias).topk(3).indices
    weights, plain, dense = (
        6 * scores.gather(1, ids),
        random_experts(E, 2, WIDE, H, seed=1),
        random_experts(1, 2, 16, H, seed=7),
    )
    truth = moe_truth(x, plain.gate_up.decode(), plain.down.decode(), ids, weights, ActivationSpec())
    truth += x.double() * weights.masked_fill(ids < E, 0).sum(1, keepdim=True)
    truth += moe_truth(
        x, dense.gate_up.decode(), dense.down.decode(), torch.zeros(T, 1), torch.ones(T, 1), ActivationSpec()
    )
    assert relative_error(found, truth) < 1e-5
    batch, _ = layer.dispatcher.dispatch(x, own)
    assert int(batch.expert_offsets[-1]) == int(real.sum())


def test_image_tokens_have_another_bias() -> None:
    """DeepSeek-V4.1: two biases select, one for each kind of token, and neither weighs."""
    rule = RoutingSpec(top_k=2, score="sqrt_softplus", correction_bias=True)
    logits, biases, image = heavy_tailed(T, E, seed=4), heavy_tailed(2, E, seed=5), torch.arange(T) % 3 == 0
    both = [route(logits, rule, bias=bias) for bias in biases]
    ids = torch.where(image[:, None], both[1].topk_ids, both[0].topk_ids)
    weights = torch.where(image[:, None], both[1].topk_weights, both[0].topk_weights)
    scores = functional.softplus(logits.double()).sqrt()
    wanted = (scores + biases[image.long()]).topk(2).indices
    assert torch.equal(ids, wanted)
    assert not torch.equal(ids, both[0].topk_ids), "the second bias changes something"
    picked = scores.gather(1, wanted)
    assert relative_error(weights, picked / picked.sum(1, keepdim=True)) < 1e-6


def test_expert_subset_takes_all_tokens() -> None:
    """Expert substitution: logits of -inf keep a subset, in which every token finds its best experts."""
    layer, x, kept = layer_of(SPECS["plain"]), heavy_tailed(T, H, seed=2), torch.tensor([0, 2, 5])
    logits = heavy_tailed(T, E, seed=4)
    masked = torch.full_like(logits, -torch.inf).index_copy(1, kept, logits[:, kept])
    chosen = layer.route(x, router_logits=masked)
    assert torch.equal(chosen.topk_ids, kept[logits[:, kept].topk(2).indices])
    assert torch.equal(layer(x, router_logits=masked), layer(x, routing=chosen))
    assert bool(layer(x, routing=Routing(topk_ids=chosen.topk_ids, topk_weights=chosen.topk_weights)).isfinite().all())


def test_hooks_see_routing_of_every_layer() -> None:
    """A hook before each layer's experts sees what the model's own router chose; ids of a byte give the same bits."""
    pytest.importorskip("transformers")
    from collegium.integrations.transformers import experts_modules, layers_of, load_model

    model = load_model("demo/fables-16m", device="cpu")
    kept: dict[int, tuple[torch.Tensor, Routing]] = {}
    outs: dict[int, torch.Tensor] = {}

    def before(number: int, given: Any) -> None:
        kept[number] = given[0].clone(), Routing(topk_ids=given[1].to(torch.uint8), topk_weights=given[2].clone())

    for number, module in experts_modules(model).items():
        module.register_forward_pre_hook(lambda _, given, number=number: before(number, given))
        module.register_forward_hook(lambda _, __, out, number=number: outs.update({number: out}))
    for ids in ([[5, 9, 300]], [[7, 11, 2, 80]]):
        with torch.no_grad():
            model(torch.tensor(ids))
        layers = layers_of(model)
        assert len(kept) == len(layers) == len(outs) > 1
        for number, layer in enumerate(layers):
            x, routing = kept[number]
            assert routing.topk_ids.shape == (len(ids[0]), layer.spec.routing.top_k)
            assert torch.equal(layer(x, routing=routing).view_as(outs[number]), outs[number])
