"""The kernels around the grouped products, in Triton's interpreter, bit for bit against their torch references."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from by_kernel import by_kernel
from collegium.errors import InputError
from collegium.ops import permute as permutation, quantize as quantization
from collegium.ops.operand import operand, operand_regions, transpose_scales
from collegium.ops.permute import Permutation, permute
from collegium.ops.quantize import (
    AS_IS,
    PADDED,
    REORDERED,
    ActivationFormat,
    QuantizedRows,
    formats_within,
    quantize_rows,
)
from collegium.ops.route import route
from collegium.ops.route_device import route_on_device
from collegium.ops.rows import SourceRows
from collegium.ops.weighted_sum import weighted_sum
from collegium.parallel.local import Local
from collegium.testing.compare import heavy_tailed
from collegium.types import Routing, RoutingSpec
from memories import Poisoned
from raising import raises_with

if torch.cuda.is_available():
    pytest.skip("tests/gpu makes these comparisons on the device", allow_module_level=True)
pytest.importorskip("triton")

# The interpreter computes with numpy, which warns of the overflows these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

V3 = RoutingSpec(
    top_k=4,
    score="sigmoid",
    renormalize_eps=1e-20,
    groups=4,
    topk_groups=2,
    group_score="top2_sum",
    scale=2.5,
    correction_bias=True,
)
SPECS = {
    "softmax": RoutingSpec(top_k=2),
    "not_renormalised": RoutingSpec(top_k=8, renormalize=False),
    "topk_softmax": RoutingSpec(top_k=4, score="topk_softmax", renormalize=False),
    "topk_softmax_renormalised": RoutingSpec(top_k=4, score="topk_softmax"),
    "max_groups": RoutingSpec(top_k=6, renormalize=False, groups=4, topk_groups=2, scale=16.0),
    "top2_groups": V3,
    "top2_without_bias": replace(V3, correction_bias=False),
    "max_with_bias": replace(V3, group_score="max"),
    "sqrt_softplus": RoutingSpec(top_k=6, score="sqrt_softplus", renormalize_eps=1e-20, correction_bias=True),
    "biased_logits": RoutingSpec(top_k=3, score="topk_softmax", correction_bias=True),
    "single_expert_groups": RoutingSpec(top_k=3, groups=20, topk_groups=5, group_score="top2_sum"),
    "five_groups": RoutingSpec(top_k=3, groups=5, topk_groups=2, group_score="top2_sum", score="topk_softmax"),
}


permute_on_device = by_kernel(permute)
weighted_sum_on_device = by_kernel(weighted_sum)
quantize_on_device = by_kernel(quantize_rows)


def same_bits(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    if left.dtype == torch.float32:
        # One NaN is as good as another; zeros keep their sign.
        left, right = (torch.where(t.isnan(), 1.5, t).view(torch.int32) for t in (left, right))
    elif left.dtype == torch.float8_e4m3fn:
        left, right = left.view(torch.uint8), right.view(torch.uint8)
    return left.dtype == right.dtype and torch.equal(left, right)


def same_routing(left: Routing, right: Routing) -> bool:
    return torch.equal(left.topk_ids, right.topk_ids) and same_bits(left.topk_weights, right.topk_weights)


def same_order(left: Permutation, right: Permutation) -> None:
    for name in ("source", "expert_offsets", "slots", "weights_by_row"):
        assert same_bits(getattr(left, name), getattr(right, name)), name
    for one, other in zip(left.tiles, right.tiles, strict=True):
        assert one.block_t == other.block_t
        assert same_bits(one.expert, other.expert)
        assert same_bits(one.row, other.row)
        assert same_bits(one.used, other.used)
        assert one.used.tolist() == [int((one.expert >= 0).sum()), 0, 0]


# From 257 assignments on two kernels do it.
@pytest.mark.parametrize(
    ("kind", "tokens", "top_k", "experts"),
    [
        ("random", 0, 3, 4),
        ("random", 1, 1, 1),
        ("random", 1, 2, 1024),
        ("random", 23, 6, 17),
        ("hot", 23, 6, 17),
        ("dropped", 23, 6, 17),
        ("random", 20, 8, 512),
        ("random", 32, 8, 60),
        ("random", 257, 1, 60),
        ("random", 130, 8, 17),
        ("hot", 300, 4, 60),
        ("dropped", 130, 8, 17),
        *[("random", count, 1, 31) for count in (1023, 1024, 1025, 4097)],
        ("random", 90, 8, 1024),
    ],
)
def test_order_and_tiles(kind: str, tokens: int, top_k: int, experts: int) -> None:
    ids = torch.randint(-2, experts + 2, (tokens, top_k))
    if kind != "random":
        ids.fill_(-1 if kind == "dropped" else experts - 1)
    weights = torch.rand(tokens, top_k)
    for block_t in ((16, 64), (160,)):
        asked: dict[str, Any] = {"input_weights": weights, "block_t": block_t}
        wanted = permute(ids, experts, **asked)
        same_order(permute_on_device(ids.int(), experts, **asked, memory=Poisoned()), wanted)


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"), [(0, 3, 4), (1, 1, 1), (1, 8, 5), (23, 6, 17), (257, 1, 3), (43, 24, 60)]
)
def test_a_routing_may_hold_anything(tokens: int, top_k: int, experts: int) -> None:
    ids = torch.randint(-2, experts + 2, (tokens, top_k))
    ids[::5, -1] = 2**32 + 1
    weights = torch.randn(tokens, top_k)
    weights[::3, 0], weights[1::3, -1], weights[2::7, top_k // 2] = torch.inf, torch.nan, -torch.inf
    wide_ids, wide_weights = torch.full((tokens, top_k + 5), 0), torch.full((tokens, top_k + 2), torch.nan)
    wide_ids[:, 2 : top_k + 2], wide_weights[:, 1 : top_k + 1] = ids, weights
    for given, factors in (
        (ids, weights),
        (wide_ids[:, 2 : top_k + 2], wide_weights[:, 1 : top_k + 1]),
        (ids.repeat_interleave(2, dim=1)[:, ::2], weights.mT.contiguous().mT),
        (ids.clamp(max=experts).int(), weights.double() * 1e39),
        (ids.clamp(0, 120).to(torch.uint8), weights.bfloat16()),
        (ids.masked_fill(ids == -1, 255).clamp(0, 255).to(torch.uint8), weights.bfloat16()),
    ):
        asked: dict[str, Any] = {"input_weights": factors, "block_t": (16, 64)}
        wanted = permute(given, experts, **asked)
        same_order(permute_on_device(given, experts, **asked, memory=Poisoned()), wanted)
        long = given.long()
        gone, kept = long == -1, (long >= 0) & (long < experts)
        assert torch.equal(wanted.slots == -1, gone)
        assert torch.equal(wanted.slots == -2, ~gone & ~kept)
        rows = torch.randn(tokens * top_k, 40) * 1e-3
        rows[int(wanted.expert_offsets[-1]) :] = torch.nan
        summed = weighted_sum(rows, wanted.slots, factors, torch.float32)
        assert same_bits(weighted_sum_on_device(rows, wanted.slots, factors, torch.float32), summed)
        lost = (~gone & (~kept | factors.isnan())).any(dim=1)
        assert summed[lost].isnan().all()
        assert summed[~lost & ~(kept & factors.float().isinf()).any(dim=1)].isfinite().all()


# A program takes two or three blocks of 128 here, which it does by itself from 16385 assignments on.
@pytest.mark.parametrize(("kind", "count"), [("random", 257), ("random", 1025), ("hot", 1100), ("dropped", 1100)])
def test_a_program_takes_several_blocks(kind: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permutation, "_PROGRAMS", 3 if count > 500 else 1)
    ids, weights = torch.randint(-2, 33, (count, 1)), torch.randn(count, 1)
    weights[::3] = torch.nan
    if kind != "random":
        ids.fill_(-1 if kind == "dropped" else 30)
    asked: dict[str, Any] = {"input_weights": weights, "block_t": (16, 64)}
    same_order(permute_on_device(ids, 31, **asked, memory=Poisoned()), permute(ids, 31, **asked))


@pytest.mark.parametrize("on_input", [False, True])
def test_dispatch_and_combine_propagate_nan(on_input: bool) -> None:
    weights = torch.tensor([[1.0, torch.nan, 0.5], [1.0, 0.25, 2.0], [3.0, torch.nan, 1.0]])
    given = Routing(topk_ids=torch.tensor([[2, 0, 2], [9, -5, 1], [1, -1, 3]]), topk_weights=weights)
    x, dispatcher = torch.ones(3, 8), Local(num_experts=4, weight_on_input=on_input)
    batch, handle = dispatcher.dispatch(x, given)
    assert handle.slots.tolist() == [[3, 0, 4], [-2, -2, 1], [2, -1, 5]]
    assert batch.expert_offsets.tolist() == [0, 1, 3, 5, 6]
    rows = torch.full((9, 8), torch.nan)
    rows[:6] = 1.0 if batch.input_weights is None else batch.input_weights[:6, None]
    assert dispatcher.combine(rows, handle)[:, 0].nan_to_num(-1.0).tolist() == [-1.0, -1.0, 4.0]


def test_tiles_cover_every_row_once() -> None:
    order = permute(torch.randint(-1, 9, (50, 4)), 9, block_t=(16,))
    seen = torch.zeros(200, dtype=torch.int64)
    for expert, row in zip(order.tiles[0].expert.tolist(), order.tiles[0].row.tolist(), strict=True):
        if expert >= 0:
            seen[row : min(row + 16, int(order.expert_offsets[expert + 1]))] += 1
            assert row >= order.expert_offsets[expert]
    assert (seen[: int(order.expert_offsets[-1])] == 1).all()
    assert (seen[int(order.expert_offsets[-1]) :] == 0).all()


def test_int64_ids_do_not_wrap() -> None:
    ids = torch.tensor([[2**32 + 1, 1], [-(2**32), 0]])
    found = permute_on_device(ids, 4)
    assert found.slots.tolist() == [[-2, 1], [-2, 0]]


@pytest.mark.parametrize("name", ["fp8_group128", "fp8_group128_pow2", "fp8_token", "mxfp8", "nvfp4", "fp32"])
@pytest.mark.parametrize("columns", [1, 33, 300])
def test_codes_and_scales(name: str, columns: int) -> None:
    x = torch.randn(11, columns) * torch.randn(1, columns).exp()
    x[3], x[7] = 0, -0.0
    x[4] *= 1e-36
    x[8] *= 1e30
    x[5, 0] = torch.nan
    x[6, columns - 1] = torch.inf
    x[9] = torch.where(torch.arange(columns) % 2 == 0, 448.0, 1.75)
    x[10] = 1.75 * 2.0**-20
    source = torch.randint(0, 11, (30,))
    for at, scale in ((None, None), (source, torch.rand(30)), (None, torch.rand(11))):
        wanted = quantize_rows(x, name, source=at, weights=scale)
        found = quantize_on_device(x, name, source=at, weights=scale, memory=Poisoned())
        for part in ("codes", "scales", "global_scale"):
            assert same_bits(getattr(found, part), getattr(wanted, part)), part


@pytest.mark.parametrize("reach", [0.3, 40.0])
@pytest.mark.parametrize("name", ["fp8_static", "nvfp4_static"])
def test_codes_of_a_calibrated_scale(name: str, reach: float) -> None:
    form, _ = formats_within(name, (reach, 1.0))
    x = heavy_tailed(11, 176, seed=3) * torch.logspace(-6, 4, 11)[:, None]
    x[3], x[4, 70], x[5, 0] = 0, torch.nan, torch.inf
    source = torch.randint(0, 11, (30,))
    for dtype in (torch.float32, torch.bfloat16):
        # The interpreter rounds weighted rows to bfloat16 otherwise than a GPU.
        for at, scale in ((None, None), (source, torch.rand(30) if dtype == torch.float32 else None)):
            wanted = quantize_rows(x.to(dtype), form, source=at, weights=scale)
            found = quantize_on_device(x.to(dtype), form, source=at, weights=scale, memory=Poisoned())
            for part in ("codes", "scales", "global_scale"):
                assert same_bits(getattr(found, part), getattr(wanted, part)), part
    if form.e4m3:
        moved, scales = operand(x, form, order=REORDERED)
        assert torch.equal(quantize_on_device(x, form, order=REORDERED).codes.float(), moved.float())
        assert scales is not None
        assert scales[:3].unique().tolist() == [form.scale]


def test_operand_weighted_rows_keep_dtype() -> None:
    x, source, weights = torch.randn(5, 7).bfloat16(), torch.tensor([4, 4, 0]), torch.tensor([0.5, 3.0, 0.7])
    rows, scales = operand(x, None, source=source, weights=weights)
    assert scales is None
    assert torch.equal(rows, (x[source].float() * weights[:, None]).bfloat16())
    assert operand(x, None)[0] is x


@pytest.mark.parametrize(("tokens", "top_k", "width"), [(1, 1, 7), (13, 5, 90), (70, 3, 300)])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_weighted_sums(tokens: int, top_k: int, width: int, shared: bool, weighted: bool) -> None:
    rows = torch.randn(tokens * top_k, width) * torch.randn(1, width).exp()
    slots = torch.randperm(tokens * top_k).view(tokens, top_k)
    dropped = torch.rand(tokens, top_k) < 0.3
    rows[slots[dropped]] = torch.nan
    weights = torch.rand(tokens, top_k).masked_fill(dropped, torch.nan) if weighted else None
    more = torch.randn(tokens, width) if shared else None
    slots = slots.masked_fill(dropped, -1)
    wanted = weighted_sum(rows, slots, weights, torch.float32, shared=more)
    assert not wanted.isnan().any()
    assert same_bits(weighted_sum_on_device(rows, slots, weights, torch.float32, shared=more), wanted)
    slots[::2, top_k // 2] = len(rows)
    slots[0, 0] = -2
    wanted = weighted_sum(rows, slots, weights, torch.float32, shared=more)
    assert wanted.isnan().all(dim=1).tolist() == [t % 2 == 0 for t in range(tokens)]
    assert same_bits(weighted_sum_on_device(rows, slots, weights, torch.float32, shared=more), wanted)


@pytest.mark.parametrize("name", SPECS)
def test_router_against_torch(name: str) -> None:
    spec = SPECS[name]
    logits = torch.randn(13, 20) * 3
    logits[3, 4], logits[4, 5], logits[5, 2] = torch.nan, torch.inf, -torch.inf
    logits[6], logits[8], logits[9], logits[11], logits[12] = 0, torch.inf, -torch.inf, -1e5, 3e38
    logits[7], logits[10] = -0.0, logits[10].round()
    logits[7, 3] = 0.0
    bias = torch.randn(20)
    tried = [None]
    if spec.correction_bias:
        tried = [bias, bias * 0, *(bias.index_fill(0, torch.tensor([2]), odd) for odd in (torch.inf, torch.nan))]
    for given in tried:
        wanted = route(logits, spec, bias=given)
        assert same_routing(route_on_device(logits, spec, bias=given, memory=Poisoned()), wanted)
        narrow = replace(spec, id_dtype="int32")
        short, found = route(logits, narrow, bias=given), route_on_device(logits, narrow, bias=given, memory=Poisoned())
        assert short.topk_ids.dtype == torch.int32
        assert torch.equal(short.topk_ids.long(), wanted.topk_ids)
        assert same_routing(found, short)
        lost = wanted.topk_weights.isnan().any(dim=1)
        assert lost.all() if given is not None and given.isnan().any() else 1 <= int(lost.sum()) < 8
        assert lost[3]


@pytest.mark.parametrize("jitter", [1e-4, 0.05, 0.5])
def test_router_mixes_two_experts(jitter: float) -> None:
    spec = RoutingSpec(top_k=2, score="sparsemixer", renormalize=False, jitter=jitter, scale=1.5)
    logits = torch.randn(40, 20) * 3
    logits[3, 4], logits[4, 5], logits[5, 2] = torch.nan, torch.inf, -torch.inf
    logits[6], logits[8], logits[9], logits[10, :18] = 0, torch.inf, -torch.inf, -torch.inf
    logits[11:20] = logits[11:20].round()
    wanted = route(logits, spec)
    assert same_routing(route_on_device(logits, spec, memory=Poisoned()), wanted)
    # Neither all weights alike nor each token alone with one expert.
    assert jitter < 0.01 or wanted.topk_weights[20:].unique().numel() > 5


@pytest.mark.parametrize("spec", ["softmax", "topk_softmax_renormalised", "top2_groups", "sqrt_softplus"])
@pytest.mark.parametrize("floor", [0.0, 3.0])
def test_router_floors_and_scales(spec: str, floor: float) -> None:
    """A floor of the sum, and a factor for each expert, which may be any number and every second one in memory."""
    rule = replace(SPECS[spec], renormalize_floor=floor, expert_scale=True)
    logits = torch.randn(30, 20) * 2 - 3
    logits[3, 4], logits[5] = torch.nan, -80.0
    factors = (torch.randn(40).exp())[::2]
    factors[2], factors[7] = -0.5, torch.inf
    given = {"bias": torch.randn(20) if rule.correction_bias else None}
    for scale in (factors, factors.bfloat16()):
        wanted = route(logits, rule, **given, expert_scale=scale)
        found = route_on_device(logits, rule, **given, expert_scale=scale, memory=Poisoned())
        assert same_routing(found, wanted)
    plain = route_on_device(logits, replace(rule, expert_scale=False), **given)
    assert same_routing(plain, route(logits, replace(rule, expert_scale=False), **given))
    other = route(logits, replace(rule, expert_scale=False, renormalize_floor=0.0), **given)
    lowered = plain.topk_weights[6:] < other.topk_weights[6:]
    assert bool(lowered.any()) == bool(floor), "no sum is below the floor"


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "topk_softmax", "sqrt_softplus"])
def test_router_looks_experts_up(score: Any) -> None:
    spec = RoutingSpec(top_k=3, score=score, hash_routing=True)
    table = torch.stack([torch.randperm(20)[:3] for _ in range(50)])
    table[4, 1], table[5, 2], table[6, 0], table[7] = table[4, 0], 20, -3, -1
    tokens = torch.cat((torch.tensor([4, 5, 6, 50, -1, 7]), torch.randint(8, 50, (3,))))
    given = {"token_ids": tokens.int(), "hash_table": table}
    logits = torch.randn(9, 20)
    logits[7, 0] = torch.nan
    wanted = route(logits, spec, **given)
    assert same_routing(route_on_device(logits, spec, **given), wanted)
    assert wanted.topk_weights.isnan().any(dim=1).tolist() == [t in (1, 2, 3, 4, 7) for t in range(9)]


def test_results_use_the_passed_memory() -> None:
    logits, weights, x, memory = torch.randn(300, 9), torch.rand(300, 4), torch.randn(300, 90), Poisoned()
    routing = route_on_device(logits, RoutingSpec(top_k=4), memory=memory)
    order = permute_on_device(routing.topk_ids, 9, input_weights=weights, block_t=(16,), memory=memory)
    rows = quantize_on_device(x, "nvfp4", memory=memory)
    out = weighted_sum_on_device(torch.ones(1200, 90), order.slots, None, torch.float32, memory=memory)
    tiles = order.tiles[0]
    places = {
        "topk_ids": (routing.topk_ids,),
        "topk_weights": (routing.topk_weights,),
        "order": (order.source, order.slots, order.expert_offsets, tiles.row),
        "owners": (tiles.expert, tiles.used),
        "weights_by_row": (order.weights_by_row,),
        "counts": (),
        "codes": (rows.codes,),
        "scales": (rows.scales,),
        "global_scale": (rows.global_scale,),
        "sum": (out,),
    }
    assert set(memory.taken) == set(places)
    for name, found in places.items():
        for each in found:
            assert each is not None
            assert each.untyped_storage().data_ptr() == memory.taken[name].untyped_storage().data_ptr(), name
    assert torch.equal(out[:, 0], (order.slots >= 0).sum(1).float())


def test_small_kernels_refuse_inputs() -> None:
    with pytest.raises(InputError, match="block_t"):
        permute(torch.zeros(3, 2, dtype=torch.int64), 4, block_t=(16, 32, 64))
    rows, slots = torch.ones(4, 5), torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises(InputError, match=r"shared: .*\(2, 5\)"):
        weighted_sum(rows, slots, None, torch.float32, shared=torch.ones(2, 4))
    with pytest.raises(InputError, match="out: "):
        weighted_sum(rows, slots, None, torch.float32, out=torch.ones(2, 5, dtype=torch.bfloat16))
    with raises_with(InputError, "nvfp4"):
        quantize_rows(torch.ones(4), "nvfp4")


def test_activation_format_without_kernel_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Halves(ActivationFormat):
        def quantize(self, x: torch.Tensor) -> QuantizedRows:
            return QuantizedRows(codes=x / 2, shape=(x.shape[0], x.shape[1]), scales=torch.full((len(x), 1), 2.0))

    known = quantization.ACTIVATION_FORMATS
    monkeypatch.setattr(quantization, "ACTIVATION_FORMATS", (*known, Halves(name="halves", bits=8)))
    x, form = torch.ones(3, 4), quantization.activation_format("halves")
    made = quantize_rows(x, "halves")
    assert torch.equal(made.codes, x / 2)
    for call in (
        lambda: quantize_on_device(x, "halves"),
        lambda: operand_regions(3, 4, "halves", dtype=torch.float32),
        lambda: form.write(SourceRows(x, None, None, AS_IS, False), made),
    ):
        with raises_with(InputError, "halves", "fp32", "nvfp4"):
            call()


@pytest.mark.parametrize("name", [None, "bf16", "mxfp8", "nvfp4"])
def test_orders_need_e4m3_operands(name: str | None) -> None:
    for call in (
        lambda: operand(torch.ones(3, 4), name, order=PADDED),
        lambda: quantize_on_device(torch.ones(3, 4), name or "fp32", order=PADDED),
        lambda: operand_regions(3, 4, name, gathered=True, order=PADDED, dtype=torch.float32),
    ):
        with raises_with(InputError, "order 1"):
            call()
    assert {form.name for form in quantization.ACTIVATION_FORMATS if form.e4m3} == {
        "fp8_group128", "fp8_group128_pow2", "fp8_token", "fp8_static",
    }  # fmt: skip


def test_row_dtype_without_format_refused() -> None:
    with raises_with(InputError, "torch.float64", "torch.float32", "torch.bfloat16"):
        operand(torch.ones(3, 4, dtype=torch.float64), None, source=torch.tensor([0]))


class Marked:
    """Memory of one byte value."""

    def alloc(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.full((*shape[:-1], shape[-1] * dtype.itemsize), 0x5A, dtype=torch.uint8).view(dtype)

    def part(self, name: str) -> Marked:
        return self


@pytest.mark.parametrize("name", ["bf16", "fp8_group128", "fp8_token", "nvfp4"])
@pytest.mark.parametrize("used", [0, 1, 5, 8])
def test_unused_rows_are_not_written(name: str, used: int) -> None:
    x = heavy_tailed(8, 160, seed=4).to(torch.bfloat16)
    whole = quantize_on_device(x, name)
    some = quantize_on_device(x, name, used=torch.tensor([used]), memory=Marked())
    for first, second in ((whole.codes, some.codes), (whole.scales, some.scales)):
        if first is not None and second is not None:
            assert torch.equal(first.view(torch.uint8)[:used], second.view(torch.uint8)[:used])
            assert bool((second.view(torch.uint8)[used:] == 0x5A).all())


@pytest.mark.parametrize("columns", [130, 384])
@pytest.mark.parametrize("name", ["fp8_group128", "fp8_group128_pow2"])
@pytest.mark.parametrize("rows", [1, 17, 70])
def test_transposed_scales_are_contiguous_per_group(name: str, columns: int, rows: int) -> None:
    x = heavy_tailed(rows, columns, seed=3).bfloat16()
    form = replace(quantization.activation_format(name), transposed_scales=True)
    memory = Poisoned(x.device)
    plain = quantize_rows(x, name)
    for run, given in ((quantize_rows, None), (quantize_on_device, memory)):
        made = run(x, form, memory=given)
        assert made.scales is not None
        assert plain.scales is not None
        assert made.scales.stride() == (1, -(-rows // 16) * 16 + 256)
        assert torch.equal(made.codes.view(torch.uint8), plain.codes.view(torch.uint8))
        assert torch.equal(made.scales, plain.scales)
    assert quantization.quantize_regions(rows, columns, form) == {n: t.nbytes for n, t in memory.taken.items()}


@pytest.mark.parametrize("used", [None, 5])
def test_gathered_scales_are_transposed(used: int | None) -> None:
    scale, source = heavy_tailed(9, 4, seed=4), torch.randint(0, 9, (33,))
    some = None if used is None else torch.tensor([used])
    with patch.object(quantization, "on_device", lambda *_: True):
        found = transpose_scales(scale, source, used=some, memory=Poisoned(scale.device))
    assert found.shape == (33, 4)
    assert found.stride(0) == 1
    assert torch.equal(found[:used], scale[source][:used])
    if used is not None:
        assert bool(found[used:].isnan().all()), "rows that nobody reads were written"
