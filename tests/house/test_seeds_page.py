"""The page of the 99 capabilities, of defects and of what is beyond: each row once, a known state, tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "developer" / "seeds.md").read_text(encoding="utf-8")
EVERY = [
    [cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if re.match(r"\| [DV]?\d", line)
]
SECTIONS = {"": 99, "D": 19, "V": 16}  # the letter before the number of a row, and how many there are
STATES = ("yes", "partly", "no", "not on this hardware")


@cache
def functions(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def rows_of(letter: str) -> list[list[str]]:
    return [row for row in EVERY if row[0].rstrip("0123456789") == letter]


@pytest.mark.parametrize(("letter", "count"), SECTIONS.items())
def test_every_row_is_complete(letter: str, count: int) -> None:
    assert [row[0] for row in rows_of(letter)] == [f"{letter}{number}" for number in range(1, count + 1)]
    for number, capability, state, what, proof in rows_of(letter):
        assert capability, number
        assert state in STATES, number
        # What is there is proved; what is not there says why.
        assert proof if state == "yes" else what, number


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`(tests/\S+?)::(\w+)`", TEXT)
    assert len(named) > 99
    assert [f"{path}::{name}" for path, name in named if name not in functions(path)] == []
