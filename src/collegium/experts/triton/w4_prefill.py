"""One product of a large batch on Hopper, MXFP4 weights and E4M3 rows: the kernel in CUDA, ``kernels/w4_prefill.cu``.

The formulas, the order of every sum and so the bits of a row are those of ``kernels/w4a8.py``.
Shape letters: R rows, E experts, P parts, N outputs of a part, K inputs.
"""

import ctypes
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ...errors import InputError
from ...kernels.enums import FAST_MATH
from ...runtime.nvrtc import Boxes, CudaKernel, Elements, start
from ...types import ActivationSpec
from . import prefill
from .grouped import TileList, activation_bounds, activation_kind
from .layout import Words
from .matrix import PackedMatrix
from .tiles.choice import FOUR_BIT_TOKENS, FOUR_BIT_TOKENS_SCALED

__all__ = ["KERNEL", "PARTS", "source_of", "w4_prefill_gemm"]

_TOKEN_STEP = 16  # between widths of tiles
_ROW_TILE = 64
_BLOCK_TILES = 4  # row tiles of a block of threads
_SHARED_BYTES = 227 * 1024  # of a block
_THREADS = 384  # of a block
_DTYPES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}  # as in w4_prefill.cu
PARTS = ("sm90.cu", "activation.cuh", "w4_decode.cuh", "w4_pipeline.cuh", "w4_epilogue.cuh", "w4_prefill.cu")


def w4_prefill_gemm(
    x: Tensor,
    packed: PackedMatrix,
    expert_offsets: Tensor,
    tiles: TileList,
    out: Tensor,
    *,
    x_scale: Tensor | None,
    activation: ActivationSpec | None = None,
) -> Tensor:
    """Write ``out [R, N]`` and return it; see ``grouped_gemm`` for its contents.

    x: E4M3 ``[R, K]`` in expert order, columns REORDERED and padded to whole K blocks. x_scale: float32 ``[R, 1]``, or
    ``[R, k_blocks]`` as ``transpose_scales`` returns it. Rows from ``expert_offsets[E]`` on are not written. With
    ``tiles.row_offsets`` rows go to those offsets. Raises InputError for rows that no tensor map can describe.
    """
    layout = packed.layout
    assert isinstance(layout, Words)
    assert x_scale is not None
    if tiles.used is None:
        raise InputError("w4_prefill_gemm: the tiles are not counted; list them with tile_list")
    if x_scale.shape[1] not in (1, layout.k_blocks) or (x_scale.shape[1] > 1 and x_scale.stride(0) != 1):
        raise InputError(
            f"w4_prefill_gemm: x_scale is {tuple(x_scale.shape)} with strides {x_scale.stride()}; allowed: one column, "
            f"or {layout.k_blocks} transposed ones; take transpose_scales"
        )
    if x.data_ptr() % 16 or not x.is_contiguous() or x.shape[1] != layout.x_columns:
        raise InputError(
            f"w4_prefill_gemm: x is {tuple(x.shape)} with strides {x.stride()} at {x.data_ptr():#x}; these weights "
            f"need contiguous [rows, {layout.x_columns}] at a multiple of 16 bytes; use grouped_gemm"
        )
    values, scale, row_scale, bias = packed.pointers
    inputs = (x, values, scale, tiles.used[1:], x_scale, row_scale, bias)
    lists = (expert_offsets, tiles.expert, tiles.row, tiles.used)
    constants = _constants(packed, tiles, out, x_scale, activation)
    counts = (layout.shape[2], layout.row_tiles, layout.k_blocks, tiles.tile.group_t)
    sizes = _Sizes(*counts, 16, x_scale.stride(1), *activation_bounds(activation))
    # The kernel takes the tensor maps, the counters, then Parameters, Out, Lists and Sizes.
    start(
        KERNEL,
        constants,
        (tiles.tile.programs, _THREADS),
        (*inputs, out, tiles.row_offsets, *lists),
        (*_maps(x, layout, _max_width(constants["X_GROUPS"])), 1, 3, 2, 4, sizes),
    )
    return out


