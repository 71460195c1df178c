"""``collegium quantize``: convert the experts of a checkpoint to another format and copy all other tensors unchanged.

A few experts are in memory at a time: they are read, decoded, encoded, compared with the source, and written. Tensor
names and ``quantization_config`` are those of published checkpoints in the target format.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.audit import audit
from ..checkpoint.dense_weights import dense_weight_problems, quantised_dense_weights
from ..checkpoint.header import TensorInfo
from ..checkpoint.index import index_of
from ..checkpoint.layer_view import CheckpointLayer
from ..checkpoint.layout import projections, stack_paths
from ..checkpoint.loader import load_experts
from ..checkpoint.problems import raise_if_any
from ..checkpoint.reader import INDEX, Checkpoint
from ..checkpoint.writer import Shard, copy_other_files, entry_of, matrix_parts, whole_folder
from ..errors import ConfigError, InputError
from ..formats import Fp8Tensor, NvFp4, by_name
from ..formats.payload import Payload, Storage
from ..formats.unquantised import CONFIG_NAMES
from ..models import Names, describe, experts_apart, family_of, moe_layers
from ..ops.activation import interleave
from ..placement import Placement
from ..planning import expert_bytes
from ..runtime.progress import Progress
from ..types import format_names
from .quantization_config import COMPRESSED, ConversionJob, describable_tensors, new_config

__all__ = ["ConvertedLayer", "QuantizeReport", "quantize_model"]

_CHUNK = 1 << 26  # bytes of experts read at a time
# For these formats, hidden and intermediate size must be multiples of the group size, because the readers refuse or
# misread a partial last group. compressed-tensors raises ("must be divisible"). transformers derives the group size of
# FP8 and MXFP8 from the number of scales: it reads 100 columns with four scales in groups of 25 instead of 32, without
# an error. Its MXFP4 reader returns whole blocks, which are wider than the model's parameter.
_WHOLE_GROUPS = {"fp8_block": 128, "mxfp8": 32, "mxfp4": 32, "int4_group": 32, "nvfp4": 16}
_READERS = {
    "fp8_block": "transformers",
    "mxfp8": "transformers",
    "mxfp4": "transformers and compressed-tensors",
    "int4_group": "compressed-tensors",
    "nvfp4": "compressed-tensors",
}
_REPLACED_FILES = {
    "config.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "quantization_config.json",
    INDEX,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertedLayer:
    """Relative L2 error of one layer's weights against the source, and the largest error, of expert ``worst``."""

    layer: int
    source_format: str
    error: float
    worst: int
    worst_error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizeReport:
    """The written checkpoint.

    storage: the published layout. nbytes, source_nbytes: bytes of all new and of all source tensors. copied: files
    copied unchanged. skipped: folders and other weight files that were not copied. removed: partial folders of killed
    runs that were removed.
    """

    path: str
    weight_format: str
    storage: str
    layers: tuple[ConvertedLayer, ...]
    nbytes: int
    source_nbytes: int
    copied: tuple[str, ...]
    skipped: tuple[str, ...]
    removed: tuple[str, ...]


