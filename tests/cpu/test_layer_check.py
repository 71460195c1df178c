"""Ranks that build a layer compare plans and weights: a difference is one error on every rank."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import distributed

from collegium import (
    CollegiumError,
    ExpertWeights,
    LatentWeights,
    Limits,
    MoELayer,
    MoESpec,
    Overrides,
    Placement,
    Problem,
    RouterWeights,
    RoutingSpec,
    SharedSpec,
    SharedWeights,
    encode_experts,
    expert_weights,
    plan,
    probe,
)
from collegium.execution import layer_comparison
from collegium.loading import dummy_layer
from collegium.parallel.layer_check import LayerContribution, SlotWeights, check_layers
from collegium.parallel.placement import linear, tensor_parallel
from collegium.parallel.rendezvous import timeout_seconds
from collegium.runtime.checksum import row_checksums
from collegium.testing.compare import heavy_tailed, random_experts
from ranks import run_ranks
from split_layers import taken

E, WIDE, HIDDEN = 8, 64, 64
SPEC = MoESpec(
    hidden_size=HIDDEN,
    intermediate_size=WIDE,
    num_experts=E,
    routing=RoutingSpec(top_k=2),
    shared=SharedSpec(intermediate_size=WIDE),
    latent_size=32,
    weight_format="fp32",
)


def _experts(count: int, hidden: int, seed: int) -> ExpertWeights[Any]:
    return encode_experts(random_experts(count, 2, WIDE, hidden, seed=seed), "fp32")


def _parts() -> dict[str, Any]:
    return {
        "router": RouterWeights(weight=heavy_tailed(E, HIDDEN, seed=8)),
        "shared": SharedWeights(experts=_experts(1, HIDDEN, 5)),
        "latent": LatentWeights(down=heavy_tailed(32, HIDDEN, seed=6), up=heavy_tailed(HIDDEN, 32, seed=7)),
    }


def _with_replicas(rank: int, world: int) -> Placement:
    """Return consecutive experts, and expert 0 on every rank."""
    every = linear(E, rank, world).ranks
    ranks = tuple(ids if 0 in ids else (*ids, 0) for ids in every)
    return Placement(rank=rank, world_size=world, expert_ids=ranks[rank], ranks=ranks)


def _layer(
    placed: Placement,
    weights: ExpertWeights[Any] | None = None,
    *,
    spec: MoESpec = SPEC,
    overrides: Overrides | None = None,
    checked: bool = False,
    **changes: Any,
) -> MoELayer:
    """Return this rank's layer. changes: of the problem, or of router, shared expert and latent projections."""
    parts = {name: changes.pop(name, value) for name, value in _parts().items()}
    if spec.shared is None:
        parts["shared"] = None
    asked: dict[str, Any] = {"limits": Limits(max_tokens=16), "dtype": "fp32", **changes}
    problem = Problem(spec=spec, device=probe("cpu"), placement=placed, **asked)
    given = taken(_experts(E, 32, 1), placed.expert_ids) if weights is None else weights
    return MoELayer(given, plan(problem, overrides or Overrides(dispatcher="all_to_all")), checked=checked, **parts)


