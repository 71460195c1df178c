"""Collectives of torch.distributed over rows, by name of the process group, with errors that name the failed rank.

A rank that dies breaks its connections, so the others fail at once; the remaining ranks then exchange a message to find
out which one is missing.
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

__all__ = ["all_gather_rows", "all_to_all_rows", "reduce_scatter_rows", "sum_over_ranks"]


@contextmanager
def _process_group(name: str, phase: str) -> Generator[distributed.ProcessGroup]:
    """Yield the process group ``name``; turn its errors into a RankError."""
    group = group_named(name)
    try:
        yield group
    except RuntimeError as error:  # torch raises nothing narrower
        rendezvous_of(name).exchange(None, f"the roll call after {phase} failed")
        raise RankError(
            f"{phase}: every rank responds, and torch.distributed reports: {error}", ranks=(), phase=phase
        ) from error


def _run_collective(start: Callable[..., Any], *tensors: Any, ranks: distributed.ProcessGroup, group: str) -> None:
    """Run a collective; on gloo for at most ``timeout_seconds()``, instead of torch's 30 minutes.

    gloo does not notify a rank that waits for a rank that itself waits for a dead one, so liveness is polled. NCCL
    waits on the device, and its watchdog limits that wait.
    """
    if not _on_gloo(ranks, tensors[-1]):
        start(*tensors, group=ranks)
        return
    work = start(*tensors, group=ranks, async_op=True)
    deadline = time.monotonic() + timeout_seconds()
    while True:
        remaining = deadline - time.monotonic()
        try:
            work.wait(timedelta(seconds=max(0.001, min(remaining, LOOK))))
        except RuntimeError:
            if work.is_completed():
                # It may have succeeded right after the wait gave up; if it failed, this raises its error.
                work.wait()
                return
            if remaining <= LOOK or rendezvous_of(group).dead_ranks():
                raise
        else:
            return


def _on_gloo(ranks: distributed.ProcessGroup, tensor: Tensor) -> bool:
    return f"{tensor.device.type}:gloo" in distributed.get_backend_config(ranks)


def all_gather_rows(rows: Tensor, max_rows: int, fill: float, *, group: str, phase: str) -> Tensor:
    """Return every rank's rows ``[W * max_rows, ...]``, padded with ``fill`` to ``max_rows`` for each rank."""
    with _process_group(group, phase) as ranks:
        padded = rows.new_full((max_rows, *rows.shape[1:]), fill)
        padded[: rows.shape[0]] = rows
        outputs = [torch.empty_like(padded) for _ in range(distributed.get_world_size(ranks))]
        if padded.numel():
            _run_collective(distributed.all_gather, outputs, padded, ranks=ranks, group=group)
        return torch.cat(outputs)


def reduce_scatter_rows(rows: Tensor, *, group: str, phase: str) -> Tensor:
    """Return this rank's part of the sum over ranks of ``rows``, whose first dimension is divided among the ranks."""
    with _process_group(group, phase) as ranks:
        world = distributed.get_world_size(ranks)
        if not rows.numel():
            return rows.chunk(world)[0]
        if _on_gloo(ranks, rows):
            # gloo's reduce-scatter ignores timeouts.
            parts = torch.empty_like(rows)
            _run_collective(distributed.all_to_all_single, parts, rows.contiguous(), ranks=ranks, group=group)
            return parts.view(world, -1, rows.shape[1]).sum(0, dtype=rows.dtype)
        total = rows.new_empty(rows.shape[0] // world, rows.shape[1])
        distributed.reduce_scatter(total, list(rows.chunk(world)), group=ranks)
        return total


def all_to_all_rows(
    rows: Tensor,
    send_counts: Sequence[int] | None = None,
    recv_counts: Sequence[int] | None = None,
    *,
    group: str,
    phase: str,
    out: Tensor | None = None,
) -> Tensor:
    """Return the rows that every rank sends to this one, in the order of ranks.

    rows: in the order of their destinations, ``send_counts[r]`` of them for rank r; ``recv_counts[r]`` come from it.
    Without counts every rank sends equally many to each, and the host reads nothing. out: the result is written here.
    """
    with _process_group(group, phase) as ranks:
        if out is None:
            received = rows.shape[0] if recv_counts is None else sum(recv_counts)
            out = rows.new_empty(received, *rows.shape[1:])
        exchange = partial(
            distributed.all_to_all_single,
            output_split_sizes=None if recv_counts is None else list(recv_counts),
            input_split_sizes=None if send_counts is None else list(send_counts),
        )
        _run_collective(exchange, out, rows.contiguous(), ranks=ranks, group=group)
        return out


def sum_over_ranks(tensor: Tensor, *, group: str, phase: str) -> None:
    """Replace ``tensor`` by its sum over the ranks of ``group``; raises RankError where one does not respond."""
    with _process_group(group, phase) as ranks:
        _run_collective(distributed.all_reduce, tensor, ranks=ranks, group=group)
