"""Tokens a second of a whole model with random weights: Collegium's experts beside those of transformers.

Everything but the experts is the same module in the same process. Decoding is greedy with a cache of fixed size; a
step is one CUDA graph where the experts allow it. Before a time is taken, the experts of the middle layer must agree
with FP32 truth on what the prompt brings them. Logits are no judge: in a random model a router near a tie takes
another expert after any rounding, and transformers' own implementations differ by a tenth. What fails is
a row with the reason.
"""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.reader import read_config
from ..errors import InputError, MeasurementError, SpecError
from ..integrations import transformers as plugin
from ..integrations.extra import extra
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
from .bench import TOLERANCES, experts_error, random_weights, recipe_of
from .measure import driver_version, prepare_pass, take_turns, version_of
from .memory_check import bytes_per_weight, check_free_memory

__all__ = ["MODELS", "RECIPES", "ModelReport", "ModelRow", "bench_model"]

# Folders with the facts of published configurations.
MODELS = {name: Path(__file__).parent / "configs" / name for name in ("qwen3_30b", "gpt_oss_20b")}
RECIPES = (("mxfp4", "bf16"), ("mxfp4", "fp8_token"))
_THEIRS = ("eager", "grouped_mm")
_NO_GRAPH = ("eager",)  # it asks the device which experts are hit
_PROMPT = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRow:
    """One contender for the experts, decoding ``batch`` sequences at once, on all ranks together.

    experts: transformers' implementation, or ``collegium WEIGHTS[:ACTIVATIONS]``. graph: whether a step is one CUDA
    graph. error: relative L2 distance of the middle layer's experts to FP32 truth. seconds: of one decode step, None
    where note says why there is none.
    """

    batch: int
    experts: str
    graph: bool = False
    error: float | None = None
    seconds: float | None = None
    note: str = ""

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of all sequences in a second."""
        return None if self.seconds is None else self.batch / self.seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelReport:
    """Everything one run measured, and on what. layers: as built, which may be less than the model has.

    ranks: which shared our experts (those of transformers are whole on each); seconds are those of the slowest.
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
    """A prompt in a cache of its own, and the decode step that follows it, always at the same position."""

    def __init__(self, model: Any, batch: int, seed: int = 0) -> None:
        generator = torch.Generator(model.device).manual_seed(batch + seed)
        words = min(1000, model.config.get_text_config().vocab_size)
        self.ids = torch.randint(0, words, (batch, _PROMPT), device=model.device, generator=generator)
        with torch.inference_mode():
            self.steps = Steps(model, extra("transformers.cache_utils"), _PROMPT + 64, capture=False)
            self.steps.first(self.ids)
            self.steps.next(self.ids[:, -1], _PROMPT)
            self._set_back()

    def _set_back(self) -> None:
        for layer in self.steps.cache.layers:
            layer.cumulative_length.sub_(1)
            if hasattr(layer, "cumulative_length_int"):
                layer.cumulative_length_int = _PROMPT

    def step(self) -> Tensor:
        """Decode one token; the cache grows by one and is set back, so that every step costs the same."""
        self.steps.token.copy_(self.steps.run().argmax(-1, keepdim=True))
        self._set_back()
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

    Its experts run in transformers' own implementations, in ours with the same BF16 weights, and in each (weights,
    activations) of ``recipes`` with random weights of that format. Those with the same weights take turns. layers:
    build that many at most. device: Ranks, where several share our experts and decode the same sequences, or each its
    own. seconds: nothing is begun after that long. progress: called with (done, total, text).
    Raises InputError for what is no such model; what fails later is a row with the reason.
    """
    started = time.monotonic()
    ranks = device if isinstance(device, Ranks) else None
    facts = probe(device.device if isinstance(device, Ranks) else device)
    place = torch.device(facts.place)
    model = _built(what, layers, facts, [weights for weights, _ in recipes])
    ours = [f"collegium {weights}" + (f":{made}" if made not in ("", "bf16") else "") for weights, made in recipes]
    rows: list[ModelRow] = []
    specs = _specs(model) if ranks else list[MoESpec]()
    groups = [(*_THEIRS, "collegium bf16"), *((way,) for way in ours)]
    for ways in counted(groups, progress, lambda ways: ways[-1]):
        # The first group lets the plug-in read the sizes of the experts off the model.
        reason = _attached(model, ways[-1], specs, ranks) if ranks or ways is not groups[0] else ""
        for batch in batches:
            late = "no time left" if _any(ranks, time.monotonic() - started > seconds) else ""
            reasons = {way: late or ("" if way in _THEIRS else reason) for way in ways}
            rows += _turns(model, reasons, batch, rounds, ranks)
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


def _any(ranks: Ranks | None, value: object) -> bool:
    """Return whether ``value`` holds on any rank: what one leaves out, all leave out."""
    return any(ranks.exchange(bool(value), "bench-model")) if ranks else bool(value)


def _specs(model: Any) -> list[MoESpec]:
    """Return the sizes of the experts, which the plug-in would read off the model where they are not shared."""
    top_k = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    if top_k is None:
        raise InputError("bench-model on several ranks: the model's config has no num_experts_per_tok")
    found = sorted(plugin.experts_modules(model).items())
    return [plugin.spec_of(module, plugin.routed_weights(module), top_k) for _, module in found]


def _built(what: str, layers: int | None, facts: DeviceFacts, formats: Sequence[str]) -> Any:
    """Return the model with random BF16 weights; raises InputError where it is none with experts or has no room."""
    transformers = extra("transformers")
    folder = MODELS.get(what, Path(what))
    if not (folder / "config.json").is_file():
        raise InputError(f"model {what!r}: allowed are {', '.join(MODELS)}, or a folder with config.json")
    read_config(folder)
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as fault:  # of many kinds, some of packages below transformers
        raise InputError(f"model {what!r}: transformers cannot read its config.json: {_reason(fault)}") from fault
    text = config.get_text_config()
    if layers is not None and layers < text.num_hidden_layers:
        text.num_hidden_layers = layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:layers]
    plugin.register()
    with torch.device("meta"):
        sizes = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    check_free_memory(f"bench-model {what}", _needs(sizes, formats), facts)
    torch.manual_seed(0)
    with torch.device(facts.place):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    if not plugin.experts_modules(model):
        raise InputError(f"model {what!r}: transformers builds no experts for it that can be run in another way")
    return model.eval()


def _needs(model: Any, formats: Sequence[str]) -> dict[str, float]:
    """Return the bytes of the model in BF16, and of its experts once more in the largest of ``formats``."""
    experts = sum(p.numel() for module in plugin.experts_modules(model).values() for p in module.parameters())
    each = [0.0]
    for name in formats:
        with suppress(SpecError):  # an unknown format is a row that says so
            each.append(bytes_per_weight(name))
    return {"model": 2.0 * sum(p.numel() for p in model.parameters()), "experts in another format": max(each) * experts}


def _formats(way: str) -> tuple[str, str]:
    """Return the weights and activations that ``way`` names: ``collegium WEIGHTS[:ACTIVATIONS]``, or transformers'."""
    return recipe_of(way.partition(" ")[2] or "bf16")


