"""MXFP4, NVFP4 and INT4 experts on a GPU: codes decoded exactly to BF16 in registers, BF16 activations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...formats.int4_group import Int4Group
from ...formats.mxfp4 import MxFp4
from ...formats.nvfp4 import NvFp4
from .lanes import pack_int4, pack_mxfp4, pack_nvfp4
from .layout import Int4Lanes, MxFp4Lanes, NvFp4Lanes
from .packed import pack_both
from .tiling import TritonKernel, refuse_machine

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ...problem import ExpertsProblem
    from ...runtime.machine import Machine
    from ...types import ExpertWeights
    from .layout import Layout
    from .matrix import PackedMatrix
    from .packed import PackedExperts

__all__ = ["TritonW4A16"]

_LAYOUTS = {"mxfp4": MxFp4Lanes, "nvfp4": NvFp4Lanes, "int4_group": Int4Lanes}
_PACKERS: dict[type, Callable[[Any, Tensor | None], PackedMatrix]] = {
    MxFp4: pack_mxfp4,
    NvFp4: pack_nvfp4,
    Int4Group: pack_int4,
}


class TritonW4A16(TritonKernel):
    """Four-bit weights whose products with BF16 activations are exact before the float32 sum."""

    name = "triton_w4a16"

    def refuse(self, problem: ExpertsProblem) -> str | None:
        """Refuse other weights, other activations than BF16, and machines Triton cannot serve."""
        weights, asked = problem.weight_format, problem.activation_format
        if weights not in _LAYOUTS:
            return f"asked for {weights} weights; it takes {', '.join(_LAYOUTS)}"
        if asked != "bf16" or problem.dtype != "bf16":
            return f"asked for {asked} activations and {problem.dtype} input; it takes bf16 for both"
        return refuse_machine(problem)

    def layout_of(self, problem: ExpertsProblem, machine: Machine) -> type[Layout]:
        """Return the layout that ``pack`` gives the weights of ``problem``.

        INT4 is taken to have bfloat16 scales of 128 columns, the commonest; ``pack`` alone sees smaller groups.
        """
        return _LAYOUTS[problem.weight_format]

    def pack(self, weights: ExpertWeights[Any], problem: ExpertsProblem) -> PackedExperts:
        """Re-lay the codes, a few rows at a time; InputError for INT4 groups the kernel cannot step through."""
        return pack_both(_PACKERS[type(weights.gate_up)], weights, problem)
