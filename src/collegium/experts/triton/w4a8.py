"""MXFP4, NVFP4 and INT4 experts on a GPU with E4M3 activations: codes decoded to E4M3 in registers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...runtime.machine import machine_at
from .lanes import with_part
from .layout import Int4Words, MxFp4Pairs, MxFp4Words, NvFp4Words
from .packed import PackedExperts
from .tiling import CODES, TritonKernel, codes_of, refuse_machine
from .words import pack_w4a8

if TYPE_CHECKING:
    from ...problem import ExpertsProblem
    from ...runtime.machine import Machine
    from ...types import ExpertWeights
    from .layout import Layout, Words

__all__ = ["TritonW4A8"]

_LAYOUTS: dict[str, type[Words]] = {"mxfp4": MxFp4Words, "nvfp4": NvFp4Words, "int4_group": Int4Words}
_SCALED_LAYOUTS = _LAYOUTS | {"mxfp4": MxFp4Pairs}


class TritonW4A8(TritonKernel):
    """Four-bit weights on FP8 tensor cores; runs only when one of the E4M3 activation formats is asked for."""

    name = "triton_w4a8"

    def refuse(self, problem: ExpertsProblem) -> str | None:
        """Refuse other weights, other activations than E4M3, and GPUs whose tensor cores lack E4M3."""
        weights, asked = problem.weight_format, problem.activation_format
        if weights not in _LAYOUTS:
            return f"asked for {weights} weights; it takes {', '.join(_LAYOUTS)}"
        if asked not in CODES:
            return f"asked for {asked} activations; it takes {', '.join(CODES)}"
        return refuse_machine(problem)

    def layout_of(self, problem: ExpertsProblem, machine: Machine) -> type[Layout]:
        """Return the layout that ``pack`` gives the weights of ``problem`` on ``machine``.

        INT4 is taken to have bfloat16 scales of 128 columns, the commonest; ``pack`` alone sees smaller groups.
        """
        layouts = _SCALED_LAYOUTS if _scaled(machine, problem.activation_format) else _LAYOUTS
        return layouts[problem.weight_format]

    def pack(self, weights: ExpertWeights[Any], problem: ExpertsProblem) -> PackedExperts:
        """Re-lay codes and scales, a few rows at a time; InputError for INT4 groups that are no multiples of 32."""
        machine = machine_at(weights.down.device)
        scaled = _scaled(machine, problem.activation_format)
        gate_up, upper = pack_w4a8(weights.gate_up, weights.gate_up_bias, scaled=scaled)
        down, lower = pack_w4a8(with_part(weights.down), weights.down_bias, scaled=scaled)
        return PackedExperts(
            gate_up=gate_up,
            down=down,
            activation=problem.activation,
            machine=machine,
            activations=codes_of(problem.activation_format),
            report=upper + lower,
        )


def _scaled(machine: Machine, activations: str) -> bool:
    """Return whether the tensor cores decode MXFP4 themselves."""
    # Triton 3.6 compiles no product that is scaled by the tensor core and again by the tokens' groups.
    return machine.scaled and activations == "fp8_token"