def source_of(constants: Mapping[str, int]) -> str:
    """Return the source of the kernel: its parts in order, and the instruction that multiplies each width."""
    folder = Path(__file__).parents[2] / "kernels"
    instructions, *parts = ((folder / name).read_text(encoding="utf-8") for name in PARTS)
    product = prefill.product_of(constants["OPERAND"])
    return instructions.replace("{ MULTIPLY }", product) + _products(_max_width(constants["X_GROUPS"])) + "".join(parts)


KERNEL = CudaKernel("w4_prefill", source_of, _SHARED_BYTES)


class _Sizes(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("n_out", "row_tiles", "k_blocks", "group_t", "sixteen", "scale_stride")),
        *((name, ctypes.c_float) for name in ("limit", "alpha", "gate_bound", "up_bound")),
    )


def _max_width(x_groups: int) -> int:
    """Return the tokens of the widest tile. x_groups: 1 where each K block of a token has a scale."""
    return FOUR_BIT_TOKENS_SCALED if x_groups else FOUR_BIT_TOKENS


def _products(max_width: int) -> str:
    """Return ``multiply_registers`` for each width: d = 64 weight rows in registers times N tokens, of 32 columns.

    tokens: rows of 128 bytes, swizzled. k: which 32 of their columns. added: whether to add the product to d.
    """
    return "\n" + "\n".join(map(_product, range(_TOKEN_STEP, max_width + 1, _TOKEN_STEP))) + "\n"


def _product(width: int) -> str:
    count = width // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    operand = ", ".join(f"%{count + i}" for i in range(4))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    instruction = f"wgmma.mma_async.sync.aligned.m64n{width}k32.f32.e4m3.e4m3"
    return (
        "__device__ __forceinline__ void multiply_registers(\n"
        f"    float (&d)[{count}], u32 a0, u32 a1, u32 a2, u32 a3, const u8* tokens, int k, bool added\n"
        ") {\n"
        f'    asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + 5}, 0;\\n"\n'
        f'        "{instruction} {{{sums}}}, {{{operand}}}, %{count + 4}, p, 1, 1; }}"\n'
        f'        : {outputs} : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(operand(tokens) + 2 * k), "r"((int)added));\n'
        "}\n"
    )


def _constants(
    packed: PackedMatrix, tiles: TileList, out: Tensor, x_scale: Tensor, activation: ActivationSpec | None
) -> dict[str, int]:
    """Return the compile-time constants; ``w4_prefill.cu`` documents them."""
    layout, kind = packed.layout, activation_kind(activation)
    n_out = layout.shape[2]
    aligned = out.dtype != torch.float32 and n_out % 8 == 0 and out.data_ptr() % 16 == 0
    return {
        "OPERAND": 0,
        "X_GROUPS": int(x_scale.shape[1] > 1),
        "OUT": _DTYPES[out.dtype],
        "PARTS": layout.shape[1],
        "KIND": kind % FAST_MATH if kind >= 0 else kind,
        "FAST": int(kind >= FAST_MATH),
        "HAS_LIMIT": int(activation is not None and activation.limit is not None),
        "PLACED": int(tiles.offset_unit(n_out) > 0),
        "BIAS": 0 if packed.bias is None else _DTYPES[packed.bias.dtype],
        "ALIGNED": int(aligned and tiles.offset_unit(n_out) != 1),
    }


def _maps(x: Tensor, layout: Words, max_width: int) -> tuple[tuple[Boxes, ...], Elements, Elements]:
    """Return the tensor maps of tokens, for tiles of each width, of codes, and of scales."""
    rows, columns = x.shape
    widths = range(_TOKEN_STEP, max_width + 1, _TOKEN_STEP)
    tokens = tuple(Boxes(x.dtype, rows, columns, columns, width // 2) for width in widths)
    experts, row_tiles, blocks = layout.shape[0], layout.row_tiles, layout.k_blocks
    # A row tile and K block has 4,096 bytes of codes; a side of a box has at most 256 elements, of eight bytes here.
    codes = Elements(8, (256, 2, blocks, row_tiles, experts), (256, 2, 1, _BLOCK_TILES, 1))
    scales = Elements(4, (_ROW_TILE, blocks, row_tiles, experts), (_ROW_TILE, 1, _BLOCK_TILES, 1))
    return tokens, codes, scales
