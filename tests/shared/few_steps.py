"""Experts whose products have one to three steps of K, against FP32 truth, on the device of their weights."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from collegium.encoding import encode_experts
from collegium.experts import KERNELS
from collegium.experts.reference import Reference
from collegium.experts.triton.packed import PackedExperts
from collegium.parallel.local import Local
from collegium.problem import DeviceFacts, Problem
from collegium.testing.compare import heavy_tailed, random_experts, relative_error, uneven_ids
from collegium.types import ActivationSpec, ExpertWeights, MoESpec, Routing, RoutingSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BOUNDS", "RECIPES", "SIZES", "check_size"]

_CODES = ("fp8_group128", "fp8_group128_pow2", "fp8_token")
_EITHER = ("fp8_block", "fp8_channel", "fp8_tensor", "mxfp4", "nvfp4", "int4_group")
RECIPES = (
    ("bf16", "bf16"),
    ("fp16", "fp16"),
    ("mxfp8", "bf16"),
    *((weights, act) for weights in _EITHER for act in ("bf16", *_CODES)),
)
# (hidden, intermediate, experts, kind): steps are 64 or 128 columns; 16, 48, 96, 130 and 200 are no whole steps.
SIZES = (
    (256, 128, 1, "swiglu"),
    (128, 256, 3, "relu2"),
    (64, 32, 3, "swiglu"),
    (32, 64, 1, "relu2"),
    (16, 192, 3, "swiglu"),
    (96, 48, 1, "swiglu"),
    (130, 200, 3, "swiglu"),
    (384, 16, 3, "relu2"),
)
# Relative L2 error allowed by the bits of an activation: two roundings to E4M3 alone make 0.045, and a square doubles
# the first. What plain code makes of the same roundings is allowed too, and a tenth more.
BOUNDS = {16: 0.01, 8: 0.07}


def check_size(
    weights: str, act: str, size: tuple[int, int, int, str], tokens: Sequence[int], facts: DeviceFacts, **machine: bool
) -> list[str]:
    """Return what is wrong with batches of ``tokens``: an empty list; machine: what is to be said of the machine."""
    hidden, wide, experts, kind = size
    top_k, parts = min(2, experts), 2 if kind == "swiglu" else 1
    spec = MoESpec(
        hidden_size=hidden,
        intermediate_size=wide,
        num_experts=experts,
        routing=RoutingSpec(top_k=top_k),
        activation=ActivationSpec(kind=kind),  # pyright: ignore[reportArgumentType]
        weight_format=weights,
        expert_bias=experts > 1,
    )
    plain: Any = "fp16" if weights == "fp16" else "bf16"
    problem = Problem(spec=spec, device=facts, activation_format=act, dtype=plain)
    device = torch.device(facts.kind if torch.cuda.is_available() else "cpu")
    made = encode_experts(random_experts(experts, parts, wide, hidden, seed=1, bias=experts > 1), weights)
    bias, down_bias = (None if each is None else each.to(device) for each in (made.gate_up_bias, made.down_bias))
    made = ExpertWeights(
        gate_up=made.gate_up.to(device), down=made.down.to(device), gate_up_bias=bias, down_bias=down_bias
    )
    kernel: Any = next(own for own in KERNELS if own.name.startswith("triton") and own.refuse(problem.routed) is None)
    packed: PackedExperts = kernel.pack(made, problem.routed)
    packed = replace(packed, machine=replace(packed.machine, **machine))
    exact = Reference().pack(made, replace(problem, activation_format="fp32").routed)
    rounded = Reference().pack(made, problem.routed)
    found: list[str] = []
    for count in tokens:
        x = heavy_tailed(count, hidden, seed=3).to(torch.float16 if plain == "fp16" else torch.bfloat16).to(device)
        ids = uneven_ids(count, top_k, experts, seed=2).to(device)
        routing = Routing(topk_ids=ids, topk_weights=torch.ones(ids.shape, device=device))
        batch, handle = Local(num_experts=experts).dispatch(x, routing)
        truth = exact.run(batch)
        bound = BOUNDS[8 if act in _CODES else 16]
        if act in _CODES:
            bound = max(bound, 1.1 * relative_error(rounded.run(batch), truth))
        outs = {"sorted": packed.run(batch)}
        if count <= packed.tiling.unsorted_tokens(top_k):
            outs["unsorted"] = packed.run_unsorted(x, ids)
            truth_of = {"sorted": truth, "unsorted": truth[handle.slots.flatten()]}
        else:
            truth_of = {"sorted": truth}
        large = packed.tiling.large(count * top_k) is not None
        for way, out in outs.items():
            error = relative_error(out, truth_of[way])
            if not error < bound:
                found.append(f"{weights}:{act} {size} {count} tokens, {way}, large={large}: {error:.3g}")
    return found
