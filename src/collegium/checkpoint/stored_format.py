"""The stored format of one layer's experts: format, storage, and the sizes that the config declares."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..formats import FORMATS, Fp8Block, Int4Affine, Int4Group, Int4Ordered, Int8Affine, Int8Ordered, by_name
from ..formats.payload import Part, Payload, Storage

__all__ = ["ACTIVATION_SCALES", "PART_SUFFIXES", "StoredFormat"]

# Suffixes of a matrix's tensors: the parts of any format, and static scales of its input.
PART_SUFFIXES = frozenset(part.suffix for form in FORMATS for storage in form.storages for part in storage.parts)
ACTIVATION_SCALES = (
    ".input_scale",
    ".input_global_scale",
    ".activation_scale",
    ".qscale_act",
    "_input_scale",
    "_activation_scale",
)
_INTEGERS = (Int4Group, Int4Affine, Int4Ordered, Int8Affine, Int8Ordered)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFormat:
    """The stored format of one layer's experts.

    name: a format of ``formats.FORMATS``. storage: one of its storages. stacked: one tensor holds all experts.
    block: rows and columns that share a scale (FP8 block). group: columns that share a scale (integers; 0: a whole
    row). static_activations: the activation format of static scales in the files, None for the default of the weight
    format.
    """

    name: str
    storage: str
    stacked: bool = False
    block: tuple[int, int] = (128, 128)
    group: int = 0
    static_activations: str | None = None

    @property
    def whole(self) -> bool:
        """Whether a matrix must be read whole before it can be cut."""
        return self.format in (Int4Ordered, Int8Ordered) or any(part.flat for part in self.layout.parts)

    @property
    def format(self) -> type[Payload]:
        """The payload class."""
        return by_name(self.name)

    @property
    def layout(self) -> Storage:
        """The storage's parts, with the block and group sizes the config declares."""
        storage = next(s for s in self.format.storages if s.name == self.storage)
        return replace(storage, parts=tuple(self._sized(part) for part in storage.parts))

    def _sized(self, part: Part) -> Part:
        if self.format is Fp8Block and part.columns_per == Fp8Block.group:
            return replace(part, rows_per=self.block[0], columns_per=self.block[1])
        if self.format not in _INTEGERS or part.columns_per != Int4Group.group:
            return part
        return replace(part, columns_per=self.group) if self.group else replace(part, columns_per=0, inner=(1,))

    def build(self, parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> Payload:
        """Return the payload of logical ``shape`` from its parts; raises the CheckpointErrors of ``from_parts``."""
        sizes: dict[str, Any] = {}
        if self.format in _INTEGERS:
            sizes["group_size"] = self.group or shape[-1]
        if self.format is Fp8Block:
            sizes["block"] = self.block
        return self.format.from_parts(parts, storage=self.storage, shape=shape, **sizes)
