"""How far a long piece of work is, told to a caller who wants to know."""

from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

__all__ = ["Progress", "counted"]

T = TypeVar("T")
Progress = Callable[[int, int, str], None]


def counted(items: Collection[T], progress: Progress | None, text: Callable[[T], str], *, end: str = "") -> Iterator[T]:
    """Yield ``items``, and call ``progress`` before each with (items done, items, text of this one).

    end: text of a last call when all are done; none without it.
    """
    for done, item in enumerate(items):
        if progress is not None:
            progress(done, len(items), text(item))
        yield item
    if progress is not None and end:
        progress(len(items), len(items), end)
