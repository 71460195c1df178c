"""The device code of the grouped product, run by Triton's interpreter on small ugly shapes."""

from __future__ import annotations

from dataclasses import replace
from math import gcd, prod
from typing import TYPE_CHECKING, Any

import pytest
import torch

from collegium.dummy.encoders import write_half
from collegium.encoding import encode_experts
from collegium.errors import InputError, PlanError
from collegium.experts.reference import Reference
from collegium.experts.triton import grouped as ops, packing as pack
from collegium.experts.triton.table import TritonBf16, TritonFp8, TritonW4A8, TritonW4A16, TritonW8A16
from collegium.experts.triton.tiles.candidates import candidates
from collegium.experts.triton.tiles.choice import choose
from collegium.experts.triton.tiles.problem import TileChoice, TileProblem
from collegium.experts.triton.tiles.score import score
from collegium.formats import (
    Bf16,
    Bnb4,
    Fp8Block,
    Fp8Channel,
    Fp32,
    Int4Affine,
    Int4Group,
    Int8Affine,
    MxFp4,
    MxFp8,
    NvFp4,
)
from collegium.formats.codecs import pack_nibbles
from collegium.formats.gguf import KINDS
from collegium.formats.unquantised import DTYPES
from collegium.ops.columns import gather_columns, halves_and_sums
from collegium.ops.permute import permute
from collegium.parallel.local import Local
from collegium.placement import Placement
from collegium.planning import plan
from collegium.problem import DeviceFacts, Problem
from collegium.runtime.machine import Machine, machine_of
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
from grids import exhaustive
from integers import encoded, ordered, random_blocks
from products import grouped_gemm_reference, in_columns_reference
from raising import assert_values, raises_with

if TYPE_CHECKING:
    from collegium.experts.triton.packed import PackedExperts

if torch.cuda.is_available():
    pytest.skip("tests/gpu makes these comparisons on the device", allow_module_level=True)
pytest.importorskip("triton")

KERNELS = (TritonBf16(), TritonFp8(), TritonW4A16(), TritonW8A16())
TILE = TileChoice(block_n=64, block_t=16, warps=4, stages=2)
FUSED = replace(TILE, fuse_k_block=True)
# The interpreter rounds to bfloat16 toward zero, so its rows are twice as far from the truth as a GPU's.
SIXTEEN, HALF, EIGHT = 0.015, 0.002, 0.06
FORMATS = (
    ("bf16", "bf16", SIXTEEN),
    ("bf16", "fp16", HALF),
    ("fp16", "bf16", SIXTEEN),
    ("mxfp4", "bf16", SIXTEEN),
    ("mxfp4", "fp16", HALF),
    ("nvfp4", "bf16", SIXTEEN),
    ("nvfp4", "fp16", HALF),
    ("int4_group", "bf16", SIXTEEN),
    ("int4_group", "fp16", HALF),
    ("int4_affine", "bf16", SIXTEEN),
    ("int4_affine", "fp16", HALF),
    ("int8_affine", "bf16", SIXTEEN),
    ("int8_affine", "fp16", HALF),
    ("int4_ordered", "bf16", SIXTEEN),
    ("int8_ordered", "fp16", HALF),
    ("gguf", "bf16", SIXTEEN),
    ("gguf", "fp16", HALF),
    *((name, "bf16", SIXTEEN) for name in ("fp8_block", "fp8_channel", "fp8_tensor", "mxfp8")),
    *((name, "fp16", HALF) for name in ("fp8_block", "fp8_channel", "fp8_tensor", "mxfp8")),
    ("fp8_block", "fp8_group128", EIGHT),
    ("fp8_block", "fp8_token", EIGHT),
    ("fp8_channel", "fp8_group128_pow2", EIGHT),
    ("fp8_tensor", "fp8_token", EIGHT),
)


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    from collegium.kernels.grouped_gemm import grouped_gemm_kernel

    if type(grouped_gemm_kernel).__name__ != "InterpretedFunction":
        pytest.fail("Triton was imported before tests/cpu/conftest.py; set TRITON_INTERPRET=1 before pytest starts")


def question(weights: str, act: str, **changes: Any) -> Problem:
    sizes = {"hidden_size": 176, "intermediate_size": 90, "num_experts": 5} | changes
    activation = sizes.pop("activation", ActivationSpec())
    spec = MoESpec(
        **sizes,
        routing=RoutingSpec(top_k=2),
        activation=activation,
        weight_format=weights,
        expert_bias=True,
    )
    dtype: Any = act if act == "fp16" else "bf16"
    return Problem(spec=spec, device=DeviceFacts(kind="cuda", capability=(9, 0)), dtype=dtype, activation_format=act)


def build(problem: Problem) -> tuple[PackedExperts, ExpertWeights[Any]]:
    spec = problem.spec
    kernel: Any = next(k for k in KERNELS if k.refuse(problem.routed) is None)
    plain = random_experts(
        spec.num_experts, spec.gate_up_parts, spec.intermediate_size, spec.hidden_size, seed=1, bias=True
    )
    made = encoded(plain, spec.weight_format, 32 if spec.weight_format.endswith("_ordered") else 128)
    return replace(kernel.pack(made, problem.routed), tiles=(TILE, TILE)), made


def batch_of(tokens: int, problem: Problem) -> ContiguousBatch:
    spec = problem.spec
    x = heavy_tailed(tokens, spec.hidden_size, seed=3).to(DTYPES[problem.dtype])
    ids = uneven_ids(tokens, 2, spec.num_experts, seed=2)
    ids[0, 0] = -1
    routing = Routing(topk_ids=ids, topk_weights=torch.rand(tokens, 2))
    return Local(num_experts=spec.num_experts).dispatch(x, routing)[0]


def truth(batch: ContiguousBatch, made: ExpertWeights[Any], problem: Problem) -> torch.Tensor:
    return Reference().pack(made, replace(problem, activation_format="fp32").routed).run(batch)


