from __future__ import annotations

import pytest

from collegium import formats, models
from tracked import ROOT

DOCS = ROOT / "docs"
PAGES = ["index", "quickstart", "data-flow", "planning", "errors", "glossary"]


def test_the_fixed_pages_exist() -> None:
    missing = [page for page in PAGES if not (DOCS / f"{page}.md").is_file()]
    assert not missing


def format_files() -> list[str]:
    return sorted({row.__module__.rsplit(".", 1)[1] for row in formats.FORMATS})


@pytest.mark.parametrize("name", format_files())
def test_every_format_has_a_page(name: str) -> None:
    page = DOCS / "formats" / f"{name}.md"
    assert page.is_file(), f"write docs/formats/{name}.md: the format to the bit"
    text = page.read_text(encoding="utf-8")
    module = __import__(f"collegium.formats.{name}", fromlist=["_"])
    published = [
        c.name for c in vars(module).values() if getattr(c, "__module__", "") == module.__name__ and "name" in vars(c)
    ]
    absent = [found for found in published if found not in text]
    assert not absent, f"{page.name} says nothing of {absent}"


def test_every_page_is_reached_from_the_index() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    lost = [
        str(page.relative_to(DOCS))
        for page in sorted(DOCS.rglob("*.md"))
        if page.name != "index.md" and f"({page.relative_to(DOCS)})" not in index
    ]
    assert not lost, f"docs/index.md has no link to {lost}"


def test_every_error_is_explained() -> None:
    from collegium import errors

    text = (DOCS / "errors.md").read_text(encoding="utf-8")
    assert not [name for name in errors.__all__ if name not in text]


def test_every_decision_says_context_decision_and_cost() -> None:
    records = sorted((DOCS / "adr").glob("*.md"))
    assert [record.name[:4] for record in records] == [f"{n:04}" for n in range(1, len(records) + 1)]
    for record in records:
        text = record.read_text(encoding="utf-8")
        for heading in ("## Context", "## Decision", "## Cost"):
            assert heading in text, f"{record.name} has no {heading!r}"
        assert len(text.splitlines()) <= 60, f"{record.name} is longer than one page"


def test_every_model_type_is_named_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert not [name for family in models.FAMILIES for name in family.model_types if f"`{name}`" not in text]
