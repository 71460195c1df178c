"""What an experts module of transformers holds and computes, read from the module itself."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import SpecError
from ...formats.fp8_block import Fp8Block
from ...formats.fp8_tensor import Fp8Tensor
from ...formats.mxfp4 import MxFp4
from ...formats.payload import Payload
from ...formats.unquantised import as_stored
from ...ops.activation import activate, deinterleave
from ...types import ActivationSpec, ExpertWeights, MoESpec, RoutingSpec

__all__ = ["experts_modules", "is_experts", "named_experts", "routed_weights", "spec_of", "write_count"]


def named_experts(model: nn.Module) -> list[tuple[str, int, nn.Module]]:
    """Return (name, layer index, module) of every experts module of a transformers model."""
    named = ((name, module) for name, module in model.named_modules() if is_experts(module))
    found = ((name, [int(piece) for piece in name.split(".") if piece.isdigit()], module) for name, module in named)
    return [(name, indices[0], module) for name, indices, module in found if indices]


def experts_modules(model: nn.Module) -> dict[int, nn.Module]:
    """Return the experts modules of a transformers model by layer index."""
    return {index: module for _, index, module in named_experts(model)}


def is_experts(module: object) -> bool:
    """Return whether ``module`` is one of transformers' experts modules."""
    return hasattr(module, "is_concatenated") and hasattr(module, "_apply_gate")


def write_count(parameter: Tensor) -> int:
    """Return how often torch saw ``parameter`` written in place; inference tensors do not count, and have 0."""
    return 0 if parameter.is_inference() else parameter._version


def routed_weights(module: Any) -> ExpertWeights[Payload]:
    """Return an experts module's parameters in logical order, as views: gate before up, output-first."""
    if hasattr(module, "down_proj_scale_inv"):
        return _quantised_weights(module)
    name, parts = ("gate_up_proj", 2) if module.has_gate else ("up_proj", 1)
    upper, lower = getattr(module, name).detach(), module.down_proj.detach()
    if module.is_transposed:
        upper, lower = upper.transpose(1, 2), lower.transpose(1, 2)
    weights = ExpertWeights(gate_up=as_stored(_split(upper, parts, module)), down=as_stored(lower))
    if not module.has_bias:
        return weights
    bias = _split(getattr(module, f"{name}_bias").detach(), parts, module)
    return replace(weights, gate_up_bias=bias, down_bias=module.down_proj_bias.detach())


def _quantised_weights(module: Any) -> ExpertWeights[Payload]:
    """Return the parameters of transformers' FP8 experts: blocks or tensors of E4M3, or MXFP4 bytes."""
    if module.activation_scheme != "dynamic":
        raise SpecError(
            f"{type(module).__name__}: its activations have {module.activation_scheme} scales; allowed: dynamic. "
            "Load the checkpoint with load_model() instead"
        )
    name, parts = ("gate_up_proj", 2) if module.has_gate else ("up_proj", 1)
    made: list[Payload] = []
    for tensor, count in ((name, parts), ("down_proj", None)):
        codes, scale = getattr(module, tensor).detach(), getattr(module, f"{tensor}_scale_inv").detach()
        if scale.dtype == torch.float8_e8m0fnu and codes.dtype != torch.int8:
            scale = scale.float()
        rows = codes.shape[1] // (count or 1)
        block: tuple[int, int] | None = None if codes.dtype == torch.int8 else module.block_size
        if block is not None and count == 2 and rows % block[0]:
            raise SpecError(
                f"{type(module).__name__}: gate has {rows} rows, no multiple of its {block[0]}-row blocks, "
                "so a block spans gate and up; load the checkpoint with load_model() instead"
            )
        if count is not None:
            codes, scale = codes.unflatten(1, (count, -1)), scale.unflatten(1, (count, -1))
        shape = (*codes.shape[:-1], codes.shape[-1] * (2 if codes.dtype == torch.int8 else 1))
        if codes.dtype == torch.int8:
            made.append(MxFp4(shape=shape, codes=codes.view(torch.uint8), scales=scale.view(torch.uint8)))
        elif block is None:
            made.append(Fp8Tensor(shape=shape, codes=codes, scale=scale[..., 0, 0]))
        else:
            made.append(Fp8Block(shape=shape, codes=codes, scales=scale, block=(block[0], block[1])))
    return ExpertWeights(gate_up=made[0], down=made[1])


def spec_of(module: Any, weights: ExpertWeights[Payload], top_k: int) -> MoESpec:
    """Return what an experts module with its ``routed_weights`` computes for ``top_k`` experts a token."""
    experts, _, wide, hidden = weights.gate_up.shape
    return MoESpec(
        hidden_size=hidden,
        intermediate_size=wide,
        num_experts=experts,
        routing=RoutingSpec(top_k=min(top_k, experts)),
        activation=_activation_of(module),
        expert_bias=weights.down_bias is not None,
        **weights.formats,
    )


def _activation_of(module: Any) -> ActivationSpec:
    """Find the activation by trying it: a candidate counts only if it reproduces the module's own gate function."""
    limit, alpha = getattr(module, "limit", None), getattr(module, "alpha", None)
    if not module.has_gate:
        candidates = [ActivationSpec(kind=kind) for kind in ("relu2", "silu", "gelu")]
    else:
        candidates = [ActivationSpec(kind=kind) for kind in ("swiglu", "geglu", "geglu_tanh")]
        for bound in {float(v) for v in (limit, getattr(module, "swiglu_limit", None)) if v}:
            candidates.append(ActivationSpec(kind="swiglu", limit=bound))
            candidates.append(ActivationSpec(kind="swiglu_oai", limit=bound, alpha=float(alpha or 1.702)))
        softcaps = [float(getattr(module.config, f"mlp_{part}_softcap", None) or 0) for part in ("gate", "up")]
        if all(softcaps):
            candidates.append(ActivationSpec(kind="situ", gate_bound=softcaps[0], up_bound=softcaps[1]))
    for candidate in candidates:
        if _reproduces(module, candidate):
            return candidate
    tried = ", ".join(f"{c.kind}(limit={c.limit})" for c in candidates)
    raise SpecError(
        f"{type(module).__name__}: its gate function matches none of the activations tried ({tried}); "
        "build a MoELayer with the right ActivationSpec and attach() it"
    )


def _reproduces(module: Any, candidate: ActivationSpec) -> bool:
    points = torch.linspace(-30, 30, 41)
    if not module.has_gate:
        found, wanted = module.act_fn(points[:, None]), activate(points[:, None, None], candidate)
    else:
        gate, up = torch.meshgrid(points, points, indexing="ij")
        pair = torch.stack([gate.reshape(-1), up.reshape(-1)], dim=1)
        # one intermediate column: concatenated and interleaved rows are the same two numbers
        found, wanted = module._apply_gate(pair), activate(pair[:, :, None], candidate)
    return bool(torch.allclose(found.float(), wanted, rtol=1e-5, atol=1e-5))


def _split(weight: Tensor, parts: int, module: nn.Module) -> Tensor:
    """Bring ``[E, P*I, ...]`` to ``[E, P, I, ...]`` without a copy."""
    if parts == 2 and not module.is_concatenated:
        return deinterleave(weight, 1)
    return weight.unflatten(1, (parts, -1))
