"""How long one MoE layer takes, beside the least this machine could take: the answer behind ``collegium bench``.

No time is given before every measured case agrees with FP32 truth. The floor is computed from the experts each
measured routing really hits and from ceilings of this machine, measured in the same run unless they are given.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.reader import read_config
from ..errors import ConfigError, InputError, MeasurementError
from ..experts import PackedWeights, Reference
from ..formats import by_name
from ..formats.payload import Payload
from ..formats.unquantised import DTYPES
from ..layer import MoELayer
from ..models import describe
from ..ops.quantize import activation_format
from ..parallel.local import Local
from ..planning import Plan, plan
from ..problem import DeviceFacts, Limits, Overrides, Problem
from ..runtime.devices import probe
from ..runtime.progress import Progress, counted
from ..types import ContiguousBatch, ExpertWeights, MoESpec, Routing, RoutingSpec
from .integers import ENCODERS
from .measure import (
    Ceilings,
    driver_version,
    floor_of,
    graph_pool,
    input_sets,
    measure_ceilings,
    prepare_pass,
    random_routing,
    stays_cached,
    take_turns,
    version_of,
)
from .memory_check import check_free_memory, layer_needs

__all__ = [
    "SHAPES",
    "TOKENS",
    "BenchReport",
    "BenchRow",
    "bench",
    "check_output",
    "experts_error",
    "named_layer",
    "planned_layer",
    "random_inputs",
    "random_weights",
    "recipe_of",
]

SHAPES: dict[str, tuple[int, int, int, int]] = {  # H, I, E, top-k of the routed experts
    "dsv3": (7168, 2048, 256, 8),
    "v4_flash": (4096, 2048, 256, 6),
    "gptoss120b": (2880, 2880, 128, 4),
    "qwen3_30b": (2048, 768, 128, 8),
}
TOKENS = (1, 8, 32, 128, 512, 2048, 8192)
_MOST_ON_CPU = 512
# Relative L2 error allowed against FP32 truth, by the bits of an activation: two roundings of activations to E4M3 alone
# make about 0.045, two to NVFP4 about 0.13; 16 bits stay far below.
TOLERANCES = {32: 0.01, 16: 0.01, 8: 0.06, 4: 0.2}
_REACH = 32.0  # of static activation scales: more than inputs of unit size and the rows between the products need
_DISTINCT = 7  # experts made and encoded; the others repeat them, so that building takes seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchRow:
    """One measured case. seconds: of one layer call, from hidden states and top-k to output.

    of_floor: floor_seconds / seconds. bound: which of the two the floor is. experts_hit: on average over the inputs.
    error: relative L2 error against FP32 truth on some tokens. cold: whether a pass reads so much more than the caches
    hold that weights come from memory; otherwise the floor is that of the operations alone.
    """

    weights: str
    activations: str
    kernel: str
    tokens: int
    seconds: float
    floor_seconds: float
    of_floor: float
    bound: str
    experts_hit: float
    gigabytes_per_second: float
    teraflops: float
    intensity: float
    error: float
    tolerance: float
    cold: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchReport:
    """Everything one run measured, and on what."""

    shape: str
    sizes: str
    routing: str
    device: str
    driver: str
    torch: str
    triton: str
    ceilings: Ceilings
    rows: tuple[BenchRow, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
    """One recipe at one token count: the layer and the inputs of a pass."""

    layer: MoELayer
    weights: ExpertWeights[Payload]
    inputs: list[tuple[Tensor, Routing]]

    def calls(self) -> list[Callable[[], Tensor]]:
        return [partial(self.layer, x, routing=routing) for x, routing in self.inputs]


def named_layer(what: str) -> tuple[str, MoESpec]:
    """Return name and routed experts of ``what``: a name of ``SHAPES``, ``HxIxExK``, or a folder with config.json.

    Router, shared expert and latent projections are left out. Raises InputError for anything else, and what
    ``describe`` raises for a config.
    """
    if (Path(what) / "config.json").is_file():
        return Path(what).resolve().name, describe(read_config(Path(what))).routed_alone()
    if Path(what).is_dir():
        raise ConfigError(f"{what}: no config.json there; give a model's folder")
    pieces = SHAPES.get(what) or tuple(int(piece) for piece in what.split("x") if piece.isdigit())
    if len(pieces) != 4 or (what not in SHAPES and what.count("x") != 3):
        raise InputError(
            f"shape {what!r}: allowed are {', '.join(SHAPES)}, HIDDENxINTERMEDIATExEXPERTSxTOPK such as "
            "2048x768x128x8, or a folder with config.json"
        )
    hidden, wide, experts, top_k = pieces
    return what, MoESpec(
        hidden_size=hidden, intermediate_size=wide, num_experts=experts, routing=RoutingSpec(top_k=top_k)
    )


def recipe_of(text: str) -> tuple[str, str]:
    """Return the two formats that ``weights[:activations]`` names; activations are bf16 when none are."""
    weights, _, activations = text.partition(":")
    return weights, activations or "bf16"


def bench(
    what: str,
    recipes: Sequence[tuple[str, str]],
    *,
    tokens: Sequence[int] | None = None,
    routing: str = "uniform",
    device: str | None = None,
    ceilings: Ceilings | None = None,
    rounds: int = 9,
    progress: Progress | None = None,
) -> BenchReport:
    """Measure the layer ``what`` (see ``named_layer``) for each (weight format, activation format) of ``recipes``.

    For each token count all recipes take turns. tokens: ``TOKENS`` when None, on a CPU without those that take minutes.
    ceilings: of the machine; measured when None. progress: called
    with (done, total, text). Raises MeasurementError when an output is not what FP32 truth says: then no time is
    given at all; and InputError, SpecError, PlanError for what cannot run here or is larger than the free memory.
    """
    name, spec = named_layer(what)
    facts = probe(device)
    if tokens is None:
        tokens = TOKENS if facts.kind == "cuda" else [count for count in TOKENS if count <= _MOST_ON_CPU]
    plans = {recipe: planned_layer(spec, recipe, facts, max(tokens)) for recipe in recipes}
    check_free_memory(f"bench {name}", layer_needs([*plans.values()], tokens, ceilings=ceilings is None), facts)
    place = torch.device(facts.place)
    # Must differ from the weights' seed, or an input would equal a weight row.
    generator = torch.Generator(place).manual_seed(1)
    made = {t: random_inputs(t, spec, routing, generator) for t in sorted(set(tokens))}
    cases: dict[Any, _Case] = {}
    for recipe, chosen in counted(plans.items(), progress, "building {0[0][0]} x {0[0][1]}".format):
        weights = random_weights(chosen.problem.spec, place)
        layer = MoELayer(weights, chosen)
        for count, pairs in made.items():
            inputs = [(x.to(DTYPES[chosen.problem.dtype]), routing_of) for x, routing_of in pairs]
            cases[*recipe, count] = _Case(layer=layer, weights=weights, inputs=inputs)
    errors: dict[Any, float] = {}
    for key, case in counted(cases.items(), progress, "checking {0[0][0]} x {0[0][1]}, {0[0][2]} tokens".format):
        errors[key] = check_output("{} x {}, {} tokens".format(*key), case.layer, case.weights, case.inputs[0])
    least = ceilings or measure_ceilings(place)
    pool = graph_pool(place)
    passes = {
        key: prepare_pass(case.calls(), place, capture=case.layer.plan.capturable, pool=pool)
        for key, case in cases.items()
    }
    # One token count after another: a large batch heats the device, and a small one behind it would pay for that.
    times: dict[Any, float] = {}
    for count in counted(made, progress, "timing {} tokens".format):
        times |= take_turns({key: call for key, call in passes.items() if key[2] == count}, place, rounds=rounds)
    if ceilings is None and place.type == "cpu":
        # Others may have been at work the first time, and a ceiling is the best there is.
        least = least.raised(measure_ceilings(place))
    rows = [_row(case, times[key] / len(case.inputs), errors[key], least) for key, case in cases.items()]
    return _report(name, spec, routing, facts, least, rows)


def planned_layer(spec: MoESpec, recipe: tuple[str, str], facts: DeviceFacts, most: int) -> Plan:
    """Return the plan of ``spec`` in a recipe's formats for at most ``most`` tokens; raises SpecError and PlanError.

    Tokens are BF16, but FP16 and FP32 where the recipe names these.
    """
    own = replace(spec, weight_format=by_name(recipe[0]).name, down_format=None)
    dtype: Any = recipe[1] if recipe[1] in DTYPES else "bf16"
    problem = Problem(spec=own, device=facts, limits=Limits(max_tokens=most), dtype=dtype)
    return plan(problem, Overrides(activation_format=recipe[1]))


def random_inputs(tokens: int, spec: MoESpec, style: str, generator: torch.Generator) -> list[tuple[Tensor, Routing]]:
    """Return the hidden states and routings that one pass walks through; style: as ``random_routing``."""

    def one() -> tuple[Tensor, Routing]:
        x = torch.randn(tokens, spec.hidden_size, device=generator.device, generator=generator).bfloat16()
        return x, random_routing(tokens, spec, style, generator)

    return [one() for _ in range(input_sets(tokens))]


def random_weights(spec: MoESpec, device: torch.device, seed: int = 0) -> ExpertWeights[Payload]:
    """Return experts of unit gain in the spec's weight format, encoded on ``device``; seven differ, the rest repeat."""
    generator = torch.Generator(device).manual_seed(seed)
    experts, parts = spec.num_experts, spec.gate_up_parts
    wide, hidden = spec.intermediate_size, spec.expert_hidden_size

    def payload(shape: tuple[int, ...]) -> Payload:
        kind = by_name(spec.weight_format)
        values = (torch.randn(shape, device=device, generator=generator) for _ in range(min(_DISTINCT, experts)))
        distinct: list[Payload] = []
        for value in values:
            # One largest value for all parts: NVFP4 then has one global scale for gate and up, which some peers need.
            value[..., 0, 0] = 8.0
            value *= shape[-1] ** -0.5
            distinct.append(ENCODERS.get(kind.name, kind.encode)(value))
        out = distinct[0].repeated(experts)
        for expert in range(experts):
            out.put(expert, distinct[expert % len(distinct)])
        return out

    def bias(*shape: int) -> Tensor | None:
        return torch.randn(shape, device=device, generator=generator).bfloat16() if spec.expert_bias else None

    return ExpertWeights(
        gate_up=payload((parts, wide, hidden)),
        down=payload((hidden, wide)),
        gate_up_bias=bias(experts, parts, wide),
        down_bias=bias(experts, hidden),
        input_reach=(_REACH, _REACH),
    )


