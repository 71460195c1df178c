"""Rows that are already packed by expert, with room for more, as low-latency dispatchers of serving engines send them.

Shape letters: E experts of this rank, M rows of room for each expert, H width.
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


def check_batched(
    x: Tensor, counts: Tensor, problem: ExpertsProblem, device: torch.device, *, quantized: bool, checked: bool
) -> None:
    """Compare the inputs of ``run_batched`` with what the experts were packed for; raises InputError.

    quantized: x is E4M3 codes. checked: wait for the device, and raise RoutingError for a count below 0 or above M.
    """
    check_tensors(device, x=x, counts=counts)
    dtype = torch.float8_e4m3fn if quantized else DTYPES[problem.dtype]
    shape = (problem.experts, *x.shape[1:2], problem.hidden)
    if (tuple(x.shape), x.dtype) != (shape, dtype):
        raise InputError(
            f"run_batched: x is {tuple(x.shape)} {x.dtype}, allowed: ({problem.experts}, M, {problem.hidden}) {dtype}, "
            "room for M rows of each expert of this rank; float8_e4m3fn with scale= alone"
        )
    if counts.shape != x.shape[:1] or counts.dtype not in (torch.int32, torch.int64):
        raise InputError(
            f"run_batched: counts is {tuple(counts.shape)} {counts.dtype}, allowed: ({problem.experts},) int32 or int64"
        )
    if checked and bool(((counts < 0) | (counts > x.shape[1])).any()):
        raise RoutingError(
            f"run_batched: counts range from {int(counts.min())} to {int(counts.max())}, allowed: 0 to {x.shape[1]}, "
            "the room for rows of an expert; pass an x with more room, or fewer rows"
        )


def run_batched(
    experts: PackedWeights,
    x: Tensor,
    counts: Tensor,
    out: Tensor,
    *,
    codes: tuple[Tensor, torch.dtype, Tensor | None] | None = None,
    expected: int | None = None,
    after_expert: Callable[[Tensor], Tensor] | None = None,
    merged_shared_experts: int = 0,
) -> None:
    """Write the first ``counts[e]`` rows of ``out[e]``: expert e's output for those of ``x[e]``; both ``[E, M, H]``.

    codes: where x is E4M3 codes, their scales ``[E, M, G]`` float32, the dtype that they stand for, and given scales of
    the rows between the products, also ``[E, M, G]``, or None. expected: number of rows to choose tiles for; None:
    E * M. merged_shared_experts: number of experts packed after those E, which get no rows. Only the kernel
    ``reference`` waits for the device.
    """
    num_experts, room, width = x.shape
    x_rows = x.reshape(-1, width)
    scale, dtype, middle_scale = (None, x.dtype, None) if codes is None else codes
    scale, middle_scale = (None if s is None else s.reshape(len(x_rows), -1) for s in (scale, middle_scale))
    out_rows = out.view(-1, width)
    valid = torch.arange(room, device=x.device) < counts[:, None]
    ids = torch.where(valid, torch.arange(num_experts, device=x.device)[:, None], -1).view(-1, 1)
    rows = ids.numel() if expected is None else expected
    # The experts write to ``out`` directly, unless ``after_expert`` sees the rows first or their dtype differs.
    owners = None
    if after_expert is None and experts.output_spec(dtype) == (width, out.dtype):
        owners = Owners(out_rows, ids.new_zeros(1))
    block_t = experts.tiling.block_t(rows) if x.is_cuda else ()
    order = permute(ids, num_experts + merged_shared_experts, block_t=block_t, owners=owners)
    remote = None if order.row_offsets is None else RemoteOutput(rows=out_rows, offsets=order.row_offsets)
    batch = ContiguousBatch(
        x=x_rows,
        source=order.source,
        expert_offsets=order.expert_offsets,
        tiles=order.tiles,
        rows=rows,
        scale=scale,
        dtype=dtype,
        remote=remote,
        middle_scale=middle_scale,
        slots=order.slots,
    )
    result = experts.run(batch)
    if remote is not None:
        return
    if after_expert is not None:
        result = after_expert(result)
    written = torch.arange(result.shape[0], device=x.device)[:, None] < order.expert_offsets[-1]
    out_rows.index_copy_(0, order.source, torch.where(written, result.to(out.dtype), out_rows[order.source]))
