"""Compare experts that transformers loaded with their checkpoint, once per module, before its layer is built.

transformers silently misreads some quantised experts: it drops a scale, or stretches a block. If the checkpoint is on
this machine, sampled rows of a few experts are decoded from the files and must have the same values. Otherwise formats
that are known to be misread are refused by the model's config.
"""

import logging
from collections import Counter
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

__all__ = ["Origin", "check", "folder_of", "record_origin", "set_comparing"]

_LOG = logging.getLogger(__name__)
_ATTRIBUTE = "_collegium_origin"  # an attribute of the module, so that copies include it
_ROWS_PER_READ = 4  # rows read at a time if rows share no scale
# Values may be rounded to bfloat16 three times: the scale, the product, and a later conversion.
_TOLERANCE = 2 * torch.finfo(torch.bfloat16).eps
_SETTINGS = {"compare": True}


@dataclass(kw_only=True, slots=True)
class Origin:
    """Origin of the weights of an experts module.

    name, layer: of the module in its model. folder: of the checkpoint; None with the reason in ``why``. versions:
    write counters of its parameters after loading. quantization: the quantisation block of the model's config.
    trusted: whether its weights were compared and are equal.
    """

    name: str
    layer: int
    folder: str | None
    why: str
    versions: tuple[int, ...]
    quantization: dict[str, object] | None
    trusted: bool = False


def set_comparing(compare: bool) -> None:
    """Set whether experts of layers built from now on are compared with their checkpoint."""
    _SETTINGS["compare"] = compare


def folder_of(config: Any, *, cache_dir: str | None = None, subfolder: str = "") -> Path | None:
    """Return the local folder that a model was loaded from, None if it is unknown; does not access the network."""
    name = str(getattr(config, "name_or_path", "") or "")
    if not name:
        return None
    folder = Path(name)
    if not folder.is_dir():
        try_to_load_from_cache = import_extra("huggingface_hub").try_to_load_from_cache
        revision = getattr(config, "_commit_hash", None)
        try:
            cached_file = try_to_load_from_cache(name, "config.json", cache_dir=cache_dir, revision=revision)
        except ValueError:  # not a repository id
            return None
        if not isinstance(cached_file, str):
            return None
        folder = Path(cached_file).parent
    return (folder / subfolder).absolute()


def record_origin(model: Any, folder: Path | None, why: str = "") -> None:
    """Record the origin of the experts of ``model``, once per module; why: the reason if ``folder`` is None."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not quantizer.pre_quantized:
        folder = None
        why = "transformers quantised the weights while it loaded them"
    block = _config_block(model.config)
    experts = named_experts(model)
    modules_per_layer = Counter(layer for _, layer, _ in experts)
    for name, layer, module in experts:
        if hasattr(module, _ATTRIBUTE):
            continue
        unique = modules_per_layer[layer] == 1
        origin = Origin(
            name=name,
            layer=layer,
            folder=str(folder) if folder is not None and unique else None,
            why=why if unique else f"layer {layer} has several experts modules",
            versions=_versions(module),
            quantization=block,
        )
        setattr(module, _ATTRIBUTE, origin)


def check(module: nn.Module, weights: ExpertWeights[Payload]) -> None:
    """Raise ConfigError if the ``weights`` of an experts module differ from the checkpoint or are known to be misread.

    Weights that were changed in place after loading are not compared.
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
    if any(hasattr(parameter, "device_mesh") for parameter in module.parameters(recurse=False)):
        return "they are sharded over several devices"
    versions = _versions(module)
    if len(versions) != len(origin.versions) or any(
        version > loaded_version for version, loaded_version in zip(versions, origin.versions, strict=True)
    ):
        return "they were changed in place after loading"
    try:
        layer = CheckpointLayer.open(_open(origin.folder, _stamps(origin.folder)), origin.layer)
        spec = layer.spec
        shape = (spec.num_experts, spec.gate_up_parts, spec.intermediate_size, spec.expert_hidden_size)
        if weights.gate_up.shape != shape:
            return f"their shape is {weights.gate_up.shape}, the checkpoint has {shape}"
        difference = _difference(layer, weights)
    except (CheckpointError, SpecError, InputError, OSError) as error:
        return f"{error}"[:500]
    if difference is None:
        return None
    projection, error = difference
    raise ConfigError(
        f"{origin.name}: {projection}: transformers {import_extra('transformers').__version__} loaded values that "
        f"differ by {error:.1%} from the checkpoint {origin.folder} ({format_names(spec.formats)}); rounding is at "
        f"most {_TOLERANCE:.1%}. Load the model with load_model({origin.folder!r}), which reads the experts itself. "
        "If you changed the weights on purpose, for instance by merging an adapter, call register(compare=False)"
    )


@lru_cache(maxsize=1)
def _open(folder: str, _stamps: tuple[tuple[str, int], ...]) -> Checkpoint:
    """Open a checkpoint; cached for all its layers until a file is modified."""
    return Checkpoint.open(folder)


def _stamps(folder: str) -> tuple[tuple[str, int], ...]:
    files = (path for path in sorted(Path(folder).iterdir()) if path.suffix in (".json", ".safetensors", ".gguf"))
    return tuple((path.name, path.stat().st_mtime_ns) for path in files)


