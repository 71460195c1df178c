"""Edits of source text that find their target by symbol and by the shape of the code there, not by quoted lines.

``$name`` in a pattern stands for any name, the same one wherever it occurs in the edit; everything else must be there
as it is written. Formatting, comments and what local names are called do not matter.
"""

from __future__ import annotations

import ast
import builtins
import re
from typing import NamedTuple

__all__ = ["Edit", "edited", "segment"]

_ANY = "_any_"  # how ``$`` is written for Python's parser
_ATOMS = (ast.Name, ast.Constant, ast.Call, ast.Attribute, ast.Subscript, ast.List, ast.Set, ast.Dict, ast.JoinedStr)


class Edit(NamedTuple):
    """One change: in which symbol, the code that is there once, and what replaces it.

    symbol: a function, a class, ``Class.method`` or a name assigned at module level; empty is the whole file. before,
    after: an expression, or statements; an ``after`` that is empty removes the statements. text: both are plain text
    instead, in which any white space matches any other: for assembly within strings and for CUDA.
    """

    symbol: str
    before: str
    after: str
    text: bool = False


def edited(edit: Edit, source: str, *, python: bool = True) -> str:
    """Return ``source`` after the edit; ValueError unless its pattern occurs exactly once in its symbol."""
    start, end = segment(source, edit.symbol, python=python)
    if edit.text or not python:
        pattern = r"\s+".join(re.escape(word) for word in edit.before.split())
        spans = [(start + m.start(), start + m.end(), edit.after) for m in re.finditer(pattern, source[start:end])]
    else:
        spans = _matches(edit, source)
    if len(spans) != 1:
        msg = f"{edit.symbol or 'the file'}: the pattern occurs {len(spans)} times, needed is once: {edit.before!r}"
        raise ValueError(msg)
    ((first, last, new),) = spans
    return source[:first] + new + source[last:]


def segment(source: str, symbol: str, *, python: bool = True) -> tuple[int, int]:
    """Return where a symbol's text begins and ends; ValueError unless the file defines it once."""
    if not symbol:
        return 0, len(source)
    if python:
        node = _defined(ast.parse(source), symbol)
        at = _Offsets(source)
        return at.start(node), at.end(node)
    spans = [
        span for m in re.finditer(rf"\b{re.escape(symbol)}\s*\(", source) if (span := _body(source, m)) is not None
    ]
    if len(spans) != 1:
        msg = f"{symbol} is defined {len(spans)} times, needed is once"
        raise ValueError(msg)
    return spans[0]


def _body(source: str, head: re.Match[str]) -> tuple[int, int] | None:
    """Return the span of a C++ function from its name to its last brace, None for a call or a declaration."""
    at = _closing(source, head.end() - 1, "()")
    found = re.compile(r"\s*(?:const\s*)?\{").match(source, at)
    return None if found is None else (head.start(), _closing(source, found.end() - 1, "{}"))


def _closing(source: str, at: int, pair: str) -> int:
    depth = 0
    for place in range(at, len(source)):
        depth += (source[place] == pair[0]) - (source[place] == pair[1])
        if depth == 0:
            return place + 1
    msg = f"no {pair[1]!r} closes {source[at : at + 30]!r}"
    raise ValueError(msg)


