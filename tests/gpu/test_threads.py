"""A second of ``stress_threads.py`` for a few recipes; the program itself runs all of them, as long as it is told."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
sys.path.insert(0, str(Path(__file__).parent))


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("own_streams", [False, True])
@pytest.mark.parametrize("recipe", [("bf16", "bf16"), ("fp8_block", "fp8_group128"), ("mxfp4", "fp8_token")])
def test_threads_get_the_bits_of_a_single_caller(recipe: tuple[str, str], own_streams: bool, layers: int) -> None:
    from stress_threads import stress

    calls, different, error = stress(*recipe, own_streams, layers, 2.0)
    assert (different, error) == (0, "")
    assert calls > 16
