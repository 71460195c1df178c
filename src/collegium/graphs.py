"""CUDA graphs of a layer for fixed numbers of tokens, and replays that pad a batch to the next of them.

An engine captures its layers once for a list of budgets. A call of n tokens replays the graph of the smallest budget
that holds them. The rows beyond n have expert ids of -1, so no expert's weights are read for them. Every graph has one
set of input and output buffers, which layers of the same sizes share, and one memory pool for everything between.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from .errors import InputError
from .formats.unquantised import DTYPES
from .layer import MoELayer
from .runtime.devices import current_device, recording
from .stages.checks import output_for
from .types import Routing

__all__ = ["BUDGETS", "GraphRunner", "ModelGraphs", "RoutingInput", "capture", "capture_all", "capture_model"]

BUDGETS = tuple(1 << power for power in range(14))  # 1 to 8,192 tokens

RoutingInput = Literal["router", "router_logits", "routing"]
_ID_DTYPE = torch.int64


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    """What the buffers of a layer follow from; layers with equal sizes share them."""

    device: torch.device
    dtype: torch.dtype
    out_dtype: torch.dtype
    hidden_size: int
    num_experts: int
    top_k: int
    routing_input: RoutingInput
    has_token_ids: bool
    has_router_input: bool
    has_adapter_ids: bool
    max_tokens: int

    @staticmethod
    def of(
        layer: MoELayer, routing_input: RoutingInput, *, router_input: bool, adapter_ids: bool, max_tokens: int
    ) -> _Sizes:
        problem = layer.plan.problem
        rule = layer.spec.routing
        return _Sizes(
            device=layer.device,
            dtype=DTYPES[problem.dtype],
            out_dtype=layer.output_dtype,
            hidden_size=layer.spec.hidden_size,
            num_experts=layer.spec.num_experts,
            top_k=rule.top_k,
            routing_input=routing_input,
            has_token_ids=rule.hash_routing and routing_input != "routing",
            has_router_input=router_input,
            has_adapter_ids=adapter_ids,
            max_tokens=max_tokens,
        )


@dataclass(kw_only=True, slots=True)
class _Buffers:
    """Inputs and output at fixed addresses, of ``max_tokens`` rows; None where the captured calls have no such input.

    live: ``[]`` int64, how many rows are tokens, for calls whose routing is computed in the graph. index: ``[T, 1]``.
    idle: recorded after every replay, so that a replay on another stream waits before it overwrites the inputs.
    """

    x: Tensor
    out: Tensor
    router_logits: Tensor | None = None
    topk_ids: Tensor | None = None
    topk_weights: Tensor | None = None
    token_ids: Tensor | None = None
    router_input: Tensor | None = None
    adapter_ids: Tensor | None = None
    live: Tensor
    index: Tensor
    lock: threading.Lock = field(default_factory=threading.Lock)
    idle: torch.cuda.Event | None = None

    @staticmethod
    def allocate(sizes: _Sizes) -> _Buffers:
        rows, device = sizes.max_tokens, sizes.device
        zeros = partial(torch.zeros, device=device)
        passes_routing = sizes.routing_input == "routing"
        logits = zeros(rows, sizes.num_experts, dtype=torch.float32)
        return _Buffers(
            x=zeros(rows, sizes.hidden_size, dtype=sizes.dtype),
            out=zeros(rows, sizes.hidden_size, dtype=sizes.out_dtype),
            router_logits=logits if sizes.routing_input == "router_logits" else None,
            topk_ids=torch.full((rows, sizes.top_k), -1, dtype=_ID_DTYPE, device=device) if passes_routing else None,
            topk_weights=zeros(rows, sizes.top_k, dtype=torch.float32) if passes_routing else None,
            token_ids=zeros(rows, dtype=_ID_DTYPE) if sizes.has_token_ids else None,
            router_input=zeros(rows, sizes.hidden_size, dtype=sizes.dtype) if sizes.has_router_input else None,
            adapter_ids=zeros(rows, dtype=_ID_DTYPE) if sizes.has_adapter_ids else None,
            live=zeros((), dtype=torch.int64),
            index=torch.arange(rows, device=device)[:, None],
            idle=torch.cuda.Event() if device.type == "cuda" else None,
        )

    def write(self, name: str, value: Tensor | None) -> None:
        """Copy an input of a call to its buffer; raises InputError where the capture has, or lacks, this input."""
        buffer: Tensor | None = getattr(self, name)
        if (value is None) != (buffer is None):
            captured = "without" if buffer is None else "with"
            raise InputError(
                f"graphs: {name} {'missing' if value is None else 'passed'}; the layer was captured {captured} it. "
                "Pass the inputs of the capture, or capture again with these"
            )
        if value is None or buffer is None:
            return
        rows = value.reshape(-1, *buffer.shape[1:])
        buffer[: rows.shape[0]].copy_(rows)


class GraphRunner:
    """One layer's CUDA graphs; call it like the layer.

    The output has the bits of ``layer(x)`` for the padded batch. On a CPU, which has no graphs, the same padded calls
    run eagerly. Any number of threads and streams may call it; calls that share buffers run one after the other.
    Options that are set on the layer after the capture have no effect on the graphs.
    """

    def __init__(self, layer: MoELayer, budgets: Sequence[int], sizes: _Sizes, buffers: _Buffers) -> None:
        self.layer = layer
        self.budgets = tuple(sorted(budgets))
        self._sizes = sizes
        self._buffers = buffers
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def __repr__(self) -> str:
        how = "CUDA graphs" if self._graphs else "eager calls: a CPU has no CUDA graphs"
        return f"GraphRunner({len(self.budgets)} budgets up to {self.budgets[-1]:,} tokens, {how})"

    def budget_for(self, tokens: int) -> int:
        """Return the smallest budget for ``tokens`` tokens; raises InputError where none is large enough."""
        position = bisect_left(self.budgets, tokens)
        if position == len(self.budgets):
            raise InputError(
                f"graphs: a batch of {tokens:,} tokens; captured: up to {self.budgets[-1]:,}. Split the batch, call "
                "the layer itself, or capture a larger budget"
            )
        return self.budgets[position]

    def __call__(
        self,
        x: Tensor,
        *,
        router_logits: Tensor | None = None,
        routing: Routing | None = None,
        token_ids: Tensor | None = None,
        router_input: Tensor | None = None,
        adapter_ids: Tensor | None = None,
        out: Tensor | None = None,
        budget: int | None = None,
    ) -> Tensor:
        """Return the layer's output for ``x [..., D]``, in fresh memory or in ``out``; arguments as of ``MoELayer``.

        budget: of the graph to replay, at least the number of tokens; None: the smallest one. Ranks that share the
        experts replay graphs of the same budget together, also with 0 tokens. Raises InputError for more tokens than
        the largest budget, for another budget than the captured ones, and for other inputs than those of the capture.
        """
        rows = x.reshape(-1, self._sizes.hidden_size)
        tokens = rows.shape[0]
        budget = self._checked_budget(tokens, budget)
        buffers = self._buffers
        with buffers.lock, torch.inference_mode(), current_device(self._sizes.device):
            self._wait_for_buffers()
            buffers.write("x", rows)
            buffers.write("router_logits", router_logits)
            buffers.write("topk_ids", None if routing is None else routing.topk_ids)
            buffers.write("topk_weights", None if routing is None else routing.topk_weights)
            buffers.write("token_ids", token_ids)
            buffers.write("router_input", router_input)
            buffers.write("adapter_ids", adapter_ids)
            if buffers.topk_ids is None:
                buffers.live.fill_(tokens)
            elif tokens < budget:
                buffers.topk_ids[tokens:budget].fill_(-1)
            self._replay(budget)
            result = output_for(x, out, self.layer.plan.problem)
            result.view(-1, self._sizes.hidden_size).copy_(buffers.out[:tokens])
            if buffers.idle is not None:
                buffers.idle.record()
        return result

    def _checked_budget(self, tokens: int, budget: int | None) -> int:
        smallest = self.budget_for(tokens)
        if budget is None:
            return smallest
        if budget not in self.budgets or budget < smallest:
            raise InputError(
                f"graphs: budget {budget:,} for {tokens:,} tokens; captured: {', '.join(map(str, self.budgets))}. Pass "
                f"one of these from {smallest:,} on, or none"
            )
        return budget

    def _wait_for_buffers(self) -> None:
        if self._buffers.idle is not None:
            torch.cuda.current_stream().wait_event(self._buffers.idle)

    def _replay(self, budget: int) -> None:
        graph = self._graphs.get(budget)
        if graph is None:
            self.run(budget)
        else:
            graph.replay()

    def run(self, budget: int) -> None:
        """Compute the first ``budget`` rows of the output buffer; this is what a graph contains."""
        buffers = self._buffers
        x = buffers.x[:budget]
        if buffers.topk_ids is not None and buffers.topk_weights is not None:
            routing = Routing(topk_ids=buffers.topk_ids[:budget], topk_weights=buffers.topk_weights[:budget])
        else:
            chosen = self.layer.route(
                x,
                router_logits=_rows(buffers.router_logits, budget),
                token_ids=_rows(buffers.token_ids, budget),
                router_input=_rows(buffers.router_input, budget),
            )
            ids = torch.where(buffers.index[:budget] < buffers.live, chosen.topk_ids, -1)
            routing = Routing(topk_ids=ids, topk_weights=chosen.topk_weights)
        # Not layer(...): inside ``installed`` that would call this runner again.
        adapter_ids = _rows(buffers.adapter_ids, budget)
        MoELayer.forward(self.layer, x, routing=routing, adapter_ids=adapter_ids, out=buffers.out[:budget])

    def record(self, budget: int, pool: Any) -> None:
        """Capture the graph of ``budget`` tokens in ``pool``."""
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), recording(graph, self._sizes.device, pool=pool):
            self.run(budget)
        self._graphs[budget] = graph


def _rows(tensor: Tensor | None, count: int) -> Tensor | None:
    return None if tensor is None else tensor[:count]


def capture(
    layer: MoELayer,
    budgets: Sequence[int] = BUDGETS,
    *,
    routing_input: RoutingInput | None = None,
    router_input: bool = False,
    adapter_ids: bool = False,
) -> GraphRunner:
    """Capture ``layer`` for each of ``budgets``, numbers of tokens; see ``capture_all``."""
    return capture_all(
        [layer], budgets, routing_input=routing_input, router_input=router_input, adapter_ids=adapter_ids
    )[0]


def capture_all(
    layers: Sequence[MoELayer],
    budgets: Sequence[int] = BUDGETS,
    *,
    routing_input: RoutingInput | None = None,
    router_input: bool = False,
    adapter_ids: bool = False,
) -> list[GraphRunner]:
    """Capture every layer for each of ``budgets`` in one memory pool, and return a runner for each layer.

    routing_input: what determines the experts: "router" (the layer's own), "router_logits" or "routing", which calls
    then pass; None: the layer's router where it has one, otherwise a routing. router_input: whether calls pass one.
    adapter_ids: whether calls pass them, for layers with adapters.

    Every budget runs once before the capture, so that nothing is compiled or allocated lazily inside it. Graphs are
    valid as long as the layers keep their experts (``MoELayer.swap`` refuses afterwards). Ranks that share the experts
    capture the same layers and budgets in the same order. Raises InputError for budgets that are not positive or exceed
    the plan's ``max_tokens``, for checked layers, and for plans that no graph can capture.
    """
    shared_buffers: dict[_Sizes, _Buffers] = {}
    runners: list[GraphRunner] = []
    for layer in layers:
        resolved: RoutingInput = routing_input or ("router" if layer.has_router else "routing")
        _check(layer, budgets, resolved)
        sizes = _Sizes.of(layer, resolved, router_input=router_input, adapter_ids=adapter_ids, max_tokens=max(budgets))
        if sizes not in shared_buffers:
            shared_buffers[sizes] = _Buffers.allocate(sizes)
        runners.append(GraphRunner(layer, budgets, sizes, shared_buffers[sizes]))
    pools: dict[torch.device, Any] = {}
    # From the largest budget on, since smaller graphs fit into the memory of larger ones.
    for budget in sorted(set(budgets), reverse=True):
        for runner in runners:
            device = runner.layer.device
            if device.type != "cuda":
                continue
            if device not in pools:
                pools[device] = torch.cuda.graph_pool_handle()
            _warm_up(runner, budget, device)
            runner.record(budget, pools[device])
    return runners


def _warm_up(runner: GraphRunner, budget: int, device: torch.device) -> None:
    """Run once on another stream, as torch requires before a capture."""
    with current_device(device), torch.inference_mode():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            runner.run(budget)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()


def _check(layer: MoELayer, budgets: Sequence[int], routing_input: RoutingInput) -> None:
    limit = layer.plan.problem.limits.max_tokens
    if not budgets or min(budgets) < 1 or max(budgets) > limit:
        raise InputError(
            f"graphs: budgets {tuple(budgets)}; allowed: from 1 to {limit:,}, the max_tokens of the layer's plan. "
            "Leave the others out, or plan with Limits(max_tokens=...)"
        )
    if layer.routed_size != layer.spec.hidden_size:
        raise InputError(
            f"graphs: the caller's latent function leaves sums of width {layer.routed_size}, x has "
            f"{layer.spec.hidden_size}; capture calls of shared_and_routed in a graph of your own"
        )
    if layer.checked:
        raise InputError(
            "graphs: the layer is checked, which reads ids on the host in every call, as no CUDA graph can; set "
            "layer.checked = False"
        )
    if layer.device.type == "cuda" and not layer.plan.capturable:
        raise InputError(
            f"graphs: kernel {layer.plan.kernel} with dispatcher {layer.plan.dispatcher} cannot be captured; plan with "
            "graph=True, which chooses only what can"
        )
    if routing_input == "router" and not layer.has_router and layer.choose is None:
        raise InputError(
            "graphs: routing_input='router', but the layer has no router; capture with 'router_logits' or 'routing'"
        )


class ModelGraphs(Sequence[GraphRunner]):
    """The runners of all layers of a model, in the model's order.

    Inside ``with graphs.installed():`` the model's own calls of these layers replay graphs.
    """

    def __init__(self, runners: Sequence[GraphRunner]) -> None:
        self._runners = tuple(runners)

    @overload
    def __getitem__(self, index: int) -> GraphRunner: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[GraphRunner]: ...
    def __getitem__(self, index: int | slice) -> GraphRunner | Sequence[GraphRunner]:
        return self._runners[index]

    def __len__(self) -> int:
        return len(self._runners)

    def __repr__(self) -> str:
        return f"ModelGraphs({len(self)} layers, {self._runners[0]!r})"

    @contextmanager
    def installed(self, *, larger: Literal["error", "eager"] = "error") -> Generator[None]:
        """Let calls of the layers replay their graphs inside the block.

        larger: what a batch beyond the largest budget does, such as a prompt: raise InputError, or run without a graph.
        """
        for runner in self._runners:
            vars(runner.layer)["forward"] = partial(_installed_forward, runner, larger == "eager")
        try:
            yield
        finally:
            for runner in self._runners:
                vars(runner.layer).pop("forward", None)


def _installed_forward(runner: GraphRunner, eager: bool, x: Tensor, **inputs: Any) -> Tensor:
    if eager and x.numel() > runner.budgets[-1] * x.shape[-1]:
        return MoELayer.forward(runner.layer, x, **inputs)
    return runner(x, **inputs)


def capture_model(
    model: nn.Module,
    budgets: Sequence[int] = BUDGETS,
    *,
    routing_input: RoutingInput = "routing",
    router_input: bool = False,
    adapter_ids: bool = False,
) -> ModelGraphs:
    """Capture every layer inside ``model``, a model of transformers or any module with ``MoELayer`` inside.

    Models of transformers choose the experts themselves and pass a routing. Otherwise as ``capture_all``. Raises
    InputError where the model has no layer yet: a transformers model builds them in its first pass, unless
    ``load_model`` loaded it.
    """
    layers = [module for module in model.modules() if isinstance(module, MoELayer)] or _layers_of(model)
    if not layers:
        raise InputError(
            f"graphs: {type(model).__name__} has no layers of Collegium; load it with collegium.load_model, or run one "
            "forward pass first"
        )
    return ModelGraphs(
        capture_all(layers, budgets, routing_input=routing_input, router_input=router_input, adapter_ids=adapter_ids)
    )


def _layers_of(model: nn.Module) -> list[MoELayer]:
    if not hasattr(model, "config"):
        return []
    from .integrations.transformers import layers_of

    return layers_of(model)
