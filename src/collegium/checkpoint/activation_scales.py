"""Static activation scales: read by the audit, used by nothing, since activations are quantised as they come.

A checkpoint whose scales contradict each other was exported wrongly, and its weights are not to be trusted either.
"""

import math

from ..errors import BadScaleError, CheckpointError
from .opened import CheckpointLayer

__all__ = ["ACTIVATION_SCALES", "check_activation_scales"]

ACTIVATION_SCALES = (".input_scale", ".input_global_scale", "_input_scale")
_AGREE = 1e-5  # relative; gate and up read one input, so compressed-tensors gives both one scale


def check_activation_scales(layer: CheckpointLayer) -> tuple[list[CheckpointError], list[str]]:
    """Return problems (not finite and positive; unequal where the storage wants one scale) and findings."""
    checkpoint, found = layer.checkpoint, layer.found.single
    problems: list[CheckpointError] = []
    unequal = 0
    for (expert, which), parts in found.items():
        for suffix in ACTIVATION_SCALES:
            if suffix not in parts:
                continue
            own = float(checkpoint.read(parts[suffix].name).float().max())
            where = f"layer {layer.number}, expert {expert}, {which}: {parts[suffix].name} is {own:g}"
            if not 0 < own < math.inf:
                problems.append(BadScaleError(f"{where}, allowed are finite and positive numbers"))
            gate = found.get((expert, "gate"), {}).get(suffix) if which == "up" else None
            other = own if gate is None else float(checkpoint.read(gate.name).float().max())
            if abs(own - other) > _AGREE * max(own, other):
                unequal += 1
                if layer.stored.storage == "compressed-tensors":
                    problems.append(BadScaleError(f"{where}, that of gate is {other:g}; they share one input"))
    if not unequal:
        return problems, []
    have = f"gate and up of {unequal} experts have different static activation scales, which are not used"
    return problems, [f"layer {layer.number}: {have}"]
