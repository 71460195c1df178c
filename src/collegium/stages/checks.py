"""Compare what a layer is built from, and what it is called with, with its plan."""

import torch
from torch import Tensor

from ..errors import InputError
from ..experts.base import require_expert_reach
from ..formats.payload import Payload
from ..formats.unquantised import DTYPES, FLOAT_FORMATS
from ..ops.quantize import formats_within
from ..problem import ExpertsProblem, Problem
from ..runtime.packed_module import check_tensors
from ..types import ExpertWeights, LatentWeights, MoESpec, RouterModule, RouterWeights, Routing

__all__ = [
    "check_after_expert",
    "check_input",
    "check_latent",
    "check_presence",
    "check_router",
    "check_rows",
    "check_selection",
    "check_tensor",
    "check_weights",
    "output_for",
]


def check_weights(weights: ExpertWeights[Payload], problem: ExpertsProblem) -> None:
    """Compare shapes, formats and biases of experts with ``problem``; raises InputError."""
    experts, parts, intermediate, hidden = problem.experts, problem.parts, problem.intermediate, problem.hidden
    shapes = {"gate_up": (experts, parts, intermediate, hidden), "down": (experts, hidden, intermediate)}
    for (name, shape), format_name in zip(shapes.items(), problem.formats, strict=True):
        payload: Payload = getattr(weights, name)
        if payload.shape != shape:
            raise InputError(
                f"{name}: the payload's logical shape is {payload.shape}, the spec needs {shape} "
                f"(E={experts}, P={parts}, I={intermediate}, H={hidden})"
            )
        if payload.name != format_name:
            raise InputError(f"{name}: the payload is {payload.name}, the spec has {format_name}")
    form, _ = formats_within(problem.activation_format, weights.input_reach)  # refuses a static format without scales
    require_expert_reach(weights, form)
    bias_shapes = {"gate_up_bias": (experts, parts, intermediate), "down_bias": (experts, hidden)}
    for name, shape in bias_shapes.items():
        bias: Tensor | None = getattr(weights, name)
        actual = None if bias is None else tuple(bias.shape)
        allowed = shape if problem.bias else None
        if actual != allowed:
            raise InputError(
                f"{name}: found {actual or 'none'}, the spec (expert_bias={problem.bias}) needs {allowed or 'none'}"
            )


def check_input(x: Tensor, routing: object, problem: Problem, device: torch.device) -> None:
    """Compare x ``[..., D]`` and a passed routing with the plan: shape, dtype, device; raises InputError."""
    check_tensors(device, x=x)
    hidden_size = problem.spec.hidden_size
    if x.shape[-1:] != (hidden_size,):
        raise InputError(f"forward: x has shape {tuple(x.shape)}; its last dimension must be hidden_size={hidden_size}")
    number_format = FLOAT_FORMATS.get(x.dtype)
    if number_format is None or number_format.name != problem.dtype:
        fix = "convert x" if number_format is None else f"convert x, or plan with dtype={number_format.name!r}"
        raise InputError(f"forward: x is {x.dtype}, the layer was planned for {problem.dtype}; {fix}")
    if routing is None:
        return
    if not isinstance(routing, Routing):
        raise InputError(
            f"forward: routing is a {type(routing).__name__}, allowed: "
            "collegium.Routing(topk_ids=..., topk_weights=...)"
        )
    check_tensors(device, topk_ids=routing.topk_ids, topk_weights=routing.topk_weights)


def output_for(x: Tensor, out: Tensor | None, problem: Problem) -> Tensor:
    """Return ``out``, or fresh contiguous memory of x's shape in the output dtype of ``problem``.

    Raises InputError for an ``out`` of another shape or dtype.
    """
    dtype = DTYPES[problem.output_dtype]
    if out is None:
        return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    check_tensors(x.device, out=out)
    if out.shape != x.shape or not out.is_contiguous():
        raise InputError(f"forward: out is {tuple(out.shape)} {out.dtype}, needed: contiguous, shaped like x")
    if out.dtype != dtype:
        number_format = FLOAT_FORMATS.get(out.dtype)
        fix = "pass another out" if number_format is None else f"plan with Problem(out_dtype={number_format.name!r})"
        raise InputError(f"forward: out is {out.dtype}, the layer was planned for {problem.output_dtype} output; {fix}")
    return out


