"""MXFP4: E2M1 codes, two in a byte, with one E8M0 scale per 32 input columns."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from .codecs import as_float32, e2m1_codes, e2m1_pairs, e8m0_codes, e8m0_values, in_groups, look_up, pack_nibbles
from .find_storage import find_storage, take
from .grouped import Grouped
from .payload import Part, Storage

__all__ = ["MxFp4"]

_E2M1_EXPONENT = 2


def _storage(name: str, weight: Part, scale: str) -> Storage:
    return Storage(name=name, parts=(weight, Part(suffix=scale, dtypes=("U8", "F8_E8M0"), columns_per=32)))


@dataclass(frozen=True, kw_only=True, slots=True)
class MxFp4(Grouped):
    """MXFP4: ``codes [..., N, Kp/2]`` uint8, low nibble first, ``scales [..., N, Kp/32]`` uint8 (E8M0)."""

    name: ClassVar[str] = "mxfp4"
    group: ClassVar[int] = 32
    e8m0_scales: ClassVar[bool] = True
    tolerance: ClassVar[float] = 0.13
    storages: ClassVar[tuple[Storage, ...]] = (
        _storage("gpt-oss", Part(suffix="_blocks", dtypes=("U8",), columns_per=32, inner=(16,)), "_scales"),
        _storage("deepseek-v4", Part(suffix=".weight", dtypes=("I8", "U8"), columns_per=2), ".scale"),
        _storage("compressed-tensors", Part(suffix=".weight_packed", dtypes=("U8",), columns_per=2), ".weight_scale"),
        _storage("finegrained-fp8", Part(suffix=".weight", dtypes=("I8", "U8"), columns_per=2), ".weight_scale_inv"),
        _storage("finegrained-fp8-stack", Part(suffix=".weight", dtypes=("I8", "U8"), columns_per=2), "_scale_inv"),
        _storage("modelopt", Part(suffix=".weight", dtypes=("U8",), columns_per=2), ".weight_scale"),
        Storage(name="gguf", parts=(Part(suffix=".weight", dtypes=("MXFP4",), columns_per=32, inner=(17,)),)),
    )

    @classmethod
    def encode(cls, weight: Tensor) -> Self:
        """Quantise ``weight [..., N, K]``: scale 2^(floor(log2(amax)) - 2), nearest even codes, saturating.

        Scale rule: OCP MX 1.0, section 6.3. Raises InputError for NaN or infinite weights.
        """
        groups = in_groups(as_float32(weight, cls.name), 32)
        scales = e8m0_codes(groups.abs().amax(-1), _E2M1_EXPONENT)
        codes = e2m1_codes(groups / look_up(e8m0_values(weight.device), scales).unsqueeze(-1))
        return cls(shape=tuple(weight.shape), codes=pack_nibbles(codes).flatten(-2), scales=scales)

    def decode(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return ``[..., N, K]``: e2m1(code) * 2^(scale - 127) in float32, rounded once to ``dtype``."""
        powers = e8m0_values(self.codes.device)
        scales = self._scales()
        return self._decode(dtype, e2m1_pairs(powers.device), lambda span: look_up(powers, scales[span]), self.group)

    @classmethod
    def from_parts(cls, parts: Mapping[str, Tensor], *, storage: str, shape: tuple[int, ...]) -> Self:
        """Take code and scale bytes as stored, I8 and E8M0 reinterpreted, never converted.

        GGUF blocks hold a scale byte and 16 bytes; the low nibbles are elements 0 to 15, the high nibbles 16 to 31.
        Code 8 is +0 in GGUF.
        """
        taken = take(cls, find_storage(cls, storage), parts, shape)
        if storage == "gguf":
            raw = taken[".weight"]
            nibbles = torch.cat((raw[..., 1:] & 0xF, raw[..., 1:] >> 4), dim=-1)
            codes = pack_nibbles(torch.where(nibbles == 8, 0, nibbles)).flatten(-2)
            return cls(shape=tuple(shape), codes=cls._whole_groups(codes, shape), scales=raw[..., 0].contiguous())
        codes, scales = (tensor.view(torch.uint8) for tensor in taken.values())
        return cls(shape=tuple(shape), codes=cls._whole_groups(codes, shape), scales=scales)

    def faults(self) -> Tensor:
        """Return a bool tensor over the leading dimensions: True where a scale byte is 255 (NaN)."""
        return self._per_matrix(self.scales == 255)
