"""The large-batch product of MXFP4 weights, its text compiled as C++: truth, ragged sizes, places, whole layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("tests/gpu makes these comparisons on the device", allow_module_level=True)

from collegium.encoding import encode_experts
from collegium.errors import InputError, PlanError, SpecError
from collegium.experts.reference import Reference
from collegium.experts.triton import packed as packed_experts
from collegium.experts.triton.grouped import tile_list
from collegium.experts.triton.packing import pack_w4a8
from collegium.experts.triton.table import TritonW4A8
from collegium.experts.triton.tiles.choice import prefill_tile
from collegium.experts.triton.tiles.fitted import LARGE
from collegium.experts.triton.tiles.problem import TileChoice
from collegium.experts.triton.w4_prefill import w4_prefill_gemm
from collegium.formats import MxFp4
from collegium.kernels.enums import NOWHERE
from collegium.ops.operand import transpose_scales
from collegium.ops.quantize import AS_IS, REORDERED, activation_format, reorder_codes
from collegium.parallel.local import Local
from collegium.planning import plan
from collegium.problem import DeviceFacts, Overrides, Problem
from collegium.runtime.machine import Machine, machine_of
from collegium.runtime.memory import FreshMemory
from collegium.testing.compare import heavy_tailed, random_experts, relative_error, uneven_ids
from collegium.types import ACTIVATION_KINDS, ActivationSpec, MoESpec, Routing, RoutingSpec
from grids import mainly
from products import grouped_gemm_reference
from raising import raises_with

TILE = TileChoice(block_n=256, block_t=160, warps=8, stages=5, group_t=2, programs=2)  # of one cluster
COUNTS = (0, 330, 3, 0, 65)  # tiles of 112 and 16 tokens, an expert with a single tile of 80, two without rows
ROWS, OWNED = 400, 398
OFFSETS = torch.tensor([0, *COUNTS]).cumsum(0)
SWIGLU = ActivationSpec(limit=2.0)


def weights_of(parts: int, n_out: int, k_in: int, *, bias: bool = True) -> tuple[Any, torch.Tensor]:
    """Return packed weights of five experts, and what they stand for."""
    values = torch.stack([heavy_tailed(n_out * parts, k_in, seed=5 + e).view(parts, n_out, k_in) for e in range(5)])
    payload = MxFp4.encode(values / k_in**0.5)
    return pack_w4a8(payload, torch.randn(5, parts, n_out).bfloat16() if bias else None), payload.decode()


def rows_of(k_in: int, name: str = "fp8_token") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes in the order of the weights, their scales as the product reads them, and what they stand for."""
    rows = activation_format(name).quantize(heavy_tailed(ROWS, k_in, seed=3).bfloat16())
    scales = rows.scales
    assert scales is not None
    by_column = scales if scales.shape[1] == 1 else scales.repeat_interleave(128, 1)[:, :k_in]
    meant = rows.codes.float() * by_column
    if scales.shape[1] > 1:
        scales = transpose_scales(scales, None)
    return reorder_codes(rows.codes, REORDERED), scales, meant


def run(x: torch.Tensor, packed: Any, dtype: torch.dtype, offsets: torch.Tensor = OFFSETS, **more: Any) -> torch.Tensor:
    out = torch.full((ROWS, packed.layout.shape[2]), 7.0, dtype=dtype)
    return w4_prefill_gemm(x, packed, offsets, tile_list(offsets, ROWS, TILE), out, **more)


@pytest.mark.parametrize("form", ["fp8_token", "fp8_group128"])
@pytest.mark.parametrize(
    ("parts", "n_out", "k_in"),
    [
        (2, 208, 272),  # weight rows that end inside of a row tile, and K inside of a K block
        (1, 600, 128),  # one K block, a second column of tiles whose second block has no weights
        (1, 64, 704),  # more K blocks than stages
    ],
)
def test_truth_and_results_of_16_bits(parts: int, n_out: int, k_in: int, form: str) -> None:
    packed, values = weights_of(parts, n_out, k_in)
    x, x_scale, meant = rows_of(k_in, form)
    activation = SWIGLU if parts == 2 else None
    floats = run(x, packed, torch.float32, x_scale=x_scale, activation=activation)
    truth = grouped_gemm_reference(meant, values, OFFSETS, bias=packed.bias, activation=activation)
    assert relative_error(floats[:OWNED], truth[:OWNED]) < 2e-6
    assert bool((floats[OWNED:] == 7.0).all())
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(run(x, packed, dtype, x_scale=x_scale, activation=activation), floats.to(dtype))


