"""Routing against a float64 judge that sorts Python tuples, and against the routers of published models."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from collegium.errors import InputError, RoutingError, SpecError
from collegium.ops.route import given_routing, route, route_custom
from collegium.types import MoESpec, Routing, RoutingSpec
from raising import raises_with

V3 = RoutingSpec(
    top_k=4,
    score="sigmoid",
    renormalize_eps=1e-20,
    groups=4,
    topk_groups=2,
    group_score="top2_sum",
    scale=2.5,
    correction_bias=True,
)
SPECS = {
    "mixtral": RoutingSpec(top_k=2),
    "olmoe": RoutingSpec(top_k=8, renormalize=False),
    "gpt_oss": RoutingSpec(top_k=4, score="topk_softmax", renormalize=False),
    "deepseek_v2": RoutingSpec(top_k=6, renormalize=False, groups=4, topk_groups=2, scale=16.0),
    "deepseek_v3": V3,
    "deepseek_v4": RoutingSpec(top_k=6, score="sqrt_softplus", renormalize_eps=1e-20, scale=1.5, correction_bias=True),
    "llama4": RoutingSpec(top_k=1, score="sigmoid", renormalize=False, weight_on_input=True),
    "ernie": RoutingSpec(top_k=6, correction_bias=True),
    "top2_without_bias": replace(V3, correction_bias=False),
    "max_with_bias": replace(V3, group_score="max"),
    "biased_logits": RoutingSpec(top_k=3, score="topk_softmax", correction_bias=True),
    "single_expert_groups": RoutingSpec(top_k=3, groups=20, topk_groups=5, group_score="top2_sum"),
}


def logits_for(tokens=40, experts=20, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(tokens, 1, generator=generator).exp() * 2
    return torch.randn(tokens, experts, generator=generator) * spread


def bias_for(spec, experts=20, seed=1):
    return torch.randn(experts, generator=torch.Generator().manual_seed(seed)) if spec.correction_bias else None


def scores_of(row, score):
    if score == "softmax":
        total = math.fsum(math.exp(v - max(row)) for v in row)
        return [math.exp(v - max(row)) / total for v in row]
    if score == "sigmoid":
        return [1 / (1 + math.exp(-v)) for v in row]
    if score == "sqrt_softplus":
        return [math.sqrt(math.log1p(math.exp(v))) for v in row]
    return list(row)


def judge(row, spec, bias=None):
    """Route one row of Python floats: ids and weights."""
    experts = len(row)
    scores = scores_of(row, spec.score)
    ranked = scores if bias is None else [s + b for s, b in zip(scores, bias, strict=True)]
    size = experts // spec.groups
    groups = [sorted(ranked[g * size : (g + 1) * size], reverse=True) for g in range(spec.groups)]
    value = [sum(g[:2]) if spec.group_score == "top2_sum" else g[0] for g in groups]
    kept = sorted(range(spec.groups), key=lambda g: (-value[g], g))[: spec.topk_groups]
    allowed = [e for e in range(experts) if e // size in kept]
    ids = sorted(allowed, key=lambda e: (-ranked[e], e))[: spec.top_k]
    weights = [scores[e] for e in ids]
    if spec.score == "topk_softmax":
        weights = scores_of(weights, "softmax")
    if spec.renormalize:
        total = sum(weights) + spec.renormalize_eps
        weights = [w / total for w in weights]
    return ids, [w * spec.scale for w in weights]


def judge_all(logits, spec, bias=None):
    rows = [judge(row, spec, None if bias is None else bias.tolist()) for row in logits.double().tolist()]
    return torch.tensor([r[0] for r in rows]), torch.tensor([r[1] for r in rows], dtype=torch.float64)


@pytest.mark.parametrize("name", SPECS)
def test_route_matches_the_judge(name):
    spec = SPECS[name]
    logits, bias = logits_for(), bias_for(spec)
    found = route(logits, spec, bias=bias, checked=True)
    ids, weights = judge_all(logits, spec, bias)
    assert torch.equal(found.topk_ids, ids)
    torch.testing.assert_close(found.topk_weights.double(), weights, rtol=1e-6, atol=1e-30)
    assert found.topk_ids.dtype == torch.int64
    assert found.topk_weights.dtype == torch.float32
    unchecked = route(logits, spec, bias=bias)
    assert torch.equal(unchecked.topk_ids, ids)
    assert torch.equal(unchecked.topk_weights, found.topk_weights)


@pytest.mark.parametrize("name", SPECS)
def test_route_is_batch_invariant(name):
    spec = SPECS[name]
    logits, bias = logits_for(tokens=33), bias_for(spec)
    whole = route(logits, spec, bias=bias)
    alone = [route(row[None], spec, bias=bias) for row in logits]
    assert torch.equal(whole.topk_ids, torch.cat([r.topk_ids for r in alone]))
    assert torch.equal(whole.topk_weights, torch.cat([r.topk_weights for r in alone]))


@pytest.mark.parametrize(
    ("score", "pairs"),
    [
        ("sqrt_softplus", [(0.0, 0.832554611), (1.0, 1.145976303), (-3.0, 0.220425388)]),
        ("sigmoid", [(0.0, 0.5)]),
    ],
)
def test_route_score_worked_examples(score, pairs):
    logits = torch.tensor([[x for x, _ in pairs]])
    found = route(logits, RoutingSpec(top_k=len(pairs), score=score, renormalize=False))
    want = sorted((y for _, y in pairs), reverse=True)
    assert found.topk_weights[0].tolist() == pytest.approx(want, rel=6e-8)


def test_route_bias_selects_but_never_weighs():
    logits, bias = torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([0.0, 0.0, 0.0, 9.0])
    spec = RoutingSpec(top_k=2, score="sigmoid", renormalize=False, correction_bias=True)
    found = route(logits, spec, bias=bias)
    assert found.topk_ids.tolist() == [[3, 0]]
    assert found.topk_weights[0].tolist() == pytest.approx([1 / (1 + math.e), 1 / (1 + math.exp(-2))], rel=1e-6)


def test_route_adds_eps_to_weight_sum():
    logits = torch.zeros(1, 4)
    spec = RoutingSpec(top_k=2, score="sigmoid", renormalize_eps=1.0, scale=4.0)
    assert route(logits, spec).topk_weights.tolist() == [[1.0, 1.0]]


def test_route_group_score_decides():
    # The best single expert stands in group 0, the best pair in group 1.
    logits = torch.tensor([[3.0, -3.0, 1.0, 1.0]])
    spec = RoutingSpec(top_k=1, score="sigmoid", groups=2, group_score="max")
    assert route(logits, spec).topk_ids.item() == 0
    assert route(logits, replace(spec, group_score="top2_sum")).topk_ids.item() == 2


@pytest.mark.parametrize("experts", [16, 17, 128, 512])
@pytest.mark.parametrize("score", ["softmax", "topk_softmax", "sigmoid", "sqrt_softplus"])
def test_route_tied_scores_take_lower_id(experts, score):
    spec = RoutingSpec(top_k=8, score=score)
    assert route(torch.full((9, experts), 0.3), spec).topk_ids.tolist() == [list(range(8))] * 9
    levels = torch.randint(0, 3, (40, experts), generator=torch.Generator().manual_seed(0)).float()
    want = torch.stack([torch.tensor(judge(row, replace(spec, score="topk_softmax"))[0]) for row in levels.tolist()])
    assert torch.equal(route(levels, spec).topk_ids, want)


@pytest.mark.parametrize("score", ["sigmoid", "sqrt_softplus", "softmax"])
def test_route_ties_take_the_lower_id(score):
    spec = RoutingSpec(top_k=5, score=score, correction_bias=True)
    logits = torch.full((7, 67), 1.2345)
    assert route(logits, spec, bias=torch.full((67,), -0.5)).topk_ids.tolist() == [[0, 1, 2, 3, 4]] * 7


def test_route_negative_zero_ties_with_zero():
    found = route(torch.tensor([[-0.0, 0.0, -0.0]]), RoutingSpec(top_k=3))
    assert found.topk_ids.tolist() == [[0, 1, 2]]


def test_route_group_ties_take_lower_group():
    spec = replace(V3, correction_bias=False)
    assert route(torch.zeros(3, 16), spec).topk_ids.tolist() == [[0, 1, 2, 3]] * 3
    logits = torch.zeros(1, 16)
    logits[0, 12:] = 1.0
    assert route(logits, replace(spec, top_k=6)).topk_ids.tolist() == [[12, 13, 14, 15, 0, 1]]


def test_route_masked_groups_below_negative_scores():
    # All biased scores are negative: a mask with 0 instead of -inf would choose masked experts.
    bias = torch.full((8,), -10.0)
    bias[:4] += 1
    spec = RoutingSpec(top_k=4, score="sigmoid", groups=2, correction_bias=True)
    assert sorted(route(torch.zeros(1, 8), spec, bias=bias).topk_ids[0].tolist()) == [0, 1, 2, 3]
    # A bias of -inf still ranks above a masked group, though the masked ids are lower.
    bias = torch.tensor([-10.0] * 4 + [1.0] + [-torch.inf] * 3)
    assert route(torch.zeros(1, 8), spec, bias=bias).topk_ids[0].tolist() == [4, 5, 6, 7]


def test_route_orders_saturated_scores_by_logit():
    logits = torch.tensor([[20.0, 30.0, 25.0]])  # float32 sigmoid: 1 for all of them
    spec = RoutingSpec(top_k=2, score="sigmoid", renormalize=False)
    found = route(logits, spec)
    assert found.topk_ids.tolist() == [[1, 2]]
    assert found.topk_weights.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("name", SPECS)
def test_route_nan_rows_marked_or_refused(name):
    spec = SPECS[name]
    logits, bias = logits_for(), bias_for(spec)
    clean = route(logits, spec, bias=bias)
    bad = logits.clone()
    bad[5, 19], bad[11] = torch.nan, torch.nan
    found = route(bad, spec, bias=bias)
    gone = torch.zeros(40, dtype=torch.bool)
    gone[[5, 11]] = True
    assert (found.topk_ids[gone] == -2).all()
    assert found.topk_weights[gone].isnan().all()
    assert torch.equal(found.topk_ids[~gone], clean.topk_ids[~gone])
    assert torch.equal(found.topk_weights[~gone], clean.topk_weights[~gone])
    with raises_with(RoutingError, "token 5", "2", "40", "NaN"):
        route(bad, spec, bias=bias, checked=True)


# Plain code, as a model's own router would be: what it makes of infinities.
PLAIN = {
    "softmax": lambda row: torch.softmax(row, -1),
    "sigmoid": torch.sigmoid,
    "sqrt_softplus": lambda row: torch.nn.functional.softplus(row).sqrt(),
}


@pytest.mark.parametrize("score", [*PLAIN, "topk_softmax"])
@pytest.mark.parametrize("renormalize", [False, True])
def test_route_infinite_logits_match_plain_code(score, renormalize):
    spec = RoutingSpec(top_k=3, score=score, renormalize=renormalize)
    logits = logits_for(tokens=5)
    logits[0, 3], logits[1, 4], logits[2, ::2], logits[3] = torch.inf, -torch.inf, -torch.inf, -torch.inf
    found = route(logits, spec)
    values, ids = logits.double().topk(3)
    if score == "topk_softmax":
        wanted = torch.softmax(values, 1)
    else:
        wanted = PLAIN[score](logits.double()).gather(1, ids)
        wanted = wanted / wanted.sum(1, keepdim=True) if renormalize else wanted
        if score != "softmax":
            wanted[3] = 0.0  # so is a sum of 0
    torch.testing.assert_close(found.topk_weights.double(), wanted, rtol=1e-6, atol=0, equal_nan=True)
    assert torch.equal(found.topk_ids[[1, 2, 4]], ids[[1, 2, 4]])
    lost = ~wanted.isfinite().all(dim=1)
    assert lost.tolist() == [score != "sigmoid", False, False, "softmax" in score, False]
    if lost.any():
        with raises_with(RoutingError, "token 0", f"{int(lost.sum())} of 5"):
            route(logits, spec, checked=True)
    else:
        assert torch.equal(route(logits, spec, checked=True).topk_ids, found.topk_ids)


@pytest.mark.parametrize("name", SPECS)
def test_route_masked_experts(name):
    """A logit of -inf masks an expert, which is how models do it."""
    spec = SPECS[name]
    logits, bias = logits_for(tokens=9), bias_for(spec)
    if bias is not None:
        bias = bias * 0.01
    masked = logits.clone()
    masked[:, 5] = -torch.inf
    found = route(masked, spec, bias=bias, checked=True)
    lowest = logits.clone()
    lowest[:, 5] = -1e30
    wanted = route(lowest, spec, bias=bias)
    assert torch.equal(found.topk_ids, wanted.topk_ids)
    assert torch.equal(found.topk_weights, wanted.topk_weights)


def test_route_zero_sum_gives_zero_weights():
    found = route(torch.full((2, 4), -1e30), RoutingSpec(top_k=2, score="sigmoid"))
    assert found.topk_ids.tolist() == [[0, 1]] * 2
    assert found.topk_weights.tolist() == [[0.0, 0.0]] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_route_reads_any_floating_dtype(dtype):
    logits, spec = logits_for().to(dtype), SPECS["mixtral"]
    found, want = route(logits, spec), route(logits.float(), spec)
    assert torch.equal(found.topk_ids, want.topk_ids)
    assert torch.equal(found.topk_weights, want.topk_weights)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("checked", [False, True])
def test_route_id_dtypes(name, checked):
    logits, bias = logits_for(), bias_for(SPECS[name])
    wide = route(logits, SPECS[name], bias=bias, checked=checked)
    found = route(logits, replace(SPECS[name], id_dtype="int32"), bias=bias, checked=checked)
    assert (wide.topk_ids.dtype, found.topk_ids.dtype) == (torch.int64, torch.int32)
    assert torch.equal(found.topk_ids.long(), wide.topk_ids)
    assert torch.equal(found.topk_weights, wide.topk_weights)
    assert route(logits.fill_(torch.nan), replace(SPECS[name], id_dtype="int32"), bias=bias).topk_ids.unique() == -2


def test_unsigned_id_dtype_refused():
    with raises_with(SpecError, "id_dtype", "'uint32'", "int64", "-1"):
        RoutingSpec(top_k=1, id_dtype="uint32")


@pytest.mark.parametrize("change", [{"top_k": 2.0}, {"top_k": 0}, {"top_k": "2"}, {"groups": 1.5}, {"topk_groups": 0}])
def test_counts_are_whole_numbers(change: dict[str, object]) -> None:
    (name, value), *_ = change.items()
    with raises_with(SpecError, name, repr(value), "1"):
        RoutingSpec(**{"top_k": 2, **change})  # type: ignore[arg-type]
    with raises_with(SpecError, "num_experts", "8.0", "1"):
        MoESpec(hidden_size=64, intermediate_size=32, num_experts=8.0, routing=RoutingSpec(top_k=2))  # type: ignore[arg-type]


# The others have no name: softmax with groups or a bias, sigmoid with groups and no bias, groups by their maximum.
METHODS = {
    "olmoe": "default",
    "mixtral": "renormalize_naive",
    "gpt_oss": "renormalize",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v4": "deepseek_v4",
    "llama4": "llama4",
}


@pytest.mark.parametrize("name", SPECS)
def test_rule_names_match_engines(name):
    assert SPECS[name].method == METHODS.get(name, "unspecified")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"groups": 1, "topk_groups": 1}, "deepseek_v3"),
        ({"scale": 1.0, "top_k": 8, "renormalize_eps": 0.0}, "deepseek_v3"),
        ({"correction_bias": False, "groups": 1, "topk_groups": 1}, "sigmoid_renorm"),
        ({"correction_bias": False, "groups": 1, "topk_groups": 1, "renormalize": False}, "sigmoid"),
        ({"renormalize": False}, "unspecified"),
        ({"score": "softmax"}, "unspecified"),
        ({"weight_on_input": True}, "unspecified"),
        ({"hash_routing": True}, "unspecified"),
        ({"expert_scale": True}, "unspecified"),
        ({"renormalize_floor": 1e-3}, "unspecified"),
    ],
)
def test_unnamed_routing_rules_are_unspecified(change, name):
    assert replace(V3, **change).method == name
    assert replace(SPECS["llama4"], top_k=2).method == "unspecified"
    assert RoutingSpec(top_k=2, score="sparsemixer", renormalize=False).method == "unspecified"


def test_route_no_tokens():
    for spec in SPECS.values():
        found = route(torch.empty(0, 20), spec, bias=bias_for(spec), checked=True)
        assert found.topk_ids.shape == found.topk_weights.shape == (0, spec.top_k)


def test_route_nan_bias():
    bias = torch.zeros(20)
    bias[7] = torch.nan
    found = route(logits_for(), V3, bias=bias)
    assert (found.topk_ids == -2).all()
    assert found.topk_weights.isnan().all()
    with raises_with(RoutingError, "expert 7", "20", "NaN"):
        route(logits_for(), V3, bias=bias, checked=True)


HASH = RoutingSpec(top_k=2, score="sqrt_softplus", renormalize_eps=1e-20, scale=1.5, hash_routing=True)
TABLE = torch.tensor([[3, 0], [1, 2], [0, 4], [4, 3]])


def test_route_hash_ids_and_weights():
    logits = logits_for(tokens=5, experts=5)
    tokens = torch.tensor([2, 0, 3, 3, 1])
    found = route(logits, HASH, token_ids=tokens, hash_table=TABLE, checked=True)
    assert torch.equal(found.topk_ids, TABLE[tokens])
    for t, row in enumerate(logits.double().tolist()):
        picked = [scores_of(row, "sqrt_softplus")[e] for e in TABLE[tokens[t]].tolist()]
        want = [1.5 * p / sum(picked) for p in picked]
        assert found.topk_weights[t].tolist() == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint16, torch.uint32])
def test_route_hash_integer_dtypes(dtype):
    logits, tokens = logits_for(tokens=4, experts=5), torch.arange(4)
    found = route(logits, HASH, token_ids=tokens.to(dtype), hash_table=TABLE.to(dtype), checked=True)
    assert torch.equal(found.topk_ids, TABLE)


def test_route_hash_softmax_of_the_selected():
    spec = RoutingSpec(top_k=2, score="topk_softmax", renormalize=False, hash_routing=True)
    table = torch.tensor([[0, 2], [1, -1], [-1, -1]])
    found = route(torch.tensor([[1.0, 5.0, 1.0]] * 3), spec, token_ids=torch.arange(3), hash_table=table)
    assert found.topk_weights.tolist() == [[0.5, 0.5], [1.0, 0.0], [0.0, 0.0]]
    assert torch.equal(found.topk_ids, table)


def test_route_hash_bad_token_ids():
    logits, tokens = logits_for(tokens=4, experts=5), torch.tensor([0, 4, -1, 1 << 40])
    found = route(logits, HASH, token_ids=tokens, hash_table=TABLE)
    assert found.topk_ids.tolist() == [[3, 0], [-2, -2], [-2, -2], [-2, -2]]
    assert found.topk_weights[0].isfinite().all()
    assert found.topk_weights[1:].isnan().all()
    with raises_with(RoutingError, "token 1", "4", "0", "3"):
        route(logits, HASH, token_ids=tokens, hash_table=TABLE, checked=True)


@pytest.mark.parametrize(("entry", "text"), [(5, "slot 1 is 5, allowed: 0 to 4"), (-2, "is -2")])
def test_route_hash_bad_table_entries(entry, text):
    table = TABLE.clone()
    table[0, 1] = entry
    logits, tokens = logits_for(tokens=4, experts=5), torch.arange(4)
    found = route(logits, HASH, token_ids=tokens, hash_table=table)
    assert found.topk_ids[0].tolist() == [3, -2]
    assert found.topk_weights[0].isnan().tolist() == [False, True]
    assert torch.equal(found.topk_ids[1:], TABLE[1:])
    assert found.topk_weights[1:].isfinite().all()
    with pytest.raises(RoutingError, match=text):
        route(logits, HASH, token_ids=tokens, hash_table=table, checked=True)


def test_route_hash_takes_an_expert_twice():
    table = TABLE.clone()
    table[0, 1] = 3
    logits, tokens = logits_for(tokens=4, experts=5), torch.arange(4)
    found = route(logits, HASH, token_ids=tokens, hash_table=table)
    assert found.topk_ids[0].tolist() == [3, 3]
    assert found.topk_weights[0].tolist() == [0.75, 0.75]
    with pytest.raises(RoutingError, match="earlier slot"):
        route(logits, HASH, token_ids=tokens, hash_table=table, checked=True)


def test_route_refusals():
    logits, tokens = logits_for(), torch.zeros(40, dtype=torch.int64)
    mixtral = SPECS["mixtral"]
    cases = [
        ("correction_bias needs", lambda: route(logits, V3)),
        (r"shape \(20,\)", lambda: route(logits, V3, bias=torch.zeros(19))),
        ("correction_bias is False", lambda: route(logits, mixtral, bias=torch.zeros(20))),
        ("hash_routing is False", lambda: route(logits, mixtral, hash_table=TABLE)),
        ("token_ids is None", lambda: route(logits, HASH, hash_table=TABLE)),
        ("hash_table is None", lambda: route(logits, HASH, token_ids=tokens)),
        ("bias=None", lambda: route(logits, HASH, bias=torch.zeros(20), token_ids=tokens, hash_table=TABLE)),
        ("one for each logits row", lambda: route(logits, HASH, token_ids=tokens[1:], hash_table=TABLE)),
        ("top_k=2", lambda: route(logits, HASH, token_ids=tokens, hash_table=TABLE[:, :1])),
        ("token_ids: found", lambda: route(logits, HASH, token_ids=tokens.float(), hash_table=TABLE)),
        (r"\[T, E\]", lambda: route(logits[0], mixtral)),
        ("floating", lambda: route(tokens[None], mixtral)),
        ("top_k=2 to", lambda: route(logits[:, :1], mixtral)),
        ("multiple of groups=4", lambda: route(logits[:, :18], SPECS["deepseek_v2"])),
        ("selected groups hold", lambda: route(logits[:, :8], SPECS["deepseek_v2"])),
    ]
    for text, call in cases:
        with pytest.raises(InputError, match=text):
            call()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32])
@pytest.mark.parametrize("checked", [False, True])
def test_caller_routing_passes_unchanged(dtype, checked):
    ids, weights = torch.tensor([[1, 0, 3]]).to(dtype), torch.ones(1, 3, dtype=torch.bfloat16)
    found = given_routing(ids, weights, 4, checked=checked)
    assert found.topk_ids is ids
    assert found.topk_weights is weights


@pytest.mark.parametrize(
    ("ids", "weights", "text"),
    [
        ([3, 5, 0], [1.0, 1.0, 1.0], r"topk_ids: token 1, slot 1 is 5, allowed: 0 to 4"),
        ([3, -2, 0], [1.0, 1.0, 1.0], r"topk_ids: token 1, slot 1 is -2, allowed: 0 to 4, or -1"),
        ([3, 0, 3], [1.0, 1.0, 1.0], r"token 1, slot 2 is 3, allowed: each id once"),
        ([1, 1, 1], [1.0, 2.0, 3.0], r"token 1, slot 1 is 1, allowed: each id once"),
        ([3, 1, 0], [1.0, 1.0, torch.inf], r"topk_weights: token 1, slot 2 is inf, allowed: a finite"),
        ([3, 1, 0], [1.0, 1e300, 1.0], r"topk_weights: token 1, slot 1 is 1e\+300, allowed: a finite"),
        ([3, 1, 0], [torch.nan, 1.0, 1.0], r"topk_weights: token 1, slot 0 is nan"),
        ([-1, -1, 0], [1.0, torch.nan, 1.0], None),
    ],
)
def test_bad_caller_routing_refused_when_checked(ids, weights, text):
    both = torch.tensor([[2, 4, 1], ids]), torch.tensor([[0.1, 0.2, 0.3], weights], dtype=torch.float64)
    assert given_routing(*both, 5).topk_ids is both[0]
    if text is None:
        assert given_routing(*both, 5, checked=True).topk_ids is both[0]
        return
    with pytest.raises(RoutingError, match=text):
        given_routing(*both, 5, checked=True)


def test_given_routing_refusals():
    ids, weights = torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2)
    for args in [
        (weights, weights),
        (ids, ids),
        (ids, weights[:, :1]),
        (ids[0], weights[0]),
        (ids.bool(), weights),
    ]:
        with pytest.raises(InputError, match="topk_"):
            given_routing(*args, 4)
    with pytest.raises(InputError, match="num_experts"):
        given_routing(ids, weights, 0)


def test_route_custom_passes_and_validates():
    x, logits = torch.randn(4, 3), logits_for(tokens=4)
    spec = RoutingSpec(top_k=2, scale=7.0)

    def fn(given, scores, top_k):
        assert given is x
        assert scores is logits
        return torch.tensor([[1, 2], [19, 20], [3, 3], [0, -1]]), torch.full((4, top_k), 0.25)

    found = route_custom(fn, x, logits, spec)
    assert found.topk_ids.tolist() == [[1, 2], [19, 20], [3, 3], [0, -1]]
    assert (found.topk_weights == 0.25).all()
    with raises_with(RoutingError, "token 1", "slot 1", "20", "19"):
        route_custom(fn, x, logits, spec, checked=True)
    with raises_with(InputError, "torch.float32", "topk_ids"):
        route_custom(lambda *_: (torch.ones(4, 3), torch.ones(4, 3)), x, logits, spec)
    with raises_with(InputError, "float32", "int64", "topk_ids", "topk_weights"):
        route_custom(lambda *given: fn(*given)[::-1], x, logits, spec)
    with pytest.raises(InputError, match="returned a Tensor"):
        route_custom(lambda *given: fn(*given)[0], x, logits, spec)
    with raises_with(InputError, "topk_weights"):
        route_custom(lambda *given: (fn(*given)[0], torch.ones(4, 2, requires_grad=True)), x, logits, spec)
    with raises_with(InputError, "(3, 3)", "[4, D]"):
        route_custom(fn, x[1:], logits, spec)
    routing = route_custom(lambda _, none, k: pair_of(*fn_of(none, k)), x, None, spec, num_experts=21)
    assert routing.topk_ids.tolist() == [[20, 2]] * 4
    with raises_with(RoutingError, "0", "19"):
        route_custom(lambda _, none, k: fn_of(none, k), x, None, spec, num_experts=20, checked=True)
    with pytest.raises(InputError, match="swapped"):
        given_routing(torch.ones(4, 2), torch.zeros(4, 2, dtype=torch.int64), 20)


def pair_of(ids, weights):
    return Routing(topk_ids=ids, topk_weights=weights)


def fn_of(logits, top_k):
    assert logits is None
    return torch.tensor([[20, 2]] * 4), torch.ones(4, top_k)


class _Config:
    def __init__(self, **facts):
        self.__dict__.update(facts)


def _published(family, spec, experts, hidden):
    transformers = pytest.importorskip("transformers")
    facts = {
        "num_experts_per_tok": spec.top_k, "num_local_experts": experts, "num_experts": experts,
        "hidden_size": hidden, "routed_scaling_factor": spec.scale, "n_group": spec.groups,
        "topk_group": spec.topk_groups, "norm_topk_prob": spec.renormalize, "scoring_func": "sqrtsoftplus",
        "topk_method": "group_limited_greedy",
    }  # fmt: skip
    module, name = family
    source = __import__(f"{transformers.__name__}.models.{module}.modeling_{module}", fromlist=[name])
    return getattr(source, name)(_Config(**facts))


FAMILIES = [
    (("deepseek_v3", "DeepseekV3TopkRouter"), V3),
    (("deepseek_v4", "DeepseekV4TopKRouter"), replace(SPECS["deepseek_v4"], top_k=4)),
    (("qwen3_moe", "Qwen3MoeTopKRouter"), RoutingSpec(top_k=6)),
    (("gpt_oss", "GptOssTopKRouter"), SPECS["gpt_oss"]),
]


@pytest.mark.parametrize(("family", "spec"), FAMILIES, ids=lambda v: v[0] if isinstance(v, tuple) else "")
def test_route_agrees_with_the_published_router(family, spec):
    experts, hidden = 32, 24
    router = _published(family, spec, experts, hidden)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        router.weight.copy_(torch.randn(experts, hidden, generator=generator))
        bias = None
        if spec.correction_bias:
            bias = torch.randn(experts, generator=generator) * 0.3
            router.e_score_correction_bias.copy_(bias)
        if hasattr(router, "bias") and router.bias is not None:
            router.bias.copy_(torch.randn(experts, generator=generator))
        logits, weights, ids = router(torch.randn(50, hidden, generator=generator))
    found = route(logits, spec, bias=bias, checked=True)
    ids, order = ids.sort(dim=1)
    mine, mine_order = found.topk_ids.sort(dim=1)
    assert torch.equal(mine, ids)
    torch.testing.assert_close(found.topk_weights.gather(1, mine_order), weights.gather(1, order), rtol=2e-6, atol=1e-9)


def test_sparsemixer_picks_two() -> None:
    spec = RoutingSpec(top_k=2, score="sparsemixer", renormalize=False, jitter=0.1)
    logits = torch.tensor([[2.0, 1.9, 1.0, -3.0], [-1.0, -1.1, -4.0, -1.15]])
    found = route(logits, spec)
    assert found.topk_ids.tolist() == [[0, 1], [0, 1]]
    # row 0: 1.0 is (2 - 1) / 2 = 0.5 away from 2, more than 0.2; alone with 1.9 the second weight is 1
    first = torch.softmax(torch.tensor([2.0, 1.9]), 0)[0]
    assert found.topk_weights[0].tolist() == pytest.approx([first.item(), 1.0])
    # row 1: |s| is what the distance is divided by; -1.1 and -1.15 are near -1, -4 is not
    near = torch.softmax(torch.tensor([-1.0, -1.1, -1.15]), 0)[0]
    second = torch.softmax(torch.tensor([-1.1, -1.15]), 0)[0]
    assert found.topk_weights[1].tolist() == pytest.approx([near.item(), second.item()])
    lost = route(torch.tensor([[float("nan"), 1.0, 0.0, 0.0]]), spec)
    assert lost.topk_ids.tolist() == [[-2, -2]]
    assert lost.topk_weights.isnan().all()
    for row in ([torch.inf, 1.0, 0.0, 0.0], [-torch.inf] * 4):
        assert route(torch.tensor([row]), spec).topk_weights.isnan().any()
    masked = route(torch.tensor([[-torch.inf, 1.9, 2.0, -torch.inf]]), spec, checked=True)
    assert masked.topk_ids.tolist() == [[2, 1]]


@pytest.mark.parametrize("change", [{"top_k": 3}, {"renormalize": True}, {"correction_bias": True}, {"jitter": 0.0}])
def test_sparsemixer_stands_alone(change: dict[str, object]) -> None:
    with pytest.raises(SpecError, match=r"sparsemixer|jitter"):
        RoutingSpec(**{"top_k": 2, "score": "sparsemixer", "renormalize": False, **change})  # type: ignore[arg-type]


def test_renormalize_floor_bounds_the_sum() -> None:
    logits = torch.tensor([[3.0, 2.0, 0.0]])
    plain = route(logits, RoutingSpec(top_k=1, score="sigmoid", renormalize=True))
    floored = route(logits, RoutingSpec(top_k=1, score="sigmoid", renormalize=True, renormalize_floor=2.0))
    assert plain.topk_weights.item() == 1.0
    assert floored.topk_weights.item() == pytest.approx(torch.sigmoid(torch.tensor(3.0)).item() / 2)
    floor = RoutingSpec(top_k=2, score="sigmoid", renormalize=True, renormalize_floor=2.0)
    assert route(torch.tensor([[3.0, torch.nan, 0.0]]), floor).topk_weights.isnan().all()


def test_expert_scale_is_required_and_last() -> None:
    spec = RoutingSpec(top_k=2, expert_scale=True, scale=3.0)
    logits, factors = torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([10.0, 20.0, 30.0])
    plain = route(logits, RoutingSpec(top_k=2, scale=3.0))
    scaled = route(logits, spec, expert_scale=factors)
    assert torch.equal(scaled.topk_weights, plain.topk_weights * torch.tensor([[30.0, 10.0]]))
    bad = torch.tensor([10.0, 20.0, torch.nan])
    both = torch.cat([logits, torch.tensor([[1.0, 0.0, -2.0]])])
    assert route(both, spec, expert_scale=bad).topk_weights.isnan().any(dim=1).tolist() == [True, False]
    with raises_with(RoutingError, "token 0", "1", "2"):
        route(both, spec, expert_scale=bad, checked=True)
    for wrong in (None, factors[:2]):
        with pytest.raises(InputError, match="expert_scale"):
            route(logits, spec, expert_scale=wrong)
    with pytest.raises(InputError, match="expert_scale"):
        route(logits, RoutingSpec(top_k=2), expert_scale=factors)
