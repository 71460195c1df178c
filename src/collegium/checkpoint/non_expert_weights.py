"""Weights of a layer outside its routed experts: router, hash table, shared expert, latent projections.

Audit and loader share these checks, so that a checkpoint that passes the audit can be loaded.
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
from ..formats.unquantised import as_stored
from ..models import declared_format
from ..models.base import Config
from ..runtime.devices import probe
from ..types import ExpertWeights, LatentWeights, RouterWeights, SharedWeights
from .activation_scales import ScaleRequest, input_reach
from .detect import stored_format
from .findings import Findings
from .header import FLOATS, TensorInfo
from .index import router_names
from .layer_view import CheckpointLayer
from .layout import Projection, Source, parts_problems, read_matrix, read_whole
from .problems import raise_if_any
from .stored_format import ACTIVATION_SCALES, StoredFormat

__all__ = [
    "check_hash_entries",
    "check_non_expert_weights",
    "load_hash_table",
    "load_latent",
    "load_router",
    "load_shared",
    "shared_sources",
]

_MATRICES = {"router_weight": "router", "shared_gate": "gate of the shared expert"}
_ROUTER_FIELDS = ("router_weight", "router_bias", "router_scale", "correction_bias", "expert_scale")
_INTEGERS = ("U8", "I8", "U16", "I16", "U32", "I32", "I64")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Module:
    """Matrices of one module: their name templates, label and locations.

    others: suffixes of tensors below the same path that are not part of the matrices.
    """

    templates: tuple[str, ...]
    where: str
    sources: tuple[Source, ...]
    others: tuple[str, ...] = ()


def _required_tensors(layer: CheckpointLayer) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the tensors that the layer needs: field of ``Names`` to (name, shape); matrices may be quantised."""
    names = layer.names
    spec = layer.spec
    if layer.index.family.refusal(layer.number) is not None:
        return {}  # transformers loads and runs them
    routing = spec.routing
    experts = spec.num_experts
    hidden = spec.hidden_size
    gated = spec.shared is not None and spec.shared.gated
    normed = spec.latent_norm_eps is not None
    image = names.image_experts
    required: dict[str, tuple[str | None, tuple[int, ...]]] = {
        "router_weight": (names.router_weight, (hidden, experts) if image else (experts, hidden)),
        "router_bias": (names.router_bias, (experts,)),
        "router_scale": (names.router_scale, (hidden,)),
        "correction_bias": (
            names.correction_bias if routing.correction_bias else None,
            (2, experts) if image else (experts,),
        ),
        "expert_scale": (names.expert_scale if routing.expert_scale else None, (experts,)),
        "shared_gate": (names.shared_gate if gated else None, (1, hidden)),
        "latent_norm": (names.latent_norm if normed else None, (spec.expert_hidden_size,)),
    }
    return {
        key: (name.format(layer=layer.number), shape) for key, (name, shape) in required.items() if name is not None
    }


def _shared_module(layer: CheckpointLayer) -> _Module | None:
    """Return the shared expert, None where the layer has none."""
    spec = layer.spec
    templates = layer.names.shared
    if spec.shared is None or templates is None:
        return None
    where = f"layer {layer.number}, shared expert"
    gated = spec.activation.gated
    paths = [template.format(layer=layer.number) for template in templates]
    intermediate = spec.shared.intermediate_size
    hidden = spec.hidden_size
    fused = gated and len(paths) == 2  # gate rows, then up rows, in one tensor
    upper: tuple[Projection, ...] = ("gate", "up") if gated else ("up",)
    sources = [
        Source(
            label=f"{where}, {which}",
            path=paths[0 if fused else half],
            projection=which,
            rows=intermediate,
            columns=hidden,
            stored_rows=2 * intermediate if fused else intermediate,
            offset=intermediate * half if fused else 0,
        )
        for half, which in enumerate(upper)
    ]
    lower: Projection = "down"
    label = f"{where}, down"
    sources.append(
        Source(label=label, path=paths[-1], projection=lower, rows=hidden, columns=intermediate, stored_rows=hidden)
    )
    return _Module(templates=templates, where=where, sources=tuple(sources))


