"""FP8 blocks: E4M3 codes with one float32 scale per block of rows and columns, 128 x 128 unless stated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

import torch

from ..errors import InputError
from .codecs import as_float32, decode_rows, e4m3_codes, e4m3_is_nan, e4m3_values, fp8_scales, look_up, scale_groups_
from .intake import any_per_matrix, check_cut, find_storage, promote_scales, take
from .payload import Part, Payload, Storage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

__all__ = ["Fp8Block"]

_BLOCK = (128, 128)


def _storage(name: str, suffix: str) -> Storage:
    scale = Part(suffix=suffix, dtypes=("F32", "BF16", "F8_E8M0"), rows_per=_BLOCK[0], columns_per=_BLOCK[1])
    return Storage(name=name, parts=(Part(suffix=".weight", dtypes=("F8_E4M3",)), scale))


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Block(Payload):
    """FP8 blocks: ``codes [..., N, K]`` float8_e4m3fn, ``scales [..., ceil(N/b0), ceil(K/b1)]`` float32.

    block: (b0, b1), rows and columns of one block; the last block of either axis may be partial.
    """

    codes: Tensor
    scales: Tensor
    block: tuple[int, int] = _BLOCK

    name: ClassVar[str] = "fp8_block"
    group: ClassVar[int] = _BLOCK[1]
    row_block: ClassVar[int] = _BLOCK[0]
    tolerance: ClassVar[float] = 0.03
    storages: ClassVar[tuple[Storage, ...]] = (
        _storage("finegrained-fp8", ".weight_scale_inv"),
        _storage("deepseek-v4", ".scale"),
        _storage("compressed-tensors", ".weight_scale"),
        _storage("modelopt", ".weight_scale"),
    )

    @classmethod
    def encode(cls, weight: Tensor, *, power_of_two: bool = False, block: tuple[int, int] = _BLOCK) -> Self:
        """Quantise ``weight [..., N, K]``: scale amax / 448 of the block, codes to nearest even.

        power_of_two: round the scale up to a power of two, so that nothing saturates. A block of zeros gets
        scale 1. Raises InputError for NaN or infinite weights.
        """
        values = as_float32(weight, cls.name)
        *lead, rows, columns = weight.shape
        padded = torch.nn.functional.pad(values, (0, -columns % block[1], 0, -rows % block[0]))
        blocks = padded.view(*lead, -1, block[0], padded.shape[-1] // block[1], block[1])
        scales = fp8_scales(blocks.abs().amax((-3, -1)), exponent_only=power_of_two)
        codes = e4m3_codes(blocks / scales[..., None, :, None]).view(padded.shape)
        codes = codes[..., :rows, :columns].contiguous()
        return cls(shape=tuple(weight.shape), codes=codes, scales=scales, block=block)

    def decode(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return ``[..., N, K]``: e4m3(code) * scale as one float32 product, rounded once to ``dtype``."""
        table = e4m3_values(self.codes.device)
        codes = self.codes.view(torch.uint8).reshape(-1, self.shape[-1])
        spread = self.scales.repeat_interleave(self.block[0], dim=-2)[..., : self.shape[-2], :]
        spread = spread.reshape(-1, spread.shape[-1])

        def rows(start: int, stop: int) -> Tensor:
            return scale_groups_(look_up(table, codes[start:stop]), spread[start:stop], self.block[1])

        return decode_rows(self.shape, dtype, self.codes.device, rows)

    @classmethod
    def from_parts(
        cls,
        parts: Mapping[str, Tensor],
        *,
        storage: str,
        shape: tuple[int, ...],
        block: tuple[int, int] = _BLOCK,
    ) -> Self:
        """Take codes as stored and promote F32, BF16 or E8M0 scales to float32, exactly.

        block: the config's ``weight_block_size``. ModelOpt's scales ``[N/128, 1, K/128, 1]`` are accepted.
        """
        if min(block) < 1:
            raise InputError(f"{cls.name}: block is {block}, allowed: two positive sizes, usually (128, 128)")
        layout = find_storage(cls, storage)
        weight, scale = layout.parts
        layout = replace(layout, parts=(weight, replace(scale, rows_per=block[0], columns_per=block[1])))
        taken = take(cls, layout, parts, shape)
        scales = promote_scales(taken[scale.suffix])
        return cls(shape=tuple(shape), codes=taken[".weight"], scales=scales, block=(block[0], block[1]))

    def faults(self) -> Tensor:
        """Return a bool tensor over the leading dimensions: True for a forbidden scale or a NaN code.

        Forbidden are NaN, infinite and negative scales, and a zero scale over codes that are not all zero.
        """
        leading = len(self.shape) - 2
        bad = any_per_matrix(~torch.isfinite(self.scales) | (self.scales < 0), leading)
        bad |= any_per_matrix(e4m3_is_nan(self.codes), leading)
        zero = self.scales == 0
        if bool(zero.any()):
            rows = zero.repeat_interleave(self.block[0], dim=-2)[..., : self.shape[-2], :]
            mask = rows.repeat_interleave(self.block[1], dim=-1)[..., : self.shape[-1]]
            bad |= any_per_matrix(mask & ((self.codes.view(torch.uint8) & 0x7F) != 0), leading)
        return bad

    def columns(self, start: int, stop: int) -> Self:
        """Return a view of input columns ``start:stop``; both on block boundaries or at the end."""
        step = self.block[1]
        check_cut(f"{self.name}: input columns", start, stop, self.shape[-1], step)
        return replace(
            self,
            shape=(*self.shape[:-1], stop - start),
            codes=self.codes[..., start:stop],
            scales=self.scales[..., start // step : -(-stop // step)],
        )

    def rows(self, start: int, stop: int) -> Self:
        """Return a view of output rows ``start:stop``; both on block boundaries or at the end."""
        step = self.block[0]
        check_cut(f"{self.name}: output rows", start, stop, self.shape[-2], step)
        return replace(
            self,
            shape=(*self.shape[:-2], stop - start, self.shape[-1]),
            codes=self.codes[..., start:stop, :],
            scales=self.scales[..., start // step : -(-stop // step), :],
        )
