"""A shared expert that runs as more routed experts: the numbers of one that runs apart, from the checkpoint on disk."""

from __future__ import annotations

import copy
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from collegium import (
    DeviceFacts,
    ExpertWeights,
    Limits,
    MoELayer,
    MoESpec,
    Overrides,
    Placement,
    PlanError,
    Problem,
    RouterWeights,
    Routing,
    RoutingSpec,
    SharedSpec,
    SharedWeights,
    encode_experts,
    load_layer,
    merge_shared,
    plan,
)
from collegium.balance.elastic import regroup
from collegium.errors import InputError, RoutingError, SpecError
from collegium.experts import KERNELS
from collegium.formats import Fp8Block
from collegium.ops import route_wide
from collegium.ops.route import route
from collegium.ops.route_wide import append_shared_experts
from collegium.testing.compare import heavy_tailed, random_experts, relative_error, uneven_ids
from collegium.types import ActivationSpec, LatentWeights
from family_cases import CASES, IDS, build, decoder
from memories import Poisoned
from quantised_matrices import KINDS, quantise
from raising import raises_with
from truth import moe_truth

if TYPE_CHECKING:
    from pathlib import Path

MERGED, APART = Overrides(shared="merged"), Overrides(shared="sequential")
HOPPER = DeviceFacts(kind="cuda", name="H200", capability=(9, 0), memory=140 << 30)
E, H, WIDE, K = 6, 64, 32, 2


class Swapped(torch.nn.Module):
    """Stands where the block stood."""

    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return self.layer(x)


def stored(folder: Path, name: str, kind: str | None, shared: int) -> tuple[Any, Any]:
    """Return the class's own model of the numbers on disk in ``folder``, and its blocks by layer."""
    pytest.importorskip("transformers")
    sizes = {"moe_intermediate_size": 32, "n_shared_experts": shared}
    model = build(replace(CASES[name], text={**CASES[name].text, **sizes}), folder)
    if kind is not None:
        twin = quantise(folder, KINDS[kind], lambda path: ".experts." in path or ".shared_experts." in path)
        model = type(model).from_pretrained(twin, dtype=torch.float32).eval()
    return model, {index: layer.mlp for index, layer in decoder(model).items() if hasattr(layer.mlp, "experts")}


@pytest.mark.each_choice
@pytest.mark.parametrize(("kind", "shared"), [(None, 1), (None, 2), ("fp8 blocks", 1), ("ct nvfp4", 2), ("ct int4", 1)])
@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_merged_and_apart_match_transformers(tmp_path: Path, name: str, kind: str | None, shared: int) -> None:
    """Several layers, scaled routing, more tokens than a pass holds, twice, compiled whole and from two threads."""
    model, blocks = stored(tmp_path / "model", name, kind, shared)
    assert len(blocks) == 2
    with torch.no_grad():
        wanted = model(IDS).logits
    seen: dict[Overrides, torch.Tensor] = {}
    for force in (MERGED, APART):
        more: dict[str, Any] = {"dtype": "fp32", "device": "cpu", "limits": Limits(max_tokens=8)}
        layers = {index: load_layer(tmp_path / "model", index, overrides=force, **more) for index in blocks}
        for index, layer in layers.items():
            assert layer.plan.merged_shared_experts == (shared if force is MERGED else 0)
            assert (layer.shared is None) == (force is MERGED)
            assert layer.spec.num_experts == layer.plan.problem.spec.num_experts == 8
            model.model.layers[index].mlp = Swapped(layer)
        with torch.no_grad():
            found = model(IDS).logits
            assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()
            assert torch.equal(model(IDS).logits, found)
        seen[force] = found
        layer, x = layers[2], heavy_tailed(11, 32, seed=3)
        alone = layer(x)
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), alone)
        with ThreadPoolExecutor(2) as pool:
            assert all(torch.equal(out, alone) for out in pool.map(layer, [x] * 8))
        model.model.layers[2].mlp = blocks[2]
        model.model.layers[1].mlp = blocks[1]
    # The library of this CPU takes other sums for other counts of rows, so the last bits may differ there.
    assert (seen[MERGED] - seen[APART]).abs().max() <= 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("way", [MERGED, APART])
