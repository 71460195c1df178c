"""Optional packages, imported where they are asked for."""

import importlib
from typing import Any

from ..errors import MissingExtraError

__all__ = ["extra"]


def extra(module: str, package: str | None = None, *, group: str = "transformers") -> Any:
    """Return a module of the optional packages in ``group``; raises MissingExtraError where it is not installed.

    package: what the error says is missing, where that is not the module itself.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{package or module} is not installed; install it with: pip install 'collegium[{group}]'"
        ) from error
