"""The layer under torch.compile and as an operation of torch.library."""

from __future__ import annotations

import gc

import pytest
import torch

from collegium import InputError, MoELayer, MoESpec, Problem, RouterWeights, Routing, RoutingSpec, plan
from collegium.runtime import custom_op
from collegium.runtime.devices import probe
from collegium.testing.compare import heavy_tailed, random_experts, uneven_ids
from raising import raises_with

SPEC = MoESpec(hidden_size=40, intermediate_size=24, num_experts=5, routing=RoutingSpec(top_k=2), weight_format="fp32")


def layer(**options: object) -> MoELayer:
    made = random_experts(5, 2, 24, 40, seed=1)
    router = RouterWeights(weight=heavy_tailed(5, 40, seed=2))
    return MoELayer(made, plan(Problem(spec=SPEC, device=probe(), dtype="fp32")), router=router, **options)  # type: ignore[arg-type]


def routing(tokens: int) -> Routing:
    return Routing(topk_ids=uneven_ids(tokens, 5, 2, seed=3), topk_weights=torch.rand(tokens, 2))


def test_full_graph_equals_eager() -> None:
    made = layer()
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (3, 1, 17):
        x = heavy_tailed(tokens, 40, seed=tokens)
        assert torch.equal(compiled(x), made(x))
        chosen = routing(tokens)
        assert torch.equal(compiled(x, routing=chosen), made(x, routing=chosen))


def test_routers_with_a_separate_input() -> None:
    made = layer()
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (3, 17):
        x, seen = heavy_tailed(tokens, 40, seed=tokens), heavy_tailed(tokens, 40, seed=tokens + 1)
        wanted = made(x, router_input=seen)
        assert torch.equal(compiled(x, router_input=seen), wanted)
        assert not torch.equal(made(x), wanted)


def test_layers_compile_after_failed_call() -> None:
    torch._dynamo.reset()
    x, first, second = heavy_tailed(3, 40, seed=4), layer(), layer()
    compiled = torch.compile(first, backend="aot_eager")
    with raises_with(InputError, "fp32"):
        compiled(x.double())
    again = torch.compile(second, fullgraph=True, backend="aot_eager")
    for tokens in (3, 1, 2):
        rows = x[:tokens]
        assert torch.equal(again(rows), second(rows))
        assert torch.equal(compiled(rows), first(rows))
    torch._dynamo.reset()


def test_a_layer_inside_a_compiled_model() -> None:
    made = layer()

    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(made(x * 2.0)) + x

    x = heavy_tailed(2, 3, 40, seed=5)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), model(x))


def test_the_operation_passes_opcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    made = layer()
    x = heavy_tailed(4, 40, seed=6)
    chosen = routing(4)
    arguments = (x, None, chosen.topk_ids, chosen.topk_weights, None, None, None, made.handle, torch.empty_like(x))
    # The check copies all inputs, and a copied handle names no layer.
    monkeypatch.setattr(custom_op, "_layer_of", lambda _: made)
    torch.library.opcheck(torch.ops.collegium.moe_layer, arguments)


def test_a_handle_dies_with_its_layer() -> None:
    made = layer()
    handle = made.handle
    del made
    gc.collect()
    x = torch.zeros(1, 40)
    with pytest.raises(InputError, match="no layer"):
        torch.ops.collegium.moe_layer(x, None, None, None, None, None, None, handle, torch.empty_like(x))


def test_copied_handle_names_no_layer() -> None:
    made = layer()
    x = torch.zeros(1, 40)
    with pytest.raises(InputError, match="no layer"):
        torch.ops.collegium.moe_layer(x, None, None, None, None, None, None, made.handle.clone(), torch.empty_like(x))


def test_out_argument_is_written_and_returned() -> None:
    made = layer()
    x = heavy_tailed(2, 3, 40, seed=7)
    out = torch.full_like(x, torch.nan)
    assert made(x, out=out) is out
    assert torch.equal(out, made(x))
    with pytest.raises(InputError, match="out is"):
        made(x, out=torch.empty(6, 40))


def test_after_expert_precedes_router_weights() -> None:
    made = layer(after_expert=lambda rows: rows.square())
    x = heavy_tailed(6, 40, seed=8)
    chosen = routing(6)
    ones = torch.ones(6, 1)
    parts = [
        layer()(x, routing=Routing(topk_ids=chosen.topk_ids[:, k : k + 1], topk_weights=ones)).square() for k in (0, 1)
    ]
    wanted = sum(parts[k] * chosen.topk_weights[:, k : k + 1] for k in (0, 1))
    torch.testing.assert_close(made(x, routing=chosen), wanted)
