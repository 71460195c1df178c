"""From tokens to chosen experts: the layer's own logits, and the rules that choose by logits or take a routing."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import InputError
from ..ops.linear import linear
from ..ops.rms_norm import rms_norm
from ..ops.route import given_routing, route, route_custom
from ..runtime.memory import Memory, alloc, part
from ..types import MoESpec, RouterWeights, Routing
from .checks import check_rows

__all__ = ["Choose", "Router", "autocast_disabled", "in_float32"]


def autocast_disabled(device: torch.device) -> AbstractContextManager[object]:
    """Return a context without autocast: router and latent projections are computed in the dtypes they have."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def in_float32(router: RouterWeights) -> RouterWeights:
    """Return a router that works in float32: copies of a weight and a bias of another dtype, without gradients."""
    bias = None if router.bias is None else router.bias.detach().float()
    return replace(router, weight=router.weight.detach().float(), bias=bias)


Choose = Callable[[Tensor, Any, int], tuple[Tensor, Tensor] | Routing]


@dataclass(frozen=True, kw_only=True, slots=True)
class Router:
    """How one layer chooses experts. weights: None where every call brings logits or a routing."""

    spec: MoESpec
    weights: RouterWeights | None
    choose: Choose | None
    checked: bool

    def check_own(self, router_input: Tensor | None) -> None:
        """Raise InputError where there is no router, or it reads another input than x."""
        if router_input is None and self.spec.routing.input_norm_eps is not None:
            raise InputError(
                "forward: this router reads an input of its own, which it normalises (Gemma-4: the residual before "
                "the experts' norm); give router_input, or router_logits or a routing"
            )
        if self.weights is None and self.choose is None:
            raise InputError(
                "forward: no router_logits and no routing were given and the layer was built without a router; "
                "give one of the two, or build the layer with router=RouterWeights(...) or choose=..."
            )

    def _own_logits(self, seen: Tensor, dtype: torch.dtype, memory: Memory | None) -> Tensor:
        own, eps = cast("RouterWeights", self.weights), self.spec.routing.input_norm_eps
        if eps is not None:
            seen = rms_norm(seen, None, eps, memory=memory)
        shape = (seen.shape[0], self.spec.num_experts)
        out = alloc(memory, "out", shape, dtype, seen.device) if self.spec.routing.round_logits else None
        return linear(seen, own.weight, own.bias, out=out, memory=memory)

    def __call__(
        self,
        x: Tensor,
        logits: Tensor | None,
        topk_ids: Tensor | None,
        topk_weights: Tensor | None,
        token_ids: Tensor | None,
        router_input: Tensor | None = None,
        memory: Memory | None = None,
    ) -> Routing:
        """Return the experts of every token of ``x [T, D]``: those given, or those the logits ``[T, E]`` choose.

        Without logits they are the layer's own, for ``router_input [T, D]`` if given; ``check_own`` comes before.
        """
        rule, own = self.spec.routing, self.weights
        if topk_ids is not None and topk_weights is not None:
            check_rows("topk_ids", topk_ids, (x.shape[0], topk_ids.shape[-1]))
            return given_routing(topk_ids, topk_weights, self.spec.num_experts, checked=self.checked)
        if logits is None and own is None and self.choose is not None:
            experts = self.spec.num_experts
            return route_custom(self.choose, x, None, rule, num_experts=experts, checked=self.checked)
        if logits is None:
            seen = x if router_input is None else router_input
            logits = self._own_logits(seen, x.dtype, part(memory, "router"))
        check_rows("router_logits", logits, (x.shape[0], self.spec.num_experts))
        if self.choose is not None:
            return route_custom(self.choose, x, logits, rule, checked=self.checked)
        return route(
            logits,
            rule,
            bias=None if own is None else own.correction_bias,
            token_ids=token_ids,
            hash_table=None if own is None else own.hash_table,
            expert_scale=None if own is None else own.expert_scale,
            checked=self.checked,
            memory=part(memory, "routing"),
        )
