from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn import functional

from collegium import DeviceFacts, MoESpec, Overrides, Plan, PlanError, Problem, Routing, RoutingSpec, plan, probe
from collegium.errors import RankError
from collegium.ops.quantize import AS_IS, PADDED, REORDERED, activation_format
from collegium.parallel import peers, symmetric_buffer
from collegium.parallel.expert_map import ExpertMap
from collegium.parallel.peers import HEAD_BYTES, PeerBuffers, TokenBuffers
from collegium.parallel.placement import linear
from collegium.testing.compare import heavy_tailed
from peer_kernels import exchange, lose, refused
from raising import assert_values, raises_with
from ranks import run_ranks
from split_layers import absent, compare, disagree


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_equal_one_layer(world: int) -> None:
    assert run_ranks(partial(compare, dispatchers=("symm_mem",)), world, seconds=300) == [[]] * world


# The interpreter computes with numpy, which warns of overflows.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "order", "dtype"),
    [
        ("fp8_group128", PADDED, torch.bfloat16),
        ("fp8_group128_pow2", AS_IS, torch.float32),
        ("fp8_token", REORDERED, torch.bfloat16),
        ("fp16", AS_IS, torch.float16),
    ],
)
def test_few_tokens_are_posted_once(name: str, order: int, dtype: torch.dtype) -> None:
    form, world, experts, top_k = activation_format(name), 2, 5, 3
    ranks = linear(experts, 1, world)
    table = ExpertMap(ranks, experts, "cpu")
    table.recording.fill_(1)
    for tokens, columns in product((0, 1, 6), (40, 72, 320)):
        wide = form.padded_columns(columns, order)
        given = heavy_tailed(7, 2 * columns, seed=tokens)[:tokens, :columns].to(dtype)
        given[1:2, 5] = torch.nan
        ids = torch.randint(-2, experts + 2, (tokens, top_k), generator=torch.Generator().manual_seed(3))
        routing = Routing(topk_ids=ids, topk_weights=torch.rand(tokens, top_k).bfloat16())
        ways = list[list[torch.Tensor]]()
        for most in (128, -1):
            made = {
                key: torch.full(shape, 7.0).to(kind) for key, (shape, kind) in form.buffers(tokens + 1, wide).items()
            }
            sent = TokenBuffers(
                x=made["codes"],
                scale=made.get("scales"),
                ids=torch.full((tokens + 1, top_k), 99, dtype=torch.int32),
                weights=torch.full((tokens + 1, top_k), 99.0),
            )
            head, deltas = torch.zeros(HEAD_BYTES // 8, dtype=torch.int64), torch.zeros(world + 1, dtype=torch.int64)
            all_peers = PeerBuffers(
                rank=1, ranks=(0, 1), layer=3, bound=6, timeout=1, head=head, deltas=deltas, alone=True
            )
            table.load.zero_()
            with patch.object(peers, "FUSED_SEND_TOKENS", most):
                if tokens or most > 0:
                    peers.send(all_peers, given, sent, routing, table, form, order)
                else:
                    peers.post(all_peers, sent, routing, table)
            told = [each for each in (sent.x.view(torch.uint8), sent.scale, sent.ids, sent.weights) if each is not None]
            ways.append([*told, head, table.load.clone()])
        for one, other in zip(*ways, strict=True):
            assert torch.equal(one.nan_to_num(9.0), other.nan_to_num(9.0)), (tokens, columns)
        codes, counted, places = ways[0][0], ways[0][-1], ways[0][-4]
        assert torch.equal(places[:tokens], table.choose(ids).int())
        assert places[tokens].tolist() == [99] * top_k
        assert counted.sum() == ((ids >= 0) & (ids < experts)).sum()
        assert ways[0][-2][:2].tolist() == [1 << 44 | 3 << 32 | top_k << 24 | tokens] * 2
        if not tokens:
            continue
        wanted = form.quantize(given).codes.view(torch.uint8)
        size = wanted.shape[1]
        if order == REORDERED:  # other places, the same codes
            codes, wanted = codes.sort(dim=1).values, functional.pad(wanted, (0, wide - columns)).sort(dim=1).values
            size = wide
        assert torch.equal(codes[:tokens, :size], wanted)


@pytest.mark.parametrize("world", [2, 4])
def test_kernels_exchange_what_torch_does(world: int) -> None:
    assert run_ranks(exchange, world, seconds=300) == [[]] * world


def test_absent_ranks_are_named() -> None:
    first, last = run_ranks(lose, 2)
    assert first[0] == last[0] == "all NaN True"
    assert first[1].startswith("symm_mem dispatch; ranks (1,); symm_mem dispatch on rank 0: rank 1 did not come within")
    assert last[1].startswith("symm_mem combine; ranks (0,); symm_mem combine on rank 1: rank 0 gave up before")
    assert first[2] == last[2] == "renewed True"


def test_all_ranks_name_first_late_rank() -> None:
    found = run_ranks(absent, 3)
    for errors, took, renewed in found[:2]:
        assert [ranks for ranks, *_ in errors] == [(2,)] * 2
        assert [phase for _, phase, _ in errors] == ["symm_mem dispatch"] * 2
        assert took < 5, "whoever waits longer is told by the one that gave up"
        assert renewed
    assert_values(found[0][0][0][2], "rank 2", "1 s")
    errors, took, renewed = found[2]
    assert [ranks for ranks, *_ in errors] == [(0,)] * 2, "the rank that came late is told who went on without it"
    assert took < 1
    assert renewed


def test_disagreement_reported_on_every_rank() -> None:
    for errors in run_ranks(partial(disagree, name="symm_mem"), 2):
        assert "rank 0: 5 tokens, top-3, layer 0; rank 1: 65 tokens, top-3, layer 0" in errors[0]
        assert "rank 0: 2 tokens, top-2, layer 0; rank 1: 2 tokens, top-3, layer 0" in errors[1]
        assert "symm_mem" in errors[2]
        assert "rank 0 of 3, experts 0 to 2" in errors[3]
        assert "rank 0: 4 tokens, top-3, layer 0; rank 1: 4 tokens, top-3, layer 1" in errors[4]


def test_unsupported_placements_refused_by_name() -> None:
    spec = MoESpec(hidden_size=64, intermediate_size=64, num_experts=8, routing=RoutingSpec(top_k=2))
    gpu = DeviceFacts(kind="cuda", name="H200", capability=(9, 0), memory=140 << 30, peers=2)

    def planned(device: DeviceFacts, world: int, **changes: Any) -> Plan:
        placed = replace(linear(8, 1, world), **changes)
        return plan(Problem(spec=spec, device=device, placement=placed))

    chosen = planned(gpu, 2)
    assert (chosen.dispatcher, chosen.capturable) == ("symm_mem", True)
    assert_values(chosen.wire_format, "bf16", "assignment")

    def why(made: Plan) -> str:
        assert made.dispatcher != "symm_mem"
        return next(refusal.reason for refusal in made.refusals if refusal.name == "symm_mem")

    assert_values(why(planned(gpu, 4)), "4 ranks", "2 GPUs")
    assert planned(replace(gpu, peers=None), 4).dispatcher == "symm_mem", "a laptop plans for other machines"
    assert "GPUs" in why(planned(probe("cpu"), 2))
    assert planned(gpu, 2, same_tokens=True).dispatcher == "symm_mem"
    problem = Problem(spec=spec, device=gpu, placement=linear(8, 1, 2))
    reduced = plan(problem, Overrides(combine="reduced"))
    assert (reduced.dispatcher, reduced.capturable) == ("symm_mem", True)
    assert_values(reduced.wire_format, "bf16", "token and rank")
    coded = plan(problem, Overrides(combine="reduced_fp8"))
    assert "reduced_fp8" in why(coded)
    with raises_with(PlanError, "reduced_fp8"):
        plan(problem, Overrides(combine="reduced_fp8", dispatcher="symm_mem"))
    uneven = [
        {
            r.name: r.nbytes
            for r in plan(Problem(spec=replace(spec, num_experts=7), device=gpu, placement=linear(7, rank, 2))).regions
        }
        for rank in range(2)
    ]
    assert uneven[0] == uneven[1], "one map of memory, whatever each rank holds"


def test_unshareable_memory_raises_on_every_rank() -> None:
    for error in run_ranks(refused, 2):
        assert error.startswith("symm_mem: ")
        assert ": rank 1: the driver says no" in error
        assert "Overrides(dispatcher='all_gather')" in error


def test_failures_during_graph_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: Any = object.__new__(symmetric_buffer.SymmetricBuffers)
    # Of the block a capture may read the word that kernels wrote into the host's memory, and nothing else.
    blocks.device, blocks.ranks, blocks._block = torch.device("cuda"), (4, 6), SimpleNamespace(status=[1 << 16 | 1])
    monkeypatch.setattr(symmetric_buffer, "is_capturing", lambda device: True)
    with raises_with(RankError, "rank 6", "layer.check") as error:
        blocks.sync_pass(0, 8, 2, 64)
    assert error.value.ranks == (6,)
