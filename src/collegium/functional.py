"""moe(): routed experts run once, on plain tensors or on payloads."""

from typing import Any, cast

from torch import Tensor

from .errors import InputError
from .formats.payload import Payload
from .formats.unquantised import FLOAT_FORMATS, as_stored
from .layer import MoELayer
from .planning import plan
from .problem import Limits, Overrides, Problem
from .runtime.devices import probe
from .runtime.packed_module import refuse_gradient
from .types import ActivationSpec, ExpertWeights, MoESpec, Routing, RoutingSpec

__all__ = ["moe"]


def moe(
    x: Tensor,
    gate_up: Payload | Tensor,
    down: Payload | Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    activation: ActivationSpec | None = None,
    biases: tuple[Tensor, Tensor] | None = None,
    overrides: Overrides | None = None,
) -> Tensor:
    """Run routed experts once, without building a layer: ``x [T, H]`` to ``[T, H]``, same dtype.

    gate_up: a payload ``[E, P, I, H]``, or a tensor ``[E, P*I, H]`` with the gate rows first. down: a payload or
    tensor ``[E, H, I]``. topk_ids ``[T, K]`` integers (-1: not here), topk_weights ``[T, K]``. biases: gate_up
    ``[E, P*I]`` or ``[E, P, I]`` and down ``[E, H]``. Weights are packed at every call: keep a MoELayer for repeated
    use of a quantised format. Inference only. Raises InputError for wrong shapes and dtypes and where a gradient is
    asked for, and PlanError.
    """
    given: dict[str, object] = {
        "x": x,
        "gate_up": gate_up,
        "down": down,
        "topk_ids": topk_ids,
        "topk_weights": topk_weights,
    }
    for name, found in given.items():
        if not isinstance(found, Tensor | Payload):
            raise InputError(f"moe: {name} is a {type(found).__name__}; allowed: a tensor, for weights a payload too")
    _check(x, topk_ids, topk_weights, biases)
    kind = activation or ActivationSpec()
    upper, lower = _payload("gate_up", gate_up, 2 if kind.gated else 1), _payload("down", down, None)
    experts, _, wide, hidden = upper.shape
    spec = MoESpec(
        hidden_size=hidden,
        intermediate_size=wide,
        num_experts=experts,
        routing=RoutingSpec(top_k=min(topk_ids.shape[-1], experts)),
        activation=kind,
        weight_format=upper.name,
        down_format=None if lower.name == upper.name else lower.name,
        expert_bias=biases is not None,
    )
    problem = Problem(
        spec=spec,
        device=probe(x.device),
        limits=Limits(max_tokens=max(1, x.shape[0])),
        dtype=cast("Any", FLOAT_FORMATS[x.dtype].name),
    )
    weights = ExpertWeights(
        gate_up=upper,
        down=lower,
        gate_up_bias=None if biases is None else _bias(biases[0], (experts, upper.shape[1], wide)),
        down_bias=None if biases is None else biases[1],
    )
    return MoELayer(weights, plan(problem, overrides))(x, routing=Routing(topk_ids=topk_ids, topk_weights=topk_weights))


def _check(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, biases: tuple[Tensor, Tensor] | None) -> None:
    if x.dim() != 2 or x.dtype not in FLOAT_FORMATS:
        allowed = ", ".join(map(str, FLOAT_FORMATS))
        raise InputError(f"moe: x is {tuple(x.shape)} {x.dtype}; allowed: [T, H] of {allowed}")
    for name, found in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        if found.dim() != 2 or found.shape[0] != x.shape[0] or found.shape[1] < 1:
            raise InputError(f"moe: {name} is {tuple(found.shape)}; allowed: [{x.shape[0]}, K], as many rows as x")
    first, second = biases or (None, None)
    refuse_gradient(x=x, topk_weights=topk_weights, gate_up_bias=first, down_bias=second)


def _payload(name: str, weight: Payload | Tensor, parts: int | None) -> Payload:
    """Return a tensor as a payload ``[E, P, I, H]`` for ``parts`` P, or ``[E, H, I]`` without."""
    if not isinstance(weight, Payload):
        refuse_gradient(**{name: weight})
        if parts is not None and weight.dim() == 3 and weight.shape[1] % parts == 0:
            weight = weight.unflatten(1, (parts, -1))
    payload = weight if isinstance(weight, Payload) else as_stored(weight)
    shape = "[E, H, I]" if parts is None else f"[E, {parts}, I, H], or a tensor [E, {parts} * I, H]"
    if len(payload.shape) != (3 if parts is None else 4) or parts not in (None, payload.shape[1]):
        raise InputError(f"moe: {name} is {tuple(weight.shape)}; allowed: {shape}")
    return payload


def _bias(bias: Tensor, shape: tuple[int, int, int]) -> Tensor:
    if tuple(bias.shape) not in (shape, (shape[0], shape[1] * shape[2])):
        raise InputError(f"moe: the bias of gate_up is {tuple(bias.shape)}; allowed: {shape}, or its last two in one")
    return bias.reshape(shape)
