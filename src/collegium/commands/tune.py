"""``collegium tune``: measure tile sizes on this GPU and save the fastest.

For both matrix products and each token count, the best candidates of the cost model run on random weights, in CUDA
graphs and in turns. The fastest is written to the user's tile file, which layers of the same sizes and formats read.
All candidates must give the same output bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..dummy.weights import random_weights
from ..errors import InputError, MeasurementError
from ..experts import PackedWeights
from ..experts.measured import write_tiles
from ..parallel import Local
from ..planning import kernel_named
from ..problem import Problem
from ..runtime.devices import probe
from ..runtime.progress import Progress, counted
from .bench import named_layer, planned_layer, random_inputs
from .measure import graph_pool, prepare_pass, take_turns
from .memory_check import check_free_memory, layer_needs

__all__ = ["TUNED_TOKENS", "TuneReport", "TuneRow", "measure_tiles", "packed_layer", "tile_times", "tune"]

TUNED_TOKENS = tuple(1 << power for power in range(14))  # each covers token counts up to a factor of two away
_MAX_SHARE = 0.98  # a tile replaces the cost model's choice if it takes less than this share of its time


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneRow:
    """One product at one token count: the tile that the cost model chooses and the fastest one, with their times."""

    product: str
    tokens: int
    rows: int
    chosen: Any
    chosen_seconds: float
    best: Any
    best_seconds: float
    candidates: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneReport:
    """The measurements of one layer, and the path of the tile file."""

    shape: str
    weights: str
    activations: str
    device: str
    path: str
    rows: tuple[TuneRow, ...]


def tune(
    what: str,
    recipe: tuple[str, str] = ("bf16", "bf16"),
    *,
    tokens: Sequence[int] = TUNED_TOKENS,
    candidates: int = 8,
    rounds: int = 5,
    device: str | None = None,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> TuneReport:
    """Measure the tiles of the layer ``what`` (see ``bench.named_layer``) and write the tile file.

    recipe: (weights, activations).
    candidates: maximum number of tiles measured per product and token count.
    folder: folder of the file; default ``tile_folder()``.

    Raises InputError if the planned kernel has no tiles, MeasurementError if two tiles give different bits.
    """
    name, problem, packed = packed_layer(what, recipe, max(tokens), device)
    rows: list[TuneRow] = []
    for count in counted(sorted(set(tokens)), progress, "{} tokens".format):
        rows += measure_tiles(packed, problem, count, candidates=candidates, rounds=rounds)
    tables = {
        product.name: tuple((row.rows, row.best) for row in rows if row.product == product.name)
        for product in packed.products()
    }
    path = write_tiles(problem, tables, folder)
    return TuneReport(
        shape=name,
        weights=recipe[0],
        activations=problem.activation_format or problem.dtype,
        device=problem.device.name or problem.device.kind,
        path=str(path),
        rows=tuple(rows),
    )


def packed_layer(
    what: str, recipe: tuple[str, str], max_tokens: int, device: str | None = None
) -> tuple[str, Problem, PackedWeights]:
    """Return the name, the problem and the packed random weights of the layer ``what``; raises like ``tune``."""
    name, spec = named_layer(what)
    facts = probe(device)
    layer_plan = planned_layer(spec, recipe, facts, max_tokens)
    kernel = kernel_named(layer_plan.kernel)
    experts_problem = layer_plan.problem.routed
    if not kernel.tiling(experts_problem).block_t(1):
        raise InputError(
            f"tune: {name} in {recipe[0]} x {recipe[1]} runs on {layer_plan.kernel}, which has no tiles to choose"
        )
    check_free_memory(f"tune {name}", layer_needs([layer_plan], [max_tokens]), facts)
    return (
        name,
        layer_plan.problem,
        kernel.pack(random_weights(layer_plan.problem.spec, torch.device(facts.place)), experts_problem),
    )


def measure_tiles(
    packed: PackedWeights, problem: Problem, tokens: int, *, candidates: int, rounds: int
) -> list[TuneRow]:
    """Return a row for each product: the fastest of ``candidates`` tiles for ``tokens`` tokens, uniform routing."""
    rows: list[TuneRow] = []
    for product, (chosen, times) in tile_times(packed, problem, tokens, candidates=candidates, rounds=rounds).items():
        fastest = min(times, key=lambda tile: times[tile])
        best = fastest if times[fastest] < _MAX_SHARE * times[chosen] else chosen
        rows.append(
            TuneRow(
                product=product,
                tokens=tokens,
                rows=tokens * problem.spec.routing.top_k,
                chosen=chosen,
                chosen_seconds=times[chosen],
                best=best,
                best_seconds=times[best],
                candidates=len(times),
            )
        )
    return rows


def tile_times(
    packed: PackedWeights, problem: Problem, tokens: int, *, candidates: int, rounds: int
) -> dict[str, tuple[Any, dict[Any, float]]]:
    """Return, by product, the tile of the cost model and the seconds of it and of up to ``candidates`` other tiles.

    Raises MeasurementError if two tiles give different bits.
    """
    device = torch.device(problem.device.place)
    spec = problem.spec
    generator = torch.Generator(device).manual_seed(tokens)
    local = Local(num_experts=spec.num_experts)
    batches = [local.dispatch(x, routing)[0] for x, routing in random_inputs(tokens, spec, "uniform", generator)]
    count = tokens * spec.routing.top_k
    results: dict[str, tuple[Any, dict[Any, float]]] = {}
    for product in packed.products():
        chosen = product.default_tile(count)
        tiles = list(dict.fromkeys([chosen, *product.candidates(count)[:candidates]]))
        runs = [product.runner(batch) for batch in batches]
        _same_bits(f"{product.name}, {tokens} tokens", [partial(runs[0], tile) for tile in tiles])
        pool = graph_pool(device)
        passes = {tile: prepare_pass([partial(run, tile) for run in runs], device, pool=pool) for tile in tiles}
        times = take_turns(passes, device, rounds=rounds)
        results[product.name] = (chosen, {tile: times[tile] / len(runs) for tile in tiles})
    return results


def _same_bits(what: str, calls: Sequence[Callable[[], Tensor]]) -> None:
    expected = calls[0]().clone().view(torch.int16)
    for call in calls[1:]:
        if not torch.equal(call().view(torch.int16), expected):
            raise MeasurementError(f"tune: {what}: two tiles give different bits; nothing is written. Please report it")