def test_scaled_tiles_in_pieces() -> None:
    """Tiles of every width that is multiplied in pieces: an odd number of them, with an odd number of K blocks."""
    widths = (96, 112, 128, 144, 160)
    offsets = torch.tensor([0, *widths]).cumsum(0)
    values = torch.stack([heavy_tailed(64, 384, seed=5 + e).view(1, 64, 384) for e in range(5)])
    payload = MxFp4.encode(values)
    rows = activation_format("fp8_group128").quantize(heavy_tailed(640, 384, seed=3).bfloat16())
    assert rows.scales is not None
    meant = rows.codes.float() * rows.scales.repeat_interleave(128, 1)
    out = torch.empty(640, 64)
    x_scale = transpose_scales(rows.scales, None)
    packed = pack_w4a8(payload, None)
    codes = reorder_codes(rows.codes, REORDERED)
    w4_prefill_gemm(codes, packed, offsets, tile_list(offsets, 640, TILE), out, x_scale=x_scale)
    assert relative_error(out, grouped_gemm_reference(meant, payload.decode(), offsets)) < 2e-6


@pytest.mark.parametrize("kind", mainly(ACTIVATION_KINDS, ("swiglu_oai", "relu2")))
def test_every_activation(kind: Any) -> None:
    activation = ActivationSpec(kind=kind)
    packed, values = weights_of(1 if kind in ("relu2", "silu", "gelu") else 2, 72, 128)
    x, x_scale, meant = rows_of(128)
    found = run(x, packed, torch.float32, x_scale=x_scale, activation=activation)
    wanted = grouped_gemm_reference(meant, values, OFFSETS, bias=packed.bias, activation=activation)
    assert relative_error(found[:OWNED], wanted[:OWNED]) < 1e-5


@pytest.mark.parametrize("form", ["fp8_token", "fp8_group128"])
def test_rows_are_batch_invariant(form: str) -> None:
    packed, _ = weights_of(2, 72, 272)
    x, x_scale, _ = rows_of(272, form)
    wanted = run(x, packed, torch.bfloat16, x_scale=x_scale, activation=SWIGLU)
    # The last 40 rows of the second expert alone, and the third one's.
    fewer = torch.tensor([0, 0, 40, 43, 43, 43])
    moved = torch.cat([torch.arange(290, 333), torch.arange(ROWS - 43)])
    x, x_scale = (
        x[moved],
        x_scale[moved] if form == "fp8_token" else transpose_scales(x_scale[moved].contiguous(), None),
    )
    found = run(x, packed, torch.bfloat16, fewer, x_scale=x_scale, activation=SWIGLU)
    assert torch.equal(found[:43], wanted[290:333])
    x_scale[7] = torch.nan
    again = run(x, packed, torch.bfloat16, fewer, x_scale=x_scale, activation=SWIGLU)
    others = torch.arange(43) != 7
    assert bool(again[7].isnan().all())
    assert torch.equal(again[:43][others], found[:43][others])


@pytest.mark.parametrize("n_out", [208, 204])
def test_rows_go_to_their_places(n_out: int) -> None:
    packed, _ = weights_of(1, n_out, 128)
    x, x_scale, _ = rows_of(128)
    wanted = run(x, packed, torch.bfloat16, x_scale=x_scale)
    places = torch.randperm(ROWS)
    offsets = torch.where(places == 3, NOWHERE, places * n_out)
    out = torch.full((ROWS, n_out), 7.0, dtype=torch.bfloat16)
    tiles = replace(tile_list(OFFSETS, ROWS, TILE), row_offsets=offsets)
    w4_prefill_gemm(x, packed, OFFSETS, tiles, out, x_scale=x_scale)
    written = places[:OWNED][places[:OWNED] != 3]
    assert torch.equal(out[written], wanted[:OWNED][places[:OWNED] != 3])
    untouched = torch.ones(ROWS, dtype=torch.bool)
    untouched[written] = False
    assert bool((out[untouched] == 7.0).all())


def test_every_code_and_scale() -> None:
    """Weights from 2^-11 to 1 of their row's largest, of every code, multiplied by one column at a time."""
    codes = torch.arange(128).repeat(64, 1) % 16
    codes[:, ::32] = 7  # the largest code, so that a group is as large as its scale says
    scales = 127 - (torch.arange(64)[:, None] + 4 * torch.arange(4)[None, :]) % 12
    scales[:, 0] = 127
    low, high = codes[:, 0::2], codes[:, 1::2]
    payload = MxFp4(
        codes=(low | high << 4).to(torch.uint8)[None, None],
        scales=scales.to(torch.uint8)[None, None],
        shape=(1, 1, 64, 128),
    )
    packed = pack_w4a8(payload, None)
    x = reorder_codes(torch.eye(128).to(torch.float8_e4m3fn), REORDERED)
    offsets = torch.tensor([0, 128])
    out = torch.empty(128, 64)
    w4_prefill_gemm(x, packed, offsets, tile_list(offsets, 128, TILE), out, x_scale=torch.ones(128, 1))
    assert torch.equal(out.T, payload.decode()[0, 0])


