"""The page of the 99 capabilities: each row once, a known state, and tests that exist."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "seeds.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if re.match(r"\| \d", line)]
STATES = ("yes", "partly", "no", "not on this hardware")


@cache
def functions(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_every_row_is_there_once_and_says_what_it_is() -> None:
    assert [int(row[0]) for row in ROWS] == list(range(1, 100))
    for number, capability, state, what, proof in ROWS:
        assert capability, number
        assert state in STATES, number
        # What is there is proved; what is not there says why.
        assert proof if state == "yes" else what, number


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`(tests/\S+?)::(\w+)`", TEXT)
    assert len(named) > 99
    assert [f"{path}::{name}" for path, name in named if name not in functions(path)] == []


def test_the_counts_are_those_of_the_rows() -> None:
    counts = Counter(row[2] for row in ROWS)
    said = ", ".join(f"{counts[state]} {state}" for state in STATES[:3])
    assert f"{said}, {counts[STATES[3]]} that this hardware cannot do." in TEXT