def test_whole_model_with_input_weights(tmp_path: Path, way: Overrides) -> None:
    """Llama-4, whose blocks have no experts interface: the layer holds router and shared expert."""
    pytest.importorskip("transformers")
    from collegium.integrations.transformers import layers_of
    from collegium.integrations.transformers.loading import load_model_in

    model = build(CASES["llama4_text"], tmp_path)
    ours = load_model_in("fp32", str(tmp_path), device="cpu", overrides=way)
    assert [layer.plan.merged_shared_experts for layer in layers_of(ours)] == [int(way is MERGED)]
    with torch.no_grad():
        found, wanted = ours(IDS).logits, model(IDS).logits
        assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()
        assert torch.equal(ours(IDS).logits, found)


def test_unsplittable_shared_expert_refused_by_name(tmp_path: Path) -> None:
    stored(tmp_path / "model", "glm4_moe", "fp8 blocks", 2)
    with raises_with(PlanError, "64", "32", "128", "shared='sequential'"):
        load_layer(tmp_path / "model", 1, dtype="fp32", device="cpu", overrides=MERGED)
    layer = load_layer(tmp_path / "model", 1, dtype="fp32", device="cpu")
    assert layer.plan.merged_shared_experts == 0
    assert re.search(r"\n *shared +sequential", str(layer))


def layer_of(
    force: Overrides | None = None,
    *,
    weights: str = "bf16",
    count: int = 1,
    device: DeviceFacts | None = None,
    shared_weights: Any = None,
    rule: RoutingSpec | None = None,
    tokens: int = 16,
    **more: Any,
) -> MoELayer:
    shared = shared_weights or encode_experts(random_experts(1, 2, count * WIDE, H, seed=2), weights)
    spec = MoESpec(
        hidden_size=H,
        intermediate_size=WIDE,
        num_experts=E,
        routing=rule or RoutingSpec(top_k=K, scale=2.5),
        weight_format=weights,
        shared=SharedSpec(intermediate_size=count * WIDE, weight_format=shared.down.name),
    )
    problem = Problem(spec=spec, device=device or DeviceFacts(kind="cpu"), limits=Limits(max_tokens=tokens))
    made, experts = plan(problem, force), encode_experts(random_experts(E, 2, WIDE, H, seed=1), weights)
    extras: dict[str, Any] = {"router": RouterWeights(weight=heavy_tailed(E, H, seed=3)), **more}
    if made.merged_shared_experts:
        return MoELayer(merge_shared(made, experts, SharedWeights(experts=shared)), made, **extras)
    return MoELayer(experts, made, shared=SharedWeights(experts=shared), **extras)


def truth_of(x: torch.Tensor, routing: Routing, weights: str = "bf16", count: int = 1) -> torch.Tensor:
    """The routed experts' sum and the shared expert once, whole, of the dequantised numbers."""
    routed = encode_experts(random_experts(E, 2, WIDE, H, seed=1), weights)
    shared = encode_experts(random_experts(1, 2, count * WIDE, H, seed=2), weights)
    every, once = torch.zeros(x.shape[0], 1, dtype=torch.int64), torch.ones(x.shape[0], 1)
    parts = ((routed, routing.topk_ids, routing.topk_weights), (shared, every, once))
    return sum(  # type: ignore[return-value]
        moe_truth(x.float(), own.gate_up.decode(), own.down.decode(), ids, factors, ActivationSpec())
        for own, ids, factors in parts
    )


