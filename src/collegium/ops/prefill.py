"""Both products of a large batch: rows put in expert order first, then tiles copied by the tensor memory accelerator.

The formulas, the order of every sum and so the bits of a row are those of ``grouped_gemm.py``.
Shape letters: R rows, E experts, P parts, N outputs of a part, K inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..errors import InputError
from ..types import ACTIVATION_KINDS, ActivationSpec
from .tiles import TileChoice

if TYPE_CHECKING:
    from torch import Tensor

    from .grouped_gemm import PackedMatrix, TileList
    from .tiles import Machine, TileProblem

__all__ = ["prefill_gemm", "prefill_tile"]

_BAND = 128  # weight rows a tile holds twice


def prefill_tile(problem: TileProblem, machine: Machine) -> TileChoice | None:
    """Return the tile of ``prefill_gemm`` for ``problem`` where that is the faster product, otherwise None.

    It needs a Hopper GPU, operands of one width, rows of a multiple of 16 bytes, and enough rows for each expert.
    """
    fits = (
        machine.specialises
        and not problem.decoded
        and problem.weight_bits == problem.x_bits
        and problem.k_in * problem.x_bits % 128 == 0
        and problem.block_k * problem.x_bits == 1024
        and problem.experts * problem.parts * problem.n_out < 1 << 31
    )
    if not fits or problem.rows < 32 * problem.experts:
        return None
    return TileChoice(block_n=_BAND, block_t=128, warps=4, stages=4)


def prefill_gemm(
    x: Tensor,
    packed: PackedMatrix,
    expert_offsets: Tensor,
    tiles: TileList,
    out: Tensor,
    *,
    x_scale: Tensor | None = None,
    activation: ActivationSpec | None = None,
    out_scale: Tensor | None = None,
    power: bool = False,
    round_first: bool = False,
    programs: int = 132,
) -> Tensor:
    """Write ``out [R, N]`` and return it; see ``grouped_gemm_reference`` for what stands in it.

    x: ``[R, K]`` of the operand dtype in expert order. x_scale: float32 ``[R, ceil(K / 128)]`` or ``[R, 1]`` for E4M3
    rows. out_scale: float32 ``[R, ceil(N / 128)]``; with it ``out`` takes E4M3 codes, each group's scale a power of two
    if ``power``, of results rounded to bfloat16 if ``round_first``. programs: how many share the tiles. Rows from
    ``expert_offsets[E]`` on are not written. Raises InputError for rows no tensor descriptor can describe.
    """
    experts, parts, n_out, k_in = packed.shape
    for name, rows in (("x", x), ("weights", packed.values)):
        if rows.stride(-2) * rows.element_size() % 16 or rows.stride(-1) != 1 or rows.data_ptr() % 16:
            raise InputError(
                f"prefill_gemm: {name} has strides {rows.stride()} of {rows.dtype} at {rows.data_ptr():#x}; rows must "
                "be dense and start at multiples of 16 bytes; use grouped_gemm"
            )
    from triton.tools.tensor_descriptor import TensorDescriptor

    from ..kernels.prefill import prefill_kernel

    spec = activation or ActivationSpec()
    tile = tiles.tile
    block = packed.block_k
    wide = packed.values.stride(-2)
    n_tiles = -(-n_out // (_BAND if parts == 2 else 2 * _BAND))
    spare = tiles.row  # stands where a pointer is not used
    launch: Any = prefill_kernel
    launch[(min(programs, tiles.count * n_tiles),)](
        TensorDescriptor(x, [x.shape[0], k_in], [x.stride(0), 1], [tile.block_t, block]),
        TensorDescriptor(packed.values, [experts * parts * n_out, k_in], [wide, 1], [_BAND, block]),
        spare if x_scale is None else x_scale,
        spare if packed.scale is None else packed.scale,
        spare if packed.row_scale is None else packed.row_scale,
        spare if packed.bias is None else packed.bias,
        out,
        spare if out_scale is None else out_scale,
        expert_offsets,
        tiles.expert,
        tiles.row,
        tiles.used,
        n_out,
        1 if packed.scale is None else packed.scale.shape[2],
        float(spec.limit or 0.0),
        float(spec.alpha),
        float(spec.gate_bound),
        float(spec.up_bound),
        SCALE=packed.scale is not None,
        X_SCALE=0 if x_scale is None else 1 + (x_scale.shape[1] == 1),
        ROW_SCALE=packed.row_scale is not None,
        BIAS=packed.bias is not None,
        PARTS=parts,
        KIND=-1 if activation is None else ACTIVATION_KINDS.index(activation.kind),
        HAS_LIMIT=activation is not None and activation.limit is not None,
        CODES=0 if out_scale is None else 1 + power,
        ROUND=round_first,
        K_BLOCKS=packed.k_blocks,
        BLOCK_T=tile.block_t,
        BLOCK_K=block,
        GROUP_T=tile.group_t,
        STAGES=tile.stages,
        SPECIALIZE=tile.warps == 4,
        ASM=x.is_cuda,
        num_warps=tile.warps,
    )
    return out
