"""Activation and FP8 quantisation in one kernel, with E8M0 scales as DeepGEMM takes them on sm_100.

Shape letters: R rows, P parts (2: gate then up; 1: up alone), I columns of a part, G groups of columns in a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ..errors import InputError
from ..kernels.arguments import CodeFormat, Projections
from ..runtime.launch import launch, on_device, overlaps, power_at_least, row_contiguous
from .activation import activate, activation_bounds, activation_kind
from .quantize import activation_format
from .rows import warps_of

if TYPE_CHECKING:
    from torch import Tensor

    from ..types import ActivationSpec

__all__ = ["PackedRows", "quantize_words"]

_FORMATS = ("fp8_group128_e8m0", "mxfp8")
_CAPABILITY = (8, 9)  # of the first GPUs that convert to FP8
_BLOCK = 4096  # elements of a program


class PackedRows(NamedTuple):
    """codes: ``[R, I]`` float8_e4m3fn. words: ``[R, ceil(G / 4)]`` int32, see ``QuantizedRows.packed_scales``."""

    codes: Tensor
    words: Tensor


def quantize_words(x: Tensor, activation: ActivationSpec | None = None, name: str = "fp8_group128_e8m0") -> PackedRows:
    """Quantise rows, or the activation of rows, to E4M3 codes with E8M0 scales that are packed four in a word.

    x: ``[R, I]`` floating without activation; otherwise ``[R, P * I]``, the gate in the first half, as a product of
    stacked gate and up writes it. name: ``fp8_group128_e8m0`` (a scale for 128 columns) or ``mxfp8`` (for 32). On a GPU
    one kernel does all of it; the bits of codes and words are those of ``quantize_rows`` for the same float32 numbers,
    and an activation is within a few roundings of ``activate``. Raises InputError for other shapes, dtypes and formats.
    """
    form = activation_format(name)
    parts = 2 if activation is not None and activation.gated else 1
    if name not in _FORMATS:
        raise InputError(f"quantize_words: format {name} has no E8M0 scales; allowed: {', '.join(_FORMATS)}")
    if x.dim() != 2 or not x.is_floating_point() or x.shape[1] < parts or x.shape[1] % parts:
        raise InputError(
            f"quantize_words: x is {tuple(x.shape)} {x.dtype}; allowed: floating [R, {parts} * I], I at least 1"
        )
    if not on_device(x, _CAPABILITY):
        rows = x if activation is None else activate(x.unflatten(1, (parts, -1)), activation)
        quantized = form.quantize(rows)
        return PackedRows(quantized.codes, quantized.packed_scales())
    return _launch(row_contiguous(x), activation, parts, form.group)


def _launch(x: Tensor, activation: ActivationSpec | None, parts: int, group: int) -> PackedRows:
    from ..kernels.quantize import activated_words_kernel

    rows, columns = x.shape[0], x.shape[1] // parts
    groups = -(-columns // group)
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=x.device)
    stride = -(-rows // 4) * 4
    words = torch.zeros(-(-groups // 4), stride, dtype=torch.int32, device=x.device)
    block_c = min(1024, power_at_least(columns, 4 * group))
    block_r = _BLOCK // block_c if rows >= _BLOCK else 1
    bounds, kind = activation_bounds(activation), activation_kind(activation)
    has_limit = activation is not None and activation.limit is not None
    args = (x, codes, words, bounds, rows, columns, x.stride(0), columns * (parts - 1), groups, stride)
    constants = {
        "PROJ": Projections(count=parts, activation=kind, has_limit=has_limit),
        "FORMAT": CodeFormat(
            group=group, power_of_two=True, e8m0=True, reorder=False, software_rounding=not x.is_cuda, words=True
        ),
        "BLOCK_R": block_r,
        "BLOCK_C": block_c,
        "PDL": overlaps(x),
    }
    if rows:
        grid = (-(-rows // block_r), -(-columns // block_c))
        launch(activated_words_kernel, grid, args, constants, num_warps=warps_of(block_r * block_c))
    return PackedRows(codes, words.t()[:rows])
