"""Write checkpoints: safetensors files tensor by tensor, and folders that appear atomically."""

import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Collection, Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self, cast

import torch
from torch import Tensor

from ..errors import CheckpointError, InputError
from ..formats import Int4Group
from ..formats.find_storage import SAFETENSORS_DTYPES
from ..formats.payload import Payload, Storage
from .header import TensorInfo

__all__ = ["Shard", "copy_other_files", "entry_of", "matrix_parts", "whole_folder"]

_WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")

_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


def matrix_parts(payload: Payload, storage: Storage) -> dict[str, Tensor]:
    """Return the checkpoint tensors of one matrix ``[N, K]`` by suffix: the required parts of ``from_parts``.

    Supports the plain storages, compressed-tensors, finegrained-fp8, gpt-oss and deepseek-v4; packed integers also get
    ``.weight_shape``.
    """
    tensors = payload.tensors()
    rows, columns = payload.shape
    first = storage.parts[0]
    if "values" in tensors:
        return {first.suffix: tensors["values"]}
    codes = tensors["codes"]
    if isinstance(payload, Int4Group):
        codes = codes[:, : 4 * -(-columns // 8)].contiguous().view(torch.int32)
    elif storage.name == "deepseek-v4" and codes.dtype == torch.uint8:
        codes = codes[:, : -(-columns // first.columns_per)].contiguous().view(torch.int8)
    elif first.inner:
        codes = codes.unflatten(-1, (-1, *first.inner))
    else:
        codes = codes[:, : -(-columns // first.columns_per)]
    scales = [tensors[name] for name in ("scale", "scales", "global_scale") if name in tensors]
    if storage.name == "deepseek-v4" and scales[0].dtype == torch.uint8:
        scales[0] = scales[0].view(torch.float8_e8m0fnu)
    # A scale per matrix is stored as [1], one per row as [N, 1].
    scales = [scale.unsqueeze(-1) if scale.dim() < 2 else scale for scale in scales]
    parts = {part.suffix: tensor for part, tensor in zip(storage.parts, [codes, *scales], strict=False)}
    if isinstance(payload, Int4Group):
        parts[".weight_shape"] = torch.tensor([rows, columns])
    return parts


class Shard:
    """Writer of one safetensors file: the header is written first, then the tensors in any order.

    entries: name to (dtype name, shape). Leaving the ``with`` block checks that every byte was written.
    """

    def __init__(self, path: Path, entries: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        self._spans: dict[str, tuple[int, int]] = {}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        widths = {name: dtype.itemsize for name, dtype in SAFETENSORS_DTYPES.items()}
        # Large elements first, so that every tensor is aligned to its element size.
        for name, (dtype, shape) in sorted(entries.items(), key=lambda entry: (-widths[entry[1][0]], entry[0])):
            size = math.prod(shape) * widths[dtype]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            self._spans[name] = (at, size)
            at += size
        raw = json.dumps(header).encode()
        raw += b" " * (-len(raw) % 8)
        self._base = 8 + len(raw)
        self._remaining = at
        self._path = path
        self._file = path.open("wb", buffering=0)
        self._file.write(len(raw).to_bytes(8, "little") + raw)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            assert self._remaining == 0, f"{self._path}: {self._remaining} bytes were never written"
            os.fsync(self._file.fileno())
        self._file.close()

    def put(self, name: str, tensor: Tensor, index: int = 0) -> None:
        """Write ``tensor`` as entry ``index`` of the stack ``name``, or whole with index 0."""
        flat = tensor.detach().contiguous().reshape(-1)
        # numpy shares the tensor's memory; its stubs lack the buffer protocol on Python 3.11
        raw = memoryview(cast("bytearray", flat.view(torch.uint8).numpy()))
        self._write(self._spans[name][0] + index * len(raw), raw)

    def copy(self, info: TensorInfo) -> None:
        """Copy a tensor's bytes from its file."""
        at, _ = self._spans[info.name]
        for piece in info.pieces():
            self._write(at, memoryview(piece))
            at += len(piece)

    def _write(self, at: int, raw: memoryview) -> None:
        self._file.seek(self._base + at)
        self._remaining -= len(raw)
        while raw:
            raw = raw[self._file.write(raw) :]


def entry_of(tensor: Tensor, experts: int | None = None) -> tuple[str, tuple[int, ...]]:
    """Return (dtype, shape) for the header, of a tensor or of a stack of ``experts`` such tensors."""
    shape = tuple(tensor.shape)
    return _NAMES[tensor.dtype], shape if experts is None else (experts, *shape)


def copy_other_files(source: Path, folder: Path, replaced: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Copy a model's other files (tokenizer, licence); return the names of copied and of skipped entries.

    replaced: names that the new folder has otherwise. Folders and other weight files are skipped. Raises
    CheckpointError.
    """
    others = sorted(set(os.listdir(source)) - set(replaced))
    skipped = [name for name in others if (source / name).is_dir() or name.endswith(_WEIGHT_FILES)]
    copied = [name for name in others if name not in skipped]
    for name in copied:
        try:
            shutil.copy2(source / name, folder / name)
        except OSError as error:
            raise CheckpointError(
                f"{source / name}: cannot be copied ({error.strerror or error}); repair or remove it"
            ) from error
    return tuple(copied), tuple(skipped)


@contextmanager
def whole_folder(out: Path, needed: int) -> Generator[tuple[Path, list[str]]]:
    """Yield a temporary folder next to ``out``, which is renamed to ``out`` on success and removed on failure.

    Also yields the names of removed folders of killed runs; a run is alive as long as it holds the lock on its folder.
    needed: bytes that must be free. Raises InputError if ``out`` exists or another run is writing it, and
    CheckpointError if the disk is too small or cannot be written.
    """
    prefix = f".{out.name}.partial-"
    try:
        with ExitStack() as stack:
            for parent in reversed(out.parents):
                if not parent.exists():
                    parent.mkdir(exist_ok=True)
                    stack.callback(_remove_empty, parent)
            with _folder_lock(out.parent):
                if out.exists():
                    raise InputError(f"{out} exists; nothing is overwritten, name another folder or remove it")
                partial = [p for p in out.parent.iterdir() if p.name.startswith(prefix)]
                stale = [p for p in partial if _is_abandoned(p)]
                if len(stale) < len(partial):
                    raise InputError(f"{out}: another run is writing it now; wait for its end, or name another folder")
                for path in stale:
                    shutil.rmtree(path)
                free = shutil.disk_usage(out.parent).free
                if free < needed:
                    raise CheckpointError(f"{out}: needs about {needed:,} bytes, {free:,} are free in {out.parent}")
                folder = out.parent / tempfile.mkdtemp(prefix=prefix, dir=out.parent)
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
                stack.enter_context(_folder_lock(folder))
            folder.chmod(0o755)
            yield folder, [path.name for path in stale]
            _sync(folder)
            folder.rename(out)
            _sync(out.parent)
    except OSError as error:
        raise CheckpointError(
            f"{out}: cannot be written ({error.strerror or error}); all temporary files were removed"
        ) from error


@contextmanager
def _open_folder(folder: Path) -> Generator[int]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _folder_lock(folder: Path, *, wait: bool = True) -> Generator[None]:
    """Hold the lock of ``folder`` until the block or the process ends."""
    with _open_folder(folder) as descriptor:
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield


def _is_abandoned(folder: Path) -> bool:
    with suppress(OSError), _folder_lock(folder, wait=False):
        return True
    return False


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # not empty: the run succeeded, or another run writes there
        folder.rmdir()


def _sync(folder: Path) -> None:
    with _open_folder(folder) as descriptor:
        os.fsync(descriptor)
