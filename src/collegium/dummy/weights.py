"""Random weights of a layer, in the weight formats of its spec."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..formats import by_name
from ..formats.payload import Payload
from ..types import ExpertWeights, LatentWeights, MoESpec, RouterWeights, SharedWeights
from .encoders import ENCODERS

__all__ = ["random_latent", "random_router", "random_shared", "random_weights"]

_INPUT_REACH = 32.0  # range of static activation scales; ample for unit-size inputs and their intermediate values
_DISTINCT_EXPERTS = 7  # generated and encoded experts; the others repeat them, so that building takes seconds
_SHARED_SEED = 1 << 20


def random_weights(
    spec: MoESpec,
    device: torch.device,
    seed: int = 0,
    *,
    experts: Sequence[int] | None = None,
    width: int | None = None,
) -> ExpertWeights[Payload]:
    """Return random experts of unit gain in the spec's weight formats, encoded on ``device``.

    Seven experts are distinct; the others repeat them. experts: the expert of each slot; None: all. Expert e is the
    same whatever the other slots hold. width: of a slice of the intermediate size; None: the whole.
    """
    generator = torch.Generator(device).manual_seed(seed)
    ids = list(range(spec.num_experts) if experts is None else experts)
    parts, hidden = spec.gate_up_parts, spec.expert_hidden_size
    intermediate_size = width or spec.intermediate_size

    def payload(shape: tuple[int, ...], weight_format: str) -> Payload:
        kind = by_name(weight_format)
        count = min(_DISTINCT_EXPERTS, spec.num_experts)
        values = (torch.randn(shape, device=device, generator=generator) for _ in range(count))
        distinct: list[Payload] = []
        for value in values:
            # The same maximum in gate and up gives NVFP4 one global scale for both, which some other libraries need.
            value[..., 0, 0] = 8.0
            value *= shape[-1] ** -0.5
            distinct.append(ENCODERS.get(kind.name, kind.encode)(value))
        stack = distinct[0].repeated(len(ids))
        for slot, expert in enumerate(ids):
            stack.put(slot, distinct[expert % len(distinct)])
        return stack

    def bias(*shape: int) -> Tensor | None:
        if not spec.expert_bias:
            return None
        every = torch.randn((spec.num_experts, *shape), device=device, generator=generator).bfloat16()
        return every if experts is None else every[ids]

    gate_up_format, down_format = spec.formats
    return ExpertWeights(
        gate_up=payload((parts, intermediate_size, hidden), gate_up_format),
        down=payload((hidden, intermediate_size), down_format),
        gate_up_bias=bias(parts, intermediate_size),
        down_bias=bias(hidden),
        input_reach=(_INPUT_REACH, _INPUT_REACH),
        expert_reach=torch.full((len(ids), 2), _INPUT_REACH),
    )


def random_router(spec: MoESpec, device: torch.device, seed: int = 0, *, vocabulary: int = 0) -> RouterWeights:
    """Return a random router; vocabulary: rows of the table where experts are looked up by token id."""
    generator = torch.Generator(device).manual_seed(seed)
    experts, rule = spec.num_experts, spec.routing
    weight = torch.randn(experts, spec.hidden_size, device=device, generator=generator) * spec.hidden_size**-0.5
    correction_bias = 0.01 * torch.randn(experts, device=device, generator=generator)
    table = None
    if rule.hash_routing:
        order = torch.rand(max(1, vocabulary), experts, device=device, generator=generator)
        table = order.argsort(dim=1)[:, : rule.top_k].contiguous()
    return RouterWeights(
        weight=weight,
        correction_bias=correction_bias if rule.correction_bias else None,
        expert_scale=torch.ones(experts, device=device) if rule.expert_scale else None,
        hash_table=table,
    )


def random_shared(spec: MoESpec, device: torch.device, seed: int = 0) -> SharedWeights[Payload] | None:
    """Return a random shared expert; None where the spec has none."""
    if spec.shared is None:
        return None
    gate = None
    if spec.shared.gated:
        generator = torch.Generator(device).manual_seed(seed)
        gate = torch.randn(1, spec.hidden_size, device=device, generator=generator) * spec.hidden_size**-0.5
    return SharedWeights(experts=random_weights(spec.shared_alone(), device, seed + _SHARED_SEED), gate=gate)


def random_latent(spec: MoESpec, device: torch.device, seed: int = 0) -> LatentWeights | None:
    """Return random latent projections; None where the spec has none."""
    if spec.latent_size is None:
        return None
    generator = torch.Generator(device).manual_seed(seed)
    width, hidden = spec.latent_size, spec.hidden_size
    down = torch.randn(width, hidden, device=device, generator=generator) * hidden**-0.5
    up = torch.randn(hidden, width, device=device, generator=generator) * width**-0.5
    norm = None if spec.latent_norm_eps is None else torch.ones(width, device=device)
    return LatentWeights(down=down, up=up, norm=norm, norm_eps=spec.latent_norm_eps or 0.0)
