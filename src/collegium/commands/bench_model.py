"""Decode speed of a whole model with random weights, with Collegium's experts and with those of transformers.

All other modules are the same objects in the same process. Decoding is greedy with a fixed-size cache; a step is one
CUDA graph if the experts allow it. Before timing, the experts of the middle layer must agree with FP32 output on the
hidden states of the prompt. Logits cannot be compared: in a random model any rounding changes routing decisions near
a tie, and the logits of transformers' two implementations differ by 10 %. A failure becomes a row with the reason.
"""

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.reader import read_config
from ..dummy.weights import random_weights
from ..errors import InputError, MeasurementError, SpecError
from ..integrations import transformers as plugin
from ..integrations.extra import import_extra
from ..integrations.transformers.decoding import Steps
from ..layer import MoELayer
from ..ops.quantize import activation_format
from ..parallel.placement import expert_ids_of
from ..parallel.ranks import Ranks
from ..planning import plan
from ..problem import DeviceFacts, Limits, Overrides, Problem
from ..runtime.devices import probe
from ..runtime.progress import Progress, counted
from ..runtime.warm_up import warm_up
from ..types import MoESpec, Routing
from .bench import TOLERANCES, experts_error, recipe_of
from .measure import driver_version, prepare_pass, take_turns, version_of
from .memory_check import bytes_per_weight, check_free_memory

__all__ = ["MODELS", "RECIPES", "ModelReport", "ModelRow", "bench_model"]

