"""Quantised matrices outside the routed experts: find them, detect how each is stored, and decode them.

The format that the config declares for a module must match the stored tensors; an error names the module.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import CheckpointError, ConfigError, TensorMismatchError, UnknownTensorError
from ..models import declared_format, moe_layers, quantization_block
from ..models.base import whole_number
from .detect import stored_format
from .header import FLOATS, TensorInfo
from .index import index_of, router_names, single_matrices
from .layout import Source, parts_problems, read_whole
from .problems import raise_if_any
from .reader import Checkpoint
from .stored_format import ACTIVATION_SCALES, PART_SUFFIXES, StoredFormat

__all__ = ["DenseWeight", "dense_weight_problems", "matrices_of", "quantised_dense_weights", "sentences"]

# Scales of activations and KV caches: not part of a weight, and unused here.
_STATIC_SCALES = (*ACTIVATION_SCALES, ".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".output_scale")
# Suffixes that do not show that a module is quantised; ``.scale`` and ``.scales`` are also plain parameters.
_PLAIN_SUFFIXES = (".weight", ".bias", ".scale", ".scales", *_STATIC_SCALES)
_QUANTISED_SUFFIXES = PART_SUFFIXES.difference(_PLAIN_SUFFIXES)
_MAX_SHAPE_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseWeight:
    """One quantised matrix. source: its module and logical size. nbytes: bytes of codes and scales in the files."""

    checkpoint: Checkpoint
    source: Source
    stored: StoredFormat
    nbytes: int

    def read(self, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Return ``[N, K]`` decoded on ``device``: exact in float32, rounded once to ``dtype``.

        Raises BadScaleError for invalid scales, and TensorMismatchError for values that contradict the config.
        """
        return read_whole(self.checkpoint, self.source, self.stored).to(device).decode(dtype)


def quantised_dense_weights(checkpoint: Checkpoint) -> dict[str, DenseWeight | CheckpointError]:
    """Return every quantised matrix outside the routed experts, or its error, by module path.

    Reads headers, and the shapes that integer formats and bitsandbytes store next to the codes.
    """
    weights: dict[str, DenseWeight | CheckpointError] = {}
    for path, parts in _modules(checkpoint).items():
        if _QUANTISED_SUFFIXES & parts.keys() or (".weight" in parts and parts[".weight"].dtype not in FLOATS):
            try:
                weights[path] = _open_weight(checkpoint, path, parts)
            except CheckpointError as error:
                weights[path] = error
    return weights


def _modules(checkpoint: Checkpoint) -> Mapping[str, dict[str, TensorInfo]]:
    """Return the tensors outside the routed experts: module path to suffix to header entry."""
    index = index_of(checkpoint)
    modules = defaultdict[str, dict[str, TensorInfo]](dict)
    routed = {info.name for layer in moe_layers(checkpoint.config) for info in index.expert_tensors(layer).infos()}
    # Tensors in the router's module other than its weight: correction bias, hash table.
    others = [name for name in router_names(index.names)[1:] if name is not None]
    router = {name.format(layer=layer) for name in others for layer in index.layers()}
    for name in checkpoint.tensors.keys() - routed - router:
        head, inner, _ = name.partition(".weight.")
        path = head if inner else name.rpartition(".")[0]
        modules[path][name.removeprefix(path)] = checkpoint.tensors[name]
    return dict(sorted(modules.items()))


def _open_weight(checkpoint: Checkpoint, path: str, parts: Mapping[str, TensorInfo]) -> DenseWeight:
    declared = declared_format(checkpoint.config, path)
    weight_parts = {suffix: info for suffix, info in parts.items() if suffix not in (".bias", *_STATIC_SCALES)}
    where = path if declared.method else f"{path}, which quantization_config skips or does not name"
    stored = stored_format(declared, {suffix: {info.dtype} for suffix, info in weight_parts.items()}, where)
    suffixes = {part.suffix for part in stored.layout.parts}
    if weight_parts.keys() - suffixes:
        raise UnknownTensorError(
            f"{where}: {', '.join(sorted(weight_parts.keys() - suffixes))} next to "
            f"{', '.join(sorted(weight_parts.keys() & suffixes))}; {stored.name} ({stored.storage}) does not have it; "
            "correct quantization_config or the files"
        )
    rows, columns = _shape(checkpoint, path, stored, weight_parts)
    source = Source(label=path, path=path, rows=rows, columns=columns, stored_rows=rows, separate_bias=True)
    raise_if_any(checkpoint, parts_problems(checkpoint, source, stored))
    nbytes = sum(info.nbytes for info in weight_parts.values())
    return DenseWeight(checkpoint=checkpoint, source=source, stored=stored, nbytes=nbytes)


