"""Match the regular expressions of a config without backtracking, so that no pattern can hang a load.

The matcher advances a set of positions through the nodes of the parsed pattern: the work is at most proportional to the
length of the pattern times the square of the length of the text.
"""

import re
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from ..errors import ConfigError

__all__ = ["matches_prefix"]

_MAX_PATTERN = 1000
_MAX_TEXT = 1000
# The parser of ``re``, and its matcher for single characters and anchors; this module replaces only the constructs that
# could backtrack. Both are private because ``re`` has no public syntax tree: ``sre_parse`` is deprecated, ``compile``
# backtracks, and a separate parser could read a pattern differently from the tool that wrote it.
_parser: Any = import_module("re._parser")
_compiler: Any = import_module("re._compiler")
_LEAVES = ("ANY", "LITERAL", "NOT_LITERAL", "IN", "AT")


def matches_prefix(pattern: str, text: str, *, where: str = "quantization_config") -> bool:
    """Return whether ``pattern`` matches at the start of ``text``, as ``re.match`` does.

    where: the part of the config that has the pattern, for errors. Raises ConfigError for a pattern or text beyond
    1,000 characters, an invalid pattern, constructs that need backtracking (references to groups, atomic groups,
    look-behind), and flags.
    """
    if len(pattern) > _MAX_PATTERN or len(text) > _MAX_TEXT:
        raise ConfigError(
            f"{where}: a pattern has {len(pattern)} characters and the name {len(text)}, at most "
            f"{_MAX_PATTERN} and {_MAX_TEXT} are allowed"
        )
    try:
        tree = _parser.parse(pattern)
        return bool(_Matcher(text, tree.state).walk(tree, {0}))
    except _Unsupported as error:
        allowed = "literals, sets, groups, alternatives, repetitions, anchors and look-ahead"
        raise ConfigError(f"{where}: a pattern uses {error}, allowed are {allowed}") from None
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"{where}: the pattern {pattern[:100]!r} cannot be used: {error}") from error


class _Unsupported(Exception):
    """A construct that cannot be matched without backtracking."""


class _Matcher:
    """Advances sets of positions through ``text``."""

    def __init__(self, text: str, state: Any) -> None:
        self._text = text
        self._state = state
        if state.flags & ~re.UNICODE:
            raise _Unsupported("flags")
        self._leaves: dict[int, re.Pattern[str]] = {}

    def walk(self, nodes: Iterable[Any], positions: set[int]) -> set[int]:
        """Return every position at which ``nodes`` may end if they start at one of ``positions``."""
        for node in nodes:
            if not positions:
                break
            positions = self._step(node, positions)
        return positions

    def _step(self, node: Any, positions: set[int]) -> set[int]:
        kind = str(node[0])
        value = node[1]
        if kind in _LEAVES:
            if id(node) not in self._leaves:
                self._leaves[id(node)] = _compiler.compile(_parser.SubPattern(self._state, [node]))
            matches = (self._leaves[id(node)].match(self._text, position) for position in positions)
            return {match.end() for match in matches if match is not None}
        if kind == "SUBPATTERN" and not value[1] and not value[2]:
            return self.walk(value[3], positions)
        if kind == "BRANCH":
            return set[int]().union(*(self.walk(branch, positions) for branch in value[1]))
        if kind in ("MAX_REPEAT", "MIN_REPEAT"):
            return self._repeat(value, positions)
        if kind in ("ASSERT", "ASSERT_NOT") and value[0] > 0:
            return {p for p in positions if bool(self.walk(value[1], {p})) == (kind == "ASSERT")}
        raise _Unsupported("flags" if kind == "SUBPATTERN" else kind.lower().replace("_", " "))

    def _repeat(self, value: Any, positions: set[int]) -> set[int]:
        min_rounds, max_rounds, inner = value
        for _ in range(min_rounds):
            before = positions
            positions = self.walk(inner, positions)
            if positions == before:  # more rounds would not change the set
                break
        reached = set(positions)
        rounds = 0
        while positions and rounds < max_rounds - min_rounds:
            positions = self.walk(inner, positions) - reached
            reached |= positions
            rounds += 1
        return reached
