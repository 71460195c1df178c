"""Time a new user's first steps: clone to text, install to first layer, checkpoint to verified layer.

    python scripts/time_newcomer.py --torch torch==2.13.0      # in a new folder and environment; writes newcomer.csv

Each step is a command of docs/quickstart.md. It runs once in a new process, and its output is checked. The rows go to
``benchmarks/results/newcomer.csv``; a test compares them with the table in docs/quickstart.md.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tracked import ROOT

__all__ = ["PATHS", "RESULTS", "Step", "main", "steps", "table"]

RESULTS = ROOT / "benchmarks" / "results" / "newcomer.csv"
MODEL = "demo/fables-16m"
_LIMIT = 1800


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One command line. typed: what a person types; words: what is run; says: what its output must hold."""

    name: str
    typed: str
    words: tuple[str, ...]
    says: str = ""


# What leads where: the steps that are added up.
PATHS = {
    "a clone to the first generated text": ("clone", "environment", "install", "text"),
    "an install to the first layer": ("environment", "install", "layer"),
    "a checkpoint to a verified layer": ("look", "verify"),
}


def session() -> str:
    """Return the first Python block of docs/quickstart.md."""
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert found is not None, "docs/quickstart.md has no Python block"
    return found[1]


def steps(room: Path, torch: str) -> list[Step]:
    """Return what somebody new runs in the empty folder ``room``."""
    python, collegium = (str(room / ".venv" / "bin" / name) for name in ("python", "collegium"))
    pip = (python, "-m", "pip", "install", "-q", "--disable-pip-version-check")
    device = ("--device", "cpu")
    return [
        Step(name="clone", typed="git clone REPOSITORY", words=("git", "clone", "-q", str(ROOT), str(room / "clone"))),
        Step(
            name="environment",
            typed=f"python3 -m venv .venv; pip install {torch}",
            words=("bash", "-c", f"{sys.executable} -m venv {room / '.venv'} && {' '.join(pip)} {torch}"),
        ),
        Step(name="install", typed="pip install '.[transformers]'", words=(*pip, f"{room / 'clone'}[transformers]")),
        Step(
            name="text",
            typed='collegium generate fables-16m --prompt "The old king"',
            words=(collegium, "generate", "fables-16m", "--prompt", "The old king", *device),
            says="The old king",
        ),
        Step(name="layer", typed="python session.py", words=(python, "-c", session()), says="of the bytes"),
        Step(
            name="look",
            typed=f"collegium inspect {MODEL}",
            words=(collegium, "inspect", MODEL, *device),
            says="every scale read",
        ),
        Step(name="verify", typed=f"collegium verify {MODEL}", words=(collegium, "verify", MODEL, *device), says="ok"),
    ]


def table(rows: list[dict[str, str]]) -> str:
    """Return the table of docs/quickstart.md: the seconds of each path."""
    seconds = {row["step"]: float(row["seconds"]) for row in rows}
    lines = ["| from | seconds |", "| --- | --- |"]
    lines += [f"| {path} | {sum(seconds[name] for name in names):.0f} |" for path, names in PATHS.items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run every step and write the rows; a step that fails ends it with what it said."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--torch", default="torch", help="what pip is asked for before the package")
    torch = parser.parse_args().torch
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    rows: list[dict[str, str]] = []
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        room = Path(folder)
        for step in steps(room, torch):
            inside = room / "clone" if (room / "clone").is_dir() else room
            start = time.perf_counter()
            done = subprocess.run(
                step.words, cwd=inside, env=environment, capture_output=True, text=True, timeout=_LIMIT, check=False
            )
            seconds = time.perf_counter() - start
            if done.returncode or step.says not in done.stdout:
                print(f"{step.name}: exit code {done.returncode}\n{done.stdout[-500:]}\n{done.stderr[-2000:]}")
                return 1
            facts = {
                "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
                "python": platform.python_version(),
                "commit": commit.stdout.strip(),
                "command": f"python scripts/time_newcomer.py --torch {torch}",
            }
            rows.append(facts | {"step": step.name, "typed": step.typed, "seconds": f"{seconds:.1f}"})
            print(f"{step.name}: {seconds:.1f} s", flush=True)
    with RESULTS.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
