"""The order of calls of functions and methods."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

__all__ = ["watch"]


def watch(events: list[str], owner: Any, name: str, event: str) -> Any:
    """Return a context in which every call of ``owner.name`` adds ``event`` to ``events`` and runs as usual."""
    original = getattr(owner, name)

    def recorded(*arguments: Any, **options: Any) -> Any:
        events.append(event)
        return original(*arguments, **options)

    return patch.object(owner, name, recorded)
