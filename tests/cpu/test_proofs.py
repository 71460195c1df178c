"""What mutants found untested: each test here kills one that had survived (docs/developer/mutants.md)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from collegium.experts.reference import Reference
from collegium.experts.triton import grouped as ops
from collegium.experts.triton.packing import add_projection_dim, pack_nvfp4
from collegium.experts.triton.tiles.problem import TileChoice
from collegium.formats import NvFp4
from collegium.ops.quantize import activation_format
from collegium.problem import DeviceFacts, Problem
from collegium.testing.compare import heavy_tailed, random_experts, relative_error
from collegium.types import ActivationSpec, ContiguousBatch, MoESpec, RoutingSpec
from products import grouped_gemm_reference

TILE = TileChoice(block_n=64, block_t=16, group_t=2, warps=4, stages=1)


def test_the_reference_leaves_dropped_rows_zero() -> None:
    made = random_experts(3, 2, 24, 40, seed=5)
    routing = RoutingSpec(top_k=1)
    spec = MoESpec(hidden_size=40, intermediate_size=24, num_experts=3, routing=routing, weight_format="fp32")
    problem = Problem(spec=spec, device=DeviceFacts(kind="cpu"), dtype="fp32")
    batch = ContiguousBatch(
        x=heavy_tailed(6, 40, seed=6), source=torch.arange(6), expert_offsets=torch.tensor([0, 2, 2, 4])
    )
    rows = Reference().pack(made, problem.routed).run(batch)
    assert rows[:4].abs().sum(1).gt(0).all()
    assert torch.equal(rows[4:], torch.zeros(2, 40))


@pytest.mark.parametrize("divides", [False, True])
def test_packed_nvfp4_respects_global_scale_rule(divides: bool) -> None:
    """In Triton's interpreter, with global scales far from 1 and different for gate and up."""
    weight = heavy_tailed(3, 2, 70, 96, seed=8, channels=False) * torch.tensor([0.02, 3.0])[:, None, None]
    payload = NvFp4.encode(weight, global_divides=divides)
    down = add_projection_dim(NvFp4.encode(heavy_tailed(3, 40, 70, seed=9, channels=False), global_divides=divides))
    offsets, spec = torch.tensor([0, 4, 4, 9]), ActivationSpec()
    x: Any = heavy_tailed(9, 96, seed=10).bfloat16()
    tiles = ops.tile_list(offsets, 9, TILE)
    for matrix, activation, rows in ((payload, spec, x), (down, None, x[:, :70].contiguous())):
        packed = pack_nvfp4(matrix, None)
        out = torch.empty(9, packed.layout.shape[2], dtype=torch.float32)
        ops.grouped_gemm(rows, packed, offsets, tiles, out, activation=activation)
        wanted = grouped_gemm_reference(rows, matrix.decode(), offsets, activation=activation)
        assert relative_error(out, wanted) < 0.01


@pytest.mark.parametrize("name", ["fp8_group128", "nvfp4", "bf16"])
def test_reference_quantises_activations_before_products(name: str) -> None:
    made = random_experts(1, 2, 64, 96, seed=12)
    spec = MoESpec(
        hidden_size=96, intermediate_size=64, num_experts=1, routing=RoutingSpec(top_k=1), weight_format="fp32"
    )
    problem = Problem(spec=spec, device=DeviceFacts(kind="cpu"), dtype="fp32", activation_format=name)
    x, form = heavy_tailed(7, 96, seed=13), activation_format(name)
    batch = ContiguousBatch(x=x, source=torch.arange(7), expert_offsets=torch.tensor([0, 7]))
    rows = Reference().pack(made, problem.routed).run(batch)
    gate, up = form.round_trip(x) @ made.gate_up.values[0].mT
    inner = form.round_trip(torch.nn.functional.silu(gate) * up)
    assert relative_error(rows, inner @ made.down.values[0].T) < 1e-5
    assert relative_error(rows, (torch.nn.functional.silu(gate) * up) @ made.down.values[0].T) > 1e-3
