"""Load ``ExpertWeights`` from files: only the local experts and the local slice, audited as they are read.

Peak memory is the local weights plus one matrix: the result is allocated once and filled expert by expert.
"""

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
from .layout import Cut, bias_names, local_range, projections, read_matrix
from .problems import raise_all, raise_if_any
from .reader import Checkpoint

__all__ = ["describe_checkpoint", "load_all", "load_experts"]


def describe_checkpoint(checkpoint: Checkpoint, layer: int | None = None) -> MoESpec:
    """Return ``models.describe`` with the ``weight_format`` that the tensors of ``layer`` confirm.

    Without a layer, returns the spec of the last and the format of the first MoE layer. Raises the errors of
    ``describe`` and ``CheckpointLayer.open``.
    """
    spec = describe(checkpoint.config, layer)
    opened = CheckpointLayer.open(checkpoint, layer)
    shared = None if opened.shared_assumed else spec.shared
    return replace(spec, shared=shared, weight_format=opened.spec.weight_format, down_format=opened.spec.down_format)


def load_experts(
    layer: CheckpointLayer,
    placement: Placement,
    *,
    device: torch.device | str = "cpu",
    pad: bool = False,
    convert: bool = False,
) -> ExpertWeights[Payload]:
    """Read the local experts of ``layer`` onto ``device``, byte for byte in their stored format.

    Returns gate_up ``[E_local, P, I / tp_size, H]`` and down ``[E_local, H, I / tp_size]``: the experts in the order of
    ``placement.expert_ids``, then spare slots, which hold a copy of the first expert. With biases, ranks other than
    ``tp_rank`` 0 get zeros for ``down_bias``, because the sum over ranks must contain it once.

    pad: if ``tp_size`` does not cut I at group boundaries of the format, give every rank the next number of whole
    groups and pad the last ranks with zeros, which do not change the sum over ranks. convert: decode gate and up that
    differ in format to float32, for a caller that encodes them again; without it, those of GGUF files are decoded to
    bfloat16 and others refused.

    Raises InputError for an expert, a split or a device that does not exist, and the CheckpointErrors of the audit for
    faults in the layer's headers and in the scales that are read.
    """
    spec = layer.spec
    device = probe(device).place
    beyond = [e for e in placement.expert_ids if not 0 <= e < spec.num_experts]
    if beyond:
        raise InputError(f"placement has experts {beyond[:8]}, allowed are 0 to {spec.num_experts - 1}")
    raise_if_any(layer.checkpoint, check_layer(layer, convert=convert))
    local, padded_width = local_range(layer.spec, layer.both_stored, placement, pad=pad)
    mixed_dtype = torch.float32 if convert else torch.bfloat16
    payloads, problems = _read_payloads(layer, placement, local, padded_width, device, mixed_dtype)
    biases = _read_biases(layer, placement, local, padded_width, problems) if spec.expert_bias else {}
    raise_if_any(layer.checkpoint, problems)
    on_device: dict[str, Any] = {name: bias.to(device) for name, bias in biases.items()}
    return ExpertWeights(gate_up=payloads["gate_up"], down=payloads["down"], **on_device)


def _read_payloads(
    layer: CheckpointLayer,
    placement: Placement,
    local: tuple[int, int],
    padded_width: int,
    device: torch.device | str,
    mixed_dtype: torch.dtype,
) -> tuple[dict[str, Payload], list[CheckpointError]]:
    """Return gate_up and down, and their problems; raises all problems if a matrix cannot be read.

    mixed_dtype: of gate and up where they differ in format and are decoded.
    """
    payloads: dict[str, Payload] = {}
    problems: list[CheckpointError] = []
    decoded = layer.unequal is not None
    # Spare slots hold a copy of the first expert until an expert is moved there.
    count = len(placement.expert_ids) + placement.spare
    # Without local experts, expert 0 provides the form of the empty payload.
    for slot, expert in enumerate(placement.expert_ids or (0,)):
        cache: dict[str, Tensor] = {}
        for half, which in enumerate(projections(layer.spec)):
            source = layer.source(expert, which)
            stored = layer.stored_as(source)
            down = which == "down"
            if down:
                rows, columns = source.rows, padded_width
                cut = Cut(rows=(0, rows), columns=local)
            else:
                rows, columns = padded_width, source.columns
                cut = Cut(rows=local, columns=(0, columns))
            matrix, matrix_problems = read_matrix(layer.checkpoint, source, stored, cut, cache, (rows, columns))
            problems += matrix_problems
            if matrix is None:
                raise_all(layer.checkpoint, problems)
            field = "down" if down else "gate_up"
            if decoded and not down:
                matrix = as_stored(matrix.decode(mixed_dtype))
            if field not in payloads:
                expert_payload = matrix.to(device)
                if not down:
                    expert_payload = expert_payload.repeated(layer.spec.gate_up_parts)
                payloads[field] = expert_payload.repeated(count)
            if count and down:
                payloads[field].put(slot, matrix)
            elif count:
                payloads[field][slot].put(half, matrix)
    for slot in range(max(1, len(placement.expert_ids)), count):
        for payload in payloads.values():
            payload.put(slot, payload[0])
    return payloads, problems


def _read_bias_rows(checkpoint: Checkpoint, name: str, ids: tuple[int, ...]) -> Tensor:
    """Read the biases ``[len(ids), N]`` of the experts ``ids``, from one stacked tensor or one tensor per expert."""
    if "{expert}" in name:
        names = [name.replace("{expert}", str(expert)) for expert in ids or (0,)]
        return torch.stack([checkpoint.read(tensor) for tensor in names])[: len(ids)]
    rows = [checkpoint.read_slice(name, (slice(i, i + 1),)) for i in ids]
    return torch.cat(rows) if rows else checkpoint.read_slice(name, (slice(0, 0),))


def _read_biases(
    layer: CheckpointLayer,
    placement: Placement,
    local: tuple[int, int],
    padded_width: int,
    problems: list[CheckpointError],
) -> dict[str, Tensor]:
    """Return the biases by their names in ``ExpertWeights``; append their problems to ``problems``."""
    ids = placement.expert_ids + placement.expert_ids[:1] * placement.spare
    tensors: list[Tensor] = []
    for name in bias_names(layer.names, layer.number, stacked=layer.stored.stacked):
        tensors.append(_read_bias_rows(layer.checkpoint, name, ids))
        problems += bad_bias(layer, name, tensors[-1], ids)
    *upper, down = tensors
    joined = upper[0] if len(upper) == 1 else torch.cat(upper, dim=-1)
    parts = layer.spec.gate_up_parts
    if layer.names.stacked.interleaved and len(upper) == 1:
        by_part = joined.unflatten(-1, (-1, parts)).mT
    else:
        by_part = joined.unflatten(-1, (parts, -1))
    local_rows = by_part[..., local[0] : local[1]]
    gate_up = functional.pad(local_rows, (0, padded_width - local_rows.shape[-1])).contiguous()
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
    layers = moe_layers(checkpoint.config)
    opened = lru_cache(maxsize=1)(partial(CheckpointLayer.open, checkpoint))

    def text(number: int) -> str:
        return f"layer {number} ({format_names(opened(number).spec.formats)})"

    for number in counted(layers, progress, text, end=f"{len(layers)} layers loaded"):
        yield number, load_experts(opened(number), placement, device=device, pad=pad)
