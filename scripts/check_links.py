"""Every relative link in a Markdown file leads to a file, and every anchor to a heading."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from urllib.parse import unquote

from tracked import ROOT, tracked

__all__ = ["broken_links", "main"]

_FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
_HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)


def broken_links(root: Path = ROOT) -> list[str]:
    """Return one line for each relative link under ``root`` that leads nowhere."""
    faults: list[str] = []
    for page in tracked(root):
        if page.suffix != ".md":
            continue
        for target in _LINK.findall(_CODE.sub("", _FENCE.sub("", page.read_text(encoding="utf-8")))):
            reason = _reason(page, target, root)
            if reason:
                faults.append(f"{page.relative_to(root)}: link {target!r}: {reason}")
    return faults


def _reason(page: Path, target: str, root: Path) -> str | None:
    if re.match(r"[a-z][a-z0-9+.-]*:", target):
        return None
    name, _, anchor = unquote(target).partition("#")
    goal = (page.parent / name).resolve() if name else page
    if not goal.is_relative_to(root.resolve()):
        return "leads out of the repository"
    if not goal.exists():
        return "no such file"
    if anchor and goal.suffix == ".md" and anchor not in _anchors(goal):
        return f"no heading makes the anchor {anchor!r}; there are {', '.join(sorted(_anchors(goal))) or 'none'}"
    return None


def _anchors(page: Path) -> set[str]:
    headings = _HEADING.findall(_FENCE.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def main() -> int:
    """Print the broken links; 1 when there are any."""
    faults = broken_links()
    print("\n".join(faults) or "links: all lead somewhere")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
