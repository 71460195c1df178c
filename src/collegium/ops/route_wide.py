"""Routing to shared experts, which every token uses, in addition to the chosen ones.

Shape letters: T tokens, K experts per token, E experts.
"""

import torch

from ..runtime.launch import align_rows, launch, on_device, overlaps, power_at_least
from ..runtime.memory import Memory, Regions
from ..types import Routing
from .buffers import Buffers, allocate, sizes

__all__ = ["append_shared_experts", "append_shared_experts_regions"]


def append_shared_experts(chosen: Routing, experts: int, merged: int, memory: Memory | None = None) -> Routing:
    """Return ``chosen`` of ``experts`` experts with ``merged`` more slots, of the experts after them, with weight 1.

    An id that was no expert stays none. memory: where "wide_ids" and "wide_weights" are on a GPU.
    """
    if not merged:
        return chosen
    tokens, top_k = chosen.topk_ids.shape
    if on_device(chosen.topk_ids):
        # Imported here: Triton exists for Linux only, and everything except launches works without it.
        from ..kernels.route import widen_kernel

        ids, weights = align_rows(chosen.topk_ids), align_rows(chosen.topk_weights)
        buffers = allocate(memory, _buffers(tokens, top_k + merged), ids.device)
        args = (ids, weights, buffers["wide_ids"], buffers["wide_weights"], experts, ids.stride(0), weights.stride(0))
        constants = {
            "TOP_K": top_k,
            "BLOCK_K": power_at_least(top_k + merged),
            "SHARED": merged,
            "PDL": overlaps(ids),
        }
        if tokens:
            launch(widen_kernel, (tokens,), args, constants, num_warps=1)
        return Routing(topk_ids=buffers["wide_ids"], topk_weights=buffers["wide_weights"])
    ids = chosen.topk_ids.to(torch.int64)
    ids = ids.masked_fill((ids < -1) | (ids >= experts), -2)
    shared = torch.arange(experts, experts + merged, device=ids.device).expand(tokens, merged)
    weights = chosen.topk_weights.to(torch.float32)
    return Routing(
        topk_ids=torch.cat((ids, shared), dim=1), topk_weights=torch.cat((weights, torch.ones_like(shared)), dim=1)
    )


def append_shared_experts_regions(tokens: int, top_k: int) -> Regions:
    """Return the memory of ``append_shared_experts`` for ``tokens`` tokens with ``top_k`` slots each."""
    return sizes(_buffers(tokens, top_k))


def _buffers(tokens: int, top_k: int) -> Buffers:
    return {"wide_ids": ((tokens, top_k), torch.int64), "wide_weights": ((tokens, top_k), torch.float32)}
