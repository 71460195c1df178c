from __future__ import annotations

import csv

import pytest

import mutants
from mutants import GPU_MUTANTS, MUTANTS, Mutant, applied
from tracked import ROOT

ALL = (*MUTANTS, *GPU_MUTANTS)


@pytest.mark.parametrize("mutant", ALL, ids=lambda m: f"{m.name}-{m.file}")
def test_every_mutant_still_applies(mutant: Mutant) -> None:
    text = (ROOT / "src" / "collegium" / mutant.file).read_text(encoding="utf-8")
    changed = applied(mutant, text)
    assert changed != text
    if mutant.file.endswith(".py"):
        compile(changed, mutant.file, "exec")
    assert mutant.tests
    assert all((ROOT / test.partition("::")[0]).is_file() for test in mutant.tests)


def test_a_pattern_that_is_gone_or_not_unique_is_refused() -> None:
    wrong = Mutant("m", "layer.py", (("absent", "x"),), ("t",))
    with pytest.raises(ValueError, match="occurs 0 times"):
        applied(wrong, "text")
    with pytest.raises(ValueError, match="occurs 2 times"):
        applied(wrong, "absent absent")


def test_no_two_mutants_share_a_name_and_a_file() -> None:
    assert len({(mutant.name, mutant.file) for mutant in ALL}) == len(ALL)


def test_the_page_lists_every_mutant_and_none_survives() -> None:
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
