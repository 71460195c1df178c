"""``collegium bench``: time one MoE layer and compare it with the minimum time (floor) of this machine.

Every case is compared with FP32 reference output before any timing. The floor follows from the experts that are
active in each measured routing and from the hardware ceilings, which are measured in the same run or passed in.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.reader import read_config
from ..dummy.weights import random_weights
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
    "recipe_of",
]

SHAPES: dict[str, tuple[int, int, int, int]] = {  # H, I, E, top-k of the routed experts
    "dsv3": (7168, 2048, 256, 8),
    "v4_flash": (4096, 2048, 256, 6),
    "gptoss120b": (2880, 2880, 128, 4),
    "qwen3_30b": (2048, 768, 128, 8),
}
TOKENS = (1, 8, 32, 128, 512, 2048, 8192)
_MAX_TOKENS_ON_CPU = 512
# Allowed relative L2 error against FP32 output, by the bits of an activation. Rounding activations to E4M3 twice gives
# about 0.045, to NVFP4 about 0.13; 16-bit activations stay far below 0.01.
TOLERANCES = {32: 0.01, 16: 0.01, 8: 0.06, 4: 0.2}


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchRow:
    """One measured case. seconds: time of one layer call, from hidden states and top-k to output.

    of_floor: floor_seconds / seconds. bound: ``memory`` or ``math``, the limit that sets the floor. experts_hit: active
    experts, averaged over the inputs. error: relative L2 error against FP32 output on sampled tokens. cold: whether a
    pass reads so much more than the caches hold that weights come from memory; otherwise the floor counts only the
    arithmetic.
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
    """All results of one run, with device and software versions."""

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
    """Return the name and the spec of ``what``: a name of ``SHAPES``, ``HxIxExK``, or a folder with config.json.

    The spec has the routed experts only: no router, shared expert or latent projections. Raises InputError for
    anything else, and the errors of ``describe``.
    """
    if (Path(what) / "config.json").is_file():
        return Path(what).resolve().name, describe(read_config(Path(what))).routed_alone()
    if Path(what).is_dir():
        raise ConfigError(f"{what}: config.json is missing; give a model's folder")
    pieces = SHAPES.get(what) or tuple(int(piece) for piece in what.split("x") if piece.isdigit())
    if len(pieces) != 4 or (what not in SHAPES and what.count("x") != 3):
        raise InputError(
            f"shape {what!r}: allowed are {', '.join(SHAPES)}, HIDDENxINTERMEDIATExEXPERTSxTOPK such as "
            "2048x768x128x8, or a folder with config.json"
        )
    hidden_size, intermediate_size, num_experts, top_k = pieces
    return what, MoESpec(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_experts=num_experts,
        routing=RoutingSpec(top_k=top_k),
    )


