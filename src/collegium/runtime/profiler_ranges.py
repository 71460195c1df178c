"""Named ranges of work that Nsight Systems shows."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["named", "show", "shown", "step"]

_NOTHING: AbstractContextManager[None] = nullcontext()
_steps: dict[str, bool] = {"shown": False}


def named(name: str, device: torch.device) -> AbstractContextManager[Any]:
    """Show what runs inside as the NVTX range ``collegium: name``; does nothing on a CPU."""
    return torch.cuda.nvtx.range(f"collegium: {name}") if device.type == "cuda" else _NOTHING


def show(on: bool = True) -> None:
    """Show the steps of passes from now on, or stop showing them.

    Passes are then run by Python, step by step, instead of replayed from a list of launches; graphs do not change.
    """
    _steps["shown"] = on


def shown() -> bool:
    """Return whether steps of passes are shown."""
    return _steps["shown"]


def step(name: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return ``named`` while steps are shown, and otherwise a context that costs a tenth of a microsecond."""
    return named(name, device) if _steps["shown"] else _NOTHING
