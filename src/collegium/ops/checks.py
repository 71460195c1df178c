"""How operations refuse a tensor they cannot take: ``types.require`` for tensors."""

from torch import Tensor

from ..errors import InputError

__all__ = ["described", "require_tensor"]


def described(tensor: Tensor | None) -> str:
    """Return shape and dtype of ``tensor``, for an error."""
    return "None" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"


def require_tensor(ok: bool, name: str, tensor: Tensor | None, allowed: str) -> None:
    """Raise InputError, which names what was asked, found and allowed, unless ``ok``."""
    if not ok:
        raise InputError(f"{name}: found {described(tensor)}, allowed: {allowed}")
