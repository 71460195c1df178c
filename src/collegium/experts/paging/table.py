"""The table of policies; the first one is the default."""

from .lfu import LFU
from .lru import LRU
from .policy import Policy
from .static import STATIC

__all__ = ["POLICIES"]

POLICIES: tuple[Policy, ...] = (LRU, LFU, STATIC)
