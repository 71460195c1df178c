"""From files to ``ExpertWeights``: only the local experts, only the local slice, audited on the way.

Peak memory is the local weights plus one matrix: the result is allocated once and filled expert by expert.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from ..errors import BadScaleError, CheckpointError, ConfigError, InputError, TensorMismatchError
from ..models import declared_format, describe, family_of
from ..types import ExpertWeights, RouterWeights, SharedWeights
from .audit import bad_bias, check_layer, fail, refuse
from .detect import StoredFormat, detect, find_shared, stored_format
from .layout import Cut, Projection, Source, bias_names, check_part, read_matrix, source_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from ..formats.payload import Payload
    from ..types import MoESpec, Placement
    from .reader import Checkpoint

__all__ = ["describe_checkpoint", "load_all", "load_experts", "load_router", "load_shared"]

_MOST_RANKS = 64


def describe_checkpoint(checkpoint: Checkpoint, layer: int | None = None) -> MoESpec:
    """Return ``models.describe`` with the ``weight_format`` that the tensors of ``layer`` confirm."""
    spec = describe(checkpoint.config)
    return replace(spec, weight_format=detect(checkpoint.config, checkpoint, layer).name)


@dataclass(kw_only=True, slots=True)
class _Reader:
    """Reads and checks one matrix after the other; keeps the problems for one error at the end."""

    checkpoint: Checkpoint
    stored: StoredFormat
    problems: list[CheckpointError] = field(default_factory=list)

    def matrix(self, source: Source, cut: Cut, seen: dict[str, Tensor]) -> Payload:
        payload, wrong = read_matrix(self.checkpoint, source, self.stored, cut, seen)
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
) -> ExpertWeights[Payload]:
    """Read the local experts of ``layer`` on ``device``, byte for byte in the format they are stored in.

    gate_up ``[E_local, 2, I / tp_size, H]``, down ``[E_local, H, I / tp_size]``, experts in the order of
    ``placement.expert_ids``. With biases, ranks other than ``tp_rank`` 0 get zeros for ``down_bias``, because the
    sum over ranks must hold it once. stored: what ``detect`` said, to save asking again.

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
    local = _local_range(spec, stored, placement)
    reader = _Reader(checkpoint=checkpoint, stored=stored)

    def source(expert: int, which: Projection) -> Source:
        return source_of(family.names, spec, layer=layer, expert=expert, projection=which, stacked=stored.stacked)

    weights = _fill(reader, source, placement, local, device)
    gate_up_bias, down_bias = _biases(reader, spec, layer, placement, local)
    refuse(checkpoint, reader.problems)
    if gate_up_bias is None or down_bias is None:
        return weights
    return replace(weights, gate_up_bias=gate_up_bias.to(device), down_bias=down_bias.to(device))


def _fill(
    reader: _Reader,
    source: Callable[[int, Projection], Source],
    placement: Placement,
    local: tuple[int, int],
    device: torch.device | str,
) -> ExpertWeights[Payload]:
    count = len(placement.expert_ids)
    gate_up: Payload | None = None
    down: Payload | None = None
    # without local experts, expert 0 still says what an empty payload looks like
    for slot, expert in enumerate(placement.expert_ids or (0,)):
        seen: dict[str, Tensor] = {}
        halves: tuple[Projection, ...] = ("gate", "up")
        for half, which in enumerate(halves):
            place = source(expert, which)
            matrix = reader.matrix(place, Cut(rows=local, columns=(0, place.columns)), seen)
            gate_up = matrix.to(device).repeated(2).repeated(count) if gate_up is None else gate_up
            if count:
                gate_up[slot].put(half, matrix)
        place = source(expert, "down")
        matrix = reader.matrix(place, Cut(rows=(0, place.rows), columns=local), seen)
        down = matrix.to(device).repeated(count) if down is None else down
        if count:
            down.put(slot, matrix)
    if gate_up is None or down is None:
        raise InputError("no experts were asked for and none could be read as an example")
    return ExpertWeights(gate_up=gate_up, down=down)


