"""plan(): choose kernel, dispatcher, pipelines, formats and memory for a problem, and report why others were refused.

A pure function: it reads no device and allocates nothing, so a laptop can plan for an H200.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch

from . import experts, parallel, pipelines
from .adapters import AdapterSizes, change_rows
from .errors import PlanError
from .experts import ExpertKernel, Tiling
from .experts.paging.policy import Policy
from .experts.paging.table import POLICIES
from .formats import by_name
from .formats.find_storage import SAFETENSORS_DTYPES
from .ops import linear
from .ops.quantize import ACTIVATION_FORMATS, activation_format
from .ops.route import route_regions
from .ops.route_wide import append_shared_experts_regions
from .parallel import EXCHANGES, DispatcherKind
from .parallel.input_check import compared_words
from .parallel.traffic import OutgoingTokens, Traffic
from .pipelines import PipelineKind, PipelineQuery
from .problem import DeviceFacts, ExpertsProblem, Overrides, Problem, Refusal
from .runtime.memory import Region, Regions, elementwise_max, memory_map, with_prefix
from .sharing import (
    SharedPlan,
    adds_shared,
    forced_shared_error,
    no_overlap,
    plan_shared,
    shared_slice,
    side_stream_of_module,
)
from .types import MoESpec, format_names, named, require

__all__ = [
    "Plan",
    "TokenRange",
    "dispatcher_named",
    "expert_bytes",
    "kernel_named",
    "plan",
    "plan_swap",
    "token_ranges",
]


# Inner rows of the adapters, in the experts' part of a pass.
_ADAPTER_REGIONS = ("experts/gate_up_adapters/inner", "experts/down_adapters/inner")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRange:
    """The pipeline for ``tokens`` tokens and more, up to the next range, and the family of its kernel's tiles."""

    tokens: int
    pipeline: str
    tiles: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Every choice that was made for a problem; a layer runs exactly this.

    problem: with activation format, combine and message format filled in. kernel, shared_kernel, dispatcher: names of
    the chosen rows; shared_kernel is None without a shared expert. token_ranges: pipeline and tiles by number of
    tokens. activation_format: of rows before each product. wire_format: what travels between ranks. capacity: maximum
    number of rows that one pass brings to this rank's experts. expert_bytes, weight_bytes: of one expert, and of all of
    this rank's slots in one layer. regions: temporary memory of a pass. capturable: whether a CUDA graph can capture
    the forward pass. refusals: the other candidates, and why they were not chosen. merged_shared_experts: number of
    routed experts that the shared expert is split into; 0: it runs separately, or there is none. side_stream_tokens: up
    to how many tokens the shared expert runs on a side stream in a CUDA graph. shared_overlap: the exchange with other
    ranks during which it runs, of ``parallel.EXCHANGES``; empty: none. overrides: what the caller forced.
    ranges_from_packing: the token ranges are not those that ``plan`` returned; see ``with_token_ranges``.
    caller_modules: pairs of gate, shared_experts or routed_input_transform and the name of the caller's function for
    it; set by the layer, as are caller_functions, the same for choose and after_expert, and checked. adapters: see
    ``with_adapters``.
    expected_misses: experts that a pass of a trace needs in a layer, and those of them that have to be copied, where
    experts are paged (``balance/residency.py``); None: unknown.
    """

    problem: Problem
    kernel: str
    shared_kernel: str | None
    dispatcher: str
    token_ranges: tuple[TokenRange, ...]
    activation_format: str
    wire_format: str
    capacity: int
    expert_bytes: int
    weight_bytes: int
    regions: tuple[Region, ...]
    capturable: bool
    refusals: tuple[Refusal, ...]
    merged_shared_experts: int = 0
    side_stream_tokens: int = 0
    shared_overlap: str = ""
    overrides: Overrides = field(default_factory=Overrides, compare=False)
    ranges_from_packing: bool = False
    adapters: AdapterSizes | None = None
    caller_modules: tuple[tuple[str, str], ...] = ()
    caller_functions: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    checked: bool = field(default=False, compare=False)
    expected_misses: tuple[float, float] | None = None

    @property
    def routed_problem(self) -> Problem:
        """The problem of kernel, dispatcher and pipelines: a merged shared expert is part of the routed experts."""
        return self.problem.with_merged_experts(self.merged_shared_experts)

    @property
    def down_kernel(self) -> str:
        """Name of the kernel of the down projections, which differs where their format does."""
        return kernel_named(self.kernel).kernels(self.problem.routed)[1]

    @property
    def workspace_bytes(self) -> int:
        """Maximum bytes of temporary memory of one pass."""
        return memory_map(self.regions).nbytes

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the process groups whose ranks call the layer together, the one that splits experts first."""
        placement = self.problem.placement
        return () if placement is None or dispatcher_named(self.dispatcher).partial_sums else placement.groups

    @property
    def output_is_reduced(self) -> bool:
        """Whether the layer returns whole sums; False: this rank's part, and the caller adds the parts of all ranks."""
        return not dispatcher_named(self.dispatcher).partial_sums or self.problem.alone

    @property
    def adds_shared(self) -> bool:
        """Whether this rank adds the shared expert, or its slice of it; of partial sums, rank 0 may add it alone."""
        return adds_shared(self.problem, self.overrides, partial_sums=not self.output_is_reduced)

    @property
    def shared_slice(self) -> tuple[int, int]:
        """The slice of the shared expert's width on this rank, and their number."""
        return shared_slice(self.problem, self.overrides, partial_sums=not self.output_is_reduced)

    @property
    def paging(self) -> Policy | None:
        """The policy of a layer whose experts are not all on the GPU, otherwise None."""
        if self.problem.gpu_slots is None:
            return None
        return named(POLICIES, self.overrides.paging or POLICIES[0].name, "known policies: ", PlanError)

    @property
    def microbatches(self) -> int:
        """Into how many parts a batch is split, of which one is exchanged while the experts run the other."""
        return self.overrides.microbatches or 1

    @property
    def pipelines(self) -> tuple[str, ...]:
        """Names of the pipelines, without repetition, in the order of token counts."""
        return tuple(dict.fromkeys(token_range.pipeline for token_range in self.token_ranges))

    def with_token_ranges(self, ranges: tuple[TokenRange, ...]) -> "Plan":
        """Return the plan of a packed layer, whose ``ranges`` may differ from the planned ones.

        Only packing shows whether weights are aligned for the fastest loads, how INT4 groups are stored, and which
        measured tiles exist. ``explain`` reports a difference.
        """
        changed = self.ranges_from_packing or ranges != self.token_ranges
        return replace(self, token_ranges=ranges, ranges_from_packing=changed)

    def with_caller_modules(self, names: Mapping[str, str]) -> "Plan":
        """Return the plan of a layer with functions or modules of the caller. names: as ``caller_modules``, a mapping.

        A shared expert of the caller runs during the same exchange as one of the spec, and on a side stream if that
        is forced. Raises PlanError where ``overlapped`` or ``side_stream`` was forced and is not possible.
        """
        changed = replace(self, caller_modules=tuple(names.items()))
        if "shared_experts" not in names or not self.adds_shared:
            return changed
        dispatcher = parallel.wrapped_for(dispatcher_named(self.dispatcher), self.problem)
        overlap = _choose_overlap(self.problem, dispatcher, self._pipeline_kinds(), self.overrides)
        tokens = side_stream_of_module(self.problem, self.dispatcher, self.overrides, capturable=self.capturable)
        return replace(changed, shared_overlap=overlap, side_stream_tokens=tokens)

    def with_adapters(self, adapters: AdapterSizes | None) -> "Plan":
        """Return the plan of the same layer with ``adapters`` to choose from, and the memory that their rows take.

        Raises PlanError where experts are split over ranks, which have no adapter ids of each other's tokens, and for
        weights whose kernel cannot add the changes.
        """
        if adapters is not None and self.dispatcher != "local":
            raise PlanError(
                f"adapters: the dispatcher is {self.dispatcher}, {self.problem.placement}; allowed: local, all experts "
                f"on one rank. Merge the {len(adapters.ranks)} adapters into copies of the checkpoint, or plan for one "
                "rank"
            )
        reason = kernel_named(self.kernel).refuse_adapters(self.problem.routed) if adapters is not None else None
        if reason is not None:
            raise PlanError(f"adapters: kernel {self.kernel}: {reason}. Merge the adapter, or convert the weights")
        regions = tuple(region for region in self.regions if region.name not in _ADAPTER_REGIONS)
        if adapters is not None and self.problem.device.kind == "cuda":
            spec, rows = self.problem.spec, self.capacity
            products = (spec.gate_up_parts, spec.intermediate_size), (1, spec.expert_hidden_size)
            for name, (count, width), rank in zip(_ADAPTER_REGIONS, products, adapters.inner_ranks, strict=True):
                changes = change_rows(rows, spec.num_experts, rank) * width
                regions += (Region(name, 4 * count * max(rows * rank, changes if rank else 0)),)
        return replace(self, adapters=adapters, regions=regions)

    def traffic(self, away: OutgoingTokens) -> Traffic:
        """Return the bytes that a rank exchanges with the others for its outgoing tokens ``away``.

        Sums of slices, and outputs that are gathered for ``same_tokens``, are not included.
        """
        return parallel.wrapped_for(dispatcher_named(self.dispatcher), self.problem).traffic(self.problem, away)

    def explain(self) -> str:
        """Return the plan as text, one choice a line."""
        spec, placement = self.problem.spec, self.problem.placement
        compared = compared_words(placement, self.dispatcher)
        lines = [
            f"layer      {_layer_text(spec)}",
            f"machine    {_device_text(self.problem.device)}",
            f"kernel     {self._kernel_text()}",
        ]
        if spec.shared is not None or "shared_experts" in dict(self.caller_modules):
            lines.append(f"shared     {self._shared_text()}")
        functions = (*self.caller_modules, *self.caller_functions)
        if functions:
            names = ", ".join(f"{name} {function}" for name, function in functions)
            lines.append(f"modules    {names}, of the caller")
        lines += [f"batches    {self.batches()}", f"dispatch   {self._dispatch_text()}"]
        if self.microbatches > 1:
            lines += [
                "halves     every batch runs as 2 halves: one travels while the experts run the other",
                "warning    halves were forced with allow_slow; no measured case was faster than whole batches",
            ]
        if self.checked:
            lines.append("checked    every call checks ids, logits and weights, and waits for the device once")
        if compared is not None:
            lines.append(f"inputs     {compared}")
        if self.adapters is not None:
            lines.append(f"adapters   {self._adapters_text()}")
        lines += [
            f"formats    {self._formats_text()}",
            f"bytes      {self.expert_bytes:,} per expert, {self.weight_bytes:,} per layer, "
            f"workspace up to {self.workspace_bytes:,} for {self.problem.limits.max_tokens:,} tokens",
        ]
        if self.problem.limits.gpu_bytes is not None:
            lines.append(f"paging     {self._paging_text()}")
        lines.append(
            f"graph      a CUDA graph {'can' if self.capturable else 'cannot'} capture the layer"
            + (", as graph=True requires" if self.problem.graph else "")
        )
        if forced := self._forced_text():
            lines.append(f"forced     {forced}")
        printed = {
            "kernel": True,
            "dispatcher": placement is not None,
            "pipeline": self.problem.device.kind == "cuda",
        }
        lines += [f"refused    {refusal.name}: {refusal.reason}" for refusal in self.refusals if printed[refusal.what]]
        return "\n".join(lines)

    def batches(self) -> str:
        """Return as text which pipeline and tiles run how many tokens."""
        descriptions = {kind.name: kind.description for kind in pipelines.PIPELINES}
        starts = [token_range.tokens for token_range in self.token_ranges]
        ends = [start - 1 for start in starts[1:]] + [self.problem.limits.max_tokens]
        texts: list[str] = []
        for token_range, last in zip(self.token_ranges, ends, strict=True):
            first = token_range.tokens
            count = f"{first:,} to {last:,} tokens" if first < last else f"{last:,} token{'s' * (last > 1)}"
            tiles = f", {token_range.tiles}" if token_range.tiles else ""
            texts.append(f"{count}: {token_range.pipeline} ({descriptions[token_range.pipeline]}{tiles})")
        return "; ".join(texts) + (" (changed by packing)" if self.ranges_from_packing else "")

    def _forced_text(self) -> str:
        """Return every override that differs from its default, by name, and which of them change nothing here."""
        defaults, spec = Overrides(), self.problem.spec
        unused = {
            "shared": spec.shared is None and "shared_experts" not in dict(self.caller_modules),
            "allow_slow": self.microbatches == 1,
            "paging": self.paging is None,
        }
        texts: list[str] = []
        for option in fields(Overrides):
            value = getattr(self.overrides, option.name)
            if value != getattr(defaults, option.name):
                texts.append(
                    f"{option.name}={value!r}" + (" (changes nothing here)" if unused.get(option.name) else "")
                )
        return ", ".join(texts)

    def _kernel_text(self) -> str:
        text = _product_kernels(self.kernel, self.problem.routed)
        if self.shared_kernel is None:
            return text
        shared = _product_kernels(self.shared_kernel, self.problem.shared())
        if shared == text:
            return text
        return f"{text}; shared expert: {shared}" if " for " in shared else f"{text}, {shared} for the shared expert"

    def _shared_text(self) -> str:
        count = self.merged_shared_experts
        if count:
            return f"merged into {count} routed expert{'s' * (count > 1)} that receive{'s' * (count == 1)} every token"
        if not self.adds_shared:
            return "added by rank 0 alone"
        text = self._order()
        if self.side_stream_tokens:
            text = f"side_stream for up to {self.side_stream_tokens} tokens in a CUDA graph, otherwise {text}"
        number, slices = self.shared_slice
        if slices > 1:
            text += f"; slice {number} of {slices}"
        elif not self.output_is_reduced:
            text += "; added by this rank alone"
        return text

    def _order(self) -> str:
        """Return as text when the shared expert runs on the stream of the routed experts."""
        if self.shared_overlap:
            return f"overlapped: runs {EXCHANGES[self.shared_overlap]}"
        if self.problem.placement is None:
            return "sequential"
        kinds = self._pipeline_kinds()
        dispatcher = parallel.wrapped_for(dispatcher_named(self.dispatcher), self.problem)
        when = "before the kernel" if any(kind.fills_gpu for kind in kinds) else "after the routed experts"
        return f"sequential, {when}: {no_overlap(self.problem, dispatcher, kinds, self.overrides)}"

    def _pipeline_kinds(self) -> list[PipelineKind]:
        return [kind for kind in pipelines.PIPELINES if kind.name in self.pipelines]

    def _formats_text(self) -> str:
        problem = self.problem
        text = f"weights {format_names(problem.spec.formats)}, activations {self._activations_text()}"
        if problem.output_dtype != problem.dtype:
            text += f", {problem.dtype} input, {problem.output_dtype} output"
        return text

    def _activations_text(self) -> str:
        """Return the activation format, whether its scales are calibrated, and how its codes are multiplied."""
        form = activation_format(self.activation_format)
        notes: list[str] = []
        if form.static:
            notes.append("calibrated scales of each expert" if form.by_expert else "calibrated scales")
            if self.overrides.unequal_scales == "largest":
                notes.append("the larger of unequal ones")
        elif form.bits < 8:
            notes.append("scales of each row")
        multiplied = kernel_named(self.kernel).multiplied_as(self.activation_format)
        if multiplied is not None:
            notes.append(f"multiplied as {multiplied}")
        return form.name + (f" ({', '.join(notes)})" if notes else "")

    def _adapters_text(self) -> str:
        large = any(token_range.tiles == "large tiles" for token_range in self.token_ranges)
        return f"{self.adapters}" + ("; batches with adapters run in small tiles" if large else "")

    def _paging_text(self) -> str:
        """Return as text how many experts are on the GPU, and what a missing one costs."""
        if self.paging is None:
            return f"none: all experts fit into gpu_bytes={self.problem.limits.gpu_bytes:,}"
        slots, experts = self.problem.slots, self.problem.spec.num_experts
        text = (
            f"{slots} of {experts} experts on the GPU, all in {experts * self.expert_bytes:,} bytes of host memory; "
            f"{self.paging.name}: {self.paging.description}; a missing one is a copy of {self.expert_bytes:,} bytes"
        )
        rate = self.problem.device.host_bandwidth
        if rate is not None:
            text += f", {1e6 * self.expert_bytes / rate:,.0f} us at {rate / 1e9:.1f} GB/s"
        if self.expected_misses is None:
            return text
        needed, missing = self.expected_misses
        text += f"; in the trace a pass needs {needed:.1f} experts of a layer, {missing:.2f} of them missing"
        return text if rate is None else f"{text}, {1e6 * missing * self.expert_bytes / rate:,.0f} us of copies"

    def _dispatch_text(self) -> str:
        text = f"{self.dispatcher}, up to {self.capacity:,} rows"
        if self.problem.placement is not None:
            text += f"; {self.problem.placement}"
        if self.wire_format != "none":
            text += f"; between ranks: {self.wire_format}"
        if not self.output_is_reduced:
            text += "; the output is not reduced: the caller adds the parts of all ranks"
        rank_tokens = self.problem.limits.rank_tokens
        if rank_tokens is not None and not dispatcher_named(self.dispatcher).fixed_messages:
            text += f"; rank_tokens={rank_tokens:,} limits all_to_all_fixed alone"
        return text

    def to_json(self) -> dict[str, object]:
        """Return the plan as plain values for ``--json``."""
        placement = self.problem.placement
        return {
            "kernel": self.kernel,
            "shared_kernel": self.shared_kernel,
            "merged_shared_experts": self.merged_shared_experts,
            "side_stream_tokens": self.side_stream_tokens,
            "shared_overlap": self.shared_overlap,
            "microbatches": self.microbatches,
            "shared_slices": self.problem.shared_slices,
            "output_is_reduced": self.output_is_reduced,
            "dispatcher": self.dispatcher,
            "token_ranges": [asdict(token_range) for token_range in self.token_ranges],
            "device": self.problem.device.kind,
            "device_name": self.problem.device.name,
            "weight_format": self.problem.spec.weight_format,
            "down_format": self.problem.spec.formats[1],
            "down_kernel": self.down_kernel,
            "activation_format": self.activation_format,
            "dtype": self.problem.dtype,
            "out_dtype": self.problem.output_dtype,
            "wire_format": self.wire_format,
            "rank": 0 if placement is None else placement.rank,
            "world_size": self.problem.world_size,
            "local_experts": len(self.problem.local_experts),
            "capacity": self.capacity,
            "expert_bytes": self.expert_bytes,
            "gpu_slots": self.problem.slots,
            "paging": None if self.paging is None else self.paging.name,
            "host_bandwidth": self.problem.device.host_bandwidth,
            "expected_misses": self.expected_misses,
            "weight_bytes": self.weight_bytes,
            "workspace_bytes": self.workspace_bytes,
            "adapters": None if self.adapters is None else self.adapters._asdict(),
            "regions": {region.name: region.nbytes for region in self.regions},
            "capturable": self.capturable,
            "refusals": [asdict(refusal) for refusal in self.refusals],
        }


