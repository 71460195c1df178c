"""Ctrl-C at the command line: one line and exit code 130, from the first import to the last thread.

Imported first by ``cli``: while the other packages are imported an interrupt is already one line and no traceback.
"""

import os
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType, TracebackType

__all__ = ["EXIT_CODE", "TEXT", "install", "interrupt_once", "was_interrupted"]

EXIT_CODE = 128 + signal.SIGINT
TEXT = "stopped by Ctrl-C"
_GRACE = 10.0  # seconds in which temporary files are removed
_count = [0]
_watches: list[threading.Timer] = []


def was_interrupted() -> bool:
    """Return whether Ctrl-C was pressed: whatever an unwinding program raises then is no error."""
    return _count[0] > 0


@contextmanager
def interrupt_once() -> Generator[None]:
    """Raise KeyboardInterrupt at the first Ctrl-C inside the block; end the process at the second, or when it hangs."""
    _count[0] = 0
    if threading.current_thread() is not threading.main_thread():  # Python handles signals in that one alone
        yield
        return
    before = signal.signal(signal.SIGINT, _on_interrupt)
    try:
        yield
    finally:
        for watch in _watches:
            watch.cancel()
        _watches.clear()
        if not was_interrupted():  # else a second Ctrl-C still ends a process that waits for its threads
            signal.signal(signal.SIGINT, before)


def _on_interrupt(_: int, __: FrameType | None) -> None:
    _count[0] += 1
    if _count[0] > 1:
        os._exit(EXIT_CODE)
    # Code that swallows the interrupt does not keep the process alive.
    watch = threading.Timer(_GRACE, os._exit, (EXIT_CODE,))
    watch.daemon = True
    watch.start()
    _watches.append(watch)
    raise KeyboardInterrupt


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        _end()
    sys.__excepthook__(kind, error, trace)


def _unraisable_hook(unraisable: "sys.UnraisableHookArgs") -> None:
    # Ctrl-C while a destructor runs: Python would print a traceback and go on.
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        _end()
    sys.__unraisablehook__(unraisable)


def _end() -> None:
    sys.stderr.write(f"Interrupted: {TEXT}\n")
    sys.stderr.flush()
    os._exit(EXIT_CODE)


def install() -> None:
    """Let Ctrl-C end this process with one line; for the command alone, before it imports anything slow."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _hook
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _unraisable_hook