def quantize_model(
    path: str, weight_format: str, out: str | None = None, *, progress: Progress | None = None
) -> QuantizeReport:
    """Write the checkpoint at ``path`` with its experts in ``weight_format`` to the new folder ``out``.

    The folder appears when all files are written and audited; a killed run leaves a ``.partial-`` folder, which the
    next run removes.

    out: default ``path-format``.
    progress: called with (experts done, experts, text).

    Raises the errors of the audit, SpecError for an unknown format, InputError for a conversion that is not possible or
    an existing ``out``, CheckpointError if the disk is full.
    """
    checkpoint = Checkpoint.open(path)
    if not checkpoint.config or not checkpoint.path.is_dir() or checkpoint.is_gguf:
        raise ConfigError(f"{path}: quantize needs a model's folder with config.json and safetensors files")
    job = _conversion_job(checkpoint, weight_format)
    report = audit(checkpoint, deep=False, convert=True)
    layers = [CheckpointLayer.open(checkpoint, layer.layer) for layer in report.layers]
    names = {stored.name for layer in layers for stored in (layer.stored, layer.up_stored, layer.down_stored)}
    if names == {job.target.name}:
        raise InputError(f"{path}: the experts are {job.target.name} already; pass another --to")
    copied_tensors = _copied_tensors(job, layers)
    folder = Path(out) if out is not None else Path(f"{os.path.abspath(path)}-{weight_format}")
    target_spec = replace(job.spec, weight_format=job.target.name, down_format=None)
    needed = sum(info.nbytes for info in copied_tensors.values())
    needed += expert_bytes(target_spec) * job.spec.num_experts * len(layers)
    with whole_folder(folder.absolute(), needed) as (partial_folder, removed):
        replaced = {info.file.name for info in checkpoint.tensors.values()} | _REPLACED_FILES
        copied, skipped = copy_other_files(checkpoint.path, partial_folder, replaced)  # first, because it can fail
        converted_layers = _write_tensors(job, layers, copied_tensors, partial_folder, progress)
        (partial_folder / "config.json").write_text(json.dumps(new_config(job, copied_tensors), indent=2) + "\n")
        written = Checkpoint.open(partial_folder)
        audit(written, deep=False)
        raise_if_any(written, dense_weight_problems(written, quantised_dense_weights(written)))
    return QuantizeReport(
        path=str(folder),
        weight_format=job.target.name,
        storage=job.storage.name,
        layers=tuple(converted_layers),
        nbytes=sum(info.nbytes for info in written.tensors.values()),
        source_nbytes=sum(info.nbytes for info in checkpoint.tensors.values()),
        copied=copied,
        skipped=skipped,
        removed=tuple(removed),
    )


def _conversion_job(checkpoint: Checkpoint, weight_format: str) -> ConversionJob:
    """Choose the published storage of ``weight_format`` for this family.

    Raises InputError, with the possible formats, if there is none.
    """
    target = by_name(weight_format, to_write=True)
    index = index_of(checkpoint)
    names = index.names
    spec = describe(checkpoint.config)
    apart = experts_apart(checkpoint.config)
    if names.fused:
        raise InputError(
            f"{weight_format}: the checkpoint stores gate and up of an expert in one module ({names.gate}), a layout "
            "that is read but not written; allowed are stacks and three modules per expert. Save the model with "
            "transformers first, which stacks the experts"
        )
    storages = _storages(names, apart=apart)
    sizes = (spec.expert_hidden_size, spec.intermediate_size)
    readable = [name for name in storages if _readable(name, sizes)]
    if target.name not in storages:
        reason = ""
        if apart:
            reason = " (DeepSeek-V4: its config can describe experts only in these formats, one tensor each)"
        elif names.up is None:
            reason = " (each row holds several experts)" if names.stacked.flat else " (they are stacked)"
        formats = ", ".join(sorted(storages)) or "no other format"
        if storages:
            formats += f"; with hidden and intermediate size {sizes}: {', '.join(sorted(readable))}"
        raise InputError(
            f"{weight_format}: experts of {family_of(checkpoint.config).name}{reason} can be written as: {formats}"
        )
    if target.name not in readable:
        group = _WHOLE_GROUPS[target.name]
        raise InputError(
            f"{weight_format}: the experts' hidden and intermediate size are {sizes}; both must be multiples of "
            f"{group}, as {_READERS[target.name]} cannot read a partial group. Formats for these sizes: "
            f"{', '.join(sorted(readable)) or 'none'}"
        )
    storage = storages[target.name]
    # Unquantised experts keep the published layout: many classes of transformers read only stacks, or only single
    # experts.
    published_stacked = any(index.expert_tensors(layer).stack for layer in moe_layers(checkpoint.config))
    job = ConversionJob(
        checkpoint=checkpoint,
        names=names,
        spec=spec,
        target=target,
        storage=storage,
        stacked=names.up is None or (storage.name == "plain" and published_stacked),
    )
    return job if apart else replace(job, outside=quantised_dense_weights(checkpoint))


