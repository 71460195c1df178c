"""NVFP4's two global-scale rules."""

from __future__ import annotations

import pytest
import torch

from collegium.errors import InputError
from collegium.formats import NvFp4
from raising import raises_with

DIVIDES = pytest.mark.parametrize("divides", [False, True])


@DIVIDES
def test_encode_rules_agree_within_one_ulp(divides: bool) -> None:
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
        with raises_with(InputError, "global scale"):
            NvFp4.encode(weight, global_scale=torch.tensor(bad))


def test_encode_clamps_group_scales() -> None:
    weight = torch.full((1, 64), 1e-9)
    weight[0, 0] = 6 * 448.0
    weight[0, 16:32] = 0
    found = NvFp4.encode(weight)
    assert found.scales.float().tolist() == [[448.0, 1.0, 2.0**-9, 2.0**-9]]
