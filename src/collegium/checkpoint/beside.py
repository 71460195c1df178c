"""What a layer has beside its routed experts: router, hash table, shared expert, projections of a latent width.

The audit asks here what the loader asks, so that what passes the one loads in the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..errors import (
    BadScaleError,
    CheckpointError,
    ConfigError,
    MissingTensorError,
    TensorMismatchError,
    UnknownTensorError,
)
from ..models import declared_format
from ..models.base import Config
from ..types import ExpertWeights, LatentWeights, RouterWeights, SharedWeights
from .activation_scales import ACTIVATION_SCALES
from .detect import StoredFormat, stored_format
from .index import find_suffixes, index_of
from .layout import Source, parts_problems, read_matrix
from .problems import refuse

if TYPE_CHECKING:
    from torch import Tensor

    from ..formats.payload import Payload
    from ..models import Names
    from ..types import MoESpec
    from .reader import Checkpoint
    from .remarks import Remarks

__all__ = ["check_beside", "load_hash_table", "load_latent", "load_router", "load_shared"]

_FLOATS = ("BF16", "F16", "F32")
_INTEGERS = ("U8", "I8", "U16", "I16", "U32", "I32", "I64")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Module:
    """Matrices that share one stored format: their name templates, what to call them, and where each one lies."""

    templates: tuple[str, ...]
    where: str
    places: tuple[Source, ...]


def _vectors(names: Names, spec: MoESpec, layer: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the unquantised numbers the layer needs: field of ``Names`` to (name, shape)."""
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
    return {key: (name.format(layer=layer), shape) for key, (name, shape) in wanted.items() if name is not None}


def _shared(names: Names, spec: MoESpec, layer: int) -> _Module | None:
    if spec.shared is None or names.shared is None:
        return None
    where, gated = f"layer {layer}, shared expert", spec.activation.gated
    paths = [template.format(layer=layer) for template in names.shared]
    wide, width = spec.shared.intermediate_size, spec.hidden_size
    fused = gated and len(paths) == 2  # gate rows, then up rows, in one tensor
    places = [
        Source(
            label=f"{where}, {which}",
            path=paths[0 if fused else half],
            rows=wide,
            columns=width,
            stored_rows=2 * wide if fused else wide,
            offset=wide * half if fused else 0,
        )
        for half, which in enumerate(("gate", "up") if gated else ("up",))
    ]
    places.append(Source(label=f"{where}, down", path=paths[-1], rows=width, columns=wide, stored_rows=width))
    return _Module(templates=names.shared, where=where, places=tuple(places))


def _latent(names: Names, spec: MoESpec, layer: int) -> list[_Module]:
    if spec.latent_size is None or names.latent is None:
        return []
    modules: list[_Module] = []
    sizes = ((spec.latent_size, spec.hidden_size), (spec.hidden_size, spec.latent_size))
    for template, (rows, columns) in zip(names.latent, sizes, strict=True):
        path, where = template.format(layer=layer), f"layer {layer}, {template.rpartition('.')[2]}"
        place = Source(label=where, path=path, rows=rows, columns=columns, stored_rows=rows)
        modules.append(_Module(templates=(template,), where=where, places=(place,)))
    return modules


def check_beside(
    checkpoint: Checkpoint, spec: MoESpec, layer: int, *, deep: bool = False, remarks: Remarks | None = None
) -> list[CheckpointError]:
    """Return every problem of what ``layer`` has beside its routed experts.

    deep: read the tensors too (numbers, scales, the hash table's entries), otherwise only their headers. remarks:
    takes in the matrices that are read.
    """
    names = index_of(checkpoint).names
    problems: list[CheckpointError] = []
    for name, shape in _vectors(names, spec, layer).values():
        try:
            _header(checkpoint, name, shape, layer)
            if deep:
                _vector(checkpoint, name, shape, layer)
        except CheckpointError as error:
            problems.append(error)
    try:
        load_hash_table(checkpoint, spec, layer, deep=deep)
    except CheckpointError as error:
        problems.append(error)
    shared = _shared(names, spec, layer)
    for module in (*([shared] if shared else []), *_latent(names, spec, layer)):
        problems += _check_module(checkpoint, layer, module, remarks, deep=deep)
    return problems + _unused(checkpoint, names, spec, layer, remarks)


