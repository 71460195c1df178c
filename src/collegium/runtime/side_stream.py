"""Run work on a second stream of a device."""

import threading
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["run_on_side_stream"]


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
