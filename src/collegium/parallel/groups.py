"""Process groups of torch.distributed by name.

A layer keeps names and never groups: a process that still holds a group when it ends aborts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import distributed

from ..errors import InputError

if TYPE_CHECKING:
    from ..placement import Placement

__all__ = ["check_ranks", "group_named", "world_ranks"]


def group_named(name: str) -> distributed.ProcessGroup:
    """Return the process group ``name``, torch's default one for an empty name; raises InputError without any."""
    if not (distributed.is_available() and distributed.is_initialized()):
        raise InputError(
            "several ranks were asked for, and torch.distributed is not initialised in this process; launch with "
            "torchrun, and call torch.distributed.init_process_group() before layers are built"
        )
    if not name:
        return distributed.group.WORLD  # pyright: ignore[reportReturnType]
    resolve: Any = getattr(distributed.distributed_c10d, "_resolve_process_group")  # noqa: B009 - torch's own, unexported
    try:
        return resolve(name)
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"no process group is called {name!r} in this process: it was destroyed, or is of other ranks; make the "
            "layers anew with Ranks.of for the groups there are"
        ) from error


def world_ranks(name: str) -> tuple[int, ...]:
    """Return the ranks of the group ``name`` as the default group numbers them."""
    return tuple(distributed.get_process_group_ranks(group_named(name)))


def check_ranks(what: str, placed: Placement) -> None:
    """Raise InputError unless the groups of torch.distributed are those of ``placed``. what: who needs them."""
    for name, rank, size in (
        (placed.group, placed.rank, placed.world_size),
        (placed.slice_group, placed.tp_rank, placed.tp_size),
    ):
        if size == 1:
            continue
        group = group_named(name)
        found = distributed.get_rank(group), distributed.get_world_size(group)
        if found != (rank, size):
            called = f"process group {name}" if name else "torch.distributed"
            raise InputError(
                f"{what}: asked for {placed}, {called} has rank {found[0]} of {found[1]}; make the placement for the "
                "ranks there are (Ranks does), or launch with as many ranks"
            )
