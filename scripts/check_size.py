"""Functions small enough to read: at most 60 lines and 8 parameters each.

Of a device function the lines after its signature and docstring count, since the formatter gives each launch argument a
line; ``readability.py`` counts its parameters.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from tracked import ROOT, tracked

__all__ = ["OPTIONS", "main", "oversized", "parameter_count"]

FUNCTION = 60
PARAMETERS = 8
OPTIONS = {"load_layer", "load_model"}  # what users call with keywords, each an option that most leave out


def oversized(root: Path = ROOT) -> list[str]:
    """Return one line for each function under ``root/src`` that is too long or takes too many parameters."""
    faults: list[str] = []
    for path in tracked(root):
        name = path.relative_to(root)
        if path.suffix != ".py" or name.parts[0] != "src":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        faults += [f"{name}:{fault}" for fault in _functions(tree, device="kernels" in name.parts)]
    return faults


def parameter_count(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return how many parameters a caller passes; 0 for a command, whose parameters are options of a command line."""
    if any("app.command" in ast.unparse(decorator) for decorator in function.decorator_list):
        return 0
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return sum(argument.arg not in ("self", "cls") for argument in arguments)


def _functions(tree: ast.Module, *, device: bool) -> list[str]:
    faults: list[str] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0] if device else node
        length = (node.end_lineno or node.lineno) - first.lineno + 1
        count = 0 if device else parameter_count(node)
        if length > FUNCTION:
            faults.append(f"{node.lineno}: {node.name} has {length} lines, allowed {FUNCTION}")
        if count > PARAMETERS and node.name not in OPTIONS:
            faults.append(f"{node.lineno}: {node.name} takes {count} parameters, allowed {PARAMETERS}")
    return faults


def main() -> int:
    """Print the functions that are too large; 1 when there are any."""
    faults = oversized()
    print("\n".join(faults) or f"size: no function over {FUNCTION} lines or {PARAMETERS} parameters")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