# Folders with published config.json files.
MODELS = {name: Path(__file__).parent / "configs" / name for name in ("qwen3_30b", "gpt_oss_20b")}
RECIPES = (("mxfp4", "bf16"), ("mxfp4", "fp8_token"))
_TRANSFORMERS = ("eager", "grouped_mm")
_NO_GRAPH = ("eager",)  # reads the active experts from the device
_PROMPT_TOKENS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRow:
    """One implementation of the experts, decoding ``batch`` sequences at once over all ranks.

    experts: transformers' implementation, or ``collegium WEIGHTS[:ACTIVATIONS]``. graph: whether a step is one CUDA
    graph. error: relative L2 error of the middle layer's experts against FP32. seconds: time of one decode step; None
    with the reason in ``note``.
    """

    batch: int
    experts: str
    graph: bool = False
    error: float | None = None
    seconds: float | None = None
    note: str = ""

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second, over all sequences."""
        return None if self.seconds is None else self.batch / self.seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelReport:
    """All results of one run, with device and software versions. layers: number of layers built.

    ranks: number of ranks, over which Collegium's experts were split (transformers' experts are whole on each rank);
    times are those of the slowest rank.
    """

    model: str
    layers: int
    parameters: int
    device: str
    driver: str
    torch: str
    triton: str
    transformers: str
    rows: tuple[ModelRow, ...]
    ranks: int = 1

    def to_json(self) -> dict[str, object]:
        """Return the report as plain values for ``--json``."""
        rows = [asdict(row) | {"tokens_per_second": row.tokens_per_second} for row in self.rows]
        return {**asdict(self), "rows": rows}


class _Stepper:
    """A prompt in its cache, and the decode step after it, repeated at the same position."""

    def __init__(self, model: Any, batch: int, seed: int = 0) -> None:
        generator = torch.Generator(model.device).manual_seed(batch + seed)
        vocab_size = min(1000, model.config.get_text_config().vocab_size)
        self.ids = torch.randint(0, vocab_size, (batch, _PROMPT_TOKENS), device=model.device, generator=generator)
        with torch.inference_mode():
            self.steps = Steps(model, import_extra("transformers.cache_utils"), _PROMPT_TOKENS + 64, capture=False)
            self.steps.first(self.ids)
            self.steps.next(self.ids[:, -1], _PROMPT_TOKENS)
            self._rewind()

    def _rewind(self) -> None:
        for layer in self.steps.cache.layers:
            layer.cumulative_length.sub_(1)
            if hasattr(layer, "cumulative_length_int"):
                layer.cumulative_length_int = _PROMPT_TOKENS

    def step(self) -> Tensor:
        """Decode one token, then rewind the cache, so that every step costs the same."""
        self.steps.token.copy_(self.steps.run().argmax(-1, keepdim=True))
        self._rewind()
        return self.steps.token


def bench_model(
    what: str,
    recipes: Sequence[tuple[str, str]] = RECIPES,
    *,
    batches: Sequence[int] = (1, 32),
    layers: int | None = None,
    device: str | Ranks | None = None,
    rounds: int = 9,
    seconds: float = float("inf"),
    progress: Progress | None = None,
) -> ModelReport:
    """Measure decode steps of the model ``what``: a name of ``MODELS``, or a folder with a config of transformers.

    The experts run in transformers' implementations, in Collegium with the same BF16 weights, and in Collegium with
    random weights in each (weights, activations) of ``recipes``. Implementations with the same weights take turns.

    layers: build at most this many layers.
    device: a device, or Ranks, over which Collegium's experts are split. The ranks decode the same or different
    sequences, according to ``Ranks.same_tokens``.
    seconds: time limit; no measurement starts after it.
    progress: called with (done, total, text).

    Raises InputError if the model cannot be built. A later failure becomes a row with the reason.
    """
    start = time.monotonic()
    ranks = device if isinstance(device, Ranks) else None
    facts = probe(device.device if isinstance(device, Ranks) else device)
    place = torch.device(facts.place)
    model = _build_model(what, layers, facts, [weights for weights, _ in recipes])
    rows: list[ModelRow] = []
    specs = _specs(model) if ranks else list[MoESpec]()
    groups = [(*_TRANSFORMERS, "collegium bf16"), *((_implementation(*recipe),) for recipe in recipes)]
    for implementations in counted(groups, progress, lambda group: group[-1]):
        # In the first group on one rank, the plug-in builds the layers and reads their sizes from the model.
        reason = ""
        if ranks or implementations is not groups[0]:
            reason = _attach_recipe(model, implementations[-1], specs, ranks)
        for batch in batches:
            late = "no time left" if _any_rank(ranks, time.monotonic() - start > seconds) else ""
            reasons = {name: late or ("" if name in _TRANSFORMERS else reason) for name in implementations}
            rows += _measure_turns(model, reasons, batch, rounds, ranks)
        specs = specs or [layer.spec for layer in plugin.layers_of(model)]
    return ModelReport(
        model=MODELS.get(what, Path(what)).resolve().name,
        layers=model.config.get_text_config().num_hidden_layers,
        parameters=sum(p.numel() for p in model.parameters()),
        device=probe(place).name or place.type,
        driver=driver_version(place),
        torch=torch.__version__,
        triton=version_of("triton"),
        transformers=version_of("transformers"),
        rows=tuple(rows),
        ranks=ranks.world_size if ranks else 1,
    )


def _implementation(weights: str, activations: str) -> str:
    suffix = "" if activations in ("", "bf16") else f":{activations}"
    return f"collegium {weights}{suffix}"


def _any_rank(ranks: Ranks | None, value: object) -> bool:
    """Return whether ``value`` is true on any rank, so that all ranks skip the same measurements."""
    return any(ranks.exchange(bool(value), "bench-model")) if ranks else bool(value)


def _specs(model: Any) -> list[MoESpec]:
    """Return the spec of each experts module, read from the model's parameters."""
    top_k = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    if top_k is None:
        raise InputError("bench-model on several ranks: the model's config lacks num_experts_per_tok; use one rank")
    modules = [module for _, module in sorted(plugin.experts_modules(model).items())]
    return [plugin.spec_of(module, plugin.routed_weights(module), top_k) for module in modules]


