"""What comes between the two projections, in registers and float32; ``ops/activation.py`` states the formulas."""

import triton
import triton.language as tl

__all__ = ["activate"]


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _tanh(x):
    return 2.0 * _sigmoid(2.0 * x) - 1.0


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
def activate(gate, up, KIND: tl.constexpr, HAS_LIMIT: tl.constexpr, limit, alpha, gate_bound, up_bound):
    """Return the activation of float32 gate and up (the same tensor for kinds without a gate).

    KIND is the place of the kind in ``types.ACTIVATION_KINDS``; ``ops/activation.py`` is the reference.
    """
    if HAS_LIMIT and KIND != 2:
        gate = _below(gate, limit)
        up = _within(up, limit)
    if KIND == 0:  # swiglu
        out = gate * _sigmoid(gate) * up
    elif KIND == 1:  # swiglu_oai
        out = (up + 1.0) * (gate * _sigmoid(alpha * gate))
    elif KIND == 2:  # swiglu_step
        gate = gate * _sigmoid(gate)
        if HAS_LIMIT:
            gate = _below(gate, limit)
            up = _within(up, limit)
        out = gate * up
    elif KIND == 3:  # situ
        bounded = gate_bound * _tanh(gate / gate_bound) * _sigmoid(gate)
        out = bounded * (up_bound * _tanh(up / up_bound))
    elif KIND == 4:  # geglu
        out = _gelu(gate) * up
    elif KIND == 5:  # geglu_tanh
        out = gate * _sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    elif KIND == 6:  # relu2
        out = tl.where(up < 0.0, 0.0, up)
        out = out * out
    elif KIND == 7:  # silu
        out = up * _sigmoid(up)
    else:  # gelu
        out = _gelu(up)
    return out
