"""The site that ``make docs`` builds: every page where it is in the repository, the API from its docstrings."""

from __future__ import annotations

import re
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
html_title = f"Collegium {release}"
html_copy_source = html_show_sourcelink = False

autoclass_content = "both"
autodoc_default_options = {"members": True}
autodoc_member_order = "groupwise"
add_module_names = False

_LINK = re.compile(r"^( *)- \[([^\]]*)\]\(([^):#]+)\.md\)", re.M)
_ARGUMENT = re.compile(r"((?:``)?[a-z_]\w*(?:``)?(?:(?:, | and )(?:``)?[a-z_]\w*(?:``)?)*): (?=\S)")


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


def list_arguments(_app: Any, _what: str, _name: str, _of: object, _options: Any, lines: list[str]) -> None:
    """Make a list of the lines ``name: what it is``."""
    made: list[str] = []
    inside, before = False, ""
    for line in lines:
        begins = not before.strip() or before.rstrip().endswith((".", ":", ";"))
        name = _ARGUMENT.match(line) if begins else None
        if name:
            made += [*([] if inside else [""]), f"* **{name[1].replace('``', '')}**: {line[name.end() :]}"]
        else:
            made.append(f"  {line.lstrip()}" if inside and line.strip() else line)
        inside, before = bool(line.strip()) and (inside or name is not None), line
    lines[:] = made


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
