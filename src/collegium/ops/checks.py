"""How operations refuse what they cannot take: ``types.require`` for what a call is given."""

from torch import Tensor

from ..errors import InputError

__all__ = ["describe", "require_input"]


def describe(value: object) -> str:
    """Return shape and dtype of a tensor, and what is none as it is printed, for an error."""
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else str(value)


def require_input(ok: bool, name: str, value: object, allowed: str) -> None:
    """Raise InputError, which names what was asked, found and allowed, unless ``ok``."""
    if not ok:
        raise InputError(f"{name}: found {describe(value)}, allowed: {allowed}")
