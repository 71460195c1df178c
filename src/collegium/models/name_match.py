r"""Match the regular expressions of a config without backtracking, so that no pattern can hang a load.

``re`` checks the syntax of a pattern and matches single characters, sets and anchors. This module parses the constructs
around them and advances a set of positions through the tree. The work is at most proportional to the length of the
pattern times the square of the length of the text.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ..errors import ConfigError

__all__ = ["matches_prefix"]

_MAX_PATTERN = 1000
_MAX_TEXT = 1000
# One character, set or anchor of a valid pattern. Escapes of several characters come before those of one.
_LEAF = re.compile(
    r"""
    \[ \^? \]? (?: \\. | [^\]\\] )* \]
    | \\ (?: x[0-9a-fA-F]{2} | u[0-9a-fA-F]{4} | U[0-9a-fA-F]{8} | N\{[^}]*\} | 0[0-7]{0,2} | [0-7]{3} | [^1-9] )
    | [^\\]
    """,
    re.VERBOSE | re.DOTALL,
)
# A brace that does not start a repetition is an ordinary character.
_REPEAT = re.compile(
    r"(?: (?P<sign>[*+?]) | \{ (?! \} ) (?P<min>[0-9]*) (?P<comma>,?) (?P<max>[0-9]*) \} )", re.VERBOSE
)
_SIGNS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_GROUP = re.compile(r"\( (?: \?: | \?P<\w+> | (?!\?) )", re.VERBOSE)
_COMMENT = re.compile(r"\(\?\#[^)]*\)")
_UNICODE_FLAG = re.compile(r"\(\?u+\)")
_REFERENCE = re.compile(r"\\[1-9][0-9]? | \(\?P=\w+\)", re.VERBOSE)
# The starts of other groups, and their names in errors.
_UNSUPPORTED_GROUPS = (
    (re.compile(r"\(\?>"), "an atomic group"),
    (re.compile(r"\(\?<="), "look-behind (assert)"),
    (re.compile(r"\(\?<!"), "look-behind (assert not)"),
    (re.compile(r"\(\?\(\w+\)"), "a condition (groupref exists)"),
    (re.compile(r"\(\?[a-zA-Z-]+:"), "flags"),
)


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
        return bool(_walk(_Parser(pattern).parse(), text, {0}))
    except _UnsupportedError as error:
        allowed = "literals, sets, groups, alternatives, repetitions, anchors and look-ahead"
        raise ConfigError(f"{where}: a pattern uses {error}, allowed are {allowed}") from None
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"{where}: the pattern {pattern[:100]!r} cannot be used: {error}") from error


class _UnsupportedError(Exception):
    """A construct that cannot be matched without backtracking was reached, or flags were set."""


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A character, a set or an anchor."""

    pattern: re.Pattern[str]


@dataclass(frozen=True, slots=True)
class _Branch:
    """Alternatives; a group has one or more."""

    alternatives: "tuple[_Sequence, ...]"


@dataclass(frozen=True, slots=True)
class _Repeat:
    """``min_rounds`` to ``max_rounds`` of a node, None for any number."""

    node: "_Node"
    min_rounds: int
    max_rounds: int | None


@dataclass(frozen=True, slots=True)
class _LookAhead:
    """What must follow, or if ``negated`` must not."""

    body: _Branch
    negated: bool


@dataclass(frozen=True, slots=True)
class _Unsupported:
    """A construct that cannot be matched without backtracking; an error only where the text reaches it."""

    name: str


_Node: TypeAlias = _Leaf | _Branch | _Repeat | _LookAhead | _Unsupported
_Sequence: TypeAlias = tuple[_Node, ...]


class _Parser:
    """Parses a pattern into nodes."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._position = 0

    def parse(self) -> _Sequence:
        """Return the nodes of the pattern; raises re.error if it is invalid, _UnsupportedError for flags."""
        if re.compile(self._pattern).flags & ~re.UNICODE:
            raise _UnsupportedError("flags")
        return (self._branch(),)

    def _branch(self) -> _Branch:
        """Parse alternatives up to a closing parenthesis or the end."""
        alternatives = [self._sequence()]
        while self._skip("|"):
            alternatives.append(self._sequence())
        return _Branch(tuple(alternatives))

    def _sequence(self) -> _Sequence:
        nodes: list[_Node] = []
        while self._position < len(self._pattern) and self._pattern[self._position] not in "|)":
            if self._take(_COMMENT) is not None or self._take(_UNICODE_FLAG) is not None:
                continue
            repeat = self._take(_REPEAT) if nodes else None
            if repeat is None:
                nodes.append(self._item())
            else:
                nodes.append(self._repeated(nodes.pop(), repeat))
        return tuple(nodes)

    def _item(self) -> _Node:
        """Parse a group, a look-ahead, or a leaf."""
        if not self._pattern.startswith("(", self._position):
            leaf = self._take(_LEAF)
            return self._reference() if leaf is None else _Leaf(re.compile(leaf[0]))
        if self._take(_GROUP) is not None:
            return self._closed(self._branch())
        for start in ("(?=", "(?!"):
            if self._skip(start):
                return _LookAhead(self._closed(self._branch()), negated=start == "(?!")
        for group, name in _UNSUPPORTED_GROUPS:
            if self._take(group) is not None:
                self._closed(self._branch())
                return _Unsupported(name)
        return self._reference()

    def _reference(self) -> _Unsupported:
        if self._take(_REFERENCE) is None:
            raise _UnsupportedError(f"{self._pattern[self._position :][:8]!r}")
        return _Unsupported("a reference to a group (groupref)")

    def _repeated(self, node: _Node, repeat: re.Match[str]) -> _Node:
        if self._skip("+"):
            return _Unsupported("a possessive repetition")
        self._skip("?")  # a lazy repetition matches at the same positions
        if repeat["sign"] is not None:
            return _Repeat(node, *_SIGNS[repeat["sign"]])
        min_rounds = int(repeat["min"] or 0)
        if not repeat["comma"]:
            return _Repeat(node, min_rounds, min_rounds)
        return _Repeat(node, min_rounds, int(repeat["max"]) if repeat["max"] else None)

    def _closed(self, branch: _Branch) -> _Branch:
        self._skip(")")
        return branch

    def _skip(self, text: str) -> bool:
        """Advance past ``text`` if it comes next."""
        found = self._pattern.startswith(text, self._position)
        self._position += len(text) * found
        return found

    def _take(self, token: re.Pattern[str]) -> re.Match[str] | None:
        """Advance past ``token`` and return its match, None if it does not come next."""
        match = token.match(self._pattern, self._position)
        if match is not None:
            self._position = match.end()
        return match


def _walk(nodes: Sequence[_Node], text: str, positions: set[int]) -> set[int]:
    """Return every position at which ``nodes`` may end if they start at one of ``positions``."""
    for node in nodes:
        if not positions:
            break
        positions = _step(node, text, positions)
    return positions


def _step(node: _Node, text: str, positions: set[int]) -> set[int]:
    match node:
        case _Leaf():
            matches = (node.pattern.match(text, position) for position in positions)
            return {match.end() for match in matches if match is not None}
        case _Branch():
            return set[int]().union(*(_walk(nodes, text, positions) for nodes in node.alternatives))
        case _LookAhead():
            return {position for position in positions if bool(_step(node.body, text, {position})) != node.negated}
        case _Repeat():
            return _repeat(node, text, positions)
        case _Unsupported():
            raise _UnsupportedError(node.name)


def _repeat(node: _Repeat, text: str, positions: set[int]) -> set[int]:
    for _ in range(node.min_rounds):
        before = positions
        positions = _step(node.node, text, positions)
        if positions == before:  # more rounds would not change the set
            break
    reached = set(positions)
    rounds = 0
    while positions and (node.max_rounds is None or rounds < node.max_rounds - node.min_rounds):
        positions = _step(node.node, text, positions) - reached
        reached |= positions
        rounds += 1
    return reached
