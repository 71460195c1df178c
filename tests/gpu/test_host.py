"""What a forward pass costs the host: no memory, no waiting, few microseconds."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import pytest
import torch

from collegium import Choice, Limits, MoELayer, MoESpec, Problem, Routing, RoutingSpec, encode_experts, plan
from collegium.devices import probe
from collegium.testing.compare import heavy_tailed, random_experts, uneven_ids
from collegium.types import SharedSpec, SharedWeights
from collegium.workspace import Workspace

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FORMATS = [("bf16", None), ("fp8_block", "fp8_group128"), ("mxfp4", None), ("nvfp4", None)]


def build(weights: str, activations: str | None, *, shared: bool = False, max_tokens: int = 600) -> MoELayer:
    spec = MoESpec(
        hidden_size=384,
        intermediate_size=256,
        num_experts=17,
        routing=RoutingSpec(top_k=4),
        weight_format=weights,
        shared=SharedSpec(intermediate_size=256) if shared else None,
    )

    def made(experts: int, seed: int):
        coded = encode_experts(random_experts(experts, 2, 256, 384, seed=seed), weights)
        return replace(coded, gate_up=coded.gate_up.to("cuda"), down=coded.down.to("cuda"))

    problem = Problem(spec=spec, device=probe(torch.device("cuda")), limits=Limits(max_tokens=max_tokens))
    chosen = plan(problem, Choice(activation_format=activations))
    return MoELayer(made(17, 1), chosen, shared=SharedWeights(experts=made(1, 2)) if shared else None)


def call(tokens: int) -> tuple[torch.Tensor, Routing]:
    x = heavy_tailed(tokens, 384, seed=tokens).cuda().bfloat16()
    ids = uneven_ids(tokens, 17, 4, seed=tokens).cuda()
    return x, Routing(topk_ids=ids, topk_weights=torch.rand(tokens, 4, device="cuda"))


@pytest.mark.parametrize(("weights", "activations"), FORMATS)
@pytest.mark.parametrize("shared", [False, True])
def test_a_pass_takes_no_memory_and_does_not_wait(weights: str, activations: str | None, shared: bool) -> None:
    layer = build(weights, activations, shared=shared)
    layer.workspace = Workspace(torch.device("cuda", torch.cuda.current_device()))
    layer.workspace.reserve(layer.plan.workspace_bytes)
    taken = layer.workspace.nbytes
    for tokens in (600, 1, 33):
        x, routing = call(tokens)
        out = torch.empty_like(x)
        wanted = layer(x, routing=routing, out=out).clone()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            layer(x, routing=routing, out=out)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        assert torch.equal(out, wanted)
    assert layer.workspace.nbytes == taken, "the plan counts too little"


def test_the_workspace_changes_no_bits() -> None:
    layer = build("mxfp4", None, shared=True)
    x, routing = call(50)
    wanted = layer(x, routing=routing)
    layer.workspace = None
    assert torch.equal(layer(x, routing=routing), wanted)


def test_passes_on_two_streams_do_not_meet_in_the_shared_buffers() -> None:
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


def test_an_eager_call_costs_the_host_less_than_100_microseconds(record_property) -> None:
    layer = build("fp8_block", "fp8_group128")
    x, routing = call(8)
    out = torch.empty_like(x)
    times: list[float] = []
    for _ in range(200):
        torch.cuda.synchronize()
        start = time.perf_counter()
        layer(x, routing=routing, out=out)
        times.append(time.perf_counter() - start)
    record_property("microseconds", 1e6 * statistics.median(times[50:]))
    assert statistics.median(times[50:]) < 100e-6, f"{1e6 * statistics.median(times[50:]):.1f} us"


def test_full_graph_compilation_gives_the_bits_of_eager() -> None:
    layer = build("mxfp4", None)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for tokens in (3, 40):
        x, routing = call(tokens)
        assert torch.equal(compiled(x, routing=routing), layer(x, routing=routing))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_layer_runs_on_its_own_device_whatever_the_current_one_is() -> None:
    x, routing = call(9)
    with torch.cuda.device(1):
        layer = build("bf16", None)
        there = Routing(topk_ids=routing.topk_ids.to("cuda:1"), topk_weights=routing.topk_weights.to("cuda:1"))
        wanted = layer(x.to("cuda:1"), routing=there)
    assert torch.equal(layer(x.to("cuda:1"), routing=there), wanted)
