"""Build experts from plain tensors, and encode experts into another weight format."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from .errors import InputError
from .formats import by_name
from .formats.payload import Payload
from .formats.unquantised import as_stored
from .types import ExpertWeights

__all__ = ["Matrices", "as_payloads", "encode_experts", "encoded", "expert_weights", "in_formats"]

# All experts of one projection: one tensor or payload, or one tensor per expert.
Matrices = Tensor | Payload | Sequence[Tensor]


def expert_weights(
    gate_up: Matrices | tuple[Matrices, Matrices],
    down: Matrices,
    *,
    gate_up_bias: Tensor | tuple[Tensor, Tensor] | None = None,
    down_bias: Tensor | None = None,
    weight_format: str | None = None,
    input_reach: tuple[float, float] | None = None,
) -> ExpertWeights[Payload]:
    """Return the experts of a layer from plain tensors or quantised payloads, output-first as in ``nn.Linear``.

    gate_up: ``[E, 2 * I, H]`` with the gate rows first (``w13``), ``[E, 2, I, H]``, or a pair (gate, up) of
        ``[E, I, H]``; without a gate ``[E, I, H]``. down: ``[E, H, I]`` (``w2``). Each is a tensor of float32, bfloat16
        or float16, a payload of ``collegium.formats``, or a list with one tensor ``[N, K]`` per expert. Gate and up
        have one format, which may differ from that of down.
    gate_up_bias: ``[E, 2 * I]``, ``[E, 2, I]`` or a pair of ``[E, I]``; down_bias: ``[E, H]``. Both or none.
    weight_format: encode all experts into this format, for instance ``mxfp4``; None: keep their format, and do not copy
        contiguous tensors.
    input_reach: as in ``ExpertWeights``, for static activation formats.

    If 2 * intermediate equals hidden, a transposed stack has the same shape and is not detected: pass ``.mT``.
    For inference only: tensors are detached. Raises InputError for shapes, dtypes and devices that do not match, and
    SpecError for an unknown format.
    """
    lower = _payload("down", down)
    if len(lower.shape) != 3:
        raise InputError(f"expert_weights: down is {_describe(lower)}; allowed: [experts, hidden, intermediate]")
    experts, hidden, intermediate = lower.shape
    upper = _gate_up_payload(gate_up, intermediate, hidden)
    parts = upper.shape[1] if len(upper.shape) == 4 else 0
    expected = (experts, parts, intermediate, hidden)
    if upper.shape != expected or parts not in (1, 2):
        raise InputError(_mismatch_text(upper, lower))
    if upper.device != lower.device:
        raise InputError(
            f"expert_weights: gate_up is on {upper.device}, down on {lower.device}; move both to one device"
        )
    biases = _biases(gate_up_bias, down_bias, expected, upper.device)
    weights = ExpertWeights(gate_up=upper, down=lower, input_reach=input_reach, **biases)
    return weights if weight_format is None else encode_experts(weights, weight_format)


def as_payloads(weights: ExpertWeights[Any]) -> ExpertWeights[Payload]:
    """Return ``weights`` with plain tensors wrapped in payloads; raises the InputError of ``expert_weights``."""
    if isinstance(weights.gate_up, Payload) and isinstance(weights.down, Payload):
        return weights
    payloads = expert_weights(
        weights.gate_up,
        weights.down,
        gate_up_bias=weights.gate_up_bias,
        down_bias=weights.down_bias,
        input_reach=weights.input_reach,
    )
    return replace(payloads, expert_reach=weights.expert_reach)


def encode_experts(
    weights: ExpertWeights[Payload] | ExpertWeights[Tensor], weight_format: str
) -> ExpertWeights[Payload]:
    """Encode every expert into ``weight_format``, one expert at a time; biases are unchanged.

    weights: payloads, or plain tensors in the shapes of ``expert_weights``. A projection that already has the format is
    unchanged. Raises SpecError for an unknown format.
    """
    target = by_name(weight_format)
    payloads = as_payloads(weights)
    return replace(payloads, gate_up=_encode(payloads.gate_up, target), down=_encode(payloads.down, target))


def encoded(weights: ExpertWeights[Payload], weight_format: str | None) -> ExpertWeights[Payload]:
    """Return ``weights`` in ``weight_format``; unchanged if both projections have it, or if it is None."""
    if weight_format is None or weights.gate_up.name == weights.down.name == weight_format:
        return weights
    return encode_experts(weights, weight_format)


def in_formats(weights: ExpertWeights[Payload], formats: tuple[str, str]) -> ExpertWeights[Payload]:
    """Return ``weights`` with gate and up, and down, encoded into ``formats`` where they have others."""
    gate_up_format, down_format = (by_name(name) for name in formats)
    gate_up, down = _encode(weights.gate_up, gate_up_format), _encode(weights.down, down_format)
    return replace(weights, gate_up=gate_up, down=down)


def _encode(source: Payload, target: type[Payload]) -> Payload:
    if source.name == target.name:
        return source
    first = target.encode(source[0].decode())
    result = first.repeated(source.shape[0])
    for expert in range(source.shape[0]):
        result.put(expert, target.encode(source[expert].decode()))
    return result


def _payload(name: str, matrices: Any) -> Payload:
    """Return all experts of one projection as one payload, ``[E, N, K]`` or ``[E, P, I, H]``."""
    if isinstance(matrices, Payload):
        return matrices
    if isinstance(matrices, Sequence):
        matrices = _stack(name, cast("Sequence[object]", matrices))
    if not isinstance(matrices, Tensor):
        raise InputError(
            f"expert_weights: {name} is a {type(matrices).__name__}; allowed: a tensor, a payload of "
            "collegium.formats, or a list with one tensor per expert"
        )
    # Contiguous, so that equal numbers give equal bits whatever the layout of the input.
    return as_stored(matrices.detach().contiguous())


def _stack(name: str, matrices: Sequence[object]) -> Tensor:
    tensors = [matrix.detach() for matrix in matrices if isinstance(matrix, Tensor)]
    kinds = {(tuple(tensor.shape), tensor.dtype, tensor.device) for tensor in tensors}
    if len(tensors) != len(matrices) or len(kinds) != 1 or tensors[0].dim() != 2:
        types = ", ".join(sorted({type(matrix).__name__ for matrix in matrices})) or "nothing"
        shapes = ", ".join(sorted({f"{list(shape)} {dtype} on {device}" for shape, dtype, device in kinds}))
        raise InputError(
            f"expert_weights: {name} is a list of {types} ({shapes or 'no tensor'}); allowed: one matrix per "
            "expert, all of one shape, dtype and device"
        )
    return torch.stack(tensors)


def _gate_up_payload(gate_up: Any, intermediate: int, hidden: int) -> Payload:
    """Return gate and up as ``[E, P, I, H]``, or unchanged if they do not match I and H of down."""
    if isinstance(gate_up, tuple) and len(cast("tuple[object, ...]", gate_up)) == 2 and not _is_matrix(gate_up[0]):
        gate, up = (_payload(name, matrices) for name, matrices in zip(("gate", "up"), gate_up, strict=True))
        return _stack_gate_up(gate, up)
    payload = _payload("gate_up", gate_up)
    if payload.shape[1:] == (2 * intermediate, hidden):
        return _split_gate_up(payload, intermediate)
    if payload.shape[1:] == (intermediate, hidden):
        return _with_axis(payload)
    return payload


def _is_matrix(value: object) -> bool:
    """Return whether ``value`` is one expert's matrix, so that a pair of them is a list of two experts."""
    return isinstance(value, Tensor) and value.dim() == 2


