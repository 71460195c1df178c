"""Measured tiles: used when they fit, ignored with one line when they do not, and never a change of a bit."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from collegium.commands.bench import named_layer
from collegium.commands.measure import random_routing
from collegium.commands.printing import print_tuning
from collegium.commands.tune import TuneReport, TuneRow, measure_tiles, tune
from collegium.dummy.weights import random_weights
from collegium.errors import InputError
from collegium.experts.measured import tile_folder, tile_key, tile_path, with_measured_tiles, write_tiles
from collegium.experts.reference import Reference
from collegium.experts.triton.packed import PackedExperts
from collegium.experts.triton.table import TritonBf16, TritonW4A16
from collegium.experts.triton.tiles.candidates import candidates
from collegium.experts.triton.tiles.choice import nearest
from collegium.experts.triton.tiles.problem import TileChoice
from collegium.layer import MoELayer
from collegium.parallel.local import Local
from collegium.planning import plan
from collegium.problem import DeviceFacts, Limits, Problem
from collegium.runtime.memory import FreshMemory
from collegium.runtime.warm_up import compile_batches, sizes_for, warm_up
from collegium.types import RouterWeights, RoutingSpec, SharedSpec, SharedWeights

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from collegium.experts.triton.tiling import ProductTiling

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("tests/gpu does this on the device", allow_module_level=True)

CPU = torch.device("cpu")
KERNELS = Path(__file__).parents[2] / "src" / "collegium" / "kernels"


def packed_layer(weights: str = "bf16", what: str = "64x64x3x1") -> tuple[Problem, PackedExperts]:
    spec = replace(named_layer(what)[1], weight_format=weights)
    problem = Problem(spec=spec, device=DeviceFacts(kind="cpu", name="test / machine"), activation_format="bf16")
    kernel = TritonBf16() if weights == "bf16" else TritonW4A16()
    packed = kernel.pack(random_weights(spec, CPU), problem.routed)
    # In the interpreter no kernel starts before the one before it has ended.
    return problem, replace(packed, machine=replace(packed.machine, pdl=False))


def possible_tiles(packed: PackedExperts, rows: int) -> dict[str, tuple[TileChoice, ...]]:
    """What may run each product of ``rows`` rows."""
    tiling = packed.tiling
    layouts = {"gate_up": packed.gate_up.layout, "down": packed.down.layout}
    return {name: candidates(tiling.problem_of(own, rows), packed.machine) for name, own in layouts.items()}


def some_tiles(packed: PackedExperts, rows: int, place: int) -> dict[str, tuple[tuple[int, TileChoice], ...]]:
    return {name: ((rows, tiles[place]),) for name, tiles in possible_tiles(packed, rows).items()}


def test_measured_tiles_are_used_nearby(tmp_path):
    problem, packed = packed_layer()
    tables = some_tiles(packed, 64, -1)
    measured = (tables["gate_up"][0][1], tables["down"][0][1])
    assert packed.tiling.pair(64) != measured
    write_tiles(problem, tables, tmp_path)
    tuned = with_measured_tiles(packed, problem, tmp_path)
    assert tuned.measured == (tables["gate_up"], tables["down"])
    for rows in (32, 64, 128):
        assert tuned.tiling.pair(rows) == measured
    for rows in (31, 129):
        assert tuned.tiling.pair(rows) == packed.tiling.pair(rows)


def test_the_nearest_measurement_counts():
    problem, packed = packed_layer()
    first, second = possible_tiles(packed, 8)["down"][:2]
    table = ((8, first), (32, second))
    found = [nearest(table, rows) for rows in (3, 4, 8, 15, 17, 32, 64, 65)]
    assert found == [None, first, first, first, second, second, second, None]
    assert nearest((), 8) is None
    assert problem.spec.num_experts == 3


def test_tiles_change_no_bit():
    problem, packed = packed_layer()
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    batch, _ = Local(num_experts=3).dispatch(x, random_routing(5, problem.spec, "uniform", torch.Generator()))
    tuned = [packed.with_measured(some_tiles(packed, 5, place)) for place in (0, -1)]
    assert tuned[0].tiling.pair(5) != tuned[1].tiling.pair(5)
    results = [own.run(batch) for own in tuned]
    assert torch.equal(results[0], results[1])
    truth = Reference().pack(random_weights(problem.spec, CPU), problem.routed).run(batch)
    assert float((results[0].float() - truth).norm() / truth.norm()) < 0.02


@pytest.mark.parametrize("entry", ["gpu", "capability", "triton", "collegium", "kernels", "hidden", "weights"])
def test_stale_and_foreign_files_are_ignored(entry, tmp_path, caplog):
    problem, packed = packed_layer()
    path = write_tiles(problem, some_tiles(packed, 64, -1), tmp_path)
    held = json.loads(path.read_text())
    held["key"][entry] = "another"
    path.write_text(json.dumps(held))
    with caplog.at_level(logging.WARNING, logger="collegium"):
        assert with_measured_tiles(packed, problem, tmp_path) is packed
        assert with_measured_tiles(packed, problem, tmp_path) is packed
    assert len(caplog.records) == 1
    text = caplog.records[0].getMessage()
    assert entry in text
    assert "another" in text
    assert "collegium tune" in text


@pytest.mark.parametrize(
    "damage",
    [
        lambda held: held["down"][0].update(block_n=96),
        lambda held: held["down"][0].update(stages=400),
        lambda held: held["down"][0].update(rows=0),
        lambda held: held["down"][0].update(cluster=2),
        lambda held: held["down"][0].pop("warps"),
        lambda held: held.pop("gate_up"),
        lambda held: held.update(key=None),
    ],
    ids=["block", "stages", "rows", "unknown entry", "missing entry", "missing product", "no key"],
)
def test_impossible_tiles_are_skipped(damage, tmp_path, caplog):
    problem, packed = packed_layer()
    path = write_tiles(problem, some_tiles(packed, 64, -1), tmp_path)
    held = json.loads(path.read_text())
    damage(held)
    path.write_text(json.dumps(held))
    with caplog.at_level(logging.WARNING, logger="collegium"):
        assert with_measured_tiles(packed, problem, tmp_path) is packed
    assert len(caplog.records) == 1


def test_partial_and_absent_tile_files(tmp_path, caplog):
    problem, packed = packed_layer()
    assert with_measured_tiles(packed, problem, tmp_path) is packed
    assert not caplog.records
    path = write_tiles(problem, some_tiles(packed, 64, -1), tmp_path)
    path.write_text(path.read_text()[:40])
    assert with_measured_tiles(packed, problem, tmp_path) is packed
    assert len(caplog.records) == 1


def test_tile_file_name_and_key(tmp_path, monkeypatch):
    problem, _ = packed_layer()
    key = tile_key(problem)
    assert key["gpu"] == "test / machine"
    assert len(key["kernels"]) == 16
    path = tile_path(problem, tmp_path)
    assert path.parent == tmp_path
    assert path.name == "test___machine-64-64-3-2-bf16-bf16.json"
    other = replace(problem, spec=replace(problem.spec, weight_format="mxfp4"))
    assert tile_path(other, tmp_path) != path
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tile_folder() == tmp_path / "collegium" / "tiles"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert tile_folder() == Path.home() / ".cache" / "collegium" / "tiles"


def test_tuning_keeps_the_fastest_candidate():
    problem, packed = packed_layer(what="64x64x2x1")
    rows = measure_tiles(packed, problem, 1, candidates=2, rounds=1)
    assert [row.product for row in rows] == ["gate_up", "down"]
    for row in rows:
        possible = possible_tiles(packed, 1)[row.product]
        assert row.best in possible
        assert row.chosen in possible
        assert row.best_seconds <= row.chosen_seconds
        assert row.rows == 1


def test_tuning_refuses_a_kernel_without_tiles():
    with pytest.raises(InputError, match="cpu_grouped"):
        tune("64x32x3x1", device="cpu", tokens=(1,))


def variants(packed: PackedExperts) -> Callable[[int], frozenset[Hashable]]:
    """What batches of two rows a token need."""
    tiling, few = packed.tiling, packed.tiling.unsorted_tokens(2)
    return lambda tokens: tiling.variants(2 * tokens, unsorted=tokens <= few)


def tiles_of(tiling: ProductTiling, top_k: int, tokens: Iterable[int]) -> set[tuple[int, TileChoice, bool]]:
    """What compiles a product of its own for batches of ``top_k`` rows a token: its tile, and whether rows are sorted.

    top_k 0: one row a token, always sorted.
    """
    few, rows = tiling.unsorted_tokens(top_k) if top_k else 0, top_k or 1
    found: set[tuple[int, TileChoice, bool]] = set()
    for count in tokens:
        large = tiling.large(rows * count)
        pair = large or tiling.pair(rows * count)
        found |= {(place, tile, count <= few) for place, tile in enumerate(pair)}
    return found


def check_sizes(variants: Callable[[int], frozenset[Hashable]], sizes: list[int], limit: int) -> None:
    """The sizes together need everything that 1 to ``limit`` tokens can need, and each needs something new."""
    assert sizes[0] == 1
    assert sizes == sorted(sizes)
    seen: set[Hashable] = set()
    for count in sizes:
        # Kernels around the products depend on powers of two: whether it is one, and between which two it is.
        own = {*variants(count), (count.bit_length(), (count - 1).bit_length())}
        assert not own <= seen, count
        seen |= own
    for count in range(1, limit + 1):
        assert {*variants(count), (count.bit_length(), (count - 1).bit_length())} <= seen, count


def test_warming_up_needs_every_tile_once():
    _, packed = packed_layer("mxfp4", "256x256x8x2")
    limit = 700
    sizes = sizes_for(variants(packed), limit)
    check_sizes(variants(packed), sizes, limit)
    assert tiles_of(packed.tiling, 2, sizes) == tiles_of(packed.tiling, 2, range(1, limit + 1))
    assert len(sizes) < 60, "more batches than powers of two and tiles"
    # Powers of two choose the variants of the kernels around the products: 64 tokens and 63, 65 rows and 64.
    assert {1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 512, 513} <= set(sizes)
    assert sizes_for(lambda _: frozenset(), limit) == []


@pytest.mark.parametrize("weights", ["bf16", "mxfp4"])
def test_warm_up_covers_shared_expert_tiles(weights):
    spec = replace(named_layer("256x256x8x2")[1], weight_format=weights, shared=SharedSpec(intermediate_size=192))
    limit, hopper = 700, DeviceFacts(kind="cuda", name="H200", capability=(9, 0), memory=140 << 30)
    alone = replace(spec, intermediate_size=192, num_experts=1, routing=RoutingSpec(top_k=1), shared=None)
    layer = MoELayer(
        random_weights(spec, CPU),
        plan(Problem(spec=spec, device=hopper, limits=Limits(max_tokens=limit))),
        shared=SharedWeights(experts=random_weights(alone, CPU)),
    )
    sizes = sizes_for(layer.variants, limit)
    check_sizes(layer.variants, sizes, limit)
    for experts, top_k in ((layer.experts, 2), (layer.shared.experts, 0)):
        tiling = experts.tiling
        assert tiles_of(tiling, top_k, sizes) == tiles_of(tiling, top_k, range(1, limit + 1))
    without = replace(layer.plan.problem, spec=replace(spec, shared=None))
    fewer = sizes_for(MoELayer(random_weights(spec, CPU), plan(without)).variants, limit)
    assert len(fewer) <= len(sizes) < 80


def test_warm_up_covers_sorted_and_unsorted():
    _, packed = packed_layer("mxfp4", "256x256x8x2")
    possible = possible_tiles(packed, 16)["down"]
    some, other = [tile for tile in possible if tile.block_t == possible[0].block_t][:2]
    table = ((16, some), (18, other), (24, some))
    packed = packed.with_measured({"gate_up": table, "down": table})
    assert packed.tiling.unsorted_tokens(2) == 8
    sizes = sizes_for(variants(packed), 15)
    check_sizes(variants(packed), sizes, 15)
    assert tiles_of(packed.tiling, 2, sizes) == tiles_of(packed.tiling, 2, range(1, 16))
    assert {(0, some, True), (0, some, False)} <= tiles_of(packed.tiling, 2, sizes)


def test_warm_up_covers_large_batch_kernel():
    _, packed = packed_layer("bf16", "256x256x8x2")
    hopper = replace(packed, machine=replace(packed.machine, copies=True, compiles=True))
    limit = 2900
    first = next(t for t in range(1, limit + 1) if hopper.tiling.large(2 * t) is not None)
    sizes = sizes_for(variants(hopper), limit)
    check_sizes(variants(hopper), sizes, limit)
    assert first in sizes
    assert all(hopper.tiling.large(2 * t) is not None for t in range(first, limit + 1))
    assert len([t for t in sizes if t > first]) < len([t for t in sizes_for(variants(packed), limit) if t > first])


def test_batches_run_and_report():
    ran: list[int] = []
    said: list[tuple[int, int, str]] = []
    assert compile_batches(ran.append, [1, 7, 30], CPU, lambda *now: said.append(now)) == 3
    assert sorted(ran) == [1, 7, 30]
    assert said == [(1, 3, "1 tokens"), (2, 3, "7 tokens"), (3, 3, "30 tokens")]
    assert compile_batches(ran.append, [], CPU) == 0

    def fails(tokens: int) -> None:
        if tokens == 7:
            raise InputError("seven")

    with pytest.raises(InputError, match="seven"):
        compile_batches(fails, [1, 7], CPU)


_KEYS = """
import json, sys
sys.path.insert(0, sys.argv[1])
from kernels.grouped_gemm import grouped_gemm_kernel
from kernels import permute, quantize, weighted_sum
from kernels.tiles import tile_list_kernel
free = [[p.name for p in k.params if p.do_not_specialize] for k in
        (grouped_gemm_kernel, tile_list_kernel, quantize.e4m3_kernel, permute.permute_kernel,
         permute.count_kernel, permute.scatter_kernel, weighted_sum.weighted_sum_kernel)]
