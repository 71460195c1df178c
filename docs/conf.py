"""The site that ``make docs`` builds: every page where it is in the repository, the API from its docstrings."""

from __future__ import annotations

import inspect
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from sphinx.util.nodes import make_refnode

import collegium

project = "Collegium"
author = "the authors of Collegium"
version = release = collegium.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]

# Pages are read from the root of the repository, so that a link in the repository is a link of the site.
root_doc = "docs/index"
include_patterns = ["*.md", "benchmarks/*.md", "docs/**.md"]
exclude_patterns = [".*", "build", "dist"]
myst_heading_anchors = 4
nitpicky = True

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["code.css"]
html_title = f"Collegium {release}"
html_copy_source = html_show_sourcelink = False

autoclass_content = "both"
autodoc_default_options = {"members": True}
autodoc_member_order = "groupwise"
add_module_names = False
python_maximum_signature_line_length = 88  # longer ones get a line for each parameter

_LINK = re.compile(r"^( *)- \[([^\]]*)\]\(([^):#]+)\.md\)", re.M)
_NAME = r"(?:``)?[a-z_]\w*(?:``)?"
# An argument begins a sentence or a paragraph.
_ARGUMENT = re.compile(rf"(?:(?<=[.;:)] )|^)({_NAME}(?:(?:, | and ){_NAME})*): (?=\S)")
_AFTER = re.compile(r"(?<=[.;)] )(?=(?:Raises|Returns|Source|Shapes)\b)")


def navigation() -> dict[str, list[tuple[str, list[str]]]]:
    """Return what stands below each page in the navigation, in sections: what stands so in the lists of the index."""
    found: dict[str, list[tuple[str, list[str]]]] = {"docs/index": []}
    text = (Path(__file__).parent / "index.md").read_text(encoding="utf-8")
    for section in text.split("\n## ")[1:]:
        pages: list[str] = []
        parent = ""
        for indent, title, link in _LINK.findall(section):
            below = found.setdefault(parent, [("", [])])[0][1] if indent else pages
            below.append(f"{title} </docs/{link}>")
            parent = parent if indent else f"docs/{link}"
        found["docs/index"].append((section.partition("\n")[0], pages))
    return found


def add_navigation(_app: Any, page: str, text: list[str]) -> None:
    """Add the page's part of the navigation, so that pages say nothing twice and read well in the repository."""
    for caption, pages in navigation().get(page, []):
        title = f":caption: {caption}\n" if caption else ""
        text[0] += f"\n\n```{{toctree}}\n:hidden:\n{title}\n" + "\n".join(pages) + "\n```\n"


def list_arguments(_app: Any, _what: str, _name: str, of: object, _options: Any, lines: list[str]) -> None:
    """Make a list of ``name: what it is``, wherever in a paragraph a sentence begins so."""
    known = argument_names(of)
    made: list[str] = []
    for paragraph in paragraphs(lines):
        made += [*listed(paragraph, known), ""]
    lines[:] = made


def argument_names(of: Any) -> set[str]:
    """Return the parameters of a function or of a class's constructor, and the annotated attributes of a class."""
    names = set[str](getattr(of, "__annotations__", {}))
    with suppress(TypeError, ValueError):  # no function, or one without a signature
        names |= set(inspect.signature(of).parameters)
    return names


def paragraphs(lines: list[str]) -> list[list[str]]:
    """Split at blank lines."""
    found: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return [paragraph for paragraph in found if paragraph]


def listed(paragraph: list[str], known: set[str]) -> list[str]:
    """Return the lines of a paragraph, as a list from its first argument to its last."""
    if paragraph[0][0].isspace() or paragraph[0].startswith(("* ", "- ", "..", ":")) or paragraph[-1].endswith("::"):
        return paragraph
    starts = {line.lstrip() for line in paragraph}
    text, cuts = " ".join(line.strip() for line in paragraph), list[tuple[int, int, str]]()
    for match in _ARGUMENT.finditer(text):
        names = match[1].replace("``", "")
        own_line = any(line.startswith(match[0]) for line in starts)
        if own_line or known.issuperset(re.split(r", | and ", names)):
            cuts.append((match.start(), match.end(), names))
    if not cuts:
        return paragraph
    ends = [start for start, _, _ in cuts[1:]]
    after = _AFTER.search(text, cuts[-1][1])
    ends.append(after.start() if after else len(text))
    items = [f"* **{names}**: {text[begin:end].strip()}" for (_, begin, names), end in zip(cuts, ends, strict=True)]
    before = [text[: cuts[0][0]].strip(), ""] if text[: cuts[0][0]].strip() else []
    return [*before, *items, *(["", text[after.start() :].strip()] if after else [])]


def show_default(*signature: Any) -> tuple[str | None, str | None]:
    """Write ``...`` for a default made anew for each object, and nothing for a protocol, which nobody makes."""
    _app, _what, _name, of, _options, arguments, result = signature
    if getattr(of, "_is_protocol", False):
        return "", result
    return arguments and arguments.replace("<factory>", "..."), result


def find_type(app: Any, environment: Any, node: Any, content: Any) -> Any:
    """Link the name of a documented class in a signature; leave that of any other class as it is."""
    if node.get("reftype") not in ("class", "obj") or node.get("refdomain") != "py":
        return None
    known = environment.get_domain("py").objects
    last = node["reftarget"].rpartition(".")[2]
    names = [name for name, what in known.items() if name.rpartition(".")[2] == last and what.objtype == "class"]
    if not names:
        return content
    goal = known[names[0]]
    return make_refnode(app.builder, node["refdoc"], goal.docname, goal.node_id, content)


def setup(app: Any) -> None:
    """Connect the above to the generator."""
    app.connect("source-read", add_navigation)
    app.connect("autodoc-process-docstring", list_arguments)
    app.connect("autodoc-process-signature", show_default)
    app.connect("missing-reference", find_type)
