"""Collectives of torch.distributed over rows, by name of the process group, with errors that name the failed rank.

A rank that dies breaks its connections, so the others fail at once; the remaining ranks then exchange a message to find
out which one is missing.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
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

__all__ = [
    "PendingRows",
    "all_gather_rows",
    "all_to_all_rows",
    "reduce_scatter_rows",
    "start_all_gather",
    "start_all_to_all",
    "start_reduce_scatter",
    "sum_over_ranks",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingRows:
    """Rows that a collective brings, which may still run.

    work: of torch.distributed; None where the current stream is already behind it. result: returns the rows once they
    are there. tensors: what the collective reads and writes. group, phase: for errors.
    """

    work: distributed.Work | None
    result: Callable[[], Tensor]
    tensors: tuple[Any, ...]
    group: str
    phase: str

    def wait(self) -> Tensor:
        """Return the rows; on NCCL the current stream waits for them, and not the host.

        On gloo the host waits for at most ``timeout_seconds()``, instead of torch's 30 minutes. Raises RankError.
        """
        if self.work is not None:
            with _process_group(self.group, self.phase) as ranks:
                if _on_gloo(ranks, self.tensors[-1]):
                    _wait_on_gloo(self.work, self.group)
                else:
                    self.work.wait()
        return self.result()


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


def _start(
    collective: Callable[..., Any], *tensors: Any, ranks: distributed.ProcessGroup, overlap: bool
) -> distributed.Work | None:
    """Start a collective. overlap: what the current stream does next need not wait for it; see ``PendingRows``.

    gloo always runs it in the background; NCCL on a separate stream with ``overlap``, otherwise on the current one.
    """
    if overlap or _on_gloo(ranks, tensors[-1]):
        return collective(*tensors, group=ranks, async_op=True)
    collective(*tensors, group=ranks)
    return None


def _wait_on_gloo(work: distributed.Work, group: str) -> None:
    """Wait for at most ``timeout_seconds()``.

    gloo does not notify a rank that waits for a rank that itself waits for a dead one, so liveness is polled. NCCL
    waits on the device, and its watchdog limits that wait.
    """
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
    return start_all_gather(rows, max_rows, fill, group=group, phase=phase).wait()


def start_all_gather(
    rows: Tensor, max_rows: int, fill: float, *, group: str, phase: str, overlap: bool = False
) -> PendingRows:
    """Start ``all_gather_rows``. overlap: other work is queued before ``wait``."""
    with _process_group(group, phase) as ranks:
        padded = rows.new_full((max_rows, *rows.shape[1:]), fill)
        padded[: rows.shape[0]] = rows
        outputs = [torch.empty_like(padded) for _ in range(distributed.get_world_size(ranks))]
        work = None
        if padded.numel():
            work = _start(distributed.all_gather, outputs, padded, ranks=ranks, overlap=overlap)
    result = partial(torch.cat, outputs)
    return PendingRows(work=work, result=result, tensors=(outputs, padded), group=group, phase=phase)


def reduce_scatter_rows(rows: Tensor, *, group: str, phase: str) -> Tensor:
    """Return this rank's part of the sum over ranks of ``rows``, whose first dimension is divided among the ranks."""
    return start_reduce_scatter(rows, group=group, phase=phase).wait()


def start_reduce_scatter(rows: Tensor, *, group: str, phase: str, overlap: bool = False) -> PendingRows:
    """Start ``reduce_scatter_rows``. overlap: other work is queued before ``wait``."""
    with _process_group(group, phase) as ranks:
        world = distributed.get_world_size(ranks)
        total = rows.new_empty(rows.shape[0] // world, rows.shape[1])
        tensors: tuple[Any, ...] = (total, rows)
        result: Callable[[], Tensor] = partial(_itself, total)
        work = None
        if rows.numel() and _on_gloo(ranks, rows):
            # gloo's reduce-scatter ignores timeouts.
            parts = torch.empty_like(rows)
            tensors = (parts, rows.contiguous())
            work = _start(distributed.all_to_all_single, *tensors, ranks=ranks, overlap=overlap)
            result = partial(parts.view(world, -1, rows.shape[1]).sum, 0, dtype=rows.dtype)
        elif rows.numel():
            work = distributed.reduce_scatter(total, list(rows.chunk(world)), group=ranks, async_op=overlap)
    return PendingRows(work=work, result=result, tensors=tensors, group=group, phase=phase)


def _itself(rows: Tensor) -> Tensor:
    return rows


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
    return start_all_to_all(rows, send_counts, recv_counts, group=group, phase=phase, out=out).wait()


def start_all_to_all(
    rows: Tensor,
    send_counts: Sequence[int] | None = None,
    recv_counts: Sequence[int] | None = None,
    *,
    group: str,
    phase: str,
    out: Tensor | None = None,
    overlap: bool = False,
) -> PendingRows:
    """Start ``all_to_all_rows``. overlap: other work is queued before ``wait``."""
    with _process_group(group, phase) as ranks:
        if out is None:
            received = rows.shape[0] if recv_counts is None else sum(recv_counts)
            out = rows.new_empty(received, *rows.shape[1:])
        exchange = partial(
            distributed.all_to_all_single,
            output_split_sizes=None if recv_counts is None else list(recv_counts),
            input_split_sizes=None if send_counts is None else list(send_counts),
        )
        tensors = (out, rows.contiguous())
        work = _start(exchange, *tensors, ranks=ranks, overlap=overlap)
    return PendingRows(work=work, result=partial(_itself, out), tensors=tensors, group=group, phase=phase)


def sum_over_ranks(tensor: Tensor, *, group: str, phase: str) -> None:
    """Replace ``tensor`` by its sum over the ranks of ``group``; raises RankError where one does not respond."""
    with _process_group(group, phase) as ranks:
        work = _start(distributed.all_reduce, tensor, ranks=ranks, overlap=False)
    PendingRows(work=work, result=partial(_itself, tensor), tensors=(tensor,), group=group, phase=phase).wait()
