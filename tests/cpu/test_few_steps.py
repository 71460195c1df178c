"""Products of one step of K in Triton's interpreter, small and large batches, against FP32 truth."""

from __future__ import annotations

import pytest
import torch

from collegium.problem import DeviceFacts
from few_steps import RECIPES, check_size

if torch.cuda.is_available():
    pytest.skip("tests/gpu makes these comparisons on the device", allow_module_level=True)
pytest.importorskip("triton")

HOPPER = DeviceFacts(kind="cuda", capability=(9, 0))


@pytest.mark.each_choice("weights", "act")
@pytest.mark.parametrize(("weights", "act"), RECIPES)
@pytest.mark.parametrize("size", [(64, 32, 3, "swiglu"), (32, 64, 1, "relu2")], ids=["gated", "alone"])
def test_truth_where_products_are_short(weights: str, act: str, size: tuple[int, int, int, str]) -> None:
    tokens = (1, 7, 90) if weights in ("bf16", "fp8_block", "fp8_channel") else (1, 7)
    assert check_size(weights, act, size, tokens, HOPPER, copies=True) == []
