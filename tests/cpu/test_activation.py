"""Activations against float64 formulas written with Python's math, and the order of interleaved rows."""

from __future__ import annotations

import math

import pytest
import torch

from collegium.errors import InputError
from collegium.ops.activation import activate, deinterleave, interleave
from collegium.types import ACTIVATION_KINDS, ActivationSpec
from raising import raises_with

OAI = ActivationSpec(kind="swiglu_oai", limit=7.0)
V4 = ActivationSpec(kind="swiglu", limit=10.0)
STEP = ActivationSpec(kind="swiglu_step", limit=7.0)
SITU = ActivationSpec(kind="situ")

# Published worked examples: gate, up, result.
EXAMPLES = [
    *((OAI, *row) for row in ((1.0, 2.0, 2.537387298), (8.0, -9.0, -41.99971877), (-8.0, 0.5, -1.464964330e-05))),
    *((V4, *row) for row in ((1.0, 2.0, 1.462117157), (12.0, -11.0, -99.995460213))),
    *((SITU, *row) for row in ((1.0, 2.0, 1.429351132), (10.0, -30.0, -82.245821545))),
    (STEP, 9.0, 8.0, 49.0),
]

SPECS = [
    *(ActivationSpec(kind=kind) for kind in ACTIVATION_KINDS),
    OAI,
    V4,
    STEP,
    ActivationSpec(kind="swiglu_oai", limit=0.75, alpha=1.25, beta=0.5),
    ActivationSpec(kind="situ", gate_bound=1.5, up_bound=3.0),
]


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def gelu(x):
    return 0.5 * x * math.erfc(-x / math.sqrt(2))


def gelu_tanh(x):
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def formula(spec, g, u):
    limit = math.inf if spec.limit is None else spec.limit

    def both(v):
        return max(-limit, min(limit, v))

    match spec.kind:
        case "swiglu":
            g = min(g, limit)
            return g * sigmoid(g) * both(u)
        case "swiglu_oai":
            g = min(g, limit)
            return (both(u) + spec.beta) * g * sigmoid(spec.alpha * g)
        case "swiglu_step":
            return min(g * sigmoid(g), limit) * both(u)
        case "situ":
            bounded = spec.gate_bound * math.tanh(g / spec.gate_bound) * sigmoid(g)
            return bounded * spec.up_bound * math.tanh(u / spec.up_bound)
        case "geglu":
            return gelu(g) * u
        case "geglu_tanh":
            return gelu_tanh(g) * u
        case "relu2":
            return max(u, 0.0) ** 2
        case "silu":
            return u * sigmoid(u)
        case "gelu":
            return gelu(u)


def inputs(spec, rows, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    parts = 2 if spec.gated else 1
    x = torch.randn(rows, parts, width, generator=generator)
    return x * torch.randn(rows, parts, width, generator=generator).exp().square()  # heavy tails: beyond every limit


@pytest.mark.parametrize(("spec", "gate", "up", "want"), EXAMPLES)
def test_activate_worked_examples(spec, gate, up, want):
    found = activate(torch.tensor([[[gate], [up]]]), spec)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(want, rel=2e-7)


def test_activate_relu2_worked_example():
    found = activate(torch.tensor([[[3.0, -3.0]]]), ActivationSpec(kind="relu2"))
    assert found.tolist() == [[9.0, 0.0]]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.kind}-{s.limit}")
def test_activate_every_kind_matches_its_formula(spec):
    x = inputs(spec, 9, 33)
    want = [[formula(spec, float(row[0, i]), float(row[-1, i])) for i in range(33)] for row in x.double()]
    # Python has no tanh - (-1) without cancellation, so that one judge is exact to 1e-16 only.
    atol = 1e-13 if spec.kind == "geglu_tanh" else 1e-37
    torch.testing.assert_close(
        activate(x, spec).double(), torch.tensor(want, dtype=torch.float64), rtol=1e-7, atol=atol
    )


@pytest.mark.parametrize("spec", [s for s in SPECS if s.gated], ids=lambda s: f"{s.kind}-{s.limit}")
def test_gate_and_up_not_exchangeable(spec):
    x = inputs(spec, 4, 17, seed=1)
    assert not torch.allclose(activate(x, spec), activate(x.flip(1), spec), rtol=1e-2)


def test_gate_clamped_only_from_above():
    low = torch.tensor([[[-9.0], [1.0]]])
    for kind in ("swiglu", "swiglu_oai", "swiglu_step"):
        kept = activate(low, ActivationSpec(kind=kind, limit=2.0))
        assert torch.equal(kept, activate(low, ActivationSpec(kind=kind)))


