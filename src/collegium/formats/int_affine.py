"""INT4 and INT8 with a scale and a zero point per row and group of columns, in column order or with a group index."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from .codecs import decode_rows, unpack_nibbles
from .grouped import Scaled
from .integers import GROUP, awq, compressed, gptq, read_integers
from .payload import Storage

__all__ = ["Int4Affine", "Int4Ordered", "Int8Affine", "Int8Ordered"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Affine(Scaled):
    """Integers with zero points; value = (code - zero) * scale.

    codes: uint8 ``[..., N, ceil(K * bits / 8)]``, low nibble first. scales: ``[..., N, G]`` bfloat16, float16 or
    float32. zeros: ``[..., N, G]`` uint8, the code of zero. group_size: columns per group.
    """

    zeros: Tensor
    group_size: int

    group: ClassVar[int] = GROUP
    read_only: ClassVar[bool] = True
    by_row: ClassVar[tuple[str, ...]] = ("codes", "scales", "zeros")
    bits: ClassVar[int]

    @property
    def scale_block(self) -> tuple[int, int]:
        """One row and the columns of a group."""
        return 1, self.group_size

    def decode(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return ``[..., N, K]``: (code - zero) * scale as one float32 product, rounded once to ``dtype``."""
        count, columns = self.shape[-2:]
        codes, scales, zeros = (t.reshape(-1, t.shape[-1]) for t in (self.codes, self.scales, self.zeros))
        group_of = self._groups()

        def rows(start: int, stop: int) -> Tensor:
            raw = codes[start:stop]
            values = (raw if self.bits == 8 else unpack_nibbles(raw))[:, :columns].float()
            matrix = torch.arange(start, stop, device=codes.device) // count if len(group_of) > 1 else 0
            index = group_of[matrix].expand(stop - start, -1)
            values -= zeros[start:stop].float().gather(1, index)
            return values.mul_(scales[start:stop].float().gather(1, index))

        return decode_rows(self.shape, dtype, codes.device, rows)

    def _groups(self) -> Tensor:
        """Return the group of each column, int64 ``[1, K]``, or ``[M, K]`` for M matrices."""
        return (torch.arange(self.shape[-1], device=self.codes.device) // self.group_size).unsqueeze(0)

    @classmethod
    def from_parts(
        cls, parts: Mapping[str, Tensor], *, storage: str, shape: tuple[int, ...], group_size: int | None = None
    ) -> Self:
        """Arrange the codes by rows; arguments and errors as for ``integers.read_integers``.

        A storage without zero points is symmetric: zero is the middle code.
        """
        integers = read_integers(cls, cls.bits, parts, storage=storage, shape=shape, group_size=group_size)
        order = {} if integers.group_of is None else {"group_of": integers.group_of}
        middle = torch.full_like(integers.scales, 2 ** (cls.bits - 1), dtype=torch.uint8)
        return cls(
            shape=tuple(shape),
            codes=integers.codes,
            scales=integers.scales,
            zeros=middle if integers.zeros is None else integers.zeros,
            group_size=integers.group_size,
            **order,
        )

    def _runs(self) -> tuple[int, Mapping[str, tuple[int, int]]]:
        size = self.group_size
        step = 8 if size >= self.shape[-1] else size
        return step, {"codes": (8 // self.bits, 1), "scales": (size, 1), "zeros": (size, 1)}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ordered(_Affine):
    """Integers with activation order. group_of: int32 ``[..., K]``, the group of each column."""

    group_of: Tensor

    ordered_columns: ClassVar[bool] = True

    def _groups(self) -> Tensor:
        return self.group_of.reshape(-1, self.shape[-1]).long()

    def _runs(self) -> tuple[int, Mapping[str, tuple[int, int]]]:
        return 8, {"codes": (8 // self.bits, 1), "group_of": (1, 1)}


def _storages(bits: int, *, ordered: bool) -> tuple[Storage, ...]:
    """Return the storages that both widths share; symmetric INT4 in column order is ``int4_group``."""
    symmetric = (compressed("compressed-tensors", bits, ordered=ordered),) if ordered or bits == 8 else ()
    return (
        gptq("gptq", bits, ordered=ordered),
        gptq("gptq_v2", bits, ordered=ordered),
        *symmetric,
        compressed("compressed-tensors-asymmetric", bits, ordered=ordered),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Int4Affine(_Affine):
    """INT4 with zero points: value = (code - zero) * scale, code and zero 0 to 15."""

    name: ClassVar[str] = "int4_affine"
    bits: ClassVar[int] = 4
    storages: ClassVar[tuple[Storage, ...]] = (*_storages(4, ordered=False), awq())


@dataclass(frozen=True, kw_only=True, slots=True)
class Int8Affine(_Affine):
    """INT8 with zero points: value = (code - zero) * scale, code and zero 0 to 255."""

    name: ClassVar[str] = "int8_affine"
    bits: ClassVar[int] = 8
    storages: ClassVar[tuple[Storage, ...]] = (*_storages(8, ordered=False), compressed("int-quantized", 8))


@dataclass(frozen=True, kw_only=True, slots=True)
class Int4Ordered(_Ordered):
    """``Int4Affine`` with an index that assigns columns to groups."""

    name: ClassVar[str] = "int4_ordered"
    bits: ClassVar[int] = 4
    storages: ClassVar[tuple[Storage, ...]] = _storages(4, ordered=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Int8Ordered(_Ordered):
    """``Int8Affine`` with an index that assigns columns to groups."""

    name: ClassVar[str] = "int8_ordered"
    bits: ClassVar[int] = 8
    storages: ClassVar[tuple[Storage, ...]] = _storages(8, ordered=True)
