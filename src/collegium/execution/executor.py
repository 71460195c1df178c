"""Running a call: compare it between ranks, borrow a workspace, split it into chunks, replay recorded launches.

``Executor.run_pass`` is the pass itself; everything else decides in which memory and how often it runs.
"""

from collections.abc import Callable, Generator, Hashable
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from ..adapters import PackedAdapters, TokenAdapters
from ..errors import RoutingError
from ..formats.unquantised import DTYPES
from ..ops.route_wide import append_shared_experts
from ..parallel.input_check import InputCheck
from ..parallel.rendezvous import group_lock
from ..pipelines import Pipeline
from ..runtime.memory import FreshMemory, Memory, Workspace, Workspaces, is_capturing, part
from ..runtime.replay import Replay
from ..runtime.side_stream import run_on_side_stream
from ..stages.call import Call, PassedInputs
from ..stages.latent import Latent
from ..stages.modules import InputTransform, SharedModule
from ..stages.router import Router, autocast_disabled
from ..stages.shared import SharedExpert
from ..types import Routing
from .context import ExecutionContext
from .input_comparison import InputComparison

__all__ = ["Executor"]


class Executor:
    """Runs the calls of one layer with one set of options; for other options the layer creates another executor.

    Any number of threads may call it. captured: whether a CUDA graph has captured a call. comparison: None where ranks
    need not have the same inputs.
    """

    def __init__(
        self,
        context: ExecutionContext,
        *,
        router: Router,
        shared: SharedExpert | SharedModule | None,
        latent: Latent | InputTransform | None,
        adapters: PackedAdapters | None,
        workspaces: Workspaces | None,
        input_check: InputCheck | None,
    ) -> None:
        problem = context.plan.problem
        self.router = router
        self.pipelines = context.pipelines
        self.workspaces = workspaces
        self.comparison = None if input_check is None else InputComparison(input_check, context)
        self.replay = Replay()
        self.captured = False
        self._shared = shared
        self._latent = latent
        self._adapters = adapters
        self._device = context.device
        self._groups = context.plan.groups
        self._handshake = context.handshake
        self._pass_order = context.pass_order
        self._memory_map = context.memory_map
        self._top_k = problem.spec.routing.top_k
        self._num_experts = problem.spec.num_experts
        self._merged_shared_experts = context.plan.merged_shared_experts
        self._side_stream_tokens = context.plan.side_stream_tokens
        self._max_tokens = problem.limits.max_tokens
        self._out_dtype = DTYPES[problem.output_dtype]
        self._chunk_tokens = context.chunk_tokens
        symmetric = context.handshake.symmetric
        # The launches of a user's function are not recorded, nor what torch exchanges with other ranks on a CPU.
        functions = (router.choose, router.module, context.after_expert)
        user_code = any(function is not None for function in functions)
        user_code = user_code or isinstance(shared, SharedModule) or isinstance(latent, InputTransform)
        self._records = not user_code and (not symmetric or self._device.type == "cuda")
        # Checked ids are read on the host for each chunk.
        self._records_chunks = self._records and not symmetric and not router.checked

    def run(self, call: Call, memory: Memory | None = None) -> None:
        """Write ``call.out``. memory: where buffers are allocated; None: in a workspace, if the layer has any.

        Raises the errors of ``MoELayer.forward`` that depend on the values of tensors or on other ranks.
        """
        tokens = call.x.shape[0]
        capturing = self.note_capture()
        workspace = None
        try:
            order = nullcontext() if self._pass_order is None else self._pass_order.turn()
            with group_lock(self._groups), order, autocast_disabled(self._device):
                call = self._prepared(call, compare=memory is None and not capturing)
                if memory is None and self.workspaces is not None:
                    if capturing and not self._handshake.symmetric:
                        memory = FreshMemory(self._device)
                    else:
                        workspace = self.workspaces.acquire()
                        memory = workspace.memory(self._memory_map)
                in_chunks = self._chunk_tokens is not None and tokens > self._chunk_tokens
                recordable = self._records_chunks if in_chunks else self._records and tokens <= self._max_tokens
                passes = self._chunks(call) if in_chunks else [(call, None)]
                for one_pass, routing in passes:
                    key = self._pass_key(one_pass, memory, workspace)
                    if key is not None and recordable and not capturing:
                        self.replay(partial(self.run_pass, memory=memory), one_pass, key)
                    else:
                        self.run_pass(one_pass, memory, routing)
        except Exception as error:
            if self.comparison is not None:
                self.comparison.note_error(error)
            raise
        finally:
            if workspace is not None and self.workspaces is not None:
                self.workspaces.release(workspace)

    def _prepared(self, call: Call, *, compare: bool) -> Call:
        """Return ``call`` once the ranks agree on its inputs, and raise InputError for a router that cannot run.

        A checked layer raises RoutingError for ids that are no adapter.
        """
        if self.router.checked and call.adapter_ids is not None and self._adapters is not None:
            _check_adapter_ids(call.adapter_ids, self._adapters)
        if compare and self.comparison is not None and self.comparison.is_due(call):
            return self.comparison.agreed(call, self.router)
        if call.needs_router:
            self.router.check_usable(call.router_input)  # before ranks wait for each other
        return call

    def _chunks(self, call: Call) -> Generator[tuple[Call, Routing]]:
        """Route the whole batch, then yield chunks of ``max_tokens`` tokens, each with its routing."""
        # Without memory: the routing of the batch is larger than that of one pass.
        routing = self.router(call)
        tokens, step = call.x.shape[0], self._max_tokens
        for start in range(0, tokens, step):
            rows = slice(start, min(start + step, tokens))
            chunk_routing = Routing(topk_ids=routing.topk_ids[rows], topk_weights=routing.topk_weights[rows])
            yield call.chunk(rows, chunk_routing), chunk_routing

    def _pass_key(self, call: Call, memory: Memory | None, workspace: Workspace | None) -> tuple[int, Hashable] | None:
        """Return the key of a pass's recorded launches, once the ranks agree on the pass; None without a workspace."""
        if workspace is None or memory is None:
            return None
        top_k = self._top_k if call.topk_ids is None else call.topk_ids.shape[1]
        return workspace.number, self._handshake.sync_pass(memory, call.x.shape[0], top_k)

    def run_pass(self, call: Call, memory: Memory | None, routing: Routing | None = None) -> None:
        """Run one pass: route, dispatch, experts, shared expert, combine. routing: None: the router chooses it.

        x and out are ``[T, D]``, ids and weights of the routing ``[T, K]``, rows of the experts ``[T, H]``.
        """
        x, out = call.x, call.out
        assert out is not None
        if x.shape[0] > self._max_tokens:
            memory = None  # it has no room for the batch; the dispatcher refuses it on every rank
        shared = self._shared_expert(call, memory)
        if routing is None:
            routing = self.router(call, memory)
        # K becomes K + merged shared experts.
        routing = append_shared_experts(
            routing, self._num_experts, self._merged_shared_experts, part(memory, "routing")
        )
        adapters = None
        if call.adapter_ids is not None and self._adapters is not None:
            adapters = TokenAdapters(packed=self._adapters, ids=call.adapter_ids)
        pipeline = self.pipeline_for(x.shape[0])
        latent = self._latent
        if not isinstance(latent, Latent):
            rows = x if latent is None else latent(x)  # [T, H]
            pipeline(rows, routing, memory, dtype=self._out_dtype, shared=shared, out=out, adapters=adapters)
            return
        latent_memory = part(memory, "latent")
        latent_x = latent.enter(x, latent_memory)  # [T, H]
        rows = pipeline(latent_x, routing, memory, dtype=torch.float32, adapters=adapters)  # [T, H]
        latent.leave(rows, None if shared is None else shared(), out, latent_memory)

    def _shared_expert(self, call: Call, memory: Memory | None) -> Callable[[], Tensor | None] | None:
        """Return what computes the shared expert's rows ``[T, D]`` or writes them, None where nothing is to be added.

        On a side stream it has started already.
        """
        tokens = call.x.shape[0]
        if self._shared is None or tokens > self._max_tokens:
            return None
        compute: Callable[[], Tensor] = partial(self._shared, call.x, memory)
        # Not outside a graph: for the host, the waits of two streams cost more than the overlap saves.
        if tokens <= self._side_stream_tokens and is_capturing(self._device):
            compute = run_on_side_stream(compute, self._device)
        return compute if call.shared_out is None else partial(_store, compute, call.shared_out)

    def report_refusal(self, x: object, optional: tuple[object, object, object, object], error: Exception) -> None:
        """Inform the other ranks, where they compare this call, that its inputs were refused with ``error``.

        optional: router logits, routing, token ids and router input as they were passed.
        """
        if self.comparison is not None:
            passed = PassedInputs(*(value is not None for value in optional))
            self.comparison.report_refusal(x, passed, error)

    def pipeline_for(self, tokens: int) -> Pipeline:
        """Return the pipeline that runs a batch of ``tokens`` tokens."""
        return next(
            pipeline for max_tokens, pipeline in self.pipelines if max_tokens is None or 0 < tokens <= max_tokens
        )

    def note_capture(self) -> bool:
        """Return whether a CUDA graph captures the current stream, and remember it if so."""
        capturing = is_capturing(self._device)
        if capturing:
            self.captured = True
        return capturing


def _check_adapter_ids(ids: Tensor, adapters: PackedAdapters) -> None:
    if bool(((ids < -1) | (ids >= adapters.count)).any()):
        raise RoutingError(
            f"adapter_ids range from {int(ids.min())} to {int(ids.max())}, allowed: -1 (none) to {adapters.count - 1}; "
            f"the layer's adapters are {', '.join(adapters.names)}"
        )


def _store(compute: Callable[[], Tensor], out: Tensor) -> None:
    """Write what ``compute`` returns to ``out``."""
    out.copy_(compute())
