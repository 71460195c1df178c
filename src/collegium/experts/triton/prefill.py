"""One product of a large batch on Hopper, its rows in expert order: the kernel in CUDA, ``kernels/prefill.cu``.

The formulas, the order of every sum and so the bits of a row are those of ``grouped.py``.
Shape letters: R rows, E experts, P parts, N outputs of a part, K inputs.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...errors import InputError
from ...kernels.enums import FAST_MATH, GROUP_CODES, GROUP_SCALE, POWER_CODES, ROWS
from ...ops.activation import activation_bounds, activation_kind
from ...ops.columns import ZeroPointCorrection
from ...runtime.nvrtc import Boxes, CudaKernel, start
from ...types import ActivationSpec
from .grouped import TileList, row_scales
from .matrix import PackedMatrix

__all__ = ["KERNEL", "SOURCE_FILES", "CodeScales", "prefill_gemm", "product_of", "source_of"]

_STEP_BYTES = 128  # of a row in a step of the K loop
_M_TILE = 64  # rows of tokens that four warps multiply at once
SOURCE_FILES = ("sm90.cu", "activation.cuh", "prefill.cu")
_SHARED_BYTES = 227 * 1024  # of a block
_THREADS = 512  # of a block
_DTYPES = {torch.float8_e4m3fn: 0, torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}  # as in prefill.cu


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeScales:
    """Results are stored as E4M3 codes; scale: float32 ``[R, ceil(N / 128)]``, written with them.

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
    x_scale: Tensor | ZeroPointCorrection | None = None,
    activation: ActivationSpec | None = None,
    codes: CodeScales | None = None,
) -> Tensor:
    """Write ``out [R, N]`` and return it; see ``grouped_gemm`` for its contents.

    x: ``[R, K]`` of the operand dtype in expert order. x_scale: float32 ``[R, ceil(K / 128)]`` or ``[R, 1]`` for E4M3
    rows, with x from ``halves_and_sums`` for weights that rescale rows. codes: makes ``out`` take E4M3 codes. Rows from
    ``expert_offsets[E]`` on are not written. With ``tiles.row_offsets`` rows go to those offsets. Raises InputError for
    rows that no tensor map can describe.
    """
    layout, tile = packed.layout, tiles.tile
    experts, parts, n_out, k_in = layout.shape
    if tiles.used is None:
        raise InputError("prefill_gemm: the tiles are not counted; list them with tile_list")
    if x.shape[1] < k_in:
        raise InputError(f"prefill_gemm: x is {tuple(x.shape)}; these weights multiply rows of {k_in} columns")
    steps = -(-k_in * x.element_size() // _STEP_BYTES)
    if layout.scale_kind == GROUP_SCALE:
        steps = 2 * layout.k_blocks
    values, scale, row_scale, bias = packed.pointers
    boxes = (
        _boxes("x", x, x.shape[0], k_in, _M_TILE // 2),
        _boxes("weights", values, experts * parts * n_out, layout.operands * k_in, _M_TILE),
    )
    inputs = (x, values, tiles.used[1:], row_scales(x_scale, values)[0], scale, row_scale, bias)
    outputs = (out, tiles.row_offsets, codes and codes.scale)
    lists = (expert_offsets, tiles.expert, tiles.row, tiles.used)
    sizes = _Sizes(n_out, steps, layout.k_blocks, layout.scale_rows, tile.group_t, *activation_bounds(activation))
    # The kernel takes two tensor maps, the counters, then ScalesAndBias, Out, Lists and Sizes.
    start(
        KERNEL,
        _constants(x, packed, tiles, out, x_scale, activation, codes),
        (tile.programs, _THREADS),
        (*inputs, *outputs, *lists),
        (*boxes, 1, 4, 3, 4, sizes),
    )
    return out


def source_of(constants: Mapping[str, int]) -> str:
    """Return the source of the kernel: the instructions of sm_90a with the product of its operands, and the kernel."""
    folder = Path(__file__).parents[2] / "kernels"
    text = "".join((folder / name).read_text(encoding="utf-8") for name in SOURCE_FILES)
    return text.replace("{ MULTIPLY }", product_of(constants["OPERAND"]))


KERNEL = CudaKernel("prefill", source_of, _SHARED_BYTES)


class _Sizes(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("n_out", "steps", "k_blocks", "scale_rows", "group_t")),
        *((name, ctypes.c_float) for name in ("limit", "alpha", "gate_bound", "up_bound")),
    )


def product_of(operand: int) -> str:
    """Return the body of a product of 64 tokens and 128 weight rows, which no template can express."""
    kind, columns = {0: ("e4m3", 32), 1: ("bf16", 16), 2: ("f16", 16)}[operand]
    sums = ", ".join(f"%{i}" for i in range(64))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(64))
    transposed = ", 0, 0" if operand else ""  # operands of 16 bits may be transposed
    instruction = f"wgmma.mma_async.sync.aligned.m64n128k{columns}.f32.{kind}.{kind}"
    return (
        '{ asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0;\\n"'
        f'"{instruction} {{{sums}}}, %64, %65, p, 1, 1{transposed}; }}"'
        f' : {outputs} : "l"(x), "l"(w), "r"((int)added)); }}'
    )


