"""Compile what a layer will need before it needs it.

Triton compiles a kernel when it first runs with new compile-time arguments, seconds each. Those arguments follow from
the layer and from the tile chosen for a token count, so running one batch for each tile there is compiles everything.
Compiled kernels stay in Triton's own cache on disk. Its key is a digest of the kernel's source and of every function
and constant it uses, all compile-time arguments, the GPU and Triton's own version: another version of this package
can meet no kernel of an older one.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from .ops.grouped_gemm import PackedExperts, chosen_tiles
from .ops.launch import power_of_two

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["batch_sizes", "compile_batches"]

_THREADS = 8


def batch_sizes(packed: Sequence[tuple[Any, int]], limit: int) -> list[int]:
    """Return token counts that together need every kernel variant that 1 to ``limit`` tokens can need.

    packed: packed experts and how many rows a token has in them; other packed types have no variants. Products depend
    on their tiles; the kernels around them on powers of two, above or below, of the counts of tokens and rows.
    """
    tiled = [(own, rows) for own, rows in packed if isinstance(own, PackedExperts)]
    seen: set[tuple[object, ...]] = set()
    sizes: list[int] = []
    for tokens in range(1, limit + 1 if tiled else 1):
        used: set[tuple[object, ...]] = {(tokens.bit_length(), power_of_two(tokens))}
        for place, (own, each) in enumerate(tiled):
            rows = tokens * each
            tiles = chosen_tiles(own, rows)
            used |= {(place, product, tile) for product, tile in enumerate(tiles)}
            # One kernel orders the rows and lists the tiles of both products.
            used.add((place, rows.bit_length(), power_of_two(rows), *(tile.block_t for tile in tiles)))
        if not used <= seen:
            seen |= used
            sizes.append(tokens)
    return sizes


def compile_batches(
    run: Callable[[int], None],
    sizes: Sequence[int],
    device: torch.device,
    progress: Callable[[int, int, str], None] | None = None,
) -> int:
    """Run a batch of each of ``sizes`` tokens, in parallel after the first; return how many ran.

    progress: called with (done, total, text) after each.
    """

    def one(tokens: int) -> int:
        # Both belong to a thread, not to the process.
        place = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with place, torch.inference_mode():
            run(tokens)
        return tokens

    def tell(done: int, tokens: int) -> None:
        if progress is not None:
            progress(done, len(sizes), f"{tokens} tokens")

    if sizes:
        # Alone, so that what all batches share is compiled once.
        tell(1, one(sizes[0]))
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
            for done, tokens in enumerate(pool.map(one, sizes[1:]), start=2):
                tell(done, tokens)
    return len(sizes)
