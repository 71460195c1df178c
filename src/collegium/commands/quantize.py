"""``collegium quantize``: a checkpoint's experts in another format, everything else byte for byte as it was.

A few experts are in memory at a time: read, decoded, encoded, compared with what they were, written. The result is what
the publishers of the format write: tensor names, ``quantization_config`` and all.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
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
from ..checkpoint.writer import Shard, entry_of, matrix_parts, whole_folder
from ..errors import CheckpointError, ConfigError, InputError
from ..formats import Fp8Tensor, NvFp4, by_name
from ..formats.payload import Payload, Storage
from ..formats.unquantised import CONFIG_NAMES
from ..models import Names, describe, experts_apart, family_of, moe_layers
from ..ops.activation import interleave
from ..placement import Placement
from ..planning import expert_bytes
from ..runtime.progress import Progress
from ..types import format_names
from .quantization_config import COMPRESSED, ConversionJob, described, new_config

__all__ = ["ConvertedLayer", "QuantizeReport", "quantize_model"]

_CHUNK = 1 << 26  # bytes of experts read at a time
# Of these formats hidden and intermediate size must be multiples, because the readers refuse a last, partial group or
# read it wrongly. compressed-tensors raises ("must be divisible"). transformers derives the group of FP8 and MXFP8 from
# the number of scales, so it reads 100 columns with four scales in groups of 25 instead of 32, without an error; its
# MXFP4 reader returns whole blocks, which are wider than the model's parameter.
_WHOLE_GROUPS = {"fp8_block": 128, "mxfp8": 32, "mxfp4": 32, "int4_group": 32, "nvfp4": 16}
_READERS = {
    "fp8_block": "transformers",
    "mxfp8": "transformers",
    "mxfp4": "transformers and compressed-tensors",
    "int4_group": "compressed-tensors",
    "nvfp4": "compressed-tensors",
}
_WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertedLayer:
    """Relative L2 error of one layer's weights against what they were, and its largest, of expert ``worst``."""

    layer: int
    source_format: str
    error: float
    worst: int
    worst_error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizeReport:
    """What was written.

    storage: the published layout. nbytes: of the new tensors, ``source_nbytes`` of the old. copied: files taken as they
    were. skipped: folders and other weight files that were not. removed: folders of killed runs that were removed.
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
    """Write the checkpoint at ``path`` with its experts in ``weight_format`` into the new folder ``out``.

    out: default ``path-format``. The folder appears when everything in it is written and audited; a killed run leaves a
    ``.partial-`` folder, which the next run removes. progress: called with (experts done, experts, text). Raises what
    the audit raises, SpecError for an unknown format, InputError for what cannot be converted and an ``out`` that
    exists, CheckpointError when the disk is full.
    """
    checkpoint = Checkpoint.open(path)
    if not checkpoint.config or not checkpoint.path.is_dir() or checkpoint.is_gguf:
        raise ConfigError(f"{path}: quantize needs a model's folder with config.json and safetensors files")
    job = _job(checkpoint, weight_format)
    report = audit(checkpoint, deep=False, convert=True)
    layers = [CheckpointLayer.open(checkpoint, layer.layer) for layer in report.layers]
    names = {stored.name for layer in layers for stored in (layer.stored, layer.up_stored, layer.down_stored)}
    if names == {job.target.name}:
        raise InputError(f"{path}: the experts are {job.target.name} already")
    kept = _kept(job, layers)
    folder = Path(out) if out is not None else Path(f"{os.path.abspath(path)}-{weight_format}")
    needed = sum(info.nbytes for info in kept.values())
    needed += (
        expert_bytes(replace(job.spec, weight_format=job.target.name, down_format=None))
        * job.spec.num_experts
        * len(layers)
    )
    with whole_folder(folder.absolute(), needed) as (room, removed):
        copied, skipped = _copy_files(checkpoint, room)  # first, as it may fail
        done = _write_tensors(job, layers, kept, room, progress)
        (room / "config.json").write_text(json.dumps(new_config(job, kept), indent=2) + "\n")
        written = Checkpoint.open(room)
        audit(written, deep=False)
        raise_if_any(written, dense_weight_problems(written, quantised_dense_weights(written)))
    return QuantizeReport(
        path=str(folder),
        weight_format=job.target.name,
        storage=job.storage.name,
        layers=tuple(done),
        nbytes=sum(info.nbytes for info in written.tensors.values()),
        source_nbytes=sum(info.nbytes for info in checkpoint.tensors.values()),
        copied=copied,
        skipped=skipped,
        removed=tuple(removed),
    )


def _job(checkpoint: Checkpoint, weight_format: str) -> ConversionJob:
    """Choose the published storage of ``weight_format`` for this family; InputError lists the formats that have one."""
    target, index = by_name(weight_format, to_write=True), index_of(checkpoint)
    names, spec, apart = index.names, describe(checkpoint.config), experts_apart(checkpoint.config)
    if names.fused:
        raise InputError(
            f"{weight_format}: the checkpoint holds gate and up of an expert in one module ({names.gate}), which is "
            "read but not written; allowed are stacks and three modules an expert. Save the model with transformers "
            "first, which stacks the experts"
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
        raise InputError(
            f"{weight_format}: experts of {family_of(checkpoint.config).name}{reason} can be written as: "
            f"{', '.join(sorted(storages)) or 'no other format'}"
            + (f"; with hidden and intermediate size {sizes}: {', '.join(sorted(readable))}" if storages else "")
        )
    if target.name not in readable:
        group = _WHOLE_GROUPS[target.name]
        raise InputError(
            f"{weight_format}: the experts' hidden and intermediate size are {sizes}; both must be multiples of "
            f"{group}, as {_READERS[target.name]} cannot read a partial group. Formats for these sizes: "
            f"{', '.join(sorted(readable)) or 'none'}"
        )
    storage = storages[target.name]
    # Unquantised experts stay as published: many a class of transformers reads only stacks, or only single experts.
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
    """Return the formats that can be written for a family, each with the storage that its publishers use.

    apart: DeepSeek-V4's experts, which its config describes separately from the other weights, which are FP8 blocks.
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
        known = {storage.name: storage for storage in by_name(name).storages}
        if name != "fp8_block":
            known.pop("finegrained-fp8", None)
        layout = next((layout for layout in layouts if layout in known), None)
        if layout is not None:
            storages[name] = known[layout]
    return storages


