"""A checkpoint's layer in every weight format and both 16-bit dtypes of tokens, as a user loads it, on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from collegium import load_layer
from collegium.formats import FORMATS
from collegium.formats.unquantised import DTYPES
from collegium.problem import Overrides
from collegium.testing.compare import heavy_tailed, relative_error
from collegium.types import Routing

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MODEL = Path(__file__).parents[2] / "demo" / "fables-16m"
WRITTEN = [form.name for form in FORMATS if not form.read_only and form.name != "fp32"]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("weights", WRITTEN)
def test_every_format_has_an_accurate_kernel(weights: str, dtype: Any) -> None:
    layer = load_layer(MODEL, layer=2, weight_format=weights, dtype=dtype)
    judge = load_layer(MODEL, layer=2, weight_format=weights, dtype="fp32", overrides=Overrides(kernel="reference"))
    assert layer.plan.kernel != "reference"
    assert layer.plan.activation_format == dtype
    stored = DTYPES[dtype]
    for tokens in (1, 7, 333):
        x = heavy_tailed(tokens, layer.spec.hidden_size, seed=tokens).to("cuda", stored)
        routing = judge.route(x.float())
        wanted = judge(x.float(), routing=routing)
        given = Routing(topk_ids=routing.topk_ids, topk_weights=routing.topk_weights)
        first, second = layer(x, routing=given), layer(x, routing=given)
        assert first.dtype == stored
        assert torch.equal(first, second)
        assert relative_error(first, wanted) < (0.003 if dtype == "fp16" else 0.015)
    loud = x.clone()
    loud[5, 3] = torch.nan
    found = layer(loud, routing=given)
    assert bool(found[5].isnan().all())
    assert torch.equal(found[:5], first[:5])
    assert torch.equal(found[6:], first[6:])


@pytest.mark.parametrize("weights", ["fp32", "bf16", "fp16"])
def test_float32_layers_run_on_tensor_cores(weights: str) -> None:
    layer = load_layer(MODEL, layer=2, weight_format=weights, dtype="fp32", device="cuda")
    judge = load_layer(MODEL, layer=2, weight_format=weights, dtype="fp32", overrides=Overrides(kernel="reference"))
    assert layer.plan.kernel == "triton_fp32"
    for tokens in (1, 7, 333):
        x = heavy_tailed(tokens, layer.spec.hidden_size, seed=tokens).to("cuda")
        routing = judge.route(x)
        found = layer(x, routing=routing)
        assert torch.equal(found, layer(x, routing=routing))
        assert relative_error(found, judge(x, routing=routing)) < 1e-5
        one = Routing(topk_ids=routing.topk_ids[:1], topk_weights=routing.topk_weights[:1])
        assert torch.equal(layer(x[:1], routing=one), found[:1])
