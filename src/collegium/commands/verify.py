"""``collegium verify``: compare the experts on this machine with independent reference code.

Each layer is loaded, planned and packed as for inference. Sampled experts are read again from the files, decoded by
the arithmetic in this module (no code of ``formats/`` or ``kernels/``), and computed in float64 on heavy-tailed rows.
The rows are scaled by powers of two so that intermediate values have unit size, and half of them exceed the clamp of an
activation that has one: swapped halves, clamps or scales then change the output visibly.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.audit import check_dense_layers
from ..checkpoint.layer_view import CheckpointLayer
from ..checkpoint.loader import load_experts
from ..checkpoint.non_expert_weights import check_non_expert_weights, load_shared
from ..checkpoint.problems import raise_if_any
from ..checkpoint.reader import Checkpoint
from ..encoding import encoded
from ..errors import InputError
from ..formats.payload import Payload
from ..layer import MoELayer
from ..loading import load_routed, scale_request
from ..models import moe_layers
from ..ops.quantize import activation_format
from ..parallel.ranks import Ranks
from ..placement import Placement
from ..planning import plan
from ..problem import DeviceFacts, Overrides, Problem
from ..runtime.devices import probe
from ..runtime.progress import Progress, counted
from ..testing.compare import activate_float64, heavy_tailed
from ..types import ExpertWeights, Routing, format_names

__all__ = ["LayerCheck", "VerifyReport", "plain_values", "tolerance_of", "verify_model"]

_DECODED_HERE = ("fp8_block", "fp8_tensor", "fp8_channel", "mxfp8", "mxfp4", "nvfp4", "int4_group")
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPERTS_PER_READ = 4
_ROWS_PER_EXPERT = (9, 17, 40, 24)  # in turn; below and above the size of a tile
_DECODE_ROWS = 4  # rows per expert in the second run, as in a decode step
_DECODED_AT_ONCE = 1 << 22  # weights


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCheck:
    """What ran in one layer, and its error against the reference.

    part: ``experts`` or ``shared``. checked: number of experts checked, of ``num_experts``. error: root mean square of
    their relative errors. worst_error: error of expert ``worst``. tolerance: limit of ``error``; one expert may have
    twice as much.
    """

    layer: int
    part: str
    kernel: str
    weight_format: str
    activation_format: str
    checked: int
    num_experts: int
    error: float
    worst: int
    worst_error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the layer and each of its experts are within the tolerance; NaN and infinity are not."""
        return self.error <= self.tolerance and self.worst_error <= 2 * self.tolerance


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """The checks of all layers."""

    path: str
    device: str
    checks: tuple[LayerCheck, ...]

    @property
    def passed(self) -> bool:
        """Whether every layer passed."""
        return all(check.passed for check in self.checks)

    def to_json(self) -> dict[str, object]:
        """Return the report as plain values for ``--json``; NaN and infinity become None."""
        layers = [{**_finite_fields(check), "passed": check.passed} for check in self.checks]
        return {"path": self.path, "device": self.device, "passed": self.passed, "layers": layers}


def _finite_fields(check: LayerCheck) -> dict[str, object]:
    fields = asdict(check)
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in fields.items()
    }


def tolerance_of(activations: str) -> float:
    """Return the relative error allowed for an activation format: 1 % for 16 bits and more, 6 % for 8, 25 % for 4.

    8 % for 8 bits with power-of-two scales, which also round the largest number of a row.
    """
    form = activation_format(activations)
    return 0.08 if form.power else {8: 0.06, 4: 0.25}.get(form.bits, 0.01)


