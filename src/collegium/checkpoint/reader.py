"""Read a checkpoint lazily: whole tensors or slices, only the bytes that are needed."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from os.path import lexists
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import cast

import torch
from torch import Tensor

from ..errors import CheckpointError, ConfigError, DuplicateTensorError, InputError, MissingTensorError
from ..formats.find_storage import SAFETENSORS_DTYPES
from ..formats.gguf import BLOCK_BYTES
from ..locate import locate
from ..models import quantization_block
from .gguf import read_gguf
from .header import TensorInfo, read_header, read_json

__all__ = ["INDEX", "TORCH_DTYPES", "Checkpoint", "bounds_of", "gguf_file", "read_config", "without_wrappers"]

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_AWQ_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}  # names in AutoAWQ's file

TORCH_DTYPES: Mapping[str, torch.dtype] = {**SAFETENSORS_DTYPES, **dict.fromkeys(BLOCK_BYTES, torch.uint8)}


class Checkpoint:
    """The tensors of one model and its ``config.json``; create it with ``Checkpoint.open`` or ``TensorStream``.

    path: the folder or file. config: ``config.json`` as ``read_config`` returns it, empty without such a file.
    tensors: name to ``TensorInfo``. complete: whether these are all tensors of the model, which is unknown for
    ``TensorStream`` and for one file of several. bytes_read: bytes of tensor data read so far. merged: a digest of the
    merged adapters, empty without one.
    """

    def __init__(
        self,
        path: Path,
        config: Mapping[str, object],
        tensors: Mapping[str, TensorInfo],
        *,
        complete: bool = False,
    ) -> None:
        self.path = path
        self.config = config
        self.tensors = tensors
        self.complete = complete
        self.bytes_read = 0
        self.merged = ""

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, revision: str | None = None, download: bool = False) -> Checkpoint:
        """Open a folder or one ``.safetensors`` or ``.gguf`` file and check every header; no tensor data is read.

        path: a folder or file, ``fables-16m`` for the shipped model, or an id of the Hugging Face Hub (``org/name`` or
        ``org/name@revision``) in the local cache. An existing path takes precedence over an id. revision: branch, tag
        or commit of an id. download: fetch what the cache lacks.

        In a folder the ``weight_map`` of ``model.safetensors.index.json`` decides; files that it does not name are
        ignored. A folder without safetensors may hold one GGUF model.

        Raises HostileFileError, TruncatedFileError, ConfigError, MissingTensorError, DuplicateTensorError,
        CheckpointError, and the errors of ``locate``.
        """
        root = locate(path, revision=revision, download=download)
        try:
            gguf = gguf_file(root)
            if gguf is not None:
                config, tensors = read_gguf(gguf)
            elif root.is_dir():
                config = read_config(root)
                tensors = _read_folder(root)
            elif root.is_file():
                config = read_config(root.parent)
                tensors = read_header(root)
            else:
                raise CheckpointError(
                    f"{root}: no such folder or file; give a checkpoint folder, one .safetensors or .gguf file, "
                    "fables-16m for the shipped model, or an id of the Hugging Face Hub (org/name)"
                )
        except OSError as error:  # no permission, a dangling link, or an invalid file name
            raise CheckpointError(
                f"{error.filename or root}: cannot be read ({error.strerror or error}); check that the download is "
                "complete and readable"
            ) from error
        return cls(root, config, without_wrappers(tensors), complete=gguf is not None or root.is_dir())

    @classmethod
    def open_config(cls, path: str | os.PathLike[str], *, download: bool = False) -> Checkpoint:
        """Open only the config of a model, as a checkpoint without tensors; path, download: as ``open``.

        A GGUF file is opened whole, because its header holds the config. Raises ConfigError without ``config.json``.
        """
        root = locate(path, download=download, weights=False)
        if gguf_file(root) is not None:
            return cls.open(root)
        config = read_config(root.parent if root.is_file() else root)
        if not config:
            raise ConfigError(
                f"{root}: config.json is missing; random weights are made from nothing else. Give a model's folder"
            )
        return cls(root, config, {})

    @property
    def folder(self) -> Path:
        """The folder of the tokenizer, config and other files of the model."""
        return self.path.parent if self.path.is_file() else self.path

    @property
    def is_gguf(self) -> bool:
        """Whether the checkpoint is a GGUF file, whose metadata are the config."""
        return str(self.config.get("model_type")).startswith("gguf:")

    def __contains__(self, name: object) -> bool:
        """Whether a tensor of this name exists."""
        return name in self.tensors

    def info(self, name: str) -> TensorInfo:
        """Return the header entry of a tensor; raises MissingTensorError."""
        if name not in self.tensors:
            raise MissingTensorError(
                f"{self.path}: tensor {name!r} was requested, the checkpoint's {len(self.tensors)} tensors lack it; "
                "their names are in Checkpoint.tensors"
            )
        return self.tensors[name]

    def read(self, name: str) -> Tensor:
        """Return the whole tensor on the CPU, dtype and shape as stored; raises MissingTensorError."""
        return self.read_slice(name, ())

    def read_slice(self, name: str, slices: Sequence[slice]) -> Tensor:
        """Return ``tensor[slices]`` on the CPU, reading only the bytes of the slice.

        slices: one slice of step 1 per leading dimension; the other dimensions are read whole. Raises InputError for
        other steps, for too many slices and for bounds outside the tensor.
        """
        info = self.info(name)
        if info.dtype not in TORCH_DTYPES:
            known = ", ".join(TORCH_DTYPES)
            raise CheckpointError(
                f"tensor {name!r} has dtype {info.dtype}, which can be listed but not read; known: {known}"
            )
        bounds = bounds_of(info, slices)
        shape = [stop - start for start, stop in bounds]
        dtype = TORCH_DTYPES[info.dtype]
        raw = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
        if raw.numel():
            # numpy shares the tensor's memory; its stubs lack the buffer protocol on Python 3.11
            info.fill(memoryview(cast("bytearray", raw.numpy())), _runs(info, bounds, dtype.itemsize))
            self.bytes_read += raw.numel()
        return raw.view(dtype).reshape(shape)


def bounds_of(info: TensorInfo, slices: Sequence[slice]) -> list[tuple[int, int]]:
    """Return the half-open range of each dimension that ``read_slice`` reads; raises its InputError."""
    if len(slices) > len(info.shape):
        raise InputError(f"tensor {info.name!r} has shape {info.shape}, {len(slices)} slices were given")
    bounds = [(0, n) for n in info.shape]
    for axis, (piece, n) in enumerate(zip(slices, info.shape, strict=False)):
        start = piece.start or 0
        stop = n if piece.stop is None else piece.stop
        if piece.step not in (None, 1) or not 0 <= start <= stop <= n:
            raise InputError(
                f"tensor {info.name!r}, axis {axis} of {n}: slice {piece} was requested, allowed is step 1 within 0 to "
                f"{n}"
            )
        bounds[axis] = (start, stop)
    return bounds


def _runs(info: TensorInfo, bounds: Sequence[tuple[int, int]], itemsize: int) -> Iterator[tuple[int, int]]:
    """Yield (file offset, bytes) of the contiguous runs of a slice, in the slice's row-major order."""
    strides = [math.prod(info.shape[axis + 1 :]) * itemsize for axis in range(len(bounds))]
    cut = len(bounds)
    while cut and bounds[cut - 1] == (0, info.shape[cut - 1]):
        cut -= 1
    if cut == 0:
        yield info.start, info.nbytes
        return
    # Axes after the last cut one are whole, so one index of that axis is strides[cut - 1] contiguous bytes.
    start, stop = bounds[cut - 1]
    count = (stop - start) * strides[cut - 1]
    first = start * strides[cut - 1]
    for index in product(*(range(*bound) for bound in bounds[: cut - 1])):
        yield info.start + first + sum(i * s for i, s in zip(index, strides, strict=False)), count


