"""Optional packages, imported where they are asked for."""

from __future__ import annotations

import importlib
from typing import Any

from ..errors import MissingExtraError

__all__ = ["extra"]


def extra(module: str) -> Any:
    """Return a module of the transformers extra; raises MissingExtraError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{module} is not installed; install it with: pip install 'collegium[transformers]'"
        ) from error
