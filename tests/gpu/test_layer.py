"""The layer on a CUDA device against float64 truth, in every format and recipe."""

from __future__ import annotations

import ctypes
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from collegium import (
    ActivationSpec,
    InputError,
    Limits,
    MoELayer,
    MoESpec,
    Overrides,
    Problem,
    RouterWeights,
    Routing,
    RoutingSpec,
    SharedSpec,
    SharedWeights,
    encode_experts,
    merge_shared,
    plan,
    probe,
)
from collegium.formats import FORMATS
from collegium.ops.quantize import ACTIVATION_FORMATS
from collegium.ops.route import route
from collegium.testing.compare import heavy_tailed, random_experts, relative_error, uneven_ids
from truth import moe_truth

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def to(weights, device):
    return replace(weights, gate_up=weights.gate_up.to(device), down=weights.down.to(device))


@pytest.mark.parametrize("activations", [None, *(f.name for f in ACTIVATION_FORMATS)])
@pytest.mark.parametrize("weight_format", [f.name for f in FORMATS if not f.read_only])
def test_gpu_layer_is_the_cpu_reference(weight_format, activations):
    experts, hidden, wide, top_k = 17, 192, 90, 3
    weights = encode_experts(random_experts(experts, 2, wide, hidden, seed=1), weight_format)
    spec = MoESpec(
        hidden_size=hidden,
        intermediate_size=wide,
        num_experts=experts,
        routing=RoutingSpec(top_k=top_k),
        weight_format=weight_format,
    )
    x, ids = heavy_tailed(23, hidden, seed=2).bfloat16(), uneven_ids(23, top_k, experts, seed=3)
    topk_weights = torch.rand(23, top_k) + 0.1
    out = {}
    for kind in ("cpu", "cuda"):
        problem = Problem(spec=spec, device=probe(kind), limits=Limits(max_tokens=64))
        made = plan(problem, Overrides(kernel="reference", activation_format=activations))
        layer = MoELayer(to(weights, kind), made)
        routing = Routing(topk_ids=ids.to(kind), topk_weights=topk_weights.to(kind))
        out[kind] = layer(x.to(kind), routing=routing).cpu()
    # Sums are ordered differently; a quantised h may round to the neighbour where float32 sums differ.
    assert relative_error(out["cuda"], out["cpu"]) < 0.01
    if activations is None:
        truth = moe_truth(x, weights.gate_up.decode(), weights.down.decode(), ids, topk_weights, ActivationSpec())
        assert relative_error(out["cuda"], truth) < 0.01


@pytest.mark.parametrize("score", ["softmax", "topk_softmax", "sigmoid", "sqrt_softplus"])
def test_gpu_routing_matches_cpu(score):
    logits = heavy_tailed(257, 64, seed=4, channels=False)
    logits[::5] = logits[::5].round()  # ties
    spec = RoutingSpec(top_k=6, score=score, groups=8, topk_groups=3, group_score="top2_sum")
    on_cpu, on_gpu = route(logits, spec), route(logits.cuda(), spec)
    assert torch.equal(on_cpu.topk_ids, on_gpu.topk_ids.cpu())
    assert relative_error(on_gpu.topk_weights.cpu(), on_cpu.topk_weights) < 1e-6


def test_gpu_layer_with_router_is_deterministic():
    weights = encode_experts(random_experts(16, 2, 96, 128, seed=5), "mxfp4")
    spec = MoESpec(
        hidden_size=128,
        intermediate_size=96,
        num_experts=16,
        routing=RoutingSpec(top_k=4),
        weight_format="mxfp4",
    )
    layer = MoELayer(
        to(weights, "cuda"),
        plan(Problem(spec=spec, device=probe("cuda"))),
        router=RouterWeights(weight=heavy_tailed(16, 128, seed=6).cuda()),
    )
    x = heavy_tailed(300, 128, seed=7).bfloat16().cuda()
    assert torch.equal(layer(x), layer(x))
    for tokens in (1, 9, 300):
        assert torch.equal(layer(x[:tokens], routing=layer.route(x[:tokens])), layer(x[:tokens]))


