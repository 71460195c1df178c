"""BF16 and FP16 experts on a GPU: weights are used where they lie, one grouped product a projection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...runtime.machine import machine_at
from .lanes import pack_plain
from .layout import PlainBf16, PlainFp16, shapes
from .packed import PackedExperts
from .tiling import TritonKernel, refuse_machine

if TYPE_CHECKING:
    from ...formats.unquantised import Bf16, Fp16
    from ...problem import ExpertsProblem
    from ...runtime.machine import Machine
    from ...types import ExpertWeights
    from .layout import Layout, Sizes

__all__ = ["TritonBf16"]

_LAYOUTS = {"bf16": PlainBf16, "fp16": PlainFp16}


class TritonBf16(TritonKernel):
    """Weights and activations in one 16-bit dtype, sums in float32; portable to every GPU from Ampere on."""

    name = "triton_bf16"

    def refuse(self, problem: ExpertsProblem) -> str | None:
        """Refuse other weights than those of the layer's own 16-bit dtype, and machines Triton cannot serve."""
        weights, asked = problem.weight_format, problem.activation_format
        if weights not in _LAYOUTS:
            return f"asked for {weights} weights; it takes bf16 or fp16"
        if not weights == problem.dtype == asked:
            return (
                f"asked for {weights} weights, {asked} activations and {problem.dtype} input; it takes one 16-bit "
                "dtype for all three"
            )
        return refuse_machine(problem)

    def layouts(self, sizes: Sizes, machine: Machine) -> tuple[Layout, Layout]:
        """Return the layouts of gate_up and down that ``pack`` gives weights of these sizes."""
        kind = _LAYOUTS[sizes.weight_format]
        gate_up, down = shapes(sizes)
        return kind(shape=gate_up), kind(shape=down)

    def pack(self, weights: ExpertWeights[Bf16 | Fp16], problem: ExpertsProblem) -> PackedExperts:
        """Keep the weights; copies only what is not contiguous."""
        return PackedExperts(
            gate_up=pack_plain(weights.gate_up.values, weights.gate_up_bias),
            down=pack_plain(weights.down.values.unsqueeze(1), weights.down_bias),
            activation=problem.activation,
            machine=machine_at(weights.down.device),
        )
