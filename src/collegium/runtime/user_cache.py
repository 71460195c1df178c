"""Files in the user's cache directory: measurements and compiled code, which can be recreated."""

import os
import threading
from pathlib import Path

__all__ = ["cache_folder", "write_atomic"]


def cache_folder(name: str) -> Path:
    """Return ``$XDG_CACHE_HOME/collegium/name``, by default in ``~/.cache``; without a home an invalid path."""
    # The one environment variable that is read: it changes where files are, and no behaviour.
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(base or Path.home() / ".cache") / "collegium" / name
    except RuntimeError:
        return Path(os.devnull) / name


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file, and create its folder; readers see the old or the new content, never a partial file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.tmp")
    partial.write_bytes(content)
    partial.replace(path)
