"""Ctrl-C at the command line prints one line and exits with status 130, from the first import to the last thread.

``cli`` imports this module first, so that an interrupt during the other imports prints no traceback either.
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
_count = [0]  # interrupts so far
_timers: list[threading.Timer] = []


def was_interrupted() -> bool:
    """Return whether Ctrl-C was pressed; exceptions raised while the program unwinds are then not errors."""
    return _count[0] > 0


@contextmanager
def interrupt_once() -> Generator[None]:
    """Raise KeyboardInterrupt at the first Ctrl-C inside the block; exit at the second, or after a timeout."""
    _count[0] = 0
    if threading.current_thread() is not threading.main_thread():  # Python handles signals only in the main thread
        yield
        return
    handler_before = signal.signal(signal.SIGINT, _on_interrupt)
    try:
        yield
    finally:
        for timer in _timers:
            timer.cancel()
        _timers.clear()
        if not was_interrupted():  # otherwise a second Ctrl-C must still end a process that waits for its threads
            signal.signal(signal.SIGINT, handler_before)


def _on_interrupt(_: int, __: FrameType | None) -> None:
    _count[0] += 1
    if _count[0] > 1:
        os._exit(EXIT_CODE)
    # Ends the process even if code swallows the interrupt.
    timer = threading.Timer(_GRACE, os._exit, (EXIT_CODE,))
    timer.daemon = True
    timer.start()
    _timers.append(timer)
    raise KeyboardInterrupt


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        _end()
    sys.__excepthook__(kind, error, trace)


def _unraisable_hook(unraisable: "sys.UnraisableHookArgs") -> None:
    # Ctrl-C in a destructor: Python would print a traceback and continue.
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        _end()
    sys.__unraisablehook__(unraisable)


def _end() -> None:
    sys.stderr.write(f"Interrupted: {TEXT}\n")
    sys.stderr.flush()
    os._exit(EXIT_CODE)


def install() -> None:
    """Let Ctrl-C end this process with one line; only for the command, before its slow imports."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _hook
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _unraisable_hook
