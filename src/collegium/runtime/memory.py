"""Memory that forward passes run in: named regions at fixed offsets of one block, sized by the plan.

A pass allocates nothing: every stage declares its regions for a problem (name and maximum bytes), the plan sums them,
and a workspace holds them all. Code that needs a buffer for the duration of a pass receives a ``Memory`` and allocates
a region by name. A workspace serves one pass at a time; ``Workspaces`` lends them, so passes that several threads start
at once never share a buffer. Blocks are not freed while the workspace lives, since passes that still run on the device
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

ALIGN = 256  # bytes; every region is aligned to it
_MAX_CACHED_BUFFERS = 4096  # of one arena, or of one part of it
_numbers = itertools.count()

Regions = dict[str, int]  # maximum bytes that a stage allocates under each name, for one problem


class Region(NamedTuple):
    """One region of a plan: its name and maximum bytes."""

    name: str
    nbytes: int


class Memory(Protocol):
    """Allocates the buffers of a pass; a buffer belongs to the pass until the pass ends."""

    def alloc(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the uninitialised contiguous buffer ``name``; a pass allocates a name once."""
        ...

    def part(self, name: str) -> Memory:
        """Return the memory of the part ``name`` of the pass: its regions are named ``name/...``."""
        ...


def alloc(memory: Memory | None, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the buffer ``name`` of ``memory``, or fresh memory of ``device`` if memory is None."""
    return torch.empty(shape, dtype=dtype, device=device) if memory is None else memory.alloc(name, shape, dtype)


def part(memory: Memory | None, name: str) -> Memory | None:
    """Return the part ``name`` of ``memory``, or None if memory is None."""
    return None if memory is None else memory.part(name)


def with_prefix(name: str, regions: Mapping[str, int]) -> Regions:
    """Return the regions of the part ``name`` of a pass."""
    return {f"{name}/{region}": size for region, size in regions.items()}


def elementwise_max(*alternatives: Mapping[str, int]) -> Regions:
    """Return regions that can hold any one of the ``alternatives``: the largest of each name."""
    names = dict.fromkeys(name for regions in alternatives for name in regions)
    return {name: max(regions.get(name, 0) for regions in alternatives) for name in names}


class MemoryMap:
    """The offset of each region of a plan in a block: the same for every pass, and on every rank.

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
        """Copy and unpickle as the cached map of these regions."""
        return memory_map, (self.regions,)

    def find(self, name: str, nbytes: int) -> int:
        """Return the first byte of ``name``; a region that is missing or too small is a bug of a stage."""
        start, size = self.offsets.get(name, (0, -1))
        if nbytes > size:
            raise AssertionError(
                f"a pass allocates {nbytes:,} bytes as {name!r}, the plan has {max(size, 0):,}: the stage declares too "
                "little. Please report it, with print(layer)"
            )
        return start


@lru_cache(maxsize=256)
def memory_map(regions: tuple[Region, ...]) -> MemoryMap:
    """Return the map of ``regions``, the same object for all layers with these regions."""
    return MemoryMap(regions)


class Arena:
    """The ``Memory`` of passes in one block, or of their parts whose regions are named ``prefix...``."""

    def __init__(self, block: Tensor, layout: MemoryMap, prefix: str = "") -> None:
        self.block = block
        self.map = layout
        self._prefix = prefix
        self._buffers: dict[tuple[str, tuple[int, ...], torch.dtype], Tensor] = {}
        self._parts: dict[str, Arena] = {}

    def alloc(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the region ``name`` of the block as a tensor."""
        key = (name, shape, dtype)
        buffer = self._buffers.get(key)
        if buffer is None:
            size = prod(shape) * dtype.itemsize
            start = self.map.find(self._prefix + name, size)
            if len(self._buffers) >= _MAX_CACHED_BUFFERS:
                self._buffers.clear()
            # An inference tensor could not be written outside inference mode.
            with torch.inference_mode(False):
                buffer = self.block[start : start + size].view(dtype).view(shape)
            self._buffers[key] = buffer
        return buffer

    def part(self, name: str) -> Memory:
        """Return the memory of a part of the pass."""
        arena = self._parts.get(name)
        if arena is None:
            arena = Arena(self.block, self.map, f"{self._prefix}{name}/")
            self._parts[name] = arena
        return arena


class FreshMemory:
    """Fresh memory for every buffer of a pass, which lives as long as this object.

    For passes that a CUDA graph captures: torch allocates from the graph's private pool, so a graph shares no buffer
    with other passes, and may be replayed at the same time. Also for passes that compile kernels in parallel.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: list[Tensor] = []

    def alloc(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return fresh memory."""
        buffer = torch.empty(shape, dtype=dtype, device=self.device)
        self._buffers.append(buffer)
        return buffer

    def part(self, name: str) -> Memory:
        """Return this memory: fresh buffers need no names."""
        return self


class Workspace:
    """A block on one device for one forward pass at a time.

    number: unique in this process. stream: the CUDA stream of the last pass.
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

    def memory(self, layout: MemoryMap) -> Arena:
        """Return the block as the memory of passes with the regions of ``layout``."""
        arena = self._arenas.get(id(layout))
        if arena is None or arena.map is not layout:
            arena = Arena(self.block, layout)
            self._arenas[id(layout)] = arena
        return arena

    def wait_on(self, stream: int) -> None:
        """Let ``stream``, the current one, wait for the stream of the last pass."""
        if stream != self.stream:
            wait_for(self.stream, self.device)
            self.stream = stream


class Workspaces:
    """The workspaces of one device, each lent to one pass at a time; their number is that of concurrent passes.

    Safe to use from any number of threads.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = torch.empty(0, device=device).device
        self._size = 0
        self._free: list[Workspace] = []
        self._retired: list[Workspace] = []  # too small, but passes that still run on the device may use them
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and unpickle as the workspaces that all layers of the device share: a layer has no addresses."""
        return shared_workspaces, (self.device, self._size)

    @property
    def nbytes(self) -> int:
        """Bytes of the workspaces that are not lent now."""
        return sum(space.nbytes for space in self._free)

    def reserve(self, size: int) -> None:
        """Let every workspace have at least ``size`` bytes, and create one if none is large enough."""
        with self._lock:
            self._size = max(self._size, size)
            ready = any(space.nbytes >= self._size for space in self._free)
        if not ready:
            self.release(self._create())

    def acquire(self) -> Workspace:
        """Return a workspace for one pass on the current stream, which waits for the stream that used it last.

        Workspaces that were last used on this stream are preferred, so threads with a stream each do not wait.
        """
        stream = current_stream(self.device)
        free = self._free
        with self._lock:
            if free and free[-1].stream == stream:
                space = free.pop()
            else:
                index = next((index for index, other in enumerate(free) if other.stream == stream), -1)
                space = free.pop(index) if free else None
        if space is None:
            return self._create()
        if space.nbytes < self._size:
            self._retired.append(space)
            return self.acquire()
        if space.stream != stream:
            if is_stream_capturing(self.device, space.stream):
                # Another thread captures on that stream, and waiting for it would become part of its graph.
                fresh = self._create()
                self._free.insert(0, space)
                return fresh
            space.wait_on(stream)
        return space

    def release(self, space: Workspace) -> None:
        """Take back what ``acquire`` returned, once everything that uses it is queued on its stream."""
        self._free.append(space)

    def _create(self) -> Workspace:
        # Allocated on the current stream, which is therefore the stream that later passes wait for.
        return Workspace(self.device, self._size)


_shared: dict[torch.device, Workspaces] = {}
_shared_lock = threading.Lock()


def shared_workspaces(device: torch.device, size: int = 0) -> Workspaces:
    """Return the workspaces that all layers of ``device`` share, of at least ``size`` bytes each."""
    with _shared_lock:
        workspaces = _shared.setdefault(device, Workspaces(device))
    workspaces.reserve(size)
    return workspaces


def wait_for(stream: int, device: torch.device) -> None:
    """Let the current stream of ``device`` wait for the work queued on ``stream`` (a CUDA handle)."""
    default = torch.cuda.default_stream(device)
    last = default if stream == 0 else torch.cuda.ExternalStream(stream, device)
    torch.cuda.current_stream(device).wait_stream(last)


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph captures the current stream of ``device``."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def is_stream_capturing(device: torch.device, stream: int) -> bool:
    """Return whether a CUDA graph captures ``stream`` (a CUDA handle) of ``device``, in any thread."""
    if device.type != "cuda" or not stream:
        return False
    with torch.cuda.stream(torch.cuda.ExternalStream(stream, device)):
        return torch.cuda.is_current_stream_capturing()


def current_stream(device: torch.device) -> int:
    """Return the CUDA handle of the current stream of ``device``, 0 on a CPU."""
    if device.type != "cuda":
        return 0
    return torch._C._cuda_getCurrentRawStream(device.index)  # pyright: ignore[reportPrivateUsage]
