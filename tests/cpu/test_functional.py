"""``moe`` as serving engines call it: raw codes with scales, quantised tokens, maps of experts, results in place."""

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
    MoEOptions,
    MoESpec,
    Overrides,
    PlanError,
    Problem,
    Routing,
    RoutingError,
    RoutingSpec,
    SharedSpec,
    SharedWeights,
    encode_experts,
    moe,
    moe_batched,
    plan,
    probe,
)
from collegium.experts.triton.table import TritonFp8, TritonW4A8
from collegium.formats import by_name, payload_from_scales
from collegium.ops.quantize import activation_format
from collegium.parallel import Local
from collegium.parallel.placement import linear
from collegium.pipelines.batched import run_batched
from collegium.pipelines.quantized import run_quantized
from collegium.testing.compare import heavy_tailed, random_experts, relative_error
from fp8_tokens import quantised, routing_with_absent_experts
from raising import raises_with
from truth import moe_truth

E, H, INNER, T, K = 6, 256, 128, 11, 3
SWIGLU = ActivationSpec()
TOKENS = MoEOptions(overrides=Overrides(activation_format="fp8_token"))


def raw(name: str) -> tuple[dict[str, Any], Any]:
    """Return w13, w2 and their scales as engines hold them, and the payloads that they stand for."""
    made = encode_experts(random_experts(E, 2, INNER, H, seed=1), name)
    arguments: dict[str, Any] = {}
    for key, payload in (("w1", made.gate_up), ("w2", made.down)):
        tensors: Any = payload.tensors()
        stacked = key == "w1"

        def joined(tensor: torch.Tensor, stacked: bool = stacked) -> torch.Tensor:
            return tensor.flatten(1, 2) if stacked and tensor.dim() > 2 else tensor

        arguments[key] = joined(tensors["codes"])
        if name == "fp8_channel" and stacked:
            tensors["scales"] = tensors["scales"].flatten(1)
        arguments[f"{key}_scale"] = tensors["scale"] if name == "fp8_tensor" else joined(tensors["scales"])
        if name == "nvfp4":
            arguments[f"{key}_global_scale"] = tensors["global_scale"]
    return arguments, made


def routing_of(experts: int = E, tokens: int = T) -> tuple[torch.Tensor, torch.Tensor]:
    return routing_with_absent_experts(tokens, experts, K)


def truth_of(x: torch.Tensor, made: Any, ids: torch.Tensor, weights: torch.Tensor, activation: Any = SWIGLU) -> Any:
    return moe_truth(x, made.gate_up.decode(), made.down.decode(), ids, weights, activation)


@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_channel", "fp8_block", "mxfp8", "mxfp4", "nvfp4"])
def test_raw_codes_with_scales(name: str) -> None:
    arguments, made = raw(name)
    ids, weights = routing_of()
    x = heavy_tailed(T, H, seed=5)
    first, second = arguments.pop("w1"), arguments.pop("w2")
    found = moe(x, first, second, ids, weights, options=MoEOptions(**arguments))
    wanted = truth_of(x, made, ids, weights)
    assert relative_error(found, wanted) < 1e-5
    swapped = replace(made, gate_up=payload_from_scales(*_swapped(made, name), parts=2, **_global(made, name)))
    assert relative_error(found, truth_of(x, swapped, ids, weights)) > 0.3
    assert torch.equal(found, moe(x, made.gate_up, made.down, ids, weights))


