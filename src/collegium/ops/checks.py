"""Checks of the arguments of operations, which raise InputError."""

from torch import Tensor

from ..errors import InputError

__all__ = ["describe", "require_input"]


def describe(value: object) -> str:
    """Return shape and dtype of a tensor, or the text of any other value, for an error."""
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else str(value)


def require_input(ok: bool, name: str, value: object, allowed: str) -> None:
    """Raise InputError with the name, the value and what is allowed, unless ``ok``."""
    if not ok:
        raise InputError(f"{name}: found {describe(value)}, allowed: {allowed}")