def _layer_text(spec: MoESpec) -> str:
    text = (
        f"{spec.num_experts} experts, top-{spec.routing.top_k} ({spec.routing.method}), hidden {spec.hidden_size}, "
        f"intermediate {spec.intermediate_size}, {spec.activation.kind}"
    )
    if spec.activation.limit is not None:
        text += f" limit {spec.activation.limit:g}"
    if spec.activation.fast:
        text += " with fast math"
    if spec.routing.weight_on_input:
        text += ", router weight on the input"
    rounding = spec.routing.round_logits
    if rounding:
        text += f", router logits rounded to {'the input dtype' if rounding is True else rounding}"
    return text


def _device_text(device: DeviceFacts) -> str:
    text = f"{device.kind} {device.name}".strip()
    if not device.nvrtc:
        text += "; no NVRTC: large batches use small tiles (install nvidia-cuda-nvrtc)"
    if device.kind == "cpu":
        text += f", {device.threads} threads"
    return text


def _product_kernels(name: str, problem: ExpertsProblem) -> str:
    """Return ``name``, or the kernels of both products where their weights have two formats."""
    if not problem.mixed:
        return name
    gate_up, down = kernel_named(name).kernels(problem)
    return f"{gate_up} for gate_up, {down} for down"


def kernel_named(name: str) -> ExpertKernel:
    """Return the experts kernel called ``name``; raises PlanError naming the known ones."""
    return _forced_row("kernel", name, experts.KERNELS)


