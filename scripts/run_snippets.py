"""Run what the documents tell people to run: run_snippets.py PAGE.md ...

Every ``python`` block is a program of its own and must exit with 0. The line before it may be ``<!-- gpu -->``: it is
left out where there is none; or ``<!-- ranks 2 -->``: torchrun starts it twice. A ``bash`` block runs when the line
before it is ``<!-- run -->``. All run in the repository's root, two at a time, this interpreter's folder first in the
search path.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tracked import ROOT

__all__ = ["Snippet", "main", "run", "snippets"]

_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>run|gpu|ranks \d+) -->\s*\n)?```(?P<language>python|bash)\s*\n(?P<code>.*?)^```\s*$",
    re.M | re.S,
)
_HAS_GPU = "import sys, torch; sys.exit(not torch.cuda.is_available())"
_LIMIT_SECONDS = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class Snippet:
    """One fenced block: where it is, its language, its text, and what stands before it."""

    page: str
    line: int
    language: str
    code: str
    mark: str = ""


def snippets(page: str, text: str) -> list[Snippet]:
    """Return the blocks of a Markdown ``text`` that must run."""
    return [
        Snippet(
            page=page,
            line=text.count("\n", 0, hit.start("code")),
            language=hit["language"],
            code=hit["code"],
            mark=hit["mark"] or "",
        )
        for hit in _BLOCK.finditer(text)
        if hit["language"] == "python" or hit["mark"] == "run"
    ]


def run(snippet: Snippet) -> subprocess.CompletedProcess[str]:
    """Run one block in the repository's root; its output is captured."""
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    shell = ["bash", "-euo", "pipefail"] if snippet.language == "bash" else [sys.executable]
    if snippet.mark.startswith("ranks"):
        shell += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", snippet.mark.split()[1]]
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "snippet"
        program.write_text(snippet.code, encoding="utf-8")
        return subprocess.run(
            [*shell, str(program)],
            cwd=ROOT,
            env={**os.environ, "PATH": search},
            capture_output=True,
            text=True,
            timeout=_LIMIT_SECONDS,
            check=False,
        )


def _timed(snippet: Snippet) -> tuple[subprocess.CompletedProcess[str], float]:
    began = time.monotonic()
    return run(snippet), time.monotonic() - began


def main(pages: list[str]) -> int:
    """Run the blocks of ``pages``; 1 when one fails or none is found."""
    found = [snippet for page in pages for snippet in snippets(page, (ROOT / page).read_text(encoding="utf-8"))]
    if not found:
        print(f"snippets: {', '.join(pages) or 'no page given'}: no block to run")
        return 1
    failed = 0
    on_gpu = any(snippet.mark == "gpu" for snippet in found) and not subprocess.call([sys.executable, "-c", _HAS_GPU])
    for snippet in found:
        if snippet.mark == "gpu" and not on_gpu:
            print(f"{snippet.page}:{snippet.line}: left out, it needs a GPU")
    asked = [snippet for snippet in found if snippet.mark != "gpu" or on_gpu]
    with ThreadPoolExecutor(2) as pool:
        for snippet, (result, seconds) in zip(asked, pool.map(_timed, asked), strict=True):
            verdict = "ok" if result.returncode == 0 else f"FAILED with {result.returncode}"
            print(f"{snippet.page}:{snippet.line}: {snippet.language} {verdict} in {seconds:.1f} s", flush=True)
            if result.returncode:
                failed += 1
                print(result.stdout + result.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
