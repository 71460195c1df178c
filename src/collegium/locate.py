"""Find a model by the name a user types: a local path, the shipped model, or an id of the Hugging Face Hub.

Every entry point resolves names here, so ``load_layer``, ``load_model``, ``Checkpoint.open`` and all commands accept
the same names. Order: an existing path, then ``fables-16m``, then the local Hugging Face cache, then a download, if the
caller allows it. Only data files are downloaded (safetensors, JSON, tokenizer); no code of a repository is fetched or
run. This module does not import torch, because the command line parses its arguments before importing it.
"""

import json
import logging
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from glob import escape
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from .errors import CheckpointError, InputError, MissingExtraError

__all__ = ["SHIPPED", "cached_ids", "locate", "missing_files", "shipped_model"]

SHIPPED = "fables-16m"
_LOG = logging.getLogger(__name__)
_HUB_ID = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:@(\w[\w./-]*))?", re.ASCII)
_COMMIT = re.compile(r"\w[\w.-]*", re.ASCII)
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER = "adapter_model.safetensors"
# Files that describe a model: configs, tokenizer, chat template. Weights are selected by name afterwards.
_DESCRIPTION = ["*.json", "*.jinja", "*.model", "*.tiktoken", "tokenizer*", "merges.txt", "vocab.txt"]
# Folders of a repository hold the same weights in other layouts (original/, onnx/); the other files may contain code.
_IGNORED = ["*/*", "*.py", "*.bin", "*.pt", "*.pth", "*.pkl", "*.safetensors", "*.gguf"]


def shipped_model() -> Path:
    """Return the folder of the shipped model: in the package, or in the clone from which the package runs.

    Raises CheckpointError if neither has it.
    """
    package = Path(__file__).resolve().parent
    for root in (package / "shipped", package.parents[1] / "demo", Path.cwd() / "demo"):
        if (root / SHIPPED / "config.json").exists():
            return root / SHIPPED
    raise CheckpointError(
        f"the shipped model {SHIPPED} is neither in the package nor in the folder demo of a clone; install the wheel, "
        "run from a clone, or name a model folder"
    )


def locate(
    name: str | os.PathLike[str],
    *,
    revision: str | None = None,
    download: bool = False,
    weights: bool = True,
    progress: bool = True,
) -> Path:
    """Return the local folder or file of a model.

    name: a path, which is returned unchanged; ``fables-16m`` for the shipped model; or an id of the Hugging Face Hub,
    ``org/name`` or ``org/name@revision``. An existing path takes precedence over an id of the same spelling; if the id
    is cached too or a download was requested, a warning is logged.
    revision: branch, tag or commit of an id. download: fetch what the cache lacks; interrupted downloads are resumed.
    weights: whether the safetensors files are needed, or only config and tokenizer. progress: show the progress bars of
    huggingface_hub on stderr.

    Raises CheckpointError for an id that is not cached, with the command that downloads it, and for a failed download;
    InputError for a revision with a name that is not an id; MissingExtraError for an id without huggingface_hub.
    """
    path = Path(name)
    match = _HUB_ID.fullmatch(os.fspath(name))
    if match is not None and not _exists(path):
        repository = match[1]
        return _resolve_hub_id(
            repository, _revision(repository, match[2], revision), download=download, weights=weights, show=progress
        )
    if revision is not None:
        raise InputError(f"revision={revision!r}: {os.fspath(name)!r} is no id of the Hub (org/name), leave it out")
    if os.fspath(name) == SHIPPED and not _exists(path):
        return shipped_model()
    if match is not None:
        _report_shadowed(match[1], match[2], download)
    return path


def cached_ids() -> list[str]:
    """Return the ids of the models in the Hugging Face cache, complete or not; [] without huggingface_hub."""
    try:
        folders = Path(_constants().HF_HUB_CACHE).expanduser().glob("models--*--*")
        return sorted(folder.name.removeprefix("models--").replace("--", "/", 1) for folder in folders)
    except (MissingExtraError, OSError):
        return []


def missing_files(folder: Path) -> list[str]:
    """Return the names of missing weight files, by the folder's index or the usual file name; [] if complete.

    A folder with GGUF files counts as complete, because they have no index.
    """
    if (folder / _INDEX).is_file():
        return [name for name in _shards(folder / _INDEX) if not (folder / name).is_file()]
    if (folder / _SINGLE).is_file() or any(folder.glob("*.gguf")):
        return []
    single = _ADAPTER if (folder / _ADAPTER_CONFIG).is_file() else _SINGLE
    return [] if (folder / single).is_file() else [single]


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # an invalid file name, or a folder without permission: opening it reports that
        return True


def _revision(repository: str, in_name: str | None, option: str | None) -> str | None:
    if in_name is not None and option not in (None, in_name):
        raise InputError(f"{repository}: revision {in_name!r} in the name and revision={option!r}; pass one of them")
    revision = in_name or option
    if revision is not None and (".." in revision or revision.startswith("/")):
        raise InputError(f"{repository}: revision {revision!r}; allowed are a branch, a tag or a commit")
    return revision


