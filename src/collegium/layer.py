"""MoELayer: one Mixture-of-Experts layer, planned, packed and ready to be called.

A token is routed, runs through a pipeline (dispatch, experts, combine), and gets the shared expert's output added.
Every choice is in the plan, which is made before the weights are packed.
"""

import operator
import sys
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from . import pipelines
from .encoding import as_payloads
from .errors import InputError
from .experts import PackedWeights
from .experts.measured import with_measured_tiles
from .formats.payload import Payload
from .formats.unquantised import DTYPES
from .ops.route_wide import append_shared_experts
from .parallel import SymmetricDispatcher, wrapped_for
from .parallel.input_check import InputCheck, input_check
from .parallel.rendezvous import group_lock, is_known_to_all, rendezvous_of
from .pipelines import Pipeline, PipelineParts
from .pipelines.batched import check_batched, run_batched
from .planning import Plan, dispatcher_named, kernel_named, plan as planned, token_ranges
from .problem import Overrides
from .runtime.devices import plain_torch
from .runtime.memory import FreshMemory, Memory, Workspaces, is_capturing, memory_map, part, shared_workspaces
from .runtime.packed_module import PackedModule, check_tensors, stored_bytes
from .runtime.replay import Replay
from .runtime.side_stream import run_on_side_stream
from .runtime.warm_up import compile_batches, run_all_paths, sizes_for
from .stages.checks import check_extras, check_input, check_rows, check_weights, check_whole, output_for
from .stages.latent import latent_of
from .stages.router import Choose, Router, autocast_disabled, in_float32
from .stages.shared import check_shared_unchanged, pack_shared, resolve_shared
from .types import ExpertWeights, LatentWeights, RouterWeights, Routing, SharedWeights

__all__ = ["MoELayer"]


_disabled: list[Any] = []  # ``operator.call`` that torch does not compile, made when it is first needed


def _uncompiled_call() -> Any:
    """Return ``operator.call``, which torch does not compile in a process that compiles.

    Once a compiled call has raised, torch no longer compiles any layer's ``forward``, and would compile what it calls.
    The compiler takes a second to import; a process that has not done so compiles nothing.
    """
    if "torch._dynamo" not in sys.modules:
        return operator.call
    if not _disabled:
        _disabled.append(torch.compiler.disable(operator.call))
    return _disabled[0]


# Attributes that ``_build`` makes of the others, and what was recorded or captured in one process.
_BUILT = ("dispatcher", "_pipelines", "_places", "_step", "_reaching", "_number", "_input_check", "_replay", "_choice")


def _given(inputs: tuple[Any, ...]) -> tuple[bool, ...]:
    """Return which of logits, routing, token ids and router input a call has."""
    _, logits, topk_ids, _, token_ids, router_input, _ = inputs
    return logits is not None, topk_ids is not None, token_ids is not None, router_input is not None