def _split_gate_up(payload: Payload, intermediate: int) -> Payload:
    """Return ``[E, 2 * I, H]`` as ``[E, 2, I, H]``: a view of unquantised weights, a copy of quantised ones."""
    values = payload.tensors().get("values")
    if len(payload.tensors()) == 1 and values is not None:
        return as_stored(values.unflatten(1, (2, intermediate)))
    return _stack_gate_up(payload.rows(0, intermediate), payload.rows(intermediate, 2 * intermediate))


def _with_axis(payload: Payload) -> Payload:
    tensors = {name: tensor.unsqueeze(1) for name, tensor in payload.tensors().items()}
    return replace(payload, shape=(payload.shape[0], 1, *payload.shape[1:]), **tensors)


def _stack_gate_up(gate: Payload, up: Payload) -> Payload:
    """Return ``[E, 2, I, H]`` of gate and up ``[E, I, H]``, which must have one format."""
    if _stack_key(gate) != _stack_key(up) or len(gate.shape) != 3:
        raise InputError(
            f"expert_weights: gate is {_describe(gate)}, up is {_describe(up)}; both must be [experts, intermediate, "
            "hidden] of one format, with the same dtypes, groups and device. Decode one of them, or encode both with "
            "weight_format="
        )
    pairs = {name: torch.stack((tensor, up.tensors()[name]), 1) for name, tensor in gate.tensors().items()}
    return replace(gate, shape=(gate.shape[0], 2, *gate.shape[1:]), **pairs)


