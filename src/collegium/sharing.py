"""How the shared expert runs: merged with the routed experts, on a side stream, during an exchange, or after them."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from . import experts
from .errors import PlanError
from .experts import ExpertKernel
from .formats import by_name
from .parallel import DispatcherKind
from .pipelines import PipelineKind
from .problem import Overrides, Problem
from .types import format_names

__all__ = [
    "SharedPlan",
    "adds_shared",
    "forced_shared_error",
    "no_overlap",
    "plan_shared",
    "shared_slice",
    "side_stream_of_module",
]

# With more tokens the routed experts keep the whole GPU busy: benchmarks/results/shared_h200.csv.
_SIDE_STREAM_TOKENS = 512


class SharedPlan(NamedTuple):
    """How the shared expert of a layer runs.

    kernel: None without a shared expert. merged_experts: the number of routed experts it is split into, each of which
    receives every token; 0: it is run separately. side_stream_tokens: up to how many tokens it runs on a side stream in
    a CUDA graph.
    """

    kernel: ExpertKernel | None
    merged_experts: int = 0
    side_stream_tokens: int = 0


def plan_shared(
    problem: Problem,
    kernel: ExpertKernel,
    dispatcher: str,
    overrides: Overrides,
    *,
    capturable: bool,
    partial_sums: bool = False,
) -> SharedPlan:
    """Return how the shared expert runs, given the ``kernel`` and ``dispatcher`` of the routed experts.

    capturable: whether a CUDA graph can capture those. partial_sums: the output is this rank's part of a sum. Raises
    PlanError where no kernel runs the shared expert, and where it cannot run in the way that ``overrides`` forces.
    """
    if problem.spec.shared is None:
        return SharedPlan(None)
    if overrides.shared == "sliced" and not partial_sums:
        reason = f"the dispatcher is {dispatcher}, which returns whole sums; slices are parts of a sum"
        raise forced_shared_error("sliced", f"{reason}, for Overrides(dispatcher='partial')")
    if overrides.shared == "merged":
        reason = _cannot_merge(problem, dispatcher)
        if reason is not None:
            raise forced_shared_error("merged", reason)
        return SharedPlan(kernel, merged_experts=problem.shared().intermediate // problem.spec.intermediate_size)
    if not adds_shared(problem, overrides, partial_sums=partial_sums):
        return SharedPlan(None)
    reason = _no_side_stream(problem, dispatcher, overrides, capturable=capturable)
    if reason is not None and overrides.shared == "side_stream":
        raise forced_shared_error("side_stream", reason)
    # A slow kernel that was not forced is used where nothing else would run; the plan reports it.
    requires_capture = problem.graph or overrides.activation_format is not None
    shared_kernel = _shared_kernel(problem, kernel, capturable=capturable and requires_capture)
    on_side_stream = reason is None and shared_kernel.capturable
    return SharedPlan(shared_kernel, side_stream_tokens=_SIDE_STREAM_TOKENS if on_side_stream else 0)


def adds_shared(problem: Problem, overrides: Overrides, *, partial_sums: bool) -> bool:
    """Return whether this rank adds a shared expert, or a slice of it, to its output.

    partial_sums: the output is this rank's part of a sum. Then rank 0 adds the whole shared expert and the other ranks
    add nothing, or every rank adds its slice (``shared='sliced'``).
    """
    placement = problem.placement
    return not partial_sums or placement is None or placement.first or overrides.shared == "sliced"


def shared_slice(problem: Problem, overrides: Overrides, *, partial_sums: bool) -> tuple[int, int]:
    """Return which slice of the shared expert's width this rank has, and how many there are; (0, 1) for the whole.

    Raises PlanError where the width, or the placement, cannot be split.
    """
    placement = problem.placement
    if not partial_sums or overrides.shared != "sliced" or placement is None:
        return 0, 1
    if placement.world_size > 1 and placement.tp_size > 1:
        raise forced_shared_error(
            "sliced",
            f"the placement is {placement}; its ranks split experts or their width, for slices only one of both",
        )
    number = max(placement.rank, placement.tp_rank)
    count = max(placement.world_size, placement.tp_size)
    if problem.spec.shared is None:
        return number, count
    shared = replace(problem, shared_slices=1).shared()
    group = _group_of(shared.formats)
    if shared.intermediate % (count * group):
        raise forced_shared_error(
            "sliced",
            f"its width of {shared.intermediate:,} cannot be split over {count} ranks in whole groups of {group}",
        )
    return number, count


def forced_shared_error(mode: str, reason: str) -> PlanError:
    """Return the error for a shared expert that cannot run in the forced ``mode`` for ``reason``."""
    return PlanError(f"shared={mode!r} was forced and is not possible: {reason}. Use Overrides(shared='sequential')")


def no_overlap(
    problem: Problem, dispatcher: DispatcherKind, pipelines: Sequence[PipelineKind], overrides: Overrides
) -> str | None:
    """Return why the shared expert does not run during an exchange of ``dispatcher``, with its wrappers, or None."""
    if overrides.shared == "sequential":
        return "shared='sequential' was forced"
    if not dispatcher.overlaps:
        return f"the dispatcher {dispatcher.name} exchanges nothing"
    filling = [kind.name for kind in pipelines if kind.fills_gpu]
    if filling:
        return f"the kernel of {filling[0]} does the exchange and occupies the whole GPU"
    if problem.spec.latent_size is not None:
        return "the layer has latent projections, and it is added behind the second one"
    return None


def side_stream_of_module(problem: Problem, dispatcher: str, overrides: Overrides, *, capturable: bool) -> int:
    """Return up to how many tokens a shared expert of the caller runs on a side stream in a CUDA graph.

    Only where that is forced, since a module may launch kernels on a stream that it chose. Raises PlanError where it
    cannot.
    """
    if overrides.shared != "side_stream":
        return 0
    reason = _no_side_stream(problem, dispatcher, overrides, capturable=capturable)
    if reason is not None:
        raise forced_shared_error("side_stream", reason)
    return _SIDE_STREAM_TOKENS


def _no_side_stream(problem: Problem, dispatcher: str, overrides: Overrides, *, capturable: bool) -> str | None:
    """Return why the shared expert cannot run on a side stream, or None."""
    if problem.device.kind != "cuda":
        return f"the device is a {problem.device.kind}, which has no streams"
    if dispatcher not in ("local", "partial"):
        return f"the dispatcher is {dispatcher}; over ranks, shared='overlapped' runs it during the exchange"
    if not capturable:
        return "a CUDA graph cannot capture the layer"
    if overrides.shared in ("sequential", "overlapped"):
        return f"shared={overrides.shared!r} was forced"
    return None


def _shared_kernel(problem: Problem, kernel: ExpertKernel, *, capturable: bool) -> ExpertKernel:
    """Return the kernel of the shared expert, for which it is a single expert that receives every token.

    That is the routed experts' ``kernel`` where it takes the weights; otherwise (FP8 or BF16 next to 4-bit routed
    experts) the first row of the table that does. capturable: skip kernels that no CUDA graph can capture. Raises
    PlanError, and SpecError for an unknown format.
    """
    shared_problem = problem.shared()
    reasons: list[str] = []
    for name in shared_problem.formats:
        by_name(name)  # raises SpecError for an unknown format
    for candidate in dict.fromkeys((kernel, *experts.KERNELS)):
        reason = candidate.refuse(shared_problem)
        if reason is None and capturable and not candidate.capturable:
            reason = (
                "a CUDA graph cannot capture it; it is used only if neither a graph nor an activation format is "
                "requested"
            )
        if reason is None:
            return candidate
        reasons.append(f"  {candidate.name}: {reason}")
    raise PlanError(
        f"{kernel.name} runs the routed experts, but no kernel supports the shared expert "
        f"({format_names(shared_problem.formats)}):\n"
        + "\n".join(reasons)
        + "\nOverride the activation format or the kernel, or plan without a graph."
    )


def _cannot_merge(problem: Problem, dispatcher: str) -> str | None:
    """Return why the shared expert cannot become routed experts, as far as sizes and formats decide, or None."""
    spec, routed, shared = problem.spec, problem.routed, problem.shared()
    assert spec.shared is not None
    if dispatcher != "local":
        return f"the dispatcher is {dispatcher}; each rank has the whole shared expert but only some routed experts"
    if spec.shared.gated:
        return "its gate gives each token a separate weight, which is computed outside the experts"
    for name, shared_value, routed_value in (
        ("weights", format_names(shared.formats), format_names(routed.formats)),
        ("activation", shared.activation, routed.activation),
        ("biases", shared.bias, routed.bias),
        ("latent width", None, spec.latent_size),
    ):
        if shared_value != routed_value:
            return f"{name}: found {shared_value}, the routed experts have {routed_value}"
    columns = routed.intermediate
    group = _group_of(shared.formats)
    if shared.intermediate % columns:
        return f"its width is {shared.intermediate:,}; it must be a multiple of the routed experts' {columns:,}"
    if shared.intermediate > columns and columns % group:
        return (
            f"its width of {shared.intermediate:,} would be split every {columns:,} columns, inside groups of {group}"
        )
    return None


def _group_of(names: tuple[str, str]) -> int:
    """Return the rows of gate_up and columns of down that a cut of weights in the formats ``names`` must not divide."""
    layouts = [by_name(name) for name in names]
    return math.lcm(*(size for layout in layouts for size in (layout.row_block, layout.group or 1)))
