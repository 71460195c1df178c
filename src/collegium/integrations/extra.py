"""Import of optional packages."""

import importlib
from typing import Any

from ..errors import MissingExtraError

__all__ = ["import_extra"]


def import_extra(module: str, package: str | None = None, *, group: str = "transformers") -> Any:
    """Import a module of the optional dependencies in ``group``; raises MissingExtraError if it is not installed.

    package: the name in the error message, if it differs from the module.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{package or module} is not installed; install it with: pip install 'collegium[{group}]'"
        ) from error
