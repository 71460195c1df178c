"""Run a program that compiles kernels in a process of its own, where Triton's interpreter does not stand in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from once import once

__all__ = ["compile_apart", "compiler_release", "skip_other_compilers"]

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
