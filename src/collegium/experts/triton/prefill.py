"""Both products of a large batch: rows put in expert order first, then tiles copied by the tensor memory accelerator.

The formulas, the order of every sum and so the bits of a row are those of ``grouped_gemm.py``.
Shape letters: R rows, E experts, P parts, N outputs of a part, K inputs.
"""

from __future__ import annotations

from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ...errors import InputError
from ...ops.operand import operand
from ...ops.quantize import activation_format
from ...runtime.launch import launch
from ...runtime.workspace import empty
from ...types import ACTIVATION_KINDS, ActivationSpec
from .tiles import TileChoice

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ...runtime.machine import Machine
    from ...types import ContiguousBatch, Problem
    from .grouped import TileList
    from .matrix import PackedMatrix
    from .packed import PackedExperts
    from .tiles import TileProblem

__all__ = ["CodeScales", "prefill_bytes", "prefill_experts", "prefill_gemm", "prefill_tile"]

_BAND = 128  # weight rows a tile holds twice
_ROWS = 56  # of an expert, from which on this product is the faster one
_GROUP = 4  # token tiles that share a pass over the weights


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeScales:
    """Results leave as E4M3 codes; scale: float32 ``[R, ceil(N / 128)]``, written beside them.

    power: scales are powers of two. rounded: results are rounded to bfloat16 before they are quantised.
    """

    scale: Tensor
    power: bool
    rounded: bool


def prefill_tile(problem: TileProblem, machine: Machine) -> TileChoice | None:
    """Return the tile of ``prefill_gemm`` for ``problem`` where that is the faster product, otherwise None.

    It needs a Hopper GPU, operands of one width, rows of a multiple of 16 bytes, and enough rows for each expert.
    """
    fits = (
        machine.copies
        and not problem.decoded
        and problem.weight_bits == problem.x_bits
        and problem.k_in * problem.x_bits % 128 == 0
        and problem.block_k * problem.x_bits == 1024
        and problem.experts * problem.parts * problem.n_out < 1 << 31
    )
    if not fits or problem.rows < _ROWS * problem.experts:
        return None
    # With four warps the compiler gives copies and products warps of their own; with eight they take turns.
    warps, stages = (4, 4) if machine.specialises else (8, 3)
    programs = _coprime(machine.sms)
    return TileChoice(block_n=_BAND, block_t=128, warps=warps, stages=stages, group_t=_GROUP, programs=programs)


def _coprime(most: int) -> int:
    """Return the most programs, up to ``most``, that have neither 2 nor 3 as a factor.

    Of n programs each takes every n-th tile. An expert's rows often fill two or three tiles, the last one in part, so
    it is done sooner. A program that met it every time would run ahead, and the weights it read would have left the L2
    cache when its neighbour comes to them.
    """
    return next(count for count in range(most, 0, -1) if count % 2 and count % 3)


