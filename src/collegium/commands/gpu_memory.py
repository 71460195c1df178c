"""``--gpu-memory``: a size of GPU memory for the experts of all layers."""

import re
from collections.abc import Mapping

from ..errors import InputError
from ..models import moe_layers

__all__ = ["layer_gpu_bytes"]

_UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def layer_gpu_bytes(text: str | None, config: Mapping[str, object]) -> int | None:
    """Return the bytes for each layer of the model of ``config`` from the ``--gpu-memory`` of all; None without it.

    Raises InputError for a text that is no size.
    """
    if text is None:
        return None
    number, unit = _size_of(text)
    return max(1, int(number * unit) // max(1, len(moe_layers(config))))


def _size_of(text: str) -> tuple[float, int]:
    """Return number and unit of a size."""
    size = re.fullmatch(r"\s*(\d+\.?\d*)\s*([A-Za-z]+)\s*", text, re.ASCII)
    if size is None or size[2] not in _UNITS:
        raise InputError(f"--gpu-memory {text!r}: a number and a unit are needed, {', '.join(_UNITS)}, such as 24GiB")
    return float(size[1]), _UNITS[size[2]]
