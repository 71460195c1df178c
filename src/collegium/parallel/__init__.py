"""Which rank holds which experts, and how tokens get there; dispatchers in order of preference."""

from __future__ import annotations

from .all_gather import AllGatherKind
from .all_to_all import AllToAllKind
from .all_to_all_fixed import AllToAllFixedKind
from .base import Dispatcher, DispatcherKind, SymmetricDispatcher
from .compose import batch_tokens, wrapped_for
from .local import Local, LocalKind
from .partial import PartialKind
from .symm_mem import SymmMemKind

__all__ = [
    "DISPATCHERS",
    "AllGatherKind",
    "AllToAllFixedKind",
    "AllToAllKind",
    "Dispatcher",
    "DispatcherKind",
    "Local",
    "LocalKind",
    "PartialKind",
    "SymmMemKind",
    "SymmetricDispatcher",
    "batch_tokens",
    "wrapped_for",
]

DISPATCHERS: tuple[DispatcherKind, ...] = (
    LocalKind(),
    SymmMemKind(),
    AllToAllKind(),
    AllGatherKind(),
    # Sends room that is empty, so it is for graphs, which the collectives before it cannot be captured in.
    AllToAllFixedKind(),
    PartialKind(),
)
