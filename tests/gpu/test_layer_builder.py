"""New weights in the packed memory of a layer on a GPU: captured graphs compute with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from collegium import LayerBuilder, Limits, MoELayer, MoESpec, Overrides, RoutingSpec, WeightUpdater, weights_checksum
from collegium.dummy.weights import random_weights
from collegium.types import ExpertWeights

E, H, WIDTH = 32, 1024, 768
# Format of the layer, format that is sent, activations.
RECIPES = [
    ("bf16", "bf16", "bf16"),
    ("fp8_block", "fp8_block", "fp8_group128"),
    ("mxfp4", "mxfp4", "bf16"),
    ("mxfp4", "mxfp4", "fp8_group128"),
    ("mxfp4", "bf16", "fp8_group128"),
    ("nvfp4", "nvfp4", "bf16"),
]


def spec_of(weight_format: str) -> MoESpec:
    return MoESpec(
        hidden_size=H,
        intermediate_size=WIDTH,
        num_experts=E,
        routing=RoutingSpec(top_k=4),
        weight_format=weight_format,
    )


def parameters_of(weights: ExpertWeights[Any], *, single: bool) -> list[tuple[str, torch.Tensor, str, int | None]]:
    """Return the stored tensors of experts under the names of compressed-tensors, or of transformers' FP8 blocks."""
    names = {
        "bf16": {"values": "weight"},
        "fp8_block": {"codes": "weight", "scales": "weight_scale_inv"},
        "mxfp4": {"codes": "weight_packed", "scales": "weight_scale"},
        "nvfp4": {"codes": "weight_packed", "scales": "weight_scale", "global_scale": "weight_global_scale"},
    }[weights.down.name]
    stacks: list[tuple[str, torch.Tensor, str, int | None]] = []
    for field, name in names.items():
        upper, lower = getattr(weights.gate_up, field), getattr(weights.down, field)
        if field == "global_scale":  # ModelOpt's multiplies, that of compressed-tensors divides
            upper, lower = 1 / upper, 1 / lower
        stacks += [(name, upper[:, 0], "w1", None), (name, upper[:, 1], "w3", None), (name, lower, "w2", None)]
    if not single:
        return stacks
    return [(name, stack[expert], shard, expert) for name, stack, shard, _ in stacks for expert in range(E)]


def load(target: LayerBuilder | WeightUpdater, tensors: list[tuple[str, torch.Tensor, Any, int | None]]) -> None:
    for name, tensor, shard, expert in tensors:
        target.load(name, tensor, shard=shard, expert=expert)


def built(weights: ExpertWeights[Any], recipe: tuple[str, str, str], router: torch.Tensor) -> MoELayer:
    layer_format, sent, activations = recipe
    builder = LayerBuilder(
        spec_of(sent),
        device="cuda",
        weight_format=layer_format,
        limits=Limits(max_tokens=512),
        overrides=Overrides(activation_format=activations),
    )
    builder.load("router.weight", router)
    load(builder, parameters_of(weights, single=True))
    return builder.finish()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: " ".join(recipe))
@pytest.mark.parametrize("single", [True, False], ids=["single", "stacked"])
def test_captured_graph_uses_new_weights(recipe: tuple[str, str, str], single: bool) -> None:
    device = torch.device("cuda")
    old, new = (random_weights(spec_of(recipe[1]), device, seed) for seed in (1, 2))
    routers = [torch.randn(E, H, device=device) for _ in range(2)]
    layer, wanted = built(old, recipe, routers[0]), built(new, recipe, routers[1])
    batches = [torch.randn(tokens, H, device=device).bfloat16() for tokens in (1, 37, 512)]
    outputs: list[torch.Tensor] = []
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        for x in batches:
            layer(x)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            outputs += [layer(x) for x in batches]
    updater = WeightUpdater(layer, stored=recipe[1])
    tensors: list[tuple[str, torch.Tensor, Any, int | None]] = [
        ("router.weight", routers[1], None, None),
        *parameters_of(new, single=single),
    ]
    load(updater, tensors)
    report = updater.finish()
    assert report.checksum == weights_checksum((name, tensor, shard, e) for name, tensor, shard, e in tensors)
    graph.replay()
    with torch.inference_mode():
        for x, output in zip(batches, outputs, strict=True):
            assert torch.equal(output, wanted(x))
            assert torch.equal(layer(x), output)