def _resolve_hub_id(repository: str, revision: str | None, *, download: bool, weights: bool, show: bool) -> Path:
    folder = _find_snapshot(repository, revision)
    typed = repository if revision is None else f"{repository}@{revision}"
    if not download:
        if folder is None:
            raise CheckpointError(
                f"{typed}: no such folder or file, and the Hugging Face cache has no model of that id; "
                f"{_how_to_get(repository, revision)}"
            )
        if weights and (missing := missing_files(folder)):
            raise CheckpointError(
                f"{typed}: the Hugging Face cache holds a part of this model, {_format_names(missing)} missing in "
                f"{folder}; {_how_to_get(repository, revision)}"
            )
        return folder
    if folder is not None and not _is_incomplete(folder, weights):
        return folder
    with _progress_bars(show):
        return _download(repository, revision, weights, typed)


def _is_incomplete(folder: Path, weights: bool) -> bool:
    """Return whether needed files are missing."""
    described = any((folder / name).is_file() for name in ("config.json", _ADAPTER_CONFIG))
    return not described or (weights and bool(missing_files(folder)))


def _download(repository: str, revision: str | None, weights: bool, typed: str) -> Path:
    fetch = _hub().snapshot_download
    try:
        # Config and index first: they name the weight files, and repositories often hold a second set of weights.
        folder = Path(fetch(repository, revision=revision, allow_patterns=_DESCRIPTION, ignore_patterns=_IGNORED))
        if weights and (missing := missing_files(folder)):
            # The same commit, even where the branch has moved since.
            fetch(repository, revision=folder.name, allow_patterns=[escape(name) for name in missing])
    except Exception as error:  # of many classes, some from the HTTP library
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{typed}: cannot be downloaded ({type(error).__name__}: {reason}); {_after_failure(repository, revision)}"
        ) from error
    if weights and (missing := missing_files(folder)):
        if (folder / _INDEX).is_file() or _constants().HF_HUB_OFFLINE:  # the index lists files of the repository
            raise CheckpointError(
                f"{typed}: {_format_names(missing)} could not be downloaded; {_after_failure(repository, revision)}"
            )
        raise CheckpointError(
            f"{typed}: the repository has no {_format_names(missing)}; only safetensors are downloaded, never .bin or "
            f".pth. For one GGUF file: hf download {repository} FILE.gguf, then give the path it prints"
        )
    return folder


def _how_to_get(repository: str, revision: str | None) -> str:
    at = "" if revision is None else f" --revision {revision}"
    return f"to download it: --download, download=True in Python, or hf download {repository}{at}"


def _after_failure(repository: str, revision: str | None) -> str:
    at = "" if revision is None else f" --revision {revision}"
    text = f"on a machine with a network: hf download {repository}{at}, and copy the cache (HF_HOME) to this one"
    if _constants().HF_HUB_OFFLINE:
        return f"HF_HUB_OFFLINE is set: unset it, or {text}"
    return f"check the id, the network and, for a private or gated model, hf auth login; run again to resume, or {text}"


def _format_names(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more files" if len(names) > 3 else "")


def _shards(index: Path) -> list[str]:
    """Return the file names in an index; errors in the index are reported when the checkpoint is opened."""
    try:
        table: Any = json.loads(index.read_bytes())
    except (OSError, ValueError, RecursionError):
        return []
    entries = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(entries, dict):
        return []
    names = {name for name in cast("dict[str, object]", entries).values() if isinstance(name, str)}
    return sorted(name for name in names if name.endswith(".safetensors") and ".." not in name and name[0] != "/")


def _find_snapshot(repository: str, revision: str | None) -> Path | None:
    """Return the snapshot folder of a cached model, None if the cache lacks this revision.

    Layout: https://huggingface.co/docs/huggingface_hub/guides/manage-cache. This does not use
    ``snapshot_download(local_files_only=True)``, which rejects snapshots that lack files Collegium never needs.
    """
    store = Path(_constants().HF_HUB_CACHE).expanduser() / f"models--{repository.replace('/', '--')}"
    reference = store / "refs" / (revision or "main")
    try:
        commit = reference.read_text().strip() if reference.is_file() else (revision or "")
        folder = store / "snapshots" / commit
        return folder if _COMMIT.fullmatch(commit) and folder.is_dir() else None
    except (OSError, UnicodeDecodeError):
        return None


def _report_shadowed(repository: str, revision: str | None, download: bool) -> None:
    try:
        shadowed = download or _find_snapshot(repository, revision) is not None
    except MissingExtraError:
        return
    if shadowed:
        _LOG.warning("%s: reading the local folder of this name, not the model of this id on the Hub", repository)


def _hub() -> Any:
    return _import_hub("huggingface_hub")


def _constants() -> Any:
    return _import_hub("huggingface_hub.constants")


def _import_hub(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            "a name of the form org/name that is no local path is an id of the Hugging Face Hub, which needs "
            "huggingface_hub; install it with: pip install 'collegium[transformers]'"
        ) from error


@contextmanager
def _progress_bars(show: bool) -> Generator[None]:
    """Hide the progress bars of huggingface_hub inside the block unless ``show``."""
    bars = _import_hub("huggingface_hub.utils")
    if show or bars.are_progress_bars_disabled():
        yield
        return
    bars.disable_progress_bars()
    try:
        yield
    finally:
        bars.enable_progress_bars()
