"""Models that are here already, by the name people give them: the shipped one, and the cache of Hugging Face."""

import re
from pathlib import Path

from ..errors import CheckpointError, MissingExtraError
from ..integrations.extra import extra

__all__ = ["SHIPPED", "cached_model", "shipped_model"]

SHIPPED = "fables-16m"
_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def shipped_model() -> Path:
    """Return the folder of the shipped model: in the package, or in the clone that the package runs from.

    Raises CheckpointError where neither has it.
    """
    package = Path(__file__).resolve().parents[1]
    for root in (package / "shipped", package.parents[1] / "demo", Path.cwd() / "demo"):
        if (root / SHIPPED / "config.json").exists():
            return root / SHIPPED
    raise CheckpointError(
        f"the shipped model {SHIPPED} is neither in the package nor in the folder demo of a clone; install the wheel, "
        "run from a clone, or name a model folder"
    )


def cached_model(given: str) -> str:
    """Return the folder of the shipped model for its name, of the cached model for its id; a path as it is.

    Nothing is downloaded. Raises CheckpointError, with the command that downloads it, for what may be an id and is
    neither there nor a path.
    """
    if given == SHIPPED and not Path(given).exists():
        return str(shipped_model())
    if not _ID.fullmatch(given) or Path(given).exists():
        return given
    try:
        return str(extra("huggingface_hub").snapshot_download(given, local_files_only=True))
    except (MissingExtraError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{given}: no such folder or file, and no model of that id is in the cache of Hugging Face; "
            f"to download one: hf download {given}"
        ) from error
