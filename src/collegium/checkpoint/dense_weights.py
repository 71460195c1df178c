"""Quantised matrices outside the routed experts: which there are, how each is stored, and what it decodes to.

What the config declares of a module must be what is stored; where they contradict each other, the module is named.
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
from .detect import stored_format
from .header import FLOATS, TensorInfo
from .index import index_of, router_names, single_matrices
from .layout import Source, parts_problems, read_whole
from .problems import raise_first
from .reader import Checkpoint
from .stored_format import ACTIVATION_SCALES, PART_SUFFIXES, StoredFormat

__all__ = ["DenseWeight", "dense_weight_problems", "matrices_of", "quantised_dense_weights", "sentences"]

# Of activations and of caches of keys and values: no part of a weight, and used by nothing here.
_STATIC = (*ACTIVATION_SCALES, ".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".output_scale")
# ``.scale`` and ``.scales`` are also names of plain parameters.
_NO_MARKS = (".weight", ".bias", ".scale", ".scales", *_STATIC)
_MARKS = PART_SUFFIXES.difference(_NO_MARKS)
_MOST_STATED = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseWeight:
    """One quantised matrix. source: its module and logical size. nbytes: of its codes and scales in the files."""

    checkpoint: Checkpoint
    source: Source
    stored: StoredFormat
    nbytes: int

    def read(self, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Return ``[N, K]`` decoded on ``device``: exact in float32, rounded once to ``dtype``.

        Raises BadScaleError for forbidden scales, and TensorMismatchError for values that contradict the config.
        """
        return read_whole(self.checkpoint, self.source, self.stored).to(device).decode(dtype)


def quantised_dense_weights(checkpoint: Checkpoint) -> dict[str, DenseWeight | CheckpointError]:
    """Return every quantised matrix outside the routed experts by its module's path, or what is wrong with it.

    Read are headers, and the shapes that integers and bitsandbytes state beside their codes.
    """
    found: dict[str, DenseWeight | CheckpointError] = {}
    for path, parts in _modules(checkpoint).items():
        if _MARKS & parts.keys() or (".weight" in parts and parts[".weight"].dtype not in FLOATS):
            try:
                found[path] = _opened(checkpoint, path, parts)
            except CheckpointError as error:
                found[path] = error
    return found


def _modules(checkpoint: Checkpoint) -> Mapping[str, dict[str, TensorInfo]]:
    """Return the tensors outside the model's routed experts: path of their module to suffix to header entry."""
    index, modules = index_of(checkpoint), defaultdict[str, dict[str, TensorInfo]](dict)
    routed = {info.name for layer in moe_layers(checkpoint.config) for info in index.found(layer).infos()}
    # Tensors below a router's module next to its weight: correction bias, table of experts.
    others = [name for name in router_names(index.names)[1:] if name is not None]
    router = {name.format(layer=layer) for name in others for layer in index.layers()}
    for name in checkpoint.tensors.keys() - routed - router:
        head, inner, _ = name.partition(".weight.")
        path = head if inner else name.rpartition(".")[0]
        modules[path][name.removeprefix(path)] = checkpoint.tensors[name]
    return dict(sorted(modules.items()))


def _opened(checkpoint: Checkpoint, path: str, parts: Mapping[str, TensorInfo]) -> DenseWeight:
    declared = declared_format(checkpoint.config, path)
    own = {suffix: info for suffix, info in parts.items() if suffix not in (".bias", *_STATIC)}
    where = path if declared.method else f"{path}, which quantization_config skips or does not name"
    stored = stored_format(declared, {suffix: {info.dtype} for suffix, info in own.items()}, where)
    known = {part.suffix for part in stored.layout.parts}
    if own.keys() - known:
        raise UnknownTensorError(
            f"{where}: {', '.join(sorted(own.keys() - known))} beside {', '.join(sorted(own.keys() & known))}; "
            f"{stored.name} ({stored.storage}) does not have it; correct quantization_config or the files"
        )
    rows, columns = _shape(checkpoint, path, stored, own)
    source = Source(label=path, path=path, rows=rows, columns=columns, stored_rows=rows, own_bias=True)
    raise_first(checkpoint, parts_problems(checkpoint, source, stored))
    nbytes = sum(info.nbytes for info in own.values())
    return DenseWeight(checkpoint=checkpoint, source=source, stored=stored, nbytes=nbytes)


