"""NVFP4's two global-scale rules, and one global scale for gate and up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from collegium.errors import InputError
from collegium.formats import NvFp4, reconcile

DIVIDES = pytest.mark.parametrize("divides", [False, True])


def payload(global_scales: list[float], *, divides: bool, low: int = 0x20, high: int = 0x60) -> NvFp4:
    """Random codes and group scales (E4M3 bytes low to high) for one matrix per global scale."""
    count = len(global_scales)
    return NvFp4(
        shape=(count, 5, 64),
        codes=torch.randint(0, 256, (count, 5, 32), dtype=torch.uint8),
        scales=torch.randint(low, high, (count, 5, 4), dtype=torch.uint8).view(torch.float8_e4m3fn),
        global_scale=torch.tensor(global_scales),
        global_divides=divides,
    )


@DIVIDES
def test_encode_rules_agree_within_an_ulp_of_the_step(divides: bool) -> None:
    weight = torch.randn(3, 16, 64) * torch.tensor([1.0, 20.0, 1e-4]).view(3, 1, 1)
    found = NvFp4.encode(weight, global_divides=divides)
    full = weight.abs().amax((-2, -1)) / (6 * 448)
    scale = 1 / found.global_scale if divides else found.global_scale
    torch.testing.assert_close(scale, full, rtol=3e-7, atol=0)
    assert (found.scales.float().amax((-2, -1)) == 448).all()
    other = NvFp4.encode(weight, global_divides=not divides)
    torch.testing.assert_close(found.decode(), other.decode(), rtol=1e-6, atol=0)


def test_encode_with_a_given_global_scale() -> None:
    weight = torch.randn(3, 16, 64)
    given_scale = torch.tensor(2.0**-8)
    found = NvFp4.encode(weight, global_scale=given_scale)
    assert found.global_scale.tolist() == [2.0**-8] * 3
    assert (found.decode() - weight).norm() < NvFp4.tolerance * weight.norm()
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match=r"finite positive global scales"):
            NvFp4.encode(weight, global_scale=torch.tensor(bad))


def test_encode_clamps_group_scales() -> None:
    weight = torch.full((1, 64), 1e-9)
    weight[0, 0] = 6 * 448.0
    weight[0, 16:32] = 0
    found = NvFp4.encode(weight)
    assert found.scales.float().tolist() == [[448.0, 1.0, 2.0**-9, 2.0**-9]]


@DIVIDES
@pytest.mark.parametrize("exponent", [-3, -1, 0, 1, 2])
def test_reconcile_by_a_power_of_two_keeps_every_bit(divides: bool, exponent: int) -> None:
    gate = payload([0.3, 0.7, 0.011], divides=divides)
    up = payload([0.3 * 2.0**exponent, 0.7, 0.011 * 2.0**-exponent], divides=divides)
    answer = reconcile(gate, up)
    assert answer.exact
    assert answer.rounded.tolist() == [0, 0, 0]
    assert answer.groups == 2 * 5 * 4
    assert answer.ratio.tolist() == [2.0**-exponent, 1.0, 2.0**exponent]
    assert answer.gate is not None
    assert answer.up is not None
    assert torch.equal(answer.gate.global_scale, answer.up.global_scale)
    for before, after in ((gate, answer.gate), (up, answer.up)):
        assert torch.equal(before.decode().view(torch.int32), after.decode().view(torch.int32))


@DIVIDES
def test_reconcile_refuses_to_round(divides: bool) -> None:
    gate, up = payload([0.3, 1.0], divides=divides), payload([0.3, 1.1], divides=divides)
    answer = reconcile(gate, up)
    assert not answer.exact
    assert answer.gate is None
    assert answer.up is None
    assert answer.rounded.tolist()[0] == 0
    assert answer.rounded.tolist()[1] == 20


def test_reconcile_counts_the_groups_that_would_round() -> None:
    gate, up = payload([1.0], divides=False), payload([0.75], divides=False)
    # 8 and 16 times 3/4 are E4M3 numbers, 13 times 3/4 and 13 over 3/4 are not.
    gate = replace(gate, scales=torch.full((1, 5, 4), 13.0).to(torch.float8_e4m3fn))
    up = replace(up, scales=torch.full((1, 5, 4), 8.0).to(torch.float8_e4m3fn))
    assert reconcile(gate, up).exact
    scales = up.scales.float()
    scales[0, 1, :3] = 13.0
    up = replace(up, scales=scales.to(torch.float8_e4m3fn))
    assert reconcile(gate, up).rounded.tolist() == [3]


@DIVIDES
def test_reconcile_uses_the_direction_that_fits(divides: bool) -> None:
    """A ratio of two is exact only away from the end of the E4M3 range that would overflow."""
    top = payload([2.0], divides=divides, low=0x7A, high=0x7F)
    other = payload([1.0], divides=divides, low=0x7A, high=0x7F)
    answer = reconcile(top, other)
    assert answer.exact
    assert answer.gate is not None
    assert answer.gate.global_scale.tolist() == ([1.0] if divides else [2.0])
    # Both ends at once: 448 cannot grow and the odd subnormal cannot halve.
    scales = torch.full((1, 5, 4), 2.0**-9)
    scales[0, 0, 0] = 448.0
    wide = scales.to(torch.float8_e4m3fn)
    stuck = reconcile(replace(top, scales=wide), replace(other, scales=wide))
    assert not stuck.exact
    assert stuck.rounded.tolist() == [1]


def test_reconcile_needs_a_pair() -> None:
    gate = payload([1.0], divides=False)
    with pytest.raises(InputError, match=r"one shape and one global-scale rule"):
        reconcile(gate, payload([1.0], divides=True))
    with pytest.raises(InputError, match=r"\[1, 5, 64\].*\[2, 5, 64\]"):
        reconcile(gate, payload([1.0, 2.0], divides=False))


@settings(max_examples=40, deadline=None)
@given(
    own=st.floats(2.0**-20, 4.0, width=32),
    other=st.floats(2.0**-20, 4.0, width=32),
    divides=st.booleans(),
    seed=st.integers(0, 99),
)
def test_reconcile_never_changes_a_value(own: float, other: float, divides: bool, seed: int) -> None:
    torch.manual_seed(seed)
    gate = payload([own], divides=divides, low=0, high=0x7F)
    up = payload([other], divides=divides, low=0, high=0x7F)
    answer = reconcile(gate, up)
    if answer.gate is None or answer.up is None:
        assert 0 < int(answer.rounded) <= answer.groups // 2
        return
    assert torch.equal(answer.gate.global_scale, answer.up.global_scale)
    assert torch.equal(gate.decode().view(torch.int32), answer.gate.decode().view(torch.int32))
    assert torch.equal(up.decode().view(torch.int32), answer.up.decode().view(torch.int32))
