"""A second stream of a device, beside the current one."""

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from .launch import Step, noted

__all__ = ["on_the_side"]


class _Side:
    """The second stream of a device for one thread, which may be at work on another than its other threads."""

    def __init__(self, device: torch.device) -> None:
        # torch hands out the same streams again and again, those with a priority seldom.
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.begun, self.done = torch.cuda.Event(), torch.cuda.Event()
        self.main = 0  # the stream that it left, as CUDA names it


class _Sides(threading.local):
    def __init__(self) -> None:
        self.found: dict[int, _Side] = {}

    def of(self, device: int) -> _Side:
        found = self.found.get(device)
        if found is None:
            found = self.found[device] = _Side(torch.device("cuda", device))
        return found


_sides = _Sides()


def on_the_side(work: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """Do ``work`` on a second stream, which follows the current one of ``device`` up to now.

    What is returned lets the stream that is then current wait for it, and returns what ``work`` returned. Launches on
    either stream, and the changes between them, can be recorded and repeated. Buffers of ``work`` may be used again
    by what follows that wait alone.
    """
    index = device.index or 0
    side = _sides.of(index)
    _do(_leave, index)
    with torch.cuda.stream(side.stream):
        made = work()
    _do(_return, index)

    def joined() -> Tensor:
        _do(_join, index)
        return made

    return joined


def _do(change: Callable[..., int | None], device: int) -> None:
    # The stream is in the place that a launch has it in, where whoever repeats it puts the one that is current then.
    step = Step(change, (device, 0, 0, torch._C._cuda_getCurrentRawStream(device)))  # pyright: ignore[reportPrivateUsage]
    change(*step.arguments)
    noted(step)


def _leave(device: int, _y: int, _z: int, stream: int) -> int:
    """Let the second stream follow ``stream``, the current one; return it, for the launches that come next."""
    side = _sides.of(device)
    side.main = stream
    side.begun.record(torch.cuda.current_stream(device))
    side.stream.wait_event(side.begun)
    return side.stream.cuda_stream


def _return(device: int, *_: int) -> int:
    """Note what the second stream has been given; return the stream that it left."""
    side = _sides.of(device)
    side.done.record(side.stream)
    return side.main


def _join(device: int, *_: int) -> None:
    """Let the current stream wait for what ``_return`` noted."""
    torch.cuda.current_stream(device).wait_event(_sides.of(device).done)
