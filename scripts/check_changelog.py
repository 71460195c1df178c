"""The newest release in CHANGELOG.md is the package's version."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tracked import ROOT

__all__ = ["changelog_fault", "main", "package_version"]

_RELEASE = re.compile(r"^## \[(\d+\.\d+\.\d+[^\]]*)\](?: - (\S+))?\s*$", re.MULTILINE)
_VERSION = re.compile(r"^__version__ = \"(.+)\"$", re.MULTILINE)
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}|unreleased")


def package_version(root: Path = ROOT) -> str:
    """Return the version of the package under ``root``."""
    found = _VERSION.search((root / "src" / "collegium" / "__init__.py").read_text(encoding="utf-8"))
    if found is None:
        raise SystemExit('src/collegium/__init__.py has no line such as: __version__ = "0.1.0"')
    return found[1]


def changelog_fault(root: Path = ROOT) -> str | None:
    """Return what is wrong between CHANGELOG.md and the package under ``root``, or None."""
    version = package_version(root)
    releases = _RELEASE.findall((root / "CHANGELOG.md").read_text(encoding="utf-8"))
    if not releases:
        return "CHANGELOG.md has no line such as '## [0.1.0] - 2026-01-31'"
    newest, date = releases[0]
    if newest != version:
        return f"CHANGELOG.md begins with {newest}, the package says {version}; they must be equal"
    if not _DATE.fullmatch(date):
        return f"CHANGELOG.md: {newest} has the date {date!r}; allowed: YYYY-MM-DD or unreleased"
    return None


def main() -> int:
    """Print the fault; 1 when there is one."""
    fault = changelog_fault()
    print(fault or "changelog: agrees with the version")
    return fault is not None


if __name__ == "__main__":
    sys.exit(main())
