"""Detect the format of a layer's experts: the format that the config declares, checked against the tensors."""

from collections.abc import Mapping
from difflib import get_close_matches

from ..errors import ConfigError, MissingTensorError
from ..formats import FORMATS, by_name
from ..formats.payload import Storage
from ..formats.unquantised import DTYPES
from ..models import Declared, declared_format, mixed_algorithms
from ..types import MoESpec
from .header import FLOATS
from .index import Index, index_of
from .layout import Projection, projections, source_of
from .reader import Checkpoint
from .stored_format import StoredFormat

__all__ = ["detect", "stored_format"]

_MAX_NAMES = 2000  # names compared with a missing one
_EXPORT_ALIKE = (
    "; export the checkpoint again with all routed experts of a layer in one format; layers may differ from each other"
)


def _fits(storage: Storage, dtypes: Mapping[str, set[str]]) -> bool:
    return all(not p.required or dtypes.get(p.suffix, set()) & set(p.dtypes) for p in storage.parts)


def _explains_all(storage: Storage, dtypes: Mapping[str, set[str]]) -> bool:
    """Return whether a storage of one part accounts for all suffixes and dtypes."""
    part = storage.parts[0]
    return len(storage.parts) == 1 and set(dtypes) == {part.suffix} and dtypes[part.suffix] <= set(part.dtypes)


def _closest(dtypes: Mapping[str, set[str]]) -> list[str]:
    """Return the names of the formats that account for most of the suffixes."""
    fits = [(sum(p.suffix in dtypes for p in s.parts), f.name) for f in FORMATS for s in f.storages if _fits(s, dtypes)]
    max_count = max((count for count, _ in fits), default=0)
    return list(dict.fromkeys(name for count, name in fits if count == max_count))


def _match_storage(declared: Declared, dtypes: Mapping[str, set[str]], where: str) -> tuple[str, str]:
    """Return (format, storage) that is both declared and present; raises ConfigError if the two disagree."""
    closest = _closest(dtypes)
    if declared.method == "bitsandbytes" and set(dtypes) == {".weight"} and dtypes[".weight"] <= {*FLOATS}:
        # bitsandbytes replaces linear modules only and does not list them: its extra tensors show what it quantised.
        declared = Declared(format=None)
    if declared.refusal:
        raise ConfigError(f"{where}: {declared.refusal}; convert the checkpoint into a format that is read")
    name = declared.format
    if declared.method is None:
        # dtype in config.json is the compute dtype; the dtype of unquantised tensors is the one in their headers.
        floats = [n for n in closest if n in DTYPES]
        name = floats[0] if floats and name not in floats else name
    if declared.method == "gguf":
        # A GGUF file has no config; every tensor states its type.
        name = next((f.name for f in FORMATS if any(_explains_all(s, dtypes) for s in f.storages)), name)
    listed = ", ".join(f"{suffix} {'/'.join(sorted(dtypes))}" for suffix, dtypes in sorted(dtypes.items())) or "none"
    tensors = f"{where}: the tensors are {listed}"
    if closest:
        tensors += f", which looks like {' or '.join(closest)}"
    if name is None:
        raise ConfigError(f"{tensors}; config.json declares neither dtype nor quantization_config; add the right one")
    payload = by_name(name)
    fitting = [s.name for s in payload.storages if _fits(s, dtypes) and declared.storage in (None, s.name)]
    if not fitting or (declared.method is None and any(n not in DTYPES for n in closest)):
        storages = [s for s in payload.storages if declared.storage in (None, s.name)]
        needs = " or ".join(dict.fromkeys(" + ".join(p.suffix for p in s.parts if p.required) for s in storages))
        declares = f"declares {name}" if declared.method is None else f"declares {name} ({declared.method})"
        raise ConfigError(
            f"{tensors}; config.json {declares}, which needs {needs}; correct quantization_config or the files"
        )
    return name, declared.method if declared.method in fitting else fitting[0]


