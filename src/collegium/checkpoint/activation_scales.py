"""Static activation scales: read by the audit, and used where a static activation format is requested.

Unused scales are reported as findings. Faulty scales are refused only where they are used.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import BadScaleError, CheckpointError, InputError, MissingTensorError, TensorMismatchError
from ..ops.quantize import activation_format
from ..problem import UnequalScales
from .header import FLOATS
from .layout import Source
from .problems import raise_if_any
from .reader import Checkpoint
from .stored_format import ACTIVATION_SCALES, StoredFormat

__all__ = [
    "ActivationScales",
    "Reach",
    "ScaleRequest",
    "activation_scales",
    "input_reach",
    "is_unequal",
    "reach_of",
    "static_format",
]

_REL_TOLERANCE = 1e-5  # relative; gate and up read one input, so compressed-tensors gives both one scale
_ACCEPT = "Overrides(unequal_scales='largest') or --unequal-scales largest accepts the larger"
_ALTERNATIVE = "use fp8_token or nvfp4, which compute a scale per row"
# Weight format to the activation format whose scales its checkpoints store.
_STATIC_FORMATS = {"fp8_tensor": "fp8_static", "fp8_channel": "fp8_static", "nvfp4": "nvfp4_static"}


class Reach(NamedTuple):
    """``ExpertWeights.input_reach``, and ``expert_reach`` of all experts."""

    largest: tuple[float, float]
    by_expert: Tensor

    def fields(self, slots: Sequence[int], activations: str) -> dict[str, Any]:
        """Return the fields of ``ExpertWeights`` for the experts in ``slots`` and an activation format."""
        by_expert = self.by_expert[list(slots)] if activation_format(activations).by_expert else None
        return {"input_reach": self.largest, "expert_reach": by_expert}


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleRequest:
    """The activation format of a layer, and which static scales it accepts.

    unequal: whether different scales of gate and up of an expert are refused, or the largest one is used.
    """

    activations: str = "fp32"
    unequal: UnequalScales = "refuse"


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationScales:
    """The static activation scales of a set of experts.

    gate_up, down: multipliers of codes; gate and up have one entry each. missing: labels of projections without a
    scale. unequal: up projections whose scale differs from that of gate, as sentences. problems: scales that are not
    finite and positive.
    """

    gate_up: list[float] = field(default_factory=list)
    down: list[float] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unequal: list[str] = field(default_factory=list)
    problems: list[CheckpointError] = field(default_factory=list)

    def findings(self, where: str, stored: tuple[StoredFormat, StoredFormat]) -> list[str]:
        """Return one line for each kind of finding; the first line is the same for every layer.

        Faulty scales are findings too: they are refused only where a plan uses them (``input_reach``).
        """
        if not self.gate_up and not self.down and not self.problems:
            return []
        names = [static_format(form) for form in stored]
        name = None if None in names else names[0]
        use = "no activation format uses" if name is None else f"--activations {name} uses, the largest of a layer"
        texts = [f"the experts have static activation scales, which {use}; without it scales are computed per row"]
        if self.problems:
            more = f", and {len(self.problems) - 1} more are wrong" if len(self.problems) > 1 else ""
            texts.append(f"{self.problems[0]}{more}; static activations, which would use them, are refused")
        if self.unequal:
            texts.append(
                f"{where}: gate and up of {len(self.unequal)} experts have different static activation scales, which "
                f"static activations refuse unless {_ACCEPT}: {self.unequal[0]}"
            )
        if self.missing:
            texts.append(f"{self.missing[0]} and {len(self.missing) - 1} more have no static activation scale")
        return texts


def static_format(stored: StoredFormat) -> str | None:
    """Return the activation format that uses the static scales of a weight format, None where there is none."""
    return stored.static_activations or _STATIC_FORMATS.get(stored.name)


def is_unequal(first: float, second: float) -> bool:
    """Return whether two scales differ by more than rounding."""
    return abs(first - second) > _REL_TOLERANCE * max(first, second)


def activation_scales(checkpoint: Checkpoint, sources: Iterable[Source]) -> ActivationScales:
    """Read the scales of ``sources``."""
    scales = ActivationScales()
    cache: dict[str, Tensor] = {}
    gate_scale = 0.0
    for source in sources:
        projection = source.projection
        name = next((n for n in (source.path + s for s in ACTIVATION_SCALES) if n in checkpoint), None)
        if name is None:
            scales.missing.append(source.label)
            continue
        try:
            scale = _read_scale(checkpoint, source, name, cache)
        except CheckpointError as error:
            scales.problems.append(error)
            continue
        (scales.down if projection == "down" else scales.gate_up).append(scale)
        if projection == "up" and gate_scale and is_unequal(scale, gate_scale):
            scales.unequal.append(
                f"{source.label}: {name} is {scale:g}, that of gate is {gate_scale:g}; they share one input"
            )
        gate_scale = scale if projection == "gate" else 0.0
    return scales


def _read_scale(checkpoint: Checkpoint, source: Source, name: str, cache: dict[str, Tensor]) -> float:
    """Return the multiplier of codes for one projection.

    cache: tensors that were read before, by name. Raises BadScaleError and TensorMismatchError.
    """
    info = checkpoint.info(name)
    sizes = [1] if source.experts is None else [1, source.experts, 2 * source.experts]
    if info.dtype not in FLOATS or prod(info.shape) not in sizes:
        raise TensorMismatchError(
            f"{source.label}: {name} is {info.dtype} {info.shape}, allowed are BF16, F16 and F32 with "
            f"{' or '.join(map(str, sizes))} numbers"
        )
    if name not in cache:
        cache[name] = checkpoint.read(name).float().reshape(-1)
    values = cache[name]
    if source.experts is not None and len(values) > 1:
        values = values.reshape(source.experts, -1)[source.index]
    invalid = values[~(values.isfinite() & (values > 0))].tolist()
    if invalid:
        raise BadScaleError(f"{source.label}: {name} is {invalid[0]:g}, allowed are finite and positive numbers")
    if name.endswith("_global_scale"):
        values = values.reciprocal()
    return float(values.max())


def input_reach(
    checkpoint: Checkpoint, sources: Iterable[Source], stored: tuple[StoredFormat, StoredFormat], request: ScaleRequest
) -> Reach | None:
    """Return the inputs that the scales of ``sources`` represent, None where no static format is requested.

    Raises InputError where the weight format has no such scales, MissingTensorError where one is missing, and
    BadScaleError.
    """
    if not activation_format(request.activations).static:
        return None
    sources = list(sources)
    _static_formats(stored, request.activations, sources[0].label)  # refuses formats without scales before any is read
    scales = activation_scales(checkpoint, sources)
    raise_if_any(checkpoint, scales.problems)
    return reach_of(scales, stored, request)


def _static_formats(stored: tuple[StoredFormat, StoredFormat], activations: str, label: str) -> list[str]:
    """Return the static activation formats of gate and up, and of down.

    label: of the first projection. Raises InputError where a weight format has no static scales.
    """
    names = [static_format(form) for form in stored]
    lacking = [form.name for form, name in zip(stored, names, strict=True) if name is None]
    if lacking:
        problem = f"{label} is {lacking[0]}, whose checkpoints have no static scales of activations"
        if len(lacking) == 1 and stored[0].name != stored[1].name:
            problem = f"one of its projections is {lacking[0]}, whose checkpoints have no static scales of activations"
        raise InputError(f"{_requested(activations)}: {problem}, allowed: {', '.join(_STATIC_FORMATS)}; {_ALTERNATIVE}")
    return [name for name in names if name is not None]


def reach_of(scales: ActivationScales, stored: tuple[StoredFormat, StoredFormat], request: ScaleRequest) -> Reach:
    """Return the inputs that ``scales`` represent, for the static format of ``request``.

    Raises InputError, MissingTensorError and BadScaleError as ``input_reach`` does.
    """
    activations = request.activations
    gate_up_format, down_format = _static_formats(stored, activations, "the first projection")
    if scales.missing:
        present = len(scales.gate_up) + len(scales.down)
        raise MissingTensorError(
            f"{_requested(activations)}: {scales.missing[0]} has no {ACTIVATION_SCALES[0]}, and "
            f"{len(scales.missing) - 1} more of {present + len(scales.missing)} have none; all need one; {_ALTERNATIVE}"
        )
    if scales.unequal and request.unequal == "refuse":
        more = f", and {len(scales.unequal) - 1} more experts have such scales" if len(scales.unequal) > 1 else ""
        raise BadScaleError(f"{_requested(activations)}: {scales.unequal[0]}{more}; {_ACCEPT}, or {_ALTERNATIVE}")
    gate_up_max = activation_format(gate_up_format).max_value
    down_max = activation_format(down_format).max_value
    experts = len(scales.down)
    gate_up = torch.tensor(scales.gate_up, dtype=torch.float64).view(experts, -1).amax(1) * gate_up_max
    down = torch.tensor(scales.down, dtype=torch.float64) * down_max
    return Reach(
        largest=(max(scales.gate_up) * gate_up_max, max(scales.down) * down_max),
        by_expert=torch.stack((gate_up, down), dim=1).float(),
    )


def _requested(activations: str) -> str:
    return f"activation format {activations} was requested"
