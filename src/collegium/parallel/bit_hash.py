"""64-bit hashes of tensors' bits, computed on the tensors' device.

Equal bits give equal hashes; tensors that differ collide with a probability of 2 ** -64. Every bit counts: two NaNs
with different payloads differ, and so do 0.0 and -0.0. Each word is mixed together with its position, so the hash
depends on the order of rows and columns; the mixed words are added modulo 2 ** 64, in any order. The mixing function is
the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["bit_hash", "one_value"]

_BLOCK_WORDS = 1 << 20  # hashed at once: a few buffers of 8 MiB, however large the tensor is
_WORD_BYTES = 8


def _signed(value: int) -> int:
    """Return the int64 with the bits of the 64-bit ``value``."""
    return value - (1 << 64) if value >> 63 else value


_STEP = _signed(0x9E3779B97F4A7C15)
_FACTORS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))


def bit_hash(tensor: Tensor) -> Tensor:
    """Return the hash of ``tensor`` (any dtype and shape) as a scalar int64 on its device; waits for no device.

    Neither shape nor dtype is part of the hash: compare them too.
    """
    words = _words(tensor)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _BLOCK_WORDS):
        block = words[start : start + _BLOCK_WORDS]
        position = torch.arange(start + 1, start + 1 + block.numel(), device=tensor.device)
        # Positions are mixed separately first: otherwise changes of two neighbouring words could cancel out.
        total = total + _mix(block ^ _mix(position.mul_(_STEP))).sum()
    return total


def one_value(tensor: Tensor) -> Tensor:
    """Return a scalar bool on the device of ``tensor``: whether all elements, if any, have the same bits."""
    if tensor.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).view(tensor.numel(), -1)
    return (raw == raw[:1]).all()


def _words(tensor: Tensor) -> Tensor:
    """Return the bytes of ``tensor`` as int64 words, filled up with zeros."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    missing = -raw.numel() % _WORD_BYTES
    if missing:
        raw = functional.pad(raw, (0, missing))
    elif raw.storage_offset() % _WORD_BYTES:
        raw = raw.clone()
    return raw.view(torch.int64)


def _mix(words: Tensor) -> Tensor:
    """Return ``words`` through the finalizer of SplitMix64; int64 products wrap around."""
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        words = (words ^ _shift_right(words, shift)) * factor
    return words ^ _shift_right(words, 31)


def _shift_right(words: Tensor, count: int) -> Tensor:
    """Return a logical shift to the right; torch's shift is arithmetic."""
    return (words >> count) & ((1 << (64 - count)) - 1)
