"""What a layer has beside its routed experts: router, hash table, shared expert, projections of a latent width.

The audit asks here what the loader asks, so that what passes the one loads in the other.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..errors import (
    BadScaleError,
    CheckpointError,
    ConfigError,
    MissingTensorError,
    TensorMismatchError,
    UnknownTensorError,
)
from ..formats.payload import Payload
from ..models import declared_format
from ..models.base import Config
from ..runtime.devices import probe
from ..types import ExpertWeights, LatentWeights, RouterWeights, SharedWeights
from .activation_scales import input_reach
from .detect import stored_format
from .findings import Findings
from .header import FLOATS, TensorInfo
from .index import router_names
from .layer_view import CheckpointLayer
from .layout import Projection, Source, parts_problems, read_matrix, read_whole
from .problems import raise_first
from .stored_format import ACTIVATION_SCALES, StoredFormat

__all__ = ["check_non_expert_weights", "load_hash_table", "load_latent", "load_router", "load_shared"]

_MATRICES = {"router_weight": "router", "shared_gate": "gate of the shared expert"}
_OF_ROUTER = ("router_weight", "router_bias", "router_scale", "correction_bias", "expert_scale")
_INTEGERS = ("U8", "I8", "U16", "I16", "U32", "I32", "I64")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Module:
    """Matrices of one module: their name templates, what to call them, and where each one lies.

    others: suffixes of tensors below the same path that are no part of the matrices.
    """

    templates: tuple[str, ...]
    where: str
    places: tuple[Source, ...]
    others: tuple[str, ...] = ()


def _vectors(layer: CheckpointLayer) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the numbers the layer needs: field of ``Names`` to (name, shape); matrices may be quantised."""
    names, spec = layer.names, layer.spec
    rule, e, d = spec.routing, spec.num_experts, spec.hidden_size
    gated = spec.shared is not None and spec.shared.gated
    wanted: dict[str, tuple[str | None, tuple[int, ...]]] = {
        "router_weight": (names.router_weight, (e, d)),
        "router_bias": (names.router_bias, (e,)),
        "router_scale": (names.router_scale, (d,)),
        "correction_bias": (names.correction_bias if rule.correction_bias else None, (e,)),
        "expert_scale": (names.expert_scale if rule.expert_scale else None, (e,)),
        "shared_gate": (names.shared_gate if gated else None, (1, d)),
        "latent_norm": (names.latent_norm if spec.latent_norm_eps is not None else None, (spec.expert_hidden_size,)),
    }
    return {key: (name.format(layer=layer.number), shape) for key, (name, shape) in wanted.items() if name is not None}


def _shared(layer: CheckpointLayer) -> _Module | None:
    spec, templates = layer.spec, layer.names.shared
    if spec.shared is None or templates is None:
        return None
    where, gated = f"layer {layer.number}, shared expert", spec.activation.gated
    paths = [template.format(layer=layer.number) for template in templates]
    wide, width = spec.shared.intermediate_size, spec.hidden_size
    fused = gated and len(paths) == 2  # gate rows, then up rows, in one tensor
    upper: tuple[Projection, ...] = ("gate", "up") if gated else ("up",)
    places = [
        Source(
            label=f"{where}, {which}",
            path=paths[0 if fused else half],
            projection=which,
            rows=wide,
            columns=width,
            stored_rows=2 * wide if fused else wide,
            offset=wide * half if fused else 0,
        )
        for half, which in enumerate(upper)
    ]
    lower: Projection = "down"
    label = f"{where}, down"
    places.append(Source(label=label, path=paths[-1], projection=lower, rows=width, columns=wide, stored_rows=width))
    return _Module(templates=templates, where=where, places=tuple(places))


def _latent(layer: CheckpointLayer) -> Iterator[_Module]:
    spec, templates = layer.spec, layer.names.latent
    if spec.latent_size is None or templates is None:
        return
    sizes = ((spec.latent_size, spec.hidden_size), (spec.hidden_size, spec.latent_size))
    for template, (rows, columns) in zip(templates, sizes, strict=True):
        path, where = template.format(layer=layer.number), f"layer {layer.number}, {template.rpartition('.')[2]}"
        place = Source(label=where, path=path, rows=rows, columns=columns, stored_rows=rows)
        yield _Module(templates=(template,), where=where, places=(place,))


