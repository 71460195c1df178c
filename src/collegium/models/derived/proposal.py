"""Propose the spec of a class's block and prove it: the same experts, weights and output on random float32 numbers."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError, SpecError
from ...ops.activation import activate, deinterleave
from ...ops.route import route
from ...types import ActivationSpec, MoESpec, RoutingSpec, SharedSpec
from .class_layers import ClassLayer, ClassModel
from .gate_functions import activation_of
from .random_block import BlockRun, ExpertsRun, run_block, run_experts

__all__ = ["Proposal", "propose"]

_EPSILONS = (0.0, 1e-20, 1e-12, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5)
_FLOORS = (1e-20, 1e-12, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5)
_MAX_MATRIX = 1 << 28  # numbers; published models have fewer than 2**27
_TOLERANCE = 2e-5  # float32 sums in another order
_TOP_K = (
    "top_k",
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_top_k",
    "moe_topk",
    "moe_k",
    "top_k_experts",
)
_GATE_NAMES = ("gate_proj", "w1", "linear_gate")


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """The spec of one layer and the tensors of its block by role.

    refusal: why the block is not a layer of Collegium, with the largest difference; None: it was proved to be one, and
    ``roles`` holds the names in memory of router_weight, router_bias, correction_bias, expert_scale, shared and
    shared_gate, as paths below the block.
    """

    spec: MoESpec
    roles: Mapping[str, str | tuple[str, ...]]
    refusal: str | None


def propose(model: ClassModel, layer: ClassLayer) -> Proposal:
    """Return the proved spec of ``layer``, or the spec of its experts with the reason why the block is refused.

    Raises SpecError if the experts cannot be described either.
    """
    experts = layer.experts
    hidden_size = int(model.text_config.hidden_size)
    down = experts.down_proj
    intermediate, width = down.shape[1:] if experts.is_transposed else reversed(down.shape[1:])
    activation = activation_of(experts)
    top_k = _top_k(model, layer, down.shape[0])
    spec = MoESpec(
        hidden_size=hidden_size,
        intermediate_size=int(intermediate),
        num_experts=int(down.shape[0]),
        routing=RoutingSpec(top_k=top_k),
        activation=activation,
        expert_bias=bool(experts.has_bias),
        latent_size=None if int(width) == hidden_size else int(width),
    )
    largest = max(tensor[0].numel() for tensor in layer.block.parameters() if tensor.dim() == 3)
    largest = max(largest, *(tensor.numel() for tensor in layer.block.parameters() if tensor.dim() < 3))
    if largest > _MAX_MATRIX:
        raise SpecError(f"{type(layer.block).__name__} has a matrix of {largest} numbers, allowed are {_MAX_MATRIX}")
    _check_experts(layer, spec)
    try:
        run = run_block(layer, hidden_size)
        spec = replace(spec, routing=replace(spec.routing, top_k=run.experts.topk_ids.shape[1]))
        return _proved(layer, spec, run, _numbers(model, layer))
    except SpecError as error:
        return Proposal(spec=spec, roles={}, refusal=str(error))


def _check_experts(layer: ClassLayer, spec: MoESpec) -> None:
    """Raise SpecError unless the class's experts compute what ``spec`` defines for random tokens, ids and weights."""
    run = run_experts(layer, spec.routing.top_k)
    output = _routed(spec, run, interleaved=not layer.experts.is_concatenated)
    difference = float((output - run.output).abs().max() / run.output.abs().max())
    if not difference <= _TOLERANCE:
        raise SpecError(
            f"{type(layer.experts).__name__}: experts with activation {spec.activation.kind} differ from it by "
            f"{difference:.2e} of the largest value, allowed are {_TOLERANCE:.0e}"
        )


def _top_k(model: ClassModel, layer: ClassLayer, experts: int) -> int:
    """Return the number of experts per token that the router module or the config has, at most all."""
    for holder in (*layer.block.modules(), model.text_config):
        for name in _TOP_K:
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return min(value, experts)
    raise SpecError(f"{model.name}: neither its router nor its config has the number of experts per token")


def _numbers(model: ClassModel, layer: ClassLayer) -> dict[str, float]:
    """Return the numbers of the block's modules and of the config by name, from which scales and groups are taken."""
    numbers: dict[str, float] = {}
    for holder in (model.text_config, *layer.block.modules()):
        values = vars(holder).items()
        numbers |= {k: v for k, v in values if isinstance(v, int | float) and not isinstance(v, bool)}
    return numbers


