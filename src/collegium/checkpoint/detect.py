"""Which format a layer's experts are stored in: what the config declares, checked against the tensors."""

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

_MOST_NAMES = 2000  # that are compared with the one that is missing
_ALIKE = "; export the checkpoint again with all routed experts of a layer alike; layers may differ from each other"


def _fits(storage: Storage, seen: Mapping[str, set[str]]) -> bool:
    return all(not p.required or seen.get(p.suffix, set()) & set(p.dtypes) for p in storage.parts)


def _holds(storage: Storage, seen: Mapping[str, set[str]]) -> bool:
    """Tell whether a storage of one part explains everything seen."""
    part = storage.parts[0]
    return len(storage.parts) == 1 and set(seen) == {part.suffix} and seen[part.suffix] <= set(part.dtypes)


def _closest(seen: Mapping[str, set[str]]) -> list[str]:
    """Name the formats the tensors look like; those that explain the most suffixes come first."""
    fits = [(sum(p.suffix in seen for p in s.parts), f.name) for f in FORMATS for s in f.storages if _fits(s, seen)]
    most = max((count for count, _ in fits), default=0)
    return list(dict.fromkeys(name for count, name in fits if count == most))


def _match_storage(declared: Declared, seen: Mapping[str, set[str]], where: str) -> tuple[str, str]:
    """Return (format, storage) that is declared and present; raises ConfigError when the two contradict each other."""
    closest = _closest(seen)
    if declared.method == "bitsandbytes" and set(seen) == {".weight"} and seen[".weight"] <= {*FLOATS}:
        # bitsandbytes replaces linear modules only and lists none of them: its own tensors tell what it quantised
        declared = Declared(format=None)
    if declared.refusal:
        raise ConfigError(f"{where}: {declared.refusal}; convert the checkpoint into a format that is read")
    name = declared.format
    if declared.method is None:
        # dtype in config.json says how to compute; unquantised tensors carry their own dtype and it is the truth
        floats = [n for n in closest if n in DTYPES]
        name = floats[0] if floats and name not in floats else name
    if declared.method == "gguf":
        # a file of blocks has no config; every tensor carries its own type
        name = next((f.name for f in FORMATS if any(_holds(s, seen) for s in f.storages)), name)
    listed = ", ".join(f"{suffix} {'/'.join(sorted(dtypes))}" for suffix, dtypes in sorted(seen.items())) or "none"
    stored = f"{where}: the tensors are {listed}"
    if closest:
        stored += f", which looks like {' or '.join(closest)}"
    if name is None:
        msg = f"{stored}; config.json declares neither dtype nor quantization_config; add the one that is true"
        raise ConfigError(msg)
    cls = by_name(name)
    fitting = [s.name for s in cls.storages if _fits(s, seen) and declared.storage in (None, s.name)]
    if not fitting or (declared.method is None and any(n not in DTYPES for n in closest)):
        asked = [s for s in cls.storages if declared.storage in (None, s.name)]
        needs = " or ".join(dict.fromkeys(" + ".join(p.suffix for p in s.parts if p.required) for s in asked))
        declares = f"declares {name}" if declared.method is None else f"declares {name} ({declared.method})"
        msg = f"{stored}; config.json {declares}, which needs {needs}; correct quantization_config or the files"
        raise ConfigError(msg)
    return name, declared.method if declared.method in fitting else fitting[0]


def detect(checkpoint: Checkpoint, spec: MoESpec, layer: int) -> dict[Projection, StoredFormat]:
    """Return how each projection of the experts of ``layer``, which ``spec`` describes, is stored.

    Raises ConfigError when the config names something unknown, declares different formats for two experts, or
    contradicts the tensors, and MissingTensorError when the layer has no expert tensors at all.
    """
    config, index = checkpoint.config, index_of(checkpoint)
    found = index.found(layer)
    if not found.single and not found.stack:
        raise _no_experts(checkpoint, index, layer)
    stacked, every = not found.single, projections(spec)
    paths = {
        which: source_of(index.names, spec, layer=layer, expert=0, projection=which, stacked=stacked).path
        for which in every
    }
    for which in every:
        _refuse_unlike_experts(config, index, layer, which)
    declared = {which: declared_format(config, path) for which, path in paths.items()}
    # Where nothing is declared, or no format has all blocks of a file, the tensors of each projection tell.
    method, seen = declared["down"].method, found.suffixes(*every)
    apart = len(set(declared.values())) > 1 or method is None
    apart = apart or (method == "gguf" and not any(_holds(s, seen) for form in FORMATS for s in form.storages))
    stored: dict[Projection, StoredFormat] = {}
    for which in every:
        holder: Projection = next(
            other for other in every if paths[other] == paths[which]
        )  # of gate and up in one, gate
        own = (found.suffixes(holder) if apart else {}) or found.suffixes(*every)
        own = {k: v for k, v in own.items() if k != "_bias" and not (spec.expert_bias and k == ".bias")}
        stored[which] = stored_format(declared[which], own, f"layer {layer}", stacked=stacked)
    return stored


def _refuse_unlike_experts(config: Mapping[str, object], index: Index, layer: int, which: Projection) -> None:
    """Raise ConfigError where mixed precision declares formats that differ from expert to expert."""
    experts = sorted(expert for expert, one in index.found(layer).single if one == which)
    every = (index.names.projection(which).format(layer=layer, expert=expert) for expert in experts)
    mixed = mixed_algorithms(config, every)
    if len(mixed) > 1:
        listed = ", ".join(f"{path} {algorithm}" for algorithm, path in mixed.items())
        raise ConfigError(f"layer {layer}: its experts differ in format: {listed}; they must share one{_ALIKE}")


def _no_experts(checkpoint: Checkpoint, index: Index, layer: int) -> MissingTensorError:
    """Return the error for a layer without a tensor that is named as the family names its experts."""
    prefix, family = index.names.experts.format(layer=layer), index.family.name
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
    if closest := get_close_matches(prefix, pool[:_MOST_NAMES], 3, 0.0):
        others += f"; the nearest names are {', '.join(closest)}"
    if inside:
        others += "; if the layer is dense, correct the entry of config.json that says which layers have experts"
    return MissingTensorError(f"layer {layer}: no tensor starts with {prefix!r}, which {family} needs{others}")


def stored_format(
    declared: Declared, seen: Mapping[str, set[str]], where: str, *, stacked: bool = False
) -> StoredFormat:
    """Return the stored format that is both declared and present; raises ConfigError."""
    name, storage = _match_storage(declared, seen, where)
    block, group = declared.block or (128, 128), declared.group or 0
    return StoredFormat(
        name=name,
        storage=storage,
        stacked=stacked,
        block=block,
        group=group,
        static_activations=declared.static_activations,
    )
