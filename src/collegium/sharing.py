"""How the shared expert runs: as more routed experts that every token goes to, beside them, or apart after them."""

import math
from typing import NamedTuple

from . import experts
from .errors import PlanError
from .experts import ExpertKernel
from .formats import by_name
from .problem import Overrides, Problem
from .types import format_names

__all__ = ["SharedWay", "forced_in_vain", "shared_way"]

# Above it the routed experts have work for the whole GPU: benchmarks/results/shared_h200.csv.
_BESIDE = 512


def _kernel(problem: Problem, kernel: ExpertKernel, *, capturable: bool) -> ExpertKernel:
    """Return the kernel of the shared expert, to which it is one expert that every token goes to.

    The routed experts' ``kernel`` where it takes the weights; otherwise (FP8 or BF16 beside routed experts of four
    bits) the first one of the table that does, and can be captured where the plan is. Raises PlanError, and SpecError
    for a format that is not known.
    """
    asked, reasons = problem.shared(), list[str]()
    for name in asked.formats:
        by_name(name)  # raises where there is no such format
    for other in dict.fromkeys((kernel, *experts.KERNELS)):
        reason = other.refuse(asked)
        if reason is None and capturable and not other.capturable:
            reason = "no CUDA graph can capture it; it is taken where neither a graph nor activations were asked for"
        if reason is None:
            return other
        reasons.append(f"  {other.name}: {reason}")
    raise PlanError(
        f"{kernel.name} runs the routed experts, no kernel runs the shared expert ({format_names(asked.formats)}):\n"
        + "\n".join(reasons)
        + "\nForce another activation format or kernel, or ask for no graph."
    )


class SharedWay(NamedTuple):
    """The kernel of the shared expert, None without one; as how many more routed experts it runs (0: on its own).

    beside: up to how many tokens it then has a stream of its own in a CUDA graph.
    """

    kernel: ExpertKernel | None
    merged: int = 0
    beside: int = 0


def shared_way(
    problem: Problem, kernel: ExpertKernel, dispatcher: str, overrides: Overrides, *, capturable: bool
) -> SharedWay:
    """Return how the shared expert runs beside routed ones with ``kernel`` and ``dispatcher``.

    Raises PlanError where no kernel runs it, and where it cannot be as it was forced to be.
    """
    if problem.spec.shared is None:
        return SharedWay(None)
    if overrides.shared == "merged":
        reason = _cannot_merge(problem, dispatcher)
        if reason is not None:
            raise forced_in_vain("merged", reason)
        return SharedWay(kernel, merged=problem.shared().intermediate // problem.spec.intermediate_size)
    reason = "shared apart was forced" if overrides.shared == "apart" else None
    if problem.device.kind != "cuda":
        reason = f"a {problem.device.kind} has no streams"
    elif dispatcher != "local":
        reason = f"with the dispatcher {dispatcher} it already runs while tokens travel"
    elif not capturable:
        reason = "no CUDA graph can capture the layer"
    if reason is not None and overrides.shared == "beside":
        raise forced_in_vain("beside", reason)
    # A slow kernel that nobody asked for is taken where nothing else would run, and the plan says so.
    asked = problem.graph or overrides.activation_format is not None
    own = _kernel(problem, kernel, capturable=capturable and asked)
    return SharedWay(own, beside=_BESIDE if reason is None and own.capturable else 0)


def _cannot_merge(problem: Problem, dispatcher: str) -> str | None:
    """Return why the shared expert cannot be routed experts, as far as sizes and formats say, or None."""
    own, routed, shared = problem.spec.shared, problem.routed, problem.shared()
    assert own is not None
    if dispatcher != "local":
        return f"asked for the dispatcher {dispatcher}; each rank has the whole shared expert, and a part of the others"
    if own.gated:
        return "its gate gives each token a weight of its own, which is computed beside the experts"
    for name, found, wanted in (
        ("weights", format_names(shared.formats), format_names(routed.formats)),
        ("activation", shared.activation, routed.activation),
        ("biases", shared.bias, routed.bias),
        ("latent width", None, problem.spec.latent_size),
    ):
        if found != wanted:
            return f"found {name} {found}, those of the routed experts are {wanted}"
    layouts, wide = [by_name(name) for name in shared.formats], routed.intermediate
    step = math.lcm(*(size for layout in layouts for size in (layout.row_block, layout.group or 1)))
    if shared.intermediate % wide or (shared.intermediate > wide and wide % step):
        return (
            f"found {shared.intermediate:,} columns; needed are those of whole routed experts, {wide:,} each, in whole "
            f"groups of {step}"
        )
    return None


def forced_in_vain(way: str, reason: str) -> PlanError:
    """Return the error for a shared expert that was to run in a ``way`` that it cannot, for ``reason``."""
    return PlanError(f"shared {way} was forced, it cannot be: {reason}. Use Overrides(shared='apart')")