def without_wrappers(tensors: Mapping[str, TensorInfo]) -> Mapping[str, TensorInfo]:
    """Return the tensors with the names of PEFT's wrappers removed, for a model that was saved inside them."""
    if not any(".base_layer." in name for name in tensors):
        return tensors
    names = {name: name.removeprefix("base_model.model.").replace(".base_layer", "") for name in tensors}
    duplicates = [name for name, following in pairwise(sorted(names.values())) if name == following]
    if duplicates:
        raise DuplicateTensorError(f"tensor {duplicates[0]!r} exists with and without base_layer in its name; keep one")
    return {names[name]: replace(info, name=names[name]) for name, info in tensors.items()}


def gguf_file(root: Path) -> Path | None:
    """Return ``root`` if it is a GGUF file, or the GGUF file of a folder without safetensors; None without one.

    Returns the first part of a split file. Raises CheckpointError if a folder holds several models.
    """
    if not root.is_dir():
        return root if root.suffix.lower() == ".gguf" and root.is_file() else None
    if lexists(root / INDEX) or lexists(root / _SINGLE):
        return None
    files = [p for p in sorted(root.iterdir()) if p.suffix.lower() == ".gguf" and not p.name.startswith("mmproj")]
    files = [p for p in files if not re.search(r"(?i)-(?!00001)\d{5}-of-\d{5}$", p.stem)]
    if len(files) > 1:
        names = ", ".join(p.name for p in files[:8])
        raise CheckpointError(f"{root}: holds several GGUF models ({names}); name the file")
    return files[0] if files else None


