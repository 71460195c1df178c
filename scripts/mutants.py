"""Inject one known kind of mistake at a time into a copy of the source, and demand that a test fails.

A mutant (``mutant_list.py``) names a file, a symbol and an edit of the code there (``mutant_edits.py``). The tests that
could see it are run until one fails, those marked exhaustive apart; a mutant that passes them all survives, and that is
a missing test. What killed what is in docs/developer/mutants.md.

    python scripts/mutants.py                 run all (about a quarter of an hour on one core), write the table
    python scripts/mutants.py --only clamp    those whose name or file holds the text
    python scripts/mutants.py --gpu --jobs 12     those of the kernels; on a machine with a GPU
    python scripts/mutants.py --gpu --new --jobs 12 --seconds 40     as many without a result as start in 40 seconds
    python scripts/mutants.py --dry           apply and parse each, report all that fail
    python scripts/mutants.py --page          write docs/developer/mutants.md anew from the committed results
"""

from __future__ import annotations

import argparse
import ast
import csv
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from mutant_edits import edited
from mutant_list import GPU_MUTANTS, MUTANTS, Mutant
from tracked import ROOT

__all__ = ["GPU_MUTANTS", "MUTANTS", "PAGE", "RESULTS", "Mutant", "applied", "main", "page"]

RESULTS = ROOT / "benchmarks" / "results" / "mutants.csv"
PAGE = next((ROOT / "docs").rglob("mutants.md"))
_SOURCE = ROOT / "src" / "collegium"
_LIMIT = 300  # seconds a mutant's tests may take


def applied(mutant: Mutant, text: str) -> str:
    """Return ``text`` with the mistake in it; ValueError unless each edit finds its place exactly once."""
    python = mutant.file.endswith(".py")
    changed = text
    for edit in mutant.edits:
        try:
            changed = edited(edit, changed, python=python)
        except ValueError as error:
            msg = f"{mutant.name} in {mutant.file}: {error}"
            raise ValueError(msg) from error
    if python:
        ast.parse(changed)
    if changed == text:
        msg = f"{mutant.name} in {mutant.file}: nothing is changed"
        raise ValueError(msg)
    return changed


def _dry_errors(mutants: Sequence[Mutant]) -> list[str]:
    """Apply each mutant and return one message for each that does not apply or does not parse."""
    errors: list[str] = []
    for mutant in mutants:
        try:
            applied(mutant, (_SOURCE / mutant.file).read_text(encoding="utf-8"))
        except FileNotFoundError:
            errors.append(f"{mutant.name} in {mutant.file}: no such file")
        except (ValueError, SyntaxError) as error:
            errors.append(str(error))
    return errors


def _tried(mutant: Mutant, stop_at: float = float("inf")) -> tuple[Mutant, str, float] | None:
    """Return which test killed the mutant and after how many seconds, None if the time to start is over."""
    if time.monotonic() > stop_at:
        return None
    with tempfile.TemporaryDirectory() as room:
        begun = time.monotonic()
        return mutant, _killed_by(mutant, Path(room)), time.monotonic() - begun


def _killed_by(mutant: Mutant, room: Path) -> str:
    """Run the mutant's tests until one fails and return its name, empty when the mutant survives."""
    source = room / "src"
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
    target = source / "collegium" / mutant.file
    target.write_text(applied(mutant, target.read_text(encoding="utf-8")), encoding="utf-8")
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    environment = {**os.environ, **threads, "PYTHONPATH": str(source), "HF_HUB_OFFLINE": "1", "COLUMNS": "400"}
    options = ["-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", "-m", "not exhaustive"]
    if mutant in GPU_MUTANTS:
        options += ["-o", "filterwarnings=default"]  # as make gpu-test: what is installed there may warn
    tests = [test for test in mutant.tests if (ROOT / test.partition("::")[0]).exists()]
    command = [sys.executable, "-B", "-m", "pytest", *options, *tests]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return f"time limit of {_LIMIT} s"
    if done.returncode == 0:
        return ""
    if done.returncode < 0:
        return f"a crash, signal {-done.returncode}"  # memory that is nobody's, in the interpreter
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    if done.returncode != 1 or not failed:
        msg = f"{mutant.name} in {mutant.file}: the tests could not run:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        raise RuntimeError(msg)
    return failed[0].removeprefix("FAILED ").partition(" - ")[0].partition("[")[0]


