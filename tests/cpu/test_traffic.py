"""The bytes that a plan says a pass sends, beside those that collectives are given, and by hand where peers read."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import distributed

from collegium import DeviceFacts, Limits, MoESpec, Overrides, Problem, Routing, RoutingSpec, plan
from collegium.parallel.expert_map import ExpertMap
from collegium.parallel.placement import linear
from collegium.parallel.rendezvous import rendezvous_of
from collegium.parallel.traffic import OutgoingTokens, Traffic
from collegium.testing.compare import heavy_tailed, uneven_ids
from ranks import run_ranks
from split_layers import EXPERTS, HIDDEN, RECIPES, kept, layer_of, replicated

COUNTS = (5, 0, 17, 1)


def _sent(own: torch.Tensor, sent: list[int] | None, rank: int) -> int:
    """Return the bytes of ``own`` that do not stay on ``rank``."""
    world = distributed.get_world_size()
    rows = own.shape[0] * (world - 1) // world if sent is None else sum(sent) - sent[rank]
    return rows * own.shape[1] * own.element_size()


def _measured(rank: int, combine: str) -> list[str]:
    world, faults = distributed.get_world_size(), list[str]()
    real, gather, tokens = distributed.all_to_all_single, distributed.all_gather, COUNTS[rank]
    for name in ("all_to_all", "all_to_all_fixed", "all_gather"):
        layer = layer_of("plain", RECIPES[3], "cpu", replicated(EXPERTS, rank, world), dispatcher=name, combine=combine)
        kept.append(layer)
        ids = uneven_ids(sum(COUNTS), 3, EXPERTS, seed=9)[sum(COUNTS[:rank]) : sum(COUNTS[: rank + 1])]
        ids[:1, 0], ids[1:2, 1] = -1, EXPERTS + 2
        told: list[int] = []

        def counted(out: Any, own: torch.Tensor, told: list[int] = told, **others: Any) -> Any:
            told.append(_sent(own, others.get("input_split_sizes"), rank))
            return real(out, own, **others)

        def given(found: Any, own: torch.Tensor, told: list[int] = told, **others: Any) -> Any:
            told.append((world - 1) * own.numel() * own.element_size())
            return gather(found, own, **others)

        x = heavy_tailed(tokens or 1, HIDDEN, seed=3)[:tokens].bfloat16()
        with patch.object(distributed, "all_to_all_single", counted), patch.object(distributed, "all_gather", given):
            layer(x, routing=Routing(topk_ids=ids, topk_weights=torch.ones(ids.shape)))
        table = ExpertMap(replicated(EXPERTS, rank, world), EXPERTS, "cpu")
        there, back = layer.plan.traffic(table.away(ids, max(COUNTS[:world])))
        told_by_all = rendezvous_of().exchange((told, there, back), "bytes")
        # What is sent back is what other ranks' tokens need, so of all ranks together it is what theirs are said to.
        if told[0] != there:
            faults.append(f"{name}: {told[0]} bytes there, {there} are said")
        if sum(own[1] for own, *_ in told_by_all) != sum(said for *_, said in told_by_all) or not any(told):
            faults.append(f"{name}: {told_by_all} back")
    return faults


@pytest.mark.parametrize("combine", ["exact", "reduced", "reduced_fp8"])
def test_planned_traffic_matches_collectives(combine: str) -> None:
    assert run_ranks(partial(_measured, combine=combine), 4, seconds=200) == [[]] * 4


def test_symmetric_memory_traffic_counts_all_parts() -> None:
    rule = RoutingSpec(top_k=4)
    spec = MoESpec(hidden_size=2880, intermediate_size=64, num_experts=8, weight_format="mxfp4", routing=rule)
    facts = DeviceFacts(kind="cuda", name="H200", capability=(9, 0), memory=140 << 30, sms=132)
    problem = Problem(spec=spec, device=facts, placement=linear(8, 0, 4), limits=Limits(max_tokens=99))
    there, back = OutgoingTokens(10, 20, 15, 22), 22 * (2880 * 2 + 8)
    exact = plan(problem, Overrides(activation_format="fp8_token")).traffic(there)
    assert exact == Traffic(15 * (2944 + 4) + 10 * 3 * 4 * 4, back)
    assert plan(problem, Overrides(activation_format="fp8_token")).traffic(OutgoingTokens(5, 8, 2, 3))[0] == 15 * (
        2948 + 16
    )
    reduced = plan(problem, Overrides(activation_format="fp8_token", combine="reduced")).traffic(there)
    assert reduced == Traffic(exact.dispatch + 10 * 3 * 4 * 4, 15 * 2880 * 2)
    assert plan(replace(problem, placement=None)).traffic(there) == Traffic(0, 0)
