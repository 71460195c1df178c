from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from collegium.experts.reference import Reference
from collegium.experts.triton.grouped import grouped_gemm, tile_list
from collegium.experts.triton.packed import PackedExperts
from collegium.experts.triton.packing import pack_fp8_rows, pack_gguf, pack_int, pack_mx, pack_nvfp4
from collegium.experts.triton.table import TritonBf16, TritonFp8, TritonW4A16, TritonW8A16
from collegium.experts.triton.tiles.candidates import candidates
from collegium.experts.triton.tiles.problem import TileChoice
from collegium.formats import Fp8Channel, Int4Affine, Int8Affine, MxFp4, MxFp8, NvFp4
from collegium.formats.codecs import pack_nibbles
from collegium.formats.fp8_block import Fp8Block
from collegium.formats.gguf import KINDS
from collegium.formats.unquantised import DTYPES
from collegium.ops.columns import halves_and_sums
from collegium.ops.operand import operand
from collegium.ops.quantize import activation_format
from collegium.parallel.local import Local
from collegium.problem import Problem
from collegium.runtime.devices import probe
from collegium.testing.compare import heavy_tailed, random_experts, relative_error, uneven_ids
from collegium.types import (
    ACTIVATION_KINDS,
    ActivationSpec,
    ContiguousBatch,
    ExpertWeights,
    MoESpec,
    Routing,
    RoutingSpec,
)
from integers import encoded, random_blocks
from passes import check_replay_with_another_routing, check_rows_stand_alone

KERNELS = (TritonBf16(), TritonFp8(), TritonW4A16(), TritonW8A16())
BF16, FP16, CODES = 0.01, 0.002, 0.06
CASES = (
    ("bf16", "bf16", BF16),
    ("bf16", "fp16", FP16),
    ("fp16", "bf16", BF16),
    ("mxfp4", "bf16", BF16),
    ("mxfp4", "fp16", FP16),
    ("nvfp4", "bf16", BF16),
    ("nvfp4", "fp16", FP16),
    ("int4_group", "bf16", BF16),
    ("int4_group", "fp16", FP16),
    ("int4_affine", "bf16", BF16),
    ("int4_affine", "fp16", FP16),
    ("int8_affine", "bf16", BF16),
    ("int8_affine", "fp16", FP16),
    ("int4_ordered", "bf16", BF16),
    ("int8_ordered", "fp16", FP16),
    ("gguf", "bf16", BF16),
    ("gguf", "fp16", FP16),
    *((name, "bf16", BF16) for name in ("fp8_block", "fp8_channel", "fp8_tensor", "mxfp8")),
    *((name, "fp16", FP16) for name in ("fp8_block", "fp8_channel", "fp8_tensor", "mxfp8")),
    ("fp8_block", "fp8_group128", CODES),
    ("fp8_block", "fp8_group128_pow2", CODES),
    ("fp8_block", "fp8_token", CODES),
    ("fp8_channel", "fp8_group128", CODES),
    ("fp8_channel", "fp8_token", CODES),
    ("fp8_tensor", "fp8_token", CODES),
    ("fp8_tensor", "fp8_static", CODES),
    ("fp8_block", "fp8_group128_e8m0", CODES),
    *((name, "mxfp8", CODES) for name in ("fp8_block", "mxfp8", "mxfp4")),
)


def build(
    weights: str,
    act: str,
    *,
    experts: int = 17,
    wide: int = 176,
    hidden: int = 336,
    activation: ActivationSpec | None = None,
    bias: bool = True,
) -> tuple[PackedExperts, ExpertWeights[Any], Problem]:
    kind = activation or ActivationSpec()
    spec = MoESpec(
        hidden_size=hidden,
        intermediate_size=wide,
        num_experts=experts,
        routing=RoutingSpec(top_k=4),
        activation=kind,
        weight_format=weights,
        expert_bias=bias,
    )
    dtype: Any = act if act == "fp16" else "bf16"
    problem = Problem(spec=spec, device=probe(torch.device("cuda")), dtype=dtype, activation_format=act)
    kernel: Any = next(k for k in KERNELS if k.refuse(problem.routed) is None)
    parts = spec.gate_up_parts
    group = 32 if weights.endswith("_ordered") else 128
    made = encoded(random_experts(experts, parts, wide, hidden, seed=1, bias=bias), weights, group)
    moved = replace(
        made,
        gate_up=made.gate_up.to("cuda"),
        down=made.down.to("cuda"),
        gate_up_bias=None if made.gate_up_bias is None else made.gate_up_bias.cuda(),
        down_bias=None if made.down_bias is None else made.down_bias.cuda(),
    )
    return kernel.pack(moved, problem.routed), moved, problem