def _stack_key(payload: Payload) -> tuple[object, ...]:
    """Return the properties that two payloads must share to be stacked: all but the contents of their tensors."""
    tensors = payload.tensors()
    attributes = [
        (name, getattr(payload, name))
        for name in payload.__dataclass_fields__
        if name not in tensors and name != "shape"
    ]
    shapes = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    return payload.name, payload.shape, str(payload.device), tuple(shapes), tuple(attributes)


def _biases(upper: Any, lower: Any, shape: tuple[int, ...], device: torch.device) -> Mapping[str, Any]:
    """Return gate_up_bias ``[E, P, I]`` and down_bias ``[E, H]``; shape: (E, P, I, H)."""
    if upper is None and lower is None:
        return {}
    experts, parts, intermediate, hidden = shape
    if isinstance(upper, tuple):
        halves = cast("tuple[Any, ...]", upper)
        for half in halves:
            _check_bias("each of the pair gate_up_bias", half, [(experts, intermediate)], device)
        if len(halves) != parts:
            raise InputError(f"expert_weights: gate_up_bias is a tuple of {len(halves)}; allowed: {parts}")
        upper = torch.stack(halves, 1)
    _check_bias("gate_up_bias", upper, [(experts, parts * intermediate), (experts, parts, intermediate)], device)
    _check_bias("down_bias", lower, [(experts, hidden)], device)
    gate_up_bias = cast("Tensor", upper).detach().reshape(experts, parts, intermediate)
    return {"gate_up_bias": gate_up_bias, "down_bias": cast("Tensor", lower).detach()}


def _check_bias(name: str, bias: Any, shapes: list[tuple[int, ...]], device: torch.device) -> None:
    if not isinstance(bias, Tensor):
        actual = type(bias).__name__
    elif tuple(bias.shape) in shapes and bias.is_floating_point() and bias.device == device:
        return
    else:
        actual = f"{list(bias.shape)} {bias.dtype} on {bias.device}"
    raise InputError(
        f"expert_weights: {name} is {actual}; allowed: {' or '.join(str(list(shape)) for shape in shapes)} of a "
        f"floating dtype on {device}. Give both biases or none"
    )


def _mismatch_text(upper: Payload, lower: Payload) -> str:
    """Return the error message for gate_up and down whose shapes do not match."""
    experts, hidden, intermediate = lower.shape
    matrix = upper.shape[-2:]
    hint = ""
    if matrix in ((hidden, 2 * intermediate), (hidden, intermediate)):
        hint = ". gate_up looks input-first: pass gate_up.mT"
    elif matrix in ((2 * hidden, intermediate), (hidden, intermediate)):
        hint = ". down looks input-first: pass down.mT"
    elif matrix in ((intermediate, 2 * hidden), (intermediate, hidden)):
        hint = ". Both look input-first: pass gate_up.mT and down.mT"
    return (
        f"expert_weights: gate_up is {_describe(upper)}, down is {_describe(lower)}; with down [E, H, I] of "
        f"E={experts}, H={hidden}, I={intermediate} allowed: gate_up {[experts, 2 * intermediate, hidden]} with the "
        f"gate rows first, {[experts, 2, intermediate, hidden]}, without a gate {[experts, intermediate, hidden]}, or "
        f"a pair (gate, up){hint}"
    )


def _describe(payload: Payload) -> str:
    return f"{list(payload.shape)} {payload.name} on {payload.device}"