def _proved(layer: ClassLayer, spec: MoESpec, run: BlockRun, numbers: Mapping[str, float]) -> Proposal:
    name = getattr(layer.block, "class_name", type(layer.block).__name__)
    inputs = run.experts.inputs
    if inputs.shape != run.x.shape or not torch.equal(inputs, run.x) or run.experts.norm is not None:
        raise SpecError(f"{name}: its experts do not read the block's input, or end in a norm")
    routing, roles = _find_routing(name, spec, run, numbers)
    spec = replace(spec, routing=routing)
    routed = _routed(spec, run.experts, interleaved=not layer.experts.is_concatenated)
    best = float("inf")
    for shared, shared_roles in _shared_candidates(spec, run):
        rest = run.output - _shared(shared, shared_roles, run, spec)
        # Some blocks scale the sum of the experts instead of the weights.
        factor = _named_scale(float((rest * routed).sum() / routed.square().sum()), numbers)
        difference = float((rest - factor * routed).abs().max() / run.output.abs().max())
        if difference <= _TOLERANCE:
            if unused := _unused(run, {**roles, **shared_roles}):
                raise SpecError(f"{name}: nothing is known of {', '.join(unused)}")
            spec = replace(spec, shared=shared, routing=replace(routing, scale=routing.scale * factor))
            return Proposal(spec=spec, roles={**roles, **shared_roles}, refusal=None)
        best = min(best, difference) if difference == difference else best
    raise SpecError(f"{name}: its output differs by {best:.2e} of the largest value, allowed are {_TOLERANCE:.0e}")


def _unused(run: BlockRun, roles: Mapping[str, str | tuple[str, ...]]) -> list[str]:
    used = {path for value in roles.values() for path in ((value,) if isinstance(value, str) else value)}
    used |= {f"{path}.weight" for path in used}
    return [name for name in run.tensors if name not in used]


def _find_routing(
    block: str, spec: MoESpec, run: BlockRun, numbers: Mapping[str, float]
) -> tuple[RoutingSpec, dict[str, str | tuple[str, ...]]]:
    """Return the first rule, with the tensors of the router, that chooses as the class did; raises SpecError."""
    experts = spec.num_experts
    matrices = [n for n, t in run.tensors.items() if tuple(t.shape) == (experts, spec.hidden_size)]
    vectors = [None, *(n for n, t in run.tensors.items() if tuple(t.shape) == (experts,))]
    if int(run.experts.topk_ids.max()) >= experts:
        raise SpecError(f"{block}: its router chooses entries beyond the {experts} experts")
    wanted = torch.zeros(run.x.shape[0], experts).scatter_(1, run.experts.topk_ids, run.experts.topk_weights)
    best = float("inf")
    for matrix, bias, correction, scale in itertools.product(matrices, vectors, vectors, vectors):
        chosen = [name for name in (bias, correction, scale) if name is not None]
        if len(set(chosen)) != len(chosen):
            continue
        tensors = {name: run.tensors[name] for name in (matrix, *chosen)}
        logits = run.x @ tensors[matrix].T
        if bias is not None:
            logits = logits + tensors[bias]
        for rule in _rules(spec, numbers, correction is not None, scale is not None):
            difference, factor = _compare(
                rule, logits, wanted, bias=tensors.get(correction or ""), scale=tensors.get(scale or "")
            )
            if difference > _TOLERANCE:
                best = min(best, difference)
                continue
            roles = {"router_weight": matrix, "router_bias": bias, "correction_bias": correction, "expert_scale": scale}
            return replace(rule, scale=_named_scale(factor, numbers)), {k: v for k, v in roles.items() if v is not None}
    raise SpecError(
        f"{block}: no routing rule chooses the experts and weights of its router; the nearest differs by {best:.2e}, "
        f"allowed are {_TOLERANCE:.0e}; its tensors are {', '.join(run.tensors)}"
    )


