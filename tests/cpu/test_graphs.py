"""Graph runners on a CPU, where the padded calls run eagerly: padding, budgets, inputs and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from collegium import (
    InputError,
    Limits,
    MoELayer,
    MoESpec,
    Problem,
    RouterWeights,
    Routing,
    RoutingSpec,
    SharedSpec,
    SharedWeights,
    encode_experts,
    plan,
    probe,
)
from collegium.graphs import BUDGETS, capture, capture_all, capture_model
from collegium.testing.compare import heavy_tailed, random_experts

E, H, INNER, K = 11, 64, 32, 3
BUDGETS_HERE = (1, 4, 16)


def layer_of(*, router: bool = True, shared: bool = False, seed: int = 1, **rule: Any) -> MoELayer:
    spec = MoESpec(
        hidden_size=H,
        intermediate_size=INNER,
        num_experts=E,
        routing=RoutingSpec(top_k=K, **rule),
        weight_format="mxfp4",
        shared=SharedSpec(intermediate_size=INNER) if shared else None,
    )
    problem = Problem(spec=spec, device=probe("cpu"), limits=Limits(max_tokens=16))
    weights = encode_experts(random_experts(E, 2, INNER, H, seed=seed), "mxfp4")
    shared_experts = encode_experts(random_experts(1, 2, INNER, H, seed=seed + 1), "mxfp4") if shared else None
    return MoELayer(
        weights,
        plan(problem),
        router=RouterWeights(weight=heavy_tailed(E, H, seed=seed + 2)) if router else None,
        shared=None if shared_experts is None else SharedWeights(experts=shared_experts),
    )


def tokens_of(count: int, seed: int = 5) -> torch.Tensor:
    return heavy_tailed(count, H, seed=seed).bfloat16()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 16])
def test_runner_equals_layer(count: int, shared: bool) -> None:
    layer = layer_of(shared=shared)
    runner = capture(layer, BUDGETS_HERE)
    x = tokens_of(count)
    assert runner(x).equal(layer(x))


def test_padding_has_no_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of an earlier batch, NaN among them, reach no later result, and padded rows no expert."""
    layer = layer_of()
    runner = capture(layer, BUDGETS_HERE)
    runner(torch.full((16, H), torch.nan, dtype=torch.bfloat16))
    x = tokens_of(5)
    expected = layer(x)
    padded: list[torch.Tensor] = []
    forward = MoELayer.forward

    def note(layer: MoELayer, x: torch.Tensor, *, routing: Routing, **inputs: Any) -> torch.Tensor:
        padded.append(routing.topk_ids)
        return forward(layer, x, routing=routing, **inputs)

    monkeypatch.setattr(MoELayer, "forward", note)
    assert runner(x).equal(expected)
    (ids,) = padded
    assert ids.shape == (16, K)
    assert bool((ids[:5] >= 0).all())
    assert bool((ids[5:] == -1).all())


@pytest.mark.parametrize("given", ["router_logits", "routing"])
def test_inputs_of_capture(given: Any) -> None:
    layer = layer_of(router=False)
    runner = capture(layer, BUDGETS_HERE, routing_input=given)
    x, logits = tokens_of(5), heavy_tailed(5, E, seed=9)
    inputs: dict[str, Any] = {"router_logits": logits}
    if given == "routing":
        inputs = {"routing": layer.route(x, router_logits=logits)}
    assert runner(x, **inputs).equal(layer(x, **inputs))
    with pytest.raises(InputError, match=given if given == "router_logits" else "topk_ids"):
        runner(x)
    other = {"routing": layer.route(x, router_logits=logits)} if given == "router_logits" else {"router_logits": logits}
    with pytest.raises(InputError):
        runner(x, **other)


def test_router_input_and_token_ids() -> None:
    layer = layer_of()
    runner = capture(layer, BUDGETS_HERE, router_input=True)
    x, router_input = tokens_of(3), tokens_of(3, seed=8)
    assert runner(x, router_input=router_input).equal(layer(x, router_input=router_input))
    assert not runner(x, router_input=router_input).equal(layer(x))
    with pytest.raises(InputError, match="router_input"):
        runner(x)


