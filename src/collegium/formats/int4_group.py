"""INT4 with one scale per row and group of input columns, symmetric, codes stored as value + 8."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from ..errors import InputError, TensorMismatchError
from .codecs import as_float32, in_groups, pack_nibbles, pair_table
from .find_storage import check_cut, pad_last
from .grouped import Scaled
from .integers import check_group_size, compressed, gptq, modelopt, read_integers
from .payload import Storage

__all__ = ["Int4Group"]

_ZERO_BYTE = 0x88


@dataclass(frozen=True, kw_only=True, slots=True)
class Int4Group(Scaled):
    """INT4: ``codes [..., N, Kp/2]`` uint8 (value + 8, low nibble first), ``scales [..., N, ceil(K/g)]``.

    scales: bfloat16, float16 or float32. group_size: g, columns that share a scale; K for one scale per row. Kp is K
    rounded up to whole groups and to 8; the columns beyond K hold code 8, which is zero.
    """

    group_size: int

    name: ClassVar[str] = "int4_group"
    group: ClassVar[int] = 32
    tolerance: ClassVar[float] = 0.1
    storages: ClassVar[tuple[Storage, ...]] = (
        compressed("compressed-tensors", 4),
        gptq("gptq", 4),
        gptq("gptq_v2", 4),
        modelopt(),
    )

    @property
    def scale_block(self) -> tuple[int, int]:
        """One row and the columns of a group."""
        return 1, self.group_size

    @classmethod
    def encode(cls, weight: Tensor, *, group_size: int = 32, scale_dtype: torch.dtype = torch.bfloat16) -> Self:
        """Quantise ``weight [..., N, K]``: scale max(largest / 7, -smallest / 8) of the group.

        The scale is rounded to ``scale_dtype``, 1 for a group of zeros; codes are rounded to nearest even within -8
        and 7. The rule uses all 16 codes and is idempotent: encoding a decoded payload returns the same payload.
        Raises InputError for NaN or infinite weights, or scales beyond ``scale_dtype``.
        """
        values = as_float32(weight, cls.name)
        columns = weight.shape[-1]
        check_group_size(cls.name, group_size, columns)
        group_size = min(group_size, columns)
        groups = in_groups(values, group_size)
        scales = torch.maximum(groups.amax(-1) / 7, groups.amin(-1) / -8)
        scales = torch.where(scales > 0, scales, 1.0).to(scale_dtype)
        # A group so small that its scale rounds to zero becomes zeros under the scale 1.
        scales = torch.where(scales > 0, scales, torch.ones_like(scales))
        if not bool(torch.isfinite(scales).all()):
            raise InputError(f"{cls.name}: a scale is beyond {torch.finfo(scale_dtype).max}; take scale_dtype float32")
        codes = (groups / scales.float().unsqueeze(-1)).round_().clamp_(-8, 7).add_(8).to(torch.uint8).flatten(-2)
        padded = pad_last(codes, _padded_cols(columns, group_size), columns, 8)
        return cls(shape=tuple(weight.shape), codes=pack_nibbles(padded), scales=scales, group_size=group_size)

    def decode(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return ``[..., N, K]``: (code - 8) * scale as one float32 product, rounded once to ``dtype``."""
        table = pair_table(tuple(float(code - 8) for code in range(16)), self.codes.device)
        scales = self._scales()
        return self._decode(dtype, table, lambda span: scales[span].float(), self.group_size)

    @classmethod
    def from_parts(
        cls, parts: Mapping[str, Tensor], *, storage: str, shape: tuple[int, ...], group_size: int | None = None
    ) -> Self:
        """Take the words as bytes and the scales as stored.

        group_size: the config's; None derives it from the columns of the scales. Raises TensorMismatchError if more
        than one size fits, and if ``.weight_shape``, a tensor's shape, a zero point other than 8 or a column order
        contradicts symmetric weights in order.
        """
        integers = read_integers(cls, 4, parts, storage=storage, shape=shape, group_size=group_size)
        if integers.zeros is not None and bool((integers.zeros != 8).any()):
            low = int(integers.zeros.min())
            high = int(integers.zeros.max())
            raise TensorMismatchError(
                f"{cls.name}: the config declares symmetric weights, the zero points are {low} to {high} instead of 8; "
                "correct sym or checkpoint_format in quantization_config"
            )
        return cls(
            shape=tuple(shape),
            codes=_with_zero_padding(integers.codes, shape[-1], integers.group_size),
            scales=integers.scales,
            group_size=integers.group_size,
        )

    def columns(self, start: int, stop: int) -> Self:
        """Return input columns ``start:stop``; both on group boundaries, or multiples of 8 with one scale per row."""
        columns = self.shape[-1]
        group = self.group_size
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


def _padded_cols(columns: int, group_size: int) -> int:
    whole = -(-columns // group_size) * group_size
    return -(-whole // 8) * 8


def _with_zero_padding(codes: Tensor, columns: int, group_size: int) -> Tensor:
    """Return bytes ``[..., n]`` cut or padded to the padded width, with code 8 in every column beyond K."""
    padded = pad_last(codes, _padded_cols(columns, group_size) // 2, -(-columns // 2), _ZERO_BYTE)
    if columns % 2:
        padded = padded.clone()
        last = padded[..., columns // 2]
        padded[..., columns // 2] = (last & 0x0F) | (_ZERO_BYTE & 0xF0)
    return padded
