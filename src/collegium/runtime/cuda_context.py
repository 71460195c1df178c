"""Start the GPU while Python is still importing packages."""

from contextlib import suppress
from threading import Thread

import torch

__all__ = ["start_context"]


def start_context(device: str | None) -> Thread | None:
    """Create the CUDA context and the cuBLAS handle in a thread; return the thread, or None without a GPU.

    The driver does both outside the interpreter lock, while the caller imports transformers. device: as in ``probe``.
    """
    if not torch.cuda.is_available() or not (device or "cuda").startswith("cuda"):
        return None
    # Not a daemon: a process must not end inside the driver.
    thread = Thread(target=_create, args=(device or "cuda",), name="collegium-cuda-context")
    thread.start()
    return thread


def _create(device: str) -> None:
    with suppress(Exception):  # the first use of the device meets the same error, and reports it
        square = torch.zeros(16, 16, dtype=torch.bfloat16, device=device)
        torch.mm(square, square)
        torch.cuda.synchronize(square.device)
