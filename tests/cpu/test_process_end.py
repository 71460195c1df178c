from __future__ import annotations

import subprocess
import sys

import pytest


def run(*arguments: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "code"),
    [(("plan", "fables-16m", "--device", "h200"), 0), (("plan", "nosuch"), 1), (("--nosuch",), 2)],
    ids=["success", "error", "usage"],
)
def test_exit_status(words: tuple[str, ...], code: int) -> None:
    status, out, err = run("-m", "collegium", *words)
    assert status == code
    assert (bool(out), bool(err)) == (code == 0, code != 0)


def test_libraries_print_nothing_at_exit() -> None:
    """A failed ``generate``, which has imported the most libraries; some list what is left when Python shuts down."""
    status, out, err = run("-m", "collegium", "generate", "fables-16m", "--format", "mxfp5", "--device", "cpu")
    assert (status, out, len(err.splitlines())) == (1, "", 1)


@pytest.mark.parametrize(
    ("end", "code", "traceback"),
    [
        ("pass", 0, False),
        ("sys.exit(3)", 3, False),
        ("sys.exit('a message')", 1, False),
        ("raise ValueError", 1, True),
    ],
)
def test_exit_functions_run_before_the_end(end: str, code: int, traceback: bool) -> None:
    program = f"""
import atexit, sys
from collegium import cli

def main():
    atexit.register(print, "exit function")
    print("output", end=" ")
    {end}

cli.main = main
cli.run_process()
"""
    status, out, err = run("-c", program)
    assert (status, out) == (code, "output exit function\n")
    assert ("Traceback" in err) == traceback