def _unused(
    checkpoint: Checkpoint, names: Names, spec: MoESpec, layer: int, remarks: Remarks | None
) -> list[CheckpointError]:
    """Return a problem for each tensor the layer would be wrong without, had config.json spoken of it.

    A correction bias is only remarked on: some models store one that they do not use.
    """
    used, rule = {name for name, _ in _vectors(names, spec, layer).values()}, spec.routing
    used |= {(names.hash_table or "").format(layer=layer)} if rule.hash_routing else set()
    others = (names.expert_scale, names.shared_gate, names.latent_norm, names.hash_table)
    found = [n for t in others if t is not None and (n := t.format(layer=layer)) in checkpoint and n not in used]
    paths = (
        *((names.shared or ()) if spec.shared is None else ()),
        *((names.latent or ()) if not spec.latent_size else ()),
    )
    found += [path.format(layer=layer) for path in paths if find_suffixes(checkpoint, layer, (path,))]
    bias = (names.correction_bias or "").format(layer=layer)
    if remarks is not None and bias in checkpoint and bias not in used and not rule.hash_routing:
        remarks.say(f"layer {layer}: {bias} is in the files, by config.json the layer does not use it")
    return [
        UnknownTensorError(
            f"layer {layer}: {name} is in the files, config.json describes a layer without it, which would compute "
            "something else; correct the entry of config.json that belongs to it, or remove the tensor"
        )
        for name in found
    ]


def _check_module(
    checkpoint: Checkpoint, layer: int, module: _Module, remarks: Remarks | None, *, deep: bool
) -> list[CheckpointError]:
    try:
        stored = _stored_at(checkpoint, layer, module)
    except CheckpointError as error:
        return [error]
    places = {place.path: place for place in reversed(module.places)}  # gate and up in one tensor: asked once
    problems = [problem for place in places.values() for problem in parts_problems(checkpoint, place, stored)]
    if problems or not deep:
        return problems
    for place in module.places:
        payload, wrong = read_matrix(checkpoint, place, stored)
        problems += wrong
        if remarks is not None and payload is not None and not wrong:
            remarks.see(place.label, payload)
    return problems


def _header(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], layer: int) -> None:
    if name not in checkpoint:
        raise MissingTensorError(f"layer {layer}: {name} missing; the layer needs it")
    info = checkpoint.info(name)
    # Dimensions of 1 are stored by some and not by others; any other order of the same numbers is another tensor.
    if [n for n in info.shape if n != 1] != [n for n in shape if n != 1] or info.dtype not in _FLOATS:
        msg = f"layer {layer}: {name} is {info.dtype} {info.shape}, needed is BF16, F16 or F32 {shape}"
        raise TensorMismatchError(msg)


def _vector(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], layer: int) -> Tensor:
    _header(checkpoint, name, shape, layer)
    tensor = checkpoint.read(name).reshape(shape)
    if not bool(torch.isfinite(tensor).all()):
        msg = f"layer {layer}: {name} holds NaN or infinity; download the file again or export it anew"
        raise BadScaleError(msg)
    return tensor


def load_hash_table(checkpoint: Checkpoint, spec: MoESpec, layer: int, *, deep: bool = True) -> Tensor | None:
    """Read the experts by token id, integers ``[vocabulary, K]``, or None where the layer looks nothing up.

    deep: False checks the header alone and returns None. Raises MissingTensorError, and TensorMismatchError for another
    shape or dtype, fewer rows than ``vocab_size``, and a row with an expert that does not exist or is named twice.
    """
    template = index_of(checkpoint).names.hash_table
    if template is None or not spec.routing.hash_routing:
        return None
    name, top_k, experts = template.format(layer=layer), spec.routing.top_k, spec.num_experts
    if name not in checkpoint:
        raise MissingTensorError(f"layer {layer}: {name} missing; the layer needs it")
    info, vocabulary = checkpoint.info(name), Config(checkpoint.config).integer("vocab_size", default=0)
    if len(info.shape) != 2 or info.shape[1] != top_k or info.dtype not in _INTEGERS:
        msg = f"layer {layer}: {name} is {info.dtype} {info.shape}, needed are integers [vocabulary, top_k={top_k}]"
        raise TensorMismatchError(msg)
    if info.shape[0] < max(vocabulary, 1):
        msg = f"layer {layer}: {name} has {info.shape[0]} rows, needed are vocab_size={vocabulary}; token ids from "
        raise TensorMismatchError(msg + f"{info.shape[0]} on would have no experts; correct the one that is wrong")
    if not deep:
        return None
    table = checkpoint.read(name)
    entries = table.long()
    outside, order = (entries < 0) | (entries >= experts), entries.sort(dim=1).values
    twice = torch.zeros_like(outside)
    twice[:, 1:] = order[:, 1:] == order[:, :-1]
    kinds = ((outside, entries, f", experts are 0 to {experts - 1}"), (twice, order, " twice, allowed is once"))
    for bad, values, what in kinds:
        if bool(bad.any()):
            row, column = bad.nonzero()[0].tolist()
            msg = (
                f"layer {layer}: {name}: row {row}, of token id {row}, holds expert {int(values[row, column])}{what}; "
            )
            msg += f"{int(bad.any(1).sum())} of {len(entries)} rows are wrong so; download the file again or correct it"
            raise TensorMismatchError(msg)
    return table


