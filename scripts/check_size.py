"""Small enough to read: lines of files and functions, parameters, and lines of code in all."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

from tracked import ROOT, tracked

__all__ = ["HOST_FILE", "KERNEL_FILE", "code_lines", "main", "oversized", "total_lines"]

HOST_FILE = 400
KERNEL_FILE = 700
FUNCTION = 60
PARAMETERS = 8
# Lines of code; ADR 8 says why comments and docstrings are free, and why there are three budgets; ADR 14: CUDA.
LAYER = 10_000
SEVERAL = 6_000
REST = 8_000
CUDA = 600
SEVERAL_OF = (
    "balance",
    "commands/balance.py",
    "parallel",
    "kernels/mega.py",
    "kernels/peer.py",
    "pipelines/mega.py",
    "placement.py",
    "runtime/symmetric.py",
)
REST_OF = ("__main__.py", "checkpoint", "cli.py", "commands", "integrations", "models", "testing")

_WHAT = {LAYER: "the layer", SEVERAL: "several GPUs", REST: "checkpoints and commands"}
_NO_CODE = (
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
)


def oversized(root: Path = ROOT) -> list[str]:
    """Return one line for each file or function under ``root/src`` that is over its budget."""
    faults: list[str] = []
    totals = dict.fromkeys(_WHAT, 0)
    for path in _sources(root):
        text = path.read_text(encoding="utf-8")
        lines, device = len(text.splitlines()), "kernels" in path.relative_to(root).parts
        allowed = KERNEL_FILE if device else HOST_FILE
        name = str(path.relative_to(root))
        totals[_budget(path, root)] += code_lines(text)
        if lines > allowed:
            faults.append(f"{name}: {lines} lines, allowed {allowed}; split it by subject")
        if not device:
            faults += [f"{name}:{fault}" for fault in _functions(ast.parse(text))]
    faults += _cuda(root)
    for allowed, total in totals.items():
        if total > allowed:
            faults.append(f"src: {total} lines of code in {_WHAT[allowed]}, allowed {allowed}; what can be deleted?")
    return faults


def total_lines(root: Path = ROOT) -> dict[str, int]:
    """Return the lines of code of the layer, of what several GPUs need, and of checkpoints and commands."""
    totals = dict.fromkeys(_WHAT, 0)
    for path in _sources(root):
        totals[_budget(path, root)] += code_lines(path.read_text(encoding="utf-8"))
    return {_WHAT[allowed]: total for allowed, total in totals.items()}


def code_lines(text: str) -> int:
    """Return how many lines of a module hold code: not blank, not only a comment, not a docstring."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if ast.get_docstring(node, clean=False) is not None and first is not None:
                found.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(found)


def _cuda(root: Path) -> list[str]:
    """Return what is over the budget of kernels in CUDA; their comments are lines of their own."""
    total, faults = 0, list[str]()
    for path in (path for path in tracked(root) if path.suffix == ".cu" and path.is_relative_to(root / "src")):
        lines = path.read_text(encoding="utf-8").splitlines()
        total += sum(bool(line.strip()) and not line.lstrip().startswith("//") for line in lines)
        if len(lines) > KERNEL_FILE:
            faults.append(f"{path.relative_to(root)}: {len(lines)} lines, allowed {KERNEL_FILE}; split it by subject")
    if total > CUDA:
        faults.append(f"src: {total} lines of CUDA, allowed {CUDA}; what can be deleted, or written in Triton?")
    return faults


def _budget(path: Path, root: Path) -> int:
    inside = path.relative_to(root / "src").parts[1:]
    rooms = {*inside[:1], "/".join(inside)}
    return SEVERAL if rooms & set(SEVERAL_OF) else REST if rooms & set(REST_OF) else LAYER


def _sources(root: Path) -> list[Path]:
    return [path for path in tracked(root) if path.suffix == ".py" and path.is_relative_to(root / "src")]


def _functions(tree: ast.Module) -> list[str]:
    faults: list[str] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        # What a command takes are options of a command line, which nobody passes by hand.
        command = any("app.command" in ast.unparse(wrapper) for wrapper in node.decorator_list)
        taken = 0 if command else sum(argument.arg not in ("self", "cls") for argument in arguments)
        if length > FUNCTION:
            faults.append(f"{node.lineno}: {node.name} has {length} lines, allowed {FUNCTION}")
        if taken > PARAMETERS:
            faults.append(f"{node.lineno}: {node.name} takes {taken} parameters, allowed {PARAMETERS}")
    return faults


def main() -> int:
    """Print what is over budget; 1 when anything is."""
    faults = oversized()
    print(
        "\n".join(faults) or "size: " + ", ".join(f"{n} lines of code in {what}" for what, n in total_lines().items())
    )
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
