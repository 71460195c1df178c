"""A layer with functions of the caller on a GPU: eager calls, CUDA graphs, parts of sums and outputs that are apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collegium import (
    Limits,
    MoELayer,
    MoESpec,
    Overrides,
    Problem,
    RoutingSpec,
    SharedSpec,
    SharedWeights,
    encode_experts,
    plan,
    probe,
    slice_shared,
)
from collegium.graphs import capture
from collegium.parallel.placement import expert_ids_of, linear
from collegium.testing.compare import heavy_tailed, random_experts, relative_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

E, H, INNER, K, WIDE = 8, 256, 128, 3, 256


def experts(count: int, inner: int, seed: int, weights: str = "bf16") -> Any:
    made = encode_experts(random_experts(count, 2, inner, H, seed=seed), weights)
    return type(made)(gate_up=made.gate_up.to("cuda"), down=made.down.to("cuda"))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        block = random_experts(1, 2, WIDE, H, seed=7)
        self.gate_up = nn.Parameter(block.gate_up.decode()[0].bfloat16().cuda(), requires_grad=False)
        self.down = nn.Parameter(block.down.decode()[0].bfloat16().cuda(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = (x @ half.T for half in self.gate_up)
        return (nn.functional.silu(gate) * up) @ self.down.T


def spec_of(shared: SharedSpec | None = None) -> MoESpec:
    return MoESpec(hidden_size=H, intermediate_size=INNER, num_experts=E, routing=RoutingSpec(top_k=K), shared=shared)


@pytest.mark.parametrize("mode", [None, "side_stream"])
def test_modules_run_eagerly_and_in_graphs(mode: Any) -> None:
    gate = heavy_tailed(E, H, seed=3, channels=False).cuda()
    problem = Problem(spec=spec_of(), device=probe("cuda"), limits=Limits(max_tokens=512), graph=True)
    module = Mlp()
    chosen = plan(problem, Overrides(shared=mode))
    layer = MoELayer(experts(E, INNER, 1), chosen, router=lambda x: x.float() @ gate.T, shared=module)
    assert layer.plan.side_stream_tokens == (512 if mode else 0)
    planned = Problem(
        spec=spec_of(SharedSpec(intermediate_size=WIDE)), device=probe("cuda"), limits=Limits(max_tokens=512)
    )
    other = MoELayer(experts(E, INNER, 1), plan(planned), shared=SharedWeights(experts=experts(1, WIDE, 7)))
    layer.warm_up()
    for tokens in (1, 7, 300):
        x = heavy_tailed(tokens, H, seed=tokens).bfloat16().cuda()
        found = [layer(x) for _ in range(3)]
        assert all(torch.equal(result, found[0]) for result in found)
        wanted = other(x, router_logits=x.float() @ gate.T)
        assert relative_error(found[0], wanted) < 0.01
        shared, routed = layer.shared_and_routed(x)
        assert shared is not None
        assert torch.equal(shared, module(x))
        assert relative_error(shared.float() + routed.float(), found[0]) < 0.01
        parts = other.shared_and_routed(x, router_logits=x.float() @ gate.T)
        assert parts[0] is not None
        assert relative_error(parts[0].float() + parts[1].float(), wanted) < 0.01
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured, apart = layer(x), layer.shared_and_routed(x)
            of_plan = other.shared_and_routed(x, router_logits=x.float() @ gate.T)
        graph.replay()
        assert torch.equal(captured, found[0])
        for result, right in zip((*apart, *of_plan), (shared, routed, *parts), strict=True):
            assert result is not None
            assert right is not None
            assert torch.equal(result, right)
    runner = capture(layer, budgets=(8, 64))
    for tokens in (1, 8, 33):
        x = heavy_tailed(tokens, H, seed=tokens).bfloat16().cuda()
        # The modules of torch may add in another order for the rows of a budget.
        assert relative_error(runner(x), layer(x)) < 0.01


@pytest.mark.parametrize("shared", ["sequential", "side_stream", "sliced"])
def test_parts_add_the_shared_expert_once(shared: Any) -> None:
    block, made = experts(1, WIDE, 7, "fp8_block"), experts(E, INNER, 1, "fp8_block")
    spec = MoESpec(
        hidden_size=H,
        intermediate_size=INNER,
        num_experts=E,
        routing=RoutingSpec(top_k=K),
        weight_format="fp8_block",
        shared=SharedSpec(intermediate_size=WIDE),
    )
    limits = Limits(max_tokens=512)
    whole_plan = plan(Problem(spec=spec, device=probe("cuda"), limits=limits, out_dtype="fp32"))
    whole = MoELayer(made, whole_plan, shared=SharedWeights(experts=block))
    layers: list[MoELayer] = []
    for rank in range(2):
        placement = linear(E, rank, 2)
        problem = Problem(spec=spec, device=probe("cuda"), limits=limits, placement=placement, out_dtype="fp32")
        overrides = Overrides(dispatcher="partial", shared=shared)
        chosen = plan(problem, overrides)
        own: SharedWeights[Any] = SharedWeights(experts=block)
        if chosen.problem.shared_slices > 1:
            own = slice_shared(chosen, own)
        layers.append(MoELayer(expert_ids_of(made, placement.expert_ids), chosen, shared=own))
    for tokens in (1, 7, 300):
        x = heavy_tailed(tokens, H, seed=tokens).bfloat16().cuda()
        logits = heavy_tailed(tokens, E, seed=tokens + 1, channels=False).cuda()
        wanted = whole(x, router_logits=logits)
        assert relative_error(sum(layer(x, router_logits=logits) for layer in layers), wanted) < 0.01  # type: ignore[arg-type]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            parts = [layer(x, router_logits=logits) for layer in layers]
        graph.replay()
        assert relative_error(parts[0] + parts[1], wanted) < 0.01
