"""Options of the plug-in: environment variables, because ``vllm serve`` passes no arguments to plug-ins."""

import os

from ...errors import InputError

__all__ = ["ACTIVATIONS", "MODE", "RELEASES", "mode", "option"]

MODE = "COLLEGIUM_VLLM"
ACTIVATIONS = "COLLEGIUM_VLLM_ACTIVATIONS"
RELEASES = ("0.32", "0.33")  # of vLLM, whose sources the plug-in was written for
_MODES = ("auto", "on", "require", "off")


def option(name: str) -> str:
    """Return an environment variable, empty if it is not set."""
    return os.environ.get(name, "").strip()


def mode() -> str:
    """Return COLLEGIUM_VLLM, by default ``auto``; raises InputError for an unknown mode."""
    value = option(MODE).lower() or "auto"
    if value not in _MODES:
        raise InputError(f"{MODE} is {value!r}, allowed: {', '.join(_MODES)}")
    return value