print(json.dumps([grouped_gemm_kernel.cache_key, free]))
"""


def key_of(folder: Path, change: tuple[str, str, str] | None = None):
    shutil.copytree(KERNELS, folder / "kernels")
    if change is not None:
        path = folder / "kernels" / change[0]
        text = path.read_text()
        assert change[1] in text
        path.write_text(text.replace(change[1], change[2]))
    run = subprocess.run(
        [sys.executable, "-c", _KEYS, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"TRITON_INTERPRET": "0"},
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


def test_compile_cache_keys(tmp_path):
    plain, free = key_of(tmp_path / "a")
    assert key_of(tmp_path / "b")[0] == plain
    changes = (
        ("grouped_gemm.py", "acc += tl.load(weights.bias", "acc += 2 * tl.load(weights.bias"),
        ("activation.py", "return 2.0 * _sigmoid(2.0 * x, FAST) - 1.0", "return 2.0 * _sigmoid(2.0 * x, FAST) - 1.5"),
        ("enums.py", "PAIR_SCALE = 5", "PAIR_SCALE = 6"),
    )
    keys = [key_of(tmp_path / str(index), change)[0] for index, change in enumerate(changes)]
    assert len({plain, *keys}) == 4
    # What changes with the token count must not choose a variant: it would compile at some batches only.
    # Nor may what the caller chooses, such as how far apart the rows of ids and weights are.
    lists = ["rank_count", "row_width", "count", "tiles_a", "tiles_b"]
    assert free == [
        ["token_tiles"], ["tiles"], ["rows", "x_ready"], [*lists, "id_stride", "weight_stride"],
        ["count", "range_size", "id_stride"], [*lists, "range_size", "weight_stride"], ["count", "weight_stride"],
    ]  # fmt: skip


def test_identical_layers_warm_up_once(monkeypatch):
    def layer(what: str) -> MoELayer:
        spec = named_layer(what)[1]
        problem = Problem(spec=spec, device=DeviceFacts(kind="cpu"))
        return MoELayer(random_weights(spec, CPU), plan(problem))

    layers = [layer("64x64x3x1"), layer("64x64x3x1"), layer("64x32x3x1")]
    assert layers[0].warm_up() == 0, "nothing to compile on a CPU"
    warmed: list[MoELayer] = []
    monkeypatch.setattr(MoELayer, "warm_up", lambda self, _: (warmed.append(self), 5)[1])
    assert warm_up(layers) == 10
    assert {own.spec.intermediate_size for own in warmed} == {64, 32}


def test_batches_of_zeros(monkeypatch):
    spec = named_layer("64x64x3x2")[1]
    router = RouterWeights(weight=torch.randn(3, 64))
    layer = MoELayer(random_weights(spec, CPU), plan(Problem(spec=spec, device=DeviceFacts(kind="cpu"))), router=router)
    seen: list[tuple[object, ...]] = []
    compute = MoELayer.compute

    def noted(self, tensors, memory):
        x, *given, out, _ = tensors
        assert isinstance(memory, FreshMemory)
        out.fill_(torch.nan)
        compute(self, tensors, memory)
        assert not x.any()
        assert not out.any(), "experts of zeros without biases"
        seen.append((tuple(x.shape), *[None if each is None else each.dtype for each in given[:3]]))

    monkeypatch.setattr(MoELayer, "compute", noted)
    monkeypatch.setattr("collegium.layer.sizes_for", lambda *_: [5])
    assert layer.warm_up() == 1
    kinds = (torch.float32, torch.bfloat16)
    routings = [((5, 64), None, whole, kind) for kind in kinds for whole in (torch.int64, torch.int32)]
    assert seen == [*routings, *(((5, 64), kind, None, None) for kind in (*kinds, None))]


def test_tiles_that_differ_look_different(capsys: pytest.CaptureFixture[str]) -> None:
    tile = TileChoice(block_n=128, block_t=64, warps=4, stages=3)
    others = (
        replace(tile, interleave_gate_up=True),
        replace(tile, depth=2),
        replace(tile, registers=168),
        replace(tile, fuse_k_block=True),
    )
    rows = tuple(
        TuneRow(
            product="down", tokens=64, rows=512, chosen=tile, chosen_seconds=2e-5, best=best, best_seconds=1e-5,
            candidates=5,
        )
        for best in (tile, *others)
    )  # fmt: skip
    print_tuning(TuneReport(shape="s", weights="mxfp4", activations="bf16", device="GPU", path="tiles.json", rows=rows))
    shown = [line for line in capsys.readouterr().out.splitlines() if "128x64 w4 s3" in line]
    assert len(set(shown)) == 5
    assert "128x64 w4 s3 r168" in shown[3]
    assert "128x64 w4 s3 fused" in shown[4]
