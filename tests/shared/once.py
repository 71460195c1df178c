"""What one process of a test run makes and the others read: compiled libraries, facts about compiled kernels."""

from __future__ import annotations

import fcntl
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FOLDER", "once"]

FOLDER = "COLLEGIUM_TEST_RUN"  # set by tests/conftest.py: a folder of this run, removed at its end


def once(key: str, suffix: str, make: Callable[[Path], None]) -> Path | None:
    """Return the file that ``make(path)`` writes, which the first caller of this run makes for all of its processes.

    key: everything the contents depend on, apart from the sources, which do not change during a run. None where no test
    run has a folder; the caller makes its own then.
    """
    if FOLDER not in os.environ:
        return None
    path = Path(os.environ[FOLDER]) / (hashlib.sha256(key.encode()).hexdigest() + suffix)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            part = path.with_suffix(".part")
            make(part)
            part.rename(path)
    return path
