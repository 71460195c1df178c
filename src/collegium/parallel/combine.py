"""How results return to the rank of their token: a row for each assignment, or one partial sum from each rank.

Exact: the owner of a token weights and adds its rows in slot order, like a single rank, so the bits are the same.
Reduced: each rank weights and adds its rows of a token in slot order in float32 and sends one row; the owner adds those
in the order of ranks in float32. That row is rounded once on the way, and the additions have another order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..formats.unquantised import DTYPES
from ..ops.quantize import QuantizedRows, activation_format, quantize_rows
from ..ops.weighted_sum import weighted_sum
from .message_format import code_columns, message_bytes, pack_columns, unpack_columns

if TYPE_CHECKING:
    from torch import Tensor

    from ..problem import Problem
    from .message_format import Columns

__all__ = ["ReducedCombine", "describe_return", "reduced_combine", "return_bytes"]

_CODE_FORMAT = "fp8_group128"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReducedCombine:
    """One row for each token and rank. code_format: activation format of these rows, None: unquantised in ``dtype``."""

    dtype: torch.dtype
    hidden: int
    code_format: str | None

    def columns(self) -> list[Columns]:
        """Return the column blocks of a message."""
        if self.code_format is None:
            return [(self.dtype, self.hidden)]
        return code_columns(self.code_format, self.hidden)

    def pack(self, rows: Tensor, slots: Tensor, weights: Tensor | None) -> Tensor:
        """Return messages ``[N, B]`` uint8 with this rank's partial sum of each token; ``slots [N, K]`` name rows."""
        if self.code_format is None:
            return pack_columns([weighted_sum(rows, slots, weights, self.dtype)])
        quantized = quantize_rows(weighted_sum(rows, slots, weights, torch.float32), self.code_format)
        assert quantized.scales is not None
        return pack_columns([quantized.codes, quantized.scales])

    def sum(
        self,
        messages: Tensor,
        slots: Tensor,
        *,
        dtype: torch.dtype,
        shared: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return ``[T, H]``: each token's partial sums ``slots [T, W]`` in the order of ranks, plus ``shared``."""
        blocks = unpack_columns(messages, self.columns())
        rows = blocks[0]
        if self.code_format is not None:
            quantized = QuantizedRows(codes=rows, shape=(rows.shape[0], self.hidden), scales=blocks[1])
            rows = activation_format(self.code_format).dequantize(quantized)
        return weighted_sum(rows, slots, None, dtype, shared=shared, out=out)


def reduced_combine(problem: Problem) -> ReducedCombine | None:
    """Return how partial sums travel in ``problem``, None where each assignment's row does."""
    if problem.combine == "exact":
        return None
    code_format = _CODE_FORMAT if problem.combine == "reduced_fp8" else None
    return ReducedCombine(dtype=DTYPES[problem.dtype], hidden=problem.spec.expert_hidden_size, code_format=code_format)


def return_bytes(problem: Problem) -> int:
    """Return the bytes of one returned row: an assignment's, or a partial sum."""
    reduced = reduced_combine(problem)
    if reduced is not None:
        return message_bytes(reduced.columns())
    # Experts return float32, or BF16 where that loses nothing; on a CPU this depends on the weights.
    returns_bf16 = problem.dtype == "bf16" and problem.device.kind == "cuda"
    return problem.spec.expert_hidden_size * (2 if returns_bf16 else 4)


def describe_return(problem: Problem) -> str:
    """Describe what returns, and its effect on the bits."""
    if problem.combine == "exact":
        return "one row per assignment back (bit-identical to one rank)"
    if problem.combine == "reduced":
        row_format, error = problem.dtype, "one rounding"
    else:
        row_format, error = _CODE_FORMAT, "relative error up to 1/16"
    return f"one {row_format} row per token and rank back ({error}; not bit-identical to one rank)"
