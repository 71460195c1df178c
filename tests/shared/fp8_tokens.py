"""Tokens in FP8 with scales, and routings in which some tokens lack an expert, for ``moe`` and for layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from collegium import Limits, MoELayer, MoESpec, Overrides, Problem, RoutingSpec, plan, probe
from collegium.ops.quantize import activation_format
from collegium.testing.compare import heavy_tailed, uneven_ids

__all__ = ["layer_on_gpu", "quantised", "routing_with_absent_experts"]


def routing_with_absent_experts(tokens: int, experts: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and weights ``[T, K]``; every fourth token has no first expert."""
    ids = uneven_ids(tokens, top_k, experts, seed=3)
    ids[::4, 0] = -1
    return ids, heavy_tailed(tokens, top_k, seed=4, channels=False).abs()


def quantised(form_name: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes and scales of ``x``, and the numbers that they stand for."""
    form = activation_format(form_name)
    rows = form.quantize(x)
    assert rows.scales is not None
    return rows.codes, rows.scales, form.dequantize(rows)


def layer_on_gpu(made: Any, tokens: int, top_k: int, *, out_dtype: Any = None, **overrides: Any) -> MoELayer:
    """Return a layer of routed experts ``made``, whose callers pass a routing."""
    experts, _, intermediate, hidden = made.gate_up.shape
    spec = MoESpec(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_experts=experts,
        routing=RoutingSpec(top_k=top_k),
        weight_format=made.gate_up.name,
    )
    problem = Problem(spec=spec, device=probe("cuda"), limits=Limits(max_tokens=tokens), out_dtype=out_dtype)
    weights = replace(made, gate_up=made.gate_up.to("cuda"), down=made.down.to("cuda"))
    return MoELayer(weights, plan(problem, Overrides(**overrides)))
