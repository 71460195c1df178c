"""Formats of activations before a multiplication; each row is quantised separately.

Shape letters: R rows, K columns, G groups of columns in a row.

Rules that all formats share. Arithmetic is float32 with one IEEE rounding per operation, in the written
order, so a kernel can match codes and scales bit for bit: ``codes = round(saturate(x * (1 / scale)))`` to
nearest, ties to even. Scales have a floor of a normal float32, so the multiplier ``1 / scale`` stays
finite and nothing depends on subnormals; all-zero groups get the floor and zero codes. A group with NaN or
infinity gets a NaN scale and zero codes, hence decodes to NaN throughout: visible, and contained in its group
(in its row for ``nvfp4``, whose global scale belongs to the row). A partial last group is a group.

Static formats have one calibrated scale for all rows, which ``within`` sets, or one for the rows of each expert.
"""

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self, final

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import InputError
from ..formats.codecs import E2M1_MAX, E4M3_MAX, SMALLEST_SCALE, e2m1_codes, e4m3_codes, in_groups, pack_nibbles
from ..kernels.arguments import CodeFormat
from ..runtime.launch import launch, on_device, overlaps, power_at_least, row_contiguous
from ..runtime.memory import Memory, Regions
from ..types import named
from .buffers import Buffers, allocate, sizes
from .checks import require_input
from .rows import (
    ExpertScales,
    QuantizedRows,
    SourceRows,
    TokenRows,
    block_of,
    block_of_token,
    check_rows,
    gather_rows,
    require_scales,
    transposed_scale_stride,
    warps_of,
    whole_rows,
)
from .scales import e2m1_numbers, e8m0_numbers, power, quotient, spread

__all__ = [
    "ACTIVATION_FORMATS",
    "AS_IS",
    "PADDED",
    "REORDERED",
    "ActivationFormat",
    "QuantizedRows",
    "activation_format",
    "cast_name",
    "formats_within",
    "quantize_regions",
    "quantize_rows",
    "reorder_codes",
]

# How a product reads the codes of a row: K of them; padded to a multiple of 128; padded and in ``reorder_codes`` order.
AS_IS, PADDED, REORDERED = range(3)

