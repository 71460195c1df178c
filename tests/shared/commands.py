"""The command, run as a user runs it."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys

from collegium import cli

__all__ = ["command", "torchrun"]


def command(*arguments: object) -> tuple[int, str, str]:
    """Run ``collegium arguments``; return exit code, output, and what it says on the error stream, as one line."""
    before, out, said = sys.argv, io.StringIO(), io.StringIO()
    sys.argv = ["collegium", *map(str, arguments)]
    code: object = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
            cli.main()
    except SystemExit as stop:
        code = stop.code
    finally:
        sys.argv = before
    return code if isinstance(code, int) else 0, out.getvalue(), " ".join(said.getvalue().split())


def torchrun(*arguments: object) -> tuple[int, str, str]:
    """Run the command in two processes as torchrun starts them; return exit code, output and errors."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "collegium"]
    done = subprocess.run(
        [*launch, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr
