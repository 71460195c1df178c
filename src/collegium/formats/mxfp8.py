"""MXFP8: E4M3 codes with one E8M0 scale per 32 input columns."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from .codecs import as_float32, e4m3_codes, e4m3_is_nan, e4m3_values, e8m0_codes, e8m0_values, in_groups, look_up
from .find_storage import find_storage, take
from .grouped import Grouped
from .payload import Part, Storage

__all__ = ["MxFp8"]

_E4M3_EXPONENT = 8


def _storage(name: str, suffix: str) -> Storage:
    weight = Part(suffix=".weight", dtypes=("F8_E4M3",))
    scale = Part(suffix=suffix, dtypes=("U8", "F8_E8M0"), columns_per=32, repeats=True)
    return Storage(name=name, parts=(weight, scale))


@dataclass(frozen=True, kw_only=True, slots=True)
class MxFp8(Grouped):
    """MXFP8 weights: ``codes [..., N, Kp]`` float8_e4m3fn and ``scales [..., N, Kp/32]`` uint8 (E8M0)."""

    name: ClassVar[str] = "mxfp8"
    group: ClassVar[int] = 32
    e8m0_scales: ClassVar[bool] = True
    per_byte: ClassVar[int] = 1
    tolerance: ClassVar[float] = 0.035
    storages: ClassVar[tuple[Storage, ...]] = (
        _storage("compressed-tensors", ".weight_scale"),
        _storage("modelopt", ".weight_scale"),
        _storage("minimax-m3", ".weight_scale_inv"),
    )

    @classmethod
    def encode(cls, weight: Tensor) -> Self:
        """Quantise ``weight [..., N, K]``: scale 2^(floor(log2(amax)) - 8), nearest even codes, saturating.

        Scale rule: OCP MX 1.0, section 6.3. Raises InputError for NaN or infinite weights.
        """
        groups = in_groups(as_float32(weight, cls.name), 32)
        scales = e8m0_codes(groups.abs().amax(-1), _E4M3_EXPONENT)
        codes = e4m3_codes(groups / look_up(e8m0_values(weight.device), scales).unsqueeze(-1))
        return cls(shape=tuple(weight.shape), codes=codes.flatten(-2), scales=scales)

    def decode(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return ``[..., N, K]``: e4m3(code) * 2^(scale - 127) in float32, rounded once to ``dtype``."""
        powers = e8m0_values(self.codes.device)
        scales = self._scales()
        return self._decode(dtype, e4m3_values(powers.device), lambda span: look_up(powers, scales[span]), self.group)

    @classmethod
    def from_parts(cls, parts: Mapping[str, Tensor], *, storage: str, shape: tuple[int, ...]) -> Self:
        """Take codes and scale bytes as stored; a scale row that covers several rows (ModelOpt) is repeated."""
        codes, scales = (t.view(torch.uint8) for t in take(cls, find_storage(cls, storage), parts, shape).values())
        codes = cls._whole_groups(codes, shape)
        if scales.shape[-2] != shape[-2]:
            scales = scales.repeat_interleave(shape[-2] // scales.shape[-2], dim=-2)
        return cls(shape=tuple(shape), codes=codes.view(torch.float8_e4m3fn), scales=scales)

    def faults(self) -> Tensor:
        """Return a bool tensor over the leading dimensions: True for a scale byte 255 or a NaN code."""
        return self._per_matrix(self.scales == 255) | self._per_matrix(e4m3_is_nan(self.codes))
