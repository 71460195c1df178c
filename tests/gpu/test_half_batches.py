"""Two halves of a batch run beside each other over two GPUs, each in a thread and on a stream of its own."""

from __future__ import annotations

from functools import partial

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

from half_batches import halves
from ranks import run_ranks


@pytest.mark.parametrize("name", ["all_to_all", "all_gather", "all_to_all_fixed", "symm_mem"])
def test_half_batches_run_concurrently(name: str) -> None:
    check = partial(halves, name=name, device="cuda")
    assert run_ranks(check, 2, "cpu:gloo,cuda:nccl", seconds=200) == [[], []]