def _constants(
    x: Tensor,
    packed: PackedMatrix,
    tiles: TileList,
    out: Tensor,
    x_scale: Tensor | ZeroPointCorrection | None,
    activation: ActivationSpec | None,
    codes: CodeScales | None,
) -> dict[str, int]:
    """Return the compile-time constants; ``prefill.cu`` documents them."""
    layout, kind = packed.layout, activation_kind(activation)
    return {
        "OPERAND": _DTYPES[x.dtype],
        "OUT": 1 if codes is not None else _DTYPES[out.dtype],
        "SCALE": layout.scale_kind,
        "TERMS": layout.operands,
        "X_SCALE": _x_scale_layout(x_scale, packed),
        "ROW_SCALE": int(packed.row_scale is not None and layout.operands == 1),
        "PROJECTIONS": layout.shape[1],
        "ACTIVATION": kind % FAST_MATH if kind >= 0 else kind,
        "FAST": int(kind >= FAST_MATH),
        "HAS_LIMIT": int(activation is not None and activation.limit is not None),
        "CODES": _stored_codes(codes),
        "ROUND": int(codes is not None and codes.rounded),
        "HAS_ROW_OFFSETS": int(tiles.offset_unit(layout.shape[2]) > 0),
        "BIAS": 0 if packed.bias is None else _DTYPES[packed.bias.dtype],
        "ALIGNED": int(_stores_vectors(out, tiles, layout.shape[2], codes=codes is not None)),
    }


def _x_scale_layout(x_scale: Tensor | ZeroPointCorrection | None, packed: PackedMatrix) -> int:
    """Return the kernel's number of how rows are scaled: not, by group, or by row."""
    if x_scale is None:
        return 0
    return 2 if row_scales(x_scale, packed.values)[0].shape[1] == 1 else 1


def _stored_codes(codes: CodeScales | None) -> int:
    """Return how results are stored (``kernels/enums.py``)."""
    if codes is None:
        return ROWS
    return POWER_CODES if codes.power else GROUP_CODES


def _stores_vectors(out: Tensor, tiles: TileList, n_out: int, *, codes: bool) -> bool:
    """Return whether every row of results begins at a multiple of 16 bytes, so that stores of 16 bytes work."""
    if out.data_ptr() % 16:
        return False
    if codes:
        return n_out % 16 == 0
    return n_out % 8 == 0 and out.dtype != torch.float32 and tiles.offset_unit(n_out) != 1


def _boxes(name: str, rows: Tensor, height: int, columns: int, box: int) -> Boxes:
    step = rows.stride(-2) * rows.element_size()
    if step % 16 or rows.stride(-1) != 1 or rows.data_ptr() % 16:
        raise InputError(
            f"prefill_gemm: {name} has strides {rows.stride()} of {rows.dtype} at {rows.data_ptr():#x}; rows must "
            "be dense and start at multiples of 16 bytes; use grouped_gemm"
        )
    return Boxes(rows.dtype, height, columns, step, box)
