"""NVFP4: E2M1 codes, two in a byte, one E4M3 scale per 16 input columns and one float32 scale per matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import torch

from ..errors import InputError
from .codecs import (
    E2M1_MAX,
    E4M3_MAX,
    SMALLEST_SCALE,
    as_float32,
    e2m1_codes,
    e2m1_pairs,
    in_groups,
    pack_nibbles,
    split_last,
)
from .grouped import Grouped
from .intake import any_per_matrix, find_storage, take
from .payload import Part, Storage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

__all__ = ["NvFp4", "Reconciliation", "reconcile"]

_SMALLEST_E4M3 = 2.0**-9


def _storage(name: str, weight: str, scale: str, global_scale: str, input_scale: str) -> Storage:
    # ModelOpt quantises a stack of experts along the input axis and turns codes and scales back to input-first
    turned = name == "modelopt-stack"
    return Storage(
        name=name,
        parts=(
            Part(suffix=weight, dtypes=("U8",), columns_per=2, transposed=turned),
            Part(suffix=scale, dtypes=("F8_E4M3",), columns_per=16, transposed=turned),
            Part(suffix=global_scale, dtypes=("F32",), rows_per=0, columns_per=0),
            Part(suffix=input_scale, dtypes=("F32",), rows_per=0, columns_per=0, required=False),
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class NvFp4(Grouped):
    """NVFP4: ``codes [..., N, Kp/2]`` uint8, ``scales [..., N, Kp/16]`` e4m3, ``global_scale [...]`` float32.

    global_divides: False, the group scale is multiplied by the global scale (ModelOpt); True, divided by it
    (compressed-tensors). Gate and up are separate matrices and keep their own global scales.
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
    )

    @classmethod
    def encode(cls, weight: Tensor, *, global_divides: bool = False, global_scale: Tensor | None = None) -> Self:
        """Quantise ``weight [..., N, K]`` by ModelOpt's rule, or with a given ``global_scale [...]``.

        The global scale is amax / (6 * 448), or its counterpart 6 * 448 / amax when it divides; the group
        scale is e4m3(amax_group / 6 / global scale) within 2^-9 and 448, and 1 for a group of zeros; codes go
        to nearest even.
        """
        groups = in_groups(as_float32(weight, cls.name), 16)
        amax = groups.abs().amax(-1)
        if global_scale is None:
            global_scale = _global_scale(amax.amax((-2, -1)), global_divides)
        elif not bool((torch.isfinite(global_scale) & (global_scale > 0)).all()):
            raise InputError(f"{cls.name}: encode needs finite positive global scales, found {global_scale}")
        global_scale = global_scale.to(amax).expand(weight.shape[:-2]).contiguous()
        spread = global_scale[..., None, None]
        wanted = (amax / E2M1_MAX) * spread if global_divides else amax / (E2M1_MAX * spread)
        wanted = torch.where(wanted == 0, 1.0, wanted)
        scales = wanted.clamp(_SMALLEST_E4M3, E4M3_MAX).to(torch.float8_e4m3fn)
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
        codes = self.codes.reshape(-1, self.codes.shape[-1])
        scales = self.scales.reshape(-1, self.scales.shape[-1])
        spread = self.global_scale.reshape(-1).repeat_interleave(self.shape[-2]).unsqueeze(-1)

        def steps(start: int, stop: int) -> Tensor:
            group_scales = scales[start:stop].float()
            if self.global_divides:
                return group_scales.div_(spread[start:stop])
            return group_scales.mul_(spread[start:stop])

        return self._decode(dtype, e2m1_pairs(codes.device), codes, steps)

    @classmethod
    def from_parts(cls, parts: Mapping[str, Tensor], *, storage: str, shape: tuple[int, ...]) -> Self:
        """Take codes and scales as stored; a static input scale is accepted and not kept."""
        layout = find_storage(cls, storage)
        taken = take(cls, layout, parts, shape)
        codes, scales, global_scale = (taken[part.suffix] for part in layout.parts[:3])
        return cls(
            shape=tuple(shape),
            codes=cls._whole_groups(codes, shape),
            scales=scales.contiguous(),
            global_scale=global_scale,
            global_divides=storage == "compressed-tensors",
        )

    def faults(self) -> Tensor:
        """Return a bool tensor over the leading dimensions: True for a forbidden scale.

        Forbidden are NaN and negative group scales, NaN, infinite and negative global scales, zero where it
        divides, and any other zero scale over codes that are not all zero.
        """
        leading = len(self.shape) - 2
        scales = self.scales.float()
        bad = any_per_matrix(torch.isnan(scales) | (scales < 0), leading)
        own = self.global_scale
        bad |= ~torch.isfinite(own) | (own < 0)
        zero = (scales == 0) | (own == 0)[..., None, None]
        if bool(zero.any()):
            used = (split_last(self.codes.contiguous(), 8) & 0x77).amax(-1) != 0
            bad |= any_per_matrix(zero & used, leading)
        return bad | (own == 0) if self.global_divides else bad


