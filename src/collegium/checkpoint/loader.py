"""From files to ``ExpertWeights``: only the local experts, only the local slice, audited as they are read.

Peak memory is the local weights plus one matrix: the result is allocated once and filled expert by expert.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import CheckpointError, InputError
from ..formats.payload import Payload
from ..formats.unquantised import as_stored
from ..models import describe, moe_layers
from ..placement import Placement
from ..runtime.devices import probe
from ..runtime.progress import Progress, counted
from ..types import ExpertWeights, MoESpec, format_names
from .audit import bad_bias, check_layer
from .layer_view import CheckpointLayer
from .layout import Cut, bias_names, projections, read_matrix
from .problems import raise_all, raise_first
from .reader import Checkpoint

__all__ = ["describe_checkpoint", "load_all", "load_experts"]

_MOST_RANKS = 64
_PADDED = ("bf16", "fp16", "fp32", "fp8_tensor", "fp8_channel", "fp8_block", "mxfp4", "mxfp8", "nvfp4")


def describe_checkpoint(checkpoint: Checkpoint, layer: int | None = None) -> MoESpec:
    """Return ``models.describe`` with the ``weight_format`` that the tensors of ``layer`` confirm.

    Without a layer it is the last one's spec and the first one's format. Raises what ``describe`` and
    ``CheckpointLayer.open`` raise.
    """
    spec = describe(checkpoint.config, layer)
    opened = CheckpointLayer.open(checkpoint, layer)
    shared = None if opened.shared_assumed else spec.shared
    formats = {"weight_format": opened.spec.weight_format, "down_format": opened.spec.down_format}
    return replace(spec, shared=shared, **formats)


def load_experts(
    layer: CheckpointLayer,
    placement: Placement,
    *,
    device: torch.device | str = "cpu",
    pad: bool = False,
    convert: bool = False,
) -> ExpertWeights[Payload]:
    """Read the local experts of ``layer`` on ``device``, byte for byte in the format they are stored in.

    gate_up ``[E_local, P, I / tp_size, H]``, down ``[E_local, H, I / tp_size]``, experts in the order of
    ``placement.expert_ids``, then spare slots, which hold a copy of the first one. With biases, ranks other than
    ``tp_rank`` 0 get zeros for ``down_bias``, because the sum over ranks must hold it once. pad: where ``tp_size`` does
    not cut I on the format's groups, give every rank the next number of whole groups and fill the last ranks up with
    zeros, which add nothing to the sum over ranks. convert: gate and up that differ in format are decoded to float32,
    for a caller that encodes them anew; elsewhere they are refused.

    Raises InputError for an expert, a split or a device that does not exist, and the CheckpointErrors of the audit for
    whatever is wrong with the layer's headers or with the scales read here.
    """
    spec, device = layer.spec, probe(device).place
    beyond = [e for e in placement.expert_ids if not 0 <= e < spec.num_experts]
    if beyond:
        raise InputError(f"placement has experts {beyond[:8]}, allowed are 0 to {spec.num_experts - 1}")
    raise_first(layer.checkpoint, check_layer(layer, convert=convert))
    local, room = _local_range(layer, placement, pad=pad)
    made, problems = _fill(layer, placement, local, room, device)
    biases = _biases(layer, placement, local, room, problems) if spec.expert_bias else {}
    raise_first(layer.checkpoint, problems)
    on_device: dict[str, Any] = {name: bias.to(device) for name, bias in biases.items()}
    return ExpertWeights(gate_up=made["gate_up"], down=made["down"], **on_device)


def _fill(
    layer: CheckpointLayer, placement: Placement, local: tuple[int, int], room: int, device: torch.device | str
) -> tuple[dict[str, Payload], list[CheckpointError]]:
    """Return gate_up and down, and what is wrong with them; raises what cannot be read, with what came before it."""
    made, problems = dict[str, Payload](), list[CheckpointError]()
    decoded = layer.unequal is not None
    # Spare slots hold what the first one does until an expert is moved there.
    count = len(placement.expert_ids) + placement.spare
    # without local experts, expert 0 still says what an empty payload looks like
    for slot, expert in enumerate(placement.expert_ids or (0,)):
        seen: dict[str, Tensor] = {}
        for half, which in enumerate(projections(layer.spec)):
            place, down = layer.source(expert, which), which == "down"
            rows, columns = (place.rows, room) if down else (room, place.columns)
            cut = Cut(rows=(0, rows), columns=local) if down else Cut(rows=local, columns=(0, columns))
            stored = layer.stored_as(place)
            matrix, wrong = read_matrix(layer.checkpoint, place, stored, cut, seen, (rows, columns))
            problems += wrong
            if matrix is None:
                raise_all(layer.checkpoint, problems)
            field = "down" if down else "gate_up"
            if decoded and not down:
                matrix = as_stored(matrix.decode())
            if field not in made:
                one = matrix.to(device)
                made[field] = (one if down else one.repeated(layer.spec.gate_up_parts)).repeated(count)
            if count and down:
                made[field].put(slot, matrix)
            elif count:
                made[field][slot].put(half, matrix)
    for slot in range(max(1, len(placement.expert_ids)), count):
        for whole in made.values():
            whole.put(slot, whole[0])
    return made, problems


def _local_range(layer: CheckpointLayer, placement: Placement, *, pad: bool) -> tuple[tuple[int, int], int]:
    """Return this rank's half-open range of I, and the width it is filled up to.

    InputError lists the tensor-parallel sizes that work.
    """
    wide, both = layer.spec.intermediate_size, layer.both_stored
    parts = [part for stored in both for part in stored.layout.parts if part.required]
    step = math.lcm(*(size for part in parts for size in (part.rows_per, part.columns_per) if size))
    padded, names = all(stored.name in _PADDED for stored in both), format_names(layer.spec.formats)
    if placement.tp_size == 1:
        return (0, wide), wide
    width, rest = divmod(wide, placement.tp_size)
    if (rest or width % step) and pad and padded:
        width = math.ceil(math.ceil(wide / step) / placement.tp_size) * step
        start = placement.tp_rank * width
        return ((start, min(wide, start + width)) if start < wide else (0, 0)), width
    if rest or width % step:
        works = [n for n in range(1, _MOST_RANKS + 1) if wide % n == 0 and (n == 1 or (wide // n) % step == 0)]
        raise InputError(
            f"tp_size={placement.tp_size} cuts intermediate_size={wide} into {wide / placement.tp_size:g}, which is "
            f"no multiple of {step} ({names} groups); tensor-parallel sizes that work: {works}; expert "
            "parallelism has no such limit, and pad=True fills up with zeros"
        )
    return (placement.tp_rank * width, (placement.tp_rank + 1) * width), width


def _bias_rows(checkpoint: Checkpoint, name: str, ids: tuple[int, ...]) -> Tensor:
    """Read the biases ``[len(ids), N]`` of some experts: rows of one tensor, or a tensor each, and no others."""
    if "{expert}" in name:
        names = [name.replace("{expert}", str(expert)) for expert in ids or (0,)]
        return torch.stack([checkpoint.read(one) for one in names])[: len(ids)]
    read = [checkpoint.read_slice(name, (slice(i, i + 1),)) for i in ids]
    return torch.cat(read) if read else checkpoint.read_slice(name, (slice(0, 0),))


def _biases(
    layer: CheckpointLayer, placement: Placement, local: tuple[int, int], room: int, problems: list[CheckpointError]
) -> dict[str, Tensor]:
    """Return the biases by their names in ``ExpertWeights``; what is wrong with them is added to ``problems``."""
    ids = placement.expert_ids + placement.expert_ids[:1] * placement.spare
    tensors: list[Tensor] = []
    for name in bias_names(layer.names, layer.number, stacked=layer.stored.stacked):
        tensors.append(_bias_rows(layer.checkpoint, name, ids))
        problems += bad_bias(layer, name, tensors[-1], ids)
    *upper, down = tensors
    both, parts = upper[0] if len(upper) == 1 else torch.cat(upper, dim=-1), layer.spec.gate_up_parts
    alternate = layer.names.stacked.interleaved and len(upper) == 1
    order = both.unflatten(-1, (-1, parts)).mT if alternate else both.unflatten(-1, (parts, -1))
    own = order[..., local[0] : local[1]]
    gate_up = functional.pad(own, (0, room - own.shape[-1])).contiguous()
    return {"gate_up_bias": gate_up, "down_bias": torch.zeros_like(down) if placement.tp_rank else down}


def load_all(
    checkpoint: Checkpoint,
    placement: Placement,
    progress: Progress | None = None,
    *,
    device: torch.device | str = "cpu",
    pad: bool = False,
) -> Iterator[tuple[int, ExpertWeights[Payload]]]:
    """Yield (layer, weights) of every MoE layer, one layer in memory at a time; pad as for ``load_experts``.

    progress: called before each layer and once at the end with (layers done, layers, text).
    """
    layers, opened = moe_layers(checkpoint.config), lru_cache(maxsize=1)(partial(CheckpointLayer.open, checkpoint))

    def text(number: int) -> str:
        return f"layer {number} ({format_names(opened(number).spec.formats)})"

    for number in counted(layers, progress, text, end=f"{len(layers)} layers loaded"):
        yield number, load_experts(opened(number), placement, device=device, pad=pad)
