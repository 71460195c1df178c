"""BF16 and FP16 experts on a GPU: weights are used where they lie, one grouped product a projection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .lanes import pack_plain
from .layout import Plain
from .packed import pack_both
from .tiling import TritonKernel, refuse_machine

if TYPE_CHECKING:
    from ...formats.unquantised import Bf16, Fp16
    from ...problem import ExpertsProblem
    from ...runtime.machine import Machine
    from ...types import ExpertWeights
    from .layout import Layout
    from .packed import PackedExperts

__all__ = ["TritonBf16"]

_TAKEN = ("bf16", "fp16")


class TritonBf16(TritonKernel):
    """Weights and activations in one 16-bit dtype, sums in float32; portable to every GPU from Ampere on."""

    name = "triton_bf16"

    def refuse(self, problem: ExpertsProblem) -> str | None:
        """Refuse other weights than those of the layer's own 16-bit dtype, and machines Triton cannot serve."""
        weights, asked = problem.weight_format, problem.activation_format
        if weights not in _TAKEN:
            return f"asked for {weights} weights; it takes bf16 or fp16"
        if not weights == problem.dtype == asked:
            return (
                f"asked for {weights} weights, {asked} activations and {problem.dtype} input; it takes one 16-bit "
                "dtype for all three"
            )
        return refuse_machine(problem)

    def layout_of(self, problem: ExpertsProblem, machine: Machine) -> type[Layout]:
        """Return the layout that ``pack`` gives the weights of ``problem``."""
        return Plain

    def pack(self, weights: ExpertWeights[Bf16 | Fp16], problem: ExpertsProblem) -> PackedExperts:
        """Keep the weights; copies only what is not contiguous."""
        return pack_both(lambda payload, bias: pack_plain(payload.values, bias), weights, problem)
