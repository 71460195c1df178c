"""The text speaks of the project alone: no machine's paths, no registry's hosts, nothing from outside.

The patterns are glued from pieces so that this file passes its own check.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tracked import ROOT, tracked

__all__ = ["forbidden_words", "main"]

_TEXT = {".py", ".md", ".toml", ".txt", ".in", ".sh", ".csv", ".yml", ".yaml", ".cfg", ""}

_PATTERNS = {
    "a path of one machine": re.compile(
        r"(?<![\w.~-])/(?:" + "|".join(("wo" + "rk", "roo" + "t", "ho" + "me", "Us" + "ers")) + r")/"
    ),
    "a path outside the repository": re.compile(r"\.\./sha" + r"red\b"),
    "a host of a package registry": re.compile(
        "|".join(
            (
                r"py" + r"pi\.org",
                r"python" + r"hosted\.org",
                r"npm" + r"js\.org",
                r"download\.pyt" + r"orch\.org",
            )
        ),
        re.IGNORECASE,
    ),
    "how it was written": re.compile(
        r"\b(?:" + "|".join(("anthr" + "opic", "chat" + "gpt", "co" + "pilot", "ai[- ]gener" + "ated")) + r")\b",
        re.IGNORECASE,
    ),
}


def forbidden_words(root: Path = ROOT) -> list[str]:
    """Return one line for each forbidden text in the tracked files under ``root``."""
    faults: list[str] = []
    for path in tracked(root):
        if path.suffix not in _TEXT:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            for what, pattern in _PATTERNS.items():
                hit = pattern.search(line)
                if hit:
                    faults.append(f"{path.relative_to(root)}:{number}: {hit.group()!r} is {what}")
    return faults


def main() -> int:
    """Print the forbidden texts; 1 when there are any."""
    faults = forbidden_words()
    print("\n".join(faults) or "words: the text speaks of the project alone")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
