"""NVFP4: E2M1 codes, two in a byte, one E4M3 scale per 16 input columns and one float32 scale per matrix."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from ..errors import InputError
from .codecs import E2M1_MAX, E4M3_MAX, SMALLEST_SCALE, as_float32, e2m1_codes, e2m1_pairs, in_groups, pack_nibbles
from .find_storage import find_storage, take
from .grouped import Grouped
from .payload import Part, Storage

__all__ = ["NvFp4"]

_SMALLEST_E4M3 = 2.0**-9


def _storage(name: str, weight: str, scale: str, global_scale: str, input_scale: str) -> Storage:
    # ModelOpt quantises a stack of experts along the input axis and transposes codes and scales back to input-first.
    transposed = name == "modelopt-stack"
    return Storage(
        name=name,
        parts=(
            Part(suffix=weight, dtypes=("U8",), columns_per=2, transposed=transposed),
            Part(suffix=scale, dtypes=("F8_E4M3",), columns_per=16, transposed=transposed),
            Part(suffix=global_scale, dtypes=("F32",), rows_per=0, columns_per=0),
            Part(suffix=input_scale, dtypes=("F32",), rows_per=0, columns_per=0, required=False),
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class NvFp4(Grouped):
    """NVFP4: ``codes [..., N, Kp/2]`` uint8, ``scales [..., N, Kp/16]`` e4m3, ``global_scale [...]`` float32.

    global_divides: False, the group scale is multiplied by the global scale (ModelOpt); True, divided by it
    (compressed-tensors). Gate and up are separate matrices with separate global scales.
    """

    global_scale: Tensor
    global_divides: bool = False

    name: ClassVar[str] = "nvfp4"
    group: ClassVar[int] = 16
    tolerance: ClassVar[float] = 0.105
    storages: ClassVar[tuple[Storage, ...]] = (
        _storage("modelopt", ".weight", ".weight_scale", ".weight_scale_2", ".input_scale"),
        _storage(
            "compressed-tensors", ".weight_packed", ".weight_scale", ".weight_global_scale", ".input_global_scale"
        ),
        _storage("modelopt-stack", ".weight", "_weight_scale", "_weight_scale_2", "_input_scale"),
        Storage(name="gguf", parts=(Part(suffix=".weight", dtypes=("NVFP4",), columns_per=64, inner=(36,)),)),
    )

    @classmethod
    def encode(cls, weight: Tensor, *, global_divides: bool = False, global_scale: Tensor | None = None) -> Self:
        """Quantise ``weight [..., N, K]`` by ModelOpt's rule, or with a given ``global_scale [...]``.

        The global scale is amax / (6 * 448), or 6 * 448 / amax if it divides; the group scale is e4m3(amax_group / 6 /
        global scale) within 2^-9 and 448, and 1 for a group of zeros; codes are rounded to nearest even.
        """
        groups = in_groups(as_float32(weight, cls.name), 16)
        amax = groups.abs().amax(-1)
        if global_scale is None:
            global_scale = _global_scale(amax.amax((-2, -1)), global_divides)
        elif not bool((torch.isfinite(global_scale) & (global_scale > 0)).all()):
            raise InputError(f"{cls.name}: encode needs finite positive global scales, found {global_scale}")
        global_scale = global_scale.to(amax).expand(weight.shape[:-2]).contiguous()
        spread = global_scale[..., None, None]
        exact = (amax / E2M1_MAX) * spread if global_divides else amax / (E2M1_MAX * spread)
        exact = torch.where(exact == 0, 1.0, exact)
        scales = exact.clamp(_SMALLEST_E4M3, E4M3_MAX).to(torch.float8_e4m3fn)
        steps = scales.float() / spread if global_divides else scales.float() * spread
        codes = pack_nibbles(e2m1_codes(groups / steps.unsqueeze(-1)))
        return cls(
            shape=tuple(weight.shape),
            codes=codes.flatten(-2),
            scales=scales,
            global_scale=global_scale,
            global_divides=global_divides,
        )

    def decode(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return ``[..., N, K]``: e2m1(code) * step, step = group scale times (or over) global scale.

        The step is rounded to float32, then the product; the result is rounded once to ``dtype``.
        """
        spread = self.global_scale.reshape(-1).repeat_interleave(self.shape[-2]).unsqueeze(-1)
        scales = self._scales()
        combine = torch.Tensor.div_ if self.global_divides else torch.Tensor.mul_

        def steps(span: slice) -> Tensor:
            return combine(scales[span].float(), spread[span])

        return self._decode(dtype, e2m1_pairs(self.codes.device), steps, self.group)

    @classmethod
    def from_parts(cls, parts: Mapping[str, Tensor], *, storage: str, shape: tuple[int, ...]) -> Self:
        """Take codes and scales as stored; a static input scale is accepted and ignored.

        GGUF blocks hold four scales and four times 8 bytes; the low nibbles are the first 8 elements of a group. Code 8
        is +0 in GGUF, and the global scale is 1.
        """
        if storage == "gguf":
            raw = take(cls, find_storage(cls, storage), parts, shape)[".weight"]
            groups = raw[..., 4:].unflatten(-1, (4, 8))
            nibbles = torch.cat((groups & 0xF, groups >> 4), dim=-1)
            codes = pack_nibbles(torch.where(nibbles == 8, 0, nibbles)).flatten(-3)
            columns = -(-shape[-1] // cls.group)
            return cls(
                shape=tuple(shape),
                codes=cls._whole_groups(codes[..., : 8 * columns], shape),
                scales=raw[..., :4].flatten(-2)[..., :columns].contiguous().view(torch.float8_e4m3fn),
                global_scale=torch.ones(shape[:-2], device=raw.device),
            )
        codes, scales, global_scale, *_ = take(cls, find_storage(cls, storage), parts, shape).values()
        return cls(
            shape=tuple(shape),
            codes=cls._whole_groups(codes, shape),
            scales=scales.contiguous(),
            global_scale=global_scale,
            global_divides=storage == "compressed-tensors",
        )

    def faults(self) -> Tensor:
        """Return a bool tensor over the leading dimensions: True for a forbidden scale.

        NaN and negative group scales are forbidden, as are NaN, infinite and negative global scales, a zero global
        scale that divides, and any other zero scale of codes that are not all zero.
        """
        scales = self.scales.float()
        bad = self._per_matrix(torch.isnan(scales) | (scales < 0))
        global_scale = self.global_scale
        bad |= ~torch.isfinite(global_scale) | (global_scale < 0)
        zero = (scales == 0) | (global_scale == 0)[..., None, None]
        if bool(zero.any()):
            used = (self.codes.unflatten(-1, (-1, 8)) & 0x77).amax(-1) != 0
            bad |= self._per_matrix(zero & used)
        return bad | (global_scale == 0) if self.global_divides else bad


def _global_scale(amax: Tensor, divides: bool) -> Tensor:
    full = E2M1_MAX * E4M3_MAX
    if divides:
        return torch.where(amax > 0, (full / amax).clamp(max=1 / SMALLEST_SCALE), 1.0)
    return torch.where(amax > 0, (amax / full).clamp(min=SMALLEST_SCALE), 1.0)