def _swapped(made: Any, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = made.gate_up.tensors()
    scales = tensors["scale"] if name == "fp8_tensor" else tensors["scales"]
    scales = scales.flip(1) if name == "fp8_tensor" else scales.flip(1).flatten(1, 2)
    return tensors["codes"].flip(1).flatten(1, 2), scales


def _global(made: Any, name: str) -> dict[str, Any]:
    return {"global_scale": made.gate_up.global_scale.flip(1)} if name == "nvfp4" else {}


def test_other_shapes_of_scales() -> None:
    weight = heavy_tailed(E, 2 * 96, H, seed=1, channels=False)
    codes = weight.to(torch.float8_e4m3fn)
    one = torch.tensor(0.5)
    for scale in (one, one.view(1), torch.full((E,), 0.5), torch.full((E, 1, 1), 0.5), torch.full((E, 2), 0.5)):
        payload = payload_from_scales(codes, scale, parts=2)
        assert payload.shape == (E, 2, 96, H)
        assert torch.equal(payload.decode().flatten(1, 2), codes.float() * 0.5)
    both = torch.tensor([[0.5, 2.0]]).expand(E, 2)
    assert torch.equal(payload_from_scales(codes, both, parts=2).decode()[:, 1], codes.float()[:, 96:] * 2)
    rows = torch.rand(E, 192, 1)
    assert torch.equal(payload_from_scales(codes, rows).decode(), codes.float() * rows)
    # Gate and up each end in a block that is not whole.
    blocks = torch.rand(E, 2, 2)
    decoded = payload_from_scales(codes, blocks, parts=2).decode()
    assert torch.equal(decoded[:, 1, :, 128:], codes.float()[:, 96:, 128:] * blocks[:, 1:, 1:])
    small = torch.rand(E, 6, 4)
    decoded = payload_from_scales(codes, small, parts=2, block_shape=(32, 64)).decode().flatten(1, 2)
    assert torch.equal(decoded, codes.float() * small.repeat_interleave(32, 1).repeat_interleave(64, 2))
    powers = torch.randint(120, 130, (E, 2, 2), dtype=torch.uint8)
    decoded = payload_from_scales(codes, powers.view(torch.float8_e8m0fnu), parts=2).decode()
    assert torch.equal(
        decoded[:, 0, :, :128], codes.float()[:, :96, :128] * torch.exp2(powers[:, :1, :1].float() - 127)
    )


@pytest.mark.parametrize(
    ("arguments", "changes", "text"),
    [
        ("fp8_block", {"w1_scale": torch.ones(E, 3, 2)}, r"gate_up: found weights \(6, 256, 256\).*scales \(6, 3, 2\)"),
        ("fp8_block", {"w2_scale": None}, "down is torch.float8_e4m3fn and w2_scale is missing"),
        ("nvfp4", {"w1_global_scale": None}, "gate_up: found .* and no global scale; allowed"),
        ("mxfp4", {"w1_global_scale": torch.ones(E)}, "a global scale belongs to float8_e4m3fn"),
        ("mxfp4", {"block_shape": (128, 128)}, "allowed: codes float8"),
        ("fp8_tensor", {"w1_scale": torch.ones(E, dtype=torch.int32)}, "torch.int32"),
    ],
)
def test_scales_that_fit_no_layout(arguments: str, changes: dict[str, Any], text: str) -> None:
    given, _ = raw(arguments)
    first, second = given.pop("w1"), given.pop("w2")
    ids, weights = routing_of()
    with pytest.raises(InputError, match=f"(?s)moe: .*{text}"):
        moe(heavy_tailed(T, H, seed=5), first, second, ids, weights, options=MoEOptions(**{**given, **changes}))


def test_expert_map_gives_partial_sum() -> None:
    total = 9
    made = random_experts(total, 2, INNER, H, seed=1)
    ids, weights = routing_of(total)
    x = heavy_tailed(T, H, seed=5)
    first, second = made.gate_up.decode(), made.down.decode()
    wanted = truth_of(x, made, ids, weights)
    found = torch.zeros(T, H)
    for local in ([0, 4, 8], [7], [1, 2, 3, 5, 6]):  # also fewer experts than ids of a token
        expert_map = torch.full((total,), -1, dtype=torch.int32)
        expert_map[local] = torch.arange(len(local), dtype=torch.int32)
        options = MoEOptions(expert_map=expert_map, global_num_experts=total)
        part = moe(x, first[local], second[local], ids, weights, options=options)
        found += part
        bad = ids.clone()
        bad[2, 1], bad[5, 0] = total, -2
        with_bad = moe(x, first[local], second[local], bad, weights, options=options)
        assert with_bad[[2, 5]].isnan().all()
        others = [row for row in range(T) if row not in (2, 5)]
        assert relative_error(with_bad[others], part[others]) < 1e-6
    assert relative_error(found, wanted) < 1e-5
    assert (
        relative_error(found, truth_of(x, replace(made, gate_up=by_name("fp32").encode(first.flip(1))), ids, weights))
        > 0.3
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (MoEOptions(global_num_experts=9), "global_num_experts is 9 and the weights have 6 experts; pass expert_map"),
        (MoEOptions(expert_map=torch.zeros(9)), r"expert_map is \(9,\) torch.float32; allowed: integers"),
        (MoEOptions(expert_map=torch.zeros(9).int(), global_num_experts=8), r"allowed: integers \[8\]"),
        (MoEOptions(expert_map=torch.zeros(9, device="meta").int()), "expert_map is on meta"),
        (MoEOptions(inplace=True, out=torch.empty(T, H)), "inplace .* out passed"),
        (
            MoEOptions(inplace=True, out_dtype=torch.bfloat16),
            "inplace with x of torch.float32, out_dtype torch.bfloat16",
        ),
        (MoEOptions(out_dtype=torch.float64), "out_dtype is torch.float64"),
        (MoEOptions(a1_scale=torch.ones(T + 1)), r"a1_scale is \(12,\); allowed: one number, \(11,\)"),
        (MoEOptions(a2_scale=torch.ones(T, 3)), r"a2_scale is \(11, 3\); allowed: .*\(11, 1\), one per"),
        (MoEOptions(a2_scale=torch.ones(T).int()), "a2_scale is torch.int32"),
        (MoEOptions(a2_scale=torch.ones(T, device="meta")), "a2_scale is on meta"),
        (
            MoEOptions(a2_scale=torch.ones(T), overrides=Overrides(activation_format="mxfp8")),
            "activation format mxfp8; allowed: fp8_token",
        ),
        (MoEOptions(w1_scale=torch.ones(E)), "gate_up is torch.float32 and w1_scale is passed"),
    ],
)
def test_options_that_contradict_each_other(options: MoEOptions, text: str) -> None:
    made = random_experts(E, 2, INNER, H, seed=1)
    ids, weights = routing_of()
    with pytest.raises(InputError, match=f"(?s)moe: .*{text}|{text}"):
        moe(heavy_tailed(T, H, seed=5), made.gate_up.decode(), made.down.decode(), ids, weights, options=options)