@pytest.mark.each_choice("weights", "act")
@pytest.mark.each_choice("act", "tile")
@pytest.mark.parametrize(("weights", "act", "bound"), FORMATS)
@pytest.mark.parametrize(
    "tile", [TILE, FUSED, replace(FUSED, interleave_gate_up=True)], ids=["apart", "fused", "interleaved"]
)
def test_experts_against_the_reference(weights: str, act: str, bound: float, tile: TileChoice) -> None:
    problem = question(weights, act)
    packed, made = build(problem)
    packed = replace(packed, tiles=(tile, replace(tile, interleave_gate_up=False)))
    batch = batch_of(23, problem)
    stop = int(batch.expert_offsets[-1])
    found = packed.run(batch)
    assert found.shape == (46, 176)
    assert relative_error(found[:stop], truth(batch, made, problem)[:stop]) < bound
    swapped = replace(
        made,
        gate_up=encoded(replace(made, gate_up=Fp32.encode(made.gate_up.decode().flip(1))), weights).gate_up,
    )
    assert relative_error(found[:stop], truth(batch, swapped, problem)[:stop]) > 0.3


@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
@pytest.mark.parametrize("limit", [None, 0.8])
def test_every_activation(kind: Any, limit: float | None) -> None:
    if limit and not kind.startswith("swiglu"):
        pytest.skip("only the swiglu family has a limit")
    problem = question("bf16", "bf16", activation=ActivationSpec(kind=kind, limit=limit), intermediate_size=33)
    packed, made = build(problem)
    batch = batch_of(6, problem)
    stop = int(batch.expert_offsets[-1])
    assert relative_error(packed.run(batch)[:stop], truth(batch, made, problem)[:stop]) < SIXTEEN


@pytest.mark.parametrize(
    ("weights", "act"),
    [
        ("bf16", "bf16"),
        ("mxfp4", "bf16"),
        ("nvfp4", "bf16"),
        ("int4_group", "bf16"),
        ("gguf", "bf16"),
        ("mxfp8", "bf16"),
        ("fp8_block", "bf16"),
        ("fp8_block", "fp8_group128"),
        ("fp8_channel", "fp8_token"),
    ],
)
def test_rows_do_not_depend_on_tiles(weights: str, act: str) -> None:
    problem = question(weights, act)
    packed, _ = build(problem)
    batch = batch_of(50, problem)
    heights = {
        16 if count <= 16 else 32 if count <= 32 else 64 for count in batch.expert_offsets.diff().tolist() if count
    }
    assert heights == {16, 32, 64}
    whole = packed.run(batch)
    wide = TileChoice(block_n=128, block_t=32, warps=8, stages=3, group_t=2)
    stop = int(batch.expert_offsets[-1])
    narrow = replace(TILE, block_t=64, narrow=True)
    for first in (wide, narrow, replace(TILE, block_t=32, interleave_gate_up=True)):
        assert torch.equal(replace(packed, tiles=(first, wide)).run(batch)[:stop], whole[:stop]), first
    for row in (0, 5, stop - 1):
        expert = int(torch.searchsorted(batch.expert_offsets, torch.tensor(row), right=True)) - 1
        offsets = (torch.arange(6) > expert).long()
        one = ContiguousBatch(x=batch.x, source=batch.source[row : row + 1], expert_offsets=offsets)
        assert torch.equal(packed.run(one)[0], whole[row])


@pytest.mark.parametrize(
    ("weights", "act", "sizes", "depths"),
    [
        ("bf16", "bf16", (330, 200), (2, 2)),
        ("fp8_block", "fp8_group128", (500, 700), (2, 3)),
        *exhaustive(
            ("fp16", "fp16", (560, 330), (3, 3)),
            ("fp8_channel", "fp8_token", (700, 500), (3, 2)),
        ),
    ],
)
def test_fused_k_blocks_preserve_summation_order(
    weights: str, act: str, sizes: tuple[int, int], depths: tuple[int, int]
) -> None:
    """The last block is a part of one, tiles are as few rows as there are, and gate and up share an operand."""
    problem = question(weights, act, hidden_size=sizes[0], intermediate_size=sizes[1])
    packed, _ = build(problem)
    blocks = packed.gate_up.layout.k_blocks, packed.down.layout.k_blocks
    assert all(count >= 4 and count % depth == 0 for count, depth in zip(blocks, depths, strict=True))
    batch = batch_of(50, problem)
    stop = int(batch.expert_offsets[-1])
    whole = packed.run(batch)[:stop].clone()
    for tile in (replace(TILE, stages=3), replace(TILE, block_t=64, narrow=True, stages=3)):
        pair = replace(tile, depth=depths[0], interleave_gate_up=True), replace(tile, depth=depths[1])
        assert torch.equal(replace(packed, tiles=pair).run(batch)[:stop], whole), pair


@pytest.mark.parametrize(("weights", "act"), [("bf16", "bf16"), ("nvfp4", "bf16"), ("mxfp4", "fp8_token")])
def test_one_compiled_kernel_per_tile(weights: str, act: str, monkeypatch: Any) -> None:
    asked: list[tuple[object, ...]] = []

    def note(kernel: Any, grid: object, args: tuple[Any, ...], *_: object, **__: object) -> None:
        # Triton compiles once more for another dtype of a pointer, and where one is aligned that was not before.
        free = {"source", "expert_offsets", "tile_expert", "tile_row"}
        weights: Any = args[1]
        product = kernel.__name__, weights.packed.data_ptr()
        for name, argument in zip(kernel.arg_names, args, strict=False):
            fields = argument._asdict() if isinstance(argument, tuple) else {"": argument}
            for field, value in fields.items():
                if isinstance(value, torch.Tensor):
                    aligned = name in free or value.data_ptr() % 16 == 0
                    asked.append((product, f"{name}.{field}", value.dtype, aligned))

    monkeypatch.setattr(ops, "launch", note)
    problem = question(weights, act)
    kernel: Any = next(k for k in (*KERNELS, TritonW4A8()) if k.refuse(problem.routed) is None)
    made = encode_experts(random_experts(5, 2, 90, 176, seed=1, bias=True), weights)
    packed = replace(kernel.pack(made, problem.routed), tiles=(TILE, replace(TILE, block_t=32)))
    for tokens in range(9, 18):
        batch = batch_of(tokens, problem)
        # The lists of both products stand in one buffer, so what is aligned depends on how long they are.
        order = permute(torch.arange(2 * tokens).view(tokens, 2) % 5, 5, block_t=(TILE.block_t, 32))
        packed.run(replace(batch, tiles=order.tiles))
    assert len({product for product, *_ in asked}) == 2
    assert len(set(asked)) == len({entry[:2] for entry in asked})


