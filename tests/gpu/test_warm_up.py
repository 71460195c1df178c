"""Warming up compiles all that any token count needs and nothing else; measured tiles change times, never bits."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from triton import knobs

from collegium import Choice, Limits, MoELayer, MoESpec, Problem, Routing, RoutingSpec, plan, probe, warm_up
from collegium.bench import bench, random_weights
from collegium.measure import Ceilings, measure_ceilings
from collegium.ops.tile_file import products, tile_path, with_tuned_tiles, write_tiles
from collegium.ops.tiles import candidates
from collegium.tuning import tune

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


def layer_of(weights: str, activations: str, *, hidden: int) -> MoELayer:
    spec = MoESpec(
        hidden_size=hidden,
        intermediate_size=256,
        num_experts=8,
        routing=RoutingSpec(top_k=TOP_K),
        weight_format=weights,
    )
    problem = Problem(spec=spec, device=probe("cuda"), limits=Limits(max_tokens=LIMIT))
    made = plan(problem, Choice(activation_format=activations))
    return MoELayer(random_weights(spec, torch.device("cuda")), made)


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
def test_after_warming_up_no_token_count_compiles_anything(compiled, weights, activations, hidden):
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


def test_tiles_of_a_file_are_used_and_change_no_bit(tmp_path):
    layer = layer_of("mxfp4", "bf16", hidden=768)
    packed, problem = layer._pipeline.packed, layer.plan.problem
    wanted = run(layer, 48)
    for pick in (0, -1):
        rows = 48 * TOP_K
        tiles = [candidates(packed.problem_of(matrix, rows), packed.machine)[pick] for _, matrix in products(packed)]
        write_tiles(problem, (((rows, tiles[0]),), ((rows, tiles[1]),)), tmp_path)
        tuned = with_tuned_tiles(packed, problem, tmp_path)
        assert [table[0][1] for table in tuned.tuned] == tiles
        other = layer_of("mxfp4", "bf16", hidden=768)
        object.__setattr__(other._pipeline, "packed", tuned)
        assert torch.equal(run(other, 48), wanted)


def test_tuning_writes_a_file_that_layers_use(tmp_path):
    report = tune("768x256x8x2", ("mxfp4", "bf16"), tokens=(1, 64), most=4, rounds=3, folder=tmp_path)
    assert {(row.product, row.tokens) for row in report.rows} == {(p, t) for p in ("gate_up", "down") for t in (1, 64)}
    assert all(0 < row.best_seconds <= row.chosen_seconds for row in report.rows)
    layer = layer_of("mxfp4", "bf16", hidden=768)
    problem = layer.plan.problem
    assert str(tile_path(problem, tmp_path)) == report.path
    tuned = with_tuned_tiles(layer._pipeline.packed, problem, tmp_path).tuned
    assert tuned[0] == tuple((row.rows, row.best) for row in report.rows if row.product == "gate_up")


def test_a_captured_bench_gives_times_above_their_floor():
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
