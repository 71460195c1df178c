"""The page of capabilities, defects and features beyond: each row once, a known verdict, tests that exist, counts."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "developer" / "seeds.md").read_text(encoding="utf-8")
EVERY = [
    [cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if re.match(r"\| [DV]?\d", line)
]
SECTIONS = {"": 126, "D": 19, "V": 16}  # the letter before the number of a row, and how many there are
SYSTEMS = {"FusedMoE", "MegaMoE", "DeepGEMM FP8", "DeepGEMM FP4", "NVFP4 runner"}
VERDICTS = ("yes", "better", "partly", "no")
MAX_CELL = 200  # characters, so that the tables stay readable


@cache
def functions(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def rows_of(letter: str) -> list[list[str]]:
    return [row for row in EVERY if row[0].rstrip("0123456789") == letter]


@pytest.mark.parametrize(("letter", "count"), SECTIONS.items())
def test_every_row_is_complete(letter: str, count: int) -> None:
    assert [row[0] for row in rows_of(letter)] == [f"{letter}{number}" for number in range(1, count + 1)]
    for number, there, here, proof, verdict in rows_of(letter):
        assert there, number
        assert here, number
        assert verdict in VERDICTS, number
        missing = re.search(r"\bMissing\b", here) is not None
        assert missing == (verdict in ("partly", "no")), f"{number}: what is missing is named, and only then"
        assert proof or verdict == "no", number
        assert verdict != "better" or re.search(r"\d", here), f"{number}: a row that is better has a measure"
        assert max(map(len, (there, here))) <= MAX_CELL, number


def test_rows_name_their_system() -> None:
    for number, there, *_ in rows_of("") + rows_of("D"):
        assert {name.strip() for name in there.split(":")[0].split(",")} <= SYSTEMS, number


def test_counts_are_those_of_the_rows() -> None:
    counts: list[str] = []
    for letter in SECTIONS:
        verdicts = Counter(row[-1] for row in rows_of(letter))
        listed = ", ".join(f"{verdicts[verdict]} {verdict}" for verdict in VERDICTS)
        counts.append(f"{len(rows_of(letter))} rows: {listed}.")
    assert re.findall(r"^\d+ rows: .*$", TEXT, re.MULTILINE) == counts


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`(tests/\S+?)::(\w+)`", TEXT)
    assert len(named) > 99
    assert [f"{path}::{name}" for path, name in named if name not in functions(path)] == []
