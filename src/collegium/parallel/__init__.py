"""Which rank holds which experts, and how tokens get there; dispatchers in order of preference."""

from __future__ import annotations

from .all_gather import AllGatherKind
from .base import Dispatcher, DispatcherKind
from .composed import batch_tokens, composed
from .local import Local, LocalKind
from .partial import PartialKind

__all__ = [
    "DISPATCHERS",
    "AllGatherKind",
    "Dispatcher",
    "DispatcherKind",
    "Local",
    "LocalKind",
    "PartialKind",
    "batch_tokens",
    "composed",
]

DISPATCHERS: tuple[DispatcherKind, ...] = (LocalKind(), AllGatherKind(), PartialKind())
