"""Static activation scales: read by the audit, and used where a static activation format is requested.

Scales that nothing uses are remarked on; where they are used, faulty ones are refused.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

from torch import Tensor

from ..errors import BadScaleError, CheckpointError, InputError, MissingTensorError, TensorMismatchError
from ..ops.quantize import activation_format
from .header import FLOATS
from .layout import Source
from .problems import raise_first
from .reader import Checkpoint
from .stored_format import ACTIVATION_SCALES, StoredFormat

__all__ = ["ActivationScales", "activation_scales", "input_reach", "static_format"]

_AGREE = 1e-5  # relative; gate and up read one input, so compressed-tensors gives both one scale
# Weight format to the activation format that its checkpoints have scales of.
_OF = {"fp8_tensor": "fp8_static", "fp8_channel": "fp8_static", "nvfp4": "nvfp4_static"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationScales:
    """The scales of some experts. gate_up, down: multipliers of codes, gate's and up's apart. missing: who has none.

    unequal: how many gates and ups have different ones. problems: those that are not finite and positive, and unequal
    ones where the storage wants one scale.
    """

    gate_up: list[float] = field(default_factory=list)
    down: list[float] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unequal: list[str] = field(default_factory=list)
    problems: list[CheckpointError] = field(default_factory=list)

    def findings(self, where: str, stored: tuple[StoredFormat, StoredFormat]) -> list[str]:
        """Return remarks on scales that are stored; the first sentence is the same for every layer.

        Faulty scales are remarks too: they are refused only where a plan uses them (``input_reach``).
        """
        if not self.gate_up + self.down and not self.problems:
            return []
        names = [static_format(form) for form in stored]
        name = None if None in names else names[0]
        use = "no activation format uses" if name is None else f"--activations {name} uses, the largest of a layer"
        remarks = [f"the experts have static activation scales, which {use}; without it rows find their own"]
        if self.problems:
            rest = f", and {len(self.problems) - 1} more are wrong" if len(self.problems) > 1 else ""
            remarks.append(f"{self.problems[0]}{rest}; only static activations would use them, and are refused")
        if self.unequal:
            remarks.append(
                f"{where}: gate and up of {len(self.unequal)} experts have different static activation scales"
            )
        if self.missing:
            remarks.append(f"{self.missing[0]} and {len(self.missing) - 1} more have no static activation scale")
        return remarks


def static_format(stored: StoredFormat) -> str | None:
    """Return the activation format that static scales of a weight format belong to, None where none uses them."""
    return stored.static_activations or _OF.get(stored.name)


def activation_scales(
    checkpoint: Checkpoint, sources: Iterable[Source], stored: tuple[StoredFormat, StoredFormat]
) -> ActivationScales:
    """Read the scales of ``sources``: one for a matrix, or those of a stack. stored: of gate and up, and of down."""
    scales, seen, gate = ActivationScales(), dict[str, Tensor](), 0.0
    for source in sources:
        which = source.label.rpartition(" ")[2]
        name = next((n for n in (source.path + s for s in ACTIVATION_SCALES) if n in checkpoint), None)
        if name is None:
            scales.missing.append(source.label)
            continue
        try:
            scale = _scale(checkpoint, source, name, seen)
        except CheckpointError as error:
            scales.problems.append(error)
            continue
        (scales.down if which == "down" else scales.gate_up).append(scale)
        if which == "up" and gate and abs(scale - gate) > _AGREE * max(scale, gate):
            scales.unequal.append(source.label)
            if stored[0].storage == "compressed-tensors":
                text = f"{source.label}: {name} is {scale:g}, that of gate is {gate:g}; they share one input"
                scales.problems.append(BadScaleError(text))
        gate = scale if which == "gate" else 0.0
    return scales


def _scale(checkpoint: Checkpoint, source: Source, name: str, seen: dict[str, Tensor]) -> float:
    """Return the multiplier of codes for one projection; raises BadScaleError and TensorMismatchError."""
    info = checkpoint.info(name)
    sizes = [1] if source.experts is None else [1, source.experts, 2 * source.experts]
    if info.dtype not in FLOATS or prod(info.shape) not in sizes:
        raise TensorMismatchError(
            f"{source.label}: {name} is {info.dtype} {info.shape}, allowed are BF16, F16 and F32 with "
            f"{' or '.join(map(str, sizes))} numbers"
        )
    if name not in seen:
        seen[name] = checkpoint.read(name).float().reshape(-1)
    values = seen[name]
    if source.experts is not None and len(values) > 1:
        values = values.reshape(source.experts, -1)[source.index]
    wrong = values[~(values.isfinite() & (values > 0))].tolist()
    if wrong:
        text = f"{source.label}: {name} is {wrong[0]:g}, allowed are finite and positive numbers"
        raise BadScaleError(text)
    return float((values.reciprocal() if name.endswith("_global_scale") else values).max())


def input_reach(
    checkpoint: Checkpoint, sources: Iterable[Source], stored: tuple[StoredFormat, StoredFormat], activations: str
) -> tuple[float, float] | None:
    """Return ``ExpertWeights.input_reach`` of all ``sources`` for a static format ``activations``; None for others.

    Raises InputError where weights have no such scales, MissingTensorError where one is missing, and BadScaleError.
    """
    if not activation_format(activations).static:
        return None
    sources = list(sources)
    asked = f"activation format {activations} was asked for"
    names, instead = (
        [static_format(form) for form in stored],
        "take fp8_token or nvfp4, which find the scales of each row",
    )
    lacking = [form.name for form, name in zip(stored, names, strict=True) if name is None]
    if lacking:
        which = f"{sources[0].label} is {lacking[0]}, whose checkpoints have no static scales of activations"
        if len(lacking) == 1 and stored[0].name != stored[1].name:
            which = f"one of its projections is {lacking[0]}, whose checkpoints have no static scales of activations"
        raise InputError(f"{asked}: {which}, allowed: {', '.join(_OF)}; {instead}")
    found = activation_scales(checkpoint, sources, stored)
    raise_first(checkpoint, found.problems)
    if found.missing:
        raise MissingTensorError(
            f"{asked}: {found.missing[0]} has no {ACTIVATION_SCALES[0]}, and {len(found.missing) - 1} more of "
            f"{len(sources)} have none; all need one; {instead}"
        )
    first, second = (activation_format(str(name)).max_value for name in names)
    return max(found.gate_up) * first, max(found.down) * second