def verify_model(
    path: str,
    *,
    experts: int | None = 8,
    device: str | Ranks | None = None,
    overrides: Overrides | None = None,
    weight_format: str | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check every MoE layer of the checkpoint at ``path``, one layer in memory at a time.

    experts: number of experts to check per layer; None for all.
    device, overrides, weight_format: see ``load_layer``. With Ranks, each rank checks its local experts, and all ranks
    get the same report.
    progress: called with (layers done, layers, text).

    Raises the errors of loading and planning, and CheckpointError for an invalid router, hash table or shared expert.
    """
    if experts is not None and experts < 1:
        raise InputError(f"verify: {experts} experts requested, allowed: at least 1, or all")
    checkpoint = Checkpoint.open(path)
    ranks = device if isinstance(device, Ranks) else None
    facts = probe(device.device if isinstance(device, Ranks) else device)
    layers = moe_layers(checkpoint.config)
    raise_if_any(checkpoint, check_dense_layers(checkpoint))
    checks: list[LayerCheck] = []
    for number in counted(layers, progress, "layer {}".format):
        layer = CheckpointLayer.open(checkpoint, number)
        raise_if_any(checkpoint, check_non_expert_weights(layer, deep=True))
        checks.append(_check_routed(layer, experts, device or facts.place, overrides, weight_format))
        checks += _check_shared(layer, facts, overrides, weight_format, ranks)
    return VerifyReport(path=str(path), device=f"{facts.kind} {facts.name}".strip(), checks=tuple(checks))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sample:
    """An expert to check, and the payloads that hold its weights at index ``slot``."""

    expert: int
    weights: ExpertWeights[Payload]
    slot: int


def _check_routed(
    layer: CheckpointLayer,
    experts: int | None,
    device: str | Ranks,
    overrides: Overrides | None,
    weight_format: str | None,
) -> LayerCheck:
    built = load_routed(layer, weight_format=weight_format, overrides=overrides, device=device)
    num_experts = built.spec.num_experts
    sampled = _choose_experts(num_experts, num_experts if experts is None else experts, layer.number)
    local = [expert for expert in sampled if expert in built.plan.problem.local_experts]
    samples = _read_samples(layer, local, weight_format)
    return _check_experts(built, layer.number, "experts", samples, device if isinstance(device, Ranks) else None)


def _read_samples(layer: CheckpointLayer, experts: Sequence[int], weight_format: str | None) -> Iterator[_Sample]:
    """Read the stored weights of ``experts``, a few at a time."""
    for start in range(0, len(experts), _EXPERTS_PER_READ):
        ids = tuple(experts[start : start + _EXPERTS_PER_READ])
        stored = load_experts(layer, Placement(expert_ids=ids), convert=weight_format is not None)
        weights = encoded(stored, weight_format)
        for slot, expert in enumerate(ids):
            yield _Sample(expert=expert, weights=weights, slot=slot)


def _check_shared(
    layer: CheckpointLayer,
    facts: DeviceFacts,
    overrides: Overrides | None,
    weight_format: str | None,
    ranks: Ranks | None,
) -> list[LayerCheck]:
    """Check the shared expert as a layer with one routed expert, as the kernel sees it; every rank runs all of it."""
    shared = load_shared(layer, device=facts.place, scales=scale_request(overrides))
    plain = load_shared(layer)
    if shared is None or plain is None:
        return []
    shared_spec = None if layer.spec.shared is None else replace(layer.spec.shared, **shared.experts.formats)
    spec = replace(layer.spec, shared=shared_spec)
    if weight_format is not None:
        spec = replace(spec, weight_format=weight_format, down_format=None)
    # The kernel that the plan of the whole layer chooses for it.
    kernel = plan(Problem(spec=spec, device=facts), overrides).shared_kernel
    problem = Problem(spec=spec.shared_alone(), device=facts)
    built = MoELayer(shared.experts, plan(problem, replace(overrides or Overrides(), kernel=kernel)))
    samples = iter([_Sample(expert=0, weights=plain.experts, slot=0)])
    return [_check_experts(built, layer.number, "shared", samples, ranks)]


def _choose_experts(num_experts: int, count: int, layer: int) -> list[int]:
    """Return ``count`` experts: the first, the last and a random choice, which is the same in every run."""
    if count >= num_experts:
        return list(range(num_experts))
    drawn = torch.randperm(num_experts, generator=torch.Generator().manual_seed(layer)).tolist()
    return sorted(list(dict.fromkeys([0, num_experts - 1, *drawn]))[:count])


def _check_experts(
    built: MoELayer, layer: int, part: str, samples: Iterator[_Sample], ranks: Ranks | None
) -> LayerCheck:
    """Compute the truth of each sample, run all rows at once and then a few rows per expert, and compare.

    With several ranks, each passes rows of its local experts, or none, and the errors are exchanged.
    """
    spec = built.spec
    row_experts: list[int] = []
    # A rank without samples takes part with zero rows.
    rows: list[Any] = [torch.empty(0, spec.hidden_size, dtype=torch.bfloat16)]
    truths: list[Any] = [torch.empty(0, spec.hidden_size, dtype=torch.float64)]
    for index, sample in enumerate(samples):
        count = _ROWS_PER_EXPERT[index % len(_ROWS_PER_EXPERT)]
        values = heavy_tailed(count, spec.hidden_size, seed=7919 * layer + sample.expert)
        x, truth = _truth(sample, built, values)
        rows.append(x)
        truths.append(truth)
        row_experts += [sample.expert] * count
    ids = torch.tensor(row_experts, dtype=torch.int64)
    factors = 0.25 + 1.5 * torch.rand(len(row_experts), generator=torch.Generator().manual_seed(layer))
    x = torch.cat(rows)
    truth = torch.cat(truths) * factors.double()[:, None]
    errors = _row_errors(_run(built, x, ids, factors), truth)
    experts = list(dict.fromkeys(row_experts))
    few = torch.cat([ids[:0], *((ids == expert).nonzero()[:_DECODE_ROWS, 0] for expert in experts)])
    few_errors = _row_errors(_run(built, x[few], ids[few], factors[few]), truth[few])
    by_expert = {
        expert: max(_root_mean_square(errors[ids == expert]), _root_mean_square(few_errors[ids[few] == expert]))
        for expert in experts
    }
    if ranks is not None:
        for rank_errors in ranks.exchange(by_expert, f"verify: {part} of layer {layer}"):
            by_expert.update({e: max(error, by_expert.get(e, error)) for e, error in rank_errors.items()})
    worst = max(by_expert, key=lambda expert: by_expert[expert])
    activations = built.plan.activation_format
    return LayerCheck(
        layer=layer,
        part=part,
        kernel=built.plan.kernel,
        weight_format=format_names(spec.formats),
        activation_format=activations,
        checked=len(by_expert),
        num_experts=spec.num_experts,
        error=_root_mean_square(torch.tensor(list(by_expert.values()), dtype=torch.float64)),
        worst=worst,
        worst_error=by_expert[worst],
        tolerance=tolerance_of(activations),
    )


def _run(built: MoELayer, x: Tensor, ids: Tensor, factors: Tensor) -> Tensor:
    device = built.plan.problem.device.place
    routing = Routing(topk_ids=ids[:, None].to(device), topk_weights=factors[:, None].to(device))
    with torch.no_grad():
        return built(x.to(device), routing=routing).cpu()


def _root_mean_square(errors: Tensor) -> float:
    return float(errors.square().mean().sqrt())


def _row_errors(output: Tensor, truth: Tensor) -> Tensor:
    """Return the relative error of each row in float64; infinity for a row with NaN or infinity."""
    distance = (output.double() - truth).norm(dim=1)
    norm = truth.norm(dim=1)
    error = torch.where(norm > 0, distance / norm.clamp(min=1e-300), torch.where(distance > 0, math.inf, 0.0))
    return torch.where(error.isfinite(), error, math.inf)


def _truth(sample: _Sample, built: MoELayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return bfloat16 rows, scaled for sensitivity, and this expert's float64 output for them.

    Static activation scales saturate: the rows are scaled to stay within range, and intermediate values are clamped.
    """
    spec, weights, slot = built.spec, sample.weights, sample.slot
    built_slot = built.plan.problem.local_experts.index(sample.expert)
    input_reach, intermediate_reach = built.experts.reach_of(built_slot) or (math.inf, math.inf)
    x = x.bfloat16()
    gate_up, down = weights.gate_up[slot], weights.down[slot]
    parts, intermediate_size, _ = gate_up.shape
    projected = torch.stack([_product(x.double(), gate_up[part]) for part in range(parts)])
    rms = projected.square().mean((0, 2)).sqrt().clamp(min=1e-30)
    target_rms = torch.full_like(rms, 1.5)
    if spec.activation.limit is not None:
        target_rms[::2] = spec.activation.limit
    # A power of two scales the product exactly, so that it need not be computed again.
    scale = torch.exp2(torch.log2(target_rms / rms).round().clamp(-100, 100))
    scale = torch.minimum(scale, torch.exp2(torch.log2(input_reach / x.double().abs().amax(1)).floor()))
    x = (x.double() * scale[:, None]).bfloat16()
    projected = projected * scale[:, None]
    if weights.gate_up_bias is not None:
        projected = projected + weights.gate_up_bias[slot].double().reshape(parts, 1, intermediate_size)
    intermediate = activate_float64(projected, spec.activation).clamp(-intermediate_reach, intermediate_reach)
    out = _product(intermediate, down)
    return x, out if weights.down_bias is None else out + weights.down_bias[slot].double()


def _product(x: Tensor, matrix: Payload) -> Tensor:
    """Return ``x [R, K] @ matrix.T`` in float64; a few million weights are decoded at a time."""
    rows, columns = matrix.shape
    step = max(1, _DECODED_AT_ONCE // columns)
    spans = ((start, min(start + step, rows)) for start in range(0, rows, step))
    return torch.cat([x @ plain_values(matrix, *span).double().T for span in spans], dim=1)


def plain_values(matrix: Payload, start: int, stop: int) -> Tensor:
    """Decode rows ``start:stop`` of one matrix ``[N, K]`` to float64 by plain arithmetic on its stored bytes.

    Formats without a rule here are decoded by their class.
    """
    stored: Any = matrix
    fields = matrix.tensors()
    columns = matrix.shape[-1]
    if set(fields) == {"values"}:
        return fields["values"][start:stop].double()
    if matrix.name not in _DECODED_HERE:
        return matrix.decode()[start:stop].double()
    scales = fields["scale"] if "scale" in fields else fields["scales"]
    codes = fields["codes"][start:stop]
    if codes.dtype == torch.float8_e4m3fn:
        values = _e4m3(codes.view(torch.uint8))
    else:
        nibbles = torch.empty(codes.shape[0], 2 * codes.shape[1], dtype=torch.int64)
        nibbles[:, 0::2] = codes.long() % 16
        nibbles[:, 1::2] = codes.long() // 16
        if matrix.name == "int4_group":
            values = (nibbles - 8).double()
        else:
            values = torch.tensor(_E2M1, dtype=torch.float64)[nibbles % 8] * (1 - 2 * (nibbles // 8))
    block = matrix.scale_block
    steps = _scale_values(scales)
    if steps.dim() == 2:
        steps = steps[torch.arange(start, stop) // block[0]][:, torch.arange(columns) // block[1]]
    elif steps.dim() == 1:
        steps = steps[start:stop, None]
    if "global_scale" in fields:
        global_scale = fields["global_scale"].double()
        steps = steps / global_scale if stored.global_divides else steps * global_scale
    return values[:, :columns] * steps


def _e4m3(codes: Tensor) -> Tensor:
    bits = codes.long()
    sign = 1 - 2 * (bits // 128)
    exponent = bits // 8 % 16
    mantissa = bits % 8
    normal = (8 + mantissa).double() * torch.exp2((exponent - 10).double())
    return sign * torch.where(exponent == 0, mantissa.double() / 512, normal)


def _scale_values(scales: Tensor) -> Tensor:
    if scales.dtype == torch.uint8:
        return torch.exp2(scales.double() - 127)
    if scales.dtype == torch.float8_e4m3fn:
        return _e4m3(scales.view(torch.uint8))
    return scales.double()