def read_config(root: Path) -> dict[str, object]:
    """Return ``config.json`` of a folder, empty without one; raises ConfigError.

    If it has no quantisation block, that of ``hf_quant_config.json`` (ModelOpt), ``quantize_config.json`` (GPTQ),
    ``quant_config.json`` (AWQ) or ``quantization_config.json`` (AutoRound) is added.
    """
    config = read_json(root / "config.json") if lexists(root / "config.json") else {}
    if "compression_config" in config:  # written by the first releases of compressed-tensors
        config.setdefault("quantization_config", config.pop("compression_config"))
    if quantization_block(config) is not None:
        return config
    modelopt = root / "hf_quant_config.json"
    gptq = root / "quantize_config.json"
    awq = root / "quant_config.json"
    auto_round = root / "quantization_config.json"
    if modelopt.exists():
        block = read_json(modelopt).get("quantization")
        if not isinstance(block, dict):
            raise ConfigError(f"{modelopt}: found no object 'quantization' in it, with quant_algo and exclude_modules")
        config["quantization_config"] = {"quant_method": "modelopt", **cast("dict[str, object]", block)}
    elif gptq.exists():
        config["quantization_config"] = {"quant_method": "gptq", **read_json(gptq)}
    elif awq.exists():
        block = {_AWQ_NAMES.get(name, name): value for name, value in read_json(awq).items()}
        config["quantization_config"] = {"quant_method": "awq", **block}
    elif auto_round.exists():
        config["quantization_config"] = read_json(auto_round)
    return config


def _read_folder(root: Path) -> dict[str, TensorInfo]:
    index = root / INDEX
    if lexists(index):  # not exists(): a dangling link must be reported when it is read
        return _read_shards(root, index)
    if lexists(root / _SINGLE):
        return read_header(root / _SINGLE)
    files = sorted(p.name for p in root.iterdir())
    shards = any(name.endswith(".safetensors") for name in files)
    advice = f"download {INDEX}, or name the one file that holds the model" if shards else "download the model again"
    listed = ", ".join(files[:8]) or "nothing"
    raise CheckpointError(f"{root}: neither {INDEX} nor {_SINGLE} exists; found {listed}; {advice}")


def _weight_map(index: Path) -> dict[str, str]:
    table = read_json(index).get("weight_map")
    entries = cast("dict[str, object]", table) if isinstance(table, dict) else {}
    not_text = [name for name, file in entries.items() if not isinstance(file, str)]
    if not entries or not_text:
        problem = (
            f"entry {not_text[0]!r} of 'weight_map' is no text" if not_text else "found no filled object 'weight_map'"
        )
        raise CheckpointError(f"{index}: {problem}; expected tensor names with file names")
    return cast("dict[str, str]", entries)


def _shard_path(root: Path, index: Path, name: str) -> Path:
    parts = (*PurePosixPath(name).parts, *PureWindowsPath(name).parts)
    absolute = PurePosixPath(name).is_absolute() or bool(PureWindowsPath(name).anchor)
    if absolute or ".." in parts or "\0" in name:
        raise CheckpointError(
            f"{index}: names the file {name!r}, which leaves the folder; allowed are files below {root}"
        )
    path = root / name
    try:
        exists = path.is_file()
    except OSError:  # an invalid file name
        exists = False
    if not exists:
        raise CheckpointError(
            f"{index}: names the file {name!r:.200}, which is not in {root}; download it or rebuild the index"
        )
    return path


def _read_shards(root: Path, index: Path) -> dict[str, TensorInfo]:
    weight_map = _weight_map(index)
    shards = {file: read_header(_shard_path(root, index, file)) for file in sorted(set(weight_map.values()))}
    for name, file in weight_map.items():
        if name not in shards[file]:
            raise MissingTensorError(
                f"{index}: maps tensor {name!r} to {file}, whose {len(shards[file])} tensors lack it"
            )
    infos_by_name: dict[str, TensorInfo] = {}
    for infos in shards.values():
        for name, info in infos.items():
            if name in infos_by_name and not _equal_bytes(infos_by_name[name], info):
                other = infos_by_name[name]
                raise DuplicateTensorError(
                    f"tensor {name!r} is in {other.file.name} ({other.dtype} {other.shape}) and in "
                    f"{info.file.name} ({info.dtype} {info.shape}) with different bytes; keep one of them"
                )
            infos_by_name[name] = info
    return {name: shards[file][name] for name, file in weight_map.items()}


def _equal_bytes(first: TensorInfo, second: TensorInfo) -> bool:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    return all(a == b for a, b in zip(first.pieces(), second.pieces(), strict=True))
