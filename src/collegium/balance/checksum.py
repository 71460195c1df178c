"""Checksums of packed experts, computed where they are and compared there: nothing waits for the device.

With w the bytes of an expert as 32-bit words and c_j(i) odd 64-bit numbers that follow from the position alone::

    lane j = sum over i of w[i] * c_j(i)  modulo 2^64,    j = 0, 1

One word that differs, so any burst of up to 32 bits within a word, always changes both lanes: its difference is below
2^32 and c_j(i) is odd. Any other error (swapped blocks, another expert, a slot half written) is missed with a chance
of 2^-64 at most, each lane with 2^-32, as long as it does not know c_j: this finds faults, not forgers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

__all__ = ["agreed", "checksum"]

_CHUNK = 1 << 20  # words at a time, so that temporary memory stays below 64 MiB
_SEEDS = (0x1F83D9ABFB41BD6B, 0x5BE0CD19137E2179)
_STEP, _FIRST, _SECOND = (n - (1 << 64) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def checksum(expert: Iterable[Tensor]) -> Tensor:
    """Return int64 ``[2]`` of the bytes of a packed expert (``Packed.take``), on its device."""
    at, total = 0, None
    for part in expert:
        words = _words(part)
        for start in range(0, words.numel(), _CHUNK):
            own = words[start : start + _CHUNK].to(torch.int64)
            index = torch.arange(at + start + 1, at + start + 1 + own.numel(), device=own.device)
            lanes = torch.stack([(own * _odd(index, seed)).sum() for seed in _SEEDS])
            total = lanes if total is None else total + lanes
        at += words.numel()
    if total is None:
        raise InputError("checksum: an expert without a byte was given; every packed expert has some")
    return total


def agreed(found: Sequence[dict[int, tuple[int, int]]], experts: int, layer: object) -> list[tuple[int, int]]:
    """Return the checksum of every expert of a layer, from those that each rank has of the experts it packed.

    Raises InputError where two ranks packed an expert into different bytes, or nobody did.
    """
    made: list[tuple[int, int]] = []
    for expert in range(experts):
        told = {rank: own[expert] for rank, own in enumerate(found) if expert in own}
        if len(set(told.values())) != 1:
            said = ", ".join(f"rank {rank}: {a & _ALL:016x}{b & _ALL:016x}" for rank, (a, b) in told.items()) or "none"
            raise InputError(
                f"layer {layer}, expert {expert}: every rank that holds it needs the same packed bytes, found "
                f"checksums {said}; load all ranks from one checkpoint, with one version of this package"
            )
        made.append(next(iter(told.values())))
    return made


_ALL = (1 << 64) - 1


def _words(part: Tensor) -> Tensor:
    raw = part.contiguous().reshape(-1).view(torch.uint8)
    if raw.numel() % 4 or raw.storage_offset() % 4:
        whole = raw.new_zeros(-(-raw.numel() // 4) * 4)
        whole[: raw.numel()] = raw
        raw = whole
    return raw.view(torch.int32)


def _odd(index: Tensor, seed: int) -> Tensor:
    """Return an odd number for every position, as SplitMix64 scatters them."""
    mixed = index * _STEP + seed
    mixed = (mixed ^ _right(mixed, 30)) * _FIRST
    mixed = (mixed ^ _right(mixed, 27)) * _SECOND
    return (mixed ^ _right(mixed, 31)) | 1


def _right(value: Tensor, bits: int) -> Tensor:
    """Shift as an unsigned number."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
