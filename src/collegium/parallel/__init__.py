"""Which rank holds which experts, and how tokens get there; dispatchers in order of preference."""

from __future__ import annotations

from .all_gather import AllGatherKind
from .base import Dispatcher, DispatcherKind
from .local import Local, LocalKind
from .partial import PartialKind

__all__ = ["DISPATCHERS", "AllGatherKind", "Dispatcher", "DispatcherKind", "Local", "LocalKind", "PartialKind"]

DISPATCHERS: tuple[DispatcherKind, ...] = (LocalKind(), AllGatherKind(), PartialKind())
