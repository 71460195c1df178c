"""One product of a large batch on Hopper with four-bit weights: the kernel in CUDA, ``kernels/w4_prefill.cu``.

The formulas, the order of every sum and so the bits of a row are those of ``kernels/w4a8.py`` (E4M3 rows) and
``kernels/grouped_gemm.py`` (bfloat16 rows). Shape letters: R rows, E experts, P parts, N outputs of a part, K inputs,
B K blocks.
"""

import ctypes
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ...errors import InputError
from ...kernels.enums import E2M1_E4M3, FAST_MATH
from ...ops.activation import activation_bounds, activation_kind
from ...runtime.nvrtc import Boxes, CudaKernel, Elements, start
from ...types import ActivationSpec
from . import prefill
from .grouped import TileList
from .layout import Lanes, Layout, Words
from .matrix import PackedMatrix
from .tiles.choice import FOUR_BIT_TOKENS, FOUR_BIT_TOKENS_SPLIT

__all__ = ["KERNEL", "parts_of", "source_of", "w4_prefill_gemm"]

_TOKEN_STEP = 16  # between widths of tiles
_ROW_TILE = 64
_BLOCK_TILES = 4  # row tiles of a block of threads
_SHARED_BYTES = 227 * 1024  # of a block
_THREADS = 384  # of a block
_OPERANDS = {torch.float8_e4m3fn: 0, torch.bfloat16: 1}  # as in w4_prefill.cu
_DTYPES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}  # as in w4_prefill.cu
_DECODERS = ("w4_decode.cuh", "w4_decode_bf16.cuh")  # by operand


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

    x: ``[R, K]`` in expert order: bfloat16, or E4M3 with columns REORDERED and padded to whole K blocks. x_scale: of
    E4M3 rows, otherwise None; float32 ``[R, 1]``, or ``[R, k_blocks]`` as ``transpose_scales`` returns it. Rows from
    ``expert_offsets[E]`` on are not written. With ``tiles.row_offsets`` rows go to those offsets. Raises InputError for
    rows that no tensor map can describe.
    """
    layout = packed.layout
    assert isinstance(layout, Words) or layout.in_registers
    assert (x_scale is not None) == layout.scaled_rows
    if tiles.used is None:
        raise InputError("w4_prefill_gemm: the tiles are not counted; list them with tile_list")
    if x_scale is not None and (
        x_scale.shape[1] not in (1, layout.k_blocks) or (x_scale.shape[1] > 1 and x_scale.stride(0) != 1)
    ):
        raise InputError(
            f"w4_prefill_gemm: x_scale is {tuple(x_scale.shape)} with strides {x_scale.stride()}; allowed: one column, "
            f"or {layout.k_blocks} transposed ones; take transpose_scales"
        )
    step = x.stride(0) * x.element_size()
    if x.data_ptr() % 16 or step % 16 or x.stride(1) != 1 or x.shape[1] != layout.x_columns:
        raise InputError(
            f"w4_prefill_gemm: x is {tuple(x.shape)} with strides {x.stride()} at {x.data_ptr():#x}; these weights "
            f"need dense rows [rows, {layout.x_columns}] at multiples of 16 bytes; use grouped_gemm"
        )
    constants = _constants(x.dtype, packed, tiles, out, x_scale, activation)
    width, most = tiles.tile.block_t, _most_tokens(constants)
    if width % _TOKEN_STEP or width > most:
        raise InputError(
            f"w4_prefill_gemm: tiles of {width} tokens; allowed with these weights and scales: multiples of "
            f"{_TOKEN_STEP} up to {most}; list the tiles with such a block_t"
        )
    values, scale, row_scale, bias = packed.pointers
    inputs = (x, values, scale, tiles.used[1:], x_scale, row_scale, bias)
    lists = (expert_offsets, tiles.expert, tiles.row, tiles.used)
    counts = (layout.shape[2], _row_tiles(layout), layout.k_blocks, tiles.tile.group_t)
    sizes = _Sizes(*counts, 16, x_scale.stride(1) if x_scale is not None else 0, *activation_bounds(activation))
    # The kernel takes the tensor maps, the counters, then Parameters, Out, Lists and Sizes.
    start(
        KERNEL,
        constants,
        (tiles.tile.programs, _THREADS),
        (*inputs, out, tiles.row_offsets, *lists),
        (*_maps(x, layout, width), 1, 3, 2, 4, sizes),
    )
    return out


def parts_of(operand: int) -> tuple[str, ...]:
    """Return the names of the parts of the kernel for ``OPERAND``, in order."""
    decoder = _DECODERS[operand]
    return ("sm90.cu", "activation.cuh", decoder, "w4_pipeline.cuh", "w4_epilogue.cuh", "w4_prefill.cu")


def source_of(constants: Mapping[str, int]) -> str:
    """Return the source of the kernel: its parts in order, and the instruction that multiplies each width."""
    folder = Path(__file__).parents[2] / "kernels"
    names = parts_of(constants["OPERAND"])
    instructions, *parts = ((folder / name).read_text(encoding="utf-8") for name in names)
    product = prefill.product_of(constants["OPERAND"])
    products = _products(constants["OPERAND"], constants["MAX_TOKENS"])
    return instructions.replace("{ MULTIPLY }", product) + products + "".join(parts)


KERNEL = CudaKernel("w4_prefill", source_of, _SHARED_BYTES)


class _Sizes(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("n_out", "row_tiles", "k_blocks", "group_t", "sixteen", "scale_stride")),
        *((name, ctypes.c_float) for name in ("limit", "alpha", "gate_bound", "up_bound")),
    )


def _most_tokens(constants: Mapping[str, int]) -> int:
    """Return the tokens of the widest tile that registers have room for."""
    split_scaled = constants["X_GROUPS"] and constants["WEIGHT"] == E2M1_E4M3
    return FOUR_BIT_TOKENS_SPLIT if split_scaled else FOUR_BIT_TOKENS


def _products(operand: int, max_width: int) -> str:
    """Return ``multiply_registers`` for each width: d = 64 weight rows in registers times N tokens, of 32 bytes.

    tokens: rows of 128 bytes, swizzled. k: which 32 of them. added: whether to add the product to d.
    """
    widths = range(8, max_width + 1, 8)  # those of tiles, and of pieces of tiles
    return "\n" + "\n".join(_product(operand, width) for width in widths) + "\n"


def _product(operand: int, width: int) -> str:
    count = width // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    weights = ", ".join(f"%{count + i}" for i in range(4))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    kind, columns, transposed = (("e4m3", 32, ""), ("bf16", 16, ", 0"))[operand]
    instruction = f"wgmma.mma_async.sync.aligned.m64n{width}k{columns}.f32.{kind}.{kind}"
    return (
        "__device__ __forceinline__ void multiply_registers(\n"
        f"    float (&d)[{count}], u32 a0, u32 a1, u32 a2, u32 a3, const u8* tokens, int k, bool added\n"
        ") {\n"
        f'    asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + 5}, 0;\\n"\n'
        f'        "{instruction} {{{sums}}}, {{{weights}}}, %{count + 4}, p, 1, 1{transposed}; }}"\n'
        f'        : {outputs} : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(operand(tokens) + 2 * k), "r"((int)added));\n'
        "}\n"
    )


def _constants(
    x_dtype: torch.dtype,
    packed: PackedMatrix,
    tiles: TileList,
    out: Tensor,
    x_scale: Tensor | None,
    activation: ActivationSpec | None,
) -> dict[str, int]:
    """Return the compile-time constants; ``w4_prefill.cu`` documents them."""
    layout, kind = packed.layout, activation_kind(activation)
    n_out = layout.shape[2]
    aligned = out.dtype != torch.float32 and n_out % 8 == 0 and out.data_ptr() % 16 == 0
    return {
        "MAX_TOKENS": tiles.tile.block_t,
        "OPERAND": _OPERANDS[x_dtype],
        "X_GROUPS": int(x_scale is not None and x_scale.shape[1] > 1),
        "WEIGHT": layout.weight,
        "SCALE": layout.scale_kind,
        "WORDS": layout.words,
        "OUT": _DTYPES[out.dtype],
        "PROJECTIONS": layout.shape[1],
        "ACTIVATION": kind % FAST_MATH if kind >= 0 else kind,
        "FAST": int(kind >= FAST_MATH),
        "HAS_LIMIT": int(activation is not None and activation.limit is not None),
        "HAS_ROW_OFFSETS": int(tiles.offset_unit(n_out) > 0),
        "BIAS": 0 if packed.bias is None else _DTYPES[packed.bias.dtype],
        "ALIGNED": int(aligned and tiles.offset_unit(n_out) != 1),
    }


def _row_tiles(layout: Layout) -> int:
    """Return the tiles of 64 weight rows of an expert, gate and up together."""
    return -(-layout.shape[1] * layout.shape[2] // _ROW_TILE)


def _maps(x: Tensor, layout: Layout, max_width: int) -> tuple[tuple[Boxes, ...], Elements, Elements]:
    """Return the tensor maps of tokens, for tiles of each width, of codes, and of scales."""
    rows, columns = x.shape
    step = x.stride(0) * x.element_size()
    widths = range(_TOKEN_STEP, max_width + 1, _TOKEN_STEP)
    tokens = tuple(Boxes(x.dtype, rows, columns, step, width // 2) for width in widths)
    if isinstance(layout, Words):
        return tokens, *_maps_of_words(layout)
    assert isinstance(layout, Lanes)
    return tokens, *_maps_of_lanes(layout)


def _maps_of_words(layout: Words) -> tuple[Elements, Elements]:
    """Return the tensor maps of codes and scales that are packed in row tiles."""
    experts, row_tiles, blocks = layout.shape[0], layout.row_tiles, layout.k_blocks
    # A row tile and K block has 4,096 bytes of codes; a side of a box has at most 256 elements, of eight bytes here.
    codes = Elements(8, (256, 2, blocks, row_tiles, experts), (256, 2, 1, _BLOCK_TILES, 1))
    scales = layout.words * _ROW_TILE
    return codes, Elements(4, (scales, blocks, row_tiles, experts), (scales, 1, _BLOCK_TILES, 1))


def _maps_of_lanes(layout: Lanes) -> tuple[Elements, Elements]:
    """Return the tensor maps of codes and scales ``[E, P, B, N, .]``, whose boxes have row tiles of all parts.

    A box takes eight rows of each part in turn. Dimensions of a map are five at most, so K blocks and experts are one:
    block b of expert e begins P B e + b blocks after the first, and part p B blocks after that.
    """
    experts, parts, n_out, _ = layout.shape
    blocks, eights = layout.k_blocks, n_out // 8
    box = _BLOCK_TILES * _ROW_TILE // 8 // parts  # of groups of eight rows
    matrices = (experts * parts - parts + 1) * blocks
    row = layout.block_k // 2  # bytes of codes
    codes = Elements(
        4,
        (row // 4, 8, parts, eights, matrices),
        (row // 4, 8, parts, box, 1),
        steps=(row, blocks * n_out * row, 8 * row, n_out * row),
        swizzle=row,
    )
    words = layout.words
    scales = Elements(
        4,
        (8, parts, eights, words, matrices),
        (8, parts, box, words, 1),
        steps=(4 * blocks * words * n_out, 32, 4 * n_out, 4 * words * n_out),
    )
    return codes, scales
