"""How rows come back: one for each assignment, or the part of a token's sum that one rank has.

Exact: the owner weights and adds the rows in slot order, as a single rank does, so the bits are the same. Reduced: each
rank weights and adds its own rows of a token in slot order in float32 and sends one row, and the owner adds those in
the order of ranks in float32. That row is rounded once on the way, and the additions are in another order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..formats.unquantised import DTYPES
from ..ops.quantize import QuantizedRows, activation_format, quantize_rows
from ..ops.weighted_sum import weighted_sum
from .message_format import joined, message_bytes, parted

if TYPE_CHECKING:
    from torch import Tensor

    from ..problem import Problem
    from .message_format import Columns

__all__ = ["ReducedCombine", "describe_return", "reduced_combine", "return_bytes"]

_FORM = "fp8_group128"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReducedCombine:
    """One row a token and rank. form: activation format of the rows on their way, None: ``dtype``."""

    dtype: torch.dtype
    hidden: int
    form: str | None

    def columns(self) -> list[Columns]:
        """Return the parts of a message."""
        if self.form is None:
            return [(self.dtype, self.hidden)]
        made = activation_format(self.form).buffers(1, self.hidden)
        return [(dtype, shape[1]) for shape, dtype in (made["codes"], made["scales"])]

    def parts(self, rows: Tensor, slots: Tensor, weights: Tensor | None) -> Tensor:
        """Return ``[N, B]`` uint8: the sum of this rank's rows of each token, ``slots [N, K]`` naming them."""
        if self.form is None:
            return joined([weighted_sum(rows, slots, weights, self.dtype)])
        found = quantize_rows(weighted_sum(rows, slots, weights, torch.float32), self.form)
        assert found.scales is not None
        return joined([found.codes, found.scales])

    def sum(
        self,
        parts: Tensor,
        slots: Tensor,
        *,
        dtype: torch.dtype,
        shared: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return ``[T, H]``: the parts ``slots [T, W]`` of each token in the order of ranks, plus ``shared``."""
        rows, *scales = parted(parts, self.columns())
        if self.form is not None:
            coded = QuantizedRows(codes=rows, shape=(rows.shape[0], self.hidden), scales=scales[0])
            rows = activation_format(self.form).dequantize(coded)
        return weighted_sum(rows, slots, None, dtype, shared=shared, out=out)


def reduced_combine(problem: Problem) -> ReducedCombine | None:
    """Return how parts of sums travel in ``problem``, None where each row does."""
    if problem.combine == "exact":
        return None
    form = _FORM if problem.combine == "reduced_fp8" else None
    return ReducedCombine(dtype=DTYPES[problem.dtype], hidden=problem.spec.expert_hidden_size, form=form)


def return_bytes(problem: Problem) -> int:
    """Return the bytes of what comes back at once: a row of the experts, or a rank's sum."""
    reduced = reduced_combine(problem)
    if reduced is not None:
        return message_bytes(reduced.columns())
    # Experts return float32, or BF16 where that loses nothing, which a CPU decides by the weights.
    narrow = problem.dtype == "bf16" and problem.device.kind == "cuda"
    return problem.spec.expert_hidden_size * (2 if narrow else 4)


def describe_return(problem: Problem) -> str:
    """Return in words what comes back, and what that does to the bits."""
    if problem.combine == "exact":
        return "a row for each assignment back, with the bits of one rank"
    kind, off = (problem.dtype, "rounded once") if problem.combine == "reduced" else (_FORM, "off by up to 1/16")
    return f"one {kind} row for each token and rank back, {off}: not the bits of one rank"
