"""moe(): run routed experts once, on plain tensors or on payloads."""

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
    ``[E, P*I]`` or ``[E, P, I]`` and down ``[E, H]``. Weights are packed at every call: build a MoELayer for repeated
    use of a quantised format. Inference only. Raises InputError for wrong shapes and dtypes and where a gradient is
    required, and PlanError.
    """
    inputs: dict[str, object] = {
        "x": x,
        "gate_up": gate_up,
        "down": down,
        "topk_ids": topk_ids,
        "topk_weights": topk_weights,
    }
    for name, value in inputs.items():
        if not isinstance(value, Tensor | Payload):
            raise InputError(f"moe: {name} is a {type(value).__name__}; allowed: a tensor, for weights a payload too")
    _check(x, topk_ids, topk_weights, biases)
    activation = activation or ActivationSpec()
    gate_up = _payload("gate_up", gate_up, 2 if activation.gated else 1)
    down = _payload("down", down, None)
    experts, parts, intermediate, hidden = gate_up.shape
    spec = MoESpec(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_experts=experts,
        routing=RoutingSpec(top_k=min(topk_ids.shape[-1], experts)),
        activation=activation,
        weight_format=gate_up.name,
        down_format=None if down.name == gate_up.name else down.name,
        expert_bias=biases is not None,
    )
    problem = Problem(
        spec=spec,
        device=probe(x.device),
        limits=Limits(max_tokens=max(1, x.shape[0])),
        dtype=cast("Any", FLOAT_FORMATS[x.dtype].name),
    )
    weights = ExpertWeights(
        gate_up=gate_up,
        down=down,
        gate_up_bias=None if biases is None else _gate_up_bias(biases[0], (experts, parts, intermediate)),
        down_bias=None if biases is None else biases[1],
    )
    layer = MoELayer(weights, plan(problem, overrides))
    return layer(x, routing=Routing(topk_ids=topk_ids, topk_weights=topk_weights))


def _check(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, biases: tuple[Tensor, Tensor] | None) -> None:
    if x.dim() != 2 or x.dtype not in FLOAT_FORMATS:
        allowed = ", ".join(map(str, FLOAT_FORMATS))
        raise InputError(f"moe: x is {tuple(x.shape)} {x.dtype}; allowed: [T, H] of {allowed}")
    for name, tensor in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        if tensor.dim() != 2 or tensor.shape[0] != x.shape[0] or tensor.shape[1] < 1:
            raise InputError(f"moe: {name} is {tuple(tensor.shape)}; allowed: [{x.shape[0]}, K], as many rows as x")
    gate_up_bias, down_bias = biases or (None, None)
    refuse_gradient(x=x, topk_weights=topk_weights, gate_up_bias=gate_up_bias, down_bias=down_bias)


def _payload(name: str, weight: Payload | Tensor, parts: int | None) -> Payload:
    """Return ``weight`` as a payload: ``[E, P, I, H]`` for ``parts`` P, ``[E, H, I]`` for None."""
    if not isinstance(weight, Payload):
        refuse_gradient(**{name: weight})
        if parts is not None and weight.dim() == 3 and weight.shape[1] % parts == 0:
            weight = weight.unflatten(1, (parts, -1))
    payload = weight if isinstance(weight, Payload) else as_stored(weight)
    dimensions = 3 if parts is None else 4
    if len(payload.shape) != dimensions or parts not in (None, payload.shape[1]):
        allowed = "[E, H, I]" if parts is None else f"[E, {parts}, I, H], or a tensor [E, {parts} * I, H]"
        raise InputError(f"moe: {name} is {tuple(weight.shape)}; allowed: {allowed}")
    return payload


def _gate_up_bias(bias: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Return the bias as ``[E, P, I]``."""
    if tuple(bias.shape) not in (shape, (shape[0], shape[1] * shape[2])):
        raise InputError(f"moe: the bias of gate_up is {tuple(bias.shape)}; allowed: {shape}, or its last two in one")
    return bias.reshape(shape)
