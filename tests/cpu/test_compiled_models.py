"""Models of several layers under torch.compile: each layer runs itself, whenever the model is compiled."""

from __future__ import annotations

import copy
import io
import pickle
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
from torch import nn

from collegium import InputError, MoELayer, MoESpec, Problem, RouterWeights, RoutingSpec, plan
from collegium.integrations.transformers import experts_modules, load_model, register
from collegium.runtime.devices import probe
from collegium.testing.compare import heavy_tailed, random_experts, relative_error
from raising import raises_with

transformers = pytest.importorskip("transformers")
SPEC = MoESpec(hidden_size=40, intermediate_size=24, num_experts=5, routing=RoutingSpec(top_k=2), weight_format="fp32")
SHIPPED = Path(__file__).resolve().parents[2] / "demo" / "fables-16m"
IDS = torch.randint(5, 90, (2, 9), generator=torch.Generator().manual_seed(2))


def layer(seed: int) -> MoELayer:
    router = RouterWeights(weight=heavy_tailed(5, 40, seed=seed + 100))
    made = plan(Problem(spec=SPEC, device=probe("cpu"), dtype="fp32"))
    return MoELayer(random_experts(5, 2, 24, 40, seed=seed), made, router=router)


class Stack(nn.Module):
    def __init__(self, layers: list[MoELayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.layers:
            x = torch.tanh(each(x)) + x
        return x


class Broken(Stack):
    """The compiler gives up between the layers, so one piece of compiled code serves all of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.layers:
            torch._dynamo.graph_break()
            x = torch.tanh(each(x)) + x
        return x


def qwen() -> nn.Module:
    torch.manual_seed(1)
    config = transformers.Qwen3MoeConfig(
        vocab_size=97,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_experts=7,
        num_experts_per_tok=3,
        tie_word_embeddings=False,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        nn.init.ones_(parameter) if "norm" in name else nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model.requires_grad_(False)


def eager(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    model.set_experts_implementation("eager")
    wanted = model(ids).logits
    model.set_experts_implementation("collegium")
    return wanted


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", [Stack, Broken])
@pytest.mark.parametrize("first", ["eager", "compiled"])
def test_every_layer_runs_itself(kind: type[Stack], first: str) -> None:
    model = kind([layer(1), layer(2), layer(3)])
    x = heavy_tailed(6, 40, seed=4)
    if first == "eager":
        model(x)
    compiled = torch.compile(model, backend="aot_eager")
    for given in (x, x[:1], x[:4], x):  # the second and third recompile
        assert torch.equal(compiled(given), model(given))


def copies(made: MoELayer) -> list[MoELayer]:
    kept = io.BytesIO()
    torch.save(made, kept)
    kept.seek(0)
    return [copy.deepcopy(made), pickle.loads(pickle.dumps(made)), torch.load(kept, weights_only=False)]


def test_sent_layers_keep_running_here() -> None:
    """Sending a tensor moves it into memory that both processes see."""
    sent, x = layer(1), heavy_tailed(3, 40, seed=9)
    wanted = sent(x)
    there = pickle.loads(ForkingPickler.dumps(sent))
    compiled = torch.compile(Stack([sent]), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), torch.tanh(wanted) + x)
    assert torch.equal(there(x), wanted)


def test_copied_layers_outlive_originals() -> None:
    made, x = layer(1), heavy_tailed(3, 40, seed=5)
    wanted = made(x)
    found = copies(made)
    del made
    for own in found:
        assert torch.equal(own(x), wanted)
        assert torch.equal(torch.compile(own, backend="aot_eager", fullgraph=True)(x), wanted)


@pytest.mark.parametrize("first", ["eager", "compiled"])
def test_compiled_transformers_model_matches_eager(first: str) -> None:
    register()
    model = qwen()
    wanted = {length: eager(model, IDS[:, :length]) for length in (9, 4, 6)}
    if first == "eager":
        model(IDS)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for length in (9, 4, 6, 9):
        assert relative_error(compiled(IDS[:, :length]).logits, wanted[length]) < 2e-5


def test_compiled_models_see_changed_weights() -> None:
    register()
    model = qwen()
    model.set_experts_implementation("collegium")
    other = copy.deepcopy(model)
    for module in experts_modules(other).values():
        module.down_proj.mul_(-3)
    compiled = [torch.compile(each, backend="aot_eager") for each in (model, other)]
    for run, each in zip(compiled, (model, other), strict=True):
        assert relative_error(run(IDS).logits, eager(each, IDS)) < 2e-5
    before = eager(model, IDS)
    for module in experts_modules(model).values():
        module.gate_up_proj.mul_(0.5)
    assert relative_error(compiled[0](IDS).logits, eager(model, IDS)) < 2e-5
    assert relative_error(before, eager(model, IDS)) > 1e-2


def test_compiled_loaded_model_matches_eager() -> None:
    model = load_model(str(SHIPPED), device="cpu")
    with torch.inference_mode():
        wanted = model(IDS).logits
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            assert relative_error(compiled(IDS).logits, wanted) < 1e-2
        assert relative_error(compiled(IDS[:, :5]).logits, model(IDS[:, :5]).logits) < 1e-2


def _generate(model: nn.Module, *, compiled: bool) -> torch.Tensor:
    """Return greedy tokens with a static cache; compiled decode steps must be one graph each."""
    whole = transformers.CompileConfig(fullgraph=True, backend="aot_eager", mode="default")
    whole._compile_all_devices = True
    options = {"compile_config": whole} if compiled else {"disable_compile": True}
    model.generation_config.eos_token_id = None  # type: ignore[union-attr]
    return model.generate(IDS, max_new_tokens=12, do_sample=False, cache_implementation="static", **options)  # type: ignore[operator]


def _compiled_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_generate_compiled_with_static_cache() -> None:
    register()
    model = qwen()
    model.set_experts_implementation("eager")
    wanted = _generate(model, compiled=False)
    model.set_experts_implementation("collegium")
    assert torch.equal(_generate(model, compiled=False), wanted)
    before = _compiled_graphs()
    assert torch.equal(_generate(model, compiled=True), wanted)
    assert _compiled_graphs() == before + 1
    calls = [node.target for node in _graph_of_a_step(model).graph.nodes if node.op == "call_function"]
    assert sum("collegium.transformers_experts" in str(call) for call in calls) == 3


def _graph_of_a_step(model: nn.Module) -> torch.fx.GraphModule:
    """Return the graph that the compiler gets of a decode step with a static cache."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    whole = transformers.CompileConfig(fullgraph=True, backend=keep, mode="default")
    whole._compile_all_devices = True
    options = {"max_new_tokens": 3, "do_sample": False, "cache_implementation": "static", "compile_config": whole}
    model.generate(IDS, **options)  # type: ignore[operator]
    assert len(graphs) == 1
    return graphs[0]


def test_loaded_model_generates_compiled() -> None:
    model = load_model(str(SHIPPED), device="cpu")
    wanted = _generate(model, compiled=False)
    before = _compiled_graphs()
    assert torch.equal(_generate(model, compiled=True), wanted)
    assert _compiled_graphs() == before + 1


def test_stale_graph_handle_refused() -> None:
    with raises_with(InputError, "experts module"):
        torch.ops.collegium.transformers_experts(
            torch.zeros(1, 4), torch.zeros(1, 1).long(), torch.ones(1, 1), torch.zeros(3), torch.zeros(1, 4)
        )
