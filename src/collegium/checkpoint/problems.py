"""One error for all the problems of a checkpoint."""

from collections.abc import Iterable, Sequence
from typing import NoReturn

from ..errors import CheckpointError
from .reader import Checkpoint

__all__ = ["raise_all", "raise_first"]

_MOST_PROBLEMS = 20


def raise_first(checkpoint: Checkpoint, problems: Iterable[CheckpointError]) -> None:
    """Raise one error that lists up to 20 problems, of the class of the first; do nothing when there are none."""
    if found := [*problems]:
        raise_all(checkpoint, found)


def raise_all(checkpoint: Checkpoint, problems: Sequence[CheckpointError]) -> NoReturn:
    """Raise the error of ``refuse`` for at least one problem."""
    kind = type(problems[0])
    if len(problems) == 1:
        raise kind(str(problems[0]))
    lines = [f"- {problem}" for problem in problems[:_MOST_PROBLEMS]]
    rest = len(problems) - len(lines)
    if rest > 0:
        lines.append(f"- and {rest} more")
    raise kind(f"{checkpoint.path}: {len(problems)} problems:\n" + "\n".join(lines))