def _difference(layer: CheckpointLayer, weights: ExpertWeights[Payload]) -> tuple[str, float] | None:
    """Return (projection, relative difference) of the first sample that differs, None if all are equal."""
    for source, window, matrix in _samples(layer, weights):
        stored = _published(layer, source, window)
        loaded = _rows(matrix, *window).float().cpu()
        magnitude = stored.abs().maximum(stored.square().mean(1, keepdim=True).sqrt())
        if not bool(((loaded - stored).abs() <= _TOLERANCE * magnitude).all()):
            return source.label, float((loaded - stored).norm() / stored.norm().clamp(min=1e-30))
    return None


def _samples(
    layer: CheckpointLayer, weights: ExpertWeights[Payload]
) -> Iterator[tuple[Source, tuple[int, int], Payload]]:
    """Yield (source, (start row, stop row), loaded matrix) for the first, the middle and the last expert."""
    spec = layer.spec
    parts = [part for stored in layer.both_stored for part in stored.layout.parts if part.required]
    step = max(part.rows_per for part in parts)
    for expert in sorted({0, spec.num_experts // 2, spec.num_experts - 1}):
        for index, which in enumerate(projections(spec)):
            source = layer.source(expert, which)
            matrix = weights.down[expert] if which == "down" else weights.gate_up[expert][index]
            # The last rows too: a partial block at the end of a matrix is the most likely to be misread.
            last_start = (source.rows - 1) // step * step if step > 1 else max(0, source.rows - _ROWS_PER_READ)
            for window in {(0, min(source.rows, max(step, _ROWS_PER_READ))), (last_start, source.rows)}:
                yield source, window, matrix


def _published(layer: CheckpointLayer, source: Source, window: tuple[int, int]) -> Tensor:
    """Decode rows of one projection from the checkpoint's files."""
    cut = Cut(rows=window, columns=(0, source.columns))
    try:
        return read_whole(layer.checkpoint, source, layer.stored_as(source), cut).decode()
    except InputError:  # a scale covers more rows than these
        return read_whole(layer.checkpoint, source, layer.stored_as(source)).rows(*window).decode()


def _rows(matrix: Payload, start: int, stop: int) -> Tensor:
    try:
        return matrix.rows(start, stop).decode()
    except InputError:
        return matrix.decode()[start:stop]


def _config_block(config: Any) -> dict[str, object] | None:
    """Return ``quantization_config`` of a model's config or its nested text config as a dict."""
    for name in ("", *NESTED):
        config = getattr(config, name, config) if name else config
        block = getattr(config, "quantization_config", None)
        if block:
            return cast("dict[str, object]", dict(block if isinstance(block, dict) else block.to_dict()))
    return None


def _stored_block(origin: Origin) -> dict[str, object] | None:
    """Return the quantisation block of the folder's config.json; transformers deletes it from a decoded model."""
    if origin.folder is None or not _SETTINGS["compare"]:
        return None
    try:
        block = quantization_block(read_config(Path(origin.folder)))
    except (CheckpointError, OSError):
        return None
    return None if block is None else dict(block)


def _refuse_method(module: nn.Module, weights: ExpertWeights[Payload], origin: Origin) -> None:
    """Raise ConfigError if the config declares a method and a format that transformers misreads."""
    block = origin.quantization or _stored_block(origin)
    if block is None:
        return
    method = str(method_of(block))
    declared = _declared({**block, "quant_method": method}, module, origin)
    if declared is not None and declared.method is None:
        return  # the experts are listed as not quantised
    format_name = block.get("quant_algo") if declared is None else declared.format
    reason = _misread_reason(method, format_name, declared, weights)
    if reason is not None:
        raise ConfigError(
            f"{origin.name}: config.json has quant_method {method!r}, format {format_name}; transformers "
            f"{import_extra('transformers').__version__} misreads such experts: {reason}. Load the model with "
            "load_model(), which reads them itself; if these weights come from another source, delete "
            "quantization_config from the config"
        )


def _misread_reason(
    method: str, format_name: object, declared: Declared | None, weights: ExpertWeights[Payload]
) -> str | None:
    readers = import_extra("transformers.quantizers.auto").AUTO_QUANTIZATION_CONFIG_MAPPING
    if not any(reader.startswith(method) for reader in readers):
        return "it has no reader for this method and uses the codes as weights"
    if (method, format_name) == ("compressed-tensors", "nvfp4"):
        return "its reader drops the global scale"
    if declared is None or declared.block is None or weights.down.name not in ("bf16", "fp16", "fp32"):
        return None
    partial_sizes = [n for n in weights.down.shape[1:] for size in declared.block if n > size and n % size]
    if not partial_sizes:
        return None
    return f"it stretches blocks of {declared.block} over {partial_sizes[0]} rows or columns"


def _declared(block: Mapping[str, object], module: nn.Module, origin: Origin) -> Declared | None:
    """Return the format that a quantisation block declares for these experts, None if Collegium cannot read it."""
    model_type = str(getattr(getattr(module, "config", None), "model_type", ""))
    try:
        down_name = family_of({"model_type": model_type}).names.down
    except ConfigError:
        down_name = None
    path = (down_name or f"{origin.name}.{{expert}}.down_proj").format(layer=origin.layer, expert=0)
    try:
        return declared_format({"model_type": model_type, "quantization_config": block}, path)
    except ConfigError:
        return None
