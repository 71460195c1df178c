"""What a symmetric workspace does on two ranks and more, on a CPU and on GPUs."""

from __future__ import annotations

import torch
from torch import distributed

from collegium.errors import InputError
from collegium.runtime.memory import Arena, Region, alloc, memory_map
from collegium.runtime.symmetric import SymmetricWorkspace

__all__ = ["exchange"]

REGIONS = (Region("x/codes", 1000), Region("counts", 64), Region("rows", 4 * 8 * 16))


def _device() -> torch.device:
    if distributed.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _wait(space: SymmetricWorkspace) -> None:
    if space.handle is None:
        distributed.barrier(space.group)
    else:
        space.handle.barrier()


def exchange(rank: int) -> tuple[list[int], list[str], float]:
    """Return offsets of the regions, errors, and the sum of what every peer wrote for this rank."""
    group, world, device = distributed.group.WORLD, distributed.get_world_size(), _device()
    assert group is not None
    layout = memory_map(REGIONS)
    space = SymmetricWorkspace(group, device, layout.nbytes)
    arenas = [Arena(block, layout) for block in space.blocks]
    memory = arenas[rank]
    base = memory.block.data_ptr()
    offsets = [alloc(memory, name, (4,), torch.uint8, device).data_ptr() - base for name, _ in REGIONS]
    memory.part("x").alloc("codes", (1000,), torch.uint8).fill_(rank)
    rows = memory.alloc("rows", (8, 16), torch.float32)
    rows.fill_(100.0 * rank)
    _wait(space)
    pulled = [int(arena.alloc("x/codes", (1000,), torch.uint8).float().mean()) for arena in arenas]
    assert pulled == list(range(world)), pulled
    # Each rank writes its row of every peer's rows.
    for arena in arenas:
        arena.alloc("rows", (8, 16), torch.float32)[rank] = rank + 1.0
    _wait(space)
    total = float(rows[:world, 0].sum())
    assert bool((rows[world:] == 100.0 * rank).all()), "nobody wrote another row"
    errors: list[str] = []
    try:
        SymmetricWorkspace(group, device, 256 * (1 + rank))
    except InputError as error:
        errors.append(str(error))
    return offsets, errors, total
