"""Run what the documents tell people to run: run_snippets.py PAGE.md ...

Every ``python`` block is a program of its own and must exit with 0. A ``bash`` block runs when the line
before it is ``<!-- run -->``. Both run in the repository's root, this interpreter's folder first in the search path.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tracked import ROOT

__all__ = ["Snippet", "main", "run", "snippets"]

_BLOCK = re.compile(r"^(?P<mark><!-- run -->\s*\n)?```(?P<language>python|bash)\s*\n(?P<code>.*?)^```\s*$", re.M | re.S)
_LIMIT_SECONDS = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class Snippet:
    """One fenced block: where it is, its language, its text."""

    page: str
    line: int
    language: str
    code: str


def snippets(page: str, text: str) -> list[Snippet]:
    """Return the blocks of a Markdown ``text`` that must run."""
    return [
        Snippet(page=page, line=text.count("\n", 0, hit.start("code")), language=hit["language"], code=hit["code"])
        for hit in _BLOCK.finditer(text)
        if hit["language"] == "python" or hit["mark"]
    ]


def run(snippet: Snippet) -> subprocess.CompletedProcess[str]:
    """Run one block in the repository's root; its output is captured."""
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    shell = [sys.executable, "-c"] if snippet.language == "python" else ["bash", "-euo", "pipefail", "-c"]
    return subprocess.run(
        [*shell, snippet.code],
        cwd=ROOT,
        env={**os.environ, "PATH": search},
        capture_output=True,
        text=True,
        timeout=_LIMIT_SECONDS,
        check=False,
    )


def main(pages: list[str]) -> int:
    """Run the blocks of ``pages``; 1 when one fails or none is found."""
    found = [snippet for page in pages for snippet in snippets(page, (ROOT / page).read_text(encoding="utf-8"))]
    if not found:
        print(f"snippets: {', '.join(pages) or 'no page given'}: no block to run")
        return 1
    failed = 0
    for snippet in found:
        began = time.monotonic()
        result = run(snippet)
        verdict = "ok" if result.returncode == 0 else f"FAILED with {result.returncode}"
        print(f"{snippet.page}:{snippet.line}: {snippet.language} {verdict} in {time.monotonic() - began:.1f} s")
        if result.returncode:
            failed += 1
            print(result.stdout + result.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
