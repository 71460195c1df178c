"""What comes between the two projections, in registers and float32; ``ops/activation.py`` states the formulas."""

import triton
import triton.language as tl

from . import enums

__all__ = ["activate"]

FAST_MATH = tl.constexpr(enums.FAST_MATH)


@triton.jit
def _near_tanh(x):
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _sigmoid(x, FAST: tl.constexpr):
    if FAST:
        return 0.5 * _near_tanh(0.5 * x) + 0.5
    else:
        return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _tanh(x, FAST: tl.constexpr):
    if FAST:
        return _near_tanh(x)
    else:
        return 2.0 * _sigmoid(2.0 * x, FAST) - 1.0


@triton.jit
def _below(x, limit):
    # Not minimum: NaN must stay NaN.
    return tl.where(x > limit, limit, x)


@triton.jit
def _within(x, limit):
    return tl.where(x < -limit, -limit, tl.where(x > limit, limit, x))


@triton.jit
def _gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def activate(gate, up, bounds, PROJ: tl.constexpr):
    """Return the activation of float32 gate and up (the same tensor for kinds without a gate).

    bounds: ``ActivationBounds``. PROJ: ``Projections``. ``ops/activation.py`` is the reference.
    """
    FAST: tl.constexpr = PROJ.activation >= FAST_MATH
    kind: tl.constexpr = PROJ.activation - FAST_MATH if FAST else PROJ.activation
    if PROJ.has_limit and kind != 2:
        gate = _below(gate, bounds.limit)
        up = _within(up, bounds.limit)
    if kind == 0:  # swiglu
        out = gate * _sigmoid(gate, FAST) * up
    elif kind == 1:  # swiglu_oai
        out = (up + bounds.gate_bound) * (gate * _sigmoid(bounds.alpha * gate, FAST))
    elif kind == 2:  # swiglu_step
        gate = gate * _sigmoid(gate, FAST)
        if PROJ.has_limit:
            gate = _below(gate, bounds.limit)
            up = _within(up, bounds.limit)
        out = gate * up
    elif kind == 3:  # situ
        bounded = bounds.gate_bound * _tanh(gate / bounds.gate_bound, FAST) * _sigmoid(gate, FAST)
        out = bounded * (bounds.up_bound * _tanh(up / bounds.up_bound, FAST))
    elif kind == 4:  # geglu
        out = _gelu(gate) * up
    elif kind == 5:  # geglu_tanh
        out = gate * _sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate), FAST) * up
    elif kind == 6:  # relu2
        out = tl.where(up < 0.0, 0.0, up)
        out = out * out
    elif kind == 7:  # silu
        out = up * _sigmoid(up, FAST)
    else:  # gelu
        out = _gelu(up)
    return out