def test_output_argument_and_shape() -> None:
    layer = layer_of()
    runner = capture(layer, BUDGETS_HERE)
    x = tokens_of(6).view(2, 3, H)
    out = torch.empty_like(x)
    assert runner(x, out=out) is out
    assert out.equal(layer(x))
    assert runner(x).shape == x.shape


def test_too_many_tokens() -> None:
    runner = capture(layer_of(), BUDGETS_HERE)
    with pytest.raises(InputError, match=r"17.*16"):
        runner(tokens_of(17))


def test_budget_argument() -> None:
    layer = layer_of()
    runner = capture(layer, BUDGETS_HERE)
    x = tokens_of(3)
    assert [runner.budget_for(count) for count in (0, 1, 2, 4, 5, 16)] == [1, 1, 4, 4, 16, 16]
    assert runner(x, budget=16).equal(layer(x))
    for wrong in (1, 5, 32):
        with pytest.raises(InputError, match=f"{wrong}.*1, 4, 16"):
            runner(x, budget=wrong)


def test_budgets_beyond_plan() -> None:
    layer = layer_of()
    for budgets in ((), (0, 4), (8, 17), BUDGETS):
        with pytest.raises(InputError, match="16"):
            capture(layer, budgets)


def test_uncapturable_layers() -> None:
    layer = layer_of()
    layer.checked = True
    with pytest.raises(InputError, match="checked"):
        capture(layer, BUDGETS_HERE)
    with pytest.raises(InputError, match="router"):
        capture(layer_of(router=False), BUDGETS_HERE, routing_input="router")


def test_layers_share_buffers() -> None:
    """Layers of the same sizes share buffers, and each still computes with its own experts."""
    layers = [layer_of(seed=1), layer_of(seed=20)]
    runners = capture_all(layers, BUDGETS_HERE)
    x = tokens_of(7)
    expected = [layer(x) for layer in layers]
    assert not expected[0].equal(expected[1])
    assert [runner(x).equal(y) for runner, y in zip(runners, expected, strict=True)] == [True, True]
    # The first result is not overwritten by the second call.
    first, second = (runner(x) for runner in runners)
    assert first.equal(expected[0])
    assert second.equal(expected[1])


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layer_of(seed=1), layer_of(seed=20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x + self.first(x, routing=self.first.route(x))
        return hidden + self.second(hidden, routing=self.second.route(hidden))


def test_model_with_installed_graphs() -> None:
    model = TwoLayers()
    x, long = tokens_of(5), tokens_of(20)
    expected, expected_long = model(x), model(long)
    graphs = capture_model(model, BUDGETS_HERE)
    assert len(graphs) == 2
    calls: list[int] = []
    for runner in graphs:
        runner.run = counted(runner.run, calls)  # type: ignore[method-assign]
    with graphs.installed():
        assert model(x).equal(expected)
        assert calls == [16, 16]
        with pytest.raises(InputError, match=r"20.*16"):
            model(long)
    with graphs.installed(larger="eager"):
        assert model(long).equal(expected_long)
    assert calls == [16, 16]
    assert model(long).equal(expected_long)


def counted(run: Any, calls: list[int]) -> Any:
    def call(budget: int) -> None:
        calls.append(budget)
        run(budget)

    return call


def test_model_without_layers() -> None:
    with pytest.raises(InputError, match="Linear"):
        capture_model(nn.Linear(4, 4), BUDGETS_HERE)


def test_routing_of_ids_without_expert() -> None:
    """Ids of -1 and out-of-range ids mean in a padded batch what they mean without padding."""
    layer = layer_of(router=False)
    runner = capture(layer, BUDGETS_HERE)
    x = tokens_of(3)
    ids = torch.tensor([[0, -1, 2], [-1, -1, -1], [4, E + 3, 1]])
    routing = Routing(topk_ids=ids, topk_weights=torch.rand(3, K))
    assert runner(x, routing=routing).nan_to_num(7).equal(layer(x, routing=routing).nan_to_num(7))


def test_repr_names_budgets() -> None:
    text = repr(capture(layer_of(), BUDGETS_HERE))
    assert "3" in text
    assert "16" in text
    assert "CPU" in text
