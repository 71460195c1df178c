"""Progress callback for long operations."""

from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

__all__ = ["Progress", "counted"]

T = TypeVar("T")
Progress = Callable[[int, int, str], None]


def counted(items: Collection[T], progress: Progress | None, text: Callable[[T], str], *, end: str = "") -> Iterator[T]:
    """Yield ``items``, and call ``progress`` before each with (items done, number of items, text of this item).

    end: text of a last call when all are done; no such call without it.
    """
    for done, item in enumerate(items):
        if progress is not None:
            progress(done, len(items), text(item))
        yield item
    if progress is not None and end:
        progress(len(items), len(items), end)
