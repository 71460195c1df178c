"""One matrix of all experts, packed: a layout and its tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from ...kernels.arguments import Weights
from ..base import map_tensors
from .layout import Layout

__all__ = ["PackedMatrix", "RangeReport"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RangeReport:
    """What packing rounded.

    groups: group scales in all. beyond: groups too small for their row's base. changed: weights rounded for that.
    """

    groups: int
    beyond: int
    changed: int

    def __add__(self, other: RangeReport) -> RangeReport:
        """Return the report of both matrices."""
        return RangeReport(
            groups=self.groups + other.groups, beyond=self.beyond + other.beyond, changed=self.changed + other.changed
        )

    def __str__(self) -> str:
        """Return one line for the layer's plan."""
        if not self.beyond:
            return f"exact in E4M3: all {self.groups:,} groups are in range"
        return (
            f"{self.beyond:,} of {self.groups:,} groups are below the range of their row; "
            f"{self.changed:,} weights rounded"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedMatrix:
    """Weights ``[E, P, N, K]`` as a kernel reads them; ``layout`` has the shapes and dtypes of the tensors.

    scale: of groups or blocks, None where no scale is applied in the K loop. row_scale: float32 factors of whole rows,
    or None; for some lanes the table of numbers (``Lanes``). bias: ``[E, P, N]`` floating, or None. order: int32
    ``[E, K]``, the column of x that each of the weights' columns multiplies, None where they are in order. report: how
    packing stored weights, or what it rounded, where a plan cannot tell.
    """

    layout: Layout
    values: Tensor
    scale: Tensor | None = None
    row_scale: Tensor | None = None
    bias: Tensor | None = None
    order: Tensor | None = None
    report: RangeReport | str | None = None

    @property
    def pointers(self) -> Weights:
        """The tensors as kernels take them; values in place of missing ones, which are not read."""
        scale, row_scale, bias = (self.values if t is None else t for t in (self.scale, self.row_scale, self.bias))
        return Weights(self.values, scale, row_scale, bias)

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> PackedMatrix:
        """Return the matrix with ``change(tensor)`` for each tensor, all of which have a row for each expert."""
        matrix = map_tensors(self, change, "values", "scale", "row_scale", "bias", "order")
        count = matrix.values.shape[0]
        return replace(matrix, layout=replace(self.layout, shape=(count, *self.layout.shape[1:])))
