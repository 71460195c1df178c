"""The packed experts of a layer in host memory: packed on the GPU some at a time, and stored at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...problem import ExpertsProblem
from ...runtime.memory import ALIGN
from ...runtime.pinned import PinnedBlock
from ...types import ExpertWeights
from ..base import ExpertKernel, PackedWeights, map_tensors, refuse_other_layout

__all__ = ["HostStore", "PackedOnce", "pack_to_host"]

_GROUP_BYTES = 256 << 20  # of experts that are packed at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class HostStore:
    """tensors: those of ``PackedWeights.slots`` for all experts, ``[E, ...]``, in one page-locked ``block``."""

    block: PinnedBlock
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedOnce:
    """All experts in host memory, and the first ones in slots of the GPU, packed alike."""

    store: HostStore
    resident: PackedWeights


def pack_to_host(
    kernel: ExpertKernel, weights: ExpertWeights[Any], problem: ExpertsProblem, device: torch.device
) -> PackedOnce:
    """Pack ``weights`` of all E experts, on any device, for ``problem``, whose experts are the slots on ``device``.

    Each group of experts is copied to the device, packed there and stored in host memory before the next one. Raises
    InputError where memory cannot be page-locked, and where experts are packed differently from each other.
    """
    count = weights.down.shape[0]
    store: HostStore | None = None
    resident: PackedWeights | None = None
    for start, stop in _groups(weights, count):
        group = _experts_on(weights, start, stop, device)
        packed = kernel.pack(group, replace(problem, experts=stop - start))
        if store is None or resident is None:
            store, resident = _allocate(packed, count, device), packed.resized(problem.experts)
        refuse_other_layout(resident, packed)
        with torch.inference_mode():
            for target, source in zip(store.tensors, packed.slots(), strict=True):
                target[start:stop].copy_(source)
        for slot in range(start, min(stop, problem.experts)):
            resident.put(slot, packed.take(slot - start))
    assert store is not None
    assert resident is not None
    return PackedOnce(store=store, resident=resident)


def _groups(weights: ExpertWeights[Any], count: int) -> Iterator[tuple[int, int]]:
    """Yield the first and the last expert plus one of each group."""
    nbytes = (weights.gate_up.nbytes + weights.down.nbytes) // count
    size = max(1, _GROUP_BYTES // max(1, nbytes))
    for start in range(0, count, size):
        yield start, min(start + size, count)


def _experts_on(weights: ExpertWeights[Any], start: int, stop: int, device: torch.device) -> ExpertWeights[Any]:
    """Return experts ``start`` to ``stop`` on ``device``."""
    gate_up, down = (matrix[start:stop].to(device) for matrix in (weights.gate_up, weights.down))
    group = replace(weights, gate_up=gate_up, down=down)
    names = ("gate_up_bias", "down_bias", "expert_reach")
    return map_tensors(group, lambda tensor: tensor[start:stop].to(device), *names)


def _allocate(packed: PackedWeights, count: int, device: torch.device) -> HostStore:
    """Return uninitialised memory for ``count`` experts packed like ``packed``."""
    like = packed.slots()
    sizes = [count * tensor[0].numel() * tensor.element_size() for tensor in like]
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // ALIGN) * ALIGN)
    block = PinnedBlock(max(1, offsets[-1]), device)
    with torch.inference_mode(False):
        tensors = tuple(
            block.data[offset : offset + size].view(tensor.dtype).view(count, *tensor.shape[1:])
            for offset, size, tensor in zip(offsets, sizes, like, strict=False)
        )
    assert all(prod(tensor.shape) for tensor in tensors)
    return HostStore(block=block, tensors=tensors)