def _latent_modules(layer: CheckpointLayer) -> Iterator[_Module]:
    """Yield the projections into and out of the latent width, where the layer has them."""
    spec = layer.spec
    templates = layer.names.latent
    if spec.latent_size is None or templates is None:
        return
    sizes = ((spec.latent_size, spec.hidden_size), (spec.hidden_size, spec.latent_size))
    for template, (rows, columns) in zip(templates, sizes, strict=True):
        path = template.format(layer=layer.number)
        where = f"layer {layer.number}, {template.rpartition('.')[2]}"
        source = Source(label=where, path=path, rows=rows, columns=columns, stored_rows=rows)
        yield _Module(templates=(template,), where=where, sources=(source,))


def _quantised_module(layer: CheckpointLayer, key: str) -> _Module | None:
    """Return the router or the shared expert's gate as a module, None where it is unquantised or missing."""
    if key not in _MATRICES:
        return None
    name, (rows, columns) = _required_tensors(layer)[key]
    path = name.removesuffix(".weight")
    known = (*router_names(layer.names), *(layer.names.outside or ()))
    named = (other.format(layer=layer.number) for other in known if other is not None)
    others = tuple(other.removeprefix(path) for other in named if other != name and other.startswith(path + "."))
    template = (getattr(layer.names, key) or "").removesuffix(".weight")
    dtypes_by_suffix = {
        suffix: dtypes for suffix, dtypes in layer.suffixes((template,)).items() if suffix not in others
    }
    if not dtypes_by_suffix or (dtypes_by_suffix.keys() == {".weight"} and dtypes_by_suffix[".weight"] <= {*FLOATS}):
        return None
    where = f"layer {layer.number}, {_MATRICES[key]}"
    source = Source(
        label=where, path=path, rows=rows, columns=columns, stored_rows=rows, separate_bias=".bias" in others
    )
    return _Module(templates=(template,), where=where, sources=(source,), others=others)


def check_non_expert_weights(
    layer: CheckpointLayer, *, deep: bool = False, tables: bool = False, findings: Findings | None = None
) -> Iterator[CheckpointError]:
    """Yield the problems of the weights of ``layer`` outside its routed experts.

    deep: read the tensors too (numbers, scales, the hash table's entries), otherwise only their headers. tables: read
    the hash table in any case. findings: records the matrices that are read.
    """
    checks = [partial(_read_tensor if deep else _check_header, layer, key) for key in _required_tensors(layer)]
    for check in (*checks, partial(load_hash_table, layer, deep=deep or tables)):
        try:
            check()
        except CheckpointError as error:
            yield error
    shared = _shared_module(layer)
    modules = [*_latent_modules(layer)] if shared is None else [shared, *_latent_modules(layer)]
    for module in modules:
        yield from _check_module(layer, module, findings, deep=deep)
    if findings is not None and shared is not None and (kinds := _unlike_kinds(layer, shared)) is not None:
        findings.add(f"{shared.where}: {kinds}; both are decoded to bf16")
    yield from _check_unused(layer, findings)


def _check_unused(layer: CheckpointLayer, findings: Findings | None) -> list[CheckpointError]:
    """Return a problem for each tensor that would be unused because config.json describes a layer without it.

    A correction bias is allowed in a layer with hash routing: it could affect only the choice of experts.
    """
    checkpoint = layer.checkpoint
    names = layer.names
    spec = layer.spec
    number = layer.number
    used = {name for name, _ in _required_tensors(layer).values()}
    templates = [names.expert_scale, names.latent_norm]
    if not spec.routing.hash_routing:
        templates += [names.correction_bias, names.hash_table]
    stored = [template.format(layer=number) for template in templates if template is not None]
    unused = [name for name in stored if name in checkpoint and name not in used]
    gate = names.shared_gate
    if gate is not None and gate.format(layer=number) not in used and layer.suffixes((gate.removesuffix(".weight"),)):
        unused.append(gate.format(layer=number))
    shared = (names.shared or ()) if spec.shared is None else ()
    latent = (names.latent or ()) if not spec.latent_size else ()
    unused += [path.format(layer=number) for path in (*shared, *latent) if layer.suffixes((path,))]
    if findings is not None and layer.shared_assumed:
        findings.add(
            f"layer {number}: neither config.json nor the files have a shared expert; the layer runs without one"
        )
    return [
        UnknownTensorError(
            f"layer {number}: {name} is in the files, config.json describes a layer without it, which would compute "
            "something else; correct the entry of config.json that belongs to it, or remove the tensor"
        )
        for name in unused
    ]