def check_output(what: str, layer: MoELayer, weights: ExpertWeights[Payload], case: tuple[Tensor, Routing]) -> float:
    """Return the error of ``layer`` on ``case``; raises MeasurementError when it is above the tolerance."""
    x, routing = case
    with torch.inference_mode():
        error = experts_error(layer(x, routing=routing), layer.plan.problem, weights, case)
    allowed = TOLERANCES[activation_format(layer.plan.activation_format).bits]
    if not error <= allowed:
        raise MeasurementError(
            f"{what}: kernel {layer.plan.kernel} is {error:.4f} away from FP32 truth (relative L2 error), allowed is "
            f"{allowed}; nothing is timed. Report it with this shape, GPU and versions"
        )
    return error


def experts_error(
    found: Tensor, problem: Problem, weights: ExpertWeights[Payload], case: tuple[Tensor, Routing]
) -> float:
    """Return the relative L2 error of ``found [T, H]`` on the first, middle and last token; infinite if not finite.

    Truth: the reference kernel with FP32 activations on the decoded weights.
    """
    x, routing = case
    if not bool(torch.isfinite(found).all()):
        return float("inf")
    some = torch.tensor(sorted({0, x.shape[0] // 2, x.shape[0] - 1}), device=x.device)
    few = Routing(topk_ids=routing.topk_ids[some], topk_weights=routing.topk_weights[some])
    local = Local(num_experts=problem.spec.num_experts)
    batch, handle = local.dispatch(x[some].float(), few)
    judge = Reference().pack(weights, replace(problem, activation_format="fp32").routed)
    truth = local.combine(_exact(judge, batch), handle)
    return float((found[some].float() - truth).norm() / truth.norm())


def _exact(judge: PackedWeights, batch: ContiguousBatch) -> Tensor:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return judge.run(batch)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _row(case: _Case, seconds: float, error: float, ceilings: Ceilings) -> BenchRow:
    chosen = case.layer.plan
    x, routings = case.inputs[0][0], [routing for _, routing in case.inputs]
    held = case.weights.gate_up.nbytes + case.weights.down.nbytes
    # What a format that is only read stores depends on the file.
    each = held / chosen.problem.spec.num_experts if case.weights.gate_up.read_only else None
    floor = floor_of(chosen.problem.spec, chosen.activation_format, routings, ceilings, each=each)
    cached = stays_cached(min(len(case.inputs) * floor.nbytes, chosen.weight_bytes), x.device)
    if cached:
        floor = floor_of(chosen.problem.spec, chosen.activation_format, routings, ceilings, cached=True, each=each)
    return BenchRow(
        weights=chosen.problem.spec.weight_format,
        activations=chosen.activation_format,
        kernel=chosen.kernel,
        tokens=x.shape[0],
        seconds=seconds,
        floor_seconds=floor.seconds,
        of_floor=floor.seconds / seconds,
        bound=floor.bound,
        experts_hit=floor.experts_hit,
        gigabytes_per_second=floor.nbytes / seconds / 1e9,
        teraflops=floor.flops / seconds / 1e12,
        intensity=floor.flops / floor.nbytes,
        error=error,
        tolerance=TOLERANCES[activation_format(chosen.activation_format).bits],
        cold=not cached,
    )


def _report(
    name: str, spec: MoESpec, routing: str, facts: DeviceFacts, ceilings: Ceilings, rows: Sequence[BenchRow]
) -> BenchReport:
    return BenchReport(
        shape=name,
        sizes=f"H={spec.hidden_size} I={spec.intermediate_size} E={spec.num_experts} top-{spec.routing.top_k}",
        routing=routing,
        device=facts.name or facts.kind,
        driver=driver_version(torch.device(facts.place)),
        torch=torch.__version__,
        triton=version_of("triton"),
        ceilings=ceilings,
        rows=tuple(rows),
    )
