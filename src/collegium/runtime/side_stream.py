"""A second stream of a device, beside the current one."""

import threading
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["run_on_side_stream"]


class _Side(threading.local):
    """The second streams of one thread: two that capture at the same time must not have one in common."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def of(self, device: torch.device) -> torch.cuda.Stream:
        found = self._streams.get(device)
        if found is None:
            # torch hands out the same streams again and again, those with a priority seldom.
            found = self._streams[device] = torch.cuda.Stream(device, priority=-1)
        return found


_side = _Side()


def run_on_side_stream(work: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """Do ``work`` on a second stream, which follows the current one of ``device`` up to now.

    What is returned lets the stream that is then current wait for it, and returns what ``work`` returned. It has to be
    called: a CUDA graph ends on the stream that it began on.
    """
    side = _side.of(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        made = work()

    def joined() -> Tensor:
        torch.cuda.current_stream(device).wait_stream(side)
        return made

    return joined
