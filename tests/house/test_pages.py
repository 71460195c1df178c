from __future__ import annotations

import ast
import csv
import re
import tomllib
from typing import TYPE_CHECKING, Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

import collegium
import make_command_line
import time_newcomer
from collegium import formats
from collegium.cli import app
from tracked import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCS = ROOT / "docs"
# What a help says of itself and of ``--json``, which the page says once for all.
FRAME = {
    *("Usage", "root", "OPTIONS", "COMMAND", "ARGS", "Arguments", "Options", "Commands", "required", "default", "x"),
    *(
        "--help",
        "-h",
        "Show",
        "this",
        "message",
        "and",
        "exit",
        "range",
        "str",
        "int",
        "float",
        "bool",
        "list",
        "no-json",
    ),
    *("--json", "Print", "one", "JSON", "object", "instead", "of", "tables"),
}
PAGES = ["index", "quickstart", "developer/data-flow", "planning", "troubleshooting", "glossary"]


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

    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    assert not [name for name in errors.__all__ if name not in text]


def test_the_texts_that_troubleshooting_names_are_those_of_the_code() -> None:
    sources = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "src").rglob("*.py"))]
    said = [
        n.value for tree in sources for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    ]
    texts = re.findall(r"^\| `([^`]* [^`]*)` \|", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.M)
    assert len(texts) > 25
    assert not [text for text in texts if not all(any(part in one for one in said) for part in text.split(" … "))]


def test_every_name_of_the_package_is_in_the_reference() -> None:
    text = (DOCS / "api" / "collegium.md").read_text(encoding="utf-8")
    assert not [name for name in collegium.__all__ if f" collegium.{name}\n" not in text and f"`{name}`" not in text]


def test_the_command_line_page_is_what_the_commands_say() -> None:
    assert make_command_line.PAGE.read_text(encoding="utf-8") == make_command_line.page(), (
        "run: python scripts/make_command_line.py"
    )


def helps(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every command line that ``--help`` can follow, and what it then prints."""
    yield words, CliRunner(env={"COLUMNS": "300", "NO_COLOR": "1"}).invoke(app, [*words, "--help"]).output
    for word, below in getattr(command, "commands", {}).items():
        yield from helps(below, (*words, word))


def test_the_command_line_page_has_every_word_of_every_help() -> None:
    page = make_command_line.PAGE.read_text(encoding="utf-8")
    sections = {part.partition("\n")[0]: part for part in page.split("\n## ")}
    seen = 0
    for words, said in helps(typer.main.get_command(app)):
        listed = re.findall(r"[\w-]*\w", sections[" ".join(("collegium", *words))])
        told = {word.lstrip("-").lower() for word in (*FRAME, *listed)}
        missing = [word for word in re.findall(r"[\w-]*\w", said) if word.lstrip("-").lower() not in told]
        assert not missing, f"{words}: the page lacks {missing}"
        seen += 1
    assert seen == 1 + len(typer.main.get_command(app).commands) + 3  # type: ignore[attr-defined]


def test_every_version_of_a_result_is_called_tested() -> None:
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


def test_every_decision_says_context_decision_and_cost() -> None:
    records = sorted((DOCS / "adr").glob("0*.md"))
    assert [record.name[:4] for record in records] == [f"{n:04}" for n in range(1, len(records) + 1)]
    for record in records:
        text = record.read_text(encoding="utf-8")
        for heading in ("## Context", "## Decision", "## Cost"):
            assert heading in text, f"{record.name} has no {heading!r}"


def test_what_somebody_new_does_first_is_timed_and_shown() -> None:
    with time_newcomer.RESULTS.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    shown = (DOCS / "quickstart.md").read_text(encoding="utf-8")
    assert time_newcomer.table(rows) in shown, (
        "docs/quickstart.md: run python scripts/time_newcomer.py and copy its table"
    )
    typed = {step.name: step.typed for step in time_newcomer.steps(ROOT, "torch==2.13.0")}
    assert {row["step"]: row["typed"] for row in rows} == typed
    assert set().union(*time_newcomer.PATHS.values()) == set(typed)
    assert "load_layer(" in time_newcomer.session()
