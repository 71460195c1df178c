from __future__ import annotations

from functools import partial

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from ranks import run_ranks
from split_layers import compare


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ranks_equal_one_layer() -> None:
    world = min(torch.cuda.device_count(), 4)
    assert run_ranks(partial(compare, dispatchers=("all_gather",)), world, "nccl", seconds=300) == [[]] * world