def test_hot_expert_of_one_block() -> None:
    """Tokens of one expert are spread over tiles of the width that the kernel was compiled for."""
    problem = Problem(
        spec=MoESpec(
            hidden_size=144,
            intermediate_size=96,
            num_experts=2,
            routing=RoutingSpec(top_k=1),
            weight_format="mxfp4",
        ),
        device=DeviceFacts(kind="cuda", capability=(9, 0)),
        activation_format="fp8_group128",
    )
    made = encode_experts(random_experts(2, 2, 96, 144, seed=1), "mxfp4")
    packed = replace(
        TritonW4A8().pack(made, problem.routed), machine=Machine(copies=True, compiles=True), forced="large"
    )
    x = heavy_tailed(200, 144, seed=3).to(torch.bfloat16)
    ids = torch.ones(200, 1, dtype=torch.int64)
    ids[7] = 0
    batch = Local(num_experts=2).dispatch(x, Routing(topk_ids=ids, topk_weights=torch.ones(200, 1)))[0]
    truth = Reference().pack(made, replace(problem, activation_format="fp32").routed).run(batch)
    assert relative_error(packed.run(batch), truth) < 0.06


def test_tiles_of_another_width_refused() -> None:
    packed, _ = weights_of(1, 64, 256)
    x, x_scale, _ = rows_of(256, "fp8_group128")
    out = torch.empty(ROWS, 64)
    for width in (176, 100):
        tiles = tile_list(OFFSETS, ROWS, replace(TILE, block_t=width))
        with raises_with(InputError, width, 160):
            w4_prefill_gemm(x, packed, OFFSETS, tiles, out, x_scale=x_scale)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("form", ["fp8_token", "fp8_group128"])
@pytest.mark.parametrize(("dtype", "kind"), [("bf16", "swiglu"), ("fp16", "swiglu_oai")])
def test_layers_of_large_batches(weighted: bool, dtype: Any, kind: Any, form: Any) -> None:
    spec = MoESpec(
        hidden_size=176,
        intermediate_size=96,
        num_experts=5,
        routing=RoutingSpec(top_k=2),
        activation=ActivationSpec(kind=kind, limit=2.0),
        weight_format="mxfp4",
        expert_bias=True,
    )
    device = DeviceFacts(kind="cuda", capability=(9, 0))
    problem = Problem(spec=spec, device=device, activation_format=form, dtype=dtype)
    made = encode_experts(random_experts(5, 2, 96, 176, seed=1, bias=True), "mxfp4")
    small = TritonW4A8().pack(made, problem.routed)
    large = replace(small, machine=Machine(copies=True, compiles=True), forced="large")
    x = heavy_tailed(90, 176, seed=3).to(torch.bfloat16 if dtype == "bf16" else torch.float16)
    ids = uneven_ids(90, 2, 5, seed=2)
    ids[0, 0] = -1
    batch = Local(num_experts=5).dispatch(x, Routing(topk_ids=ids, topk_weights=torch.rand(90, 2)), block_t=(160,))[0]
    assert large.tiling.block_t(180) == (160,)
    if weighted:
        batch = replace(batch, input_weights=torch.rand(180) + 0.5)
    stop = int(batch.expert_offsets[-1])
    assert small.tiling.large(180) is None
    assert large.tiling.large(180) is not None
    truth = Reference().pack(made, replace(problem, activation_format="fp32").routed).run(batch)[:stop]
    # The tiles come from the sort, or else are listed.
    with patch.object(packed_experts, "tile_list", lambda *_: pytest.fail("the tiles were listed again")):
        found = large.run(batch)[:stop]
    assert torch.equal(found, large.run(replace(batch, tiles=()))[:stop])
    assert relative_error(found, truth) < 0.06
    # The interpreter rounds the rows between the products toward zero, in both.
    assert relative_error(found, small.run(batch)[:stop]) < 0.012
    if not weighted:
        check_received_codes(large, batch, found, activation_format(form))


def check_received_codes(experts: Any, batch: Any, wanted: torch.Tensor, form: Any) -> None:
    """Codes of the tokens, in either order of columns, give the same rows; without slots they are refused."""
    rows = form.quantize(batch.x)
    for order in (AS_IS, REORDERED):
        codes = reorder_codes(rows.codes, order)
        received = replace(batch, x=codes, scale=rows.scales, order=order, dtype=batch.x.dtype)
        assert torch.equal(experts.run(received)[: wanted.shape[0]], wanted)
    with raises_with(InputError, "slots"):
        experts.run(replace(received, slots=None))


