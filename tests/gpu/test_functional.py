"""``moe`` and layers with raw codes, quantised tokens and output dtypes on a GPU, against float64 on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from collegium import (
    ActivationSpec,
    MoEOptions,
    Overrides,
    Routing,
    encode_experts,
    moe,
    moe_batched,
)
from collegium.testing.compare import heavy_tailed, random_experts, relative_error
from fp8_tokens import layer_on_gpu, quantised, routing_with_absent_experts
from truth import moe_truth

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

E, H, INNER, K = 8, 512, 256, 3


def on_gpu(made: Any) -> Any:
    return made.gate_up.to("cuda"), made.down.to("cuda")


def truth_of(x: torch.Tensor, made: Any, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return moe_truth(x, made.gate_up.decode(), made.down.decode(), ids, weights, ActivationSpec())


@pytest.mark.parametrize("name", ["fp8_block", "fp8_channel", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("form", ["fp8_token", "fp8_group128"])
@pytest.mark.parametrize("tokens", [1, 9, 300])
def test_quantised_tokens(name: str, form: str, tokens: int) -> None:
    made = encode_experts(random_experts(E, 2, INNER, H, seed=1), name)
    ids, weights = routing_with_absent_experts(tokens, E, K)
    x = heavy_tailed(tokens, H, seed=5).bfloat16()
    codes, scale, dequantised = quantised(form, x)
    gate_up, down = on_gpu(made)
    routing = ids.cuda(), weights.cuda()
    found = moe(codes.cuda(), gate_up, down, *routing, options=MoEOptions(a1_scale=scale.cuda()))
    assert relative_error(found.cpu(), truth_of(dequantised, made, ids, weights)) < 0.06
    forced = MoEOptions(overrides=Overrides(activation_format=form))
    # One quantisation, here by the library on the CPU and there by the kernel, and the same products.
    assert relative_error(found, moe(x.cuda(), gate_up, down, *routing, options=forced)) < 2e-3
    wide = moe(
        codes.cuda(), gate_up, down, *routing, options=MoEOptions(a1_scale=scale.cuda(), out_dtype=torch.float32)
    )
    assert wide.dtype == torch.float32
    assert relative_error(wide.cpu(), truth_of(dequantised, made, ids, weights)) < 0.06


@pytest.mark.parametrize("form", ["fp8_token", "fp8_group128"])
def test_rows_packed_by_expert_in_fp8(form: str) -> None:
    made = encode_experts(random_experts(E, 2, INNER, H, seed=1), "fp8_block")
    gate_up, down = on_gpu(made)
    layer = layer_on_gpu(made, 64, K, activation_format=form)
    room = 40
    counts = torch.tensor([0, 7, room, 3, 0, 1, 12, 2])
    rows = heavy_tailed(E * room, H, seed=2).bfloat16()
    codes, scale, _ = quantised(form, rows)
    valid = torch.arange(room) < counts[:, None]
    scale = scale.view(E, room, -1).masked_fill(~valid[..., None], torch.nan)
    out = torch.full((E, room, H), 7.0, dtype=torch.bfloat16, device="cuda")
    layer.run_batched(codes.view(E, room, H).cuda(), counts.cuda(), scale=scale.cuda(), out=out, expected=25)
    wanted = layer.run_batched(rows.view(E, room, H).cuda(), counts.cuda())
    assert relative_error(out.cpu()[valid], wanted.cpu()[valid]) < 2e-3
    assert bool((out.cpu()[~valid] == 7).all())
    options = MoEOptions(a1_scale=scale.cuda())
    once = moe_batched(codes.view(E, room, H).cuda(), gate_up, down, counts.cuda(), options=options, expected=25)
    assert relative_error(once.cpu()[valid], out.cpu()[valid]) < 1e-6
    graph = torch.cuda.CUDAGraph()
    inputs = codes.view(E, room, H).cuda(), counts.cuda(), scale.cuda()
    with torch.cuda.graph(graph):
        captured = layer.run_batched(inputs[0], inputs[1], scale=inputs[2])
    graph.replay()
    assert torch.equal(captured.cpu()[valid], out.cpu()[valid])


@pytest.mark.parametrize("name", ["bf16", "fp8_block", "mxfp4"])
@pytest.mark.parametrize("tokens", [1, 9, 300])
def test_the_output_has_its_own_dtype(name: str, tokens: int) -> None:
    made = encode_experts(random_experts(E, 2, INNER, H, seed=1), name)
    ids, weights = routing_with_absent_experts(tokens, E, K)
    x = heavy_tailed(tokens, H, seed=5).bfloat16()
    routing = Routing(topk_ids=ids.cuda(), topk_weights=weights.cuda())
    outputs = []
    for out_dtype in (None, "fp32"):
        layer = layer_on_gpu(made, 64, K, out_dtype=out_dtype)
        outputs.append([layer(x.cuda(), routing=routing) for _ in range(3)][-1])
    assert torch.equal(outputs[1].bfloat16(), outputs[0])
    assert relative_error(outputs[1].cpu(), truth_of(x, made, ids, weights)) < 0.01
