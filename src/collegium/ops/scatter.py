"""Tokens as the rows of a grouped product in expert order: each is read once and written for all of its assignments.

Shape letters: T tokens, A assignments of a token, R rows, K columns, G groups of columns that share a scale.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ..runtime.launch import launch, on_device, overlaps, power_at_least, row_contiguous
from ..runtime.memory import Memory, Regions, alloc, part, with_prefix
from .buffers import allocate
from .checks import require_input
from .operand import Operand, operand, operand_regions
from .quantize import AS_IS, ActivationFormat, activation_format, cast_name, reorder_codes
from .rows import QuantizedRows, TokenRows, block_of_token, check_rows, require_scales, transposed_scale_stride

__all__ = ["scatter_codes", "scatter_regions", "scatter_rows"]


def scatter_regions(
    tokens: int,
    rows: int,
    columns: int,
    name: str | ActivationFormat | None,
    *,
    order: int = AS_IS,
    dtype: torch.dtype,
) -> Regions:
    """Return the most bytes ``scatter_rows`` takes for up to ``tokens`` tokens and ``rows`` rows of ``columns`` each.

    name, order: as in ``scatter_rows``. dtype: of x.
    """
    regions = operand_regions(rows, columns, name, order=order, gathered=True, dtype=dtype)
    if name is not None and not activation_format(name).e4m3:
        regions |= with_prefix("tokens", operand_regions(tokens, columns, name, order=order, dtype=dtype))
    return regions


def scatter_rows(
    x: Tensor,
    name: str | ActivationFormat | None,
    slots: Tensor,
    rows: int,
    *,
    order: int = AS_IS,
    x_ready: bool = False,
    memory: Memory | None = None,
) -> Operand:
    """Return ``rows`` rows as a product reads them: row ``slots[t, a]`` is token t of ``x [T, K]``.

    The bits and strides are those of ``operand`` with a source. slots: int64 ``[T, A]``, contiguous; negative: the
    assignment has no row. Rows of no slot are uninitialised. name, order, x_ready: as in ``operand``. memory: where
    kernels take "codes", "scales" and, for formats without ``e4m3``, part "tokens".
    Raises ``InputError`` for wrong shapes or dtypes, and for an order that rows of the format cannot have.
    """
    _check(x, slots)
    form = activation_format(cast_name(x.dtype) if name is None else name)
    if name is None:
        form.padded_columns(x.shape[1], order)  # which refuses other orders
        return _copy(x, None, slots, rows, memory)
    check_rows(form.name, x)
    if not form.e4m3 or not on_device(x, form.capability):
        by_row = replace(form, transposed_scales=False)
        codes, scale = operand(x, by_row, order=order, x_ready=x_ready, memory=part(memory, "tokens"))
        return _copy(codes, scale, slots, rows, memory, transposed=form.transposed_scales)
    padded_cols = form.padded_columns(x.shape[1], order)
    buffers = allocate(memory, form.buffers(rows, padded_cols), x.device)
    quantized = QuantizedRows(shape=(rows, padded_cols), **buffers)
    if x.shape[0]:
        # Fresh memory may still be in use by the previous kernel.
        form.write_to_slots(TokenRows(row_contiguous(x), slots, order, x_ready and memory is not None), quantized)
    scales = require_scales(form.name, quantized.scales)
    return quantized.codes, scales[:, :rows].t() if form.transposed_scales else scales


def scatter_codes(
    codes: Tensor,
    scale: Tensor,
    slots: Tensor,
    rows: int,
    *,
    reorder: int = AS_IS,
    transposed: bool = False,
    memory: Memory | None = None,
) -> Operand:
    """Return what ``scatter_rows`` returns for tokens that are E4M3 codes ``[T, K]`` with scales ``[T, G]`` float32.

    reorder: the order of columns to bring codes into, AS_IS to keep theirs. transposed: whether to return scales as
    ``transpose_scales`` does.
    """
    _check(codes, slots)
    return _copy(reorder_codes(codes, reorder), scale, slots, rows, memory, transposed=transposed)


def _copy(
    x: Tensor, scale: Tensor | None, slots: Tensor, rows: int, memory: Memory | None, *, transposed: bool = False
) -> Operand:
    """Return ``rows`` rows with copies of ``x [T, K]`` and their scales ``[T, G]`` at their slots, bit for bit."""
    out = alloc(memory, "codes", (rows, x.shape[1]), x.dtype, x.device)
    out_scale = None
    if scale is not None:
        groups = scale.shape[1]
        shape = (groups, transposed_scale_stride(rows)) if transposed else (rows, groups)
        out_scale = alloc(memory, "scales", shape, scale.dtype, x.device)
        out_scale = out_scale[:, :rows].t() if transposed else out_scale
    if not x.shape[0]:
        return out, out_scale
    if not on_device(x):
        _copy_in_torch(x, slots, out)
        if scale is not None and out_scale is not None:
            _copy_in_torch(scale, slots, out_scale)
        return out, out_scale
    # Imported here: Triton exists for Linux only, and everything except launches works without it.
    from ..kernels.quantize import copy_to_slots_kernel

    tokens, columns = x.shape
    groups = 0 if scale is None else scale.shape[1]
    block_c, warps = block_of_token(columns)
    args = (
        _bits(row_contiguous(x)),
        None if scale is None else scale.contiguous(),
        slots,
        _bits(out),
        out_scale,
        columns,
        x.stride(0),
        groups,
        out_scale.stride(1) if transposed and out_scale is not None else None,
    )
    constants = {
        **TokenRows(x, slots).constants,
        "BLOCK_C": block_c,
        "BLOCK_G": power_at_least(groups, 2),
        "PDL": overlaps(x),
    }
    launch(copy_to_slots_kernel, (tokens, -(-columns // block_c)), args, constants, num_warps=warps)
    return out, out_scale


def _copy_in_torch(x: Tensor, slots: Tensor, out: Tensor) -> None:
    """Write what the kernel writes, and zeros to the rows of no slot."""
    index = slots.reshape(-1)
    # Assignments without a row go to one more row behind the others.
    index = torch.where(index < 0, out.shape[0], index)
    bits = _bits(x).repeat_interleave(slots.shape[1], dim=0)
    _bits(out).copy_(bits.new_zeros(out.shape[0] + 1, out.shape[1]).index_copy_(0, index, bits)[:-1])


def _bits(x: Tensor) -> Tensor:
    """Return E4M3 codes as bytes, which kernels and torch copy, and other numbers as they are."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def _check(x: Tensor, slots: Tensor) -> None:
    valid = slots.dim() == 2 and slots.dtype == torch.int64 and slots.is_contiguous()
    require_input(valid, "slots", slots, "contiguous [T, A] int64, as permute() returns")
    valid = x.dim() == 2 and x.shape[0] == slots.shape[0] and x.shape[1] >= 1
    require_input(valid, "x", x, f"[{slots.shape[0]}, K >= 1], a row for each row of slots")
