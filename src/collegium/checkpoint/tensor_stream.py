"""A checkpoint in memory: tensors that the caller provides by name, one by one and in any order.

The source may be an engine's loader, a training framework or a network connection. The tensors pass through the same
code as files, so audits, errors and bits are the same.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from ..errors import DuplicateTensorError, InputError
from ..formats.find_storage import SAFETENSORS_DTYPES
from ..models import family_of
from ..placement import Placement
from .header import TensorInfo, middle_of
from .index import expert_of, index_of
from .reader import Checkpoint, without_wrappers
from .writer import entry_of

__all__ = ["TensorStream"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _InMemoryTensor(TensorInfo):
    """Header entry of a tensor in memory.

    data: one buffer with all bytes of the tensor, or an empty list if they were not stored or were released. sample:
    the bytes in its middle, which are always stored.
    """

    data: list[memoryview]
    sample: bytes

    def fill(self, into: memoryview, runs: Iterable[tuple[int, int]]) -> None:
        at = 0
        for start, count in runs:
            if not self.data:
                raise InputError(
                    f"tensor {self.name!r} is no longer in memory: its layer was released, or it belongs to an expert "
                    "that the placement of the TensorStream does not include; create a TensorStream that stores it"
                )
            into[at : at + count] = self.data[0][start : start + count]
            at += count

    def middle(self) -> bytes:
        return self.sample


class TensorStream:
    """Collects the tensors of a checkpoint in memory and provides a ``Checkpoint`` of those that have arrived."""

    def __init__(
        self,
        config: Mapping[str, object],
        tensors: Iterable[tuple[str, Tensor]] = (),
        *,
        placement: Placement | None = None,
        copy: bool = True,
    ) -> None:
        """Put ``tensors``, pairs of name and tensor; more may follow.

        config: the contents of ``config.json``. placement: of this rank; of other ranks' experts with separate tensors
        only the headers are stored. copy: False stores CPU tensors without a copy; the caller must not write to them.
        Raises ConfigError for an unknown model type, and the errors of ``put``.
        """
        self.config = config
        self._family = family_of(config)
        self._copy = copy
        # A rank without experts stores the first one, which provides the form of an empty payload.
        self._local = None if placement is None else placement.expert_ids or (0,)
        self._infos: dict[str, TensorInfo] = {}
        self._checkpoint: Checkpoint | None = None
        for name, tensor in tensors:
            self.put(name, tensor)

    def put(self, name: str, tensor: Tensor) -> bool:
        """Add one tensor under its name in the checkpoint; return whether its data is stored.

        The tensor is copied to the CPU, so the caller may reuse its memory. Raises DuplicateTensorError for a repeated
        name, and InputError for a dtype that checkpoints do not have and for partial tensors (DTensor).
        """
        plain = tensor.detach()
        if name in self._infos:
            raise DuplicateTensorError(
                f"tensor {name!r} was put twice; each name may be put once. Use another TensorStream for other weights"
            )
        if type(plain) is not Tensor or plain.is_meta or plain.dtype not in SAFETENSORS_DTYPES.values():
            raise InputError(
                f"tensor {name!r} is a {type(plain).__name__} of {plain.dtype} on {plain.device}; allowed are whole, "
                f"plain tensors (full_tensor() of a DTensor) of {', '.join(map(str, SAFETENSORS_DTYPES.values()))}"
            )
        dtype, shape = entry_of(plain)
        raw = plain.contiguous().view(-1).view(torch.uint8)
        is_local = self._local is None or expert_of(self._family, name) in (None, *self._local)
        # numpy shares the tensor's memory; its stubs lack the buffer protocol on Python 3.11
        data = [memoryview(cast("bytearray", raw.to("cpu", copy=self._copy).numpy()))] if is_local else []
        sample = raw[slice(*middle_of(raw.numel()))].cpu().numpy().tobytes()
        self._infos[name] = _InMemoryTensor(
            name=name,
            dtype=dtype,
            shape=shape,
            file=Path("<memory>"),
            start=0,
            stop=raw.numel(),
            data=data,
            sample=sample,
        )
        self._checkpoint = None
        return is_local

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint of all tensors that have arrived so far; complete layers can be loaded from it."""
        if self._checkpoint is None:
            self._checkpoint = Checkpoint(Path("<memory>"), self.config, without_wrappers(dict(self._infos)))
        return self._checkpoint

    def release(self, layer: int) -> None:
        """Free the tensors of a loaded layer; their headers remain, so they cannot be put again."""
        for _, info in index_of(self.checkpoint).tensors(layer):
            if isinstance(info, _InMemoryTensor):
                info.data.clear()