def _check_module(
    layer: CheckpointLayer, module: _Module, findings: Findings | None, *, deep: bool
) -> list[CheckpointError]:
    try:
        stored = _stored_formats(layer, module)
    except CheckpointError as error:
        return [error]
    sources = {source.path: source for source in reversed(module.sources)}  # a fused tensor is checked once
    problems: list[CheckpointError] = []
    for source in sources.values():
        problems += parts_problems(layer.checkpoint, source, stored[source.path])
    if problems or not deep:
        return problems
    for source in module.sources:
        payload, matrix_problems = read_matrix(layer.checkpoint, source, stored[source.path])
        problems += matrix_problems
        if findings is not None and payload is not None and not matrix_problems:
            findings.record(source.label, payload)
    return problems


def _check_header(layer: CheckpointLayer, key: str) -> None:
    """Check the headers of entry ``key`` of ``_required_tensors``; raises its problems."""
    name, shape = _required_tensors(layer)[key]
    module = _quantised_module(layer, key)
    if module is not None:
        raise_if_any(layer.checkpoint, _check_module(layer, module, None, deep=False))
        return
    info = _info(layer, name)
    # Some tools store dimensions of 1 and others do not.
    if [n for n in info.shape if n != 1] != [n for n in shape if n != 1] or info.dtype not in FLOATS:
        raise TensorMismatchError(
            f"layer {layer.number}: {name} is {info.dtype} {info.shape}, needed is BF16, F16 or F32 {shape}"
        )


def _info(layer: CheckpointLayer, name: str) -> TensorInfo:
    if name not in layer.checkpoint:
        raise MissingTensorError(f"layer {layer.number}: {name} missing; the layer needs it")
    return layer.checkpoint.info(name)


def _read_tensor(layer: CheckpointLayer, key: str) -> Tensor:
    """Read entry ``key`` of ``_required_tensors`` in its stored dtype; a quantised matrix is decoded to float32."""
    _check_header(layer, key)
    module = _quantised_module(layer, key)
    if module is not None:
        return _read_matrices(layer, module)[0].decode()
    name, shape = _required_tensors(layer)[key]
    tensor = layer.checkpoint.read(name).reshape(shape)
    if not bool(torch.isfinite(tensor).all()):
        raise BadScaleError(
            f"layer {layer.number}: {name} holds NaN or infinity; download the file again or export it again"
        )
    return tensor


def load_hash_table(layer: CheckpointLayer, *, deep: bool = True) -> Tensor | None:
    """Read the hash table, the experts by token id: integers ``[vocabulary, K]``, None without hash routing.

    deep: False checks the header alone and returns None. Raises MissingTensorError, and TensorMismatchError for another
    shape or dtype, fewer rows than ``vocab_size``, and a row with an expert that does not exist or is repeated.
    """
    template = layer.names.hash_table
    spec = layer.spec
    where = f"layer {layer.number}"
    if template is None or not spec.routing.hash_routing:
        return None
    name = template.format(layer=layer.number)
    top_k = spec.routing.top_k
    info = _info(layer, name)
    vocabulary = Config(layer.checkpoint.config).integer("vocab_size", default=0)
    if len(info.shape) != 2 or info.shape[1] != top_k or info.dtype not in _INTEGERS:
        raise TensorMismatchError(
            f"{where}: {name} is {info.dtype} {info.shape}, needed are integers [vocabulary, top_k={top_k}]"
        )
    if info.shape[0] < max(vocabulary, 1):
        raise TensorMismatchError(
            f"{where}: {name} has {info.shape[0]} rows, needed are vocab_size={vocabulary}; token ids from "
            f"{info.shape[0]} on would have no experts; correct the one that is wrong"
        )
    if not deep:
        return None
    table = layer.checkpoint.read(name)
    check_hash_entries(f"{where}: {name}", table.long(), spec.num_experts)
    return table


