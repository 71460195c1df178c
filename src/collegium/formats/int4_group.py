"""INT4 with one scale per row and group of input columns, symmetric, codes stored as value + 8."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

import torch

from ..errors import CheckpointError, InputError, TensorMismatchError
from .codecs import as_float32, decode_rows, in_groups, look_up, pack_nibbles, pair_table, scale_groups_
from .intake import any_per_matrix, check_cut, find_storage, pad_last, take
from .payload import Part, Payload, Storage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

__all__ = ["Int4Group"]

_SCALE_DTYPES = ("BF16", "F16", "F32")
_ZERO_BYTE = 0x88
_UNSUPPORTED = {
    ".weight_zero_point": "asymmetric INT4 has a zero point; only symmetric INT4 (zero point 8) is supported",
    ".weight_g_idx": "activation-ordered INT4 permutes the input columns; only column order is supported",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Int4Group(Payload):
    """INT4: ``codes [..., N, Kp/2]`` uint8 (value + 8, low nibble first), ``scales [..., N, ceil(K/g)]``.

    scales: bfloat16, float16 or float32. group_size: g, columns that share a scale; K for one scale a row. Kp
    is K rounded up to whole groups and to 8, and the columns beyond K hold code 8, the zero.
    """

    codes: Tensor
    scales: Tensor
    group_size: int

    name: ClassVar[str] = "int4_group"
    group: ClassVar[int] = 32
    tolerance: ClassVar[float] = 0.1
    storages: ClassVar[tuple[Storage, ...]] = (
        Storage(
            name="compressed-tensors",
            parts=(
                Part(suffix=".weight_packed", dtypes=("I32",), columns_per=8),
                Part(suffix=".weight_scale", dtypes=_SCALE_DTYPES, columns_per=32),
                Part(
                    suffix=".weight_shape",
                    dtypes=("I64", "I32"),
                    rows_per=0,
                    columns_per=0,
                    inner=(2,),
                    required=False,
                ),
                Part(suffix=".weight_zero_point", dtypes=("I32",), rows_per=8, columns_per=32, required=False),
                Part(suffix=".weight_g_idx", dtypes=("I32",), rows_per=0, required=False),
            ),
        ),
    )

    @classmethod
    def encode(cls, weight: Tensor, *, group_size: int = 32, scale_dtype: torch.dtype = torch.bfloat16) -> Self:
        """Quantise ``weight [..., N, K]``: scale max(largest / 7, -smallest / 8) of the group.

        The scale is rounded to ``scale_dtype``, 1 for a group of zeros; codes go to nearest even within -8
        and 7. The rule uses all 16 codes and gives the same payload when its own result is encoded again.
        Raises InputError for NaN or infinite weights, or scales beyond ``scale_dtype``.
        """
        values = as_float32(weight, cls.name)
        columns = weight.shape[-1]
        _check_group_size(group_size, columns)
        group_size = min(group_size, columns)
        groups = in_groups(values, group_size)
        scales = torch.maximum(groups.amax(-1) / 7, groups.amin(-1) / -8)
        scales = torch.where(scales > 0, scales, 1.0).to(scale_dtype)
        # A group so small that its scale rounds to zero becomes zeros under the scale 1.
        scales = torch.where(scales > 0, scales, torch.ones_like(scales))
        if not bool(torch.isfinite(scales).all()):
            raise InputError(
                f"{cls.name}: a scale is beyond {torch.finfo(scale_dtype).max}; choose scale_dtype float32"
            )
        codes = (groups / scales.float().unsqueeze(-1)).round_().clamp_(-8, 7).add_(8).to(torch.uint8)
        codes = codes.flatten(-2)
        padded = pad_last(codes, _padded(columns, group_size), columns, 8)
        return cls(shape=tuple(weight.shape), codes=pack_nibbles(padded), scales=scales, group_size=group_size)

    def decode(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return ``[..., N, K]``: (code - 8) * scale as one float32 product, rounded once to ``dtype``."""
        device = self.codes.device
        table = pair_table(tuple(float(code - 8) for code in range(16)), device)
        codes = self.codes.reshape(-1, self.codes.shape[-1])
        scales = self.scales.reshape(-1, self.scales.shape[-1])
        columns = self.shape[-1]

        def rows(start: int, stop: int) -> Tensor:
            values = look_up(table, codes[start:stop]).view(torch.float32)[:, :columns]
            return scale_groups_(values, scales[start:stop].float(), self.group_size)

        return decode_rows(self.shape, dtype, device, rows)

    @classmethod
    def from_parts(
        cls,
        parts: Mapping[str, Tensor],
        *,
        storage: str,
        shape: tuple[int, ...],
        group_size: int | None = None,
    ) -> Self:
        """Take the words as bytes and the scales as stored.

        group_size: the config's; None derives it from the scales' columns and refuses if more than one size fits.
        Raises CheckpointError for a zero point or a column order, and TensorMismatchError when
        ``.weight_shape`` or a tensor's shape contradicts ``shape``.
        """
        layout = find_storage(cls, storage)
        for suffix, reason in _UNSUPPORTED.items():
            if suffix in parts:
                raise CheckpointError(f"{cls.name}: part {suffix!r} found: {reason}; export the model symmetric")
        scales = parts.get(".weight_scale")
        stored = scales.shape[-1] if scales is not None and scales.dim() == len(shape) else 1
        if group_size is None:
            group_size = _group_size(shape[-1], stored)
        _check_group_size(group_size, shape[-1])
        group_size = min(group_size, shape[-1])
        known = [
            replace(part, columns_per=group_size) if part.suffix == ".weight_scale" else part for part in layout.parts
        ]
        taken = take(cls, replace(layout, parts=tuple(known)), parts, shape)
        claimed = taken.get(".weight_shape")
        if claimed is not None and not bool((claimed == claimed.new_tensor(shape[-2:])).all()):
            raise TensorMismatchError(
                f"{cls.name} .weight_shape says {[int(n) for n in claimed.reshape(-1, 2)[0]]}, the config "
                f"implies {list(shape[-2:])}; check the sizes in the config"
            )
        raw = taken[".weight_packed"].contiguous().view(torch.uint8)
        return cls(
            shape=tuple(shape),
            codes=_with_zero_padding(raw, shape[-1], group_size),
            scales=taken[".weight_scale"],
            group_size=group_size,
        )

    def faults(self) -> Tensor:
        """Return a bool tensor over the leading dimensions: True for a forbidden scale.

        Forbidden are NaN, infinite and negative scales, and a zero scale over codes that are not all 8.
        """
        leading = len(self.shape) - 2
        bad = any_per_matrix(~torch.isfinite(self.scales) | (self.scales < 0), leading)
        zero = self.scales == 0
        if bool(zero.any()):
            # With every scale 1 the decoded value is non-zero exactly where the code is not 8.
            used = in_groups(replace(self, scales=torch.ones_like(self.scales)).decode(), self.group_size)
            bad |= any_per_matrix(zero & (used != 0).any(-1), leading)
        return bad

    def columns(self, start: int, stop: int) -> Self:
        """Return input columns ``start:stop``; both on group boundaries (of 8 if one scale a row)."""
        columns, group = self.shape[-1], self.group_size
        single = group >= columns
        check_cut(f"{self.name}: input columns", start, stop, columns, 8 if single else group)
        size = stop - start if single else min(group, stop - start)
        raw = self.codes[..., start // 2 : -(-stop // 2)]
        return replace(
            self,
            shape=(*self.shape[:-1], stop - start),
            codes=_with_zero_padding(raw, stop - start, size),
            scales=self.scales if single else self.scales[..., start // group : -(-stop // group)],
            group_size=size,
        )

    def rows(self, start: int, stop: int) -> Self:
        """Return a view of output rows ``start:stop``, any rows."""
        check_cut(f"{self.name}: output rows", start, stop, self.shape[-2], 1)
        return replace(
            self,
            shape=(*self.shape[:-2], stop - start, self.shape[-1]),
            codes=self.codes[..., start:stop, :],
            scales=self.scales[..., start:stop, :],
        )


def _check_group_size(group_size: int, columns: int) -> None:
    if group_size < 1 or (group_size % 8 and group_size < columns):
        raise InputError(
            f"int4_group: group_size is {group_size}, allowed: a multiple of 8, or at least K={columns} for "
            "one scale a row"
        )


def _padded(columns: int, group_size: int) -> int:
    whole = -(-columns // group_size) * group_size
    return -(-whole // 8) * 8


def _group_size(columns: int, stored: int) -> int:
    """Return the only usual group size (K / stored, or a power of two) that gives ``stored`` scales a row."""
    if stored <= 1:
        return columns
    fits = {size for size in (16, 32, 64, 128, 256, 512, 1024) if -(-columns // size) == stored}
    if columns % stored == 0 and columns // stored % 8 == 0:
        fits.add(columns // stored)
    if len(fits) != 1:
        found = " or ".join(str(size) for size in sorted(fits)) or "no usual size"
        raise TensorMismatchError(
            f"int4_group .weight_scale has {stored} columns for K={columns}: the group size could be {found}; "
            "pass the config's group_size"
        )
    return fits.pop()


def _with_zero_padding(codes: Tensor, columns: int, group_size: int) -> Tensor:
    """Return bytes ``[..., n]`` cut or filled to the padded width, with code 8 in every column beyond K."""
    padded = pad_last(codes, _padded(columns, group_size) // 2, -(-columns // 2), _ZERO_BYTE)
    if columns % 2:
        padded = padded.clone()
        last = padded[..., columns // 2]
        padded[..., columns // 2] = (last & 0x0F) | (_ZERO_BYTE & 0xF0)
    return padded