def prefill_gemm(
    x: Tensor,
    packed: PackedMatrix,
    expert_offsets: Tensor,
    tiles: TileList,
    out: Tensor,
    *,
    x_scale: Tensor | None = None,
    activation: ActivationSpec | None = None,
    codes: CodeScales | None = None,
) -> Tensor:
    """Write ``out [R, N]`` and return it; see ``grouped_gemm_reference`` for what stands in it.

    x: ``[R, K]`` of the operand dtype in expert order. x_scale: float32 ``[R, ceil(K / 128)]`` or ``[R, 1]`` for
    E4M3 rows. codes: makes ``out`` take E4M3 codes. Rows from ``expert_offsets[E]`` on are not written. Raises
    InputError for rows no tensor descriptor can describe.
    """
    experts, parts, n_out, k_in = packed.layout.shape
    _check(x, packed, tiles)
    from ...kernels.prefill import prefill_kernel

    spec = activation or ActivationSpec()
    tile = tiles.tile
    n_tiles = -(-n_out // (_BAND if parts == 2 else 2 * _BAND))
    spare = packed.values  # stands where a pointer is not used, of one dtype and alignment in every batch
    args = (
        x,
        packed.values,
        spare if x_scale is None else x_scale,
        spare if packed.scale is None else packed.scale,
        spare if packed.row_scale is None else packed.row_scale,
        spare if packed.bias is None else packed.bias,
        out,
        spare if codes is None else codes.scale,
        expert_offsets,
        tiles.expert,
        tiles.row,
        tiles.row,
        tiles.used,
        x.shape[0],
        n_out,
        k_in,
        x.stride(0),
        packed.values.stride(-2),
        experts * parts * n_out,
        1 if packed.scale is None else packed.scale.shape[2],
        *(float(v or 0.0) for v in (spec.limit, spec.alpha, spec.gate_bound, spec.up_bound)),
    )
    constants = _constants(packed, tile, activation, codes) | {
        # Float32 results pass through shared memory that one stage less leaves free.
        "STAGES": min(tile.stages, 3) if out.dtype == torch.float32 else tile.stages,
        "X_SCALE": 0 if x_scale is None else 1 + (x_scale.shape[1] == 1),
        "ASM": x.is_cuda,
    }
    grid = (min(tile.programs, tiles.count * n_tiles),)
    _with_scratch(x.device, partial(launch, prefill_kernel, grid, args, constants, num_warps=tile.warps))
    return out


def prefill_experts(batch: ContiguousBatch, packed: PackedExperts, tiles: TileList, out: Tensor) -> Tensor:
    """Write both products of every row to ``out [R, H]`` and return it, as ``run_experts`` does."""
    name, x, expert_offsets = packed.activations, batch.x, batch.expert_offsets
    wide = packed.gate_up.layout.shape[2]
    rows, x_scale = operand(x, name, source=batch.source, weights=batch.input_weights)
    narrow = name is None or x.dtype == torch.bfloat16
    codes, shape, dtype = None, (out.shape[0], wide), x.dtype if narrow else torch.float32
    if name is not None and activation_format(name).group == _BAND:
        scale, dtype = empty((out.shape[0], -(-wide // _BAND)), torch.float32, x.device), torch.float8_e4m3fn
        codes = CodeScales(scale=scale, power=name == "fp8_group128_pow2", rounded=narrow)
    middle = empty(shape, dtype, x.device)
    prefill_gemm(
        rows,
        packed.gate_up,
        expert_offsets,
        tiles,
        middle,
        x_scale=x_scale,
        activation=packed.activation,
        codes=codes,
    )
    middle, scale = operand(middle, name) if codes is None else (middle, codes.scale)
    return prefill_gemm(middle, packed.down, expert_offsets, tiles, out, x_scale=scale)


def prefill_bytes(problem: Problem, *, codes: bool) -> int:
    """Return the bytes ``prefill_experts`` takes beside those of the small-batch products: rows in expert order."""
    spec, capability = problem.spec, problem.device.capability
    rows, hidden = problem.limits.max_tokens * spec.routing.top_k, spec.expert_hidden_size
    bits = 8 if codes else 16
    fits = hidden * bits % 128 == 0 == spec.intermediate_size * bits % 128 and rows >= _ROWS * spec.num_experts
    if not fits or capability != (9, 0) or not spec.weight_format.startswith("fp8" if codes else ("bf16", "fp16")):
        return 0
    return rows * (hidden + 4 * -(-hidden // _BAND)) if codes else 2 * rows * hidden


def _with_scratch(device: torch.device, start: Callable[[], None]) -> None:
    """Start a kernel that makes descriptors; their memory is the pass's, and Triton's own setting stays as it was."""
    from ...kernels.prefill import set_allocator

    def allocate(size: int, alignment: int, stream: int | None) -> Tensor:
        return empty((size,), torch.int8, device)

    context = copy_context()
    setting: Any = set_allocator
    context.run(setting, allocate)
    context.run(start)


def _constants(
    packed: PackedMatrix, tile: TileChoice, activation: ActivationSpec | None, codes: CodeScales | None
) -> dict[str, Any]:
    return {
        "SCALE": packed.scale is not None,
        "ROW_SCALE": packed.row_scale is not None,
        "BIAS": packed.bias is not None,
        "PARTS": packed.layout.shape[1],
        "KIND": -1 if activation is None else ACTIVATION_KINDS.index(activation.kind),
        "HAS_LIMIT": activation is not None and activation.limit is not None,
        "CODES": 0 if codes is None else 1 + codes.power,
        "ROUND": codes is not None and codes.rounded,
        "K_BLOCKS": packed.layout.k_blocks,
        "BLOCK_T": tile.block_t,
        "BLOCK_K": packed.layout.block_k,
        "GROUP_T": tile.group_t,
        "SPECIALIZE": tile.warps == 4,
    }


def _check(x: Tensor, packed: PackedMatrix, tiles: TileList) -> None:
    for name, rows in (("x", x), ("weights", packed.values)):
        if rows.stride(-2) * rows.element_size() % 16 or rows.stride(-1) != 1 or rows.data_ptr() % 16:
            raise InputError(
                f"prefill_gemm: {name} has strides {rows.stride()} of {rows.dtype} at {rows.data_ptr():#x}; rows must "
                "be dense and start at multiples of 16 bytes; use grouped_gemm"
            )
    if tiles.used is None:
        raise InputError("prefill_gemm: the tiles are not counted; list them with tile_list")