def detect(checkpoint: Checkpoint, spec: MoESpec, layer: int) -> dict[Projection, StoredFormat]:
    """Return the stored format of each projection of the experts of ``layer``.

    spec: the spec of the layer. Raises ConfigError if the config names something unknown, declares different formats
    for two experts, or contradicts the tensors, and MissingTensorError if the layer has no expert tensors.
    """
    config = checkpoint.config
    index = index_of(checkpoint)
    tensors = index.expert_tensors(layer)
    if not tensors.single and not tensors.stack:
        raise _missing_experts_error(checkpoint, index, layer)
    stacked = not tensors.single
    every = projections(spec)
    paths = {
        which: source_of(index.names, spec, layer=layer, expert=0, projection=which, stacked=stacked).path
        for which in every
    }
    for which in every:
        _refuse_unlike_experts(config, index, layer, which)
    declared: dict[Projection, Declared] = {which: declared_format(config, paths[which]) for which in every}
    dtypes = tensors.suffixes(*every)
    per_projection = _must_detect_per_projection(declared, dtypes)
    stored: dict[Projection, StoredFormat] = {}
    for which in every:
        # Gate and up in one tensor are listed as gate.
        holder: Projection = next(other for other in every if paths[other] == paths[which])
        present = tensors.suffixes(holder) if per_projection else {}
        weights = {
            suffix: kinds
            for suffix, kinds in (present or dtypes).items()
            if suffix != "_bias" and not (spec.expert_bias and suffix == ".bias")
        }
        stored[which] = stored_format(declared[which], weights, f"layer {layer}", stacked=stacked)
    return stored


def _must_detect_per_projection(declared: Mapping[Projection, Declared], dtypes: Mapping[str, set[str]]) -> bool:
    """Return whether projections may differ in format, so that each must be detected from its tensors alone.

    That is the case where the declared formats differ, where nothing is declared, and where a GGUF file has blocks of
    several formats.
    """
    if len(set(declared.values())) > 1 or declared["down"].method is None:
        return True
    one_format = any(_explains_all(storage, dtypes) for form in FORMATS for storage in form.storages)
    return declared["down"].method == "gguf" and not one_format


def _refuse_unlike_experts(config: Mapping[str, object], index: Index, layer: int, which: Projection) -> None:
    """Raise ConfigError if mixed precision declares different formats for experts of one layer."""
    experts = sorted(expert for expert, one in index.expert_tensors(layer).single if one == which)
    every = (index.names.projection(which).format(layer=layer, expert=expert) for expert in experts)
    mixed = mixed_algorithms(config, every)
    if len(mixed) > 1:
        listed = ", ".join(f"{path} {algorithm}" for algorithm, path in mixed.items())
        raise ConfigError(f"layer {layer}: its experts differ in format: {listed}; they must share one{_EXPORT_ALIKE}")


def _missing_experts_error(checkpoint: Checkpoint, index: Index, layer: int) -> MissingTensorError:
    """Return the error for a layer without any tensor that has an expert's name of the family."""
    prefix = index.names.experts.format(layer=layer)
    family = index.family.name
    near = [name for name in checkpoint.tensors if name.startswith(prefix)]
    known = [names.projection("down") or names.stacked.down for names in index.family.tables]
    if near:
        needs = " or ".join(dict.fromkeys(known)).replace("{layer}", str(layer))
        return MissingTensorError(
            f"layer {layer}: {len(near)} tensors start with {prefix!r}, none of them is named like an expert of "
            f"{family}: {', '.join(near[:6])}{', ...' if len(near) > 6 else ''}; down, for example, is {needs}"
        )
    experts = [name for name in checkpoint.tensors if ".experts." in name]
    heads = dict.fromkeys(name.split(".layers.")[0] for name in experts if ".layers." in name)
    others = f"; experts exist below {', '.join(map(repr, heads))}" if heads else ""
    inside = [info.name for _, info in index.tensors(layer)]
    pool = inside or experts or list(checkpoint.tensors)
    if closest := get_close_matches(prefix, pool[:_MAX_NAMES], 3, 0.0):
        others += f"; the nearest names are {', '.join(closest)}"
    if inside:
        others += "; if the layer is dense, correct the entry of config.json that lists the layers with experts"
    return MissingTensorError(f"layer {layer}: no tensor starts with {prefix!r}, which {family} needs{others}")


def stored_format(
    declared: Declared, dtypes: Mapping[str, set[str]], where: str, *, stacked: bool = False
) -> StoredFormat:
    """Return the stored format that is both declared and present; raises ConfigError."""
    name, storage = _match_storage(declared, dtypes, where)
    return StoredFormat(
        name=name,
        storage=storage,
        stacked=stacked,
        block=declared.block or (128, 128),
        group=declared.group or 0,
        static_activations=declared.static_activations,
    )
