"""Unquantised weights: FP32, BF16 and FP16."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from ..errors import InputError
from .codecs import as_float32, check_decoded
from .find_storage import find_storage, take
from .payload import Part, Payload, Storage

__all__ = ["CONFIG_NAMES", "DTYPES", "FLOAT_FORMATS", "Bf16", "Fp16", "Fp32", "as_stored"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plain(Payload):
    """An unquantised format. values: ``[..., N, K]`` in the format's dtype."""

    values: Tensor
    by_row: ClassVar[tuple[str, ...]] = ("values",)
    dtype: ClassVar[torch.dtype]

    @classmethod
    def encode(cls, weight: Tensor) -> Self:
        """Round ``weight [..., N, K]`` to the format's dtype; raises InputError if a value is or becomes infinite."""
        values = as_float32(weight, cls.name).to(cls.dtype)
        overflows = int((~torch.isfinite(values)).sum())
        if overflows:
            raise InputError(
                f"{cls.name}: {overflows} of {values.numel()} weights are beyond {torch.finfo(cls.dtype).max}; "
                "encode into bf16 or fp32"
            )
        return cls(shape=tuple(weight.shape), values=values)

    def decode(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return ``[..., N, K]`` in ``dtype``; the stored tensor itself if it already has that dtype."""
        check_decoded(dtype)
        return self.values.to(dtype)

    @classmethod
    def from_parts(cls, parts: Mapping[str, Tensor], *, storage: str, shape: tuple[int, ...]) -> Self:
        """Take the part ``.weight`` as stored; raises a CheckpointError for a wrong name, dtype or shape."""
        (values,) = take(cls, find_storage(cls, storage), parts, shape).values()
        return cls(shape=tuple(shape), values=values)

    def faults(self) -> Tensor:
        """Return a bool tensor over the leading dimensions: True where a value is NaN or infinite."""
        # Both are NaN where a value is; together six times as fast as torch.isfinite of every value.
        low, high = self.values.amin((-2, -1)), self.values.amax((-2, -1))
        return ~(torch.isfinite(low) & torch.isfinite(high))

    def _runs(self) -> tuple[int, Mapping[str, tuple[int, int]]]:
        return 1, {"values": (1, 1)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp32(_Plain):
    """Float32 weights: ``values [..., N, K]`` float32."""

    name: ClassVar[str] = "fp32"
    tolerance: ClassVar[float] = 0.0
    dtype: ClassVar[torch.dtype] = torch.float32
    storages: ClassVar[tuple[Storage, ...]] = (Storage(name="plain", parts=(Part(suffix=".weight", dtypes=("F32",)),)),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bf16(_Plain):
    """BF16 weights: ``values [..., N, K]`` bfloat16."""

    name: ClassVar[str] = "bf16"
    tolerance: ClassVar[float] = 2.0e-3
    dtype: ClassVar[torch.dtype] = torch.bfloat16
    storages: ClassVar[tuple[Storage, ...]] = (
        Storage(name="plain", parts=(Part(suffix=".weight", dtypes=("BF16",)),)),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp16(_Plain):
    """FP16 weights: ``values [..., N, K]`` float16."""

    name: ClassVar[str] = "fp16"
    tolerance: ClassVar[float] = 2.5e-4
    dtype: ClassVar[torch.dtype] = torch.float16
    storages: ClassVar[tuple[Storage, ...]] = (Storage(name="plain", parts=(Part(suffix=".weight", dtypes=("F16",)),)),)


FLOAT_FORMATS: Mapping[torch.dtype, type[Fp32 | Bf16 | Fp16]] = {f.dtype: f for f in (Bf16, Fp16, Fp32)}
DTYPES: Mapping[str, torch.dtype] = {f.name: dtype for dtype, f in FLOAT_FORMATS.items()}
# format to its dtype in config.json
CONFIG_NAMES: Mapping[str, str] = {name: str(dtype).removeprefix("torch.") for name, dtype in DTYPES.items()}


def as_stored(values: Tensor) -> Fp32 | Bf16 | Fp16:
    """Wrap ``values [..., N, K]`` in the format of its dtype without a copy; raises InputError for other dtypes."""
    if values.dtype not in FLOAT_FORMATS:
        allowed = ", ".join(map(str, FLOAT_FORMATS))
        raise InputError(f"a weight is {values.dtype}; allowed: {allowed}, or a payload of collegium.formats")
    return FLOAT_FORMATS[values.dtype](values=values, shape=tuple(values.shape))
