"""The combine sum against float64, bit for bit against a scalar float32 loop, and with poisoned rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from collegium.errors import InputError
from collegium.ops.permute import permute
from collegium.ops.weighted_sum import weighted_sum


def problem(tokens=13, top_k=5, width=33, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(tokens * top_k, width, generator=generator) * torch.randn(1, width, generator=generator).exp()
    slots = torch.randperm(tokens * top_k, generator=generator).view(tokens, top_k)
    weights = torch.rand(tokens, top_k, generator=generator)
    return rows, slots, weights


def scalar_loop(rows, slots, weights):
    out = np.zeros((slots.shape[0], rows.shape[1]), dtype=np.float32)
    table, scale = rows.float().numpy(), weights.numpy()
    for t, row in enumerate(slots.tolist()):
        for k, slot in enumerate(row):
            if slot >= 0:
                out[t] = out[t] + (table[slot] * scale[t, k]).astype(np.float32)
    return torch.from_numpy(out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weighted_sum_uses_the_defined_order(dtype):
    rows, slots, weights = problem()
    rows = rows.to(dtype)
    found = weighted_sum(rows, slots, weights, torch.float32)
    assert torch.equal(found, scalar_loop(rows, slots, weights))
    truth = (rows.double()[slots] * weights.double()[:, :, None]).sum(1)
    torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-6)


def test_weighted_sum_order_is_by_slot():
    rows = torch.tensor([[1e8], [1.0], [-1e8]])
    ones = torch.ones(1, 3)
    assert weighted_sum(rows, torch.tensor([[0, 1, 2]]), ones, torch.float32).item() == 0.0
    assert weighted_sum(rows, torch.tensor([[0, 2, 1]]), ones, torch.float32).item() == 1.0


def test_weighted_sum_rounds_products_before_adding():
    factor = 1.0 + 2.0**-12
    exact = factor * factor  # needs 25 bits
    rows = torch.tensor([[-(1.0 + 2.0**-11)], [factor]])
    found = weighted_sum(rows, torch.tensor([[0, 1]]), torch.tensor([[1.0, factor]]), torch.float32).item()
    assert exact - (1.0 + 2.0**-11) == 2.0**-24  # what a fused multiply-add would return
    assert found == 0.0


def test_weighted_sum_dropped_slots_ignore_poison():
    rows, slots, weights = problem()
    drop = torch.rand(slots.shape, generator=torch.Generator().manual_seed(1)) < 0.4
    clean = scalar_loop(rows, slots.masked_fill(drop, -1), weights)
    poisoned = rows.clone()
    poisoned[slots[drop]] = torch.nan
    poisoned[0] = rows[0] if not drop.view(-1)[(slots.view(-1) == 0)].any() else torch.inf
    bad_weights = weights.masked_fill(drop, torch.nan)
    found = weighted_sum(poisoned, slots.masked_fill(drop, -1), bad_weights, torch.float32)
    assert torch.equal(found, clean)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("slot", [-2, 65, 1 << 40])
def test_weighted_sum_invalid_slots_give_nan(slot, weighted):
    rows, slots, weights = problem()
    weights = weights if weighted else None
    clean = weighted_sum(rows, slots, weights, torch.float32)
    slots[4, 2] = slot
    for shared in (None, torch.ones(13, 33)):
        found = weighted_sum(rows, slots, weights, torch.float32, shared=shared)
        assert found.isnan().all(dim=1).tolist() == [t == 4 for t in range(13)]
        wanted = clean if shared is None else clean + shared
        assert torch.equal(found[[0, 1, 2, 3, *range(5, 13)]], wanted[[0, 1, 2, 3, *range(5, 13)]])
    nothing = weighted_sum(torch.empty(0, 4), torch.tensor([[-1], [slot]]), None, torch.float32)
    assert nothing.isnan().all(dim=1).tolist() == [False, True]


def test_weighted_sum_preserves_nonfinite_weights():
    rows, slots, weights = problem()
    weights[2, 1], weights[5, 0], weights[7, 3] = torch.nan, torch.inf, -torch.inf
    found = weighted_sum(rows, slots, weights, torch.float32)
    assert torch.equal(found.nan_to_num(1.5, 2.5, 3.5), scalar_loop(rows, slots, weights).nan_to_num(1.5, 2.5, 3.5))
    assert found[2].isnan().all()
    assert found[[5, 7]].isinf().all()


def test_weighted_sum_of_dropped_slots():
    rows = torch.full((2, 3), torch.nan)
    assert weighted_sum(rows, torch.full((4, 2), -1), torch.ones(4, 2), torch.float32).eq(0).all()


def test_weighted_sum_is_batch_invariant():
    rows, slots, weights = problem(tokens=21, width=90)
    whole = weighted_sum(rows, slots, weights, torch.bfloat16)
    alone = [weighted_sum(rows, s[None], w[None], torch.bfloat16) for s, w in zip(slots, weights, strict=True)]
    assert torch.equal(whole, torch.cat(alone))


def test_weighted_sum_rounds_once_at_end():
    rows = torch.full((3, 1), 1.0 + 2.0**-7)
    rows[1:] = 2.0**-9
    slots, weights = torch.tensor([[0, 1, 2]]), torch.ones(1, 3)
    # Two small terms reach half a bfloat16 step only together: the sum 1 + 3 * 2^-8 ties to the even 1 + 2^-6.
    assert weighted_sum(rows, slots, weights, torch.bfloat16).item() == 1.0 + 2.0**-6


def test_weighted_sum_unpermutes_rows_to_tokens():
    ids = torch.tensor([[3, 1], [-1, 3], [0, 2]])
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    order = permute(ids, 4)
    rows = x[order.source].clone()
    rows[int(order.expert_offsets[-1]) :] = torch.nan
    weights = torch.tensor([[0.25, 0.5], [9.0, 2.0], [1.0, -1.0]])
    found = weighted_sum(rows, order.slots, weights, torch.float32)
    torch.testing.assert_close(found, x * torch.tensor([[0.75], [2.0], [0.0]]))


def test_weighted_sum_empty():
    assert weighted_sum(
        torch.empty(0, 4), torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2), torch.float32
    ).shape == (0, 4)
    found = weighted_sum(torch.empty(0, 4), torch.full((3, 2), -1), torch.ones(3, 2), torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert found.eq(0).all()


def test_weighted_sum_refusals():
    rows, slots, weights = problem()
    with pytest.raises(InputError, match=r"slots: .*int64"):
        weighted_sum(rows, slots.int(), weights, torch.float32)
    with pytest.raises(InputError, match=r"weights: .*floating"):
        weighted_sum(rows, slots, weights.int(), torch.float32)
    with pytest.raises(InputError, match="weights: "):
        weighted_sum(rows, slots, weights[:-1], torch.float32)
    with pytest.raises(InputError, match="rows: "):
        weighted_sum(rows[None], slots, weights, torch.float32)
    with pytest.raises(InputError, match="out_dtype: "):
        weighted_sum(rows, slots, weights, torch.int64)