@pytest.mark.parametrize("weight_format", ["bf16", "fp8_block", "mxfp4", "nvfp4", "int4_group"])
def test_planned_kernel_is_accurate_and_capturable(weight_format):
    """What the plan calls capturable is captured whole: router, experts, combine, shared expert."""
    experts, hidden, wide = 17, 256, 128
    weights = encode_experts(random_experts(experts, 2, wide, hidden, seed=8), weight_format)
    shared = encode_experts(random_experts(1, 2, wide, hidden, seed=9), weight_format)
    router = heavy_tailed(experts, hidden, seed=10)
    spec = MoESpec(
        hidden_size=hidden,
        intermediate_size=wide,
        num_experts=experts,
        routing=RoutingSpec(top_k=3),
        weight_format=weight_format,
        shared=SharedSpec(intermediate_size=wide),
    )
    layers = {
        name: MoELayer(
            to(weights, "cuda"),
            plan(Problem(spec=spec, device=probe("cuda")), Overrides(kernel=name)),
            router=RouterWeights(weight=router.cuda()),
            shared=SharedWeights(experts=to(shared, "cuda")),
        )
        for name in (None, "reference")
    }
    fast = layers[None]
    assert fast.plan.kernel.startswith("triton")
    assert fast.plan.capturable
    x = heavy_tailed(33, hidden, seed=11).bfloat16().cuda()
    fast(x)
    torch.cuda.synchronize()
    graph, held = torch.cuda.CUDAGraph(), x.clone()
    with torch.cuda.graph(graph):
        out = fast(held)
    for seed in (11, 12):
        held.copy_(heavy_tailed(33, hidden, seed=seed).bfloat16().cuda())
        graph.replay()
        assert torch.equal(out, fast(held))
        assert relative_error(out, layers["reference"](held)) < 0.01


