"""The activation between both projections, in registers and float32; ``ops/activation.py`` states the formulas."""

import triton
import triton.language as tl

from . import enums

__all__ = ["activate"]

FAST_MATH = tl.constexpr(enums.FAST_MATH)
# Projections.activation: positions in types.ACTIVATION_KINDS.
SWIGLU = tl.constexpr(0)
SWIGLU_OAI = tl.constexpr(1)
SWIGLU_STEP = tl.constexpr(2)
SITU = tl.constexpr(3)
GEGLU = tl.constexpr(4)
GEGLU_TANH = tl.constexpr(5)
RELU2 = tl.constexpr(6)
SILU = tl.constexpr(7)
GELU = tl.constexpr(8)


@triton.jit
def _tanh_approx(x):
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _sigmoid(x, FAST: tl.constexpr):
    if FAST:
        return 0.5 * _tanh_approx(0.5 * x) + 0.5
    else:
        return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _tanh(x, FAST: tl.constexpr):
    if FAST:
        return _tanh_approx(x)
    else:
        return 2.0 * _sigmoid(2.0 * x, FAST) - 1.0


@triton.jit
def _silu(x, FAST: tl.constexpr):
    return x * _sigmoid(x, FAST)


@triton.jit
def _clamp_above(x, limit):
    # Not minimum: NaN must stay NaN.
    return tl.where(x > limit, limit, x)


@triton.jit
def _clamp(x, limit):
    return tl.where(x < -limit, -limit, tl.where(x > limit, limit, x))


@triton.jit
def _gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _situ(gate, up, bounds, FAST: tl.constexpr):
    bounded_gate = bounds.gate_bound * _tanh(gate / bounds.gate_bound, FAST) * _sigmoid(gate, FAST)
    return bounded_gate * (bounds.up_bound * _tanh(up / bounds.up_bound, FAST))


@triton.jit
def activate(gate, up, bounds, PROJ: tl.constexpr):
    """Return the activation of float32 gate and up (the same tensor for kinds without a gate).

    bounds: ``ActivationBounds``. PROJ: ``Projections``. ``ops/activation.py`` is the reference.
    """
    FAST: tl.constexpr = PROJ.activation >= FAST_MATH
    KIND: tl.constexpr = PROJ.activation - FAST_MATH if FAST else PROJ.activation
    if PROJ.has_limit and KIND != SWIGLU_STEP:
        gate = _clamp_above(gate, bounds.limit)
        up = _clamp(up, bounds.limit)
    if KIND == SWIGLU:
        out = _silu(gate, FAST) * up
    elif KIND == SWIGLU_OAI:
        out = (up + bounds.gate_bound) * (gate * _sigmoid(bounds.alpha * gate, FAST))
    elif KIND == SWIGLU_STEP:
        gate = _silu(gate, FAST)
        if PROJ.has_limit:
            gate = _clamp_above(gate, bounds.limit)
            up = _clamp(up, bounds.limit)
        out = gate * up
    elif KIND == SITU:
        out = _situ(gate, up, bounds, FAST)
    elif KIND == GEGLU:
        out = _gelu(gate) * up
    elif KIND == GEGLU_TANH:
        out = gate * _sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate), FAST) * up
    elif KIND == RELU2:
        out = tl.where(up < 0.0, 0.0, up)
        out = out * out
    elif KIND == SILU:
        out = _silu(up, FAST)
    else:
        out = _gelu(up)
    return out
