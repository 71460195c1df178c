"""The grids of GGUF's IQ kinds, magnitudes of four or eight columns by index, read from ``gguf_grids.bin``.

``scripts/write_gguf_grids.py`` writes the file. Source: ggml, ``ggml-common.h`` (``iq2xxs_grid`` and so on), as the
``gguf`` package publishes it.
"""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["GRIDS", "PATH", "Grid", "grid_of"]

PATH = Path(__file__).with_name("gguf_grids.bin")
_THREE = (8, 25, 43)


class Grid(NamedTuple):
    """Entries of a grid, columns of an entry, and the values that its columns have, in order."""

    entries: int
    columns: int
    values: tuple[int, ...]

    @property
    def bits(self) -> int:
        """Bits of the index of a value in the file."""
        return 2 if len(self.values) == 3 else 4

    @property
    def nbytes(self) -> int:
        """Bytes of the grid in the file."""
        return self.entries * self.columns * self.bits // 8


# By kind, in the order of the file; IQ1_M has the grid of IQ1_S.
GRIDS = {
    "IQ2_XXS": Grid(256, 8, _THREE),
    "IQ2_XS": Grid(512, 8, _THREE),
    "IQ2_S": Grid(1024, 8, _THREE),
    "IQ3_XXS": Grid(256, 4, (4, 12, 20, 28, 36, 44, 52, 62)),
    "IQ3_S": Grid(512, 4, (1, 3, 5, 7, 9, 11, 13, 15)),
    "IQ1_S": Grid(2048, 8, (-1, 0, 1)),
}


@cache
def grid_of(kind: str, device: torch.device) -> Tensor:
    """Return the indices of the values of each entry of a grid, uint8 ``[entries, columns]``."""
    raw = torch.frombuffer(bytearray(PATH.read_bytes()), dtype=torch.uint8)
    sizes = [grid.nbytes for grid in GRIDS.values()]
    packed = dict(zip(GRIDS, raw.split(sizes), strict=True))[kind]
    grid = GRIDS[kind]
    shifts = torch.arange(0, 8, grid.bits, dtype=torch.uint8)
    fields = (packed.unsqueeze(-1) >> shifts) & ((1 << grid.bits) - 1)
    return fields.view(grid.entries, grid.columns).to(device)
