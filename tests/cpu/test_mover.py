"""Experts move while layers serve: every output keeps its bits, and what arrives damaged is never used."""

from __future__ import annotations

import random
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from collegium import InputError
from collegium.balance.balancer import Balancer
from collegium.balance.checksum import agree_on_checksums, checksum
from collegium.balance.mover import rounds
from collegium.balance.slots import balancedness
from collegium.parallel.rendezvous import timeout_seconds
from moving import (
    by_policy,
    placement,
    random_slots,
    rebalance,
    refused,
    served_while_moving,
    split_layer,
    whole_weights,
)
from raising import assert_values, raises_with
from ranks import error_of, run_ranks


@pytest.mark.parametrize(
    ("world", "times"),
    [(2, 100), pytest.param(2, 880, marks=pytest.mark.exhaustive), pytest.param(4, 120, marks=pytest.mark.exhaustive)],
)
def test_random_rebalances_with_replicas_preserve_bits(world: int, times: int) -> None:
    work = partial(rebalance, recipe="whole", times=times, replicas=True, spoil=50)
    found = run_ranks(work, world, seconds=400)
    for faults, counts in found:
        assert not faults
        assert counts["given_up"] == counts["spoiled"] > 0
    assert sum(counts["moved"] for _, counts in found) > times


@pytest.mark.parametrize(
    ("world", "times", "recipe", "same"),
    [
        (2, 40, "whole", True),
        (2, 9, "fp8_block", False),
        pytest.param(2, 120, "whole", False, marks=pytest.mark.exhaustive),
        pytest.param(4, 24, "whole", False, marks=pytest.mark.exhaustive),
    ],
)
def test_experts_move_under_symmetric_memory(world: int, times: int, recipe: str, same: bool) -> None:
    more = {"dispatcher": "symm_mem", "same": same, "replicas": recipe == "whole", "spoil": 8}
    found = run_ranks(partial(rebalance, recipe=recipe, times=times, **more), world, seconds=200)
    for faults, counts in found:
        assert not faults
        assert counts["given_up"] == counts["spoiled"] > 0
        assert counts["switched"] >= times - counts["spoiled"]


def test_loads_are_counted_while_experts_move() -> None:
    assert run_ranks(partial(served_while_moving, recipes=("whole",), times=6), 2) == [[]] * 2


@pytest.mark.parametrize("recipe", ["bf16", "mxfp4", "fp8_block"])
def test_packed_formats_move_bit_exactly(recipe: str) -> None:
    # Without replicas: see RECIPES.
    for faults, counts in run_ranks(partial(rebalance, recipe=recipe, times=12, replicas=False, spoil=3, every=3), 2):
        assert not faults
        assert counts["switched"] >= 12 - counts["spoiled"]
        assert counts["given_up"] == counts["spoiled"] > 0


@pytest.mark.parametrize(("policy", "dispatcher"), [("greedy", None), ("least_moves", None), ("greedy", "symm_mem")])
def test_policies_balance_loads_of_all_ranks(policy: str, dispatcher: str | None) -> None:
    pytest.importorskip("prometheus_client")
    found = run_ranks(partial(by_policy, policy=policy, dispatcher=dispatcher), 2)
    for faults, loads, before, after, counts, _ in found:
        assert not faults
        assert loads[:2] == [60 * 2 * 12, 60 * 2 * 6]
        assert sum(loads) == 60 * 2 * 12 * 3
        assert balancedness(loads, after) > balancedness(loads, before) + 0.05
        assert counts.switched >= 1
        # The last empty slot of a rank is left for moving.
        assert all(-1 in own for own in after)
    assert found[0][1:4] == found[1][1:4]
    moved = sum(counts.moved for *_, counts, _ in found)
    told = [
        float(line.split()[1]) for *_, text in found for line in text.splitlines() if "moved_experts_total{" in line
    ]
    assert sum(told) == moved > 0


def _served(rank: int) -> tuple[Any, Any]:
    """Return a layer whose five experts are split over two ranks, and whether it still gives the right numbers."""
    weights = whole_weights("whole", 5, 0)
    layer = split_layer("whole", weights, "cpu", placement(5, rank, 2, 1))
    x = torch.randint(-2, 3, (9, 32), generator=torch.Generator().manual_seed(rank)).float()
    logits = torch.randn(9, 5, generator=torch.Generator().manual_seed(rank + 7))
    wanted = split_layer("whole", weights, "cpu", None)(x, router_logits=logits)
    return layer, lambda: torch.equal(layer(x, router_logits=logits), wanted)


WAYS: Any = (((0, 1, 2), (3, 4)), ((3, 4), (0, 1, 2)))