_NVFP4_GROUP = 16  # columns that share an E4M3 scale
_MX_GROUP = 32  # columns that share an E8M0 scale
_GLOBAL_FLOOR = 2.0**-117  # times the smallest E4M3 number, 2^-9, this is SMALLEST_SCALE


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationFormat:
    """One activation format: its reference, and the launch of its kernel.

    bits: width of a code. group: columns that share a scale; 0: the whole row, or no scale at all. power: scales are
    powers of two. static: scales are calibrated, not computed from the rows; scale: the one that ``within`` set.
    by_expert: rows have the scale of their expert instead (``with_expert_scales``).
    transposed_scales: the kernel stores scales of groups, or codes of formats without scales, as ``transpose_scales``
    does. max_value, min_scale: the largest number at a scale of 1, and the smallest scale. capability: of the first
    GPUs with a kernel for the format. exact_rows: rows between the products stay float32 until they are quantised.
    """

    capability: ClassVar[tuple[int, int]] = (8, 9)  # FP8 conversions begin there
    max_value: ClassVar[float] = E4M3_MAX
    exact_rows: ClassVar[bool] = False
    min_scale: ClassVar[float] = SMALLEST_SCALE

    name: str
    bits: int
    group: int = 0
    power: bool = False
    static: bool = False
    by_expert: bool = False
    scale: float | None = None
    transposed_scales: bool = False

    def within(self, reach: float) -> Self:
        """Return a static format with the scale at which ``reach`` is the largest number, rounded to float32.

        Larger numbers saturate. A format with a scale per expert becomes that of one expert. Raises InputError where
        the scale is not finite, or too small to divide by.
        """
        scale = torch.tensor(reach / self.max_value).item()
        stated = f"scale {scale:g}, for numbers up to {reach:g}"
        allowed = f"finite scales from {self.min_scale:g} on; calibrate the checkpoint again"
        require_input(self.min_scale <= scale < math.inf, f"activation format {self.name}", stated, allowed)
        return replace(self, scale=scale, by_expert=False)

    @property
    def largest_input(self) -> float:
        """The largest number that does not saturate; infinity where scales are computed."""
        return math.inf if self.scale is None else self.scale * self.max_value

    def with_expert_scales(self, scales: ExpertScales) -> "ActivationFormat":
        """Return the format of rows in expert order with ``scales``; raises InputError for other formats."""
        raise InputError(f"activation format {self.name}: found scales per expert, allowed: nvfp4_expert")

    def with_row_scales(self, scales: Tensor) -> "ActivationFormat":
        """Return the format of rows with given ``scales [R, G]`` float32; raises InputError for other formats.

        Larger numbers than a scale represents saturate. On a GPU a few launches of torch quantise such rows.
        """
        raise InputError(
            f"activation format {self.name}: found given scales {tuple(scales.shape)}, allowed: fp8_token, fp8_group128"
        )

    def expert_scales(self, reach: Tensor) -> Tensor:
        """Return the scales ``[E]`` float32 at which ``reach [E]`` are the largest numbers; errors as ``within``."""
        scales = [self.within(expert_reach).scale for expert_reach in reach.tolist()]
        return torch.tensor(scales, dtype=torch.float32, device=reach.device)

    def calibrated_scale(self) -> float | None:
        """Return the scale of a static format, None for others; raises InputError where none was set."""
        if self.static and self.scale is None:
            raise InputError(
                f"activation format {self.name}: found no calibrated scales, allowed: weights read from a checkpoint "
                "that has them for every expert, or ExpertWeights(input_reach=...); without any, take fp8_token or "
                "nvfp4, which find scales in each row"
            )
        return self.scale

    def calibrated_or(self, scales: Tensor) -> Tensor:
        """Return ``scales`` computed from rows, replaced by the scale of a static format."""
        scale = self.calibrated_scale()
        return scales if scale is None else torch.full_like(scales, scale)

    @property
    def e4m3(self) -> bool:
        """Whether rows are operands of FP8 tensor cores: E4M3 codes, and float32 scales of a row or of groups."""
        return False

    @property
    def operand_format(self) -> "ActivationFormat | None":
        """The format of the rows that tensor cores multiply, whose scales are float32; None: no kernel quantises."""
        return self if self.e4m3 else None

    def quantize(self, x: Tensor) -> QuantizedRows:
        """Quantise ``x [R, K]`` (floating, K >= 1); raises ``InputError`` for another shape or dtype."""
        raise NotImplementedError

    def dequantize(self, rows: QuantizedRows) -> Tensor:
        """Return ``[R, K]`` float32: code times scale, rounded once."""
        raise NotImplementedError

    def round_trip(self, x: Tensor) -> Tensor:
        """Return ``x [R, K]`` quantised to this format and back, float32."""
        return self.dequantize(self.quantize(x))

    def padded_columns(self, columns: int, order: int) -> int:
        """Return the columns of rows of codes in ``order``; raises InputError where the format lacks it."""
        if order == AS_IS:
            return columns
        allowed = f"{AS_IS} (as they are); only operands of FP8 tensor cores have others"
        require_input(self.e4m3, f"activation format {self.name}", f"order {order} of its rows", allowed)
        return -(-columns // 128) * 128

    def buffers(self, rows: int, columns: int) -> Buffers:
        """Return the buffers of the kernel, by the names of ``QuantizedRows``; InputError if there is no kernel."""
        raise _no_kernel(self)

    def write(self, source: SourceRows, out: QuantizedRows) -> None:
        """Launch the kernel of ``quantize`` for one row or more; raises InputError if there is none."""
        raise _no_kernel(self)

    def write_to_slots(self, tokens: TokenRows, out: QuantizedRows) -> None:
        """Launch the kernel that quantises each token once and writes all of its rows; InputError without ``e4m3``."""
        raise _no_kernel(self)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Cast(ActivationFormat):
    """A plain floating dtype: rounded to nearest even; float16 overflows to infinity, as in IEEE 754."""

    capability: ClassVar[tuple[int, int]] = (8, 0)

    dtype: torch.dtype

    def quantize(self, x: Tensor) -> QuantizedRows:
        check_rows(self.name, x)
        return QuantizedRows(codes=x.to(self.dtype), shape=(x.shape[0], x.shape[1]))

    def dequantize(self, rows: QuantizedRows) -> Tensor:
        return rows.codes.to(torch.float32)

    def buffers(self, rows: int, columns: int) -> Buffers:
        return {
            "codes": (
                (columns, transposed_scale_stride(rows)) if self.transposed_scales else (rows, columns),
                self.dtype,
            )
        }

    def write(self, source: SourceRows, out: QuantizedRows) -> None:
        # Imported here: Triton exists for Linux only, and everything except launches works without it.
        from ..kernels.quantize import cast_kernel

        rows, columns = source.shape
        block_r, block_c = block_of(rows, columns)
        grid = (-(-rows // block_r), -(-columns // block_c))
        constants = {"BLOCK_R": block_r, "BLOCK_C": block_c, "PDL": overlaps(source.x)}
        args = (*source.arguments(out.codes), out.codes.stride(0) if self.transposed_scales else None)
        launch(cast_kernel, grid, args, constants, num_warps=warps_of(block_r * block_c))


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Fp8(ActivationFormat):
    """E4M3 codes with one scale for each group: ``amax / 448``, or the smallest power of two that saturates nothing.

    e8m0: the power is stored as its E8M0 byte. rows: the scales ``[R, G]`` float32 that ``with_row_scales`` set.
    """

    e8m0: bool = False
    rows: Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def e4m3(self) -> bool:
        return not self.e8m0

    @property
    def operand_format(self) -> ActivationFormat:
        if not self.e8m0:
            return self
        if self.group == _MX_GROUP:
            return _DecodedMxFp8(name=self.name, bits=16)
        # The same powers of two as float32 numbers.
        return activation_format("fp8_group128_pow2")

    def with_row_scales(self, scales: Tensor) -> ActivationFormat:
        if not self.e4m3 or self.static:
            return ActivationFormat.with_row_scales(self, scales)
        return replace(self, rows=scales)

    def calibrated_or(self, scales: Tensor) -> Tensor:
        return ActivationFormat.calibrated_or(self, scales) if self.rows is None else self.rows

    def quantize(self, x: Tensor) -> QuantizedRows:
        check_rows(self.name, x)
        groups = in_groups(x.to(torch.float32), self.group or x.shape[1])
        amax = groups.abs().amax(dim=2)
        finite = amax.isfinite()
        amax = torch.where(finite, amax, 0.0)
        dynamic = power(amax) if self.power else quotient(amax, E4M3_MAX).clamp(min=SMALLEST_SCALE)
        scale = self.calibrated_or(dynamic)
        scaled = torch.where(finite.unsqueeze(2), groups * scale.reciprocal().unsqueeze(2), 0.0)
        codes = e4m3_codes(scaled).flatten(1)
        scales = scale.masked_fill(~finite, torch.nan)
        if self.e8m0:
            # The byte is the exponent field, all ones for NaN.
            scales = (scales.view(torch.int32) >> 23).to(torch.uint8)
        return QuantizedRows(codes=codes[:, : x.shape[1]].contiguous(), shape=(x.shape[0], x.shape[1]), scales=scales)

    def dequantize(self, rows: QuantizedRows) -> Tensor:
        scales = require_scales(self.name, rows.scales)
        scales = e8m0_numbers(scales) if self.e8m0 else scales
        return rows.codes.to(torch.float32) * spread(scales, self.group, rows.shape[1])

    def buffers(self, rows: int, columns: int) -> Buffers:
        groups = -(-columns // (self.group or columns))
        scales = (groups, transposed_scale_stride(rows)) if self.transposed_scales else (rows, groups)
        dtype = torch.uint8 if self.e8m0 else torch.float32
        return {"codes": ((rows, columns), torch.float8_e4m3fn), "scales": (scales, dtype)}

    def write(self, source: SourceRows, out: QuantizedRows) -> None:
        if self.rows is not None:
            self._write_with_given_scales(source, out)
            return
        from ..kernels.quantize import e4m3_kernel

        rows, columns = source.shape
        padded_cols = out.codes.shape[1]
        scales = require_scales(self.name, out.scales)
        block_r, block_c = block_of(rows, columns) if self.group else whole_rows(rows, padded_cols)
        grid = (-(-rows // block_r), -(-padded_cols // block_c))
        args = (
            *source.arguments(out.codes, scales),
            -(-padded_cols // (self.group or padded_cols)),
            padded_cols,
            int(source.x_ready),
            self.calibrated_scale(),
            scales.stride(0) if self.transposed_scales else None,
        )
        constants = {
            "FORMAT": self._code_format(source, block_c),
            "BLOCK_R": block_r,
            "BLOCK_C": block_c,
            "PDL": overlaps(source.x),
        }
        launch(e4m3_kernel, grid, args, constants, num_warps=warps_of(block_c * (block_r if self.group else 1)))

    def _write_with_given_scales(self, source: SourceRows, out: QuantizedRows) -> None:
        """Write ``out`` with torch, as the kernel stores it."""
        rows = self.quantize(gather_rows(source.x, source.source, source.weights))
        out.codes.view(torch.uint8).copy_(reorder_codes(rows.codes, source.order).view(torch.uint8))
        scales, stored = require_scales(self.name, rows.scales), require_scales(self.name, out.scales)
        if self.transposed_scales:
            stored[:, : scales.shape[0]].copy_(scales.t())
        else:
            stored.copy_(scales)

    def write_to_slots(self, tokens: TokenRows, out: QuantizedRows) -> None:
        from ..kernels.quantize import e4m3_to_slots_kernel

        if self.e8m0:
            raise _no_kernel(self)
        count, columns = tokens.x.shape
        padded_cols = out.codes.shape[1]
        scales = require_scales(self.name, out.scales)
        block_c, warps = block_of_token(padded_cols, whole=not self.group)
        args = (
            tokens.x,
            tokens.slots,
            out.codes,
            scales,
            columns,
            tokens.x.stride(0),
            -(-padded_cols // (self.group or padded_cols)),
            padded_cols,
            int(tokens.x_ready),
            self.calibrated_scale(),
            scales.stride(0) if self.transposed_scales else None,
        )
        constants = {
            "FORMAT": self._code_format(tokens, block_c),
            **tokens.constants,
            "BLOCK_C": block_c,
            "PDL": overlaps(tokens.x),
        }
        launch(e4m3_to_slots_kernel, (count, -(-padded_cols // block_c)), args, constants, num_warps=warps)

    def _code_format(self, rows: SourceRows | TokenRows, block_c: int) -> CodeFormat:
        """Return how a kernel whose programs take ``block_c`` columns stores codes."""
        return CodeFormat(
            group=self.group or block_c,
            power_of_two=self.power,
            e8m0=self.e8m0,
            reorder=rows.order == REORDERED,
            software_rounding=not rows.x.is_cuda,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _NvFp4(ActivationFormat):
    """E2M1 codes, an E4M3 scale for each group of 16, and a float32 global scale for each row.

    The published recipe has one global scale for the tensor. Taken from the batch, it would let every row
    change the bits of all others; here it is ``amax(row) / (6 * 448)``, so a row depends on nothing but
    itself. Static, it is the calibrated one of the published recipe; groups have separate scales.
    """

    max_value: ClassVar[float] = E2M1_MAX * E4M3_MAX
    min_scale: ClassVar[float] = _GLOBAL_FLOOR

    @property
    def operand_format(self) -> ActivationFormat:
        return _DecodedNvFp4(name=self.name, bits=16, static=self.static, by_expert=self.by_expert, scale=self.scale)

    def quantize(self, x: Tensor) -> QuantizedRows:
        check_rows(self.name, x)
        groups = in_groups(x.to(torch.float32), _NVFP4_GROUP)
        rows, columns = x.shape
        amax = groups.abs().amax(dim=2)
        row_amax = amax.amax(dim=1, keepdim=True)
        finite = row_amax.isfinite()
        amax = torch.where(finite, amax, 0.0)
        row_amax = torch.where(finite, row_amax, 0.0)
        global_scale = self.calibrated_or(quotient(row_amax, self.max_value).clamp(min=self.min_scale))
        # Group scales are E4M3 numbers from the smallest, 2^-9, to the largest: never zero, never NaN here.
        scales = (amax / (global_scale * E2M1_MAX)).clamp(2.0**-9, E4M3_MAX).to(torch.float8_e4m3fn)
        multiplier = (scales.to(torch.float32) * global_scale).reciprocal()
        scaled = torch.where(finite.unsqueeze(2), groups * multiplier.unsqueeze(2), 0.0)
        nibbles = e2m1_codes(scaled).flatten(1)[:, :columns]
        codes = pack_nibbles(functional.pad(nibbles, (0, columns % 2)))
        return QuantizedRows(
            codes=codes, shape=(rows, columns), scales=scales, global_scale=global_scale.masked_fill(~finite, torch.nan)
        )

    def dequantize(self, rows: QuantizedRows) -> Tensor:
        scales = require_scales(self.name, rows.scales).to(torch.float32) * require_scales(self.name, rows.global_scale)
        return e2m1_numbers(rows.codes)[:, : rows.shape[1]] * spread(scales, _NVFP4_GROUP, rows.shape[1])

    def buffers(self, rows: int, columns: int) -> Buffers:
        return {
            "codes": ((rows, -(-columns // 2)), torch.uint8),
            "scales": ((rows, -(-columns // _NVFP4_GROUP)), torch.float8_e4m3fn),
            "global_scale": ((rows, 1), torch.float32),
        }

    def write(self, source: SourceRows, out: QuantizedRows) -> None:
        from ..kernels.quantize import nvfp4_kernel

        rows, columns = source.shape
        scales, block = require_scales(self.name, out.scales), power_at_least(columns, 32)
        written = (out.codes, scales, require_scales(self.name, out.global_scale))
        constants = {
            "BLOCK_C": block,
            "SOFTWARE_ROUNDING": not source.x.is_cuda,
            "PDL": overlaps(source.x),
        }
        args = (*source.arguments(*written), scales.shape[1], self.calibrated_scale())
        launch(nvfp4_kernel, (rows,), args, constants, num_warps=warps_of(block))


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _DecodedNvFp4(_NvFp4):
    """The rows of ``nvfp4`` for 16-bit tensor cores: BF16 ``code * group scale``, and a float32 scale for each row.

    An E2M1 number has 2 significant bits and an E4M3 number 4, so their product has at most 6 and lies between 2^-10
    and 2688: BF16, with 8 bits, holds it exactly. The global scale multiplies the float32 sum. ``codes`` are those
    products, ``scales`` the global scales ``[R, 1]``. rows: the scales of the experts that own the rows.

    Rounding a row to BF16 first would move numbers across the wide steps of E2M1, so rows between the products are not.
    """

    capability: ClassVar[tuple[int, int]] = (8, 0)
    exact_rows: ClassVar[bool] = True

    rows: ExpertScales | None = field(default=None, compare=False, repr=False)

    @property
    def operand_format(self) -> ActivationFormat:
        return self

    def calibrated_or(self, scales: Tensor) -> Tensor:
        if self.rows is None:
            return _NvFp4.calibrated_or(self, scales)
        return self.rows.by_row(scales.shape[0])[:, None]

    def with_expert_scales(self, scales: ExpertScales) -> ActivationFormat:
        return replace(self, rows=scales)

    def quantize(self, x: Tensor) -> QuantizedRows:
        rows = _NvFp4.quantize(self, x)
        group_scales = require_scales(self.name, rows.scales).to(torch.float32)
        numbers = e2m1_numbers(rows.codes)[:, : rows.shape[1]] * spread(group_scales, _NVFP4_GROUP, rows.shape[1])
        return QuantizedRows(codes=numbers.to(torch.bfloat16), shape=rows.shape, scales=rows.global_scale)

    def dequantize(self, rows: QuantizedRows) -> Tensor:
        return rows.codes.to(torch.float32) * require_scales(self.name, rows.scales)

    def buffers(self, rows: int, columns: int) -> Buffers:
        return {"codes": ((rows, columns), torch.bfloat16), "scales": ((rows, 1), torch.float32)}

    def write(self, source: SourceRows, out: QuantizedRows) -> None:
        from ..kernels.quantize import nvfp4_decoded_kernel

        rows, columns = source.shape
        block = power_at_least(columns, 32)
        constants = {"BLOCK_C": block, "PDL": overlaps(source.x)}
        if self.rows is None:
            scales = (self.calibrated_scale(), None, None, 0)
        else:
            scales = (None, *self.rows, self.rows.values.numel())
        constants["BLOCK_E"] = power_at_least(scales[-1], 16)
        args = (*source.arguments(out.codes, require_scales(self.name, out.scales)), *scales)
        launch(nvfp4_decoded_kernel, (rows,), args, constants, num_warps=warps_of(block))


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _DecodedMxFp8(ActivationFormat):
    """The rows of ``mxfp8`` for 16-bit tensor cores: BF16 ``code * scale``, without scales.

    An E4M3 number has 4 significant bits, and BF16, with 8 and the exponents of float32, holds its product with a power
    of two exactly, unless it is below 2^-126: there BF16 has multiples of 2^-133, and groups are rounded whose largest
    magnitude is below 2^-115.

    Rounding a row to BF16 first could move a number to another code, so rows between the products are not.
    """

    capability: ClassVar[tuple[int, int]] = (8, 0)
    exact_rows: ClassVar[bool] = True

    @property
    def operand_format(self) -> ActivationFormat:
        return self

    def quantize(self, x: Tensor) -> QuantizedRows:
        numbers = activation_format(self.name).round_trip(x)
        return QuantizedRows(codes=numbers.to(torch.bfloat16), shape=(x.shape[0], x.shape[1]))

    def dequantize(self, rows: QuantizedRows) -> Tensor:
        return rows.codes.to(torch.float32)

    def buffers(self, rows: int, columns: int) -> Buffers:
        return {"codes": ((rows, columns), torch.bfloat16)}

    def write(self, source: SourceRows, out: QuantizedRows) -> None:
        from ..kernels.quantize import mxfp8_decoded_kernel

        rows, columns = source.shape
        block_r, block_c = block_of(rows, columns)
        grid = (-(-rows // block_r), -(-columns // block_c))
        constants = {"BLOCK_R": block_r, "BLOCK_C": block_c, "PDL": overlaps(source.x)}
        launch(
            mxfp8_decoded_kernel, grid, source.arguments(out.codes), constants, num_warps=warps_of(block_r * block_c)
        )


_CASTS = (
    _Cast(name="fp32", bits=32, dtype=torch.float32),
    _Cast(name="bf16", bits=16, dtype=torch.bfloat16),
    _Cast(name="fp16", bits=16, dtype=torch.float16),
)

# Order: plain dtypes, then eight bits, then four.
ACTIVATION_FORMATS: tuple[ActivationFormat, ...] = (
    *_CASTS,
    _Fp8(name="fp8_group128", bits=8, group=128),
    _Fp8(name="fp8_group128_pow2", bits=8, group=128, power=True),
    _Fp8(name="fp8_group128_e8m0", bits=8, group=128, power=True, e8m0=True),
    _Fp8(name="fp8_token", bits=8),
    _Fp8(name="fp8_static", bits=8, static=True),
    _Fp8(name="mxfp8", bits=8, group=_MX_GROUP, power=True, e8m0=True),
    _NvFp4(name="nvfp4", bits=4, group=_NVFP4_GROUP),
    _NvFp4(name="nvfp4_static", bits=4, group=_NVFP4_GROUP, static=True),
    _NvFp4(name="nvfp4_expert", bits=4, group=_NVFP4_GROUP, static=True, by_expert=True),
)


def activation_format(name: str | ActivationFormat) -> ActivationFormat:
    """Return the format called ``name``, or ``name`` if it is a format; InputError lists the allowed names."""
    if isinstance(name, ActivationFormat):
        return name
    return named(ACTIVATION_FORMATS, name, f"activation format: found {name!r}, allowed: ", InputError)


def formats_within(
    name: str | ActivationFormat, reach: tuple[float, float] | None
) -> tuple[ActivationFormat, ActivationFormat]:
    """Return the formats of the rows of two products: ``name``, with the scales of ``reach`` if it is static.

    reach: as in ``ExpertWeights``. A format with a scale per expert is returned as it is. Raises InputError for
    a static format without reach.
    """
    form = activation_format(name)
    if form.by_expert and reach is not None:
        return form, form
    if form.static and reach is not None:
        return form.within(reach[0]), form.within(reach[1])
    form.calibrated_scale()
    return form, form


def cast_name(dtype: torch.dtype) -> str:
    """Return the name of the format that holds rows in ``dtype`` as they are; raises ``InputError`` for others."""
    for form in _CASTS:
        if form.dtype == dtype:
            return form.name
    allowed = ", ".join(str(form.dtype) for form in _CASTS)
    raise InputError(f"rows of activations: found {dtype}, allowed: {allowed}; convert them")


def quantize_regions(rows: int, columns: int, name: str | ActivationFormat, *, order: int = AS_IS) -> Regions:
    """Return the most bytes ``quantize_rows`` takes for any count of rows up to ``rows``."""
    form = activation_format(name)
    return sizes(form.buffers(rows, form.padded_columns(columns, order)))


def quantize_rows(
    x: Tensor,
    name: str | ActivationFormat,
    *,
    source: Tensor | None = None,
    weights: Tensor | None = None,
    order: int = AS_IS,
    x_ready: bool = False,
    used: Tensor | None = None,
    memory: Memory | None = None,
) -> QuantizedRows:
    """Quantise rows of ``x [T, K]`` (floating) to a format, or to the one called ``name``.

    source: ``[R]`` int64, row r is ``x[source[r]]``; without it rows are those of x. weights: ``[R]`` float32 that
    multiply the rows first, rounded to x's dtype. order, x_ready and used: as in ``operand``. On a GPU all of it is
    one kernel, with the bits of ``ActivationFormat.quantize``. memory: where that kernel takes "codes", "scales" and
    "global_scale".
    Raises ``InputError`` for wrong shapes or dtypes.
    """
    form = activation_format(name)
    check_rows(form.name, x)
    padded_cols = form.padded_columns(x.shape[1], order)
    on_kernel = on_device(x, form.capability)
    if on_kernel:
        rows = SourceRows(row_contiguous(x), source, weights, order, x_ready, used)
        quantized = _run_kernel(form, rows, padded_cols, memory)
    else:
        quantized = form.quantize(gather_rows(x, source, weights))
        codes = reorder_codes(quantized.codes, order)
        quantized = replace(quantized, codes=codes, shape=(codes.shape[0], padded_cols))
    return _view_by_row(form, quantized, stored=on_kernel) if form.transposed_scales else quantized


def _run_kernel(form: ActivationFormat, rows: SourceRows, padded_cols: int, memory: Memory | None) -> QuantizedRows:
    count = rows.shape[0]
    buffers = allocate(memory, form.buffers(count, padded_cols), rows.x.device)
    quantized = QuantizedRows(shape=(count, padded_cols), **buffers)
    if count:
        form.write(rows, quantized)
    return quantized


def _view_by_row(form: ActivationFormat, rows: QuantizedRows, *, stored: bool) -> QuantizedRows:
    """Return a view ``[R, G]`` of transposed scales, or of codes without scales.

    stored: they are transposed in memory; otherwise they are copied to that layout first.
    """
    name = "scales" if form.group else "codes"
    values: Tensor = getattr(rows, name)
    count = rows.shape[0]
    if not stored:
        values = functional.pad(values.t(), (0, transposed_scale_stride(count) - count))
    return replace(rows, **{name: values[:, :count].t()})


def reorder_codes(codes: Tensor, order: int) -> Tensor:
    """Return E4M3 codes ``[R, K]`` in ``order``, with zeros beyond K.

    REORDERED is for four-bit weights: within 128 columns, column 32 t + 8 s + 4 h + i (t, s < 4, h < 2, i < 4) goes to
    place 64 h + 16 s + 4 t + i, so a thread of the tensor core needs 32 neighbours of a row of weights.
    """
    if order == AS_IS:
        return codes
    short = -codes.shape[1] % 128
    padded = functional.pad(codes.view(torch.uint8), (0, short))
    if order == PADDED:
        return padded.view(codes.dtype)
    split = padded.view(codes.shape[0], -1, 4, 4, 2, 4).permute(0, 1, 4, 3, 2, 5)
    return split.reshape(codes.shape[0], -1).view(codes.dtype)


def _no_kernel(form: ActivationFormat) -> InputError:
    written = (known for known in ACTIVATION_FORMATS if type(known).write is not ActivationFormat.write)
    allowed = ", ".join(known.name for known in written)
    return InputError(
        f"activation format {form.name}: found {type(form).__name__}, which no kernel writes, allowed: {allowed}; "
        "write one, and give the class its buffers and its launch (buffers, write)"
    )