def _build_model(what: str, layers: int | None, facts: DeviceFacts, formats: Sequence[str]) -> Any:
    """Build the model with random BF16 weights; raises InputError if it has no experts or exceeds the free memory."""
    transformers = import_extra("transformers")
    folder = MODELS.get(what, Path(what))
    if not (folder / "config.json").is_file():
        raise InputError(f"model {what!r}: allowed are {', '.join(MODELS)}, or a folder with config.json")
    read_config(folder)
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers and its dependencies raise many classes
        raise InputError(f"model {what!r}: transformers cannot read its config.json: {_reason(error)}") from error
    text = config.get_text_config()
    if layers is not None and layers < text.num_hidden_layers:
        text.num_hidden_layers = layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:layers]
    plugin.register()
    with torch.device("meta"):
        sizes = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    check_free_memory(f"bench-model {what}", _model_needs(sizes, formats), facts)
    torch.manual_seed(0)
    with torch.device(facts.place):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    if not plugin.experts_modules(model):
        raise InputError(
            f"model {what!r}: transformers builds no experts with an exchangeable implementation for it; pass a "
            "Mixture-of-Experts model that load_model takes (docs/families.md)"
        )
    return model.eval()


def _model_needs(model: Any, formats: Sequence[str]) -> dict[str, float]:
    """Return the bytes of the model in BF16 and of a second copy of its experts in the largest of ``formats``."""
    experts = sum(p.numel() for module in plugin.experts_modules(model).values() for p in module.parameters())
    sizes = [0.0]
    for name in formats:
        with suppress(SpecError):  # an unknown format becomes a row with the reason
            sizes.append(bytes_per_weight(name))
    return {
        "model": 2.0 * sum(p.numel() for p in model.parameters()),
        "experts in another format": max(sizes) * experts,
    }


def _formats(implementation: str) -> tuple[str, str]:
    """Return the (weights, activations) of ``collegium WEIGHTS[:ACTIVATIONS]``; BF16 for transformers'."""
    return recipe_of(implementation.partition(" ")[2] or "bf16")


def _attach_recipe(model: Any, implementation: str, specs: Sequence[MoESpec], ranks: Ranks | None) -> str:
    """Attach random experts of ``implementation`` to every layer; return the reason of a failure, or ""."""
    modules = sorted(plugin.experts_modules(model).items())
    if len(specs) != len(modules):
        return "absent: the sizes of the experts are unknown, because Collegium's BF16 experts did not run"
    recipe = _formats(implementation)
    try:
        pairs = zip(modules, specs, strict=True)
        layers = {index: _random_layer(spec, recipe, index, module, ranks) for (index, module), spec in pairs}
        plugin.attach(model, layers)
    except Exception as error:  # listed with the reason; the run continues
        return f"absent: {_reason(error)}"
    return ""


def _random_layer(spec: MoESpec, recipe: tuple[str, str], index: int, module: Any, ranks: Ranks | None) -> MoELayer:
    """Return a layer for an experts module: with the module's weights in BF16, else with random weights.

    The weights of layer ``index`` are the same for any number of ranks.
    """
    weight_format, activations = recipe
    device = module.down_proj.device
    recipe_spec = replace(spec, weight_format=weight_format)
    if weight_format == "bf16":
        weights = plugin.routed_weights(module)
    else:
        weights = random_weights(recipe_spec, device, seed=index)
    placement = None if ranks is None else ranks.placement(spec.num_experts)
    problem = Problem(spec=recipe_spec, device=probe(device), limits=Limits(max_tokens=2048), placement=placement)
    if placement is not None:
        weights = expert_ids_of(weights, placement.expert_ids)
    return MoELayer(weights, plan(problem, Overrides(activation_format=activations)))


