"""Static activation scales: read by the audit, and used where a static activation format is asked for.

A checkpoint whose scales contradict each other was exported wrongly, and its weights are not to be trusted either.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from ..errors import BadScaleError, CheckpointError, InputError, MissingTensorError
from ..ops.quantize import activation_format
from .layout import Source
from .problems import refuse
from .reader import Checkpoint
from .stored import StoredFormat

__all__ = ["ACTIVATION_SCALES", "ActivationScales", "activation_scales", "input_reach"]

ACTIVATION_SCALES = (".input_scale", ".input_global_scale", "_input_scale")
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
        """Return what to say of scales that are there; the first sentence is the same for every layer."""
        if not self.gate_up + self.down:
            return []
        names = [_OF.get(form.name) for form in stored]
        name = None if None in names else names[0]
        use = "no activation format uses" if name is None else f"--activations {name} uses, the largest of a layer"
        said = [f"the experts have static activation scales, which {use}; without it rows find their own"]
        if self.unequal:
            said.append(f"{where}: gate and up of {len(self.unequal)} experts have different static activation scales")
        if self.missing:
            said.append(f"{self.missing[0]} and {len(self.missing) - 1} more have no static activation scale")
        return said


def activation_scales(
    checkpoint: Checkpoint, sources: Iterable[Source], stored: tuple[StoredFormat, StoredFormat]
) -> ActivationScales:
    """Read the scales of ``sources``: one for a matrix, or those of a stack. stored: of gate and up, and of down."""
    found, seen, gate = ActivationScales(), dict[str, Tensor](), 0.0
    for source in sources:
        which = source.label.rpartition(" ")[2]
        name = next((n for n in (source.path + s for s in ACTIVATION_SCALES) if n in checkpoint), None)
        if name is None:
            found.missing.append(source.label)
            continue
        values = seen[name] if name in seen else checkpoint.read(name).float().reshape(-1)
        seen[name] = values
        wrong = values[~(values.isfinite() & (values > 0))].tolist()
        if wrong:
            said = f"{source.label}: {name} is {wrong[0]:g}, allowed are finite and positive numbers"
            found.problems.append(BadScaleError(said))
            continue
        own = float((values.reciprocal() if name.endswith("_global_scale") else values).max())
        (found.down if which == "down" else found.gate_up).append(own)
        if which == "up" and gate and abs(own - gate) > _AGREE * max(own, gate):
            found.unequal.append(source.label)
            if stored[0].storage == "compressed-tensors":
                said = f"{source.label}: {name} is {own:g}, that of gate is {gate:g}; they share one input"
                found.problems.append(BadScaleError(said))
        gate = own if which == "gate" else 0.0
    return found


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
        [_OF.get(form.name) for form in stored],
        "take fp8_token or nvfp4, which find the scales of each row",
    )
    lacking = [form.name for form, name in zip(stored, names, strict=True) if name is None]
    if lacking:
        which = f"{sources[0].label} is {lacking[0]}, whose checkpoints have no static scales of activations"
        if len(lacking) == 1 and stored[0].name != stored[1].name:
            which = f"one of its projections is {lacking[0]}, whose checkpoints have no static scales of activations"
        raise InputError(f"{asked}: {which}, allowed: {', '.join(_OF)}; {instead}")
    found = activation_scales(checkpoint, sources, stored)
    refuse(checkpoint, found.problems)
    if found.missing:
        raise MissingTensorError(
            f"{asked}: {found.missing[0]} has no {ACTIVATION_SCALES[0]}, and {len(found.missing) - 1} more of "
            f"{len(sources)} have none; all need one; {instead}"
        )
    first, second = (activation_format(str(name)).most for name in names)
    return max(found.gate_up) * first, max(found.down) * second
