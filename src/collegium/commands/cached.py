"""Models that are in the cache of Hugging Face already, by the name they have there. Nothing is downloaded."""

import re
from pathlib import Path

from ..errors import CheckpointError, MissingExtraError
from ..integrations.extra import extra

__all__ = ["cached_model"]

_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def cached_model(given: str) -> str:
    """Return the folder in the cache of the model whose id is ``given``; anything else, a path, as it is.

    Raises CheckpointError, with the command that downloads it, for what may be an id and is neither there nor a path.
    """
    if not _ID.fullmatch(given) or Path(given).exists():
        return given
    try:
        return str(extra("huggingface_hub").snapshot_download(given, local_files_only=True))
    except (MissingExtraError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{given}: no such folder or file, and no model of that id is in the cache of Hugging Face; "
            f"to download one: hf download {given}"
        ) from error
