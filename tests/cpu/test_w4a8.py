"""Four-bit weights with E4M3 activations: packing, and the device code in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from collegium.encoding import encode_experts
from collegium.errors import InputError
from collegium.experts import KERNELS
from collegium.experts.reference import Reference
from collegium.experts.triton import grouped as ops
from collegium.experts.triton.packing import pack_w4a8
from collegium.experts.triton.table import TritonW4A8
from collegium.experts.triton.tiles.problem import TileChoice
from collegium.formats import Int4Group, MxFp4, NvFp4
from collegium.formats.unquantised import Fp32
from collegium.ops.operand import operand
from collegium.ops.quantize import PADDED, REORDERED, quantize_rows, reorder_codes
from collegium.parallel.local import Local
from collegium.planning import plan
from collegium.problem import DeviceFacts, Limits, Problem
from collegium.testing.compare import heavy_tailed, random_experts, relative_error, uneven_ids
from collegium.types import ActivationSpec, ContiguousBatch, ExpertWeights, MoESpec, RemoteOutput, Routing, RoutingSpec
from grids import mainly
from raising import assert_values, raises_with

if TYPE_CHECKING:
    from torch import Tensor

if torch.cuda.is_available():
    pytest.skip("tests/gpu makes these comparisons on the device", allow_module_level=True)
pytest.importorskip("triton")

KERNEL = TritonW4A8()
TILE = TileChoice(block_n=64, block_t=16, warps=4, stages=2)
WEIGHTS = ("mxfp4", "nvfp4", "int4_group", "int4_group:64", "int4_group:32")  # INT4: with how many columns a group


def question(weights: str, act: str, **changes: Any) -> Problem:
    sizes = {"hidden_size": 176, "intermediate_size": 90, "num_experts": 5} | changes
    activation = sizes.pop("activation", ActivationSpec())
    name = weights.partition(":")[0]
    spec = MoESpec(**sizes, routing=RoutingSpec(top_k=2), activation=activation, weight_format=name, expert_bias=True)
    return Problem(spec=spec, device=DeviceFacts(kind="cuda", capability=(9, 0)), activation_format=act)


def encoded(name: str, weights: ExpertWeights[Any]) -> ExpertWeights[Any]:
    name, _, size = name.partition(":")
    if name != "int4_group":
        return encode_experts(weights, name)
    # Small groups with the scales that checkpoints have, and with wider ones.
    dtype = torch.float32 if size == "64" else torch.bfloat16
    both = (Int4Group.encode(part.decode(), group_size=int(size or 128)) for part in (weights.gate_up, weights.down))
    gate_up, down = (replace(part, scales=part.scales.to(dtype)) for part in both)
    return replace(weights, gate_up=gate_up, down=down)


def build(problem: Problem, weights: str = "") -> tuple[Any, ExpertWeights[Any]]:
    spec = problem.spec
    plain = random_experts(
        spec.num_experts, spec.gate_up_parts, spec.intermediate_size, spec.hidden_size, seed=1, bias=True
    )
    made = encoded(weights or spec.weight_format, plain)
    return replace(KERNEL.pack(made, problem.routed), tiles=(TILE, TILE)), made


def batch_of(tokens: int, problem: Problem) -> ContiguousBatch:
    spec = problem.spec
    x = heavy_tailed(tokens, spec.hidden_size, seed=3).bfloat16()
    ids = uneven_ids(tokens, 2, spec.num_experts, seed=2)
    ids[0, 0] = -1
    return Local(num_experts=spec.num_experts).dispatch(x, Routing(topk_ids=ids, topk_weights=torch.rand(tokens, 2)))[0]


def reference(batch: ContiguousBatch, made: ExpertWeights[Any], problem: Problem, act: str) -> Tensor:
    return Reference().pack(made, replace(problem, activation_format=act).routed).run(batch)


def multiplied_by_one(payload: Any, *, scaled: bool = False) -> Tensor:
    """Return ``[N, K]``: what the kernel reads of weights ``[1, 1, N, K]``, by rows with a single one."""
    columns = payload.shape[3]
    matrix = pack_w4a8(payload, None, scaled=scaled)
    x, scale = (
        reorder_codes(torch.eye(columns).to(torch.float8_e4m3fn), matrix.layout.row_order),
        torch.ones(columns, 1),
    )
    found = torch.empty(columns, payload.shape[2])
    offsets = torch.tensor([0, columns])
    tile = replace(TILE, block_t=128)
    ops.grouped_gemm(x, matrix, offsets, ops.tile_list(offsets, columns, tile), found, x_scale=scale)
    return found.T


@pytest.mark.each_choice("weights", "act")
@pytest.mark.parametrize(("weights", "act"), [(w, a) for w in WEIGHTS for a in ("fp8_token", "fp8_group128")])
def test_experts_against_the_reference(weights: str, act: str) -> None:
    problem = question(weights, act)
    packed, made = build(problem, weights)
    batch = batch_of(23, problem)
    stop = int(batch.expert_offsets[-1])
    found = packed.run(batch)[:stop]
    assert relative_error(found, reference(batch, made, problem, "fp32")[:stop]) < 0.06
    # The interpreter rounds the rows between the products toward zero, which moves some of their codes.
    assert relative_error(found, reference(batch, made, problem, act)[:stop]) < 0.012
    values = made.gate_up.decode().flip(1)
    swapped = replace(
        made, gate_up=encoded(weights, replace(made, gate_up=Fp32(values=values, shape=values.shape))).gate_up
    )
    assert relative_error(found, reference(batch, swapped, problem, "fp32")[:stop]) > 0.3


@pytest.mark.parametrize(
    ("weights", "act"),
    [
        ("mxfp4", "fp8_token"),
        ("nvfp4", "fp8_group128"),
        ("int4_group:32", "fp8_group128_pow2"),
        ("fp8_block", "fp8_group128"),
        ("fp8_channel", "fp8_token"),
    ],
)
def test_received_codes_equal_local_tokens(weights: str, act: str) -> None:
    problem = question(weights, act)
    kernel = next(k for k in KERNELS if k.refuse(problem.routed) is None)
    spec = problem.spec
    plain = random_experts(
        spec.num_experts, spec.gate_up_parts, spec.intermediate_size, spec.hidden_size, seed=1, bias=True
    )
    packed = kernel.pack(encoded(weights, plain), problem.routed)
    batch = batch_of(23, problem)
    stop, sent = int(batch.expert_offsets[-1]), quantize_rows(batch.x, act)
    arrived = replace(batch, x=sent.codes, scale=sent.scales, dtype=batch.x.dtype)
    wanted = packed.run(batch)
    assert wanted.dtype == torch.bfloat16
    assert torch.equal(packed.run(arrived)[:stop], wanted[:stop])
    # Tiles are chosen for the rows that are likely, and no bit depends on them.
    assert torch.equal(packed.run(replace(arrived, rows=3))[:stop], wanted[:stop])
    other = replace(arrived, x=sent.codes.view(torch.uint8).flip(1).view(torch.float8_e4m3fn))
    assert relative_error(packed.run(other)[:stop], wanted[:stop]) > 0.3
    with raises_with(InputError, "float8_e4m3fn", "scales and weights", "E4M3"):
        packed.run(replace(arrived, input_weights=torch.ones(batch.source.numel())))
    for name in ("reference", "cpu_grouped", "triton_bf16"):
        own = next(k for k in KERNELS if k.name == name)
        asked = replace(problem, spec=replace(spec, weight_format="bf16"), activation_format="bf16").routed
        with raises_with(InputError, "float8_e4m3fn"):
            own.pack(encode_experts(plain, "bf16"), asked).run(arrived)


@pytest.mark.parametrize("weights", mainly(WEIGHTS, ("mxfp4", "nvfp4", "int4_group:32")))
def test_rows_do_not_depend_on_tiles(weights: str) -> None:
    problem = question(weights, "fp8_group128", hidden_size=368)
    packed, _ = build(problem, weights)
    batch = batch_of(40, problem)
    whole = packed.run(batch)
    stop = int(batch.expert_offsets[-1])
    for warps, height in ((4, 32), (8, 32), (4, 64)):
        wide = TileChoice(block_n=128, block_t=height, warps=warps, stages=3, group_t=2, narrow=height == 64)
        assert torch.equal(replace(packed, tiles=(wide, wide)).run(batch)[:stop], whole[:stop])
    deep = replace(TILE, depth=2), replace(TILE, block_n=128, block_t=64, narrow=True, depth=2, registers=168)
    assert packed.gate_up.layout.k_blocks == 3
    for tile in deep:
        assert torch.equal(replace(packed, tiles=(tile, TILE)).run(batch)[:stop], whole[:stop])
    row = stop - 1
    expert = int(torch.searchsorted(batch.expert_offsets, torch.tensor(row), right=True)) - 1
    one = ContiguousBatch(
        x=batch.x, source=batch.source[row : row + 1], expert_offsets=(torch.arange(6) > expert).long()
    )
    assert torch.equal(packed.run(one)[0], whole[row])


@pytest.mark.parametrize("kind", ["swiglu_oai", "relu2"])
def test_activations_with_limit_and_without_gate(kind: Any) -> None:
    activation = ActivationSpec(kind=kind, limit=0.8 if kind == "swiglu_oai" else None)
    problem = question("mxfp4", "fp8_token", activation=activation, intermediate_size=33)
    packed, made = build(problem)
    batch = batch_of(6, problem)
    stop = int(batch.expert_offsets[-1])
    found = packed.run(batch)[:stop]
    assert relative_error(found, reference(batch, made, problem, "fp8_token")[:stop]) < 0.015


def all_bytes(rows: int) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).repeat(1, 1, rows, 1)


def test_mxfp4_is_exact_in_range() -> None:
    exponents = (torch.arange(12)[:, None] + torch.arange(16)) % 12 + 100
    payload = MxFp4(shape=(1, 1, 12, 512), codes=all_bytes(12), scales=exponents.to(torch.uint8)[None, None])
    for scaled in (False, True):
        assert torch.equal(multiplied_by_one(payload, scaled=scaled), payload.decode()[0, 0])
    report = pack_w4a8(payload, None).report
    assert (report.groups, report.beyond, report.changed) == (192, 0, 0)
    assert "exact" in str(report)


def test_nvfp4_is_exact_in_range() -> None:
    scales = torch.arange(96).view(3, 32) + 22
    payload = NvFp4(
        shape=(1, 1, 3, 512),
        codes=all_bytes(3),
        scales=scales.to(torch.uint8).view(torch.float8_e4m3fn)[None, None],
        global_scale=torch.tensor([[0.25]]),
    )
    assert torch.equal(multiplied_by_one(payload), payload.decode()[0, 0])
    assert pack_w4a8(payload, None).report.beyond == 0


def test_subnormal_nvfp4_scales_are_exact() -> None:
    scales = torch.arange(1, 33)[None].to(torch.uint8)
    payload = NvFp4(
        shape=(1, 1, 1, 512),
        codes=all_bytes(1),
        scales=scales.view(torch.float8_e4m3fn)[None, None],
        global_scale=torch.tensor([[2.0]]),
        global_divides=True,
    )
    assert torch.equal(multiplied_by_one(payload), payload.decode()[0, 0])


@pytest.mark.each_choice
@pytest.mark.parametrize("group", [32, 64, 96, 128, 256, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_int4_byte_is_exact(group: int, dtype: torch.dtype) -> None:
    scales = (torch.rand(1, 1, 2, -(-512 // group)) + 0.5).to(dtype)
    payload = Int4Group(shape=(1, 1, 2, 512), codes=all_bytes(2), scales=scales, group_size=group)
    assert torch.equal(multiplied_by_one(payload), payload.decode()[0, 0])


def test_groups_below_their_rows_range() -> None:
    exponents = torch.tensor([[120] * 15 + [120 - 13], [120] * 15 + [60], [90] * 16])
    payload = MxFp4(shape=(1, 1, 3, 512), codes=all_bytes(3), scales=exponents.to(torch.uint8)[None, None])
    found, exact = multiplied_by_one(payload), payload.decode()[0, 0]
    assert torch.equal(found[:, :480], exact[:, :480])
    assert torch.equal(found[2], exact[2])
    grid = 2.0 ** (120 - 11 - 127)  # codes of the smallest group in range are multiples of half of it
    assert float((found[:, 480:] - exact[:, 480:]).abs().max()) <= grid / 4
    assert not bool(found[1, 480:].any())
    report = pack_w4a8(payload, None).report
    assert (report.groups, report.beyond) == (48, 2)
    assert "2 of 48 groups" in str(report)


def test_groups_of_zeros_set_no_base() -> None:
    exponents = torch.tensor([[254] + [100] * 15])
    codes = all_bytes(1)
    codes[..., :16] = 0
    payload = MxFp4(shape=(1, 1, 1, 512), codes=codes, scales=exponents.to(torch.uint8)[None, None])
    assert torch.equal(multiplied_by_one(payload), payload.decode()[0, 0])


def test_odd_width_rows_preserve_columns() -> None:
    codes, scale = operand(heavy_tailed(3, 200, seed=1), "fp8_token", order=REORDERED)
    assert scale is not None
    plain, _ = operand(heavy_tailed(3, 200, seed=1), "fp8_token")
    padded, _ = operand(heavy_tailed(3, 200, seed=1), "fp8_token", order=PADDED)
    assert torch.equal(padded[:, :200].view(torch.uint8), plain.view(torch.uint8))
    assert not bool(padded[:, 200:].view(torch.uint8).any())
    assert codes.shape == (3, 256)
    back = codes.view(torch.uint8).view(3, 2, 2, 4, 4, 4).permute(0, 1, 4, 3, 2, 5).reshape(3, 256)
    assert torch.equal(back[:, :200], plain.view(torch.uint8))
    assert not bool(back[:, 200:].any())


def test_refusals_name_what_was_asked() -> None:
    assert KERNEL.refuse(question("mxfp4", "fp8_token").routed) is None
    other_weights = KERNEL.refuse(question("fp8_block", "fp8_token").routed)
    assert_values(str(other_weights), "fp8_block", "mxfp4, nvfp4 or int4_group")
    assert_values(str(KERNEL.refuse(question("mxfp4", "bf16").routed)), "bf16", "mxfp4", "fp8_token")
    ampere = replace(question("mxfp4", "fp8_token"), device=DeviceFacts(kind="cuda", capability=(8, 0)))
    assert_values(str(KERNEL.refuse(ampere.routed)), "fp8_token", "sm_80", "sm_89")
    assert_values(str(KERNEL.refuse(replace(ampere, device=DeviceFacts(kind="cpu")).routed)), "cpu", "CUDA")
    small = Int4Group.encode(heavy_tailed(1, 1, 64, 256, seed=5), group_size=16)
    with raises_with(InputError, "16"):
        pack_w4a8(small, None)


def test_plan_uses_w4a8_only_with_e4m3() -> None:
    asked = question("mxfp4", "fp8_token")
    assert plan(asked).kernel == "triton_w4a8"
    assert plan(replace(asked, activation_format=None)).kernel == "triton_w4a16"


def test_workspace_counts_rows_and_codes() -> None:
    problem = replace(question("mxfp4", "fp8_token"), limits=Limits(max_tokens=64))
    rows = 64 * 2
    assert sum(KERNEL.regions(problem.routed).values()) > rows * (90 * 2 + 176 * 2 + 128) + 64 * 256


@pytest.mark.parametrize("rows", [torch.empty(10, 176), torch.empty(10, 160, dtype=torch.bfloat16)])
def test_stored_rows_need_one_memory_kind(rows: Tensor) -> None:
    problem = question("mxfp4", "fp8_token")
    back = RemoteOutput(rows=rows, offsets=torch.zeros(10, dtype=torch.int64))
    with raises_with(InputError, "remote", "176 torch.bfloat16"):
        build(problem)[0].run(replace(batch_of(5, problem), remote=back))
