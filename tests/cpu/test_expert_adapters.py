"""Unmerged adapters of experts: PEFT files on disk, layers on a CPU, whole models, the command, plans and refusals."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers
import torch

from adapted import adapted_truth, random_adapters
from collegium import (
    BadScaleError,
    ExpertAdapter,
    ExpertAdapters,
    InputError,
    Limits,
    LowRankPair,
    MoELayer,
    MoESpec,
    Overrides,
    PlanError,
    Problem,
    RouterWeights,
    Routing,
    RoutingError,
    RoutingSpec,
    load_adapters,
    load_layer,
    merge_shared,
    plan,
)
from collegium.adapters import AdapterSizes
from collegium.checkpoint import Checkpoint, with_adapter
from collegium.errors import CheckpointError, ConfigError
from collegium.graphs import capture
from collegium.integrations.transformers import choose_adapters, layers_of, load_model
from collegium.parallel.placement import linear
from collegium.problem import DeviceFacts
from collegium.testing.compare import heavy_tailed, random_experts, relative_error
from collegium.types import ActivationSpec, SharedSpec, SharedWeights
from commands import command
from integers import encoded
from lora_files import ALPHA, LAYERS, RANK, E, H, model_of, stacks, write
from raising import assert_values, raises_with

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

EXPERTS, HIDDEN, WIDE, TOP_K = 5, 48, 40, 3
RANKS = (3, 16, 64)
KERNELS = [
    ("bf16", "bf16", "cpu_grouped", 0.02),
    ("bf16", "bf16", "reference", 0.01),
    ("mxfp4", "bf16", "cpu_fused", 0.02),
    ("mxfp4", "bf16", "cpu_grouped", 0.02),
    ("fp8_block", "bf16", "reference", 0.01),
    ("int4_ordered", "bf16", "cpu_fused", 0.02),
    ("bf16", "fp32", "cpu_grouped", 1e-5),
]


def layer_of(
    weights: str = "bf16", dtype: str = "bf16", kernel: str | None = None, *, checked: bool = False, **spec: Any
) -> tuple[tuple[Tensor, Tensor], MoELayer]:
    """Return the decoded weights and a layer with a router."""
    whole = MoESpec(
        hidden_size=HIDDEN,
        intermediate_size=WIDE,
        num_experts=EXPERTS,
        routing=RoutingSpec(top_k=TOP_K),
        weight_format=weights,
        **spec,
    )
    experts = encoded(random_experts(EXPERTS, whole.gate_up_parts, WIDE, HIDDEN, seed=1), weights, group=8)
    problem = Problem(spec=whole, device=DeviceFacts(kind="cpu"), dtype=dtype)  # type: ignore[arg-type]
    router = RouterWeights(weight=heavy_tailed(EXPERTS, HIDDEN, seed=2))
    layer = MoELayer(experts, plan(problem, Overrides(kernel=kernel)), router=router, checked=checked)
    return (experts.gate_up.decode(), experts.down.decode()), layer


def adapters_of(**changes: Any) -> ExpertAdapters:
    return random_adapters(RANKS, EXPERTS, WIDE, HIDDEN, **changes)


IDS = torch.tensor([0, -1, 2, 1, -1, 2, 0, 1])


@pytest.mark.parametrize(("weights", "dtype", "kernel", "most"), KERNELS)
def test_mixed_adapters_match_merged_weights(weights: str, dtype: str, kernel: str, most: float) -> None:
    decoded, layer = layer_of(weights, dtype, kernel)
    x = heavy_tailed(8, HIDDEN, seed=3).to(layer.input_dtype)
    routing = layer.route(x)
    plain = layer(x, routing=routing)
    adapters = adapters_of()
    layer.set_adapters(adapters)
    assert torch.equal(layer(x), plain)
    for ids in (IDS, IDS.int()):
        found = layer(x, adapter_ids=ids)
        assert torch.equal(found[ids < 0], plain[ids < 0])
        args = (x, decoded, routing.topk_ids, routing.topk_weights, adapters, ids, ActivationSpec())
        truth = adapted_truth(*args, layer.input_dtype)
        for number in range(-1, len(RANKS)):
            assert relative_error(found[ids == number], truth[ids == number]) < most, number
    layer.set_adapters(None)
    assert torch.equal(layer(x), plain)


@pytest.mark.parametrize("kind", ["relu2", "geglu", "swiglu_oai"])
@pytest.mark.parametrize("kernel", ["cpu_grouped", "reference"])
def test_every_activation(kind: Any, kernel: str) -> None:
    spec = ActivationSpec(kind=kind)
    decoded, layer = layer_of(kernel=kernel, activation=spec)
    adapters = adapters_of(gated=spec.gated)
    layer.set_adapters(adapters)
    x = heavy_tailed(8, HIDDEN, seed=3).bfloat16()
    routing = layer.route(x)
    args = (x, decoded, routing.topk_ids, routing.topk_weights, adapters, IDS, spec)
    assert relative_error(layer(x, adapter_ids=IDS), adapted_truth(*args)) < 0.02


def test_router_weights_on_the_input() -> None:
    _, layer = layer_of("bf16", "fp32")
    decoded, weighted = layer_of("bf16", "fp32")
    spec = replace(weighted.spec, routing=RoutingSpec(top_k=1, weight_on_input=True, score="sigmoid"))
    problem = Problem(spec=spec, device=DeviceFacts(kind="cpu"), dtype="fp32")
    experts = encoded(random_experts(EXPERTS, 2, WIDE, HIDDEN, seed=1), "bf16")
    weighted = MoELayer(experts, plan(problem))
    adapters = adapters_of()
    for each in (layer, weighted):
        each.set_adapters(adapters)
    x = heavy_tailed(8, HIDDEN, seed=3)
    ids = torch.arange(8)[:, None] % EXPERTS
    weights = torch.linspace(0.2, 0.9, 8)[:, None]
    found = weighted(x, routing=Routing(topk_ids=ids, topk_weights=weights), adapter_ids=IDS)
    args = (x * weights, decoded, ids, torch.ones(8, 1), adapters, IDS, ActivationSpec(), torch.float32)
    assert relative_error(found, adapted_truth(*args)) < 1e-5


def test_merged_shared_expert_has_no_adapter() -> None:
    _, apart = layer_of("bf16", "fp32")
    spec = replace(apart.spec, shared=SharedSpec(intermediate_size=WIDE))
    routed = encoded(random_experts(EXPERTS, 2, WIDE, HIDDEN, seed=1), "bf16")
    shared = SharedWeights(experts=encoded(random_experts(1, 2, WIDE, HIDDEN, seed=9), "bf16"))
    problem = Problem(spec=spec, device=DeviceFacts(kind="cpu"), dtype="fp32")
    merged_plan = plan(problem, Overrides(shared="merged"))
    sequential = MoELayer(routed, plan(problem, Overrides(shared="sequential")), shared=shared)
    merged = MoELayer(merge_shared(merged_plan, routed, shared), merged_plan)
    x = heavy_tailed(8, HIDDEN, seed=3)
    routing = apart.route(x)
    for layer in (sequential, merged):
        layer.set_adapters(adapters_of())
    found, wanted = (layer(x, routing=routing, adapter_ids=IDS) for layer in (merged, sequential))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_chunks_copies_pickles_and_swaps() -> None:
    _, layer = layer_of("bf16", "fp32")
    problem = replace(layer.plan.problem, limits=Limits(max_tokens=3))
    experts = encoded(random_experts(EXPERTS, 2, WIDE, HIDDEN, seed=1), "bf16")
    chunked = MoELayer(experts, plan(problem), router=layer.router)
    for each in (layer, chunked):
        each.set_adapters(adapters_of())
    x = heavy_tailed(8, HIDDEN, seed=3)
    wanted = layer(x, adapter_ids=IDS)
    torch.testing.assert_close(chunked(x, adapter_ids=IDS), wanted, rtol=1e-4, atol=1e-4)
    for other in (copy.copy(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x, adapter_ids=IDS), wanted)
    shallow = copy.copy(layer)
    shallow.set_adapters(None)
    assert torch.equal(layer(x, adapter_ids=IDS), wanted)
    assert layer.nbytes - shallow.nbytes == layer.adapters.sizes.nbytes  # type: ignore[union-attr]
    layer.swap(experts)
    assert torch.equal(layer(x, adapter_ids=IDS), wanted)
    assert layer.plan.adapters is not None


def test_captured_calls_pass_ids() -> None:
    _, layer = layer_of("bf16", "fp32")
    layer.set_adapters(adapters_of())
    runner = capture(layer, (1, 4, 16), adapter_ids=True)
    x = heavy_tailed(3, HIDDEN, seed=3)
    padded = layer(torch.cat([x, x[:1]]), adapter_ids=torch.tensor([0, -1, 2, 0]))[:3]
    torch.testing.assert_close(runner(x, adapter_ids=torch.tensor([0, -1, 2])), padded)
    with raises_with(InputError, "adapter_ids"):
        runner(x)


def test_compiled_layer_takes_ids() -> None:
    _, layer = layer_of("bf16", "fp32")
    layer.set_adapters(adapters_of())
    x = heavy_tailed(8, HIDDEN, seed=3)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, adapter_ids=IDS), layer(x, adapter_ids=IDS))


def test_unknown_ids() -> None:
    _, layer = layer_of("bf16", "fp32")
    layer.set_adapters(adapters_of())
    x = heavy_tailed(8, HIDDEN, seed=3)
    ids = IDS.clone()
    ids[2], ids[5] = 3, -2
    found = layer(x, adapter_ids=ids)
    assert found.isnan().all(dim=1).nonzero()[:, 0].tolist() == [2, 5]
    assert found.isnan().any(dim=1).nonzero()[:, 0].tolist() == [2, 5]
    layer.checked = True
    with raises_with(RoutingError, "-2", "3", "-1", "2", "adapter0"):
        layer(x, adapter_ids=ids)
    assert bool(layer(x, adapter_ids=IDS).isfinite().all())


def test_wrong_calls() -> None:
    _, layer = layer_of()
    x = heavy_tailed(8, HIDDEN, seed=3).bfloat16()
    with raises_with(InputError, "set_adapters"):
        layer(x, adapter_ids=IDS)
    layer.set_adapters(adapters_of())
    for ids in (IDS[:7], IDS.float(), IDS[:, None], IDS.to(torch.int16)):
        with raises_with(InputError, str(tuple(ids.shape)), str(ids.dtype), "8", "2"):
            layer(x, adapter_ids=ids)
    with pytest.raises(InputError, match="adapter_ids is a list"):
        layer(x, adapter_ids=IDS.tolist())  # type: ignore[arg-type]
    with pytest.raises(InputError, match="set_adapters"):
        layer.adapters = None
    assert torch.equal(layer(x.view(2, 4, HIDDEN), adapter_ids=IDS).view(8, HIDDEN), layer(x, adapter_ids=IDS))


PAIR = LowRankPair(a=torch.ones(EXPERTS, 4, HIDDEN), b=torch.ones(EXPERTS, WIDE, 4))
FAULTS: dict[str, tuple[type[Exception], dict[str, Any], tuple[str, ...]]] = {
    "none": (InputError, {}, ("broken", "gate", "up", "down")),
    "experts": (InputError, {"up": LowRankPair(a=PAIR.a[:4], b=PAIR.b[:4])}, ("broken", "up", "4", "5")),
    "columns": (InputError, {"down": PAIR}, ("down", str((5, 4, HIDDEN)), str((5, 4, WIDE)))),
    "ranks": (InputError, {"up": LowRankPair(a=PAIR.a[:, :3], b=PAIR.b)}, ("up", "3", "4")),
    "rank 0": (InputError, {"up": LowRankPair(a=PAIR.a[:, :0], b=PAIR.b[..., :0])}, ("up", "rank from 1")),
    "scale": (InputError, {"up": replace(PAIR, scale=torch.ones(4))}, ("scale of up", "(4,)", "(5,)")),
    "nan": (BadScaleError, {"up": replace(PAIR, a=PAIR.a * torch.nan)}, ("broken", "A of up")),
    "infinite scale": (BadScaleError, {"up": replace(PAIR, scale=float("inf"))}, ("broken", "scale of up")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_adapters_leave_the_layer_unchanged(fault: str) -> None:
    error, pairs, values = FAULTS[fault]
    _, layer = layer_of()
    layer.set_adapters(adapters_of())
    x = heavy_tailed(8, HIDDEN, seed=3).bfloat16()
    wanted = layer(x, adapter_ids=IDS)
    with raises_with(error, *values):
        layer.set_adapters(ExpertAdapters((ExpertAdapter(name="broken", **pairs),)))
    assert torch.equal(layer(x, adapter_ids=IDS), wanted)


def test_wrong_containers() -> None:
    with raises_with(InputError, "adapter"):
        ExpertAdapters(())
    _, plain = layer_of(activation=ActivationSpec(kind="relu2"))
    with raises_with(InputError, "broken", "gate", "up, down"):
        plain.set_adapters(ExpertAdapters((ExpertAdapter(name="broken", gate=PAIR),)))
    _, half = layer_of("bf16", "fp16")
    with raises_with(BadScaleError, "1e+06", "65504"):
        half.set_adapters(ExpertAdapters((ExpertAdapter(name="large", up=replace(PAIR, a=PAIR.a * 1e6)),)))


SIZES = AdapterSizes(ranks=(16, 64), inner_ranks=(64, 64), nbytes=1000)


def gpu_plan(weights: str = "bf16", placement: Any = None, tokens: int = 4096) -> Any:
    spec = MoESpec(
        hidden_size=2048,
        intermediate_size=768,
        num_experts=128,
        routing=RoutingSpec(top_k=8),
        weight_format=weights,
    )
    device = DeviceFacts(kind="cuda", name="H100", capability=(9, 0))
    return plan(Problem(spec=spec, device=device, placement=placement, limits=Limits(max_tokens=tokens)))


def test_plan_explains_and_counts_memory() -> None:
    before = gpu_plan()
    planned = before.with_adapters(SIZES)
    line = "adapters   2 of rank 16, 64, chosen per token; 1,000 bytes; batches with adapters run in small tiles"
    assert line in planned.explain()
    assert "adapters" not in before.explain()
    rows = 4096 * 8
    # Inner rows of gate and up, and the changes of 16 rows for each expert by down, which are larger.
    assert planned.workspace_bytes - before.workspace_bytes == 4 * (rows * 2 * 64 + 16 * 128 * 2048)
    assert planned.with_adapters(SIZES) == planned
    assert planned.with_adapters(None) == before
    assert planned.to_json()["adapters"] == SIZES._asdict()
    assert "small tiles" not in gpu_plan(tokens=16).with_adapters(SIZES).explain().split("adapters ")[1].split("\n")[0]


def test_plan_refuses() -> None:
    with raises_with(PlanError, "the dispatcher is symm_mem", "local", "2 adapters"):
        gpu_plan(placement=linear(128, 0, 2)).with_adapters(SIZES)
    with raises_with(PlanError, "triton_w4a16", "int4_ordered"):
        gpu_plan("int4_ordered").with_adapters(SIZES)


@pytest.fixture
def on_disk(tmp_path: Path) -> tuple[Path, list[Path]]:
    """A toy model on disk and two adapters of its experts, of ranks 3 and 2."""
    model = model_of("qwen3_moe", tmp_path / "base")
    folders: list[Path] = []
    for name, rank in (("first", RANK), ("second", 2)):
        tensors = {key: value for key, value in stacks(model).items() if "q_proj" not in key}
        if rank != RANK:
            tensors = {
                key: value[: rank * E] if "lora_A" in key else 0.5 * value[:, : rank * E]
                for key, value in tensors.items()
            }
        changes = {"r": rank, "target_modules": None}
        folders.append(write(tmp_path / name, {key: t.contiguous() for key, t in tensors.items()}, **changes))
    return tmp_path / "base", folders


def test_peft_files_match_merged_checkpoints(on_disk: tuple[Path, list[Path]]) -> None:
    base, folders = on_disk
    for number in range(LAYERS):
        layer = load_layer(base, number, device="cpu", dtype="fp32")
        layer.set_adapters(load_adapters(base, number, folders))
        assert layer.adapters is not None
        assert layer.adapters.names == tuple(map(str, folders))
        assert layer.adapters.sizes.ranks == (RANK, 2)
        x = heavy_tailed(6, H, seed=4)
        ids = torch.tensor([0, 1, -1, 1, 0, -1])
        found = layer(x, adapter_ids=ids)
        assert torch.equal(found[ids < 0], layer(x)[ids < 0])
        for adapter, folder in enumerate(folders):
            merged = load_layer(with_adapter(Checkpoint.open(base), folder), number, device="cpu", dtype="fp32")
            wanted = merged(x, routing=layer.route(x))
            assert relative_error(found[ids == adapter], wanted[ids == adapter]) < 0.02  # merged into bfloat16
            assert relative_error(layer(x)[ids == adapter], wanted[ids == adapter]) > 0.1


def test_ranks_and_scales_by_pattern(tmp_path: Path) -> None:
    """An adapter of single experts' modules, of which some have another rank and alpha, and one has no pair."""
    model_of("qwen3_moe", tmp_path / "base")
    base = Checkpoint.open(tmp_path / "base")
    names = [name for name in base.tensors if ".experts." in name and "3.up_proj" not in name]
    tensors: dict[str, Tensor] = {}
    for seed, name in enumerate(names):
        rows, columns = base.info(name).shape
        rank = 4 if ".1.gate_proj" in name else RANK
        path = name.removesuffix(".weight")
        tensors[f"base_model.model.{path}.lora_A.weight"] = heavy_tailed(rank, columns, seed=seed)
        tensors[f"base_model.model.{path}.lora_B.weight"] = heavy_tailed(rows, rank, seed=seed + 1)
    patterns = {"rank_pattern": {"experts.1.gate_proj": 4}, "alpha_pattern": {"experts.2.down_proj": 1.5}}
    modules = {"target_modules": ["gate_proj", "up_proj", "down_proj"], "target_parameters": None}
    folder = write(tmp_path / "adapter", tensors, **modules, **patterns)
    layer = load_layer(base, 1, device="cpu", dtype="fp32")
    adapters = load_adapters(base, 1, [folder])
    layer.set_adapters(adapters)
    pairs = adapters.adapters[0].pairs
    assert [pairs[name].rank for name in ("gate", "up", "down")] == [4, RANK, RANK]
    assert pairs["gate"].scale.tolist() == pytest.approx([ALPHA / RANK, ALPHA / 4] + [ALPHA / RANK] * 3)  # type: ignore[union-attr]
    assert pairs["up"].scale.tolist() == pytest.approx([ALPHA / RANK] * 3 + [0.0] + [ALPHA / RANK])  # type: ignore[union-attr]
    assert pairs["down"].scale[2] == pytest.approx(1.5 / RANK)  # type: ignore[index]
    x = heavy_tailed(6, H, seed=4)
    wanted = load_layer(with_adapter(base, folder), 1, device="cpu", dtype="fp32")(x, routing=layer.route(x))
    assert relative_error(layer(x, adapter_ids=torch.zeros(6, dtype=torch.int64)), wanted) < 0.01


