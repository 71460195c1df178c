"""Compile what a layer will need before it needs it.

Triton compiles a kernel when it first runs with new compile-time arguments, seconds each. Those arguments follow from
the layer and from the tiles chosen for a token count, so running one batch for each of those compiles everything.
Compiled kernels stay in Triton's own cache on disk. Its key is a digest of the kernel's source and of every function
and constant it uses, all compile-time arguments, the GPU and Triton's own version: another version of this package
never runs a kernel of an older one.
"""

import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import torch

from .devices import current_device
from .launch import power_at_least
from .memory import FreshMemory

__all__ = ["compile_batches", "run_all_paths", "sizes_for", "warm_up"]


def warm_up(layers: Iterable[Any], progress: Callable[[int, int, str], None] | None = None) -> int:
    """Warm up every ``MoELayer`` that differs from the ones before it; return the number of batches run."""
    kinds = {_kind(layer): layer for layer in layers}
    return sum(layer.warm_up(progress) for layer in kinds.values())


def _kind(layer: Any) -> tuple[Hashable, ...]:
    """Return what decides which kernel variants a layer needs.

    Of layers over several ranks only what all ranks agree on: they have to warm up the same ones.
    """
    if layer.plan.groups:
        return layer.plan.problem, layer.router is None, layer.after_expert is None
    shared = None if layer.shared is None else layer.shared.experts.key
    return layer.plan, layer.router is None, layer.after_expert is None, layer.experts.key, shared


def sizes_for(variants: Callable[[int], frozenset[Hashable]], limit: int) -> list[int]:
    """Return token counts that together need every kernel variant that 1 to ``limit`` tokens can need.

    variants: what a batch of so many tokens needs of the experts; the kernels around them depend on powers of two,
    above or below, of the count of tokens.
    """
    seen: set[Hashable] = set()
    sizes: list[int] = []
    for tokens in range(1, limit + 1):
        used = set(variants(tokens))
        if used:
            used.add((tokens.bit_length(), power_at_least(tokens)))
        if not used <= seen:
            seen |= used
            sizes.append(tokens)
    return sizes


def run_all_paths(layer: Any, tokens: int) -> None:
    """Run a batch of ``tokens`` zeros through ``layer``, once for each kind of call that a caller may make."""
    spec = layer.spec
    x = torch.zeros(tokens, spec.hidden_size, dtype=layer.input_dtype, device=layer.handle.device)
    out = torch.empty_like(x)
    for asked in _ways_to_ask(layer, x):
        # Batches run side by side, and this is the memory of as many passes only while they are compiled.
        layer.compute((x, *asked, out), FreshMemory(x.device))


Asked = tuple[torch.Tensor | None, ...]


def _ways_to_ask(layer: Any, x: torch.Tensor) -> Iterator[Asked]:
    """Yield logits, ids, weights, token ids and router input that a caller may give beside ``x [T, D]``.

    In every dtype compiled for: ids are int32 or int64, weights and logits float32 or of x's dtype.
    """
    rule, tokens, experts = layer.spec.routing, x.shape[0], layer.spec.num_experts
    ids = torch.arange(tokens * rule.top_k, device=x.device).view(tokens, -1) % experts
    dtypes = tuple(dict.fromkeys((torch.float32, x.dtype)))
    for dtype, whole in product(dtypes, (torch.int64, torch.int32)):
        yield None, ids.to(whole), torch.ones(ids.shape, dtype=dtype, device=x.device), None, None
    if layer.router is None and (rule.correction_bias or rule.hash_routing or rule.expert_scale):
        return
    for dtype, whole in product(dtypes, (torch.int64, torch.int32) if rule.hash_routing else (torch.int64,)):
        logits = torch.zeros(tokens, experts, dtype=dtype, device=x.device)
        yield logits, None, None, torch.zeros(tokens, dtype=whole, device=x.device), None
    if layer.router is not None:
        # Its own logits are float32, like the first of those.
        known = torch.zeros(tokens, dtype=torch.int64, device=x.device)
        yield None, None, None, known, None if rule.input_norm_eps is None else x


def compile_batches(
    run: Callable[[int], None],
    sizes: Sequence[int],
    device: torch.device,
    progress: Callable[[int, int, str], None] | None = None,
    *,
    threads: int = 8,
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
        with ThreadPoolExecutor(min(threads, os.cpu_count() or 1)) as pool:
            for done, tokens in enumerate(pool.map(one, sizes[1:]), start=2):
                tell(done, tokens)
    return len(sizes)
