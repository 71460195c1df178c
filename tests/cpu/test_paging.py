"""Experts in host memory: decisions against models written for each policy, and the bits of copies."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch

from by_kernel import by_kernel
from collegium import InputError
from collegium.experts.paging.table import POLICIES
from collegium.ops import paging
from collegium.ops.paging import CHUNK_BYTES, Schedule, copy_experts, decide, new_tables, schedule, segments_of

if TYPE_CHECKING:
    from torch import Tensor

    from collegium.experts.paging.policy import Policy

if torch.cuda.is_available():
    pytest.skip("tests/gpu makes these comparisons on the device", allow_module_level=True)
pytest.importorskip("triton")

CPU = torch.device("cpu")
decide_on_device, copy_on_device = by_kernel(decide), by_kernel(copy_experts)
LONG = pytest.mark.exhaustive


class Model:
    """Slots and the policy by name, with times and counts in place of scores."""

    def __init__(self, policy: str, experts: int, slots: int, trace: list[float]) -> None:
        self.policy, self.slots = policy, list(range(slots))
        self.time, self.used, self.count, self.trace = 0, [0] * experts, [0.0] * experts, trace

    def value(self, expert: int) -> float:
        """Return what the policy compares; the lowest one goes."""
        return {"lru": self.used, "lfu": self.count, "static": self.trace}[self.policy][expert]

    def step(self, needed: set[int]) -> int:
        """Serve a pass that needs no more experts than there are slots; return the misses."""
        self.time += 1
        for expert in range(len(self.used)):
            self.count[expert] = self.count[expert] * 0.99 + (expert in needed)
            if expert in needed:
                self.used[expert] = self.time
        missing = sorted(needed - set(self.slots))
        idle = [slot for slot, expert in enumerate(self.slots) if expert not in needed]
        idle.sort(key=lambda slot: (self.value(self.slots[slot]), slot))
        for slot, expert in zip(idle, missing, strict=False):
            self.slots[slot] = expert
        return len(missing)


def routing(rng: random.Random, tokens: int, top_k: int, experts: int) -> Tensor:
    """Return ids of hot experts, others, and some that are no expert."""
    hot = rng.sample(range(experts), max(1, experts // 4))
    choices = [rng.choice(hot) if rng.random() < 0.6 else rng.randrange(experts) for _ in range(tokens * top_k)]
    invalid = [-1, experts, -7, (1 << 40) + 1]
    return torch.tensor([rng.choice(invalid) if rng.random() < 0.1 else e for e in choices]).view(tokens, top_k)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("steps", [400, pytest.param(4000, marks=LONG)])
def test_kernel_follows_the_policy(policy: Policy, steps: int) -> None:
    rng = random.Random(policy.name)
    served = 0
    while served < steps:
        experts, slots = rng.randint(12, 40), rng.randint(8, 9)
        trace = [rng.random() for _ in range(experts)]
        scores = torch.tensor(trace) if policy.name == "static" else None
        tables = new_tables(experts, slots, CPU, scores)
        model = Model(policy.name, experts, slots, torch.tensor(trace).tolist())
        misses = 0
        for _ in range(50):
            ids = routing(rng, rng.randint(1, 2), rng.randint(1, 4), experts)
            valid = (ids >= 0) & (ids < experts)
            rounds = schedule(ids.numel(), experts, slots, serial=True)
            slot_ids = decide_on_device(ids, tables, policy.update, rounds)
            misses += model.step(set(ids[valid].tolist()))
            assert tables.slot_expert.tolist() == model.slots
            (only,) = slot_ids
            assert torch.equal(tables.slot_expert[only[valid].long()], ids[valid].int())
            assert bool((only[~valid] == -1).all())
            served += 1
        assert tables.counters[1] == misses > 0


def check_rounds(tables: Any, before: Tensor, ids: Tensor, slot_ids: Tensor, rounds: Schedule) -> None:
    """Assert that each round's experts are in their slots, whatever was copied next to it."""
    contents, ready = before.clone(), int(tables.ready)

    def copies(turn: int, first: int = 0) -> tuple[Tensor, Tensor]:
        start, stop = tables.round_start[turn : turn + 2].tolist()
        targets = tables.copy_slot[max(first, start) : stop].long()
        assert targets.unique().numel() == targets.numel()
        return targets, tables.copy_expert[max(first, start) : stop]

    for turn, local in enumerate(slot_ids):
        if turn >= rounds.first_miss:
            # Those that were ready have been made in round 0.
            targets, experts = copies(turn, ready if turn == rounds.first_miss == 1 else 0)
            contents[targets] = experts
        there = local >= 0
        assert torch.equal(contents[local[there].long()].long(), ids[there])
        used = set(local[there].tolist())
        if turn == 0 and rounds.first_miss == 1:
            targets = tables.copy_slot[:ready].long()
            assert not used & set(targets.tolist())
            assert ready <= int(tables.round_start[2])
            contents[targets] = tables.copy_expert[:ready]
        elif rounds.groups == 2 and turn + 1 < rounds.rounds:
            assert not used & set(copies(turn + 1)[0].tolist())
    assert torch.equal(contents, tables.slot_expert)