def _asked_meanwhile(rank: int) -> list[str]:
    """Return what goes wrong where experts are asked to move by hand at every call that a policy may be asked at."""
    layer, right = _served(rank)
    looked, faults = list[int](), list[str]()
    balancer = Balancer({"a": layer}, lambda load, slots: looked.append(1), interval=6, every=2)
    for call in range(150):
        if not right():
            faults.append(f"call {call}")
        balancer.step()
        time.sleep(0.001)
        if call % 7 == 3:
            said = error_of(partial(balancer.plan, {"a": WAYS[call // 7 % 2]}))
            if said != "none" and "when idle" not in said:
                faults.append(said)
    if len(looked) < 3 or balancer.counts.switched < 6:
        faults.append(f"{len(looked)} looks, {balancer.counts}")
    balancer.close()
    return [*faults, error_of(lambda: balancer.plan({"a": WAYS[0]}))]


def test_experts_can_be_moved_by_hand() -> None:
    for said in run_ranks(_asked_meanwhile, 2):
        assert len(said) == 1, said
        assert "Balancer" in said[0]


def _asked_for_loads(rank: int) -> Any:
    layer, right = _served(rank)
    timeout_seconds(5)
    balancer, faults = Balancer({"a": layer}, every=3), list[str]()
    balancer.record()
    balancer.plan({"a": WAYS[0]})
    for call in range(40):
        if not right():
            faults.append(f"call {call}")
        balancer.step()
        loads = [balancer.loads() for _ in range(3)]
        if not all(torch.equal(own, loads[0]) and int(own.sum()) == (call + 1) * 2 * 9 * 3 for own in loads):
            faults.append(f"call {call}: {loads}")
    done = balancer.idle, balancer.counts.switched > 0
    balancer.close()
    return faults, done


def test_loads_can_be_read_while_moving() -> None:
    assert run_ranks(_asked_for_loads, 2) == [([], (True, True))] * 2


def _made_anew(rank: int) -> Any:
    """Return what goes wrong where Balancers of one layer follow each other, and are there at the same time."""
    layer, right = _served(rank)
    timeout_seconds(8)
    faults, groups = list[str](), set[str]()
    for turn in range(8):
        both = [Balancer({"a": layer}, every=1) for _ in range(1 + turn % 2)]
        groups |= {each._mover._group for each in both}
        time.sleep(0.03 * ((rank + turn) % 2))
        for each, wanted in zip(both, WAYS if turn % 4 < 2 else WAYS[::-1], strict=False):
            each.plan({"a": wanted})
            while not each.idle:
                each.step()
                if not right():
                    faults.append(f"turn {turn}")
        if not all(each.counts.switched for each in both[1:]):
            faults.append(f"turn {turn}: nothing moved")
        for each in (*both, *both):
            each.close()
    return faults, len(groups)


def test_balancers_can_be_recreated() -> None:
    assert run_ranks(_made_anew, 2) == [([], 2)] * 2


def _policy_that_fails(rank: int) -> Any:
    layer, right = _served(rank)
    asked: list[int] = []

    def place(load: Any, slots: Any) -> Any:
        asked.append(1)
        if len(asked) == 1:
            raise ValueError("no idea")
        return ((0, 1),) if len(asked) == 2 else WAYS[0] if len(asked) == 3 else None

    balancer, said = Balancer({"a": layer}, place, interval=4, every=2), list[str]()
    for _ in range(80):
        try:
            balancer.step()
        except (ValueError, InputError) as error:
            said.append(str(error))
        if not right():
            said.append("wrong")
        time.sleep(0.002)
    held, switched = layer.dispatcher.expert_map.slots, balancer.counts.switched
    balancer.close()
    return said, [sorted(set(own) - {-1}) for own in held], switched > 0


def test_failing_policies_are_reported_and_retried() -> None:
    first, second = run_ranks(_policy_that_fails, 2)
    assert first == second
    said, held, switched = first
    assert said[0] == "no idea"
    assert_values(said[1], "ranks", "slots")
    assert len(said) == 2
    assert held == [[0, 1, 2], [3, 4]]
    assert switched


@pytest.mark.parametrize(("asked", "text"), [({"interval": 0}, "interval=0"), ({"every": 0}, "every=0")])
def test_times_that_never_come_are_refused(asked: Any, text: str) -> None:
    with raises_with(InputError, text, "1 call"):
        Balancer({}, **asked)


def test_layers_in_one_kernel_are_refused() -> None:
    placed = SimpleNamespace(spare=1, group="")
    made = SimpleNamespace(problem=SimpleNamespace(placement=placed), dispatcher="symm_mem", pipelines=("mega",))
    layer: Any = SimpleNamespace(plan=made, dispatcher=SimpleNamespace(expert_map=object()))
    with raises_with(InputError, "Overrides(pipeline='split')"):
        Balancer({"a": layer})


def test_unbalanceable_layers_refused_on_every_rank() -> None:
    for errors in run_ranks(refused, 2):
        assert_values(errors[0], "layer a", "Placement.spare")
        assert_values(errors[1], "checksums", "rank 0:")
        assert "['a']" in errors[2]
        assert "[0]" in errors[3]
        assert "[0, 1, 3, 4]" in errors[4] or "[4]" in errors[4]
        assert "layers ['a'] got other experts or another plan since (swap, replan)" in errors[5]


@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(2, 5), st.integers(1, 3))
@settings(max_examples=300, deadline=None)
def test_rounds_reach_any_placement_without_loss(seed: int, each: int, world: int, spare: int) -> None:
    chance = random.Random(seed)
    room = tuple(each + spare + chance.randrange(2) for _ in range(world))
    experts = each * world
    start = random_slots(experts, room, chance, replicas=True)
    wide = max(room)
    held = tuple(own + (-1,) * (wide - len(own)) for own in start)
    wanted = random_slots(experts, room, chance, replicas=True)
    for one in rounds(held, wanted, room):
        before = [[*own] for own in held]
        for move in one.moves:
            assert before[move.source_rank][move.source_slot] == move.expert
            assert held[move.rank][move.slot] == -1
            assert move.slot < room[move.rank]
        for rank, own in enumerate(one.slots):
            assert set(own) - {-1} <= set(held[rank]) | {m.expert for m in one.moves if m.rank == rank}
        assert set(range(experts)) <= {expert for own in one.slots for expert in own}
        held = one.slots
    assert [set(own) - {-1} for own in held] == [set(own) for own in wanted]


def test_rounds_for_too_many_ranks_refused() -> None:
    with raises_with(InputError, "[[0]", "[1]", "[2, 2]"):
        rounds(((0, -1), (1, -1)), ((0,), (1,), ()), (2, 2))


def test_rounds_without_empty_slot_refused() -> None:
    with raises_with(InputError, "rank 0", "[1]"):
        rounds(((0,), (1,)), ((1,), (0,)), (1, 1))


def _parts(seed: int) -> tuple[torch.Tensor, ...]:
    made = torch.Generator().manual_seed(seed)
    return (
        torch.randint(0, 256, (3, 37), generator=made, dtype=torch.uint8),
        torch.randn(5, 7, generator=made).to(torch.bfloat16),
        torch.randn((), generator=made),
    )


def test_checksum_detects_flips_and_swaps() -> None:
    parts = _parts(1)
    right = checksum(parts)
    assert torch.equal(right, checksum([part.clone() for part in parts]))
    for which, part in enumerate(parts):
        raw = part.reshape(-1).view(torch.uint8)
        for byte in range(raw.numel()):
            for bit in range(8):
                raw[byte] ^= 1 << bit
                found = checksum(parts)
                # Each lane by itself sees a change of one word.
                assert bool((found != right).all()), (which, byte, bit)
                raw[byte] ^= 1 << bit
    assert torch.equal(right, checksum(parts))
    rows = parts[0]
    assert not torch.equal(checksum((rows[[1, 0, 2]], *parts[1:])), right)
    assert not torch.equal(checksum((rows, parts[1].roll(1, 0), parts[2])), right)


def test_checksum_tracks_position_across_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    from collegium.balance import checksum as module

    values = torch.arange(4096, dtype=torch.int32)
    right = checksum((values,))
    monkeypatch.setattr(module, "_CHUNK", 100)
    assert torch.equal(checksum((values,)), right)
    assert torch.equal(checksum((values[:1000], values[1000:])), right)
    swapped = torch.cat((values[100:200], values[:100], values[200:]))
    assert not torch.equal(checksum((swapped,)), right)


def test_checksum_mismatch_names_the_expert() -> None:
    good: Any = [{0: (1, 2), 1: (3, 4)}, {1: (3, 4)}]
    assert agree_on_checksums(good, 2, "model.3") == [(1, 2), (3, 4)]
    with pytest.raises(InputError, match=r"layer 3, expert 1: every rank .* rank 0: 0{15}30{15}4, rank 1: "):
        agree_on_checksums([good[0], {1: (3, -5)}], 2, 3)
    with raises_with(InputError, "layer 3", "expert 2"):
        agree_on_checksums(good, 3, 3)
