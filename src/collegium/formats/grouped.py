"""Base classes of the formats with codes and scales: checks, cuts and the decode loop."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from .codecs import decode_rows, e4m3_is_nan, look_up, scale_groups_
from .find_storage import pad_last
from .payload import Payload

__all__ = ["Grouped", "Scaled"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaled(Payload):
    """A format with codes and scales that multiply them."""

    codes: Tensor
    scales: Tensor

    def faults(self) -> Tensor:
        """Return a bool tensor over the leading dimensions: True for a forbidden scale or a NaN code.

        NaN, infinite and negative scales are forbidden, and zero scales of groups with codes other than zero.
        """
        bad = self._per_matrix(~torch.isfinite(self.scales) | (self.scales < 0))
        if self.codes.dtype == torch.float8_e4m3fn:
            bad |= self._per_matrix(e4m3_is_nan(self.codes))
        zero = self.scales == 0
        if bool(zero.any()):
            # With scale 1 where the scale is zero and 0 elsewhere, only codes that must be zero are decoded.
            bad |= self._per_matrix(replace(self, scales=zero.float()).decode() != 0)
        return bad

    def _scales(self) -> Tensor:
        """Return the stored scales ``[R, G]`` of rows counted over all leading dimensions."""
        return self.scales.reshape(-1, self.scales.shape[-1])

    def _decode(self, dtype: torch.dtype, table: Tensor, scales_of: Callable[[slice], Tensor], group: int) -> Tensor:
        """Decode the codes with a table and multiply by the scales of groups of ``group`` columns.

        table: 256 float32 values, or 256 pairs of them for two codes per byte. scales_of: returns the scales, float32
        ``[r, G]``, of a span of rows, counted over all leading dimensions.
        """
        codes = self.codes.view(torch.uint8).reshape(-1, self.codes.shape[-1])

        def rows(start: int, stop: int) -> Tensor:
            values = look_up(table, codes[start:stop]).view(torch.float32)[:, : self.shape[-1]]
            return scale_groups_(values, scales_of(slice(start, stop)), group)

        return decode_rows(self.shape, dtype, codes.device, rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Grouped(Scaled):
    """codes: ``[..., N, Kp / per_byte]``. scales: ``[..., N, ceil(K / group)]``. Kp: K up to a whole group.

    per_byte: codes in one stored byte, 2 for 4-bit codes (low nibble first) and 1 for 8-bit codes.
    """

    per_byte: ClassVar[int] = 2

    def _runs(self) -> tuple[int, Mapping[str, tuple[int, int]]]:
        return self.group, {"codes": (self.group, self.group // self.per_byte), "scales": (self.group, 1)}

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