def test_adapters_of_quantised_experts(on_disk: tuple[Path, list[Path]], tmp_path: Path) -> None:
    base, folders = on_disk
    code, _, said = command("quantize", base, "--to", "fp8_channel", "--out", tmp_path / "small")
    assert code == 0, said
    with raises_with(ConfigError, "F8_E4M3 (20, 24)", "BF16, F16 and F32", "quantize"):
        with_adapter(Checkpoint.open(tmp_path / "small"), folders[0])
    layer = load_layer(tmp_path / "small", 0, device="cpu", dtype="fp32")
    assert layer.spec.weight_format == "fp8_channel"
    layer.set_adapters(load_adapters(tmp_path / "small", 0, folders))
    plain = load_layer(base, 0, device="cpu", dtype="fp32", weight_format="fp8_channel")
    plain.set_adapters(load_adapters(base, 0, folders))
    x = heavy_tailed(6, H, seed=4)
    ids = torch.tensor([0, 1, -1, 1, 0, -1])
    assert torch.equal(layer(x, adapter_ids=ids), plain(x, adapter_ids=ids))


def test_other_modules_and_layers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = model_of("qwen3_moe", tmp_path / "base")
    tensors = stacks(model)
    folder = write(tmp_path / "adapter", tensors)
    with raises_with(ConfigError, "2 modules", "q_proj", "experts_only=True"):
        load_adapters(tmp_path / "base", 0, [folder])
    adapters = load_adapters(tmp_path / "base", 0, [folder], experts_only=True)
    assert adapters.adapters[0].rank == RANK
    assert_values(caplog.text, "2 modules", "q_proj")
    first = {key: value for key, value in tensors.items() if "layers.0.mlp" in key}
    lower = write(tmp_path / "lower", first, target_modules=None)
    with raises_with(ConfigError, "layer 1", "lower"):
        load_adapters(tmp_path / "base", 1, [lower])
    attention = {key: value for key, value in tensors.items() if "q_proj" in key}
    only = write(tmp_path / "attention", attention)
    with raises_with(ConfigError, "2 modules", "none of them routed experts"):
        load_adapters(tmp_path / "base", 0, [only], experts_only=True)
    with raises_with(ConfigError, "lower", "a list of folders"):
        load_adapters(tmp_path / "base", 0, str(lower))  # type: ignore[arg-type]
    # An adapter that leaves a layer alone has zeros there, so ids mean the same in every layer.
    whole = {key: value for key, value in tensors.items() if "q_proj" not in key}
    every = write(tmp_path / "every", whole, target_modules=None)
    layer = load_layer(tmp_path / "base", 1, device="cpu", dtype="fp32")
    layer.set_adapters(load_adapters(tmp_path / "base", 1, [lower, every]))
    x = heavy_tailed(4, H, seed=4)
    found = layer(x, adapter_ids=torch.tensor([0, 1, 0, -1]))
    changed = (found != layer(x)).any(dim=1).tolist()
    assert changed == [False, True, False, False]