def _global_scale(amax: Tensor, divides: bool) -> Tensor:
    full = E2M1_MAX * E4M3_MAX
    if divides:
        return torch.where(amax > 0, (full / amax).clamp(max=1 / SMALLEST_SCALE), 1.0)
    return torch.where(amax > 0, (amax / full).clamp(min=SMALLEST_SCALE), 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reconciliation:
    """The answer of ``reconcile`` for gate and up payloads with leading dimensions ``[...]``.

    gate, up: payloads that share ``global_scale`` and decode to the same bits as before, or None when any
    matrix would change. rounded: ``[...]`` int64, group scales E4M3 cannot hold for the better of the two
    global scales. groups: group scales of gate and up together, per matrix. ratio: ``[...]`` float64, global
    scale gate / up.
    """

    gate: NvFp4 | None
    up: NvFp4 | None
    rounded: Tensor
    groups: int
    ratio: Tensor

    @property
    def exact(self) -> bool:
        """Whether gate and up now share their global scales without any rounding."""
        return self.gate is not None


def reconcile(gate: NvFp4, up: NvFp4) -> Reconciliation:
    """Bring gate and up ``[..., I, H]`` to one global scale a pair, only if no group scale must be rounded.

    For each matrix both existing global scales are tried for the pair; a group scale moves by the ratio of
    the two scales and must be an E4M3 number afterwards. Pure; raises InputError when the two are not a pair.
    """
    if gate.shape != up.shape or gate.global_divides != up.global_divides:
        raise InputError(
            f"reconcile needs gate and up of one shape and one global-scale rule, found {list(gate.shape)} "
            f"(divides: {gate.global_divides}) and {list(up.shape)} (divides: {up.global_divides})"
        )
    # If the global scale multiplies, to_gate moves up's group scales; gate's own stay, and the reverse.
    to_gate, lost_to_gate = _rescaled(up, gate.global_scale)
    to_up, lost_to_up = _rescaled(gate, up.global_scale)
    keep_gate = lost_to_gate <= lost_to_up
    rounded = torch.where(keep_gate, lost_to_gate, lost_to_up)
    exact = not bool(rounded.any())
    pick = keep_gate[..., None, None]
    shared = torch.where(keep_gate, gate.global_scale, up.global_scale)
    return Reconciliation(
        gate=_with_scales(gate, pick, gate.scales, to_up, shared) if exact else None,
        up=_with_scales(up, pick, to_gate, up.scales, shared) if exact else None,
        rounded=rounded,
        groups=2 * gate.scales.shape[-2] * gate.scales.shape[-1],
        ratio=gate.global_scale.double() / up.global_scale.double(),
    )


def _rescaled(payload: NvFp4, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return group scales for the global scale ``target [...]`` and how many are not exact, per matrix."""
    own = payload.global_scale.double()[..., None, None]
    wanted = target.double()[..., None, None]
    if payload.global_divides:
        own, wanted = wanted, own
    # An E4M3 number has 4 significant bits and a float32 24: the product is exact in float64, == is a proof.
    product = payload.scales.double() * own
    moved = (product / wanted).clamp(max=E4M3_MAX).float().to(torch.float8_e4m3fn)
    differs = moved.double() * wanted != product
    return moved, differs.flatten(-2).sum(-1)


def _with_scales(payload: NvFp4, pick: Tensor, first: Tensor, second: Tensor, shared: Tensor) -> NvFp4:
    scales = torch.where(pick, first.view(torch.uint8), second.view(torch.uint8)).view(torch.float8_e4m3fn)
    return NvFp4(
        shape=payload.shape,
        codes=payload.codes,
        scales=scales,
        global_scale=shared,
        global_divides=payload.global_divides,
    )
