"""A checkpoint, read lazily: whole tensors or slices, and never a byte more than asked."""

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
from ..formats.gguf import KINDS
from ..locate import locate
from ..models import quantization_block
from .gguf import read_gguf
from .header import TensorInfo, read_header, read_json

__all__ = ["INDEX", "TORCH_DTYPES", "Checkpoint", "bounds_of", "gguf_file", "read_config", "without_wrappers"]

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_AWQ_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}  # what AutoAWQ's own file calls them

TORCH_DTYPES: Mapping[str, torch.dtype] = {**SAFETENSORS_DTYPES, **dict.fromkeys(KINDS, torch.uint8)}


class Checkpoint:
    """The tensors of one model and its ``config.json``; made by ``Checkpoint.open`` and ``TensorStream``.

    path: the folder or file. config: ``config.json`` (with ``quantization_config`` as ``read_config`` finds it), empty
    when there is no such file. tensors: name to ``TensorInfo``. complete: whether these are all tensors of the model,
    which neither ``TensorStream`` nor one file of several can promise. bytes_read: bytes of tensor data read so far.
    merged: a digest of the adapter that is merged into what is read, empty without one.
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

        path: also ``fables-16m``, the shipped model, or an id of the Hugging Face Hub (``org/name`` or
        ``org/name@revision``) in the local cache. revision: branch, tag or commit of an id. download: fetch what the
        cache lacks. An existing path wins over an id.
        In a folder the ``weight_map`` of ``model.safetensors.index.json`` is the authority; files it does not name
        are ignored. A folder without safetensors may hold one GGUF model. Raises HostileFileError, TruncatedFileError,
        ConfigError, MissingTensorError, DuplicateTensorError, CheckpointError, and what ``locate`` raises.
        """
        root = locate(path, revision=revision, download=download)
        try:
            gguf = gguf_file(root)
            if gguf is not None:
                config, tensors = read_gguf(gguf)
            elif root.is_dir():
                config, tensors = read_config(root), _folder(root)
            elif root.is_file():
                config, tensors = read_config(root.parent), read_header(root)
            else:
                msg = (
                    f"{root}: no such folder or file; give a checkpoint folder, one .safetensors or .gguf file, "
                    "fables-16m for the shipped model, or an id of the Hugging Face Hub (org/name)"
                )
                raise CheckpointError(msg)
        except OSError as error:  # no permission, a link to nothing, a name that no file system takes
            what = f"{error.filename or root}: cannot be read ({error.strerror or error})"
            raise CheckpointError(f"{what}; check that the download is complete and readable") from error
        return cls(root, config, without_wrappers(tensors), complete=gguf is not None or root.is_dir())

    @property
    def folder(self) -> Path:
        """Where what lies beside the tensors is."""
        return self.path.parent if self.path.is_file() else self.path

    @property
    def is_gguf(self) -> bool:
        """Whether it is a GGUF file, whose metadata are the config."""
        return str(self.config.get("model_type")).startswith("gguf:")

    def __contains__(self, name: object) -> bool:
        """Whether a tensor of this name exists."""
        return name in self.tensors

    def info(self, name: str) -> TensorInfo:
        """Return where the tensor lies; raises MissingTensorError."""
        if name not in self.tensors:
            msg = f"{self.path}: tensor {name!r} was asked for, the checkpoint's {len(self.tensors)} tensors lack it"
            raise MissingTensorError(msg)
        return self.tensors[name]

    def read(self, name: str) -> Tensor:
        """Return the whole tensor on the CPU, dtype and shape as stored; raises MissingTensorError."""
        return self.read_slice(name, ())

    def read_slice(self, name: str, slices: Sequence[slice]) -> Tensor:
        """Return ``tensor[slices]`` on the CPU, reading only the bytes of the slice.

        slices: one slice of step 1 for each leading dimension; dimensions not named are read whole. Raises
        InputError for other steps, for too many slices and for bounds outside the tensor.
        """
        info = self.info(name)
        if info.dtype not in TORCH_DTYPES:
            known = ", ".join(TORCH_DTYPES)
            msg = f"tensor {name!r} has dtype {info.dtype}, which can be listed but not read; known: {known}"
            raise CheckpointError(msg)
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
    """Return first and last index of each dimension that ``read_slice`` reads; raises its InputError."""
    if len(slices) > len(info.shape):
        raise InputError(f"tensor {info.name!r} has shape {info.shape}, {len(slices)} slices were given")
    bounds = [(0, n) for n in info.shape]
    for axis, (part, n) in enumerate(zip(slices, info.shape, strict=False)):
        start, stop = part.start or 0, n if part.stop is None else part.stop
        if part.step not in (None, 1) or not 0 <= start <= stop <= n:
            msg = f"tensor {info.name!r}, axis {axis} of {n}: slice {part} was asked, allowed is step 1 within 0 to {n}"
            raise InputError(msg)
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
    # axes behind the last cut one are whole, so one index of that axis is stride[cut - 1] contiguous bytes
    start, stop = bounds[cut - 1]
    count, first = (stop - start) * strides[cut - 1], start * strides[cut - 1]
    for index in product(*(range(*bound) for bound in bounds[: cut - 1])):
        yield info.start + first + sum(i * s for i, s in zip(index, strides, strict=False)), count


def without_wrappers(tensors: Mapping[str, TensorInfo]) -> Mapping[str, TensorInfo]:
    """Return the tensors of a model that was saved inside PEFT's wrappers under the names they have outside."""
    if not any(".base_layer." in name for name in tensors):
        return tensors
    names = {name: name.removeprefix("base_model.model.").replace(".base_layer", "") for name in tensors}
    if twice := [one for one, two in pairwise(sorted(names.values())) if one == two]:
        raise DuplicateTensorError(f"tensor {twice[0]!r} is there with and without base_layer in its name; keep one")
    return {names[name]: replace(info, name=names[name]) for name, info in tensors.items()}