def _rules(spec: MoESpec, numbers: Mapping[str, float], correction: bool, scale: bool) -> Iterator[RoutingSpec]:
    """Yield all rules for a router with these tensors, groups from the config."""
    top_k = spec.routing.top_k
    counts = sorted({int(v) for k, v in numbers.items() if "group" in k and v == int(v) and 1 <= v <= spec.num_experts})
    groups = [(1, 1, "max")]
    for group, kept in itertools.product(counts, counts):
        fits = group > 1 and kept <= group and spec.num_experts % group == 0
        if fits and kept * (spec.num_experts // group) >= top_k:
            groups += [(group, kept, "top2_sum"), (group, kept, "max")]
    sums: list[dict[str, Any]] = [{"renormalize": False}]
    sums += [{"renormalize": True, "renormalize_eps": eps} for eps in _EPSILONS]
    sums += [{"renormalize": True, "renormalize_floor": floor} for floor in _FLOORS]
    scores: tuple[Any, ...] = ("softmax", "sigmoid", "topk_softmax", "sqrt_softplus")
    for (group, kept, kind), score, total in itertools.product(groups, scores, sums):
        selection: Any = {"groups": group, "topk_groups": kept, "group_score": kind}
        yield RoutingSpec(
            top_k=top_k, score=score, correction_bias=correction, expert_scale=scale, **selection, **total
        )


def _compare(
    rule: RoutingSpec, logits: Tensor, wanted: Tensor, *, bias: Tensor | None, scale: Tensor | None
) -> tuple[float, float]:
    """Return the largest relative difference of a weight, and the factor between the class's weights and the rule's."""
    try:
        routing = route(logits, rule, bias=bias, expert_scale=scale)
    except InputError:
        return float("inf"), 1.0
    found = torch.zeros_like(wanted).scatter_(1, routing.topk_ids.clamp(min=0), routing.topk_weights)
    if not torch.equal(found != 0, wanted != 0):
        return float("inf"), 1.0
    chosen = wanted != 0
    ratios = wanted[chosen] / found[chosen]
    factor = float(ratios.median())
    difference = float((ratios / factor - 1).abs().max())
    return difference if difference == difference else float("inf"), factor


def _named_scale(factor: float, numbers: Mapping[str, float]) -> float:
    """Return 1 or the number of the class or config that ``factor`` is to float32; else ``factor``."""
    for number in (1.0, *numbers.values()):
        if abs(factor - number) <= 1e-5 * abs(number):
            return float(number)
    return factor


def _routed(spec: MoESpec, run: ExpertsRun, *, interleaved: bool) -> Tensor:
    """Return the weighted sum of the experts' outputs, as Collegium defines an expert."""
    output = torch.zeros_like(run.inputs)
    parts = spec.gate_up_parts
    for expert in run.topk_ids.unique().tolist():
        rows, slots = torch.where(run.topk_ids == expert)
        both = run.inputs[rows] @ run.gate_up[expert].T
        if run.biases is not None:
            both = both + run.biases[0][expert]
        both = deinterleave(both, 1) if interleaved and parts == 2 else both.unflatten(1, (parts, -1))
        out = activate(both, spec.activation) @ run.down[expert].T
        if run.biases is not None:
            out = out + run.biases[1][expert]
        if run.norm is not None:
            out = run.norm(out)
        output.index_add_(0, rows, out * run.topk_weights[rows, slots, None])
    return output


def _shared_candidates(spec: MoESpec, run: BlockRun) -> Iterator[tuple[SharedSpec | None, dict[str, Any]]]:
    """Yield no shared expert, then each way to read a module of three matrices as one."""
    yield None, {}
    modules: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, tensor in run.tensors.items():
        path, _, leaf = name.rpartition(".")
        parent, _, module = path.rpartition(".")
        if leaf == "weight" and tensor.dim() == 2 and tensor.shape[0] != spec.num_experts:
            modules.setdefault(parent, {})[module] = tuple(tensor.shape)
    gates: list[str | None] = [None, *(n for n, t in run.tensors.items() if tuple(t.shape) == (1, spec.hidden_size))]
    activations: list[ActivationSpec | None] = [None]
    if spec.activation.limit is not None:
        activations.append(ActivationSpec(kind="swiglu"))
    for parent, shapes in modules.items():
        down = [
            name for name, shape in shapes.items() if (shape[0] == spec.hidden_size and "down" in name) or name == "w2"
        ]
        upper = [name for name, shape in shapes.items() if shape[1] == spec.hidden_size and name not in down]
        upper.sort(key=lambda name: name not in _GATE_NAMES)
        for orders in (upper, upper[::-1]):
            paths = tuple(f"{parent}.{name}" for name in (*orders, *down))
            width = shapes[down[0]][1] if len(down) == 1 else 0
            fused = len(upper) == 1 and spec.gate_up_parts == 2 and shapes[upper[0]][0] == 2 * width
            plain = len(upper) == spec.gate_up_parts and all(shapes[name][0] == width for name in upper)
            if not width or not (fused or plain):
                continue
            for gate, activation in itertools.product(gates, activations):
                roles: dict[str, Any] = {"shared": paths}
                if gate is not None:
                    roles["shared_gate"] = gate
                yield SharedSpec(intermediate_size=width, gated=gate is not None, activation=activation), roles


def _shared(shared: SharedSpec | None, roles: Mapping[str, Any], run: BlockRun, spec: MoESpec) -> Tensor:
    if shared is None:
        return torch.zeros_like(run.x)
    *upper, down = [run.tensors[f"{path}.weight"] for path in roles["shared"]]
    both = torch.cat([run.x @ weight.T for weight in upper], dim=1).unflatten(1, (spec.gate_up_parts, -1))
    output = activate(both, shared.activation or spec.activation) @ down.T
    if "shared_gate" in roles:
        output = output * torch.sigmoid(run.x @ run.tensors[roles["shared_gate"]].T)
    return output
