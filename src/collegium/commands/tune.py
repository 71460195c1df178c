"""Measure tiles on this machine and keep the best: the work behind ``collegium tune``.

For both products and each token count, the candidates the cost model likes best run alone on random weights, captured
and in turns like every measurement here. The fastest goes into the user's file of measured tiles, from which layers
of the same sizes and formats take it from then on. All candidates must give the same bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, MeasurementError
from ..experts import PackedWeights
from ..experts.measured import write_tiles
from ..parallel import Local
from ..planning import kernel_named
from ..problem import Problem
from ..runtime.devices import probe
from ..runtime.progress import Progress, counted
from .bench import named_layer, planned_layer, random_inputs, random_weights
from .measure import graph_pool, prepare_pass, take_turns
from .memory_check import check_free_memory, layer_needs

__all__ = ["TUNED_TOKENS", "TuneReport", "TuneRow", "measure_tiles", "packed_layer", "tile_times", "tune"]

TUNED_TOKENS = tuple(1 << power for power in range(14))  # each serves token counts up to a factor of two away
_GAIN = 0.98  # a tile must take at most this share of the model's own choice to replace it: less is noise


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneRow:
    """One product at one token count: the tile the model chooses and the best measured, with their seconds."""

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
    """What was measured for one layer and where it was written."""

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
    most: int = 8,
    rounds: int = 5,
    device: str | None = None,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> TuneReport:
    """Measure tiles of the layer ``what`` (see ``bench.named_layer``) in one (weights, activations) and write the file.

    most: candidates measured for each product and token count. folder: of the file, ``tile_folder()`` when None.
    Raises InputError where the plan's kernel has no tiles, MeasurementError when two tiles give different bits.
    """
    name, problem, packed = packed_layer(what, recipe, max(tokens), device)
    rows: list[TuneRow] = []
    for count in counted(sorted(set(tokens)), progress, "{} tokens".format):
        rows += measure_tiles(packed, problem, count, most=most, rounds=rounds)
    names = [product.name for product in packed.products()]
    tables = {name: tuple((row.rows, row.best) for row in rows if row.product == name) for name in names}
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
    what: str, recipe: tuple[str, str], most_tokens: int, device: str | None = None
) -> tuple[str, Problem, PackedWeights]:
    """Return the name, the problem and the packed random weights of the layer ``what``; errors as ``tune``."""
    name, plain = named_layer(what)
    facts = probe(device)
    made = planned_layer(plain, recipe, facts, most_tokens)
    kernel, asked = kernel_named(made.kernel), made.problem.routed
    if not kernel.tiling(asked).block_t(1):
        raise InputError(
            f"tune: {name} in {recipe[0]} x {recipe[1]} runs on {made.kernel}, which has no tiles to choose"
        )
    check_free_memory(f"tune {name}", layer_needs([made], [most_tokens]), facts)
    return name, made.problem, kernel.pack(random_weights(made.problem.spec, torch.device(facts.place)), asked)


def measure_tiles(packed: PackedWeights, problem: Problem, tokens: int, *, most: int, rounds: int) -> list[TuneRow]:
    """Return a row for each product: the best of ``most`` candidates for ``tokens`` tokens, uniform routing."""
    found: list[TuneRow] = []
    for product, (chosen, times) in tile_times(packed, problem, tokens, most=most, rounds=rounds).items():
        fastest = min(times, key=lambda tile: times[tile])
        best = fastest if times[fastest] < _GAIN * times[chosen] else chosen
        found.append(
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
    return found


def tile_times(
    packed: PackedWeights, problem: Problem, tokens: int, *, most: int, rounds: int
) -> dict[str, tuple[Any, dict[Any, float]]]:
    """Return for each product the choice made from the sizes, and the seconds of that and of ``most`` other tiles.

    Raises MeasurementError when two tiles give different bits.
    """
    device, spec = torch.device(problem.device.place), problem.spec
    generator = torch.Generator(device).manual_seed(tokens)
    local = Local(num_experts=spec.num_experts)
    batches = [local.dispatch(*one)[0] for one in random_inputs(tokens, spec, "uniform", generator)]
    count = tokens * spec.routing.top_k
    found: dict[str, tuple[Any, dict[Any, float]]] = {}
    for product in packed.products():
        chosen = product.default_tile(count)
        tiles = list(dict.fromkeys([chosen, *product.candidates(count)[:most]]))
        runs = [product.runner(batch) for batch in batches]
        _same_bits(f"{product.name}, {tokens} tokens", [partial(runs[0], tile) for tile in tiles])
        pool = graph_pool(device)
        passes = {tile: prepare_pass([partial(run, tile) for run in runs], device, pool=pool) for tile in tiles}
        times = take_turns(passes, device, rounds=rounds)
        found[product.name] = (chosen, {tile: times[tile] / len(runs) for tile in tiles})
    return found


def _same_bits(what: str, calls: Sequence[Callable[[], Tensor]]) -> None:
    wanted = calls[0]().clone()
    for call in calls[1:]:
        if not torch.equal(call().view(torch.int16), wanted.view(torch.int16)):
            raise MeasurementError(f"tune: {what}: two tiles give different bits; nothing is written. Please report it")
