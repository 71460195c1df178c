"""The proof behind ``collegium verify``: experts as they run on this machine, beside plain code that shares nothing.

Each layer is loaded, planned and packed as it would be run. Sampled experts are then read again from the files, their
weights are decoded by the few lines of arithmetic below (no code of ``formats/`` or ``kernels/``), and their outputs
are computed in float64 on heavy-tailed rows, scaled by powers of two so that the values between the projections have
unit size, and with a clamp half of them beyond it: at that size no half, clamp or scale can be exchanged unseen.
"""

import math
from collections.abc import Iterator
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
from ..loading import asked_activations, load_routed
from ..models import moe_layers
from ..ops.quantize import activation_format
from ..parallel.ranks import Ranks
from ..placement import Placement
from ..planning import plan
from ..problem import DeviceFacts, Overrides, Problem
from ..runtime.devices import probe
from ..runtime.progress import Progress, counted
from ..testing.compare import between, heavy_tailed
from ..types import ExpertWeights, Routing, format_names

__all__ = ["LayerProof", "VerifyReport", "plain_values", "tolerance_of", "verify_model"]

_KNOWN = ("fp8_block", "fp8_tensor", "fp8_channel", "mxfp8", "mxfp4", "nvfp4", "int4_group")
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_TOGETHER = 4  # experts read at a time
_COUNTS = (9, 17, 40, 24)  # rows of the experts in turn: less than a tile, and more
_FEW = 4  # rows of each expert in the second run, as in a decode step
_ELEMENTS = 1 << 22  # weights decoded at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerProof:
    """What ran in one layer and how far it was from the truth.

    part: ``experts`` or ``shared``. checked: experts recomputed, of ``held``. error: mean square over them of the
    relative error; worst_error of expert ``worst``. tolerance: what ``error`` may be, for one expert twice as much.
    """

    layer: int
    part: str
    kernel: str
    weight_format: str
    activation_format: str
    checked: int
    held: int
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
    """The proofs of all layers."""

    path: str
    device: str
    proofs: tuple[LayerProof, ...]

    @property
    def passed(self) -> bool:
        """Whether every layer passed."""
        return all(proof.passed for proof in self.proofs)

    def to_json(self) -> dict[str, object]:
        """Return the report as plain values for ``--json``; an error that is no number becomes None."""
        rows = [{**asdict(proof), "passed": proof.passed} for proof in self.proofs]
        rows = [{k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in r.items()} for r in rows]
        return {"path": self.path, "device": self.device, "passed": self.passed, "layers": rows}


