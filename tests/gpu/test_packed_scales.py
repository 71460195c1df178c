"""Activation and quantisation with E8M0 words in one kernel, on a GPU: the bits of the reference."""

from __future__ import annotations

import pytest
import torch

from collegium.ops.activated import quantize_words
from collegium.ops.activation import activate
from collegium.ops.quantize import activation_format
from collegium.testing.compare import heavy_tailed
from collegium.types import ActivationSpec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("name", ["fp8_group128_e8m0", "mxfp8"])
@pytest.mark.parametrize("rows", [1, 7, 5000])
def test_words_have_reference_bits(name: str, rows: int) -> None:
    x = heavy_tailed(rows, 1100, seed=1).to("cuda", torch.bfloat16)
    form = activation_format(name)
    for spec in (None, ActivationSpec(kind="relu2")):
        found = quantize_words(x, spec, name)
        wanted = form.quantize(x if spec is None else activate(x[:, None], spec))
        assert torch.equal(found.codes.view(torch.uint8), wanted.codes.view(torch.uint8))
        assert torch.equal(found.words, wanted.packed_scales())
    gated = quantize_words(x, ActivationSpec(limit=7.0), name)
    wanted = form.quantize(activate(x.unflatten(1, (2, -1)), ActivationSpec(limit=7.0)))
    assert (gated.codes.view(torch.uint8) != wanted.codes.view(torch.uint8)).float().mean() < 0.001
    assert (gated.words != wanted.packed_scales()).float().mean() < 0.001
