"""Four-bit weights and tokens that large batches multiply in registers: how to encode and pack weights, and rows."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from collegium.dummy.encoders import affine
from collegium.experts.triton.packing import pack_int, pack_mx, pack_nvfp4, pack_w4a8
from collegium.formats import Int4Group, MxFp4, NvFp4
from collegium.ops.operand import operand, transpose_scales
from collegium.ops.quantize import AS_IS, REORDERED, activation_format

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from collegium.experts.triton.matrix import PackedMatrix

__all__ = ["RECIPES", "Recipe", "Rows"]


class Rows(NamedTuple):
    """Rows of tokens and the scales of codes as a product reads them, and the numbers that they stand for."""

    x: Tensor
    scale: Tensor | None
    values: Tensor


class Recipe(NamedTuple):
    """Weights and tokens. encode: weights ``[E, P, N, K]`` to a payload. pack: payload and bias to a matrix.

    tokens: the activation format.
    """

    encode: Callable[[Tensor], Any]
    pack: Callable[[Any, Tensor | None], PackedMatrix]
    tokens: str

    def rows(self, x: Tensor) -> Rows:
        """Return ``x [R, K]`` as rows of this recipe."""
        x = x.bfloat16()
        if self.tokens == "bf16":
            return Rows(*operand(x, None, order=AS_IS), x.float())
        codes, scale = operand(x, self.tokens, order=REORDERED)
        assert scale is not None
        plain = activation_format(self.tokens).quantize(x)
        by_column = scale
        if scale.shape[1] > 1:
            by_column = scale.repeat_interleave(128, 1)[:, : x.shape[1]]
            scale = transpose_scales(scale, None)
        return Rows(codes, scale, plain.codes.float() * by_column)


def _integers(group: int, dtype: torch.dtype) -> Callable[[Tensor], Int4Group]:
    return partial(Int4Group.encode, group_size=group, scale_dtype=dtype)


def _affine(group: int) -> Callable[[Tensor], Any]:
    return lambda weight: affine(weight, 4, group)


# Scales of integers: a float32 for a K block, two bfloat16 a word, four float32; with zero points one or four.
RECIPES = {
    "mxfp4:fp8": Recipe(MxFp4.encode, pack_w4a8, "fp8_token"),
    "nvfp4:fp8": Recipe(NvFp4.encode, pack_w4a8, "fp8_token"),
    "mxfp4:fp8_group128": Recipe(MxFp4.encode, pack_w4a8, "fp8_group128"),
    "nvfp4:fp8_group128": Recipe(NvFp4.encode, pack_w4a8, "fp8_group128"),
    "mxfp4:bf16": Recipe(MxFp4.encode, pack_mx, "bf16"),
    "nvfp4:bf16": Recipe(NvFp4.encode, pack_nvfp4, "bf16"),
    "int4_128:bf16": Recipe(_integers(128, torch.bfloat16), pack_int, "bf16"),
    "int4_32:bf16": Recipe(_integers(32, torch.bfloat16), pack_int, "bf16"),
    "int4_64_fp16:bf16": Recipe(_integers(64, torch.float16), pack_int, "bf16"),
    "int4_affine_128:bf16": Recipe(_affine(128), pack_int, "bf16"),
    "int4_affine_32:bf16": Recipe(_affine(32), pack_int, "bf16"),
}