def _readable(weight_format: str, sizes: tuple[int, int]) -> bool:
    """Whether the format's readers understand matrices ``[I, H]`` and ``[H, I]`` of ``sizes`` (H, I)."""
    group = _WHOLE_GROUPS.get(weight_format, 1)
    # One group that is the whole row is derived correctly from its one scale.
    single = group if weight_format == "mxfp8" else 0
    return all(size % group == 0 or size < single for size in sizes)


def _kept(job: ConversionJob, layers: Iterable[CheckpointLayer]) -> dict[str, TensorInfo]:
    """Return every tensor that is copied by its new name; InputError where no one config could describe them."""
    replaced = {
        info.name
        for layer in layers
        for suffix, info in layer.expert_tensors.items()
        if not (layer.spec.expert_bias and suffix.endswith("bias"))
    }
    return described(job, {name: info for name, info in job.checkpoint.tensors.items() if name not in replaced})


def _write_tensors(
    job: ConversionJob,
    layers: list[CheckpointLayer],
    kept: Mapping[str, TensorInfo],
    room: Path,
    progress: Progress | None,
) -> list[ConvertedLayer]:
    sources = sorted({info.file for info in kept.values()})
    count = len(sources) + len(layers)
    names = [f"model-{at + 1:05d}-of-{count:05d}.safetensors" for at in range(count)]
    weight_map: dict[str, str] = {}
    for name, source in zip(names, sources, strict=False):
        own = [info for info in kept.values() if info.file == source]
        with Shard(room / name, {info.name: (info.dtype, info.shape) for info in own}) as shard:
            for info in own:
                shard.copy(info)
        weight_map |= {info.name: name for info in own}
    done: list[ConvertedLayer] = []
    for at, (name, layer) in enumerate(zip(names[len(sources) :], layers, strict=True)):

        def step(experts: int, at: int = at, number: int = layer.number) -> None:
            if progress is not None:
                total = len(layers) * job.spec.num_experts
                progress(at * job.spec.num_experts + experts, total, f"layer {number}")

        converted, written = _write_layer(job, layer, room / name, step)
        done.append(converted)
        weight_map |= dict.fromkeys(written, name)
    size = sum((room / name).stat().st_size for name in names)
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (room / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return done


def _write_layer(
    job: ConversionJob, layer: CheckpointLayer, path: Path, step: Callable[[int], None]
) -> tuple[ConvertedLayer, Iterable[str]]:
    """Convert one layer a few experts at a time; the first expert says what the header needs."""
    spec = layer.spec
    together = max(1, _CHUNK // expert_bytes(spec))
    entries: dict[str, tuple[str, tuple[int, ...]]] = {}
    errors: list[float] = []
    step(0)
    with ExitStack() as stack:
        shard: Shard | None = None
        for start in range(0, spec.num_experts, together):
            ids = tuple(range(start, min(start + together, spec.num_experts)))
            weights = load_experts(layer, Placement(expert_ids=ids), convert=True)
            for slot, expert in enumerate(ids):
                matrices, error = _encode(job, weights.gate_up[slot], weights.down[slot])
                errors.append(error)
                if shard is None:
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
    """Return gate, where there is one, up and down in the target format, and their relative error together."""
    options: dict[str, Any] = {"global_divides": True} if job.target is NvFp4 else {}
    true_up, true_down = gate_up.decode(), down.decode()
    if job.target in (NvFp4, Fp8Tensor):
        # Engines keep one scale for the fused first projection: encoded as one matrix, gate and up share it.
        both = job.target.encode(true_up.flatten(0, 1), **options)
        upper = [both.rows(start, start + true_up.shape[1]) for start in range(0, both.shape[0], true_up.shape[1])]
    else:
        upper = [job.target.encode(part) for part in true_up]
    encoded = (*upper, job.target.encode(true_down, **options))
    trues = (*true_up, true_down)
    lost = sum(_square(payload.decode() - true) for payload, true in zip(encoded, trues, strict=True))
    whole = sum(_square(true) for true in trues)
    return encoded, (lost / whole) ** 0.5 if whole else 0.0


def _square(values: Tensor) -> float:
    return float(values.square().sum(-1).double().sum())


def _expert_tensors(job: ConversionJob, layer: int, expert: int, matrices: tuple[Payload, ...]) -> dict[str, Tensor]:
    """Return one expert's tensors under their published names; of a stack, its entry."""
    *upper, down = (matrix_parts(matrix, job.storage) for matrix in matrices)
    names, table, out = job.names, job.names.stacked, dict[str, Tensor]()
    if not job.stacked:
        for which, parts in zip(projections(job.spec), (*upper, down), strict=True):
            path = names.projection(which).format(layer=layer, expert=expert)
            out |= {path + suffix: tensor for suffix, tensor in parts.items()}
        return out
    for which, path in stack_paths(table).items():
        held = {"gate": upper if table.up is None else upper[:1], "up": upper[1:], "down": [down]}[which]
        for suffix in down:
            own = torch.stack([parts[suffix] for parts in held])
            own = interleave(own, 0) if table.interleaved and which == "gate" else own.flatten(0, 1)
            plain = suffix == ".weight"
            name = path.format(layer=layer) + (table.plain if plain else suffix)
            out[name] = own.mT if plain and table.transposed else own
    return out


def _layer_entries(
    job: ConversionJob, layer: int, matrices: tuple[Payload, ...]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    experts = range(1 if job.stacked else job.spec.num_experts)
    held = job.spec.num_experts if job.stacked else None
    tensors = (_expert_tensors(job, layer, expert, matrices) for expert in experts)
    return {name: entry_of(tensor, held) for own in tensors for name, tensor in own.items()}


def _copy_files(checkpoint: Checkpoint, room: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Copy tokenizer, licence and the like; other weight files than were read, and folders, are skipped and named."""
    source, read = checkpoint.path, {info.file.name for info in checkpoint.tensors.values()}
    read |= {"config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json"}
    read |= {"quantization_config.json", INDEX}
    others = sorted(set(os.listdir(source)) - read)
    skipped = [name for name in others if (source / name).is_dir() or name.endswith(_WEIGHT_FILES)]
    copied = [name for name in others if name not in skipped]
    for name in copied:
        try:
            shutil.copy2(source / name, room / name)
        except OSError as error:
            raise CheckpointError(
                f"{source / name}: cannot be copied ({error.strerror or error}); mend it or take it away"
            ) from error
    return tuple(copied), tuple(skipped)
