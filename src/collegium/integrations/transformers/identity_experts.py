"""Experts some of whose ids stand for the identity (LongCat-Flash): the weight of such an id multiplies the token."""

from typing import Any

import torch
from torch import Tensor, nn

from ...models.derived import has_identity_experts
from .plugin import experts_forward

__all__ = ["IdentityExperts", "replace_identity_experts"]


class IdentityExperts(nn.Module):
    """Experts of Collegium for ids below ``num_routed_experts``, the identity for all others.

    It has the attributes of transformers' exchangeable experts, and parameters on the meta device.
    """

    is_concatenated, is_transposed = True, False
    has_bias, has_gate = False, True

    def __init__(self, experts: Any, config: Any) -> None:
        """Take the place of the class's ``experts``; config: of the text model."""
        super().__init__()
        self.config = config
        self.act_fn = experts.act_fn
        self.num_routed_experts = int(experts.num_routed_experts)
        for name in ("gate_up_proj", "down_proj"):
            shape = (self.num_routed_experts, *getattr(experts, name).shape[1:])
            setattr(self, name, nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False))

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Return the weighted sum ``[T, H]`` of experts and identities for ``x [T, H]``, ids and weights ``[T, K]``."""
        identity = topk_ids >= self.num_routed_experts
        routed = experts_forward(self, x, topk_ids.masked_fill(identity, -1), topk_weights)
        return routed + (topk_weights * identity).sum(-1, keepdim=True).to(x.dtype) * x


def replace_identity_experts(model: Any) -> None:
    """Replace every experts module of ``model`` that has identities among its ids."""
    for name, module in list(model.named_modules()):
        if has_identity_experts(module):
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, IdentityExperts(module, model.config.get_text_config()))
