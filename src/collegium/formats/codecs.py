"""Scalar codecs shared by the weight formats: E2M1, E4M3, E8M0, nibble packing, and the row-wise decode loop.

Sources: OCP Microscaling Formats (MX) 1.0 for E2M1 and E8M0, OCP 8-bit floating point (OFP8) 1.0 for E4M3.
"""

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from ..errors import InputError

__all__ = [
    "E2M1_MAX",
    "E2M1_VALUES",
    "E4M3_MAX",
    "SMALLEST_SCALE",
    "as_float32",
    "check_decoded",
    "decode_rows",
    "e2m1_codes",
    "e2m1_pairs",
    "e4m3_codes",
    "e4m3_is_nan",
    "e4m3_values",
    "e8m0_codes",
    "e8m0_values",
    "floor_log2",
    "fp8_scales",
    "in_groups",
    "look_up",
    "pack_nibbles",
    "pair_table",
    "power_of_two",
    "relative_e8m0",
    "scale_groups_",
    "unpack_nibbles",
]

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E2M1_MAX = 6.0
E4M3_MAX = 448.0
# The smallest normal float32: below it a scale would lose bits, so encoders never write a smaller one.
SMALLEST_SCALE = 2.0**-126
_DECODED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

# Elements decoded at a time. On a CPU the float32 temporaries then fit in the last-level cache; on a GPU they only have
# to be small compared with the layer.
_CPU_CHUNK = 1 << 20
_GPU_CHUNK = 1 << 25


