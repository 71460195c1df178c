"""Reduced sums between ranks: to the bit what the pages say they are, and as far from FP32 truth as they say."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from collegium import Routing
from collegium.ops.quantize import activation_format
from collegium.ops.weighted_sum import weighted_sum
from collegium.parallel.combine import ReducedCombine
from collegium.parallel.placement import linear
from collegium.testing.compare import heavy_tailed, relative_error, uneven_ids
from ranks import run_ranks
from rough_tokens import same
from split_layers import EXPERTS, HIDDEN, RECIPES, layer_of

NAMES = ("all_gather", "all_to_all", "all_to_all_fixed")
COUNTS = ((3, 11, 1, 6), (0, 9, 4, 0), (0, 0, 0, 0), (30, 2, 17, 64))
FORM = activation_format("fp8_group128")


def _routing(tokens: int, top_k: int) -> Routing:
    ids = uneven_ids(tokens, top_k, EXPERTS, seed=9)
    ids[1::4, 0], ids[2::9, -1] = -1, EXPERTS + 2
    weights = heavy_tailed(*ids.shape, seed=10, channels=False).abs()
    weights[5::7, 0] = torch.nan
    return Routing(topk_ids=ids, topk_weights=weights)


def _parts(whole: Any, x: torch.Tensor, routing: Routing, world: int) -> list[torch.Tensor]:
    """Return each rank's sum of the rows of its own experts, as one layer computes it when it is given no others."""
    found: list[torch.Tensor] = []
    for rank in range(world):
        ids = routing.topk_ids
        elsewhere = (
            (ids >= 0) & (ids < EXPERTS) & ~torch.isin(ids, torch.tensor(linear(EXPERTS, rank, world).expert_ids))
        )
        own = Routing(topk_ids=ids.masked_fill(elsewhere, -1), topk_weights=routing.topk_weights)
        found.append(whole(x, routing=own))
    return found


def _slack(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the stated bound of FP8 parts: 1/16 of an element, or half a step of the smallest codes of its group."""
    total = torch.zeros(parts[0].shape)
    for part in parts:
        size = part.abs().view(len(part), HIDDEN // 128, 128)
        step = size.amax(2, keepdim=True).expand_as(size).reshape(part.shape) / 448 / 1024
        total += torch.maximum(part.abs() / 16, step) + 1e-5 * part.abs()
    return total


def _compare(rank: int, combine: str) -> list[str]:
    world, faults = distributed.get_world_size(), list[str]()
    # The parts of FP8 are made of sums in float32, which a layer of float32 alone shows.
    recipes = RECIPES[:2] + RECIPES[3:] if combine == "reduced" else RECIPES[1:2]
    for kind in ("plain", "on input"):
        for recipe in recipes:
            whole = layer_of(kind, recipe, "cpu")
            place = linear(EXPERTS, rank, world)
            names = (*NAMES, "symm_mem") if combine == "reduced" else NAMES
            layers = [layer_of(kind, recipe, "cpu", place, dispatcher=name, combine=combine) for name in names]
            for turn in COUNTS:
                counts = [turn[r % len(turn)] for r in range(world)]
                own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
                x = heavy_tailed(sum(counts), HIDDEN, seed=3).to(whole.input_dtype)
                routing = _routing(sum(counts), whole.spec.routing.top_k)
                parts = [part[own] for part in _parts(whole, x, routing, world)]
                sent = [FORM.round_trip(p) if combine == "reduced_fp8" and len(p) else p for p in parts]
                wanted = torch.zeros(parts[0].shape)
                for part in sent:
                    wanted += part.float()
                exact = whole(x, routing=routing)[own].float()
                mine = Routing(topk_ids=routing.topk_ids[own], topk_weights=routing.topk_weights[own])
                for layer in layers:
                    said = f"{kind} {recipe} {layer.plan.dispatcher} {combine} {counts}"
                    found = layer(x[own], routing=mine)
                    if not same(found, wanted.to(x.dtype)):
                        faults.append(f"{said}: not the sum of the parts")
                    if combine == "reduced_fp8" and bool(((found - exact).abs() > _slack(parts)).any()):
                        faults.append(f"{said}: further off than it says")
                    if combine == "reduced_fp8" and len(found) > 10 and same(found, exact):
                        faults.append(f"{said}: nothing was rounded")
    return faults


@pytest.mark.parametrize("combine", ["reduced", "reduced_fp8"])
@pytest.mark.parametrize("world", [2, 4])
def test_partial_sums_added_in_rank_order(world: int, combine: str) -> None:
    assert run_ranks(partial(_compare, combine=combine), world, seconds=300) == [[]] * world


def _whole(rank: int) -> list[float]:
    """Return the distance from the whole layer's FP32 output of each combine, shared expert and router included."""
    world, found = distributed.get_world_size(), list[float]()
    x = heavy_tailed(40, HIDDEN, seed=4)
    truth = layer_of("shared", RECIPES[1], "cpu")(x)
    for combine in ("exact", "reduced", "reduced_fp8"):
        for recipe in RECIPES[:2]:
            layer = layer_of(
                "shared", recipe, "cpu", linear(EXPERTS, rank, world), dispatcher=NAMES[1], combine=combine
            )
            out = [layer(x.to(layer.input_dtype)).float() for _ in range(2)]
            assert torch.equal(*out)
            found.append(float((out[0] - truth).norm() / truth.norm()))
    return found


def test_what_a_reduced_combine_costs() -> None:
    for found in run_ranks(_whole, 2):
        (_, exact), (_, reduced), (_, fp8) = zip(found[::2], found[1::2], strict=True)
        assert exact < 1e-6
        assert reduced < 1e-6
        assert 0.003 < fp8 < 0.04
        narrow = found[::2]
        assert narrow[1] < 1.5 * narrow[0]
        assert narrow[2] < 0.04


def test_errors_match_documented_values() -> None:
    tokens, top_k, hidden = 128, 8, 4096
    rows = heavy_tailed(tokens * top_k, hidden, seed=1).bfloat16()
    weights = torch.softmax(heavy_tailed(tokens, top_k, seed=2, channels=False), 1)
    slots = torch.arange(tokens * top_k).view(tokens, top_k)
    truth = (rows.double().view(tokens, top_k, hidden) * weights.double()[:, :, None]).sum(1)
    exact = relative_error(weighted_sum(rows, slots, weights, torch.bfloat16), truth)
    page = (Path(__file__).parents[2] / "docs" / "several-gpus.md").read_text(encoding="utf-8")
    assert f"| {exact:.4f}, from rounding to BF16 only |" in page
    for world, (form, line) in product((2, 4, 8), ((None, "| `reduced` |"), ("fp8_group128", "| `reduced_fp8` |"))):
        owner = torch.randint(world, slots.shape, generator=torch.Generator().manual_seed(3))
        wire = ReducedCombine(dtype=torch.bfloat16, hidden=hidden, code_format=form)
        sent = torch.cat([wire.pack(rows, slots.masked_fill(owner != rank, -1), weights) for rank in range(world)])
        assert sent.shape[1] == (hidden * 2 if form is None else hidden + hidden // 128 * 4)
        places = torch.arange(tokens)[:, None] + torch.arange(world) * tokens
        error = relative_error(wire.sum(sent, places, dtype=torch.bfloat16), truth)
        said = next(float(row.split("|")[-2]) for row in page.splitlines() if row.startswith(line))
        assert abs(error - said) < 0.05 * said
