"""Rows of parametrizations that only `make test-all` runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

__all__ = ["exhaustive", "mainly"]


def exhaustive(*rows: Any) -> list[Any]:
    """Return rows with the mark ``exhaustive``; a tuple is the values of several parameters."""
    return [pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.exhaustive) for row in rows]


def mainly(rows: Iterable[Any], main: Collection[Any]) -> list[Any]:
    """Return rows of which those that are not in ``main`` are exhaustive."""
    return [row if row in main else exhaustive(row)[0] for row in rows]
