"""Do several ranks read the same checkpoint? A digest that costs no more than a few small reads."""

import hashlib
import json
from collections.abc import Sequence

from .header import TensorInfo
from .opened import CheckpointLayer
from .reader import Checkpoint

__all__ = ["fingerprint"]

_TENSORS, _OF_LAYER, _BYTES = 32, 8, 64
_known: dict[int, tuple[Checkpoint, str]] = {}  # of the checkpoint asked for last


def fingerprint(layer: CheckpointLayer) -> str:
    """Return a digest of the config, all headers, and some bytes of tensors of this layer and of the others.

    Another training run differs in every tensor, so a few of them tell.
    """
    checkpoint = layer.checkpoint
    if id(checkpoint) not in _known:
        whole = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True, default=str).encode())
        infos = sorted(checkpoint.tensors.values(), key=lambda info: info.name)
        for info in infos:
            whole.update(f"{info.name} {info.dtype} {info.shape}\n".encode())
        _known.clear()
        _known[id(checkpoint)] = checkpoint, whole.hexdigest() + _sampled(infos, _TENSORS)
    own = sorted(layer.found.infos(), key=lambda info: info.name)
    return hashlib.sha256((_known[id(checkpoint)][1] + _sampled(own, _OF_LAYER)).encode()).hexdigest()[:16]


def _sampled(infos: Sequence[TensorInfo], most: int) -> str:
    """Return a digest of bytes from the middle of some of ``infos``."""
    seen = hashlib.sha256()
    for info in infos[:: max(1, len(infos) // most)]:
        with info.file.open("rb") as file:
            file.seek(info.start + max(0, info.nbytes - _BYTES) // 2)
            seen.update(file.read(min(_BYTES, info.nbytes)))
    return seen.hexdigest()
