"""One of the two products of packed experts, alone, for ``collegium tune``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ops.operand import operand, transpose_scales
from ...ops.quantize import ActivationFormat
from ...types import ActivationSpec, ContiguousBatch
from .grouped import TileList, grouped_gemm, rescale, tile_list
from .matrix import PackedMatrix
from .tiles.candidates import candidates
from .tiles.choice import choose
from .tiles.problem import TileChoice, TileProblem
from .tiles.score import score
from .tiling import ProductTiling, reads_transposed_scales

__all__ = ["MeasuredProduct"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredProduct:
    """One of the two products, as a function of its tile.

    first: gate_up, which gathers tokens and applies the activation. form: of its rows, None for rows in their dtype.
    """

    name: str
    matrix: PackedMatrix
    tiling: ProductTiling
    activation: ActivationSpec
    form: ActivationFormat | None
    first: bool

    def _problem(self, rows: int) -> TileProblem:
        return self.tiling.problem_of(self.matrix.layout, rows)

    def default_tile(self, rows: int) -> TileChoice:
        """Return the tile chosen from the sizes alone."""
        return choose(self._problem(rows), self.tiling.machine)

    def candidates(self, rows: int) -> tuple[TileChoice, ...]:
        """Return every tile that fits, the fastest by the score first."""
        problem, machine = self._problem(rows), self.tiling.machine
        return tuple(sorted(candidates(problem, machine), key=lambda tile: score(problem, tile, machine)))

    def runner(self, batch: ContiguousBatch) -> Callable[[TileChoice], Tensor]:
        """Return this product of ``batch`` as a function of its tile; the second product reads random rows."""
        matrix, first = self.matrix, self.first
        count = batch.source.numel()
        _, _, n_out, k_in = matrix.layout.shape
        x = batch.x if first else torch.randn(count, k_in, device=batch.x.device).to(batch.x.dtype)
        rows = operand(x, self.form, order=matrix.layout.row_order)
        codes, scale = rescale(rows, matrix, None, None)
        out = torch.empty(count, n_out, dtype=torch.bfloat16, device=x.device)
        options: dict[str, Any] = {"source": batch.source, "activation": self.activation} if first else {}
        tile_lists: dict[TileChoice, TileList] = {}
        # The kernel that quantises the second product's rows writes transposed scales at no cost.
        transposed = None
        if not first and isinstance(scale, Tensor) and reads_transposed_scales(self.tiling.activations, matrix.layout):
            transposed = transpose_scales(scale, None)

        def run(tile: TileChoice) -> Tensor:
            if tile not in tile_lists:
                tile_lists[tile] = tile_list(batch.expert_offsets, count, tile)
            x_scale = scale
            if isinstance(scale, Tensor) and reads_transposed_scales(self.tiling.activations, matrix.layout, tile):
                x_scale = transpose_scales(scale, batch.source) if first else transposed
            return grouped_gemm(codes, matrix, batch.expert_offsets, tile_lists[tile], out, x_scale=x_scale, **options)

        return run
