"""FP8 with one float32 scale per output row."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from .codecs import as_float32, e4m3_codes, e4m3_values, fp8_scales
from .find_storage import find_storage, promote_scales, take
from .grouped import Scaled
from .payload import Part, Storage

__all__ = ["Fp8Channel"]


def _storage(name: str, inner: tuple[int, ...]) -> Storage:
    weight = Part(suffix=".weight", dtypes=("F8_E4M3",))
    scale = Part(suffix=".weight_scale", dtypes=("F32", "BF16", "F16"), columns_per=0, inner=inner)
    return Storage(name=name, parts=(weight, scale))


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Channel(Scaled):
    """FP8, one scale per output row: ``codes [..., N, K]`` float8_e4m3fn, ``scales [..., N]`` float32."""

    name: ClassVar[str] = "fp8_channel"
    tolerance: ClassVar[float] = 0.03
    storages: ClassVar[tuple[Storage, ...]] = (_storage("compressed-tensors", (1,)), _storage("modelopt", ()))

    @classmethod
    def encode(cls, weight: Tensor) -> Self:
        """Quantise ``weight [..., N, K]``: scale amax / 448 of the row (1 for zeros), codes to nearest even.

        Raises InputError for NaN or infinite weights.
        """
        values = as_float32(weight, cls.name)
        scales = fp8_scales(values.abs().amax(-1))
        return cls(shape=tuple(weight.shape), codes=e4m3_codes(values / scales.unsqueeze(-1)), scales=scales)

    def decode(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return ``[..., N, K]``: e4m3(code) * scale as one float32 product, rounded once to ``dtype``."""
        scales = self.scales.reshape(-1, 1)
        return self._decode(dtype, e4m3_values(scales.device), lambda span: scales[span], self.shape[-1])

    @classmethod
    def from_parts(cls, parts: Mapping[str, Tensor], *, storage: str, shape: tuple[int, ...]) -> Self:
        """Take codes as stored and the scales, ``[N]`` or ``[N, 1]``, in float32."""
        codes, scales = take(cls, find_storage(cls, storage), parts, shape).values()
        return cls(shape=tuple(shape), codes=codes, scales=promote_scales(scales).reshape(shape[:-1]))