def dispatched(
    tokens: int, experts: int, hidden: int, top_k: int = 4, dtype: torch.dtype = torch.bfloat16
) -> ContiguousBatch:
    x = heavy_tailed(tokens, hidden, seed=3).to(dtype).cuda()
    ids = uneven_ids(tokens, top_k, experts, seed=2).cuda()
    if tokens > 2:
        ids[1, 1] = -1
    routing = Routing(topk_ids=ids, topk_weights=torch.rand(tokens, top_k, device="cuda"))
    return Local(num_experts=experts).dispatch(x, routing)[0]


def truth(batch: ContiguousBatch, weights: ExpertWeights[Any], problem: Problem) -> torch.Tensor:
    return Reference().pack(weights, replace(problem, activation_format="fp32").routed).run(batch)


@pytest.mark.parametrize("block", [(32, 32), (64, 64), (1, 128)])
@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize(("act", "bound"), [("bf16", BF16), ("fp16", FP16), ("fp8_group128", CODES), ("mxfp8", CODES)])
@pytest.mark.parametrize("tokens", [1, 200])
def test_fp8_blocks_of_other_sizes(block: tuple[int, int], power: bool, act: str, bound: float, tokens: int) -> None:
    _, made, problem = build("fp8_block", act)
    payloads = [
        Fp8Block.encode(payload.decode(), block=block, power_of_two=power) for payload in (made.gate_up, made.down)
    ]
    made = replace(made, gate_up=payloads[0], down=payloads[1])
    packed: Any = TritonFp8().pack(made, problem.routed)
    batch = dispatched(tokens, 17, 336, dtype=DTYPES[problem.dtype])
    stop = int(batch.expert_offsets[-1])
    found = packed.run(batch)
    assert relative_error(found[:stop], truth(batch, made, problem)[:stop]) < bound
    alone = packed.run_unsorted(batch.x[:1], torch.zeros(1, 1, dtype=torch.int64, device="cuda"))
    first = replace(
        batch,
        x=batch.x[:1],
        source=torch.zeros(1, dtype=torch.int64, device="cuda"),
        expert_offsets=torch.ones(18, dtype=torch.int64, device="cuda").index_fill_(0, torch.tensor([0]).cuda(), 0),
        rows=None,
        tiles=(),
    )
    assert torch.equal(packed.run(first), alone)


@pytest.mark.parametrize(("weights", "act", "bound"), CASES)
@pytest.mark.parametrize("tokens", [1, 7, 200])
def test_against_the_reference(weights: str, act: str, bound: float, tokens: int) -> None:
    packed, made, problem = build(weights, act)
    batch = dispatched(tokens, 17, 336, dtype=DTYPES[problem.dtype])
    stop = int(batch.expert_offsets[-1])
    found = packed.run(batch)
    assert relative_error(found[:stop], truth(batch, made, problem)[:stop]) < bound


@pytest.mark.parametrize(("weights", "act", "bound"), CASES)
def test_every_tile_gives_the_same_bits(weights: str, act: str, bound: float) -> None:
    packed, made, problem = build(weights, act, wide=256, hidden=512)
    batch = dispatched(150, 17, 512, dtype=DTYPES[problem.dtype])
    stop = int(batch.expert_offsets[-1])
    first = packed.run(batch)[:stop]
    assert relative_error(first, truth(batch, made, problem)[:stop]) < bound
    tried = candidates(packed.tiling.problem_of(packed.gate_up.layout, 600), packed.machine)
    allowed = set(candidates(packed.tiling.problem_of(packed.down.layout, 600), packed.machine))
    layout = packed.gate_up.layout
    # Products of quarters have no room for taller tiles.
    assert len({tile.block_t for tile in tried}) >= (2 if layout.quartered and not packed.activations else 3)
    for tile in tried:
        other = next(t for t in sorted(allowed, key=repr) if t.block_t == tile.block_t)
        for fused in (False, True) if layout.decoded else (False,):
            pair = replace(tile, fuse_k_block=fused), replace(other, fuse_k_block=fused)
            assert torch.equal(replace(packed, tiles=pair).run(batch)[:stop], first), pair