def load_router(
    checkpoint: Checkpoint, spec: MoESpec, layer: int, *, device: torch.device | str = "cpu"
) -> RouterWeights:
    """Read the router of ``layer`` in its stored dtype: weight ``[E, D]``, the rest ``[E]`` or None.

    A factor of the router's input is multiplied into the weight, with ``D**-0.5``, in float32. Raises
    MissingTensorError, TensorMismatchError, and BadScaleError for NaN or infinity.
    """
    wanted = _vectors(index_of(checkpoint).names, spec, layer)

    def optional(key: str) -> Tensor | None:
        return _vector(checkpoint, *wanted[key], layer).to(device) if key in wanted else None

    weight = _vector(checkpoint, *wanted["router_weight"], layer)
    if "router_scale" in wanted:
        scale = _vector(checkpoint, *wanted["router_scale"], layer)
        weight = weight.float() * scale.float() * spec.hidden_size**-0.5
    table = load_hash_table(checkpoint, spec, layer)
    return RouterWeights(
        weight=weight.to(device),
        bias=optional("router_bias"),
        correction_bias=optional("correction_bias"),
        hash_table=None if table is None else table.to(device),
        expert_scale=optional("expert_scale"),
    )


def _stored_at(checkpoint: Checkpoint, layer: int, module: _Module) -> StoredFormat:
    """Return how the matrices are stored; raises MissingTensorError, ConfigError and UnknownTensorError."""
    missing = [t.format(layer=layer) for t in module.templates if not find_suffixes(checkpoint, layer, (t,))]
    if missing:
        msg = f"layer {layer}: {' and '.join(missing)} missing; the layer needs {'it' if len(missing) == 1 else 'them'}"
        raise MissingTensorError(msg)
    seen = find_suffixes(checkpoint, layer, module.templates)
    declared = [declared_format(checkpoint.config, t.format(layer=layer)) for t in module.templates]
    if len(set(declared)) > 1:
        listed = ", ".join(
            f"{t.format(layer=layer)} {d.format}" for t, d in zip(module.templates, declared, strict=True)
        )
        raise ConfigError(f"{module.where}: its projections differ in format: {listed}; they must share one")
    stored = stored_format(declared[0], seen, module.where)
    unknown = set(seen) - {part.suffix for part in stored.layout.parts} - set(ACTIVATION_SCALES)
    if unknown:
        raise UnknownTensorError(f"{module.where}: has {', '.join(sorted(unknown))}, which {stored.name} does not have")
    return stored


def _matrices(checkpoint: Checkpoint, layer: int, module: _Module) -> list[Payload]:
    """Read the matrices of a module whole in their stored format, checked."""
    refuse(checkpoint, _check_module(checkpoint, layer, module, None, deep=False))
    stored, found = _stored_at(checkpoint, layer, module), list["Payload"]()
    for place in module.places:
        payload, wrong = read_matrix(checkpoint, place, stored)
        refuse(checkpoint, wrong)
        found += [] if payload is None else [payload]
    return found


def load_latent(
    checkpoint: Checkpoint, spec: MoESpec, layer: int, *, device: torch.device | str = "cpu"
) -> LatentWeights | None:
    """Read the projections into and out of the latent width, decoded to float32, or None when the spec has none.

    Raises ConfigError, MissingTensorError, TensorMismatchError and BadScaleError.
    """
    names = index_of(checkpoint).names
    modules = _latent(names, spec, layer)
    if not modules:
        return None
    down, up = (_matrices(checkpoint, layer, module)[0].decode().to(device) for module in modules)
    wanted = _vectors(names, spec, layer).get("latent_norm")
    norm = None if wanted is None else _vector(checkpoint, *wanted, layer).to(device)
    return LatentWeights(down=down, up=up, norm=norm, norm_eps=spec.latent_norm_eps or 0.0)


def load_shared(
    checkpoint: Checkpoint, spec: MoESpec, layer: int, *, device: torch.device | str = "cpu"
) -> SharedWeights[Payload] | None:
    """Read the shared expert of ``layer`` as one expert in its own stored format, or None when the spec has none.

    Raises ConfigError, MissingTensorError, TensorMismatchError and BadScaleError.
    """
    names = index_of(checkpoint).names
    module = _shared(names, spec, layer)
    if module is None:
        return None
    *upper, lower = (matrix.to(device) for matrix in _matrices(checkpoint, layer, module))
    gate_up, down = upper[0].repeated(len(upper)).repeated(1), lower.repeated(1)
    for half, matrix in enumerate(upper):
        gate_up[0].put(half, matrix)
    down.put(0, lower)
    wanted = _vectors(names, spec, layer).get("shared_gate")
    gate = None if wanted is None else _vector(checkpoint, *wanted, layer).to(device)
    return SharedWeights(experts=ExpertWeights(gate_up=gate_up, down=down), gate=gate)