def _shape(checkpoint: Checkpoint, path: str, stored: StoredFormat, parts: Mapping[str, TensorInfo]) -> tuple[int, int]:
    """Return rows and columns: the stored ``shape`` if there is one, else derived from the shape of the codes."""
    weight = stored.layout.parts[0]
    sizes: list[int] = []
    info = next((i for s, i in parts.items() if s == ".weight_shape" or ".quant_state." in s), parts[weight.suffix])
    if info is parts[weight.suffix]:
        weight = weight.fitted(info.dtype, info.shape, 0)
        sizes += info.shape[: len(info.shape) - len(weight.inner)]
    elif info.nbytes <= _MAX_SHAPE_BYTES:
        listed = checkpoint.read(info.name).tolist()
        with suppress(ValueError, TypeError, KeyError, OverflowError, RecursionError):
            sizes += [int(size) for size in (json.loads(bytes(listed))["shape"] if weight.flat else listed)]
    if len(sizes) != 2 or min(sizes) < 1:
        raise TensorMismatchError(
            f"{path}: {info.name}, {info.dtype} {info.shape}, gives no shape [rows, columns]; outside the experts only "
            "matrices are quantised; download the file again"
        )
    if info is not parts[weight.suffix]:
        return sizes[0], sizes[1]
    rows, columns = sizes[::-1] if weight.transposed else sizes
    return rows * weight.rows_per, columns * weight.columns_per


def _locate_module(checkpoint: Checkpoint, path: str) -> tuple[int | None, str]:
    """Return (layer of the text model, path below the layer) of a module; (None, path) outside these layers."""
    index = index_of(checkpoint)
    head = index.names.layer.partition("{layer}")[0]
    count = index.family.num_layers(checkpoint.config)
    number, _, kind = path.removeprefix(head).partition(".")
    # A GGUF file also counts the layers for multi-token prediction.
    end = 1 + max(moe_layers(checkpoint.config), default=-1) if count is None else count
    layer = whole_number(number) if path.startswith(head) else None
    return (layer, kind) if layer is not None and layer < end else (None, path)


def matrices_of(checkpoint: Checkpoint, weights: Mapping[str, DenseWeight | CheckpointError]) -> list[DenseWeight]:
    """Return the matrices of the text model's layers, head and embeddings, without those for multi-token prediction."""
    numbered = {path for path in weights if any(piece.isdigit() for piece in path.split("."))}
    paths = [path for path in weights if path not in numbered or _locate_module(checkpoint, path)[0] is not None]
    return [entry for path in paths if isinstance(entry := weights[path], DenseWeight)]


def dense_weight_problems(
    checkpoint: Checkpoint, weights: Mapping[str, DenseWeight | CheckpointError]
) -> list[CheckpointError]:
    """Return the problems of the text model's dense layers.

    ``check_non_expert_weights`` covers layers with experts. In addition to the errors in ``weights``, an unquantised
    matrix is a problem if the config declares a format for it and other layers store that module quantised. This does
    not apply to GGUF files, where every tensor states its type.
    """
    names = index_of(checkpoint).names
    problems: list[CheckpointError] = []
    moe_modules = (*(names.shared or ()), *(names.latent or ()), *single_matrices(names))
    stored: dict[str, tuple[str, DenseWeight]] = {}
    plain: list[tuple[str, str]] = []
    for path, parts in _modules(checkpoint).items():
        layer, kind = _locate_module(checkpoint, path)
        if layer is None or path in [template.format(layer=layer) for template in moe_modules]:
            continue
        entry = weights.get(path)
        if isinstance(entry, CheckpointError):
            problems.append(entry)
        elif entry is not None:
            stored.setdefault(kind, (path, entry))
        elif ".weight" in parts and len(parts[".weight"].shape) == 2:
            plain.append((kind, path))
    for kind, path in plain:
        try:
            declared = declared_format(checkpoint.config, path) if kind in stored else None
        except CheckpointError as error:
            problems.append(error)
            continue
        if declared is not None and declared.method not in (None, "gguf", "bitsandbytes"):
            other, entry = stored[kind]
            problems.append(
                ConfigError(
                    f"{path}: its weight is not quantised, config.json declares {declared.format} ({declared.method}), "
                    f"and {other} is stored in {entry.stored.name}; add it to the modules that are not converted, or "
                    "export both in one format"
                )
            )
    return problems


def sentences(
    checkpoint: Checkpoint, matrices: Sequence[DenseWeight], dtype: torch.dtype = torch.bfloat16
) -> list[str]:
    """Describe the matrices that a whole model decodes to ``dtype``, the memory they need, and unused scales."""
    texts: list[str] = []
    if matrices:
        formats = Counter(matrix.stored.name for matrix in matrices)
        listed = ", ".join(f"{count} {name}" for name, count in sorted(formats.items()))
        stored_bytes = sum(matrix.nbytes for matrix in matrices)
        decoded_bytes = sum(matrix.source.rows * matrix.source.columns for matrix in matrices) * dtype.itemsize
        name = str(dtype).removeprefix("torch.")
        texts.append(
            f"{len(matrices)} matrices outside the experts ({listed}) run decoded to {name} in a whole model: "
            f"{decoded_bytes:,} bytes instead of {stored_bytes:,}"
        )
    static = [path + s for path, parts in _modules(checkpoint).items() for s in parts if s in _STATIC_SCALES]
    if static and quantization_block(checkpoint.config):
        texts.append(
            f"{len(static)} scales of activations or caches outside the experts are not used ({static[0]}, ...)"
        )
    return texts
