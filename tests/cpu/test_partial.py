"""This rank's part of the sum, from a checkpoint on disk: experts, slices and both add up to the whole layer."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

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
    Placement,
    PlanError,
    Problem,
    Routing,
    RoutingSpec,
    SharedSpec,
    SharedWeights,
    SpecError,
    load_layer,
    plan,
    slice_shared,
)
from collegium.checkpoint import Checkpoint
from collegium.checkpoint.layer_view import CheckpointLayer
from collegium.checkpoint.loader import load_experts
from collegium.checkpoint.non_expert_weights import load_shared
from collegium.loading import assemble, load_routed
from collegium.parallel.placement import expert_ids_of, linear, round_robin, tensor_parallel
from collegium.runtime.devices import probe
from collegium.testing.compare import heavy_tailed, random_experts, relative_error, uneven_ids
from raising import raises_with
from toys import TinySize, write_checkpoint
from truth import moe_truth

if TYPE_CHECKING:
    from pathlib import Path

EXPERTS, TOP_K = 7, 3
PARTIAL = Overrides(dispatcher="partial")
SPLITS = {
    "experts": [linear(EXPERTS, rank, 3) for rank in range(3)],
    "experts in turn": [round_robin(EXPERTS, rank, 4) for rank in range(4)],
    "slices": [tensor_parallel(EXPERTS, rank, 2) for rank in range(2)],
    "uneven slices": [tensor_parallel(EXPERTS, rank, 3) for rank in range(3)],
    "both": [
        Placement(rank=2 * part + half, world_size=4, expert_ids=ids, tp_rank=half, tp_size=2)
        for part, ids in enumerate(((0, 2, 5), (6, 1, 3, 4)))
        for half in range(2)
    ],
}


def opened(folder: Path, family: str, weights: str) -> CheckpointLayer:
    write_checkpoint(folder, family, weights, size=TinySize(experts=EXPERTS, top_k=TOP_K, layers=2, intermediate=256))
    return CheckpointLayer.open(Checkpoint.open(folder), 1)


def routing_of(tokens: int) -> Routing:
    ids = uneven_ids(tokens, TOP_K, EXPERTS, seed=tokens)
    ids[::4, 0] = -1
    return Routing(topk_ids=ids, topk_weights=heavy_tailed(tokens, TOP_K, seed=tokens + 1, channels=False).abs())


@pytest.mark.parametrize("split", list(SPLITS))
@pytest.mark.parametrize(("family", "weights"), [("qwen3_moe", "bf16"), ("gpt_oss", "mxfp4"), ("mixtral", "fp8_block")])
def test_partial_sums_equal_the_layer(tmp_path: Path, family: str, weights: str, split: str) -> None:
    layer = opened(tmp_path, family, weights)
    if weights == "fp8_block" and split == "uneven slices":
        pytest.skip("two blocks of 128 are no three slices")
    whole = load_routed(layer, device="cpu", dtype="fp32")
    ranks = [load_routed(layer, device="cpu", dtype="fp32", placement=p, overrides=PARTIAL) for p in SPLITS[split]]
    for tokens in (1, 5, 70):
        x, routing = heavy_tailed(tokens, whole.spec.hidden_size, seed=tokens), routing_of(tokens)
        parts = [rank(x, routing=routing) for rank in ranks]
        assert tokens == 1 or sum(bool(part.abs().max() > 0) for part in parts) > 1
        assert relative_error(torch.stack(parts).sum(0), whole(x, routing=routing)) < 1e-5
        bad = routing.topk_ids.clone()
        bad[0, -1] = EXPERTS + 3
        for rank in ranks:
            found = rank(x, routing=Routing(topk_ids=bad, topk_weights=routing.topk_weights))
            assert found[0].isnan().all(), "an id that is no expert is NaN on every rank"
            assert not found[1:].isnan().any()


def test_plans_count_local_weights(tmp_path: Path) -> None:
    layer = opened(tmp_path, "qwen3_moe", "bf16")
    rank = load_routed(layer, device="cpu", placement=SPLITS["both"][3], overrides=PARTIAL)
    chosen = rank.plan
    assert "rank 3 of 4, experts 6, 1, 3, 4, slice 1 of 2" in chosen.explain()
    assert chosen.dispatcher == "partial"
    assert chosen.weight_bytes == 4 * chosen.expert_bytes == 4 * 3 * 2 * 128 * 256
    found = chosen.to_json()
    assert (found["rank"], found["world_size"], found["local_experts"]) == (3, 4, 4)


def test_it_is_never_taken_unasked(tmp_path: Path) -> None:
    layer = opened(tmp_path, "qwen3_moe", "bf16")
    with pytest.raises(PlanError, match=r"(?s)rank 1 of 3, experts 3, 4.*dispatcher='partial'"):
        load_routed(layer, device="cpu", placement=replace(SPLITS["experts"][1], ranks=()))
    with raises_with(SpecError, "placement.expert_ids", "[9]", "0", "6"):
        Problem(spec=layer.spec, device=probe("cpu"), placement=Placement(expert_ids=(0, 9)))
    # A rank that holds everything is alone, and needs no exchange.
    alone = Problem(spec=layer.spec.routed_alone(), device=probe("cpu"), placement=linear(EXPERTS, 0, 1))
    assert plan(alone).dispatcher == "local"


def test_weights_of_another_rank_are_refused(tmp_path: Path) -> None:
    layer = opened(tmp_path, "qwen3_moe", "bf16")
    made = load_routed(layer, device="cpu", placement=SPLITS["experts"][0], overrides=PARTIAL)
    with pytest.raises(InputError, match="logical shape"):
        MoELayer(load_experts(layer, SPLITS["experts"][1]), made.plan)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"latent_size": 32, "latent_norm_eps": 1e-6}, "latent projection.*norm"),
    ],
)
def test_non_additive_parts_refused(more: dict[str, Any], why: str) -> None:
    spec = MoESpec(hidden_size=64, intermediate_size=64, num_experts=EXPERTS, routing=RoutingSpec(top_k=2), **more)
    problem = Problem(spec=spec, device=probe("cpu"), placement=SPLITS["experts"][0])
    with pytest.raises(PlanError, match=why):
        plan(problem, PARTIAL)


WIDE, NARROW, SHARED_WIDE = 96, 64, 96


def parts_of(placements: list[Placement], shared: str | None, **changes: Any) -> tuple[list[MoELayer], Any, Any, Any]:
    """Return a layer for each of ``placements``, and the routed experts, the shared expert and its gate."""
    routed = random_experts(EXPERTS, 2, NARROW, WIDE, seed=1)
    block = random_experts(1, 2, SHARED_WIDE, WIDE, seed=7)
    gate = heavy_tailed(1, WIDE, seed=8, channels=False) / 10
    spec = MoESpec(
        hidden_size=WIDE,
        intermediate_size=NARROW,
        num_experts=EXPERTS,
        routing=RoutingSpec(top_k=TOP_K),
        weight_format="fp32",
        shared=SharedSpec(intermediate_size=SHARED_WIDE, gated=True),
    )
    layers: list[MoELayer] = []
    for placement in placements:
        problem = Problem(
            spec=spec, device=probe("cpu"), dtype="fp32", placement=placement, limits=Limits(max_tokens=16)
        )
        layer_plan = plan(replace(problem, **changes), Overrides(dispatcher="partial", shared=shared))  # type: ignore[arg-type]
        weights: Any = expert_ids_of(routed, placement.expert_ids)
        width = NARROW // placement.tp_size
        rows = slice(placement.tp_rank * width, (placement.tp_rank + 1) * width)
        if placement.tp_size > 1:
            weights = replace(
                weights,
                gate_up=weights.gate_up.rows(rows.start, rows.stop),
                down=weights.down.columns(rows.start, rows.stop),
            )
        own = SharedWeights(experts=block, gate=gate)
        if layer_plan.problem.shared_slices > 1:
            own = slice_shared(layer_plan, own)
        layers.append(MoELayer(weights, layer_plan, shared=own))
    return layers, routed, block, gate


def sums_of(x: torch.Tensor, routing: Routing, routed: Any, block: Any, gate: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the shared expert's output and the routed experts' sums in float64."""
    one = torch.zeros(len(x), 1, dtype=torch.int64)
    shared = moe_truth(x, block.gate_up.decode(), block.down.decode(), one, torch.ones(len(x), 1), ActivationSpec())
    shared = shared * torch.sigmoid(x.double() @ gate.double().T)
    experts = routed.gate_up.decode(), routed.down.decode()
    return shared, moe_truth(x, *experts, routing.topk_ids, routing.topk_weights, ActivationSpec())


