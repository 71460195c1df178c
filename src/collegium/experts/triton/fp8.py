"""FP8 experts on a GPU: E4M3 products with E4M3 activations, or decoded to BF16 for BF16 activations."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ...formats.fp8_block import Fp8Block
from ...formats.fp8_channel import Fp8Channel
from ...formats.fp8_tensor import Fp8Tensor
from ...formats.mxfp8 import MxFp8
from .lanes import pack_fp8_block, pack_fp8_rows, pack_mxfp8
from .layout import BlockCodes, BlockLanes, MxFp8Lanes, RowCodes, RowLanes
from .packed import pack_both
from .tiling import CODES, TritonKernel, refuse_machine

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ...problem import ExpertsProblem
    from ...runtime.machine import Machine
    from ...types import ExpertWeights
    from .layout import Layout
    from .matrix import PackedMatrix
    from .packed import PackedExperts

    Packer = Callable[[Any, Tensor | None], PackedMatrix]

__all__ = ["TritonFp8"]

# Multiplied as they are, with E4M3 activations.
_NATIVE: dict[str, type[Layout]] = {"fp8_block": BlockCodes, "fp8_tensor": RowCodes, "fp8_channel": RowCodes}
_NATIVE_PACKERS: dict[type, Packer] = {
    Fp8Block: partial(pack_fp8_block, native=True),
    Fp8Tensor: partial(pack_fp8_rows, native=True),
    Fp8Channel: partial(pack_fp8_rows, native=True),
}
# Decoded, with BF16 activations.
_DECODED: dict[str, type[Layout]] = {
    "fp8_block": BlockLanes,
    "fp8_tensor": RowLanes,
    "fp8_channel": RowLanes,
    "mxfp8": MxFp8Lanes,
}
_DECODED_PACKERS: dict[type, Packer] = {
    Fp8Block: partial(pack_fp8_block, native=False),
    Fp8Tensor: partial(pack_fp8_rows, native=False),
    Fp8Channel: partial(pack_fp8_rows, native=False),
    MxFp8: pack_mxfp8,
}


class TritonFp8(TritonKernel):
    """FP8 weights with block, channel, tensor or MX scales; the activation format decides how they multiply."""

    name = "triton_fp8"

    def refuse(self, problem: ExpertsProblem) -> str | None:
        """Refuse other weights and activations, and GPUs whose tensor cores lack what was asked for."""
        weights, asked = problem.weight_format, problem.activation_format
        if weights not in _DECODED:
            return f"asked for {weights} weights; it takes {', '.join(_DECODED)}"
        if asked == "bf16" and problem.dtype == "bf16":
            return refuse_machine(problem)
        if asked not in CODES or weights not in _NATIVE:
            taken = "bf16 with bf16 input" + (f", or one of {', '.join(CODES)}" if weights in _NATIVE else "")
            return f"asked for {asked} activations, {weights} weights and {problem.dtype} input; it takes {taken}"
        return refuse_machine(problem)

    def layout_of(self, problem: ExpertsProblem, machine: Machine) -> type[Layout]:
        """Return the layout that ``pack`` gives the weights of ``problem``."""
        return (_NATIVE if problem.activation_format in CODES else _DECODED)[problem.weight_format]

    def pack(self, weights: ExpertWeights[Any], problem: ExpertsProblem) -> PackedExperts:
        """Keep the codes; only scales are re-laid. InputError for blocks that are no multiple of 128 x 128."""
        packers = _NATIVE_PACKERS if problem.activation_format in CODES else _DECODED_PACKERS
        return pack_both(packers[type(weights.gate_up)], weights, problem)