def pair_table(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return a table ``[256]`` int64 whose entry b is the float32 pair (low, high nibble) of byte b."""
    row = torch.tensor(values, dtype=torch.float32, device=device)
    pairs = torch.stack((row.repeat(16), row.repeat_interleave(16)), dim=-1)
    # One 8-byte look-up per stored byte is several times faster than gathering two floats.
    return pairs.view(torch.int64).squeeze(-1)


def e2m1_pairs(device: torch.device) -> Tensor:
    """Return the pair table ``[256]`` int64 of E2M1, low nibble first."""
    return pair_table(E2M1_VALUES, device)


def look_up(table: Tensor, codes: Tensor) -> Tensor:
    """Return ``table[codes]`` for uint8 ``codes`` of any shape and a table with 256 entries."""
    return table.index_select(0, codes.reshape(-1).int()).view(codes.shape)


def e4m3_values(device: torch.device) -> Tensor:
    """Return the 256 float32 values of E4M3 (fn) by byte; 0x7F and 0xFF are NaN, 0x80 is -0.0."""
    return torch.arange(256, device=device, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def e4m3_is_nan(codes: Tensor) -> Tensor:
    """Return a bool tensor: True where a float8_e4m3fn code is NaN (0x7F or 0xFF)."""
    return (codes.view(torch.uint8) & 0x7F) == 0x7F


def e8m0_values(device: torch.device) -> Tensor:
    """Return the 256 float32 values of E8M0 by byte: 2^(byte - 127); 0x00 is subnormal, 0xFF is NaN."""
    bits = torch.arange(256, device=device, dtype=torch.int32) << 23
    bits[0] = 0x00400000
    bits[255] = 0x7FC00000
    return bits.view(torch.float32)


def relative_e8m0(scales: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Split E8M0 ``scales [E, ..., G]`` into the row's largest scale and bytes relative to it, the largest is ``top``.

    Returns uint8 ``[E, ..., G]`` and float32 ``[E, ...]``. Groups more than 2^top below the largest are raised to that.
    Works on one expert at a time to bound temporary memory.
    """
    relative = torch.empty_like(scales)
    largest = scales.amax(-1)
    for expert, row_scales in enumerate(scales):
        shifted = row_scales.to(torch.int16) - largest[expert].to(torch.int16).unsqueeze(-1) + top
        relative[expert] = shifted.clamp(min=0).to(torch.uint8)
    return relative, look_up(e8m0_values(scales.device), largest)


def floor_log2(x: Tensor) -> Tensor:
    """Return floor(log2(x)) as int32, exact for every positive float32, subnormals too (zero: -1)."""
    return torch.frexp(x).exponent - 1


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent as float32 for int32 exponents from -126 to 127, without rounding."""
    return ((exponent + 127) << 23).view(torch.float32)


def e8m0_codes(amax: Tensor, largest_exponent: int) -> Tensor:
    """Return E8M0 bytes ``floor(log2(amax)) - largest_exponent + 127`` (OCP MX 1.0, section 6.3).

    ``amax`` is float32 of any shape; the byte is clamped to 0..254; a group of zeros gets 127, the scale 1.
    """
    exponent = floor_log2(amax) - largest_exponent + 127
    return torch.where(amax > 0, exponent.clamp(0, 254), 127).to(torch.uint8)


def e2m1_codes(x: Tensor) -> Tensor:
    """Return E2M1 codes (uint8, 0..15) of finite float32 ``x``: nearest, ties to even, saturating at 6.

    The sign is kept on zero, so -0.0 and small negative numbers become code 8.
    """
    magnitude = x.abs()
    # Steps are 1/2 below 2, 1 below 4 and 2 above; the three lines meet there, so their minimum is the code.
    codes = (magnitude * 2).round_()
    torch.minimum(codes, magnitude.round() + 2, out=codes)
    torch.minimum(codes, magnitude.mul_(0.5).round_() + 4, out=codes)
    return codes.clamp_(max=7).to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)


def e4m3_codes(x: Tensor) -> Tensor:
    """Return float8_e4m3fn of float32 ``x``: nearest even, saturating at 448."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack uint8 codes 0..15 ``[..., 2n]`` into bytes ``[..., n]``, the even element in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Split bytes ``[..., n]`` into uint8 codes ``[..., 2n]``, the low nibble first."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def fp8_scales(amax: Tensor, *, exponent_only: bool = False) -> Tensor:
    """Return float32 scales amax / 448, 1 where amax is 0; exponent_only: rounded up to a power of two."""
    scales = (amax / E4M3_MAX).clamp(min=SMALLEST_SCALE)
    if exponent_only:
        mantissa, exponent = torch.frexp(scales)
        # frexp returns mantissa 0.5 for an exact power of two, which needs no rounding.
        scales = power_of_two(torch.where(mantissa == 0.5, exponent - 1, exponent))
    return torch.where(amax > 0, scales, 1.0)


def as_float32(weight: Tensor, format_name: str) -> Tensor:
    """Return a weight ``[..., N, K]`` as float32; InputError if it cannot be encoded."""
    if not weight.dtype.is_floating_point or weight.dim() < 2 or 0 in weight.shape[-2:]:
        raise InputError(
            f"{format_name}: encode needs a floating-point weight [..., N, K] with N, K >= 1, "
            f"found {weight.dtype} {list(weight.shape)}; pass the matrices as rows of outputs"
        )
    values = weight.detach().float()
    bad = int((~torch.isfinite(values)).sum())
    if bad:
        raise InputError(
            f"{format_name}: encode needs finite weights, found {bad} NaN or infinite of {values.numel()} in "
            f"{list(weight.shape)}; repair the weight before encoding"
        )
    return values


def in_groups(values: Tensor, group: int) -> Tensor:
    """Return ``[..., K]`` as ``[..., ceil(K / group), group]``, the last group padded with zeros."""
    padding = -values.shape[-1] % group
    if padding:
        values = torch.nn.functional.pad(values, (0, padding))
    return values.unflatten(-1, (-1, group))


def scale_groups_(
    values: Tensor, scales: Tensor, group: int, change: Callable[[Tensor, Tensor], Tensor] = torch.Tensor.mul_
) -> Tensor:
    """Multiply ``values [r, k]`` in place by ``scales [r, ceil(k / group)]`` and return them.

    change: another in-place operation than multiplication.
    """
    whole_groups = values.shape[-1] // group
    full = values[:, : whole_groups * group]
    change(full.unflatten(-1, (-1, group)), scales[:, :whole_groups, None])
    if whole_groups < scales.shape[-1]:
        change(values[:, whole_groups * group :], scales[:, whole_groups:])
    return values


def check_decoded(dtype: torch.dtype) -> None:
    """Raise InputError for a dtype to which weights cannot be decoded."""
    if dtype not in _DECODED:
        allowed = ", ".join(str(d) for d in _DECODED)
        raise InputError(f"decode to {dtype} is not possible, allowed: {allowed}; convert the result yourself")


def decode_rows(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, rows: Callable[[int, int], Tensor]
) -> Tensor:
    """Fill a tensor of ``shape [..., N, K]`` chunk by chunk; InputError for an unsuitable dtype.

    ``rows(start, stop)`` returns the exact float32 values ``[stop - start, K or more]`` of rows counted over
    all leading dimensions; each value is rounded once, to ``dtype``.
    """
    check_decoded(dtype)
    columns = shape[-1]
    total = prod(shape[:-1])
    out = torch.empty((total, columns), dtype=dtype, device=device)
    step = max(1, (_GPU_CHUNK if device.type == "cuda" else _CPU_CHUNK) // columns)
    for start in range(0, total, step):
        stop = min(start + step, total)
        out[start:stop] = rows(start, stop)[:, :columns]
    return out.view(shape)