def test_input_weights_out_and_clamp() -> None:
    made = random_experts(E, 2, INNER, H, seed=1)
    first, second = made.gate_up.decode(), made.down.decode()
    ids, weights = routing_of()
    x = heavy_tailed(T, H, seed=5)
    found = moe(x, first, second, ids, weights, options=MoEOptions(apply_router_weight_on_input=True))
    wanted = torch.zeros(T, H, dtype=torch.float64)
    for slot in range(K):
        one = ids[:, slot : slot + 1]
        wanted += truth_of(x * weights[:, slot : slot + 1], made, one, torch.ones(T, 1))
    assert relative_error(found, wanted) < 1e-5
    assert relative_error(found, truth_of(x, made, ids, weights)) > 0.1
    limited = ActivationSpec(kind="swiglu_oai", limit=0.75, alpha=1.3)
    found = moe(x, first, second, ids, weights, activation=limited)
    assert relative_error(found, truth_of(x, made, ids, weights, limited)) < 1e-5
    plain = moe(x, first, second, ids, weights)
    kept = x.clone()
    assert moe(kept, first, second, ids, weights, options=MoEOptions(inplace=True)) is kept
    assert torch.equal(kept, plain)
    out = torch.empty(T, H, dtype=torch.bfloat16)
    options = MoEOptions(out=out, out_dtype=torch.bfloat16)
    assert moe(x, first, second, ids, weights, options=options) is out
    assert torch.equal(out, plain.bfloat16())


