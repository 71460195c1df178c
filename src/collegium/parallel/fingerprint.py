"""Do several ranks read the same checkpoint? A digest that costs no more than a few small reads."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

__all__ = ["fingerprint"]

_TENSORS, _OF_LAYER = 32, 8


class _Info(Protocol):
    """What a checkpoint says of a tensor."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def middle(self) -> bytes: ...


class _Checkpoint(Protocol):
    """What is asked of a checkpoint."""

    @property
    def config(self) -> Mapping[str, object]: ...
    @property
    def tensors(self) -> Mapping[str, Any]: ...
    @property
    def merged(self) -> str: ...


_known: dict[int, tuple[_Checkpoint, str]] = {}  # of the checkpoint asked for last


def fingerprint(checkpoint: _Checkpoint, layer: Iterable[_Info]) -> str:
    """Return a digest of the config, all headers, a merged adapter, and some bytes of tensors.

    layer: the experts of the layer that is loaded; tensors of it and of the others are looked at.

    Another training run differs in every tensor, so a few of them tell.
    """
    if id(checkpoint) not in _known:
        whole = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True, default=str).encode())
        whole.update(checkpoint.merged.encode())
        infos = sorted(checkpoint.tensors.values(), key=lambda info: info.name)
        for info in infos:
            whole.update(f"{info.name} {info.dtype} {info.shape}\n".encode())
        _known.clear()
        _known[id(checkpoint)] = checkpoint, whole.hexdigest() + _sampled(infos, _TENSORS)
    own = sorted(layer, key=lambda info: info.name)
    return hashlib.sha256((_known[id(checkpoint)][1] + _sampled(own, _OF_LAYER)).encode()).hexdigest()[:16]


def _sampled(infos: Sequence[_Info], most: int) -> str:
    """Return a digest of bytes from the middle of some of ``infos``."""
    seen = hashlib.sha256()
    for info in infos[:: max(1, len(infos) // most)]:
        seen.update(info.middle())
    return seen.hexdigest()
