"""README.md as the page of a package index shows it; the build asks for it (pyproject.toml).

A relative link leads nowhere there: it becomes a link into the repository where ``project.urls`` names one, and
plain text where it does not.
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

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)\s]+)\)")


def index_page(text: str, repository: str = "") -> str:
    """Return Markdown whose relative links lead into ``repository``, or are their text alone without one."""
    target = repository.rstrip("/") + "/blob/main/"
    return _LINK.sub(lambda found: f"[{found[1]}]({target}{found[2]})" if repository else found[1], text)


_Hook: Any = object if interface is None else interface.MetadataHookInterface


class IndexPage(_Hook):
    """What hatchling calls for the fields that pyproject.toml calls dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the readme."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        page = index_page(text, metadata.get("urls", {}).get("Repository", ""))
        metadata["readme"] = {"content-type": "text/markdown", "text": page}
