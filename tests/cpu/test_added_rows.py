"""An experts kernel, a dispatcher and a pipeline, each added by one row of a table and nothing else.

The throw-away kernel has tiles: so its layers get tile lists, the unsorted path, warm-up, tuning and lines of the plan.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar
from unittest.mock import patch

import pytest
import torch

from collegium import (
    Limits,
    MoELayer,
    MoESpec,
    Overrides,
    PlanError,
    Problem,
    RouterWeights,
    RoutingSpec,
    SharedSpec,
    SharedWeights,
    experts,
    parallel,
    pipelines,
    plan,
    warm_up,
)
from collegium.commands import tune
from collegium.experts import CpuGrouped, PackedWeights, Tiling, measured as measuring
from collegium.experts.measured import with_measured_tiles
from collegium.parallel import Local, LocalKind
from collegium.pipelines.split import Split, SplitKind
from collegium.problem import DeviceFacts
from collegium.runtime.memory import Workspaces, alloc
from collegium.testing.compare import heavy_tailed, random_experts

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping
    from pathlib import Path

    from collegium.problem import ExpertsProblem
    from collegium.runtime.memory import Memory, Regions
    from collegium.types import ContiguousBatch, ExpertWeights

CPU = torch.device("cpu")
SPEC = MoESpec(
    hidden_size=48,
    intermediate_size=40,
    num_experts=6,
    routing=RoutingSpec(top_k=2),
    weight_format="fp32",
    shared=SharedSpec(intermediate_size=40),
)
GPU = DeviceFacts(kind="cuda", name="H200", capability=(9, 0), memory=140 << 30)


@dataclass(frozen=True)
class Tile:
    block_t: int


class Sixteens(Tiling):
    """Tiles of 16 rows up to 40 rows, then of 64; one token runs unsorted."""

    def family(self, rows: int, *, unsorted: bool = False) -> str:
        return "sixteens" if rows <= 40 else "sixty-fours"

    def block_t(self, rows: int) -> tuple[int, ...]:
        return (16,) if rows <= 40 else (64,)

    def unsorted_tokens(self, top_k: int) -> int:
        return 1

    def variants(self, rows: int, *, unsorted: bool) -> frozenset[Hashable]:
        return frozenset({(self.block_t(rows), unsorted)})


@dataclass(frozen=True)
class Gemm:
    """A product whose tile can be measured; tile 32 is made the fastest one by the test."""

    name: str
    packed: Any

    def default_tile(self, rows: int) -> Tile:
        return Tile(16)

    def candidates(self, rows: int) -> tuple[Tile, ...]:
        return Tile(32), Tile(16)

    def runner(self, batch: ContiguousBatch) -> Any:
        return lambda tile: torch.zeros(4, dtype=torch.bfloat16)


@dataclass(frozen=True)
class ThrowAwayExperts(PackedWeights):
    inner: Any
    log: list[tuple[Any, ...]]
    measured: Any = None

    @property
    def tiling(self) -> Tiling:
        return Sixteens()

    def run(self, batch: ContiguousBatch, memory: Memory | None = None) -> torch.Tensor:
        rows = self.inner.run(replace(batch, tiles=()))
        self.log.append(("sorted", batch.x.shape[0], tuple(tile.block_t for tile in batch.tiles), memory is not None))
        return alloc(memory, "rows", tuple(rows.shape), torch.float32, CPU).copy_(rows)

    def run_unsorted(
        self, x: torch.Tensor, ids: torch.Tensor, memory: Memory | None = None, adapters: Any = None
    ) -> torch.Tensor:
        self.log.append(("unsorted", x.shape[0], (), memory is not None))
        order = ids.reshape(-1).argsort(stable=True)
        offsets = torch.searchsorted(ids.reshape(-1)[order], torch.arange(SPEC.num_experts + 1))
        from collegium.types import ContiguousBatch

        source = torch.div(order, ids.shape[1], rounding_mode="floor")
        rows = self.inner.run(ContiguousBatch(x=x, source=source, expert_offsets=offsets))
        return torch.empty_like(rows).index_copy_(0, order, rows)

    def products(self) -> tuple[Gemm, ...]:
        return Gemm("only", self), Gemm("other", self)

    def with_measured(self, tables: Mapping[str, Any]) -> ThrowAwayExperts:
        return replace(self, measured=tables)


class ThrowAway:
    """The one file; ``row`` below is the one row."""

    name = "throw_away"
    capturable = True
    takes_codes = False

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []

    def refuse(self, problem: ExpertsProblem) -> str | None:
        return None if problem.weight_format == "fp32" else f"the weights are {problem.weight_format}; supported: fp32"

    def multiplied_as(self, activation_format: str) -> str | None:
        return None

    def tiling(self, problem: ExpertsProblem) -> Tiling:
        return Sixteens()

    def regions(self, problem: ExpertsProblem) -> Regions:
        return {"rows": 4 * problem.rows * problem.hidden}

    def pack(self, weights: ExpertWeights[Any], problem: ExpertsProblem) -> ThrowAwayExperts:
        return ThrowAwayExperts(inner=CpuGrouped().pack(weights, problem), log=self.log)


@pytest.fixture
def row(monkeypatch: pytest.MonkeyPatch) -> ThrowAway:
    made = ThrowAway()
    monkeypatch.setattr(experts, "KERNELS", (made, *experts.KERNELS))
    return made


def layer_of(problem: Problem, force: Overrides | None = None) -> MoELayer:
    return MoELayer(
        random_experts(6, 2, 40, 48, seed=1),
        plan(problem, force),
        router=RouterWeights(weight=heavy_tailed(6, 48, seed=2)),
        shared=SharedWeights(experts=random_experts(1, 2, 40, 48, seed=3)),
    )


def problem_on(device: DeviceFacts, most: int = 64) -> Problem:
    return Problem(spec=SPEC, device=device, limits=Limits(max_tokens=most), dtype="fp32")


def test_a_kernel_is_one_row(row: ThrowAway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with patch.object(torch.Tensor, "is_cuda", False):
        wanted = layer_of(problem_on(GPU), Overrides(kernel="reference"))
    made = layer_of(problem_on(GPU), Overrides(shared="sequential"))
    # Lines of the plan.
    assert made.plan.kernel == made.plan.shared_kernel == "throw_away"
    assert [(s.tokens, s.pipeline, s.tiles) for s in made.plan.token_ranges] == [
        (1, "direct", "sixteens"),
        (2, "split", "sixteens"),
        (21, "split", "sixty-fours"),
    ]
    assert re.search(r"1 token: direct [^;]*sixteens[^;]*; 2 to 20 tokens: split [^;]*sixteens[^;]*; 21 ", repr(made))
    names = {region.name: region.nbytes for region in made.plan.regions}
    assert names["experts/rows"] == 4 * 64 * 2 * 48
    assert names["shared/rows"] == 4 * 64 * 48
    # Memory of the plan, tile lists, the unsorted path; the truth of the reference.
    made.workspaces = Workspaces(CPU)
    made.workspaces.reserve(made.plan.workspace_bytes)
    for tokens, how, tiles in ((1, "unsorted", ()), (9, "sorted", (16,)), (40, "sorted", (64,))):
        x = heavy_tailed(tokens, 48, seed=tokens)
        row.log.clear()
        with patch.object(torch.Tensor, "is_cuda", True), _torch_alone():
            found = made(x)
        assert row.log == [(how, tokens, tiles, True), ("sorted", tokens, (), True)], "the routed, then the shared one"
        torch.testing.assert_close(found, wanted(x), rtol=1e-4, atol=1e-4)
    # Warm-up: a batch for every variant of routed and shared expert, and no other.
    row.log.clear()
    with patch.object(torch.Tensor, "is_cuda", True), _torch_alone():
        batches = warm_up([made])
    sizes = {entry[1] for entry in row.log}
    assert batches == len(sizes)
    assert {1, 2, 21, 41} <= sizes
    assert len(sizes) <= 14, "powers of two, and one for each change of tiles"
    # Tuning and its file.
    monkeypatch.setattr(tune, "take_turns", lambda passes, *_, **__: {tile: 1 / tile.block_t for tile in passes})
    monkeypatch.setattr(tune, "probe", lambda _: replace(GPU, index=None))
    monkeypatch.setattr(tune, "random_weights", lambda *_: random_experts(6, 2, 40, 48, seed=1))
    monkeypatch.setattr(tune, "check_free_memory", lambda *_: None)
    packed, problem = made.experts, made.plan.problem
    rows = tune.measure_tiles(packed, replace(problem, device=replace(GPU, kind="cpu")), 4, candidates=1, rounds=1)
    assert [(r.product, r.chosen, r.best) for r in rows] == [(n, Tile(16), Tile(32)) for n in ("only", "other")]
    tables = {r.product: ((r.rows, r.best),) for r in rows}
    measuring.write_tiles(problem, tables, tmp_path)
    again: Any = with_measured_tiles(packed, problem, tmp_path)
    assert again.measured == {"only": ((8, Tile(32)),), "other": ((8, Tile(32)),)}


def _torch_alone() -> Any:
    """Let torch compute what kernels would on a GPU: the tensors are on a CPU and only say otherwise."""
    return _Patches()


class _Patches:
    rooms = ("linear", "permute", "quantize", "route", "weighted_sum")

    def __enter__(self) -> None:
        from importlib import import_module

        self.made = [
            patch.object(import_module(f"collegium.ops.{room}"), "on_device", lambda *_: False) for room in self.rooms
        ]
        for each in self.made:
            each.start()

    def __exit__(self, *_: object) -> None:
        for each in self.made:
            each.stop()


class Twice(Local):
    """Sends every batch through the experts twice as large, as an exchange with a neighbour would."""

    def rows(self, tokens: int, top_k: int) -> int:
        return 2 * tokens * top_k


class TwiceKind(LocalKind):
    name = "twice"

    def wire_format(self, problem: Problem) -> str:
        return "carrier pigeon"

    def rows(self, problem: Problem, tokens: int) -> int:
        return 2 * tokens * problem.spec.routing.top_k

    def capacity(self, problem: Problem) -> int:
        return 2 * super().capacity(problem)

    def build(self, problem: Problem) -> Local:
        return Twice(num_experts=problem.spec.num_experts)


def test_a_dispatcher_is_one_row(row: ThrowAway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "DISPATCHERS", (TwiceKind(), *parallel.DISPATCHERS))
    made = layer_of(problem_on(GPU))
    assert made.plan.dispatcher == "twice"
    assert made.plan.capacity == 2 * 64 * 2
    assert "carrier pigeon" in repr(made)
    # It is not the local one, so nothing runs unsorted, and tiles are chosen for the rows that it says arrive.
    assert [(s.tokens, s.pipeline, s.tiles) for s in made.plan.token_ranges] == [
        (1, "split", "sixteens"),
        (11, "split", "sixty-fours"),
    ]
    x = heavy_tailed(13, 48, seed=5)
    with patch.object(torch.Tensor, "is_cuda", True), _torch_alone():
        found = made(x)
    assert row.log[-2:] == [("sorted", 13, (64,), False), ("sorted", 13, (), False)]
    torch.testing.assert_close(found, layer_of(problem_on(GPU), Overrides(dispatcher="local"))(x))
    known = "twice, local, symm_mem, all_to_all, all_gather, all_to_all_fixed, partial"
    with pytest.raises(PlanError, match=f"known dispatchers: {known}"):
        plan(problem_on(GPU), Overrides(dispatcher="nccl"))


class Loud(Split):
    """A pipeline that says it ran."""

    heard: ClassVar[list[int]] = []

    def __call__(self, x: torch.Tensor, *args: Any, **others: Any) -> torch.Tensor:
        self.heard.append(x.shape[0])
        return Split.__call__(self, x, *args, **others)


class LoudKind(SplitKind):
    name = "loud"
    description = "one kernel for everything"

    def refuse(self, asked: Any) -> str | None:
        if asked.problem.spec.routing.method != "renormalize_naive":
            return f"the routing is {asked.problem.spec.routing.method}; supported: renormalize_naive"
        return None if asked.problem.spec.shared is not None else "the layer has no shared expert; it needs one"

    def max_tokens(self, tiling: Tiling, top_k: int) -> int | None:
        return 30

    def regions(self, asked: Any) -> Regions:
        return super().regions(asked) | {"loud": 1 << 20}

    def build(self, parts: Any) -> Loud:
        return Loud(parts=parts)


def test_a_pipeline_is_one_row(row: ThrowAway, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {kind.name: kind for kind in pipelines.PIPELINES}
    monkeypatch.setattr(pipelines, "PIPELINES", (rows["direct"], LoudKind(), rows["split"]))
    made = layer_of(problem_on(GPU), Overrides(shared="sequential"))
    assert [(s.tokens, s.pipeline) for s in made.plan.token_ranges] == [
        (1, "direct"),
        (2, "loud"),
        (21, "loud"),
        (31, "split"),
    ]
    assert {region.name: region.nbytes for region in made.plan.regions}["loud"] == 1 << 20
    assert "2 to 20 tokens: loud (one kernel for everything, sixteens)" in repr(made)
    Loud.heard.clear()
    for tokens in (1, 2, 30, 31):
        with patch.object(torch.Tensor, "is_cuda", True), _torch_alone():
            made(heavy_tailed(tokens, 48, seed=tokens))
    assert Loud.heard == [2, 30]
    v3 = replace(SPEC.routing, score="sigmoid", correction_bias=True)
    routing = replace(problem_on(GPU), spec=replace(SPEC, routing=v3))
    said = {r.name: r.reason for r in plan(routing, Overrides(shared="sequential")).refusals}
    assert said["loud"] == "the routing is deepseek_v3; supported: renormalize_naive"
    assert "6 experts, top-2 (deepseek_v3), hidden 48" in plan(routing).explain()
    assert "6 experts, top-2 (renormalize_naive), hidden 48" in repr(made)
    without = replace(problem_on(GPU), spec=replace(SPEC, shared=None))
    assert ("loud", "the layer has no shared expert; it needs one") in {
        (r.name, r.reason) for r in plan(without).refusals
    }
    assert plan(problem_on(GPU), Overrides(pipeline="split")).pipelines == ("split",)
