"""Collectives of torch.distributed over rows, on a group by name, whose failures name the rank that is gone.

A rank that dies breaks its connections, so the others fail at once; then those that are left call the roll.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from ..errors import RankError
from .groups import group_named
from .rendezvous import LOOK, rendezvous_of, timeout_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from torch import Tensor

__all__ = ["exchanged", "gathered", "scattered"]


@contextmanager
def _named(group: str, phase: str) -> Generator[distributed.ProcessGroup]:
    """Give the process group ``group``; raise RankError for what goes wrong in it."""
    own = group_named(group)
    try:
        yield own
    except RuntimeError as error:  # torch raises nothing narrower
        rendezvous_of(group).exchange(None, f"the roll call after {phase} failed")
        raise RankError(
            f"{phase}: every rank is there, and torch.distributed says: {error}", ranks=(), phase=phase
        ) from error


def _done(start: Callable[..., Any], *tensors: Any, ranks: distributed.ProcessGroup, group: str) -> None:
    """Run a collective; with gloo no longer than ``timeout_seconds()``, which is torch's own 30 minutes otherwise.

    A rank that waits for one that waits for one that is gone is told nothing, so it looks. NCCL's wait is the device's,
    and its watchdog bounds it.
    """
    if not _on_gloo(ranks, tensors[-1]):
        start(*tensors, group=ranks)
        return
    work, until = start(*tensors, group=ranks, async_op=True), time.monotonic() + timeout_seconds()
    while True:
        left = until - time.monotonic()
        try:
            work.wait(timedelta(seconds=max(0.001, min(left, LOOK))))
        except RuntimeError:
            if work.is_completed():
                # It may have ended well just after the wait gave up; an error of its own is raised here again.
                work.wait()
                return
            if left <= LOOK or rendezvous_of(group).dead_ranks():
                raise
        else:
            return


def _on_gloo(ranks: distributed.ProcessGroup, tensor: Tensor) -> bool:
    return f"{tensor.device.type}:gloo" in distributed.get_backend_config(ranks)


def gathered(own: Tensor, most: int, fill: float, *, group: str, phase: str) -> Tensor:
    """Return every rank's rows ``[W * most, ...]``, those of a rank with fewer than ``most`` filled up."""
    with _named(group, phase) as ranks:
        padded = own.new_full((most, *own.shape[1:]), fill)
        padded[: own.shape[0]] = own
        found = [torch.empty_like(padded) for _ in range(distributed.get_world_size(ranks))]
        if padded.numel():
            _done(distributed.all_gather, found, padded, ranks=ranks, group=group)
        return torch.cat(found)


def scattered(rows: Tensor, *, group: str, phase: str) -> Tensor:
    """Return this rank's part of the sum over ranks of ``rows``, whose first dimension all ranks share."""
    with _named(group, phase) as ranks:
        world = distributed.get_world_size(ranks)
        if not rows.numel():
            return rows.chunk(world)[0]
        if _on_gloo(ranks, rows):
            # Its reduce-scatter waits for ever, whatever bound is given.
            found = torch.empty_like(rows)
            _done(distributed.all_to_all_single, found, rows.contiguous(), ranks=ranks, group=group)
            return found.view(world, -1, rows.shape[1]).sum(0, dtype=rows.dtype)
        own = rows.new_empty(rows.shape[0] // world, rows.shape[1])
        distributed.reduce_scatter(own, list(rows.chunk(world)), group=ranks)
        return own


def exchanged(
    own: Tensor,
    sent: Sequence[int] | None = None,
    came: Sequence[int] | None = None,
    *,
    group: str,
    phase: str,
    out: Tensor | None = None,
) -> Tensor:
    """Return the rows that every rank sends here, in the order of ranks.

    own: rows in the order of the ranks they go to, ``sent[r]`` of them to rank r; ``came[r]`` come from it. Without
    these every rank sends every other as many, and nothing is read on the host. out: written instead of fresh memory.
    """
    with _named(group, phase) as ranks:
        rows = own.shape[0] if came is None else sum(came)
        out = own.new_empty(rows, *own.shape[1:]) if out is None else out
        lists = {"output_split_sizes": came, "input_split_sizes": sent}
        splits: dict[str, Any] = {name: None if count is None else list(count) for name, count in lists.items()}
        _done(partial(distributed.all_to_all_single, **splits), out, own.contiguous(), ranks=ranks, group=group)
        return out
