"""How operations refuse what they cannot take: ``types.require`` for what a call is given."""

from torch import Tensor

from ..errors import InputError

__all__ = ["described", "require_input"]


def described(found: object) -> str:
    """Return shape and dtype of a tensor, and what is none as it is printed, for an error."""
    return f"{tuple(found.shape)} {found.dtype}" if isinstance(found, Tensor) else str(found)


def require_input(ok: bool, name: str, found: object, allowed: str) -> None:
    """Raise InputError, which names what was asked, found and allowed, unless ``ok``."""
    if not ok:
        raise InputError(f"{name}: found {described(found)}, allowed: {allowed}")
