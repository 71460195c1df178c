"""Tiles measured on this machine, in the user's cache directory; ``collegium tune`` writes them.

A file is used only if everything it depends on is unchanged since it was measured (GPU, Triton, this package and its
kernels' source, sizes and formats) and the machine can run each tile in it. Tiles change no bit of a result, so a file
can only cost time.
"""

import hashlib
import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from ..problem import Problem
from ..runtime.user_cache import cache_folder, write_atomic
from .base import PackedWeights

__all__ = ["tile_folder", "tile_key", "tile_path", "with_measured_tiles", "write_tiles"]

_LOG = logging.getLogger("collegium")
Tables = tuple[tuple[int, Any], ...]  # (rows, the fastest measured tile there), rows ascending


def tile_folder() -> Path:
    """Return the folder of measured tiles."""
    return cache_folder("tiles")


def tile_key(problem: Problem) -> dict[str, Any]:
    """Return everything that measured tiles depend on, as plain values."""
    experts, device = problem.routed, problem.device
    return {
        "gpu": device.name,
        "capability": list(device.capability or ()),
        "triton": version("triton") if find_spec("triton") else "unknown",
        "collegium": str(vars(sys.modules[__name__.partition(".")[0]])["__version__"]),
        "kernels": _source_hash(),
        "hidden": experts.hidden,
        "intermediate": experts.intermediate,
        "experts": experts.experts,
        "parts": experts.parts,
        "weights": experts.weight_format if not experts.mixed else "+".join(experts.formats),
        "activations": experts.activation_format,
    }


def tile_path(problem: Problem, folder: Path | None = None) -> Path:
    """Return the file of ``problem``, named by GPU, sizes and formats."""
    key = tile_key(problem)
    names = ("gpu", "hidden", "intermediate", "experts", "parts", "weights", "activations")
    name = "-".join(str(key[part]) for part in names)
    return (folder or tile_folder()) / ("".join(c if c.isalnum() or c in "-_" else "_" for c in name) + ".json")


def write_tiles(problem: Problem, tuned: Mapping[str, Tables], folder: Path | None = None) -> Path:
    """Write the tiles measured for ``problem``, by product, and return the file."""
    path = tile_path(problem, folder)
    tables = {name: [{"rows": rows} | asdict(tile) for rows, tile in table] for name, table in tuned.items()}
    write_atomic(path, (json.dumps({"key": tile_key(problem), **tables}, indent=1) + "\n").encode())
    return path


def with_measured_tiles(packed: PackedWeights, problem: Problem, folder: Path | None = None) -> PackedWeights:
    """Return ``packed`` with the tiles of this machine's file; unchanged without a file, a GPU or products to tune.

    A stale, foreign or damaged file is ignored with one warning.
    """
    if not packed.products() or (folder is None and problem.device.kind != "cuda"):
        return packed
    path = tile_path(problem, folder)
    if not path.is_file():
        return packed
    try:
        tables = _read(path, problem, packed)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _warn(path, str(error) or type(error).__name__)
        return packed
    return packed.with_measured(tables)


def _read(path: Path, problem: Problem, packed: PackedWeights) -> dict[str, Tables]:
    document = cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8")))
    expected, key = tile_key(problem), document["key"]
    for name, value in expected.items():
        if key.get(name) != value:
            raise ValueError(f"it was measured with {name} {key.get(name)!r}, this is {value!r}")
    tables: dict[str, Tables] = {}
    for product in packed.products():
        table: list[tuple[int, Any]] = []
        for entry in document[product.name]:
            rows, tile = int(entry.pop("rows")), type(product.default_tile(1))(**entry)
            if rows < 1 or tile not in product.candidates(rows):
                raise ValueError(f"{product.name} at {rows} rows: {tile} does not run on this machine")
            table.append((rows, tile))
        tables[product.name] = tuple(sorted(table, key=lambda pair: pair[0]))
    return tables


@cache
def _warn(path: Path, reason: str) -> None:
    _LOG.warning("measured tiles in %s are ignored: %s; run collegium tune again", path, reason)


@cache
def _source_hash() -> str:
    """Return a digest of the kernels' source and of the tile choice: another kernel needs another measurement."""
    here = Path(__file__).resolve()
    kernels = here.parents[1] / "kernels"
    sources = [
        *sorted(kernels.glob("*.py")),
        *sorted(kernels.glob("*.cu*")),
        *sorted(here.parent.glob("triton/tiles/*.py")),
    ]
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
