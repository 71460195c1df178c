"""Checksums of packed experts, computed and compared on their device, without waiting for it.

With w the bytes of an expert as 32-bit words and c_j(i) odd 64-bit numbers that follow from the position alone::

    lane j = sum over i of w[i] * c_j(i)  modulo 2^64,    j = 0, 1

A single wrong word, hence any burst of up to 32 bits within a word, always changes both lanes: its difference is below
2^32 and c_j(i) is odd. Other errors (swapped blocks, another expert, a partly written slot) are missed with a
probability of at most 2^-64, 2^-32 for each lane, if they are independent of c_j: this detects faults, not attacks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..errors import InputError
from ..runtime.checksum import odd_numbers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

__all__ = ["agree_on_checksums", "checksum"]

_CHUNK = 1 << 20  # words at a time, so that temporary memory stays below 64 MiB
_SEEDS = (0x1F83D9ABFB41BD6B, 0x5BE0CD19137E2179)
_UINT64_MASK = (1 << 64) - 1


def checksum(expert: Iterable[Tensor]) -> Tensor:
    """Return int64 ``[2]`` of the bytes of a packed expert (``PackedWeights.take``), on its device."""
    offset = 0
    total = None
    for part in expert:
        words = _words(part)
        for start in range(0, words.numel(), _CHUNK):
            chunk = words[start : start + _CHUNK].to(torch.int64)
            index = torch.arange(offset + start + 1, offset + start + 1 + chunk.numel(), device=chunk.device)
            lanes = torch.stack([(chunk * odd_numbers(index, seed)).sum() for seed in _SEEDS])
            total = lanes if total is None else total + lanes
        offset += words.numel()
    if total is None:
        raise InputError("checksum: an expert without bytes; every packed expert has some")
    return total


def agree_on_checksums(
    rank_checksums: Sequence[dict[int, tuple[int, int]]], experts: int, layer: object
) -> list[tuple[int, int]]:
    """Return the checksum of every expert of a layer.

    rank_checksums: of each rank, the checksums of the experts it packed. Raises InputError where two ranks packed an
    expert into different bytes, or none did.
    """
    common: list[tuple[int, int]] = []
    for expert in range(experts):
        by_rank = {rank: table[expert] for rank, table in enumerate(rank_checksums) if expert in table}
        if len(set(by_rank.values())) != 1:
            listing = ", ".join(f"rank {rank}: {_hexadecimal(value)}" for rank, value in by_rank.items()) or "none"
            raise InputError(
                f"layer {layer}, expert {expert}: every rank that holds it needs the same packed bytes, found "
                f"checksums {listing}; load all ranks from one checkpoint, with one version of this package"
            )
        common.append(next(iter(by_rank.values())))
    return common


def _hexadecimal(lanes: tuple[int, int]) -> str:
    return "".join(f"{lane & _UINT64_MASK:016x}" for lane in lanes)


def _words(part: Tensor) -> Tensor:
    """Return the bytes of ``part`` as 32-bit words, padded with zeros."""
    raw = part.contiguous().reshape(-1).view(torch.uint8)
    if raw.numel() % 4 or raw.storage_offset() % 4:
        padded = raw.new_zeros(-(-raw.numel() // 4) * 4)
        padded[: raw.numel()] = raw
        raw = padded
    return raw.view(torch.int32)