@pytest.mark.parametrize("tiles", ["small", "large"])
def test_copied_tokens_do_not_overlap(tiles: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantising may overlap the sort, but not the copy of tokens that are not aligned."""
    spec = MoESpec(
        hidden_size=128, intermediate_size=128, num_experts=2, routing=RoutingSpec(top_k=1), weight_format="mxfp4"
    )
    problem = Problem(spec=spec, device=DeviceFacts(kind="cuda", capability=(9, 0)), activation_format="fp8_token")
    made = encode_experts(random_experts(2, 2, 128, 128, seed=1), "mxfp4")
    experts = replace(
        TritonW4A8().pack(made, problem.routed), machine=Machine(copies=True, compiles=True), forced=tiles
    )
    found: list[bool] = []

    class Seen(Exception):
        """Raised in place of quantising."""

    def quantise(*_: Any, x_ready: bool, **__: Any) -> Any:
        found.append(x_ready)
        raise Seen

    monkeypatch.setattr(packed_experts, "scatter_rows" if tiles == "large" else "operand", quantise)
    wide = heavy_tailed(40, 131, seed=3).bfloat16()
    routing = Routing(topk_ids=torch.arange(40)[:, None] % 2, topk_weights=torch.ones(40, 1))
    for x in (wide[:, :128].contiguous(), wide[:, 3:]):
        batch = Local(num_experts=2).dispatch(x, routing, FreshMemory(x.device))[0]
        with pytest.raises(Seen):
            experts.run(batch)
    assert found == [True, False]


def test_which_batches_are_large() -> None:
    hopper = machine_of((9, 0), 132)
    first, _ = weights_of(2, 208, 272)

    def tile(rows: int, layout: Any = first.layout, *, groups: bool = False, machine: Machine = hopper) -> Any:
        return prefill_tile(replace(layout, shape=(256, *layout.shape[1:])).problem(rows, 8, groups), machine)

    found = tile(256 * LARGE.four_bits)
    assert found is not None
    assert (found.block_t, found.programs) == (160, 132)
    assert tile(256 * LARGE.four_bits - 1) is None
    scaled = tile(256 * LARGE.four_bits, groups=True)
    assert scaled is not None
    assert scaled.block_t == 160
    assert tile(256 * LARGE.four_bits, machine=machine_of((9, 0), 132, nvrtc=False)) is None
    assert tile(256 * LARGE.four_bits, machine=machine_of((10, 0), 132)) is None
    problem = replace(first.layout, shape=(256, *first.layout.shape[1:])).problem(8, 8, False)
    assert prefill_tile(problem, hopper, always=True) == found
    assert first.layout.runs_large
    assert not weights_of(1, 204, 128)[0].layout.runs_large
    assert first.layout.dequantized_bytes == 0


def test_tiles_that_a_caller_forces() -> None:
    spec = MoESpec(
        hidden_size=1024, intermediate_size=512, num_experts=16, routing=RoutingSpec(top_k=2), weight_format="mxfp4"
    )
    hopper = DeviceFacts(kind="cuda", capability=(9, 0))
    problem = Problem(spec=spec, device=hopper, activation_format="fp8_token")
    assert {each.tiles for each in plan(problem).token_ranges} == {"small tiles", "large tiles"}
    assert {each.tiles for each in plan(problem, Overrides(tiles="small")).token_ranges} == {"small tiles"}
    forced = plan(problem, Overrides(tiles="large", pipeline="split"))
    assert [each.tiles for each in forced.token_ranges] == ["large tiles"]
    assert "large tiles" in forced.explain()
    assert [each.tiles for each in plan(problem, Overrides(tiles="large")).token_ranges] == [
        "small tiles",
        "large tiles",
    ]
    with raises_with(PlanError, "large tiles were forced"):
        plan(replace(problem, device=replace(hopper, nvrtc=False)), Overrides(tiles="large"))
    grouped = plan(replace(problem, activation_format="fp8_group128"))
    assert {each.tiles for each in grouped.token_ranges} == {"small tiles", "large tiles"}
    with raises_with(SpecError, "tiles"):
        Overrides(tiles="wide")  # pyright: ignore[reportArgumentType]


def test_unaligned_rows_refused() -> None:
    packed, _ = weights_of(1, 64, 128)
    x, x_scale, _ = rows_of(128)
    with raises_with(InputError, "16"):
        run(x.flatten()[1:-127].view(-1, 128), packed, torch.bfloat16, x_scale=x_scale)
