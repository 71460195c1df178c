"""Sizes that break assumptions: E = 17, H = 2880, I = 1408, and tensors of more than 2^31 elements."""

from __future__ import annotations

import pytest
import torch

from collegium import (
    ActivationSpec,
    DeviceFacts,
    ExpertWeights,
    Limits,
    MoELayer,
    MoESpec,
    Overrides,
    Problem,
    Routing,
    RoutingSpec,
    plan,
)
from collegium.experts import KERNELS
from collegium.formats import by_name
from collegium.ops.weighted_sum import weighted_sum
from collegium.testing.compare import heavy_tailed, relative_error, uneven_ids
from grids import exhaustive
from truth import moe_truth

E, H, WIDE = 17, 2880, 1408
USED = 4  # experts with weights of their own; the others are empty here, and a wrong expert would show


@pytest.fixture(scope="module")
def experts():
    down = heavy_tailed(USED, H, WIDE, seed=1, channels=False) * WIDE**-0.5
    return heavy_tailed(USED, 2, WIDE, H, seed=2, channels=False) * H**-0.5, down


@pytest.mark.each_choice
@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("weight_format", ["mxfp4", "int4_group", *exhaustive("bf16", "fp8_block", "nvfp4")])
def test_the_standard_ugly_size(experts, weight_format, top_k):
    gate_up, down = (by_name(weight_format).encode(w) for w in experts)
    wide, narrow = gate_up[0].repeated(E), down[0].repeated(E)
    where = [16, 3, 8, 0]
    for slot in range(E):
        source = where.index(slot) if slot in where else 0
        wide.put(slot, gate_up[source])
        narrow.put(slot, down[source])
    spec = MoESpec(
        hidden_size=H,
        intermediate_size=WIDE,
        num_experts=E,
        routing=RoutingSpec(top_k=top_k),
        weight_format=weight_format,
    )
    problem = Problem(spec=spec, device=DeviceFacts(kind="cpu"), limits=Limits(max_tokens=16))
    x = heavy_tailed(5, H, seed=3).bfloat16()
    local = uneven_ids(5, top_k, USED, seed=4)
    ids, weights = torch.tensor(where)[local], torch.rand(5, top_k) + 0.1
    truth = moe_truth(x, gate_up.decode(), down.decode(), local, weights, ActivationSpec())
    for kernel in KERNELS:
        if kernel.refuse(problem.routed) is None:
            made = plan(problem, Overrides(kernel=kernel.name))
            layer = MoELayer(ExpertWeights(gate_up=wide, down=narrow), made)
            found = layer(x, routing=Routing(topk_ids=ids, topk_weights=weights))
            assert relative_error(found, truth) < 0.01, kernel.name


@pytest.mark.exhaustive
def test_intermediates_beyond_31_bits():
    """gate_up rows [R, 2 * I] above 2^31 elements: an index of 32 bits would wrap onto other rows.

    One row of x and tiny widths keep the memory at the intermediate itself, which the kernel makes in pieces.
    """
    tokens, wide = 1 << 16, 1 << 14
    assert tokens * 2 * wide >= 1 << 31
    gate_up = torch.zeros(1, 2, wide, 16)
    gate_up[0, :, -1] = 1.0
    down = torch.zeros(1, 16, wide)
    down[0, :, -1] = 0.5
    weights = ExpertWeights(gate_up=by_name("bf16").encode(gate_up), down=by_name("bf16").encode(down))
    spec = MoESpec(
        hidden_size=16,
        intermediate_size=wide,
        num_experts=1,
        routing=RoutingSpec(top_k=1),
        weight_format="bf16",
    )
    x = torch.zeros(tokens, 16, dtype=torch.bfloat16)
    x[:, 0] = torch.arange(tokens) % 7
    problem = Problem(spec=spec, device=DeviceFacts(kind="cpu"))
    routing = Routing(topk_ids=torch.zeros(tokens, 1, dtype=torch.int64), topk_weights=torch.ones(tokens, 1))
    found = MoELayer(weights, plan(problem))(x, routing=routing)
    value = (torch.arange(tokens) % 7).float()
    torch.testing.assert_close(found[:, 5].float(), 0.5 * value**2 * torch.sigmoid(value), rtol=0.01, atol=0)


@pytest.mark.parametrize("numel", [(1 << 31) - 1, 1 << 31, (1 << 31) + 7])
def test_row_offsets_beyond_31_bits(numel):
    """The last row of a row buffer whose element index needs 32 bits, without the memory: rows repeat a stride."""
    hidden = 1 << 10
    count = -(-numel // hidden)
    base = torch.arange(count, dtype=torch.float32)[:, None].expand(count, hidden)
    slots = torch.tensor([[count - 1, 0], [count - 2, -1]])
    found = weighted_sum(base, slots, torch.tensor([[1.0, 1.0], [1.0, 1.0]]), torch.float32)
    assert torch.equal(found[0], torch.full((hidden,), float(count - 1)))
    assert torch.equal(found[1], torch.full((hidden,), float(count - 2)))
