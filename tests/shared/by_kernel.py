"""Operations that take their kernels wherever their tensors are: on a CPU, Triton's interpreter runs those."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar
from unittest.mock import patch

__all__ = ["by_kernel"]

Run = TypeVar("Run", bound=Callable[..., object])


def by_kernel(run: Run) -> Run:
    """Return ``run``, an operation that asks ``on_device``, as it is on a device."""

    def forced(*args: object, **kwargs: object) -> object:
        with patch(f"{run.__module__}.on_device", lambda *_: True):
            return run(*args, **kwargs)

    return forced  # pyright: ignore[reportReturnType]