@pytest.mark.parametrize("name", ["fp8_channel", "fp8_block"])
@pytest.mark.parametrize("scales", ["token", "column", "one", "block"])
@pytest.mark.parametrize("middle", [None, 0.05])
def test_quantised_tokens(name: str, scales: str, middle: float | None) -> None:
    arguments, made = raw(name)
    ids, weights = routing_of()
    x = heavy_tailed(T, H, seed=5)
    if scales == "one":
        codes, scale = (x / 0.25).to(torch.float8_e4m3fn), torch.tensor(0.25)
        tokens = codes.float() * 0.25
    else:
        codes, scale, tokens = quantised("fp8_group128" if scales == "block" else "fp8_token", x)
    scale = scale.flatten() if scales == "token" else scale
    first, second = arguments.pop("w1"), arguments.pop("w2")
    options = MoEOptions(a1_scale=scale, a2_scale=middle, out_dtype=torch.float32, **arguments)
    found = moe(codes, first, second, ids, weights, options=options)
    assert found.dtype == torch.float32
    # The rest is what the format of the rows between the products rounds.
    assert relative_error(found, truth_of(tokens, made, ids, weights)) < 0.05
    assert relative_error(found, truth_of(tokens * 1.2, made, ids, weights)) > 0.1
    assert moe(codes, first, second, ids, weights, options=replace(options, out_dtype=None)).dtype == torch.bfloat16


def test_prequantised_tokens_match_bitwise() -> None:
    _, made = raw("fp8_block")
    ids, weights = routing_of()
    x = heavy_tailed(T, H, seed=5).bfloat16()
    for name in ("fp8_token", "fp8_group128"):
        codes, scale, _ = quantised(name, x)
        options = MoEOptions(overrides=Overrides(activation_format=name))
        wanted = moe(x, made.gate_up, made.down, ids, weights, options=options)
        found = moe(codes, made.gate_up, made.down, ids, weights, options=MoEOptions(a1_scale=scale))
        assert torch.equal(found, wanted)
    static = MoEOptions(a1_scale=torch.tensor(0.25), a2_scale=0.125)
    wanted = moe(x, made.gate_up, made.down, ids, weights, options=static)
    form = activation_format("fp8_static").within(0.25 * 448)
    codes = form.quantize(x).codes
    assert torch.equal(moe(codes, made.gate_up, made.down, ids, weights, options=static), wanted)


def layer_of(made: Any, activations: str, **changes: Any) -> MoELayer:
    spec_changes = changes.pop("spec", {})
    others = changes.pop("others", {})
    spec = MoESpec(
        **{
            "hidden_size": H,
            "intermediate_size": INNER,
            "num_experts": E,
            "routing": RoutingSpec(top_k=K),
            "weight_format": made.gate_up.name,
            **spec_changes,
        }
    )
    problem = Problem(spec=spec, device=probe("cpu"), limits=Limits(max_tokens=8), **changes)
    return MoELayer(made, plan(problem, Overrides(activation_format=activations)), **others)


def test_prequantised_tokens_with_shared_expert() -> None:
    _, made = raw("fp8_block")
    shared = encode_experts(random_experts(1, 2, INNER, H, seed=7), "fp8_block")
    layer = layer_of(
        made,
        "fp8_token",
        out_dtype="fp32",
        spec={"shared": SharedSpec(intermediate_size=INNER)},
        others={"shared": SharedWeights(experts=shared), "after_expert": lambda rows: 2 * rows},
    )
    ids, weights = routing_of()
    routing = Routing(topk_ids=ids, topk_weights=weights)
    codes, scale, tokens = quantised("fp8_token", heavy_tailed(T, H, seed=5))
    found = layer.run_quantized(codes, scale, routing)
    one = torch.zeros(T, 1, dtype=torch.int64)
    wanted = 2 * truth_of(tokens, made, ids, weights) + truth_of(tokens, shared, one, torch.ones(T, 1))
    assert relative_error(found, wanted) < 0.05
    out = torch.empty_like(found)
    assert layer.run_quantized(codes, scale, routing, out=out) is out
    assert torch.equal(out, found)
    assert layer.run_quantized(codes[:0], scale[:0], Routing(topk_ids=ids[:0], topk_weights=weights[:0])).shape == (
        0,
        H,
    )
    bad = ids.clone()
    bad[3, 0] = E
    routing = Routing(topk_ids=bad, topk_weights=weights)
    assert layer.run_quantized(codes, scale, routing).isnan().any(1).tolist() == [row == 3 for row in range(T)]
    layer.checked = True
    with pytest.raises(RoutingError):
        layer.run_quantized(codes, scale, routing)


