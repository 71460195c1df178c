"""Recorded loads: assignments of every expert in every layer and step, and their file format."""

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
_INTEGER_FIELDS = ("top_k", "groups", "expert_bytes")
_REMEDY = "record it again with `collegium balance record MODEL --out FILE`"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadTrace:
    """Counts ``[steps, layers, experts]`` int64 of assignments to logical experts, a step being a forward pass.

    model: its name. layers: their names. top_k: experts of a token. groups: number of equal runs of experts that a
    token chooses together, 1 without. expert_bytes: stored bytes of one expert of one layer. Raises InputError for
    fields that do not fit each other.
    """

    counts: NDArray[np.int64]
    model: str
    layers: tuple[str, ...]
    top_k: int
    groups: int
    expert_bytes: int

    def __post_init__(self) -> None:
        counts = self.counts
        if counts.ndim != 3 or counts.dtype != np.int64 or 0 in counts.shape or len(self.layers) != counts.shape[1]:
            raise InputError(
                f"load trace: found counts {counts.shape} {counts.dtype} and {len(self.layers)} names of layers; "
                "needed are [steps, layers, experts] int64, none of them 0, and a name for each layer"
            )
        # Bounded, so that sums fit in int64.
        if counts.min() < 0 or counts.max() > 1 << 40:
            raise InputError(f"load trace: counts are {counts.min()} to {counts.max()}; allowed are 0 to {1 << 40}")
        experts = counts.shape[2]
        if not (1 <= self.top_k <= experts and min(self.expert_bytes, self.groups) > 0 == experts % self.groups):
            raise InputError(
                f"load trace: found top-{self.top_k}, {self.groups} groups and {self.expert_bytes} bytes an expert for "
                f"{experts} experts; needed are top-1 to top-{experts}, equal groups, and bytes above 0"
            )

    def shares(self) -> NDArray[np.float64]:
        """Return ``[layers, experts]``: each expert's load over all steps, as a multiple of an even share."""
        total = self.counts.sum(axis=0).astype(np.float64)
        return total / np.maximum(total.mean(axis=1, keepdims=True), np.finfo(np.float64).tiny)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, which appears when it is complete. Raises OSError."""
        file = Path(path)
        partial = file.with_name(f".{file.name}.partial-{os.getpid()}")
        metadata = {name: getattr(self, name) for name in ("model", "layers", *_INTEGER_FIELDS)}
        try:
            partial.write_bytes(save({"counts": np.ascontiguousarray(self.counts)}, {_KIND: json.dumps(metadata)}))
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> LoadTrace:
        """Read what ``save`` wrote; raises InputError for a missing or damaged file, or another kind of file."""
        file = Path(path)
        if not file.is_file():
            raise InputError(f"{path}: no such file; {_REMEDY}")
        try:
            with safe_open(file, framework="numpy") as reader:
                entries = reader.metadata() or {}
                if list(entries) != [_KIND] or list(reader.keys()) != ["counts"]:
                    raise InputError(
                        f"{path}: is a safetensors file with the entries {sorted(entries)[:8]} and the tensors "
                        f"{sorted(reader.keys())[:8]}, needed are {_KIND!r} and 'counts'; {_REMEDY}"
                    )
                counts = reader.get_tensor("counts")
            metadata: Any = json.loads(entries[_KIND])
            integers = {name: int(metadata[name]) for name in _INTEGER_FIELDS}
            layers = tuple(map(str, metadata["layers"]))
            return cls(counts=counts, model=str(metadata["model"]), layers=layers, **integers)
        except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
            if isinstance(error, InputError) and str(path) in str(error):
                raise
            raise InputError(f"{path}: cannot be read as a load trace: {error}; {_REMEDY}") from error
