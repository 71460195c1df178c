"""A memory block for each rank of one host, which the other ranks can read and write.

On GPUs the blocks are torch's symmetric memory (peer access over NVLink or PCIe); on a CPU, for gloo groups, a block is
a file in memory that every rank maps. All ranks of the group allocate their blocks together.
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

__all__ = ["SymmetricWorkspace"]


class SymmetricWorkspace:
    """A block of ``nbytes`` bytes on every rank of ``group``, on ``device``; all ranks create it together.

    blocks: of every rank, as bytes. handle: torch's handle, None on a CPU; the peers' blocks are mapped as long as it
    lives. Raises InputError on every rank where the ranks request different sizes, or are on several hosts.
    """

    def __init__(self, group: distributed.ProcessGroup, device: torch.device, nbytes: int) -> None:
        self.group = group
        self.device = device
        self.nbytes = nbytes
        self.rank = distributed.get_rank(group)
        self.world_size = distributed.get_world_size(group)
        self._agree("bytes", nbytes)
        self._agree("host", socket.gethostname())
        self.handle: Any = None
        self.blocks = self._allocate_on_gpus() if device.type == "cuda" else self._allocate_on_cpu()

    def _agree(self, what: str, value: object) -> None:
        """Raise InputError on every rank unless all ranks have the same ``value``."""
        values: list[object] = [None] * self.world_size
        distributed.all_gather_object(values, value, group=self.group)
        if any(other != value for other in values):
            listing = "; ".join(f"rank {rank}: {str(other)[:80]}" for rank, other in enumerate(values))
            raise InputError(f"symmetric memory: every rank needs the same {what}, found {listing}")

    def _allocate_on_gpus(self) -> list[Tensor]:
        # Imported here: it is a private module of torch, and no CPU needs it.
        from torch.distributed import _symmetric_memory as symmetric

        with torch.cuda.device(self.device), torch.inference_mode(False):
            block = None
            fault = ""
            try:
                block = symmetric.empty(self.nbytes, dtype=torch.uint8, device=self.device)
            except RuntimeError as error:
                fault = str(error).partition("\n")[0]
            # Before the ranks wait for each other in torch.
            self._agree("memory from the driver", fault)
            if block is None:
                raise InputError(f"symmetric memory: every rank was refused {self.nbytes:,} bytes: {fault}")
            self.handle = symmetric.rendezvous(block, self.group)
        return [
            block if rank == self.rank else self.handle.get_buffer(rank, (self.nbytes,), torch.uint8)
            for rank in range(self.world_size)
        ]

    def _allocate_on_cpu(self) -> list[Tensor]:
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