def _attached(model: Any, way: str, specs: Sequence[MoESpec], ranks: Ranks | None) -> str:
    """Give every layer of ``model`` experts in the formats of ``way``; return why not, or nothing."""
    modules = sorted(plugin.experts_modules(model).items())
    if len(specs) != len(modules):
        return "absent: the sizes of the experts are not known, as our BF16 experts did not run"
    try:
        pairs = zip(modules, specs, strict=True)
        plugin.attach(model, {at: _layer(spec, way, (at, module), ranks) for (at, module), spec in pairs})
    except Exception as fault:  # this way is listed with the reason, and the run goes on
        return f"absent: {_reason(fault)}"
    return ""


def _layer(spec: MoESpec, way: str, owner: tuple[int, Any], ranks: Ranks | None) -> MoELayer:
    """Return the layer of an experts module: random experts, in BF16 the module's own, as in one process."""
    (weights, activations), (seed, module) = _formats(way), owner
    own, device = replace(spec, weight_format=weights), module.down_proj.device
    made = plugin.routed_weights(module) if weights == "bf16" else random_weights(own, device, seed=seed)
    placed = None if ranks is None else ranks.placement(spec.num_experts)
    problem = Problem(spec=own, device=probe(device), limits=Limits(max_tokens=2048), placement=placed)
    if placed is not None:
        made = expert_ids_of(made, placed.expert_ids)
    return MoELayer(made, plan(problem, Overrides(activation_format=activations)))