class _Offsets:
    """Places of nodes in a text: Python counts bytes of a line."""

    def __init__(self, source: str) -> None:
        self._lines = source.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def _place(self, line: int, column: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def start(self, node: ast.stmt | ast.expr) -> int:
        return self._place(node.lineno, node.col_offset)

    def end(self, node: ast.stmt | ast.expr) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._place(node.end_lineno, node.end_col_offset)


def _defined(tree: ast.Module, symbol: str) -> ast.stmt:
    found: list[ast.stmt] = []

    def visit(node: ast.AST, path: str) -> None:
        for child in ast.iter_child_nodes(node):
            inside = path
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inside = f"{path}.{child.name}".lstrip(".")
                if inside == symbol:
                    found.append(child)
            elif isinstance(child, ast.Assign | ast.AnnAssign):
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                names = [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
                if symbol in [f"{path}.{name}".lstrip(".") for name in names]:
                    found.append(child)
            if not isinstance(child, ast.expr):
                visit(child, inside)

    visit(tree, "")
    if len(found) != 1:
        msg = f"{symbol} is defined {len(found)} times, needed is once"
        raise ValueError(msg)
    return found[0]


def _matches(edit: Edit, source: str) -> list[tuple[int, int, str]]:
    """Return (start, end, replacement) of each place in the symbol where the pattern is."""
    tree, at = ast.parse(source), _Offsets(source)
    scope: ast.AST = _defined(tree, edit.symbol) if edit.symbol else tree
    before, after = _parsed(edit.before), _parsed(edit.after)
    known = set(re.findall(r"\w+", source)) | set(dir(builtins))
    spans: list[tuple[int, int, str]] = []
    if isinstance(before, ast.expr) and isinstance(after, ast.expr):
        for node in _expressions(scope):
            names: dict[str, str] = {}
            if _same(before, node, names):
                new = _written(after, names, known)
                plain = isinstance(after, _ATOMS) or (isinstance(after, ast.Tuple) and isinstance(node, ast.Tuple))
                spans.append((at.start(node), at.end(node), new if plain else f"({new})"))
        return spans
    wanted, new_body = _statements(before), _statements(after)
    for body in _bodies(scope):
        for first in range(len(body) - len(wanted) + 1):
            there, names = body[first : first + len(wanted)], dict[str, str]()
            if all(_same(own, node, names) for own, node in zip(wanted, there, strict=True)):
                lines = "\n".join(_written(node, names, known) for node in new_body) or "pass"
                indent = "\n" + " " * there[0].col_offset
                spans.append((at.start(there[0]), at.end(there[-1]), indent.join(lines.split("\n"))))
    return spans


def _parsed(text: str) -> ast.expr | list[ast.stmt]:
    body = ast.parse(text.replace("$", _ANY)).body
    return body[0].value if len(body) == 1 and isinstance(body[0], ast.Expr) else body


def _statements(pattern: ast.expr | list[ast.stmt]) -> list[ast.stmt]:
    return [ast.Expr(pattern)] if isinstance(pattern, ast.expr) else pattern


def _expressions(scope: ast.AST) -> list[ast.expr]:
    """Return the expressions of a symbol, without those within f-strings, whose places Python 3.11 does not have."""
    found: list[ast.expr] = []
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, ast.expr):
            found.append(child)
        if not isinstance(child, ast.JoinedStr):
            found += _expressions(child)
    return found


def _bodies(scope: ast.AST) -> list[list[ast.stmt]]:
    lists = [value for node in ast.walk(scope) for _, value in ast.iter_fields(node) if isinstance(value, list)]
    found = [[item for item in value if isinstance(item, ast.stmt)] for value in lists]
    return [body for body in found if body]


def _same(pattern: object, node: object, names: dict[str, str]) -> bool:
    """Whether a node has the pattern's shape; notes in ``names`` what ``$`` stands for, a different name for each."""
    if isinstance(pattern, ast.Name) and pattern.id.startswith(_ANY):
        if not isinstance(node, ast.Name):
            return False
        if pattern.id not in names and node.id in names.values():
            return False
        return names.setdefault(pattern.id, node.id) == node.id
    if isinstance(pattern, ast.AST):
        if type(pattern) is not type(node):
            return False
        fields = [name for name in pattern._fields if name not in ("ctx", "kind", "type_comment", "type_params")]
        return all(_same(getattr(pattern, name, None), getattr(node, name, None), names) for name in fields)
    if isinstance(pattern, list):
        return (
            isinstance(node, list)
            and len(pattern) == len(node)  # pyright: ignore[reportUnknownArgumentType]
            and all(_same(own, other, names) for own, other in zip(pattern, node, strict=True))  # pyright: ignore
        )
    return type(pattern) is type(node) and pattern == node


def _written(node: ast.expr | ast.stmt, names: dict[str, str], known: set[str]) -> str:
    """Return a replacement as text; ValueError where it has a name that the file lacks, as after a rename."""
    text = re.sub(rf"{_ANY}\w+", lambda m: names.get(m[0], m[0].removeprefix(_ANY)), ast.unparse(node))
    used = {own.id for own in ast.walk(ast.parse(text)) if isinstance(own, ast.Name)}
    stored = {
        own.id for own in ast.walk(ast.parse(text)) if isinstance(own, ast.Name) and isinstance(own.ctx, ast.Store)
    }
    if lost := used - known - stored:
        msg = f"the replacement {text!r} has names that the file lacks: {sorted(lost)}"
        raise ValueError(msg)
    return text
