"""Write ``formats/gguf_grids.bin``, the grids of GGUF's IQ kinds, from the tables of the ``gguf`` package.

The file holds, one grid after the other, the index of each value among the values of its grid, which are in order: two
bits for grids of three values, four bits for those of eight, the first in the lowest bits.

    python scripts/write_gguf_grids.py
"""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import quants

from collegium.formats.gguf_grids import GRIDS, PATH

__all__ = ["packed_grids"]


def packed_grids() -> bytes:
    """Return the contents of the file; raises ValueError for grids of other sizes or values."""
    parts: list[bytes] = []
    for name, grid in GRIDS.items():
        kind: Any = getattr(quants, name)
        kind.init_grid()
        values, indices = np.unique(kind.grid, return_inverse=True)
        if tuple(values.astype(int)) != grid.values or kind.grid.shape[-2:] != (grid.entries, grid.columns):
            raise ValueError(f"{name}: {kind.grid.shape} of {values}, expected {grid}")
        fields = indices.reshape(-1, 8 // grid.bits).astype(np.uint8)
        shifts = np.arange(0, 8, grid.bits, dtype=np.uint8)
        parts.append(np.bitwise_or.reduce(fields << shifts, axis=1).astype(np.uint8).tobytes())
    return b"".join(parts)


if __name__ == "__main__":
    Path(PATH).write_bytes(packed_grids())
