"""Activations between the two projections of an expert, and the order of interleaved gate and up rows.

Shape letters: R rows, P parts (2: gate then up; 1: up alone), I intermediate size.

Everything is evaluated in float64 and rounded once to float32: the float32 silu, sigmoid and gelu of torch
give other bits in the vector body than in the tail of a tensor, so a row would depend on how many rows are
before it.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import InputError
from ..kernels.arguments import ActivationBounds
from ..kernels.enums import FAST_MATH, NO_ACTIVATION
from ..types import ACTIVATION_KINDS, ActivationSpec
from .checks import require_input

__all__ = ["activate", "activation_bounds", "activation_kind", "deinterleave", "interleave"]

_CHUNK = 1 << 22  # float64 elements in flight; a bound on memory, without influence on the result


def activate(x: Tensor, spec: ActivationSpec) -> Tensor:
    """Return the float32 activation ``[R, I]`` of ``x [R, P, I]`` (any floating dtype).

    With a gate P is 2 and index 0 is the gate, index 1 up; without one P is 1. Formulas:
    ``docs/activations.md``. NaN stays NaN through every clamp; finite inputs never give NaN. Raises
    ``InputError`` for a wrong shape or dtype.
    """
    parts = 2 if spec.gated else 1
    allowed = f"floating [R, {parts}, I] ({'gate, then up' if spec.gated else 'up alone'})"
    valid = x.dim() == 3 and x.shape[1] == parts and x.is_floating_point()
    require_input(valid, f"activation {spec.kind}", x, allowed)
    rows, _, width = x.shape
    step = max(1, _CHUNK // max(1, width))
    if rows <= step:
        return _formula(x, spec)
    return torch.cat([_formula(x[start : start + step], spec) for start in range(0, rows, step)])


def _formula(x: Tensor, spec: ActivationSpec) -> Tensor:
    exact = x.to(torch.float64)
    value = _gated(exact[:, 0], exact[:, 1], spec) if spec.gated else _plain(exact[:, 0], spec)
    return value.to(torch.float32)


def _gated(gate: Tensor, up: Tensor, spec: ActivationSpec) -> Tensor:
    if spec.kind == "swiglu_step":
        gate = functional.silu(gate)
    if spec.limit is not None:
        gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
    match spec.kind:
        case "swiglu":
            return functional.silu(gate) * up
        case "swiglu_oai":
            return (up + spec.beta) * (gate * torch.sigmoid(spec.alpha * gate))
        case "swiglu_step":
            return gate * up
        case "situ":
            bounded = spec.gate_bound * torch.tanh(gate / spec.gate_bound) * torch.sigmoid(gate)
            return bounded * (spec.up_bound * torch.tanh(up / spec.up_bound))
        case "geglu":
            return _gelu(gate) * up
        case "geglu_tanh":
            # (1 + tanh z) / 2 is sigmoid(2 z), which does not cancel for negative z.
            return gate * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)) * up
        case _:
            raise InputError(f"activation {spec.kind}: found no gated formula of this name")


def _plain(up: Tensor, spec: ActivationSpec) -> Tensor:
    match spec.kind:
        case "relu2":
            return functional.relu(up).square()
        case "silu":
            return functional.silu(up)
        case "gelu":
            return _gelu(up)
        case _:
            raise InputError(f"activation {spec.kind}: found no formula without a gate of this name")


def _gelu(x: Tensor) -> Tensor:
    # erfc instead of 1 + erf, which cancels for negative x.
    return 0.5 * x * torch.special.erfc(x * -math.sqrt(0.5))


def activation_bounds(activation: ActivationSpec | None) -> ActivationBounds:
    """Return the numbers of an activation for a kernel."""
    spec = activation or ActivationSpec()
    gate_bound = spec.beta if spec.kind == "swiglu_oai" else spec.gate_bound
    return ActivationBounds(float(spec.limit or 0.0), float(spec.alpha), float(gate_bound), float(spec.up_bound))


def activation_kind(activation: ActivationSpec | None) -> int:
    """Return the kernels' number of an activation."""
    if activation is None:
        return NO_ACTIVATION
    return ACTIVATION_KINDS.index(activation.kind) + (FAST_MATH if activation.fast else 0)


def deinterleave(rows: Tensor, dim: int) -> Tensor:
    """Split axis ``dim`` of size 2I, ordered g0, u0, g1, u1, ..., into ``[2, I]``: all gates, then all ups.

    Works on any dtype; returns a view with one more dimension. Raises ``InputError`` when the size is odd.
    """
    axis = _axis(dim, rows.dim())
    if rows.shape[axis] % 2:
        raise InputError(f"deinterleave: axis {dim} of {tuple(rows.shape)} is odd, allowed: 2*I, gate and up in turn")
    return rows.unflatten(axis, (rows.shape[axis] // 2, 2)).transpose(axis, axis + 1)


def interleave(parts: Tensor, dim: int) -> Tensor:
    """Undo ``deinterleave`` with the same ``dim``: axes ``[2, I]`` become one axis g0, u0, g1, u1, ...

    ``dim`` counts axes of the result. Returns a copy. Raises ``InputError`` when the first axis is not 2.
    """
    axis = _axis(dim, parts.dim() - 1)
    if parts.shape[axis] != 2:
        raise InputError(f"interleave: axis {axis} of {tuple(parts.shape)} is not 2, allowed: [2, I], gate before up")
    return parts.transpose(axis, axis + 1).flatten(axis, axis + 1)


def _axis(dim: int, dims: int) -> int:
    require_input(-dims <= dim < dims, "interleaved axis", dim, f"{-dims} to {dims - 1}")
    return dim % dims
