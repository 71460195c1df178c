"""Process groups of torch.distributed by name.

A layer holds names and never groups: a process that still holds a group at exit aborts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import distributed

from ..errors import InputError

if TYPE_CHECKING:
    from ..placement import Placement

__all__ = ["check_ranks", "group_named", "world_ranks"]


def group_named(name: str) -> distributed.ProcessGroup:
    """Return the process group ``name``, torch's default group for an empty name; raises InputError if none exists."""
    if not (distributed.is_available() and distributed.is_initialized()):
        raise InputError(
            "several ranks were requested, and torch.distributed is not initialised in this process; launch with "
            "torchrun, and call torch.distributed.init_process_group() before layers are built"
        )
    if not name:
        return distributed.group.WORLD  # pyright: ignore[reportReturnType]
    resolve: Any = getattr(distributed.distributed_c10d, "_resolve_process_group")  # noqa: B009 - not exported by torch
    try:
        return resolve(name)
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"no process group is called {name!r} in this process: it was destroyed, or is of other ranks; make the "
            "layers anew with Ranks.of for the existing groups"
        ) from error


def world_ranks(name: str) -> tuple[int, ...]:
    """Return the ranks of the group ``name``, as numbered in the default group."""
    return tuple(distributed.get_process_group_ranks(group_named(name)))


def check_ranks(caller: str, placement: Placement) -> None:
    """Raise InputError unless the groups of torch.distributed match ``placement``. caller: for the error."""
    expected_groups = (
        (placement.group, placement.rank, placement.world_size),
        (placement.slice_group, placement.tp_rank, placement.tp_size),
    )
    for name, rank, size in expected_groups:
        if size == 1:
            continue
        group = group_named(name)
        actual_rank = distributed.get_rank(group)
        actual_size = distributed.get_world_size(group)
        if (actual_rank, actual_size) != (rank, size):
            label = f"process group {name}" if name else "torch.distributed"
            raise InputError(
                f"{caller}: planned for {placement}, {label} has rank {actual_rank} of {actual_size}; make the "
                "placement for the existing ranks (Ranks does), or launch with as many ranks"
            )
