"""Are the experts that transformers loaded those of the checkpoint? Asked once a module, before its layer is built.

transformers reads some quantised experts wrongly and says nothing: a scale that is dropped, a block that is stretched.
Where the checkpoint lies on this machine, rows of a few experts are decoded here too and must be the same numbers;
elsewhere the config is asked, and what is known to be misread is refused.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...checkpoint.layer_view import CheckpointLayer
from ...checkpoint.layout import Cut, Source, projections, read_whole
from ...checkpoint.reader import Checkpoint, read_config
from ...errors import CheckpointError, ConfigError, InputError, SpecError
from ...formats.payload import Payload
from ...models import NESTED, Declared, declared_format, family_of, method_of, quantization_block
from ...types import ExpertWeights, format_names
from ..extra import import_extra
from .modules import named_experts, write_count

__all__ = ["Origin", "record_origin", "check", "folder_of", "set_comparing"]

_LOG = logging.getLogger(__name__)
_ATTRIBUTE = "_collegium_origin"  # on the module itself, so that it goes with copies
_ROWS_PER_READ = 4  # rows read at a time where rows share no scale
# A model may be rounded to bfloat16 three times: its scale, the product, and for a later dtype.
_TOLERANCE = 2 * torch.finfo(torch.bfloat16).eps
_SETTINGS = {"compare": True}


@dataclass(kw_only=True, slots=True)
class Origin:
    """Where the weights of an experts module come from.

    name, layer: of the module in its model. folder: of the checkpoint, None with the reason in ``why``. versions:
    write counters of its parameters at that time. quantization: what the model's config says. trusted: whether its
    weights were compared and found equal.
    """

    name: str
    layer: int
    folder: str | None
    why: str
    versions: tuple[int, ...]
    quantization: dict[str, object] | None
    trusted: bool = False


def set_comparing(compare: bool) -> None:
    """Compare the experts of layers built from now on with their checkpoint, or leave that to the caller."""
    _SETTINGS["compare"] = compare


def folder_of(config: Any, *, cache_dir: str | None = None, subfolder: str = "") -> Path | None:
    """Return the folder on this machine that a model was loaded from; the network is never asked."""
    named = str(getattr(config, "name_or_path", "") or "")
    if not named:
        return None
    folder = Path(named)
    if not folder.is_dir():
        ask, revision = import_extra("huggingface_hub").try_to_load_from_cache, getattr(config, "_commit_hash", None)
        try:
            found = ask(named, "config.json", cache_dir=cache_dir, revision=revision)
        except ValueError:  # no name of a repository
            return None
        if not isinstance(found, str):
            return None
        folder = Path(found).parent
    return (folder / subfolder).absolute()


def record_origin(model: Any, folder: Path | None, why: str = "") -> None:
    """Note where the experts of ``model`` come from, once; why: the reason where no folder is given."""
    quantizer, block = getattr(model, "hf_quantizer", None), _config_block(model.config)
    if quantizer is not None and not quantizer.pre_quantized:
        folder, why = None, "transformers quantised the weights while it loaded them"
    experts = named_experts(model)
    for name, layer, module in experts:
        if not hasattr(module, _ATTRIBUTE):
            alone = sum(other == layer for _, other, _ in experts) == 1
            origin = Origin(
                name=name,
                layer=layer,
                folder=str(folder) if folder is not None and alone else None,
                why=why if alone else f"layer {layer} has several experts modules",
                versions=_versions(module),
                quantization=block,
            )
            setattr(module, _ATTRIBUTE, origin)


def check(module: nn.Module, weights: ExpertWeights[Payload]) -> None:
    """Refuse an experts module whose ``weights`` are not the checkpoint's, or are known to be misread.

    Raises ConfigError. Weights that were changed in place since they were loaded are not compared.
    """
    if torch.compiler.is_compiling():
        return
    origin: Origin | None = getattr(module, _ATTRIBUTE, None)
    if origin is None:
        block = _config_block(getattr(module, "config", None))
        origin = Origin(name=type(module).__name__, layer=0, folder=None, why="", versions=(), quantization=block)
    if origin.trusted:
        return
    reason = _compare(module, weights, origin) if _SETTINGS["compare"] else "register(compare=False) was called"
    if reason is None:
        origin.trusted = True
        return
    _LOG.info("%s: its experts were not compared with a checkpoint: %s", origin.name, reason)
    _refuse_method(module, weights, origin)


def _versions(module: nn.Module) -> tuple[int, ...]:
    return tuple(write_count(parameter) for parameter in module.parameters(recurse=False))


def _compare(module: nn.Module, weights: ExpertWeights[Payload], origin: Origin) -> str | None:
    """Compare sampled rows; return None, or why that is not possible. Raises ConfigError for a difference."""
    if origin.folder is None:
        return origin.why or "the folder of the checkpoint is not known"
    if any(hasattr(p, "device_mesh") for p in module.parameters(recurse=False)):
        return "they are spread over several devices"
    now = _versions(module)
    if len(now) != len(origin.versions) or any(a > b for a, b in zip(now, origin.versions, strict=True)):
        return "they were changed in place since they were loaded"
    try:
        layer = CheckpointLayer.open(_open(origin.folder, _stamps(origin.folder)), origin.layer)
        spec = layer.spec
        wanted = (spec.num_experts, spec.gate_up_parts, spec.intermediate_size, spec.expert_hidden_size)
        if weights.gate_up.shape != wanted:
            return f"{weights.gate_up.shape} of them are held here, the checkpoint has {wanted}"
        difference = _difference(layer, weights)
    except (CheckpointError, SpecError, InputError, OSError) as error:
        return f"{error}"[:500]
    if difference is None:
        return None
    raise ConfigError(
        f"{origin.name}: {difference[0]}: transformers {import_extra('transformers').__version__} loaded numbers that are "
        f"{difference[1]:.1%} off those of the checkpoint {origin.folder} ({format_names(layer.spec.formats)}); rounding "
        f"is at most {_TOLERANCE:.1%}. Load the model with load_model({origin.folder!r}), which reads the experts "
        "itself. "
        "Where you changed the weights on purpose (an adapter that was merged, for instance), say so with "
        "register(compare=False)"
    )


@lru_cache(maxsize=1)
def _open(folder: str, _stamps: tuple[tuple[str, int], ...]) -> Checkpoint:
    """Open a checkpoint once for all its layers, again when a file was written since."""
    return Checkpoint.open(folder)


def _stamps(folder: str) -> tuple[tuple[str, int], ...]:
    files = (path for path in sorted(Path(folder).iterdir()) if path.suffix in (".json", ".safetensors", ".gguf"))
    return tuple((path.name, path.stat().st_mtime_ns) for path in files)


def _difference(layer: CheckpointLayer, weights: ExpertWeights[Payload]) -> tuple[str, float] | None:
    """Return (which projection, relative difference of the rows read) of the first that differs, None without one."""
    for source, window, matrix in _samples(layer, weights):
        ours, theirs = _published(layer, source, window), _rows(matrix, *window).float().cpu()
        size = ours.abs().maximum(ours.square().mean(1, keepdim=True).sqrt())
        if not bool(((theirs - ours).abs() <= _TOLERANCE * size).all()):
            return source.label, float((theirs - ours).norm() / ours.norm().clamp(min=1e-30))
    return None


def _samples(
    layer: CheckpointLayer, weights: ExpertWeights[Payload]
) -> Iterator[tuple[Source, tuple[int, int], Payload]]:
    """Yield rows of the first, the middle and the last expert: where they are stored, which, and the module's."""
    spec, halves = layer.spec, projections(layer.spec)
    parts = [part for stored in layer.both_stored for part in stored.layout.parts if part.required]
    step = max(part.rows_per for part in parts)
    for expert in sorted({0, spec.num_experts // 2, spec.num_experts - 1}):
        for half, which in enumerate(halves):
            source = layer.source(expert, which)
            theirs = weights.down[expert] if which == "down" else weights.gate_up[expert][half]
            # a block that is cut short by the end of the matrix is the one most easily misread
            last = (source.rows - 1) // step * step if step > 1 else max(0, source.rows - _ROWS_PER_READ)
            for start, stop in {(0, min(source.rows, max(step, _ROWS_PER_READ))), (last, source.rows)}:
                yield source, (start, stop), theirs


def _published(layer: CheckpointLayer, source: Source, window: tuple[int, int]) -> Tensor:
    """Decode rows of one projection as the checkpoint holds them."""
    cut = Cut(rows=window, columns=(0, source.columns))
    try:
        return read_whole(layer.checkpoint, source, layer.stored_as(source), cut).decode()
    except InputError:  # a scale that serves more rows than these
        return read_whole(layer.checkpoint, source, layer.stored_as(source)).rows(*window).decode()


def _rows(matrix: Payload, start: int, stop: int) -> Tensor:
    try:
        return matrix.rows(start, stop).decode()
    except InputError:
        return matrix.decode()[start:stop]


def _config_block(config: Any) -> dict[str, object] | None:
    """Return ``quantization_config`` of a model's config or of its text part as an object of JSON."""
    for name in ("", *NESTED):
        config = getattr(config, name, config) if name else config
        block = getattr(config, "quantization_config", None)
        if block:
            return cast("dict[str, object]", dict(block if isinstance(block, dict) else block.to_dict()))
    return None


def _stored_block(origin: Origin) -> dict[str, object] | None:
    """Return what the folder's config says: transformers deletes the entry of a model it has decoded."""
    if origin.folder is None or not _SETTINGS["compare"]:
        return None
    try:
        block = quantization_block(read_config(Path(origin.folder)))
    except (CheckpointError, OSError):
        return None
    return None if block is None else dict(block)


def _refuse_method(module: nn.Module, weights: ExpertWeights[Payload], origin: Origin) -> None:
    """Raise ConfigError where the config names a method and a format that transformers reads wrongly."""
    block = origin.quantization or _stored_block(origin)
    if block is None:
        return
    method = str(method_of(block))
    declared = _declared({**block, "quant_method": method}, module, origin)
    if declared is not None and declared.method is None:
        return  # the experts are on the list of what is not quantised
    form = block.get("quant_algo") if declared is None else declared.format
    readers = import_extra("transformers.quantizers.auto").AUTO_QUANTIZATION_CONFIG_MAPPING
    why: str | None = None
    if not any(known.startswith(method) for known in readers):
        why = "it has no reader of this method and takes the codes for weights"
    elif (method, form) == ("compressed-tensors", "nvfp4"):
        why = "its reader drops the global scale"
    elif declared is not None and declared.block is not None and weights.down.name in ("bf16", "fp16", "fp32"):
        cut = [n for n in weights.down.shape[1:] for size in declared.block if n > size and n % size]
        why = f"it stretches blocks of {declared.block} over {cut[0]} rows or columns" if cut else None
    if why is not None:
        raise ConfigError(
            f"{origin.name}: config.json says quant_method {method!r}, format {form}; transformers "
            f"{import_extra('transformers').__version__} reads such experts wrongly: {why}. Load the model with load_model(), "
            "which reads them itself; where these weights come from elsewhere, delete quantization_config of the config"
        )


def _declared(block: Mapping[str, object], module: nn.Module, origin: Origin) -> Declared | None:
    """Return what a quantisation block says of these experts, None where it is not known to Collegium."""
    kind = str(getattr(getattr(module, "config", None), "model_type", ""))
    try:
        named = family_of({"model_type": kind}).names.down
    except ConfigError:
        named = None
    path = (named or f"{origin.name}.{{expert}}.down_proj").format(layer=origin.layer, expert=0)
    try:
        return declared_format({"model_type": kind, "quantization_config": block}, path)
    except ConfigError:
        return None
