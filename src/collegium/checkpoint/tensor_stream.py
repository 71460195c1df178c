"""A checkpoint over memory: tensors that somebody else has, by name, one by one and in any order.

An engine with a loader of its own, a training framework or a connection hands them over; what reads files reads them
then, so audits, errors and bits are those of files.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

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
class _Held(TensorInfo):
    """data: all bytes of the tensor; empty where they are not kept. sample: those in its middle, which are."""

    data: list[memoryview]
    sample: bytes

    def fill(self, into: memoryview, runs: Iterable[tuple[int, int]]) -> None:
        at = 0
        for start, count in runs:
            if not self.data:
                raise InputError(
                    f"tensor {self.name!r} is no longer in memory: its layer was released, or it is of an expert that "
                    "the placement given to TensorStream does not hold; make TensorStream that keep it"
                )
            into[at : at + count] = self.data[0][start : start + count]
            at += count

    def middle(self) -> bytes:
        return self.sample


class TensorStream:
    """Takes the tensors of a checkpoint from memory and gives a ``Checkpoint`` of those that have arrived."""

    def __init__(
        self,
        config: Mapping[str, object],
        tensors: Iterable[tuple[str, Tensor]] = (),
        *,
        placement: Placement | None = None,
        copy: bool = True,
    ) -> None:
        """Put ``tensors``, pairs of name and tensor; more may follow. config: what ``config.json`` holds.

        placement: of this rank: an expert of its own tensors that it does not hold leaves only its headers here. copy:
        False keeps tensors that lie on the CPU where they are; nobody may write to them then. Raises ConfigError for a
        model type that is not known, and what ``put`` raises.
        """
        self.config, self._family, self._copy = config, family_of(config), copy
        # Where a rank holds none, the first expert still says what an empty one looks like.
        self._local = None if placement is None else placement.expert_ids or (0,)
        self._infos: dict[str, TensorInfo] = {}
        self._made: Checkpoint | None = None
        for name, tensor in tensors:
            self.put(name, tensor)

    def put(self, name: str, tensor: Tensor) -> bool:
        """Take one tensor under its name in the checkpoint; return whether its numbers are kept.

        Copied to the CPU from whatever device, so the caller may use its memory again. Raises DuplicateTensorError for
        a name that came before, and InputError for a dtype that no checkpoint has and for parts of a tensor (DTensor).
        """
        plain = tensor.detach()
        if name in self._infos:
            raise DuplicateTensorError(
                f"tensor {name!r} was put twice; each name comes once. Other weights of a model are other TensorStream"
            )
        if type(plain) is not Tensor or plain.is_meta or plain.dtype not in SAFETENSORS_DTYPES.values():
            raise InputError(
                f"tensor {name!r} is a {type(plain).__name__} of {plain.dtype} on {plain.device}; allowed are whole, "
                f"plain tensors (full_tensor() of a DTensor) of {', '.join(map(str, SAFETENSORS_DTYPES.values()))}"
            )
        dtype, shape = entry_of(plain)
        raw = plain.contiguous().view(-1).view(torch.uint8)
        kept = self._local is None or expert_of(self._family, name) in (None, *self._local)
        # numpy shares the tensor's memory; its stubs lack the buffer protocol on Python 3.11
        data = [memoryview(cast("bytearray", raw.to("cpu", copy=self._copy).numpy()))] if kept else []
        sample = raw[slice(*middle_of(raw.numel()))].cpu().numpy().tobytes()
        there: Any = {"file": Path("<memory>"), "start": 0, "stop": raw.numel()}
        self._infos[name] = _Held(name=name, dtype=dtype, shape=shape, data=data, sample=sample, **there)
        self._made = None
        return kept

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint of all tensors that have arrived so far; layers that are complete can be loaded from it."""
        if self._made is None:
            self._made = Checkpoint(Path("<memory>"), self.config, without_wrappers(dict(self._infos)))
        return self._made

    def release(self, layer: int) -> None:
        """Free the tensors of a layer that was loaded; their headers stay, and none of them may come again."""
        for _, info in index_of(self.checkpoint).tensors(layer):
            if isinstance(info, _Held):
                info.data.clear()
