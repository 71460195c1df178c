"""The order of rows against a plain Python sort."""

from __future__ import annotations

import pytest
import torch

from collegium.errors import InputError
from collegium.ops.permute import permute


def expected(ids, experts):
    """Sort (expert, token, slot) triples; dropped assignments go last."""
    triples = [
        (e if 0 <= e < experts else experts, t, k) for t, row in enumerate(ids.tolist()) for k, e in enumerate(row)
    ]
    order = sorted(triples)
    offsets = [sum(e < bound for e, _, _ in order) for bound in range(experts + 1)]
    slots = [[-1 if e == -1 else -2 for e in row] for row in ids.tolist()]
    for row, (e, t, k) in enumerate(order):
        if e < experts:
            slots[t][k] = row
    return order, offsets, slots


def ids_for(tokens, top_k, experts, seed=0, dropped=0.2):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)])
    return ids.masked_fill(torch.rand(tokens, top_k, generator=generator) < dropped, -1)


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 1, 1), (1, 4, 17), (23, 6, 17), (40, 8, 512), (33, 3, 3)])
def test_permute_matches_a_plain_sort(tokens, top_k, experts):
    ids = ids_for(tokens, top_k, experts)
    weights = torch.rand(tokens, top_k)
    order, offsets, slots = expected(ids, experts)
    found = permute(ids, experts, input_weights=weights)
    assert found.source.tolist() == [t for _, t, _ in order]
    assert found.expert_offsets.tolist() == offsets
    assert found.slots.tolist() == slots
    want = torch.tensor([weights[t, k] if e < experts else 0.0 for e, t, k in order])
    assert torch.equal(found.weights_by_row, want)
    assert {found.source.dtype, found.expert_offsets.dtype, found.slots.dtype} == {torch.int64}
    assert found.weights_by_row.dtype == torch.float32


def test_permute_hand_made():
    found = permute(torch.tensor([[2, 0], [0, -1], [2, 1]]), 4)
    assert found.source.tolist() == [0, 1, 2, 0, 2, 1]
    assert found.expert_offsets.tolist() == [0, 2, 3, 5, 5]
    assert found.slots.tolist() == [[3, 0], [1, -1], [4, 2]]
    assert found.weights_by_row is None


def test_permute_one_expert_preserves_token_order():
    found = permute(torch.full((50, 1), 7), 9)
    assert found.source.tolist() == list(range(50))
    assert found.expert_offsets.tolist() == [0] * 8 + [50, 50]


def test_permute_all_dropped():
    found = permute(torch.full((5, 3), -1), 4)
    assert found.expert_offsets.tolist() == [0] * 5
    assert (found.slots == -1).all()
    assert found.source.shape == (15,)
    assert ((found.source >= 0) & (found.source < 5)).all()


def test_permute_no_tokens():
    found = permute(torch.empty(0, 3, dtype=torch.int64), 4, input_weights=torch.empty(0, 3))
    assert found.source.shape == (0,)
    assert found.slots.shape == (0, 3)
    assert found.expert_offsets.tolist() == [0] * 5
    assert found.weights_by_row.shape == (0,)


def test_permute_of_ids_out_of_range():
    ids = torch.tensor([[0, 4], [-7, 1], [-1, 1 << 40]])
    found = permute(ids, 4)
    assert found.expert_offsets.tolist() == [0, 1, 2, 2, 2]
    assert found.slots.tolist() == [[0, -2], [-2, 1], [-1, -2]]


def test_permute_unsigned_255_is_not_dropped():
    assert permute(torch.tensor([[0, 255]], dtype=torch.uint8), 4).slots.tolist() == [[0, -2]]


def test_permute_allows_duplicate_experts():
    found = permute(torch.tensor([[2, 2], [0, 2]]), 4)
    assert found.slots.tolist() == [[1, 2], [0, 3]]
    assert found.source.tolist() == [1, 0, 0, 1]


def test_permute_dropped_weights_do_not_leak():
    found = permute(torch.tensor([[1, -1]]), 2, input_weights=torch.tensor([[0.5, torch.nan]]))
    assert found.weights_by_row.tolist() == [0.5, 0.0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_permute_other_integer_dtypes(dtype):
    ids = ids_for(6, 2, 9, dropped=0)
    assert torch.equal(permute(ids.to(dtype), 9).slots, permute(ids, 9).slots)


def test_permute_refusals():
    with pytest.raises(InputError, match="topk_ids"):
        permute(torch.zeros(3, 2), 4)
    with pytest.raises(InputError, match="topk_ids"):
        permute(torch.zeros(3, dtype=torch.int64), 4)
    with pytest.raises(InputError, match="num_experts"):
        permute(torch.zeros(3, 2, dtype=torch.int64), 0)
    with pytest.raises(InputError, match=r"input_weights: .*\(3, 2\)"):
        permute(torch.zeros(3, 2, dtype=torch.int64), 4, input_weights=torch.zeros(3))
