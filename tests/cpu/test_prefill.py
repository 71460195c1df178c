"""The large-batch product, run by Triton's interpreter on small ugly shapes, against the product of small batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from collegium.encoding import encode_experts
from collegium.errors import InputError
from collegium.experts.reference import Reference
from collegium.experts.triton import grouped as ops
from collegium.experts.triton.prefill import CodeScales, prefill_gemm
from collegium.experts.triton.table import TritonBf16, TritonFp8
from collegium.experts.triton.tiles import choice
from collegium.experts.triton.tiles.choice import prefill_tile
from collegium.experts.triton.tiles.problem import TileChoice, TileProblem
from collegium.formats.unquantised import DTYPES
from collegium.ops.quantize import activation_format
from collegium.parallel.local import Local
from collegium.problem import DeviceFacts, Limits, Problem
from collegium.runtime.machine import Machine, machine_of
from collegium.testing.compare import heavy_tailed, random_experts, relative_error, uneven_ids
from collegium.types import ACTIVATION_KINDS, ActivationSpec, MoESpec, Routing, RoutingSpec
from five_experts import five_experts, rows_of
from grids import exhaustive, mainly
from prefill_on_cpu import TILE
from products import grouped_gemm_reference
from raising import raises_with

if torch.cuda.is_available():
    pytest.skip("tests/gpu makes these comparisons on the device", allow_module_level=True)
pytest.importorskip("triton")

SMALL = TileChoice(block_n=128, block_t=128, warps=8, stages=2)
COUNTS = (0, 150, 3, 0, 129)
FORMATS = (
    ("bf16", None),
    ("fp8_block", "fp8_group128"),
    ("fp8_block", "fp8_token"),
    ("fp8_channel", "fp8_group128_pow2"),
    ("fp8_channel", "fp8_token"),
)


@pytest.mark.each_choice("weights", "act")
@pytest.mark.parametrize(("weights", "act"), FORMATS)
@pytest.mark.parametrize("parts", [1, 2])
def test_sums_of_the_small_batch_product(weights: str, act: str | None, parts: int) -> None:
    packed, _ = five_experts(weights, parts, 208, 272, bias=weights != "bf16")
    x, x_scale = rows_of(act, 272, 290)
    offsets = torch.tensor([0, *COUNTS]).cumsum(0)
    activation = ActivationSpec(limit=2.0) if parts == 2 else None
    outs = []
    for product, tile in ((ops.grouped_gemm, SMALL), (prefill_gemm, TILE)):
        out = torch.full((290, 208), 7.0)
        tiles = ops.tile_list(offsets, 290, tile)
        outs.append(product(x, packed, offsets, tiles, out, x_scale=x_scale, activation=activation))
    # On a CPU sums are in another order; the bits are compared on a device.
    assert relative_error(outs[1][:282], outs[0][:282]) < 1e-5
    assert bool((outs[1][282:] == 7.0).all())
    assert not bool((outs[1][:282] == 7.0).all(1).any())


@pytest.mark.parametrize("kind", mainly(ACTIVATION_KINDS, ("swiglu", "swiglu_oai", "relu2")))
def test_every_activation(kind: Any) -> None:
    activation = ActivationSpec(kind=kind)
    parts = 1 if kind in ("relu2", "silu", "gelu") else 2
    packed, _ = five_experts("bf16", parts, 136, 64, bias=True)
    x = rows_of(None, 64, 290)[0] * 0.1
    offsets = torch.tensor([0, *COUNTS]).cumsum(0)
    out = torch.empty(290, 136, dtype=torch.float32)
    prefill_gemm(x, packed, offsets, ops.tile_list(offsets, 290, TILE), out, activation=activation)
    wanted = grouped_gemm_reference(x, packed.values, offsets, bias=packed.bias, activation=activation)
    assert relative_error(out[:282], wanted[:282]) < 1e-5


@pytest.mark.each_choice
@pytest.mark.parametrize("act", ["fp8_group128", "fp8_group128_pow2"])
@pytest.mark.parametrize("parts", [1, 2])
def test_intermediate_codes_and_scales(act: str, parts: int) -> None:
    """What leaves the first product as codes is what quantising its rows gives."""
    packed, _ = five_experts("fp8_block", parts, 336, 256, bias=False)
    x, x_scale = rows_of("fp8_group128", 256, 290)
    offsets = torch.tensor([0, *COUNTS]).cumsum(0)
    tiles = ops.tile_list(offsets, 290, TILE)
    activation = ActivationSpec(kind="swiglu" if parts == 2 else "relu2")
    rows = torch.empty(290, 336, dtype=torch.bfloat16)
    prefill_gemm(x, packed, offsets, tiles, rows, x_scale=x_scale, activation=activation)
    wanted = activation_format(act).quantize(rows)
    assert wanted.scales is not None
    codes, scales = torch.zeros(290, 336, dtype=torch.float8_e4m3fn), torch.zeros(290, 3)
    made = CodeScales(scale=scales, power=act.endswith("pow2"), rounded=True)
    prefill_gemm(x, packed, offsets, tiles, codes, x_scale=x_scale, activation=activation, codes=made)
    assert torch.equal(scales[:282], wanted.scales[:282])
    # The interpreter rounds to E4M3 toward zero.
    assert relative_error(codes[:282].float(), wanted.codes[:282].float()) < 0.06


@pytest.mark.parametrize(
    ("weights", "act"),
    [
        *mainly(FORMATS, (("bf16", None), ("fp8_block", "fp8_group128"), ("fp8_channel", "fp8_token"))),
        ("fp8_block", "bf16"),
        *exhaustive(("bf16", "fp16"), ("fp16", "bf16")),
    ],
)
def test_large_batches_equal_small_tiles(weights: str, act: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "large_from", lambda *_: 56)
    spec = MoESpec(
        hidden_size=272,
        intermediate_size=144,
        num_experts=3,
        routing=RoutingSpec(top_k=2),
        weight_format=weights,
        expert_bias=True,
    )
    device, dtype = DeviceFacts(kind="cuda", capability=(9, 0)), "fp16" if act == "fp16" else "bf16"
    problem = Problem(spec=spec, device=device, dtype=dtype, activation_format=act or "bf16")
    kernel: Any = TritonBf16() if weights.endswith("16") else TritonFp8()
    made = encode_experts(random_experts(3, 2, 144, 272, seed=1, bias=True), weights)
    packed = kernel.pack(made, problem.routed)
    judge = Reference().pack(made, replace(problem, activation_format="fp32").routed)
    ids = uneven_ids(90, 2, 3, seed=2)
    ids[0, 0] = -1
    x = heavy_tailed(90, 272, seed=3).to(DTYPES[dtype])
    batch, _ = Local(num_experts=3).dispatch(x, Routing(topk_ids=ids, topk_weights=torch.rand(90, 2)))
    stop = int(batch.expert_offsets[-1])
    for weight in (None, torch.rand(180) + 0.5):
        given = replace(batch, input_weights=weight)
        small = packed.run(given)[:stop]
        other = replace(packed, machine=Machine(copies=True, compiles=True))
        assert packed.tiling.large(180) is None
        assert (other.tiling.large(180) is None) == (weights == "fp8_block" and act == "bf16"), (
            "decoded weights alone keep the small tiles"
        )
        large = other.run(given)[:stop]
        if other.tiling.large(180) is None:
            assert relative_error(large, small) < 3e-3
        elif act is None or act.endswith("16"):
            assert relative_error(large, judge.run(given)[:stop]) < 4e-3
        else:
            # Codes of the rows between are rounded toward zero by Triton's interpreter.
            assert relative_error(large, small) < 0.06


def product(**changes: Any) -> TileProblem:
    sizes = {"rows": 65536, "experts": 256, "n_out": 2048, "k_in": 7168, "parts": 2, "block_k": 128}
    return TileProblem(**(sizes | {"weight_bits": 8, "x_bits": 8, "promoted": True} | changes))


def test_which_batches_are_large() -> None:
    hopper = machine_of((9, 0), 132)
    tile = prefill_tile(product(), hopper)
    assert tile is not None
    assert (tile.programs, tile.group_t) == (132, 8)
    fewer = prefill_tile(product(), replace(hopper, sms=115))
    assert fewer is not None
    assert fewer.programs == 114, "blocks come in pairs"
    assert prefill_tile(product(), replace(hopper, compiles=False)) is None, "without NVRTC"
    assert prefill_tile(product(), machine_of((9, 0), 132, nvrtc=False)) is None
    plain16 = {"block_k": 64, "weight_bits": 16, "x_bits": 16, "promoted": False}
    assert prefill_tile(product(**plain16, k_in=2880), hopper) is not None
    assert prefill_tile(product(rows=256 * 16), hopper) is not None
    assert prefill_tile(product(rows=256 * 40, promoted=False), hopper) is not None
    assert prefill_tile(product(**plain16, rows=256 * 48), hopper) is not None
    # A shared expert has too few tiles for the multiprocessors, eight experts have enough.
    few16 = {**plain16, "experts": 1}
    assert prefill_tile(product(experts=1, rows=40), hopper) is not None
    assert prefill_tile(product(**few16, rows=120), hopper) is not None
    assert prefill_tile(product(experts=8, rows=8 * 16), hopper) is not None
    for refused in (
        {"experts": 1, "rows": 39},
        {**few16, "rows": 119},
        {"experts": 8, "n_out": 768, "rows": 8 * 39},
        {"rows": 512},
        {"rows": 256 * 15},
        {"rows": 256 * 39, "promoted": False},
        {**plain16, "rows": 256 * 47},
        {"k_in": 7176},
        {"x_bits": 16, "decoded": True},
        {"weight_bits": 4.25, "decoded": True},
        {"experts": 1 << 20, "rows": 1 << 26},
    ):
        assert prefill_tile(product(**refused), hopper) is None, refused
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        assert prefill_tile(product(), machine_of(capability, 132)) is None


def test_unaligned_rows_refused() -> None:
    packed, _ = five_experts("fp8_channel", 1, 32, 40, bias=False)
    x, x_scale = rows_of("fp8_token", 40, 20)
    offsets = torch.tensor([0, 20, 20, 20, 20, 20])
    out = torch.empty(20, 32)
    with raises_with(InputError, "16"):
        prefill_gemm(x, packed, offsets, ops.tile_list(offsets, 20, TILE), out, x_scale=x_scale)


def test_workspace_counts_gathered_rows() -> None:
    sizes = {"intermediate_size": 128, "num_experts": 5, "routing": RoutingSpec(top_k=2)}
    for weights, act, bytes_a_row in (("bf16", "bf16", 512), ("fp8_block", "fp8_group128", 256 + 8)):
        spec = MoESpec(hidden_size=256, weight_format=weights, **sizes)
        device = DeviceFacts(kind="cuda", capability=(9, 0))
        problem = Problem(spec=spec, device=device, limits=Limits(max_tokens=600), activation_format=act)
        kernel: Any = TritonBf16() if weights.endswith("16") else TritonFp8()

        def held(asked: Problem, kernel: Any = kernel) -> tuple[int, bool]:
            """Return the bytes of the first product's rows, and whether those of large batches are counted."""
            regions = kernel.regions(asked.routed)
            return sum(size for name, size in regions.items() if name in ("x/codes", "x/scales")), "scales" in regions

        assert held(problem) == (1200 * bytes_a_row, True)
        few = replace(problem, limits=Limits(max_tokens=9))
        other = replace(problem, device=replace(device, capability=(10, 0)))
        odd = replace(problem, spec=replace(spec, intermediate_size=90))
        # Otherwise rows are read where they are: tokens in the order they came in, as codes where they are quantised.
        tokens_alone = 0 if act == "bf16" else bytes_a_row
        wanted = [(tokens * tokens_alone, False) for tokens in (9, 600, 600)]
        assert [held(asked) for asked in (few, other, odd)] == wanted
