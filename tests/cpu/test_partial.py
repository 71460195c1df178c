"""This rank's part of the sum, from a checkpoint on disk: experts, slices and both add up to the whole layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from collegium import (
    InputError,
    MoESpec,
    Overrides,
    Placement,
    PlanError,
    Problem,
    Routing,
    RoutingSpec,
    SharedSpec,
    SpecError,
    plan,
)
from collegium.checkpoint import Checkpoint
from collegium.checkpoint.layer_view import CheckpointLayer
from collegium.loading import load_routed
from collegium.parallel.placement import linear, round_robin, tensor_parallel
from collegium.runtime.devices import probe
from collegium.testing.compare import heavy_tailed, relative_error, uneven_ids
from raising import raises_with
from toys import TinySize, write_checkpoint

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
    with pytest.raises(PlanError, match=r"(?s)rank 1 of 3, experts 3, 4.*all experts, unsliced.*dispatcher='partial'"):
        load_routed(layer, device="cpu", placement=replace(SPLITS["experts"][1], ranks=()))
    with raises_with(SpecError, "placement.expert_ids", "[9]", "0", "6"):
        Problem(spec=layer.spec, device=probe("cpu"), placement=Placement(expert_ids=(0, 9)))
    # A rank that holds everything is alone, and needs no exchange.
    alone = Problem(spec=layer.spec.routed_alone(), device=probe("cpu"), placement=linear(EXPERTS, 0, 1))
    assert plan(alone).dispatcher == "local"


def test_weights_of_another_rank_are_refused(tmp_path: Path) -> None:
    layer = opened(tmp_path, "qwen3_moe", "bf16")
    made = load_routed(layer, device="cpu", placement=SPLITS["experts"][0], overrides=PARTIAL)
    from collegium import MoELayer
    from collegium.checkpoint.loader import load_experts

    with pytest.raises(InputError, match="logical shape"):
        MoELayer(load_experts(layer, SPLITS["experts"][1]), made.plan)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"shared": SharedSpec(intermediate_size=64)}, "shared expert"),
        ({"latent_size": 32, "latent_norm_eps": 1e-6}, "latent projection has a norm"),
    ],
)
def test_non_additive_parts_refused(more: dict[str, Any], why: str) -> None:
    spec = MoESpec(hidden_size=64, intermediate_size=64, num_experts=EXPERTS, routing=RoutingSpec(top_k=2), **more)
    problem = Problem(spec=spec, device=probe("cpu"), placement=SPLITS["experts"][0])
    with pytest.raises(PlanError, match=why):
        plan(problem, PARTIAL)
