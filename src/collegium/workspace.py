"""Memory that forward passes run in: taken once, cut into buffers for each kind of pass.

A forward pass allocates nothing because its buffers are views of a block that exists already. Code that needs memory
for the length of a pass asks ``empty``: inside ``Workspace.scope`` it gets, at the same place of every pass of one
kind, the same buffer; outside it gets fresh memory. Blocks are never given back while the workspace lives, since a
captured CUDA graph keeps their addresses.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Generator, Hashable

    from torch import Tensor

__all__ = ["Workspace", "empty", "serves", "shared_workspace"]

_ALIGN = 256
_KEPT = 512  # kinds of pass remembered; the oldest goes first


class Workspace:
    """Buffers on one device for one forward pass at a time.

    A pass on another CUDA stream than the one before waits for that stream. Passes that are to run at the same time,
    or in captured graphs replayed side by side, need two workspaces.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = torch.empty(0, device=device).device  # with its index, as tensors name it
        self._blocks: list[Tensor] = []
        self._kinds: dict[Hashable, list[tuple[Tensor, int]]] = {}
        self._stream: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the block in use; older, smaller blocks are not counted."""
        return self._blocks[-1].numel() if self._blocks else 0

    def reserve(self, size: int) -> None:
        """Make sure that passes of up to ``size`` bytes take no new memory."""
        if size > self.nbytes:
            self._blocks.append(torch.empty(size, dtype=torch.uint8, device=self.device))
            self._kinds.clear()

    @contextmanager
    def scope(self, kind: Hashable) -> Generator[None]:
        """Serve ``empty`` from this workspace inside the block; ``kind`` names passes that ask for the same buffers."""
        self.follow()
        if kind not in self._kinds and len(self._kinds) >= _KEPT:
            del self._kinds[next(iter(self._kinds))]
        before, _active.running = _active.running, _Pass(self, self._kinds.setdefault(kind, []))
        try:
            yield
        finally:
            _active.running = before

    def follow(self) -> None:
        """Let this stream wait for the one that used the buffers last; a graph keeps its own order while captured."""
        if self.device.type != "cuda":
            return
        current = torch._C._cuda_getCurrentRawStream(self.device.index)  # pyright: ignore[reportPrivateUsage]
        if current == self._stream or torch.cuda.is_current_stream_capturing():
            return
        if self._stream is not None:
            last = torch.cuda.default_stream(self.device)
            waiting = torch.cuda.current_stream(self.device)
            waiting.wait_stream(last if self._stream == 0 else torch.cuda.ExternalStream(self._stream, self.device))
        self._stream = current

    def piece(self, start: int, size: int) -> tuple[Tensor, int]:
        """Return ``size`` bytes from byte ``start`` of the block, or from a new and larger one, and where they end."""
        if start + size > self.nbytes:
            self._blocks.append(torch.empty(start + size, dtype=torch.uint8, device=self.device))
            start = 0
        end = start + size
        return self._blocks[-1][start:end], -(-end // _ALIGN) * _ALIGN


class _Pass:
    """How far one pass has come in the list of buffers of its kind."""

    def __init__(self, space: Workspace, buffers: list[tuple[Tensor, int]]) -> None:
        self.space = space
        self.buffers = buffers
        self.given = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.given < len(self.buffers):
            found = self.buffers[self.given][0]
            if found.shape == shape and found.dtype == dtype:
                self.given += 1
                return found
            del self.buffers[self.given :]  # another sequence than last time: what follows is cut anew
        start = self.buffers[-1][1] if self.buffers else 0
        raw, end = self.space.piece(start, prod(shape) * dtype.itemsize)
        self.buffers.append((raw.view(dtype).view(shape), end))
        self.given += 1
        return self.buffers[-1][0]


class _Active(threading.local):
    running: _Pass | None = None


_active = _Active()
_shared: dict[torch.device, Workspace] = {}


def _serving(device: torch.device) -> _Pass | None:
    running = _active.running
    return running if running is not None and running.space.device == device else None


def serves(device: torch.device) -> bool:
    """Return whether a pass is running that ``empty`` gives memory of ``device`` from."""
    return _serving(device) is not None


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised contiguous tensor: the running pass's own until it ends, or fresh memory outside one."""
    running = _serving(device)
    if running is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return running.take(shape, dtype)


def shared_workspace(device: torch.device, size: int = 0) -> Workspace:
    """Return the workspace all layers of ``device`` share, of ``size`` bytes at least: they run one after the other."""
    if device not in _shared:
        _shared[device] = Workspace(device)
    _shared[device].reserve(size)
    return _shared[device]
