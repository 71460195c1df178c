"""Layers in every format that Triton's kernels decode to 16-bit numbers, with a batch and what is true of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from collegium.experts.reference import Reference
from collegium.experts.triton.table import TritonBf16, TritonFp8, TritonW4A16, TritonW8A16
from collegium.formats.gguf import KINDS
from collegium.formats.unquantised import DTYPES
from collegium.parallel.local import Local
from collegium.problem import Problem
from collegium.testing.compare import heavy_tailed, random_experts, uneven_ids
from collegium.types import ActivationSpec, ExpertWeights, MoESpec, Routing, RoutingSpec
from integers import encoded, random_blocks

if TYPE_CHECKING:
    from collegium.experts.triton.packed import PackedExperts
    from collegium.problem import DeviceFacts
    from collegium.types import ContiguousBatch

__all__ = ["DECODED", "decoded_layer"]

_KERNELS: tuple[Any, ...] = (TritonBf16(), TritonFp8(), TritonW4A16(), TritonW8A16())

# Format or kind of GGUF block, activations, columns of a group.
DECODED = (
    *((name, act, 128) for name in ("mxfp4", "nvfp4", "mxfp8", "fp8_block", "fp8_channel") for act in ("bf16", "fp16")),
    ("fp8_tensor", "bf16", 128),
    *(("nvfp4", act, 128) for act in ("nvfp4", "nvfp4_static", "nvfp4_expert")),
    *(("int4_group", act, group) for act in ("bf16", "fp16") for group in (32, 128)),
    *((f"int{bits}_affine", "bf16", group) for bits in (4, 8) for group in (32, 128)),
    *((f"int{bits}_affine", "fp16", 128) for bits in (4, 8)),
    *((f"int{bits}_ordered", "bf16", group) for bits in (4, 8) for group in (32, 128)),
    *(("bnb4", act, group) for act in ("bf16", "fp16") for group in (32, 64)),
    *((kind, act, 32) for kind in KINDS for act in ("bf16", "fp16")),
)


def decoded_layer(
    name: str,
    act: str,
    group: int,
    device: DeviceFacts,
    *,
    tokens: int,
    sizes: tuple[int, int, int] = (5, 144, 272),
    where: str = "cpu",
) -> tuple[PackedExperts, ContiguousBatch, torch.Tensor]:
    """Return packed experts, ``tokens`` tokens for them, two experts each, and what is true of their rows.

    sizes: experts, intermediate and hidden size. where: the torch device of all three.
    """
    experts, wide, hidden = sizes
    if name in KINDS:
        wide, hidden = -(-wide // 256) * 256, -(-hidden // 256) * 256
    if name == "bnb4":
        # Scales of 64 columns, or of 32 in the second product.
        wide, hidden = -(-wide // 64) * 64 - (32 if group == 32 else 0), -(-hidden // 64) * 64
    spec = MoESpec(
        hidden_size=hidden,
        intermediate_size=wide,
        num_experts=experts,
        routing=RoutingSpec(top_k=2),
        activation=ActivationSpec(limit=4.0),
        weight_format="gguf" if name in KINDS else name,
        expert_bias=True,
    )
    dtype: Any = act if act in DTYPES else "bf16"
    problem = Problem(spec=spec, device=device, dtype=dtype, activation_format=act)
    made = _made(name, group, random_experts(experts, 2, wide, hidden, seed=1, bias=True))
    made = replace(
        made,
        gate_up=made.gate_up.to(where),
        down=made.down.to(where),
        gate_up_bias=None if made.gate_up_bias is None else made.gate_up_bias.to(where),
        down_bias=None if made.down_bias is None else made.down_bias.to(where),
    )
    kernel = next(kernel for kernel in _KERNELS if kernel.refuse(problem.routed) is None)
    x = heavy_tailed(tokens, hidden, seed=3).to(where, DTYPES[dtype])
    ids = uneven_ids(tokens, 2, experts, seed=2)
    ids[0, 0] = -1
    routing = Routing(topk_ids=ids.to(where), topk_weights=torch.rand(tokens, 2).to(where))
    batch = Local(num_experts=experts).dispatch(x, routing)[0]
    # Rows of 16 bits lose nothing; codes of rows are part of what is true.
    exact = "fp32" if act in DTYPES else act
    judge = Reference().pack(made, replace(problem, activation_format=exact).routed)
    return kernel.pack(made, problem.routed), batch, judge.run(batch)


def _made(name: str, group: int, plain: ExpertWeights[Any]) -> ExpertWeights[Any]:
    if name not in KINDS:
        return encoded(plain, name, group)
    torch.manual_seed(0)
    gate_up, down = (random_blocks(name, *part.shape) for part in (plain.gate_up, plain.down))
    return replace(plain, gate_up=gate_up, down=down)