def _shape(checkpoint: Checkpoint, path: str, stored: StoredFormat, parts: Mapping[str, TensorInfo]) -> tuple[int, int]:
    """Return rows and columns: as stated beside the codes, else as many as the codes have room for."""
    weight, sizes = stored.layout.parts[0], list[int]()
    info = next((i for s, i in parts.items() if s == ".weight_shape" or ".quant_state." in s), parts[weight.suffix])
    if info is parts[weight.suffix]:
        weight = weight.fitted(info.dtype, info.shape, 0)
        sizes += info.shape[: len(info.shape) - len(weight.inner)]
    elif info.nbytes <= _MOST_STATED:
        listed = checkpoint.read(info.name).tolist()
        with suppress(ValueError, TypeError, KeyError, OverflowError, RecursionError):
            sizes += [int(size) for size in (json.loads(bytes(listed))["shape"] if weight.flat else listed)]
    if len(sizes) != 2 or min(sizes) < 1:
        what = f"{info.name}, {info.dtype} {info.shape}, gives no shape [rows, columns]"
        msg = f"{path}: {what}; outside the experts only matrices are quantised; download the file again"
        raise TensorMismatchError(msg)
    if info is not parts[weight.suffix]:
        return sizes[0], sizes[1]
    rows, columns = sizes[::-1] if weight.transposed else sizes
    return rows * weight.rows_per, columns * weight.columns_per


def _place(checkpoint: Checkpoint, path: str) -> tuple[int | None, str]:
    """Return the layer of the text model that a module is in, None for another place, and its path below that."""
    index = index_of(checkpoint)
    head, count = index.names.layer.partition("{layer}")[0], index.family.num_layers(checkpoint.config)
    number, _, kind = path.removeprefix(head).partition(".")
    # a GGUF file counts those that predict further too
    end = 1 + max(moe_layers(checkpoint.config), default=-1) if count is None else count
    inside = path.startswith(head) and number.isdigit() and int(number) < end
    return (int(number), kind) if inside else (None, path)


def matrices_of(checkpoint: Checkpoint, found: Mapping[str, DenseWeight | CheckpointError]) -> list[DenseWeight]:
    """Return those of the text model's layers and of its head and embeddings, not of layers that predict further."""
    numbered = {path for path in found if any(piece.isdigit() for piece in path.split("."))}
    held = [path for path in found if path not in numbered or _place(checkpoint, path)[0] is not None]
    return [entry for path in held if isinstance(entry := found[path], DenseWeight)]


def dense_weight_problems(
    checkpoint: Checkpoint, found: Mapping[str, DenseWeight | CheckpointError]
) -> list[CheckpointError]:
    """Return the problems of the text model's dense layers.

    ``check_non_expert_weights`` covers layers with experts. In addition to the errors in ``found``, a plain matrix is
    a problem where the config declares a format in which other layers store theirs; in GGUF files every tensor has its
    type.
    """
    names, problems = index_of(checkpoint).names, list[CheckpointError]()
    beside = (*(names.shared or ()), *(names.latent or ()), *single_matrices(names))
    stored, plain = dict[str, tuple[str, DenseWeight]](), list[tuple[str, str]]()
    for path, parts in _modules(checkpoint).items():
        layer, kind = _place(checkpoint, path)
        if layer is None or path in [template.format(layer=layer) for template in beside]:
            continue
        entry = found.get(path)
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
                    "export both alike"
                )
            )
    return problems


def sentences(
    checkpoint: Checkpoint, matrices: Sequence[DenseWeight], dtype: torch.dtype = torch.bfloat16
) -> list[str]:
    """Say which matrices a whole model decodes to ``dtype``, what that costs, and which scales nothing uses."""
    said: list[str] = []
    if matrices:
        formats = Counter(matrix.stored.name for matrix in matrices)
        listed = ", ".join(f"{count} {name}" for name, count in sorted(formats.items()))
        held = sum(matrix.nbytes for matrix in matrices)
        taken = sum(matrix.source.rows * matrix.source.columns for matrix in matrices) * dtype.itemsize
        name = str(dtype).removeprefix("torch.")
        said.append(
            f"{len(matrices)} matrices outside the experts ({listed}) run decoded to {name} in a whole model: "
            f"{taken:,} bytes instead of {held:,}"
        )
    static = [path + s for path, parts in _modules(checkpoint).items() for s in parts if s in _STATIC]
    if static and quantization_block(checkpoint.config):
        said.append(
            f"{len(static)} scales of activations or caches outside the experts are not used ({static[0]}, ...)"
        )
    return said
