"""A digest that tells whether several ranks read the same checkpoint, for the cost of a few small reads."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

__all__ = ["fingerprint"]

_SAMPLED_TENSORS = 32
_SAMPLED_OF_LAYER = 8


class _Info(Protocol):
    """A tensor of a checkpoint."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def middle(self) -> bytes: ...


class _Checkpoint(Protocol):
    """The parts of a checkpoint that are hashed."""

    @property
    def config(self) -> Mapping[str, object]: ...
    @property
    def tensors(self) -> Mapping[str, Any]: ...
    @property
    def merged(self) -> str: ...


_last: dict[int, tuple[_Checkpoint, str]] = {}  # digest of the last checkpoint, by its address


def fingerprint(checkpoint: _Checkpoint, layer: Iterable[_Info]) -> str:
    """Return a digest of the config, all headers, a merged adapter, and some bytes of tensors.

    layer: the experts of the layer that is loaded; tensors of it and of other layers are sampled.

    Another training run differs in every tensor, so a sample is enough.
    """
    if id(checkpoint) not in _last:
        digest = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True, default=str).encode())
        digest.update(checkpoint.merged.encode())
        infos = sorted(checkpoint.tensors.values(), key=lambda info: info.name)
        for info in infos:
            digest.update(f"{info.name} {info.dtype} {info.shape}\n".encode())
        _last.clear()
        _last[id(checkpoint)] = checkpoint, digest.hexdigest() + _sample(infos, _SAMPLED_TENSORS)
    layer_infos = sorted(layer, key=lambda info: info.name)
    _, checkpoint_digest = _last[id(checkpoint)]
    combined = checkpoint_digest + _sample(layer_infos, _SAMPLED_OF_LAYER)
    return hashlib.sha256(combined.encode()).hexdigest()[:16]


def _sample(infos: Sequence[_Info], count: int) -> str:
    """Return a digest of bytes from the middle of about ``count`` of ``infos``."""
    digest = hashlib.sha256()
    for info in infos[:: max(1, len(infos) // count)]:
        digest.update(info.middle())
    return digest.hexdigest()
