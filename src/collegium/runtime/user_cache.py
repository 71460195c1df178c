"""Files in the user's cache directory: what this machine measured or compiled, and can make again."""

import os
import threading
from pathlib import Path

__all__ = ["cache_folder", "write_atomic"]


def cache_folder(name: str) -> Path:
    """Return ``$XDG_CACHE_HOME/collegium/name``, or one under ``~/.cache``; for a user without a home nowhere."""
    # Where files are is the user's to say; XDG_CACHE_HOME changes no behaviour.
    told = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(told or Path.home() / ".cache") / "collegium" / name
    except RuntimeError:
        return Path(os.devnull) / name


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file, and its folder: a reader sees the old one or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.tmp")
    partial.write_bytes(content)
    partial.replace(path)