def recipe_of(text: str) -> tuple[str, str]:
    """Split ``weights[:activations]`` into two format names; activations default to bf16."""
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

    At each token count the recipes take turns.

    tokens: token counts; default ``TOKENS``, on a CPU those up to 512.
    routing: see ``random_routing``.
    ceilings: hardware limits; measured if None.
    progress: called with (done, total, text).

    Raises MeasurementError, before anything is timed, if an output differs from the FP32 output; InputError, SpecError
    and PlanError for a case that cannot run on this device or exceeds its free memory.
    """
    name, spec = named_layer(what)
    facts = probe(device)
    if tokens is None:
        tokens = TOKENS if facts.kind == "cuda" else [count for count in TOKENS if count <= _MAX_TOKENS_ON_CPU]
    plans = {recipe: planned_layer(spec, recipe, facts, max(tokens)) for recipe in recipes}
    check_free_memory(f"bench {name}", layer_needs([*plans.values()], tokens, ceilings=ceilings is None), facts)
    place = torch.device(facts.place)
    # A seed other than the weights', or an input would equal a row of weights.
    generator = torch.Generator(place).manual_seed(1)
    inputs_by_count = {t: random_inputs(t, spec, routing, generator) for t in sorted(set(tokens))}
    cases: dict[Any, _Case] = {}
    for recipe, recipe_plan in counted(plans.items(), progress, "building {0[0][0]} x {0[0][1]}".format):
        weights = random_weights(recipe_plan.problem.spec, place)
        layer = MoELayer(weights, recipe_plan)
        dtype = DTYPES[recipe_plan.problem.dtype]
        for count, pairs in inputs_by_count.items():
            inputs = [(x.to(dtype), input_routing) for x, input_routing in pairs]
            cases[*recipe, count] = _Case(layer=layer, weights=weights, inputs=inputs)
    errors: dict[Any, float] = {}
    for key, case in counted(cases.items(), progress, "checking {0[0][0]} x {0[0][1]}, {0[0][2]} tokens".format):
        errors[key] = check_output("{} x {}, {} tokens".format(*key), case.layer, case.weights, case.inputs[0])
    limits = ceilings or measure_ceilings(place)
    pool = graph_pool(place)
    passes = {
        key: prepare_pass(case.calls(), place, capture=case.layer.plan.capturable, pool=pool)
        for key, case in cases.items()
    }
    # One token count at a time: a large batch heats the device and would slow down a small batch measured after it.
    times: dict[Any, float] = {}
    for count in counted(inputs_by_count, progress, "timing {} tokens".format):
        times.update(take_turns({key: call for key, call in passes.items() if key[2] == count}, place, rounds=rounds))
    if ceilings is None and place.type == "cpu":
        # Other programs may have disturbed the first measurement; a ceiling is the best of both.
        limits = limits.raised(measure_ceilings(place))
    rows = [_row(case, times[key] / len(case.inputs), errors[key], limits) for key, case in cases.items()]
    return _report(name, spec, routing, facts, limits, rows)


def planned_layer(spec: MoESpec, recipe: tuple[str, str], facts: DeviceFacts, max_tokens: int) -> Plan:
    """Plan ``spec`` in a recipe's formats for at most ``max_tokens`` tokens; raises SpecError and PlanError.

    Tokens are BF16, or FP16 and FP32 if the recipe's activation format is one of these.
    """
    recipe_spec = replace(spec, weight_format=by_name(recipe[0]).name, down_format=None)
    dtype: Any = recipe[1] if recipe[1] in DTYPES else "bf16"
    problem = Problem(spec=recipe_spec, device=facts, limits=Limits(max_tokens=max_tokens), dtype=dtype)
    return plan(problem, Overrides(activation_format=recipe[1]))


def random_inputs(tokens: int, spec: MoESpec, style: str, generator: torch.Generator) -> list[tuple[Tensor, Routing]]:
    """Return the inputs of one pass, ``input_sets(tokens)`` pairs; style: see ``random_routing``."""
    inputs: list[tuple[Tensor, Routing]] = []
    for _ in range(input_sets(tokens)):
        x = torch.randn(tokens, spec.hidden_size, device=generator.device, generator=generator).bfloat16()
        inputs.append((x, random_routing(tokens, spec, style, generator)))
    return inputs


def check_output(what: str, layer: MoELayer, weights: ExpertWeights[Payload], case: tuple[Tensor, Routing]) -> float:
    """Return the error of ``layer`` on ``case``; raises MeasurementError if it is above the tolerance."""
    x, routing = case
    with torch.inference_mode():
        error = experts_error(layer(x, routing=routing), layer.plan.problem, weights, case)
    tolerance = TOLERANCES[activation_format(layer.plan.activation_format).bits]
    if not error <= tolerance:
        raise MeasurementError(
            f"{what}: kernel {layer.plan.kernel} has a relative L2 error of {error:.4f} against FP32, above the "
            f"tolerance of {tolerance}; nothing was timed. Please report it with this shape, device and versions"
        )
    return error


def experts_error(
    output: Tensor, problem: Problem, weights: ExpertWeights[Payload], case: tuple[Tensor, Routing]
) -> float:
    """Return the relative L2 error of ``output [T, H]`` on the first, middle and last token; infinite if not finite.

    The truth is the reference kernel with FP32 activations on the decoded weights.
    """
    x, routing = case
    if not bool(torch.isfinite(output).all()):
        return float("inf")
    sample = torch.tensor(sorted({0, x.shape[0] // 2, x.shape[0] - 1}), device=x.device)
    sample_routing = Routing(topk_ids=routing.topk_ids[sample], topk_weights=routing.topk_weights[sample])
    local = Local(num_experts=problem.spec.num_experts)
    batch, handle = local.dispatch(x[sample].float(), sample_routing)
    reference = Reference().pack(weights, replace(problem, activation_format="fp32").routed)
    truth = local.combine(_run_in_fp32(reference, batch), handle)
    return float((output[sample].float() - truth).norm() / truth.norm())


def _run_in_fp32(reference: PackedWeights, batch: ContiguousBatch) -> Tensor:
    tf32_before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return reference.run(batch)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32_before


def _row(case: _Case, seconds: float, error: float, ceilings: Ceilings) -> BenchRow:
    layer_plan = case.layer.plan
    spec = layer_plan.problem.spec
    x = case.inputs[0][0]
    routings = [routing for _, routing in case.inputs]
    expert_nbytes = None
    if case.weights.gate_up.read_only:  # the size of a read-only format depends on the file
        expert_nbytes = (case.weights.gate_up.nbytes + case.weights.down.nbytes) / spec.num_experts
    floor_for = partial(floor_of, spec, layer_plan.activation_format, routings, ceilings, expert_nbytes=expert_nbytes)
    floor = floor_for()
    in_cache = stays_cached(min(len(case.inputs) * floor.nbytes, layer_plan.weight_bytes), x.device)
    if in_cache:
        floor = floor_for(cached=True)
    return BenchRow(
        weights=spec.weight_format,
        activations=layer_plan.activation_format,
        kernel=layer_plan.kernel,
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
        tolerance=TOLERANCES[activation_format(layer_plan.activation_format).bits],
        cold=not in_cache,
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
