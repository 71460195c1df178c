"""FP8 experts on a GPU: E4M3 products with E4M3 activations, or decoded to BF16 for BF16 activations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...runtime.machine import machine_at
from .lanes import pack_fp8_block, pack_fp8_rows, pack_mxfp8, with_part
from .packed import PackedExperts, refuse_machine, run_experts, temporary_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from ...problem import Problem
    from ...types import ContiguousBatch, ExpertWeights
    from .grouped import PackedMatrix

__all__ = ["TritonFp8"]

_WEIGHTS = ("fp8_block", "fp8_tensor", "fp8_channel", "mxfp8")
_CODES = ("fp8_group128", "fp8_group128_pow2", "fp8_token")


class TritonFp8:
    """FP8 weights with block, channel, tensor or MX scales; the activation format decides how they multiply."""

    name = "triton_fp8"
    capturable = True

    def refuse(self, problem: Problem) -> str | None:
        """Refuse other weights and activations, and GPUs whose tensor cores lack what was asked for."""
        weights, asked = problem.spec.weight_format, problem.activation_format or problem.dtype
        if weights not in _WEIGHTS:
            return f"asked for {weights} weights; it takes {', '.join(_WEIGHTS)}"
        if asked == "bf16" and problem.dtype == "bf16":
            return refuse_machine(problem)
        if asked not in _CODES or weights == "mxfp8":
            taken = "bf16 with bf16 input" + ("" if weights == "mxfp8" else f", or one of {', '.join(_CODES)}")
            return f"asked for {asked} activations, {weights} weights and {problem.dtype} input; it takes {taken}"
        capability = problem.device.capability
        if capability is not None and capability < (8, 9):
            found = f"sm_{capability[0]}{capability[1]}"
            return f"asked for {asked} activations on {found}; E4M3 products need sm_89 or later"
        return refuse_machine(problem)

    def workspace_bytes(self, problem: Problem) -> int:
        """The rows between the projections and their codes, the rows of the result, and the tile list."""
        return temporary_bytes(problem, codes=problem.activation_format in _CODES)

    def pack(self, weights: ExpertWeights[Any], problem: Problem) -> PackedExperts:
        """Keep the codes; only scales are re-laid. InputError for blocks that are no multiple of 128 x 128."""
        name = problem.activation_format
        native = name in _CODES
        return PackedExperts(
            gate_up=_matrix(weights.gate_up, weights.gate_up_bias, native),
            down=_matrix(with_part(weights.down), weights.down_bias, native),
            activation=problem.spec.activation,
            machine=machine_at(weights.down.device),
            activations=name if native else None,
        )

    def run(self, batch: ContiguousBatch, packed: PackedExperts) -> Tensor:
        """Return ``[R, H]``, bfloat16 for bfloat16 input and float32 otherwise; dropped rows are not written."""
        return run_experts(batch, packed)


def _matrix(payload: Any, bias: Tensor | None, native: bool) -> PackedMatrix:
    if payload.name == "mxfp8":
        return pack_mxfp8(payload, bias)
    if payload.name == "fp8_block":
        return pack_fp8_block(payload, bias, native=native)
    return pack_fp8_rows(payload, bias, native=native)
