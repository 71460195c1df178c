"""What makes the source hard to read, in numbers, with a budget for each.

    python scripts/readability.py                  # this tree
    python scripts/readability.py --against REV    # and the tree of another commit next to it
    python scripts/readability.py --check          # 1 when a budget is exceeded, as `make check` runs it

Filler words are names that tell how a value came to be instead of what it is.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from check_size import OPTIONS, parameter_count
from tracked import ROOT, tracked

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Budget", "main", "measure"]

FILLER = frozenset(
    "own told found made beside said asked given held seen kept wide most least each again".split()  # noqa: SIM905
)
BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match, ast.AsyncFor, ast.AsyncWith)
DEVICE = "kernels"


@dataclass(frozen=True, slots=True)
class Budget:
    """A number that ``measure`` returns under ``name``, and the most it may be."""

    name: str
    text: str
    limit: float


BUDGETS = (
    Budget("filler", "filler words per 1,000 bindings of src", 3),
    Budget("host_parameters", "most parameters of a host function", 8),
    Budget("device_parameters", "most parameters of a device function", 24),
    Budget("nesting", "deepest nesting of blocks", 4),
    Budget("fmt_skip", "`fmt: skip` in src", 30),
    Budget("readme_lines", "lines of README.md", 100),
    Budget("guide_words", "words of the guides (docs/*.md)", 40_000),
    Budget("test_names", "tests not named in two to six words", 0),
)


def measure(root: Path = ROOT) -> dict[str, float]:
    """Return the number of each budget for the tracked files of the tree at ``root``."""
    files = {path.relative_to(root): path for path in tracked(root)}
    source = {name: path.read_text() for name, path in files.items() if name.parts[0] == "src" and name.suffix == ".py"}
    trees = {name: ast.parse(text) for name, text in source.items()}
    bindings = [name for tree in trees.values() for name in bound_names(tree)]
    host = [function for name, tree in trees.items() if DEVICE not in name.parts for function in functions(tree)]
    device = [function for name, tree in trees.items() if DEVICE in name.parts for function in functions(tree)]
    guides = [path for name, path in files.items() if name.parts[0] == "docs" and len(name.parts) == 2]
    tests = [path for name, path in files.items() if name.parts[0] == "tests" and name.suffix == ".py"]
    return {
        "filler": 1000 * sum(name in FILLER for name in bindings) / len(bindings),
        "host_parameters": max(parameter_count(function) for function in host if function.name not in OPTIONS),
        "device_parameters": max(parameter_count(function) for function in device),
        "nesting": max(nesting(function) for function in host + device),
        "fmt_skip": sum(text.count("# fmt: skip") for text in source.values()),
        "readme_lines": len((root / "README.md").read_text().splitlines()),
        "guide_words": sum(len(path.read_text().split()) for path in guides if path.suffix == ".md"),
        "test_names": sum(
            not 2 <= words <= 6 for path in tests for words in words_in_test_names(ast.parse(path.read_text()))
        ),
    }


def words_in_test_names(tree: ast.Module) -> Iterator[int]:
    """Yield the number of words in the name of each test of a module, without the word ``test``."""
    for function in functions(tree):
        if function.name.startswith("test_"):
            yield len(function.name.split("_")) - 1


def bound_names(tree: ast.Module) -> Iterator[str]:
    """Yield every name that an assignment or a parameter binds."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def functions(tree: ast.Module) -> Iterable[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return every function of a module, methods and inner ones too."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def nesting(node: ast.AST, level: int = 0) -> int:
    """Return how many blocks are inside each other at most; a chain of ``elif`` is one."""
    deepest = level
    for child in ast.iter_child_nodes(node):
        chained = isinstance(child, ast.If) and isinstance(node, ast.If) and node.orelse == [child]
        deeper = isinstance(child, BLOCKS) and not chained
        deepest = max(deepest, nesting(child, level + deeper))
    return deepest


def measure_commit(revision: str) -> dict[str, float]:
    """Return what ``measure`` finds in the tree of ``revision``, checked out into a temporary clone."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "clone", "--quiet", "--no-checkout", ROOT, folder], check=True)
        subprocess.run(["git", "-C", folder, "checkout", "--quiet", revision], check=True)
        return measure(Path(folder))


def main() -> int:
    """Print the numbers; 1 when asked to check and one exceeds its budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="REV", help="a commit to compare with")
    parser.add_argument("--check", action="store_true", help="fail when a budget is exceeded")
    options = parser.parse_args()
    columns = [("now", measure())]
    if options.against:
        columns.insert(0, (options.against, measure_commit(options.against)))
    print(f"{'':45}{''.join(f'{title:>14}' for title, _ in columns)}{'budget':>14}")
    for budget in BUDGETS:
        values = "".join(f"{numbers[budget.name]:14,.1f}" for _, numbers in columns)
        print(f"{budget.text:45}{values}{budget.limit:14,.1f}")
    numbers = columns[-1][1]
    exceeded = [budget.text for budget in BUDGETS if numbers[budget.name] > budget.limit]
    if exceeded and options.check:
        print(f"readability: over budget: {'; '.join(exceeded)}")
    return int(options.check and bool(exceeded))


if __name__ == "__main__":
    sys.exit(main())