def tolerance_of(activations: str) -> float:
    """Return the relative error allowed for an activation format: 1 % for 16 bits and more, 6 % for 8, 25 % for 4.

    Scales of 8 bits that are powers of two may differ by 8 %: they round a row's largest number too, which others keep.
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
    """Verify every MoE layer of the checkpoint at ``path``, one in memory at a time.

    experts: how many of each layer to recompute, None for all. device, overrides, weight_format: as ``load_layer``; of
    Ranks each recomputes experts it holds, and all get one report.
    progress: called with (layers done, layers, text). Raises what loading and planning raise, and the
    CheckpointErrors of a router, hash table or shared expert that no layer could be built from.
    """
    if experts is not None and experts < 1:
        raise InputError(f"verify: {experts} experts were asked for, allowed: at least 1, or all")
    checkpoint, ranks = Checkpoint.open(path), device if isinstance(device, Ranks) else None
    facts = probe(device.device if isinstance(device, Ranks) else device)
    layers = moe_layers(checkpoint.config)
    raise_if_any(checkpoint, check_dense_layers(checkpoint))
    proofs: list[LayerProof] = []
    for number in counted(layers, progress, "layer {}".format):
        layer = CheckpointLayer.open(checkpoint, number)
        raise_if_any(checkpoint, check_non_expert_weights(layer, deep=True))
        proofs.append(_prove_routed(layer, experts, device or facts.place, overrides, weight_format))
        proofs += _prove_shared(layer, facts, overrides, weight_format, ranks)
    return VerifyReport(path=str(path), device=f"{facts.kind} {facts.name}".strip(), proofs=tuple(proofs))


def _prove_routed(
    layer: CheckpointLayer,
    experts: int | None,
    device: str | Ranks,
    overrides: Overrides | None,
    weight_format: str | None,
) -> LayerProof:
    built = load_routed(layer, weight_format=weight_format, overrides=overrides, device=device)
    held = built.spec.num_experts
    chosen = _sample(held, held if experts is None else experts, layer.number)
    chosen = [expert for expert in chosen if expert in built.plan.problem.local_experts]

    def source() -> Iterator[tuple[int, ExpertWeights[Payload], int]]:
        for start in range(0, len(chosen), _TOGETHER):
            ids = tuple(chosen[start : start + _TOGETHER])
            weights = load_experts(layer, Placement(expert_ids=ids), convert=weight_format is not None)
            weights = encoded(weights, weight_format)
            for slot, expert in enumerate(ids):
                yield expert, weights, slot

    return _prove(built, layer.number, "experts", source(), device if isinstance(device, Ranks) else None)


def _prove_shared(
    layer: CheckpointLayer,
    facts: DeviceFacts,
    overrides: Overrides | None,
    weight_format: str | None,
    ranks: Ranks | None,
) -> list[LayerProof]:
    """Run the shared expert as one routed expert, which is what it is to a kernel; every rank runs it whole."""
    shared = load_shared(layer, device=facts.place, activations=asked_activations(overrides))
    if shared is None:
        return []
    own = None if layer.spec.shared is None else replace(layer.spec.shared, **shared.experts.formats)
    spec = replace(layer.spec, shared=own)
    if weight_format is not None:
        spec = replace(spec, weight_format=weight_format, down_format=None)
    # The kernel that the whole layer's plan gives it.
    kernel = plan(Problem(spec=spec, device=facts), overrides).shared_kernel
    problem = Problem(spec=spec.shared_alone(), device=facts)
    built = MoELayer(shared.experts, plan(problem, replace(overrides or Overrides(), kernel=kernel)))
    plain = load_shared(layer)
    return [] if plain is None else [_prove(built, layer.number, "shared", iter([(0, plain.experts, 0)]), ranks)]


def _sample(held: int, count: int, layer: int) -> list[int]:
    """Return ``count`` experts, always the first and the last, others by chance; the same ones in every run."""
    if count >= held:
        return list(range(held))
    drawn = torch.randperm(held, generator=torch.Generator().manual_seed(layer)).tolist()
    return sorted(list(dict.fromkeys([0, held - 1, *drawn]))[:count])


def _prove(
    built: MoELayer,
    layer: int,
    part: str,
    source: Iterator[tuple[int, ExpertWeights[Payload], int]],
    ranks: Ranks | None,
) -> LayerProof:
    """Compute truth expert by expert, run all rows at once and then a few of each expert, and compare.

    Of several ranks each brings rows of its own experts, or none, and hears how far off the others' are.
    """
    spec, owners = built.spec, list[int]()
    # A rank may hold none of the experts that were chosen; it takes part with no rows.
    rows: list[Any] = [torch.empty(0, spec.hidden_size, dtype=torch.bfloat16)]
    truths: list[Any] = [torch.empty(0, spec.hidden_size, dtype=torch.float64)]
    for place, (expert, weights, slot) in enumerate(source):
        count = _COUNTS[place % len(_COUNTS)]
        x, truth = _truth(weights, slot, built, heavy_tailed(count, spec.hidden_size, seed=7919 * layer + expert))
        rows.append(x)
        truths.append(truth)
        owners += [expert] * count
    ids = torch.tensor(owners, dtype=torch.int64)
    factors = 0.25 + 1.5 * torch.rand(len(owners), generator=torch.Generator().manual_seed(layer))
    x, truth = torch.cat(rows), torch.cat(truths) * factors.double()[:, None]
    errors = _row_errors(_run(built, x, ids, factors), truth)
    names = list(dict.fromkeys(owners))
    few = torch.cat([ids[:0], *((ids == expert).nonzero()[:_FEW, 0] for expert in names)])
    again = _row_errors(_run(built, x[few], ids[few], factors[few]), truth[few])
    by_expert = {e: max(_mean(errors[ids == e]), _mean(again[ids[few] == e])) for e in names}
    for found in [] if ranks is None else ranks.exchange(by_expert, f"verify: {part} of layer {layer}"):
        by_expert |= {e: max(error, by_expert.get(e, error)) for e, error in found.items()}
    worst = max(by_expert, key=lambda expert: by_expert[expert])
    chosen = built.plan
    return LayerProof(
        layer=layer,
        part=part,
        kernel=chosen.kernel,
        weight_format=format_names(spec.formats),
        activation_format=chosen.activation_format,
        checked=len(by_expert),
        held=spec.num_experts,
        error=_mean(torch.tensor(list(by_expert.values()), dtype=torch.float64)),
        worst=worst,
        worst_error=by_expert[worst],
        tolerance=tolerance_of(chosen.activation_format),
    )


def _run(built: MoELayer, x: Tensor, ids: Tensor, factors: Tensor) -> Tensor:
    device = built.plan.problem.device.place
    routing = Routing(topk_ids=ids[:, None].to(device), topk_weights=factors[:, None].to(device))
    with torch.no_grad():
        return built(x.to(device), routing=routing).cpu()


def _mean(errors: Tensor) -> float:
    return float(errors.square().mean().sqrt())


def _row_errors(found: Tensor, truth: Tensor) -> Tensor:
    """Return the relative error of each row in float64, infinity where anything is not finite."""
    distance = (found.double() - truth).norm(dim=1)
    size = truth.norm(dim=1)
    error = torch.where(size > 0, distance / size.clamp(min=1e-300), torch.where(distance > 0, math.inf, 0.0))
    return torch.where(error.isfinite(), error, math.inf)


def _truth(weights: ExpertWeights[Payload], slot: int, built: MoELayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return bfloat16 rows, scaled to a telling size, and this expert's float64 output for them.

    What is beyond the reach of static activation scales saturates here too; the rows themselves are not.
    """
    spec, (first, second) = built.spec, built.experts.input_reach or (math.inf, math.inf)
    x = x.bfloat16()
    gate_up, down = weights.gate_up[slot], weights.down[slot]
    parts, wide, _ = gate_up.shape
    both = torch.stack([_product(x.double(), gate_up[part]) for part in range(parts)])
    size = both.square().mean((0, 2)).sqrt().clamp(min=1e-30)
    wanted = torch.full_like(size, 1.5)
    if spec.activation.limit is not None:
        wanted[::2] = spec.activation.limit
    # Powers of two: the product is scaled exactly and need not be computed again.
    scale = torch.exp2(torch.log2(wanted / size).round().clamp(-100, 100))
    scale = torch.minimum(scale, torch.exp2(torch.log2(first / x.double().abs().amax(1)).floor()))
    x, both = (x.double() * scale[:, None]).bfloat16(), both * scale[:, None]
    if weights.gate_up_bias is not None:
        both = both + weights.gate_up_bias[slot].double().reshape(parts, 1, wide)
    out = _product(between(both, spec.activation).clamp(-second, second), down)
    return x, out if weights.down_bias is None else out + weights.down_bias[slot].double()


