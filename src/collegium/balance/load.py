"""What was recorded: assignments of every expert, layer by layer, step by step, and the file that keeps them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ..errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["LoadTrace"]

_KIND = "collegium load trace 1"
_NUMBERS = ("top_k", "groups", "expert_bytes")
_AGAIN = "record it again with `collegium balance record MODEL --out FILE`"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadTrace:
    """Counts ``[steps, layers, experts]`` int64 of assignments to logical experts, a step being a forward pass.

    model: its name. layers: their names. top_k: experts of a token. groups: equal runs of experts a token chooses
    together, 1 without. expert_bytes: stored bytes of one expert of one layer. Raises InputError where they disagree.
    """

    counts: NDArray[np.int64]
    model: str
    layers: tuple[str, ...]
    top_k: int
    groups: int
    expert_bytes: int

    def __post_init__(self) -> None:
        found = self.counts
        if found.ndim != 3 or found.dtype != np.int64 or 0 in found.shape or len(self.layers) != found.shape[1]:
            raise InputError(
                f"load trace: found counts {found.shape} {found.dtype} and {len(self.layers)} names of layers; needed "
                "are [steps, layers, experts] int64, none of them 0, and a name for each layer"
            )
        # Bounded, so that no sum of them leaves int64.
        if found.min() < 0 or found.max() > 1 << 40:
            raise InputError(f"load trace: counts are {found.min()} to {found.max()}; allowed are 0 to {1 << 40}")
        experts = found.shape[2]
        if not (1 <= self.top_k <= experts and min(self.expert_bytes, self.groups) > 0 == experts % self.groups):
            raise InputError(
                f"load trace: found top-{self.top_k}, {self.groups} groups and {self.expert_bytes} bytes an expert for "
                f"{experts} experts; needed are top-1 to top-{experts}, equal groups, and bytes above 0"
            )

    def shares(self) -> NDArray[np.float64]:
        """Return ``[layers, experts]``: each expert's load over all steps in times of an even share."""
        total = self.counts.sum(axis=0).astype(np.float64)
        return total / np.maximum(total.mean(axis=1, keepdims=True), np.finfo(np.float64).tiny)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, which appears when it is complete. Raises OSError."""
        file = Path(path)
        made = file.with_name(f".{file.name}.partial-{os.getpid()}")
        said = {name: getattr(self, name) for name in ("model", "layers", *_NUMBERS)}
        try:
            made.write_bytes(save({"counts": np.ascontiguousarray(self.counts)}, {_KIND: json.dumps(said)}))
            made.replace(file)
        finally:
            made.unlink(missing_ok=True)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> LoadTrace:
        """Read what ``save`` wrote; raises InputError for a file that is missing, damaged or something else."""
        file = Path(path)
        if not file.is_file():
            raise InputError(f"{path}: no such file; {_AGAIN}")
        try:
            with safe_open(file, framework="numpy") as opened:
                kinds = opened.metadata() or {}
                if list(kinds) != [_KIND] or list(opened.keys()) != ["counts"]:
                    raise InputError(
                        f"{path}: is a safetensors file with the entries {sorted(kinds)[:8]} and the tensors "
                        f"{sorted(opened.keys())[:8]}, needed are {_KIND!r} and 'counts'; {_AGAIN}"
                    )
                counts = opened.get_tensor("counts")
            said: Any = json.loads(kinds[_KIND])
            numbers = {name: int(said[name]) for name in _NUMBERS}
            return cls(counts=counts, model=str(said["model"]), layers=tuple(map(str, said["layers"])), **numbers)
        except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
            if isinstance(error, InputError) and str(path) in str(error):
                raise
            raise InputError(f"{path}: cannot be read as a load trace: {error}; {_AGAIN}") from error
