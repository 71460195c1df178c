"""How the shared expert runs: as more routed experts that every token goes to, beside them, or apart after them."""

import math

from . import experts
from .errors import PlanError
from .experts import ExpertKernel
from .formats import by_name
from .problem import Choice, Problem, Refusal

__all__ = ["not_merged", "runs_beside", "shared_way"]


def _kernel(problem: Problem, kernel: ExpertKernel, *, capturable: bool) -> ExpertKernel:
    """Return the kernel of the shared expert, to which it is one expert that every token goes to.

    The routed experts' ``kernel`` where it takes the weights; otherwise (FP8 or BF16 beside routed experts of four
    bits) the first one of the table that does, and can be captured where the plan is. Raises PlanError.
    """
    asked = problem.shared()
    reasons: list[str] = []
    for other in dict.fromkeys((kernel, *experts.KERNELS)):
        reason = other.refuse(asked)
        if reason is None and capturable and not other.capturable:
            reason = "it cannot be captured in a CUDA graph, which the plan promises"
        if reason is None:
            return other
        reasons.append(f"  {other.name}: {reason}")
    raise PlanError(
        f"{kernel.name} runs the routed experts, no kernel runs the shared expert ({asked.weight_format}) beside it:\n"
        + "\n".join(reasons)
        + "\nForce another activation format or kernel."
    )


def shared_way(
    problem: Problem, routed: tuple[ExpertKernel, str], force: Choice, refusals: list[Refusal], *, capturable: bool
) -> tuple[ExpertKernel | None, int]:
    """Return the kernel of the shared expert, if there is one, and as how many more routed experts it runs; 0: apart.

    routed: kernel and dispatcher of the routed experts. refusals: the other way and why not is added. Raises PlanError
    where no kernel runs it, and where it was to be merged and cannot be.
    """
    if problem.spec.shared is None:
        return None, 0
    kernel, dispatcher = routed
    cannot = _cannot_merge(problem, dispatcher)
    if cannot is not None and force.shared == "merged":
        raise not_merged(cannot)
    wide, one = problem.shared().intermediate, problem.spec.intermediate_size
    takes, rather = "Choice(shared='merged') takes it", None
    if force.shared != "merged" and problem.device.kind != "cuda":
        rather = f"it saves launches, which cost little on a {problem.device.kind}; {takes}"
    elif force.shared != "merged" and wide != one:
        rather = (
            f"found {wide:,} columns, those of {wide // one} experts, whose rows would be rounded and added one by "
            f"one, with other last bits than over ranks; {takes}"
        )
    elif force.shared in ("apart", "beside"):
        rather = f"shared {force.shared} was forced"
    why = cannot or rather
    if why is not None:
        refusals.append(Refusal(what="shared", name="merged", reason=why))
        return _kernel(problem, kernel, capturable=capturable), 0
    chosen = "shared merged was forced" if force.shared else "merged saves its launches, with the same bits"
    refusals.append(Refusal(what="shared", name="apart", reason=chosen))
    return kernel, wide // one


def runs_beside(problem: Problem, dispatcher: str, force: Choice, *, merged: int, capturable: bool) -> bool:
    """Return whether the shared expert has a stream of its own while a CUDA graph captures the layer.

    Raises PlanError where that was forced and cannot be.
    """
    if problem.device.kind != "cuda":
        reason = f"a {problem.device.kind} has no streams"
    elif dispatcher != "local":
        reason = f"with the dispatcher {dispatcher} it already runs while tokens travel"
    elif not capturable:
        reason = "no CUDA graph can capture the layer"
    else:
        return problem.spec.shared is not None and not merged and force.shared != "apart"
    if force.shared == "beside" and problem.spec.shared is not None:
        raise PlanError(f"shared beside was forced, it cannot be: {reason}. Use Choice(shared='apart')")
    return False


def _cannot_merge(problem: Problem, dispatcher: str) -> str | None:
    """Return why the shared expert cannot be routed experts, as far as sizes and formats say, or None."""
    own, routed, shared = problem.spec.shared, problem.routed, problem.shared()
    assert own is not None
    if dispatcher != "local":
        return f"asked for the dispatcher {dispatcher}; each rank has the whole shared expert, and a part of the others"
    if own.gated:
        return "its gate gives each token a weight of its own, which is computed beside the experts"
    for name, found, wanted in (
        ("weights", shared.weight_format, routed.weight_format),
        ("activation", shared.activation, routed.activation),
        ("biases", shared.bias, routed.bias),
        ("width of tokens", shared.hidden, routed.hidden),
    ):
        if found != wanted:
            return f"found {name} {found}, those of the routed experts are {wanted}"
    layout, wide = by_name(shared.weight_format), routed.intermediate
    step = math.lcm(layout.row_block, layout.group or 1)
    if shared.intermediate % wide or (shared.intermediate > wide and wide % step):
        return (
            f"found {shared.intermediate:,} columns; needed are those of whole routed experts, {wide:,} each, in whole "
            f"groups of {step}"
        )
    return None


def not_merged(reason: str) -> PlanError:
    """Return the error for a shared expert that was to be merged and cannot be, for ``reason``."""
    return PlanError(f"shared merged was forced, it cannot be: {reason}. Use Choice(shared='apart')")
