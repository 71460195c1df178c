"""Formats activations may take before a multiplication; every row is quantised by itself.

Shape letters: R rows, K columns, G groups of columns in a row.

Rules that all formats share. Arithmetic is float32 with one IEEE rounding per operation, in the written
order, so a kernel can match codes and scales bit for bit: ``codes = round(saturate(x * (1 / scale)))`` to
nearest, ties to even. Scales have a floor of a normal float32, so the multiplier ``1 / scale`` stays
finite and nothing depends on subnormals; all-zero groups get the floor and zero codes. A group with NaN or
infinity gets a NaN scale and zero codes, hence decodes to NaN throughout: visible, and contained in its group
(in its row for ``nvfp4``, whose global scale belongs to the row). A partial last group is a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from ..errors import InputError
from ..formats.codecs import E2M1_MAX, E4M3_MAX, SMALLEST_SCALE, e2m1_codes, e4m3_codes, pack_nibbles, unpack_nibbles
from ..runtime.launch import launch, on_device, overlaps, power_of_two
from ..runtime.workspace import empty

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "ACTIVATION_FORMATS",
    "AS_IS",
    "PADDED",
    "REORDERED",
    "ActivationFormat",
    "QuantizedRows",
    "activation_format",
    "cast_name",
    "quantize_on_device",
    "quantize_rows",
    "row_buffers",
]

_GLOBAL_FLOOR = 2.0**-117  # times the smallest E4M3 number, 2^-9, this is SMALLEST_SCALE
_NAN_BYTE = 255  # E8M0
_FEW_ROWS = 64  # below, a row is spread over more programs


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedRows:
    """Quantised activations of logical ``shape`` (R, K).

    codes: ``[R, K]`` in the format's dtype; ``nvfp4``: ``[R, ceil(K/2)]`` uint8, low nibble first, the high
        nibble of the last byte 0 when K is odd.
    scales: ``[R, G]`` multipliers of the codes: float32; uint8 E8M0 bytes for ``mxfp8``; float8_e4m3fn for
        ``nvfp4``; None where the format has none.
    global_scale: ``[R, 1]`` float32 for ``nvfp4``, else None.
    """

    codes: Tensor
    shape: tuple[int, int]
    scales: Tensor | None = None
    global_scale: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationFormat:
    """One activation format.

    bits: width of a code. group: columns that share a scale; 0: the whole row, or no scale at all.
    """

    name: str
    bits: int
    group: int = 0

    def quantize(self, x: Tensor) -> QuantizedRows:
        """Quantise ``x [R, K]`` (floating, K >= 1); raises ``InputError`` for another shape or dtype."""
        raise NotImplementedError

    def dequantize(self, rows: QuantizedRows) -> Tensor:
        """Return ``[R, K]`` float32: code times scale, rounded once."""
        raise NotImplementedError

    def round_trip(self, x: Tensor) -> Tensor:
        """Return what a multiplication sees of ``x [R, K]`` in this format, float32."""
        return self.dequantize(self.quantize(x))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cast(ActivationFormat):
    """A plain floating dtype: rounded to nearest even; float16 overflows to infinity as IEEE says."""

    dtype: torch.dtype

    def quantize(self, x: Tensor) -> QuantizedRows:
        _check(self.name, x)
        return QuantizedRows(codes=x.to(self.dtype), shape=(x.shape[0], x.shape[1]))

    def dequantize(self, rows: QuantizedRows) -> Tensor:
        return rows.codes.to(torch.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fp8(ActivationFormat):
    """E4M3 codes with one scale for each group.

    power: the scale is the smallest power of two that saturates nothing, else ``amax / 448``.
    e8m0: the power is stored as its E8M0 byte.
    """

    power: bool = False
    e8m0: bool = False

    def quantize(self, x: Tensor) -> QuantizedRows:
        grouped = _grouped(_check(self.name, x), self.group)
        amax = grouped.abs().amax(dim=2)
        finite = amax.isfinite()
        amax = torch.where(finite, amax, 0.0)
        if self.power:
            scale_byte = _power_byte(amax)
            scale = _power(scale_byte)
        else:
            scale_byte = None
            scale = _quotient(amax, E4M3_MAX).clamp(min=SMALLEST_SCALE)
        scaled = torch.where(finite.unsqueeze(2), grouped * scale.reciprocal().unsqueeze(2), 0.0)
        codes = e4m3_codes(scaled).flatten(1)
        if self.e8m0 and scale_byte is not None:
            scales = scale_byte.masked_fill(~finite, _NAN_BYTE).to(torch.uint8)
        else:
            scales = scale.masked_fill(~finite, torch.nan)
        return QuantizedRows(codes=codes[:, : x.shape[1]].contiguous(), shape=(x.shape[0], x.shape[1]), scales=scales)

    def dequantize(self, rows: QuantizedRows) -> Tensor:
        stored = _present(self.name, rows.scales)
        scales = stored
        if self.e8m0:
            byte = stored.to(torch.int32)
            scales = _power(byte).masked_fill(byte == _NAN_BYTE, torch.nan)
        return rows.codes.to(torch.float32) * _spread(scales, self.group, rows.shape[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class _NvFp4(ActivationFormat):
    """E2M1 codes, an E4M3 scale for each group of 16, and a float32 global scale for each row.

    The published recipe has one global scale for the tensor. Taken from the batch, it would let every row
    change the bits of all others; here it is ``amax(row) / (6 * 448)``, so a row depends on nothing but
    itself.
    """

    def quantize(self, x: Tensor) -> QuantizedRows:
        grouped = _grouped(_check(self.name, x), self.group)
        rows, columns = x.shape
        amax = grouped.abs().amax(dim=2)
        row_amax = amax.amax(dim=1, keepdim=True)
        finite = row_amax.isfinite()
        amax = torch.where(finite, amax, 0.0)
        row_amax = torch.where(finite, row_amax, 0.0)
        global_scale = _quotient(row_amax, E2M1_MAX * E4M3_MAX).clamp(min=_GLOBAL_FLOOR)
        # Group scales are E4M3 numbers from the smallest, 2^-9, to the largest: never zero, never NaN here.
        scales = (amax / (global_scale * E2M1_MAX)).clamp(2.0**-9, E4M3_MAX).to(torch.float8_e4m3fn)
        multiplier = (scales.to(torch.float32) * global_scale).reciprocal()
        scaled = torch.where(finite.unsqueeze(2), grouped * multiplier.unsqueeze(2), 0.0)
        nibbles = e2m1_codes(scaled).flatten(1)[:, :columns]
        codes = pack_nibbles(functional.pad(nibbles, (0, columns % 2)))
        return QuantizedRows(
            codes=codes,
            shape=(rows, columns),
            scales=scales,
            global_scale=global_scale.masked_fill(~finite, torch.nan),
        )

    def dequantize(self, rows: QuantizedRows) -> Tensor:
        scales = _present(self.name, rows.scales).to(torch.float32) * _present(self.name, rows.global_scale)
        nibbles = unpack_nibbles(rows.codes)[:, : rows.shape[1]]
        return _e2m1_values(nibbles) * _spread(scales, self.group, rows.shape[1])


# How a product reads the codes of a row: K of them; up to whole 128; the same in the order of ``ordered``.
AS_IS, PADDED, REORDERED = range(3)

# Order: plain dtypes, then eight bits, then four.
ACTIVATION_FORMATS: tuple[ActivationFormat, ...] = (
    _Cast(name="fp32", bits=32, dtype=torch.float32),
    _Cast(name="bf16", bits=16, dtype=torch.bfloat16),
    _Cast(name="fp16", bits=16, dtype=torch.float16),
    _Fp8(name="fp8_group128", bits=8, group=128),
    _Fp8(name="fp8_group128_pow2", bits=8, group=128, power=True),
    _Fp8(name="fp8_token", bits=8),
    _Fp8(name="mxfp8", bits=8, group=32, power=True, e8m0=True),
    _NvFp4(name="nvfp4", bits=4, group=16),
)


def activation_format(name: str) -> ActivationFormat:
    """Return the format called ``name``; raises ``InputError`` naming the allowed ones."""
    for candidate in ACTIVATION_FORMATS:
        if candidate.name == name:
            return candidate
    allowed = ", ".join(candidate.name for candidate in ACTIVATION_FORMATS)
    raise InputError(f"activation format: found {name!r}, allowed: {allowed}")


def cast_name(dtype: torch.dtype) -> str:
    """Return the name of the format that holds rows in ``dtype`` as they are."""
    return next(form.name for form in ACTIVATION_FORMATS if isinstance(form, _Cast) and form.dtype == dtype)


def row_buffers(name: str, rows: int, columns: int, device: torch.device) -> QuantizedRows:
    """Allocate what ``quantize_rows`` writes for ``rows`` rows in the format ``name``, to be passed as ``out``."""
    form = activation_format(name)
    groups = -(-columns // (form.group or columns))
    if isinstance(form, _Cast):
        return QuantizedRows(codes=empty((rows, columns), form.dtype, device), shape=(rows, columns))
    if isinstance(form, _NvFp4):
        return QuantizedRows(
            codes=empty((rows, -(-columns // 2)), torch.uint8, device),
            shape=(rows, columns),
            scales=empty((rows, groups), torch.float8_e4m3fn, device),
            global_scale=empty((rows, 1), torch.float32, device),
        )
    if isinstance(form, _Fp8):
        return QuantizedRows(
            codes=empty((rows, columns), torch.float8_e4m3fn, device),
            shape=(rows, columns),
            scales=empty((rows, groups), torch.uint8 if form.e8m0 else torch.float32, device),
        )
    raise _no_kernel(form)


def quantize_rows(
    x: Tensor,
    name: str,
    *,
    source: Tensor | None = None,
    weights: Tensor | None = None,
    out: QuantizedRows | None = None,
) -> QuantizedRows:
    """Quantise rows of ``x [T, K]`` (floating) to the format ``name``.

    source: ``[R]`` int64, row r is ``x[source[r]]``; without it rows are those of x. weights: ``[R]`` float32 that
    multiply the rows first, rounded to x's dtype. out: buffers to write, from ``row_buffers``. On a GPU all of it is
    one kernel, with the bits of ``ActivationFormat.quantize``. Raises ``InputError`` for wrong shapes or dtypes.
    """
    if x.dim() != 2 or x.shape[1] < 1 or not x.is_floating_point():
        raise InputError(f"quantize to {name}: found {tuple(x.shape)} {x.dtype}, allowed: floating [R, K >= 1]")
    # FP8 conversions begin with sm_89.
    if on_device(x, (8, 0) if isinstance(activation_format(name), _Cast) else (8, 9)):
        return quantize_on_device(x, name, source=source, weights=weights, out=out)
    rows = activation_format(name).quantize(_weighted(x, source, weights))
    if out is None:
        return rows
    for target, made in ((out.codes, rows.codes), (out.scales, rows.scales), (out.global_scale, rows.global_scale)):
        if target is not None and made is not None:
            target.copy_(made)
    return out


def quantize_on_device(
    x: Tensor,
    name: str,
    *,
    source: Tensor | None = None,
    weights: Tensor | None = None,
    out: QuantizedRows | None = None,
    order: int = 0,
    late: bool = False,
) -> QuantizedRows:
    """Do ``quantize_rows`` in one pass of a kernel, E4M3 codes in the order and ``late`` as ``operand`` says."""
    form, columns = activation_format(name), x.shape[1]
    if not isinstance(form, _Cast | _Fp8 | _NvFp4):
        raise _no_kernel(form)
    wide = -(-columns // 128) * 128 if order != AS_IS else columns
    rows = x.shape[0] if source is None else source.numel()
    made = row_buffers(name, rows, wide, x.device) if out is None else out
    if rows == 0:
        return made
    # Imported here: Triton exists for Linux alone, and everything but a launch works without it.
    from ..kernels import quantize as kernels

    x = x if x.stride(1) == 1 else x.contiguous()
    inputs = (x, made.codes if source is None else source, made.codes if weights is None else weights, made.codes)
    sizes = (rows, columns, x.stride(0))
    reads = {"GATHER": source is not None, "WEIGHTS": weights is not None, "PDL": overlaps(x)}
    if isinstance(form, _NvFp4):
        block = power_of_two(columns, 32)
        args = (*inputs, made.scales, made.global_scale, *sizes, _present(name, made.scales).shape[1])
        constants = {"BLOCK_C": block, **reads, "ROUND": not x.is_cuda}
        launch(kernels.nvfp4_kernel, (rows,), args, constants, num_warps=max(1, min(16, block // 512)))
        return made
    few = rows < _FEW_ROWS
    if form.group == 0 and not isinstance(form, _Cast):
        block_r, block_c = 1, power_of_two(wide, 32)
    else:
        block_r, block_c = (
            (1, min(256, power_of_two(columns, 128))) if few else (2, min(1024, power_of_two(columns, 128)))
        )
    grid = (-(-rows // block_r), -(-wide // block_c))
    block = {"BLOCK_R": block_r, "BLOCK_C": block_c, **reads}
    warps = max(1, min(16, block_r * block_c // 512))
    if isinstance(form, _Fp8):
        block |= {"GROUP": form.group or block_c, "POWER": form.power, "BYTE": form.e8m0, "ROUND": not x.is_cuda}
        block["REORDER"] = order == REORDERED
        args = (*inputs, made.scales, *sizes, _present(name, made.scales).shape[1], wide, int(late))
        launch(kernels.e4m3_kernel, grid, args, block, num_warps=warps)
    else:
        launch(kernels.cast_kernel, grid, (*inputs, *sizes), block, num_warps=warps)
    return made


def _no_kernel(form: ActivationFormat) -> InputError:
    kinds = ", ".join(known.name for known in ACTIVATION_FORMATS if isinstance(known, _Cast | _Fp8 | _NvFp4))
    return InputError(
        f"activation format {form.name}: found {type(form).__name__}, which no kernel writes, allowed: {kinds}; write "
        "one and launch it in ops/quantize.py"
    )


def _weighted(x: Tensor, source: Tensor | None, weights: Tensor | None) -> Tensor:
    rows = x if source is None else x.index_select(0, source)
    return rows if weights is None else (rows.float() * weights[:, None]).to(x.dtype)


def _check(name: str, x: Tensor) -> Tensor:
    if x.dim() != 2 or x.shape[1] < 1 or not x.is_floating_point():
        raise InputError(f"quantize to {name}: found {tuple(x.shape)} {x.dtype}, allowed: floating [R, K >= 1]")
    return x.to(torch.float32)


def _present(name: str, scales: Tensor | None) -> Tensor:
    if scales is None:
        raise InputError(f"dequantize from {name}: found no scale, allowed: rows quantised to {name}")
    return scales


def _grouped(x: Tensor, group: int) -> Tensor:
    """Zero-pad ``x [R, K]`` to ``[R, G, group]``; group 0 is the whole row."""
    columns = x.shape[1]
    size = group or columns
    return functional.pad(x, (0, -columns % size)).reshape(x.shape[0], -(-columns // size), size)


def _spread(scales: Tensor, group: int, columns: int) -> Tensor:
    """Repeat ``[R, G]`` over the columns of each group, ``[R, K]``."""
    return scales.repeat_interleave(group, dim=1)[:, :columns] if group else scales


def _quotient(x: Tensor, divisor: float) -> Tensor:
    # On CUDA torch turns division by a Python number into multiplication by its reciprocal: two roundings.
    return x / torch.full_like(x, divisor)


def _power_byte(amax: Tensor) -> Tensor:
    """Return the biased exponent (int32) of the least power of two not below ``amax / 448`` or the floor."""
    bits = amax.contiguous().view(torch.int32)
    # 448 is 1.75 * 2^8: the quotient's exponent drops by 8, and rises by one when the mantissa is above 1.75.
    above = (bits & 0x7FFFFF) > 0x600000
    return ((bits >> 23) - 8 + above.to(torch.int32)).clamp(min=1)


def _power(byte: Tensor) -> Tensor:
    """Return 2^(byte - 127) float32 for int32 bytes 0 to 254."""
    # Byte 0 is the subnormal 2^-127, whose bits are not an exponent field; no quantiser here writes it.
    return torch.where(byte == 0, 1 << 22, byte << 23).to(torch.int32).view(torch.float32)


def _e2m1_values(codes: Tensor) -> Tensor:
    """Return the float32 values of E2M1 codes 0..15."""
    low = (codes & 7).to(torch.int32)
    # Exponent 0 is subnormal: 0 and 0.5. Otherwise (1 + mantissa / 2) * 2^(exponent - 1), built from its
    # bits.
    normal = (((low >> 1) + 126) << 23) | ((low & 1) << 22)
    size = torch.where(low < 2, low.to(torch.float32) * 0.5, normal.view(torch.float32))
    return torch.where(codes >= 8, -size, size)
