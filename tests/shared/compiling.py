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

__all__ = ["compile_apart", "skip_other_compilers"]


def skip_other_compilers() -> None:
    """Skip a module whose bounds are those of Triton 3.6 where that is not installed."""
    try:
        found = version("triton")
    except PackageNotFoundError:
        pytest.skip("needs Triton", allow_module_level=True)
    if not found.startswith("3.6."):
        reason = f"registers and spills are judged by what Triton 3.6 makes; {found} is installed"
        pytest.skip(reason, allow_module_level=True)


def compile_apart(program: str, asked: list[Any]) -> list[Any]:
    """Return what ``program`` prints as JSON behind ``RESULT`` when it reads ``asked`` as JSON."""
    places = (Path(__file__).parents[2] / "src", Path(__file__).parent)
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(map(str, places))},
    )
    line = next((text for text in run.stdout.splitlines() if text.startswith("RESULT")), None)
    assert line is not None, run.stderr[-4000:]
    return json.loads(line.removeprefix("RESULT"))
