"""README.md as the page of a package index shows it; the build asks for it (pyproject.toml).

Relative links and pictures lead nowhere there. Where ``project.urls`` names a repository they become links into it;
where it does not, a link becomes plain text and a picture is left out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

try:
    from hatchling.metadata.plugin import interface  # pyright: ignore[reportMissingImports]
except ImportError:  # a test imports this file without the build's own packages
    interface = None

__all__ = ["IndexPage", "index_page"]

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)\s]+)\)")


def index_page(text: str, repository: str = "") -> str:
    """Return Markdown without relative links: absolute ones into ``repository``, or text alone without one."""
    root = repository.rstrip("/")

    def absolute(link: re.Match[str]) -> str:
        picture, label, path = link.groups()
        if not repository:
            return "" if picture else label
        return f"{picture}[{label}]({root}/{'raw' if picture else 'blob'}/main/{path})"

    return _LINK.sub(absolute, text)


_Hook: Any = object if interface is None else interface.MetadataHookInterface


class IndexPage(_Hook):
    """What hatchling calls for the fields that pyproject.toml calls dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the readme."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        page = index_page(text, metadata.get("urls", {}).get("Repository", ""))
        metadata["readme"] = {"content-type": "text/markdown", "text": page}