@pytest.mark.parametrize("shared", [None, "sequential", "sliced"])
@pytest.mark.parametrize("split", ["experts", "slices"])
def test_the_shared_expert_is_added_once(split: str, shared: str | None) -> None:
    layers, routed, block, gate = parts_of(SPLITS[split], shared)
    for tokens in (1, 9, 40):  # also more than a pass has
        x, routing = heavy_tailed(tokens, WIDE, seed=tokens), routing_of(tokens)
        apart = [layer.shared_and_routed(x, routing=routing) for layer in layers]
        dense, sums = sums_of(x, routing, routed, block, gate)
        total = torch.stack([layer(x, routing=routing) for layer in layers]).sum(0)
        assert relative_error(total, dense + sums) < 1e-5
        assert relative_error(torch.stack([part for part, _ in apart if part is not None]).sum(0), dense) < 1e-5
        assert relative_error(torch.stack([part for _, part in apart]).sum(0), sums) < 1e-5
        added = [part is not None and bool(part.abs().max() > 0) for part, _ in apart]
        assert added == [shared == "sliced" or rank == 0 for rank in range(len(layers))]
    texts = [layer.plan.explain() for layer in layers]
    assert not any(layer.output_is_reduced or layer.plan.output_is_reduced for layer in layers)
    assert all("not reduced" in text for text in texts)
    if shared == "sliced":
        rows = [f"\n *shared +sequential.*slice {rank} of {len(layers)}" for rank in range(len(layers))]
        assert all(re.search(row, text) for row, text in zip(rows, texts, strict=True))
        assert layers[1].plan.to_json()["shared_slices"] == len(layers)
        assert layers[0].nbytes == layers[1].nbytes or split == "experts"
    else:
        assert re.search(r"\n *shared .*this rank", texts[0])
        assert re.search(r"\n *shared .*rank 0", texts[1])
        assert layers[1].plan.shared_kernel is None
        assert layers[0].nbytes > layers[-1].nbytes


