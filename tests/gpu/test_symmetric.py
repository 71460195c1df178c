from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from ranks import run_ranks
from symmetric import exchange


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_peers_reach_regions() -> None:
    world = min(torch.cuda.device_count(), 4)
    answers = run_ranks(exchange, world, "nccl")
    assert len({tuple(offsets) for offsets, _, _ in answers}) == 1
    for _, errors, found in answers:
        assert found == world * (world + 1) / 2
        assert len(errors) == 1
