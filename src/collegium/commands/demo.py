"""``collegium demo``: measure one trained model in every format and compare it with BF16."""

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..checkpoint.layer_view import CheckpointLayer
from ..checkpoint.loader import describe_checkpoint, load_experts
from ..checkpoint.reader import Checkpoint
from ..functional import MoEOptions, moe
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
# Without a penalty the small model repeats itself. Decoding is greedy, so that formats differ by their experts alone.
PENALTY = 1.2
# Passes of a few tokens need the fewest compiled kernels; the output bits are the same. A plan without compiled kernels
# takes a whole window per pass.
_COMPILED_PASS_TOKENS, _PLAIN_PASS_TOKENS = 4, 4096


_WEIGHTS = ("bf16", "fp16", "fp8_block", "fp8_channel", "fp8_tensor", "mxfp8", "int4_group", "mxfp4", "nvfp4")
RECIPES = (  # weights, activations
    *((weights, "bf16") for weights in _WEIGHTS),
    ("fp8_block", "fp8_group128"),
    ("mxfp4", "fp8_group128"),
    ("nvfp4", "nvfp4"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoRow:
    """One row of the table. layer_error: relative L2 error of one layer against FP32 on the BF16 weights."""

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
    """All results of the demo. compile_seconds: the part of ``seconds`` spent on compiling kernels."""

    model: str
    device: str
    repetition_penalty: float
    seconds: float
    compile_seconds: float
    rows: tuple[DemoRow, ...]


def run_demo(
    folder: Path, *, device: str | None = None, tokens: int = 32, windows: int = 6, progress: Progress | None = None
) -> DemoReport:
    """Measure every recipe on the model in ``folder``, which also holds the text ``heldout.txt``.

    Before timing, each recipe compiles its kernels and generates the text once (on a CPU only its start).
    progress: called with (done, total, text). Raises the errors of ``check_writable`` and ``load_model``, and
    InputError if ``heldout.txt`` is missing or too short.
    """
    start = time.perf_counter()
    facts = probe(device)
    report_progress = progress or _no_progress
    rows: list[DemoRow] = []
    with _one_thread(facts):
        bench = _Bench(check_writable(str(folder)), facts, windows)
        for index, (weights, activations) in enumerate(RECIPES):
            step = partial(_report_step, report_progress, index, f"{weights} x {activations}")
            row = bench.row((weights, activations), tokens, step)
            if rows:
                row = replace(row, perplexity_ratio=row.perplexity / rows[0].perplexity)
            rows.append(row)
    report_progress(len(RECIPES), len(RECIPES), "done")
    return DemoReport(
        model=folder.resolve().name,
        device=facts.name or facts.kind,
        repetition_penalty=PENALTY,
        seconds=time.perf_counter() - start,
        compile_seconds=bench.compile_seconds,
        rows=tuple(rows),
    )


def _no_progress(_done: int, _total: int, _text: str) -> None:
    return None


def _report_step(progress: Progress, index: int, recipe: str, text: str) -> None:
    progress(index, len(RECIPES), f"{recipe}: {text}")


@contextmanager
def _one_thread(facts: DeviceFacts) -> Generator[None]:
    """Use one thread on a CPU.

    This model is so small that a second thread makes it 10 % faster on an idle machine and half as fast on a busy one.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if facts.kind == "cpu" else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Bench:
    """The model, its held-out text and the inputs of one layer, which are the same for every recipe."""

    def __init__(self, checkpoint: Checkpoint, facts: DeviceFacts, windows: int) -> None:
        self.checkpoint = checkpoint
        self.facts = facts
        self.spec = describe_checkpoint(checkpoint)
        limits = _limits(self.spec, facts, (self.spec.weight_format, "bf16"))
        model = load_model(checkpoint, device=facts.place, limits=limits)
        self.writer = Writer(model, checkpoint.path)
        self.ids = self.writer.windows(checkpoint.path / "heldout.txt", WINDOW, windows)[:windows]
        self.compile_seconds = _compile_seconds(layers_of(model), None)
        self.case = _Case(model, checkpoint, self.ids[:1])

    def row(self, recipe: tuple[str, str], tokens: int, step: Callable[[str], None]) -> DemoRow:
        weight_format, activations = recipe
        step("loading")
        layers = build_layers(
            self.checkpoint,
            weight_format=weight_format,
            overrides=Overrides(activation_format=activations),
            device=self.facts.place,
            limits=_limits(self.spec, self.facts, recipe),
        )
        attach(self.writer.model, layers)
        self.compile_seconds += _compile_seconds(
            layers.values(), lambda done, total, _: step(f"compiling {done} of {total}")
        )
        step("perplexity")
        perplexity = self.writer.perplexity(self.ids)
        layer_error = self.case.error(layers[self.case.layer])
        step("writing")
        # On a CPU two tokens are enough: nothing is compiled or captured later in the text.
        self.writer.write(PROMPT, tokens if self.facts.kind == "cuda" else min(tokens, 2), penalty=PENALTY)
        written = self.writer.write(PROMPT, tokens, penalty=PENALTY)
        layer_plan = layers[self.case.layer].plan
        return DemoRow(
            weights=weight_format,
            activations=activations,
            kernel=layer_plan.kernel,
            expert_bytes=layer_plan.expert_bytes,
            perplexity=perplexity,
            perplexity_ratio=1.0,
            layer_error=layer_error,
            tokens_per_second=written.tokens_per_second,
            text=written.text,
        )


def _limits(spec: MoESpec, facts: DeviceFacts, recipe: tuple[str, str]) -> Limits:
    weight_format, activations = recipe
    if weight_format != spec.weight_format:
        spec = replace(spec, weight_format=weight_format, down_format=None)
    recipe_plan = plan(Problem(spec=spec, device=facts), Overrides(activation_format=activations))
    return Limits(max_tokens=_COMPILED_PASS_TOKENS if recipe_plan.capturable else _PLAIN_PASS_TOKENS)


def _compile_seconds(layers: Iterable[MoELayer], progress: Progress | None) -> float:
    """Compile the kernels of ``layers`` and return the time."""
    start = time.perf_counter()
    warm_up(layers, progress)
    return time.perf_counter() - start


class _Case:
    """Inputs of a model's middle layer for a real text, and the layer's FP32 output with the BF16 weights."""

    def __init__(self, model: nn.Module, checkpoint: Checkpoint, ids: Tensor) -> None:
        """Run ``ids [1, T]`` through the model and capture the inputs of the layer's experts."""
        modules = experts_modules(model)
        self.layer = sorted(modules)[len(modules) // 2]
        captured: list[tuple[Tensor, Tensor, Tensor]] = []
        hook = modules[self.layer].register_forward_pre_hook(lambda _, inputs: captured.append(inputs))
        with hook, torch.inference_mode():
            cast("Any", model)(ids, use_cache=False)
        self.x, topk_ids, topk_weights = (tensor.clone() for tensor in captured[0])
        self.routing = Routing(topk_ids=topk_ids, topk_weights=topk_weights)
        spec = describe_checkpoint(checkpoint)
        layer = CheckpointLayer.open(checkpoint, self.layer)
        weights = load_experts(layer, linear(spec.num_experts, 0, 1), device=self.x.device)
        self.truth = moe(
            self.x.float(),
            weights.gate_up,
            weights.down,
            topk_ids,
            topk_weights,
            activation=spec.activation,
            options=MoEOptions(overrides=Overrides(kernel="reference")),
        )

    def error(self, layer: MoELayer) -> float:
        """Return the relative L2 error of ``layer`` on the captured inputs."""
        output = layer(self.x, routing=self.routing).float()
        return float((output - self.truth).norm() / self.truth.norm())