def test_what_quantised_tokens_need() -> None:
    _, made = raw("fp8_block")
    ids, weights = routing_of()
    routing = Routing(topk_ids=ids, topk_weights=weights)
    codes, scale, tokens = quantised("fp8_group128", heavy_tailed(T, H, seed=5))
    grouped = layer_of(made, "fp8_group128")
    for x, scales, text in (
        (tokens, scale, "x is torch.float32, for any layer"),
        (codes[:, :128], scale, r"x is \(11, 128\)"),
        (codes, scale[:, :1], r"the scales are \(11, 1\); with fp8_group128 activations allowed: \(11, 2\), one for"),
        (codes, torch.tensor(1.0), "one for every 128 columns"),
        (codes, scale.double(), "the scales are torch.float64"),
        (codes, scale.to("meta"), "scale is on meta"),
    ):
        with pytest.raises(InputError, match=text):
            grouped.run_quantized(x, scales, routing)
    with pytest.raises(InputError, match=r"\(11,\).*\(11, 1\)"):
        layer_of(made, "fp8_token").run_quantized(codes, scale, routing)
    with pytest.raises(InputError, match=r"bf16 activations.*activation_format='fp8_token'"):
        layer_of(made, "bf16").run_quantized(codes, scale, routing)
    on_input = layer_of(made, "fp8_token", spec={"routing": RoutingSpec(top_k=K, weight_on_input=True)})
    with raises_with(InputError, "weight_on_input"):
        on_input.run_quantized(codes, scale[:, :1], routing)
    with pytest.raises(InputError, match=r"x is float8_e4m3fn.*a1_scale"):
        moe(codes, made.gate_up, made.down, ids, weights)
    options = MoEOptions(a1_scale=scale, overrides=Overrides(kernel="cpu_grouped"))
    with raises_with(PlanError, "cpu_grouped"):
        moe(codes, made.gate_up, made.down, ids, weights, options=options)


COUNTS = torch.tensor([0, 7, 20, 3, 0, 1])
ROOM = 20


@pytest.mark.parametrize("form", ["fp8_token", "fp8_group128"])
@pytest.mark.parametrize("name", ["fp8_block", "nvfp4"])
def test_rows_packed_by_expert_in_fp8(name: str, form: str) -> None:
    _, made = raw(name)
    layer = layer_of(made, form)
    rows = heavy_tailed(E * ROOM, H, seed=2).bfloat16()
    codes, scale, tokens = quantised(form, rows)
    valid = torch.arange(ROOM) < COUNTS[:, None]
    codes, scale = codes.view(E, ROOM, H), scale.view(E, ROOM, -1)
    scale = scale.masked_fill(~valid[..., None], torch.nan)
    out = torch.full((E, ROOM, H), 7.0, dtype=torch.bfloat16)
    assert layer.run_batched(codes, COUNTS, scale=scale, out=out) is out
    assert torch.equal(out[valid], layer.run_batched(rows.view(E, ROOM, H), COUNTS)[valid])
    assert bool((out[~valid] == 7).all())
    ids = torch.where(valid, torch.arange(E)[:, None], -1).view(-1, 1)
    wanted = truth_of(tokens, made, ids, torch.ones(len(ids), 1)).view(E, ROOM, H)
    assert relative_error(out[valid], wanted[valid]) < 0.05
    if form == "fp8_token":
        assert torch.equal(layer.run_batched(codes, COUNTS, scale=scale[..., 0])[valid], out[valid])
    with raises_with(InputError, "run_batched", "(6, 20, 5)"):
        layer.run_batched(codes, COUNTS, scale=torch.ones(E, ROOM, 5))
    with pytest.raises(InputError, match=r"run_batched: x .*torch.bfloat16.*torch.float8_e4m3fn"):
        layer.run_batched(rows.view(E, ROOM, H), COUNTS, scale=scale)
    with pytest.raises(InputError, match=r"float8_e4m3fn.*scale="):
        layer.run_batched(codes, COUNTS)