RECIPES = [
    ("bf16", None, 0.02),
    ("fp8_channel", "fp8_token", 0.08),
    ("fp8_block", "fp8_group128", 0.08),
    ("mxfp4", None, 0.02),
    ("mxfp4", "fp8_token", 0.08),
    ("nvfp4", "fp8_group128", 0.08),
    ("int4_group", None, 0.02),
]


@pytest.mark.each_choice("weights", "activations")
@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize(("weights", "activations", "most"), RECIPES)
def test_gpu_kernels_match_apart_bitwise(weights: str, activations: str | None, most: float, on_input: bool) -> None:
    """In Triton's interpreter: unsorted, sorted, and in passes."""
    if torch.cuda.is_available():
        pytest.skip("tests/gpu makes these comparisons on the device")
    pytest.importorskip("triton")
    rule = RoutingSpec(top_k=K, scale=2.5, weight_on_input=on_input)
    wishes = [Overrides(activation_format=activations, shared=own) for own in ("merged", "sequential")]
    merged, apart = (layer_of(force, weights=weights, device=HOPPER, rule=rule) for force in wishes)
    assert (merged.plan.merged_shared_experts, merged.shared, apart.plan.merged_shared_experts) == (1, None, 0)
    assert merged.plan.pipelines == (("split",) if on_input else ("direct", "split"))
    assert "shared     merged into 1 routed expert " in str(merged)
    assert merged.plan.kernel == apart.plan.shared_kernel
    for tokens in (1, 16, 19):
        x = heavy_tailed(tokens, H, seed=tokens).bfloat16()
        assert torch.equal(merged(x), apart(x))
        chosen = merged.route(x)
        assert chosen.topk_ids.shape == (tokens, K)
        assert torch.equal(merged(x, routing=chosen), apart(x))
        if not on_input:
            assert relative_error(merged(x).float(), truth_of(x, chosen, weights)) < most


@pytest.mark.parametrize("device", [DeviceFacts(kind="cpu"), HOPPER], ids=["cpu", "cuda"])
@pytest.mark.parametrize("weights", ["bf16", "mxfp4", "nvfp4"])
def test_large_shared_expert_is_split(weights: str, device: DeviceFacts) -> None:
    if device is HOPPER and torch.cuda.is_available():
        pytest.skip("tests/gpu makes these comparisons on the device")
    layer = layer_of(MERGED, weights=weights, count=3, device=device)
    assert layer.plan.merged_shared_experts == 3
    assert layer.experts.slots()[0].shape[0] == E + 3
    for tokens in (1, 7, 20):
        x = heavy_tailed(tokens, H, seed=tokens).bfloat16()
        assert relative_error(layer(x).float(), truth_of(x, layer.route(x), weights, 3)) < 0.02
    whole = layer_of(weights=weights, count=3, device=device)
    assert whole.plan.merged_shared_experts == 0
    assert relative_error(layer(x).float(), whole(x).float()) < 0.01


def test_caller_routing_reaches_only_routed_experts() -> None:
    merged, apart = layer_of(MERGED), layer_of(APART)
    x = heavy_tailed(6, H, seed=4).bfloat16()
    ids = torch.tensor([[0, 5], [-1, 3], [-1, -1], [1, E], [E + 1, 2], [-2, 0]])
    factors = torch.rand(6, 2) + 0.5
    factors[1, 0] = torch.nan  # of what is not here
    for whole in (torch.int64, torch.int32, torch.int8):
        for real in (torch.float32, torch.float64, torch.bfloat16):
            routing = Routing(topk_ids=ids.to(whole), topk_weights=factors.to(real))
            found = merged(x, routing=routing)
            assert torch.equal(found.nan_to_num(7), apart(x, routing=routing).nan_to_num(7))
            assert found.isnan().all(1).tolist() == found.isnan().any(1).tolist() == [False] * 3 + [True] * 3
    wider = Routing(topk_ids=torch.arange(4).expand(6, 4), topk_weights=torch.rand(6, 4))
    assert torch.equal(merged(x, routing=wider), apart(x, routing=wider))
    checked = layer_of(MERGED, checked=True)
    with pytest.raises(RoutingError, match="allowed: 0 to 5"):
        checked(x, routing=Routing(topk_ids=ids, topk_weights=factors))
    assert torch.equal(checked(x), apart(x))


