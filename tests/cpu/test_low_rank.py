"""Unmerged adapters in Triton's kernels: the truth of merged weights, and the bits of tokens without an adapter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from adapted import adapted_truth, packed_adapters, random_adapters
from collegium import Limits, MoESpec, Overrides, Problem, Routing, RoutingSpec, plan
from collegium.adapters import TokenAdapters
from collegium.experts import KERNELS
from collegium.experts.triton import grouped, low_rank, packed as products
from collegium.parallel.local import Local
from collegium.pipelines import PipelineParts
from collegium.pipelines.direct import Direct
from collegium.pipelines.split import Split
from collegium.problem import DeviceFacts
from collegium.runtime.memory import Arena, memory_map
from collegium.testing.compare import heavy_tailed, random_experts, relative_error
from collegium.types import ActivationSpec
from integers import encoded

if torch.cuda.is_available():
    pytest.skip("tests/gpu makes these comparisons on the device", allow_module_level=True)
pytest.importorskip("triton")

EXPERTS, HIDDEN, WIDE = 5, 176, 90
RANKS = (3, 16, 64)
RECIPES = [
    ("bf16", None, "bf16", 0.015),
    ("bf16", None, "fp16", 0.002),
    ("fp8_block", "fp8_group128", "bf16", 0.06),
    ("fp8_channel", "fp8_token", "bf16", 0.06),
    ("mxfp4", None, "bf16", 0.015),
    ("mxfp4", "fp8_token", "bf16", 0.06),
    ("mxfp4", "fp8_group128", "fp32", 0.06),
    ("nvfp4", "fp8_group128", "bf16", 0.06),
    ("nvfp4", "nvfp4", "bf16", 0.25),
    ("nvfp4", "nvfp4_static", "fp32", 0.4),
    ("int4_group", None, "bf16", 0.015),
]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def build(
    weights: str, activations: str | None, dtype: str = "bf16", activation: str = "swiglu", hidden: int = HIDDEN
) -> tuple[Any, Any]:
    spec = MoESpec(
        hidden_size=hidden,
        intermediate_size=WIDE,
        num_experts=EXPERTS,
        routing=RoutingSpec(top_k=3),
        weight_format=weights,
        activation=ActivationSpec(kind=activation),  # type: ignore[arg-type]
    )
    experts = encoded(random_experts(EXPERTS, spec.gate_up_parts, WIDE, hidden, seed=1), weights, group=32)
    device = DeviceFacts(kind="cuda", capability=(9, 0))
    problem = Problem(spec=spec, device=device, limits=Limits(max_tokens=8), dtype=dtype)  # type: ignore[arg-type]
    chosen = plan(problem, Overrides(activation_format=activations))
    kernel = next(k for k in KERNELS if k.name == chosen.kernel)
    return experts, kernel.pack(experts, chosen.problem.routed)


def pipelines_of(packed: Any) -> tuple[Direct, Split]:
    parts = PipelineParts(experts=packed, dispatcher=Local(num_experts=EXPERTS), top_k=3, num_experts=EXPERTS)
    return Direct(parts=parts), Split(parts=parts)


def routing_of(tokens: int, *, hot: bool = False) -> Routing:
    """Distinct experts for each token; hot: expert 2 gets every token, and expert 4 none."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :3]
    if hot:
        ids = torch.tensor([[2, 0, 1], [3, 2, 0], [1, 3, 2]]).repeat(tokens // 3 + 1, 1)[:tokens]
    return Routing(topk_ids=ids, topk_weights=torch.rand(tokens, 3, generator=generator) + 0.1)


@pytest.mark.parametrize(("weights", "activations", "dtype", "most"), RECIPES)
def test_mixed_adapters_match_merged_weights(
    monkeypatch: pytest.MonkeyPatch, weights: str, activations: str | None, dtype: str, most: float
) -> None:
    made, packed = build(weights, activations, dtype)
    adapters = random_adapters(RANKS, EXPERTS, WIDE, HIDDEN)
    form = DTYPES[dtype]
    x = heavy_tailed(7, HIDDEN, seed=3).to(form)
    ids = torch.tensor([0, -1, 2, 1, -1, 2, 0])
    token_adapters = TokenAdapters(packed=packed_adapters(adapters, form), ids=ids)
    routing = routing_of(7)

    def poisoned(_: object, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
        return torch.full(shape, float("nan"), device=device).to(dtype)

    monkeypatch.setattr(low_rank, "alloc", poisoned)
    monkeypatch.setattr(products, "alloc", poisoned)
    direct, split = pipelines_of(packed)
    plain = split(x, routing, dtype=torch.float32)
    found = split(x, routing, dtype=torch.float32, adapters=token_adapters)
    assert torch.equal(found[ids < 0], plain[ids < 0])
    assert torch.equal(direct(x, routing, dtype=torch.float32, adapters=token_adapters), found)
    monkeypatch.setattr(low_rank, "change_rows", lambda *_: 0)
    for pipeline in (direct, split):  # products that multiply inner rows by B
        assert torch.equal(pipeline(x, routing, dtype=torch.float32, adapters=token_adapters), found)
    truth = adapted_truth(
        x,
        (made.gate_up.decode(), made.down.decode()),
        routing.topk_ids,
        routing.topk_weights,
        adapters,
        ids,
        ActivationSpec(),
        form,
    )
    for number in range(-1, len(RANKS)):
        rows = ids == number
        assert relative_error(found[rows], truth[rows]) < most, number
    assert relative_error(plain[ids >= 0], truth[ids >= 0]) > 0.3


@pytest.mark.parametrize("activation", ["relu2", "swiglu_oai"])
def test_other_activations(activation: str) -> None:
    made, packed = build("bf16", None, activation=activation)
    gated = activation != "relu2"
    adapters = random_adapters((16, 3), EXPERTS, WIDE, HIDDEN, gated=gated)
    ids = torch.tensor([0, -1, 1, 1], dtype=torch.int32)
    token_adapters = TokenAdapters(packed=packed_adapters(adapters, gated=gated), ids=ids)
    x, routing = heavy_tailed(4, HIDDEN, seed=3).bfloat16(), routing_of(4)
    _, split = pipelines_of(packed)
    found = split(x, routing, dtype=torch.float32, adapters=token_adapters)
    weights = made.gate_up.decode(), made.down.decode()
    spec = ActivationSpec(kind=activation)  # type: ignore[arg-type]
    truth = adapted_truth(x, weights, routing.topk_ids, routing.topk_weights, adapters, ids, spec)
    assert relative_error(found, truth) < 0.02
    assert torch.equal(found[1], split(x, routing, dtype=torch.float32)[1])


def test_wide_tokens_fill_every_sum() -> None:
    """Columns take turns in four sums of 128, twice and a part."""
    hidden, tokens = 1176, 3
    made, packed = build("bf16", None, hidden=hidden)
    adapters = random_adapters((5,), EXPERTS, WIDE, hidden)
    ids = torch.zeros(tokens, dtype=torch.int64)
    x, routing = torch.zeros(tokens, hidden, dtype=torch.bfloat16), routing_of(tokens)
    # Each token has numbers in the columns of other sums.
    for token, columns in enumerate((slice(0, 300), slice(384, 512), slice(1024, hidden))):
        x[token, columns] = heavy_tailed(1, hidden, seed=3).bfloat16()[0, columns]
    token_adapters = TokenAdapters(packed=packed_adapters(adapters), ids=ids)
    _, split = pipelines_of(packed)
    found = split(x, routing, dtype=torch.float32, adapters=token_adapters)
    weights = made.gate_up.decode(), made.down.decode()
    truth = adapted_truth(x, weights, routing.topk_ids, routing.topk_weights, adapters, ids, ActivationSpec())
    for token in range(tokens):
        assert relative_error(found[token], truth[token]) < 0.02, token


@pytest.mark.parametrize("block_t", [16, 64, 128])
def test_hot_and_empty_experts(monkeypatch: pytest.MonkeyPatch, block_t: int) -> None:
    monkeypatch.setattr(low_rank, "_MAX_TURNS", 2)  # of three adapters
    monkeypatch.setattr(low_rank, "_MIN_BLOCK_T", min(block_t, 32))
    _, packed = build("bf16", None)
    # Tall tiles have separate sums for gate and up.
    pair = packed.tiling.pair(9)
    tiles = tuple(replace(tile, block_t=block_t, interleave_gate_up=block_t == 16 and tile is pair[0]) for tile in pair)
    adapters = random_adapters(RANKS, EXPERTS, WIDE, HIDDEN)
    tokens = 70
    ids = torch.arange(tokens) % 4 - 1
    token_adapters = TokenAdapters(packed=packed_adapters(adapters), ids=ids)
    x, routing = heavy_tailed(tokens, HIDDEN, seed=3).bfloat16(), routing_of(tokens, hot=True)
    _, split = pipelines_of(replace(packed, tiles=tiles))
    found = split(x, routing, dtype=torch.float32, adapters=token_adapters)
    assert torch.equal(found[ids < 0], split(x, routing, dtype=torch.float32)[ids < 0])
    few = slice(8, 12)  # the bits of a row are those of a smaller batch
    part = Routing(topk_ids=routing.topk_ids[few], topk_weights=routing.topk_weights[few])
    alone = TokenAdapters(packed=token_adapters.packed, ids=ids[few])
    direct, _ = pipelines_of(packed)
    assert torch.equal(direct(x[few], part, dtype=torch.float32, adapters=alone), found[few])


def test_unknown_adapters_make_their_rows_nan() -> None:
    _, packed = build("bf16", None)
    adapters = random_adapters(RANKS, EXPERTS, WIDE, HIDDEN)
    ids = torch.tensor([0, 3, -2, 1 << 32, -1])
    token_adapters = TokenAdapters(packed=packed_adapters(adapters), ids=ids)
    x, routing = heavy_tailed(5, HIDDEN, seed=3).bfloat16(), routing_of(5)
    for pipeline in pipelines_of(packed):
        found = pipeline(x, routing, dtype=torch.float32, adapters=token_adapters)
        assert found.isnan().all(dim=1).tolist() == [False, True, True, True, False]
        assert found.isnan().any(dim=1).tolist() == [False, True, True, True, False]


def test_router_weight_on_the_input() -> None:
    made, packed = build("bf16", None)
    adapters = random_adapters((16, 3), EXPERTS, WIDE, HIDDEN)
    ids = torch.tensor([0, -1, 1, 1])
    token_adapters = TokenAdapters(packed=packed_adapters(adapters), ids=ids)
    x = heavy_tailed(4, HIDDEN, seed=3).bfloat16()
    topk_ids, weights = torch.tensor([[2], [0], [2], [4]]), torch.tensor([[0.25], [0.5], [2.0], [4.0]])
    dispatcher = Local(num_experts=EXPERTS, weight_on_input=True)
    split = Split(parts=PipelineParts(experts=packed, dispatcher=dispatcher, top_k=1, num_experts=EXPERTS))
    routing = Routing(topk_ids=topk_ids, topk_weights=weights)
    found = split(x, routing, dtype=torch.float32, adapters=token_adapters)
    args = (x.float() * weights, (made.gate_up.decode(), made.down.decode()), topk_ids, torch.ones(4, 1), adapters, ids)
    assert relative_error(found, adapted_truth(*args, ActivationSpec())) < 0.02


def test_experts_without_matrices_are_unchanged() -> None:
    """Merged shared experts come after the routed ones, for which the adapters have matrices."""
    _, packed = build("bf16", None)
    adapters = random_adapters((16, 3), EXPERTS - 1, WIDE, HIDDEN)
    token_adapters = TokenAdapters(packed=packed_adapters(adapters), ids=torch.tensor([0, 1, 0, 1]))
    x = heavy_tailed(4, HIDDEN, seed=3).bfloat16()
    routing = Routing(topk_ids=torch.tensor([[4], [4], [1], [0]]), topk_weights=torch.ones(4, 1))
    parts = PipelineParts(experts=packed, dispatcher=Local(num_experts=EXPERTS), top_k=1, num_experts=EXPERTS)
    for pipeline in (Direct(parts=parts), Split(parts=parts)):
        plain = pipeline(x, routing, dtype=torch.float32)
        found = pipeline(x, routing, dtype=torch.float32, adapters=token_adapters)
        assert (found != plain).any(dim=1).tolist() == [False, False, True, True]


@pytest.mark.parametrize(("weights", "activations"), [("bf16", None), ("mxfp4", "fp8_token")])
def test_inner_rows_right_before_product(
    monkeypatch: pytest.MonkeyPatch, weights: str, activations: str | None
) -> None:
    """A product waits for the previous kernel alone, and late: everything else that it reads is older."""
    _, packed = build(weights, activations)
    adapters = random_adapters((16, 3), EXPERTS, WIDE, HIDDEN)
    token_adapters = TokenAdapters(packed=packed_adapters(adapters), ids=torch.tensor([0, 1, -1, 1]))
    x, routing = heavy_tailed(4, HIDDEN, seed=3).bfloat16(), routing_of(4)
    names: list[str] = []

    def launching(inner: Any) -> Any:
        def record(kernel: Any, *args: Any, **options: Any) -> None:
            names.append(kernel.__name__)
            inner(kernel, *args, **options)

        return record

    def preparing(name: str, inner: Any) -> Any:
        def record(*args: Any, **options: Any) -> Any:
            names.append(name)
            return inner(*args, **options)

        return record

    for module in (low_rank, grouped):
        monkeypatch.setattr(module, "launch", launching(module.launch))
    # These launch kernels on a GPU.
    for name in ("operand", "rescale", "gather_columns", "transpose_scales"):
        monkeypatch.setattr(products, name, preparing(name, getattr(products, name)))
    product = "grouped_gemm_kernel" if activations is None else "w4a8_kernel"
    for pipeline in pipelines_of(packed):
        names.clear()
        pipeline(x, routing, dtype=torch.float32, adapters=token_adapters)
        assert names.count(product) == names.count("low_rank_kernel") == 2
        for index in (i for i, name in enumerate(names) if name == product):
            assert names[index - 1] == "low_rank_kernel"


def test_memory_of_the_plan_is_enough() -> None:
    spec = MoESpec(hidden_size=HIDDEN, intermediate_size=WIDE, num_experts=EXPERTS, routing=RoutingSpec(top_k=3))
    device = DeviceFacts(kind="cuda", capability=(9, 0))
    adapters = packed_adapters(random_adapters(RANKS, EXPERTS, WIDE, HIDDEN))
    chosen = plan(Problem(spec=spec, device=device, limits=Limits(max_tokens=8)))
    layout = memory_map(chosen.with_adapters(adapters.sizes).regions)
    x, routing = heavy_tailed(8, HIDDEN, seed=3).bfloat16(), routing_of(8)
    token_adapters = TokenAdapters(packed=adapters, ids=torch.arange(8) % 4 - 1)
    _, packed = build("bf16", None)
    for pipeline in pipelines_of(packed):
        block = torch.full((layout.nbytes,), 0xFF, dtype=torch.uint8)
        found = pipeline(x, routing, Arena(block, layout), dtype=torch.float32, adapters=token_adapters, out=None)
        assert torch.equal(found, pipeline(x, routing, dtype=torch.float32, adapters=token_adapters))
        small = memory_map(chosen.regions)
        with pytest.raises(AssertionError, match="gate_up_adapters/inner"):
            pipeline(x, routing, Arena(block, small), dtype=torch.float32, adapters=token_adapters)


def test_adapters_never_take_the_large_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    _, packed = build("bf16", None)
    adapters = random_adapters((16, 3), EXPERTS, WIDE, HIDDEN)
    token_adapters = TokenAdapters(packed=packed_adapters(adapters), ids=torch.tensor([0, 1, -1, 1]))
    x, routing = heavy_tailed(4, HIDDEN, seed=3).bfloat16(), routing_of(4)
    _, split = pipelines_of(packed)
    wanted = split(x, routing, dtype=torch.float32, adapters=token_adapters)
    tile = packed.tiling.pair(12)[1]
    monkeypatch.setattr(type(packed.tiling), "large", lambda *_: tile)
    assert torch.equal(split(x, routing, dtype=torch.float32, adapters=token_adapters), wanted)
