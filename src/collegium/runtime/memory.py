"""Memory that forward passes run in: named regions at fixed places of one block, sized by the plan.

A pass allocates nothing: every stage declares its regions for a problem (name and most bytes), the plan sums them, and
a workspace holds them all. Code that needs a buffer for the length of a pass is given a ``Memory`` and takes a region
by name. A workspace serves one pass at a time; ``Workspaces`` lends them, so passes that several threads start at once
never share a buffer. Blocks are never given back while the workspace lives, since passes that still run on the device
use their addresses.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = [
    "Arena",
    "FreshMemory",
    "Memory",
    "MemoryMap",
    "Region",
    "Regions",
    "Workspace",
    "Workspaces",
    "alloc",
    "current_stream",
    "elementwise_max",
    "is_capturing",
    "is_stream_capturing",
    "memory_map",
    "part",
    "shared_workspaces",
    "wait_for",
    "with_prefix",
]

ALIGN = 256  # bytes that divide the place of every region
_KEPT = 4096  # buffers of one arena, or of one part of it, remembered
_numbers = itertools.count()

Regions = dict[str, int]  # the most bytes a stage takes under each name, for one problem


class Region(NamedTuple):
    """One region of a plan: its name, and the most bytes that are taken of it."""

    name: str
    nbytes: int


class Memory(Protocol):
    """What a pass takes its buffers from; a buffer is the pass's own until the pass ends."""

    def alloc(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the uninitialised contiguous buffer ``name``; a pass takes a name once."""
        ...

    def part(self, name: str) -> Memory:
        """Return the memory of the part ``name`` of the pass: its regions are called ``name/...``."""
        ...


def alloc(memory: Memory | None, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the buffer ``name`` of ``memory``, or fresh memory of ``device`` where no pass gives any."""
    return torch.empty(shape, dtype=dtype, device=device) if memory is None else memory.alloc(name, shape, dtype)


def part(memory: Memory | None, name: str) -> Memory | None:
    """Return the part ``name`` of ``memory``, or None where no pass gives any."""
    return None if memory is None else memory.part(name)


def with_prefix(name: str, regions: Mapping[str, int]) -> Regions:
    """Return the regions of the part ``name`` of a pass."""
    return {f"{name}/{own}": size for own, size in regions.items()}


def elementwise_max(*alternatives: Mapping[str, int]) -> Regions:
    """Return what holds any one of the ``alternatives``: of each region the largest."""
    names = dict.fromkeys(name for regions in alternatives for name in regions)
    return {name: max(regions.get(name, 0) for regions in alternatives) for name in names}


class MemoryMap:
    """Where each region of a plan is in a block: the same place for every pass, and on every rank.

    nbytes: of the block.
    """

    def __init__(self, regions: tuple[Region, ...]) -> None:
        self.regions = regions
        self.offsets: dict[str, tuple[int, int]] = {}
        start = 0
        for region in regions:
            self.offsets[region.name] = start, region.nbytes
            start += -(-region.nbytes // ALIGN) * ALIGN
        self.nbytes = start

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and unpickle as the one map of these regions."""
        return memory_map, (self.regions,)

    def find(self, name: str, nbytes: int) -> int:
        """Return the first byte of ``name``; a region that is missing or too small is a fault of the plan."""
        start, size = self.offsets.get(name, (0, -1))
        if nbytes > size:
            raise AssertionError(
                f"a pass takes {nbytes:,} bytes as {name!r}, the plan has {max(size, 0):,}: the stage that takes them "
                "declares too little. Please report it, with print(layer)"
            )
        return start


@lru_cache(maxsize=256)
def memory_map(regions: tuple[Region, ...]) -> MemoryMap:
    """Return the map of ``regions``, one for all layers that have the same."""
    return MemoryMap(regions)


class Arena:
    """The ``Memory`` of passes in one block, or of their parts whose regions are called ``prefix...``."""

    def __init__(self, block: Tensor, places: MemoryMap, prefix: str = "") -> None:
        self.block = block
        self.map = places
        self._prefix = prefix
        self._found: dict[tuple[str, tuple[int, ...], torch.dtype], Tensor] = {}
        self._parts: dict[str, Arena] = {}

    def alloc(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the region ``name`` of the block as a tensor."""
        key = (name, shape, dtype)
        found = self._found.get(key)
        if found is None:
            size = prod(shape) * dtype.itemsize
            start = self.map.find(self._prefix + name, size)
            if len(self._found) >= _KEPT:
                self._found.clear()
            # An inference tensor could not be written outside inference mode.
            with torch.inference_mode(False):
                found = self._found[key] = self.block[start : start + size].view(dtype).view(shape)
        return found

    def part(self, name: str) -> Memory:
        """Return the memory of a part of the pass."""
        found = self._parts.get(name)
        if found is None:
            found = self._parts[name] = Arena(self.block, self.map, f"{self._prefix}{name}/")
        return found


class FreshMemory:
    """Fresh memory for every buffer of a pass, none of it twice, which lives as long as this object.

    For passes that a CUDA graph captures: torch takes the memory from the graph's own pool, so a graph shares no buffer
    with other passes, and may be replayed beside them. And for passes that compile kernels side by side.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._taken: list[Tensor] = []

    def alloc(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return fresh memory."""
        self._taken.append(torch.empty(shape, dtype=dtype, device=self.device))
        return self._taken[-1]

    def part(self, name: str) -> Memory:
        """Return this memory: what is never shared needs no names."""
        return self


class Workspace:
    """A block on one device for one forward pass at a time; ``number`` is its own in this process.

    stream: the CUDA stream of the last pass.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.device = torch.empty(0, device=device).device  # with its index, as tensors name it
        self.number = next(_numbers)
        self.stream = current_stream(self.device)
        # An inference tensor could not be written outside inference mode.
        with torch.inference_mode(False):
            self.block = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self._arenas: dict[int, Arena] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the block."""
        return self.block.numel()

    def memory(self, places: MemoryMap) -> Arena:
        """Return the block as the memory of passes whose regions are at ``places``."""
        found = self._arenas.get(id(places))
        if found is None or found.map is not places:
            found = self._arenas[id(places)] = Arena(self.block, places)
        return found

    def wait_on(self, stream: int) -> None:
        """Let ``stream``, which is current, wait for the stream of the last pass."""
        if stream != self.stream:
            wait_for(self.stream, self.device)
            self.stream = stream


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
            self.release(self._made())

    def acquire(self) -> Workspace:
        """Return a workspace for one pass on the current stream, which waits for another stream that used it last.

        Workspaces that were last used on this stream come first, so threads with a stream each do not wait.
        """
        stream, free = current_stream(self.device), self._free
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
            return self.acquire()
        if space.stream != stream:
            if is_stream_capturing(self.device, space.stream):
                # Another thread captures on that stream, and waiting for it would become a part of its graph.
                made = self._made()
                self._free.insert(0, space)
                return made
            space.wait_on(stream)
        return space

    def release(self, space: Workspace) -> None:
        """Take back what ``take`` returned, once everything that uses it is on its stream."""
        self._free.append(space)

    def _made(self) -> Workspace:
        # Its memory is new on the current stream, which is therefore the one that later passes wait for.
        return Workspace(self.device, self._size)


_shared: dict[torch.device, Workspaces] = {}
_making = threading.Lock()


def shared_workspaces(device: torch.device, size: int = 0) -> Workspaces:
    """Return the workspaces all layers of ``device`` share, of ``size`` bytes at least each."""
    with _making:
        found = _shared.setdefault(device, Workspaces(device))
    found.reserve(size)
    return found


def wait_for(stream: int, device: torch.device) -> None:
    """Let the current stream of ``device`` wait for what ``stream`` (as CUDA names it) was given."""
    default = torch.cuda.default_stream(device)
    last = default if stream == 0 else torch.cuda.ExternalStream(stream, device)
    torch.cuda.current_stream(device).wait_stream(last)


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph captures what the current stream of ``device`` is given."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def is_stream_capturing(device: torch.device, stream: int) -> bool:
    """Return whether a CUDA graph captures ``stream`` (as CUDA names it) of ``device``, in whatever thread."""
    if device.type != "cuda" or not stream:
        return False
    with torch.cuda.stream(torch.cuda.ExternalStream(stream, device)):
        return torch.cuda.is_current_stream_capturing()


def current_stream(device: torch.device) -> int:
    """Return the current stream of ``device`` as CUDA names it, 0 on a CPU."""
    if device.type != "cuda":
        return 0
    return torch._C._cuda_getCurrentRawStream(device.index)  # pyright: ignore[reportPrivateUsage]
