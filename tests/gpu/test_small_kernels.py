"""The kernels around the grouped products, bit for bit against their torch references, on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from collegium.encoding import encode_experts
from collegium.layer import MoELayer
from collegium.ops.linear import linear, sigmoid_gate
from collegium.ops.operand import operand
from collegium.ops.permute import Permutation, permute
from collegium.ops.quantize import ACTIVATION_FORMATS, AS_IS, REORDERED, activation_format, quantize_rows
from collegium.ops.rms_norm import rms_norm
from collegium.ops.route import route
from collegium.ops.scatter import scatter_codes, scatter_rows
from collegium.ops.weighted_sum import weighted_sum
from collegium.planning import plan
from collegium.problem import Problem
from collegium.runtime.devices import probe
from collegium.testing.compare import heavy_tailed, random_experts, relative_error, uneven_ids
from collegium.types import SCORE_FUNCTIONS, MoESpec, Routing, RoutingSpec
from memories import Poisoned

FP8 = torch.cuda.get_device_capability() >= (8, 9)
NAMES = [f.name for f in ACTIVATION_FORMATS if FP8 or f.name in ("fp32", "bf16", "fp16")]


def same_bits(found: torch.Tensor | None, wanted: torch.Tensor | None) -> bool:
    if found is None or wanted is None:
        return found is wanted
    left, right = found.cpu(), wanted
    if left.dtype in (torch.float32, torch.bfloat16, torch.float16):
        # One NaN is as good as another; zeros keep their sign.
        bits = {4: torch.int32, 2: torch.int16}[left.element_size()]
        left, right = (torch.where(t.isnan(), 1.5, t).view(bits) for t in (left, right))
    elif left.dtype == torch.float8_e4m3fn:
        left, right = left.view(torch.uint8), right.view(torch.uint8)
    return left.dtype == right.dtype and torch.equal(left, right)


def ids_of(kind: str, tokens: int, top_k: int, experts: int) -> torch.Tensor:
    if kind == "dropped":
        return torch.full((tokens, top_k), -1)
    if kind == "hot":
        return torch.full((tokens, top_k), min(7, experts - 1))
    ids = torch.randint(0, experts, (tokens, top_k))
    return torch.where(torch.rand(tokens, top_k) < 0.1, torch.randint(-3, experts + 3, ids.shape), ids)


def same_order(found: Permutation, wanted: Permutation) -> None:
    for name in ("source", "expert_offsets", "slots", "weights_by_row"):
        assert same_bits(getattr(found, name), getattr(wanted, name)), name
    for left, right in zip(found.tiles, wanted.tiles, strict=True):
        assert same_bits(left.expert, right.expert)
        assert same_bits(left.row, right.row)
        assert same_bits(left.used, right.used)


@pytest.mark.parametrize("experts", [17, 256, 512])
@pytest.mark.parametrize("tokens", [0, 1, 8, 16, 32, 33, 128, 129, 2049, 8192])
@pytest.mark.parametrize("kind", ["random", "hot", "dropped"])
def test_order_and_tiles(kind: str, tokens: int, experts: int) -> None:
    ids, weights = ids_of(kind, tokens, 8, experts), torch.rand(tokens, 8)
    for block_t in ((16, 128), (160,), (192,)):
        asked: dict[str, Any] = {"block_t": block_t}
        wanted = permute(ids, experts, input_weights=weights, **asked)
        for dtype in (torch.int64, torch.int32) if tokens == 129 else (torch.int32,):
            same_order(permute(ids.to("cuda", dtype), experts, input_weights=weights.cuda(), **asked), wanted)


@pytest.mark.parametrize("experts", [1, 17, 256, 1024])
@pytest.mark.parametrize("count", [1, 2, 31, 257, 1023, 1025, 4097])
def test_a_routing_may_hold_anything(count: int, experts: int) -> None:
    for top_k, dtype, factor in ((1, torch.int64, 1e39), (6, torch.int32, 1.0), (8, torch.int64, 1.0)):
        tokens = -(-count // top_k)
        ids = torch.randint(-3, experts + 2, (tokens, 2 * top_k + 3)).to(dtype)[:, 1 : top_k + 1]
        weights = torch.randn(tokens, top_k, dtype=torch.float64 if factor > 1 else torch.float32) * factor
        weights[::3, 0], weights[1::3, -1] = torch.inf, torch.nan
        asked: dict[str, Any] = {"block_t": (16, 64)}
        wanted = permute(ids, experts, input_weights=weights, **asked)
        assert torch.equal(wanted.slots == -1, ids == -1)
        assert torch.equal(wanted.slots == -2, (ids < -1) | (ids >= experts))
        moved, there = ids.cuda(), weights.cuda()
        strided = torch.empty(tokens, 3 * top_k, dtype=dtype, device="cuda")
        strided[:, 2 : top_k + 2] = moved
        for given in (moved, strided[:, 2 : top_k + 2]):
            same_order(permute(given, experts, input_weights=there, **asked), wanted)
        rows = torch.randn(tokens * top_k, 48) * 1e-3
        rows[int(wanted.expert_offsets[-1]) :] = torch.nan
        summed = weighted_sum(rows, wanted.slots, weights, torch.float32)
        lost = ((wanted.slots == -2) | ((wanted.slots >= 0) & weights.isnan())).any(dim=1)
        assert summed[lost].isnan().all()
        assert same_bits(weighted_sum(rows.cuda(), wanted.slots.cuda(), there, torch.float32), summed)
        rows = torch.randn(tokens * top_k, 48)
        by_ids = weighted_sum(rows, ids, weights, torch.float32, experts=experts)
        assert by_ids[lost].isnan().all()
        assert same_bits(weighted_sum(rows.cuda(), moved, there, torch.float32, experts=experts), by_ids)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("rows", "columns", "dtype"),
    [(1, 7168, torch.bfloat16), (23, 336, torch.float32), (300, 33, torch.float16), (1100, 2880, torch.bfloat16)],
)
def test_codes_and_scales(name: str, rows: int, columns: int, dtype: torch.dtype) -> None:
    x = heavy_tailed(rows, columns, seed=3)
    if rows > 20:
        x[3], x[8] = 0, -0.0
        x[4] *= 1e-36
        x[5, columns // 2] = torch.nan
        x[6, 0] = torch.inf
        x[7] = torch.where(torch.arange(columns) % 2 == 0, 448.0, 1.75)
        x[9] = 1.75 * 2.0**-20
    x = x.to(dtype)
    source = torch.randint(0, rows, (rows + 5,))
    for at, scale in ((None, None), (source, torch.rand(rows + 5))):
        form = activation_format(name)
        form = form.within(100.0) if form.static else form
        wanted = quantize_rows(x, form, source=at, weights=scale)
        moved = [None if t is None else t.cuda() for t in (at, scale)]
        found = quantize_rows(x.cuda(), form, source=moved[0], weights=moved[1], memory=Poisoned("cuda"))
        for part in ("codes", "scales", "global_scale"):
            assert same_bits(getattr(found, part), getattr(wanted, part)), part


@pytest.mark.parametrize("name", [*(["fp8_token", "fp8_static", "fp8_group128"] if FP8 else []), "nvfp4", None])
@pytest.mark.parametrize(
    ("kind", "tokens", "top_k", "columns"),
    [("random", 1, 8, 7168), ("hot", 257, 1, 336), ("random", 300, 6, 33), ("dropped", 40, 4, 128),
     ("random", 2100, 8, 2880), ("random", 700, 8, 7168)],
)  # fmt: skip
def test_tokens_at_all_their_rows(name: str | None, kind: str, tokens: int, top_k: int, columns: int) -> None:
    x = heavy_tailed(tokens, columns, seed=3).bfloat16().cuda()
    if tokens > 20:
        x[3], x[5, columns // 2], x[6, 0] = 0, torch.nan, torch.inf
    form = None if name is None else activation_format(name)
    form = form.within(100.0).operand_format if form is not None and form.static else form and form.operand_format
    order = permute(ids_of(kind, tokens, top_k, 60).cuda(), 60)
    stop, rows = int(order.expert_offsets[-1]), tokens * top_k
    for columns_order in (AS_IS, REORDERED) if form is not None and form.e4m3 else (AS_IS,):
        wanted, wanted_scale = operand(x, form, source=order.source, order=columns_order)
        across = replace(form, transposed_scales=True) if form is not None and form.group and form.e4m3 else form
        for stored in (form, across):
            memory = Poisoned("cuda")
            found, scale = scatter_rows(x, stored, order.slots, rows, order=columns_order, x_ready=True, memory=memory)
            assert same_bits(found[:stop].cpu(), wanted[:stop].cpu())
            assert bool(found[stop:].float().isnan().all()), "rows of no slot were written"
            if scale is not None and wanted_scale is not None:
                assert same_bits(scale[:stop].cpu(), wanted_scale[:stop].cpu())
    if form is not None and form.e4m3:
        codes, scales = operand(x, form)
        assert scales is not None
        found, scale = scatter_codes(codes, scales, order.slots, rows, memory=Poisoned("cuda"))
        assert same_bits(found[:stop].cpu(), codes.view(torch.uint8)[order.source].view(codes.dtype)[:stop].cpu())
        assert same_bits(scale[:stop].cpu() if scale is not None else None, scales[order.source][:stop].cpu())


@pytest.mark.parametrize(("tokens", "width"), [(1, 7168), (33, 90), (200, 2880), (4096, 2048)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weighted_sums(tokens: int, width: int, dtype: torch.dtype) -> None:
    rows = heavy_tailed(tokens * 8, width, seed=5).to(dtype)
    slots = torch.randperm(tokens * 8).view(tokens, 8)
    dropped = torch.rand(tokens, 8) < 0.2
    rows[slots[dropped]] = torch.nan
    weights = torch.rand(tokens, 8).masked_fill(dropped, torch.nan)
    slots = slots.masked_fill(dropped, -1)
    shared = torch.randn(tokens, width).to(dtype)
    for out_dtype in (torch.float32, dtype):
        for scale, more, lost in (
            (weights, None, 0),
            (None, shared, 0),
            (weights, shared.float(), 0),
            (weights, shared, -2),
            (None, None, len(rows)),
        ):
            if lost:
                slots[tokens // 2, 3] = lost
            wanted = weighted_sum(rows, slots, scale, out_dtype, shared=more)
            assert wanted.isnan().any(dim=1).nonzero().flatten().tolist() == ([tokens // 2] if lost else [])
            out = torch.full((tokens, width), torch.nan, dtype=out_dtype, device="cuda")
            moved = [None if t is None else t.cuda() for t in (scale, more)]
            weighted_sum(rows.cuda(), slots.cuda(), moved[0], out_dtype, shared=moved[1], out=out)
            assert same_bits(out, wanted)
        slots[tokens // 2, 3] = -1


GROUPED = {"groups": 8, "topk_groups": 4}


@pytest.mark.parametrize("score", [score for score in SCORE_FUNCTIONS if score != "sparsemixer"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("experts", "options"),
    [
        (17, {"top_k": 4}),
        (128, {"top_k": 8, "renormalize": False}),
        (256, {"top_k": 8, "group_score": "top2_sum", "scale": 2.5, "renormalize_eps": 1e-20, **GROUPED}),
        (160, {"top_k": 6, "group_score": "max", **GROUPED}),
        (1024, {"top_k": 10}),
    ],
)
def test_router_against_torch(score: Any, biased: bool, experts: int, options: dict[str, Any]) -> None:
    check_router(RoutingSpec(score=score, correction_bias=biased, **options), experts)


@pytest.mark.parametrize("experts", [16, 128])
def test_router_mixes_two_experts(experts: int) -> None:
    check_router(RoutingSpec(top_k=2, score="sparsemixer", renormalize=False), experts)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "topk_softmax"])
def test_router_floors_and_scales(score: Any) -> None:
    rule = RoutingSpec(top_k=4, score=score, renormalize_floor=0.7, expert_scale=True, scale=1.25)
    logits, factors = heavy_tailed(300, 128, seed=1), torch.rand(256).exp()[::2]
    wanted = route(logits, rule, expert_scale=factors)
    found = route(logits.cuda(), rule, expert_scale=factors.cuda())
    assert same_bits(found.topk_ids, wanted.topk_ids)
    assert same_bits(found.topk_weights, wanted.topk_weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 2048), (63, 384), (64, 5120), (3000, 300)])
def test_gated_rows(tokens: int, hidden: int, dtype: torch.dtype) -> None:
    """The bits of torch's own sigmoid in float64, for every batch that a row is in."""
    x, rows = heavy_tailed(tokens, hidden, seed=1).cuda().to(dtype), heavy_tailed(tokens, hidden, seed=2).cuda()
    gate = heavy_tailed(1, hidden, seed=3).cuda() / hidden**0.5
    for given in (rows, rows.to(dtype)):
        found = sigmoid_gate(x, gate, given)
        assert torch.equal(found, torch.sigmoid(linear(x, gate).double()).float() * given)
        assert torch.equal(found[tokens // 2 :], sigmoid_gate(x[tokens // 2 :], gate, given[tokens // 2 :]))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("tokens", "columns"), [(1, 5120), (64, 1024), (300, 4097)])
def test_rms_norm(tokens: int, columns: int, weighted: bool) -> None:
    x = heavy_tailed(tokens, columns, seed=1).cuda()
    weight = heavy_tailed(1, columns, seed=2)[0].cuda() if weighted else None
    found = rms_norm(x, weight, 1e-5)
    truth = x.double() / (x.double().square().mean(1, keepdim=True) + 1e-5).sqrt()
    truth = truth if weight is None else truth * weight.double()
    assert relative_error(found, truth) < 3e-7
    assert torch.equal(found[tokens // 2 :], rms_norm(x[tokens // 2 :], weight, 1e-5))


def check_router(spec: RoutingSpec, experts: int) -> None:
    logits = heavy_tailed(3000, experts, seed=1) * 2
    logits[3, 4], logits[4, 5], logits[5, 2] = torch.nan, torch.inf, -torch.inf
    logits[6], logits[7], logits[8] = 0, torch.inf, -torch.inf
    logits[9, : experts - spec.top_k] = -torch.inf
    logits[10:100] = logits[10:100].round()
    bias = torch.randn(experts) if spec.correction_bias else None
    check_routed(logits, spec, bias)
    if bias is not None:
        bias[experts // 2] = torch.nan
        check_routed(logits[:40], spec, bias)
        assert route(logits[:40], spec, bias=bias).topk_weights.isnan().all()


def check_routed(logits: torch.Tensor, spec: RoutingSpec, bias: torch.Tensor | None) -> None:
    experts = logits.shape[1]
    for dtype in (torch.float32, torch.bfloat16) if experts == 128 else (torch.float32,):
        given = logits.to(dtype)
        wanted = route(given, spec, bias=bias)
        found = route(given.cuda(), spec, bias=None if bias is None else bias.cuda())
        assert same_bits(found.topk_ids, wanted.topk_ids)
        assert same_bits(found.topk_weights, wanted.topk_weights)


def test_router_looks_experts_up() -> None:
    spec = RoutingSpec(top_k=6, score="sqrt_softplus", hash_routing=True, renormalize_eps=1e-20)
    table = torch.stack([torch.randperm(256)[:6] for _ in range(999)])
    table[4, 1], table[5, 2], table[6, 0], table[7] = table[4, 0], 256, -3, -1
    tokens, logits = torch.randint(-5, 1005, (4096,)), torch.randn(4096, 256)
    tokens[:8], logits[9, 3] = torch.arange(8), torch.nan
    for dtype in (torch.int32, torch.int64):
        given = {"token_ids": tokens.to(dtype), "hash_table": table.to(dtype)}
        wanted = route(logits, spec, **given)
        found = route(logits.cuda(), spec, **{name: tensor.cuda() for name, tensor in given.items()})
        assert same_bits(found.topk_ids, wanted.topk_ids)
        assert same_bits(found.topk_weights, wanted.topk_weights)


def test_buffers_are_written_and_nothing_waits() -> None:
    ids = ids_of("random", 300, 8, 64).cuda()
    weights, logits = torch.rand(300, 8, device="cuda"), torch.randn(300, 64, device="cuda")
    spec = RoutingSpec(top_k=8)
    for _ in range(2):
        memory = Poisoned("cuda")
        torch.cuda.set_sync_debug_mode("error")
        try:
            order = permute(ids, 64, input_weights=weights, block_t=(16,), memory=memory)
            rows = quantize_rows(torch.ones(300, 256, device="cuda"), "bf16", source=order.source, memory=memory)
            weighted_sum(rows.codes, order.slots, weights, torch.bfloat16, memory=memory)
            given = route(logits, spec, memory=memory)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert given.topk_ids is memory.taken["topk_ids"]
        assert order.source.data_ptr() == memory.taken["order"].data_ptr()
        assert set(memory.taken) == {
            "order", "owners", "weights_by_row", "counts", "codes", "sum", "topk_ids", "topk_weights"
        }  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 32, 700])
@pytest.mark.parametrize("on_input", [False, True])
def test_layer_replays_with_another_routing(tokens: int, on_input: bool) -> None:
    routing = RoutingSpec(top_k=4, weight_on_input=on_input)
    spec = MoESpec(hidden_size=336, intermediate_size=176, num_experts=17, routing=routing, weight_format="bf16")
    problem = Problem(spec=spec, device=probe(torch.device("cuda")))
    made = encode_experts(random_experts(17, 2, 176, 336, seed=1), "bf16")
    layer = MoELayer(replace(made, gate_up=made.gate_up.to("cuda"), down=made.down.to("cuda")), plan(problem))
    x = heavy_tailed(tokens, 336, seed=3).bfloat16().cuda()
    given = Routing(
        topk_ids=uneven_ids(tokens, 4, 17, seed=2).int().cuda(), topk_weights=torch.rand(tokens, 4, device="cuda")
    )
    layer(x, routing=given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = layer(x, routing=given)
    for seed in (5, 6):
        given.topk_ids.copy_(uneven_ids(tokens, 4, 17, seed=seed))
        given.topk_ids[0, 1] = -1
        graph.replay()
        assert torch.equal(replayed, layer(x, routing=given))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        layer(x, routing=given)
        torch.cuda.synchronize()
    names = [event.name for event in seen.events() if "kernel" in event.name and "Memcpy" not in event.name]
    foreign = [name for name in names if "at::" in name or "vectorized" in name]
    assert not foreign, foreign
