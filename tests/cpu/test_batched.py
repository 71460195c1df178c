"""Rows packed by expert with room for more, through a layer and through Triton's kernels in the interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from collegium import (
    ActivationSpec,
    DeviceFacts,
    InputError,
    Limits,
    MoELayer,
    MoESpec,
    Overrides,
    Problem,
    Routing,
    RoutingError,
    RoutingSpec,
    encode_experts,
    plan,
)
from collegium.experts.triton.table import TritonBf16, TritonFp8, TritonW4A16
from collegium.formats.unquantised import DTYPES
from collegium.ops import permute
from collegium.parallel.placement import linear
from collegium.pipelines.batched import run_batched
from collegium.testing.compare import heavy_tailed, random_experts, relative_error
from grids import exhaustive
from raising import raises_with
from truth import moe_truth

COUNTS = (0, 7, 40, 3, 0, 1)  # none, some, and all there is room for
E, M, H, INNER = len(COUNTS), 40, 48, 36
# Of the kernel's activations; a batch's rows are heavy-tailed, and the interpreter rounds to bfloat16 toward zero.
HELD = torch.arange(M) < torch.tensor(COUNTS)[:, None]
BOUNDS = {"fp32": 1e-5, "fp16": 3e-3, "bf16": 0.02, "fp8_group128": 0.07}


def problem_of(weights: str, dtype: Any, device: DeviceFacts, activations: str | None = None) -> Problem:
    spec = MoESpec(
        hidden_size=H,
        intermediate_size=INNER,
        num_experts=E,
        routing=RoutingSpec(top_k=2),
        weight_format=weights,
        expert_bias=True,
    )
    limits = Limits(max_tokens=16)  # fewer than the rows: they are no pass of the plan
    return Problem(spec=spec, device=device, dtype=dtype, limits=limits, activation_format=activations)


def rows_of(dtype: str, seed: int = 2) -> torch.Tensor:
    """Return rows whose values beyond each count are NaN."""
    x = heavy_tailed(E * M, H, seed=seed).view(E, M, H).to(DTYPES[dtype])
    return x.masked_fill(~HELD[..., None], torch.nan)


def check(found: torch.Tensor, x: torch.Tensor, weights: Any, bound: float) -> None:
    """Compare the rows of each expert with float64, and those beyond with what they were."""
    ids = torch.where(HELD, torch.arange(E)[:, None], -1).view(-1, 1)
    biases = weights.gate_up_bias, weights.down_bias
    flat = x.nan_to_num().view(-1, H)
    truth = moe_truth(
        flat, weights.gate_up.decode(), weights.down.decode(), ids, torch.ones(E * M, 1), ActivationSpec(), biases
    )
    assert found.shape == x.shape
    assert relative_error(found[HELD], truth.view(E, M, H)[HELD]) < bound
    assert bool((found[~HELD] == 7).all())


@pytest.mark.parametrize(
    ("kernel", "weights", "dtype"),
    [
        ("cpu_grouped", "mxfp4", "fp16"),
        ("cpu_fused", "mxfp4", "bf16"),
        ("reference", "nvfp4", "bf16"),
        *exhaustive(
            ("cpu_grouped", "fp32", "fp32"), ("cpu_grouped", "bf16", "bf16"), ("cpu_grouped", "fp8_block", "bf16")
        ),
    ],
)
def test_layer_runs_expert_packed_rows(kernel: str, weights: str, dtype: str) -> None:
    problem = problem_of(weights, dtype, DeviceFacts(kind="cpu"))
    made = encode_experts(random_experts(E, 2, INNER, H, seed=1, bias=True), weights)
    layer = MoELayer(made, plan(problem, Overrides(kernel=kernel)))
    x = rows_of(dtype)
    counts = torch.tensor(COUNTS)
    for given in (counts, counts.int(), counts):
        out = torch.full_like(x, 7)
        assert layer.run_batched(x, given, out=out) is out
        check(out, x, made, BOUNDS[dtype])
    # The rows have the bits that the same tokens have in a pass.
    ids = torch.arange(E).repeat_interleave(counts)[:, None]
    tokens = x[HELD]
    layer = MoELayer(made, plan(replace(problem, limits=Limits(max_tokens=256)), Overrides(kernel=kernel)))
    wanted = layer(tokens, routing=Routing(topk_ids=ids, topk_weights=torch.ones(len(ids), 1)))
    fresh = layer.run_batched(x, counts, expected=4)
    assert torch.equal(fresh[HELD], wanted)
    # More than there is room for is all there is room for, and no room at all is fine.
    full = layer.run_batched(x.nan_to_num(), counts + 1000)
    assert torch.equal(full, layer.run_batched(x.nan_to_num(), torch.full((E,), M)))
    assert layer.run_batched(x[:, :0], counts * 0).shape == (E, 0, H)
    compiled = torch.compile(layer.run_batched, backend="aot_eager")
    assert torch.equal(compiled(x.nan_to_num(), counts + 1000), full)


@pytest.mark.each_choice
@pytest.mark.parametrize(
    ("kernel", "weights", "dtype", "activations"),
    [
        (TritonBf16(), "bf16", "bf16", "bf16"),
        (TritonBf16(), "fp16", "fp16", "fp16"),
        (TritonFp8(), "fp8_block", "bf16", "fp8_group128"),
        (TritonW4A16(), "mxfp4", "bf16", "bf16"),
    ],
    ids=["bf16", "fp16", "fp8", "mxfp4"],
)
@pytest.mark.parametrize(("expected", "ordered_by"), [(None, "torch"), (9, "a kernel"), (1 << 15, "a kernel")])
def test_triton_kernels_write_batched_layout(
    kernel: Any,
    weights: str,
    dtype: str,
    activations: str,
    expected: int | None,
    ordered_by: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("tests/gpu runs them on the device")
    problem = problem_of(weights, dtype, DeviceFacts(kind="cuda", capability=(9, 0)), activations)
    made = encode_experts(random_experts(E, 2, INNER, H, seed=1, bias=True), weights)
    packed = kernel.pack(made, problem.routed)
    monkeypatch.setattr(permute, "on_device", lambda *_: ordered_by == "a kernel")
    x, out = rows_of(dtype), torch.full((E, M, H), 7, dtype=DTYPES[dtype])
    run_batched(packed, x, torch.tensor(COUNTS), out, expected=expected)
    check(out, x, made, BOUNDS[activations])
    again = torch.full_like(out, 7)
    run_batched(packed, x, torch.tensor(COUNTS), again, after_expert=lambda rows: -rows)
    assert torch.equal(torch.where(HELD[..., None], -out, 7), again)


def test_local_experts_with_after_expert() -> None:
    placed = linear(E, 1, 2)
    problem = replace(problem_of("fp32", "fp32", DeviceFacts(kind="cpu")), placement=placed)
    whole = random_experts(E, 2, INNER, H, seed=1, bias=True)
    half = replace(
        whole,
        gate_up=whole.gate_up[E // 2 :],
        down=whole.down[E // 2 :],
        gate_up_bias=whole.gate_up_bias[E // 2 :],
        down_bias=whole.down_bias[E // 2 :],
    )
    layer = MoELayer(half, plan(problem, Overrides(dispatcher="partial")), after_expert=lambda rows: 2 * rows)
    x, counts = rows_of("fp32"), torch.tensor(COUNTS)
    one = MoELayer(whole, plan(problem_of("fp32", "fp32", DeviceFacts(kind="cpu"))))
    wanted, found = one.run_batched(x, counts), layer.run_batched(x[E // 2 :], counts[E // 2 :])
    here = HELD[E // 2 :]
    assert torch.equal(found[here], 2 * wanted[E // 2 :][here])


def test_what_does_not_fit_is_refused() -> None:
    problem = problem_of("fp32", "fp32", DeviceFacts(kind="cpu"))
    layer = MoELayer(random_experts(E, 2, INNER, H, seed=1, bias=True), plan(problem))
    x, counts = rows_of("fp32"), torch.tensor(COUNTS)
    for given, number, text in (
        (x[0], counts, r"x is \(40, 48\) torch.float32, allowed: \(6, M, 48\) torch.float32, room"),
        (x[:5], counts[:5], r"x is \(5, 40, 48\)"),
        (x[..., :40], counts, r"x is \(6, 40, 40\)"),
        (x.bfloat16(), counts, "torch.bfloat16, allowed"),
        (x, counts[:5], r"counts is \(5,\) torch.int64, allowed: \(6,\) int32 or int64"),
        (x, counts.float(), "torch.float32"),
    ):
        with pytest.raises(InputError, match=f"run_batched: .*{text}"):
            layer.run_batched(given, number)
    with raises_with(InputError, "counts", "meta", "cpu"):
        layer.run_batched(x, counts.to("meta"))
    with pytest.raises(InputError, match="counts is a list"):
        layer.run_batched(x, list(COUNTS))
    with pytest.raises(InputError, match="out is"):
        layer.run_batched(x, counts, out=torch.empty(E, M, 2 * H)[..., :H])
    with pytest.raises(InputError, match="x requires a gradient"):
        layer.run_batched(x.clone().requires_grad_(), counts)


@pytest.mark.parametrize("beyond", [M + 1, -1])
def test_checked_layers_refuse_wrong_row_counts(beyond: int) -> None:
    weights = random_experts(E, 2, INNER, H, seed=1, bias=True)
    made = plan(problem_of("fp32", "fp32", DeviceFacts(kind="cpu")))
    x, counts = rows_of("fp32"), torch.tensor(COUNTS)
    plain, checked = MoELayer(weights, made), MoELayer(weights, made, checked=True)
    assert torch.equal(checked.run_batched(x, counts)[HELD], plain.run_batched(x, counts)[HELD])
    counts[2] = beyond
    others = HELD & (torch.arange(E) != 2)[:, None]
    assert torch.equal(plain.run_batched(x, counts)[others], checked.run_batched(x, torch.tensor(COUNTS))[others])
    with raises_with(RoutingError, "counts", beyond, "0 to 40"):
        checked.run_batched(x, counts)