def _rows() -> list[dict[str, str]]:
    return list(csv.DictReader(RESULTS.read_text(encoding="utf-8").splitlines())) if RESULTS.exists() else []


def _save(found: list[tuple[Mutant, str, float]]) -> None:
    """Write results, those of mutants not run now kept, in the order of the lists."""
    rows = {(row["mutant"], row["file"]): row for row in _rows()}
    for mutant, test, seconds in found:
        key = (mutant.name, mutant.file)
        rows[key] = {"mutant": key[0], "file": key[1], "killed_by": test, "seconds": f"{seconds:.0f}"}
    keys = [(mutant.name, mutant.file) for mutant in (*MUTANTS, *GPU_MUTANTS)]
    with RESULTS.open("w", newline="", encoding="utf-8") as file:
        writer: csv.DictWriter[str] = csv.DictWriter(
            file, ("mutant", "file", "killed_by", "seconds"), lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows(rows[key] for key in keys if key in rows)


def page() -> str:
    """Return docs/developer/mutants.md as the lists and the committed results make it."""
    rows = {(row["mutant"], row["file"]): row for row in _rows()}
    killed = sum(bool(row["killed_by"]) for row in rows.values())
    results = Path(os.path.relpath(RESULTS, PAGE.parent)).as_posix()
    lines = [
        "# Mutants",
        "",
        "Tests that cannot fail prove nothing. Each row is one known kind of mistake, injected alone into a copy of",
        "the source, and the first test that failed. `make mutants` runs them all and fails when one survives;",
        "`scripts/mutant_list.py` is the list, and `scripts/mutants.py` writes this page. Kernels run in Triton's",
        "interpreter there; with `--gpu` their mistakes, and those in the device form of their decoding, are made",
        "again for the tests of a GPU.",
        "",
        f"{killed} of {len(rows)} mutants run were killed ([results]({results})).",
        "",
        "| mutant | in | killed by |",
        "| --- | --- | --- |",
    ]
    for mutant in (*MUTANTS, *GPU_MUTANTS):
        row = rows.get((mutant.name, mutant.file))
        test = "not run yet" if row is None else row["killed_by"] or "**survived**"
        file, _, name = test.partition("::")
        shown = f"`{name}` in `{file}`" if name else test
        lines.append(f"| {mutant.name} | `{mutant.file}` | {shown} |")
    return "\n".join([*lines, ""])


def main() -> int:
    """Run the mutants asked for; 1 when one survives."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="text in the name or the file")
    parser.add_argument("--gpu", action="store_true", help="the mutants for the tests of a GPU")
    parser.add_argument("--new", action="store_true", help="those alone that have no result yet")
    parser.add_argument("--dry", action="store_true", help="apply each and parse what it gives, and stop")
    parser.add_argument("--jobs", type=int, default=1, help="how many run side by side")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no mutant after this time")
    parser.add_argument("--page", action="store_true", help="write docs/developer/mutants.md and stop")
    asked = parser.parse_args()
    chosen = [m for m in (GPU_MUTANTS if asked.gpu else MUTANTS) if asked.only in f"{m.name} {m.file}"]
    known = {(row["mutant"], row["file"]) for row in _rows()} if asked.new else set[tuple[str, str]]()
    chosen = [m for m in chosen if (m.name, m.file) not in known]
    if asked.dry:
        errors = _dry_errors(chosen)
        for error in errors:
            print(error)
        print(f"{len(chosen) - len(errors)} of {len(chosen)} mutants apply")
        return bool(errors)
    found: list[tuple[Mutant, str, float]] = []
    stop_at = time.monotonic() + asked.seconds
    with ThreadPoolExecutor(asked.jobs) as pool:
        runs = [pool.submit(_tried, mutant, stop_at) for mutant in ([] if asked.page else chosen)]
        for run in as_completed(runs):
            result = run.result()
            if result is None:
                continue
            mutant, test, seconds = result
            found.append(result)
            print(f"{seconds:4.0f} s  {mutant.name} ({mutant.file}): {test or 'SURVIVED'}", flush=True)
            _save(found)
    PAGE.write_text(page(), encoding="utf-8")
    survivors = [mutant for mutant, test, _ in found if not test]
    print(f"{len(found) - len(survivors)} of {len(found)} mutants killed")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
