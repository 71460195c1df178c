"""Writing checkpoints: safetensors files piece by piece, and a folder that appears whole or not at all."""

import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Mapping
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

__all__ = ["Shard", "entry_of", "matrix_parts", "whole_folder"]

_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


def matrix_parts(payload: Payload, storage: Storage) -> dict[str, Tensor]:
    """Return the checkpoint tensors of one matrix ``[N, K]`` by suffix: what ``from_parts`` takes, required parts only.

    Known are the plain storages, compressed-tensors, finegrained-fp8, gpt-oss and deepseek-v4; packed integers bring
    ``.weight_shape``.
    """
    tensors, (rows, columns), first = payload.tensors(), payload.shape, storage.parts[0]
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
    # one number a matrix is stored as [1], one a row as [N, 1]
    scales = [scale.unsqueeze(-1) if scale.dim() < 2 else scale for scale in scales]
    out = {part.suffix: tensor for part, tensor in zip(storage.parts, [codes, *scales], strict=False)}
    return out | ({".weight_shape": torch.tensor([rows, columns])} if isinstance(payload, Int4Group) else {})


class Shard:
    """One safetensors file in the making: the header is written first, then every tensor in any order.

    entries: name to (dtype name, shape). Leaving the ``with`` block checks that every byte was given.
    """

    def __init__(self, path: Path, entries: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        self._spans: dict[str, tuple[int, int]] = {}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        widths = {name: dtype.itemsize for name, dtype in SAFETENSORS_DTYPES.items()}
        # Wide elements first, so that every tensor starts on a multiple of its element.
        for name, (dtype, shape) in sorted(entries.items(), key=lambda entry: (-widths[entry[1][0]], entry[0])):
            size = math.prod(shape) * widths[dtype]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            self._spans[name] = (at, size)
            at += size
        raw = json.dumps(header).encode()
        raw += b" " * (-len(raw) % 8)
        self._base, self._left, self._path = 8 + len(raw), at, path
        self._file = path.open("wb", buffering=0)
        self._file.write(len(raw).to_bytes(8, "little") + raw)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            assert self._left == 0, f"{self._path}: {self._left} bytes were never given"
            os.fsync(self._file.fileno())
        self._file.close()

    def put(self, name: str, tensor: Tensor, index: int = 0) -> None:
        """Write ``tensor`` as entry ``index`` of ``name`` (entry 0 of 1 when the whole is given)."""
        flat = tensor.detach().contiguous().reshape(-1)
        # numpy shares the tensor's memory; its stubs lack the buffer protocol on Python 3.11
        raw = memoryview(cast("bytearray", flat.view(torch.uint8).numpy()))
        self._write(self._spans[name][0] + index * len(raw), raw)

    def copy(self, info: TensorInfo) -> None:
        """Copy a tensor's bytes from the file it lies in."""
        at, _ = self._spans[info.name]
        for piece in info.pieces():
            self._write(at, memoryview(piece))
            at += len(piece)

    def _write(self, at: int, raw: memoryview) -> None:
        self._file.seek(self._base + at)
        self._left -= len(raw)
        while raw:
            raw = raw[self._file.write(raw) :]


def entry_of(tensor: Tensor, experts: int | None = None) -> tuple[str, tuple[int, ...]]:
    """Return the header's (dtype, shape) of a tensor, or of a stack of ``experts`` such tensors."""
    shape = tuple(tensor.shape)
    return _NAMES[tensor.dtype], shape if experts is None else (experts, *shape)


@contextmanager
def whole_folder(out: Path, needed: int) -> Generator[tuple[Path, list[str]]]:
    """Give a temporary folder beside ``out`` that becomes ``out`` when the block ends well, and vanishes otherwise.

    Also gives the names of folders that killed runs had left and that were removed. A run is alive as long as it holds
    the lock on its folder. needed: bytes that must be free. Raises InputError when ``out`` exists or a live run writes
    it, and CheckpointError when the disk is too small or refuses.
    """
    prefix = f".{out.name}.partial-"
    try:
        with ExitStack() as held:
            for parent in reversed(out.parents):
                if not parent.exists():
                    parent.mkdir(exist_ok=True)
                    held.callback(_remove_empty, parent)
            with _locked(out.parent):
                if out.exists():
                    raise InputError(f"{out} exists; nothing is overwritten, name another folder or remove it")
                partial = [p for p in out.parent.iterdir() if p.name.startswith(prefix)]
                stale = [p for p in partial if _abandoned(p)]
                if len(stale) < len(partial):
                    raise InputError(f"{out}: another run is writing it now; wait for its end, or name another folder")
                for path in stale:
                    shutil.rmtree(path)
                free = shutil.disk_usage(out.parent).free
                if free < needed:
                    raise CheckpointError(f"{out}: needs about {needed:,} bytes, {free:,} are free in {out.parent}")
                room = out.parent / tempfile.mkdtemp(prefix=prefix, dir=out.parent)
                held.callback(shutil.rmtree, room, ignore_errors=True)
                held.enter_context(_locked(room))
            room.chmod(0o755)
            yield room, [path.name for path in stale]
            _sync(room)
            room.rename(out)
            _sync(out.parent)
    except OSError as error:
        msg = f"{out}: cannot be written ({error.strerror or error}); nothing was left behind"
        raise CheckpointError(msg) from error


@contextmanager
def _opened(folder: Path) -> Generator[int]:
    held = os.open(folder, os.O_RDONLY)
    try:
        yield held
    finally:
        os.close(held)


@contextmanager
def _locked(folder: Path, *, wait: bool = True) -> Generator[None]:
    """Hold the lock of ``folder`` until the block ends, or the process by whatever end."""
    with _opened(folder) as held:
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(held, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield


def _abandoned(folder: Path) -> bool:
    with suppress(OSError), _locked(folder, wait=False):
        return True
    return False


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # not empty: all went well, or another run writes there
        folder.rmdir()


def _sync(folder: Path) -> None:
    with _opened(folder) as held:
        os.fsync(held)
