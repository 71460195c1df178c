"""MoELayer: one Mixture-of-Experts layer, planned, packed and ready to be called.

A call is checked here (``stages/call.py``) and run by ``execution/executor.py``: route, pipeline (dispatch, experts,
combine), shared expert. Every choice is in the plan, which is made before the weights are packed.
"""

import copy
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from .adapters import ExpertAdapters, PackedAdapters
from .encoding import as_payloads
from .errors import InputError
from .execution.layer_comparison import refusal_reported
from .execution.planned_module import PlannedModule
from .experts import PackedWeights
from .experts.measured import with_measured_tiles
from .experts.paging.paged import pack_paged
from .formats.payload import Payload
from .formats.unquantised import DTYPES
from .ops.quantize import activation_format
from .ops.route_wide import append_shared_experts
from .parallel import Local, Partial
from .parallel.collectives import sum_over_ranks
from .parallel.rendezvous import rendezvous_of
from .pipelines.batched import check_batched, run_batched
from .pipelines.paged import Paged
from .pipelines.quantized import check_quantized, run_quantized
from .planning import Plan, kernel_named, plan as plan_layer, plan_swap
from .problem import Overrides
from .runtime.custom_op import uncompiled_call
from .runtime.devices import plain_torch
from .runtime.packed_module import check_tensors, stored_bytes
from .runtime.warm_up import compile_batches, run_all_paths, sizes_for
from .stages.call import Call, checked_adapter_ids, checked_call
from .stages.checks import check_after_expert, check_input, check_weights, output_for
from .stages.latent import latent_of
from .stages.modules import InputTransform, RowFunction, module_names, refuse_gradients
from .stages.quantized_input import code_scales, dequantized
from .stages.router import Choose, autocast_disabled, router_of
from .stages.shared import SharedExpert, check_apart, check_shared_unchanged, shared_of
from .types import ActivationSpec, ExpertWeights, LatentWeights, RouterModule, RouterWeights, Routing, SharedWeights

__all__ = ["MoELayer"]


