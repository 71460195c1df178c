"""Errors by their class and the values that their message has to have, whatever its sentence."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["raises_with"]

E = TypeVar("E", bound=BaseException)


@contextmanager
def raises_with(kind: type[E] | tuple[type[E], ...], *values: object) -> Iterator[pytest.ExceptionInfo[E]]:
    """Expect an error of a class whose message has the text of each of ``values``: names, sizes, what is allowed."""
    with pytest.raises(kind) as caught:
        yield caught
    assert_values(str(caught.value), *values)


def assert_values(text: str, *values: object) -> None:
    """Expect ``text`` to contain the text of each of ``values``: names, sizes, what is allowed; not its wording."""
    assert [str(value) for value in values if str(value) not in text] == [], text
