"""One product of a large batch, its rows in expert order: tiles are copied by the tensor memory accelerator.

The formulas, the order of every sum and so the bits of a row are those of ``grouped.py``.
Shape letters: R rows, E experts, P parts, N outputs of a part, K inputs.
"""

from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ...kernels.numbers import GROUP_CODES, POWER_CODES, ROWS
from ...ops.columns import RowSums
from ...runtime.launch import launch
from ...runtime.memory import Memory, take
from ...types import ActivationSpec
from .grouped import TileList, bounds_of, constants_of, scales_of
from .matrix import PackedMatrix
from .tiles import BAND

__all__ = ["CodeScales", "prefill_gemm"]

_STEP = 128  # bytes of a row in a step of the K loop, of which four stages fit


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeScales:
    """Results leave as E4M3 codes; scale: float32 ``[R, ceil(N / 128)]``, written beside them.

    power: scales are powers of two. rounded: results are rounded to bfloat16 before they are quantised.
    """

    scale: Tensor
    power: bool
    rounded: bool


def prefill_gemm(
    x: Tensor,
    packed: PackedMatrix,
    expert_offsets: Tensor,
    tiles: TileList,
    out: Tensor,
    *,
    x_scale: Tensor | RowSums | None = None,
    activation: ActivationSpec | None = None,
    codes: CodeScales | None = None,
) -> Tensor:
    """Write ``out [R, N]`` and return it; see ``grouped_gemm`` for its contents.

    x: ``[R, K]`` of the operand dtype in expert order. x_scale: float32 ``[R, ceil(K / 128)]`` or ``[R, 1]`` for E4M3
    rows, with x from ``halves_and_sums`` for weights that rescale rows. codes: makes ``out`` take E4M3 codes. Rows from
    ``expert_offsets[E]`` on are not written. With ``tiles.places`` rows go where those say. Raises InputError for rows
    no tensor descriptor can describe.
    """
    layout = packed.layout
    experts, parts, n_out, k_in = layout.shape
    _check(x, packed, tiles)
    from ...kernels.prefill import prefill_kernel

    tile = tiles.tile
    n_tiles = -(-n_out // (BAND if parts == 2 else 2 * BAND))
    values, *beside = packed.pointers
    wide = layout.operands * layout.block_k * x.element_size() > _STEP
    args = (
        x, values, scales_of(x_scale, values)[0], *beside, out, tiles.places, values if codes is None else codes.scale,
        expert_offsets, tiles.expert, tiles.row, tiles.used, x.shape[0], n_out, k_in, x.stride(0),
        values.stride(-2), experts * parts * n_out, layout.scale_rows, *bounds_of(activation),
    )  # fmt: skip
    constants = constants_of(packed, activation, x_scale, tiles) | {
        "SCALE": layout.scale_kind,
        "TERMS": layout.operands,
        "ROW_SCALE": packed.row_scale is not None and layout.operands == 1,
        "CODES": ROWS if codes is None else POWER_CODES if codes.power else GROUP_CODES,
        "ROUND": codes is not None and codes.rounded,
        # Float32 results pass through shared memory that one stage less leaves free; wide blocks leave room for two.
        "STAGES": min(tile.stages, 2 if wide else 3 if out.dtype == torch.float32 else 4),
        "SPECIALIZE": tile.warps == 4,
        "ASM": x.is_cuda,
    }
    grid = (min(tile.programs, tiles.count * n_tiles),)
    _with_scratch(x.device, partial(launch, prefill_kernel, grid, args, constants, num_warps=tile.warps), tiles.memory)
    return out


def _with_scratch(device: torch.device, start: Callable[[], None], memory: Memory | None) -> None:
    """Start a kernel that makes descriptors; their memory is the pass's, and Triton's own setting stays as it was."""
    from ...kernels.prefill import set_allocator

    def allocate(size: int, alignment: int, stream: int | None) -> Tensor:
        return take(memory, "scratch", (size,), torch.int8, device)

    context = copy_context()
    setting: Any = set_allocator
    context.run(setting, allocate)
    context.run(start)


def _check(x: Tensor, packed: PackedMatrix, tiles: TileList) -> None:
    for name, rows in (("x", x), ("weights", packed.values)):
        if rows.stride(-2) * rows.element_size() % 16 or rows.stride(-1) != 1 or rows.data_ptr() % 16:
            raise InputError(
                f"prefill_gemm: {name} has strides {rows.stride()} of {rows.dtype} at {rows.data_ptr():#x}; rows must "
                "be dense and start at multiples of 16 bytes; use grouped_gemm"
            )
    if tiles.used is None:
        raise InputError("prefill_gemm: the tiles are not counted; list them with tile_list")
