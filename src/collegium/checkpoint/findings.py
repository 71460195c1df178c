"""What is allowed but strange in the weights: copies, constants, empty halves, sizes that no layer could train with.

Nothing here is refused: experts copied from one dense layer are how some models begin their training.
"""

from collections import defaultdict
from hashlib import blake2b
from statistics import median
from typing import cast

import torch

from ..formats.payload import Payload

__all__ = ["Findings"]

_MOST = 20
_FEWEST = 64  # numbers a tensor must have before equality means anything
_FAR = 1024.0
# Inputs of unit size leave a published projection 0.1 to 30 times as large. Scales that divide where they should
# multiply move that by 10^4 and more.
_GAINS = (1e-4, 1e3)
_SAMPLED = 16  # rows of a matrix that are decoded, at its beginning and in its middle
_HALF = 0.45  # of the weights; in units of 8 bytes, of which quantising leaves none empty by chance
# What the 8 bytes of nothing but zeros are, signs aside: (mask, value) of the codes by format.
_EMPTY = {
    **dict.fromkeys(("mxfp4", "nvfp4"), (0x7777777777777777, 0)),
    **dict.fromkeys(("fp8_block", "fp8_tensor", "fp8_channel", "mxfp8"), (0x7F7F7F7F7F7F7F7F, 0)),
    **dict.fromkeys(("bf16", "fp16"), (0x7FFF7FFF7FFF7FFF, 0)),
    "fp32": (0x7FFFFFFF7FFFFFFF, 0),
    "int4_group": (-1, -0x7777777777777778),  # code 8 is zero
}
_COMPARED = {"codes": "weights", "values": "weights", "scales": "scales"}


class Findings:
    """Collects remarks over all layers of a checkpoint, keeping 16 bytes for each tensor seen."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, bytes], str] = {}
        self._sizes: dict[str, list[tuple[str, float]]] = defaultdict(list)
        self._gains: dict[str, list[tuple[str, float]]] = defaultdict(list)
        self._texts: list[str] = []

    def record(self, label: str, payload: Payload) -> None:
        """Take in one matrix, as read; label: ``layer 3, expert 17, down`` or ``layer 3, shared expert, down``."""
        layer, *others = label.split(", ")
        place = f"{layer}, {others[-1]}" if others[0].startswith("expert ") else label
        self._sizes[place].append((label, _largest(payload)))
        self._gains[place].append((label, _gain(payload)))
        empty = _empty(payload)
        if _HALF <= empty < 1:
            self._texts.append(
                f"{label}: {empty:.0%} of its weights are zero, whole runs of them; was it written whole?"
            )
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

    def add(self, text: str) -> None:
        """Take in a remark that another has made."""
        self._texts.append(text)

    def findings(self) -> list[str]:
        """Return the remarks, at most 20 and how many more there are."""
        texts = [text for place, gains in self._gains.items() for text in _implausible(place, gains)]
        texts += self._texts
        for place, sizes in self._sizes.items():
            middle = median(size for _, size in sizes)
            for label, size in sizes:
                if middle and not middle / _FAR < size < middle * _FAR:
                    texts.append(f"{label}: its largest scale is {size:.3g}, {middle:.3g} is usual for {place}")
        rest = len(texts) - _MOST
        return texts[:_MOST] + ([f"{rest} more remarks of these kinds"] if rest > 0 else [])


def _implausible(place: str, gains: list[tuple[str, float]]) -> list[str]:
    low, high = _GAINS
    far = [(label, gain) for label, gain in gains if gain and not low < gain < high]
    if not far:
        return []
    label, gain = max(far, key=lambda entry: max(entry[1], 1 / entry[1]))
    return [
        f"{place}: {len(far)} of {len(gains)} matrices make inputs of unit size more than {high:g} times as large or "
        f"{1 / low:g} times as small, {label} for instance {gain:.3g} times as large; no published model does; are its "
        "scales upside down?"
    ]


def _gain(payload: Payload) -> float:
    """Return how large the outputs are for inputs of unit size: the length of a row of the matrix, of sampled ones."""
    rows = payload.shape[0]
    block: tuple[int, int] = getattr(payload, "block", (payload.row_block, 1))
    step = -(-_SAMPLED // block[0]) * block[0]  # rows are cut where their scales are
    starts = {0, rows // 2 // step * step}
    values = torch.cat([payload.rows(start, min(start + step, rows)).decode() for start in starts])
    # the middle one of the rows: one scale that is far off is not the matrix
    return float(values.double().square().sum(1).median().sqrt())


def _empty(payload: Payload) -> float:
    """Return the share of the weights that are zero in whole units of 8 bytes; 0 for formats that pack otherwise."""
    if payload.name not in _EMPTY:
        return 0.0
    tensors, (mask, value) = payload.tensors(), _EMPTY[payload.name]
    stored = tensors["values"] if "values" in tensors else tensors["codes"]
    width = payload.shape[-1] // (2 if payload.name in ("mxfp4", "nvfp4", "int4_group") else 1)
    raw = stored[..., :width].contiguous().view(-1).view(torch.uint8)
    units = raw[: raw.numel() // 8 * 8].view(torch.int64)
    return float(((units & mask) == value).double().mean()) if units.numel() else 0.0


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
