"""Warming up compiles all that any token count needs and nothing else; measured tiles change times, never bits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from triton import knobs

from collegium import (
    Limits,
    MoELayer,
    MoESpec,
    Overrides,
    Problem,
    RouterWeights,
    Routing,
    RoutingSpec,
    SharedSpec,
    SharedWeights,
    plan,
    probe,
    warm_up,
)
from collegium.commands.bench import bench
from collegium.commands.measure import Ceilings, measure_ceilings
from collegium.commands.tune import tune
from collegium.dummy.weights import random_weights
from collegium.experts.measured import tile_path, with_measured_tiles, write_tiles
from collegium.experts.triton.tiles.candidates import candidates

if TYPE_CHECKING:
    from collections.abc import Iterator

TOP_K, LIMIT = 2, 512


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """The kernels compiled since the test began, in a cache of its own."""
    found: list[str] = []
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))

    def note(*, repr: str, **_: object) -> None:
        found.append(repr)

    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = note
    yield found
    knobs.runtime.jit_post_compile_hook = before


def layer_of(weights: str, activations: str, *, hidden: int, routed: bool = False) -> MoELayer:
    """Return a layer; routed: with a router and a shared expert of its own."""
    device = torch.device("cuda")
    spec = MoESpec(
        hidden_size=hidden,
        intermediate_size=256,
        num_experts=8,
        routing=RoutingSpec(top_k=TOP_K),
        weight_format=weights,
    )
    problem = Problem(spec=spec, device=probe("cuda"), limits=Limits(max_tokens=LIMIT))
    if not routed:
        made = plan(problem, Overrides(activation_format=activations))
        return MoELayer(random_weights(spec, device), made)
    alone = replace(spec, intermediate_size=192, num_experts=1, routing=RoutingSpec(top_k=1))
    problem = replace(problem, spec=replace(spec, shared=SharedSpec(intermediate_size=192)))
    made = plan(problem, Overrides(activation_format=activations))
    return MoELayer(
        random_weights(spec, device),
        made,
        router=RouterWeights(weight=torch.randn(8, hidden, device=device)),
        shared=SharedWeights(experts=random_weights(alone, device)),
    )


def run(layer: MoELayer, tokens: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(tokens)
    x = torch.randn(tokens, layer.spec.hidden_size, device="cuda", generator=generator).bfloat16()
    ids = torch.rand(tokens, 8, device="cuda", generator=generator).topk(TOP_K).indices
    return layer(x, routing=Routing(topk_ids=ids, topk_weights=torch.full(ids.shape, 0.5, device="cuda")))


# Sizes that no other test uses: a kernel compiled by another test would not be compiled here.
@pytest.mark.parametrize(
    ("weights", "activations", "hidden"),
    [("bf16", "bf16", 1152), ("fp8_block", "fp8_group128", 1280), ("mxfp4", "bf16", 1408), ("nvfp4", "bf16", 1536)],
)
def test_warm_up_covers_every_token_count(compiled, weights, activations, hidden):
    layer = layer_of(weights, activations, hidden=hidden)
    seen: list[tuple[int, int]] = []
    batches = warm_up([layer, layer], lambda done, total, _: seen.append((done, total)))
    assert batches == len(seen) > 1
    assert seen[-1][0] == seen[-1][1]
    assert any("grouped_gemm_kernel" in name for name in compiled)
    made = len(compiled)
    for tokens in (*range(1, 66), *range(66, LIMIT + 1, 7), LIMIT):
        run(layer, tokens)
    torch.cuda.synchronize()
    assert compiled[made:] == []
    # And nothing else: as many products as tiles that some token count chooses, none twice.
    products_compiled = [name for name in compiled if "grouped_gemm_kernel" in name]
    assert len(set(products_compiled)) <= 2 * batches


def asked(layer: MoELayer, tokens: int) -> Iterator[dict[str, object]]:
    """Every way to ask for ``tokens`` tokens, beside x."""
    ids = torch.rand(tokens, 8, device="cuda").topk(TOP_K).indices
    weights = torch.full(ids.shape, 0.5, device="cuda")
    for dtype in (torch.float32, torch.bfloat16):
        for whole in (torch.int64, torch.int32):
            yield {"routing": Routing(topk_ids=ids.to(whole), topk_weights=weights.to(dtype))}
        yield {"router_logits": torch.randn(tokens, 8, device="cuda", dtype=dtype)}
    columns = torch.rand(tokens, 8, device="cuda").topk(5)
    yield {"routing": Routing(topk_ids=columns.indices[:, 1:3], topk_weights=columns.values[:, 1:3])}
    if layer.router is not None:
        yield {}


@pytest.mark.parametrize(
    ("weights", "activations", "hidden", "routed"),
    [
        ("bf16", "bf16", 1664, False),
        ("fp8_block", "fp8_group128", 1792, True),
        ("mxfp4", "fp8_token", 1920, True),
        ("int4_group", "bf16", 2176, False),
    ],
)
def test_warm_up_covers_every_call_form(compiled, weights, activations, hidden, routed):
    layer = layer_of(weights, activations, hidden=hidden, routed=routed)
    warm_up([layer])
    made = len(compiled)
    generator = torch.Generator().manual_seed(0)
    some = torch.randint(81, LIMIT, (24,), generator=generator).tolist()
    # Beyond the limit a last pass has what is left.
    for tokens in (*range(1, 81), *some, LIMIT, LIMIT + 1, LIMIT + 3, LIMIT + 77):
        x = torch.randn(tokens + 1, hidden, device="cuda").bfloat16()
        for rest in asked(layer, tokens):
            layer(x[1:], **rest)
        assert compiled[made:] == [], tokens
    odd = torch.randn(40 * hidden + 1, device="cuda").bfloat16()[1:].view(40, hidden)
    wide = torch.randn(40, hidden + 24, device="cuda").bfloat16()[:, :hidden]
    routing = next(asked(layer, 40))
    for x in (odd, wide):
        assert torch.equal(layer(x, **routing), layer(x.clone(memory_format=torch.contiguous_format), **routing))
    torch.cuda.synchronize()
    assert compiled[made:] == []


def test_tile_file_used_without_changing_bits(tmp_path):
    layer = layer_of("mxfp4", "bf16", hidden=768)
    packed, problem = layer.experts, layer.plan.problem
    wanted, rows = run(layer, 48), 48 * TOP_K
    used: list[tuple[object, ...]] = []
    for pick in (0, -1):
        layouts = {"gate_up": packed.gate_up.layout, "down": packed.down.layout}
        tiles = {
            name: candidates(packed.tiling.problem_of(own, rows), packed.machine)[pick] for name, own in layouts.items()
        }
        write_tiles(problem, {name: ((rows, tile),) for name, tile in tiles.items()}, tmp_path)
        tuned = with_measured_tiles(packed, problem, tmp_path)
        assert [table[0][1] for table in tuned.measured] == list(tiles.values())
        other = layer_of("mxfp4", "bf16", hidden=768)
        other.replan(other.plan, tuned)
        used.append(other._context.pipelines[-1][1].parts.experts.tiling.pair(rows))
        assert used[-1] == tuple(tiles.values())
        assert torch.equal(run(other, 48), wanted)
    assert used[0] != used[1]


def test_layers_use_the_tuned_file(tmp_path):
    report = tune("768x256x8x2", ("mxfp4", "bf16"), tokens=(1, 64), candidates=4, rounds=3, folder=tmp_path)
    assert {(row.product, row.tokens) for row in report.rows} == {(p, t) for p in ("gate_up", "down") for t in (1, 64)}
    assert all(0 < row.best_seconds <= row.chosen_seconds for row in report.rows)
    layer = layer_of("mxfp4", "bf16", hidden=768)
    problem = layer.plan.problem
    assert str(tile_path(problem, tmp_path)) == report.path
    tuned = with_measured_tiles(layer.experts, problem, tmp_path).measured
    assert tuned[0] == tuple((row.rows, row.best) for row in report.rows if row.product == "gate_up")


def test_captured_bench_times_exceed_floor():
    ceilings = measure_ceilings(torch.device("cuda"), nbytes=1 << 30)
    assert 1e11 < ceilings.bandwidth < 2e13
    assert 1e13 < ceilings.rate_16 <= ceilings.rate_8 < 1e16
    report = bench("2048x1024x64x4", [("bf16", "bf16"), ("mxfp4", "bf16")], tokens=(1, 64), rounds=5, device="cuda")
    assert all(row.of_floor < 1.0 for row in report.rows)
    assert all(row.error < row.tolerance for row in report.rows)
    fixed = Ceilings(bandwidth=1e12, rate_16=1e14, rate_8=2e14)
    again = bench("2048x1024x64x4", [("bf16", "bf16")], tokens=(64,), ceilings=fixed, rounds=3, device="cuda")
    assert again.rows[0].floor_seconds == pytest.approx(
        max(again.rows[0].experts_hit * 3 * 2048 * 1024 * 2 + 4 * 64 * 2048, 0) / 1e12, rel=0.01
    )