def test_custom_rules_and_expert_factors() -> None:
    x = heavy_tailed(6, H, seed=4).bfloat16()

    def choose(x: torch.Tensor, logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = (-logits).topk(top_k)
        return ids, weights

    merged, apart = (layer_of(force, choose=choose) for force in (MERGED, APART))
    assert torch.equal(merged(x), apart(x))
    rule, logits = RoutingSpec(top_k=K, expert_scale=True), heavy_tailed(6, E, seed=5)
    narrow = route(logits, rule, expert_scale=torch.rand(E) + 0.5)
    wide = append_shared_experts(narrow, E, 2)
    assert torch.equal(wide.topk_ids, torch.cat((narrow.topk_ids, torch.tensor([[E, E + 1]] * 6)), 1))
    assert torch.equal(wide.topk_weights, torch.cat((narrow.topk_weights, torch.ones(6, 2)), 1))


def test_packed_rows_are_of_routed_experts() -> None:
    merged, apart = layer_of(MERGED), layer_of(APART)
    x, counts = heavy_tailed(E * 5, H, seed=6).bfloat16().view(E, 5, H), torch.tensor([5, 0, 2, 9, 1, 3])
    fill = torch.full_like(x, 3.0)
    assert torch.equal(merged.run_batched(x, counts, out=fill.clone()), apart.run_batched(x, counts, out=fill.clone()))


def test_a_swap_keeps_the_shared_expert() -> None:
    """One that is merged is part of what would be swapped: refused, and the layer is as it was."""
    x, other = heavy_tailed(9, H, seed=7).bfloat16(), encode_experts(random_experts(E, 2, WIDE, H, seed=8), "bf16")
    merged, apart = layer_of(MERGED), layer_of()
    before = merged(x)
    with raises_with(InputError, "swap", "1", "Overrides(shared='side_stream')"):
        merged.swap(other)
    assert torch.equal(merged(x), before)
    assert torch.equal(pickle.loads(pickle.dumps(merged))(x), copy.deepcopy(merged)(x))
    with pytest.raises(InputError, match=r"\b0\b.*\b1\b"):
        apart.swap(other, MERGED)
    assert torch.equal(apart(x), before)
    apart.swap(other)
    assert relative_error(apart(x).float(), before.float()) > 0.1
    wished = layer_of(APART)
    for force in (None, Overrides(activation_format="bf16")):
        wished.swap(other, force)
        assert wished.plan.overrides.shared == "sequential"


def test_incompatible_shared_weights_refused() -> None:
    """The plan cannot know: blocks of another size, and what a function does to the rows of routed experts."""
    big = random_experts(1, 2, WIDE, H, seed=2)
    blocks = ExpertWeights(
        gate_up=Fp8Block.encode(big.gate_up.decode(), block=(256, 256)),
        down=Fp8Block.encode(big.down.decode(), block=(256, 256)),
    )
    with raises_with(PlanError, "(256, 256)", "(128, 128)"):
        layer_of(MERGED, weights="fp8_block", shared_weights=blocks)
    assert layer_of(weights="fp8_block", shared_weights=blocks, device=HOPPER).plan.merged_shared_experts == 0
    with raises_with(PlanError, "mxfp4", "bf16"):
        layer_of(MERGED, shared_weights=encode_experts(big, "mxfp4"))
    with pytest.raises(PlanError, match="after_expert"):
        layer_of(MERGED, after_expert=lambda rows: rows * 2)
    doubled = layer_of(after_expert=lambda rows: rows * 2, device=HOPPER)
    assert doubled.plan.merged_shared_experts == 0


REASONS = {
    "gate": {"shared": SharedSpec(intermediate_size=WIDE, gated=True)},
    "activation: found": {"shared": SharedSpec(intermediate_size=WIDE, activation=ActivationSpec(kind="geglu"))},
    "weights: found fp8_block": {"shared": SharedSpec(intermediate_size=WIDE, weight_format="fp8_block")},
    "biases: found False": {"expert_bias": True},
    "latent width: found None": {"latent_size": 32},
    f"latent width: found None, the routed experts have {H}": {"latent_size": H},
    "width is 48": {"shared": SharedSpec(intermediate_size=48)},
}


@pytest.mark.parametrize("reason", REASONS)
def test_a_plan_says_why_not(reason: str) -> None:
    base: dict[str, Any] = {"hidden_size": H, "intermediate_size": WIDE, "num_experts": E}
    more = {"routing": RoutingSpec(top_k=K), "shared": SharedSpec(intermediate_size=WIDE), **REASONS[reason]}
    problem = Problem(spec=MoESpec(**base, **more), device=HOPPER)
    with pytest.raises(PlanError, match=f"shared='merged'.*{reason}"):
        plan(problem, MERGED)
    assert plan(problem).to_json()["merged_shared_experts"] == 0


def test_plan_describes_merged_shared_expert() -> None:
    spec = MoESpec(
        hidden_size=H,
        intermediate_size=WIDE,
        num_experts=E,
        routing=RoutingSpec(top_k=K),
        shared=SharedSpec(intermediate_size=WIDE),
    )
    made = plan(Problem(spec=spec, device=HOPPER, limits=Limits(max_tokens=10)), MERGED)
    assert (made.merged_shared_experts, made.side_stream_tokens, made.capacity) == (1, 0, 10 * (K + 1))
    assert made.weight_bytes == E * made.expert_bytes
    assert not any(region.name.startswith("shared/") for region in made.regions)
    # Nothing to a layer without one, nothing over ranks.
    assert plan(Problem(spec=replace(spec, shared=None), device=HOPPER), MERGED).merged_shared_experts == 0
    half = Placement(rank=0, world_size=2, expert_ids=(0, 1, 2), ranks=((0, 1, 2), (3, 4, 5)))
    assert plan(Problem(spec=spec, device=DeviceFacts(kind="cpu"), placement=half)).merged_shared_experts == 0
    with raises_with(PlanError, "merged"):
        plan(Problem(spec=spec, device=DeviceFacts(kind="cpu"), placement=half), MERGED)
    with raises_with(SpecError, "shared", "'aside'", "sequential", "side_stream", "merged"):
        Overrides(shared="aside")  # type: ignore[arg-type]


def test_plan_of_a_side_stream() -> None:
    """The default on one GPU; refused elsewhere if it is forced."""
    spec = MoESpec(
        hidden_size=H,
        intermediate_size=WIDE,
        num_experts=E,
        routing=RoutingSpec(top_k=K),
        shared=SharedSpec(intermediate_size=WIDE),
    )
    problem, forced = Problem(spec=spec, device=HOPPER), Overrides(shared="side_stream")
    for made in (plan(problem), plan(problem, forced)):
        assert (made.merged_shared_experts, made.side_stream_tokens) == (0, 512)
        assert made.to_json()["side_stream_tokens"] == 512
        assert re.search(r"\n *shared +side_stream .*512", made.explain())
    assert plan(problem, APART).side_stream_tokens == 0
    assert plan(replace(problem, spec=replace(spec, shared=None)), forced).side_stream_tokens == 0
    half = Placement(rank=0, world_size=2, expert_ids=(0, 1, 2), ranks=((0, 1, 2), (3, 4, 5)))
    for reason, asked, force in (
        ("cpu", replace(problem, device=DeviceFacts(kind="cpu")), forced),
        ("symm_mem", replace(problem, placement=half), forced),
        ("CUDA graph", problem, replace(forced, kernel="reference")),
    ):
        with raises_with(PlanError, "shared='side_stream'", reason, "shared='sequential'"):
            plan(asked, force)
        assert plan(asked, replace(force, shared=None)).side_stream_tokens == 0


def test_regrouping_merged_shared_expert_refused() -> None:
    with raises_with(InputError, "1", "shared='sequential'"):
        regroup({0: layer_of(MERGED)})


def test_shared_weights_must_fit_the_plan() -> None:
    problem = layer_of().plan.problem
    routed, bf16 = (encode_experts(random_experts(count, 2, WIDE, H, seed=1), "bf16") for count in (E, 1))
    shared = SharedWeights(experts=bf16)
    for parts in ({"shared": shared}, {}):
        with raises_with(InputError, f"{E + 1} in all", f"found {E}", "merge_shared", "without shared="):
            MoELayer(routed, plan(problem, MERGED), **parts)
    with raises_with(InputError, "merge_shared", "shared=", "Overrides(shared='merged')"):
        merge_shared(plan(problem, APART), routed, shared)
    coded = SharedWeights(experts=encode_experts(bf16, "mxfp4"))
    with raises_with(InputError, "mxfp4", "bf16", "SharedSpec(weight_format='mxfp4'"):
        MoELayer(routed, plan(problem, APART), shared=coded)
    with raises_with(InputError, "shared", "found none", "pass shared="):
        MoELayer(routed, plan(problem, APART))


def test_latent_weights_with_a_shared_expert() -> None:
    spec = MoESpec(
        hidden_size=H,
        intermediate_size=WIDE,
        num_experts=E,
        routing=RoutingSpec(top_k=K),
        latent_size=48,
        shared=SharedSpec(intermediate_size=WIDE),
    )
    layer = MoELayer(
        random_bf16(E, 48, 1),
        plan(Problem(spec=spec, device=HOPPER)),
        router=RouterWeights(weight=heavy_tailed(E, H, seed=3)),
        shared=SharedWeights(experts=random_bf16(1, H, 2)),
        latent=LatentWeights(down=heavy_tailed(48, H, seed=4), up=heavy_tailed(H, 48, seed=5)),
    )
    assert layer.plan.merged_shared_experts == 0
    assert layer.shared is not None


def random_bf16(experts: int, hidden: int, seed: int) -> Any:
    return encode_experts(random_experts(experts, 2, WIDE, hidden, seed=seed), "bf16")


@pytest.mark.parametrize("merged", [1, 3])
def test_a_kernel_writes_the_further_slots(merged: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chosen ones keep their bits; nothing else is written."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("tests/gpu makes these comparisons on the device")
    ids = uneven_ids(9, 3, 20, seed=2)
    ids[0, 0], ids[1, 1], ids[2, 2] = -1, 20, -5
    for whole in (torch.int64, torch.int32, torch.int8):
        for real in (torch.float32, torch.bfloat16):
            given = Routing(topk_ids=ids.to(whole), topk_weights=torch.rand(9, 3).to(real))
            wanted = append_shared_experts(given, 20, merged)
            with monkeypatch.context() as patched:
                patched.setattr(route_wide, "on_device", lambda *_: True)
                made = append_shared_experts(given, 20, merged, Poisoned())
            assert torch.equal(made.topk_ids, wanted.topk_ids)
            assert torch.equal(made.topk_weights, wanted.topk_weights)
            assert made.topk_ids[1, 1] == made.topk_ids[2, 2] == -2


def test_kernels_take_additional_experts() -> None:
    """A kernel is asked for the routed ones alone: none may refuse a number of experts."""
    problem = layer_of(APART).plan.problem
    for kernel in KERNELS:
        for wide in (problem, problem.with_merged_experts(3)):
            asked = replace(wide.routed, device=problem.device)
            assert (kernel.refuse(asked) is None) == (kernel.refuse(problem.routed) is None)