def _product(x: Tensor, matrix: Payload) -> Tensor:
    """Return ``x [R, K] @ matrix.T`` in float64, decoding a few million weights at a time."""
    rows, columns = matrix.shape
    step = max(1, _ELEMENTS // columns)
    spans = ((start, min(start + step, rows)) for start in range(0, rows, step))
    return torch.cat([x @ plain_values(matrix, *span).double().T for span in spans], dim=1)


def plain_values(matrix: Payload, start: int, stop: int) -> Tensor:
    """Return rows ``start:stop`` of one matrix ``[N, K]`` as float64, from its stored bytes and by arithmetic alone.

    A format this arithmetic does not know is decoded by its own ``decode``.
    """
    stored: Any = matrix
    fields, columns = matrix.tensors(), matrix.shape[-1]
    if set(fields) == {"values"}:
        return fields["values"][start:stop].double()
    if matrix.name not in _KNOWN:
        return matrix.decode()[start:stop].double()
    scales = fields["scale"] if "scale" in fields else fields["scales"]
    codes = fields["codes"][start:stop]
    if codes.dtype == torch.float8_e4m3fn:
        values = _e4m3(codes.view(torch.uint8))
    else:
        nibbles = torch.empty(codes.shape[0], 2 * codes.shape[1], dtype=torch.int64)
        nibbles[:, 0::2], nibbles[:, 1::2] = codes.long() % 16, codes.long() // 16
        if matrix.name == "int4_group":
            values = (nibbles - 8).double()
        else:
            values = torch.tensor(_E2M1, dtype=torch.float64)[nibbles % 8] * (1 - 2 * (nibbles // 8))
    block: tuple[int, int] = getattr(stored, "block", (1, getattr(stored, "group_size", matrix.group)))
    steps = _scale_values(scales)
    if steps.dim() == 2:
        steps = steps[torch.arange(start, stop) // block[0]][:, torch.arange(columns) // block[1]]
    elif steps.dim() == 1:
        steps = steps[start:stop, None]
    if "global_scale" in fields:
        whole = fields["global_scale"].double()
        steps = steps / whole if stored.global_divides else steps * whole
    return values[:, :columns] * steps


def _e4m3(codes: Tensor) -> Tensor:
    bits = codes.long()
    sign, exponent, mantissa = 1 - 2 * (bits // 128), bits // 8 % 16, bits % 8
    normal = (8 + mantissa).double() * torch.exp2((exponent - 10).double())
    return sign * torch.where(exponent == 0, mantissa.double() / 512, normal)


def _scale_values(scales: Tensor) -> Tensor:
    if scales.dtype == torch.uint8:
        return torch.exp2(scales.double() - 127)
    return _e4m3(scales.view(torch.uint8)) if scales.dtype == torch.float8_e4m3fn else scales.double()
