"""Unmerged adapters on the device: FP32 truth, the bits of tokens without an adapter, graphs and replayed launches."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from triton import knobs

from adapted import adapted_truth, random_adapters
from collegium import Limits, MoELayer, MoESpec, Overrides, Problem, Routing, RoutingSpec, plan
from collegium.graphs import capture
from collegium.runtime.devices import probe
from collegium.testing.compare import heavy_tailed, random_experts, relative_error
from collegium.types import ActivationSpec
from integers import encoded

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
E, H, INNER, K = 17, 384, 250, 4
RANKS = (3, 16, 64)
RECIPES = [
    ("bf16", None, 0.012),
    ("fp8_block", "fp8_group128", 0.06),
    ("fp8_block", None, 0.012),
    ("fp8_channel", "fp8_token", 0.06),
    ("mxfp4", None, 0.012),
    ("mxfp4", "fp8_token", 0.06),
    ("mxfp4", "fp8_group128", 0.06),
    ("nvfp4", "fp8_token", 0.06),
    ("int4_group", None, 0.012),
    ("gguf", None, 0.012),
]
# Tokens, and whether one expert gets all of them.
BATCHES = ((1, False), (4, False), (9, True), (40, False), (300, True), (1500, False))


def layers_of(
    weights: str, activations: str | None, kind: Any = "swiglu", dtype: Any = "bf16", hidden: int = H
) -> tuple[Any, ...]:
    """Return the decoded weights, a layer without adapters, one with them, and the adapters."""
    spec = MoESpec(
        hidden_size=hidden,
        intermediate_size=INNER,
        num_experts=E,
        routing=RoutingSpec(top_k=K),
        weight_format=weights,
        activation=ActivationSpec(kind=kind),
    )
    coded = encoded(random_experts(E, spec.gate_up_parts, INNER, hidden, seed=1), weights)
    experts = replace(coded, gate_up=coded.gate_up.to("cuda"), down=coded.down.to("cuda"))
    problem = Problem(spec=spec, device=probe("cuda"), limits=Limits(max_tokens=2048), dtype=dtype)
    plain = MoELayer(experts, plan(problem, Overrides(activation_format=activations)))
    adapted = copy.copy(plain)
    adapters = random_adapters(RANKS, E, INNER, hidden, gated=spec.activation.gated)
    adapted.set_adapters(adapters)
    return (coded.gate_up.decode(), coded.down.decode()), plain, adapted, adapters


def call(
    tokens: int, dtype: torch.dtype = torch.bfloat16, *, hot: bool = False, hidden: int = H
) -> tuple[Any, Routing, Any]:
    """Return tokens, their experts and adapters, all mixed with -1; hot: expert 2 gets every token."""
    generator = torch.Generator().manual_seed(tokens)
    x = heavy_tailed(tokens, hidden, seed=tokens).to("cuda", dtype)
    ids = torch.rand(tokens, E, generator=generator).argsort(1)[:, :K]
    if hot:
        ids = torch.cat([torch.full((tokens, 1), 2), 3 + ids[:, 1:] % (E - 3)], 1)
    weights = torch.rand(tokens, K, generator=generator) + 0.1
    adapter_ids = torch.randint(-1, len(RANKS), (tokens,), generator=generator)
    return x, Routing(topk_ids=ids.cuda(), topk_weights=weights.cuda()), adapter_ids.cuda()


def poison(layer: MoELayer) -> None:
    """Fill the memory of passes with NaN."""
    for workspace in layer.workspaces._free:
        workspace.block.fill_(0xFF)


@pytest.mark.parametrize(("weights", "activations", "most"), RECIPES)
def test_mixed_adapters_match_merged_weights(weights: str, activations: str | None, most: float) -> None:
    decoded, plain, adapted, adapters = layers_of(weights, activations)
    for tokens, hot in BATCHES:
        x, routing, ids = call(tokens, hot=hot)
        poison(adapted)
        found = adapted(x, routing=routing, adapter_ids=ids)
        without = plain(x, routing=routing)
        assert torch.equal(found[ids < 0], without[ids < 0]), tokens
        assert torch.equal(adapted(x, routing=routing), without)
        for dtype in (torch.int64, torch.int32) if tokens == 4 else (torch.int64,):
            for _ in range(3):  # compiled, recorded, replayed
                poison(adapted)
                assert torch.equal(adapted(x, routing=routing, adapter_ids=ids.to(dtype)), found), tokens
        few = torch.arange(min(tokens, 6))
        args = (x[few].cpu(), decoded, routing.topk_ids[few].cpu(), routing.topk_weights[few].cpu(), adapters)
        truth = adapted_truth(*args, ids[few].cpu(), ActivationSpec())
        assert relative_error(found[few].cpu(), truth) < most, tokens


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_other_dtypes(dtype: str) -> None:
    weights, activations = ("bf16", None) if dtype == "fp16" else ("mxfp4", "fp8_token")
    decoded, plain, adapted, adapters = layers_of(weights, activations, dtype=dtype)
    form = {"fp16": torch.float16, "fp32": torch.float32}[dtype]
    for tokens in (1, 40):
        x, routing, ids = call(tokens, form)
        found = adapted(x, routing=routing, adapter_ids=ids)
        assert torch.equal(found[ids < 0], plain(x, routing=routing)[ids < 0])
        few = torch.arange(min(tokens, 6))
        args = (x[few].cpu(), decoded, routing.topk_ids[few].cpu(), routing.topk_weights[few].cpu(), adapters)
        truth = adapted_truth(*args, ids[few].cpu(), ActivationSpec(), form)
        assert relative_error(found[few].cpu(), truth) < (0.004 if dtype == "fp16" else 0.06)


@pytest.mark.parametrize("kind", ["swiglu_oai", "situ", "geglu_tanh", "relu2"])
@pytest.mark.parametrize(("weights", "activations"), [("mxfp4", "fp8_token"), ("fp8_channel", "fp8_token")])
def test_other_activations_keep_bits(weights: str, activations: str, kind: str) -> None:
    """Scales of rows come before the activation, where a compiler may fuse a product with a sum."""
    decoded, plain, adapted, adapters = layers_of(weights, activations, kind)
    for tokens in (1, 40, 300):
        x, routing, ids = call(tokens)
        found = adapted(x, routing=routing, adapter_ids=ids)
        assert torch.equal(found[ids < 0], plain(x, routing=routing)[ids < 0]), tokens
        few = torch.arange(min(tokens, 4))
        args = (x[few].cpu(), decoded, routing.topk_ids[few].cpu(), routing.topk_weights[few].cpu(), adapters)
        truth = adapted_truth(*args, ids[few].cpu(), ActivationSpec(kind=kind))  # type: ignore[arg-type]
        assert relative_error(found[few].cpu(), truth) < 0.08, tokens


@pytest.mark.parametrize(("weights", "activations", "most"), RECIPES[:6])
def test_bits_in_any_batch(weights: str, activations: str | None, most: float) -> None:
    _, _, adapted, _ = layers_of(weights, activations)
    x, routing, ids = call(1500, hot=True)
    whole = adapted(x, routing=routing, adapter_ids=ids)
    assert bool(whole.isfinite().all()), most
    for start, stop in ((0, 1), (7, 9), (100, 140), (200, 500)):
        rows = slice(start, stop)
        part = Routing(topk_ids=routing.topk_ids[rows], topk_weights=routing.topk_weights[rows])
        assert torch.equal(adapted(x[rows], routing=part, adapter_ids=ids[rows]), whole[rows]), (start, stop)


@pytest.mark.parametrize(("weights", "activations", "most"), RECIPES[:6:5])
def test_graphs_and_overlapping_passes(weights: str, activations: str | None, most: float) -> None:
    _, _, adapted, _ = layers_of(weights, activations)
    eager = copy.copy(adapted)
    runner = capture(adapted, (1, 4, 64), adapter_ids=True)
    cases = [call(tokens) for tokens in (1, 3, 4, 50, 64)]
    wanted: list[torch.Tensor] = []
    for x, routing, ids in cases:
        wanted.append(eager(x, routing=routing, adapter_ids=ids).clone())
        torch.cuda.synchronize()
    for _ in range(5):
        for (x, routing, ids), out in zip(cases, wanted, strict=True):
            assert torch.equal(runner(x, routing=routing, adapter_ids=ids), out)
    found = [eager(x, routing=routing, adapter_ids=ids) for _ in range(20) for x, routing, ids in cases]
    torch.cuda.synchronize()
    assert all(torch.equal(out, wanted[index % len(cases)]) for index, out in enumerate(found)), most


def test_unknown_adapters_make_their_rows_nan() -> None:
    _, _, adapted, _ = layers_of("mxfp4", "fp8_token")
    for tokens in (5, 64):
        x, routing, ids = call(tokens)
        ids[1], ids[2], ids[3] = len(RANKS), -2, 1 << 32
        found = adapted(x, routing=routing, adapter_ids=ids)
        assert found[1:4].isnan().all()
        assert found[0].isfinite().all()
        assert found[4:].isfinite().all()


def test_warmed_up_layer_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def note(*, repr: str, **_: object) -> None:
        compiled.append(repr)

    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", note)
    # A width that no other test uses: a kernel compiled by another test would not be compiled here.
    _, _, adapted, _ = layers_of("bf16", None, hidden=416)
    adapted.warm_up()
    assert compiled
    compiled.clear()
    for tokens in (1, 5, 64, 700):
        x, routing, ids = call(tokens, hidden=416)
        adapted(x, routing=routing, adapter_ids=ids)
        adapted(x, routing=routing, adapter_ids=ids.int())
    torch.cuda.synchronize()
    assert not compiled
