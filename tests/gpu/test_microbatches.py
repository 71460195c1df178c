"""Halves of a batch on two streams of each GPU, against whole batches."""

from __future__ import annotations

from functools import partial

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from microbatches import compare_halves
from ranks import run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize("name", ["all_to_all", "all_gather"])
def test_halves_equal_whole_batches(name: str) -> None:
    asked = partial(compare_halves, name=name, device="cuda", repeats=20)
    assert run_ranks(asked, 2, "nccl", seconds=400) == [[], []]
