"""Activation and quantisation with E8M0 words in one kernel, in Triton's interpreter, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from by_kernel import by_kernel
from collegium.errors import InputError
from collegium.ops.activated import PackedRows, quantize_words
from collegium.ops.activation import activate
from collegium.ops.quantize import activation_format
from collegium.testing.compare import heavy_tailed, relative_error
from collegium.types import ActivationSpec
from raising import raises_with

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("tests/gpu makes these comparisons on the device", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

FORMATS = ("fp8_group128_e8m0", "mxfp8")
SIZES = [(1, 128), (5, 40), (7, 512), (9, 1100), (3, 1536)]
on_device = by_kernel(quantize_words)


def expected(rows: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and words by plain arithmetic on the reference's bytes."""
    quantized = activation_format(name).quantize(rows)
    assert quantized.scales is not None
    words = torch.zeros(len(rows), -(-quantized.scales.shape[1] // 4), dtype=torch.int64)
    for group, column in enumerate(quantized.scales.long().T):
        words[:, group // 4] |= column << (8 * (group % 4))
    return quantized.codes, words


def same(found: PackedRows, wanted: tuple[torch.Tensor, torch.Tensor]) -> bool:
    codes, words = wanted
    bits = torch.equal(found.codes.view(torch.uint8), codes.view(torch.uint8))
    return bits and torch.equal(found.words.long() & 0xFFFFFFFF, words)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_have_reference_bits(name: str, size: tuple[int, int], dtype: torch.dtype) -> None:
    x = (heavy_tailed(*size, seed=1) * torch.logspace(-6, 3, size[0])[:, None]).to(dtype)
    x[-1] = 0.0
    found: Any = on_device(x, None, name)
    assert same(found, expected(x, name))
    assert same(quantize_words(x, None, name), expected(x, name)), "the CPU gives other bits"
    # Words of a column follow each other, and columns are a multiple of 16 bytes apart.
    assert found.words.stride() == (1, -(-size[0] // 4) * 4)
    assert torch.equal(found.words, activation_format(name).quantize(x).packed_scales())


@pytest.mark.parametrize("name", FORMATS)
def test_exact_activations_have_reference_bits(name: str) -> None:
    x = heavy_tailed(6, 600, seed=2)
    spec = ActivationSpec(kind="relu2")
    found: Any = on_device(x, spec, name)
    assert same(found, expected(activate(x[:, None], spec), name))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "spec", [ActivationSpec(), ActivationSpec(limit=2.0), ActivationSpec(kind="swiglu_oai", limit=7.0, alpha=1.702)]
)
def test_gated_activations_near_reference(name: str, spec: ActivationSpec) -> None:
    x = heavy_tailed(6, 2 * 300, seed=3)
    found: Any = on_device(x, spec, name)
    truth = activate(x.unflatten(1, (2, -1)), spec)
    codes, words = expected(truth, name)
    assert torch.equal(found.words.long() & 0xFFFFFFFF, words)
    differing = found.codes.view(torch.uint8) != codes.view(torch.uint8)
    assert differing.float().mean() < 0.001, "a few numbers at the middle between two codes"
    swapped: Any = on_device(x.roll(300, 1), spec, name)
    assert (swapped.codes.view(torch.uint8) != codes.view(torch.uint8)).float().mean() > 0.5
    form = activation_format(name)
    assert relative_error(form.round_trip(truth), truth) < 0.05


def test_lost_groups_have_nan_scales() -> None:
    x = heavy_tailed(3, 256, seed=4)
    x[1, 200] = torch.nan
    found: Any = on_device(x, None, "fp8_group128_e8m0")
    assert (found.words[1] >> 8 & 255).item() == 255
    assert same(found, expected(x, "fp8_group128_e8m0"))


def test_refusals_name_what_is_allowed() -> None:
    with raises_with(InputError, "fp8_token", "mxfp8"):
        quantize_words(torch.ones(2, 128), None, "fp8_token")
    with raises_with(InputError, "(2, 129)", "2 * I"):
        quantize_words(torch.ones(2, 129), ActivationSpec())
    with raises_with(InputError, "int64", "floating"):
        quantize_words(torch.ones(2, 128, dtype=torch.int64))
