"""Run a program that compiles kernels in a process of its own, where Triton's interpreter does not stand in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from once import once

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

__all__ = ["compile_apart", "compile_selected", "compiler_release", "grid", "selected", "skip_other_compilers"]

BOUNDED = ("3.6", "3.9")  # releases of Triton for whose code the tests have bounds


def compiler_release() -> str:
    """Return the installed release of Triton without its last number, such as ``3.6``; empty where there is none."""
    try:
        return ".".join(version("triton").split(".")[:2])
    except PackageNotFoundError:
        return ""


def skip_other_compilers() -> None:
    """Skip a module with bounds of registers and instructions where another release of Triton is installed."""
    release = compiler_release()
    if not release:
        pytest.skip("needs Triton", allow_module_level=True)
    if release not in BOUNDED:
        reason = f"bounds exist for Triton {' and '.join(BOUNDED)}; {release} is installed"
        pytest.skip(reason, allow_module_level=True)


def grid(cases: Sequence[Any], facts: Callable[..., Iterable[Hashable]], ids: Callable[..., str]) -> Any:
    """Return the parameter ``index`` of a test that reads what was made of ``cases[index]``.

    What ``facts(*case)`` names occurs in a case that ``make test`` compiles too; the other cases are exhaustive.
    """
    rows: list[Any] = []
    seen: set[Hashable] = set()
    for index, case in enumerate(cases):
        new = set(facts(*case)) - seen
        seen |= new
        rows.append(pytest.param(index, id=f"{ids(*case)}-{index}", marks=() if new else pytest.mark.exhaustive))
    return pytest.mark.parametrize("index", rows)


def selected(request: pytest.FixtureRequest, test: str, cases: Sequence[Any]) -> list[int]:
    """Return with which places of ``cases`` a test function of this module runs, all where it does not run at all."""
    found: set[int] = set()
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.path == request.path and item.originalname == test:
            found.add(item.callspec.params["index"])
    return sorted(found) or list(range(len(cases)))


def compile_selected(request: pytest.FixtureRequest, test: str, program: str, asked: Sequence[Any]) -> dict[int, Any]:
    """Return what ``program`` makes of the cases that a test function runs with, by their place in ``asked``."""
    places = selected(request, test, asked)
    return dict(zip(places, compile_apart(program, [asked[place] for place in places]), strict=True))


def compile_apart(program: str, asked: list[Any]) -> list[Any]:
    """Return what ``program`` prints as JSON behind ``RESULT`` when it reads ``asked`` as JSON.

    One process of a test run compiles; the others, whose workers took tests of the same module, read its result.
    """
    words = json.dumps(asked)
    path = once(program + words, ".json", lambda new: _write(new, _printed(program, words)))
    return json.loads(_printed(program, words) if path is None else path.read_text())


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _printed(program: str, words: str) -> str:
    places = (Path(__file__).parents[2] / "src", Path(__file__).parent)
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        input=words,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(map(str, places))},
    )
    line = next((text for text in run.stdout.splitlines() if text.startswith("RESULT")), None)
    assert line is not None, run.stderr[-4000:]
    return line.removeprefix("RESULT")
