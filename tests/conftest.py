from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

# Triton's interpreter multiplies with NumPy. OpenBLAS's products for Haswell and Zen add in an order that depends on
# how many columns there are; these do not. Read when NumPy is first loaded.
if platform.machine() in ("x86_64", "AMD64"):
    os.environ["OPENBLAS_CORETYPE"] = "Sandybridge"

import pytest
import torch

from once import FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_HERE = Path(__file__).parent
collect_ignore = ["vllm"]  # `make vllm-test` runs them, in an environment of their own


def pytest_configure(config: pytest.Config) -> None:
    """Make the folder that the processes of this run share; workers of pytest-xdist inherit its path."""
    if not hasattr(config, "workerinput"):
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="collegium-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove that folder."""
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(FOLDER), ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark ``exhaustive`` what ``each_choice`` leaves over, before ``-m`` deselects."""
    grids: defaultdict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("each_choice"):
            grids[item.nodeid.partition("[")[0]].append(item)
    for cells in grids.values():
        for item in _left_over(cells):
            item.add_marker("exhaustive")


def _left_over(cells: Sequence[pytest.Function]) -> list[pytest.Function]:
    """Return the cells without which every value of every parameter still occurs, for few cells that remain.

    Greedy, in the order of the grid; the cells that are marked ``exhaustive`` by hand are no choice. Values are told
    apart by what they are if they are plain, and by identity: cells of a grid share their values. Cells that this
    machine skips are not chosen, since they would cover nothing.
    """
    skipped = [cell for cell in cells if _is_skipped(cell)]
    left = [cell for cell in cells if cell not in skipped and not cell.get_closest_marker("exhaustive")]
    values: dict[pytest.Function, set[tuple[str, object]]] = {}
    for cell in left:
        params = cell.callspec.params
        plain = {name for name, value in params.items() if value is None or isinstance(value, str | int | float)}
        told: dict[str, object] = {name: repr(value) if name in plain else id(value) for name, value in params.items()}
        values[cell] = set(told.items())
        for mark in cell.iter_markers("each_choice"):
            values[cell].add((" ".join(mark.args), tuple(told[name] for name in mark.args)))
    missing = set().union(*values.values())
    while missing:
        best = max(left, key=lambda cell: len(values[cell] & missing))
        left.remove(best)
        missing -= values[best]
    return left + skipped


def _is_skipped(cell: pytest.Function) -> bool:
    """Return whether a ``skipif`` mark without an expression to evaluate skips the cell."""
    return any(mark.args and mark.args[0] is True for mark in cell.iter_markers("skipif"))


@pytest.fixture(autouse=True)
def _poisoned_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fill fresh memory so that a row or a scale nobody wrote cannot pass for a result.

    Floats become NaN (also every float8, and E8M0 byte 255), integers their maximum, booleans True. Torch does
    it for every way of making an empty tensor, from Python or C++, in its deterministic mode; only the packed
    four-bit dtype cannot be filled. Tests of the CPU only: on a GPU that mode refuses operations that are
    deterministic for our inputs.
    """
    if not request.path.is_relative_to(_HERE / "cpu"):
        yield
        return
    fill, mode = (
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.are_deterministic_algorithms_enabled(),
    )
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(mode)
    torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)
