"""Passes that change the same memory, one after the other: on the host by a lock, on a GPU by waiting streams."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

import torch

from .memory import current_stream, is_capturing, is_stream_capturing, wait_for

__all__ = ["PassOrder"]


class PassOrder:
    """The order of the passes of one layer on ``device``, in any threads and on any streams.

    CUDA graphs are captured without waiting for other streams: whoever replays two graphs of one layer orders them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = torch.empty(0, device=device).device  # with its index, as tensors name it
        self._stream = current_stream(self._device)
        self._lock = threading.RLock()

    @contextmanager
    def turn(self) -> Generator[None]:
        """Queue a pass on the current stream inside the block; it starts after all earlier passes."""
        with self._lock:
            stream = current_stream(self._device)
            if not is_capturing(self._device):
                if stream != self._stream and not is_stream_capturing(self._device, self._stream):
                    wait_for(self._stream, self._device)
                self._stream = stream
            yield
