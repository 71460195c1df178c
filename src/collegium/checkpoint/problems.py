"""Raise one error for all the problems of a checkpoint."""

from collections.abc import Iterable, Sequence
from typing import NoReturn

from ..errors import CheckpointError
from .reader import Checkpoint

__all__ = ["raise_all", "raise_if_any"]

_MAX_PROBLEMS = 20


def raise_if_any(checkpoint: Checkpoint, problems: Iterable[CheckpointError]) -> None:
    """Raise one error that lists up to 20 problems, of the class of the first; do nothing if there are none."""
    listed = [*problems]
    if listed:
        raise_all(checkpoint, listed)


def raise_all(checkpoint: Checkpoint, problems: Sequence[CheckpointError]) -> NoReturn:
    """Raise one error that lists up to 20 problems, of the class of the first; ``problems`` is not empty."""
    kind = type(problems[0])
    if len(problems) == 1:
        raise kind(str(problems[0]))
    lines = [f"- {problem}" for problem in problems[:_MAX_PROBLEMS]]
    more = len(problems) - len(lines)
    if more > 0:
        lines.append(f"- and {more} more")
    raise kind(f"{checkpoint.path}: {len(problems)} problems:\n" + "\n".join(lines))