def check_hash_entries(where: str, entries: Tensor, experts: int) -> None:
    """Raise TensorMismatchError for a row of ``entries [vocabulary, K]`` with an invalid or a repeated expert."""
    outside = (entries < 0) | (entries >= experts)
    ordered = entries.sort(dim=1).values
    repeated = torch.zeros_like(outside)
    repeated[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    checks = (
        (outside, entries, f", experts are 0 to {experts - 1}"),
        (repeated, ordered, " twice, allowed is once"),
    )
    for bad, values, problem in checks:
        if bool(bad.any()):
            row, column = bad.nonzero()[0].tolist()
            raise TensorMismatchError(
                f"{where}: row {row}, of token id {row}, holds expert {int(values[row, column])}{problem}; "
                f"{int(bad.any(1).sum())} of {len(entries)} rows have this fault; download the file again or correct it"
            )


def load_router(layer: CheckpointLayer, *, device: torch.device | str = "cpu") -> RouterWeights:
    """Read the router of ``layer`` in its stored dtype: weight ``[E, D]``, other tensors ``[E]`` or None.

    A quantised weight is decoded to float32 exactly. A scale of the router's input is multiplied into the weight,
    together with ``D**-0.5``, in float32. Raises MissingTensorError, TensorMismatchError, UnknownTensorError,
    ConfigError, and BadScaleError for NaN or infinity.
    """
    device = probe(device).place
    tensors = {key: _read_tensor(layer, key).to(device) for key in _required_tensors(layer) if key in _ROUTER_FIELDS}
    weight = tensors["router_weight"]
    if layer.names.image_experts:  # input-first; the first row of the bias is for text
        weight = weight.T.contiguous()
        tensors["correction_bias"] = tensors["correction_bias"][0].clone()
    scale = tensors.get("router_scale")
    if scale is not None:
        weight = weight.float() * scale.float() * layer.spec.hidden_size**-0.5
    table = load_hash_table(layer)
    return RouterWeights(
        weight=weight,
        bias=tensors.get("router_bias"),
        correction_bias=tensors.get("correction_bias"),
        hash_table=None if table is None else table.to(device),
        expert_scale=tensors.get("expert_scale"),
    )


def _stored_formats(layer: CheckpointLayer, module: _Module) -> dict[str, StoredFormat]:
    """Return the stored format of each matrix by module path; down may differ from gate and up.

    In a GGUF file gate and up may differ too: quantisers choose the kind of each tensor. Raises MissingTensorError,
    ConfigError and UnknownTensorError.
    """
    number = layer.number
    missing = [t.format(layer=number) for t in module.templates if not layer.suffixes((t,))]
    if missing:
        raise MissingTensorError(
            f"layer {number}: {' and '.join(missing)} missing; the layer needs {'it' if len(missing) == 1 else 'them'}"
        )
    *upper, lower = module.templates
    formats: dict[str, StoredFormat] = {}
    together = [[template] for template in upper] if layer.checkpoint.is_gguf else [upper]
    for templates in (*filter(None, together), [lower]):
        dtypes_by_suffix = {k: dtypes for k, dtypes in layer.suffixes(templates).items() if k not in module.others}
        paths = [template.format(layer=number) for template in templates]
        declared = {path: declared_format(layer.checkpoint.config, path) for path in paths}
        if len(set(declared.values())) > 1:
            listed = ", ".join(f"{path} {entry.format}" for path, entry in declared.items())
            raise ConfigError(f"{module.where}: gate and up differ in format: {listed}; they are one product")
        try:
            stored = stored_format(declared[paths[0]], dtypes_by_suffix, module.where)
        except ConfigError:
            upper_format = formats.get(module.templates[0].format(layer=number))
            if upper_format is None or declared[paths[0]] != declared_format(
                layer.checkpoint.config, next(iter(formats))
            ):
                raise
            stored = upper_format  # same declaration: the check of the parts reports the missing one
        unknown = set(dtypes_by_suffix) - {part.suffix for part in stored.layout.parts} - set(ACTIVATION_SCALES)
        if unknown:
            names = [n for path in paths for s in sorted(unknown) if (n := path + s) in layer.checkpoint]
            raise UnknownTensorError(
                f"{module.where}: {', '.join(names)}: {stored.name} ({stored.storage}) has no such part"
            )
        formats.update(dict.fromkeys(paths, stored))
    return formats


def _read_matrices(layer: CheckpointLayer, module: _Module) -> list[Payload]:
    """Check the matrices of a module and read them whole in their stored format."""
    raise_if_any(layer.checkpoint, _check_module(layer, module, None, deep=False))
    stored = _stored_formats(layer, module)
    return [read_whole(layer.checkpoint, source, stored[source.path]) for source in module.sources]


def load_latent(layer: CheckpointLayer, *, device: torch.device | str = "cpu") -> LatentWeights | None:
    """Read the projections into and out of the latent width, decoded to float32; None if the layer has none.

    Raises ConfigError, MissingTensorError, TensorMismatchError and BadScaleError.
    """
    device = probe(device).place
    modules = [*_latent_modules(layer)]
    if not modules:
        return None
    down, up = (_read_matrices(layer, module)[0].decode().to(device) for module in modules)
    norm = _read_tensor(layer, "latent_norm").to(device) if "latent_norm" in _required_tensors(layer) else None
    return LatentWeights(down=down, up=up, norm=norm, norm_eps=layer.spec.latent_norm_eps or 0.0)


def _unlike_kinds(layer: CheckpointLayer, shared: _Module) -> str | None:
    """Return the kinds of the shared expert's gate and up in a GGUF file if they differ, else None."""
    names = [f"{source.path}.weight" for source in shared.sources[:-1]] if layer.checkpoint.is_gguf else []
    kinds = [layer.checkpoint.info(name).dtype for name in names if name in layer.checkpoint]
    return f"gate is {kinds[0]}, up is {kinds[-1]}" if len(set(kinds)) > 1 else None


def _in_one_format(layer: CheckpointLayer, shared: _Module, upper: list[Payload]) -> list[Payload]:
    """Return the shared expert's gate and up, decoded to bfloat16 if a GGUF file has them in different kinds."""
    if _unlike_kinds(layer, shared) is None:
        return upper
    return [as_stored(matrix.decode(torch.bfloat16)) for matrix in upper]


def shared_sources(layer: CheckpointLayer) -> list[tuple[Source, StoredFormat]]:
    """Return the matrices of the shared expert and their stored formats, gate before up before down; none without one.

    Raises the errors of ``load_shared`` for headers.
    """
    module = _shared_module(layer)
    if module is None:
        return []
    stored = _stored_formats(layer, module)
    return [(source, stored[source.path]) for source in module.sources]


def load_shared(
    layer: CheckpointLayer, *, device: torch.device | str = "cpu", scales: ScaleRequest | None = None
) -> SharedWeights[Payload] | None:
    """Read the shared expert of ``layer`` as one expert in its stored format; None if the layer has none.

    Gate and up of different kinds in a GGUF file are decoded to bfloat16, as those of routed experts.

    scales: the activation format; the scales of a static format are read too. Raises ConfigError,
    MissingTensorError, TensorMismatchError, BadScaleError, and the InputError of ``input_reach``.
    """
    device = probe(device).place
    module = _shared_module(layer)
    if module is None:
        return None
    *upper, lower = (matrix.to(device) for matrix in _read_matrices(layer, module))
    upper = _in_one_format(layer, module, upper)
    gate_up = upper[0].repeated(len(upper)).repeated(1)
    down = lower.repeated(1)
    for half, matrix in enumerate(upper):
        gate_up[0].put(half, matrix)
    down.put(0, lower)
    gate = _read_tensor(layer, "shared_gate").to(device) if "shared_gate" in _required_tensors(layer) else None
    stored = _stored_formats(layer, module)
    both = stored[module.sources[0].path], stored[module.sources[-1].path]
    request = scales or ScaleRequest()
    reach = input_reach(layer.checkpoint, module.sources, both, request)
    fields = {} if reach is None else reach.fields([0], request.activations)
    return SharedWeights(experts=ExpertWeights(gate_up=gate_up, down=down, **fields), gate=gate)
