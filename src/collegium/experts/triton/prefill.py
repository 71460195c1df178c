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
from ...ops.columns import ZeroPointCorrection
from ...runtime.nvrtc import Boxes, CudaKernel, start
from ...types import ActivationSpec
from .grouped import TileList, bounds_of, kind_of, scales_of
from .matrix import PackedMatrix

__all__ = ["KERNEL", "CodeScales", "prefill_gemm", "source_of"]

# Bytes of a row in a step of the K loop, rows of tokens that four warps multiply at once, what a block has.
_STEP, _UNIT, _SHARED, _THREADS = 128, 64, 227 * 1024, 512
_NUMBERS = {torch.float8_e4m3fn: 0, torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}


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
    x_scale: Tensor | ZeroPointCorrection | None = None,
    activation: ActivationSpec | None = None,
    codes: CodeScales | None = None,
) -> Tensor:
    """Write ``out [R, N]`` and return it; see ``grouped_gemm`` for its contents.

    x: ``[R, K]`` of the operand dtype in expert order. x_scale: float32 ``[R, ceil(K / 128)]`` or ``[R, 1]`` for E4M3
    rows, with x from ``halves_and_sums`` for weights that rescale rows. codes: makes ``out`` take E4M3 codes. Rows from
    ``expert_offsets[E]`` on are not written. With ``tiles.places`` rows go where those say. Raises InputError for rows
    no tensor map can describe.
    """
    layout, tile = packed.layout, tiles.tile
    experts, parts, n_out, k_in = layout.shape
    if tiles.used is None:
        raise InputError("prefill_gemm: the tiles are not counted; list them with tile_list")
    steps = 2 * layout.k_blocks if layout.scale_kind == GROUP_SCALE else -(-k_in * x.element_size() // _STEP)
    values, scale, row_scale, bias = packed.pointers
    boxes = (
        _boxes("x", x, x.shape[0], k_in, _UNIT // 2),
        _boxes("weights", values, experts * parts * n_out, layout.operands * k_in, _UNIT),
    )
    read = (x, values, tiles.used[1:], scales_of(x_scale, values)[0], scale, row_scale, bias)
    others = (out, tiles.places, codes and codes.scale, expert_offsets, tiles.expert, tiles.row, tiles.used)
    sizes = _Sizes(n_out, steps, layout.k_blocks, layout.scale_rows, tile.group_t, *bounds_of(activation))
    # The kernel takes two tensor maps, the counters, then Beside, Out, Lists and Sizes.
    start(
        KERNEL,
        _constants(x, packed, tiles, out, x_scale, activation, codes),
        (tile.programs, _THREADS),
        (*read, *others),
        (*boxes, 1, 4, 3, 4, sizes),
    )
    return out


def source_of(constants: Mapping[str, int]) -> str:
    """Return the kernel's text: the instructions of sm_90a, with the product of its operands, and what uses them."""
    folder = Path(__file__).parents[2] / "kernels"
    text = "".join((folder / name).read_text(encoding="utf-8") for name in ("sm90.cu", "prefill.cu"))
    return text.replace("{ MULTIPLY }", _product_of(constants["OPERAND"]))


KERNEL = CudaKernel("prefill", source_of, _SHARED)


class _Sizes(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("n_out", "steps", "k_blocks", "scale_rows", "group_t")),
        *((name, ctypes.c_float) for name in ("limit", "alpha", "gate_bound", "up_bound")),
    )


def _product_of(operand: int) -> str:
    """Return the body of a product of 64 tokens and 128 weight rows, which no template can write."""
    kind, columns = {0: ("e4m3", 32), 1: ("bf16", 16), 2: ("f16", 16)}[operand]
    outputs, names = (", ".join(each.format(i) for i in range(64)) for each in ('"+f"(d[{}])', "%{}"))
    turned = ", 0, 0" if operand else ""
    return (
        '{ asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0;\\n"'
        f'"wgmma.mma_async.sync.aligned.m64n128k{columns}.f32.{kind}.{kind} {{{names}}}, %64, %65, p, 1, 1{turned}; }}"'
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
    """Return what the kernel is compiled for; ``prefill.cu`` says what each number means."""
    layout, kind, n_out = packed.layout, kind_of(activation), packed.layout.shape[2]
    placed = tiles.placed(n_out)
    scale = scales_of(x_scale, packed.values)[0]
    wide = n_out % 16 == 0 if codes is not None else n_out % 8 == 0 and out.dtype != torch.float32 and placed != 1
    return {
        "OPERAND": _NUMBERS[x.dtype],
        "OUT": 1 if codes is not None else _NUMBERS[out.dtype],
        "SCALE": layout.scale_kind,
        "TERMS": layout.operands,
        "X_SCALE": 0 if x_scale is None else 2 if scale.shape[1] == 1 else 1,
        "ROW_SCALE": int(packed.row_scale is not None and layout.operands == 1),
        "PARTS": layout.shape[1],
        "KIND": kind % FAST_MATH if kind >= 0 else kind,
        "FAST": int(kind >= FAST_MATH),
        "HAS_LIMIT": int(activation is not None and activation.limit is not None),
        "CODES": ROWS if codes is None else POWER_CODES if codes.power else GROUP_CODES,
        "ROUND": int(codes is not None and codes.rounded),
        "PLACED": int(placed > 0),
        "BIAS": 0 if packed.bias is None else _NUMBERS[packed.bias.dtype],
        "ALIGNED": int(wide and out.data_ptr() % 16 == 0),
    }


def _boxes(name: str, rows: Tensor, height: int, columns: int, box: int) -> Boxes:
    step = rows.stride(-2) * rows.element_size()
    if step % 16 or rows.stride(-1) != 1 or rows.data_ptr() % 16:
        raise InputError(
            f"prefill_gemm: {name} has strides {rows.stride()} of {rows.dtype} at {rows.data_ptr():#x}; rows must "
            "be dense and start at multiples of 16 bytes; use grouped_gemm"
        )
    return Boxes(rows.dtype, height, columns, step, box)
