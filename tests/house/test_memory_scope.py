from __future__ import annotations

import torch


def test_poisoning_ends_with_the_tests_of_the_cpu() -> None:
    assert not torch.are_deterministic_algorithms_enabled()
