"""Build the wheel, install it in an empty environment of every Python that is here, and run it away from the clone.

    python scripts/try_wheel.py                          # every python3.11 and later in the search path
    python scripts/try_wheel.py --python python3.12 --folder /tmp/wheels --torch torch==2.13.0

Each environment gets torch, then the wheel with its ``transformers`` extra. In an empty folder the commands below run
on the shipped model that is in the wheel, and what they print is looked at. The rows go to
``benchmarks/results/wheels.csv``; a row that failed says why, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from index_page import index_page
from tracked import ROOT

__all__ = ["CHECKS", "RESULTS", "main", "tried"]

RESULTS = ROOT / "benchmarks" / "results" / "wheels.csv"
PYTHONS = ("python3.11", "python3.12", "python3.13", "python3.14")
PACKAGES = ("torch", "triton", "numpy", "transformers")
_LIMIT = 1800  # seconds: torch may be gigabytes


def _demo(found: Any) -> bool:
    return len(found["rows"]) == 12 and all(0 < row["perplexity"] < 100 for row in found["rows"])


def _inspect(found: Any) -> bool:
    return len(found["moe_layers"]) == 6


def _plan(found: Any) -> bool:
    return found["kernel"] == "triton_bf16"


def _generate(found: Any) -> bool:
    return str(found["text"]).startswith("Once upon a time")


# What runs, and what judges its JSON.
CHECKS: dict[str, tuple[tuple[str, ...], Callable[[Any], bool]]] = {
    "demo": (("--device", "cpu", "--tokens", "4"), _demo),
    "inspect": (("fables-16m", "--device", "cpu"), _inspect),
    "plan": (("fables-16m", "--device", "h200"), _plan),
    "generate": (("fables-16m", "--device", "cpu", "--tokens", "12"), _generate),
}


def _run(words: list[str], *, folder: Path | None = None) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["HF_HUB_OFFLINE"] = "1"
    done = subprocess.run(
        words, capture_output=True, text=True, cwd=folder, env=environment, timeout=_LIMIT, check=False
    )
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise RuntimeError(
            f"{' '.join(Path(words[0]).name if not at else w for at, w in enumerate(words))}: {said[-1]}"
        )
    return done.stdout


def tried(interpreter: str, wheel: Path, torch: str, room: Path) -> dict[str, object]:
    """Install ``wheel`` beside ``torch`` in an environment below ``room`` and return the row of its run."""
    version = _run([interpreter, "-c", "import platform; print(platform.python_version())"]).strip()
    row: dict[str, object] = {"python": version}
    own = room / version
    try:
        if not (own / "bin" / "python").exists():
            _run([interpreter, "-m", "venv", str(own)])
        python = str(own / "bin" / "python")
        install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        _run([*install, torch])
        _run([*install, f"{wheel}[transformers]"])
        _run([*install, "--force-reinstall", "--no-deps", str(wheel)])
        listed = f"from importlib.metadata import version; print(*map(version, {PACKAGES!r}))"
        row |= dict(zip(PACKAGES, _run([python, "-c", listed]).split(), strict=True))
        with tempfile.TemporaryDirectory() as empty:
            for name, (words, judge) in CHECKS.items():
                start = time.perf_counter()
                found = json.loads(_run([str(own / "bin" / "collegium"), name, *words, "--json"], folder=Path(empty)))
                row[f"{name}_seconds"] = f"{time.perf_counter() - start:.1f}"
                row["text"] = " ".join(str(found.get("text", "")).split())
                if not judge(found):
                    row["failure"] = f"{name}: {json.dumps(found)[:200]}"
    except (RuntimeError, subprocess.TimeoutExpired, OSError, ValueError) as error:
        row["failure"] = " ".join(str(error).split())[:200]
    return row


def _built(room: Path) -> Path:
    """Build the wheel and return it; RuntimeError where its page for an index has a link that leads nowhere."""
    _run([sys.executable, "-m", "build", "--wheel", "--outdir", str(room), str(ROOT)])
    wheel = next(room.glob("*.whl"))
    with zipfile.ZipFile(wheel) as held:
        names = held.namelist()
        about = held.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
    for needed in ("collegium/py.typed", "collegium/shipped/fables-16m/model.safetensors"):
        if needed not in names:
            raise RuntimeError(f"{wheel.name} lacks {needed}")
    if "# Collegium" not in about or index_page(about) != about:
        raise RuntimeError(f"{wheel.name}: its page for an index is missing, or has links that lead nowhere there")
    return wheel


def main() -> int:
    """Try every Python; 1 when one failed."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--python", nargs="*", help="interpreters; those in the search path when left out")
    parser.add_argument("--torch", default="torch", help="what pip is asked for before the wheel")
    parser.add_argument("--folder", help="keep environments here and use those that are there")
    parser.add_argument("--out", default=str(RESULTS))
    asked = parser.parse_args()
    pythons = asked.python or [name for name in PYTHONS if shutil.which(name)]
    with tempfile.TemporaryDirectory() as made:
        wheel, room = _built(Path(made)), Path(asked.folder or made)
        facts = {
            "machine": f"{platform.system()} {platform.machine()}",
            "commit": _run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]).strip(),
            "command": f"python scripts/try_wheel.py --torch {asked.torch}",
            "wheel_mb": f"{wheel.stat().st_size / 1e6:.1f}",
        }
        names = [*facts, "python", *PACKAGES, *(f"{name}_seconds" for name in CHECKS), "text", "failure"]
        rows: list[dict[str, object]] = []
        for interpreter in pythons:
            row = facts | tried(interpreter, wheel, asked.torch, room)
            print({key: value for key, value in row.items() if not re.fullmatch("commit|command", key)}, flush=True)
            rows.append(row)
    with Path(asked.out).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return any(row.get("failure") for row in rows) or not rows


if __name__ == "__main__":
    sys.exit(main())
