"""Experts some of whose ids stand for the identity (LongCat-Flash): the weight of such an id multiplies the token."""

from typing import Any

from torch import Tensor, nn

from ...models.derived import ExchangeableExperts, has_identity_experts, replace_modules
from .plugin import experts_forward

__all__ = ["IdentityExperts", "replace_identity_experts"]


class IdentityExperts(ExchangeableExperts):
    """Experts of Collegium for ids below ``num_routed_experts``, the identity for all others."""

    def __init__(self, experts: Any, config: Any) -> None:
        """Take the place of the class's ``experts``; config: of the text model."""
        count = int(experts.num_routed_experts)
        super().__init__(experts.gate_up_proj[:count], experts.down_proj[:count], experts.act_fn, config)
        self.num_routed_experts = count

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Return the weighted sum ``[T, H]`` of experts and identities for ``x [T, H]``, ids and weights ``[T, K]``."""
        identity = topk_ids >= self.num_routed_experts
        routed = experts_forward(self, x, topk_ids.masked_fill(identity, -1), topk_weights)
        return routed + (topk_weights * identity).sum(-1, keepdim=True).to(x.dtype) * x


def replace_identity_experts(model: Any) -> None:
    """Replace every experts module of ``model`` that has identities among its ids."""

    def replacement(module: Any) -> nn.Module | None:
        return IdentityExperts(module, model.config.get_text_config()) if has_identity_experts(module) else None

    replace_modules(model, replacement)
