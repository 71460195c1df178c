"""Rows that are packed by expert already, with room for more, as low-latency dispatchers of serving engines bring them.

Shape letters: E experts of this rank, M rows of room for each, H width.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import InputError, RoutingError
from ..experts import PackedWeights
from ..formats.unquantised import DTYPES
from ..ops.permute import Owners, permute
from ..problem import ExpertsProblem
from ..runtime.packed_module import check_tensors
from ..types import ContiguousBatch, RemoteOutput

__all__ = ["check_batched", "run_batched"]


def check_batched(x: Tensor, counts: Tensor, asked: ExpertsProblem, device: torch.device, *, checked: bool) -> None:
    """Compare what ``run_batched`` is given with what the experts were packed for; raises InputError.

    checked: wait for the device and raise RoutingError for a count that is not of rows that there are.
    """
    check_tensors(device, x=x, counts=counts)
    wanted, dtype = (asked.experts, *x.shape[1:2], asked.hidden), DTYPES[asked.dtype]
    if (tuple(x.shape), x.dtype) != (wanted, dtype):
        raise InputError(
            f"run_batched: x is {tuple(x.shape)} {x.dtype}, allowed: ({asked.experts}, M, {asked.hidden}) {dtype}, "
            "room for M rows of each expert of this rank"
        )
    if counts.shape != x.shape[:1] or counts.dtype not in (torch.int32, torch.int64):
        raise InputError(
            f"run_batched: counts is {tuple(counts.shape)} {counts.dtype}, allowed: ({asked.experts},) int32 or int64"
        )
    if checked and bool(((counts < 0) | (counts > x.shape[1])).any()):
        found = f"run_batched: counts go from {int(counts.min())} to {int(counts.max())}, allowed: 0 to {x.shape[1]}"
        raise RoutingError(f"{found}, the rows that an expert has room for; give x more room, or send fewer rows")


def run_batched(
    experts: PackedWeights,
    x: Tensor,
    counts: Tensor,
    out: Tensor,
    *,
    expected: int | None = None,
    after_expert: Callable[[Tensor], Tensor] | None = None,
    merged: int = 0,
) -> None:
    """Write the first ``counts[e]`` rows of ``out[e]``, expert e's output for those of ``x[e]``; both ``[E, M, H]``.

    merged: so many experts behind those E have no rows.
    expected: how many rows to choose tiles for, all there is room for when None. Nothing but ``reference`` waits for
    the device.
    """
    slots, most, width = x.shape
    flat, target = x.reshape(-1, width), out.view(-1, width)
    asked = torch.arange(most, device=x.device) < counts[:, None]
    ids = torch.where(asked, torch.arange(slots, device=x.device)[:, None], -1).view(-1, 1)
    rows = ids.numel() if expected is None else expected
    # Rows that others are to see first, or that are of another dtype, cannot be stored where they belong at once.
    stored = after_expert is None and experts.output_spec(x.dtype) == (width, x.dtype)
    owners = Owners(target, ids.new_zeros(1)) if stored else None
    order = permute(ids, slots + merged, block_t=experts.tiling.block_t(rows) if x.is_cuda else (), owners=owners)
    back = None if order.row_offsets is None else RemoteOutput(rows=target, offsets=order.row_offsets)
    kept, source = order.expert_offsets, order.source
    batch = ContiguousBatch(x=flat, source=source, expert_offsets=kept, tiles=order.tiles, rows=rows, remote=back)
    made = experts.run(batch)
    if back is None:
        made = made if after_expert is None else after_expert(made)
        given = torch.arange(made.shape[0], device=x.device)[:, None] < kept[-1]
        target.index_copy_(0, source, torch.where(given, made.to(x.dtype), target[source]))