def _quantised(layer: CheckpointLayer, key: str) -> _Module | None:
    """Return where the router or the gate of the shared expert lies, None where it is unquantised or missing."""
    if key not in _MATRICES:
        return None
    name, (rows, columns) = _vectors(layer)[key]
    path = name.removesuffix(".weight")
    named = (other.format(layer=layer.number) for other in router_names(layer.names) if other is not None)
    others = tuple(other.removeprefix(path) for other in named if other != name and other.startswith(path + "."))
    template = (getattr(layer.names, key) or "").removesuffix(".weight")
    seen = {suffix: dtypes for suffix, dtypes in layer.suffixes((template,)).items() if suffix not in others}
    if not seen or (seen.keys() == {".weight"} and seen[".weight"] <= {*FLOATS}):
        return None
    where = f"layer {layer.number}, {_MATRICES[key]}"
    source = Source(label=where, path=path, rows=rows, columns=columns, stored_rows=rows, own_bias=".bias" in others)
    return _Module(templates=(template,), where=where, places=(source,), others=others)


def check_non_expert_weights(
    layer: CheckpointLayer, *, deep: bool = False, tables: bool = False, remarks: Findings | None = None
) -> Iterator[CheckpointError]:
    """Yield every problem of what ``layer`` has beside its routed experts.

    deep: read the tensors too (numbers, scales, the hash table's entries), otherwise only their headers. tables: read
    the hash table in any case. remarks: takes in the matrices that are read.
    """
    checks = [partial(_read if deep else _header, layer, key) for key in _vectors(layer)]
    for check in (*checks, partial(load_hash_table, layer, deep=deep or tables)):
        try:
            check()
        except CheckpointError as error:
            yield error
    shared = _shared(layer)
    for module in (*([shared] if shared else []), *_latent(layer)):
        yield from _check_module(layer, module, remarks, deep=deep)
    yield from _unused(layer, remarks)


def _unused(layer: CheckpointLayer, remarks: Findings | None) -> list[CheckpointError]:
    """Return a problem for each tensor that the layer would not use, because config.json describes one without it.

    The bias of a layer that looks its experts up by token id is allowed: it could only choose them.
    """
    checkpoint, names, spec, number = layer.checkpoint, layer.names, layer.spec, layer.number
    used = {name for name, _ in _vectors(layer).values()}
    templates = [names.expert_scale, names.latent_norm]
    if not spec.routing.hash_routing:
        templates += [names.correction_bias, names.hash_table]
    stored = [template.format(layer=number) for template in templates if template is not None]
    found = [name for name in stored if name in checkpoint and name not in used]
    gate = names.shared_gate
    if gate is not None and gate.format(layer=number) not in used and layer.suffixes((gate.removesuffix(".weight"),)):
        found.append(gate.format(layer=number))
    shared = (names.shared or ()) if spec.shared is None else ()
    latent = (names.latent or ()) if not spec.latent_size else ()
    found += [path.format(layer=number) for path in (*shared, *latent) if layer.suffixes((path,))]
    if remarks is not None and layer.shared_assumed:
        remarks.add(
            f"layer {number}: neither config.json nor the files have a shared expert; the layer runs without one"
        )
    return [
        UnknownTensorError(
            f"layer {number}: {name} is in the files, config.json describes a layer without it, which would compute "
            "something else; correct the entry of config.json that belongs to it, or remove the tensor"
        )
        for name in found
    ]


def _check_module(
    layer: CheckpointLayer, module: _Module, remarks: Findings | None, *, deep: bool
) -> list[CheckpointError]:
    try:
        stored = _stored_at(layer, module)
    except CheckpointError as error:
        return [error]
    places = {place.path: place for place in reversed(module.places)}  # gate and up in one tensor: asked once
    problems: list[CheckpointError] = []
    for place in places.values():
        problems += parts_problems(layer.checkpoint, place, stored[place.path])
    if problems or not deep:
        return problems
    for place in module.places:
        payload, wrong = read_matrix(layer.checkpoint, place, stored[place.path])
        problems += wrong
        if remarks is not None and payload is not None and not wrong:
            remarks.record(place.label, payload)
    return problems


def _header(layer: CheckpointLayer, key: str) -> None:
    """Check the headers of what ``_vectors`` names; raises the first problem."""
    name, shape = _vectors(layer)[key]
    module = _quantised(layer, key)
    if module is not None:
        raise_first(layer.checkpoint, _check_module(layer, module, None, deep=False))
        return
    info = _info(layer, name)
    # Dimensions of 1 are stored by some and not by others; any other order of the same numbers is another tensor.
    if [n for n in info.shape if n != 1] != [n for n in shape if n != 1] or info.dtype not in FLOATS:
        msg = f"layer {layer.number}: {name} is {info.dtype} {info.shape}, needed is BF16, F16 or F32 {shape}"
        raise TensorMismatchError(msg)


