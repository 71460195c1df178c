"""FP8 with one float32 scale per matrix."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from .codecs import as_float32, e4m3_codes, fp8_scales
from .find_storage import find_storage, promote_scales, take
from .fp8_channel import Fp8Channel
from .payload import Part, Payload, Storage

__all__ = ["Fp8Tensor"]


def _storage(name: str, weight_scale: str, input_scale: str, *, transposed: bool = False) -> Storage:
    dtypes = ("F32", "BF16", "F16")
    return Storage(
        name=name,
        parts=(
            Part(suffix=".weight", dtypes=("F8_E4M3",), transposed=transposed),
            Part(suffix=weight_scale, dtypes=dtypes, rows_per=0, columns_per=0),
            Part(suffix=input_scale, dtypes=dtypes, rows_per=0, columns_per=0, required=False),
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Tensor(Payload):
    """FP8, one scale per matrix: ``codes [..., N, K]`` float8_e4m3fn and ``scale [...]`` float32."""

    codes: Tensor
    scale: Tensor

    name: ClassVar[str] = "fp8_tensor"
    tolerance: ClassVar[float] = 0.03
    by_row: ClassVar[tuple[str, ...]] = ("codes",)
    # Stacks hold all experts in one tensor and join names with an underscore; ModelOpt's stacks are input-first.
    storages: ClassVar[tuple[Storage, ...]] = (
        _storage("modelopt", ".weight_scale", ".input_scale"),
        _storage("compressed-tensors", ".weight_scale", ".input_scale"),
        _storage("finegrained-fp8", ".weight_scale_inv", ".activation_scale"),
        _storage("finegrained-fp8-stack", "_scale_inv", "_activation_scale"),
        _storage("mistral", ".qscale_weight", ".qscale_act"),
        _storage("modelopt-stack", "_weight_scale", "_input_scale", transposed=True),
    )

    @classmethod
    def encode(cls, weight: Tensor) -> Self:
        """Quantise ``weight [..., N, K]``: scale amax / 448 of the matrix (1 for zeros), nearest even codes.

        Raises InputError for NaN or infinite weights.
        """
        values = as_float32(weight, cls.name)
        scale = fp8_scales(values.abs().amax((-2, -1)))
        return cls(shape=tuple(weight.shape), codes=e4m3_codes(values / scale[..., None, None]), scale=scale)

    def decode(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return ``[..., N, K]``: e4m3(code) * scale as one float32 product, rounded once to ``dtype``."""
        return self._by_row().decode(dtype)

    @classmethod
    def from_parts(cls, parts: Mapping[str, Tensor], *, storage: str, shape: tuple[int, ...]) -> Self:
        """Take codes as stored and the scale in float32; a static input scale is accepted and ignored."""
        codes, scale, *_ = take(cls, find_storage(cls, storage), parts, shape).values()
        return cls(shape=tuple(shape), codes=codes.contiguous(), scale=promote_scales(scale))

    def faults(self) -> Tensor:
        """Return a bool tensor over the leading dimensions: True for a forbidden scale or a NaN code.

        Forbidden are a NaN, infinite or negative scale, and a zero scale over codes that are not all zero.
        """
        return self._by_row().faults()

    def _by_row(self) -> Fp8Channel:
        """Return the same weights as ``Fp8Channel``, with the matrix's scale repeated for each row."""
        return Fp8Channel(shape=self.shape, codes=self.codes, scales=self.scale.unsqueeze(-1).expand(self.shape[:-1]))
