"""Given scales of the rows between the products on a GPU: small and large tiles, against float64 and each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from collegium import (
    MoEOptions,
    Routing,
    encode_experts,
    moe,
)
from collegium.ops.quantize import activation_format
from collegium.testing.compare import heavy_tailed, random_experts, relative_error
from fp8_tokens import layer_on_gpu, quantised, routing_with_absent_experts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

E, H, INNER, K = 8, 512, 256, 3


def case(name: str, form_name: str, tokens: int) -> tuple[Any, Any, Any, Any, torch.Tensor]:
    """Return experts, their routing, tokens as codes and scales, their numbers, and scales of the rows in between."""
    made = encode_experts(random_experts(E, 2, INNER, H, seed=1), name)
    ids, weights = routing_with_absent_experts(tokens, E, K)
    codes, code_scale, decoded = quantised(form_name, heavy_tailed(tokens, H, seed=5).bfloat16())
    largest = torch.zeros(tokens, INNER)
    for expert in range(E):
        gate, up = made.gate_up[expert].decode()
        middle = torch.nn.functional.silu(decoded @ gate.T) * (decoded @ up.T)
        largest = torch.where((ids == expert).any(1, keepdim=True), torch.maximum(largest, middle.abs()), largest)
    width = 128 if activation_format(form_name).group else INNER
    scale = torch.stack([part.amax(1) for part in largest.split(width, dim=1)], dim=1).clamp(min=1e-4) / 448
    scale[2] /= 32  # saturates
    return made, (ids, weights), (codes.cuda(), code_scale.cuda()), decoded, scale


def truth_of(made: Any, routing: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the sums in float64, with rows between the products rounded to E4M3 of ``scale [T, G]``."""
    ids, weights = routing
    x, weights = x.double(), weights.double()
    spread = scale.double().repeat_interleave(INNER // scale.shape[1], 1)
    out = torch.zeros(x.shape[0], H, dtype=torch.float64)
    for expert in range(E):
        gate, up = made.gate_up[expert].decode().double()
        middle = torch.nn.functional.silu(x @ gate.T) * (x @ up.T)
        codes = (middle / spread).clamp(-448, 448).float().to(torch.float8_e4m3fn)
        factor = torch.where(ids == expert, weights, 0).sum(1, keepdim=True)
        out += factor * ((codes.double() * spread) @ made.down[expert].decode().double().T)
    return out


@pytest.mark.parametrize("form", ["fp8_token", "fp8_group128"])
@pytest.mark.parametrize("name", ["fp8_block", "fp8_channel", "mxfp4", "nvfp4"])
def test_tiles_quantise_with_given_scales(name: str, form: str) -> None:
    tokens = 2048
    made, (ids, weights), (codes, code_scale), decoded, scale = case(name, form, tokens)
    routing = Routing(topk_ids=ids.cuda(), topk_weights=weights.cuda())
    outs: list[torch.Tensor] = []
    for tiles in ("small", None):
        layer = layer_on_gpu(made, tokens, K, activation_format=form, tiles=tiles)
        out = layer.run_quantized(codes, code_scale, routing, middle_scale=scale.cuda())
        outs.append(out.cpu())
    assert torch.equal(*outs)
    wanted = truth_of(made, (ids, weights), decoded, scale)
    assert relative_error(outs[0], wanted) < 0.02
    assert relative_error(outs[0][2], wanted[2]) < 0.03


@pytest.mark.parametrize("kind", ["one", "token", "group"])
@pytest.mark.parametrize("tokens", [1, 9, 300])
def test_functional_entry(kind: str, tokens: int) -> None:
    form = "fp8_group128" if kind == "group" else "fp8_token"
    tokens = max(tokens, 3)
    made, (ids, weights), (codes, code_scale), decoded, scale = case("fp8_block", form, tokens)
    given: Any = float(scale.max()) if kind == "one" else scale.cuda()
    options = MoEOptions(a1_scale=code_scale, a2_scale=given)
    out = moe(codes, made.gate_up.to("cuda"), made.down.to("cuda"), ids.cuda(), weights.cuda(), options=options)
    used = torch.full_like(scale[:, :1], given) if kind == "one" else scale
    assert relative_error(out.cpu(), truth_of(made, (ids, weights), decoded, used)) < 0.02
