"""Four-bit weights with E4M3 activations on the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
if torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs E4M3 tensor cores (sm_89)", allow_module_level=True)

from collegium.experts.reference import Reference
from collegium.experts.triton import grouped as ops
from collegium.experts.triton.packing import pack_w4a8
from collegium.experts.triton.table import TritonW4A8
from collegium.experts.triton.tiles.candidates import candidates
from collegium.experts.triton.tiles.problem import TileChoice
from collegium.formats import Int4Group, MxFp4, NvFp4, by_name
from collegium.ops.operand import operand
from collegium.ops.quantize import activation_format, reorder_codes
from collegium.parallel.local import Local
from collegium.problem import Problem
from collegium.runtime.devices import probe
from collegium.runtime.machine import machine_at
from collegium.testing.compare import heavy_tailed, random_experts, relative_error, uneven_ids
from collegium.types import ActivationSpec, ContiguousBatch, ExpertWeights, MoESpec, Routing, RoutingSpec
from passes import check_replay_with_another_routing, check_rows_stand_alone
from products import grouped_gemm_reference

WEIGHTS = ("mxfp4", "nvfp4", "int4_group", "int4_group:32")  # INT4: with how many columns a group, else 128
FORMATS = ("fp8_token", "fp8_group128", "fp8_group128_pow2")
CUDA = torch.device("cuda")
TILE = TileChoice(block_n=64, block_t=32, warps=4, stages=3)


def encode(name: str, weight: torch.Tensor) -> Any:
    name, _, size = name.partition(":")
    if name == "int4_group":
        return Int4Group.encode(weight, group_size=int(size or 128)).to("cuda")
    return by_name(name).encode(weight).to("cuda")


def build(
    weights: str, act: str, experts: int = 17, hidden: int = 336, wide: int = 176, kind: ActivationSpec | None = None
) -> tuple[Any, ExpertWeights[Any], Problem]:
    spec = MoESpec(
        hidden_size=hidden,
        intermediate_size=wide,
        num_experts=experts,
        routing=RoutingSpec(top_k=4),
        activation=kind or ActivationSpec(),
        weight_format=weights.partition(":")[0],
        expert_bias=True,
    )
    problem = Problem(spec=spec, device=probe(CUDA), activation_format=act)
    kernel = TritonW4A8()
    assert kernel.refuse(problem.routed) is None
    plain = random_experts(experts, 2, wide, hidden, seed=1, bias=True)
    assert plain.gate_up_bias is not None
    assert plain.down_bias is not None
    made = ExpertWeights(
        gate_up=encode(weights, plain.gate_up.decode()),
        down=encode(weights, plain.down.decode()),
        gate_up_bias=plain.gate_up_bias.cuda(),
        down_bias=plain.down_bias.cuda(),
    )
    return kernel.pack(made, problem.routed), made, problem


def batch_of(tokens: int, experts: int, hidden: int) -> ContiguousBatch:
    x = heavy_tailed(tokens, hidden, seed=3).bfloat16().cuda()
    ids = uneven_ids(tokens, 4, experts, seed=2).cuda()
    if tokens > 2:
        ids[1, 1] = -1
    routing = Routing(topk_ids=ids, topk_weights=torch.rand(tokens, 4, device="cuda"))
    return Local(num_experts=experts).dispatch(x, routing)[0]


def truth(batch: ContiguousBatch, weights: ExpertWeights[Any], problem: Problem) -> torch.Tensor:
    return Reference().pack(weights, replace(problem, activation_format="fp32").routed).run(batch)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("act", FORMATS)
@pytest.mark.parametrize("tokens", [1, 7, 200])
def test_experts_against_the_truth(weights: str, act: str, tokens: int) -> None:
    packed, made, problem = build(weights, act)
    batch = batch_of(tokens, 17, 336)
    stop = int(batch.expert_offsets[-1])
    poison = torch.full((1 << 24,), torch.nan, device="cuda")
    del poison
    found = packed.run(batch)[:stop]
    assert relative_error(found, truth(batch, made, problem)[:stop]) < 0.06
    swapped = replace(made, gate_up=encode(weights, made.gate_up.decode().cpu().flip(1)))
    assert relative_error(found, truth(batch, swapped, problem)[:stop]) > 0.3


@pytest.mark.parametrize("weights", WEIGHTS)
def test_large_odd_sizes_limit_and_biases(weights: str) -> None:
    kind = ActivationSpec(kind="swiglu_oai", limit=7.0)
    packed, made, problem = build(weights, "fp8_token", 17, 2880, 1408, kind)
    for tokens in (1, 40):
        batch = batch_of(tokens, 17, 2880)
        stop = int(batch.expert_offsets[-1])
        found = packed.run(batch)[:stop]
        assert relative_error(found, truth(batch, made, problem)[:stop]) < 0.06


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("act", FORMATS)
@pytest.mark.parametrize("columns", [2880, 3000])  # an odd number of K blocks, and one that 4 divides
def test_tiles_agree_bitwise_and_match_codes(weights: str, act: str, columns: int) -> None:
    rows = 1500
    payload = encode(weights, heavy_tailed(5, 1, 512, columns, seed=1, channels=False) * columns**-0.5)
    packed = pack_w4a8(payload, None)
    x = heavy_tailed(rows, columns, seed=2).bfloat16().cuda()
    codes, scale = operand(x, act, order=packed.layout.row_order)
    offsets = torch.tensor([0, 300, 301, 301, 900, rows], device="cuda")
    wanted = grouped_gemm_reference(activation_format(act).round_trip(x.cpu()).cuda(), payload.decode(), offsets)
    first: torch.Tensor | None = None
    tried = candidates(packed.layout.problem(rows, 8, act != "fp8_token"), machine_at(CUDA))
    assert len({tile.block_t for tile in tried}) >= 3
    for tile in tried:
        tiles = ops.tile_list(offsets, rows, tile)
        for _ in range(3):
            out = torch.full((rows, 512), torch.nan, device="cuda")
            ops.grouped_gemm(codes, packed, offsets, tiles, out, x_scale=scale)
            if first is None:
                first = out
                assert relative_error(out, wanted) < 0.01
            assert torch.equal(out, first), tile


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("act", ["fp8_token", "fp8_group128"])
def test_rows_are_batch_invariant(weights: str, act: str) -> None:
    packed, _, _ = build(weights, act, hidden=512, wide=256)
    check_rows_stand_alone(packed, (2, 9, 64, 333, 4096))


def as_read(payload: Any) -> torch.Tensor:
    """Return ``[N, K]``: what the kernel reads of weights ``[1, 1, N, K]``, by rows with a single one."""
    columns = payload.shape[3]
    packed = pack_w4a8(payload, None)
    report = packed.report
    assert report.beyond == 0
    codes = reorder_codes(torch.eye(columns, device="cuda").to(torch.float8_e4m3fn), packed.layout.row_order)
    found = torch.empty(columns, payload.shape[2], device="cuda")
    offsets = torch.tensor([0, columns], device="cuda")
    scale = torch.ones(columns, 1, device="cuda")
    ops.grouped_gemm(codes, packed, offsets, ops.tile_list(offsets, columns, TILE), found, x_scale=scale)
    return found.T


def test_every_byte_exact_at_every_scale() -> None:
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").repeat(1, 1, 12, 1)
    exponents = (torch.arange(12, device="cuda")[:, None] + torch.arange(16, device="cuda")) % 12 + 100
    mxfp4 = MxFp4(shape=(1, 1, 12, 512), codes=codes, scales=exponents.to(torch.uint8)[None, None])
    assert torch.equal(as_read(mxfp4), mxfp4.decode()[0, 0])
    scales = (torch.arange(384, device="cuda").view(12, 32) % 96 + 22).to(torch.uint8)
    nvfp4 = NvFp4(
        shape=(1, 1, 12, 512),
        codes=codes,
        scales=scales.view(torch.float8_e4m3fn)[None, None],
        global_scale=torch.tensor([[0.25]], device="cuda"),
    )
    assert torch.equal(as_read(nvfp4), nvfp4.decode()[0, 0])
    for group, dtype in ((128, torch.float32), (32, torch.bfloat16), (64, torch.bfloat16), (32, torch.float16)):
        scales = (torch.rand(1, 1, 12, 512 // group, device="cuda") + 0.5).to(dtype)
        int4 = Int4Group(shape=(1, 1, 12, 512), codes=codes, scales=scales, group_size=group)
        assert torch.equal(as_read(int4), int4.decode()[0, 0])


def test_row_codes_in_kernel_order() -> None:
    x = heavy_tailed(70, 336, seed=3)
    x[3] = 0
    x[5, 7] = torch.nan
    for name in FORMATS:
        codes, scales = operand(x.cuda(), name, order=2)
        wanted, scale = operand(x, name, order=2)
        assert scales is not None
        assert scale is not None
        assert torch.equal(codes.view(torch.uint8).cpu(), wanted.view(torch.uint8))
        assert torch.equal(scales.cpu().nan_to_num(-1), scale.nan_to_num(-1))


@pytest.mark.parametrize("weights", WEIGHTS)
def test_graph_replay_with_another_routing(weights: str) -> None:
    packed, _, _ = build(weights, "fp8_token")
    check_replay_with_another_routing(packed)


def test_nan_tokens_stay_in_their_rows() -> None:
    packed, _, _ = build("mxfp4", "fp8_token")
    batch = batch_of(20, 17, 336)
    stop = int(batch.expert_offsets[-1])
    clean = packed.run(batch)
    x = batch.x.clone()
    x[3, 5] = torch.nan
    found = packed.run(replace(batch, x=x))
    hit = (batch.source == 3)[:stop]
    assert bool(torch.isnan(found[:stop][hit]).all())
    assert torch.equal(found[:stop][~hit], clean[:stop][~hit])


def test_packing_takes_little_memory() -> None:
    codes = torch.randint(0, 256, (4, 2, 2048, 2048), dtype=torch.uint8, device="cuda")
    scales = torch.randint(90, 110, (4, 2, 2048, 128), dtype=torch.uint8, device="cuda")
    payload = MxFp4(shape=(4, 2, 2048, 4096), codes=codes, scales=scales)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    packed = pack_w4a8(payload, None)
    report = packed.report
    assert packed.scale is not None
    kept = torch.cuda.memory_allocated() - before
    assert torch.cuda.max_memory_allocated() - before - kept < 64 << 20
    assert report.beyond > 0
