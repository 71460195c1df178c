"""What is allowed but strange in the weights: copies, constants, and sizes far from those of the other experts.

Nothing here is refused: experts copied from one dense layer are how some models begin their training.
"""

from __future__ import annotations

from collections import defaultdict
from hashlib import blake2b
from statistics import median
from typing import TYPE_CHECKING, cast

import torch

if TYPE_CHECKING:
    from ..formats.payload import Payload

__all__ = ["Remarks"]

_MOST = 20
_FEWEST = 64  # numbers a tensor must have before equality means anything
_FAR = 1024.0
_COMPARED = {"codes": "weights", "values": "weights", "scales": "scales"}


class Remarks:
    """Collects remarks over all layers of a checkpoint, keeping 16 bytes for each tensor seen."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, bytes], str] = {}
        self._sizes: dict[str, list[tuple[str, float]]] = defaultdict(list)
        self._texts: list[str] = []

    def see(self, label: str, payload: Payload) -> None:
        """Take in one projection of one expert, as read; label: ``layer 3, expert 17, down``."""
        layer, _, projection = label.split(", ")
        self._sizes[f"{layer}, {projection}"].append((label, _largest(payload)))
        for name, tensor in payload.tensors().items():
            if name not in _COMPARED or tensor.numel() < _FEWEST:
                continue
            raw = tensor.contiguous().view(-1).view(torch.uint8).view(-1, tensor.element_size())
            if bool((raw == raw[0]).all()):
                if _COMPARED[name] == "weights":
                    self._texts.append(f"{label}: all its weights are the same")
                continue
            # numpy shares the tensor's memory; its stubs lack the buffer protocol on Python 3.11
            digest = blake2b(cast("bytes", raw.numpy()), digest_size=16).digest()
            first = self._seen.setdefault((name, digest), label)
            if first != label:
                self._texts.append(f"{label}: its {_COMPARED[name]} are, byte for byte, those of {first}")
                break

    def findings(self) -> list[str]:
        """Return the remarks, at most 20 and how many more there are."""
        texts = list(self._texts)
        for place, sizes in self._sizes.items():
            middle = median(size for _, size in sizes)
            for label, size in sizes:
                if middle and not middle / _FAR < size < middle * _FAR:
                    usual = f"{middle:.3g} is usual for {place}"
                    texts.append(f"{label}: its largest scale is {size:.3g}, {usual}")
        rest = len(texts) - _MOST
        return texts[:_MOST] + ([f"{rest} more remarks of these kinds"] if rest > 0 else [])


def _largest(payload: Payload) -> float:
    """Return the largest absolute weight, or the largest scale, which says as much and costs less."""
    tensors = payload.tensors()
    own = tensors.get("scales", tensors.get("scale", tensors.get("values")))
    if own is None:
        return 1.0
    largest = float(own.float().abs().max())
    if payload.name in ("mxfp4", "mxfp8"):
        largest = 2.0 ** (largest - 127)
    if "global_scale" in tensors:
        whole = float(tensors["global_scale"]) or 1.0
        largest = largest / whole if getattr(payload, "global_divides", False) else largest * whole
    return largest
