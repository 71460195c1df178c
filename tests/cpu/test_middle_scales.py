"""Given scales of the rows between the products: one per token, per group of columns, or for all rows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from collegium import (
    DeviceFacts,
    InputError,
    Limits,
    MoELayer,
    MoEOptions,
    MoESpec,
    Overrides,
    Problem,
    Routing,
    RoutingSpec,
    encode_experts,
    moe,
    moe_batched,
    plan,
    probe,
)
from collegium.experts.triton.table import TritonFp8, TritonW4A8
from collegium.experts.triton.tiles import choice
from collegium.ops.quantize import activation_format
from collegium.parallel import Local
from collegium.pipelines.quantized import run_quantized
from collegium.runtime.machine import Machine
from collegium.testing.compare import heavy_tailed, random_experts, relative_error
from fp8_tokens import routing_with_absent_experts
from raising import raises_with

if TYPE_CHECKING:
    from torch import Tensor

E, H, INNER, T, K = 6, 256, 192, 11, 3
ROOM = 5
COUNTS = torch.tensor([5, 0, 3, 1, 4, 2])
GROUPS = 2  # of 128 of the 192 columns between the products


def experts_of(name: str) -> Any:
    return encode_experts(random_experts(E, 2, INNER, H, seed=1), name)


def routing_of(tokens: int = T) -> tuple[Tensor, Tensor]:
    return routing_with_absent_experts(tokens, E, K)


def middle_of(x: Tensor, made: Any, expert: int) -> Tensor:
    """Return the rows between the products of ``x``, for one expert, in float64."""
    gate, up = made.gate_up[expert].decode().double()
    return torch.nn.functional.silu(x.double() @ gate.T) * (x.double() @ up.T)


def rounded(rows: Tensor, scale: Tensor) -> Tensor:
    """Return ``rows`` as E4M3 codes of ``scale [..., G]``, by definition and in float64."""
    spread = scale.double().repeat_interleave(128, -1)[..., : rows.shape[-1]] if scale.shape[-1] > 1 else scale.double()
    codes = (rows / spread).clamp(-448, 448)
    exponent = codes.abs().clamp(min=2.0**-6).log2().floor()
    step = torch.exp2(exponent - 3)
    return torch.round(codes / step) * step * spread


def truth_of(x: Tensor, made: Any, ids: Tensor, weights: Tensor, scale: Tensor | None) -> Tensor:
    """Return the sums ``[T, H]`` in float64; scale ``[T, G]``: of the rows between the products, None: exact rows."""
    out = torch.zeros(x.shape[0], H, dtype=torch.float64)
    for token in range(x.shape[0]):
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            if expert >= 0:
                rows = middle_of(x[token : token + 1], made, expert)
                rows = rows if scale is None else rounded(rows, scale[token : token + 1])
                out[token] += weight * (rows @ made.down[expert].decode().double().T)[0]
    return out


def scales_of(kind: str, x: Tensor, made: Any, ids: Tensor) -> Any:
    """Return scales at which the largest number of a token, or of its groups, is the largest code."""
    rows = torch.stack([torch.stack([middle_of(x, made, e)[t] for e in range(E)]) for t in range(x.shape[0])])
    used = torch.zeros(x.shape[0], E, dtype=torch.bool).scatter_(1, ids.clamp(min=0), True)
    largest = torch.where(used[..., None], rows.abs(), 0).amax(1)
    groups = torch.stack([part.amax(1) for part in largest.split(128, dim=1)], dim=1)
    scales = ((groups if kind == "group" else groups.amax(1, keepdim=True)) / 448).clamp(min=1e-6).float()
    return float(scales.max()) if kind == "one" else scales.flatten() if kind == "token" else scales


def by_token(scale: Any) -> Tensor:
    if isinstance(scale, float):
        return torch.full((T, 1), scale)
    return scale if scale.dim() == 2 else scale[:, None]


@pytest.mark.parametrize("second", ["one", "token", "column", "group"])
@pytest.mark.parametrize("first", [None, "one", "token", "group"])
@pytest.mark.parametrize("is_codes", [False, True])
def test_every_pair_of_scales(first: str | None, second: str, is_codes: bool) -> None:
    if is_codes and first is None:
        return
    made = experts_of("fp8_channel")
    ids, weights = routing_of()
    x = heavy_tailed(T, H, seed=5)
    grouped = first == "group" or (first is None and second == "group")
    form = activation_format("fp8_group128" if grouped else "fp8_token")
    quantized = form.quantize(x)
    codes, first_scale, tokens = quantized.codes, quantized.scales, form.dequantize(quantized)
    assert first_scale is not None
    if first == "one":
        first_scale = torch.tensor(0.25)
        codes = (x * 4).clamp(-448, 448).to(torch.float8_e4m3fn)
        tokens = codes.float() * 0.25
    scale = scales_of(second, tokens, made, ids)
    options = MoEOptions(a1_scale=None if first is None else first_scale, a2_scale=scale, out_dtype=torch.float32)
    found = moe(codes if is_codes else x, made.gate_up, made.down, ids, weights, options=options)
    assert relative_error(found, truth_of(tokens, made, ids, weights, None)) < 0.06
    # A rounding step apart for a few numbers that lie near its boundary in float32.
    wanted = truth_of(tokens, made, ids, weights, by_token(scale))
    assert relative_error(found, wanted) < 0.004
    doubled = truth_of(tokens, made, ids, weights, 1.37 * by_token(scale))
    assert relative_error(found, doubled) > 5 * relative_error(found, wanted)


def test_small_scales_saturate() -> None:
    made = experts_of("fp8_channel")
    ids, weights = routing_of()
    form = activation_format("fp8_token")
    x = form.round_trip(heavy_tailed(T, H, seed=5))
    scale = scales_of("group", x, made, ids)
    scale[3], scale[5, 1] = scale[3] / 64, scale[5, 1] / 16
    options = MoEOptions(a2_scale=scale, overrides=Overrides(activation_format="fp8_group128"))
    found = moe(x, made.gate_up, made.down, ids, weights, options=options)
    tokens = activation_format("fp8_group128").round_trip(x)
    assert relative_error(found, truth_of(tokens, made, ids, weights, scale)) < 0.004
    exact = truth_of(tokens, made, ids, weights, None)
    errors = [relative_error(found[row], exact[row]) for row in range(T)]
    assert errors[3] > 0.5
    assert max(errors[row] for row in range(T) if row not in (3, 5)) < 0.1


def test_one_number_matches_static_bits() -> None:
    made = experts_of("fp8_block")
    ids, weights = routing_of()
    x = heavy_tailed(T, H, seed=5).bfloat16()
    static = moe(x, made.gate_up, made.down, ids, weights, options=MoEOptions(a1_scale=0.25, a2_scale=0.125))
    rows = MoEOptions(a1_scale=torch.full((T,), 0.25), a2_scale=torch.full((T, 1), 0.125))
    assert torch.equal(moe(x, made.gate_up, made.down, ids, weights, options=rows), static)


def test_given_scales_match_computed_ones() -> None:
    made = experts_of("fp8_block")
    ids, weights = routing_of()
    ids, weights = ids[:, 1:2], weights[:, 1:2]
    x = heavy_tailed(T, H, seed=5)
    form = activation_format("fp8_token")
    tokens = form.round_trip(x)
    rows = torch.empty(T, INNER)
    for token, expert in enumerate(ids.flatten().tolist()):
        gate, up = made.gate_up[expert].decode()
        rows[token] = torch.nn.functional.silu(tokens[token] @ gate.T) * (tokens[token] @ up.T)
    dynamic = MoEOptions(overrides=Overrides(activation_format="fp8_token"))
    wanted = moe(x, made.gate_up, made.down, ids, weights, options=dynamic)
    scales = form.quantize(rows).scales
    found = moe(x, made.gate_up, made.down, ids, weights, options=MoEOptions(a2_scale=scales))
    assert relative_error(found, wanted) < 2e-3


@pytest.mark.parametrize("kind", ["one", "token", "group"])
def test_packed_rows(kind: str) -> None:
    made = experts_of("fp8_block")
    rows = heavy_tailed(E * ROOM, H, seed=2)
    form = activation_format("fp8_group128")
    tokens = form.round_trip(rows)
    middle = torch.cat([middle_of(part, made, e) for e, part in enumerate(tokens.split(ROOM))])
    groups = torch.stack([part.abs().amax(1) for part in middle.split(128, dim=1)], dim=1) / 448
    scale: Any = groups if kind == "group" else groups.amax(1, keepdim=True)
    scale = float(scale.max()) if kind == "one" else scale.float().view(E, ROOM, -1)
    quantized = form.quantize(rows)
    assert quantized.scales is not None
    options = MoEOptions(a1_scale=quantized.scales.view(E, ROOM, -1), a2_scale=scale, out_dtype=torch.float32)
    codes = quantized.codes.view(E, ROOM, H)
    found = moe_batched(codes, made.gate_up, made.down, COUNTS, options=options)
    given = torch.full((E * ROOM, 1), scale) if isinstance(scale, float) else scale.view(E * ROOM, -1)
    parts = zip(middle.split(ROOM), given.split(ROOM), strict=True)
    wanted = torch.stack([rounded(part, s) @ made.down[e].decode().double().T for e, (part, s) in enumerate(parts)])
    valid = torch.arange(ROOM) < COUNTS[:, None]
    assert relative_error(found[valid], wanted[valid]) < 0.004


def layer_of(made: Any, activations: str, **options: Any) -> MoELayer:
    spec = MoESpec(
        hidden_size=H,
        intermediate_size=INNER,
        num_experts=E,
        routing=RoutingSpec(top_k=K),
        weight_format=made.gate_up.name,
    )
    problem = Problem(spec=spec, device=probe("cpu"), limits=Limits(max_tokens=4), **options)
    return MoELayer(made, plan(problem, Overrides(activation_format=activations)))


def test_layers_run_given_scales_in_chunks() -> None:
    made = experts_of("fp8_block")
    ids, weights = routing_of()
    form = activation_format("fp8_token")
    quantized = form.quantize(heavy_tailed(T, H, seed=5))
    tokens, scale = form.dequantize(quantized), quantized.scales
    assert scale is not None
    layer = layer_of(made, "fp8_token", out_dtype="fp32")
    routing = Routing(topk_ids=ids, topk_weights=weights)
    middle = scales_of("token", tokens, made, ids)
    found = layer.run_quantized(quantized.codes, scale, routing, middle_scale=middle)
    assert relative_error(found, truth_of(tokens, made, ids, weights, middle[:, None])) < 0.004
    with raises_with(InputError, f"({T}, 3)", f"({T}, 1)"):
        layer.run_quantized(quantized.codes, scale, routing, middle_scale=torch.ones(T, 3))
    with raises_with(InputError, "middle_scale", "float8_e4m3fn"):
        layer.run_batched(torch.zeros(E, 2, H).bfloat16(), COUNTS.clamp(max=2), middle_scale=torch.ones(E, 2))


@pytest.mark.parametrize(
    ("kernel", "weights", "form"),
    [
        (TritonFp8(), "fp8_block", "fp8_group128"),
        (TritonFp8(), "fp8_channel", "fp8_token"),
        (TritonW4A8(), "mxfp4", "fp8_token"),
        (TritonW4A8(), "nvfp4", "fp8_group128"),
    ],
    ids=["fp8", "fp8 rows", "mxfp4", "nvfp4"],
)
def test_triton_quantises_with_given_scales(kernel: Any, weights: str, form: str) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("tests/gpu runs them on the device")
    made = experts_of(weights)
    spec = layer_of(made, form).spec
    device = DeviceFacts(kind="cuda", capability=(9, 0))
    problem = Problem(spec=spec, device=device, limits=Limits(max_tokens=16), activation_format=form)
    packed = kernel.pack(made, problem.routed)
    ids, factors = routing_of()
    routing = Routing(topk_ids=ids, topk_weights=factors)
    rows = activation_format(form).quantize(heavy_tailed(T, H, seed=5).bfloat16())
    assert rows.scales is not None
    tokens = activation_format(form).dequantize(rows)
    middle = by_token(scales_of("group" if form == "fp8_group128" else "token", tokens, made, ids))
    middle[2] /= 32
    found = torch.empty(T, H, dtype=torch.bfloat16)
    codes = (rows.codes, rows.scales, torch.bfloat16)
    run_quantized(packed, Local(num_experts=E), codes, routing, found, middle_scale=middle)
    # Rows between the products are rounded to bfloat16 before they are quantised.
    assert relative_error(found, truth_of(tokens, made, ids, factors, middle)) < 0.02
    assert relative_error(found[2], truth_of(tokens, made, ids, factors, None)[2]) > 0.3


@pytest.mark.parametrize(
    ("kernel", "weights", "form"),
    [
        (TritonFp8(), "fp8_block", "fp8_group128"),
        (TritonFp8(), "fp8_channel", "fp8_token"),
        (TritonW4A8(), "mxfp4", "fp8_token"),
        (TritonW4A8(), "mxfp4", "fp8_group128"),
    ],
    ids=["fp8", "fp8 rows", "mxfp4 rows", "mxfp4"],
)
def test_large_tiles_use_given_scales(kernel: Any, weights: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("tests/gpu runs them on the device")
    pytest.importorskip("prefill_on_cpu")
    monkeypatch.setattr(choice, "large_from", lambda *_: 56)
    made = experts_of(weights)
    tokens = 60
    ids, factors = routing_of(tokens)
    rows = activation_format(form).quantize(heavy_tailed(tokens, H, seed=5).bfloat16())
    device = DeviceFacts(kind="cuda", capability=(9, 0))
    problem = Problem(spec=layer_of(made, form).spec, device=device, activation_format=form)
    small = kernel.pack(made, problem.routed)
    large = replace(small, machine=Machine(copies=True, compiles=True), forced="large")
    batch, _ = Local(num_experts=E).dispatch(rows.codes, Routing(topk_ids=ids, topk_weights=factors))
    scale = heavy_tailed(tokens, GROUPS if form == "fp8_group128" else 1, seed=6, channels=False).abs() * 0.02 + 1e-3
    batch = replace(batch, scale=rows.scales, dtype=torch.bfloat16, middle_scale=scale)
    assert small.tiling.large(K * tokens) is None
    assert large.tiling.large(K * tokens) is not None
    stop = int(batch.expert_offsets[-1])
    found, wanted = large.run(batch)[:stop], small.run(batch)[:stop]
    # Triton's interpreter rounds the rows between the products toward zero.
    assert relative_error(found, wanted) < 0.02
    assert relative_error(large.run(replace(batch, middle_scale=None))[:stop], wanted) > 0.1