def test_other_ranks_need_no_shared_weights() -> None:
    layers, *_ = parts_of(SPLITS["experts"], None)
    weights = expert_ids_of(random_experts(EXPERTS, 2, NARROW, WIDE, seed=1), SPLITS["experts"][1].expert_ids)
    layer = MoELayer(weights, layers[1].plan)
    x, routing = heavy_tailed(5, WIDE, seed=5), routing_of(5)
    assert torch.equal(layer(x, routing=routing), layers[1](x, routing=routing))
    with raises_with(InputError, "shared"):
        MoELayer(expert_ids_of(random_experts(EXPERTS, 2, NARROW, WIDE, seed=1), (0, 1, 2)), layers[0].plan)


def test_shared_slices_that_cannot_be_cut() -> None:
    with raises_with(PlanError, "shared='sliced'", "96", "7 ranks"):
        parts_of([linear(EXPERTS, 0, 7)], "sliced")
    with raises_with(PlanError, "shared='sliced'"):
        parts_of([SPLITS["both"][0]], "sliced")
    with raises_with(PlanError, "merged'", "partial"):
        parts_of([SPLITS["experts"][0]], "merged")
    spec = MoESpec(
        hidden_size=64,
        intermediate_size=64,
        num_experts=EXPERTS,
        routing=RoutingSpec(top_k=2),
        shared=SharedSpec(intermediate_size=64),
    )
    problem = Problem(spec=spec, device=probe("cpu"))
    with raises_with(PlanError, "shared='sliced'", "local"):
        plan(problem, Overrides(shared="sliced"))
    whole = plan(problem)
    assert whole.output_is_reduced
    assert "not reduced" not in whole.explain()
    # A rank that holds every expert returns whole sums, by whatever name.
    assert plan(problem, Overrides(dispatcher="partial")).output_is_reduced


def test_a_graph_overlaps_the_shared_expert() -> None:
    device = DeviceFacts(kind="cuda", capability=(9, 0))
    spec = MoESpec(
        hidden_size=128,
        intermediate_size=128,
        num_experts=EXPERTS,
        routing=RoutingSpec(top_k=2),
        shared=SharedSpec(intermediate_size=256),
    )
    problem = Problem(spec=spec, device=device, placement=linear(EXPERTS, 1, 2))
    chosen = plan(problem, Overrides(dispatcher="partial", shared="sliced"))
    assert chosen.side_stream_tokens == 512
    assert chosen.problem.shared().intermediate == 128
    assert re.search(r"\n *shared +side_stream .*512 tokens.*sequential.*partial.*slice 1 of 2", chosen.explain())


def test_planned_float32_parts() -> None:
    layers, routed, block, gate = parts_of(SPLITS["slices"], "sliced", dtype="bf16", out_dtype="fp32")
    x, routing = heavy_tailed(9, WIDE, seed=9).bfloat16(), routing_of(9)
    parts = [layer(x, routing=routing) for layer in layers]
    assert {part.dtype for part in parts} == {torch.float32}
    dense, sums = sums_of(x, routing, routed, block, gate)
    assert relative_error(torch.stack(parts).sum(0), dense + sums) < 0.01


def test_checkpoints_load_shared_slices(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_checkpoint(folder, "deepseek_v3", "bf16", size=TinySize(experts=EXPERTS, top_k=TOP_K, layers=2))
    view = CheckpointLayer.open(Checkpoint.open(folder), 1)
    whole = load_layer(folder, 1, device="cpu", dtype="fp32")
    x = heavy_tailed(6, whole.spec.hidden_size, seed=6)
    routing = whole.route(x)
    for shared in ("sequential", "sliced"):
        parts: list[torch.Tensor] = []
        for rank in range(2):
            placement = linear(EXPERTS, rank, 2)
            weights = load_experts(view, placement)
            own = load_shared(view, device="cpu")
            spec = replace(view.spec, **weights.formats)
            problem = Problem(spec=spec, device=probe("cpu"), dtype="fp32", placement=placement)
            overrides = Overrides(dispatcher="partial", shared=shared)  # type: ignore[arg-type]
            layer = assemble(problem, overrides, weights, router=None, shared=own, latent=None, checked=False)
            parts.append(layer(x, routing=routing))
        assert relative_error(parts[0] + parts[1], whole(x, routing=routing)) < 1e-5
