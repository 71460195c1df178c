"""One argument splits a layer: every way to share experts, from checkpoints on disk, against one rank."""

from __future__ import annotations

import io
import logging
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

from collegium import (
    DeviceFacts,
    InputError,
    Limits,
    MoELayer,
    MoESpec,
    Overrides,
    Plan,
    PlanError,
    Problem,
    Ranks,
    Routing,
    RoutingSpec,
    load_layer,
    plan,
    probe,
)
from collegium.checkpoint.layer_view import CheckpointLayer
from collegium.checkpoint.loader import load_experts
from collegium.checkpoint.reader import Checkpoint
from collegium.parallel.placement import round_robin, wrap_around
from collegium.testing.compare import random_experts
from moving import placement, split_layer, whole_weights
from raising import assert_values, raises_with
from rank_cases import FOLDERS, built, compare_loaded, refusals, sequences_in_parts
from ranks import error_of, run_ranks

# A shared expert, biases with slices of 24 columns, and weights in blocks that slices must fill up.
FAMILIES = ("deepseek_v3", "gpt_oss")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: Any) -> list[Path]:
    return built(tmp_path_factory.mktemp("ranks"), *FAMILIES)


@pytest.mark.parametrize("world", [2, 4])
def test_every_sharing_equals_one_rank(folders: list[Path], monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    monkeypatch.setenv(FOLDERS, os.pathsep.join(map(str, folders if world == 2 else folders[1:])))
    assert run_ranks(compare_loaded, world, seconds=200) == [[]] * world


def test_context_parallel_ranks_split_sequences(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDERS, str(folders[1]))
    assert run_ranks(sequences_in_parts, 4, seconds=200) == [[]] * 4


def test_unshareable_is_one_error_everywhere(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The same model after more training: every name and shape is the same.
    trained = shutil.copytree(folders[0], tmp_path / "trained")
    tensors = {name: tensor + tensor.abs() / 64 for name, tensor in load_file(trained / "model.safetensors").items()}
    save_file(tensors, trained / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setenv(FOLDERS, os.pathsep.join(map(str, (*folders, trained))))
    first, other = run_ranks(refusals, 2)
    says = {
        "does not multiply": "experts=3, slices=2 were requested, torch.distributed has 2 ranks; 3 x 2 has to be 2",
        "nothing left": "experts=None, slices=3 were requested",
        "other on one rank": "Ranks.of: ranks 0 and 1 differ: spare 0 and 1; every rank has to request the same",
        "no such dimension": "experts='model', slices=None were requested, the mesh has dimensions ('experts',)",
        "a name without a mesh": "name dimensions of a mesh, and no mesh was given",
        "no such context": "slices=None, context='prefill' were requested, the mesh has dimensions ('experts',)",
        "a context of experts": "experts='experts', slices=None, context='experts' were requested",
        "a context without a mesh": "{'context': 'experts'} name dimensions of a mesh, and no mesh was given",
        "contexts that do not divide": "context=3 was requested, 2 ranks split the experts; allowed is a",
        "contexts of the same tokens": "same_tokens=True and context=2 were requested; 2 context-parallel ranks hold",
        "contexts on one rank": "Ranks.of: ranks 0 and 1 differ: context 1 and 2",
        "more ranks than experts": "1 experts were to be split over 2 ranks; a rank holds at least one",
        "map": "(missing [2, 3, 4], unknown [])",
        "too many replicas": "allowed are 0 to 4 replicas a rank",
        "another order": "allowed: 'linear', 'round_robin'",
        "other checkpoints": "loading layer 1: ranks 0 and 1 differ: checkpoint",
        "other weights": "loading layer 1: ranks 0 and 1 differ: checkpoint",
        "other limits": "ranks 0 and 1 differ: limits Limits(max_tokens=9, ",
        "other tokens": "same_tokens: every rank has to be called with the same tokens, found [4, 5]",
        "no mesh": "'cpu' was given as the mesh; allowed: a DeviceMesh, or none",
        "another layer of slices": "slices: every rank has to call the same layer, found layers [",
        "other slices": "loading layer 1: ranks 0 and 1 differ: checkpoint",
        "other tokens of slices": "slices: every rank has to be called with the same tokens, found [4, 5]",
    }
    assert first.keys() == says.keys()
    for name, text in says.items():
        assert first[name] == other[name]
        assert first[name].startswith("InputError: "), name
        assert text in first[name], name


def _other_shares(rank: int) -> tuple[list[str], bool]:
    """Return the errors of ranks that read each other's memory and have 4 and 5 tokens, or 4 and 6; then they go on."""
    force = Overrides(dispatcher="symm_mem")
    layer: Any = load_layer(os.environ[FOLDERS], 1, device=Ranks.of(same_tokens=True), overrides=force)
    x = torch.rand(4 + 2 * rank, layer.spec.hidden_size).to(layer.input_dtype)
    x[:4] = torch.arange(layer.spec.hidden_size)
    errors = [error_of(lambda: layer(x))]
    right = layer(x[:4])
    # The inputs of later passes are not compared; shares of 4 and 5 tokens are 2 and 3, and rank 1 has 2 of both.
    errors += [error_of(lambda: layer(x)), error_of(lambda: layer(x[: 4 + rank])), error_of(layer.check)]
    return errors, torch.equal(layer(x[:4]), right)


def test_symmetric_memory_refuses_unequal_token_counts(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDERS, str(folders[0]))
    (first, same), (other, also) = run_ranks(_other_shares, 2)
    assert first == other
    for text, counts in zip(first, ("[4, 6]", "[4, 6]", "[4, 5]"), strict=False):
        assert text.startswith(
            f"InputError: same_tokens: every rank has to be called with the same tokens, found {counts}"
        )
    assert first[3] == "none"
    assert same
    assert also


def _ranks(world: int, **asked: Any) -> list[Ranks]:
    """Return what ``Ranks.of`` gives each of ``world`` ranks, without a group: what is read needs none."""
    return [Ranks(rank=rank, world_size=world, **asked) for rank in range(world)]


def test_each_rank_reads_its_own_bytes(folders: list[Path]) -> None:
    def read(ranks: Ranks) -> int:
        layer = CheckpointLayer.open(Checkpoint.open(folders[0]), 1)
        before = layer.checkpoint.bytes_read
        load_experts(layer, ranks.placement(8), pad=True)
        return layer.checkpoint.bytes_read - before

    whole = read(Ranks())
    assert [read(ranks) for ranks in _ranks(3)] == [whole * n // 8 for n in (3, 3, 2)]
    assert [read(ranks) for ranks in _ranks(4, replicas=1)] == [whole * 3 // 8] * 4
    # A slice is cut from every expert, none twice; 32 columns in 5 slices are 4 of 7 and one of 4.
    for cut in (2, 5):
        parts = [read(Ranks(slice_rank=rank, slices=cut)) for rank in range(cut)]
        assert sum(parts) == whole
        assert max(parts) == -(-32 // cut) * whole // 32


def test_who_holds_what() -> None:
    def held(world: int, experts: int, **asked: Any) -> list[tuple[int, ...]]:
        placements = [ranks.placement(experts) for ranks in _ranks(world, **asked)]
        assert all(placed.ranks == placements[0].ranks for placed in placements)
        return [placed.expert_ids for placed in placements]

    assert held(3, 7) == [(0, 1, 2), (3, 4), (5, 6)]
    assert held(3, 7, order="round_robin", replicas=2) == [(0, 3, 6, 1, 4), (1, 4, 2, 5), (2, 5, 0, 3)]
    assert held(2, 3, order=((2, 0), (1, 2))) == [(2, 0), (1, 2)]
    assert held(2, 3, order=((2, 0), (1, 2)), replicas=1) == [(2, 0, 1), (1, 2, 0)]
    placed = Ranks(rank=1, world_size=2, spare=3, same_tokens=True, group="g").placement(4)
    assert (placed.width, placed.same_tokens, placed.group) == (5, True, "g")


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"order": [(0, 1), (2, 3)]}, r"order=\[\(0, 1\), \(2, 3\)\] was requested; allowed: .* a tuple with the"),
        ({"order": ([0, 1], (2, 3))}, r"every rank needs a tuple .* \(ranks \[0\] have not\)"),
        ({"order": ((0, 1), (2, 3.0))}, r"every rank needs a tuple .* \(ranks \[1\] have not\)"),
        ({"order": (0, 1)}, r"\(ranks \[0, 1\] have not\)"),
        ({"replicas": 0.5}, r"replicas=0.5, spare=0 were requested"),
        ({"spare": "1"}, r"replicas=0, spare='1' were requested"),
    ],
)
def test_wrong_placements_are_refused(asked: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        Ranks(world_size=2, **asked).placement(4)


def _from_threads(rank: int) -> list[str]:
    """Return which calls differ that four threads of each rank make in whatever order they come."""
    weights = whole_weights("whole", 7, 0)
    whole, faults = split_layer("whole", weights, "cpu", None), list[str]()
    for name in ("all_to_all", "all_gather", "symm_mem"):
        layer = split_layer("whole", weights, "cpu", placement(7, rank, 2, 0), name)
        calls: list[tuple[torch.Tensor, Routing]] = []
        for number in range(24):
            tokens, made = 1 + (5 * number + 3 * rank) % 17, torch.Generator().manual_seed(100 * rank + number)
            x = torch.randint(-2, 3, (tokens, 32), generator=made).float()
            ids = torch.rand(tokens, 7, generator=made).topk(3).indices
            calls.append((x, Routing(topk_ids=ids, topk_weights=torch.rand(tokens, 3, generator=made))))
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda own, layer=layer: layer(own[0], routing=own[1]), calls))
        faults += [
            f"{name}, call {number}"
            for number, ((x, routing), own) in enumerate(zip(calls, found, strict=True))
            if not torch.equal(own, whole(x, routing=routing))
        ]
        _kept.append(layer)
    return faults


def _with_redundancy(rank: int) -> list[str]:
    """Return what differs where redundant slots wrap around, so that a rank has an expert twice."""
    weights, faults = whole_weights("whole", 5, 0), list[str]()
    whole = split_layer("whole", weights, "cpu", None)
    for redundant in (1, 3, 11):
        placed = wrap_around(5, redundant, rank, 2)
        for name in ("all_to_all", "all_gather", "all_to_all_fixed", "symm_mem"):
            layer = split_layer("whole", weights, "cpu", placed, name)
            _kept.append(layer)
            for seed, tokens in enumerate((1, 17, 5)):
                generator = torch.Generator().manual_seed(10 * rank + seed)
                x = torch.randint(-2, 3, (tokens, 32), generator=generator).float()
                ids = torch.rand(tokens, 5, generator=generator).topk(3).indices
                ids[1::4, 0] = -1
                routing = Routing(topk_ids=ids, topk_weights=torch.rand(tokens, 3, generator=generator))
                if not torch.equal(layer(x, routing=routing), whole(x, routing=routing)):
                    faults.append(f"{name}, {redundant} redundant slots, {tokens} tokens")
    return faults


def test_several_slots_of_one_expert() -> None:
    assert run_ranks(_with_redundancy, 2) == [[], []]


def test_one_rank_needs_no_redundant_slots() -> None:
    with raises_with(PlanError, "12 of 5 experts"):
        split_layer("whole", whole_weights("whole", 5, 0), "cpu", wrap_around(5, 7))


def _logged(rank: int) -> str:
    """Return what is logged when a layer of five experts is built."""
    stream = io.StringIO()
    handler, logger = logging.StreamHandler(stream), logging.getLogger("collegium")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    _kept.append(split_layer("whole", whole_weights("whole", 5, 0), "cpu", round_robin(5, rank, 2)))
    return stream.getvalue()


def test_experts_of_a_rank_are_logged() -> None:
    texts = ("rank 0 of 2, experts 0 to 4 in steps of 2", "rank 1 of 2, experts 1, 3")
    for text, logged in zip(texts, run_ranks(_logged, 2), strict=True):
        assert text in logged


_kept: list[Any] = []  # until the process ends, as a program keeps its model


def test_threads_call_in_any_order() -> None:
    assert run_ranks(_from_threads, 2) == [[], []]


def test_plan_describes_traffic_and_capacity() -> None:
    spec = MoESpec(hidden_size=64, intermediate_size=64, num_experts=8, routing=RoutingSpec(top_k=2))

    def made(ranks: Ranks, tokens: int = 100, **force: Any) -> Plan:
        asked = Problem(spec=spec, device=probe("cpu"), limits=Limits(max_tokens=tokens), placement=ranks.placement(8))
        return plan(asked, Overrides(**force))

    sliced = made(Ranks(slices=2))
    assert (sliced.dispatcher, sliced.capacity) == ("local", 200)
    assert_values(sliced.wire_format, "float32", "2 slices")
    assert sliced.wire_format in sliced.explain()
    both = made(Ranks(world_size=2, slices=2, same_tokens=True), tokens=101)
    # A share is 51 tokens, and every rank's share may go to this rank's experts.
    assert (both.dispatcher, both.capacity) == ("all_to_all", 51 * 2 * 2)
    assert_values(both.explain(), "2 slices", "every rank")
    assert both.groups == ("", "")
    gpu = replace(sliced.problem, device=DeviceFacts(kind="cuda", capability=(9, 0)), graph=True)
    # Nothing is read on the host, and few tokens do not go around the sum over slices.
    assert (plan(gpu).capturable, plan(gpu).pipelines) == (True, ("split",))
    assert plan(replace(gpu, placement=None)).pipelines == ("direct", "split")
    # Ranks that read each other's memory serve shares of the same tokens too, and whole experts alone.
    near = replace(gpu, device=replace(gpu.device, peers=2), limits=Limits(max_tokens=101))
    same = plan(replace(near, placement=Ranks(world_size=2, same_tokens=True).placement(8)))
    assert (same.dispatcher, same.capturable, same.capacity) == ("symm_mem", True, 51 * 2 * 2)
    assert "every rank" in same.explain()
    refused = plan(replace(near, graph=False, placement=both.problem.placement))
    assert refused.dispatcher == "all_to_all"
    assert any("slice 0 of 2" in refusal.reason for refusal in refused.refusals if "symm_mem" in refusal.name)
    part = made(Ranks(world_size=2, slices=2), dispatcher="partial")
    assert (part.wire_format, part.groups, part.capacity) == ("none", (), 200)
    with raises_with(PlanError, "local", "rank 0", "2", "experts 0", "3", "4", "8"):
        made(Ranks(world_size=2), dispatcher="local")


def test_ranks_need_a_group(folders: list[Path]) -> None:
    with raises_with(InputError, "torch.distributed"):
        Ranks.of()
    with raises_with(InputError, "torch.distributed"):
        load_layer(folders[0], 1, device=Ranks(world_size=2))
    # One rank that holds everything needs none.
    assert load_layer(folders[0], 1, device=Ranks()).plan.dispatcher == "local"


def test_after_expert_refused_for_slices() -> None:
    weights = random_experts(4, 2, 32, 64, seed=1)
    spec = MoESpec(hidden_size=64, intermediate_size=64, num_experts=4, routing=RoutingSpec(top_k=2))
    asked = Problem(
        spec=replace(spec, weight_format=weights.down.name),
        device=probe("cpu"),
        dtype="fp32",
        placement=Ranks(slices=2).placement(4),
    )
    with raises_with(InputError, "after_expert"):
        MoELayer(weights, plan(asked), after_expert=lambda rows: rows)
