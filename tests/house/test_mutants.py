from __future__ import annotations

import csv

import pytest

import mutants
from mutant_edits import Edit, edited
from mutants import GPU_MUTANTS, MUTANTS, applied
from tracked import ROOT

ALL = (*MUTANTS, *GPU_MUTANTS)


@pytest.mark.parametrize("file", sorted({mutant.file for mutant in ALL}))
def test_every_mutant_applies(file: str) -> None:
    text = (ROOT / "src" / "collegium" / file).read_text(encoding="utf-8")
    for mutant in ALL:
        if mutant.file == file:
            assert applied(mutant, text) != text
            assert mutant.tests
            assert all((ROOT / test.partition("::")[0]).is_file() for test in mutant.tests)


SOURCE = """
class Layer:
    def run(self, x, scale):
        total = add(x * scale, [scale - x])  # a sum
        if total > 0:
            self.seen = total
        return total

    def other(self, x): return x * x
"""


@pytest.mark.parametrize(
    ("symbol", "before", "after", "line"),
    [
        ("Layer.run", "$a * $b", "$a / $b", "total = add((x / scale), [scale - x])  # a sum"),
        ("Layer.run", "add($a * $b, $c)", "add($b, $c)", None),
        ("Layer.run", "add($a * $b, [$b - $a])", "add($b, $a)", "total = add(scale, x)  # a sum"),
        ("Layer.run", "$t > 0", "x < $t", "if (x < total):"),
        ("Layer.run", "self.seen = $t", "", "pass"),
        ("Layer.run", "return $t", "$t = 1\nreturn $t", "total = 1\n        return total"),
        ("Layer.other", "$a * $a", "$a", "def other(self, x): return x"),
        ("Layer", "$a * $b", "$a", "total = add(x, [scale - x])  # a sum"),
    ],
)
def test_edit_matches_code_by_structure(symbol: str, before: str, after: str, line: str | None) -> None:
    if line is None:  # what is a list there is no name
        with pytest.raises(ValueError, match="occurs 0 times"):
            edited(Edit(symbol, before, after), SOURCE)
        return
    changed = edited(Edit(symbol, before, after), SOURCE)
    assert f"{line}\n" in changed
    compile(changed, "changed", "exec")


@pytest.mark.parametrize(
    ("symbol", "before", "after", "reason"),
    [
        ("Layer.run", "$a / $b", "1", "occurs 0 times"),
        ("", "return $a * $b", "pass", "occurs 0 times"),
        ("Layer.gone", "$a", "1", "Layer.gone is defined 0 times"),
        ("Layer.run", "$t > 0", "$t > limit", "limit"),
    ],
)
def test_edit_without_unique_match_refused(symbol: str, before: str, after: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        edited(Edit(symbol, before, after), SOURCE)


def test_text_edit_stays_within_function() -> None:
    source = "int f(int a);\nint f(int a) {\n  if (a) { return 1; }\n  return  2;\n}\nint g(int a) { return 2; }\n"
    changed = edited(Edit("f", "return 2;", "return 3;"), source, python=False)
    assert changed == source.replace("return  2;", "return 3;")
    with pytest.raises(ValueError, match="occurs 2 times"):
        edited(Edit("", "return 2;", "return 3;"), source, python=False)


def test_mutant_name_and_file_are_unique() -> None:
    assert len({(mutant.name, mutant.file) for mutant in ALL}) == len(ALL)


def test_page_lists_every_mutant_as_killed() -> None:
    page = mutants.PAGE.read_text(encoding="utf-8")
    assert page == mutants.page(), "python scripts/mutants.py --page writes it anew"
    lines = mutants.RESULTS.read_text(encoding="utf-8").splitlines()
    rows = {(row["mutant"], row["file"]): row for row in csv.DictReader(lines)}
    for mutant in ALL:
        assert f"| {mutant.name} | `{mutant.file}` |" in page
        row = rows.get((mutant.name, mutant.file))
        if row is None and mutant in GPU_MUTANTS:
            assert f"| {mutant.name} | `{mutant.file}` | not run yet |" in page
            continue
        assert row is not None
        assert row["killed_by"], f"{mutant.name} in {mutant.file} survives"
