"""From files to ``ExpertWeights``: only the local experts, only the local slice, audited on the way.

Peak memory is the local weights plus one matrix: the result is allocated once and filled expert by expert.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from ..errors import (
    BadScaleError,
    CheckpointError,
    ConfigError,
    InputError,
    TensorMismatchError,
    UnknownTensorError,
)
from ..models import declared_format, describe, family_of
from ..types import ExpertWeights, LatentWeights, RouterWeights, SharedWeights
from .audit import ACTIVATION_SCALES, bad_bias, check_layer, fail, refuse
from .detect import StoredFormat, detect, stored_format
from .index import find_suffixes, index_of
from .layout import Cut, Projection, Source, bias_names, check_part, projections, read_matrix, source_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from ..formats.payload import Payload
    from ..types import MoESpec, Placement
    from .reader import Checkpoint

__all__ = ["describe_checkpoint", "load_all", "load_experts", "load_latent", "load_router", "load_shared"]

_MOST_RANKS = 64
_PADDED = ("bf16", "fp16", "fp32", "fp8_tensor", "fp8_channel", "fp8_block", "mxfp4", "mxfp8", "nvfp4")


def describe_checkpoint(checkpoint: Checkpoint, layer: int | None = None) -> MoESpec:
    """Return ``models.describe`` with the ``weight_format`` that the tensors of ``layer`` confirm."""
    spec = describe(checkpoint.config, layer)
    return replace(spec, weight_format=detect(checkpoint.config, checkpoint, layer).name)


@dataclass(kw_only=True, slots=True)
class _Reader:
    """Reads and checks one matrix after the other; keeps the problems for one error at the end."""

    checkpoint: Checkpoint
    stored: StoredFormat
    problems: list[CheckpointError] = field(default_factory=list)

    def matrix(self, source: Source, cut: Cut, seen: dict[str, Tensor], room: tuple[int, int] | None = None) -> Payload:
        """Return the cut; room: rows and columns to fill up to with zeros."""
        payload, wrong = read_matrix(self.checkpoint, source, self.stored, cut, seen, room)
        self.problems += wrong
        if payload is None:
            fail(self.checkpoint, self.problems)
        return payload


def load_experts(
    checkpoint: Checkpoint,
    spec: MoESpec,
    layer: int,
    placement: Placement,
    *,
    stored: StoredFormat | None = None,
    device: torch.device | str = "cpu",
    pad: bool = False,
) -> ExpertWeights[Payload]:
    """Read the local experts of ``layer`` on ``device``, byte for byte in the format they are stored in.

    gate_up ``[E_local, P, I / tp_size, H]``, down ``[E_local, H, I / tp_size]``, experts in the order of
    ``placement.expert_ids``. With biases, ranks other than ``tp_rank`` 0 get zeros for ``down_bias``, because the
    sum over ranks must hold it once. stored: what ``detect`` said, to save asking again. pad: where ``tp_size`` does
    not cut I on the format's groups, give every rank the next number of whole groups and fill the last ranks up with
    zeros, which add nothing to the sum over ranks.

    Raises InputError for a layer, expert or split that does not exist, ConfigError when ``spec.weight_format`` is not
    what is stored, and the CheckpointErrors of the audit for whatever is wrong with the layer's headers or with the
    scales read here.
    """
    family = family_of(checkpoint.config)
    if layer not in family.moe_layers(checkpoint.config):
        msg = f"layer {layer} was asked for, layers with routed experts are {family.moe_layers(checkpoint.config)}"
        raise InputError(msg)
    beyond = [e for e in placement.expert_ids if not 0 <= e < spec.num_experts]
    if beyond:
        raise InputError(f"placement has experts {beyond[:8]}, allowed are 0 to {spec.num_experts - 1}")
    stored = detect(checkpoint.config, checkpoint, layer) if stored is None else stored
    if stored.name != spec.weight_format:
        msg = (
            f"layer {layer} is stored as {stored.name}, the spec says weight_format={spec.weight_format!r}; "
            "use describe_checkpoint(checkpoint, layer) or replace(spec, weight_format=...)"
        )
        raise ConfigError(msg)
    refuse(checkpoint, check_layer(checkpoint, spec, layer, stored))
    names = index_of(checkpoint).names
    block = math.lcm(*(p.rows_per for p in stored.layout.parts if p.required and p.rows_per))
    if stored.stacked and names.stacked.up is None and spec.gate_up_parts == 2 and spec.intermediate_size % block:
        meet = f"stacked gate and up meet at row {spec.intermediate_size}"
        raise TensorMismatchError(f"{meet}, which is inside a scale block of {block} rows")
    local, room = _local_range(spec, stored, placement, pad=pad)
    reader = _Reader(checkpoint=checkpoint, stored=stored)

    def source(expert: int, which: Projection) -> Source:
        return source_of(names, spec, layer=layer, expert=expert, projection=which, stacked=stored.stacked)

    weights = _fill(reader, source, projections(spec)[:-1], placement, local, room, device)
    gate_up_bias, down_bias = _biases(reader, spec, layer, placement, local, room)
    refuse(checkpoint, reader.problems)
    if gate_up_bias is None or down_bias is None:
        return weights
    return replace(weights, gate_up_bias=gate_up_bias.to(device), down_bias=down_bias.to(device))


def _fill(
    reader: _Reader,
    source: Callable[[int, Projection], Source],
    halves: tuple[Projection, ...],
    placement: Placement,
    local: tuple[int, int],
    room: int,
    device: torch.device | str,
) -> ExpertWeights[Payload]:
    count = len(placement.expert_ids)
    gate_up: Payload | None = None
    down: Payload | None = None
    # without local experts, expert 0 still says what an empty payload looks like
    for slot, expert in enumerate(placement.expert_ids or (0,)):
        seen: dict[str, Tensor] = {}
        for half, which in enumerate(halves):
            place = source(expert, which)
            matrix = reader.matrix(place, Cut(rows=local, columns=(0, place.columns)), seen, (room, place.columns))
            gate_up = matrix.to(device).repeated(len(halves)).repeated(count) if gate_up is None else gate_up
            if count:
                gate_up[slot].put(half, matrix)
        place = source(expert, "down")
        matrix = reader.matrix(place, Cut(rows=(0, place.rows), columns=local), seen, (place.rows, room))
        down = matrix.to(device).repeated(count) if down is None else down
        if count:
            down.put(slot, matrix)
    if gate_up is None or down is None:
        raise InputError("no experts were asked for and none could be read as an example")
    return ExpertWeights(gate_up=gate_up, down=down)


def _local_range(
    spec: MoESpec, stored: StoredFormat, placement: Placement, *, pad: bool
) -> tuple[tuple[int, int], int]:
    """Return this rank's half-open range of I, and the width it is filled up to.

    InputError lists the tensor-parallel sizes that work.
    """
    wide, parts = spec.intermediate_size, stored.layout.parts
    steps = [n for p in parts if p.required for n in (p.rows_per, p.columns_per) if n]
    step = math.lcm(*steps)
    if placement.tp_size == 1:
        return (0, wide), wide
    width, rest = divmod(wide, placement.tp_size)
    if (rest or width % step) and pad and stored.name in _PADDED:
        width = math.ceil(math.ceil(wide / step) / placement.tp_size) * step
        start = placement.tp_rank * width
        return ((start, min(wide, start + width)) if start < wide else (0, 0)), width
    if rest or width % step:
        works = [n for n in range(1, _MOST_RANKS + 1) if wide % n == 0 and (n == 1 or (wide // n) % step == 0)]
        msg = (
            f"tp_size={placement.tp_size} cuts intermediate_size={wide} into {wide / placement.tp_size:g}, which is "
            f"no multiple of {step} ({stored.name} groups); tensor-parallel sizes that work: {works}; expert "
            "parallelism has no such limit, and pad=True fills up with zeros"
        )
        raise InputError(msg)
    return (placement.tp_rank * width, (placement.tp_rank + 1) * width), width


def _rows(checkpoint: Checkpoint, name: str, ids: tuple[int, ...]) -> Tensor:
    """Read the rows ``ids`` of a tensor, and no others."""
    read = [checkpoint.read_slice(name, (slice(i, i + 1),)) for i in ids]
    return torch.cat(read) if read else checkpoint.read_slice(name, (slice(0, 0),))


def _biases(
    reader: _Reader, spec: MoESpec, layer: int, placement: Placement, local: tuple[int, int], room: int
) -> tuple[Tensor | None, Tensor | None]:
    if not spec.expert_bias:
        return None, None
    names = index_of(reader.checkpoint).names
    tensors: list[Tensor] = []
    for name in bias_names(names, layer):
        tensors.append(_rows(reader.checkpoint, name, placement.expert_ids))
        reader.problems += bad_bias(layer, name, tensors[-1], placement.expert_ids)
    *upper, down = tensors
    both = upper[0] if len(upper) == 1 else torch.cat(upper, dim=-1)
    parts = spec.gate_up_parts
    order = both.unflatten(-1, (-1, parts)).mT if names.stacked.interleaved else both.unflatten(-1, (parts, -1))
    if placement.tp_rank:
        down = torch.zeros_like(down)
    own = order[..., local[0] : local[1]]
    return functional.pad(own, (0, room - own.shape[-1])).contiguous(), down


def load_all(
    checkpoint: Checkpoint,
    placement: Placement,
    progress: Callable[[int, int, str], None] | None = None,
    *,
    device: torch.device | str = "cpu",
    pad: bool = False,
) -> Iterator[tuple[int, ExpertWeights[Payload]]]:
    """Yield (layer, weights) of every MoE layer, one layer in memory at a time; pad as for ``load_experts``.

    progress: called before each layer and once at the end with (layers done, layers, text).
    """
    layers = family_of(checkpoint.config).moe_layers(checkpoint.config)
    for done, layer in enumerate(layers):
        stored = detect(checkpoint.config, checkpoint, layer)
        if progress is not None:
            progress(done, len(layers), f"layer {layer} ({stored.name})")
        own = replace(describe(checkpoint.config, layer), weight_format=stored.name)
        yield layer, load_experts(checkpoint, own, layer, placement, stored=stored, device=device, pad=pad)
    if progress is not None:
        progress(len(layers), len(layers), f"{len(layers)} layers loaded")


def _vector(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Tensor:
    info = checkpoint.info(name)
    if math.prod(info.shape) != math.prod(shape) or info.dtype not in ("BF16", "F16", "F32"):
        msg = f"{name} is {info.dtype} {info.shape}, needed is BF16, F16 or F32 {shape}"
        raise TensorMismatchError(msg)
    tensor = checkpoint.read(name).reshape(shape)
    if not bool(torch.isfinite(tensor).all()):
        raise BadScaleError(f"{name} holds NaN or infinity; download the file again or export it anew")
    return tensor


def load_router(
    checkpoint: Checkpoint, spec: MoESpec, layer: int, *, device: torch.device | str = "cpu"
) -> RouterWeights:
    """Read the router of ``layer`` in its stored dtype: weight ``[E, D]``, the rest ``[E]`` or None.

    A factor of the router's input is multiplied into the weight, with ``D**-0.5``, in float32. Raises
    MissingTensorError, TensorMismatchError, and BadScaleError for NaN or infinity.
    """
    names, e, rule = index_of(checkpoint).names, spec.num_experts, spec.routing

    def optional(template: str | None, wanted: bool = True) -> Tensor | None:
        if template is None or not wanted:
            return None
        return _vector(checkpoint, template.format(layer=layer), (e,)).to(device)

    weight = _vector(checkpoint, names.router_weight.format(layer=layer), (e, spec.hidden_size))
    if names.router_scale is not None:
        scale = _vector(checkpoint, names.router_scale.format(layer=layer), (spec.hidden_size,))
        weight = weight.float() * scale.float() * spec.hidden_size**-0.5
    table: Tensor | None = None
    if rule.hash_routing and names.hash_table is not None:
        table = checkpoint.read(names.hash_table.format(layer=layer))
        if table.dim() != 2 or table.shape[1] != rule.top_k or table.is_floating_point():
            name, found = names.hash_table.format(layer=layer), f"{table.dtype} {tuple(table.shape)}"
            raise TensorMismatchError(f"{name} is {found}, needed are integers [vocabulary, top_k={rule.top_k}]")
    return RouterWeights(
        weight=weight.to(device),
        bias=optional(names.router_bias),
        correction_bias=optional(names.correction_bias, rule.correction_bias),
        hash_table=None if table is None else table.to(device),
        expert_scale=optional(names.expert_scale, rule.expert_scale),
    )


def _stored_at(checkpoint: Checkpoint, layer: int, templates: tuple[str, ...], where: str) -> StoredFormat:
    """Return how the modules at ``templates`` are stored; raises ConfigError and UnknownTensorError."""
    seen = find_suffixes(checkpoint, layer, templates)
    stored = stored_format(declared_format(checkpoint.config, templates[0].format(layer=layer)), seen, where)
    unknown = set(seen) - {part.suffix for part in stored.layout.parts} - set(ACTIVATION_SCALES)
    if unknown:
        raise UnknownTensorError(f"{where}: has {', '.join(sorted(unknown))}, which {stored.name} does not have")
    return stored


def _matrix(checkpoint: Checkpoint, stored: StoredFormat, place: Source) -> Payload:
    """Read one whole matrix in its stored format, checked."""
    for part in stored.layout.parts:
        if part.required:
            check_part(place, part, checkpoint, stored.format)
    reader = _Reader(checkpoint=checkpoint, stored=stored)
    whole = reader.matrix(place, Cut(rows=(0, place.rows), columns=(0, place.columns)), {})
    refuse(checkpoint, reader.problems)
    return whole


def load_latent(
    checkpoint: Checkpoint, spec: MoESpec, layer: int, *, device: torch.device | str = "cpu"
) -> LatentWeights | None:
    """Read the projections into and out of the latent width, decoded to float32, or None when the spec has none.

    Raises ConfigError, MissingTensorError, TensorMismatchError and BadScaleError.
    """
    names = index_of(checkpoint).names
    if spec.latent_size is None or names.latent is None:
        return None
    found: list[Tensor] = []
    sizes = ((spec.latent_size, spec.hidden_size), (spec.hidden_size, spec.latent_size))
    for template, (rows, columns) in zip(names.latent, sizes, strict=True):
        path, where = template.format(layer=layer), f"layer {layer}, {template.rpartition('.')[2]}"
        stored = _stored_at(checkpoint, layer, (template,), where)
        place = Source(label=where, path=path, rows=rows, columns=columns, stored_rows=rows)
        found.append(_matrix(checkpoint, stored, place).decode().to(device))
    norm: Tensor | None = None
    if spec.latent_norm_eps is not None and names.latent_norm is not None:
        norm = _vector(checkpoint, names.latent_norm.format(layer=layer), (spec.latent_size,)).to(device)
    return LatentWeights(down=found[0], up=found[1], norm=norm, norm_eps=spec.latent_norm_eps or 0.0)


def load_shared(
    checkpoint: Checkpoint, spec: MoESpec, layer: int, *, device: torch.device | str = "cpu"
) -> SharedWeights[Payload] | None:
    """Read the shared expert of ``layer`` as one expert in its own stored format, or None when the spec has none.

    Raises ConfigError, MissingTensorError, TensorMismatchError and BadScaleError.
    """
    names = index_of(checkpoint).names
    if spec.shared is None or names.shared is None:
        return None
    where, gated = f"layer {layer}, shared expert", spec.activation.gated
    paths = [template.format(layer=layer) for template in names.shared]
    stored = _stored_at(checkpoint, layer, names.shared, where)
    wide, width = spec.shared.intermediate_size, spec.hidden_size
    fused = gated and len(paths) == 2  # gate rows, then up rows, in one tensor
    upper: list[Payload] = []
    for half, which in enumerate(("gate", "up") if gated else ("up",)):
        place = Source(
            label=f"{where}, {which}",
            path=paths[0 if fused else half],
            rows=wide,
            columns=width,
            stored_rows=2 * wide if fused else wide,
            offset=wide * half if fused else 0,
        )
        upper.append(_matrix(checkpoint, stored, place).to(device))
    place = Source(label=f"{where}, down", path=paths[-1], rows=width, columns=wide, stored_rows=width)
    lower = _matrix(checkpoint, stored, place).to(device)
    gate_up, down = upper[0].repeated(len(upper)).repeated(1), lower.repeated(1)
    for half, matrix in enumerate(upper):
        gate_up[0].put(half, matrix)
    down.put(0, lower)
    gate: Tensor | None = None
    if spec.shared.gated and names.shared_gate is not None:
        gate = _vector(checkpoint, names.shared_gate.format(layer=layer), (1, width)).to(device)
    return SharedWeights(experts=ExpertWeights(gate_up=gate_up, down=down), gate=gate)
