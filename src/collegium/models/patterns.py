"""Regular expressions of a config, matched without backtracking, so that no pattern can hang a load.

A match is a set of positions that every node of the parsed pattern moves forward: the work grows with the length of
the pattern times the square of the length of the text, whatever the pattern is.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["matches_prefix"]

_MAX_PATTERN = 1000
_MAX_TEXT = 1000
_parser: Any = import_module("re._parser")  # the parser of ``re``; only its matcher is replaced
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")
_ALLOWED = "literals, sets, groups, alternatives, repetitions, anchors and look-ahead"


def matches_prefix(pattern: str, text: str) -> bool:
    """Tell whether ``pattern`` matches at the start of ``text``, as ``re.match`` does.

    Raises ConfigError for a pattern or text beyond 1,000 characters, a faulty pattern, and what needs backtracking
    (references to groups, atomic groups, look-behind) or flags.
    """
    if len(pattern) > _MAX_PATTERN or len(text) > _MAX_TEXT:
        msg = (
            f"quantization_config: a pattern has {len(pattern)} characters and the name {len(text)}, at most "
            f"{_MAX_PATTERN} and {_MAX_TEXT} are allowed"
        )
        raise ConfigError(msg)
    try:
        tree = _parser.parse(pattern)
        if tree.state.flags & ~re.UNICODE:
            raise _refused("flags")
        return bool(_walk(tree, text, {0}))
    except (re.error, OverflowError, RecursionError) as error:
        msg = f"quantization_config: the pattern {pattern[:100]!r} cannot be used: {error}"
        raise ConfigError(msg) from error


def _refused(what: str) -> ConfigError:
    return ConfigError(f"quantization_config: a pattern uses {what}, allowed are {_ALLOWED}")


def _walk(nodes: Iterable[Any], text: str, positions: set[int]) -> set[int]:
    """Return every position at which ``nodes`` may end when they begin at one of ``positions``."""
    for node, value in nodes:
        if not positions:
            break
        positions = _step(str(node), value, text, positions)
    return positions


def _step(kind: str, value: Any, text: str, positions: set[int]) -> set[int]:
    if kind == "SUBPATTERN":
        _, add, remove, inner = value
        if add or remove:
            raise _refused("flags")
        return _walk(inner, text, positions)
    if kind == "BRANCH":
        return set[int]().union(*(_walk(branch, text, positions) for branch in value[1]))
    if kind in _REPEATS[:2]:
        return _repeat(value, text, positions)
    if kind in ("ASSERT", "ASSERT_NOT") and value[0] > 0:
        return {p for p in positions if bool(_walk(value[1], text, {p})) == (kind == "ASSERT")}
    if kind == "AT":
        return {p for p in positions if _anchored(str(value), text, p)}
    return {p + 1 for p in positions if p < len(text) and _takes(kind, value, text[p])}


def _repeat(value: Any, text: str, positions: set[int]) -> set[int]:
    least, most, inner = value
    for _ in range(least):
        before, positions = positions, _walk(inner, text, positions)
        if positions == before:  # it can stand still, so more rounds change nothing
            break
    reached, rounds = set(positions), 0
    while positions and rounds < most - least:
        positions = _walk(inner, text, positions) - reached
        reached |= positions
        rounds += 1
    return reached


def _anchored(kind: str, text: str, position: int) -> bool:
    match kind:
        case "AT_BEGINNING" | "AT_BEGINNING_STRING":
            return position == 0
        case "AT_END_STRING":
            return position == len(text)
        case "AT_END":
            return position == len(text) or (position == len(text) - 1 and text[-1] == "\n")
        case "AT_BOUNDARY" | "AT_NON_BOUNDARY":
            sides = [0 <= p < len(text) and _word(text[p]) for p in (position - 1, position)]
            return (sides[0] != sides[1]) == (kind == "AT_BOUNDARY")
        case _:
            raise _refused(kind.lower())


def _takes(kind: str, value: Any, letter: str) -> bool:
    match kind:
        case "ANY":
            return letter != "\n"
        case "LITERAL":
            return ord(letter) == value
        case "NOT_LITERAL":
            return ord(letter) != value
        case "RANGE":
            return value[0] <= ord(letter) <= value[1]
        case "CATEGORY":
            return _in_category(str(value), letter)
        case "IN":
            rest = [(str(node), inner) for node, inner in value if str(node) != "NEGATE"]
            return any(_takes(node, inner, letter) for node, inner in rest) == (len(rest) == len(value))
        case _:
            raise _refused(kind.lower().replace("_", " "))


def _word(letter: str) -> bool:
    return letter.isalnum() or letter == "_"


def _in_category(kind: str, letter: str) -> bool:
    name = kind.removeprefix("CATEGORY_")
    test = {"DIGIT": letter.isdecimal(), "SPACE": letter.isspace(), "WORD": _word(letter)}
    return test[name.removeprefix("NOT_")] != name.startswith("NOT_")
