"""Passes over ranks in one kernel, interpreted: virtual ranks phase by phase, and processes in one launch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from collegium import DeviceFacts, InputError, Limits, MoESpec, Overrides, Problem, RankError, RoutingSpec, plan
from collegium.experts.reference import Reference
from collegium.kernels.enums import PHASE_COMBINE, PHASE_COMPUTE, PHASE_PUBLISH
from collegium.ops.buffers import sizes
from collegium.parallel.peers_in_torch import raise_status
from collegium.parallel.placement import linear
from collegium.pipelines import mega
from collegium.pipelines.mega import MAX_TOKENS, Mega
from collegium.pipelines.split import Split
from collegium.testing.compare import relative_error
from mega_ranks import CASES, MOST, Ranks, crowded, deserted, encoded, given, planned, together
from raising import assert_values, raises_with
from ranks import run_ranks
from rough_tokens import same
from split_layers import EXPERTS

if torch.cuda.is_available():
    pytest.skip("tests/gpu makes these comparisons on the device", allow_module_level=True)
pytest.importorskip("triton")


TURNS = ((3, 1, 0, 6), (0, 5, 2, 1), (1, 0, 0, 0), (24, 3, 9, 4))
GPU = DeviceFacts(kind="cuda", name="H200", capability=(9, 0), memory=140 << 30, sms=132, peers=8)


@pytest.mark.parametrize(
    ("index", "world"),
    [(0, 2), (1, 2), (3, 2), *(pytest.param(*own, marks=pytest.mark.exhaustive) for own in ((2, 4), (4, 3), (5, 2)))],
)
def test_passes_equal_one_rank_bitwise(index: int, world: int) -> None:
    ranks = Ranks(CASES[index], world)
    for table in ranks.tables:
        table.recording.fill_(1)
    counted = torch.zeros(world, EXPERTS, dtype=torch.int64)
    for turn, counts in enumerate(TURNS):
        if max(counts[:world]) == 0:
            continue
        inputs = ranks.each(lambda r, n=counts, t=turn: given(CASES[index], 10 * t + r, n[r], hot=t == 3))
        for rank, (out, own) in enumerate(zip(ranks.everybody(inputs), inputs, strict=True)):
            assert same(out, ranks.wanted(own)), (counts, rank)
            ids = own[1].topk_ids
            counted[rank] += torch.bincount(ids[(ids >= 0) & (ids < EXPERTS)], minlength=EXPERTS)
    assert [table.load.tolist() for table in ranks.tables] == counted.tolist()


@pytest.mark.parametrize(
    ("index", "wide"),
    [
        (0, 0),
        (4, mega.MIN_TILES_PER_SM),
        *(
            pytest.param(*own, marks=pytest.mark.exhaustive)
            for own in ((0, mega.MIN_TILES_PER_SM), (4, 0), (5, 0), (5, mega.MIN_TILES_PER_SM))
        ),
    ],
)
def test_all_tile_sizes_equal_one_rank(index: int, wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mega, "MIN_TILES_PER_SM", wide)
    ranks, heights = Ranks(CASES[index], 2), set[Any]()
    for tokens in (6, 20, 50):
        variants = ranks.pipelines[0].variants(tokens)
        heights |= {height for _, height, *_ in variants}
        assert {rows for _, _, rows, _ in variants} == {64 if wide else 128}
        inputs = ranks.each(lambda r, n=tokens: given(CASES[index], r, n - 5 * r, hot=r == 1))
        for out, own in zip(ranks.everybody(inputs), inputs, strict=True):
            assert same(out, ranks.wanted(own)), tokens
    assert heights == ({16, 32, 64} if CASES[index].weights == "mxfp4" else {16, 32})


@pytest.mark.parametrize("index", [1, *(pytest.param(own, marks=pytest.mark.exhaustive) for own in (3, 5))])
def test_layers_are_close_to_the_truth(index: int) -> None:
    case, cpu = CASES[index], torch.device("cpu")
    ranks, other = Ranks(case, 2), Ranks(case, 2, swapped=True)
    inputs = ranks.each(lambda r: given(case, r, 9))
    made = planned(case, None)
    truth = replace(
        ranks.one.parts,
        experts=Reference().pack(encoded(case, cpu), replace(made.problem, activation_format="fp32").routed),
    )
    for _, routing in inputs:
        routing.topk_ids[:] = routing.topk_ids.clamp(-1, EXPERTS - 1)
    for found, swapped, (x, routing) in zip(ranks.everybody(inputs), other.everybody(inputs), inputs, strict=True):
        wanted = Split(parts=truth)(x, routing, dtype=torch.float32, shared=lambda x=x: x)
        assert relative_error(found - x, wanted - x) < 0.06
        assert relative_error(swapped - x, wanted - x) > 0.3


def test_passes_ignore_stale_buffers() -> None:
    ranks = Ranks(CASES[0], 2)
    first = ranks.each(lambda r: given(CASES[0], r, 20, hot=True))
    ranks.everybody(first)
    inputs = ranks.each(lambda r: given(CASES[0], 5 + r, 2))
    ranks.begin([2, 2])
    outs = [torch.full(x.shape, torch.inf) for x, _ in inputs]
    # What ran before left its counters, lists and rows.
    for block in ranks.blocks:
        block[2048:] = torch.randint(0, 256, block[2048:].shape, generator=torch.Generator().manual_seed(1)).byte()
    for phase in (PHASE_PUBLISH, PHASE_COMPUTE, PHASE_COMBINE):
        for rank, own in enumerate(inputs):
            ranks.phase(rank, own, outs[rank], (phase, phase))
    for out, own in zip(outs, inputs, strict=True):
        assert same(out, ranks.wanted(own))


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_processes_equal_one_rank(world: int) -> None:
    assert run_ranks(together, world, seconds=400) == [[]] * world


def test_concurrent_programs_wait_for_peers() -> None:
    assert run_ranks(partial(crowded, programs=2), 4, seconds=400) == [[]] * 4


def test_absent_ranks_are_named() -> None:
    first, last = run_ranks(deserted, 2)
    assert first[0] == last[0] == "all NaN True"
    assert first[1].startswith("symm_mem dispatch; ranks (1,); symm_mem dispatch on rank 0: rank 1 did not come within")
    assert last[1].startswith("symm_mem combine; ranks (0,); symm_mem combine on rank 1: rank 0 gave up before")
    assert first[2] == last[2] == "renewed True"


def test_mismatched_call_is_reported() -> None:
    ranks = Ranks(CASES[0], 2)
    inputs = ranks.each(lambda r: given(CASES[0], r, 3))
    ranks.begin([3, 3], layers=(5, 6), seconds=5e-6)
    outs = [torch.full(x.shape, torch.inf) for x, _ in inputs]
    for phase in (PHASE_PUBLISH, PHASE_COMPUTE, PHASE_COMBINE):
        for rank, own in enumerate(inputs):
            ranks.phase(rank, own, outs[rank], (phase, phase))
    assert all(bool(out.isnan().all()) for out in outs)
    for rank in (0, 1):
        with raises_with(RankError, f"rank {1 - rank}", "3 tokens, top-3", "layer"):
            raise_status(ranks.heads, (0, 1), rank)
    # Whoever gave up stays away until the block is renewed, and says so at once.
    again = ranks.everybody(inputs)
    assert all(bool(out.isnan().all()) for out in again)


@pytest.mark.parametrize("index", [0, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_full_passes_equal_one_rank(index: int) -> None:
    ranks = Ranks(CASES[index], 2, most=9)
    for hot in (False, True):
        inputs = ranks.each(lambda r, h=hot: given(CASES[index], r, 9, hot=h))
        for out, own in zip(ranks.everybody(inputs), inputs, strict=True):
            assert same(out, ranks.wanted(own)), hot


def test_passes_fit_in_planned_memory() -> None:
    for case in CASES:
        ranks = Ranks(case, 4)
        held = {region.name: region.nbytes for region in ranks.places.regions}
        for tokens in range(1, MOST + 1):
            pipeline: Any = ranks.pipelines[0]
            shape = pipeline._shape(tokens, case.top_k)
            for name, size in sizes(shape.buffers(pipeline._block_t(shape), torch.bfloat16)).items():
                assert size <= held[name], (name, tokens)


def test_mega_refusals_give_reasons() -> None:
    rule = RoutingSpec(top_k=2)
    spec = MoESpec(hidden_size=64, intermediate_size=64, num_experts=64, routing=rule, weight_format="mxfp4")

    def why(
        device: DeviceFacts = GPU,
        act: str = "fp8_token",
        most: int = 64,
        world: int = 2,
        wish: Any = (),
        **changes: Any,
    ) -> str:
        placed = None if world == 1 else linear(64, 0, world)
        asked = Problem(spec=replace(spec, **changes), device=device, placement=placed, limits=Limits(max_tokens=most))
        made = plan(asked, Overrides(activation_format=act, **dict(wish)))
        assert made.pipelines[-1] == "split"
        return next(refusal.reason for refusal in made.refusals if refusal.name == "mega")

    slow = ("from {}", "to {} tokens", "{} ranks", "{} weights")

    def allowed(*sizes: object) -> list[str]:
        return [text.format(size) for text, size in zip(slow, sizes, strict=True)]

    four, eight = allowed(7168, 8, 2, "mxfp4"), allowed(4096, 128, 2, "fp8_block")
    assert_values(why(), *four, "found 64 and 64", "Overrides(pipeline='mega')")
    assert_values(why(most=9, hidden_size=7168), *four, "found 7168 and 9")
    blocks: dict[str, Any] = {"act": "fp8_group128", "weight_format": "fp8_block"}
    assert_values(why(**blocks, most=129, hidden_size=4096), *eight, "found 4096 and 129")
    assert_values(why(**blocks, most=8, hidden_size=2048), *eight, "found 2048 and 8")
    # Over four ranks: up to 128 tokens in four bits, and up to 6 rows of an expert in eight.
    many = replace(GPU, peers=4)
    reason = why(many, most=129, world=4, hidden_size=7168)
    assert_values(reason, *allowed(7168, 128, 4, "mxfp4"), "found 7168 and 129")
    blocks |= {"world": 4, "hidden_size": 4096}
    assert_values(why(many, **blocks, most=49), *allowed(4096, 48, 4, "fp8_block"), "found 4096 and 49")
    assert_values(why(DeviceFacts(kind="cpu"), "fp32"), "device", "cpu")
    assert_values(why(world=1), "dispatcher", "local")
    assert_values(why(wish={"dispatcher": "all_to_all"}), "dispatcher", "all_to_all")
    assert_values(why(act="fp8_group128"), "mxfp4 weights", "fp8_group128", "mxfp4 with fp8_token")
    coded: dict[str, Any] = {"act": "fp8_group128", "weight_format": "fp8_block"}
    assert_values(why(**coded, hidden_size=40), "hidden size is 40", "multiples of 16")
    assert_values(why(weight_format="int4_group"), "int4_group weights", "fp8_token")
    assert_values(why(wish={"kernel": "reference"}), "kernel is reference", "Triton")
    assert_values(why(weight_format="nvfp4"), "nvfp4 weights", "Overrides(pipeline='mega')")
    assert_values(why(replace(GPU, capability=(10, 0))), "sm_100")
    assert_values(why(wish={"combine": "reduced"}), "combine", "reduced")
    for weights, width, most, act, world in (
        ("mxfp4", 7168, 8, "fp8_token", 2), ("fp8_block", 4096, 128, "fp8_group128", 2),
        ("mxfp4", 7168, 128, "fp8_token", 4), ("fp8_block", 4096, 48, "fp8_group128", 4),
    ):  # fmt: skip
        wide = replace(spec, hidden_size=width, weight_format=weights)
        for spare, taken in ((0, "mega"), (1, "split")):
            given = replace(linear(64, 0, world), spare=spare)
            few = Problem(spec=wide, device=many, placement=given, limits=Limits(max_tokens=most))
            assert plan(few, Overrides(activation_format=act)).pipelines == (taken,)
            # What an error tells people to ask for, whatever the plan prefers.
            assert plan(few, Overrides(activation_format=act, pipeline="split")).pipelines == ("split",)
    assert_values(why(most=9999), "9,999 tokens", f"{MAX_TOKENS:,}")
    carried = RoutingSpec(top_k=1, weight_on_input=True, renormalize=False)
    assert_values(why(routing=carried), "router weights", "input")

    asked = Problem(spec=spec, device=GPU, placement=linear(64, 0, 2), limits=Limits(max_tokens=64), graph=True)
    made = plan(asked, Overrides(activation_format="fp8_token", pipeline="mega"))
    assert made.pipelines == ("mega",)
    assert "1 to 64 tokens: mega (" in made.explain()
    assert made.capturable
    assert {"counters", "lists", "experts/rows"} <= {region.name for region in made.regions}


def test_after_expert_is_refused() -> None:
    parts = replace(Ranks(CASES[0], 2).pipelines[0].parts, after_expert=lambda rows: rows)
    with pytest.raises(InputError, match=r"after_expert.*Overrides\(pipeline='split'\)"):
        Mega(parts=parts)
