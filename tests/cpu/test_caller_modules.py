"""Routers, shared experts and input transforms that the caller computes, and outputs that are not added."""

from __future__ import annotations

import copy
import pickle
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collegium import (
    ActivationSpec,
    InputError,
    LatentWeights,
    LayerBuilder,
    Limits,
    MoELayer,
    MoESpec,
    Overrides,
    Problem,
    Ranks,
    RouterModule,
    RouterWeights,
    Routing,
    RoutingSpec,
    SharedSpec,
    SharedWeights,
    WeightUpdater,
    merge_shared,
    plan,
    probe,
)
from collegium.graphs import capture
from collegium.parallel.placement import expert_ids_of, linear, tensor_parallel
from collegium.runtime import custom_op
from collegium.testing.compare import heavy_tailed, random_experts, relative_error, uneven_ids
from raising import raises_with
from ranks import run_ranks
from truth import moe_truth

E, H, INNER, T, K, WIDE = 6, 64, 48, 9, 2, 40
BLOCK = random_experts(1, 2, WIDE, H, seed=7)
GATE = heavy_tailed(E, H, seed=3, channels=False)


class Mlp(nn.Module):
    """A gated MLP, as an engine computes a shared expert; it returns no bias next to the product, as engines do."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(BLOCK.gate_up.decode()[0].to(dtype), requires_grad=False)
        self.down = nn.Parameter(BLOCK.down.decode()[0].to(dtype), requires_grad=False)
        self.calls = 0

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        self.calls += 1
        gate, up = (x @ half.T for half in self.gate_up)
        return (nn.functional.silu(gate) * up) @ self.down.T, None


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(GATE, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x.float() @ self.weight.T


def spec_of(**changes: Any) -> MoESpec:
    return MoESpec(
        **{
            "hidden_size": H,
            "intermediate_size": INNER,
            "num_experts": E,
            "routing": RoutingSpec(top_k=K),
            "weight_format": "fp32",
            **changes,
        }
    )


def layer_of(
    spec: MoESpec | None = None, overrides: Overrides | None = None, *, options: Any = None, **changes: Any
) -> MoELayer:
    spec = spec or spec_of()
    made = random_experts(E, 2, INNER, spec.expert_hidden_size, seed=1)
    problem = Problem(
        **{"spec": spec, "device": probe("cpu"), "dtype": "fp32", "limits": Limits(max_tokens=8), **changes}
    )
    return MoELayer(made, plan(problem, overrides), **(options or {}))


def inputs(tokens: int = T) -> tuple[Tensor, Routing]:
    ids = uneven_ids(tokens, K, E, seed=3)
    ids[::4, 0] = -1
    return heavy_tailed(tokens, H, seed=5), Routing(
        topk_ids=ids, topk_weights=heavy_tailed(tokens, K, seed=4, channels=False).abs()
    )


def routed_truth(x: Tensor, routing: Routing, width: int = H) -> Tensor:
    made = random_experts(E, 2, INNER, width, seed=1)
    ids, weights = routing.topk_ids, routing.topk_weights
    return moe_truth(x, made.gate_up.decode(), made.down.decode(), ids, weights, ActivationSpec())


def shared_truth(x: Tensor) -> Tensor:
    one = torch.zeros(len(x), 1, dtype=torch.int64)
    return moe_truth(x, BLOCK.gate_up.decode(), BLOCK.down.decode(), one, torch.ones(len(x), 1), ActivationSpec())


def test_a_shared_expert_of_the_caller() -> None:
    module = Mlp()
    layer = layer_of(options={"shared": module})
    x, routing = inputs()
    found = layer(x, routing=routing)
    assert relative_error(found, routed_truth(x, routing) + shared_truth(x)) < 1e-5
    assert module.calls == 2  # two passes of at most eight tokens
    shared, sums = layer.shared_and_routed(x, routing=routing)
    assert shared is not None
    assert relative_error(shared, shared_truth(x)) < 1e-5
    assert relative_error(sums, routed_truth(x, routing)) < 1e-5
    assert re.search(r"\n *shared +sequential\nmodules +shared_experts Mlp", layer.plan.explain())
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, routing=routing), found)
    for other in (copy.copy(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x, routing=routing), found)
    assert torch.equal(layer(x.view(3, 3, H), routing=routing), found.view(3, 3, H))
    assert (
        layer(x[:0], routing=Routing(topk_ids=routing.topk_ids[:0], topk_weights=routing.topk_weights[:0])).shape[0]
        == 0
    )
    layer.warm_up()
    few = Routing(topk_ids=routing.topk_ids[:7], topk_weights=routing.topk_weights[:7])
    runner = capture(layer, budgets=(4, 8), routing_input="routing")
    assert relative_error(runner(x[:7], routing=few), layer(x[:7], routing=few)) < 1e-6


def test_planned_shared_expert_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(shared=SharedSpec(intermediate_size=WIDE))
    layer = layer_of(spec, options={"shared": SharedWeights(experts=BLOCK)}, out_dtype="bf16")
    x, routing = inputs()
    shared, sums = layer.shared_and_routed(x.view(3, 3, H), routing=routing)
    assert shared is not None
    assert (shared.dtype, shared.shape, sums.shape) == (torch.bfloat16, (3, 3, H), (3, 3, H))
    assert relative_error(shared.view(T, H), shared_truth(x)) < 3e-3
    assert relative_error(sums.view(T, H), routed_truth(x, routing)) < 3e-3
    both = torch.compile(
        lambda rows: layer.shared_and_routed(rows, routing=routing), fullgraph=True, backend="aot_eager"
    )
    for found, wanted in zip(both(x), (shared, sums), strict=True):
        assert torch.equal(found.view(3, 3, H), wanted)
    outputs = [torch.empty(T, H, dtype=torch.bfloat16) for _ in range(2)]
    call = (x, None, routing.topk_ids, routing.topk_weights, None, None, None, layer.handle, outputs)
    with monkeypatch.context() as patch:
        # The check copies all inputs, and a copied handle names no layer.
        patch.setattr(custom_op, "_layer_of", lambda _: layer)
        torch.library.opcheck(torch.ops.collegium.moe_layer_apart, call)
    plain = layer_of()
    nothing, sums = plain.shared_and_routed(x, routing=routing)
    assert nothing is None
    assert torch.equal(sums, plain(x, routing=routing))
    merged = plan(replace(layer.plan.problem, spec=replace(spec, intermediate_size=WIDE)), Overrides(shared="merged"))
    experts = random_experts(E, 2, WIDE, H, seed=1)
    joined = MoELayer(merge_shared(merged, experts, SharedWeights(experts=BLOCK)), merged)
    with raises_with(InputError, "shared_and_routed", "1 routed expert", "plan"):
        joined.shared_and_routed(x, routing=routing)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_gate_of_the_caller(score: Any) -> None:
    bias = heavy_tailed(E, seed=9) if score == "sigmoid" else None
    spec = spec_of(routing=RoutingSpec(top_k=K, score=score, correction_bias=bias is not None))
    x, _ = inputs()
    wanted = layer_of(spec, options={"router": RouterWeights(weight=GATE, correction_bias=bias)})
    gate = Gate()
    router: Any = gate if bias is None else RouterModule(gate=gate, correction_bias=bias)
    layer = layer_of(spec, options={"router": router})
    assert torch.equal(layer.route(x).topk_ids, wanted.route(x).topk_ids)
    assert relative_error(layer(x), wanted(x)) < 1e-6
    assert re.search(r"\n *modules +gate Gate", repr(layer))
    tuples = layer_of(
        spec,
        options={"router": replace(router, gate=lambda rows: (gate(rows), None))}
        if bias is not None
        else {"router": lambda rows: (gate(rows), None)},
    )
    assert torch.equal(tuples(x), layer(x))
    assert torch.equal(layer(x, router_logits=gate(x)), layer(x))
    assert torch.equal(layer(2 * x, router_input=x), layer(2 * x, routing=layer.route(x)))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))
    chosen = layer_of(spec, options={"router": router, "choose": lambda rows, logits, top_k: logits.topk(top_k)[::-1]})
    assert torch.equal(chosen.route(x).topk_ids, gate(x).topk(K).indices)
    layer.warm_up()
    runner = capture(layer, budgets=(4, 8))
    assert relative_error(runner(x[:7]), layer(x[:7])) < 1e-6
    if bias is not None:
        with raises_with(InputError, "router", "correction bias"):
            layer_of(spec, options={"router": gate})


def test_an_input_transform_of_the_caller() -> None:
    width = 32
    down, up = heavy_tailed(width, H, seed=6) / 8, heavy_tailed(H, width, seed=8) / 6
    spec = spec_of(latent_size=width)
    module = Mlp()
    layer = layer_of(spec, options={"latent": lambda x: (x @ down.T, None), "shared": module})
    x, routing = inputs()
    shared, sums = layer.shared_and_routed(x, routing=routing)
    assert shared is not None
    assert (sums.shape, layer.routed_size) == ((T, width), width)
    assert relative_error(shared, shared_truth(x)) < 1e-5
    assert relative_error(sums, routed_truth(x @ down.T, routing, width)) < 1e-5
    whole = layer_of(spec, options={"latent": LatentWeights(down=down, up=up)})
    assert relative_error(sums @ up.T, whole(x, routing=routing)) < 1e-5
    for call in (lambda: layer(x, routing=routing), lambda: capture(layer, budgets=(4,))):
        with raises_with(InputError, "width 32", "64", "shared_and_routed"):
            call()
    layer.warm_up()
    # Of the same width, everything can be added.
    turned = torch.linalg.qr(heavy_tailed(H, H, seed=11, channels=False)).Q
    same = layer_of(options={"latent": lambda rows: rows @ turned.T, "shared": module})
    wanted = routed_truth(x @ turned.T, routing) + shared_truth(x)
    assert relative_error(same(x, routing=routing), wanted) < 1e-5
    assert re.search(r"\n *modules +shared_experts Mlp, routed_input_transform <lambda>", repr(same))
    # Results may be views of any strides.
    strided = layer_of(options={"latent": lambda rows: (turned @ rows.T).T, "shared": lambda rows: module(rows)[0].T.T})
    turned_back = layer_of(options={"latent": lambda rows: rows @ turned.T, "shared": module})
    assert relative_error(strided(x, routing=routing), turned_back(x, routing=routing)) < 1e-5


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"shared": lambda x: x[:, :5]}, r"shared: returned \(8, 5\) torch.float32 for x \(8, 64\); allowed: floating"),
        ({"shared": lambda x: x.argmax(1, keepdim=True).expand_as(x)}, "shared: returned .* torch.int64"),
        ({"shared": lambda x: None}, "shared is a NoneType"),
        ({"shared": nn.Linear(H, H)}, "inference only: shared requires a gradient"),
        (
            {"latent": lambda x: x.bfloat16()},
            "latent: returned torch.bfloat16, the layer was planned for torch.float32",
        ),
        ({"router": lambda x: x}, r"router: returned \(9, 64\)"),
    ],
)
def test_results_that_do_not_fit(options: dict[str, Any], text: str) -> None:
    x, routing = inputs()
    layer = layer_of(options=options)
    with pytest.raises(InputError, match=text):
        layer(x, routing=None if "router" in options else routing)


@pytest.mark.parametrize(
    ("spec", "options", "text"),
    [
        ({}, {"shared": 3}, "shared: found a int, and the spec has none"),
        ({"shared": SharedSpec(intermediate_size=WIDE)}, {"shared": Mlp()}, "found a Mlp, and the spec has SharedSpec"),
        ({}, {"router": torch.ones(E, H)}, "router: found a Tensor; allowed: RouterWeights"),
        ({}, {"latent": "x"}, "latent: found a str"),
        ({"latent_size": 32, "latent_norm_eps": 1e-6}, {"latent": nn.Identity()}, "without a norm of their sums"),
        ({}, {"shared": Mlp(), "mode": "merged"}, r"a Mlp and Overrides\(shared='merged'\)"),
    ],
)
def test_modules_that_contradict_the_spec(spec: dict[str, Any], options: dict[str, Any], text: str) -> None:
    overrides = Overrides(shared=options.get("mode"))
    with pytest.raises(InputError, match=text):
        layer_of(spec_of(**spec), overrides, options={key: options[key] for key in options if key != "mode"})


def test_compiled_layers_refuse_trained_modules() -> None:
    x, routing = inputs()
    layer = layer_of(options={"shared": nn.Linear(H, H)})
    compiled = torch.compile(layer, backend="aot_eager")
    with pytest.raises(InputError, match="shared requires a gradient"):
        compiled(x, routing=routing)
    with torch.no_grad():
        assert torch.equal(compiled(x, routing=routing), layer(x, routing=routing))


def test_a_part_keeps_its_rank() -> None:
    made = random_experts(E, 2, INNER, H, seed=1)
    plans = [
        plan(
            Problem(spec=spec_of(), device=probe("cpu"), dtype="fp32", placement=linear(E, rank, 2)),
            Overrides(dispatcher="partial"),
        )
        for rank in range(2)
    ]
    layer = MoELayer(expert_ids_of(made, plans[1].problem.placement.expert_ids), plans[1], shared=Mlp())  # type: ignore[union-attr]
    assert re.search(r"\n *shared .*rank 0", layer.plan.explain())
    with raises_with(InputError, "replan", "(0, 1)", "None"):
        layer.replan(plans[0], layer.experts)
    without = MoELayer(expert_ids_of(made, plans[1].problem.placement.expert_ids), plans[1])  # type: ignore[union-attr]
    without.replan(plans[0], without.experts)


def test_layers_are_built_around_modules() -> None:
    made = random_experts(E, 2, INNER, 32, seed=1)
    transform = nn.Linear(H, 32, bias=False).requires_grad_(False)
    options: dict[str, Any] = {"router": Gate(), "shared": Mlp(), "latent": transform}
    spec = spec_of(latent_size=32)
    builder = LayerBuilder(spec, device="cpu", dtype="fp32", limits=Limits(max_tokens=8), **options)
    assert builder.names == ["weight"]

    def load(target: LayerBuilder | WeightUpdater, factor: float) -> None:
        target.load("weight", factor * made.gate_up.decode().flatten(1, 2), shard="w13")
        target.load("weight", made.down.decode(), shard="w2")

    load(builder, 1.0)
    layer, x = builder.finish(), heavy_tailed(T, H, seed=5)
    shared, sums = layer.shared_and_routed(x)
    assert shared is not None
    assert relative_error(shared, shared_truth(x)) < 1e-5
    assert relative_error(sums, routed_truth(transform(x), layer.route(x), 32)) < 1e-5
    updater = WeightUpdater(layer)
    assert updater.names == ["weight"]
    load(updater, 0.0)
    updater.finish()
    assert bool((layer.shared_and_routed(x)[1] == 0).all())
    dummy = LayerBuilder(spec, device="cpu", dtype="fp32", **options).finish("dummy")
    assert dummy.plan.caller_modules == layer.plan.caller_modules
    assert dummy.shared_and_routed(x)[1].shape == (T, 32)
    with raises_with(InputError, "shared", "SharedSpec"):
        LayerBuilder(spec_of(shared=SharedSpec(intermediate_size=WIDE)), device="cpu", shared=Mlp())
    with raises_with(InputError, "unknown arguments ['gate']", "shared, latent"):
        LayerBuilder(spec, device="cpu", gate=Gate())  # type: ignore[call-arg]


def _ranks(rank: int) -> list[str]:
    faults: list[str] = []
    made = random_experts(E, 2, INNER, H, seed=1)
    same = Ranks.of(same_tokens=True)
    for name, placement, tokens in (
        ("all_to_all", linear(E, rank, 2), T + rank),
        ("all_gather", linear(E, rank, 2), T + rank),
        ("all_gather", same.placement(E), T),
        ("partial", linear(E, rank, 2), T),
        ("partial sliced", linear(E, rank, 2), T),
    ):
        dispatcher, _, sliced = name.partition(" ")
        module = Mlp()
        scale = 0.5 if sliced else 1.0  # each rank's module returns its part
        problem = Problem(
            spec=spec_of(), device=probe("cpu"), dtype="fp32", limits=Limits(max_tokens=16), placement=placement
        )
        chosen = plan(problem, Overrides(dispatcher=dispatcher, shared="sliced" if sliced else None))
        layer = MoELayer(
            expert_ids_of(made, placement.expert_ids),
            chosen,
            router=Gate(),
            shared=lambda x, module=module, scale=scale: module(x)[0] * scale,
        )
        x = heavy_tailed(tokens, H, seed=tokens)
        routing = layer.route(x)
        wanted, dense = routed_truth(x, routing), shared_truth(x)
        shared, sums = layer.shared_and_routed(x)
        assert shared is not None
        results = layer.reduce(torch.stack([layer(x), shared, sums]))
        if not layer.output_is_reduced and module.calls != (2 if rank == 0 or sliced else 0):
            faults.append(f"{name}: the shared expert ran {module.calls} times")
        for found, right in zip(results, (wanted + dense, dense, wanted), strict=True):
            if relative_error(found, right) > 1e-5:
                faults.append(f"{name}: rank {rank} is {relative_error(found, right)} off")
    return faults


def test_over_ranks() -> None:
    assert run_ranks(_ranks, 2) == [[], []]


def _transformed(rank: int) -> list[str]:
    faults: list[str] = []
    width = 32
    made = random_experts(E, 2, INNER, width, seed=1)
    down = heavy_tailed(width, H, seed=6) / 8
    # Of the last two the ranks have the same tokens; of the last, each has slices of all experts.
    for name, placement, tokens in (
        ("all_to_all", linear(E, rank, 2), T + rank),
        ("all_gather", linear(E, rank, 2), T + rank),
        ("all_gather", Ranks.of(same_tokens=True).placement(E), T),
        (None, tensor_parallel(E, rank, 2), T),
    ):
        weights: Any = expert_ids_of(made, placement.expert_ids)
        if placement.tp_size > 1:
            rows = slice(rank * INNER // 2, (rank + 1) * INNER // 2)
            weights = replace(
                weights,
                gate_up=weights.gate_up.rows(rows.start, rows.stop),
                down=weights.down.columns(rows.start, rows.stop),
            )
        problem = Problem(
            spec=spec_of(latent_size=width),
            device=probe("cpu"),
            dtype="fp32",
            limits=Limits(max_tokens=16),
            placement=placement,
        )
        layer = MoELayer(
            weights, plan(problem, Overrides(dispatcher=name)), router=Gate(), latent=lambda x: x @ down.T, shared=Mlp()
        )
        x = heavy_tailed(tokens, H, seed=tokens)
        shared, sums = layer.shared_and_routed(x)
        assert shared is not None
        wanted = routed_truth(x @ down.T, layer.route(x), width)
        for found, right in ((sums, wanted), (shared, shared_truth(x))):
            if relative_error(found, right) > 1e-5:
                faults.append(f"{layer.plan.dispatcher} {placement}: rank {rank} is {relative_error(found, right)} off")
    return faults


def test_transformed_inputs_over_ranks() -> None:
    assert run_ranks(_transformed, 2) == [[], []]


def _modules_of_one_rank(rank: int) -> str:
    placement = linear(E, rank, 2)
    problem = Problem(spec=spec_of(), device=probe("cpu"), dtype="fp32", placement=placement)
    weights = expert_ids_of(random_experts(E, 2, INNER, H, seed=1), placement.expert_ids)
    with pytest.raises(InputError) as caught:
        MoELayer(weights, plan(problem, Overrides(dispatcher="all_to_all")), shared=Mlp() if rank else None)
    return str(caught.value)


def test_all_ranks_have_the_same_modules() -> None:
    texts = run_ranks(_modules_of_one_rank, 2)
    assert texts[0] == texts[1]
    assert "building a layer: ranks 0 and 1 differ: modules of the caller () and ('shared_experts',)" in texts[0]
