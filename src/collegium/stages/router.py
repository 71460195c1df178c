"""From tokens to chosen experts: logits of the layer's router, and the rules that choose experts."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import InputError
from ..formats.unquantised import DTYPES
from ..ops.linear import linear
from ..ops.rms_norm import rms_norm
from ..ops.route import given_routing, route, route_custom
from ..runtime.memory import Memory, alloc, part
from ..types import MoESpec, RouterModule, RouterWeights, Routing
from .call import Call
from .checks import check_router, check_rows, check_selection
from .modules import RowFunction, rows_of

__all__ = ["Choose", "Router", "autocast_disabled", "router_of"]


def autocast_disabled(device: torch.device) -> AbstractContextManager[object]:
    """Return a context without autocast: router and latent projections run in the dtype of their weights."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def _in_float32(router: RouterWeights) -> RouterWeights:
    """Return ``router`` with weight and bias in float32, copied where they have another dtype, without gradients."""
    bias = None if router.bias is None else router.bias.detach().float()
    return replace(router, weight=router.weight.detach().float(), bias=bias)


def router_of(
    spec: MoESpec, router: RouterWeights | RouterModule | RowFunction | None
) -> tuple[RouterWeights | None, RouterModule | None]:
    """Return the weights or the module of a layer's router; raises InputError where the spec needs others."""
    if router is None:
        return None, None
    if isinstance(router, RouterWeights):
        check_router(spec, router)
        return _in_float32(router), None
    module = router if isinstance(router, RouterModule) else RouterModule(gate=router)
    if not callable(module.gate):
        raise InputError(
            f"router: found a {type(module.gate).__name__}; allowed: RouterWeights, RouterModule, or a function or "
            "module that returns logits"
        )
    check_selection(spec, module)
    return None, module


Choose = Callable[[Tensor, Any, int], tuple[Tensor, Tensor] | Routing]


@dataclass(frozen=True, kw_only=True, slots=True)
class Router:
    """Chooses the experts of a layer's tokens.

    weights, module: one of them, or none where every call passes logits or a routing. choose: a custom rule, see
    ``MoELayer``. checked: raise RoutingError instead of writing NaN rows.
    """

    spec: MoESpec
    weights: RouterWeights | None
    module: RouterModule | None = None
    choose: Choose | None
    checked: bool

    def check_usable(self, router_input: Tensor | None) -> None:
        """Raise InputError where the layer has no router, or where the router needs a ``router_input``."""
        if router_input is None and self.spec.routing.input_norm_eps is not None:
            raise InputError(
                "forward: this router normalises a separate input, which is not x (Gemma-4: the residual before the "
                "experts' norm); pass router_input, router_logits or a routing"
            )
        if self.weights is None and self.module is None and self.choose is None:
            raise InputError(
                "forward: neither router_logits nor a routing was passed, and the layer has no router; pass one of the "
                "two, or build the layer with router=RouterWeights(...), a module as router, or choose=..."
            )

    def __call__(self, call: Call, memory: Memory | None = None) -> Routing:
        """Return the routing of ``call``: the one that was passed, or what the logits ``[T, E]`` choose.

        Logits that were not passed are computed from ``router_input`` or x; call ``check_usable`` first.
        """
        x = call.x
        if call.topk_ids is not None and call.topk_weights is not None:
            check_rows("topk_ids", call.topk_ids, (x.shape[0], call.topk_ids.shape[-1]))
            return given_routing(call.topk_ids, call.topk_weights, self.spec.num_experts, checked=self.checked)
        rule, num_experts = self.spec.routing, self.spec.num_experts
        logits = call.router_logits
        if logits is None:
            if self.weights is None and self.module is None and self.choose is not None:
                return route_custom(self.choose, x, None, rule, num_experts=num_experts, checked=self.checked)
            logits = self._logits(call, part(memory, "router"))
        check_rows("router_logits", logits, (x.shape[0], num_experts))
        if self.choose is not None:
            return route_custom(self.choose, x, logits, rule, checked=self.checked)
        weights = self.weights or self.module
        return route(
            logits,
            rule,
            bias=None if weights is None else weights.correction_bias,
            token_ids=call.token_ids,
            hash_table=None if weights is None else weights.hash_table,
            expert_scale=None if weights is None else weights.expert_scale,
            checked=self.checked,
            memory=part(memory, "routing"),
        )

    def _logits(self, call: Call, memory: Memory | None) -> Tensor:
        """Return ``[T, E]``: the logits of the layer's router, in float32 or rounded as in the spec.

        The caller's module returns them in a dtype of its choice.
        """
        rule = self.spec.routing
        rows = call.x if call.router_input is None else call.router_input
        if rule.input_norm_eps is not None:
            rows = rms_norm(rows, None, rule.input_norm_eps, memory=memory)
        if self.module is not None:
            return rows_of("router", self.module.gate, rows, self.spec.num_experts)
        weights = cast("RouterWeights", self.weights)
        out = None
        if rule.round_logits:
            dtype = call.x.dtype if rule.round_logits is True else DTYPES[rule.round_logits]
            out = alloc(memory, "out", (rows.shape[0], self.spec.num_experts), dtype, rows.device)
        return linear(rows, weights.weight, weights.bias, out=out, memory=memory)
