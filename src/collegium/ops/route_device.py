"""Launch of the routing kernel; ``route`` states the rules and checks the arguments.

Shape letters: T tokens, K experts per token, E experts.
"""

import torch
from torch import Tensor

from ..kernels.arguments import ExpertGroups, RoutingFormat
from ..runtime.launch import align_rows, launch, overlaps, power_at_least
from ..runtime.memory import Memory, Regions
from ..types import SCORE_FUNCTIONS, Routing, RoutingSpec
from .buffers import Buffers, allocate, sizes

__all__ = ["ID_DTYPES", "route_on_device", "route_regions"]

ID_DTYPES = {"int64": torch.int64, "int32": torch.int32}


def route_regions(tokens: int, top_k: int) -> Regions:
    """Return the most bytes ``route`` takes for any count of tokens up to ``tokens``."""
    return sizes(_buffers(tokens, top_k, torch.int64))


def route_on_device(
    logits: Tensor,
    spec: RoutingSpec,
    *,
    bias: Tensor | None = None,
    token_ids: Tensor | None = None,
    hash_table: Tensor | None = None,
    expert_scale: Tensor | None = None,
    memory: Memory | None = None,
) -> Routing:
    """Do ``route`` unchecked, in one kernel; the arguments must be those ``route`` accepts."""
    # Imported here: Triton exists for Linux only, and everything except launches works without it.
    from ..kernels.route import route_kernel

    tokens, experts = logits.shape
    buffers = _buffers(tokens, spec.top_k, ID_DTYPES[spec.id_dtype])
    routing = Routing(**allocate(memory, buffers, logits.device))
    if tokens == 0:
        return routing
    logits = align_rows(logits)
    groups = spec.groups if spec.groups > 1 and not spec.hash_routing else 1
    block_g, block_s = power_at_least(groups), power_at_least(experts // groups)
    block_s = max(block_s, 32 // block_g)
    # Token ids and a table that are not needed would select another variant of the kernel.
    token_ids = token_ids if spec.hash_routing else None
    table = None if hash_table is None or not spec.hash_routing else hash_table.contiguous()
    args = (
        logits,
        bias,
        token_ids,
        table,
        expert_scale,
        routing.topk_ids,
        routing.topk_weights,
        experts,
        groups,
        experts // groups,
        1 if table is None else table.shape[0],
        logits.stride(0),
        *(1 if tensor is None else tensor.stride(0) for tensor in (bias, token_ids, expert_scale)),
        *map(float, (spec.renormalize_eps, spec.renormalize_floor, spec.scale, spec.jitter)),
    )
    constants = {
        "ROUTING": RoutingFormat(
            score=SCORE_FUNCTIONS.index(spec.score),
            top_k=spec.top_k,
            block_k=power_at_least(spec.top_k),
            renormalize=spec.renormalize,
        ),
        "GROUPS": ExpertGroups(
            block_g=block_g,
            block_s=block_s,
            top=spec.topk_groups if groups > 1 else 0,
            top2_sum=spec.group_score == "top2_sum",
        ),
        "PDL": overlaps(logits),
    }
    warps = max(1, min(4, block_g * block_s // 256))
    launch(route_kernel, (tokens,), args, constants, num_warps=warps, enable_fp_fusion=False)
    return routing


def _buffers(tokens: int, top_k: int, ids: torch.dtype) -> Buffers:
    shape = (tokens, top_k)
    return {"topk_ids": (shape, ids), "topk_weights": (shape, torch.float32)}