@pytest.mark.parametrize(
    ("weight_format", "dtype", "activations", "bound"),
    [
        ("bf16", "bf16", None, 0.01),
        ("fp16", "fp16", None, 0.002),
        ("mxfp4", "bf16", None, 0.01),
        ("fp8_block", "bf16", "fp8_group128", 0.07),
        ("mxfp4", "bf16", "fp8_token", 0.07),
    ],
)
def test_gpu_batched_rows_asynchronous_and_replayable(weight_format, dtype, activations, bound):
    experts, room, hidden, wide = 6, 40, 192, 90
    weights = encode_experts(random_experts(experts, 2, wide, hidden, seed=1), weight_format)
    spec = MoESpec(
        hidden_size=hidden,
        intermediate_size=wide,
        num_experts=experts,
        routing=RoutingSpec(top_k=2),
        weight_format=weight_format,
    )
    problem = Problem(spec=spec, device=probe("cuda"), limits=Limits(max_tokens=16), dtype=dtype)
    layer = MoELayer(to(weights, "cuda"), plan(problem, Overrides(activation_format=activations)))
    x = heavy_tailed(experts * room, hidden, seed=2).view(experts, room, hidden).to("cuda", layer.input_dtype)
    given, counts = x.clone(), torch.zeros(experts, dtype=torch.int32, device="cuda")
    out = torch.empty_like(x)
    layer.run_batched(given, counts, out=out)
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer.run_batched(given, counts, out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.run_batched(given, counts, out=out)
    for rows in ((0, 7, 40, 3, 0, 1), (40,) * 6, (0,) * 6, (1, 0, 0, 0, 0, 33)):
        held = torch.arange(room, device="cuda") < torch.tensor(rows, device="cuda")[:, None]
        given.copy_(x.masked_fill(~held[..., None], torch.nan))
        counts.copy_(torch.tensor(rows))
        out.fill_(7)
        graph.replay()
        ids = torch.where(held.cpu(), torch.arange(experts)[:, None], -1).view(-1, 1)
        ones, flat = torch.ones(len(ids), 1), x.cpu().view(-1, hidden)
        truth = moe_truth(flat, weights.gate_up.decode(), weights.down.decode(), ids, ones, ActivationSpec())
        assert bool((out[~held] == 7).all())
        if any(rows):
            assert relative_error(out[held].cpu(), truth.view_as(x.cpu())[held.cpu()]) < bound
        assert torch.equal(layer.run_batched(given, counts)[held], out[held])


def test_gpu_experts_swap_until_captured():
    def made(weight_format, seed):
        return to(encode_experts(random_experts(16, 2, 96, 128, seed=seed), weight_format), "cuda")

    def layer_of(weights):
        spec = MoESpec(
            hidden_size=128,
            intermediate_size=96,
            num_experts=16,
            routing=RoutingSpec(top_k=4),
            weight_format=weights.down.name,
        )
        problem = Problem(spec=spec, device=probe("cuda"), limits=Limits(max_tokens=64))
        return MoELayer(weights, plan(problem), router=RouterWeights(weight=heavy_tailed(16, 128, seed=6).cuda()))

    layer = layer_of(made("bf16", 5))
    for seed, weight_format in enumerate(("mxfp4", "bf16", "fp8_block"), start=7):
        layer.swap(made(weight_format, seed))
        fresh = layer_of(made(weight_format, seed))
        for tokens in (1, 33, 1, 33, 1, 33):
            x = heavy_tailed(tokens, 128, seed=tokens).bfloat16().cuda()
            assert torch.equal(layer(x), fresh(x))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    with pytest.raises(InputError, match="CUDA graph"):
        layer.swap(made("bf16", 5))
    graph.replay()
    assert torch.equal(y, fresh(x))


@pytest.mark.parametrize(
    ("weight_format", "activations"),
    [("bf16", None), ("fp8_block", "fp8_group128"), ("mxfp4", "fp8_token"), ("nvfp4", None)],
)
def test_gpu_merged_shared_expert_matches_apart(weight_format, activations):
    """Layers with routers of their own, by logits and by a given routing: unsorted, sorted, in passes, in a graph."""
    experts, hidden, wide, most = 17, 256, 128, 200
    spec = MoESpec(
        hidden_size=hidden,
        intermediate_size=wide,
        num_experts=experts,
        routing=RoutingSpec(top_k=3, score="sigmoid", scale=2.5),
        weight_format=weight_format,
        shared=SharedSpec(intermediate_size=wide),
    )
    problem = Problem(spec=spec, device=probe("cuda"), limits=Limits(max_tokens=most))

    def build(way, seed):
        weights = to(encode_experts(random_experts(experts, 2, wide, hidden, seed=seed), weight_format), "cuda")
        coded = to(encode_experts(random_experts(1, 2, wide, hidden, seed=seed + 2), weight_format), "cuda")
        made, shared = plan(problem, Overrides(activation_format=activations, shared=way)), SharedWeights(experts=coded)
        if way == "merged":
            weights, shared = merge_shared(made, weights, shared), None
        router = RouterWeights(weight=heavy_tailed(experts, hidden, seed=seed + 1).cuda())
        return MoELayer(weights, made, router=router, shared=shared)

    stacks = {way: [build(way, seed) for seed in (20, 30)] for way in ("merged", "sequential")}
    assert [[layer.plan.merged_shared_experts for layer in own] for own in stacks.values()] == [[1, 1], [0, 0]]

    def run(way, x):
        first, second = stacks[way]
        made = first(x)
        return second(made, routing=second.route(made))

    for tokens in (1, 2, 7, most, most + 9):
        for call in range(3):  # computed, recorded, repeated
            x = heavy_tailed(tokens, hidden, seed=tokens + call).bfloat16().cuda()
            assert torch.equal(run("merged", x), run("sequential", x))
            ids = uneven_ids(tokens, 3, experts, seed=call).cuda()
            ids[-1, 1], ids[0, 0] = experts, -1  # the first of the further slots' experts is nobody's to choose
            given = Routing(topk_ids=ids, topk_weights=torch.rand(tokens, 3, device="cuda"))
            ways = [stacks[way][0](x, routing=given).nan_to_num(7) for way in ("merged", "sequential")]
            assert torch.equal(*ways)
            assert (ways[0][-1] == 7).all()
    for tokens in (1, 40):
        held = heavy_tailed(tokens, hidden, seed=5).bfloat16().cuda()
        run("merged", held)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run("merged", held)
        for seed in (6, 7):
            held.copy_(heavy_tailed(tokens, hidden, seed=seed).bfloat16())
            graph.replay()
            assert torch.equal(out, run("sequential", held))


@pytest.mark.parametrize(
    ("weights", "shared", "activations"),
    [("bf16", SharedSpec(intermediate_size=128, gated=True), None), ("mxfp4", "fp8_block", "fp8_token")],
)
def test_gpu_shared_expert_on_side_stream(weights, shared, activations):
    """Several layers, in graphs of several threads and of torch.compile: the bits of layers without a second stream."""
    experts, hidden, wide, most = 17, 256, 128, 200
    own = shared if isinstance(shared, SharedSpec) else SharedSpec(intermediate_size=wide, weight_format=shared)
    spec = MoESpec(
        hidden_size=hidden,
        intermediate_size=wide,
        num_experts=experts,
        routing=RoutingSpec(top_k=3, score="sigmoid", scale=2.5),
        weight_format=weights,
        shared=own,
    )
    problem = Problem(spec=spec, device=probe("cuda"), limits=Limits(max_tokens=most))

    def made(way: str | None, seed: int) -> MoELayer:
        alone = encode_experts(random_experts(1, 2, wide, hidden, seed=seed + 2), own.weight_format or weights)
        return MoELayer(
            to(encode_experts(random_experts(experts, 2, wide, hidden, seed=seed), weights), "cuda"),
            plan(problem, Overrides(activation_format=activations, shared=way)),
            router=RouterWeights(weight=heavy_tailed(experts, hidden, seed=seed + 1).cuda()),
            shared=SharedWeights(
                experts=to(alone, "cuda"), gate=heavy_tailed(1, hidden, seed=9).cuda() if own.gated else None
            ),
        )

    stacks = {way: [made(way, seed) for seed in (20, 30)] for way in (None, "sequential")}
    assert [[layer.plan.side_stream_tokens for layer in layers] for layers in stacks.values()] == [[512, 512], [0, 0]]

    def run(way, x):
        first, second = stacks[way]
        return second(first(x))

    def captured_alone(seed):
        """Each thread on streams of its own."""
        for tokens in (1, 40):
            held = heavy_tailed(tokens, hidden, seed=seed).bfloat16().cuda()
            with torch.cuda.stream(torch.cuda.Stream()):
                run(None, held)
                torch.cuda.current_stream().synchronize()
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(capture_error_mode="thread_local")
                out = run(None, held)
                graph.capture_end()
                for more in range(5):
                    held.copy_(heavy_tailed(tokens, hidden, seed=seed + more).bfloat16())
                    graph.replay()
                    assert torch.equal(out, run("sequential", held))
        return True

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(captured_alone, (100, 200, 300)))
    for mode in ("default", "reduce-overhead"):
        torch._dynamo.reset()
        compiled = torch.compile(torch.nn.Sequential(*stacks[None]), mode=mode)
        for tokens in (1, 40, 1, 1, 40):
            x = heavy_tailed(tokens, hidden, seed=tokens).bfloat16().cuda()
            assert torch.equal(compiled(x).clone(), run("sequential", x))
    torch._dynamo.reset()
    for tokens in (1, 40, most, most + 9):
        held, out, graph = heavy_tailed(tokens, hidden, seed=5).bfloat16().cuda(), {}, {}
        for way in stacks:
            run(way, held)
            torch.cuda.synchronize()
            graph[way] = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.cuda.graph(graph[way]):
                out[way] = run(way, held)
        assert _joins(graph["sequential"].raw_cuda_graph()) == 0
        assert _joins(graph[None].raw_cuda_graph()) >= 2 * -(-tokens // most), "one for each pass of each layer"
        for seed in (6, 7):
            held.copy_(heavy_tailed(tokens, hidden, seed=seed).bfloat16())
            wanted = run("sequential", held)
            for way in stacks:
                graph[way].replay()
                assert torch.equal(out[way], wanted)


def _joins(graph: int) -> int:
    """Return how many nodes of a CUDA graph follow more than one other."""
    driver = ctypes.CDLL("libcuda.so.1")
    count = ctypes.c_size_t()
    # The older form without data refuses edges between kernels that overlap.
    assert not driver.cuGraphGetEdges_v2(ctypes.c_void_p(graph), None, None, None, ctypes.byref(count))
    begins, ends = ((ctypes.c_void_p * count.value)() for _ in range(2))
    data = ctypes.create_string_buffer(8 * count.value)
    args = (ctypes.c_void_p(graph), begins, ends, data, ctypes.byref(count))
    assert not driver.cuGraphGetEdges_v2(*args)
    return sum(more > 1 for more in Counter(ends[: count.value]).values())
