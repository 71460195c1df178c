from __future__ import annotations

import torch


def test_poisoning_is_limited_to_cpu_tests() -> None:
    assert not torch.are_deterministic_algorithms_enabled()
