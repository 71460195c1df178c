"""One MoE layer of a checkpoint, opened: what loader, audit, quantize and verify would each have to ask again."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Self

from ..errors import InputError
from ..models import Names, dense_error
from ..types import MoESpec
from .detect import detect
from .index import Found, Index, index_of
from .layout import Projection, Source, projections, source_of
from .reader import Checkpoint
from .stored_format import StoredFormat

__all__ = ["CheckpointLayer"]


def _said(stored: StoredFormat) -> str:
    return f"{stored.name} ({stored.storage})" + (f" in groups of {stored.group}" if stored.group else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointLayer:
    """What is known of one MoE layer before a tensor is read; made by ``CheckpointLayer.open``.

    number: of the layer in its model. index: the checkpoint's names by layer. spec: what the config says of this
    layer, with the ``weight_format`` that the tensors confirm. stored: how gate and up of its routed experts are
    stored; down_stored: how down is, in another format perhaps; up_stored: how up is, as gate unless ``unequal``.
    """

    checkpoint: Checkpoint
    number: int
    index: Index
    spec: MoESpec
    stored: StoredFormat
    up_stored: StoredFormat
    down_stored: StoredFormat

    @classmethod
    def open(cls, checkpoint: Checkpoint, number: int | None = None) -> Self:
        """Open layer ``number`` (default: the first with routed experts) by config and headers; no tensor is read.

        Raises InputError for a layer without routed experts, ConfigError for a dense model, and what
        ``models.describe`` and ``detect`` raise.
        """
        index = index_of(checkpoint)
        layers = index.family.moe_layers(checkpoint.config)
        if not layers:
            raise dense_error(checkpoint.config, "no layer has routed experts")
        number = layers[0] if number is None else number
        if isinstance(number, bool | float) or number not in layers:
            raise InputError(f"layer {number!r} was asked for, layers with routed experts are {layers}")
        spec = index.family.describe(checkpoint.config, number)
        if _without_shared(checkpoint, index, number):
            spec = replace(spec, shared=None)
        found = detect(checkpoint, spec, number)
        first, down = next(iter(found.values())), found["down"]
        spec = replace(spec, weight_format=first.name, down_format=None if down.name == first.name else down.name)
        made = {"stored": first, "up_stored": found["up"], "down_stored": down}
        return cls(checkpoint=checkpoint, number=number, index=index, spec=spec, **made)

    @property
    def both_stored(self) -> tuple[StoredFormat, StoredFormat]:
        """How gate and up are stored, and how down is."""
        return self.stored, self.down_stored

    def stored_as(self, source: Source) -> StoredFormat:
        """Return how one projection is stored."""
        return {"up": self.up_stored, "down": self.down_stored}.get(source.projection, self.stored)

    @property
    def unequal(self) -> str | None:
        """How gate and up of an expert differ in format, which one product cannot multiply; None where they do not."""
        found = self.found.single
        for expert in sorted({expert for expert, _ in found}):
            gate, up = (found.get((expert, which), {}) for which in ("gate", "up"))
            kinds = [own[".weight"].dtype if ".weight" in own else "" for own in (gate, up)]
            if self.stored.name == "gguf" and all(kinds) and kinds[0] != kinds[1]:
                return f"gate of expert {expert} is {kinds[0]}, up is {kinds[1]}"
        if self.stored != self.up_stored:
            first, second = (_said(own) for own in (self.stored, self.up_stored))
            return f"gate is {first}, up is {second}"
        return None

    @property
    def shared_assumed(self) -> bool:
        """Whether the layer has no shared expert although the model type has one by default."""
        return self.spec.shared is None and _without_shared(self.checkpoint, self.index, self.number)

    @property
    def names(self) -> Names:
        """The name table that the checkpoint follows."""
        return self.index.names

    @property
    def found(self) -> Found:
        """The layer's expert tensors by name."""
        return self.index.found(self.number)

    def suffixes(self, templates: Iterable[str]) -> dict[str, set[str]]:
        """Return suffixes and dtypes of the layer's tensors at module paths, a shared expert's for instance."""
        return self.index.suffixes(self.number, templates)

    def sources(self) -> Iterator[tuple[int, Source]]:
        """Yield every routed expert with each of its projections, gate before up before down."""
        for expert in range(self.spec.num_experts):
            for which in projections(self.spec):
                yield expert, self.source(expert, which)

    def source(self, expert: int, projection: Projection) -> Source:
        """Return where one projection of one routed expert lies."""
        return source_of(
            self.names, self.spec, layer=self.number, expert=expert, projection=projection, stacked=self.stored.stacked
        )


def _without_shared(checkpoint: Checkpoint, index: Index, number: int) -> bool:
    """Tell whether a shared expert that config.json does not mention is absent from all layers of the files."""
    return (
        checkpoint.complete
        and index.names.shared is not None
        and not index.has_shared
        and index.family.assumes_shared(checkpoint.config, number)
    )
