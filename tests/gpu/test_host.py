"""What a forward pass costs the host: no memory, no waiting, few microseconds."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from triton import knobs

from collegium import Limits, MoELayer, MoESpec, Overrides, Problem, Routing, RoutingSpec, encode_experts, plan
from collegium.runtime.devices import probe
from collegium.runtime.memory import Workspaces
from collegium.testing.compare import heavy_tailed, random_experts, uneven_ids
from collegium.types import SharedSpec, SharedWeights

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
COSTS = [("fp8_block", "fp8_group128"), ("mxfp4", "fp8_group128"), ("mxfp4", None)]
FORMATS = [("bf16", None), ("fp8_block", "fp8_group128"), ("mxfp4", None), ("nvfp4", None)]


def build(
    weights: str, activations: str | None, *, shared: bool = False, gated: bool = False, max_tokens: int = 600
) -> MoELayer:
    spec = MoESpec(
        hidden_size=384,
        intermediate_size=256,
        num_experts=17,
        routing=RoutingSpec(top_k=4),
        weight_format=weights,
        shared=SharedSpec(intermediate_size=256, gated=gated) if shared else None,
    )
    gate = heavy_tailed(1, 384, seed=3).cuda() / 20 if gated else None

    def made(experts: int, seed: int):
        coded = encode_experts(random_experts(experts, 2, 256, 384, seed=seed), weights)
        return replace(coded, gate_up=coded.gate_up.to("cuda"), down=coded.down.to("cuda"))

    problem = Problem(spec=spec, device=probe(torch.device("cuda")), limits=Limits(max_tokens=max_tokens))
    chosen = plan(problem, Overrides(activation_format=activations))
    return MoELayer(made(17, 1), chosen, shared=SharedWeights(experts=made(1, 2), gate=gate) if shared else None)


def call(tokens: int) -> tuple[torch.Tensor, Routing]:
    x = heavy_tailed(tokens, 384, seed=tokens).cuda().bfloat16()
    ids = uneven_ids(tokens, 4, 17, seed=tokens).cuda()
    return x, Routing(topk_ids=ids, topk_weights=torch.rand(tokens, 4, device="cuda"))


@pytest.mark.parametrize(("weights", "activations"), FORMATS)
@pytest.mark.parametrize(("shared", "gated"), [(False, False), (True, False), (True, True)])
def test_passes_neither_allocate_nor_synchronise(
    weights: str, activations: str | None, shared: bool, gated: bool
) -> None:
    layer = build(weights, activations, shared=shared, gated=gated)
    layer.workspaces = Workspaces(torch.device("cuda", torch.cuda.current_device()))
    layer.workspaces.reserve(layer.plan.workspace_bytes)
    taken = layer.workspaces.nbytes
    for tokens in (600, 1, 33):
        x, routing = call(tokens)
        out = torch.empty_like(x)
        wanted = layer(x, routing=routing, out=out).clone()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):  # computed, recorded and repeated
                layer(x, routing=routing, out=out.zero_())
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        assert torch.equal(out, wanted)
    assert layer.workspaces.nbytes == taken, "the plan counts too little"


def test_the_workspace_changes_no_bits() -> None:
    layer = build("mxfp4", None, shared=True)
    x, routing = call(50)
    wanted = layer(x, routing=routing)
    layer.workspaces = None
    assert torch.equal(layer(x, routing=routing), wanted)


def test_concurrent_streams_do_not_share_buffers() -> None:
    layer = build("bf16", None)
    calls = [call(tokens) for tokens in (500, 501)]
    wanted = [layer(x, routing=routing) for x, routing in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    found: list[list[torch.Tensor]] = [[], []]
    for _ in range(20):
        for place, (x, routing) in enumerate(calls):
            with torch.cuda.stream(streams[place]):
                found[place].append(layer(x, routing=routing))
    torch.cuda.synchronize()
    assert all(torch.equal(out, wanted[place]) for place in (0, 1) for out in found[place])


def test_replayed_passes_match_computed_bitwise() -> None:
    layer, plain = build("fp8_block", "fp8_group128", shared=True), build("fp8_block", "fp8_group128", shared=True)
    plain.workspaces = None
    x, routing = call(33)
    many, wide = torch.empty(99, 384, device="cuda", dtype=torch.bfloat16), torch.empty(33, 400, device="cuda")
    wide = wide.bfloat16()
    for seed in range(4):
        torch.manual_seed(seed)
        shifted = torch.empty(33 * 384 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(33, 384)
        for given in (x, many[33:66], wide[:, 8:392], shifted, x.view(3, 11, 384)):
            given.normal_()
            ids = torch.rand(33, 17, device="cuda").topk(4).indices
            for chosen in (ids, ids.int(), ids.t().contiguous().t()):
                kept = Routing(topk_ids=chosen, topk_weights=torch.rand(33, 4, device="cuda"))
                wanted = plain(given, routing=kept)
                assert torch.equal(layer(given, routing=kept), wanted)
        inside = x.clone()
        wanted = plain(inside, routing=routing)
        assert torch.equal(layer(inside, routing=routing, out=inside), wanted)
        if seed == 1:
            layer.workspaces.reserve(layer.workspaces.nbytes + (1 << 20))
    assert any(isinstance(found, tuple) for found in layer._executor.replay._kinds.values())


@pytest.mark.parametrize(("weights", "activations"), [("bf16", None), ("fp8_block", "fp8_group128")])
def test_a_large_batch_is_repeated_too(weights: str, activations: str | None) -> None:
    layer, plain = build(weights, activations, shared=True), build(weights, activations, shared=True)
    plain.workspaces = None
    x, routing = call(600)
    assert layer.plan.token_ranges[-1].tiles == "large tiles" or torch.cuda.get_device_capability() != (9, 0)
    for _ in range(4):
        x.normal_()
        assert torch.equal(layer(x, routing=routing), plain(x, routing=routing))
    assert all(isinstance(found, tuple) for found in layer._executor.replay._kinds.values())


def test_replayed_pass_can_be_captured() -> None:
    layer = build("mxfp4", "fp8_group128")
    x, routing = call(9)
    out = torch.empty_like(x)
    for _ in range(3):
        layer(x, routing=routing, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(x, routing=routing, out=out)
    for _ in range(3):
        x.normal_()
        wanted = layer(x, routing=routing)
        graph.replay()
        assert torch.equal(out, wanted)


def test_hook_sees_launches_of_replayed_pass() -> None:
    layer = build("fp8_block", "fp8_group128")
    x, routing = call(8)
    wanted = layer(x, routing=routing)
    for _ in range(3):
        assert torch.equal(layer(x, routing=routing), wanted)
    seen: list[object] = []
    knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        assert torch.equal(layer(x, routing=routing), wanted)
    finally:
        knobs.runtime.launch_enter_hook.remove(seen.append)
    assert len(seen) >= 5
    assert torch.equal(layer(x, routing=routing), wanted)


def microseconds(run: Callable[[], object]) -> float:
    """Return what a call costs the host: the median of the quietest of ten rounds, as another process may be busy."""
    rounds: list[float] = []
    for _ in range(10):
        times: list[float] = []
        for _ in range(50):
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        rounds.append(statistics.median(times))
    return 1e6 * min(rounds)


@pytest.mark.parametrize("tokens", [1, 8, 64])
@pytest.mark.parametrize(("weights", "activations"), COSTS)
def test_eager_call_host_time_below_100us(weights: str, activations: str | None, tokens: int, record_property) -> None:
    layer = build(weights, activations)
    x, routing = call(tokens)
    out = torch.empty_like(x)
    found = microseconds(lambda: layer(x, routing=routing, out=out))
    record_property("microseconds", found)
    print(f"{weights} x {activations or 'bf16'}, {tokens} tokens: {found:.1f} us")  # noqa: T201
    assert found < 100, f"{found:.1f} us"


def test_fullgraph_compile_matches_eager_bitwise() -> None:
    layer = build("mxfp4", None)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for tokens in (3, 40):
        x, routing = call(tokens)
        for _ in range(3):
            assert torch.equal(compiled(x, routing=routing), layer(x, routing=routing))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_layer_ignores_the_current_device() -> None:
    x, routing = call(9)
    with torch.cuda.device(1):
        layer = build("bf16", None)
        there = Routing(topk_ids=routing.topk_ids.to("cuda:1"), topk_weights=routing.topk_weights.to("cuda:1"))
        wanted = layer(x.to("cuda:1"), routing=there)
    assert torch.equal(layer(x.to("cuda:1"), routing=there), wanted)