class MoELayer(PackedModule):
    """One Mixture-of-Experts layer: router, routed experts, shared expert.

    The layer owns packed weights on one device and makes every decision when it is built; ``forward`` only computes.
    ``plan`` says what was chosen, ``print(layer)`` shows it. Inference only. Any number of threads may call a layer, on
    any streams. It can be copied and pickled; it does not move and has no ``state_dict``.
    """

    _captured = False
    packed_names = ("experts", "shared", "router", "latent")

    @plain_torch()
    def __init__(
        self,
        weights: ExpertWeights[Payload] | ExpertWeights[Tensor],
        plan: Plan,
        *,
        router: RouterWeights | None = None,
        shared: SharedWeights[Payload] | SharedWeights[Tensor] | None = None,
        latent: LatentWeights | None = None,
        choose: Choose | None = None,
        after_expert: Callable[[Tensor], Tensor] | None = None,
        checked: bool = False,
    ) -> None:
        """Pack ``weights``, this rank's experts in the order of the plan's placement, for the kernel of ``plan``.

        weights: payloads, or plain tensors in the shapes of ``expert_weights``.
        router: needed unless every call brings logits or a routing; it works in float32, in a copy made here of a
        weight and a bias of another dtype. shared, latent: as the spec says.
        choose: a custom routing rule, ``choose(x [T, D], logits [T, E], top_k) -> (topk_ids, topk_weights)``, integers
        and floating numbers ``[T, K]``, or a ``Routing``; it replaces the spec's rule, and what it returns is checked
        like any other routing. logits are None where the layer has no router and the call brings none.
        after_expert: applied to the rows ``[R, H]`` the experts return, row by row, before they are weighted.
        checked: raise RoutingError on NaN logits, biases or weights, out-of-range and repeated ids instead of NaN rows;
        this reads the device once a call. Over ranks they also compare the inputs of every pass
        (``parallel/input_check.py``), and all raise RankError where one cannot run it; give all ranks the same value.
        Raises InputError when weights and plan disagree. ``workspaces`` lends the memory of a pass on a GPU, to all
        layers of the device; None: every pass takes fresh memory.
        """
        super().__init__()
        problem, spec = plan.problem, plan.problem.spec
        weights = as_payloads(weights)
        shared = None if shared is None else SharedWeights(experts=as_payloads(shared.experts), gate=shared.gate)
        check_weights(weights, problem.routed)
        check_extras(spec, router, shared, latent)
        check_whole(problem, after_expert)
        if shared is not None:
            plan, weights, shared = resolve_shared(plan, weights, shared, after_expert)
            problem = plan.problem
        self.spec = problem.spec
        self.checked, self.choose = checked, choose
        self.router = None if router is None else in_float32(router)
        self.after_expert = after_expert
        self.experts = with_measured_tiles(kernel_named(plan.kernel).pack(weights, plan.inside.routed), problem)
        self.shared = None if shared is None else pack_shared(shared, problem, kernel_named(str(plan.shared_kernel)))
        self.latent = None if latent is None else latent_of(latent, DTYPES[problem.dtype])
        self._device = weights.down.device
        self._replay: Replay  # made by every assignment
        self._choice: Router | None
        self._build(plan)
        self.identify(self._device, DTYPES[problem.dtype])

    def _build(self, plan: Plan) -> None:
        """Make what runs ``self.experts`` as ``plan`` says; all ranks that share the experts do so together."""
        problem = plan.inside
        # split too: for no tokens at all, and for as many as packing finds are better sorted.
        kinds = [kind for kind in pipelines.PIPELINES if kind.name in (*plan.pipelines, "split")]
        row, tiling = wrapped_for(dispatcher_named(plan.dispatcher), problem), self.experts.tiling
        # Packing may have found what the problem could not say.
        self.plan = replace(plan, token_ranges=token_ranges(kinds, row, tiling, problem))
        self.dispatcher = row.build(problem)
        parts = PipelineParts(
            experts=self.experts,
            dispatcher=self.dispatcher,
            top_k=problem.spec.routing.top_k,
            num_experts=len(problem.local_experts),
            after_expert=self.after_expert,
        )
        self._pipelines = tuple((own.max_tokens(tiling, parts.top_k), own.build(parts)) for own in kinds)
        self._places = memory_map(self.plan.regions)
        self._step = None if row.collective else problem.limits.max_tokens
        self._reaching = self.dispatcher if isinstance(self.dispatcher, SymmetricDispatcher) else None
        self._number = 0 if self._reaching is None else self._reaching.register_layer(self._places)
        self.workspaces: Workspaces | Any = self._lender()
        self._input_check = self._comparison()

    def _comparison(self) -> InputCheck | None:
        """Return what compares the inputs of ranks that have to bring the same, None where there are none."""
        number = getattr(self.dispatcher, "number", 0)
        return input_check(self.plan.problem.placement, self.plan.dispatcher, checked=self.checked, layer=number)

    def replan(self, plan: Plan, experts: PackedWeights) -> None:
        """Go on with ``experts``, packed for ``plan``, which differs from the layer's own in its placement alone.

        All ranks of the new placement call it at the same time; what was captured in a CUDA graph before is no good.
        """
        self.__dict__["experts"] = with_measured_tiles(experts, plan.problem)
        self._build(plan)

    @plain_torch()
    def swap(self, weights: ExpertWeights[Payload] | ExpertWeights[Tensor], overrides: Overrides | None = None) -> None:
        """Go on with other routed experts of the same sizes, in the format of ``weights``; all else stays as it is.

        weights: this rank's, in the order of the plan's placement, on the layer's device. overrides: as ``plan``,
        where the
        activation format is the layer's own unless another one is forced; None: the dispatcher stays too. What was
        recorded is forgotten, and code that torch.compile made goes on with the new experts. Old and new ones are
        in memory together for a while. No other thread may be in the layer; ranks that share it swap at the same time.
        Raises InputError for other sizes or another device, where a CUDA graph has captured the layer, and where the
        shared expert is merged or would need another packing; PlanError where nothing runs the format. The layer is
        then unchanged.
        """
        weights = as_payloads(weights)
        old, shared = self.plan.problem, self.plan.problem.spec.shared
        check_weights(weights, replace(old.routed, **weights.formats))
        if self._captured or weights.down.device != self._device:
            raise InputError(
                f"swap: the weights are on {weights.down.device}, the layer is on {self._device}, "
                f"{'captured' if self._captured else 'not captured'} by a CUDA graph; allowed: weights on its device, "
                "for a layer that no graph replays with the experts it has. Load another layer, and capture that"
            )
        spec = replace(old.spec, **weights.formats)
        if shared is not None:
            alone = old.spec.shared_alone()
            kept = replace(shared, weight_format=alone.weight_format, down_format=alone.down_format)
            spec = replace(spec, shared=kept)
        wish = overrides or Overrides(dispatcher=self.plan.dispatcher)
        made = planned(replace(old, spec=spec), replace(wish, shared=wish.shared or self.plan.overrides.shared))
        check_shared_unchanged(self.plan, made)
        self.replan(made, kernel_named(made.kernel).pack(weights, made.problem.routed))
        self.spec = made.problem.spec

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute and forget what was recorded: another layer may start other kernels."""
        if name in ("experts", "after_expert") and "_pipelines" in self.__dict__:
            raise InputError(
                f"{name}: a layer's passes are built from it and would go on with the old one; other experts are for "
                "swap(weights), another function is for another layer"
            )
        super().__setattr__(name, value)
        self.__dict__["_replay"] = Replay()
        self.__dict__["_choice"] = None
        if name == "checked" and "_pipelines" in self.__dict__:
            self.__dict__["_input_check"] = self._comparison()

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: weights, plan and options; what runs them is built anew.

        Raises InputError for a layer over ranks.
        """
        if self.plan.groups:
            raise InputError(
                f"a layer over ranks cannot be pickled ({self.plan.problem.placement}): it needs the process groups of "
                "this process, and every rank holds another part. Load it in each process with device=Ranks.of(...)"
            )
        state = super().__getstate__()
        for name in _BUILT:
            state.pop(name)
        state.pop("_captured", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied layer, or build what runs an unpickled one."""
        super().__setstate__(state)
        if "_pipelines" not in self.__dict__:
            workspaces = self.__dict__.pop("workspaces")
            self._build(self.plan)
            self.workspaces = workspaces

    def _lender(self) -> Workspaces | Any:
        """Return what lends the memory of passes: the dispatcher, this device, or nobody."""
        if self._reaching is not None:
            return self._reaching.blocks
        on_gpu = self._device.type == "cuda" and self.plan.capturable
        return shared_workspaces(self._device, self._places.nbytes) if on_gpu else None

    @property
    def nbytes(self) -> int:
        """Bytes of the packed experts, the shared expert, the router and the latent projections on this rank."""
        return stored_bytes(self.experts, self.shared, self.router, self.latent)

    def extra_repr(self) -> str:
        """Show the plan, and what only packing knows."""
        return self.plan.explain() + self.experts.summary(self.plan.activation_format)

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
        of fresh memory. Raises InputError on shapes, dtypes, devices and where a gradient is asked for, RoutingError
        in checked mode, and RankError on every rank where ranks that need the same inputs have different ones.
        """
        given = router_logits, routing, token_ids, router_input
        if not torch.compiler.is_compiling():
            return self._eager(x, given, out)
        inputs = self._inputs(x, *given)
        out = output_for(x, out)
        torch.ops.collegium.moe_layer(*inputs, self.handle, out.view(-1, self.spec.hidden_size))
        return out

    def _eager(self, x: Tensor, given: tuple[Any, Any, Any, Any], out: Tensor | None) -> Tensor:
        try:
            inputs = self._inputs(x, *given)
            out = output_for(x, out)
        except Exception as error:
            try:
                self._refused(x, given, error)
            finally:
                self._compare_next(error)
            raise
        _uncompiled_call()(self.compute, *inputs, out.view(-1, self.spec.hidden_size))
        return out

    def route(
        self,
        x: Tensor,
        *,
        router_logits: Tensor | None = None,
        token_ids: Tensor | None = None,
        router_input: Tensor | None = None,
    ) -> Routing:
        """Return the experts that ``forward`` chooses for the same arguments, and their weights.

        ``layer(x, routing=layer.route(x))`` has the bits of ``layer(x)``, so what was chosen can be kept, changed and
        given again. A token whose row is NaN has ids of -2. Raises what ``forward`` does.
        """
        inputs = self._inputs(x, router_logits, None, token_ids, router_input)
        if router_logits is None:
            self._router.check_own(inputs[-1])
        with autocast_disabled(x.device):
            return self._router(*inputs)

    def _inputs(
        self, x: Tensor, logits: Tensor | None, routing: Routing | None, token_ids: Tensor | None, own: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Return what a router is called with, in rows, once it is what the plan describes. own: ``router_input``."""
        check_input(x, routing, self.plan.problem, self._device)
        if logits is not None and routing is not None:
            raise InputError("router_logits and routing were given, which choose experts each; give one of them")
        ids, weights = (None, None) if routing is None else (routing.topk_ids, routing.topk_weights)
        if logits is not None or own is not None:
            given, other = x if logits is None else logits, x if own is None else own
            check_tensors(self._device, router_logits=given, router_input=other)
        wide, seen = self.spec.hidden_size, None
        if own is not None and routing is None and logits is None:
            seen = own.reshape(-1, wide)
            check_rows("router_input", seen, (x.numel() // wide, wide))
        return x if x.dim() == 2 else x.reshape(-1, wide), logits, ids, weights, token_ids, seen

    def run_batched(
        self, x: Tensor, counts: Tensor, *, out: Tensor | None = None, expected: int | None = None
    ) -> Tensor:
        """Return ``[E, M, H]``: what this rank's E experts make of rows that are packed by expert already.

        As low-latency dispatchers of serving engines bring them. x: ``[E, M, H]`` in the layer's dtype, H the width
        that experts read. counts: ``[E]`` int32 or int64 on x's device; the first ``counts[e]`` rows of ``x[e]`` are
        expert e's; a count beyond M is M, one below 0 is 0, and a checked layer raises RoutingError for both. What rows
        beyond hold does not matter, and theirs in ``out`` are not written. expected: how many rows there are likely to
        be in all, which decides tiles and no bit; None: all there is room for. The rows are those of the experts alone:
        nothing is routed, weighted or sent, and no shared expert or latent projection takes part. The memory is fresh;
        nothing waits for the device but the kernel ``reference``. Raises InputError as ``forward`` does.
        """
        check_batched(x, counts, self.plan.problem.routed, self._device, checked=self.checked)
        out = output_for(x, out)
        self._capturing()
        with autocast_disabled(x.device):
            more = {"expected": expected, "after_expert": self.after_expert, "merged": self.plan.merged}
            _uncompiled_call()(run_batched, self.experts, x, counts, out, **more)
        return out

    def warm_up(self, progress: Callable[[int, int, str], None] | None = None) -> int:
        """Compile every kernel variant that 1 to ``max_tokens`` tokens can reach, and no other.

        Where several ranks share the experts, all warm up the same layers in the same order. Returns the number of
        batches of zeros it ran; 0 for a kernel that compiles nothing. progress: called with (done, total, text).
        """
        sizes = sizes_for(self.variants, self.plan.problem.limits.max_tokens)
        for group in self.plan.groups:
            # A rank with fewer experts may need other batches; each is run by all ranks.
            found = rendezvous_of(group).exchange(sizes, "warm_up")
            sizes = sorted({size for own in found for size in own})
        # One by one where ranks wait for each other: threads would call in another order on each.
        threads = 1 if self.plan.groups else 8
        return compile_batches(partial(run_all_paths, self), sizes, self._device, progress, threads=threads)

    def check(self) -> None:
        """Raise what a replayed CUDA graph could only note; it waits for the device.

        InputError on every rank where a token found no room (``all_to_all_fixed``, all ranks ask at the same time), and
        RankError where a rank did not come and output has been NaN since (``symm_mem``). Other failures are raised by
        the call itself.
        """
        self.dispatcher.check()

    def variants(self, tokens: int) -> frozenset[Hashable]:
        """Return what has to be compiled for a batch of ``tokens`` tokens; equal members are compiled once."""
        shared = frozenset[Any]() if self.shared is None else self.shared.variants(tokens)
        routed = self._pipeline(tokens).variants(tokens)
        return frozenset({("routed", own) for own in routed} | {("shared", own) for own in shared})

    def compute(
        self,
        x: Tensor,
        router_logits: Tensor | None,
        topk_ids: Tensor | None,
        topk_weights: Tensor | None,
        token_ids: Tensor | None,
        router_input: Tensor | None,
        out: Tensor,
        memory: Memory | None = None,
    ) -> None:
        """Write ``out [T, D]`` for ``x [T, D]``: ``forward`` after its checks, in passes of ``max_tokens`` rows.

        memory: where buffers come from, instead of one of ``workspaces``.
        """
        inputs = (x, router_logits, topk_ids, topk_weights, token_ids, router_input, out)
        try:
            self._compute(inputs, memory)
        except Exception as error:
            self._compare_next(error)
            raise

    def _compare_next(self, error: Exception) -> None:
        """Let this rank compare its next pass after an ``error`` that the other ranks do not know of."""
        if self._input_check is not None and not is_known_to_all(error):
            self._input_check.forget()

    def _compute(self, inputs: tuple[Any, ...], memory: Memory | None) -> None:
        x, _, topk_ids, *_ = inputs
        capturing = self._capturing()
        with group_lock(self.plan.groups), autocast_disabled(x.device):
            if memory is None and not capturing and self._due(inputs):
                x, _, topk_ids, *_ = inputs = self._compared(inputs)
            else:
                self._check_router(inputs)  # before ranks wait for each other
            if memory is not None or self.workspaces is None:
                self._passes(memory, *inputs)
            elif capturing and self._reaching is None:
                self._passes(FreshMemory(self._device), *inputs)
            else:
                space = self.workspaces.acquire()
                try:
                    own, kind = space.memory(self._places), space.number
                    if self._reaching is not None and (self._step is None or x.shape[0] <= self._step):
                        top_k = self.spec.routing.top_k if topk_ids is None else topk_ids.shape[1]
                        kind = kind, self._reaching.sync_pass(own, self._number, x.shape[0], top_k)
                    self._recorded(own, kind, inputs)
                finally:
                    self.workspaces.release(space)

    def _check_router(self, inputs: tuple[Any, ...]) -> None:
        _, logits, topk_ids, topk_weights, _, router_input, _ = inputs
        if logits is None and (topk_ids is None or topk_weights is None):
            self._router.check_own(router_input)

    def _due(self, inputs: tuple[Any, ...]) -> bool:
        """Return whether ranks compare the inputs of this pass."""
        return self._input_check is not None and self._input_check.due(inputs[0].shape[0], _given(inputs))

    def _compared(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return ``inputs`` with the chosen experts in place of what chooses them, once all ranks agree on both."""
        x, logits, topk_ids, topk_weights, token_ids, router_input, out = inputs
        try:
            self._check_router(inputs)
            chosen = self._router(*inputs[:-1])
        except Exception as error:  # a function of the user's may raise anything, and the other ranks wait
            self._meet_inputs(x.shape[0], _given(inputs), error=error)
            raise
        named = {"x": x, "router_logits": logits, "topk_ids": topk_ids, "topk_weights": topk_weights}
        named |= {"token_ids": token_ids, "router_input": router_input}
        if topk_ids is None:
            named |= {"the chosen experts": chosen.topk_ids, "the weights of the chosen experts": chosen.topk_weights}
        self._meet_inputs(x.shape[0], _given(inputs), named, top_k=chosen.topk_ids.shape[1])
        return x, None, chosen.topk_ids, chosen.topk_weights, None, None, out

    def _meet_inputs(
        self,
        tokens: int,
        given: tuple[bool, ...],
        tensors: dict[str, Tensor | None] | None = None,
        *,
        top_k: int | None = None,
        error: Exception | None = None,
    ) -> None:
        """Exchange what ranks bring; raises ``error``, why this one cannot run the pass, once the others know it."""
        check = self._input_check
        assert check is not None
        if self._reaching is not None:
            # First, in the words in which ranks agree on passes: one that calls another layer is noticed at once.
            try:
                most = tokens if self._step is None else min(tokens, self._step)
                self._reaching.sync_call(self._number, most, top_k or self.spec.routing.top_k)
            except InputError as disagreement:
                raise (error or disagreement) from None
        check.compare(tokens, given, tensors, error)

    def _refused(self, x: Any, given: tuple[Any, Any, Any, Any], error: Exception) -> None:
        """Let ranks that wait for this pass know why this one cannot run it, where they compare inputs."""
        if self._input_check is None or is_capturing(self._device):
            return
        logits, routing, token_ids, own = (each is not None for each in given)
        tokens = prod(x.shape[:-1]) if isinstance(x, Tensor) else 0
        present = logits, routing, token_ids, own and not logits and not routing
        with group_lock(self.plan.groups):
            if self._input_check.due(tokens, present):
                self._meet_inputs(tokens, present, error=error)

    def _capturing(self) -> bool:
        """Return whether a CUDA graph captures this call; if so, it keeps the addresses of the experts."""
        found = is_capturing(self._device)
        if found:
            self.__dict__["_captured"] = True
        return found

    def _recorded(self, memory: Memory, kind: Hashable, inputs: tuple[Any, ...]) -> None:
        # User callbacks may launch work that the recorder cannot see; a graph records by itself.
        own = self.choose is None and self.after_expert is None
        # On a CPU torch alone exchanges with peers.
        own = own and (self._reaching is None or self._device.type == "cuda") and not is_capturing(self._device)
        again = partial(self._replay, partial(self._passes, memory), memory=kind)
        if own and inputs[0].shape[0] <= self.plan.problem.limits.max_tokens:
            again(inputs)
        else:
            # Passes of one batch are of one kind. Ranks that reach each other, and who checks ids, do more for each.
            own = own and self._reaching is None and not self.checked
            self._passes(memory, *inputs, each=again if own else None)

    def _passes(self, memory: Memory | None, *inputs: Any, each: Callable[[Any], None] | None = None) -> None:
        x, out = inputs[0], inputs[-1]
        tokens, step = x.shape[0], self._step
        if tokens > self.plan.problem.limits.max_tokens and step is None:
            memory = None  # it has no room for them, and the dispatcher refuses them on every rank
        if step is None or tokens <= step:
            self._tokens(x, partial(self._router, *inputs[:-1], memory=memory), out, memory)
            return
        # The routing of all passes at once is more than the memory of one.
        chosen = self._router(*inputs[:-1])
        for start in range(0, tokens, step):
            span = slice(start, min(start + step, tokens))
            own = replace(chosen, topk_ids=chosen.topk_ids[span], topk_weights=chosen.topk_weights[span])
            if each is not None:
                each((x[span], None, own.topk_ids, own.topk_weights, None, None, out[span]))
                continue
            if self._reaching is not None and memory is not None:
                self._reaching.sync_pass(memory, self._number, *own.topk_ids.shape)
            self._tokens(x[span], lambda own=own: own, out[span], memory)

    def _tokens(self, x: Tensor, route: Callable[[], Routing], out: Tensor, memory: Memory | None) -> None:
        # Where ranks call together the dispatcher refuses too many tokens, on every rank.
        many = x.shape[0] > self.plan.problem.limits.max_tokens
        shared = None if self.shared is None or many else partial(self.shared, x, memory)
        if shared is not None and x.shape[0] <= self.plan.beside and is_capturing(self._device):
            # Only here: eagerly the waits of two streams cost the host more than they bring.
            shared = run_on_side_stream(shared, self._device)
        routing = append_shared_experts(route(), self.spec.num_experts, self.plan.merged, part(memory, "routing"))
        pipeline = self._pipeline(x.shape[0])
        if self.latent is None:
            pipeline(x, routing, memory, dtype=x.dtype, shared=shared, out=out)
            return
        own = part(memory, "latent")
        rows = pipeline(self.latent.enter(x, own), routing, memory, dtype=torch.float32)
        self.latent.leave(rows, None if shared is None else shared(), out, own)

    def _pipeline(self, tokens: int) -> Pipeline:
        return next(own for most, own in self._pipelines if most is None or 0 < tokens <= most)

    @property
    def _router(self) -> Router:
        if self._choice is None:
            made = Router(spec=self.spec, weights=self.router, choose=self.choose, checked=self.checked)
            self.__dict__["_choice"] = made
            return made
        return self._choice