@pytest.mark.parametrize("tokens", [1, 7, 60, 400])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_rounds_serve_any_batch(policy: Policy, tokens: int) -> None:
    rng = random.Random(tokens)
    for turn in range(12):
        experts = rng.randint(2, 60)
        slots = min(rng.randint(1, 20), experts - 1)
        by_kernels, by_torch = (new_tables(experts, slots, CPU) for _ in range(2))
        with patch.object(paging, "_COPIES_DOMINATE", (256, 0)[turn % 3 == 1]):
            rounds = schedule(tokens * 3, experts, slots, serial=turn % 2 == 0)
        for _ in range(4):
            ids, before = routing(rng, tokens, 3, experts), by_kernels.slot_expert.clone()
            hits = set(before.tolist()) & set(ids.flatten().tolist())
            slot_ids = decide_on_device(ids, by_kernels, policy.update, rounds)
            assert torch.equal(slot_ids, decide(ids, by_torch, policy.update, rounds))
            for name, table, other in zip(by_kernels._fields, by_kernels, by_torch, strict=True):
                if name not in ("keys", "order"):
                    assert torch.equal(table, other), name
            check_rounds(by_kernels, before, ids, slot_ids, rounds)
            valid = (ids >= 0) & (ids < experts)
            assert torch.equal((slot_ids >= 0).int().sum(0), valid.int())
            misses = int(by_kernels.round_start[rounds.rounds])
            assert misses == len(set(ids[valid].tolist()) - hits)
            slot_of = by_kernels.expert_slot
            resident = slot_of >= 0
            assert torch.equal(by_kernels.slot_expert[slot_of[resident].long()].long(), resident.nonzero().flatten())
            assert int(by_kernels.needed.sum()) == 0


def test_copies_move_every_byte() -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = [(7, 3, CHUNK_BYTES + 4, torch.uint8), (7, 2, 8192, torch.bfloat16), (7, 5, 1, torch.int8)]
    sources = [torch.randint(0, 100, shape, generator=generator).to(dtype) for *shape, dtype in shapes]
    tables = new_tables(7, 4, CPU)
    by_kernels, by_torch = ([torch.zeros_like(source[:4]) for source in sources] for _ in range(2))
    for copies, run in ((by_kernels, copy_on_device), (by_torch, copy_experts)):
        segments = segments_of(sources, copies)
        tables.round_start[:3] = torch.tensor([0, 3, 4])
        tables.copy_expert[:4] = torch.tensor([6, 0, 5, 2])
        tables.copy_slot[:4] = torch.tensor([1, 3, 0, 1])
        run(segments, tables, 0)
        for source, copied in zip(sources, copies, strict=True):
            assert torch.equal(copied[[1, 3, 0]], source[[6, 0, 5]])
            assert not copied[2].any()
        run(segments, tables, 1)
    for source, copied, other in zip(sources, by_kernels, by_torch, strict=True):
        assert torch.equal(copied[[1, 3, 0]], source[[2, 0, 5]])
        assert torch.equal(copied, other)


def test_wrong_tensors_are_refused() -> None:
    tables = new_tables(4, 2, CPU)
    for ids in (torch.zeros(3, dtype=torch.int64), torch.zeros(1, 2)):
        with pytest.raises(InputError, match="topk_ids"):
            decide(ids, tables, POLICIES[0].update, schedule(2, 4, 2))
    experts = torch.zeros(4, 6)
    for source, target in ((experts[:, :3], experts[:2, :3]), (experts, experts[:2, :5]), (experts, experts.int())):
        with pytest.raises(InputError):
            segments_of([source], [target])


@pytest.mark.parametrize(
    ("assignments", "experts", "slots", "rounds"),
    [
        (4, 64, 8, (2, 1)),
        (9, 64, 8, (3, 1)),
        (900, 128, 64, (2, 1)),
        (900, 64, 10, (7, 1)),
        (2, 3, 1, (3, 1)),
        (1 << 20, 128, 64, (3, 2)),
        (1 << 20, 128, 96, (2, 2)),
        (1 << 20, 64, 10, (12, 2)),
    ],
)
def test_rounds_follow_from_sizes(assignments: int, experts: int, slots: int, rounds: tuple[int, int]) -> None:
    found = schedule(assignments, experts, slots)
    assert (found.rounds, found.groups) == rounds
    assert found.half == (slots if found.groups == 1 else slots - slots // 2)
    serial = schedule(assignments, experts, slots, serial=True)
    assert serial.rounds == (1 if assignments <= slots else rounds[0])
