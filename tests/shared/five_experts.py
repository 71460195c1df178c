"""Packed weights of five experts and rows for them: what the tests of large-batch products multiply."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from collegium.experts.triton.packing import pack_fp8_block, pack_fp8_rows, pack_plain
from collegium.formats import by_name
from collegium.ops.quantize import activation_format
from collegium.testing.compare import heavy_tailed

if TYPE_CHECKING:
    from torch import Tensor

    from collegium.experts.triton.matrix import PackedMatrix


def five_experts(weights: str, parts: int, n_out: int, k_in: int, *, bias: bool) -> tuple[PackedMatrix, Tensor]:
    """Return packed weights ``[5, parts, n_out, k_in]`` in BF16 or FP8, and what they stand for, in float32."""
    values = torch.stack([heavy_tailed(n_out * parts, k_in, seed=5 + e).view(parts, n_out, k_in) for e in range(5)])
    payload: Any = by_name(weights).encode(values / k_in**0.5)
    added = torch.randn(5, parts, n_out).bfloat16() if bias else None
    if weights == "bf16":
        return pack_plain(payload, added), payload.decode()
    pack = pack_fp8_block if weights == "fp8_block" else pack_fp8_rows
    return pack(payload, added, native=True), payload.decode()


def rows_of(act: str | None, k_in: int, count: int) -> tuple[Tensor, Tensor | None]:
    """Return ``count`` rows of k_in columns as codes of ``act`` and their scales, or in BF16 and None."""
    x = heavy_tailed(count, k_in, seed=3).bfloat16()
    if act is None:
        return x, None
    made = activation_format(act).quantize(x)
    return made.codes, made.scales