def dispatcher_named(name: str) -> DispatcherKind:
    """Return the dispatcher called ``name``; raises PlanError naming the known ones."""
    return _forced_row("dispatcher", name, parallel.DISPATCHERS)


def expert_bytes(spec: MoESpec, intermediate: int | None = None) -> int:
    """Return the bytes of one routed expert in the spec's weight format, with biases and padding.

    intermediate: the width of a slice; None: the whole width.
    """
    intermediate = intermediate or spec.intermediate_size
    hidden, parts = spec.expert_hidden_size, spec.gate_up_parts
    gate_up_format, down_format = spec.formats
    matrices = parts * _matrix_bytes(gate_up_format, intermediate, hidden)
    matrices += _matrix_bytes(down_format, hidden, intermediate)
    biases = 2 * (parts * intermediate + hidden) if spec.expert_bias else 0
    return matrices + biases


def _matrix_bytes(name: str, rows: int, columns: int) -> int:
    layout = by_name(name)
    if layout.row_block == 1 and layout.group:
        columns = -(-columns // layout.group) * layout.group
    total = 0
    for part in layout.storages[0].parts:
        if part.required:
            itemsize = SAFETENSORS_DTYPES.get(part.dtypes[0], torch.uint8).itemsize
            total += math.prod(part.stored_shape(rows, columns)) * itemsize
    return total


def _with_overrides(problem: Problem, overrides: Overrides) -> Problem:
    """Return ``problem`` with the fields that ``overrides`` replaces, and the activation format that follows."""
    return replace(
        problem,
        activation_format=activation_format(
            overrides.activation_format or problem.activation_format or problem.dtype
        ).name,
        combine=overrides.combine or problem.combine,
        tiles=overrides.tiles or problem.tiles,
    )


def plan(problem: Problem, overrides: Overrides | None = None) -> Plan:
    """Choose the first kernel, dispatcher and pipelines of the tables that do not refuse ``problem``.

    overrides: forced choices, which are obeyed or refused, never replaced. Raises PlanError listing every refusal.
    """
    overrides = overrides or Overrides()
    require(type(overrides) is Overrides, "overrides", overrides, "an Overrides, such as Overrides(kernel=...)")
    problem = _with_overrides(problem, overrides)
    refusals: list[Refusal] = []
    kernel = _choose_kernel(problem, overrides, refusals)
    problem = _with_slots(problem, kernel, overrides)
    problem = _with_wire_format(problem, kernel)
    _check_half_batches(problem, overrides)
    dispatcher = _choose_dispatcher(problem, overrides, refusals)
    wrapped = parallel.wrapped_for(dispatcher, problem)
    capturable = kernel.capturable and wrapped.capturable
    partial_sums = dispatcher.partial_sums and not problem.alone
    problem = replace(problem, shared_slices=shared_slice(problem, overrides, partial_sums=partial_sums)[1])
    shared = plan_shared(problem, kernel, dispatcher.name, overrides, capturable=capturable, partial_sums=partial_sums)
    if shared.kernel is not None:
        capturable = capturable and shared.kernel.capturable
    routed_problem = problem.with_merged_experts(shared.merged_experts)
    capacity = wrapped.capacity(routed_problem)
    tokens = wrapped.batch_tokens(routed_problem)
    experts_problem = replace(routed_problem.routed, rows=capacity, tokens=tokens)
    query = PipelineQuery(
        problem=routed_problem,
        experts=experts_problem,
        kernel=kernel,
        dispatcher=wrapped,
        tiling=kernel.tiling(experts_problem),
        pipeline=overrides.pipeline,
    )
    kinds = _choose_pipelines(query, refusals)
    apart = shared.kernel is not None and not shared.merged_experts
    shared_overlap = _choose_overlap(problem, wrapped, kinds, overrides) if apart else ""
    regions = _layer_regions(problem, routed_problem, shared) | _pipeline_regions(kinds, query)
    bytes_per_expert = expert_bytes(problem.spec, problem.routed.intermediate)
    if problem.gpu_slots is not None:
        bytes_per_expert = kernel.slot_bytes(problem.routed)
    return Plan(
        problem=problem,
        kernel=kernel.name,
        shared_kernel=None if shared.kernel is None else shared.kernel.name,
        dispatcher=dispatcher.name,
        token_ranges=token_ranges(kinds, wrapped, query.tiling, routed_problem),
        activation_format=str(problem.activation_format),
        wire_format=wrapped.wire_format(problem),
        capacity=capacity,
        expert_bytes=bytes_per_expert,
        weight_bytes=bytes_per_expert * problem.slots,
        regions=tuple(Region(name, size) for name, size in regions.items()),
        capturable=capturable,
        refusals=tuple(refusals),
        merged_shared_experts=shared.merged_experts,
        side_stream_tokens=shared.side_stream_tokens,
        shared_overlap=shared_overlap,
        overrides=overrides,
    )


def _refuse_unequal_scales(overrides: Overrides, activations: str) -> None:
    """Raise PlanError where unequal calibrated scales were accepted for a format that has none."""
    if overrides.unequal_scales != "largest" or activation_format(activations).static:
        return
    static = ", ".join(form.name for form in ACTIVATION_FORMATS if form.static)
    raise PlanError(
        f"unequal_scales='largest' was requested with activation format {activations}, which computes its scales; "
        f"formats with calibrated scales: {static}. Remove the override, or request one of them"
    )


def plan_swap(old: Plan, formats: Mapping[str, Any], overrides: Overrides | None = None) -> Plan:
    """Return the plan of the layer of ``old`` with routed experts in other ``formats``; see ``MoELayer.swap``.

    formats: the fields ``weight_format`` and ``down_format`` of the spec. The shared expert stays as it is stored.
    """
    spec = replace(old.problem.spec, **formats)
    if spec.shared is not None:
        stored = old.problem.spec.shared_alone()
        shared = replace(spec.shared, weight_format=stored.weight_format, down_format=stored.down_format)
        spec = replace(spec, shared=shared)
    # The dispatcher stays as it is, also where nobody forced it.
    chosen = Overrides(dispatcher=old.overrides.dispatcher) if overrides is None else overrides
    kept = replace(
        chosen,
        dispatcher=old.dispatcher if overrides is None else chosen.dispatcher,
        shared=chosen.shared or old.overrides.shared,
        microbatches=chosen.microbatches or old.overrides.microbatches,
        allow_slow=chosen.allow_slow or old.overrides.allow_slow,
    )
    new = plan(replace(old.problem, spec=spec), kept)
    return replace(new, overrides=replace(new.overrides, dispatcher=chosen.dispatcher))


def _choose_kernel(problem: Problem, overrides: Overrides, refusals: list[Refusal]) -> ExpertKernel:
    """Return the kernel of the routed experts; raises PlanError."""
    _refuse_unequal_scales(overrides, problem.activation_format or problem.dtype)

    def refuse(kernel: ExpertKernel) -> str | None:
        return _cannot_capture(kernel, problem) or kernel.refuse(problem.routed) or _refuse_tiles(kernel, problem)

    kernel = _first_accepting("kernel", experts.KERNELS, overrides.kernel, refuse, refusals)
    if kernel is None:
        raise PlanError(
            f"no kernel runs {format_names(problem.spec.formats)} weights with {problem.activation_format} activations "
            f"on {problem.device.kind}:\n{_refusal_lines(refusals)}\n"
            f"Allowed activation formats: {', '.join(f.name for f in ACTIVATION_FORMATS)}. "
            "Remove the override, or change the limit named above."
        )
    return kernel


def _with_slots(problem: Problem, kernel: ExpertKernel, overrides: Overrides) -> Problem:
    """Return ``problem`` with the slots for its experts on the GPU, where the limit has no room for all of them.

    Raises PlanError where such a layer cannot run.
    """
    limit = problem.limits.gpu_bytes
    if limit is None:
        if overrides.paging is None:
            return problem
        raise PlanError(
            f"paging={overrides.paging!r} was forced without a limit; allowed: with Limits(gpu_bytes=...), the bytes "
            "of GPU memory for the experts of a layer. Set it, or leave out paging"
        )
    needed = kernel.slot_bytes(problem.routed) if kernel.pages else expert_bytes(problem.spec)
    slots, count = limit // needed, len(problem.local_experts)
    if slots >= count:
        return problem
    reason = _cannot_page(problem, kernel, overrides, slots)
    if reason is not None:
        raise PlanError(
            f"gpu_bytes={limit:,} has room for {slots} of {count} experts of {needed:,} bytes, and the others cannot "
            f"stay in host memory: {reason}. Allowed without it: gpu_bytes of at least {needed * count:,}, or None"
        )
    return replace(problem, gpu_slots=slots)


def _cannot_page(problem: Problem, kernel: ExpertKernel, overrides: Overrides, slots: int) -> str | None:
    """Return why experts of ``problem`` cannot be paged through ``slots`` slots, with numbers, or None."""
    top_k = problem.spec.routing.top_k
    if problem.device.kind != "cuda":
        return f"the device is a {problem.device.kind}, which needs no copies of them"
    if not kernel.pages:
        return f"kernel {kernel.name} cannot run experts in any slots; supported: the kernels in Triton"
    if not problem.alone:
        return f"the placement is {problem.placement}; supported: all experts of a layer on one rank"
    if slots < top_k:
        return f"a token takes {top_k} experts, more than the {slots} slots; {top_k} slots are needed at least"
    forced = {
        "shared": overrides.shared == "merged" and "merged",
        "pipeline": overrides.pipeline != "paged" and overrides.pipeline,
    }
    forced["dispatcher"] = overrides.dispatcher != "local" and overrides.dispatcher
    return next((f"{name}={value!r} was forced" for name, value in forced.items() if value), None)


def _refuse_tiles(kernel: ExpertKernel, problem: Problem) -> str | None:
    """Return why ``kernel`` cannot run the tiles that were forced, or None."""
    routed = problem.routed
    if routed.tiles is None:
        return None
    family = kernel.tiling(routed).family(routed.rows)
    if family == f"{routed.tiles} tiles":
        return None
    return f"{routed.tiles} tiles were forced; on this device these weights have {family or 'no tiles'}"


def _choose_dispatcher(problem: Problem, overrides: Overrides, refusals: list[Refusal]) -> DispatcherKind:
    """Return the row of the dispatcher, without the wrappers that the placement requires; raises PlanError."""

    def refuse(kind: DispatcherKind) -> str | None:
        wrapped = parallel.wrapped_for(kind, problem)
        reason = _cannot_capture(wrapped, problem)
        reason = reason or wrapped.refuse(problem, requested=overrides.dispatcher == kind.name)
        if reason is None and overrides.microbatches == 2 and kind.no_half_batches:
            reason = f"microbatches=2 was forced; {kind.no_half_batches}"
        return reason

    kind = _first_accepting("dispatcher", parallel.DISPATCHERS, overrides.dispatcher, refuse, refusals)
    if kind is None:
        reasons = _refusal_lines([refusal for refusal in refusals if refusal.what == "dispatcher"])
        raise PlanError(
            f"no dispatcher serves {problem.placement or 'one rank'}:\n{reasons}\nChange the override or the placement."
        )
    return kind


def _check_half_batches(problem: Problem, overrides: Overrides) -> None:
    """Raise PlanError where half batches were forced and ``problem`` does not run as two halves."""
    reason = pipelines.no_half_batches(problem, overrides) if overrides.microbatches == 2 else None
    if reason is not None:
        raise PlanError(f"microbatches=2 was forced and is refused: {reason}. Leave out microbatches for whole batches")


def _choose_overlap(
    problem: Problem,
    dispatcher: DispatcherKind,
    kinds: Sequence[PipelineKind],
    overrides: Overrides,
) -> str:
    """Return the exchange during which the shared expert runs; empty: none. Raises PlanError where one was forced."""
    reason = no_overlap(problem, dispatcher, kinds, overrides)
    if reason is not None and overrides.shared == "overlapped":
        raise forced_shared_error("overlapped", reason)
    return dispatcher.overlaps if reason is None else ""


def _layer_regions(problem: Problem, routed_problem: Problem, shared: SharedPlan) -> Regions:
    """Return the memory of what is outside the pipelines: routing, shared expert, router and latent projections."""
    tokens = problem.limits.max_tokens
    regions: Regions = with_prefix("routing", route_regions(tokens, problem.spec.routing.top_k))
    if shared.merged_experts:
        regions |= with_prefix("routing", append_shared_experts_regions(tokens, routed_problem.spec.routing.top_k))
    elif shared.kernel is not None:
        regions |= with_prefix("shared", shared.kernel.regions(problem.shared()))
    return regions | linear.regions_of(problem)


def _pipeline_regions(kinds: Sequence[PipelineKind], query: PipelineQuery) -> Regions:
    """Return the memory of every pipeline.

    Ranks that read each other's memory need the same memory map, so it has room for the experts of any of them.
    """
    placement = query.problem.placement
    counts = {query.experts.experts}
    if placement is not None and query.dispatcher.symmetric:
        counts |= {len(ids) + placement.spare for ids in placement.ranks}
    queries = [replace(query, experts=replace(query.experts, experts=count)) for count in sorted(counts)]
    return elementwise_max(*(kind.regions(rank_query) for kind in kinds for rank_query in queries))


def _cannot_capture(candidate: ExpertKernel | DispatcherKind, problem: Problem) -> str | None:
    if problem.graph and not candidate.capturable:
        return "graph=True was requested; it reads sizes on the host, so a CUDA graph cannot capture it"
    return None


def _with_wire_format(problem: Problem, kernel: ExpertKernel) -> Problem:
    """Return ``problem`` with the format in which tokens travel.

    Tokens travel as codes if ``kernel`` takes codes and the router weight is applied after the experts.
    """
    if problem.world_size == 1:
        return problem
    form = activation_format(problem.routed.activation_format)
    codes = form.e4m3 and not form.static and kernel.takes_codes and not problem.spec.routing.weight_on_input
    return replace(problem, sent_as=form.name if codes else None)


def _first_accepting(
    what: str, table: Sequence[Any], forced: str | None, refuse: Callable[[Any], str | None], refusals: list[Refusal]
) -> Any:
    """Return the first row of ``table`` that does not refuse, or None; add a refusal for every other row."""
    if forced is not None:
        _forced_row(what, forced, table)
    chosen: Any = None
    for row in table:
        reason = f"{what} {forced} was forced" if forced not in (None, row.name) else refuse(row)
        if reason is None and chosen is None:
            chosen = row
            continue
        if reason is None:
            reason = f"supported, but {chosen.name} is preferred"
        refusals.append(Refusal(what=what, name=row.name, reason=reason))
    return chosen


def _forced_row(what: str, name: str, table: Sequence[Any]) -> Any:
    return named(table, name, f"{what} {name!r} was forced; known {what}s: ", PlanError)


def _refusal_lines(refusals: Sequence[Refusal]) -> str:
    return "\n".join(f"  {refusal.name}: {refusal.reason}" for refusal in refusals)


def _choose_pipelines(query: PipelineQuery, refusals: list[Refusal]) -> list[PipelineKind]:
    """Return the pipelines in the order of token counts; the last one runs any number. Raises PlanError."""
    top_k = query.problem.spec.routing.top_k
    forced: PipelineKind | None = None
    if query.pipeline is not None:
        forced = _forced_row("pipeline", query.pipeline, pipelines.PIPELINES)
    # A forced pipeline that runs any number of tokens runs all batches; one for few tokens needs another for the rest.
    forced_runs_all = forced is not None and forced.max_tokens(query.tiling, top_k) is None
    chosen: list[PipelineKind] = []
    pipeline_refusals: list[Refusal] = []
    paged = query.problem.gpu_slots is not None
    for kind in pipelines.PIPELINES:
        if (kind.name == "paged") != paged and kind is not forced:
            continue  # which pipelines a plan can have at all is no choice
        runs_all = kind.max_tokens(query.tiling, top_k) is None
        reason = kind.refuse(query)
        if reason is None and forced not in (None, kind) and (forced_runs_all or not runs_all):
            reason = f"pipeline {query.pipeline} was forced"
        if reason is None and chosen and chosen[-1].max_tokens(query.tiling, top_k) is None:
            reason = f"supported, but {chosen[-1].name} is preferred"
        if reason is None:
            chosen.append(kind)
        else:
            pipeline_refusals.append(Refusal(what="pipeline", name=kind.name, reason=reason))
    refusals += pipeline_refusals
    complete = bool(chosen) and chosen[-1].max_tokens(query.tiling, top_k) is None
    if not complete or (forced is not None and forced not in chosen):
        reasons = _refusal_lines(pipeline_refusals)
        raise PlanError(f"no pipelines cover all token counts with these overrides:\n{reasons}")
    return chosen


def token_ranges(
    kinds: Sequence[PipelineKind], dispatcher: DispatcherKind, tiling: Tiling, problem: Problem
) -> tuple[TokenRange, ...]:
    """Return every number of tokens, up to ``max_tokens``, from which another pipeline or tile family runs."""
    top_k, max_tokens = problem.spec.routing.top_k, problem.limits.max_tokens
    ranges: list[TokenRange] = []
    start = 1
    for kind in kinds:
        limit = kind.max_tokens(tiling, top_k)
        last = max_tokens if limit is None else min(limit, max_tokens)
        while start <= last:
            family = kind.family(tiling, dispatcher.rows(problem, start))

            def other_family(tokens: int, kind: PipelineKind = kind, family: str = family) -> bool:
                return kind.family(tiling, dispatcher.rows(problem, tokens)) != family

            ranges.append(TokenRange(tokens=start, pipeline=kind.name, tiles=family))
            start += bisect_left(range(start, last + 1), True, key=other_family)
    return tuple(ranges)
