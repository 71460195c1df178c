from __future__ import annotations

import pytest
import torch

WAYS = {
    "empty": lambda dtype: torch.empty(3, 5, dtype=dtype),
    "new_empty": lambda dtype: torch.zeros(1, dtype=torch.float64).new_empty((3, 5), dtype=dtype),
    "empty_like": lambda dtype: torch.empty_like(torch.zeros(3, 5), dtype=dtype),
    "empty_strided": lambda dtype: torch.empty_strided((3, 5), (5, 1), dtype=dtype),
    "new_empty_strided": lambda dtype: torch.zeros(1).new_empty_strided((3, 5), (5, 1), dtype=dtype),
    "resize": lambda dtype: torch.zeros(0, dtype=dtype).resize_(3, 5),
}
FLOATS = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_fresh_floats_are_nan(way: str, dtype: torch.dtype) -> None:
    torch.full((64,), 1.0)  # leaves written memory behind for the allocator to hand out again
    assert WAYS[way](dtype).float().isnan().all()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_fresh_integers_are_their_maximum(way: str, dtype: torch.dtype) -> None:
    assert (WAYS[way](dtype) == torch.iinfo(dtype).max).all()


def test_a_skipped_row_is_seen() -> None:
    rows = torch.empty(4, 8)
    rows[:3] = 1.0
    assert rows.isnan().any(dim=1).tolist() == [False, False, False, True]


def test_written_memory_is_left_alone() -> None:
    assert torch.zeros(4).tolist() == [0.0] * 4
    assert torch.ones(4).mul(2).tolist() == [2.0] * 4