def _measure_turns(
    model: Any, reasons: Mapping[str, str], batch: int, rounds: int, ranks: Ranks | None
) -> list[ModelRow]:
    """Measure the implementations in turns and return one row for each.

    reasons: by implementation, why it is not measured; "" to measure it.
    """
    steps: dict[str, Callable[[], object]] = {}
    sequences, seed = batch, 0
    if ranks is not None and not ranks.same_tokens:  # each rank decodes other sequences
        sequences, seed = batch * ranks.world_size, 1000 * ranks.rank
    rows = {name: ModelRow(batch=sequences, experts=name, note=reason) for name, reason in reasons.items()}
    for name in [name for name, reason in reasons.items() if not reason]:
        try:
            model.set_experts_implementation(name.split()[0])
            if name not in _TRANSFORMERS:
                _build_and_warm_up(model)
            stepper = _Stepper(model, batch, seed)
            error = _checked_error(model, name, stepper, ranks)
            steps[name], graph = _prepare_step(model, name, stepper)
            rows[name] = replace(rows[name], error=error, graph=graph)
        except Exception as fault:  # noted in the row; the run continues
            rows[name] = replace(rows[name], note=f"failed: {_reason(fault)}")
    try:
        for name, seconds in take_turns(steps, model.device, rounds=rounds, queued=False).items():
            slowest = max(ranks.exchange(seconds, "bench-model: seconds")) if ranks else seconds
            rows[name] = replace(rows[name], seconds=slowest)
    except Exception as fault:  # noted in the rows; the run continues
        for name in steps:
            rows[name] = replace(rows[name], note=f"failed: {_reason(fault)}")
    steps.clear()
    gc.collect()
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    return list(rows.values())


def _build_and_warm_up(model: Any) -> None:
    """Build Collegium's layers with one token, unless layers are attached, and compile all kernels in parallel."""
    if not plugin.layers_of(model):
        with torch.inference_mode():
            model(torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=False, logits_to_keep=1)
    warm_up(plugin.layers_of(model))


def _checked_error(model: Any, implementation: str, stepper: _Stepper, ranks: Ranks | None) -> float:
    """Return the error of the middle layer's experts on the prompt; raises MeasurementError above the tolerance."""
    modules = sorted(plugin.experts_modules(model).items())
    index, module = modules[len(modules) // 2]
    calls: list[tuple[Any, ...]] = []
    hook = module.register_forward_hook(lambda _, inputs, out: calls.append((*inputs, out)))
    with hook, torch.inference_mode():
        model(stepper.ids, use_cache=False, logits_to_keep=1)
        x, ids, topk_weights, output = calls[0]
        weight_format, activations = _formats(implementation)
        weights = plugin.routed_weights(module)
        spec = replace(plugin.spec_of(module, weights, ids.shape[-1]), weight_format=weight_format)
        if weight_format != "bf16":
            weights = random_weights(spec, model.device, seed=index)
        case = (x.view(-1, x.shape[-1]), Routing(topk_ids=ids, topk_weights=topk_weights.float()))
        problem = Problem(spec=spec, device=probe(model.device))
        error = experts_error(output.view(-1, x.shape[-1]), problem, weights, case)
    tolerance = TOLERANCES[activation_format(activations).bits]
    if ranks is not None:
        errors = ranks.exchange(error, "bench-model: error")
        error = max(errors, key=lambda value: (math.isnan(value), value))
    if not error <= tolerance:
        raise MeasurementError(
            f"the experts of layer {index} have a relative L2 error of {error:.4f} against FP32, above {tolerance}"
        )
    return error


def _prepare_step(model: Any, implementation: str, stepper: _Stepper) -> tuple[Callable[[], object], bool]:
    """Return a decode step and whether it is a CUDA graph."""
    layers = [] if implementation in _TRANSFORMERS else plugin.layers_of(model)
    capturable = all(layer.plan.capturable for layer in layers)
    if model.device.type == "cuda" and implementation not in _NO_GRAPH and capturable:
        try:
            return prepare_pass([stepper.step], model.device), True
        except Exception:  # a step that cannot be captured is timed without a graph
            torch.cuda.synchronize()

    def eager() -> object:
        model.set_experts_implementation(implementation.split()[0])
        with torch.inference_mode():
            return stepper.step()

    eager()
    return eager, False


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
