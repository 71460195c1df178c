"""Activation scales of a checkpoint on a GPU: the codes of the reference, whatever else a process has compiled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
if torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("FP8 products begin with sm_89", allow_module_level=True)

from collegium.encoding import encode_experts
from collegium.layer import MoELayer
from collegium.ops.quantize import formats_within, quantize_rows
from collegium.planning import plan
from collegium.problem import DeviceFacts, Limits, Overrides, Problem
from collegium.runtime.devices import probe
from collegium.testing.compare import heavy_tailed, random_experts, relative_error, uneven_ids
from collegium.types import ExpertWeights, MoESpec, Routing, RoutingSpec

SIZES = (16, 512, 384)
REACH = (20.0, 6.0)


def weights_of(weights: str, reach: tuple[float, float]) -> ExpertWeights[Any]:
    experts, hidden, wide = SIZES
    return replace(encode_experts(random_experts(experts, 2, wide, hidden, seed=1), weights), input_reach=reach)


def layer_of(weights: str, activations: str, place: str, reach: tuple[float, float] = REACH) -> MoELayer:
    experts, hidden, wide = SIZES
    spec = MoESpec(
        hidden_size=hidden,
        intermediate_size=wide,
        num_experts=experts,
        routing=RoutingSpec(top_k=4),
        weight_format=weights,
    )
    facts: DeviceFacts = probe(place)
    made = weights_of(weights, reach)
    moved = replace(made, gate_up=made.gate_up.to(place), down=made.down.to(place))
    problem = Problem(spec=spec, device=facts, limits=Limits(max_tokens=2048))
    return MoELayer(moved, plan(problem, Overrides(activation_format=activations)))


def tokens(count: int) -> tuple[torch.Tensor, Routing]:
    """Rows that underflow, rows that saturate, and what is between."""
    x = heavy_tailed(count, SIZES[1], seed=2) * torch.logspace(-7, 2, count)[:, None]
    ids = uneven_ids(count, 4, SIZES[0], seed=3)
    return x.bfloat16(), Routing(topk_ids=ids, topk_weights=torch.rand(count, 4) + 0.1)


def on(routing: Routing, place: str) -> Routing:
    return Routing(topk_ids=routing.topk_ids.to(place), topk_weights=routing.topk_weights.to(place))


@pytest.mark.parametrize("name", ["fp8_static", "nvfp4_static"])
@pytest.mark.parametrize("rows", [1, 23, 5000])
def test_kernel_codes_match_reference(name: str, rows: int) -> None:
    """Formats with and without a given scale take turns: their kernels differ by a missing argument alone."""
    x = tokens(max(rows, 2))[0][:rows]
    for reach in (REACH, (0.5, 1.0)):
        form, _ = formats_within(name, reach)
        own, _ = formats_within("fp8_token" if form.bits == 8 else "nvfp4", None)
        for each in (form, own, form):
            wanted, found = quantize_rows(x, each), quantize_rows(x.cuda(), each)
            assert torch.equal(found.codes.cpu().view(torch.uint8), wanted.codes.view(torch.uint8))
            assert wanted.scales is not None
            assert found.scales is not None
            assert torch.equal(found.scales.cpu().float(), wanted.scales.float())


@pytest.mark.parametrize("weights", ["fp8_tensor", "fp8_channel", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("count", [1, 24, 400, 2048])
def test_layers_are_the_reference(weights: str, count: int) -> None:
    x, routing = tokens(max(count, 2))
    x, routing = x[:count], Routing(topk_ids=routing.topk_ids[:count], topk_weights=routing.topk_weights[:count])
    layer = layer_of(weights, "fp8_static", "cuda")
    assert layer.plan.kernel == ("triton_w4a8" if weights.endswith("fp4") else "triton_fp8")
    judge = layer_of(weights, "fp8_static", "cpu")
    found, wanted = layer(x.cuda(), routing=on(routing, "cuda")).float().cpu(), judge(x, routing=routing).float()
    zero = (wanted == 0).all(dim=1)
    assert (found[zero] == 0).all()
    if count > 1:
        assert zero.any()
    if not zero.all():
        assert relative_error(found[~zero], wanted[~zero]) < 0.03
    other = layer_of(weights, "fp8_static", "cuda", (REACH[1], REACH[0]))
    if count > 1:
        assert relative_error(other(x.cuda(), routing=on(routing, "cuda")).float().cpu()[~zero], wanted[~zero]) > 0.05


def test_layers_share_kernels_across_static_scales() -> None:
    """Warmed up by the first, then each in a graph of its own: the bits are those without one."""
    x, routing = tokens(24)
    x, routing = x.cuda(), on(routing, "cuda")
    layers = [layer_of("fp8_tensor", "fp8_static", "cuda", reach) for reach in (REACH, (1.0, 1.0))]
    layers.append(layer_of("fp8_tensor", "fp8_token", "cuda"))
    layers[0].warm_up()
    before = [layer(x, routing=routing) for layer in layers]
    assert not torch.equal(before[0], before[1])
    for layer, wanted in zip(layers, before, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x, routing=routing)
        graph.replay()
        assert torch.equal(out, wanted)
        for _ in range(3):  # recorded by the layer itself
            assert torch.equal(layer(x, routing=routing), wanted)