def _turns(model: Any, ways: Mapping[str, str], batch: int, rounds: int, ranks: Ranks | None) -> list[ModelRow]:
    """Return a row for each of ``ways``, which take turns; without a time where it names a reason."""
    ready: dict[str, Callable[[], object]] = {}
    # Ranks with sequences of their own decode as many more together.
    apart = None if ranks is None or ranks.same_tokens else ranks
    count, seed = (batch * apart.world_size, 1000 * apart.rank) if apart else (batch, 0)
    rows = {way: ModelRow(batch=count, experts=way, note=reason) for way, reason in ways.items()}
    for way in [way for way, reason in ways.items() if not reason]:
        try:
            model.set_experts_implementation(way.split()[0])
            if way not in _THEIRS:
                _warm(model)
            stepper = _Stepper(model, batch, seed)
            error = _checked(model, way, stepper, ranks)
            ready[way], graph = _prepared(model, way, stepper)
            rows[way] = replace(rows[way], error=error, graph=graph)
        except Exception as fault:  # as above
            rows[way] = replace(rows[way], note=f"failed: {_reason(fault)}")
    try:
        for way, seconds in take_turns(ready, model.device, rounds=rounds, queued=False).items():
            slowest = max(ranks.exchange(seconds, "bench-model: seconds")) if ranks else seconds
            rows[way] = replace(rows[way], seconds=slowest)
    except Exception as fault:  # as above
        rows |= {way: replace(rows[way], note=f"failed: {_reason(fault)}") for way in ready}
    ready.clear()
    gc.collect()
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    return list(rows.values())


def _warm(model: Any) -> None:
    """Build our layers with one token, unless they are attached already, and compile the rest side by side."""
    if not plugin.layers_of(model):
        with torch.inference_mode():
            model(torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=False, logits_to_keep=1)
    warm_up(plugin.layers_of(model))


def _checked(model: Any, way: str, stepper: _Stepper, ranks: Ranks | None) -> float:
    """Return the error of the middle layer's experts on the inputs of the prompt; raises when it is too large."""
    modules = sorted(plugin.experts_modules(model).items())
    index, module = modules[len(modules) // 2]
    asked: list[tuple[Any, ...]] = []
    hook = module.register_forward_hook(lambda _, inputs, out: asked.append((*inputs, out)))
    with hook, torch.inference_mode():
        model(stepper.ids, use_cache=False, logits_to_keep=1)
        x, ids, topk_weights, found = asked[0]
        weights, activations = _formats(way)
        plain = plugin.routed_weights(module)
        spec = replace(plugin.spec_of(module, plain, ids.shape[-1]), weight_format=weights)
        own = plain if weights == "bf16" else random_weights(spec, model.device, seed=index)
        case = (x.view(-1, x.shape[-1]), Routing(topk_ids=ids, topk_weights=topk_weights.float()))
        error = experts_error(found.view(-1, x.shape[-1]), Problem(spec=spec, device=probe(model.device)), own, case)
    allowed = TOLERANCES[activation_format(activations).bits]
    if ranks is not None:
        error = max(ranks.exchange(error, "bench-model: error"), key=lambda each: (each != each, each))
    if not error <= allowed:
        raise MeasurementError(f"the experts of layer {index} are {error:.4f} away from FP32 truth, allowed {allowed}")
    return error


def _prepared(model: Any, way: str, stepper: _Stepper) -> tuple[Callable[[], object], bool]:
    """Return a decode step of ``way`` and whether it is a graph."""
    shared = () if way in _THEIRS else (layer.plan for layer in plugin.layers_of(model))
    if model.device.type == "cuda" and way not in _NO_GRAPH and all(made.capturable for made in shared):
        try:
            return prepare_pass([stepper.step], model.device), True
        except Exception:  # what cannot be captured is timed as it is
            torch.cuda.synchronize()

    def eager() -> object:
        model.set_experts_implementation(way.split()[0])
        with torch.inference_mode():
            return stepper.step()

    eager()
    return eager, False


def _reason(fault: BaseException) -> str:
    return f"{type(fault).__name__}: {' '.join(str(fault).split())[:200]}"
