from __future__ import annotations

import ast

import pytest

from tracked import ROOT

SOURCE = ROOT / "src" / "collegium"
READERS = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def reads(source: str) -> list[int]:
    """The lines of ``source`` that touch the environment."""
    found: list[int] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in READERS:
            found.append(node.lineno)
        if isinstance(node, ast.ImportFrom) and node.module == "os" and {a.name for a in node.names} & READERS:
            found.append(node.lineno)
    return found


def test_the_library_reads_no_environment_variable() -> None:
    # torchrun starts the commands, and `vllm serve` passes its plug-ins no argument.
    started = SOURCE / "cli.py", SOURCE / "commands" / "terminal.py", SOURCE / "integrations" / "vllm" / "options.py"
    paths = [path for path in SOURCE.rglob("*.py") if path not in started]
    assert len(reads(started[2].read_text(encoding="utf-8"))) == 1
    assert len(paths) > 10
    # Where the user's cache directory is; it changes no result.
    allowed = SOURCE / "runtime" / "user_cache.py"
    assert len(reads(allowed.read_text(encoding="utf-8"))) == 1
    assert 'environ.get("XDG_CACHE_HOME")' in allowed.read_text(encoding="utf-8")
    paths.remove(allowed)
    guilty = [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in reads(path.read_text(encoding="utf-8"))]
    assert not guilty, f"read an explicit argument instead: {guilty}"


@pytest.mark.parametrize(
    "source",
    [
        "import os\nx = os.environ['A']",
        "import os as o\nx = o.getenv('A')",
        "from os import environ\nx = environ",
    ],
)
def test_a_read_is_found(source: str) -> None:
    assert reads(source)
