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

from .ops.launch import power_of_two
from .ops.products import PackedExperts, chosen_tiles, few_tokens, large_tile
from .types import Routing
from .workspace import own_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["batch_sizes", "compile_batches", "warm_layer", "warm_up"]

_THREADS = 8
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def warm_up(layers: Iterable[Any], progress: Callable[[int, int, str], None] | None = None) -> int:
    """Warm up every ``MoELayer`` that differs from the ones before it; return the number of batches run."""
    kinds = {(layer.plan, layer.router is None, _shared_format(layer)): layer for layer in layers}
    return sum(layer.warm_up(progress) for layer in kinds.values())


def _shared_format(layer: Any) -> str | None:
    return None if layer.shared is None else layer.shared.experts.down.name


def warm_layer(layer: Any, progress: Callable[[int, int, str], None] | None = None) -> int:
    """Compile every kernel variant that 1 to ``max_tokens`` tokens can reach, and no other.

    Returns the number of batches of zeros that were run for it; 0 for a kernel that compiles nothing. progress: called
    with (done, total, text).
    """
    problem = layer.plan.problem
    spec, device = problem.spec, torch.device(problem.device.place)
    packed = [(layer._pipeline.packed, spec.routing.top_k), (layer._packed_shared, 1)]

    def run(tokens: int) -> None:
        x = torch.zeros(tokens, spec.hidden_size, dtype=_DTYPES[problem.dtype], device=device)
        shape = (tokens, spec.routing.top_k)
        ids = torch.arange(tokens * shape[1], device=device).view(shape) % spec.num_experts
        # Batches run side by side, and this is the memory of as many passes only while they are compiled.
        with own_memory(device):
            layer(x, routing=Routing(topk_ids=ids, topk_weights=torch.ones(shape, device=device)))
            if layer.router is not None:
                layer(x, token_ids=torch.zeros(tokens, dtype=torch.int64, device=device))

    return compile_batches(run, batch_sizes(packed, problem.limits.max_tokens), device, progress)


def batch_sizes(packed: Sequence[tuple[Any, int]], limit: int) -> list[int]:
    """Return token counts that together need every kernel variant that 1 to ``limit`` tokens can need.

    packed: packed experts and how many rows a token has in them; other packed types have no variants. Products depend
    on their tiles; the kernels around them on powers of two, above or below, of the counts of tokens and rows.
    """
    tiled = [(own, rows) for own, rows in packed if isinstance(own, PackedExperts)]
    seen: set[tuple[object, ...]] = set()
    sizes: list[int] = []
    few = [few_tokens(own, each) for own, each in tiled]
    for tokens in range(1, limit + 1 if tiled else 1):
        used: set[tuple[object, ...]] = {(tokens.bit_length(), power_of_two(tokens))}
        for place, (own, each) in enumerate(tiled):
            rows = tokens * each
            large = large_tile(own, rows)
            tiles = chosen_tiles(own, rows) if large is None else (large, large)
            # Few assignments take the same tile unsorted, which is another variant of the product.
            used |= {(place, product, tile, tokens <= few[place]) for product, tile in enumerate(tiles)}
            # One kernel orders the rows and lists the tiles of both products.
            used.add((place, rows.bit_length(), power_of_two(rows), *own.block_t(rows)))
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
