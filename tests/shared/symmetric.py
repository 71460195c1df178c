"""What a symmetric workspace does on two ranks and more, on a CPU and on GPUs."""

from __future__ import annotations

import torch
from torch import distributed

from collegium.errors import InputError
from collegium.runtime.memory import Region, alloc, memory_map
from collegium.runtime.symmetric import SymmetricWorkspace

__all__ = ["exchange"]

REGIONS = (Region("x/codes", 1000), Region("counts", 64), Region("rows", 4 * 8 * 16))


def _device() -> torch.device:
    if distributed.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def exchange(rank: int) -> tuple[list[int], list[str], float]:
    """Return places of the regions, errors, and the sum of what every peer wrote for this rank, pulled and pushed."""
    group, world, device = distributed.group.WORLD, distributed.get_world_size(), _device()
    assert group is not None
    places = memory_map(REGIONS)
    space = SymmetricWorkspace(group, device, places.nbytes)
    memory = space.memory(places)
    base = memory.block.data_ptr()
    offsets = [alloc(memory, name, (4,), torch.uint8, device).data_ptr() - base for name, _ in REGIONS]
    memory.part("x").alloc("codes", (1000,), torch.uint8).fill_(rank)
    rows = memory.alloc("rows", (8, 16), torch.float32)
    rows.fill_(100.0 * rank)
    space.barrier()
    pulled = [int(memory.peer(other, "x/codes", (1000,), torch.uint8).float().mean()) for other in range(world)]
    assert pulled == list(range(world)), pulled
    # Each rank writes its row of every peer's rows.
    for other in range(world):
        memory.peer(other, "rows", (8, 16), torch.float32)[rank] = rank + 1.0
    space.barrier()
    found = float(rows[:world, 0].sum())
    assert bool((rows[world:] == 100.0 * rank).all()), "nobody wrote beside its row"
    errors: list[str] = []
    for ask in (
        lambda: SymmetricWorkspace(group, device, 256 * (1 + rank)),
        lambda: space.memory(memory_map((Region("rows", 16 + 16 * rank),))),
        lambda: space.memory(memory_map((Region("rows", 1 << 20),))),
    ):
        try:
            ask()
        except InputError as error:
            errors.append(str(error))
    return offsets, errors, found
