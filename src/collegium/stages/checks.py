"""Whether what a layer is built from and called with is what its plan describes."""

import torch
from torch import Tensor

from ..errors import InputError
from ..formats.payload import Payload
from ..formats.unquantised import FLOAT_FORMATS
from ..ops.quantize import formats_within
from ..problem import ExpertsProblem, Problem
from ..runtime.packed_module import check_tensors
from ..types import ExpertWeights, LatentWeights, MoESpec, RouterWeights, Routing, SharedWeights

__all__ = ["check_extras", "check_input", "check_rows", "check_weights", "check_whole", "output_for"]


def check_weights(weights: ExpertWeights[Payload], problem: ExpertsProblem) -> None:
    """Compare shapes, formats and biases of experts with what the kernel was planned for; raises InputError."""
    experts, parts, wide, hidden = problem.experts, problem.parts, problem.intermediate, problem.hidden
    wanted = {"gate_up": (experts, parts, wide, hidden), "down": (experts, hidden, wide)}
    for (name, shape), form in zip(wanted.items(), problem.formats, strict=True):
        payload: Payload = getattr(weights, name)
        if payload.shape != shape:
            raise InputError(
                f"{name}: the payload's logical shape is {payload.shape}, the spec needs {shape} "
                f"(E={experts}, P={parts}, I={wide}, H={hidden})"
            )
        if payload.name != form:
            raise InputError(f"{name}: the payload is {payload.name}, the spec says {form}")
    formats_within(problem.activation_format, weights.input_reach)  # refuses a static one without scales
    biases = {"gate_up_bias": (experts, parts, wide), "down_bias": (experts, hidden)}
    for name, shape in biases.items():
        bias: Tensor | None = getattr(weights, name)
        found = None if bias is None else tuple(bias.shape)
        allowed = shape if problem.bias else None
        if found != allowed:
            raise InputError(
                f"{name}: found {found or 'none'}, the spec (expert_bias={problem.bias}) needs {allowed or 'none'}"
            )


def check_input(x: Tensor, routing: object, problem: Problem, device: torch.device) -> None:
    """Compare shape and dtype of x with the plan, and do ``check_given`` for x and a routing; raises InputError."""
    check_tensors(device, x=x)
    width, wanted = problem.spec.hidden_size, problem.dtype
    if x.shape[-1:] != (width,):
        raise InputError(f"forward: x has shape {tuple(x.shape)}; its last dimension must be hidden_size={width}")
    found = FLOAT_FORMATS.get(x.dtype)
    if found is None or found.name != wanted:
        can = "; convert x" if found is None else f"; convert x, or plan with dtype={found.name!r}"
        raise InputError(f"forward: x is {x.dtype}, the layer was planned for {wanted}{can}")
    if routing is not None and not isinstance(routing, Routing):
        raise InputError(
            f"forward: routing is a {type(routing).__name__}, allowed: "
            "collegium.Routing(topk_ids=..., topk_weights=...)"
        )
    if routing is not None:
        check_tensors(device, topk_ids=routing.topk_ids, topk_weights=routing.topk_weights)


def output_for(x: Tensor, out: Tensor | None) -> Tensor:
    """Return ``out``, or fresh memory like x where it is None; raises InputError for one that is not like x."""
    if out is None:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    check_tensors(x.device, out=out)
    if out.shape != x.shape or out.dtype != x.dtype or not out.is_contiguous():
        raise InputError(f"forward: out is {tuple(out.shape)} {out.dtype}, needed: contiguous, like x")
    return out


def check_rows(name: str, found: Tensor, wanted: tuple[int, int]) -> None:
    """Compare the shape of what is given beside x; raises InputError."""
    if tuple(found.shape) != wanted:
        raise InputError(f"forward: {name} has shape {tuple(found.shape)}, this call needs {wanted}")


def check_extras(
    spec: MoESpec, router: RouterWeights | None, shared: SharedWeights[Payload] | None, latent: LatentWeights | None
) -> None:
    """Compare what a layer is given beside its experts with the spec; raises InputError."""
    for name, asked, given in (
        ("shared", spec.shared is not None, shared is not None),
        ("latent", spec.latent_size is not None, latent is not None),
    ):
        if asked != given:
            needs = "needs" if asked else "has no place for"
            raise InputError(f"{name}: the spec {needs} {name} weights, they were {'given' if given else 'not given'}")
    rule, e, d, h = spec.routing, spec.num_experts, spec.hidden_size, spec.expert_hidden_size
    if spec.shared is not None and shared is not None:
        _check_tensor(
            "shared", "gate", shared.gate, (1, d) if spec.shared.gated else None, f"gated={spec.shared.gated}"
        )
    if latent is not None:
        _check_tensor("latent", "down", latent.down, (h, d), f"latent_size={h}")
        _check_tensor("latent", "up", latent.up, (d, h), f"latent_size={h}")
        if latent.norm is not None or spec.latent_norm_eps is not None:
            _check_tensor("latent", "norm", latent.norm, (h,), f"latent_norm_eps={spec.latent_norm_eps}")
    if router is None:
        return
    _check_tensor("router", "weight", router.weight, (e, d), f"num_experts={e}, hidden_size={d}")
    if router.bias is not None:
        _check_tensor("router", "bias", router.bias, (e,), f"num_experts={e}")
    flag, wanted = rule.correction_bias, (e,) if rule.correction_bias else None
    _check_tensor("router", "correction bias", router.correction_bias, wanted, f"correction_bias={flag}")
    wanted = (e,) if rule.expert_scale else None
    _check_tensor("router", "expert scale", router.expert_scale, wanted, f"expert_scale={rule.expert_scale}")
    table = router.hash_table
    rows = 1 if table is None or table.dim() != 2 else table.shape[0]
    wanted = (rows, rule.top_k) if rule.hash_routing else None
    _check_tensor("router", "hash table", table, wanted, f"hash_routing={rule.hash_routing}, top_k={rule.top_k}")


def _check_tensor(whose: str, name: str, tensor: Tensor | None, wanted: tuple[int, ...] | None, says: str) -> None:
    found = None if tensor is None else tuple(tensor.shape)
    if found != wanted:
        what = f"has shape {found}" if found else "missing"
        raise InputError(f"{whose}: {name} {what}, the spec ({says}) needs {wanted or 'none'}; give what the spec says")


def check_whole(problem: Problem, after_expert: object) -> None:
    """Refuse a function of experts' rows where ranks hold slices of experts; raises InputError."""
    if after_expert is not None and problem.placement is not None and problem.placement.tp_size > 1:
        raise InputError(
            f"after_expert was given for {problem.placement}: a slice's rows are a part of what the expert returns; "
            "split the experts over ranks instead of each expert's width"
        )