def batched_truth(
    tokens: torch.Tensor, made: Any, activation: Any = SWIGLU, biases: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which rows of ``tokens [E * ROOM, H]`` are valid, and the experts' output ``[E, ROOM, H]``."""
    valid = torch.arange(ROOM) < COUNTS[:, None]
    ids = torch.where(valid, torch.arange(E)[:, None], -1).view(-1, 1)
    matrices = made.gate_up.decode(), made.down.decode()
    return valid, moe_truth(tokens, *matrices, ids, torch.ones(len(ids), 1), activation, biases).view(E, ROOM, H)


@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_channel", "fp8_block", "mxfp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("scales", [None, "one", "expert", "token", "block"])
def test_packed_rows_of_an_engine(name: str, scales: str | None) -> None:
    arguments, made = raw(name)
    first, second = arguments.pop("w1"), arguments.pop("w2")
    rows = heavy_tailed(E * ROOM, H, seed=2)
    limited = ActivationSpec(limit=0.75)
    options = MoEOptions(**arguments, out=torch.full((E, ROOM, H), 7.0), out_dtype=torch.float32)
    x, tokens = rows, rows
    if scales in ("token", "block"):
        x, scale, tokens = quantised("fp8_group128" if scales == "block" else "fp8_token", rows)
        options = replace(options, a1_scale=scale.view(E, ROOM, -1))
    elif scales is not None:
        factors = torch.tensor(0.25) if scales == "one" else torch.arange(1, 1 + E).float().view(E, 1, 1) / 16
        x = (rows.view(E, ROOM, H) / factors).to(torch.float8_e4m3fn)
        tokens = (x.float() * factors).view(-1, H)
        options = replace(options, a1_scale=factors)
    found = moe_batched(x.view(E, ROOM, H), first, second, COUNTS, activation=limited, options=options, expected=31)
    assert found is options.out
    valid, wanted = batched_truth(tokens, made, limited)
    # Where x is quantised, the format of the rows between the products rounds them too.
    assert relative_error(found[valid], wanted[valid]) < (1e-5 if scales is None else 0.05)
    assert relative_error(found[valid], batched_truth(tokens, made)[1][valid]) > 0.06
    assert bool((found[~valid] == 7).all())


def test_packed_rows_biases_static_scales() -> None:
    made = random_experts(E, 2, INNER, H, seed=1)
    matrices = made.gate_up.decode().flatten(1, 2), made.down.decode()
    biases = heavy_tailed(E, 2 * INNER, seed=6), heavy_tailed(E, H, seed=7)
    rows = heavy_tailed(E * ROOM, H, seed=2)
    x = rows.view(E, ROOM, H).clone()
    found = moe_batched(x, *matrices, COUNTS, biases=biases, options=MoEOptions(inplace=True))
    assert found is x
    valid, wanted = batched_truth(rows, made, biases=(biases[0].view(E, 2, INNER), biases[1]))
    assert relative_error(found[valid], wanted[valid]) < 1e-5
    assert torch.equal(found[~valid], rows.view(E, ROOM, H)[~valid])
    _, coded = raw("fp8_block")
    static = MoEOptions(a1_scale=0.25, a2_scale=0.125)
    found = moe_batched(rows.bfloat16().view(E, ROOM, H), coded.gate_up, coded.down, COUNTS, options=static)
    tokens = (rows.bfloat16().float() / 0.25).to(torch.float8_e4m3fn)
    assert relative_error(found[valid], batched_truth(tokens.float() * 0.25, coded)[1][valid]) < 0.05
    codes = tokens.view(E, ROOM, H)
    assert torch.equal(
        moe_batched(codes, coded.gate_up, coded.down, COUNTS, options=static)[valid].view(torch.int16),
        found[valid].view(torch.int16),
    )


@pytest.mark.parametrize(
    ("options", "x", "counts", "text"),
    [
        (MoEOptions(expert_map=torch.arange(E)), None, COUNTS, "expert_map was passed, global_num_experts is None"),
        (MoEOptions(global_num_experts=9), None, COUNTS, "global_num_experts is 9"),
        (MoEOptions(apply_router_weight_on_input=True), None, COUNTS, "apply_router_weight_on_input True"),
        (None, torch.ones(T, H), COUNTS, r"moe_batched: x is \(11, 256\) torch.float32; allowed: \[E, M, H\]"),
        (None, torch.ones(5, 3, H), COUNTS, r"x is \(5, 3, 256\) torch.float32, allowed: \(6, M, 256\)"),
        (None, None, COUNTS.float(), r"counts is \(6,\) torch.float32"),
        (None, None, [1, 2], "moe_batched: counts is a list"),
        (None, torch.ones(E, 3, H, requires_grad=True), COUNTS, "x requires a gradient"),
        (
            MoEOptions(a1_scale=torch.ones(E, 4), a2_scale=1.0),
            None,
            COUNTS,
            r"a1_scale is \(6, 4\); allowed: one number, \(6, 1, 1\), \(6, 3\)",
        ),
        (
            MoEOptions(a1_scale=torch.ones(E, 3, 5)),
            torch.ones(E, 3, H).to(torch.float8_e4m3fn),
            COUNTS,
            r"a1_scale is \(6, 3, 5\); allowed: .*\(6, 3, 2\), one for every 128",
        ),
        (
            MoEOptions(a1_scale=torch.ones(E, 4)),
            torch.ones(E, 3, H).to(torch.float8_e4m3fn),
            COUNTS,
            r"a1_scale is \(6, 4\); allowed: one number, \(6, 1, 1\), \(6, 3\) or",
        ),
    ],
)
def test_packed_rows_that_are_refused(options: Any, x: Any, counts: Any, text: str) -> None:
    made = random_experts(E, 2, INNER, H, seed=1)
    x = torch.ones(E, 3, H) if x is None else x
    with pytest.raises(InputError, match=text):
        moe_batched(x, made.gate_up, made.down, counts, options=options)


@pytest.mark.each_choice
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
def test_triton_uses_codes_unchanged(kernel: Any, weights: str, form: str) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("tests/gpu runs them on the device")
    _, made = raw(weights)
    spec = MoESpec(
        hidden_size=H,
        intermediate_size=INNER,
        num_experts=E,
        routing=RoutingSpec(top_k=K),
        weight_format=weights,
    )
    device = DeviceFacts(kind="cuda", capability=(9, 0))
    problem = Problem(spec=spec, device=device, limits=Limits(max_tokens=16), activation_format=form)
    packed = kernel.pack(made, problem.routed)
    ids, factors = routing_of()
    routing = Routing(topk_ids=ids, topk_weights=factors)
    x = heavy_tailed(T, H, seed=5).bfloat16()
    codes, scale, tokens = quantised(form, x)
    found = torch.empty(T, H, dtype=torch.bfloat16)
    run_quantized(packed, Local(num_experts=E), (codes, scale, torch.bfloat16), routing, found)
    assert relative_error(found, truth_of(tokens, made, ids, factors)) < 0.06
    rows = heavy_tailed(E * ROOM, H, seed=2).bfloat16()
    codes, scale, _ = quantised(form, rows)
    valid = torch.arange(ROOM) < COUNTS[:, None]
    outs = [torch.full((E, ROOM, H), 7.0, dtype=torch.bfloat16) for _ in range(2)]
    run_batched(packed, rows.view(E, ROOM, H), COUNTS, outs[0])
    run_batched(packed, codes.view(E, ROOM, H), COUNTS, outs[1], codes=(scale, torch.bfloat16, None))
    assert relative_error(outs[1][valid], outs[0][valid]) < 1e-6
    assert torch.equal(outs[0][~valid], outs[1][~valid])


def test_partial_ranks_take_prequantised_tokens() -> None:
    _, made = raw("fp8_block")
    ids, weights = routing_of()
    routing = Routing(topk_ids=ids, topk_weights=weights)
    codes, scale, tokens = quantised("fp8_token", heavy_tailed(T, H, seed=5))
    total = torch.zeros(T, H)
    for rank in range(2):
        place = linear(E, rank, 2)
        half = slice(place.expert_ids[0], place.expert_ids[-1] + 1)
        spec = MoESpec(
            hidden_size=H,
            intermediate_size=INNER,
            num_experts=E,
            routing=RoutingSpec(top_k=K),
            weight_format="fp8_block",
        )
        problem = Problem(spec=spec, device=probe("cpu"), placement=place, out_dtype="fp32")
        overrides = Overrides(activation_format="fp8_token", dispatcher="partial")
        part = replace(made, gate_up=made.gate_up[half], down=made.down[half])
        total += MoELayer(part, plan(problem, overrides)).run_quantized(codes, scale, routing)
    assert relative_error(total, truth_of(tokens, made, ids, weights)) < 0.05


@pytest.mark.parametrize("kernel", ["reference", "cpu_grouped"])
def test_another_clamp_without_packing_again(kernel: str) -> None:
    made = random_experts(E, 2, INNER, H, seed=1)
    shared = random_experts(1, 2, INNER, H, seed=7)
    spec = MoESpec(
        hidden_size=H,
        intermediate_size=INNER,
        num_experts=E,
        routing=RoutingSpec(top_k=K),
        weight_format="fp32",
        shared=SharedSpec(intermediate_size=INNER),
    )
    problem = Problem(spec=spec, device=probe("cpu"), limits=Limits(max_tokens=16), dtype="fp32")
    layer = MoELayer(made, plan(problem, Overrides(kernel=kernel)), shared=SharedWeights(experts=shared))
    ids, weights = routing_of()
    routing = Routing(topk_ids=ids, topk_weights=weights)
    x = heavy_tailed(T, H, seed=5)
    before = layer(x, routing=routing)
    one = torch.zeros(T, 1, dtype=torch.int64)
    for activation in (ActivationSpec(limit=0.5), ActivationSpec(kind="swiglu_oai", limit=2.0, alpha=1.3), SWIGLU):
        other = layer.with_activation(activation)
        wanted = truth_of(x, made, ids, weights, activation) + truth_of(x, shared, one, torch.ones(T, 1), activation)
        assert relative_error(other(x, routing=routing), wanted) < 1e-5
        assert other.plan.problem.spec.activation == activation
        assert activation.limit is None or f"limit {activation.limit:g}" in other.plan.explain()
        assert {t.data_ptr() for t in other.experts.slots()} == {t.data_ptr() for t in layer.experts.slots()}
    assert torch.equal(layer(x, routing=routing), before)
    # Compiled code runs the layer that it was compiled for.
    other = layer.with_activation(ActivationSpec(limit=0.5))
    for one in (layer, other):
        compiled = torch.compile(one, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x, routing=routing), one(x, routing=routing))
    with pytest.raises(InputError, match=r"relu2.*gate"):
        layer.with_activation(ActivationSpec(kind="relu2"))
    with pytest.raises(PlanError, match="fast=True"):
        layer.with_activation(ActivationSpec(fast=True))
