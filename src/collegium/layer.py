"""MoELayer: one Mixture-of-Experts layer, planned, packed and ready to be called.

A token's way: route -> dispatch -> experts -> combine -> add the shared expert. Every number on that way stands in
the plan, which is made before the weights are packed.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn import functional

from .errors import InputError, PlanError
from .experts import KERNELS
from .experts.triton.packed import PackedExperts, few_tokens
from .experts.triton.tile_file import with_tuned_tiles
from .formats.unquantised import DTYPES, FLOAT_FORMATS
from .ops.route import given_routing, route, route_custom
from .parallel.local import Local
from .pipeline import DirectPipeline, SplitPipeline, ways
from .runtime.devices import plain_torch
from .runtime.packed_module import PackedModule, refuse_gradient
from .runtime.replay import Replay
from .runtime.workspace import captured, own_memory, owned, shared_workspaces
from .types import ContiguousBatch, Routing
from .warming import warm_layer
from .weight_checks import check_extras, check_weights

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import Tensor

    from .experts import ExpertKernel
    from .formats.payload import Payload
    from .plan import Plan
    from .runtime.workspace import Workspace, Workspaces
    from .types import ExpertWeights, LatentWeights, Problem, RouterWeights, SharedWeights

__all__ = ["MoELayer"]

_DTYPES = {dtype: plain.name for dtype, plain in FLOAT_FORMATS.items()}


class MoELayer(PackedModule):
    """One Mixture-of-Experts layer: router, routed experts, shared expert.

    The layer owns packed weights on one device and makes every decision when it is built; ``forward`` only computes.
    ``plan`` says what was chosen, ``print(layer)`` shows it. Inference only. Any number of threads may call a layer, on
    any streams. It can be copied and pickled; it does not move and has no ``state_dict``.
    """

    @plain_torch()
    def __init__(
        self,
        weights: ExpertWeights[Payload],
        plan: Plan,
        *,
        router: RouterWeights | None = None,
        shared: SharedWeights[Payload] | None = None,
        latent: LatentWeights | None = None,
        choose: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]] | None = None,
        after_expert: Callable[[Tensor], Tensor] | None = None,
        checked: bool = False,
    ) -> None:
        """Pack ``weights`` for the kernel of ``plan``.

        router: needed unless every call brings logits or a routing; it works in float32, in a copy made here of a
        weight and a bias of another dtype. shared, latent: as the spec says.
        choose: a routing rule of your own, ``choose(x [T, D], logits [T, E], top_k) -> (weights, ids)`` both
        ``[T, K]``; it replaces the spec's rule, and what it returns is checked like any other routing.
        after_expert: applied to the rows ``[R, H]`` the experts return, row by row, before they are weighted.
        checked: raise RoutingError on NaN logits, biases or weights, out-of-range and repeated ids instead of NaN rows;
        this reads the device once a call. Raises InputError when weights and spec disagree. ``workspaces`` lends the
        memory of a pass on a GPU, to all layers of the device; None: every pass takes fresh memory.
        """
        super().__init__()
        spec = plan.problem.spec
        check_weights(weights, spec)
        check_extras(spec, router, shared, latent)
        kernel = next(k for k in KERNELS if k.name == plan.kernel)
        self.plan = plan
        self.spec = spec
        self.checked = checked
        self.choose = choose
        self.router = None if router is None else _in_float32(router)
        self.shared = shared
        self.latent = latent
        self._pipeline = SplitPipeline(
            dispatcher=Local(num_experts=spec.num_experts, weight_on_input=spec.routing.weight_on_input),
            kernel=kernel,
            packed=with_tuned_tiles(kernel.pack(weights, plan.problem), plan.problem),
            after_expert=after_expert,
        )
        packed = self._pipeline.packed
        sorted_only = spec.routing.weight_on_input or not isinstance(packed, PackedExperts)
        self._direct = None
        if not sorted_only:
            most = few_tokens(packed, spec.routing.top_k)
            self._direct = DirectPipeline(packed=packed, most=most, after_expert=after_expert)
        self._shared_kernel, self._packed_shared = kernel, None
        if shared is not None:
            self._shared_kernel, self._packed_shared = _pack_shared(kernel, shared, plan.problem)
        self._device = weights.down.device
        # To the shared expert every batch is the first rows in order; row T of the bounds is (0, T).
        longest = 0 if shared is None else plan.problem.limits.max_tokens + 1
        self._shared_rows = torch.arange(longest, device=self._device)
        self._shared_bounds = torch.stack((torch.zeros_like(self._shared_rows), self._shared_rows), dim=1)
        on_gpu = self._device.type == "cuda" and plan.capturable
        self.workspaces: Workspaces | None = shared_workspaces(self._device, plan.workspace_bytes) if on_gpu else None
        self._kind = hash((plan.problem, plan.kernel))
        self._replay: Replay  # made by every assignment
        self.identify(self._device, DTYPES[plan.problem.dtype])

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute and forget what was recorded: another layer may start other kernels."""
        super().__setattr__(name, value)
        self.__dict__["_replay"] = Replay()

    def extra_repr(self) -> str:
        """Show the plan, how batches of each size run, and what the plan does not say of shared expert and packing."""
        packed, lines = self._pipeline.packed, [self.plan.explain()]
        if isinstance(packed, PackedExperts):
            top_k, most = self.spec.routing.top_k, self.plan.problem.limits.max_tokens
            lines.append(f"batches    {ways(packed, top_k, most, direct=self._direct is not None)}")
        if self.shared is not None and self._shared_kernel is not self._pipeline.kernel:
            own = self.shared.experts.down.name
            lines.append(
                f"shared     {own} weights run on {self._shared_kernel.name}, which the plan's kernel does not take"
            )
        report = getattr(packed, "report", None)
        return "\n".join(lines if report is None else [*lines, f"weights    {report}"])

    def forward(
        self,
        x: Tensor,
        *,
        router_logits: Tensor | None = None,
        routing: Routing | None = None,
        token_ids: Tensor | None = None,
        router_input: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the layer's output for ``x [..., D]`` (bf16, fp16 or float32), same shape and dtype.

        router_logits: ``[T, E]`` from an external router; routing: chosen experts and weights, used as they are;
        neither: the layer's own router. token_ids: ``[T]`` integers, needed for hash routing only.
        router_input: what the layer's own router reads, like ``x``, where the model gives it another input (Gemma-4).
        T is the product of the leading dimensions and may be 0. out: contiguous, like x, written and returned instead
        of fresh memory. Raises InputError on shapes, dtypes, devices and where a gradient is asked for, and
        RoutingError in checked mode.
        """
        self._check_input(x)
        given = cast("object", routing)
        if given is not None and not isinstance(given, Routing):
            raise InputError(
                f"forward: routing is a {type(given).__name__}, allowed: "
                "collegium.Routing(topk_ids=..., topk_weights=...)"
            )
        ids, weights = (None, None) if routing is None else (routing.topk_ids, routing.topk_weights)
        refuse_gradient(x=x, router_logits=router_logits, topk_weights=weights, router_input=router_input, out=out)
        if out is None:
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
        elif out.shape != x.shape or out.dtype != x.dtype or not out.is_contiguous():
            raise InputError(f"forward: out is {tuple(out.shape)} {out.dtype}, needed: contiguous, like x")
        wide = self.spec.hidden_size
        if router_input is not None and routing is None and router_logits is None:
            seen = router_input.reshape(-1, wide)
            _check_rows("router_input", seen, (x.numel() // wide, wide))
            router_logits = self._logits(seen)
        inputs = (x if x.dim() == 2 else x.reshape(-1, wide), router_logits, ids, weights, token_ids)
        if torch.compiler.is_compiling():
            torch.ops.collegium.moe_layer(*inputs, self.handle, out.view(-1, wide))
        else:
            self.compute(*inputs, out.view(-1, wide))
        return out

    warm_up = warm_layer

    def compute(
        self,
        x: Tensor,
        router_logits: Tensor | None,
        topk_ids: Tensor | None,
        topk_weights: Tensor | None,
        token_ids: Tensor | None,
        out: Tensor,
    ) -> None:
        """Write ``out [T, D]`` for ``x [T, D]``: ``forward`` after its checks, in passes of ``max_tokens`` rows."""
        with _in_full(x.device):
            if router_logits is None and (topk_ids is None or topk_weights is None):
                router_logits = self._own_logits(x)
            inputs = (x, router_logits, topk_ids, topk_weights, token_ids, out)
            if self.workspaces is None or owned(self._device):
                self._passes(None, *inputs)
            elif captured(self._device):
                with own_memory(self._device):
                    self._passes(None, *inputs)
            else:
                space = self.workspaces.take()
                try:
                    self._in_workspace(space, inputs)
                finally:
                    self.workspaces.give(space)

    def _in_workspace(self, space: Workspace, inputs: tuple[Any, ...]) -> None:
        # User callbacks may launch work that the recorder cannot see.
        own = self.choose is None and self._pipeline.after_expert is None
        if own and inputs[0].shape[0] <= self.plan.problem.limits.max_tokens:
            self._replay(partial(self._passes, space), inputs, space.number)
        else:
            self._passes(space, *inputs)

    def _passes(self, space: Workspace | None, *inputs: Any) -> None:
        x, out = inputs[0], inputs[5]
        tokens, step = x.shape[0], self.plan.problem.limits.max_tokens
        if tokens <= step:
            with self._scope(space, tokens):
                self._tokens(x, self._route(*inputs[:5]), out)
            return
        chosen = self._route(*inputs[:5])
        for start in range(0, tokens, step):
            span = slice(start, min(start + step, tokens))
            part = replace(chosen, topk_ids=chosen.topk_ids[span], topk_weights=chosen.topk_weights[span])
            with self._scope(space, span.stop - start):
                self._tokens(x[span], part, out[span])

    def _scope(self, space: Workspace | None, tokens: int) -> AbstractContextManager[None]:
        return nullcontext() if space is None else space.scope((self._kind, tokens))

    def _tokens(self, x: Tensor, routing: Routing, out: Tensor) -> None:
        shared = None if self.shared is None else self._shared_output(x)
        pipeline = self._way(x, routing)
        if self.latent is None:
            pipeline(x, routing, dtype=x.dtype, shared=shared, out=out)
            return
        inner = functional.linear(x, self.latent.down.to(x.dtype))
        rows, norm = pipeline(inner, routing), self.latent.norm
        if norm is not None:
            rows = functional.rms_norm(rows, (rows.shape[-1],), norm.float(), self.latent.norm_eps)
        latent = functional.linear(rows, self.latent.up.float())
        out.copy_(latent if shared is None else latent + shared)

    def _way(self, x: Tensor, routing: Routing) -> DirectPipeline | SplitPipeline:
        direct = self._direct
        return direct if direct is not None and direct.serves(x, routing) else self._pipeline

    def _shared_output(self, x: Tensor) -> Tensor:
        shared = cast("SharedWeights[Payload]", self.shared)
        tokens = x.shape[0]
        batch = ContiguousBatch(x=x, source=self._shared_rows[:tokens], expert_offsets=self._shared_bounds[tokens])
        out = self._shared_kernel.run(batch, self._packed_shared)
        if shared.gate is None:
            return out
        return torch.sigmoid(functional.linear(x.float(), shared.gate.float())) * out

    def _own_logits(self, x: Tensor) -> Tensor:
        if self.spec.routing.input_norm_eps is not None:
            raise InputError(
                "forward: this router reads an input of its own, which it normalises (Gemma-4: the residual before "
                "the experts' norm); give router_input, or router_logits or a routing"
            )
        return self._logits(x)

    def _logits(self, x: Tensor) -> Tensor:
        """Return the logits ``[T, E]`` float32 of the layer's own router for what it reads, ``[T, D]``."""
        if self.router is None:
            raise InputError(
                "forward: no router_logits and no routing were given and the layer was built without a router; "
                "give one of the two, or build the layer with router=RouterWeights(...)"
            )
        bias, eps = None if self.router.bias is None else self.router.bias.float(), self.spec.routing.input_norm_eps
        with _in_full(x.device):
            read = x.float() if eps is None else functional.rms_norm(x.float(), (x.shape[-1],), eps=eps)
            return functional.linear(read, self.router.weight.float(), bias)

    def _route(
        self,
        x: Tensor,
        logits: Tensor | None,
        topk_ids: Tensor | None,
        topk_weights: Tensor | None,
        token_ids: Tensor | None,
    ) -> Routing:
        if topk_ids is not None and topk_weights is not None:
            _check_rows("topk_ids", topk_ids, (x.shape[0], topk_ids.shape[-1]))
            return given_routing(topk_ids, topk_weights, self.spec.num_experts, checked=self.checked)
        logits = cast("Tensor", logits)
        _check_rows("router_logits", logits, (x.shape[0], self.spec.num_experts))
        if self.choose is not None:
            return route_custom(self.choose, x, logits, self.spec.routing, checked=self.checked)
        return route(
            logits,
            self.spec.routing,
            bias=None if self.router is None else self.router.correction_bias,
            token_ids=token_ids,
            hash_table=None if self.router is None else self.router.hash_table,
            expert_scale=None if self.router is None else self.router.expert_scale,
            checked=self.checked,
        )

    def _check_input(self, x: Tensor) -> None:
        if x.shape[-1:] != (self.spec.hidden_size,):
            raise InputError(
                f"forward: x has shape {tuple(x.shape)}; its last dimension must be hidden_size={self.spec.hidden_size}"
            )
        wanted = self.plan.problem.dtype
        if _DTYPES.get(x.dtype) != wanted:
            raise InputError(
                f"forward: x is {x.dtype}, the layer was planned for {wanted}; convert x, or plan with dtype="
                f"{_DTYPES.get(x.dtype, 'one of ' + ', '.join(_DTYPES.values()))!r}"
            )
        if x.device != self._device:
            raise InputError(
                f"forward: x is on {x.device}, the packed weights are on {self._device}; move x, or build the layer "
                "with weights on x's device (a packed layer does not move)"
            )


def _pack_shared(kernel: ExpertKernel, shared: SharedWeights[Payload], problem: Problem) -> tuple[ExpertKernel, Any]:
    """Choose a kernel for the shared expert and pack it: to a kernel, one expert that every token goes to.

    Where its format is not one of the plan's kernel (FP8 or BF16 beside routed experts of four bits), it is the first
    one of the table that takes it and can be captured where the plan says so.
    """
    alone = problem.spec.shared_alone(shared.experts.down.name)
    check_weights(shared.experts, alone)
    asked = replace(problem, spec=alone)
    reasons: list[str] = []
    for other in dict.fromkeys((kernel, *KERNELS)):
        reason = other.refuse(asked)
        if reason is None and kernel.capturable and not other.capturable:
            reason = "it cannot be captured in a CUDA graph, which the plan promises"
        if reason is None:
            return other, other.pack(shared.experts, asked)
        reasons.append(f"  {other.name}: {reason}")
    raise PlanError(
        f"{kernel.name} runs the routed experts, no kernel runs the shared expert ({alone.weight_format}) beside it:\n"
        + "\n".join(reasons)
        + "\nForce another activation format or kernel."
    )


def _in_full(device: torch.device) -> AbstractContextManager[object]:
    """Return a context without autocast: router and latent projections are computed in the dtypes they have."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def _in_float32(router: RouterWeights) -> RouterWeights:
    bias = None if router.bias is None else router.bias.detach().float()
    return replace(router, weight=router.weight.detach().float(), bias=bias)


def _check_rows(name: str, found: Tensor, wanted: tuple[int, int]) -> None:
    if tuple(found.shape) != wanted:
        raise InputError(f"forward: {name} has shape {tuple(found.shape)}, this call needs {wanted}")