def _local_range(spec: MoESpec, stored: StoredFormat, placement: Placement) -> tuple[int, int]:
    """Return this rank's half-open range of I; InputError lists the tensor-parallel sizes that work."""
    wide, parts = spec.intermediate_size, stored.layout.parts
    steps = [n for p in parts if p.required for n in (p.rows_per, p.columns_per) if n]
    rows = [p.rows_per for p in parts if p.required and p.rows_per]
    step = math.lcm(*steps)
    if placement.tp_size == 1:
        if stored.stacked and wide % math.lcm(*rows):
            msg = f"stacked gate and up meet at row {wide}, which is inside a scale block of {math.lcm(*rows)} rows"
            raise TensorMismatchError(msg)
        return 0, wide
    width, rest = divmod(wide, placement.tp_size)
    if rest or width % step:
        works = [n for n in range(1, _MOST_RANKS + 1) if wide % n == 0 and (n == 1 or (wide // n) % step == 0)]
        msg = (
            f"tp_size={placement.tp_size} cuts intermediate_size={wide} into {wide / placement.tp_size:g}, which is "
            f"no multiple of {step} ({stored.name} groups); tensor-parallel sizes that work: {works}; expert "
            "parallelism has no such limit"
        )
        raise InputError(msg)
    return placement.tp_rank * width, (placement.tp_rank + 1) * width


def _rows(checkpoint: Checkpoint, name: str, ids: tuple[int, ...]) -> Tensor:
    """Read the rows ``ids`` of a tensor, and no others."""
    read = [checkpoint.read_slice(name, (slice(i, i + 1),)) for i in ids]
    return torch.cat(read) if read else checkpoint.read_slice(name, (slice(0, 0),))


def _biases(
    reader: _Reader, spec: MoESpec, layer: int, placement: Placement, local: tuple[int, int]
) -> tuple[Tensor | None, Tensor | None]:
    if not spec.expert_bias:
        return None, None
    names = family_of(reader.checkpoint.config).names
    tensors: list[Tensor] = []
    for name in bias_names(names, layer):
        tensors.append(_rows(reader.checkpoint, name, placement.expert_ids))
        reader.problems += bad_bias(layer, name, tensors[-1], placement.expert_ids)
    *upper, down = tensors
    both = upper[0] if len(upper) == 1 else torch.cat(upper, dim=-1)
    order = both.unflatten(-1, (-1, 2)).mT if names.stacked.interleaved else both.unflatten(-1, (2, -1))
    if placement.tp_rank:
        down = torch.zeros_like(down)
    return order[..., local[0] : local[1]].contiguous(), down


def load_all(
    checkpoint: Checkpoint,
    placement: Placement,
    progress: Callable[[int, int, str], None] | None = None,
    *,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[int, ExpertWeights[Payload]]]:
    """Yield (layer, weights) of every MoE layer, one layer in memory at a time.

    progress: called before each layer and once at the end with (layers done, layers, text).
    """
    spec = describe(checkpoint.config)
    layers = family_of(checkpoint.config).moe_layers(checkpoint.config)
    for done, layer in enumerate(layers):
        stored = detect(checkpoint.config, checkpoint, layer)
        if progress is not None:
            progress(done, len(layers), f"layer {layer} ({stored.name})")
        own = replace(spec, weight_format=stored.name)
        yield layer, load_experts(checkpoint, own, layer, placement, stored=stored, device=device)
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
    """Read the router of ``layer`` in its stored dtype: weight ``[E, D]``, bias and correction bias ``[E]`` or None.

    Raises MissingTensorError, TensorMismatchError, and BadScaleError for NaN or infinity.
    """
    names, e = family_of(checkpoint.config).names, spec.num_experts

    def optional(template: str | None) -> Tensor | None:
        return None if template is None else _vector(checkpoint, template.format(layer=layer), (e,)).to(device)

    weight = _vector(checkpoint, names.router_weight.format(layer=layer), (e, spec.hidden_size))
    return RouterWeights(
        weight=weight.to(device),
        bias=optional(names.router_bias),
        correction_bias=optional(names.correction_bias) if spec.routing.correction_bias else None,
    )


def load_shared(
    checkpoint: Checkpoint, spec: MoESpec, layer: int, *, device: torch.device | str = "cpu"
) -> SharedWeights[Payload] | None:
    """Read the shared expert of ``layer`` as one expert in its own stored format, or None when the spec has none.

    Raises ConfigError, MissingTensorError, TensorMismatchError and BadScaleError.
    """
    family = family_of(checkpoint.config)
    templates = family.names.shared
    if spec.shared is None or templates is None:
        return None
    where = f"layer {layer}, shared expert"
    paths = [template.format(layer=layer) for template in templates]
    declared = declared_format(checkpoint.config, paths[0])
    stored = stored_format(declared, find_shared(checkpoint, family, layer), where)
    wide, width = spec.shared.intermediate_size, spec.hidden_size
    sizes = ((wide, width), (wide, width), (width, wide))
    reader = _Reader(checkpoint=checkpoint, stored=stored)
    matrices: list[Payload] = []
    for path, which, (rows, columns) in zip(paths, ("gate", "up", "down"), sizes, strict=True):
        place = Source(label=f"{where}, {which}", path=path, rows=rows, columns=columns, stored_rows=rows)
        for part in stored.layout.parts:
            if part.required:
                check_part(place, part, checkpoint, stored.format)
        matrices.append(reader.matrix(place, Cut(rows=(0, rows), columns=(0, columns)), {}).to(device))
    refuse(checkpoint, reader.problems)
    gate, up, down = matrices
    gate_up, down_room = gate.repeated(2).repeated(1), down.repeated(1)
    gate_up[0].put(0, gate)
    gate_up[0].put(1, up)
    down_room.put(0, down)
    return SharedWeights(experts=ExpertWeights(gate_up=gate_up, down=down_room))
