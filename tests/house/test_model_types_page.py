"""The table of model types in docs/families.md is that of the committed list, and its numbers are within rounding."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from list_model_types import table

ROOT = Path(__file__).parents[2]
LISTS = sorted((ROOT / "tests" / "data").glob("model_types_transformers_*.csv"))


def test_page_has_newest_table() -> None:
    page = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
    assert "\n".join(table(LISTS[-1])) in page


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_differences_are_rounding(path: Path) -> None:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    numbers = [float(row[key]) for row in rows for key in ("layer", "whole") if row[key]]
    assert len(numbers) > 80
    assert max(numbers) < 2e-5
    assert min(numbers) > 0  # equal bits of two equal products would prove nothing
    missing = [row["model_type"] for row in rows if row["status"] != "refused" and not row["whole"]]
    assert missing == []
    refused = [row for row in rows if row["status"] == "refused"]
    assert len(refused) <= 4
    assert all(row["note"] for row in refused)
