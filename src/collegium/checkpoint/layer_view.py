"""One MoE layer of a checkpoint, as loader, audit, quantize and verify need it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Self

from ..errors import InputError
from ..formats import Bf16
from ..models import Names, dense_error
from ..types import MoESpec
from .detect import detect
from .index import ExpertTensors, Index, index_of
from .layout import Projection, Source, projections, source_of
from .reader import Checkpoint
from .stored_format import StoredFormat

__all__ = ["CheckpointLayer"]


def _describe(stored: StoredFormat) -> str:
    return f"{stored.name} ({stored.storage})" + (f" in groups of {stored.group}" if stored.group else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointLayer:
    """One MoE layer by config and headers, before any tensor is read; create it with ``CheckpointLayer.open``.

    number: of the layer in its model. index: the checkpoint's names by layer. spec: the spec of this layer from the
    config, with the ``weight_format`` that the tensors confirm, or bf16 if ``decodes_gate_up``. stored: format of gate
    and up of the routed experts. down_stored: format of down, which may differ. up_stored: format of up, the same as
    that of gate unless ``unequal``.
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

        Raises InputError for a layer without routed experts, ConfigError for a dense model, and the errors of
        ``models.describe`` and ``detect``.
        """
        index = index_of(checkpoint)
        layers = index.family.moe_layers(checkpoint.config)
        if not layers:
            raise dense_error(checkpoint.config, "no layer has routed experts")
        number = layers[0] if number is None else number
        if isinstance(number, bool | float) or number not in layers:
            raise InputError(f"layer {number!r} was requested, layers with routed experts are {layers}")
        spec = index.family.describe(checkpoint.config, number)
        if _lacks_default_shared(checkpoint, index, number):
            spec = replace(spec, shared=None)
        formats = detect(checkpoint, spec, number)
        stored = next(iter(formats.values()))
        down = formats["down"]
        layer = cls(
            checkpoint=checkpoint,
            number=number,
            index=index,
            spec=spec,
            stored=stored,
            up_stored=formats["up"],
            down_stored=down,
        )
        name = Bf16.name if layer.decodes_gate_up else stored.name
        spec = replace(spec, weight_format=name, down_format=None if down.name == name else down.name)
        return replace(layer, spec=spec)

    @property
    def both_stored(self) -> tuple[StoredFormat, StoredFormat]:
        """The stored formats of gate and up, and of down."""
        return self.stored, self.down_stored

    def stored_as(self, source: Source) -> StoredFormat:
        """Return the stored format of one projection."""
        return {"up": self.up_stored, "down": self.down_stored}.get(source.projection, self.stored)

    @property
    def unequal(self) -> str | None:
        """How gate and up of an expert differ in format, None where they do not; one product needs one format."""
        single = self.expert_tensors.single
        if self.stored.name == "gguf":
            for expert in sorted({expert for expert, _ in single}):
                gate = single.get((expert, "gate"), {}).get(".weight")
                up = single.get((expert, "up"), {}).get(".weight")
                if gate is not None and up is not None and gate.dtype != up.dtype:
                    return f"gate of expert {expert} is {gate.dtype}, up is {up.dtype}"
        if self.stored != self.up_stored:
            return f"gate is {_describe(self.stored)}, up is {_describe(self.up_stored)}"
        return None

    @property
    def decodes_gate_up(self) -> bool:
        """Whether gate and up are decoded to bfloat16: in a GGUF file, quantisers choose the kind of each tensor."""
        return self.checkpoint.is_gguf and self.unequal is not None

    @property
    def shared_assumed(self) -> bool:
        """Whether the layer lacks the shared expert that its model type has by default."""
        return self.spec.shared is None and _lacks_default_shared(self.checkpoint, self.index, self.number)

    @property
    def names(self) -> Names:
        """The name table that the checkpoint follows."""
        return self.index.names

    @property
    def expert_tensors(self) -> ExpertTensors:
        """The layer's expert tensors by name."""
        return self.index.expert_tensors(self.number)

    def suffixes(self, templates: Iterable[str]) -> dict[str, set[str]]:
        """Return suffixes and dtypes of the layer's tensors at module paths, a shared expert's for instance."""
        return self.index.suffixes(self.number, templates)

    def sources(self) -> Iterator[tuple[int, Source]]:
        """Yield every routed expert with each of its projections, gate before up before down."""
        for expert in range(self.spec.num_experts):
            for which in projections(self.spec):
                yield expert, self.source(expert, which)

    def source(self, expert: int, projection: Projection) -> Source:
        """Return the location of one projection of one routed expert."""
        return source_of(
            self.names, self.spec, layer=self.number, expert=expert, projection=projection, stacked=self.stored.stacked
        )


def _lacks_default_shared(checkpoint: Checkpoint, index: Index, number: int) -> bool:
    """Return whether the files lack a shared expert that the family assumes and config.json does not mention."""
    return (
        checkpoint.complete
        and index.names.shared is not None
        and not index.has_shared
        and index.family.assumes_shared(checkpoint.config, number)
    )
