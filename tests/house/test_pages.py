from __future__ import annotations

import ast
import csv
import re
import tomllib
from typing import TYPE_CHECKING

import pytest
import yaml

import collegium
import make_command_line
from collegium import formats
from tracked import ROOT

if TYPE_CHECKING:
    pass

DOCS = ROOT / "docs"


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


def test_index_links_every_page() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    lost = [
        str(page.relative_to(DOCS))
        for page in sorted(DOCS.rglob("*.md"))
        if page.name != "index.md" and f"({page.relative_to(DOCS)})" not in index
    ]
    assert not lost, f"docs/index.md has no link to {lost}"


def test_every_error_is_explained() -> None:
    from collegium import errors

    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    assert not [name for name in errors.__all__ if name not in text]


def test_troubleshooting_texts_are_in_the_code() -> None:
    sources = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "src").rglob("*.py"))]
    said = [
        n.value for tree in sources for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    ]
    texts = re.findall(r"^\| `([^`]* [^`]*)` \|", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.M)
    assert len(texts) > 25
    assert not [text for text in texts if not all(any(part in one for one in said) for part in text.split(" … "))]


def test_reference_lists_every_public_name() -> None:
    text = (DOCS / "api" / "collegium.md").read_text(encoding="utf-8")
    assert not [name for name in collegium.__all__ if f" collegium.{name}\n" not in text and f"`{name}`" not in text]


def test_command_line_page_is_current() -> None:
    assert make_command_line.PAGE.read_text(encoding="utf-8") == make_command_line.page(), (
        "run: python scripts/make_command_line.py"
    )


def test_compatibility_page_lists_tested_versions() -> None:
    text = (DOCS / "compatibility.md").read_text(encoding="utf-8")
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                known = [row.get(what, "") for what in ("python", "torch", "transformers", "triton", "driver", "gpu")]
                names = [
                    name.partition("+")[0].removeprefix("NVIDIA ") for name in known if name and "Linux" not in name
                ]
                assert not [name for name in names if name not in text], f"{path.name}: docs/compatibility.md"


def test_the_citation_is_of_this_project() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert cited["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "type"} <= set(cited)
    assert (cited["version"], cited["license"]) == (collegium.__version__, project["license"])
    assert cited["keywords"] == project["keywords"]
    assert f"version = {{{collegium.__version__}}}" in (DOCS / "citing.md").read_text(encoding="utf-8")
