"""The command, run as a user runs it."""

from __future__ import annotations

import contextlib
import io
import sys

from collegium import cli

__all__ = ["command"]


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
