"""Routing with experts that every token goes to, after those that a rule or a caller chose.

Shape letters: T tokens, K experts per token, E experts, n experts after those.
"""

import torch
from torch import Tensor

from ..runtime.launch import on_device
from ..runtime.memory import Memory
from ..types import Routing, RoutingSpec
from .route import NO_EXPERT, check_rule, in_one_kernel, route
from .route_device import route_on_device, widen_on_device

__all__ = ["route_wide", "widened"]


def route_wide(
    logits: Tensor,
    spec: RoutingSpec,
    merged: int,
    *,
    checked: bool = False,
    memory: Memory | None = None,
    **given: Tensor | None,
) -> Routing:
    """Do ``route``, then ``widened``; on a GPU still in one kernel. given: the other arguments of ``route``."""
    if not merged or checked or spec.expert_scale or not in_one_kernel(logits, spec):
        own = None if merged else memory
        found = route(logits, spec, checked=checked, memory=own, **given)
        return widened(found, logits.shape[1], merged, memory)
    given.pop("expert_scale", None)
    check_rule(logits, spec, *(given.get(name) for name in ("bias", "token_ids", "hash_table")))
    return route_on_device(logits, spec, merged=merged, memory=memory, **given)


def widened(chosen: Routing, experts: int, merged: int, memory: Memory | None = None) -> Routing:
    """Return ``chosen`` of ``experts`` experts with ``merged`` slots more, of the experts after them, with weight 1.

    An id that was no expert is none of those either. memory: where a kernel takes "topk_ids" and "topk_weights".
    """
    if not merged:
        return chosen
    if on_device(chosen.topk_ids):
        return widen_on_device(chosen, experts, merged, memory)
    ids = chosen.topk_ids.to(torch.int64)
    ids = ids.masked_fill((ids < -1) | (ids >= experts), NO_EXPERT)
    more = torch.arange(experts, experts + merged, device=ids.device).expand(ids.shape[0], merged)
    weights = chosen.topk_weights.to(torch.float32)
    return Routing(
        topk_ids=torch.cat((ids, more), dim=1), topk_weights=torch.cat((weights, torch.ones_like(more)), dim=1)
    )