def check_rows(name: str, tensor: Tensor, shape: tuple[int, int]) -> None:
    """Raise InputError unless the input ``name`` has ``shape``."""
    if tuple(tensor.shape) != shape:
        raise InputError(f"forward: {name} has shape {tuple(tensor.shape)}, this call needs {shape}")


def check_latent(spec: MoESpec, latent: LatentWeights | None) -> None:
    """Compare the latent projections of a layer with the spec; raises InputError."""
    check_presence("latent", required=spec.latent_size is not None, present=latent is not None)
    hidden, width = spec.hidden_size, spec.expert_hidden_size
    if latent is not None:
        check_tensor("latent", "down", latent.down, (width, hidden), f"latent_size={width}")
        check_tensor("latent", "up", latent.up, (hidden, width), f"latent_size={width}")
        if latent.norm is not None or spec.latent_norm_eps is not None:
            check_tensor("latent", "norm", latent.norm, (width,), f"latent_norm_eps={spec.latent_norm_eps}")


def check_router(spec: MoESpec, router: RouterWeights) -> None:
    """Compare the weights of a router with the spec; raises InputError."""
    experts, hidden = spec.num_experts, spec.hidden_size
    weight_shape = (experts, hidden)
    check_tensor("router", "weight", router.weight, weight_shape, f"num_experts={experts}, hidden_size={hidden}")
    if router.bias is not None:
        check_tensor("router", "bias", router.bias, (experts,), f"num_experts={experts}")
    check_selection(spec, router)


def check_selection(spec: MoESpec, router: RouterWeights | RouterModule) -> None:
    """Compare what a router selects experts by, apart from logits, with the spec; raises InputError."""
    rule, experts = spec.routing, spec.num_experts
    shape = (experts,) if rule.correction_bias else None
    correction = router.correction_bias
    check_tensor("router", "correction bias", correction, shape, f"correction_bias={rule.correction_bias}")
    shape = (experts,) if rule.expert_scale else None
    check_tensor("router", "expert scale", router.expert_scale, shape, f"expert_scale={rule.expert_scale}")
    table = router.hash_table
    vocabulary = 1 if table is None or table.dim() != 2 else table.shape[0]
    shape = (vocabulary, rule.top_k) if rule.hash_routing else None
    check_tensor("router", "hash table", table, shape, f"hash_routing={rule.hash_routing}, top_k={rule.top_k}")


def check_presence(name: str, *, required: bool, present: bool) -> None:
    """Raise InputError for weights that are missing, or that the spec does not have."""
    if required == present:
        return
    if required:
        raise InputError(
            f"{name}: the spec needs {name} weights, found none; pass {name}=, or plan a spec without them"
        )
    raise InputError(f"{name}: the spec has no {name} weights, found some; leave out {name}=, or plan a spec with them")


def check_tensor(owner: str, name: str, tensor: Tensor | None, shape: tuple[int, ...] | None, setting: str) -> None:
    """Raise InputError unless ``tensor`` has ``shape``; setting: of the spec, which requires that shape."""
    actual = None if tensor is None else tuple(tensor.shape)
    if actual != shape:
        problem = "is missing" if actual is None else f"has shape {actual}"
        raise InputError(f"{owner}: {name} {problem}, the spec ({setting}) needs {shape or 'none'}; pass what it needs")


def check_after_expert(problem: Problem, after_expert: object) -> None:
    """Refuse a function of experts' rows where each rank has slices of experts; raises InputError."""
    if after_expert is not None and problem.placement is not None and problem.placement.tp_size > 1:
        raise InputError(
            f"after_expert was passed for {problem.placement}: the rows of a slice are only a part of what the expert "
            "returns; split the experts over ranks instead of each expert's width"
        )
