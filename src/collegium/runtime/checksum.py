"""A checksum of tensors, computed on their device without waiting for it.

With w the bytes of a tensor as 64-bit words and c(i) odd numbers that follow from the position alone::

    checksum = sum over i of w[i] * c(i)  modulo 2^64

A change within one word always changes it: the difference of the words is not 0 and c(i) is odd. Other errors (swapped
blocks, another tensor) are missed with a probability of about 2^-64, if they are independent of c(i): this detects
faults, not attacks.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

__all__ = [
    "combined_checksum",
    "odd_numbers",
    "row_checksums",
    "tensor_checksum",
    "tensor_checksums",
    "weights_checksum",
]

_CHUNK = 1 << 22  # words at a time, so that temporary memory stays below 100 MB
_ROW_CHUNK = 1 << 16  # words of each row at a time
_SEED = 0x510E527FADE682D1
_UINT64 = 1 << 64
# Constants of SplitMix64 as int64.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
_factors: dict[torch.device, Tensor] = {}

# Parameter, shard and expert of a tensor, as ``LayerBuilder.load`` takes them.
Key = tuple[str, str | None, int | None]


def odd_numbers(index: Tensor, seed: int) -> Tensor:
    """Return an odd pseudorandom number for every position, by SplitMix64."""
    mixed = index * _STEP + seed
    mixed = (mixed ^ _shift_right(mixed, 30)) * _FIRST
    mixed = (mixed ^ _shift_right(mixed, 27)) * _SECOND
    return (mixed ^ _shift_right(mixed, 31)) | 1


def tensor_checksum(tensor: Tensor) -> Tensor:
    """Return the checksum of the bytes of ``tensor``, int64 ``[]`` on its device."""
    words = _words(tensor)
    factors = _factors_on(words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for number, start in enumerate(range(0, words.numel(), _CHUNK)):
        chunk = words[start : start + _CHUNK]
        # Every chunk has another odd factor, so that chunks cannot be exchanged.
        total += (chunk * factors[: chunk.numel()]).sum() * _odd(number)
    return total


def tensor_checksums(rows: Tensor, indices: Sequence[int]) -> Tensor:
    """Return ``tensor_checksum`` of the rows ``indices [I]`` of ``rows [N, ...]``, int64 ``[I]``, in few launches."""
    raw = rows.contiguous().flatten(1) if rows.dim() > 1 else rows.contiguous().unsqueeze(1)
    raw = raw.view(torch.uint8)  # because not every device can gather 8-bit floats
    words_per_row = -(-raw.shape[1] // 8)
    if words_per_row > _CHUNK:
        return torch.stack([tensor_checksum(raw[index]) for index in indices])
    factors = _factors_on(raw.device)[:words_per_row]
    step = max(1, _CHUNK // max(1, words_per_row))
    chosen = torch.tensor(indices, device=raw.device)
    sums = [
        (_row_words(raw[chosen[start : start + step]]) * factors).sum(dim=1) for start in range(0, len(indices), step)
    ]
    return torch.cat(sums) * _odd(0)


def row_checksums(rows: Tensor) -> Tensor:
    """Return the checksum of each row of ``rows [N, ...]``, int64 ``[N]`` on their device.

    Equal rows have equal checksums, whatever N is. Nothing is kept on the device.
    """
    words = _row_words(rows)
    factors = odd_numbers(torch.arange(1, 1 + min(_ROW_CHUNK, words.shape[1]), device=rows.device), _SEED)
    total = torch.zeros(words.shape[0], dtype=torch.int64, device=rows.device)
    for number, start in enumerate(range(0, words.shape[1], _ROW_CHUNK)):
        chunk = words[:, start : start + _ROW_CHUNK]
        total += (chunk * factors[: chunk.shape[1]]).sum(dim=1) * _odd(number)
    return total


def combined_checksum(checksums: Mapping[Key, int]) -> int:
    """Return one number below 2^64 for the checksums of several tensors, in any order."""
    total = 0
    for key, value in checksums.items():
        digest = hashlib.blake2b(repr(tuple(key)).encode(), digest_size=8).digest()
        total += (value % _UINT64) * (int.from_bytes(digest, "little") | 1)
    return total % _UINT64


def weights_checksum(tensors: Iterable[tuple[str, Tensor, str | None, int | None]]) -> int:
    """Return the checksum of tensors as a sender computes it, to compare with ``WeightUpdater.finish().checksum``.

    tensors: (parameter, tensor, shard, expert) as they are loaded, in any order, on any device.
    """
    values = {(name, shard, expert): tensor_checksum(tensor.detach()) for name, tensor, shard, expert in tensors}
    return combined_checksum({key: int(value) for key, value in values.items()})


def _words(tensor: Tensor) -> Tensor:
    """Return the bytes of ``tensor`` as 64-bit words, padded with zeros."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    if raw.numel() % 8 or raw.storage_offset() % 8 or raw.data_ptr() % 8:
        padded = raw.new_zeros(-(-raw.numel() // 8) * 8)
        padded[: raw.numel()] = raw
        raw = padded
    return raw.view(torch.int64)


def _row_words(rows: Tensor) -> Tensor:
    """Return the bytes of each row of ``rows [N, ...]`` as 64-bit words ``[N, W]``, padded with zeros."""
    count = rows.shape[0]
    if not rows.numel():
        return torch.zeros(count, 0, dtype=torch.int64, device=rows.device)
    raw = rows.contiguous().view(-1).view(torch.uint8).view(count, rows.element_size() * rows[:1].numel())
    if raw.shape[1] % 8 or raw.data_ptr() % 8 or raw.storage_offset() % 8:
        padded = raw.new_zeros(count, -(-raw.shape[1] // 8) * 8)
        padded[:, : raw.shape[1]] = raw
        raw = padded
    return raw.view(torch.int64)


def _factors_on(device: torch.device) -> Tensor:
    """Return the odd numbers of one chunk on ``device``, which are computed once."""
    if device not in _factors:
        with torch.inference_mode(False):
            index = torch.arange(1, _CHUNK + 1, device=device)
            _factors[device] = odd_numbers(index, _SEED)
    return _factors[device]


def _odd(number: int) -> int:
    """Return an odd number for chunk ``number``, as int64."""
    value = (number * 0x9E3779B97F4A7C15 + 1) % _UINT64 | 1
    return value - _UINT64 if value >= 1 << 63 else value


def _shift_right(words: Tensor, bits: int) -> Tensor:
    """Return a logical shift to the right; torch's shift is arithmetic."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)
