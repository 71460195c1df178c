"""MXFP4, NVFP4 and INT4 experts on a GPU with E4M3 activations: codes decoded to E4M3 in registers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...runtime.machine import machine_at
from .lanes import with_part
from .layout import Int4Words, MxFp4Pairs, MxFp4Words, NvFp4Words, shapes
from .packed import PackedExperts, refuse_machine, run_experts, temporary_bytes
from .words import pack_w4a8

if TYPE_CHECKING:
    from torch import Tensor

    from ...runtime.machine import Machine
    from ...types import ContiguousBatch, ExpertWeights, Problem
    from .layout import Layout, Sizes, Words

__all__ = ["TritonW4A8"]

_LAYOUTS: dict[str, type[Words]] = {"mxfp4": MxFp4Words, "nvfp4": NvFp4Words, "int4_group": Int4Words}
_SCALED_LAYOUTS = _LAYOUTS | {"mxfp4": MxFp4Pairs}
_CODES = ("fp8_group128", "fp8_group128_pow2", "fp8_token")


class TritonW4A8:
    """Four-bit weights on FP8 tensor cores; runs only when one of the E4M3 activation formats is asked for."""

    name = "triton_w4a8"
    capturable = True

    def refuse(self, problem: Problem) -> str | None:
        """Refuse other weights, other activations than E4M3, and GPUs whose tensor cores lack E4M3."""
        weights, asked = problem.spec.weight_format, problem.activation_format or problem.dtype
        if weights not in _LAYOUTS:
            return f"asked for {weights} weights; it takes {', '.join(_LAYOUTS)}"
        if asked not in _CODES:
            return f"asked for {asked} activations; it takes {', '.join(_CODES)}"
        capability = problem.device.capability
        if capability is not None and capability < (8, 9):
            found = f"sm_{capability[0]}{capability[1]}"
            return f"asked for {asked} activations on {found}; E4M3 products need sm_89 or later"
        return refuse_machine(problem)

    def workspace_bytes(self, problem: Problem) -> int:
        """The rows between the projections and their codes, the rows of the result, and the tile list."""
        return temporary_bytes(problem, codes=True)

    def layouts(self, sizes: Sizes, machine: Machine) -> tuple[Layout, Layout]:
        """Return the layouts of gate_up and down that ``pack`` gives weights of these sizes on ``machine``.

        INT4 is taken to have bfloat16 scales of 128 columns, the commonest; ``pack`` alone sees smaller groups.
        """
        kind = (_SCALED_LAYOUTS if _scaled(machine, sizes.activation_format) else _LAYOUTS)[sizes.weight_format]
        gate_up, down = shapes(sizes)
        return kind(shape=gate_up), kind(shape=down)

    def pack(self, weights: ExpertWeights[Any], problem: Problem) -> PackedExperts:
        """Re-lay codes and scales, a few rows at a time; InputError for INT4 groups that are no multiples of 32."""
        machine = machine_at(weights.down.device)
        scaled = _scaled(machine, problem.activation_format)
        gate_up, upper = pack_w4a8(weights.gate_up, weights.gate_up_bias, scaled=scaled)
        down, lower = pack_w4a8(with_part(weights.down), weights.down_bias, scaled=scaled)
        return PackedExperts(
            gate_up=gate_up,
            down=down,
            activation=problem.spec.activation,
            machine=machine,
            activations=problem.activation_format,
            report=upper + lower,
        )

    def run(self, batch: ContiguousBatch, packed: PackedExperts) -> Tensor:
        """Return ``[R, H]``, bfloat16 for bfloat16 input and float32 otherwise; dropped rows are not written."""
        return run_experts(batch, packed)


def _scaled(machine: Machine, activations: str | None) -> bool:
    """Return whether the tensor cores decode MXFP4 themselves."""
    # Triton 3.6 compiles no product that is scaled by the tensor core and again by the tokens' groups.
    return machine.scaled and activations == "fp8_token"
