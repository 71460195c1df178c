"""Which rank holds which experts, and how tokens get there; dispatchers in order of preference."""

from __future__ import annotations

from .all_gather import AllGatherKind
from .base import Dispatcher, DispatcherKind, Reaching
from .local import Local, LocalKind
from .partial import PartialKind
from .symm_mem import SymmMemKind

__all__ = [
    "DISPATCHERS",
    "AllGatherKind",
    "Dispatcher",
    "DispatcherKind",
    "Local",
    "LocalKind",
    "PartialKind",
    "Reaching",
    "SymmMemKind",
]

DISPATCHERS: tuple[DispatcherKind, ...] = (LocalKind(), SymmMemKind(), AllGatherKind(), PartialKind())
