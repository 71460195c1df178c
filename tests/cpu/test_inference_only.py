"""What a packed layer is not: trainable, movable, a state dict; and what may not change what it computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from collegium import (
    InputError,
    MoELayer,
    MoESpec,
    Overrides,
    Problem,
    RouterWeights,
    Routing,
    RoutingSpec,
    SpecError,
    load_layer,
    moe,
    plan,
)
from collegium.runtime.devices import probe
from collegium.testing.compare import heavy_tailed, random_experts, uneven_ids
from raising import raises_with

SHIPPED = Path(__file__).resolve().parents[2] / "demo" / "fables-16m"
SPEC = MoESpec(hidden_size=40, intermediate_size=24, num_experts=5, routing=RoutingSpec(top_k=2), weight_format="fp32")
X = heavy_tailed(6, 40, seed=4)


def layer() -> MoELayer:
    made = plan(Problem(spec=SPEC, device=probe("cpu"), dtype="fp32"))
    router = RouterWeights(weight=heavy_tailed(5, 40, seed=2))
    return MoELayer(random_experts(5, 2, 24, 40, seed=1), made, router=router)


def routing() -> Routing:
    return Routing(topk_ids=uneven_ids(6, 5, 2, seed=3), topk_weights=torch.rand(6, 2))


@pytest.mark.parametrize("run", [lambda made: made, lambda made: torch.compile(made, backend="aot_eager")])
@pytest.mark.parametrize("what", ["x", "router_logits", "topk_weights"])
def test_inputs_requiring_grad_are_refused(run, what: str) -> None:
    torch._dynamo.reset()
    made = run(layer())
    x, logits, chosen = X.clone(), torch.randn(6, 5), routing()
    {"x": x, "router_logits": logits, "topk_weights": chosen.topk_weights}[what].requires_grad_()
    more = {"router_logits": logits} if what == "router_logits" else {"routing": chosen}
    with pytest.raises(InputError, match=f"inference only: {what}"):
        made(x, **more)
    with torch.no_grad():
        assert made(x, **more).isfinite().all()


def test_no_grad_not_required_without_gradients() -> None:
    assert torch.is_grad_enabled()
    assert layer()(X).isfinite().all()


def test_transformers_model_refuses_training() -> None:
    transformers = pytest.importorskip("transformers")
    from collegium.integrations.transformers import register

    register()
    model = transformers.AutoModelForCausalLM.from_pretrained(SHIPPED, experts_implementation="collegium")
    ids = torch.tensor([[1, 5, 9]])
    for mode in (model.train, model.eval):
        mode()
        with pytest.raises(InputError, match="inference only"):
            model(ids, labels=ids)
    with torch.no_grad():
        wanted = model(ids).logits
    assert torch.equal(model.requires_grad_(False)(ids).logits, wanted)


def test_expert_parameters_that_require_gradients() -> None:
    transformers = pytest.importorskip("transformers")
    from collegium.integrations.transformers import experts_modules, register

    register()
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(SHIPPED, experts_implementation="collegium").requires_grad_(False)
    ids, experts = torch.tensor([[1, 5, 9]]), next(iter(experts_modules(model).values()))
    for name, parameter in experts.named_parameters():
        parameter.requires_grad_(True)
        with pytest.raises(InputError, match=f"(experts|{name}) requires a gradient"):
            model(ids)
        parameter.requires_grad_(False)
    before = model(ids).logits
    torch.nn.utils.parametrize.register_parametrization(experts, "gate_up_proj", torch.nn.Identity())
    with raises_with(InputError, "gate_up_proj", "merge_and_unload"):
        model(ids)
    torch.nn.utils.parametrize.remove_parametrizations(experts, "gate_up_proj")
    assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize("weights", [None, "mxfp4", "fp8_block"])
@pytest.mark.parametrize("kernel", [None, "cpu_grouped"])
def test_buffers_ignore_the_default_device(weights: str | None, kernel: str | None) -> None:
    own = load_layer(SHIPPED, 2, device="cpu", weight_format=weights, overrides=Overrides(kernel=kernel))
    x = torch.randn(5, 256).bfloat16()
    before = own(x)
    with torch.device("meta"):
        assert torch.equal(own(x), before)


def test_state_dict_save_and_load_refused() -> None:
    model = nn.Sequential(nn.Linear(40, 40), layer())
    for refused in (model.state_dict, model[1].state_dict, lambda: model.load_state_dict({}, strict=False)):
        with raises_with(InputError, "state_dict"):
            refused()


def test_moving_a_layer_is_refused() -> None:
    model = nn.Sequential(nn.Linear(40, 40), layer())
    wanted = model[1](X)
    for allowed in (lambda: model.to("cpu"), model.float, model.eval, lambda: model.to(torch.float32)):
        assert torch.equal(allowed()[1](X), wanted)
    for refused in (lambda: model.to("meta"), model.half, model.bfloat16, lambda: model.to(torch.float64)):
        with raises_with(InputError, "MoELayer", "torch.float32", "device=", "dtype="):
            refused()


@pytest.mark.parametrize("kernel", ["cpu_grouped", "reference"])
def test_autocast_changes_no_bit(kernel: str) -> None:
    # Of the two only the reference multiplies by operators that autocast knows: the other's write to a given tensor.
    made = load_layer(SHIPPED, 2, device="cpu", overrides=Overrides(kernel=kernel))
    x = heavy_tailed(64, 256, seed=5).bfloat16()
    packed, counts = x.view(16, 4, 256), torch.full((16,), 4)

    def taken() -> tuple[torch.Tensor, ...]:
        chosen = made.route(x)
        given = made(x), made(x, router_input=x), made(x, routing=chosen), made.run_batched(packed, counts)
        return *given, chosen.topk_ids, chosen.topk_weights

    wanted = taken()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(torch.equal(*pair) for pair in zip(taken(), wanted, strict=True))


def test_loading_ignores_ambient_torch_modes() -> None:
    def loaded() -> MoELayer:
        return load_layer(SHIPPED, 2, device="cpu", weight_format="mxfp4")

    x = heavy_tailed(6, 256, seed=5).bfloat16()
    wanted = loaded()(x)
    with torch.inference_mode():
        inside = loaded()
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        wide = loaded()
        assert torch.equal(wide(x), wanted)
    finally:
        torch.set_default_dtype(default)
    with torch.device("meta"):
        elsewhere = loaded()
    for made in (inside, wide, elsewhere):
        assert torch.equal(made(x), wanted)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(inside, backend="aot_eager", fullgraph=True)(x), wanted)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"gate_up": torch.randn(5, 47, 40)}, "gate_up"),
        ({"gate_up": torch.randn(48, 40)}, "gate_up"),
        ({"down": torch.randn(40, 24)}, "down"),
        ({"down": torch.randn(5, 40, 23)}, "down"),
        ({"topk_ids": torch.zeros(6, dtype=torch.int64)}, "topk_ids"),
        ({"topk_weights": torch.ones(5, 2)}, "topk_weights"),
        ({"x": torch.randn(2, 3, 40)}, "x is"),
        ({"x": torch.randn(6, 40, dtype=torch.float64)}, "x is"),
        ({"biases": (torch.randn(5, 47), torch.randn(5, 40))}, "bias of gate_up"),
        ({"gate_up": torch.randn(5, 48, 40, requires_grad=True)}, "inference only"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_moe_names_the_wrong_tensor(change: dict[str, object], text: str) -> None:
    given: dict[str, object] = {
        "x": X,
        "gate_up": torch.randn(5, 48, 40),
        "down": torch.randn(5, 40, 24),
        "topk_ids": uneven_ids(6, 5, 2, seed=3),
        "topk_weights": torch.rand(6, 2),
    }
    with pytest.raises(InputError, match=text):
        moe(**{**given, **change})


ELSEWHERE = torch.empty(6, 2, dtype=torch.int64, device="meta")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"x": X.tolist()}, "x is a list"),
        ({"x": X.to("meta")}, "x is on meta"),
        ({"router_logits": torch.zeros(6, 5, device="meta")}, "router_logits is on meta"),
        ({"router_logits": [[1.0] * 5] * 6}, "router_logits is a list"),
        ({"router_input": X.to("meta")}, "router_input is on meta"),
        ({"routing": Routing(topk_ids=ELSEWHERE, topk_weights=torch.ones(6, 2))}, "topk_ids is on meta"),
        (
            {"routing": Routing(topk_ids=ELSEWHERE.new_zeros((6, 2), device="cpu"), topk_weights=None)},
            "topk_weights is a",
        ),
        ({"routing": Routing(topk_ids=None, topk_weights=None)}, "topk_ids is a NoneType"),
        ({"out": torch.empty(6, 40, device="meta")}, "out is on meta"),
        ({"out": []}, "out is a list"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_non_tensors_and_other_devices(given: dict[str, object], text: str) -> None:
    torch._dynamo.reset()
    for run in (layer(), torch.compile(layer(), backend="aot_eager")):
        with raises_with(InputError, text, "cpu"):
            run(**{"x": X, **given})
    torch._dynamo.reset()


def test_wrong_argument_types_are_refused_first() -> None:
    with raises_with(SpecError, "overrides", "'reference'"):
        load_layer(SHIPPED, 2, device="cpu", overrides="reference")
    with raises_with(SpecError, "limits", "16", "max_tokens"):
        load_layer(SHIPPED, 2, device="cpu", limits=16)
    for dtype in ("auto", "fp8_token", torch.int8):
        with raises_with(SpecError, "dtype", "bf16", "fp16", "fp32"):
            load_layer(SHIPPED, 2, device="cpu", dtype=dtype)
    with raises_with(InputError, "'2'"):
        load_layer(SHIPPED, "2", device="cpu")


def test_wrong_routing_types_refused() -> None:
    chosen = routing()
    with pytest.raises(InputError, match="routing is a tuple"):
        layer()(X, routing=(chosen.topk_ids, chosen.topk_weights))
    made = layer()
    made.choose = lambda x, logits, top_k: logits.topk(top_k).indices
    with pytest.raises(InputError, match="choose returned"):
        made(X)
    made.choose = lambda x, logits, top_k: (ELSEWHERE, torch.ones(6, 2))
    with raises_with(InputError, "topk_ids", "cpu"):
        made(X)
    made.choose = lambda x, logits, top_k: (chosen.topk_ids, torch.ones(6, 2, device="meta"))
    with raises_with(InputError, "topk_weights", "topk_ids", "cpu"):
        made(X)


def test_training_mode_changes_no_output() -> None:
    made = layer()
    chosen = routing()
    plain = made(X, routing=chosen)
    assert not made.training
    made.train()
    out = torch.empty_like(X)
    trained = made(made(X, routing=chosen), routing=chosen, out=out)
    assert trained is out
    assert not trained.requires_grad
    assert torch.equal(made(X, routing=chosen), plain)


def test_whole_model_backward_is_refused() -> None:
    from collegium.integrations.transformers import load_model

    model, ids = load_model(SHIPPED, device="cpu"), torch.arange(9)[None]
    before = model(ids).logits
    model.train()
    out = model(ids, labels=ids)
    assert torch.equal(out.logits.detach(), before)
    for loss in (out.loss, out.logits.sum(), model(ids, return_dict=False)[0].sum()):
        with pytest.raises(InputError, match="inference only"):
            loss.backward()
    assert not model.eval()(ids).logits.requires_grad
