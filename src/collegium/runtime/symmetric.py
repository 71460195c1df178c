"""A workspace that the ranks of one host share: a region is at the same place on every rank, and peers can reach it.

On GPUs the block is torch's symmetric memory (peer access over NVLink or PCIe); on a CPU, for gloo groups, it is a file
in memory that every rank maps. Making one is a call that all ranks of the group make together.
"""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from ..errors import InputError
from .memory import Arena, MemoryMap

__all__ = ["SymmetricArena", "SymmetricWorkspace"]


class SymmetricArena(Arena):
    """The ``Memory`` of passes in a shared block: its own regions, and those of its peers."""

    def __init__(self, blocks: list[Tensor], rank: int, places: MemoryMap) -> None:
        super().__init__(blocks[rank], places)
        self._others = [Arena(block, places) for block in blocks]

    def peer(self, rank: int, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the region ``name`` of ``rank``; whoever reads it waits for a barrier after it was written."""
        return self._others[rank].alloc(name, shape, dtype)


class SymmetricWorkspace:
    """A block of ``nbytes`` bytes on every rank of ``group``, on ``device``; all ranks make it at the same time.

    blocks: of every rank, as bytes. Raises InputError on every rank where the ranks ask for different sizes, or are on
    several hosts.
    """

    def __init__(self, group: distributed.ProcessGroup, device: torch.device, nbytes: int) -> None:
        self.group, self.device, self.nbytes = group, device, nbytes
        self.rank, self.world_size = distributed.get_rank(group), distributed.get_world_size(group)
        self._same("bytes", nbytes)
        self._same("host", socket.gethostname())
        self.handle: Any = None  # of torch; the peers' blocks are mapped as long as it lives
        self.blocks = self._on_gpus() if device.type == "cuda" else self._on_cpu()

    def memory(self, places: MemoryMap) -> SymmetricArena:
        """Return the block as the memory of passes whose regions are at ``places``; all ranks ask at the same time.

        Raises InputError where the ranks have other regions, or more bytes than the block.
        """
        if places.nbytes > self.nbytes:
            raise InputError(
                f"symmetric memory: the regions take {places.nbytes:,} bytes, the block has {self.nbytes:,}"
            )
        self._same("regions", tuple((region.name, region.nbytes) for region in places.regions))
        return SymmetricArena(self.blocks, self.rank, places)

    def barrier(self) -> None:
        """Wait until every rank is here; on GPUs the stream waits and the host goes on."""
        if self.handle is None:
            distributed.barrier(self.group)
        else:
            self.handle.barrier()

    def _same(self, what: str, own: object) -> None:
        found: list[object] = [None] * self.world_size
        distributed.all_gather_object(found, own, group=self.group)
        if any(other != own for other in found):
            said = "; ".join(f"rank {rank}: {str(other)[:80]}" for rank, other in enumerate(found))
            raise InputError(f"symmetric memory: every rank needs the same {what}, found {said}")

    def _on_gpus(self) -> list[Tensor]:
        # Imported here: it is torch's own private module, and no CPU needs it.
        from torch.distributed import _symmetric_memory as symmetric

        with torch.cuda.device(self.device), torch.inference_mode(False):
            try:
                block, fault = symmetric.empty(self.nbytes, dtype=torch.uint8, device=self.device), ""
            except RuntimeError as error:
                block, fault = None, str(error).partition("\n")[0]
            # Before the ranks wait for each other in torch.
            self._same("memory from the driver", fault)
            if block is None:
                raise InputError(f"symmetric memory: every rank was refused {self.nbytes:,} bytes: {fault}")
            self.handle = symmetric.rendezvous(block, self.group)
        peers = range(self.world_size)
        return [block if p == self.rank else self.handle.get_buffer(p, (self.nbytes,), torch.uint8) for p in peers]

    def _on_cpu(self) -> list[Tensor]:
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        handle, name = tempfile.mkstemp(prefix="collegium-", dir=folder)
        try:
            os.truncate(handle, self.nbytes)
            names: list[Any] = [None] * self.world_size
            distributed.all_gather_object(names, name, group=self.group)
            with torch.inference_mode(False):
                blocks = [torch.from_file(n, shared=True, size=self.nbytes, dtype=torch.uint8) for n in names]
            distributed.barrier(self.group)  # mapped everywhere; the name is no longer needed
        finally:
            os.close(handle)
            Path(name).unlink()
        return blocks
