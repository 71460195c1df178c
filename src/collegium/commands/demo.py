"""The demo: one real model, every format, measured beside BF16."""

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..checkpoint.layer_view import CheckpointLayer
from ..checkpoint.loader import describe_checkpoint, load_experts
from ..checkpoint.reader import Checkpoint
from ..functional import moe
from ..integrations.transformers import attach, build_layers, experts_modules, layers_of, load_model
from ..layer import MoELayer
from ..parallel.placement import linear
from ..planning import plan
from ..problem import DeviceFacts, Limits, Overrides, Problem
from ..runtime.devices import probe
from ..runtime.progress import Progress
from ..runtime.warm_up import warm_up
from ..types import MoESpec, Routing
from .generate import Writer, check_writable

__all__ = ["RECIPES", "DemoReport", "DemoRow", "run_demo"]

PROMPT = "Once upon a time there was a"
WINDOW = 256
# The small model repeats itself without it. Greedy, so that formats differ by their experts alone.
PENALTY = 1.2
# A kernel is compiled for each kind of batch, and passes of a few tokens have the fewest kinds. Bits are the same. What
# compiles nothing takes the text as it is.
_COMPILED_PASS, _PLAIN_PASS = 4, 4096


_WEIGHTS = ("bf16", "fp16", "fp8_block", "fp8_channel", "fp8_tensor", "mxfp8", "int4_group", "mxfp4", "nvfp4")
RECIPES = (  # weights, activations
    *((weights, "bf16") for weights in _WEIGHTS),
    ("fp8_block", "fp8_group128"),
    ("mxfp4", "fp8_group128"),
    ("nvfp4", "nvfp4"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoRow:
    """One line of the table. layer_error: relative L2 error of one layer against FP32 on the BF16 weights."""

    weights: str
    activations: str
    kernel: str
    expert_bytes: int
    perplexity: float
    perplexity_ratio: float
    layer_error: float
    tokens_per_second: float
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoReport:
    """Everything the demo measured. compile_seconds: the part of ``seconds`` in which kernels were compiled."""

    model: str
    device: str
    repetition_penalty: float
    seconds: float
    compile_seconds: float
    rows: tuple[DemoRow, ...]


def run_demo(
    folder: Path, *, device: str | None = None, tokens: int = 32, windows: int = 6, progress: Progress | None = None
) -> DemoReport:
    """Measure every recipe on the model in ``folder`` (which ships ``heldout.txt``).

    Each recipe compiles its kernels and writes the text, on a CPU its start, once before it is timed writing it.
    progress: called with (done, total, text). Raises what ``check_writable`` and ``load_model`` raise, InputError
    without that text.
    """
    start = time.perf_counter()
    facts = probe(device)
    rows: list[DemoRow] = []
    with _one_thread(facts):
        bench = _Bench(check_writable(str(folder)), facts, windows)
        for done, recipe in enumerate(RECIPES):

            def step(text: str, done: int = done, recipe: tuple[str, str] = recipe) -> None:
                if progress is not None:
                    progress(done, len(RECIPES), f"{recipe[0]} x {recipe[1]}: {text}")

            row = bench.row(recipe, tokens, step)
            rows.append(replace(row, perplexity_ratio=row.perplexity / rows[0].perplexity) if rows else row)
    if progress is not None:
        progress(len(RECIPES), len(RECIPES), "done")
    return DemoReport(
        model=folder.resolve().name,
        device=facts.name or facts.kind,
        repetition_penalty=PENALTY,
        seconds=time.perf_counter() - start,
        compile_seconds=bench.compile_seconds,
        rows=tuple(rows),
    )


@contextmanager
def _one_thread(facts: DeviceFacts) -> Generator[None]:
    """Compute in one thread on a CPU, where more of them mostly wait for each other.

    So small a model gains a tenth by a second one, and on a machine with other work takes twice as long with it.
    """
    own = torch.get_num_threads()
    torch.set_num_threads(1 if facts.kind == "cpu" else own)
    try:
        yield
    finally:
        torch.set_num_threads(own)


class _Bench:
    """The model, its held-out text and the inputs of one layer, on which every recipe is measured."""

    def __init__(self, checkpoint: Checkpoint, facts: DeviceFacts, windows: int) -> None:
        self.checkpoint, self.facts = checkpoint, facts
        self.spec = describe_checkpoint(checkpoint)
        limits = _limits(self.spec, facts, (self.spec.weight_format, "bf16"))
        model = load_model(checkpoint, device=facts.place, limits=limits)
        self.writer = Writer(model, checkpoint.path)
        self.ids = self.writer.windows(checkpoint.path / "heldout.txt", WINDOW, windows)[:windows]
        self.compile_seconds = _compiled(layers_of(model), None)
        self.case = _Case(model, checkpoint, self.ids[:1])

    def row(self, recipe: tuple[str, str], tokens: int, step: Callable[[str], None]) -> DemoRow:
        step("loading")
        layers = build_layers(
            self.checkpoint,
            weight_format=recipe[0],
            overrides=Overrides(activation_format=recipe[1]),
            device=self.facts.place,
            limits=_limits(self.spec, self.facts, recipe),
        )
        attach(self.writer.model, layers)
        self.compile_seconds += _compiled(layers.values(), lambda done, total, _: step(f"compiling {done} of {total}"))
        step("perplexity")
        perplexity, error = self.writer.perplexity(self.ids), self.case.error(layers[self.case.layer])
        step("writing")
        # On a CPU nothing is compiled or captured in the midst of a text.
        self.writer.write(PROMPT, tokens if self.facts.kind == "cuda" else min(tokens, 2), penalty=PENALTY)
        written = self.writer.write(PROMPT, tokens, penalty=PENALTY)
        chosen = layers[self.case.layer].plan
        return DemoRow(
            weights=recipe[0],
            activations=recipe[1],
            kernel=chosen.kernel,
            expert_bytes=chosen.expert_bytes,
            perplexity=perplexity,
            perplexity_ratio=1.0,
            layer_error=error,
            tokens_per_second=written.tokens_per_second,
            text=written.text,
        )


def _limits(spec: MoESpec, facts: DeviceFacts, recipe: tuple[str, str]) -> Limits:
    own = spec if recipe[0] == spec.weight_format else replace(spec, weight_format=recipe[0], down_format=None)
    problem = Problem(spec=own, device=facts)
    made = plan(problem, Overrides(activation_format=recipe[1]))
    return Limits(max_tokens=_COMPILED_PASS if made.capturable else _PLAIN_PASS)


def _compiled(layers: Iterable[MoELayer], progress: Progress | None) -> float:
    start = time.perf_counter()
    warm_up(layers, progress)
    return time.perf_counter() - start


class _Case:
    """Real inputs of one layer, the middle one of a model, and its FP32 output on the BF16 weights."""

    def __init__(self, model: nn.Module, checkpoint: Checkpoint, ids: Tensor) -> None:
        """Run ``ids [1, T]`` through the model and keep what the layer's experts were asked."""
        modules = experts_modules(model)
        self.layer = sorted(modules)[len(modules) // 2]
        asked: list[tuple[Tensor, Tensor, Tensor]] = []
        hook = modules[self.layer].register_forward_pre_hook(lambda _, inputs: asked.append(inputs))
        with hook, torch.inference_mode():
            cast("Any", model)(ids, use_cache=False)
        self.x, topk_ids, topk_weights = (t.clone() for t in asked[0])
        self.routing = Routing(topk_ids=topk_ids, topk_weights=topk_weights)
        spec, layer = describe_checkpoint(checkpoint), CheckpointLayer.open(checkpoint, self.layer)
        weights = load_experts(layer, linear(spec.num_experts, 0, 1), device=self.x.device)
        wishes: Any = {"activation": spec.activation, "overrides": Overrides(kernel="reference")}
        self.truth = moe(self.x.float(), weights.gate_up, weights.down, topk_ids, topk_weights, **wishes)

    def error(self, layer: MoELayer) -> float:
        """Return the relative L2 error of ``layer`` on the captured inputs."""
        found = layer(self.x, routing=self.routing).float()
        return float((found - self.truth).norm() / self.truth.norm())
