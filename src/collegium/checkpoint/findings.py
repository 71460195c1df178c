"""Findings: weights that are allowed but unusual, such as copies, constants, empty halves and implausible sizes.

Findings are never errors: some models are initialised with experts copied from one dense layer.
"""

from collections import defaultdict
from hashlib import blake2b
from statistics import median
from typing import cast

import torch

from ..formats.nvfp4 import NvFp4
from ..formats.payload import Payload

__all__ = ["Findings"]

_MAX_FINDINGS = 20
_MIN_NUMEL = 64  # numbers a tensor must have before equality means anything
_MAX_SCALE_RATIO = 1024.0
# Published projections change the size of unit inputs by a factor of 0.1 to 30. Scales that divide where they should
# multiply change that factor by 10^4 and more.
_GAIN_RANGE = (1e-4, 1e3)
_SAMPLED_ROWS = 16  # rows of a matrix that are decoded, at its start and in its middle
# Share of 8-byte words that hold only zeros; quantisation leaves no such word empty by chance.
_MIN_EMPTY_SHARE = 0.45
# An 8-byte word of zeros, ignoring signs: mask and value of the words, and weights per stored element, by format.
_ZERO_WORDS = {
    **dict.fromkeys(("mxfp4", "nvfp4"), (0x7777777777777777, 0, 2)),
    **dict.fromkeys(("fp8_block", "fp8_tensor", "fp8_channel", "mxfp8"), (0x7F7F7F7F7F7F7F7F, 0, 1)),
    **dict.fromkeys(("bf16", "fp16"), (0x7FFF7FFF7FFF7FFF, 0, 1)),
    "fp32": (0x7FFFFFFF7FFFFFFF, 0, 1),
    "int4_group": (-1, -0x7777777777777778, 2),  # code 8 is zero
}
_COMPARABLE = (torch.float32, torch.bfloat16, torch.float16)  # what torch.aminmax takes, of scales and weights
_COMPARED_TENSORS = {"codes": "weights", "values": "weights", "scales": "scales"}


class Findings:
    """Collects findings over all layers of a checkpoint; stores 16 bytes per tensor."""

    def __init__(self) -> None:
        self._first_labels: dict[tuple[str, bytes], str] = {}
        self._sizes: dict[str, list[tuple[str, float]]] = defaultdict(list)
        self._gains: dict[str, list[tuple[str, float]]] = defaultdict(list)
        self._texts: list[str] = []

    def record(self, label: str, payload: Payload) -> None:
        """Check one matrix; label: ``layer 3, expert 17, down`` or ``layer 3, shared expert, down``."""
        layer, *others = label.split(", ")
        position = f"{layer}, {others[-1]}" if others[0].startswith("expert ") else label
        self._sizes[position].append((label, _largest_scale(payload)))
        self._gains[position].append((label, _gain(payload)))
        empty = _zero_share(payload)
        if _MIN_EMPTY_SHARE <= empty < 1:
            self._texts.append(
                f"{label}: {empty:.0%} of its weights are zero, whole runs of them; was it written whole?"
            )
        for name, tensor in payload.tensors().items():
            if name not in _COMPARED_TENSORS or tensor.numel() < _MIN_NUMEL:
                continue
            raw = tensor.contiguous().view(-1).view(torch.uint8).view(-1, tensor.element_size())
            if bool((raw == raw[0]).all()):
                if _COMPARED_TENSORS[name] == "weights":
                    self._texts.append(f"{label}: all its weights are the same")
                continue
            # numpy shares the tensor's memory; its stubs lack the buffer protocol on Python 3.11
            digest = blake2b(cast("bytes", raw.numpy()), digest_size=16).digest()
            first = self._first_labels.setdefault((name, digest), label)
            if first != label:
                self._texts.append(f"{label}: its {_COMPARED_TENSORS[name]} are, byte for byte, those of {first}")
                break

    def add(self, text: str) -> None:
        """Add a finding as text."""
        self._texts.append(text)

    def findings(self) -> list[str]:
        """Return the findings: at most 20, then a line with the number of the others."""
        texts = [text for position, gains in self._gains.items() for text in _implausible_gains(position, gains)]
        texts += self._texts
        for position, sizes in self._sizes.items():
            usual = median(size for _, size in sizes)
            for label, size in sizes:
                if usual and not usual / _MAX_SCALE_RATIO < size < usual * _MAX_SCALE_RATIO:
                    texts.append(f"{label}: its largest scale is {size:.3g}, {usual:.3g} is usual for {position}")
        more = len(texts) - _MAX_FINDINGS
        return texts[:_MAX_FINDINGS] + ([f"{more} more findings of these kinds"] if more > 0 else [])


def _implausible_gains(position: str, gains: list[tuple[str, float]]) -> list[str]:
    low, high = _GAIN_RANGE
    outside = [(label, gain) for label, gain in gains if gain and not low < gain < high]
    if not outside:
        return []
    label, gain = max(outside, key=lambda entry: max(entry[1], 1 / entry[1]))
    return [
        f"{position}: {len(outside)} of {len(gains)} matrices make inputs of unit size more than {high:g} times "
        f"as large or {1 / low:g} times as small, {label} for instance {gain:.3g} times as large; no published model "
        "does; are its scales inverted?"
    ]


def _gain(payload: Payload) -> float:
    """Return the size of the outputs for inputs of unit size: the median L2 norm of sampled rows."""
    rows = payload.shape[0]
    block_rows = payload.scale_block[0]
    step = -(-_SAMPLED_ROWS // block_rows) * block_rows  # rows are cut where their scales are
    starts = {0, rows // 2 // step * step}
    values = torch.cat([payload.rows(start, min(start + step, rows)).decode() for start in starts])
    # The median, so that one wrong scale does not decide.
    return float(values.double().square().sum(1).median().sqrt())


def _zero_share(payload: Payload) -> float:
    """Return the share of 8-byte words that hold only zero weights; 0 for formats with another packing."""
    if payload.name not in _ZERO_WORDS:
        return 0.0
    tensors = payload.tensors()
    mask, value, per_byte = _ZERO_WORDS[payload.name]
    stored = tensors["values"] if "values" in tensors else tensors["codes"]
    width = payload.shape[-1] // per_byte
    raw = stored[..., :width].contiguous().view(-1).view(torch.uint8)
    words = raw[: raw.numel() // 8 * 8].view(torch.int64)
    return float(((words & mask) == value).double().mean()) if words.numel() else 0.0


def _largest_scale(payload: Payload) -> float:
    """Return the largest scale, or the largest absolute weight of a format without scales."""
    tensors = payload.tensors()
    scales = tensors.get("scales", tensors.get("scale", tensors.get("values")))
    if scales is None:
        return 1.0
    low, high = (scales if scales.dtype in _COMPARABLE else scales.float()).aminmax()
    largest = max(-float(low), float(high))
    if payload.e8m0_scales:
        largest = 2.0 ** (largest - 127)
    if "global_scale" in tensors:
        global_scale = float(tensors["global_scale"]) or 1.0
        divides = isinstance(payload, NvFp4) and payload.global_divides
        return largest / global_scale if divides else largest * global_scale
    return largest