def _changed(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` with another last element."""
    other = tensor.clone()
    other.view(-1)[-1] += 1
    return other


def _changed_experts(weights: ExpertWeights[Any], expert: int) -> ExpertWeights[Any]:
    values = weights.down.values.clone()
    values[expert, -1, -1] += 1
    return replace(weights, down=replace(weights.down, values=values))


def _outcome(build: Any) -> tuple[str, tuple[int, ...], str]:
    """Return class, ranks and text of the error of ``build``."""
    try:
        build()
    except CollegiumError as error:
        return type(error).__name__, getattr(error, "ranks", ()), str(error)
    return "none", (), ""


def _plans(rank: int) -> dict[str, Any]:
    """Return the errors of ranks of which the last one plans something else."""
    world = distributed.get_world_size()
    placed, last = linear(E, rank, world), rank == world - 1
    other_spec = replace(SPEC, routing=RoutingSpec(top_k=2, renormalize=False))
    asks: dict[str, Any] = {
        "limits": lambda: _layer(placed, limits=Limits(max_tokens=17 if last else 16)),
        "dtype": lambda: _layer(placed, dtype="bf16" if last else "fp32"),
        "routing": lambda: _layer(placed, spec=other_spec if last else SPEC),
        "dispatcher": lambda: _layer(
            placed, overrides=Overrides(dispatcher="all_gather" if last else "all_to_all", kernel="reference")
        ),
        "kernel": lambda: _layer(placed, overrides=Overrides(kernel="reference" if last else "cpu_grouped")),
        "combine": lambda: _layer(placed, overrides=Overrides(combine="reduced" if last else "exact")),
        "same_tokens": lambda: _layer(replace(placed, same_tokens=last)),
        "checked": lambda: _layer(placed, checked=last),
        "ranks": lambda: _layer(_with_replicas(rank, world) if last else placed),
    }
    found: dict[str, Any] = {name: _outcome(build) for name, build in asks.items()}
    found["right"] = bool(_layer(placed)(torch.ones(2, HIDDEN)).isfinite().all())
    return found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_other_plans_are_one_error(world: int) -> None:
    values = {
        "limits": ("max_tokens=16", "max_tokens=17"),
        "dtype": ("fp32", "bf16"),
        "routing": ("renormalize=True", "renormalize=False"),
        "dispatcher": ("all_to_all", "all_gather"),
        "kernel": ("cpu_grouped", "reference"),
        "combine": ("exact", "reduced"),
        "same_tokens": ("False", "True"),
        "checked": ("False", "True"),
        "ranks": (", 0)",),
    }
    for found in run_ranks(_plans, world):
        assert found.pop("right")
        assert found.keys() == values.keys()
        for name, (kind, _, text) in found.items():
            assert kind == "InputError", (name, text)
            assert f"ranks 0 and {world - 1} differ" in text
            for value in (f"{name} ", *values[name]):
                assert value in text, (name, text)


def _weights(rank: int) -> dict[str, Any]:
    """Return the errors of ranks of which the last one holds other weights."""
    world = distributed.get_world_size()
    placed, last = linear(E, rank, world), rank == world - 1
    whole, copied = _experts(E, 32, 1), _with_replicas(rank, world)
    right = _parts()
    # Expert 0 in the last slot of the last rank; the change is outside of the sampled bytes.
    wrong = _changed_experts(taken(whole, copied.expert_ids), -1)
    first_half = taken(whole, linear(E, 0, world).expert_ids)
    shared = SharedWeights(experts=_changed_experts(right["shared"].experts, 0))
    asks: dict[str, Any] = {
        "a copy": lambda: _layer(copied, wrong if last else None),
        "router": lambda: _layer(
            placed, router=RouterWeights(weight=_changed(right["router"].weight)) if last else right["router"]
        ),
        "no router": lambda: _layer(placed, router=None if last else right["router"]),
        "shared": lambda: _layer(placed, shared=shared if last else right["shared"]),
        "latent": lambda: _layer(
            placed, latent=replace(right["latent"], up=_changed(right["latent"].up)) if last else right["latent"]
        ),
        "the same experts": lambda: _layer(placed, first_half),
    }
    # Experts of this size would be sampled whole.
    with patch.object(layer_comparison, "SAMPLED_ELEMENTS", 64):
        found: dict[str, Any] = {name: _outcome(build) for name, build in asks.items()}
    layer = _layer(copied)
    before = layer(torch.ones(2, HIDDEN))
    packed = layer.experts
    found["swap"] = _outcome(lambda: layer.swap(wrong if last else taken(whole, copied.expert_ids)))
    found["unchanged"] = layer.experts is packed
    layer.swap(taken(whole, copied.expert_ids))
    found["right"] = torch.equal(layer(torch.ones(2, HIDDEN)), before)
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_other_weights_are_one_error(world: int) -> None:
    last = world - 1
    values = {
        "a copy": ("copies of expert 0 have different weights", f"rank {last} slot"),
        "router": (f"rank {last} differs from rank 0", "router.weight"),
        "no router": (f"rank {last} differs from rank 0", "router.weight (none, not"),
        "shared": (f"rank {last} differs from rank 0", "shared.experts"),
        "latent": (f"rank {last} differs from rank 0", "latent.up"),
        "the same experts": ("ranks 0 and 1 hold the same weights", "experts 0, 1"),
        "swap": ("copies of expert 0 have different weights",),
    }
    for found in run_ranks(_weights, world):
        assert found.pop("right")
        assert found.pop("unchanged")
        assert found.keys() == values.keys()
        for name, (kind, ranks, text) in found.items():
            assert (kind, ranks) == ("RankError", (1,) if name == "the same experts" else (last,)), (name, text)
            for value in values[name]:
                assert value in text, (name, text)


def _slices(rank: int) -> dict[str, Any]:
    """Return the errors of ranks that hold slices, in other layouts, the same slice, or as they should."""
    world = distributed.get_world_size()
    placed, whole = tensor_parallel(E, rank, world), _experts(E, 32, 1)
    mixed = replace(SPEC, weight_format="int4_group", down_format="fp32", shared=None)
    width = WIDE // world

    def cut(start: int, form: str | None = None, group: int = 16) -> ExpertWeights[Any]:
        gate_up = whole.gate_up.values[:, :, start * width : (start + 1) * width]
        down = whole.down.values[:, :, start * width : (start + 1) * width]
        weights = expert_weights(gate_up.contiguous(), down.contiguous())
        if form is None:
            return weights
        coded: Any = type(encode_experts(weights, form).gate_up)
        return replace(weights, gate_up=coded.encode(weights.gate_up.decode(), group_size=group))

    local = Overrides()
    asks = {
        "the same slice": lambda: _layer(placed, cut(0), overrides=local),
        "groups": lambda: _layer(
            placed, cut(rank, "int4_group", 32 if rank else 16), spec=mixed, overrides=Overrides(kernel="reference")
        ),
        "right": lambda: _layer(placed, cut(rank), overrides=local),
    }
    return {name: _outcome(build) for name, build in asks.items()}


@pytest.mark.parametrize("world", [2, 4])
def test_slices_of_one_group(world: int) -> None:
    for found in run_ranks(_slices, world):
        assert found["right"][0] == "none"
        kind, ranks, text = found["the same slice"]
        assert (kind, ranks) == ("RankError", (1,))
        assert "(slice 0)" in text
        assert "(slice 1)" in text
        kind, _, text = found["groups"]
        assert kind == "InputError", text
        assert "packed" in text


def _refused(rank: int) -> Any:
    """Return the errors, and after how long, where the last rank's weights do not fit its plan."""
    timeout_seconds(30)
    world = distributed.get_world_size()
    placed = linear(E, rank, world)
    weights = taken(_experts(E, 32, 1), placed.expert_ids)
    if rank == world - 1:
        weights = encode_experts(weights, "bf16")
    started = time.monotonic()
    outcome = _outcome(lambda: _layer(placed, weights))
    return outcome, time.monotonic() - started, _outcome(lambda: _layer(placed))[0]


def test_failed_build_names_its_rank() -> None:
    (first, seconds, after), (last, _, _) = run_ranks(_refused, 2)
    assert seconds < 20
    assert after == "none"
    assert first[:2] == ("RankError", (1,))
    assert "rank 1: InputError" in first[2]
    assert "bf16" in first[2]
    assert last[0] == "InputError"


def _constant(rank: int) -> list[str]:
    """Return the errors of weights that are equal on purpose."""
    world = distributed.get_world_size()
    placed, whole = linear(E, rank, world), _experts(E, 32, 1)
    same = taken(whole, [0] * len(placed.expert_ids))
    # As dummy weights: a few distinct experts, repeated.
    repeated = taken(whole, [expert % 3 for expert in placed.expert_ids])
    checked = Overrides(dispatcher="partial")
    routed = replace(SPEC, shared=None)
    asks = [
        lambda: _layer(placed, same),
        lambda: _layer(placed, repeated),
        lambda: _layer(placed, spec=routed, overrides=checked, checked=True),
    ]
    return [_outcome(build)[2] for build in asks]


def test_equal_experts_are_accepted() -> None:
    assert run_ranks(_constant, 2) == [["", "", ""]] * 2


def _dummies(rank: int) -> str:
    """Return the error of dummy layers, in which expert 7 has the weights of expert 0."""
    spec = replace(SPEC, num_experts=14, latent_size=None)
    options: dict[str, Any] = {"overrides": None, "limits": None, "dtype": "fp32", "checked": False}
    return _outcome(lambda: dummy_layer(spec, "cpu", linear(14, rank, 2), **options))[2]


def test_dummy_layers_may_repeat_experts() -> None:
    assert run_ranks(_dummies, 2) == ["", ""]


def _parts_of_a_sum(rank: int) -> list[tuple[str, tuple[int, ...], str]]:
    placed, checked = linear(E, rank, 2), Overrides(dispatcher="partial")
    routed = replace(SPEC, shared=None)
    half = replace(placed, ranks=(), expert_ids=(0, 1, 2, 3 + rank))
    router = RouterWeights(weight=heavy_tailed(E, HIDDEN, seed=8 + rank))
    asks = [
        lambda: _layer(placed, spec=routed, overrides=checked, checked=True, router=router),
        lambda: _layer(half, spec=routed, overrides=checked, checked=True),
        # Unchecked layers with partial sums are built one at a time.
        lambda: None if rank else _layer(placed, spec=routed, overrides=checked),
    ]
    return [_outcome(build) for build in asks]


def test_checked_partial_sums_are_compared() -> None:
    for other, missing, alone in run_ranks(_parts_of_a_sum, 2):
        assert other[:2] == ("RankError", (1,))
        assert "router.weight" in other[2]
        assert missing[0] == "InputError"
        assert "experts 5, 6, 7" in missing[2]
        assert alone[0] == "none"


def _contributions(**second: Any) -> list[LayerContribution]:
    slots = (SlotWeights(0, 5), SlotWeights(1, 6))
    first = LayerContribution(rank=4, settings={"num_experts": 4}, expert_ids=(0, 1), slots=slots)
    other = LayerContribution(
        rank=7,
        settings={"num_experts": 4},
        expert_ids=(2, 3),
        slots=(SlotWeights(2, 7), SlotWeights(3, 8)),
        expert_rank=1,
    )
    return [first, other._replace(**second)]


def test_the_table_of_contributions() -> None:
    check_layers("all_to_all", _contributions())
    swapped = (SlotWeights(2, 5), SlotWeights(3, 6))
    assert _outcome(lambda: check_layers("x", _contributions(slots=swapped)))[:2] == ("RankError", (7,))
    assert _outcome(lambda: check_layers("x", _contributions(whole={"router.weight": -1})))[:2] == ("RankError", (7,))
    _, _, text = _outcome(lambda: check_layers("x", _contributions(error="InputError: y")))
    assert text == "x: building a layer: not every rank can build it: rank 7: InputError: y"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
def test_row_checksums(dtype: torch.dtype) -> None:
    rows = (9 * heavy_tailed(5, 70_001, seed=3)).to(dtype)
    checksums = row_checksums(rows)
    assert checksums.shape == (5,)
    # A row has one checksum, whatever is next to it and however it is stored.
    for row in range(5):
        assert int(row_checksums(rows[row : row + 1])) == int(checksums[row])
    assert torch.equal(row_checksums(rows.t().contiguous().t()), checksums)
    assert torch.equal(row_checksums(rows.view(5, 1, -1)), checksums)
    changed = rows.clone()
    changed[3, 66_000] += 1
    assert (row_checksums(changed) != checksums).tolist() == [False, False, False, True, False]
    exchanged = torch.cat([rows[:, 65536 - 8 : 65536], rows[:, 8:], rows[:, :8]], dim=1)
    assert not bool((row_checksums(exchanged) == row_checksums(torch.cat([rows, rows[:, -8:]], dim=1))).any())
    assert row_checksums(rows[:, :0]).tolist() == [0] * 5