def _storages(names: Names, *, apart: bool) -> dict[str, Storage]:
    """Return the formats that can be written for a family, each with the storage of published checkpoints.

    apart: whether the config describes the experts separately from the other weights (DeepSeek-V4).
    """
    stacked = names.up is None
    if apart:
        layouts = () if stacked else ("deepseek-v4",)
    elif stacked:
        layouts = () if names.stacked.flat else ("plain", "gpt-oss")
    else:
        layouts = ("plain", "finegrained-fp8", "minimax-m3", "compressed-tensors")
    storages: dict[str, Storage] = {}
    for name in (*CONFIG_NAMES, *COMPRESSED, "fp8_block", "mxfp8"):
        storage_by_layout = {storage.name: storage for storage in by_name(name).storages}
        if name != "fp8_block":
            storage_by_layout.pop("finegrained-fp8", None)
        layout = next((layout for layout in layouts if layout in storage_by_layout), None)
        if layout is not None:
            storages[name] = storage_by_layout[layout]
    return storages


def _readable(weight_format: str, sizes: tuple[int, int]) -> bool:
    """Return whether the format's readers can read matrices ``[I, H]`` and ``[H, I]`` of ``sizes`` (H, I)."""
    group = _WHOLE_GROUPS.get(weight_format, 1)
    # A row that is one partial group is read correctly, because the group size is derived from its single scale.
    max_single_group = group if weight_format == "mxfp8" else 0
    return all(size % group == 0 or size < max_single_group for size in sizes)


def _copied_tensors(job: ConversionJob, layers: Iterable[CheckpointLayer]) -> dict[str, TensorInfo]:
    """Return every copied tensor by its new name; raises InputError if no config can describe them."""
    replaced = {
        info.name
        for layer in layers
        for suffix, info in layer.expert_tensors.items()
        if not (layer.spec.expert_bias and suffix.endswith("bias"))
    }
    return describable_tensors(
        job, {name: info for name, info in job.checkpoint.tensors.items() if name not in replaced}
    )


def _write_tensors(
    job: ConversionJob,
    layers: list[CheckpointLayer],
    copied_tensors: Mapping[str, TensorInfo],
    folder: Path,
    progress: Progress | None,
) -> list[ConvertedLayer]:
    """Write one shard per source file with its copied tensors, one shard per layer, and the index."""
    sources = sorted({info.file for info in copied_tensors.values()})
    count = len(sources) + len(layers)
    file_names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    weight_map: dict[str, str] = {}
    for file_name, source in zip(file_names, sources, strict=False):
        infos = [info for info in copied_tensors.values() if info.file == source]
        with Shard(folder / file_name, {info.name: (info.dtype, info.shape) for info in infos}) as shard:
            for info in infos:
                shard.copy(info)
        weight_map.update({info.name: file_name for info in infos})
    converted_layers: list[ConvertedLayer] = []
    num_experts = job.spec.num_experts
    for index, (file_name, layer) in enumerate(zip(file_names[len(sources) :], layers, strict=True)):
        step = partial(_report_step, progress, index * num_experts, len(layers) * num_experts, f"layer {layer.number}")
        converted, tensor_names = _write_layer(job, layer, folder / file_name, step)
        converted_layers.append(converted)
        weight_map.update(dict.fromkeys(tensor_names, file_name))
    total_size = sum((folder / file_name).stat().st_size for file_name in file_names)
    index_content = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index_content, indent=2) + "\n")
    return converted_layers


def _report_step(progress: Progress | None, first: int, total: int, text: str, experts: int) -> None:
    if progress is not None:
        progress(first + experts, total, text)