class MoELayer(PlannedModule):
    """One Mixture-of-Experts layer: router, routed experts, shared expert.

    A forward pass of T tokens ``x [T, D]`` with E experts, of which each token takes K:

    1. Route: logits ``[T, E]`` give ``topk_ids [T, K]`` and ``topk_weights [T, K]``.
    2. Dispatch: sort the T * K assignments by expert; over several ranks, send tokens to the ranks of their experts.
       R assignments are this rank's, with input rows ``[R, H]``.
    3. Experts: gate and up ``[R, I]`` each, activation ``[R, I]``, down ``[R, H]``.
    4. Combine: multiply the rows of a token by its weights and add them, ``[T, H]``; over several ranks, return them.
    5. Shared: add the shared expert's rows ``[T, D]``, and round once to the output dtype.

    H is D, or the latent size, where the layer projects tokens before step 2 and sums after step 4.

    The layer owns packed weights on one device and makes every decision when it is built; ``forward`` only computes.
    ``print(layer)`` shows the plan, ``layer_id`` is the layer's number in its model, None where it was not loaded by
    number. Inference only. Any number of threads may call a layer, on any streams. It can be
    copied and pickled; it cannot be moved to another device and has no ``state_dict``.
    """

    layer_id: int | None = None

    @plain_torch()
    def __init__(
        self,
        weights: ExpertWeights[Payload] | ExpertWeights[Tensor],
        plan: Plan,
        *,
        router: RouterWeights | RouterModule | RowFunction | None = None,
        shared: SharedWeights[Payload] | SharedWeights[Tensor] | RowFunction | None = None,
        latent: LatentWeights | RowFunction | None = None,
        choose: Choose | None = None,
        after_expert: Callable[[Tensor], Tensor] | None = None,
        checked: bool = False,
    ) -> None:
        """Pack ``weights``, this rank's experts in the order of the plan's placement, for the kernel of ``plan``.

        weights: payloads, or plain tensors in the shapes of ``expert_weights``.
        router: needed unless every call passes logits or a routing; computed in float32, a weight and a bias of another
        dtype are copied. shared, latent: where the spec has them; a merged shared expert is part of ``weights``
        (``collegium.merge_shared``).
        Each may be a function or module of the caller: router is then the gate of engines, from ``[T, D]`` to logits
        ``[T, E]``; shared their ``shared_experts``, from ``[T, D]`` to ``[T, D]``, for a spec without shared expert;
        latent their ``routed_input_transform``, from ``[T, D]`` to the experts' input ``[T, H]``, whose sums are not
        projected back. A tuple of results stands for its first entry. All ranks pass them; where the output is this
        rank's part of a sum, shared is called on rank 0 alone, or on every rank with ``Overrides(shared='sliced')``.
        choose: a custom routing rule, ``choose(x [T, D], logits [T, E], top_k) -> (topk_ids, topk_weights)``, integers
        and floating numbers ``[T, K]``, or a ``Routing``. It replaces the spec's rule; its result is checked like any
        other routing. logits are None where the layer has no router and the call passes none.
        after_expert: applied to the rows ``[R, H]`` that the experts return, row by row, before they are weighted.
        checked: raise RoutingError on NaN logits, biases or weights and on out-of-range or repeated ids, instead of
        writing NaN rows; waits for the device once a call. Ranks also compare the inputs of every pass
        (``parallel/input_check.py``), and all raise RankError where one cannot run it; the same on all ranks.
        Raises InputError where weights and plan disagree. Ranks that share the layer build it together and compare
        plans, options and weights: all raise InputError for different plans, and RankError for different weights or
        where one of them cannot build it.
        """
        super().__init__()
        problem = plan.problem
        self.checked = checked
        self.choose = choose
        self.after_expert = after_expert
        with refusal_reported(plan, checked=checked):
            weights = as_payloads(weights)
            self.shared = shared_of(plan, weights, shared, after_expert)
            check_weights(weights, replace(plan.routed_problem.routed, experts=plan.routed_problem.packed_experts))
            check_after_expert(problem, after_expert)
            self.router, self.gate = router_of(problem.spec, router)
            self.latent = latent_of(problem, latent)
            self.caller_modules = module_names(self.gate, shared, self.latent)
            self._device = _device_of(plan, weights)
            self.experts = with_measured_tiles(_pack(plan, weights, self._device), problem)
        self.adapters = None
        self._build(plan)
        self.identify(self._device, DTYPES[problem.dtype])

    @plain_torch()
    def swap(self, weights: ExpertWeights[Payload] | ExpertWeights[Tensor], overrides: Overrides | None = None) -> None:
        """Continue with other routed experts of the same sizes, in the format of ``weights``; all else stays.

        weights: this rank's experts in the order of the plan's placement, on the layer's device. overrides: as in
        ``plan``; without a forced activation format that of the layer stays; None: the dispatcher stays too. Recorded
        launches are forgotten; code from torch.compile continues with the new experts. Old and new experts are in
        memory together for a while. No other thread may be in the layer; ranks that share it swap together.
        Raises InputError for other sizes or another device, where a CUDA graph has captured the layer, and where the
        shared expert is merged or would need another packing; PlanError where nothing runs the format. The layer is
        then unchanged.
        """
        self._require_resident("swap")
        weights = as_payloads(weights)
        check_weights(weights, replace(self.plan.problem.routed, **weights.formats))
        captured = self._executor.captured
        if captured or weights.down.device != self._device:
            raise InputError(
                f"swap: the weights are on {weights.down.device}, the layer is on {self._device}, "
                f"{'captured' if captured else 'not captured'} by a CUDA graph; allowed: weights on its device, for a "
                "layer that no CUDA graph has captured. Load another layer, and capture that"
            )
        plan = plan_swap(self.plan, weights.formats, overrides)
        check_shared_unchanged(self.plan, plan)
        self._continue_with(plan, kernel_named(plan.kernel).pack(weights, plan.problem.routed))

    @plain_torch()
    def set_adapters(self, adapters: ExpertAdapters | None) -> None:
        """Let calls choose among ``adapters`` for each token (``adapter_ids``), instead of those set before.

        The weights stay as they are, in any format; matrices of adapters are rounded to the layer's input dtype. None:
        no adapters. Recorded launches are forgotten. No other thread may be in the layer.
        Raises InputError for matrices of other sizes and where a CUDA graph has captured the layer, BadScaleError for
        numbers that are not finite, and PlanError where the experts are split over ranks. The layer is then unchanged.
        """
        if adapters is not None:
            self._require_resident("set_adapters")
        if self._executor.captured:
            raise InputError(
                "set_adapters: a CUDA graph has captured the layer, and would read the memory of the old adapters; set "
                "the adapters first, or load another layer"
            )
        packed = None
        if adapters is not None:
            problem = self.plan.problem
            packed = PackedAdapters.pack(
                adapters,
                experts=self.spec.num_experts,
                gated=self.spec.activation.gated,
                intermediate=self.spec.intermediate_size,
                hidden=self.spec.expert_hidden_size,
                dtype=DTYPES[problem.dtype],
                device=self._device,
            )
        plan = self.plan.with_adapters(None if packed is None else packed.sizes)
        self.__dict__["adapters"] = packed
        self._build(plan)

    def with_activation(self, activation: ActivationSpec) -> Self:
        """Return a layer with the same packed weights and another clamp, alpha or kind of activation.

        A copy of the layer, without a copy of its weights; so an engine can hold one for each clamp that calls need. A
        shared expert follows where the spec gives it no activation. Ranks that share the layer call it together. Raises
        InputError for a merged shared expert and between activations with and without a gate, and PlanError where the
        kernel has no such activation.
        """
        old = self.plan
        gated = old.problem.spec.activation.gated
        if old.merged_shared_experts or activation.gated != gated:
            raise InputError(
                f"with_activation: found {activation.kind} for a layer {'with' if gated else 'without'} a gate and "
                f"{old.merged_shared_experts} merged shared experts; allowed: activations of the same matrices, "
                "without merged shared experts"
            )
        forced = replace(old.overrides, kernel=old.kernel, dispatcher=old.dispatcher)
        spec = replace(old.problem.spec, activation=activation)
        layer_plan = plan_layer(replace(old.problem, spec=spec), forced)
        packed, needed = (old.down_kernel, old.shared_kernel), (layer_plan.down_kernel, layer_plan.shared_kernel)
        if packed != needed:
            raise InputError(
                f"with_activation: with {activation} down and the shared expert need the kernels {needed}, they are "
                f"packed for {packed}; load another layer with that activation"
            )
        layer = copy.copy(self)
        if isinstance(self.shared, SharedExpert):
            layer.__dict__["shared"] = self.shared.with_activation(layer_plan.problem.shared().activation)
        layer._continue_with(layer_plan, self.experts.with_activation(activation))
        return layer

    @property
    def device(self) -> torch.device:
        """The device of the layer's weights, inputs and outputs."""
        return self._device

    @property
    def output_dtype(self) -> torch.dtype:
        """The dtype of the layer's output."""
        return DTYPES[self.plan.problem.output_dtype]

    @property
    def output_is_reduced(self) -> bool:
        """Whether the output is complete; False: the caller adds the outputs of all ranks (dispatcher ``partial``)."""
        return self.plan.output_is_reduced

    def reduce(self, output: Tensor) -> Tensor:
        """Return the complete output, where ``output`` is what this layer returned.

        A complete output is returned unchanged. A part of a sum is replaced by the sum over all ranks that share the
        experts, in its dtype; every rank calls this. Raises RankError where a rank does not respond, and InputError
        without their process groups.
        """
        placement = self.plan.problem.placement
        if placement is not None and not self.output_is_reduced:
            for group in placement.groups:
                sum_over_ranks(output, group=group, phase="reduce")
        return output

    @property
    def routed_size(self) -> int:
        """The width of the routed experts' sums: D, or H where ``latent`` is a function of the caller."""
        latent = self.latent
        return latent.width if isinstance(latent, InputTransform) else self.spec.hidden_size

    @property
    def has_router(self) -> bool:
        """Whether the layer computes logits itself, with ``router`` or the caller's gate."""
        return self.router is not None or self.gate is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the packed experts, shared expert, router, latent projections and adapters on this rank."""
        return stored_bytes(self.experts, self.shared, self.router, self.gate, self.latent, self.adapters)

    def extra_repr(self) -> str:
        """Return the plan, and what packing rounded, as text."""
        return self.plan.explain() + self.experts.summary(self.plan.activation_format)

    def forward(
        self,
        x: Tensor,
        *,
        router_logits: Tensor | None = None,
        routing: Routing | None = None,
        token_ids: Tensor | None = None,
        router_input: Tensor | None = None,
        adapter_ids: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the layer's output for ``x [..., D]`` (bf16, fp16 or float32), same shape, in the output dtype.

        router_logits: ``[T, E]`` from an external router. routing: chosen experts and weights, used unchanged. Without
        both, the layer's router chooses. token_ids: ``[T]`` integers, needed for hash routing only.
        router_input: the input of the layer's router, like ``x``, where the model gives it another one (Gemma-4).
        adapter_ids: ``[T]`` int32 or int64, which of the layer's adapters (``set_adapters``) changes the experts for
        each token; -1: none, the token has the bits of a call without adapters. Any other id makes the token NaN.
        T is the product of the leading dimensions and may be 0. out: contiguous, shaped like x, in the output dtype;
        written and returned instead of fresh memory. Raises InputError on shapes, dtypes, devices and where a gradient
        is required, RoutingError in checked mode, and RankError on every rank where ranks that need the same inputs
        have different ones.
        """
        try:
            check_input(x, routing, self.plan.problem, self._device)
            self._check_width()
            result = output_for(x, out, self.plan.problem)
            call = checked_call(
                self.spec,
                self._device,
                x,
                router_logits=router_logits,
                routing=routing,
                token_ids=token_ids,
                router_input=router_input,
                out=result,
            )
            call = self._with_adapter_ids(call, adapter_ids)
        except Exception as error:
            self._executor.report_refusal(x, (router_logits, routing, token_ids, router_input), error)
            raise
        self._run(call)
        return result

    def shared_and_routed(
        self,
        x: Tensor,
        *,
        router_logits: Tensor | None = None,
        routing: Routing | None = None,
        token_ids: Tensor | None = None,
        router_input: Tensor | None = None,
        adapter_ids: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """Return the shared expert's output for ``x [..., D]`` and the routed experts' sums ``[..., D]``, not added.

        The sums are ``[..., H]`` where ``latent`` is a function of the caller. Both have the output dtype, and each is
        rounded once. The first is None for a layer without shared expert, and zero on ranks of a partial sum that leave
        it to rank 0. Arguments and errors as ``forward``; InputError also for a merged shared expert.
        """
        try:
            check_input(x, routing, self.plan.problem, self._device)
            check_apart(self.plan)
            routed = x.new_empty(*x.shape[:-1], self.routed_size, dtype=self.output_dtype)
            shared = (
                None
                if self.shared is None
                else torch.empty_like(x, dtype=self.output_dtype, memory_format=torch.contiguous_format)
            )
            call = checked_call(
                self.spec,
                self._device,
                x,
                router_logits=router_logits,
                routing=routing,
                token_ids=token_ids,
                router_input=router_input,
                out=routed,
            )
            call = self._with_adapter_ids(call, adapter_ids)
            if shared is not None:
                call = call._replace(shared_out=shared.view(-1, self.spec.hidden_size))
        except Exception as error:
            self._executor.report_refusal(x, (router_logits, routing, token_ids, router_input), error)
            raise
        self._run(call)
        if shared is None and self.has_shared:
            shared = torch.zeros_like(x, dtype=self.output_dtype, memory_format=torch.contiguous_format)
        return shared, routed

    def _with_adapter_ids(self, call: Call, adapter_ids: Tensor | None) -> Call:
        """Return ``call`` with the adapter of each token, if the caller passed them; raises as ``forward``."""
        if adapter_ids is None:
            return call
        return call._replace(adapter_ids=checked_adapter_ids(adapter_ids, call.x.shape[0], self.adapters, self._device))

    def _run(self, call: Call) -> None:
        """Write the outputs of ``call``, as one operation where torch compiles."""
        if not torch.compiler.is_compiling():
            uncompiled_call()(self._executor.run, call)
            return
        refuse_gradients(self.gate, self.shared, self.latent)
        if call.shared_out is None:
            torch.ops.collegium.moe_layer(*call[:-2], self.handle, call.out)
        else:
            torch.ops.collegium.moe_layer_apart(*call[:-2], self.handle, [call.out, call.shared_out])

    def _require_resident(self, call: str) -> None:
        """Raise InputError for a layer whose experts are not all on the GPU."""
        slots = self.plan.problem.gpu_slots
        if slots is not None:
            raise InputError(
                f"{call}: {slots} of {self.spec.num_experts} experts are on the GPU (Limits(gpu_bytes=...)), allowed: "
                "layers with all of them there. Load the layer without gpu_bytes, or call forward"
            )

    def _check_width(self) -> None:
        """Raise InputError where the routed sums have another width than x, so that nothing can be added."""
        if self.routed_size != self.spec.hidden_size:
            raise InputError(
                f"forward: latent is a function, so the routed sums have width {self.routed_size}, and x has "
                f"{self.spec.hidden_size}; call shared_and_routed and project the sums, or pass LatentWeights"
            )

    def route(
        self,
        x: Tensor,
        *,
        router_logits: Tensor | None = None,
        token_ids: Tensor | None = None,
        router_input: Tensor | None = None,
    ) -> Routing:
        """Return the experts that ``forward`` chooses for the same arguments, and their weights.

        ``layer(x, routing=layer.route(x))`` has the bits of ``layer(x)``, so a routing can be stored, changed and
        passed again. A token whose row is NaN has ids of -2. Raises the errors of ``forward``.
        """
        check_input(x, None, self.plan.problem, self._device)
        call = checked_call(
            self.spec,
            self._device,
            x,
            router_logits=router_logits,
            token_ids=token_ids,
            router_input=router_input,
        )
        router = self._executor.router
        if call.needs_router:
            router.check_usable(call.router_input)
        with autocast_disabled(x.device):
            return router(call)

    def run_quantized(
        self,
        x: Tensor,
        scale: Tensor,
        routing: Routing,
        *,
        middle_scale: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the layer's output ``[T, D]`` for tokens that the caller has quantised, in the output dtype.

        x: ``[T, D]`` float8_e4m3fn. scale: one number, or one per token ``[T]`` or ``[T, 1]``, or one per group of
        columns ``[T, G]``, as the plan's activation format has them (``fp8_token`` and ``fp8_static``: one per token or
        for all; ``fp8_group128``: one for 128 columns); a token is ``x * scale``. routing: chosen experts and weights.
        The experts multiply the codes as they are; rows between the products are quantised by the plan's format, with
        the scales ``middle_scale`` where passed: as scale, one per token or per group, for all experts of a token
        (not with ``fp8_static``). A shared expert gets ``x * scale`` rounded to the input dtype. The memory is fresh,
        and ``torch.compile`` does not trace the call. Raises InputError as ``forward`` does, for layers over
        ranks that exchange tokens, for latent layers and for router weights on the input.
        """
        self._require_resident("run_quantized")
        problem = self.plan.problem
        check_tensors(self._device, x=x, topk_ids=routing.topk_ids, topk_weights=routing.topk_weights)
        if x.dtype != torch.float8_e4m3fn or self.latent is not None:
            layer = "a latent layer, which projects tokens first" if self.latent is not None else "any layer"
            raise InputError(f"run_quantized: x is {x.dtype}, for {layer}; allowed: float8_e4m3fn without latent_size")
        check_quantized(x, self.dispatcher, self.spec.hidden_size, weight_on_input=self.spec.routing.weight_on_input)
        scale = code_scales("run_quantized", self.plan.activation_format, x, scale)
        middle = self._middle_scales("run_quantized", x, middle_scale)
        call = Call(x, topk_ids=routing.topk_ids, topk_weights=routing.topk_weights, out=output_for(x, out, problem))
        self._executor.note_capture()
        with autocast_disabled(x.device):
            uncompiled_call()(self._run_quantized, call, scale, middle)
        assert call.out is not None
        return call.out

    def _middle_scales(self, caller: str, x: Tensor, scale: Tensor | None) -> Tensor | None:
        """Return the given scales ``[..., G]`` of the rows between the products; raises InputError for others."""
        if scale is None:
            return None
        name, columns = self.plan.activation_format, self.plan.problem.routed.intermediate
        if activation_format(name).static:
            raise InputError(
                f"{caller}: middle_scale {tuple(scale.shape)} was passed, and {name} has calibrated scales; allowed: "
                "layers planned for fp8_token or fp8_group128"
            )
        return code_scales(f"{caller}, middle_scale", name, x, scale, columns=columns)

    def _run_quantized(self, call: Call, scale: Tensor, middle_scale: Tensor | None) -> None:
        """Write ``call.out`` for codes ``call.x [T, D]`` with scales ``[T, G]``, ``max_tokens`` tokens at a time."""
        merged = self.plan.merged_shared_experts
        routing = append_shared_experts(self._executor.router(call), self.spec.num_experts, merged, None)
        step = self.plan.problem.limits.max_tokens
        for start in range(0, call.x.shape[0], step):
            rows = slice(start, start + step)
            chunk_routing = Routing(topk_ids=routing.topk_ids[rows], topk_weights=routing.topk_weights[rows])
            middle = None if middle_scale is None else middle_scale[rows]
            self._run_quantized_chunk(call.chunk(rows, chunk_routing), (scale[rows], middle), chunk_routing)

    def _run_quantized_chunk(self, call: Call, scales: tuple[Tensor, Tensor | None], routing: Routing) -> None:
        assert call.out is not None
        assert isinstance(self.dispatcher, Local | Partial)
        dtype = DTYPES[self.plan.problem.dtype]
        shared = None
        if self.shared is not None:
            shared = self.shared(dequantized(self.plan.activation_format, call.x, scales[0]).to(dtype))
        run_quantized(
            self.experts,
            self.dispatcher,
            (call.x, scales[0], dtype),
            routing,
            call.out,
            middle_scale=scales[1],
            after_expert=self.after_expert,
            shared=shared,
        )

    def run_batched(
        self,
        x: Tensor,
        counts: Tensor,
        *,
        scale: Tensor | None = None,
        middle_scale: Tensor | None = None,
        out: Tensor | None = None,
        expected: int | None = None,
    ) -> Tensor:
        """Return ``[E, M, H]``: the output of this rank's E experts for rows that are already packed by expert.

        Low-latency dispatchers of serving engines send rows in this form. x: ``[E, M, H]`` in the layer's input dtype,
        H the experts' width; the result has the output dtype. counts: ``[E]`` int32 or int64 on x's device; the first
        ``counts[e]`` rows of ``x[e]`` are for expert e. Counts are clamped to 0..M; a checked layer raises RoutingError
        for others. Rows past ``counts`` are ignored, and the matching rows of ``out`` are left untouched. expected: the
        likely total number of rows, which decides tiles and no bit; None: E * M. scale: of rows that the caller has
        quantised, x is then float8_e4m3fn: one number, ``[E, 1, 1]``, ``[E, M]``, ``[E, M, 1]`` or ``[E, M, G]``, as in
        ``run_quantized``; middle_scale too, only with scale. Nothing is routed, weighted or sent, and neither shared
        expert nor latent projection takes part. The memory is fresh; only the kernel ``reference`` waits for the
        device. Raises InputError as ``forward`` does.
        """
        self._require_resident("run_batched")
        problem = self.plan.problem
        check_batched(x, counts, problem.routed, self._device, quantized=scale is not None, checked=self.checked)
        codes = None
        if scale is not None:
            given = code_scales("run_batched", self.plan.activation_format, x, scale)
            codes = given, DTYPES[problem.dtype], self._middle_scales("run_batched", x, middle_scale)
        elif middle_scale is not None:
            raise InputError("run_batched: middle_scale was passed without scale; allowed: both, for float8_e4m3fn x")
        out = output_for(x, out, self.plan.problem)
        self._executor.note_capture()
        run = partial(
            run_batched,
            codes=codes,
            expected=expected,
            after_expert=self.after_expert,
            merged_shared_experts=self.plan.merged_shared_experts,
        )
        with autocast_disabled(x.device):
            uncompiled_call()(run, self.experts, x, counts, out)
        return out

    def warm_up(self, progress: Callable[[int, int, str], None] | None = None) -> int:
        """Compile every kernel variant that 1 to ``max_tokens`` tokens can need, and no other.

        Ranks that share the experts warm up the same layers in the same order. Returns the number of batches of zeros
        that were run; 0 for a kernel that compiles nothing. progress: called with (done, total, text).
        """
        sizes = sizes_for(self.variants, self.plan.problem.limits.max_tokens)
        for group in self.plan.groups:
            # A rank with fewer experts may need other batches; all ranks run the batches of all ranks.
            rank_sizes = rendezvous_of(group).exchange(sizes, "warm_up")
            sizes = sorted(set().union(*rank_sizes))
        # One thread where ranks wait for each other, since several would call in a different order on each rank, and
        # for modules of the caller, which may not be made for more.
        threads = 1 if self.plan.groups or self.caller_modules else 8
        pipeline = self._executor.pipeline_for(1)
        if isinstance(pipeline, Paged):
            # Passes of such a layer run one after the other; what they compile for long does not have to.
            compile_batches(partial(self._compile_slots, pipeline), sizes, self._device, threads=threads)
        return compile_batches(partial(run_all_paths, self), sizes, self._device, progress, threads=threads)

    def _compile_slots(self, pipeline: Paged, tokens: int) -> None:
        pipeline.compile(torch.zeros(tokens, self.spec.expert_hidden_size, dtype=self.input_dtype, device=self._device))

    def check(self) -> None:
        """Raise the errors that a replayed CUDA graph could only record; waits for the device.

        InputError on every rank where a token found no room (``all_to_all_fixed``; all ranks call it together), and
        RankError where a rank did not respond and outputs have been NaN since (``symm_mem``). Other errors are raised
        by the call itself.
        """
        self.dispatcher.check()

    def variants(self, tokens: int) -> frozenset[Hashable]:
        """Return what a batch of ``tokens`` tokens needs compiled; equal members are compiled once."""
        routed = self._executor.pipeline_for(tokens).variants(tokens)
        if self.adapters is not None:
            routed |= self.experts.tiling.variants_with_adapters(tokens * self.spec.routing.top_k)
        shared = frozenset[Any]() if self.shared is None else self.shared.variants(tokens)
        return frozenset({("routed", variant) for variant in routed} | {("shared", variant) for variant in shared})


def _device_of(plan: Plan, weights: ExpertWeights[Payload]) -> torch.device:
    """Return the device of the layer: of its weights, which are on the host where their experts are paged."""
    facts = plan.problem.device
    if plan.paging is None or facts.index is None:
        return weights.down.device
    return torch.device(facts.place)


def _pack(plan: Plan, weights: ExpertWeights[Payload], device: torch.device) -> PackedWeights:
    """Return ``weights`` as the plan's kernel reads them, paged through its slots where not all fit."""
    kernel, problem = kernel_named(plan.kernel), plan.routed_problem.routed
    if plan.paging is None:
        return kernel.pack(weights, problem)
    packed = pack_paged(kernel, weights, problem, plan.paging, device)
    limit, nbytes = plan.problem.limits.gpu_bytes or 0, problem.experts * packed.slot_bytes
    if nbytes > limit:
        raise InputError(
            f"gpu_bytes={limit:,}: {problem.experts} slots of {plan.expert_bytes:,} bytes were planned, and experts "
            f"stored like these take {packed.slot_bytes:,} bytes when packed, {nbytes:,} in all; allowed: up to the "
            "limit. Set gpu_bytes for fewer slots, or convert the experts with weight_format"
        )
    return packed