def _info(layer: CheckpointLayer, name: str) -> TensorInfo:
    if name not in layer.checkpoint:
        raise MissingTensorError(f"layer {layer.number}: {name} missing; the layer needs it")
    return layer.checkpoint.info(name)


def _read(layer: CheckpointLayer, key: str) -> Tensor:
    """Read what ``_vectors`` names in its stored dtype; a quantised matrix is decoded to float32, exactly."""
    _header(layer, key)
    module = _quantised(layer, key)
    if module is not None:
        return _matrices(layer, module)[0].decode()
    name, shape = _vectors(layer)[key]
    tensor = layer.checkpoint.read(name).reshape(shape)
    if not bool(torch.isfinite(tensor).all()):
        msg = f"layer {layer.number}: {name} holds NaN or infinity; download the file again or export it anew"
        raise BadScaleError(msg)
    return tensor


def load_hash_table(layer: CheckpointLayer, *, deep: bool = True) -> Tensor | None:
    """Read the experts by token id, integers ``[vocabulary, K]``, or None where the layer looks nothing up.

    deep: False checks the header alone and returns None. Raises MissingTensorError, and TensorMismatchError for another
    shape or dtype, fewer rows than ``vocab_size``, and a row with an expert that does not exist or is named twice.
    """
    template, spec, where = layer.names.hash_table, layer.spec, f"layer {layer.number}"
    if template is None or not spec.routing.hash_routing:
        return None
    name, top_k, experts = template.format(layer=layer.number), spec.routing.top_k, spec.num_experts
    info, vocabulary = _info(layer, name), Config(layer.checkpoint.config).integer("vocab_size", default=0)
    if len(info.shape) != 2 or info.shape[1] != top_k or info.dtype not in _INTEGERS:
        msg = f"{where}: {name} is {info.dtype} {info.shape}, needed are integers [vocabulary, top_k={top_k}]"
        raise TensorMismatchError(msg)
    if info.shape[0] < max(vocabulary, 1):
        msg = f"{where}: {name} has {info.shape[0]} rows, needed are vocab_size={vocabulary}; token ids from "
        raise TensorMismatchError(msg + f"{info.shape[0]} on would have no experts; correct the one that is wrong")
    if not deep:
        return None
    table = layer.checkpoint.read(name)
    entries = table.long()
    outside, order = (entries < 0) | (entries >= experts), entries.sort(dim=1).values
    twice = torch.zeros_like(outside)
    twice[:, 1:] = order[:, 1:] == order[:, :-1]
    kinds = ((outside, entries, f", experts are 0 to {experts - 1}"), (twice, order, " twice, allowed is once"))
    for bad, values, what in kinds:
        if bool(bad.any()):
            row, column = bad.nonzero()[0].tolist()
            msg = f"{where}: {name}: row {row}, of token id {row}, holds expert {int(values[row, column])}{what}; "
            msg += f"{int(bad.any(1).sum())} of {len(entries)} rows are wrong so; download the file again or correct it"
            raise TensorMismatchError(msg)
    return table


def load_router(layer: CheckpointLayer, *, device: torch.device | str = "cpu") -> RouterWeights:
    """Read the router of ``layer`` in its stored dtype: weight ``[E, D]``, the rest ``[E]`` or None.

    A quantised weight is decoded to float32, exactly. A factor of the router's input is multiplied into the weight,
    with ``D**-0.5``, in float32. Raises MissingTensorError, TensorMismatchError, UnknownTensorError, ConfigError, and
    BadScaleError for NaN or infinity.
    """
    device = probe(device).place
    found = {key: _read(layer, key).to(device) for key in _vectors(layer) if key in _OF_ROUTER}
    weight, scale = found["router_weight"], found.get("router_scale")
    table = load_hash_table(layer)
    return RouterWeights(
        weight=weight if scale is None else weight.float() * scale.float() * layer.spec.hidden_size**-0.5,
        bias=found.get("router_bias"),
        correction_bias=found.get("correction_bias"),
        hash_table=None if table is None else table.to(device),
        expert_scale=found.get("expert_scale"),
    )