BROKEN: dict[str, tuple[type[CheckpointError], dict[str, Any], str]] = {
    "dora": (ConfigError, {"use_dora": True}, "use_dora=True is not implemented"),
    "rank": (CheckpointError, {"r": 4}, r"lora_A and lora_B are \(15, 24\)"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_files(fault: str, tmp_path: Path) -> None:
    error, changes, message = BROKEN[fault]
    model = model_of("qwen3_moe", tmp_path / "base")
    tensors = {key: value for key, value in stacks(model).items() if "q_proj" not in key}
    folder = write(tmp_path / "adapter", tensors, **(changes | {"target_modules": None}))
    with pytest.raises(error, match=message):
        load_adapters(tmp_path / "base", 0, [folder])


def test_two_layers_of_a_whole_model(on_disk: tuple[Path, list[Path]]) -> None:
    base, folders = on_disk
    model = load_model(base, device="cpu", dtype="fp32", adapters=folders)
    assert [len(layer.adapters.names) for layer in layers_of(model) if layer.adapters] == [2] * LAYERS
    ids = torch.arange(12).view(3, 4) % 40
    with torch.inference_mode():
        plain = model(ids).logits
        choose_adapters(model, [1, -1, 0])
        found = model(ids).logits
        torch.testing.assert_close(found[1], plain[1])  # bits of a CPU depend on how many rows an expert gets
        for row, folder in ((2, folders[0]), (0, folders[1])):
            wanted = load_model(base, device="cpu", dtype="fp32", adapter=folder)(ids[row : row + 1]).logits[0]
            assert relative_error(found[row], wanted) < 0.02
            assert relative_error(plain[row], wanted) > 0.05
        choose_adapters(model, None)
        assert torch.equal(model(ids).logits, plain)
        choose_adapters(model, [0, 1])
        with raises_with(InputError, "2 sequences", "the batch has 3"):
            model(ids)
    with raises_with(InputError, "[0, 2]", "-1", "1"):
        choose_adapters(model, [0, 2])
    with pytest.raises(InputError, match="no adapters"):
        choose_adapters(load_model(base, device="cpu"), [0])


def test_generate_with_several_adapters(on_disk: tuple[Path, list[Path]]) -> None:
    base, folders = on_disk
    words = {f"w{number}": number for number in range(40)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(base / "tokenizer.json"))
    shared = ("generate", base, "--device", "cpu", "--tokens", "6", "--json")
    wanted: list[str] = []
    for folder, prompt in zip(folders, ("w3 w5", "w7"), strict=True):
        code, out, said = command(*shared, "--prompt", prompt, "--adapter", folder)
        assert code == 0, said
        wanted.append(json.loads(out)["text"])
    both = [part for folder in folders for part in ("--adapter", folder)]
    code, out, said = command(*shared, *both, "--prompt", "w3 w5", "--prompt", "w7")
    assert code == 0, said
    report = json.loads(out)
    assert report["adapters"] == list(map(str, folders))
    assert report["prompts"] == ["w3 w5", "w7"]
    assert [written["text"].split()[:2] for written in report["texts"]] == [text.split()[:2] for text in wanted]
    code, out, _ = command(*shared[:-1], *both, "--prompt", "w3")
    assert code == 0
    assert all(folder.name in out for folder in folders)
    code, out, _ = command(*shared, *both, *["--prompt", "w3"] * 3)
    assert code == 1
    assert_values(out, "3 prompts", "2 adapters")
