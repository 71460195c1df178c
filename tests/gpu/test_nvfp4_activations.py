"""NVFP4 rows times NVFP4 weights on a GPU: the codes and the numbers of the reference, in every flow and in graphs."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from collegium.encoding import encode_experts
from collegium.layer import MoELayer
from collegium.ops.quantize import activation_format, quantize_rows
from collegium.ops.rows import ExpertScales
from collegium.planning import plan
from collegium.problem import DeviceFacts, Limits, Overrides, Problem
from collegium.runtime.devices import probe
from collegium.testing.compare import heavy_tailed, random_experts, relative_error, uneven_ids
from collegium.types import ExpertWeights, MoESpec, Routing, RoutingSpec
from memories import Poisoned
from nvfp4_rows import emulated_experts, quantized

FORMATS = ("nvfp4", "nvfp4_static", "nvfp4_expert")
SIZES = (16, 512, 384)
REACH = (20.0, 6.0)
EXPERT_REACH = torch.tensor(REACH) * torch.logspace(-1, 0, 16)[:, None]


def weights_of(sizes: tuple[int, int, int]) -> ExpertWeights[Any]:
    experts, hidden, wide = sizes
    weights = encode_experts(random_experts(experts, 2, wide, hidden, seed=1), "nvfp4")
    return replace(weights, input_reach=REACH, expert_reach=EXPERT_REACH[:experts])


def layer_of(
    activations: str, place: str, *, dtype: Any = "bf16", sizes: tuple[int, int, int] = SIZES, **options: Any
) -> MoELayer:
    experts, hidden, wide = sizes
    spec = MoESpec(
        hidden_size=hidden,
        intermediate_size=wide,
        num_experts=experts,
        routing=RoutingSpec(top_k=4),
        weight_format="nvfp4",
    )
    facts: DeviceFacts = probe(place)
    weights = weights_of(sizes)
    moved = replace(weights, gate_up=weights.gate_up.to(place), down=weights.down.to(place))
    problem = Problem(spec=spec, device=facts, dtype=dtype, limits=Limits(max_tokens=4096))
    return MoELayer(moved, plan(problem, Overrides(activation_format=activations, **options)))


def tokens(count: int, dtype: torch.dtype, sizes: tuple[int, int, int] = SIZES) -> tuple[torch.Tensor, Routing]:
    """Rows that underflow the calibrated scales, rows that saturate them, and what is between."""
    x = heavy_tailed(count, sizes[1], seed=2) * torch.logspace(-6, 1.5, count)[:, None]
    routing = Routing(topk_ids=uneven_ids(count, 4, sizes[0], seed=3), topk_weights=torch.rand(count, 4) + 0.1)
    return x.to(dtype), routing


def on(routing: Routing, place: str = "cuda") -> Routing:
    return Routing(topk_ids=routing.topk_ids.to(place), topk_weights=routing.topk_weights.to(place))


@pytest.mark.parametrize("activations", FORMATS)
@pytest.mark.parametrize("columns", [1, 33, 336, 7168])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decoded_rows_are_the_codes(activations: str, columns: int, dtype: torch.dtype) -> None:
    form: Any = activation_format(activations).operand_format
    x = heavy_tailed(40, columns, seed=2) * torch.logspace(-7, 3, 40)[:, None]
    x[3], x[5, : columns // 2] = 0.0, 0.0
    x[6] = torch.where(torch.arange(columns) % 2 == 0, 6.0, 1.25)
    x = x.to(dtype)
    scale: Any = None
    if activations == "nvfp4_static":
        form = form.within(REACH[0])
        scale = form.scale
    on_gpu = form
    if activations == "nvfp4_expert":
        values, offsets = EXPERT_REACH[:5, 0] / 2688, torch.tensor([0, 7, 7, 20, 33, 40])
        scale = values.repeat_interleave(offsets.diff())
        form = form.with_expert_scales(ExpertScales(values, offsets))
        on_gpu = form.with_expert_scales(ExpertScales(values.cuda(), offsets.cuda()))
    found = quantize_rows(x.cuda(), on_gpu, memory=Poisoned("cuda"))
    numbers, scales = quantized(x, scale)
    reference = quantize_rows(x, form)
    assert found.scales is not None
    for rows in (found, reference):
        assert torch.equal(rows.codes.float().cpu(), numbers)
        assert rows.scales is not None
        assert torch.equal(rows.scales.cpu(), scales)


@pytest.mark.parametrize("activations", FORMATS)
@pytest.mark.parametrize("count", [1, 3, 24, 400, 2048, 4096])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_layers_are_the_reference(activations: str, count: int, dtype: Any) -> None:
    x, routing = tokens(max(count, 2), torch.float32 if dtype == "fp32" else torch.bfloat16)
    x, routing = x[:count], Routing(topk_ids=routing.topk_ids[:count], topk_weights=routing.topk_weights[:count])
    layer, judge = layer_of(activations, "cuda", dtype=dtype), layer_of(activations, "cpu", dtype=dtype)
    assert layer.plan.kernel == "triton_w4a16"
    assert judge.plan.kernel == "reference"
    assert re.search(r"activations nvfp4\w* \(.*bf16", str(layer))
    found, wanted = layer(x.cuda(), routing=on(routing)).float().cpu(), judge(x, routing=routing).float()
    # Sums of another order move a row between the products across a code's midpoint now and then.
    assert relative_error(found, wanted) < (2e-3 if dtype == "fp32" else 6e-3)
    rows = (found - wanted).norm(dim=1) / wanted.norm(dim=1).clamp(min=1e-30)
    assert float(rows.median()) < (2e-5 if dtype == "fp32" else 6e-3)


@pytest.mark.parametrize("activations", FORMATS)
@pytest.mark.parametrize("sizes", [(5, 176, 112), (5, 130, 66), (16, 1024, 512)])
def test_layers_are_the_emulation(activations: str, sizes: tuple[int, int, int]) -> None:
    x, routing = tokens(12, torch.float32, sizes)
    layer = layer_of(activations, "cuda", dtype="fp32", sizes=sizes)
    weights = weights_of(sizes)
    scales: Any = (None, None)
    if activations == "nvfp4_static":
        scales = (REACH[0] / 2688, REACH[1] / 2688)
    elif activations == "nvfp4_expert":
        scales = (EXPERT_REACH[: sizes[0], 0] / 2688, EXPERT_REACH[: sizes[0], 1] / 2688)
    wanted = emulated_experts(x, weights.gate_up.decode(), weights.down.decode(), routing, scales=scales)
    assert relative_error(layer(x.cuda(), routing=on(routing)).cpu(), wanted) < 2e-3


@pytest.mark.parametrize("activations", FORMATS)
def test_rows_in_any_batch(activations: str) -> None:
    """The bits of a token alone, in a small, a sorted and a large batch, next to a NaN row, and in two runs."""
    layer = layer_of(activations, "cuda")
    x, routing = tokens(4096, torch.bfloat16)
    x, routing = x.cuda(), on(routing)
    whole = layer(x, routing=routing)
    assert torch.equal(layer(x, routing=routing), whole)
    for rows in (slice(700, 701), slice(3000, 3003), slice(2100, 2164), slice(0, 900)):
        part = Routing(topk_ids=routing.topk_ids[rows], topk_weights=routing.topk_weights[rows])
        assert torch.equal(layer(x[rows], routing=part), whole[rows])
    x[5, 3] = torch.nan
    lost = layer(x, routing=routing)
    assert lost[5].isnan().all()
    others = torch.arange(4096, device="cuda") != 5
    assert torch.equal(lost[others], whole[others])


@pytest.mark.parametrize("activations", FORMATS)
def test_graphs_of_two_layers(activations: str) -> None:
    x, routing = tokens(64, torch.bfloat16)
    x, routing = x.cuda(), on(routing)
    layers = [layer_of(activations, "cuda"), layer_of("nvfp4", "cuda")]
    layers[0].warm_up()
    wanted = layers[1](layers[0](x, routing=routing), routing=routing)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layers[1](layers[0](x, routing=routing), routing=routing)
    for _ in range(2):
        graph.replay()
        assert torch.equal(found, wanted)


def test_other_scales_need_no_other_kernel() -> None:
    """A calibrated scale is a number that kernels are passed: formats take turns without a wrong reuse."""
    x, routing = tokens(24, torch.bfloat16)
    x, routing = x.cuda(), on(routing)
    layers = {name: layer_of(name, "cuda") for name in FORMATS}
    first = {name: layer(x, routing=routing) for name, layer in layers.items()}
    assert not torch.equal(first["nvfp4"], first["nvfp4_static"])
    assert not torch.equal(first["nvfp4_expert"], first["nvfp4_static"])
    for _ in range(3):
        for name, layer in layers.items():
            assert torch.equal(layer(x, routing=routing), first[name])
