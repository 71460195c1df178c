"""Names for stretches of work that Nsight Systems shows."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["named"]


@contextmanager
def named(name: str, device: torch.device) -> Generator[None]:
    """Show what runs inside as the NVTX range ``collegium: name``; does nothing on a CPU."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.nvtx.range(f"collegium: {name}"):
        yield
