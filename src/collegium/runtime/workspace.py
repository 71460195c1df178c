"""Memory that forward passes run in: taken once, cut into buffers for each kind of pass.

A forward pass allocates nothing because its buffers are views of a block that exists already. Code that needs memory
for the length of a pass asks ``empty``: inside ``Workspace.scope`` it gets, at the same place of every pass of one
kind, the same buffer; outside it gets fresh memory. A workspace serves one pass at a time; ``Workspaces`` lends them,
so passes that several threads start at once never share a buffer. Blocks are never given back while the workspace
lives, since passes that still run on the device use their addresses.
"""

from __future__ import annotations

import itertools
import threading
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Generator, Hashable

    from torch import Tensor

__all__ = [
    "Workspace",
    "Workspaces",
    "captured",
    "captures",
    "empty",
    "own_memory",
    "owned",
    "serves",
    "shared_workspaces",
]

_ALIGN = 256
_KEPT = 512  # kinds of pass remembered; the oldest goes first
_numbers = itertools.count()


class Workspace:
    """Buffers on one device for one forward pass at a time; ``number`` is its own in this process.

    stream: the CUDA stream of the last pass.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = torch.empty(0, device=device).device  # with its index, as tensors name it
        self.number = next(_numbers)
        self.stream = _current_stream(self.device)
        self._blocks: list[Tensor] = []
        self._kinds: dict[Hashable, list[tuple[Tensor, int]]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the block in use; older, smaller blocks are not counted."""
        return self._blocks[-1].numel() if self._blocks else 0

    def reserve(self, size: int) -> None:
        """Make sure that passes of up to ``size`` bytes take no new memory."""
        if size > self.nbytes:
            self._grow(size)
            self._kinds.clear()

    @contextmanager
    def scope(self, kind: Hashable) -> Generator[None]:
        """Serve ``empty`` from this workspace inside the block; ``kind`` names passes that ask for the same buffers."""
        if kind not in self._kinds and len(self._kinds) >= _KEPT:
            del self._kinds[next(iter(self._kinds))]
        before, _active.running = _active.running, _Pass(self, self._kinds.setdefault(kind, []))
        try:
            yield
        finally:
            _active.running = before

    def follow(self, stream: int) -> None:
        """Let ``stream``, which is current, wait for the stream of the last pass."""
        if stream == self.stream:
            return
        default = torch.cuda.default_stream(self.device)
        last = default if self.stream == 0 else torch.cuda.ExternalStream(self.stream, self.device)
        torch.cuda.current_stream(self.device).wait_stream(last)
        self.stream = stream

    def piece(self, start: int, size: int) -> tuple[Tensor, int]:
        """Return ``size`` bytes from byte ``start`` of the block, or from a new and larger one, and where they end."""
        if start + size > self.nbytes:
            self._grow(start + size)
            start = 0
        end = start + size
        return self._blocks[-1][start:end], -(-end // _ALIGN) * _ALIGN

    def _grow(self, size: int) -> None:
        # An inference tensor could not be written outside inference mode.
        with torch.inference_mode(False):
            self._blocks.append(torch.empty(size, dtype=torch.uint8, device=self.device))


class Workspaces:
    """The workspaces of one device, lent to one pass each; as many exist as passes were ever started at once.

    Safe to use from any number of threads.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = torch.empty(0, device=device).device
        self._size = 0
        self._free: list[Workspace] = []
        self._retired: list[Workspace] = []  # too small; passes that still run on the device may use them
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and unpickle as what all layers of the device share: addresses are no part of a layer."""
        return shared_workspaces, (self.device, self._size)

    @property
    def nbytes(self) -> int:
        """Bytes of the workspaces that no pass has now."""
        return sum(space.nbytes for space in self._free)

    def reserve(self, size: int) -> None:
        """Let every workspace have ``size`` bytes at least, and have one ready."""
        with self._lock:
            self._size = max(self._size, size)
            ready = any(space.nbytes >= self._size for space in self._free)
        if not ready:
            self.give(self._made())

    def take(self) -> Workspace:
        """Return a workspace for one pass on the current stream, which waits for another stream that used it last.

        Workspaces that were last used on this stream come first, so threads with a stream each do not wait.
        """
        stream, free = _current_stream(self.device), self._free
        with self._lock:
            if free and free[-1].stream == stream:
                space = free.pop()
            else:
                at = next((at for at, other in enumerate(free) if other.stream == stream), -1)
                space = free.pop(at) if free else None
        if space is None:
            return self._made()
        if space.nbytes < self._size:
            self._retired.append(space)
            return self.take()
        if space.stream != stream:
            if captures(self.device, space.stream):
                # Another thread captures on that stream, and waiting for it would become a part of its graph.
                made = self._made()
                self._free.insert(0, space)
                return made
            space.follow(stream)
        return space

    def give(self, space: Workspace) -> None:
        """Take back what ``take`` returned, once everything that uses it is on its stream."""
        self._free.append(space)

    def _made(self) -> Workspace:
        # Its memory is new on the current stream, which is therefore the one that later passes wait for.
        space = Workspace(self.device)
        space.reserve(self._size)
        return space


class _Pass:
    """How far one pass has come in the list of buffers of its kind."""

    def __init__(self, space: Workspace, buffers: list[tuple[Tensor, int]]) -> None:
        self.device = space.device
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


class _OwnPass:
    """A pass whose buffers are fresh and live until it ends."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffers: list[Tensor] = []

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self.buffers.append(torch.empty(shape, dtype=dtype, device=self.device))
        return self.buffers[-1]


class _Active(threading.local):
    running: _Pass | _OwnPass | None = None


_active = _Active()
_shared: dict[torch.device, Workspaces] = {}
_making = threading.Lock()


@contextmanager
def own_memory(device: torch.device) -> Generator[None]:
    """Serve ``empty`` with fresh memory inside the block, none of it twice.

    For passes that a CUDA graph captures: torch takes the memory from the graph's own pool, so a graph shares no buffer
    with other passes, and may be replayed beside them. And for passes that compile kernels side by side.
    """
    before, _active.running = _active.running, _OwnPass(torch.empty(0, device=device).device)
    try:
        yield
    finally:
        _active.running = before


def captured(device: torch.device) -> bool:
    """Return whether a CUDA graph captures what the current stream of ``device`` is given."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def owned(device: torch.device) -> bool:
    """Return whether ``empty`` gives fresh memory of ``device`` that lives until ``own_memory`` ends."""
    return isinstance(_serving(device), _OwnPass)


def _serving(device: torch.device) -> _Pass | _OwnPass | None:
    running = _active.running
    return running if running is not None and running.device == device else None


def _current_stream(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return torch._C._cuda_getCurrentRawStream(device.index)  # pyright: ignore[reportPrivateUsage]


def captures(device: torch.device, stream: int) -> bool:
    """Return whether a CUDA graph captures ``stream`` (as CUDA names it) of ``device``, in whatever thread."""
    if device.type != "cuda" or not stream:
        return False
    with torch.cuda.stream(torch.cuda.ExternalStream(stream, device)):
        return torch.cuda.is_current_stream_capturing()


def serves(device: torch.device) -> bool:
    """Return whether a pass is running that ``empty`` gives memory of ``device`` from."""
    return _serving(device) is not None


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised contiguous tensor: the running pass's own until it ends, or fresh memory outside one."""
    running = _serving(device)
    if running is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return running.take(shape, dtype)


def shared_workspaces(device: torch.device, size: int = 0) -> Workspaces:
    """Return the workspaces all layers of ``device`` share, of ``size`` bytes at least each."""
    with _making:
        found = _shared.setdefault(device, Workspaces(device))
    found.reserve(size)
    return found