def test_router_weight_on_the_input() -> None:
    problem = question("bf16", "bf16")
    packed, made = build(problem)
    batch = batch_of(5, problem)
    batch = replace(batch, input_weights=torch.rand(10) + 0.5)
    stop = int(batch.expert_offsets[-1])
    assert relative_error(packed.run(batch)[:stop], truth(batch, made, problem)[:stop]) < SIXTEEN


def test_fp16_and_an_empty_batch() -> None:
    problem = replace(question("fp16", "fp16"), dtype="fp16")
    packed, made = build(problem)
    batch = batch_of(5, problem)
    batch = replace(batch, x=batch.x.half())
    stop = int(batch.expert_offsets[-1])
    found = packed.run(batch)
    assert found.dtype == torch.float16
    assert relative_error(found[:stop].float(), truth(batch, made, problem)[:stop]) < 2e-3
    none = ContiguousBatch(
        x=batch.x[:0], source=batch.source[:0], expert_offsets=torch.zeros_like(batch.expert_offsets)
    )
    assert packed.run(none).shape == (0, 176)


def test_unowned_rows_are_not_written() -> None:
    problem = question("bf16", "bf16")
    packed, _ = build(problem)
    offsets = torch.tensor([0, 0, 3, 3, 7, 7])
    out = torch.full((20, 176), 7.0, dtype=torch.bfloat16)
    rows = heavy_tailed(20, 90, seed=4).bfloat16()
    ops.grouped_gemm(rows, packed.down, offsets, ops.tile_list(offsets, 20, TILE), out)
    assert bool((out[7:] == 7.0).all())
    bias = packed.down.bias
    wanted = grouped_gemm_reference(rows, packed.down.values, offsets, bias=bias)
    assert relative_error(out[:7], wanted[:7]) < SIXTEEN


def test_grouped_gemm_reference_by_hand() -> None:
    weight = torch.tensor([[[[1.0, 2.0]], [[3.0, 4.0]]], [[[0.0, 1.0]], [[1.0, 0.0]]]])
    x = torch.tensor([[1.0, 1.0], [2.0, 0.0]])
    offsets = torch.tensor([0, 1, 2])
    found = grouped_gemm_reference(
        x, weight, offsets, source=torch.tensor([1, 0]), activation=ActivationSpec(kind="swiglu")
    )
    silu = torch.nn.functional.silu(torch.tensor([2.0, 1.0]))
    assert torch.allclose(found[:, 0], silu * torch.tensor([6.0, 1.0]))


@pytest.mark.parametrize("counts", [[0, 0, 0], [1, 0, 300], [16, 17, 0, 1, 15], [0, 5] * 40])
@pytest.mark.parametrize("block_t", [16, 32])
def test_tile_list(counts: list[int], block_t: int) -> None:
    offsets = torch.tensor([0, *counts]).cumsum(0)
    rows = int(offsets[-1]) + 5
    tiles = ops.tile_list(offsets, rows, replace(TILE, block_t=block_t))
    wanted = [(e, int(offsets[e]) + j) for e, c in enumerate(counts) for j in range(0, c, block_t)]
    assert len(wanted) <= tiles.count
    found = [(e, r) for e, r in zip(tiles.expert.tolist(), tiles.row.tolist(), strict=True) if e >= 0]
    assert found == wanted
    assert tiles.expert.tolist()[len(wanted) :] == [-1] * (tiles.count - len(wanted))


