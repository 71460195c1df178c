"""Run a program that compiles kernels in a process of its own, where Triton's interpreter does not stand in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["compile_apart"]


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
