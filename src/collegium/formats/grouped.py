"""What the formats with one scale per row and group of columns share: checks, cuts and the decode loop."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

import torch

from .codecs import decode_rows, look_up, scale_groups_
from .intake import check_cut, pad_last
from .payload import Payload

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["Grouped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Grouped(Payload):
    """codes: ``[..., N, Kp / per_byte]``. scales: ``[..., N, ceil(K / group)]``. Kp: K up to a whole group.

    per_byte: codes in one stored byte, 2 for 4-bit codes (low nibble first) and 1 for 8-bit codes.
    """

    codes: Tensor
    scales: Tensor
    per_byte: ClassVar[int] = 2

    def columns(self, start: int, stop: int) -> Self:
        """Return a view of input columns ``start:stop``; both on group boundaries or at the end."""
        group = self.group
        check_cut(f"{self.name}: input columns", start, stop, self.shape[-1], group)
        first, last = start // group, -(-stop // group)
        width = group // self.per_byte
        return replace(
            self,
            shape=(*self.shape[:-1], stop - start),
            codes=self.codes[..., first * width : last * width],
            scales=self.scales[..., first:last],
        )

    @classmethod
    def _whole_groups(cls, codes: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return stored uint8 codes ``[..., N, any]`` padded with zeros beyond K to whole groups."""
        columns = shape[-1]
        size = -(-columns // cls.group) * cls.group // cls.per_byte
        codes = codes.reshape(*shape[:-1], -1)
        padded = pad_last(codes, size, -(-columns // cls.per_byte), 0)
        if cls.per_byte == 2 and columns % 2:
            padded = padded.clone()
            padded[..., columns // 2] &= 0x0F
        return padded

    def _decode(self, dtype: torch.dtype, table: Tensor, scales_of: Callable[[Tensor, slice], Tensor]) -> Tensor:
        """Decode the codes by a float32 table or one of float32 pairs, times the scales.

        scales_of: the stored scales ``[r, G]`` of a span of rows, counted over all leading dimensions, in float32.
        """
        codes, scales = (t.reshape(-1, t.shape[-1]) for t in (self.codes.view(torch.uint8), self.scales))

        def rows(start: int, stop: int) -> Tensor:
            values = look_up(table, codes[start:stop])
            if self.per_byte == 2:
                values = values.view(torch.float32)
            return scale_groups_(values, scales_of(scales[start:stop], slice(start, stop)), self.group)

        return decode_rows(self.shape, dtype, codes.device, rows)