def test_tile_count_is_tight_upper_bound() -> None:
    for rows, experts, block in ((1, 8, 16), (64, 256, 16), (700, 8, 16), (65536, 256, 128)):
        used = min(rows, experts)
        counts = [1] * (used - 1) + [rows - used + 1]
        assert ops.tile_count(rows, experts, block) == sum(-(-c // block) for c in counts)


def in_rows_of(packed: Any, rows: torch.dtype) -> Any:
    return replace(packed, layout=replace(packed.layout, half=rows == torch.float16))


@pytest.mark.parametrize("rows", [torch.bfloat16, torch.float16])
def test_every_e2m1_code_and_scale_exact(rows: torch.dtype) -> None:
    half = rows == torch.float16
    codes = torch.arange(16, dtype=torch.uint8).repeat(16)[None, None, None]
    row = codes[..., 0::2] | (codes[..., 1::2] << 4)
    for low, high in ((127, 127), (1, 24), (230, 250), *(() if half else ((100, 139), (1, 120), (127, 250)))):
        scales = torch.linspace(low, high, 8).round().to(torch.uint8)[None, None, None]
        payload = MxFp4(shape=(1, 1, 1, 256), codes=row, scales=scales)
        packed = in_rows_of(pack.pack_mx(payload, None, half=half), rows)
        offsets = torch.tensor([0, 256])
        found = torch.empty(256, 1)
        x = torch.eye(256).to(rows)
        ops.grouped_gemm(x, packed, offsets, ops.tile_list(offsets, 256, TILE), found)
        assert torch.equal(found[:, 0], payload.decode()[0, 0, 0])


@pytest.mark.parametrize("rows", [torch.bfloat16, torch.float16])
def test_every_e4m3_code_exact_in_lanes(rows: torch.dtype) -> None:
    half = rows == torch.float16
    codes = torch.arange(256, dtype=torch.uint8)
    codes = torch.where((codes & 127) == 127, 0, codes)[None, None, None].view(torch.float8_e4m3fn)
    offsets = torch.tensor([0, 256])
    x = torch.eye(256).to(rows)
    for low, high in ((127, 127), (120, 134), (90, 112), *(() if half else ((20, 120), (127, 240)))):
        scales = torch.linspace(low, high, 8).round().to(torch.uint8)[None, None, None]
        payload = MxFp8(shape=(1, 1, 1, 256), codes=codes, scales=scales)
        found = torch.empty(256, 1)
        tiles = ops.tile_list(offsets, 256, TILE)
        ops.grouped_gemm(x, in_rows_of(pack.pack_mx(payload, None, half=half), rows), offsets, tiles, found)
        assert torch.equal(found[:, 0], payload.decode()[0, 0, 0])
    channel = Fp8Channel(shape=(1, 1, 1, 256), codes=codes, scales=torch.ones(1, 1, 1))
    ops.grouped_gemm(x, in_rows_of(pack.pack_fp8_rows(channel, None, native=False), rows), offsets, tiles, found)
    assert torch.equal(found[:, 0], codes.float()[0, 0, 0])


@pytest.mark.parametrize("rows", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("divides", [False, True])
def test_every_nvfp4_code_and_scale_exact(rows: torch.dtype, divides: bool) -> None:
    half = rows == torch.float16
    codes = torch.arange(16, dtype=torch.uint8).repeat(128).view(1, 1, 16, 128)
    scales = torch.arange(128, dtype=torch.uint8).clamp(max=126).view(1, 1, 16, 8).view(torch.float8_e4m3fn)
    payload = NvFp4(
        shape=(1, 1, 16, 128),
        codes=pack_nibbles(codes),
        scales=scales,
        global_scale=torch.full((1, 1), 0.25),
        global_divides=divides,
    )
    packed, offsets = in_rows_of(pack.pack_nvfp4(payload, None, half=half), rows), torch.tensor([0, 128])
    found = torch.empty(128, 16)
    ops.grouped_gemm(torch.eye(128).to(rows), packed, offsets, ops.tile_list(offsets, 128, FUSED), found)
    assert torch.equal(found.T, payload.decode()[0, 0])


def test_bf16_weights_with_fp16_tokens_exact() -> None:
    """Rows of every size are brought into float16's range; what is rounded is far below a row's largest number."""
    made = random_experts(3, 1, 40, 176, seed=4).gate_up.decode()[:, :1].bfloat16()
    made[0] *= 2.0**-100
    made[1, 0, :20] *= 2.0**100
    made[1, 0, 30] = 0
    made[2, 0, :, 0] = 2.0**-126
    made[2, 0, :, 1] = 2.0**20
    before = made.clone()
    payload = Bf16(shape=tuple(made.shape), values=made)
    packed, offsets = in_rows_of(pack.pack_plain(payload, None, half=True), torch.float16), torch.tensor([0, 3, 5, 9])
    x, found = heavy_tailed(9, 176, seed=6).half(), torch.empty(9, 40)
    ops.grouped_gemm(x, packed, offsets, ops.tile_list(offsets, 9, TILE), found)
    wanted = grouped_gemm_reference(x, made, offsets)
    assert torch.equal(made, before)
    assert not found[3:5, 30].any()
    for expert, rows in enumerate((slice(3), slice(3, 5), slice(5, 9))):
        for column in range(40):
            if (expert, column) != (1, 30):
                assert relative_error(found[rows, column], wanted[rows, column]) < 3e-6


def test_packing_does_not_copy_plain_weights() -> None:
    problem = question("bf16", "bf16")
    packed, made = build(problem)
    assert packed.gate_up.values.data_ptr() == made.gate_up.values.data_ptr()
    assert packed.down.values.data_ptr() == made.down.values.data_ptr()


@pytest.mark.parametrize("group_size", [32, 64, 128, 176])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_int4_groups_and_scale_dtypes(group_size: int, dtype: torch.dtype) -> None:
    weight = heavy_tailed(2, 1, 40, 176, seed=5, channels=False)
    payload = Int4Group.encode(weight, group_size=group_size, scale_dtype=dtype)
    packed = pack.pack_int(payload, None)
    offsets = torch.tensor([0, 3, 9])
    x = heavy_tailed(9, 176, seed=6).bfloat16()
    found = torch.empty(9, 40)
    ops.grouped_gemm(x, packed, offsets, ops.tile_list(offsets, 9, TILE), found)
    assert relative_error(found, grouped_gemm_reference(x, payload.decode(), offsets)) < 1e-6


def random_integers(bits: int, group: int, dtype: torch.dtype, *shape: int) -> Int4Affine:
    """Return integers ``[E, P, N, K]`` whose zero points differ from group to group, over their whole range."""
    made = torch.Generator().manual_seed(bits + group)
    count, n_out, k_in = shape[0] * shape[1], shape[2], shape[3]
    codes = torch.randint(0, 1 << bits, (count * n_out, k_in), generator=made, dtype=torch.uint8)
    zeros = torch.randint(0, 1 << bits, (*shape[:3], -(-k_in // group)), generator=made, dtype=torch.uint8)
    zeros[..., 0], zeros[:, :, 1] = (1 << bits) - 1, 0
    scales = heavy_tailed(count * n_out, zeros.shape[-1], seed=group, channels=False).abs().to(dtype).view(zeros.shape)
    kind: Any = Int4Affine if bits == 4 else Int8Affine
    stored = (pack_nibbles(codes) if bits == 4 else codes).view(*shape[:3], -1)
    return kind(shape=shape, codes=stored, scales=scales, zeros=zeros, group_size=min(group, k_in))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128, 176])
@pytest.mark.parametrize("rows", [torch.bfloat16, torch.float16])
def test_zero_points_for_every_integer_layout(bits: int, group: int, rows: torch.dtype) -> None:
    payload = random_integers(bits, group, torch.float16 if group > 32 else torch.bfloat16, 2, 1, 40, 176)
    packed = pack.pack_int(payload, None)
    packed = in_rows_of(packed, rows)
    offsets = torch.tensor([0, 3, 9])
    x = heavy_tailed(9, 176, seed=6).to(rows)
    found = torch.empty(9, 40)
    ops.grouped_gemm(x, packed, offsets, ops.tile_list(offsets, 9, TILE), found)
    assert relative_error(found, grouped_gemm_reference(x, payload.decode(), offsets)) < 1e-6


@pytest.mark.each_choice
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tile", [TILE, FUSED], ids=["apart", "fused"])
def test_scales_that_are_zero_or_tiny(bits: int, group: int, dtype: torch.dtype, tile: TileChoice) -> None:
    payload = random_integers(bits, group, dtype, 2, 1, 40, 416)
    if dtype == torch.float32:
        payload = replace(payload, zeros=torch.full_like(payload.zeros, 1 << (bits - 1)))
    own = payload.scales
    own[:, :, :10, 0], own[:, :, 5:15, 1], own[:, :, 8:20, 2:], own[:, :, 20, :] = 0, 0, 0, 0
    own[:, :, 12, 1], own[:, :, 25, 0] = -own[:, :, 11, 0], 2.0**-100
    own[:, :, 30:] *= 2.0**-60 if dtype == torch.bfloat16 else 2.0**-10
    before = payload.decode()
    packed, offsets = pack.pack_int(payload, None), torch.tensor([0, 3, 9])
    x, found = heavy_tailed(9, 416, seed=6).bfloat16(), torch.empty(9, 40)
    ops.grouped_gemm(x, packed, offsets, ops.tile_list(offsets, 9, tile), found)
    wanted = grouped_gemm_reference(x, before, offsets)
    rows = [row for row in range(40) if row not in (8, 9, 20)]
    assert not found[:, [8, 9, 20]].any()
    assert not wanted[:, [8, 9, 20]].any()
    assert all(relative_error(found[:, row], wanted[:, row]) < 3e-6 for row in rows)
    assert torch.equal(payload.decode(), before)


@pytest.mark.parametrize("bits", [4, 8])
def test_fp32_scales_require_middle_zero_points(bits: int) -> None:
    payload = random_integers(bits, 64, torch.float32, 2, 1, 24, 128)
    with raises_with(InputError, "float32"):
        pack.pack_int(payload, None)
    payload = replace(payload, zeros=torch.full_like(payload.zeros, 1 << (bits - 1)))
    packed, offsets, found = pack.pack_int(payload, None), torch.tensor([0, 3, 9]), torch.empty(9, 24)
    x = heavy_tailed(9, 128, seed=6).bfloat16()
    ops.grouped_gemm(x, packed, offsets, ops.tile_list(offsets, 9, TILE), found)
    assert relative_error(found, grouped_gemm_reference(x, payload.decode(), offsets)) < 1e-6


def random_looked_up(*shape: int) -> Bnb4:
    """Return codes ``[E, P, N, K]`` into a table of its own for each matrix, blocks cut where rows end."""
    *lead, columns = shape
    made, group = torch.Generator().manual_seed(columns), gcd(64, columns)
    return Bnb4(
        shape=shape,
        codes=torch.randint(0, 256, (*lead, columns // 2), generator=made, dtype=torch.uint8),
        scales=heavy_tailed(prod(lead), columns // group, seed=columns, channels=False).abs().view(*lead, -1),
        table=torch.rand(*lead[:2], 16, generator=made) * 2 - 1,
        group_size=group,
    )


@pytest.mark.each_choice
@pytest.mark.parametrize(("rows", "most"), [(torch.bfloat16, 1e-5), (torch.float16, 1e-6)])
@pytest.mark.parametrize("columns", [64, 96, 320, 512])
@pytest.mark.parametrize(
    ("activation", "tile"),
    [(None, TILE), (ActivationSpec(), TILE), (ActivationSpec(), replace(TILE, interleave_gate_up=True))],
)
def test_codes_that_look_numbers_up(
    columns: int, rows: torch.dtype, most: float, activation: Any, tile: TileChoice
) -> None:
    """To 16 bits, or 22: the larger term alone would be 1e-3 or 1e-4 away."""
    parts = 1 if activation is None else 2
    payload = random_looked_up(2, parts, 40, columns)
    packed = pack.pack_bnb4(payload, None, half=rows == torch.float16)
    packed = in_rows_of(packed, rows)
    offsets = torch.tensor([0, 3, 9])
    x = heavy_tailed(9, columns, seed=6).to(rows)
    found = torch.empty(9, 40)
    ops.grouped_gemm(x, packed, offsets, ops.tile_list(offsets, 9, tile), found, activation=activation)
    wanted = grouped_gemm_reference(x, payload.decode(), offsets, activation=activation)
    assert relative_error(found, wanted) < most


@pytest.mark.each_choice
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [96, 320, 512])
@pytest.mark.parametrize("tile", [TILE, FUSED], ids=["apart", "fused"])
def test_every_gguf_kind_and_row_dtype(kind: str, rows: torch.dtype, columns: int, tile: TileChoice) -> None:
    payload = random_blocks(kind, 2, 1, 40, columns)
    packed = pack.pack_gguf(payload, None, half=rows == torch.float16)
    packed = in_rows_of(packed, rows)
    offsets = torch.tensor([0, 3, 9])
    x = heavy_tailed(9, columns, seed=6).to(rows)
    found = torch.empty(9, 40)
    assert packed.layout.minima == (kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"))
    own, beside = halves_and_sums(x) if packed.layout.minima else (x, None)
    ops.grouped_gemm(own, packed, offsets, ops.tile_list(offsets, 9, tile), found, x_scale=beside)
    most = 1e-6
    if kind == "Q2_K":
        # Weights become bfloat16 numbers, or the nearest multiples of a scale.
        most = 4e-3 if packed.layout.low_bits else 2e-3
    assert relative_error(found, grouped_gemm_reference(x, payload.decode(), offsets)) < most


@pytest.mark.parametrize(
    "kind", ["Q4_0", "Q5_0", "Q8_0", "Q6_K", "MXFP4", "Q3_K", "IQ4_NL", "IQ2_XS", "IQ1_M", "TQ1_0"]
)
def test_gguf_blocks_whose_scale_is_zero(kind: str) -> None:
    """The codes of such a block are anything; llama.cpp writes Q6_K codes of -32 and E8M0 bytes of 0."""
    payload = random_blocks(kind, 2, 1, 40, 512)
    blocks = payload.blocks
    for rows, at in ((slice(10), 0), (slice(5, 15), 1), (slice(20, 21), slice(None))):
        if KINDS[kind].terms:
            write_half(kind, blocks[:, :, rows, at], 0, torch.zeros(()))
        else:
            blocks[:, :, rows, at, 0] = 0
    if kind == "Q6_K":
        blocks[:, :, 12:18, 0, 192:200] = 0
        blocks[:, :, 19, :, 200] = 128
    packed, offsets = pack.pack_gguf(payload, None, half=True), torch.tensor([0, 3, 9])
    packed = in_rows_of(packed, torch.float16)
    x, found = heavy_tailed(9, 512, seed=6).half(), torch.empty(9, 40)
    ops.grouped_gemm(x, packed, offsets, ops.tile_list(offsets, 9, TILE), found)
    wanted = grouped_gemm_reference(x, payload.decode(), offsets)
    assert float(found[:, 20].abs().max()) < 1e-30
    assert all(relative_error(found[:, row], wanted[:, row]) < 3e-6 for row in range(40) if row != 20)


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_1", "Q4_K", "Q5_K"])
@pytest.mark.parametrize("tile", [TILE, FUSED], ids=["apart", "fused"])
def test_gguf_zero_scales_and_minima(kind: str, tile: TileChoice) -> None:
    """A scale of zero leaves the minimum alone, a minimum of zero the codes, whatever the steps beside them are."""
    payload = random_blocks(kind, 2, 1, 40, 512)
    for half, rows, at in ((0, slice(10), 0), (0, slice(5, 15), 1), (0, slice(20, 22), slice(None)),
                           (1, slice(8, 14), 0), (1, slice(21, 25), slice(None)), (1, slice(30, 40), -1)):  # fmt: skip
        first = KINDS[kind].halves[half]
        payload.blocks[:, :, rows, at, first : first + 2] = 0
    payload.blocks[:, :, 3, 1, KINDS[kind].halves[0] + 1] ^= 128  # a sign
    packed = in_rows_of(pack.pack_gguf(payload, None), torch.bfloat16)
    x, offsets, found = heavy_tailed(9, 512, seed=6).bfloat16(), torch.tensor([0, 3, 9]), torch.empty(9, 40)
    own, beside = halves_and_sums(x)
    ops.grouped_gemm(own, packed, offsets, ops.tile_list(offsets, 9, tile), found, x_scale=beside)
    wanted = grouped_gemm_reference(x, payload.decode(), offsets)
    assert float(found[:, 21].abs().max()) < 1e-30, "both are zero"
    assert all(relative_error(found[:, row], wanted[:, row]) < 3e-6 for row in range(40) if row != 21)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_halves_and_sums_of_partial_columns(dtype: torch.dtype) -> None:
    x = heavy_tailed(6, 1200, seed=6).to(dtype)
    x[3, 40] = torch.nan
    x[4] *= 2.0**-14 if dtype == torch.float16 else 2.0**-100
    x[5] = 0
    for columns in (1, 33, 96, 1025, 1100):
        halves, (scale, sums) = halves_and_sums(x[:, :columns])
        bad = [3] if columns > 40 else []
        assert scale.isnan().nonzero().tolist() == [[row, 0] for row in bad]
        own = x[:, :columns].double()
        own[bad] = 0
        largest = halves.abs().amax(dim=1)
        assert all(512 <= largest[row] < 1024 for row in (0, 1, 2, 4) if own[row].any())
        made = halves * scale.nan_to_num(0).double()
        # float32 rows are rounded to eleven bits, others only where they are tiny beside their largest number.
        rounding = own.abs() * (2.0**-11 if dtype == torch.float32 else 0)
        assert bool(((made - own).abs() <= rounding + own.abs().amax(dim=1, keepdim=True) * 2.0**-33).all())
        parts = sums.double().unflatten(1, (-1, 8))
        wanted = torch.nn.functional.pad(halves.double(), (0, -columns % 128)).unflatten(1, (-1, 32)).sum(-1)
        assert parts.shape[:2] == wanted.shape
        assert not parts[..., 2:].any()
        assert bool(((parts[..., 0] - wanted).abs() <= wanted.abs() * 2.0**-11).all())
        assert relative_error(parts.sum(-1).float(), wanted.float()) < 1e-6
    some, (scale, sums) = halves_and_sums(x, used=torch.tensor([2]))
    whole, beside = halves_and_sums(x)
    for found, wanted in ((some, whole), (scale, beside.scale), (sums, beside.sums)):
        assert torch.equal(found[:2], wanted[:2])
        assert bool(found[2:].isnan().all())  # nothing was written there


def test_gathered_columns_follow_the_rows_expert() -> None:
    x, order = heavy_tailed(9, 75, seed=1), torch.stack([torch.randperm(75) for _ in range(4)]).int()
    offsets, source = torch.tensor([0, 3, 3, 8, 12]), torch.randint(0, 9, (15,))
    source[12:] = 1 << 40  # rows of nobody
    experts = torch.tensor([0] * 3 + [2] * 5 + [3] * 4)
    found = gather_columns(x, order, offsets, source)
    assert torch.equal(found[:12], in_columns_reference(x, order, experts, source[:12]))
    ids = torch.tensor([[3, 0], [-1, 1], [4, 1 << 40], [2, 2], [1, 3], [0, 0], [0, 1], [2, 1], [3, 3]])
    found, here = gather_columns(x, order, ids, None, top_k=2), ((ids >= 0) & (ids < 4)).flatten()
    tokens = torch.arange(18) // 2
    assert torch.equal(found[here], in_columns_reference(x, order, ids.flatten()[here], tokens[here]))
    assert bool(found[~here].isnan().all())  # nothing was written there


@pytest.mark.parametrize("fault", ["sizes", "parts"])
def test_inconsistent_column_orders_refused(fault: str) -> None:
    payload = ordered(heavy_tailed(2, 2, 24, 128, seed=5), 4, 32)
    group_of = payload.group_of.clone()
    if fault == "sizes":
        group_of[group_of == 1] = 0
    else:
        group_of[1, 1] = group_of[1, 1].flip(0)
    with raises_with(InputError, "int4_ordered", "32", "reference"):
        pack.pack_int(replace(payload, group_of=group_of), None)


def test_refused_block_sizes_are_named() -> None:
    weight = heavy_tailed(1, 1, 64, 96, seed=5)
    for native in (True, False):
        with raises_with(InputError, "(64, 48)", "32 columns"):
            pack.pack_fp8_block(Fp8Block.encode(weight, block=(64, 48)), None, native=native)
    with raises_with(InputError, "24"):
        pack.pack_int(Int4Group.encode(weight, group_size=24), None)


def test_large_fp8_blocks_are_repeated() -> None:
    weight = heavy_tailed(1, 1, 300, 260, seed=5)
    payload = Fp8Block.encode(weight, block=(256, 128))
    packed = pack.pack_fp8_block(payload, None, native=False)
    offsets = torch.tensor([0, 4])
    x = heavy_tailed(4, 260, seed=6).bfloat16()
    found = torch.empty(4, 300)
    ops.grouped_gemm(x, packed, offsets, ops.tile_list(offsets, 4, TILE), found)
    assert relative_error(found, grouped_gemm_reference(x, payload.decode(), offsets)) < 1e-5


def test_refusals_name_what_was_asked() -> None:
    bf16, fp8, w4, w8 = KERNELS
    both = "bf16 or fp16 for both"
    for kernel, weights, activations, supported in (
        (bf16, "mxfp4", "bf16", "bf16 or fp16"),
        (bf16, "bf16", "fp8_token", both),
        (bf16, "fp16", "fp32", "fp16 or bf16 for both"),
        (w4, "mxfp4", "fp8_token", both),
        (w8, "int4_affine", "bf16", "int8_affine"),
        (w8, "int8_affine", "fp8_token", both),
        (fp8, "mxfp8", "fp8_token", both),
        (fp8, "fp8_block", "nvfp4", f"{both}, fp8_group128"),
        (TritonW4A8(), "mxfp4", "bf16", "fp8_token"),
    ):
        reason = str(kernel.refuse(question(weights, activations).routed))
        assert_values(reason, weights, supported)
    ampere = replace(question("fp8_block", "fp8_group128"), device=DeviceFacts(kind="cuda", capability=(8, 0)))
    assert_values(str(fp8.refuse(ampere.routed)), "fp8_group128", "sm_80", "sm_89")
    old = replace(question("bf16", "bf16"), device=DeviceFacts(kind="cuda", capability=(7, 5)))
    assert_values(str(bf16.refuse(old.routed)), "sm_75", "sm_80")
    assert_values(str(bf16.refuse(replace(old, device=DeviceFacts(kind="cpu")).routed)), "cpu", "CUDA")
    for kernel in KERNELS:
        assert kernel.capturable


def test_slices_belong_to_the_dispatcher() -> None:
    placed = Placement(world_size=2, expert_ids=tuple(range(5)), tp_rank=1, tp_size=2)
    asked = replace(question("bf16", "bf16"), placement=placed)
    assert (asked.routed.experts, asked.routed.intermediate, asked.routed.hidden) == (5, 45, 176)
    assert KERNELS[0].refuse(asked.routed) is None
    assert plan(asked).wire_format.startswith("float32 sums of 2 slices")


def test_workspace_counts_every_row() -> None:
    problem = question("bf16", "bf16")
    rows = 8192 * 2
    least = rows * (90 * 2 + 176 * 2)
    assert least < sum(KERNELS[0].regions(problem.routed).values()) < 1.1 * least


def test_wrong_rows_are_refused() -> None:
    problem = question("mxfp4", "bf16")
    packed, _ = build(problem)
    offsets = torch.zeros(6, dtype=torch.int64)
    tiles = ops.tile_list(offsets, 4, TILE)
    out = torch.empty(4, 176, dtype=torch.bfloat16)
    with raises_with(InputError, "(4, 91)"):
        ops.grouped_gemm(torch.zeros(4, 91).bfloat16(), packed.down, offsets, tiles, out)
    with raises_with(InputError, "torch.float16"):
        ops.grouped_gemm(torch.zeros(4, 90).half(), packed.down, offsets, tiles, out)
    with raises_with(InputError, "x_scale"):
        ops.grouped_gemm(torch.zeros(4, 90).bfloat16(), packed.down, offsets, tiles, out, x_scale=torch.ones(4, 1))
    with raises_with(InputError, "(4, 175)"):
        ops.grouped_gemm(torch.zeros(4, 90).bfloat16(), packed.down, offsets, tiles, out[:, :175])
    lines = build(question("gguf", "bf16"))[0].down
    with raises_with(InputError, "halves_and_sums"):
        ops.grouped_gemm(torch.zeros(4, 90).half(), lines, offsets, tiles, out)


SIZES = (
    (7168, 2048, 256, 8),
    (4096, 2048, 256, 6),
    (2880, 2880, 128, 4),
    (2048, 768, 128, 8),
    (64, 32, 1, 1),
)


def products(tokens: int, sizes: tuple[int, ...], **facts: Any) -> TileProblem:
    hidden, wide, experts, top_k = sizes
    return TileProblem(rows=tokens * top_k, experts=experts, n_out=wide, k_in=hidden, parts=2, block_k=64, **facts)


@pytest.mark.parametrize("machine", [machine_of((9, 0), 132), machine_of((8, 0), 108), machine_of((8, 6), 84)])
def test_chosen_tile_fits_for_every_size(machine: Machine) -> None:
    for sizes in SIZES:
        for tokens in (1, 8, 512, 8192):
            for facts in (
                {},
                {"decoded": True, "weight_bits": 4.25},
                {"promoted": True, "x_bits": 8, "weight_bits": 8},
            ):
                problem = products(tokens, sizes, **facts)
                tile = choose(problem, machine)
                assert tile in candidates(problem, machine)
                bits = 2 * tile.columns * problem.weight_bits + tile.block_t * problem.x_bits
                assert tile.stages * tile.depth * 64 * bits / 8 <= machine.shared
                assert score(problem, tile, machine) == min(
                    score(problem, other, machine) for other in candidates(problem, machine)
                )


def test_tile_width_follows_tokens() -> None:
    machine = machine_of((9, 0), 132)
    few, many = products(1, SIZES[0]), products(8192, SIZES[0])
    assert choose(few, machine).block_t == 16
    assert choose(many, machine).block_t >= 128


def test_stacked_tiles_and_early_loads() -> None:
    hopper, ampere = machine_of((9, 0), 132), machine_of((8, 0), 108)
    few, many = products(2, SIZES[3], promoted=True, x_bits=8, weight_bits=8), products(512, SIZES[0])
    assert choose(few, ampere).interleave_gate_up
    assert choose(few, hopper).overlap
    assert not choose(few, ampere).overlap
    assert choose(many, hopper).overlap
    assert not choose(replace(many, decoded=True, weight_bits=4.25), hopper).overlap
    assert choose(products(8, SIZES[1], decoded=True, weight_bits=4.25), hopper).interleave_gate_up
    alone = replace(few, parts=1)
    assert not any(tile.interleave_gate_up for tile in candidates(alone, hopper))


def test_only_hopper_joins_decoded_weight_tiles() -> None:
    hopper, ampere = machine_of((9, 0), 132), machine_of((8, 0), 108)
    decoded = {"decoded": True, "weight_bits": 4.25}
    few, many = (replace(products(tokens, SIZES[1], **decoded), block_k=128) for tokens in (1, 8192))
    assert (choose(many, hopper).fuse_k_block, choose(many, hopper).block_t, choose(many, hopper).warps) == (
        True,
        128,
        4,
    )
    assert not choose(few, hopper).fuse_k_block, "one token waits for each product"
    assert choose(replace(few, running=True, x_bits=20), hopper).fuse_k_block
    assert not choose(replace(many, promoted=True, quartered=True), hopper).fuse_k_block, (
        "quarters have factors of their own"
    )
    for machine, most in ((hopper, 64), (ampere, 32)):
        minima = candidates(replace(many, running=True, x_bits=20), machine)
        assert max(tile.block_t for tile in minima) == most
        assert not any(tile.fuse_k_block for tile in minima if machine is ampere)
    assert max(tile.block_t for tile in candidates(many, ampere)) == 64
    assert not any(tile.registers for tile in candidates(many, ampere))


def test_group_units_allow_tall_tiles() -> None:
    hopper, ampere = machine_of((9, 0), 132), machine_of((8, 0), 108)
    four = {"decoded": True, "quartered": True, "running": True, "weight_bits": 4.5}
    for bits, most, few in ((4.5, 64, 128), (8.5, 128, 64)):
        one, many = (replace(products(n, SIZES[1], **four), block_k=128, weight_bits=bits) for n in (1, 8192))
        assert choose(many, hopper).block_t == most
        assert (choose(one, hopper).block_t, choose(one, hopper).block_n) == (16, few)
        assert choose(many, ampere).block_t == 64
        assert not any(tile.fuse_k_block for tile in candidates(many, hopper))
        # Two sums do not fit beside each other.
        assert choose(replace(many, promoted=True, running=False), hopper).block_t == 32


def test_few_rows_prefetch_several_blocks() -> None:
    hopper, ampere = machine_of((9, 0), 132), machine_of((8, 0), 108)
    eight = {"promoted": True, "x_bits": 8, "weight_bits": 8}

    def tile(tokens: int, sizes: tuple[int, ...], **facts: Any) -> TileChoice:
        return choose(replace(products(tokens, sizes, **eight), block_k=128, **facts), hopper)

    v3, qwen = (7168, 2048, 256, 8), (2048, 768, 128, 8)
    # All programs at once where three share a multiprocessor; more of them keep more bytes on their way in pairs.
    few, more = tile(1, qwen), tile(1, v3)
    assert (few.block_n, few.interleave_gate_up, few.depth, few.stages) == (64, True, 2, 3)
    assert (more.depth, more.stages) == (2, 4)
    assert [tile(count, v3).block_t for count in (1, 8, 128, 512)] == [16, 16, 16, 64]
    assert tile(512, v3).narrow
    # Where K is an odd number of blocks, there is a third or nothing.
    thirds, odd = choose(products(1, (2880, 2880, 128, 4)), hopper), tile(1, v3, k_in=1408)
    assert (thirds.depth, odd.depth) == (3, 1)
    # A short product of many rows, and rows that fill tiles, are better off one by one.
    down = {"parts": 1, "k_in": 768, "n_out": 2048}
    assert (tile(8, qwen, **down).depth, tile(512, qwen, **down).depth) == (2, 1)
    assert not tile(8, qwen, **down).interleave_gate_up
    assert tile(2048, v3).depth == 1
    assert choose(products(1, SIZES[0]), ampere).depth == 1
    assert choose(products(1, SIZES[0]), replace(hopper, shared=99 << 10)).depth == 2
    assert choose(products(1, SIZES[0]), replace(hopper, shared=60 << 10)).depth == 1


def test_a_machine_too_small_is_named() -> None:
    with raises_with(PlanError, "1,024"):
        choose(products(1, SIZES[0]), Machine(shared=1024))


@pytest.mark.parametrize(("weights", "act"), [("bf16", "bf16"), ("mxfp4", "bf16"), ("fp8_block", "fp8_group128")])
def test_biases_may_be_views(weights: str, act: str) -> None:
    """As an engine keeps them: gate and up by turns, and room beyond the hidden size."""
    problem = question(weights, act)
    packed, made = build(problem)
    assert made.gate_up_bias is not None
    assert made.down_bias is not None
    by_turns = made.gate_up_bias.movedim(1, 2).contiguous().movedim(2, 1)
    wider = torch.nn.functional.pad(made.down_bias, (0, 16))[:, : made.down_bias.shape[1]]
    kernel: Any = next(k for k in KERNELS if k.refuse(problem.routed) is None)
    views = kernel.pack(replace(made, gate_up_bias=by_turns, down_bias=wider), problem.routed)
    batch = batch_of(23, problem)
    stop = int(batch.expert_offsets[-1])
    assert torch.equal(replace(views, tiles=(TILE, TILE)).run(batch)[:stop], packed.run(batch)[:stop])
