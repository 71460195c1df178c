"""Read weights and activation function from an experts module of transformers."""

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
from ...models.derived import activation_of
from ...ops.activation import deinterleave
from ...types import ExpertWeights, MoESpec, RoutingSpec

__all__ = [
    "expert_norms",
    "experts_modules",
    "is_experts",
    "named_experts",
    "routed_weights",
    "spec_of",
    "text_experts",
    "write_count",
]


def named_experts(model: nn.Module) -> list[tuple[str, int, nn.Module]]:
    """Return (name, layer index, module) of every experts module of a transformers model."""
    experts: list[tuple[str, int, nn.Module]] = []
    for name, module in model.named_modules():
        indices = [int(piece) for piece in name.split(".") if piece.isdigit()]
        if indices and is_experts(module):
            experts.append((name, indices[0], module))
    return experts


def text_experts(model: nn.Module) -> list[tuple[str, int, nn.Module]]:
    """Return ``named_experts`` without the experts of image tokens, which ERNIE-4.5-VL has next to those of text."""
    return [found for found in named_experts(model) if ".vision_moe." not in found[0]]


def experts_modules(model: nn.Module) -> dict[int, nn.Module]:
    """Return the experts modules of a transformers model by layer index, without those of image tokens."""
    return {index: module for _, index, module in text_experts(model)}


def expert_norms(model: nn.Module) -> dict[int, nn.Module]:
    """Return, by layer index, the norms of experts' outputs in models that have them."""
    experts = experts_modules(model).items()
    # Older releases of transformers have no experts that end in a norm.
    return {i: module.post_expert_norm for i, module in experts if getattr(module, "has_post_expert_norm", False)}  # type: ignore[misc]


def is_experts(module: object) -> bool:
    """Return whether ``module`` is one of transformers' experts modules."""
    return hasattr(module, "is_concatenated") and hasattr(module, "_apply_gate")


def write_count(parameter: Tensor) -> int:
    """Return torch's count of in-place writes to ``parameter``; 0 for inference tensors, which have no counter."""
    return 0 if parameter.is_inference() else parameter._version


def routed_weights(module: Any) -> ExpertWeights[Payload]:
    """Return an experts module's parameters in logical order, as views: gate before up, output-first."""
    if hasattr(module, "down_proj_scale_inv"):
        return _quantised_weights(module)
    name, parts = ("gate_up_proj", 2) if module.has_gate else ("up_proj", 1)
    gate_up = getattr(module, name).detach()
    down = module.down_proj.detach()
    if module.is_transposed:
        gate_up = gate_up.transpose(1, 2)
        down = down.transpose(1, 2)
    weights = ExpertWeights(gate_up=as_stored(_split(gate_up, parts, module)), down=as_stored(down))
    if not module.has_bias:
        return weights
    bias = _split(getattr(module, f"{name}_bias").detach(), parts, module)
    return replace(weights, gate_up_bias=bias, down_bias=module.down_proj_bias.detach())


def _quantised_weights(module: Any) -> ExpertWeights[Payload]:
    """Return the parameters of transformers' FP8 experts: E4M3 with block or tensor scales, or MXFP4 bytes."""
    if module.activation_scheme != "dynamic":
        raise SpecError(
            f"{type(module).__name__}: its activation scales are {module.activation_scheme}; allowed: dynamic. "
            "Load the checkpoint with load_model() instead"
        )
    name, parts = ("gate_up_proj", 2) if module.has_gate else ("up_proj", 1)
    payloads: list[Payload] = []
    for tensor, count in ((name, parts), ("down_proj", None)):
        codes = getattr(module, tensor).detach()
        scale = getattr(module, f"{tensor}_scale_inv").detach()
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
            codes = codes.unflatten(1, (count, -1))
            scale = scale.unflatten(1, (count, -1))
        shape = (*codes.shape[:-1], codes.shape[-1] * (2 if codes.dtype == torch.int8 else 1))
        if codes.dtype == torch.int8:
            payloads.append(MxFp4(shape=shape, codes=codes.view(torch.uint8), scales=scale.view(torch.uint8)))
        elif block is None:
            payloads.append(Fp8Tensor(shape=shape, codes=codes, scale=scale[..., 0, 0]))
        else:
            payloads.append(Fp8Block(shape=shape, codes=codes, scales=scale, block=(block[0], block[1])))
    return ExpertWeights(gate_up=payloads[0], down=payloads[1])


def spec_of(module: Any, weights: ExpertWeights[Payload], top_k: int) -> MoESpec:
    """Return the spec of an experts module with its ``routed_weights``, for ``top_k`` experts per token."""
    num_experts, _, intermediate_size, hidden_size = weights.gate_up.shape
    return MoESpec(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_experts=num_experts,
        routing=RoutingSpec(top_k=min(top_k, num_experts)),
        activation=activation_of(module),
        expert_bias=weights.down_bias is not None,
        **weights.formats,
    )


def _split(weight: Tensor, parts: int, module: nn.Module) -> Tensor:
    """View ``[E, P*I, ...]`` as ``[E, P, I, ...]``."""
    if parts == 2 and not module.is_concatenated:
        return deinterleave(weight, 1)
    return weight.unflatten(1, (parts, -1))
