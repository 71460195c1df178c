"""Run work on a second stream of a device."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = ["ForkedStream", "run_on_side_stream"]


class _Side(threading.local):
    """The second streams of one thread: threads that capture at the same time must not share one."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def of(self, device: torch.device) -> torch.cuda.Stream:
        stream = self._streams.get(device)
        if stream is None:
            # torch hands out streams from a pool; those with a priority are rarely used elsewhere.
            stream = torch.cuda.Stream(device, priority=-1)
            self._streams[device] = stream
        return stream


_side = _Side()


def run_on_side_stream(work: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """Do ``work`` on a second stream, after everything queued on the current stream of ``device``.

    Returns a function that lets the then current stream wait for the work, and returns its result. It has to be called:
    a CUDA graph ends on the stream that it began on.
    """
    side = _side.of(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        result = work()

    def wait() -> Tensor:
        torch.cuda.current_stream(device).wait_stream(side)
        return result

    return wait


class ForkedStream:
    """A second stream, behind what is queued on the current stream of ``device`` when it is made.

    A call returns the context in which work is queued on it. On a CPU everything runs in the order of calls.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _side.of(device) if device.type == "cuda" else None
        self.catch_up()

    def __call__(self) -> AbstractContextManager[Any]:
        """Return a context in which the second stream is the current one."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def catch_up(self) -> None:
        """Let the second stream wait for what is queued on the current stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def join(self) -> None:
        """Let the current stream wait for what is queued on the second stream."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
