"""The large-batch product of four-bit weights on a Hopper GPU: truth, bits of the small tiles, sizes, graphs, NaN."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from collegium.experts.reference import Reference
from collegium.experts.triton.grouped import grouped_gemm, tile_list
from collegium.experts.triton.packing import pack_w4a8
from collegium.experts.triton.table import TritonW4A8, TritonW4A16
from collegium.experts.triton.tiles.choice import choose
from collegium.experts.triton.tiles.problem import TileChoice
from collegium.experts.triton.w4_prefill import w4_prefill_gemm
from collegium.formats import MxFp4
from collegium.formats.unquantised import DTYPES
from collegium.kernels.enums import NOWHERE
from collegium.ops.operand import operand
from collegium.ops.quantize import REORDERED
from collegium.parallel.local import Local
from collegium.problem import Problem
from collegium.runtime.devices import probe
from collegium.runtime.machine import machine_at
from collegium.testing.compare import heavy_tailed, random_experts, relative_error, uneven_ids
from collegium.types import ActivationSpec, ContiguousBatch, MoESpec, Routing, RoutingSpec
from integers import encoded
from passes import check_rows_stand_alone
from w4_recipes import RECIPES

if TYPE_CHECKING:
    from collegium.experts.triton.packed import PackedExperts

DEVICE = torch.device("cuda")
SMALL_TILE = TileChoice(block_n=128, block_t=128, warps=4, stages=2)
LARGE_TILE = TileChoice(block_n=256, block_t=160, warps=8, stages=5, programs=132)
TOP_K = 4


def small(packed: PackedExperts) -> PackedExperts:
    """Return the same experts, which multiply in small tiles whatever the batch."""
    return replace(packed, forced="small")


def build(
    *,
    experts: int = 17,
    wide: int = 176,
    hidden: int = 336,
    dtype: Any = "bf16",
    weights: str = "mxfp4",
    act: str = "fp8_token",
    group: int = 128,
    **changes: Any,
) -> tuple[Any, Any, Problem]:
    """Return packed experts whose batches all run in large tiles, what they were packed from, and the problem."""
    activation = changes.pop("activation", ActivationSpec(limit=2.0))
    bias = changes.pop("bias", True)
    spec = MoESpec(
        hidden_size=hidden,
        intermediate_size=wide,
        num_experts=experts,
        routing=RoutingSpec(top_k=TOP_K),
        activation=activation,
        weight_format=weights,
        expert_bias=bias,
    )
    problem = Problem(spec=spec, device=probe(DEVICE), dtype=dtype, activation_format=act)
    made = encoded(random_experts(experts, spec.gate_up_parts, wide, hidden, seed=1, bias=bias), weights, group)
    made = replace(
        made,
        gate_up=made.gate_up.to("cuda"),
        down=made.down.to("cuda"),
        gate_up_bias=None if made.gate_up_bias is None else made.gate_up_bias.cuda(),
        down_bias=None if made.down_bias is None else made.down_bias.cuda(),
    )
    kernel = TritonW4A16() if act == "bf16" else TritonW4A8()
    packed = kernel.pack(made, problem.routed)
    return replace(packed, forced="large"), made, problem


def routed_ids(style: str, tokens: int, experts: int) -> torch.Tensor:
    """Return distinct ids ``[tokens, 4]``; one expert has no rows, and some assignments have no expert."""
    if style == "uneven":
        ids = uneven_ids(tokens, TOP_K, experts, seed=2)
    else:
        weight = torch.arange(1, experts + 1).float() ** (-1.2 if style == "zipf" else 0)
        ids = torch.multinomial(weight.expand(tokens, -1), TOP_K, generator=torch.Generator().manual_seed(3))
        if style == "hot":
            ids[:, 0] = 5
            ids[:, 1:] = torch.where(ids[:, 1:] == 5, -1, ids[:, 1:])
    ids[1, 1] = -1
    ids[ids == 3] = -1
    return ids.cuda()


def dispatched(
    tokens: int, experts: int, hidden: int, *, style: str = "uneven", dtype: str = "bf16"
) -> ContiguousBatch:
    x = heavy_tailed(tokens, hidden, seed=3).to(DTYPES[dtype]).cuda()
    routing = Routing(
        topk_ids=routed_ids(style, tokens, experts), topk_weights=torch.rand(tokens, TOP_K, device="cuda")
    )
    return Local(num_experts=experts).dispatch(x, routing)[0]


LAYERS = [
    ("nvfp4", "fp8_token", 128),
    ("nvfp4", "fp8_group128", 128),
    ("mxfp4", "bf16", 128),
    ("nvfp4", "bf16", 128),
    ("int4_group", "bf16", 128),
    ("int4_affine", "bf16", 32),
    ("int4_affine", "bf16", 128),
    ("int4_ordered", "bf16", 128),
]


@pytest.mark.parametrize(("weights", "act", "group"), LAYERS)
@pytest.mark.parametrize(
    ("experts", "wide", "hidden"),
    [
        (16, 1408, 2816),
        (8, 128, 128),  # one K block
        (5, 640, 3072),
    ],
)
def test_every_recipe(experts: int, wide: int, hidden: int, weights: str, act: str, group: int) -> None:
    activation = ActivationSpec(kind="swiglu_oai", limit=7.0)
    packed, made, problem = build(
        experts=experts, wide=wide, hidden=hidden, weights=weights, act=act, group=group, activation=activation
    )
    for style in ("uniform", "hot"):
        batch = dispatched(600, experts, hidden, style=style)
        rows, stop = batch.source.numel(), int(batch.expert_offsets[-1])
        assert packed.tiling.large(rows) is not None
        wanted = small(packed).run(batch)[:stop]
        for _ in range(2):
            assert torch.equal(packed.run(batch)[:stop], wanted)
        truth = Reference().pack(made, replace(problem, activation_format="fp32").routed).run(batch)[:stop]
        assert relative_error(wanted, truth) < (0.06 if act.startswith("fp8") else 0.01)
        weighted = replace(batch, input_weights=torch.rand(rows, device="cuda") + 0.5)
        assert torch.equal(packed.run(weighted)[:stop], small(packed).run(weighted)[:stop])


@pytest.mark.parametrize("weights", ["mxfp4", "nvfp4", "int4_affine"])
def test_rows_of_every_recipe_stand_alone(weights: str) -> None:
    packed, _, _ = build(wide=256, hidden=512, weights=weights, act="bf16")
    check_rows_stand_alone(packed, (9, 130, 237, 1024, 4096))


@pytest.mark.parametrize("style", ["uneven", "uniform", "zipf", "hot"])
@pytest.mark.parametrize(
    ("experts", "wide", "hidden"),
    [
        (17, 176, 336),
        (16, 1408, 2880),
        (8, 704, 1024),
        (8, 128, 128),  # one K block
        (8, 2880, 2880),
        (5, 72, 3072),
    ],
)
@pytest.mark.parametrize("act", ["fp8_token", "fp8_group128"])
def test_matches_truth_and_small_batch_bits(experts: int, wide: int, hidden: int, style: str, act: str) -> None:
    packed, made, problem = build(experts=experts, wide=wide, hidden=hidden, act=act)
    batch = dispatched(600, experts, hidden, style=style)
    rows, stop = batch.source.numel(), int(batch.expert_offsets[-1])
    assert packed.tiling.large(rows) is not None
    assert small(packed).tiling.large(rows) is None
    found = packed.run(batch)[:stop]
    truth = Reference().pack(made, replace(problem, activation_format="fp32").routed).run(batch)[:stop]
    assert relative_error(found, truth) < 0.06
    assert torch.equal(found, small(packed).run(batch)[:stop])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "activation",
    [
        ActivationSpec(),
        ActivationSpec(kind="swiglu_oai", limit=7.0),
        ActivationSpec(kind="geglu_tanh", fast=True),
        ActivationSpec(kind="situ"),
        ActivationSpec(kind="relu2"),
    ],
    ids=lambda spec: spec.kind,
)
def test_activations_and_biases(activation: ActivationSpec, bias: bool) -> None:
    packed, _, _ = build(activation=activation, bias=bias)
    batch = dispatched(600, 17, 336)
    stop = int(batch.expert_offsets[-1])
    assert torch.equal(packed.run(batch)[:stop], small(packed).run(batch)[:stop])


@pytest.mark.parametrize("act", ["fp8_token", "fp8_static", "fp8_group128", "fp8_group128_pow2"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("weighted", [False, True])
def test_formats_of_tokens(act: str, dtype: str, weighted: bool) -> None:
    packed, _, _ = build(act=act, dtype=dtype)
    batch = dispatched(300, 17, 336, dtype=dtype)
    if weighted:
        batch = replace(batch, input_weights=torch.rand(batch.source.numel(), device="cuda") + 0.5)
    stop = int(batch.expert_offsets[-1])
    assert torch.equal(packed.run(batch)[:stop], small(packed).run(batch)[:stop])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("parts", [1, 2])
def test_every_count_of_rows(parts: int, recipe: str) -> None:
    """Experts of 1 to 341 rows, so tiles of every width: the bits of the small tiles, and nothing beyond them."""
    encode, pack, _ = RECIPES[recipe]
    counts = torch.arange(0, 342, 11)
    experts, n_out, k_in = counts.numel(), 200, 640
    values = torch.randn(experts, parts, n_out, k_in, device="cuda") / k_in**0.5
    packed = pack(encode(values), torch.randn(experts, parts, n_out, device="cuda").bfloat16())
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).cuda()
    stop = int(offsets[-1])
    rows = stop + 5
    x, x_scale, _ = RECIPES[recipe].rows(heavy_tailed(rows, k_in, seed=3).cuda())
    scaled = x_scale is not None and x_scale.shape[1] > 1
    split = scaled and recipe.startswith("nvfp4")
    large_tile = replace(LARGE_TILE, block_t=112) if split else LARGE_TILE
    activation = ActivationSpec() if parts == 2 else None
    wanted = torch.full((rows, n_out), 7.0, dtype=torch.bfloat16, device="cuda")
    tile = SMALL_TILE
    if x_scale is None:
        tile = choose(packed.layout.problem(rows, 16, False), machine_at(DEVICE))
    grouped_gemm(x, packed, offsets, tile_list(offsets, rows, tile), wanted, x_scale=x_scale, activation=activation)
    for programs in (132, 2, 8):
        out = torch.full((rows, n_out), 7.0, dtype=torch.bfloat16, device="cuda")
        tiles = tile_list(offsets, rows, replace(large_tile, programs=programs))
        for _ in range(3):
            w4_prefill_gemm(x, packed, offsets, tiles, out, x_scale=x_scale, activation=activation)
            assert torch.equal(out, wanted)
        assert tiles.used is not None
        assert tiles.used[1:].tolist() == [0, 0], "counters end as they began"


def test_rows_go_to_their_places() -> None:
    counts = torch.tensor([0, 330, 3, 0, 65], device="cuda")
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64, device="cuda"), counts.cumsum(0)])
    packed = pack_w4a8(MxFp4.encode(torch.randn(5, 1, 208, 272, device="cuda")), None)
    x, x_scale = operand(heavy_tailed(400, 272, seed=3).bfloat16().cuda(), "fp8_token", order=REORDERED)
    tiles = tile_list(offsets, 400, LARGE_TILE)
    wanted = torch.empty(400, 208, dtype=torch.bfloat16, device="cuda")
    w4_prefill_gemm(x, packed, offsets, tiles, wanted, x_scale=x_scale)
    places = torch.randperm(400, device="cuda")
    out = torch.full((400, 208), 7.0, dtype=torch.bfloat16, device="cuda")
    tiles = replace(tiles, row_offsets=torch.where(places == 3, NOWHERE, places * 208))
    w4_prefill_gemm(x, packed, offsets, tiles, out, x_scale=x_scale)
    written = places[:398][places[:398] != 3]
    assert torch.equal(out[written], wanted[:398][places[:398] != 3])
    untouched = torch.ones(400, dtype=torch.bool, device="cuda")
    untouched[written] = False
    assert bool((out[untouched] == 7.0).all())


def test_rows_are_batch_invariant() -> None:
    packed, _, _ = build(wide=256, hidden=512)
    check_rows_stand_alone(packed, (9, 130, 237, 238, 333, 1024, 4096))


def test_poisoned_memory() -> None:
    packed, _, _ = build()
    batch = dispatched(300, 17, 336)
    stop = int(batch.expert_offsets[-1])
    wanted = small(packed).run(batch)[:stop].clone()
    for byte in (0xFF, 0x7F, 0x00):
        torch.cuda.empty_cache()
        blocks = [torch.full((1 << 26,), byte, dtype=torch.uint8, device="cuda") for _ in range(4)]
        blocks += [torch.full((1 << size,), byte, dtype=torch.uint8, device="cuda") for size in range(9, 21)]
        del blocks
        assert torch.equal(packed.run(batch)[:stop], wanted)


def test_graph_replay_follows_one_hot_routing() -> None:
    packed, _, _ = build()
    local = Local(num_experts=17)
    x = heavy_tailed(300, 336, seed=3).bfloat16().cuda()
    weight = torch.rand(300, TOP_K, device="cuda")
    ids = uneven_ids(300, TOP_K, 17, seed=2).cuda()

    def layer(experts: PackedExperts) -> torch.Tensor:
        batch, handle = local.dispatch(x, Routing(topk_ids=ids, topk_weights=weight))
        return local.combine(experts.run(batch), handle)

    layer(packed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = layer(packed)
    for seed in (5, 6):
        ids.copy_(uneven_ids(300, TOP_K, 17, seed=seed))
        if seed == 6:
            ids[:, 1:] = -1
            ids[:, 0] = 11
        graph.replay()
        assert torch.equal(replayed, layer(small(packed)))


def test_streams_at_the_same_time() -> None:
    packed, _, _ = build()
    batches = [dispatched(tokens, 17, 336) for tokens in (300, 420, 555, 600)]
    wanted = [small(packed).run(batch)[: int(batch.expert_offsets[-1])].clone() for batch in batches]

    def run(batch: ContiguousBatch) -> torch.Tensor:
        with torch.cuda.stream(torch.cuda.Stream()):
            found = packed.run(batch)
            for _ in range(20):
                found = packed.run(batch)
            torch.cuda.current_stream().synchronize()
        return found

    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(run, batches))
    for rows, right in zip(found, wanted, strict=True):
        assert torch.equal(rows[: right.shape[0]], right)


def test_nothing_waits_for_the_device() -> None:
    packed, _, _ = build()
    batch = dispatched(300, 17, 336)
    packed.run(batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed.run(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_nan_tokens_stay_in_their_rows() -> None:
    packed, _, _ = build()
    batch = dispatched(300, 17, 336)
    stop = int(batch.expert_offsets[-1])
    clean = packed.run(batch)
    x = batch.x.clone()
    x[3, 5] = torch.nan
    found = packed.run(replace(batch, x=x))
    hit = (batch.source == 3)[:stop]
    assert bool(torch.isnan(found[:stop][hit]).all())
    assert torch.equal(found[:stop][~hit], clean[:stop][~hit])


def test_many_rows_choose_large_tiles() -> None:
    packed, _, _ = build(experts=64, wide=704, hidden=1024)
    chosen = replace(packed, forced=None)
    assert chosen.tiling.large(64 * 64) is not None
    assert chosen.tiling.large(64) is None
