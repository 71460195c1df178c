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
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from .experts.triton.packed import PackedExperts, chosen_tiles, few_tokens, large_tile, variant_key
from .formats.unquantised import DTYPES
from .runtime.devices import current_device
from .runtime.launch import power_of_two
from .runtime.workspace import own_memory
from .types import Routing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["batch_sizes", "compile_batches", "warm_layer", "warm_up"]

_THREADS = 8


def warm_up(layers: Iterable[Any], progress: Callable[[int, int, str], None] | None = None) -> int:
    """Warm up every ``MoELayer`` that differs from the ones before it; return the number of batches run."""
    kinds = {(layer.plan, *_compiled_for(layer)): layer for layer in layers}
    return sum(layer.warm_up(progress) for layer in kinds.values())


def warm_layer(layer: Any, progress: Callable[[int, int, str], None] | None = None) -> int:
    """Compile every kernel variant that 1 to ``max_tokens`` tokens can reach, and no other.

    Returns the number of batches of zeros that were run for it; 0 for a kernel that compiles nothing. progress: called
    with (done, total, text).
    """
    problem = layer.plan.problem
    spec, device = problem.spec, torch.device(problem.device.place)
    packed = [(layer._pipeline.packed, spec.routing.top_k), (layer._packed_shared, 1)]

    def run(tokens: int) -> None:
        x = torch.zeros(tokens, spec.hidden_size, dtype=DTYPES[problem.dtype], device=device)
        for asked in _ways_to_ask(layer, x):
            # Batches run side by side, and this is the memory of as many passes only while they are compiled.
            with own_memory(device):
                layer(x, **asked)

    return compile_batches(run, batch_sizes(packed, problem.limits.max_tokens), device, progress)


def _compiled_for(layer: Any) -> tuple[object, ...]:
    """Return what decides, beside the plan, which kernel variants a layer needs."""
    packed = [own for own in (layer._pipeline.packed, layer._packed_shared) if isinstance(own, PackedExperts)]
    own = (layer.router is None, layer.shared is None, layer._pipeline.after_expert is None)
    return (*own, *[variant_key(each) for each in packed])


def _ways_to_ask(layer: Any, x: torch.Tensor) -> Iterator[dict[str, Any]]:
    """Yield what a caller may give beside ``x [T, D]``, in every dtype that a kernel is compiled for.

    Ids are int32 or int64, weights and logits float32 or of x's dtype.
    """
    rule, tokens, experts = layer.spec.routing, x.shape[0], layer.spec.num_experts
    ids = torch.arange(tokens * rule.top_k, device=x.device).view(tokens, -1) % experts
    dtypes = tuple(dict.fromkeys((torch.float32, x.dtype)))
    for dtype, whole in product(dtypes, (torch.int64, torch.int32)):
        weights = torch.ones(ids.shape, dtype=dtype, device=x.device)
        yield {"routing": Routing(topk_ids=ids.to(whole), topk_weights=weights)}
    if layer.router is None and (rule.correction_bias or rule.hash_routing or rule.expert_scale):
        return
    for dtype, whole in product(dtypes, (torch.int64, torch.int32) if rule.hash_routing else (torch.int64,)):
        known = {"token_ids": torch.zeros(tokens, dtype=whole, device=x.device)}
        if layer.router is not None and dtype == torch.float32:
            yield {"router_input": x, **known}  # its own logits are float32
        else:
            yield {"router_logits": torch.zeros(tokens, experts, dtype=dtype, device=x.device), **known}


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
            unsorted = tokens <= few[place]
            used |= {(place, number, tile, unsorted) for number, tile in enumerate(tiles)}
            # One kernel orders the rows and lists the tiles of both products.
            used.add((place, unsorted, rows.bit_length(), power_of_two(rows), *own.block_t(rows)))
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
        with current_device(device), torch.inference_mode():
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
