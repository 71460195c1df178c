"""Which files belong to the repository."""

from __future__ import annotations

import subprocess
from pathlib import Path

__all__ = ["ROOT", "tracked"]

ROOT = Path(__file__).resolve().parent.parent

# Only for an unpacked archive, where git cannot say.
_NOT_OURS = {".git", "build", "dist", "htmlcov", "__pycache__"}
_NOT_OURS_STEMS = (
    ".venv",
    ".pytest_cache",
    ".ruff_cache",
    ".hypothesis",
    ".import_linter_cache",
    ".coverage",
)


def tracked(root: Path = ROOT) -> list[Path]:
    """Return the files git tracks or would track under ``root``, sorted; all files but caches without git."""
    asked = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(asked, check=True, capture_output=True).stdout
    except (OSError, subprocess.CalledProcessError):
        found = [path for path in root.rglob("*") if _ours(path.relative_to(root))]
    else:
        found = [root / name for name in listing.decode().split("\0") if name]
    return sorted(path for path in set(found) if path.is_file())


def _ours(path: Path) -> bool:
    return not any(part in _NOT_OURS or part.startswith(_NOT_OURS_STEMS) for part in path.parts)