@pytest.mark.parametrize(("weights", "act", "bound"), CASES)
def test_rows_are_batch_invariant(weights: str, act: str, bound: float) -> None:
    packed, _, problem = build(weights, act, wide=256, hidden=512)
    check_rows_stand_alone(packed, (2, 9, 64, 333, 4096), DTYPES[problem.dtype])


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_e4m3_code_exact_in_lanes(scaled: bool, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = torch.where((codes & 127) == 127, 0, codes)[None, None, None].view(torch.float8_e4m3fn).cuda()
    scales = torch.linspace(118, 134, 8).round().to(torch.uint8)[None, None, None].cuda()
    if scaled:
        payload = MxFp8(shape=(1, 1, 1, 256), codes=codes, scales=scales)
        packed = pack_mx(payload, None, half=dtype == torch.float16)
    else:
        payload = Fp8Channel(shape=(1, 1, 1, 256), codes=codes, scales=torch.ones(1, 1, 1, device="cuda"))
        packed = pack_fp8_rows(payload, None, native=False)
    packed = replace(packed, layout=replace(packed.layout, half=dtype == torch.float16))
    offsets = torch.tensor([0, 256], device="cuda")
    found = torch.empty(256, 1, device="cuda")
    tiles = tile_list(offsets, 256, TileChoice(block_n=64, block_t=16, warps=4, stages=2))
    grouped_gemm(torch.eye(256, device="cuda").to(dtype), packed, offsets, tiles, found)
    assert torch.equal(found[:, 0], payload.decode()[0, 0, 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_every_e2m1_code_and_scale_exact(name: str, dtype: torch.dtype) -> None:
    half, size = dtype == torch.float16, 32 if name == "mxfp4" else 16
    codes = pack_nibbles(torch.arange(16, dtype=torch.uint8).repeat(128)[None, None, None])
    scales = torch.arange(2048 // size, dtype=torch.uint8)
    if name == "mxfp4":
        # Twenty-three powers of two, the most that float16 holds beside every code.
        payload: Any = MxFp4(shape=(1, 1, 1, 2048), codes=codes, scales=(110 + scales % 23)[None, None, None])
    else:
        own = scales.clamp(max=126)[None, None, None].view(torch.float8_e4m3fn)
        payload = NvFp4(shape=(1, 1, 1, 2048), codes=codes, scales=own, global_scale=torch.full((1, 1), 0.25))
    payload = payload.to("cuda")
    packed = (pack_mx if name == "mxfp4" else pack_nvfp4)(payload, None, half=half)
    packed = replace(packed, layout=replace(packed.layout, half=half))
    offsets, found = torch.tensor([0, 2048], device="cuda"), torch.empty(2048, 1, device="cuda")
    for fused in (False, True):
        tiles = tile_list(offsets, 2048, TileChoice(block_n=64, block_t=16, warps=4, stages=2, fuse_k_block=fused))
        grouped_gemm(torch.eye(2048, device="cuda").to(dtype), packed, offsets, tiles, found.fill_(torch.nan))
        assert torch.equal(found[:, 0], payload.decode()[0, 0, 0])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_integer_and_zero_point_exact(bits: int, group: int, dtype: torch.dtype) -> None:
    count = 1 << bits
    codes = torch.arange(256).remainder(count).repeat(count, 1).to(torch.uint8)
    zeros = torch.arange(count, dtype=torch.uint8)[:, None].expand(count, 256 // group).contiguous()
    zeros[:, 1] = zeros[:, 0].flip(0)
    kind: Any = Int4Affine if bits == 4 else Int8Affine
    stored, scales = pack_nibbles(codes) if bits == 4 else codes, torch.full(zeros.shape, 0.75).half()
    payload = kind(
        shape=(1, 1, count, 256), codes=stored[None, None], scales=scales[None, None], zeros=zeros[None, None],
        group_size=group,
    ).to("cuda")  # fmt: skip
    packed = pack_int(payload, None)
    packed = replace(packed, layout=replace(packed.layout, half=dtype == torch.float16))
    offsets, found = torch.tensor([0, 256], device="cuda"), torch.empty(256, count, device="cuda")
    for block_n in (64, 128):
        tile = TileChoice(block_n=block_n, block_t=16, warps=4, stages=2)
        grouped_gemm(torch.eye(256, device="cuda").to(dtype), packed, offsets, tile_list(offsets, 256, tile), found)
        # A sum in units of a group is rounded whenever the unit changes.
        assert relative_error(found.T, payload.decode()[0, 0]) <= (2e-6 if group == 32 else 0.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_gguf_code_and_step_exact(kind: str, dtype: torch.dtype) -> None:
    payload, half = random_blocks(kind, 1, 1, 160, 512).to("cuda"), dtype == torch.float16
    packed = pack_gguf(payload, None, half=half)
    packed = replace(packed, layout=replace(packed.layout, half=half))
    offsets, found = torch.tensor([0, 512], device="cuda"), torch.empty(512, 160, device="cuda")
    x = torch.eye(512, device="cuda").to(dtype)
    own, beside = halves_and_sums(x) if packed.layout.minima else (x, None)
    for block_n in (64, 128):
        tile = TileChoice(block_n=block_n, block_t=16, warps=4, stages=2)
        grouped_gemm(own, packed, offsets, tile_list(offsets, 512, tile), found, x_scale=beside)
        # Two products of a minimum, its difference, and a sum in another unit are rounded once more than the format's.
        close = 2e-6 if packed.layout.minima or packed.layout.quartered else 0.0
        # Weights of Q2_K become bfloat16 numbers, or the nearest multiples of a scale.
        close = (4e-3 if packed.layout.low_bits else 2.5e-3) if kind == "Q2_K" else close
        assert relative_error(found.T, payload.decode()[0, 0]) <= close


@pytest.mark.parametrize(("act", "most"), [("bf16", 1e-5), ("fp16", 1e-6)])
@pytest.mark.parametrize(("wide", "hidden"), [(192, 384), (224, 352)])
def test_codes_that_look_numbers_up(act: str, most: float, wide: int, hidden: int) -> None:
    """Blocks of 64 and of 32 columns: whole layers, and one product of every tile before anything is rounded."""
    packed, made, problem = build("bnb4", act, wide=wide, hidden=hidden)
    for tokens in (1, 7, 200, 3000):
        batch = dispatched(tokens, 17, hidden, dtype=DTYPES[problem.dtype])
        stop = int(batch.expert_offsets[-1])
        assert relative_error(packed.run(batch)[:stop], truth(batch, made, problem)[:stop]) < BF16
    offsets, x = torch.tensor([0, 70, *range(71, 87)]).cuda(), heavy_tailed(86, hidden, seed=4).to(batch.x.dtype).cuda()
    gate_up, up_bias = made.gate_up.decode(), made.gate_up_bias
    assert up_bias is not None
    owner = torch.arange(17).cuda().repeat_interleave(offsets.diff())
    parts = torch.einsum("rk,rpnk->rpn", x.double(), gate_up.double()[owner]) + up_bias.double()[owner]
    wanted = torch.nn.functional.silu(parts[:, 0]) * parts[:, 1]
    bits = set[bytes]()
    for tile in candidates(packed.gate_up.layout.problem(600, 16, False), packed.machine):
        found = torch.full((86, wide), torch.nan, device="cuda")
        grouped_gemm(x, packed.gate_up, offsets, tile_list(offsets, 86, tile), found, activation=ActivationSpec())
        assert relative_error(found, wanted) < most, tile
        bits.add(found.cpu().numpy().tobytes())
    assert len(bits) == 1


@pytest.mark.parametrize("name", ["fp8_group128", "fp8_group128_pow2", "fp8_token"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_row_codes_and_scales_match_format(name: str, dtype: torch.dtype) -> None:
    x = heavy_tailed(70, 336, seed=3).to(dtype)
    x[3] = 0
    x[4] *= 1e-36
    x[5, 7] = torch.nan
    x[6, 300] = torch.inf
    x[7, :128] = torch.where(torch.arange(128) % 2 == 0, 448.0, 1.75)
    x[8, :128] = 1.75 * 2.0**-20
    codes, scales = operand(x.cuda(), name)
    wanted = activation_format(name).quantize(x)
    assert torch.equal(codes.view(torch.uint8).cpu(), wanted.codes.view(torch.uint8))
    assert wanted.scales is not None
    assert scales is not None
    assert torch.equal(scales.cpu().nan_to_num(-1), wanted.scales.nan_to_num(-1))


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
def test_every_activation(kind: Any, fast: bool) -> None:
    limit = 1.5 if kind.startswith("swiglu") else None
    activation = ActivationSpec(kind=kind, limit=limit, beta=0.5, fast=fast)
    packed, made, problem = build("bf16", "bf16", activation=activation)
    batch = dispatched(40, 17, 336)
    stop = int(batch.expert_offsets[-1])
    assert relative_error(packed.run(batch)[:stop], truth(batch, made, problem)[:stop]) < BF16


@pytest.mark.parametrize(("weights", "act"), [("bf16", "bf16"), ("fp8_block", "fp8_group128"), ("mxfp4", "bf16")])
def test_graph_replay_with_another_routing(weights: str, act: str) -> None:
    packed, _, _ = build(weights, act)
    check_replay_with_another_routing(packed)


def test_nothing_waits_for_the_device() -> None:
    packed, _, _ = build("bf16", "bf16")
    batch = dispatched(33, 17, 336)
    packed.run(batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed.run(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_nan_tokens_stay_in_their_rows() -> None:
    for weights, act in (("bf16", "bf16"), ("fp8_block", "fp8_group128"), ("mxfp4", "bf16")):
        packed, _, _ = build(weights, act)
        batch = dispatched(20, 17, 336)
        stop = int(batch.expert_offsets[-1])
        clean = packed.run(batch)
        x = batch.x.clone()
        x[3, 5] = torch.nan
        found = packed.run(replace(batch, x=x))
        hit = (batch.source == 3)[:stop]
        assert bool(torch.isnan(found[:stop][hit]).all())
        assert torch.equal(found[:stop][~hit], clean[:stop][~hit])


def test_rows_past_last_expert_not_written() -> None:
    packed, _, _ = build("bf16", "bf16")
    batch = dispatched(12, 17, 336)
    stop = int(batch.expert_offsets[-1])
    assert stop < 48
    out = torch.full((48, 336), 7.0, dtype=torch.bfloat16, device="cuda")
    tile = TileChoice(block_n=64, block_t=16, warps=4, stages=2)
    tiles = tile_list(batch.expert_offsets, 48, tile)
    h = torch.randn(48, 176, device="cuda").bfloat16()
    grouped_gemm(h, packed.down, batch.expert_offsets, tiles, out)
    assert bool((out[stop:] == 7.0).all())
    assert not bool((out[:stop] == 7.0).all(1).any())


def test_addresses_beyond_2_to_the_31() -> None:
    experts, wide, hidden = 17, 8192, 8192  # 2.3e9 elements in gate and up
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of GPU memory")
    from collegium.formats.unquantised import Bf16

    generator = torch.Generator("cuda").manual_seed(0)
    gate_up = torch.empty(experts, 2, wide, hidden, dtype=torch.bfloat16, device="cuda")
    gate_up.normal_(0, hidden**-0.5, generator=generator)
    down = torch.empty(experts, hidden, wide, dtype=torch.bfloat16, device="cuda")
    down.normal_(0, wide**-0.5, generator=generator)
    spec = MoESpec(hidden_size=hidden, intermediate_size=wide, num_experts=experts, routing=RoutingSpec(top_k=2))
    problem = Problem(spec=spec, device=probe(torch.device("cuda")), activation_format="bf16")
    made = ExpertWeights(
        gate_up=Bf16(values=gate_up, shape=tuple(gate_up.shape)),
        down=Bf16(values=down, shape=tuple(down.shape)),
    )
    kernel = TritonBf16()
    x = torch.randn(3, hidden, device="cuda", generator=generator).bfloat16()
    ids = torch.tensor([[16, 0], [15, 16], [1, 16]], device="cuda")
    batch, _ = Local(num_experts=experts).dispatch(x, Routing(topk_ids=ids, topk_weights=torch.ones(3, 2).cuda()))
    assert relative_error(kernel.pack(made, problem.routed).run(batch), truth(batch, made, problem)) < BF16
