"""Compile the kernels of a layer before its first use.

Triton compiles a kernel when it first runs with new compile-time arguments, which takes seconds. Those arguments depend
on the layer and on the tiles chosen for a token count, so running one batch for each choice of tiles compiles
everything. Compiled kernels are stored in Triton's cache on disk. Its key is a digest of the kernel's source and of
every function and constant it uses, all compile-time arguments, the GPU and Triton's version, so no version of this
package runs a kernel of another version.
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
    """Return a key for the kernel variants that a layer needs.

    For layers over several ranks it has only what all ranks agree on, since they have to warm up the same layers.
    """
    if layer.caller_modules:
        # A function of the caller may differ from that of any other layer. All ranks of a layer have the same ones.
        return (id(layer),)
    options = layer.router is None, layer.after_expert is None
    if layer.plan.groups:
        return layer.plan.problem, options
    shared = None if layer.shared is None else layer.shared.experts.key
    return layer.plan, options, layer.experts.key, shared


def sizes_for(variants: Callable[[int], frozenset[Hashable]], limit: int) -> list[int]:
    """Return token counts that together need every kernel variant that 1 to ``limit`` tokens can need.

    variants: returns the kernel variants of the experts for a number of tokens. Other kernels depend on the powers of
    two above and below the number of tokens.
    """
    covered: set[Hashable] = set()
    sizes: list[int] = []
    for tokens in range(1, limit + 1):
        used = set(variants(tokens))
        if used:
            used.add((tokens.bit_length(), power_at_least(tokens)))
        if not used <= covered:
            covered |= used
            sizes.append(tokens)
    return sizes


def run_all_paths(layer: Any, tokens: int) -> None:
    """Run a batch of ``tokens`` zeros through ``layer``, once for each kind of call that a caller may make."""
    spec = layer.spec
    x = torch.zeros(tokens, spec.hidden_size, dtype=layer.input_dtype, device=layer.handle.device)
    out = x.new_empty(tokens, layer.routed_size, dtype=layer.output_dtype)
    # Sums of another width than x cannot have the shared expert's output added.
    shared_out = torch.empty_like(x) if layer.routed_size != x.shape[1] and layer.shared is not None else None
    for arguments in _argument_kinds(layer, x):
        # Batches run in parallel, so each has separate memory, only while they are compiled.
        layer.compute((x, *arguments, out, shared_out), FreshMemory(x.device))


def _argument_kinds(layer: Any, x: torch.Tensor) -> Iterator[tuple[torch.Tensor | None, ...]]:
    """Yield the optional inputs of ``Call`` from logits to adapter ids, as a caller may pass them with ``x [T, D]``.

    In every dtype that kernels are compiled for: ids in int32 or int64, weights and logits in float32 or x's dtype.
    """
    routing = layer.spec.routing
    tokens = x.shape[0]
    experts = layer.spec.num_experts
    ids = torch.arange(tokens * routing.top_k, device=x.device).view(tokens, -1) % experts
    dtypes = tuple(dict.fromkeys((torch.float32, x.dtype)))
    for dtype, id_dtype in product(dtypes, (torch.int64, torch.int32)):
        yield None, ids.to(id_dtype), torch.ones(ids.shape, dtype=dtype, device=x.device), None, None, None
    if layer.adapters is not None:
        for id_dtype in (torch.int64, torch.int32):
            adapter_ids = torch.zeros(tokens, dtype=id_dtype, device=x.device)
            yield None, ids, torch.ones(ids.shape, dtype=torch.float32, device=x.device), None, None, adapter_ids
    if not layer.has_router and (routing.correction_bias or routing.hash_routing or routing.expert_scale):
        return
    for dtype, id_dtype in product(dtypes, (torch.int64, torch.int32) if routing.hash_routing else (torch.int64,)):
        logits = torch.zeros(tokens, experts, dtype=dtype, device=x.device)
        yield logits, None, None, torch.zeros(tokens, dtype=id_dtype, device=x.device), None, None
    if layer.has_router:
        # The router's logits are float32, like the first logits above.
        token_ids = torch.zeros(tokens, dtype=torch.int64, device=x.device)
        yield None, None, None, token_ids, None if routing.input_norm_eps is None else x, None


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

    def run_batch(tokens: int) -> int:
        # Both are settings of a thread, not of the process.
        with current_device(device), torch.inference_mode():
            run(tokens)
        return tokens

    def report(done: int, tokens: int) -> None:
        if progress is not None:
            progress(done, len(sizes), f"{tokens} tokens")

    if sizes:
        # The first batch runs alone, so that what all batches share is compiled once.
        report(1, run_batch(sizes[0]))
        with ThreadPoolExecutor(min(threads, os.cpu_count() or 1)) as pool:
            for done, tokens in enumerate(pool.map(run_batch, sizes[1:]), start=2):
                report(done, tokens)
    return len(sizes)
