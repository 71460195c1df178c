"""plan(): which pipeline, dispatcher and kernel run a problem, in which formats and memory, and why not others.

Pure: it looks at no device and allocates nothing, so a laptop can plan for an H200.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from . import experts, parallel, pipelines
from .errors import PlanError
from .experts import ExpertKernel, Tiling
from .formats import by_name
from .formats.find_storage import SAFETENSORS_DTYPES
from .ops import linear
from .ops.quantize import ACTIVATION_FORMATS, activation_format
from .ops.route import route_regions
from .ops.route_wide import append_shared_experts_regions
from .parallel import DispatcherKind
from .parallel.input_check import compared_words
from .parallel.traffic import OutgoingTokens, Traffic
from .pipelines import PipelineKind, PipelineQuery
from .problem import ExpertsProblem, Overrides, Problem, Refusal
from .runtime.memory import Region, Regions, elementwise_max, memory_map, with_prefix
from .sharing import SharedWay, shared_way
from .types import MoESpec, format_names, named, require

__all__ = ["Plan", "TokenRange", "dispatcher_named", "expert_bytes", "kernel_named", "plan", "token_ranges"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRange:
    """From ``tokens`` tokens on, up to the next stretch: the pipeline, and the family of its kernel's tiles."""

    tokens: int
    pipeline: str
    tiles: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Every choice made, and what runs is exactly this.

    problem: the question, with activation format, combine and what tokens are sent as filled in. kernel,
    shared_kernel, dispatcher: names of what was chosen; shared_kernel is None without a shared expert. token_ranges:
    which
    pipeline and tiles run how many tokens; a layer corrects them where packing finds what a problem cannot say (groups
    of INT4, weights at odd addresses).
    wire_format: what travels between ranks. capacity: rows one pass brings to this rank's experts at most.
    expert_bytes, weight_bytes: one expert, all of this rank's slots in one layer. regions: temporary memory of a
    pass. capturable: whether the forward pass may be captured in a CUDA graph. refusals: the other candidates and why.
    merged: as how many more routed experts the shared one runs; 0: on its own, or there is none. beside: up to how many
    tokens it then has a stream of its own in a CUDA graph. overrides: what the caller chose.
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
    merged: int = 0
    beside: int = 0
    overrides: Overrides = field(default_factory=Overrides, compare=False)

    @property
    def inside(self) -> Problem:
        """What kernel, dispatcher and pipelines run: the problem, with the shared expert among the routed ones."""
        return self.problem.widened(self.merged)

    @property
    def down_kernel(self) -> str:
        """Name of the kernel of the down projections, which is another one where their format is."""
        return kernel_named(self.kernel).kernels(self.problem.routed)[1]

    @property
    def workspace_bytes(self) -> int:
        """Bytes of temporary memory of one pass at most."""
        return memory_map(self.regions).nbytes

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the process groups whose ranks call the layer together, the one that splits experts first."""
        placed = self.problem.placement
        return () if placed is None or self.dispatcher == "partial" else placed.groups

    @property
    def pipelines(self) -> tuple[str, ...]:
        """Names of the pipelines that run, each once, from the fewest tokens on."""
        return tuple(dict.fromkeys(stretch.pipeline for stretch in self.token_ranges))

    def traffic(self, away: OutgoingTokens) -> Traffic:
        """Return the bytes between a rank and the others for its tokens, ``away`` being what of them goes elsewhere.

        Of slices, and of the same tokens on every rank, without the sums and shares that are gathered around it.
        """
        return parallel.wrapped_for(dispatcher_named(self.dispatcher), self.problem).traffic(self.problem, away)

    def explain(self) -> str:
        """Return the plan as lines a person can read."""
        spec, device = self.problem.spec, self.problem.device
        where = f"{device.kind} {device.name}".strip()
        where += "" if device.nvrtc else "; no NVRTC, so large batches run small tiles: install nvidia-cuda-nvrtc"
        compared = compared_words(self.problem.placement, self.dispatcher)
        kernels = _product_kernels(self.kernel, self.problem.routed)
        shared = None if self.shared_kernel is None else _product_kernels(self.shared_kernel, self.problem.shared())
        if shared not in (None, kernels):
            kernels += f", {shared} for the shared expert" if " for " not in shared else f"; shared expert: {shared}"
        lines = [
            f"layer      {spec.num_experts} experts, top-{spec.routing.top_k} ({spec.routing.method}), "
            f"hidden {spec.hidden_size}, intermediate {spec.intermediate_size}, {spec.activation.kind}"
            + (f" limit {spec.activation.limit:g}" if spec.activation.limit is not None else "")
            + (" in fast math" if spec.activation.fast else ""),
            f"machine    {where}, {device.threads} threads" if device.kind == "cpu" else f"machine    {where}",
            f"kernel     {kernels}",
            *([] if spec.shared is None else [f"shared     {self._shared()}"]),
            f"batches    {self.batches()}",
            f"dispatch   {self.dispatcher}, at most {self.capacity:,} rows"
            + ("" if self.problem.placement is None else f"; {self.problem.placement}")
            + ("" if self.wire_format == "none" else f"; {self.wire_format} between ranks"),
            *([] if compared is None else [f"inputs     {compared}"]),
            f"formats    weights {format_names(spec.formats)}, activations {self.activation_format}",
            f"bytes      {self.expert_bytes:,} an expert, {self.weight_bytes:,} a layer, "
            f"workspace at most {self.workspace_bytes:,} for {self.problem.limits.max_tokens:,} tokens",
            f"graph      {'can' if self.capturable else 'cannot'} be captured in a CUDA graph",
        ]
        told = {"kernel": True, "dispatcher": self.problem.placement is not None, "pipeline": device.kind == "cuda"}
        lines += [f"refused    {refusal.name}: {refusal.reason}" for refusal in self.refusals if told[refusal.what]]
        return "\n".join(lines)

    def batches(self) -> str:
        """Return in words which pipeline and tiles run how many tokens."""
        does = {kind.name: kind.does for kind in pipelines.PIPELINES}
        most, found = self.problem.limits.max_tokens, list[str]()
        for own, following in zip(self.token_ranges, (*self.token_ranges[1:], None), strict=True):
            last = most if following is None else following.tokens - 1
            count = f"{own.tokens:,} to {last:,} tokens" if own.tokens < last else f"{last:,} token{'s' * (last > 1)}"
            tiles = f", {own.tiles}" if own.tiles else ""
            found.append(f"{count} {own.pipeline} ({does[own.pipeline]}{tiles})")
        return "; ".join(found)

    def _shared(self) -> str:
        if self.merged:
            return f"merged: {self.merged} more routed expert{'s' * (self.merged > 1)}, for every token"
        beside = f"; in a CUDA graph beside the routed experts up to {self.beside} tokens"
        return f"apart{beside if self.beside else ''}"

    def to_json(self) -> dict[str, object]:
        """Return the plan as plain values for ``--json``."""
        placed = self.problem.placement
        return {
            "kernel": self.kernel,
            "shared_kernel": self.shared_kernel,
            "merged": self.merged,
            "beside": self.beside,
            "dispatcher": self.dispatcher,
            "token_ranges": [asdict(stretch) for stretch in self.token_ranges],
            "device": self.problem.device.kind,
            "device_name": self.problem.device.name,
            "weight_format": self.problem.spec.weight_format,
            "down_format": self.problem.spec.formats[1],
            "down_kernel": self.down_kernel,
            "activation_format": self.activation_format,
            "wire_format": self.wire_format,
            "rank": 0 if placed is None else placed.rank,
            "world_size": self.problem.world_size,
            "local_experts": len(self.problem.local_experts),
            "capacity": self.capacity,
            "expert_bytes": self.expert_bytes,
            "weight_bytes": self.weight_bytes,
            "workspace_bytes": self.workspace_bytes,
            "regions": {region.name: region.nbytes for region in self.regions},
            "capturable": self.capturable,
            "refusals": [asdict(refusal) for refusal in self.refusals],
        }


def _product_kernels(name: str, problem: ExpertsProblem) -> str:
    """Return the kernel called ``name`` as text; of weights in two formats, the kernels of both products."""
    if not problem.mixed:
        return name
    first, second = kernel_named(name).kernels(problem)
    return f"{first} for gate_up, {second} for down"


def kernel_named(name: str) -> ExpertKernel:
    """Return the experts kernel called ``name``; raises PlanError naming the known ones."""
    return _named("kernel", name, experts.KERNELS)


def dispatcher_named(name: str) -> DispatcherKind:
    """Return the dispatcher called ``name``; raises PlanError naming the known ones."""
    return _named("dispatcher", name, parallel.DISPATCHERS)


def expert_bytes(spec: MoESpec, intermediate: int | None = None) -> int:
    """Return the bytes one routed expert takes in the spec's weight format, biases included, padding included.

    intermediate: the width of a slice instead of the whole.
    """
    hidden, wide, parts = spec.expert_hidden_size, intermediate or spec.intermediate_size, spec.gate_up_parts
    first, second = spec.formats
    matrices = parts * _matrix_bytes(first, wide, hidden) + _matrix_bytes(second, hidden, wide)
    biases = 2 * (parts * wide + hidden) if spec.expert_bias else 0
    return matrices + biases


def _matrix_bytes(name: str, rows: int, columns: int) -> int:
    layout = by_name(name)
    if layout.row_block == 1 and layout.group:
        columns = -(-columns // layout.group) * layout.group
    needed = (part for part in layout.storages[0].parts if part.required)
    return sum(
        math.prod(p.stored_shape(rows, columns)) * SAFETENSORS_DTYPES.get(p.dtypes[0], torch.uint8).itemsize
        for p in needed
    )


def plan(problem: Problem, overrides: Overrides | None = None) -> Plan:
    """Choose the first kernel, dispatcher and pipelines of the tables that do not refuse ``problem``.

    overrides: explicit choices, which are obeyed or refused, never replaced. Raises PlanError listing every refusal.
    """
    overrides = overrides or Overrides()
    require(type(overrides) is Overrides, "overrides", overrides, "an Overrides, such as Overrides(kernel=...)")
    wanted = activation_format(overrides.activation_format or problem.activation_format or problem.dtype).name
    asked = replace(problem, activation_format=wanted, combine=overrides.combine or problem.combine)
    refusals: list[Refusal] = []

    def refuse_kernel(kernel: Any) -> str | None:
        return _cannot_capture(kernel, asked) or kernel.refuse(asked.routed)

    kernel = _first("kernel", experts.KERNELS, overrides.kernel, refuse_kernel, refusals)
    if kernel is None:
        raise _no_kernel(asked, refusals)
    asked = _with_wire(asked, kernel)

    def refuse_dispatcher(kind: Any) -> str | None:
        whole = parallel.wrapped_for(kind, asked)
        return _cannot_capture(whole, asked) or whole.refuse(asked, asked=overrides.dispatcher == kind.name)

    chosen = _first("dispatcher", parallel.DISPATCHERS, overrides.dispatcher, refuse_dispatcher, refusals)
    if chosen is None:
        reasons = _listed([r for r in refusals if r.what == "dispatcher"]) + "\nChange the choice or the placement."
        raise PlanError(f"no dispatcher serves {asked.placement or 'one rank'}:\n{reasons}")
    dispatcher = parallel.wrapped_for(chosen, asked)
    capturable = kernel.capturable and dispatcher.capturable
    shared = shared_way(asked, kernel, chosen.name, overrides, capturable=capturable)
    inside = asked.widened(shared.merged)
    capacity = dispatcher.capacity(inside)
    brought = replace(inside.routed, rows=capacity, tokens=parallel.batch_tokens(dispatcher, inside))
    parts: dict[str, Any] = {"experts": brought, "tiling": kernel.tiling(brought), "pipeline": overrides.pipeline}
    question = PipelineQuery(problem=inside, kernel=kernel, dispatcher=dispatcher, **parts)
    kinds = _pipelines(question, overrides, refusals)
    one = expert_bytes(asked.spec, asked.routed.intermediate)
    regions = _regions_beside(asked, inside, shared) | _largest_regions(kinds, question)
    return Plan(
        problem=asked,
        kernel=kernel.name,
        shared_kernel=None if shared.kernel is None else shared.kernel.name,
        dispatcher=chosen.name,
        token_ranges=token_ranges(kinds, dispatcher, question.tiling, inside),
        activation_format=wanted,
        wire_format=dispatcher.wire_format(asked),
        capacity=capacity,
        expert_bytes=one,
        weight_bytes=one * asked.slots,
        regions=tuple(Region(name, size) for name, size in regions.items()),
        capturable=capturable and (shared.kernel is None or shared.kernel.capturable),
        refusals=tuple(refusals),
        merged=shared.merged,
        beside=shared.beside,
        overrides=overrides,
    )


def _no_kernel(asked: Problem, refusals: Sequence[Refusal]) -> PlanError:
    return PlanError(
        f"no kernel runs {format_names(asked.spec.formats)} weights with {asked.activation_format} activations on "
        f"{asked.device.kind}:\n"
        f"{_listed(refusals)}\nAllowed activation formats: {', '.join(f.name for f in ACTIVATION_FORMATS)}. "
        "Drop the forced choice or change the named limit."
    )


def _regions_beside(asked: Problem, inside: Problem, shared: SharedWay) -> Regions:
    """Return the memory of what is beside the pipelines."""
    tokens, wide = asked.limits.max_tokens, inside.spec.routing.top_k
    regions: Regions = with_prefix("routing", route_regions(tokens, asked.spec.routing.top_k))
    if shared.merged:
        regions |= with_prefix("routing", append_shared_experts_regions(tokens, wide))
    if shared.kernel is not None and not shared.merged:
        regions |= with_prefix("shared", shared.kernel.regions(asked.shared()))
    return regions | linear.regions_of(asked)


def _largest_regions(kinds: Sequence[PipelineKind], question: PipelineQuery) -> Regions:
    """Return the memory of every pipeline; where ranks read each other's, with the experts of any of them.

    So they have one map of it, whatever experts each of them holds.
    """
    brought, placed = question.experts, question.problem.placement
    widths = {brought.experts}
    if placed is not None and question.dispatcher.symmetric:
        widths |= {len(ids) + placed.spare for ids in placed.ranks}
    asks = [replace(question, experts=replace(brought, experts=width)) for width in sorted(widths)]
    return elementwise_max(*(kind.regions(ask) for kind in kinds for ask in asks))


def _cannot_capture(candidate: Any, problem: Problem) -> str | None:
    if problem.graph and not candidate.capturable:
        return "asked for a layer that a CUDA graph can capture; it reads sizes on the host"
    return None


def _with_wire(problem: Problem, kernel: ExpertKernel) -> Problem:
    """Return ``problem`` with what tokens travel as: codes where they are weighted later and ``kernel`` takes them."""
    if problem.world_size == 1:
        return problem
    form = activation_format(problem.routed.activation_format)
    codes = form.e4m3 and not form.static and kernel.takes_codes and not problem.spec.routing.weight_on_input
    return replace(problem, sent_as=form.name if codes else None)


def _first(
    what: str, table: Sequence[Any], forced: str | None, refuse: Callable[[Any], str | None], refusals: list[Refusal]
) -> Any:
    """Return the first row of ``table`` that does not refuse, or None; add a refusal for every other row."""
    if forced is not None:
        _named(what, forced, table)
    chosen: Any = None
    for row in table:
        reason = f"{what} {forced} was forced" if forced not in (None, row.name) else refuse(row)
        if reason is None and chosen is None:
            chosen = row
        else:
            reason = reason or f"it can run this, but {chosen.name} is before it in the table"
            refusals.append(Refusal(what=what, name=row.name, reason=reason))
    return chosen


def _named(what: str, name: str, table: Sequence[Any]) -> Any:
    return named(table, name, f"{what} {name!r} was forced; known {what}s: ", PlanError)


def _listed(refusals: Sequence[Refusal]) -> str:
    return "\n".join(f"  {refusal.name}: {refusal.reason}" for refusal in refusals)


def _pipelines(question: PipelineQuery, overrides: Overrides, refusals: list[Refusal]) -> list[PipelineKind]:
    """Return the pipelines that share the batches, the one for the fewest tokens first; the last serves any number."""
    rows, found, top_k = pipelines.PIPELINES, list["PipelineKind"](), question.problem.spec.routing.top_k
    forced = None if overrides.pipeline is None else _named("pipeline", overrides.pipeline, rows)
    # One that is forced and serves any number needs none beside it; one for few tokens needs one for the rest.
    alone = forced is not None and forced.max_tokens(question.tiling, top_k) is None
    own: list[Refusal] = []
    for kind in rows:
        reason = kind.refuse(question)
        if (
            reason is None
            and forced not in (None, kind)
            and (alone or kind.max_tokens(question.tiling, top_k) is not None)
        ):
            reason = f"pipeline {overrides.pipeline} was forced"
        if reason is None and found and found[-1].max_tokens(question.tiling, top_k) is None:
            reason = f"it can run this, but {found[-1].name} is before it in the table"
        if reason is None:
            found.append(kind)
        else:
            own.append(Refusal(what="pipeline", name=kind.name, reason=reason))
    refusals += own
    forced_away = overrides.pipeline is not None and overrides.pipeline not in {kind.name for kind in found}
    if forced_away or not found or found[-1].max_tokens(question.tiling, top_k) is not None:
        raise PlanError(f"no pipeline runs every number of tokens as asked:\n{_listed(own)}")
    return found


def token_ranges(
    kinds: Sequence[PipelineKind], dispatcher: DispatcherKind, tiling: Tiling, problem: Problem
) -> tuple[TokenRange, ...]:
    """Return every count of tokens, up to ``max_tokens``, from which another pipeline or tile family runs."""

    def family_at(tokens: int, kind: PipelineKind) -> str:
        return kind.family(tiling, dispatcher.rows(problem, tokens))

    found: list[TokenRange] = []
    start, top_k, limit = 1, problem.spec.routing.top_k, problem.limits.max_tokens
    for kind in kinds:
        most = kind.max_tokens(tiling, top_k)
        last = limit if most is None else min(most, limit)
        while start <= last:
            family = family_at(start, kind)
            found.append(TokenRange(tokens=start, pipeline=kind.name, tiles=family))
            later = range(start, last + 1)
            start += bisect_left(later, True, key=lambda n, k=kind, f=family: family_at(n, k) != f)
    return tuple(found)