def _stored_at(layer: CheckpointLayer, module: _Module) -> dict[str, StoredFormat]:
    """Return how each matrix is stored, by module path; gate and up of a shared expert alike, down as it likes.

    Raises MissingTensorError, ConfigError and UnknownTensorError.
    """
    number = layer.number
    missing = [t.format(layer=number) for t in module.templates if not layer.suffixes((t,))]
    if missing:
        raise MissingTensorError(
            f"layer {number}: {' and '.join(missing)} missing; the layer needs {'it' if len(missing) == 1 else 'them'}"
        )
    *upper, lower = module.templates
    found: dict[str, StoredFormat] = {}
    for templates in (upper, [lower]) if upper else ([lower],):
        seen = {k: dtypes for k, dtypes in layer.suffixes(templates).items() if k not in module.others}
        paths = [template.format(layer=number) for template in templates]
        declared = {path: declared_format(layer.checkpoint.config, path) for path in paths}
        if len(set(declared.values())) > 1:
            listed = ", ".join(f"{path} {entry.format}" for path, entry in declared.items())
            raise ConfigError(f"{module.where}: gate and up differ in format: {listed}; they are one product")
        try:
            stored = stored_format(declared[paths[0]], seen, module.where)
        except ConfigError:
            above = found.get(module.templates[0].format(layer=number))
            if above is None or declared[paths[0]] != declared_format(layer.checkpoint.config, next(iter(found))):
                raise
            stored = above  # declared alike: the check of the parts names the one that is missing
        if stored.name == "gguf" and len(seen[".weight"]) > 1:
            kinds = ", ".join(sorted(seen[".weight"]))
            raise ConfigError(f"{module.where}: gate and up differ in format: {kinds}; they are one product")
        unknown = set(seen) - {part.suffix for part in stored.layout.parts} - set(ACTIVATION_SCALES)
        if unknown:
            names = [n for path in paths for s in sorted(unknown) if (n := path + s) in layer.checkpoint]
            raise UnknownTensorError(
                f"{module.where}: {', '.join(names)}: {stored.name} ({stored.storage}) has no such part"
            )
        found |= dict.fromkeys(paths, stored)
    return found


def _matrices(layer: CheckpointLayer, module: _Module) -> list[Payload]:
    """Read the matrices of a module whole in their stored format, checked."""
    raise_first(layer.checkpoint, _check_module(layer, module, None, deep=False))
    stored = _stored_at(layer, module)
    return [read_whole(layer.checkpoint, place, stored[place.path]) for place in module.places]


def load_latent(layer: CheckpointLayer, *, device: torch.device | str = "cpu") -> LatentWeights | None:
    """Read the projections into and out of the latent width, decoded to float32, or None when the layer has none.

    Raises ConfigError, MissingTensorError, TensorMismatchError and BadScaleError.
    """
    device, modules = probe(device).place, [*_latent(layer)]
    if not modules:
        return None
    down, up = (_matrices(layer, module)[0].decode().to(device) for module in modules)
    norm = _read(layer, "latent_norm").to(device) if "latent_norm" in _vectors(layer) else None
    return LatentWeights(down=down, up=up, norm=norm, norm_eps=layer.spec.latent_norm_eps or 0.0)


def load_shared(
    layer: CheckpointLayer, *, device: torch.device | str = "cpu", activations: str = "fp32"
) -> SharedWeights[Payload] | None:
    """Read the shared expert of ``layer`` as one expert in its own stored format, or None when it has none.

    activations: the format its rows will have, whose scales are read if it is static. Raises ConfigError,
    MissingTensorError, TensorMismatchError, BadScaleError, and InputError as ``input_reach`` says.
    """
    device, module = probe(device).place, _shared(layer)
    if module is None:
        return None
    *upper, lower = (matrix.to(device) for matrix in _matrices(layer, module))
    gate_up, down = upper[0].repeated(len(upper)).repeated(1), lower.repeated(1)
    for half, matrix in enumerate(upper):
        gate_up[0].put(half, matrix)
    down.put(0, lower)
    gate = _read(layer, "shared_gate").to(device) if "shared_gate" in _vectors(layer) else None
    stored = _stored_at(layer, module)
    both = stored[module.places[0].path], stored[module.places[-1].path]
    reach = input_reach(layer.checkpoint, module.places, both, activations)
    return SharedWeights(experts=ExpertWeights(gate_up=gate_up, down=down, input_reach=reach), gate=gate)
