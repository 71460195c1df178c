"""Codes of two and three bits on a GPU: every tile gives the bits of the others and the product of decoded weights."""

from __future__ import annotations

import pytest
import torch

from collegium.experts.triton.grouped import grouped_gemm, tile_list
from collegium.experts.triton.packing import pack_gguf
from collegium.experts.triton.packing.low_bits import LOW_BIT_KINDS
from collegium.experts.triton.tiles.candidates import candidates
from collegium.layer import MoELayer
from collegium.planning import plan
from collegium.problem import Overrides, Problem
from collegium.runtime.devices import probe
from collegium.runtime.machine import machine_at
from collegium.testing.compare import heavy_tailed, relative_error
from collegium.types import ActivationSpec, ExpertWeights, MoESpec, RoutingSpec
from integers import random_blocks
from products import grouped_gemm_reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def bound_of(kind: str, most: float) -> float:
    # Weights of Q2_K become bfloat16 numbers.
    return 1e-2 if kind == "Q2_K" else most


@pytest.mark.parametrize("kind", LOW_BIT_KINDS)
@pytest.mark.parametrize(("parts", "columns"), [(2, 320), (1, 2048)])
def test_tiles_have_the_same_bits(kind: str, parts: int, columns: int) -> None:
    payload = random_blocks(kind, 3, parts, 200, columns)
    bias = torch.randn(3, parts, 200)
    packed = pack_gguf(payload.to("cuda"), bias.cuda())
    offsets = torch.tensor([0, 70, 71, 100])
    x = heavy_tailed(101, columns, seed=6).bfloat16()
    x[3], x[100] = torch.nan, torch.nan
    activation = ActivationSpec() if parts == 2 else None
    truth = grouped_gemm_reference(x[:100], payload.decode(), offsets, bias=bias, activation=activation)
    tiles = candidates(packed.layout.problem(100, 16, False), machine_at(torch.device("cuda")))
    assert {tile.block_t for tile in tiles} >= {16, 32}
    results = []
    for tile in tiles:
        found = torch.full((101, 200), torch.nan, device="cuda")
        tile_lists = tile_list(offsets.cuda(), 100, tile)
        grouped_gemm(x.cuda(), packed, offsets.cuda(), tile_lists, found[:100], activation=activation)
        assert bool(found[100].isnan().all())
        results.append(found[:100].cpu())
    first = results[0]
    assert bool(first[3].isnan().all())
    kept = [row for row in range(100) if row != 3]
    assert relative_error(first[kept], truth[kept]) < bound_of(kind, 3e-5)
    assert all(torch.equal(first[kept], other[kept]) for other in results[1:])


@pytest.mark.parametrize("kind", LOW_BIT_KINDS)
def test_layer_matches_float32(kind: str) -> None:
    """Batches of one token to hundreds, in tiles of all sizes; gate and up swapped would differ."""
    spec = MoESpec(
        hidden_size=768, intermediate_size=512, num_experts=8, routing=RoutingSpec(top_k=2), weight_format="gguf"
    )  # fmt: skip
    gate_up, down = random_blocks(kind, 8, 2, 512, 768), random_blocks(kind, 8, 768, 512)
    layers = {}
    for place in ("cpu", "cuda"):
        made = plan(Problem(spec=spec, device=probe(place)), Overrides(kernel="reference") if place == "cpu" else None)
        layers[place] = MoELayer(ExpertWeights(gate_up=gate_up.to(place), down=down.to(place)), made)
    assert any(f"gate_up {kind} in {bits}" in str(layers["cuda"]) for bits in (2, 3))
    alone = None
    for tokens in (1, 3, 16, 200, 700):
        x, logits = heavy_tailed(700, 768, seed=3)[:tokens].bfloat16(), heavy_tailed(700, 8, seed=4)[:tokens]
        wanted = layers["cpu"](x, router_logits=logits)
        found = layers["cuda"](x.cuda(), router_logits=logits.cuda()).cpu()
        assert relative_error(found, wanted) < 0.015
        alone = found[:1] if alone is None else alone
        assert torch.equal(found[:1], alone), "a token's bits do not depend on the batch"