def test_clamp_order_of_swiglu_and_step():
    x = torch.tensor([[[7.003], [1.0]]])  # silu(7.003) < 7 < 7.003: only the clamp before silu acts
    before = activate(x, ActivationSpec(kind="swiglu", limit=7.0)).item()
    after = activate(x, STEP).item()
    assert before == pytest.approx(7 * sigmoid(7), rel=1e-6)
    assert after == pytest.approx(7.003 * sigmoid(7.003), rel=1e-6)
    assert after - before > 1e-3


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.kind}-{s.limit}")
def test_activate_nan_stays_and_stays_alone(spec):
    x = inputs(spec, 5, 33, seed=2)
    clean = activate(x, spec)
    for part in range(x.shape[1]):
        bad = x.clone()
        bad[2, part, 7] = torch.nan
        found = activate(bad, spec)
        assert found[2, 7].isnan()
        found[2, 7] = clean[2, 7]
        assert torch.equal(found, clean)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.kind}-{s.limit}")
def test_activate_finite_inputs_never_give_nan(spec):
    large = [v * s for v in (3.4e38, 1e30, 1e20, 200.0, 89.0, 0.0) for s in (1.0, -1.0)]
    pairs = torch.cartesian_prod(torch.tensor(large), torch.tensor(large)).T[None]
    found = activate(pairs if spec.gated else pairs[:, :1], spec)
    assert not found.isnan().any()


def test_silu_of_large_negative_is_zero():
    assert activate(torch.full((1, 1, 1), -1e30), ActivationSpec(kind="silu")).item() == 0.0


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.kind}-{s.limit}")
def test_activate_is_batch_invariant(spec):
    x = inputs(spec, 8, 33, seed=3)
    whole = activate(x, spec)
    assert torch.equal(whole, torch.cat([activate(row[None], spec) for row in x]))
    assert torch.equal(whole[3:6], activate(x[3:6], spec))
    assert torch.equal(whole, activate(x.transpose(0, 2).contiguous().transpose(0, 2), spec))


def test_activate_in_chunks_is_the_same(monkeypatch):
    x = inputs(OAI, 11, 33, seed=4)
    whole = activate(x, OAI)
    monkeypatch.setattr("collegium.ops.activation._CHUNK", 100)
    assert torch.equal(whole, activate(x, OAI))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_computed_in_fp32(dtype):
    x = inputs(OAI, 3, 17).to(dtype)
    assert torch.equal(activate(x, OAI), activate(x.float(), OAI))


def test_activate_empty():
    assert activate(torch.empty(0, 2, 17), OAI).shape == (0, 17)


@pytest.mark.parametrize("shape", [(3, 1, 4), (3, 8), (3, 3, 4)])
def test_activate_refuses_wrong_shapes(shape):
    with raises_with(InputError, "swiglu_oai", "[R, 2, I]"):
        activate(torch.zeros(shape), OAI)


def test_ungated_activation_refuses_gate():
    with pytest.raises(InputError, match=r"relu2: .*\[R, 1, I\]"):
        activate(torch.zeros(3, 2, 4), ActivationSpec(kind="relu2"))


def test_deinterleave_puts_gates_before_ups():
    rows = torch.tensor([10, 20, 11, 21, 12, 22])
    assert deinterleave(rows, 0).tolist() == [[10, 11, 12], [20, 21, 22]]


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float8_e4m3fn])
def test_interleave_undoes_deinterleave(dim, dtype):
    rows = torch.arange(4 * 6 * 8).remainder(120).to(torch.uint8).view(4, 6, 8)
    rows = rows.view(dtype) if dtype.itemsize == 1 else rows.to(dtype)
    split = deinterleave(rows, dim)
    axis = dim % 3
    assert split.shape == (*rows.shape[:axis], 2, rows.shape[axis] // 2, *rows.shape[axis + 1 :])
    assert torch.equal(interleave(split, dim).view(torch.uint8), rows.view(torch.uint8))
    second = split.select(axis, 1).contiguous().view(torch.uint8)
    odd = rows.index_select(axis, torch.arange(1, rows.shape[axis], 2)) if dtype != torch.float8_e4m3fn else None
    if odd is not None:
        assert torch.equal(second, odd.contiguous().view(torch.uint8))


def test_interleave_refusals():
    with pytest.raises(InputError, match="odd"):
        deinterleave(torch.zeros(3, 5), 1)
    with pytest.raises(InputError, match="not 2"):
        interleave(torch.zeros(3, 5), 0)
    with raises_with(InputError, "-2", "1"):
        deinterleave(torch.zeros(2, 2), 2)
