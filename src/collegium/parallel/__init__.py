"""Dispatchers: they bring tokens to the ranks that hold the experts, and the experts' rows back."""

from .all_gather import AllGatherKind
from .all_to_all import AllToAllKind
from .all_to_all_fixed import AllToAllFixedKind
from .base import EXCHANGES, Dispatcher, DispatcherKind, SymmetricDispatcher
from .local import Local, LocalKind
from .partial import Partial, PartialKind
from .symm_mem import SymmMemKind
from .table import DISPATCHERS, wrapped_for

__all__ = [
    "DISPATCHERS",
    "EXCHANGES",
    "AllGatherKind",
    "AllToAllFixedKind",
    "AllToAllKind",
    "Dispatcher",
    "DispatcherKind",
    "Local",
    "LocalKind",
    "Partial",
    "PartialKind",
    "SymmMemKind",
    "SymmetricDispatcher",
    "wrapped_for",
]
