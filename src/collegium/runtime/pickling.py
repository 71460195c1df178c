"""Pickle objects that hold tensors of any dtype, with any pickler.

``pickle.loads`` of torch fails for a tensor in FP8, E8M0 or unsigned integers of more than 8 bits, after ``dumps``
succeeded, and plain ``pickle`` writes a storage once for each of its views. So the memory of all tensors is pickled as
bytes, each storage once, together with dtype, offset and strides of the tensors in it. The bytes are tensors of uint8,
so that ``torch.save``, ``pickle`` and ``torch.multiprocessing`` handle them like any tensor.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InputError

__all__ = ["WithTensors"]


class _View(NamedTuple):
    """A tensor in storage number ``storage``; offset and strides in elements."""

    storage: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Pickler(pickle.Pickler):
    """Pickles everything but tensors, and collects their storages."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.DEFAULT_PROTOCOL)
        self.storages: list[Tensor] = []
        self._numbers: dict[tuple[torch.device, int, int], int] = {}

    def persistent_id(self, obj: Any) -> _View | None:
        """Return the view of a tensor, None for anything else."""
        if type(obj) is not Tensor:
            return None
        storage = obj.untyped_storage()
        key = obj.device, storage.data_ptr(), storage.nbytes()
        if key not in self._numbers:
            self._numbers[key] = len(self.storages)
            with torch.inference_mode(False):
                self.storages.append(torch.empty(0, dtype=torch.uint8, device=obj.device).set_(storage))
        return _View(self._numbers[key], obj.dtype, int(obj.storage_offset()), tuple(obj.shape), obj.stride())


class _Unpickler(pickle.Unpickler):
    """Reads what ``_Pickler`` wrote."""

    def __init__(self, file: io.BytesIO, storages: list[Tensor]) -> None:
        super().__init__(file)
        self._storages = storages

    def persistent_load(self, pid: Any) -> Tensor:
        """Return the tensor that a view describes."""
        view = _View(*pid)
        raw = self._storages[view.storage]
        # An inference tensor could not be written outside inference mode.
        with torch.inference_mode(False):
            tensor = torch.empty(0, dtype=view.dtype, device=raw.device)
            return tensor.set_(raw.untyped_storage(), view.offset, view.shape, view.strides)


class WithTensors:
    """Pickles a value together with the tensors in it; unpickling returns the value itself."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the value without tensors, and the storages of its tensors."""
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(self.value)
        devices = [str(storage.device) for storage in pickler.storages]
        return _restore, (file.getvalue(), pickler.storages, devices)


def _restore(skeleton: bytes, storages: list[Tensor], devices: list[str]) -> Any:
    for storage, saved_device in zip(storages, devices, strict=True):
        if str(storage.device) != saved_device:
            raise InputError(
                f"packed weights were saved from {saved_device} and are being loaded to {storage.device}; they are "
                "laid out for the device they were packed for. Load them without map_location, or load the checkpoint "
                "again"
            )
    return _Unpickler(io.BytesIO(skeleton), storages).load()
