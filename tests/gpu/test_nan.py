"""A NaN, or an id that is no expert, is seen in its token's row and nowhere else: whole layers on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from collegium import (
    Limits,
    MoELayer,
    MoESpec,
    Overrides,
    Problem,
    RouterWeights,
    RoutingSpec,
    SharedSpec,
    SharedWeights,
    encode_experts,
    plan,
    probe,
)
from collegium.errors import RoutingError
from collegium.experts.triton.tiles import choice as tiles
from collegium.pipelines.direct import Direct
from collegium.testing.compare import heavy_tailed, random_experts
from collegium.types import ExpertWeights
from poisons import NAN, check_not_here, check_seen, poisons

HOPPER = torch.cuda.get_device_capability() == (9, 0)
FP8 = torch.cuda.get_device_capability() >= (8, 9)
RECIPES = [
    ("bf16", None),
    ("fp8_block", None),
    ("mxfp8", None),
    ("mxfp4", None),
    ("nvfp4", None),
    ("int4_group", None),
    ("fp8_block", "fp8_group128"),
    ("fp8_block", "fp8_group128_pow2"),
    ("fp8_channel", "fp8_token"),
    ("mxfp4", "fp8_token"),
    ("mxfp4", "fp8_group128"),
    ("nvfp4", "fp8_token"),
    ("int4_group", "fp8_group128"),
]
LARGE = [recipe for recipe in RECIPES if recipe[0] in ("bf16", "fp8_block", "fp8_channel") and recipe[1:] != (None,)]
LARGE.append(("bf16", None))
E, H, WIDE, K = 17, 384, 250, 4


def on_gpu(weights: ExpertWeights[Any]) -> ExpertWeights[Any]:
    return replace(weights, gate_up=weights.gate_up.to("cuda"), down=weights.down.to("cuda"))


def build(weights: str, activations: str | None = None, *, spec: Any = None, **extras: Any) -> MoELayer:
    if activations is not None and not FP8:
        pytest.skip("E4M3 products need sm_89 or later")
    facts: dict[str, Any] = {"intermediate_size": WIDE, "num_experts": E, "routing": RoutingSpec(top_k=K)}
    made = MoESpec(hidden_size=H, weight_format=weights, **(facts | (spec or {})))
    coded = encode_experts(random_experts(made.num_experts, 2, made.intermediate_size, H, seed=1), weights)
    problem = Problem(spec=made, device=probe("cuda"), limits=Limits(max_tokens=512))
    return MoELayer(on_gpu(coded), plan(problem, Overrides(activation_format=activations)), **extras)


def tokens(count: int) -> torch.Tensor:
    return heavy_tailed(count, H, seed=2).cuda().bfloat16()


@pytest.mark.parametrize(("weights", "activations"), RECIPES)
def test_wrong_tokens_poison_their_row(weights: str, activations: str | None) -> None:
    layer = build(weights, activations)
    (most, direct), _ = layer._context.pipelines
    assert isinstance(direct, Direct)
    assert most is not None
    for count in (1, 2, 4, 40):
        assert (layer._executor.pipeline_for(count) is direct) == (count <= most) == (count < 40), (
            "few tokens unsorted, 40 sorted"
        )
        for poison in poisons(layer, tokens(count), count // 2, seed=count):
            check_seen(layer, poison)
        check_not_here(layer, tokens(max(count, 2)))


@pytest.mark.skipif(not HOPPER, reason="large batches have a product of their own on Hopper")
@pytest.mark.parametrize(("weights", "activations"), LARGE)
def test_large_batches_show_it(weights: str, activations: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "large_from", lambda *_: 56)
    layer = build(weights, activations, spec={"num_experts": 5, "intermediate_size": 256})
    x = tokens(200)
    tiling: Any = layer.experts.tiling
    assert tiling.large(200 * K) is not None
    for poison in poisons(layer, x, 77, seed=3):
        check_seen(layer, poison)
    check_not_here(layer, x)


@pytest.mark.parametrize(("weights", "activations"), [("bf16", None), ("fp8_channel", "fp8_token"), ("mxfp4", None)])
@pytest.mark.parametrize("count", [1, 40])
def test_weights_on_the_input(weights: str, activations: str | None, count: int) -> None:
    layer = build(weights, activations, spec={"routing": RoutingSpec(top_k=K, weight_on_input=True)})
    for poison in poisons(layer, tokens(count), count // 2, seed=3):
        check_seen(layer, poison)
    check_not_here(layer, tokens(max(count, 2)))


ROUTERS = [
    RoutingSpec(top_k=K, score="sigmoid", correction_bias=True, renormalize_eps=1e-20, scale=2.5),
    RoutingSpec(top_k=K, score="softmax", renormalize=False),
    RoutingSpec(top_k=K, score="topk_softmax", renormalize=False),
    RoutingSpec(top_k=K, score="softmax", renormalize_floor=1e-12),
    RoutingSpec(top_k=2, score="sparsemixer", renormalize=False),
    RoutingSpec(top_k=K, expert_scale=True),
    RoutingSpec(top_k=K, score="sqrt_softplus", hash_routing=True),
]


@pytest.mark.parametrize("routing", ROUTERS)
@pytest.mark.parametrize("count", [1, 40])
def test_the_layers_own_router_shows_it(routing: RoutingSpec, count: int) -> None:
    weight, x = heavy_tailed(E, H, seed=6).cuda(), tokens(count)
    given: dict[str, torch.Tensor] = {"weight": weight}
    call: dict[str, torch.Tensor] = {}
    if routing.correction_bias:
        given["correction_bias"] = torch.rand(E, device="cuda") * 0.01
    if routing.expert_scale:
        given["expert_scale"] = torch.rand(E, device="cuda") + 0.5
    if routing.hash_routing:
        table = torch.rand(50, E).argsort(1)[:, :K]
        table[49, 1], table[48, 0] = E, -2
        given["hash_table"], call["token_ids"] = table.contiguous().cuda(), torch.arange(count, device="cuda")
    shared = SharedWeights(experts=on_gpu(encode_experts(random_experts(1, 2, 128, H, seed=4), "bf16")))
    facts = {"routing": routing, "shared": SharedSpec(intermediate_size=128)}
    layer = build("bf16", spec=facts, router=RouterWeights(**given), shared=shared)
    clean = layer(x, **call)
    assert clean.isfinite().all()
    others = torch.arange(count, device="cuda") != count // 2
    bad = x.clone()
    bad[count // 2, 5] = NAN
    found = layer(bad, **call)
    assert found[count // 2].isnan().all()
    assert torch.equal(found[others], clean[others])
    if routing.hash_routing:
        for unknown in (48, 49, 50, -1):
            ids = call["token_ids"].index_fill(0, torch.tensor([count // 2], device="cuda"), unknown)
            found = layer(x, token_ids=ids)
            assert found[count // 2].isnan().all()
            assert torch.equal(found[others], clean[others])
    if routing.correction_bias:
        given["correction_bias"][E // 2] = NAN
        assert layer(x).isnan().all()
    if routing.expert_scale:
        hit = ((x.float() @ weight.T).topk(K).indices == 3).any(dim=1)
        given["expert_scale"][3] = NAN
        found = layer(x)
        assert torch.equal(found.isnan().all(dim=1), hit)
        assert torch.equal(found[~hit], clean[~hit])


def test_checked_layer_refuses_poison_by_token() -> None:
    layer = build("bf16", checked=True)
    for poison in poisons(layer, tokens(9), 4, seed=3):
        if not poison.name.startswith("x "):
            with pytest.raises(RoutingError, match="token 4"):
                layer(**poison.call)


def test_graph_replay_shows_and_clears_nan() -> None:
    layer, x = build("mxfp4"), tokens(3)
    (poison, *_) = poisons(layer, x, 1, seed=3)
    routing = poison.call["routing"]
    good = poison.clean["routing"].topk_weights
    wanted = layer(x, routing=poison.clean["routing"])
    layer(x, routing=routing)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x, routing=routing)
    graph.replay()
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2]], wanted[[0, 2]])
    routing.topk_weights.copy_(good)
    graph.replay()
    assert torch.equal(out, wanted)
