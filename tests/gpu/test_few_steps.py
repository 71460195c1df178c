"""Sizes whose products have one to three steps of K, as slices for tensor parallelism do: every recipe is right."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from collegium.experts import KERNELS
from collegium.problem import Problem
from collegium.runtime.devices import probe
from collegium.types import MoESpec, RoutingSpec
from few_steps import RECIPES, SIZES, check_size


@pytest.mark.parametrize("size", SIZES, ids=["x".join(map(str, size)) for size in SIZES])
@pytest.mark.parametrize(("weights", "act"), RECIPES)
def test_truth_where_products_are_short(weights: str, act: str, size: tuple[int, int, int, str]) -> None:
    facts = probe("cuda")
    spec = MoESpec(
        hidden_size=size[0], intermediate_size=size[1], num_experts=1, routing=RoutingSpec(top_k=1),
        weight_format=weights,
    )  # fmt: skip
    dtype = "fp16" if weights == "fp16" else "bf16"
    problem = Problem(spec=spec, device=facts, activation_format=act, dtype=dtype)
    if all(kernel.refuse(problem.routed) for kernel in KERNELS if kernel.name.startswith("triton")):
        pytest.skip(f"no Triton kernel for {weights}:{act} on this GPU")
    assert check_size(weights, act, size, (1, 7, 64, 600), facts) == []