def _write_layer(
    job: ConversionJob, layer: CheckpointLayer, path: Path, step: Callable[[int], None]
) -> tuple[ConvertedLayer, Iterable[str]]:
    """Convert one layer a few experts at a time; return its errors and the names of the written tensors."""
    spec = layer.spec
    chunk = max(1, _CHUNK // expert_bytes(spec))
    entries: dict[str, tuple[str, tuple[int, ...]]] = {}
    errors: list[float] = []
    step(0)
    with ExitStack() as stack:
        shard: Shard | None = None
        for start in range(0, spec.num_experts, chunk):
            ids = tuple(range(start, min(start + chunk, spec.num_experts)))
            weights = load_experts(layer, Placement(expert_ids=ids), convert=True)
            for slot, expert in enumerate(ids):
                matrices, error = _encode(job, weights.gate_up[slot], weights.down[slot])
                errors.append(error)
                if shard is None:  # the header needs the shapes of the first expert
                    entries = _layer_entries(job, layer.number, matrices)
                    shard = stack.enter_context(Shard(path, entries))
                for name, tensor in _expert_tensors(job, layer.number, expert, matrices).items():
                    shard.put(name, tensor, expert if job.stacked else 0)
                step(expert + 1)
    worst = max(range(len(errors)), key=lambda expert: errors[expert])
    mean = (sum(error * error for error in errors) / len(errors)) ** 0.5
    formats = format_names(spec.formats) if layer.unequal is None else layer.unequal
    converted = ConvertedLayer(
        layer=layer.number, source_format=formats, error=mean, worst=worst, worst_error=errors[worst]
    )
    return converted, entries


def _encode(job: ConversionJob, gate_up: Payload, down: Payload) -> tuple[tuple[Payload, ...], float]:
    """Return gate (if there is one), up and down in the target format, and their joint relative error."""
    options: dict[str, Any] = {"global_divides": True} if job.target is NvFp4 else {}
    gate_up_values = gate_up.decode()
    down_values = down.decode()
    if job.target in (NvFp4, Fp8Tensor):
        # Inference engines keep one scale for the fused first projection. Encoded as one matrix, gate and up share it.
        fused = job.target.encode(gate_up_values.flatten(0, 1), **options)
        rows = gate_up_values.shape[1]
        gate_up_payloads = [fused.rows(start, start + rows) for start in range(0, fused.shape[0], rows)]
    else:
        gate_up_payloads = [job.target.encode(part) for part in gate_up_values]
    payloads = (*gate_up_payloads, job.target.encode(down_values, **options))
    matrices = (*gate_up_values, down_values)
    differences = (payload.decode() - matrix for payload, matrix in zip(payloads, matrices, strict=True))
    error_square = sum(_sum_of_squares(difference) for difference in differences)
    norm_square = sum(_sum_of_squares(matrix) for matrix in matrices)
    return payloads, (error_square / norm_square) ** 0.5 if norm_square else 0.0


def _sum_of_squares(values: Tensor) -> float:
    return float(values.square().sum(-1).double().sum())


def _expert_tensors(job: ConversionJob, layer: int, expert: int, matrices: tuple[Payload, ...]) -> dict[str, Tensor]:
    """Return one expert's tensors by published name; for stacked experts, the expert's entry of each stack."""
    *gate_up_parts, down_parts = (matrix_parts(matrix, job.storage) for matrix in matrices)
    tensors: dict[str, Tensor] = {}
    if not job.stacked:
        for which, parts in zip(projections(job.spec), (*gate_up_parts, down_parts), strict=True):
            path = job.names.projection(which).format(layer=layer, expert=expert)
            tensors.update({path + suffix: tensor for suffix, tensor in parts.items()})
        return tensors
    stack = job.names.stacked
    gate_members = gate_up_parts if stack.up is None else gate_up_parts[:1]
    members = {"gate": gate_members, "up": gate_up_parts[1:], "down": [down_parts]}
    for which, path in stack_paths(stack).items():
        for suffix in down_parts:
            projection = torch.stack([parts[suffix] for parts in members[which]])
            interleaved = stack.interleaved and which == "gate"
            tensor = interleave(projection, 0) if interleaved else projection.flatten(0, 1)
            plain = suffix == ".weight"
            name = path.format(layer=layer) + (stack.plain if plain else suffix)
            tensors[name] = tensor.mT if plain and stack.transposed else tensor
    return tensors


def _layer_entries(
    job: ConversionJob, layer: int, matrices: tuple[Payload, ...]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the header entries of a layer's tensors; matrices: those of any expert, for their shapes."""
    experts = range(1 if job.stacked else job.spec.num_experts)
    stacked_experts = job.spec.num_experts if job.stacked else None
    entries: dict[str, tuple[str, tuple[int, ...]]] = {}
    for expert in experts:
        for name, tensor in _expert_tensors(job, layer, expert, matrices).items():
            entries[name] = entry_of(tensor, stacked_experts)
    return entries