def gguf_file(root: Path) -> Path | None:
    """Return the GGUF file ``root`` is or, in a folder without safetensors, holds; None without one.

    Of a split file the first part is returned. Raises CheckpointError when a folder holds several models.
    """
    if not root.is_dir():
        return root if root.suffix.lower() == ".gguf" and root.is_file() else None
    if lexists(root / INDEX) or lexists(root / _SINGLE):
        return None
    found = [p for p in sorted(root.iterdir()) if p.suffix.lower() == ".gguf" and not p.name.startswith("mmproj")]
    found = [p for p in found if not re.search(r"(?i)-(?!00001)\d{5}-of-\d{5}$", p.stem)]
    if len(found) > 1:
        names = ", ".join(p.name for p in found[:8])
        raise CheckpointError(f"{root}: holds several GGUF models ({names}); name the file")
    return found[0] if found else None


def read_config(root: Path) -> dict[str, object]:
    """Return ``config.json`` of a folder, empty without one; raises ConfigError.

    ``hf_quant_config.json`` (ModelOpt), ``quantize_config.json`` (GPTQ), ``quant_config.json`` (AWQ) or
    ``quantization_config.json`` (AutoRound) is merged in where it says nothing of a quantisation.
    """
    config = read_json(root / "config.json") if lexists(root / "config.json") else {}
    if "compression_config" in config:  # what the first releases of compressed-tensors wrote
        config.setdefault("quantization_config", config.pop("compression_config"))
    separate, gptq, awq = (root / f"{name}_config.json" for name in ("hf_quant", "quantize", "quant"))
    rounded = root / "quantization_config.json"
    if quantization_block(config) is not None:
        return config
    if separate.exists():
        block = read_json(separate).get("quantization")
        if not isinstance(block, dict):
            raise ConfigError(f"{separate}: found no object 'quantization' in it, with quant_algo and exclude_modules")
        config["quantization_config"] = {"quant_method": "modelopt", **cast("dict[str, object]", block)}
    elif gptq.exists():
        config["quantization_config"] = {"quant_method": "gptq", **read_json(gptq)}
    elif awq.exists():
        block = {_AWQ_NAMES.get(name, name): value for name, value in read_json(awq).items()}
        config["quantization_config"] = {"quant_method": "awq", **block}
    elif rounded.exists():
        config["quantization_config"] = read_json(rounded)
    return config


def _folder(root: Path) -> dict[str, TensorInfo]:
    index = root / INDEX
    if lexists(index):  # a link to nothing is an error of its own
        return _sharded(root, index)
    if lexists(root / _SINGLE):
        return read_header(root / _SINGLE)
    found = sorted(p.name for p in root.iterdir())
    shards = any(name.endswith(".safetensors") for name in found)
    todo = f"download {INDEX}, or name the one file that holds the model" if shards else "download the model again"
    listed = ", ".join(found[:8]) or "nothing"
    raise CheckpointError(f"{root}: neither {INDEX} nor {_SINGLE} is there; found {listed}; {todo}")


def _weight_map(index: Path) -> dict[str, str]:
    table = read_json(index).get("weight_map")
    entries = cast("dict[str, object]", table) if isinstance(table, dict) else {}
    wrong = [name for name, file in entries.items() if not isinstance(file, str)]
    if not entries or wrong:
        found = f"entry {wrong[0]!r} of 'weight_map' is no text" if wrong else "found no filled object 'weight_map'"
        raise CheckpointError(f"{index}: {found}; expected tensor names with file names")
    return cast("dict[str, str]", entries)


def _shard_path(root: Path, index: Path, name: str) -> Path:
    parts = (*PurePosixPath(name).parts, *PureWindowsPath(name).parts)
    absolute = PurePosixPath(name).is_absolute() or bool(PureWindowsPath(name).anchor)
    if absolute or ".." in parts or "\0" in name:
        msg = f"{index}: names the file {name!r}, which leaves the folder; allowed are files below {root}"
        raise CheckpointError(msg)
    path = root / name
    try:
        there = path.is_file()
    except OSError:  # a name no file system takes
        there = False
    if not there:
        msg = f"{index}: names the file {name!r:.200}, which is not in {root}; download it or rebuild the index"
        raise CheckpointError(msg)
    return path


def _sharded(root: Path, index: Path) -> dict[str, TensorInfo]:
    weight_map = _weight_map(index)
    shards = {file: read_header(_shard_path(root, index, file)) for file in sorted(set(weight_map.values()))}
    for name, file in weight_map.items():
        if name not in shards[file]:
            msg = f"{index}: says tensor {name!r} is in {file}, whose {len(shards[file])} tensors lack it"
            raise MissingTensorError(msg)
    seen: dict[str, TensorInfo] = {}
    for infos in shards.values():
        for name, info in infos.items():
            if name in seen and not _equal_bytes(seen[name], info):
                raise DuplicateTensorError(
                    f"tensor {name!r} is in {seen[name].file.name} ({seen[name].dtype} {seen[name].shape}) and in "
                    f"{info.file.name} ({info.dtype} {info.shape}) with different bytes; keep one of them"
                )
            seen[name] = info
    return {name: shards[file][name] for name, file in weight_map.items()}


def _equal_bytes(one: TensorInfo, two: TensorInfo) -> bool:
    alike = (one.dtype, one.shape) == (two.dtype, two.shape)
    return alike and all(a == b for a, b in zip(one.pieces(), two.pieces(), strict=True))
