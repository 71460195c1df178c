"""Page-locked host memory that kernels of a GPU read at its address on the host."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError

__all__ = ["PinnedBlock"]

_PORTABLE_AND_MAPPED = 1 | 2  # flags of cudaHostRegister


class PinnedBlock:
    """``nbytes`` bytes of host memory, page-locked while this object lives; ordinary memory for a ``device`` cpu.

    data: uint8 ``[nbytes]``. PyTorch's pinned tensors are rounded up to a power of two bytes, which this is not.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """Allocate and lock; raises InputError where the system does not allow it."""
        with torch.inference_mode(False):
            # Whole pages: a page that another locked block shares could not be locked again.
            try:
                pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except (OSError, OverflowError) as error:
                raise _refused(nbytes, str(error)) from error
            with contextlib.suppress(OSError, AttributeError):
                pages.madvise(mmap.MADV_HUGEPAGE)
            self.data = torch.frombuffer(pages, dtype=torch.uint8)
        if device.type == "cuda":
            with torch.cuda.device(device):
                _lock(self.data)
            weakref.finalize(self, _unlock, self.data, device).atexit = False


def _lock(block: Tensor) -> None:
    runtime: Any = torch.cuda.cudart()
    result = runtime.cudaHostRegister(block.data_ptr(), block.numel(), _PORTABLE_AND_MAPPED)
    if int(result) != 0:
        with contextlib.suppress(RuntimeError, AssertionError):
            torch.zeros(1, device="cuda")  # reports, and so clears, the error that CUDA remembers
        raise _refused(block.numel(), f"cudaHostRegister returned {result}")


def _unlock(block: Tensor, device: torch.device) -> None:
    # Kernels that are under way may still read it.
    torch.cuda.synchronize(device)
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(block.data_ptr())


def _refused(nbytes: int, reason: str) -> InputError:
    return InputError(
        f"{nbytes:,} bytes of host memory for experts cannot be page-locked: {reason}. Allowed: what is free and below "
        "the limit of locked memory (ulimit -l). Keep all experts on the GPU with a larger Limits(gpu_bytes=...), "
        "split them over more ranks, or use a machine with more memory"
    )
