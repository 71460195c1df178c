"""Weights of four bits, and integers of eight, decoded to 16 bits and multiplied by 16-bit activations on a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ...formats.int4_group import Int4Group
from ...formats.int_affine import Int4Affine, Int4Ordered, Int8Affine, Int8Ordered
from ...formats.mxfp4 import MxFp4
from ...formats.nvfp4 import NvFp4
from .lanes import column_order, pack_int, pack_mxfp4, pack_nvfp4, with_part
from .layout import Int4Lanes, Int8Lanes, MxFp4Lanes, NvFp4Lanes
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

__all__ = ["TritonW4A16", "TritonW8A16"]

_PACKERS: dict[type, Callable[[Any, Tensor | None], PackedMatrix]] = {
    MxFp4: pack_mxfp4,
    NvFp4: pack_nvfp4,
    Int4Group: pack_int,
    Int4Affine: pack_int,
    Int8Affine: pack_int,
    Int4Ordered: pack_int,
    Int8Ordered: pack_int,
}


class TritonW4A16(TritonKernel):
    """Four-bit weights whose products with 16-bit activations are exact before the float32 sum."""

    name = "triton_w4a16"
    layouts_of: ClassVar[dict[str, Callable[..., Layout]]] = {
        "mxfp4": MxFp4Lanes,
        "nvfp4": NvFp4Lanes,
        "int4_group": Int4Lanes,
        "int4_affine": partial(Int4Lanes, zeroed=True),
        "int4_ordered": partial(Int4Lanes, zeroed=True),
    }

    def refuse(self, problem: ExpertsProblem) -> str | None:
        """Refuse other weights, activations that are not the 16-bit input itself, and machines Triton cannot serve."""
        weights, asked, dtype = problem.weight_format, problem.activation_format, problem.dtype
        if weights not in self.layouts_of:
            return f"asked for {weights} weights; it takes {', '.join(self.layouts_of)}"
        allowed = ("bf16", "fp16") if weights.startswith("int") else ("bf16",)
        if asked != dtype or dtype not in allowed:
            taken = " or ".join(allowed)
            return f"asked for {asked} activations and {dtype} input; with {weights} it takes {taken} for both"
        return refuse_machine(problem)

    def layout_of(self, problem: ExpertsProblem, machine: Machine) -> Callable[..., Layout]:
        """Return the layout that ``pack`` gives the weights of ``problem``.

        Integers are taken to have 16-bit scales of 128 columns, the commonest; ``pack`` alone sees others.
        """
        return self.layouts_of[problem.weight_format]

    def pack(self, weights: ExpertWeights[Any], problem: ExpertsProblem) -> PackedExperts:
        """Re-lay the codes, a few rows at a time; InputError for groups or scales the kernel cannot take."""
        if isinstance(weights.gate_up, Int4Ordered | Int8Ordered):
            weights = _rows_moved(weights)
        made = pack_both(_PACKERS[type(weights.gate_up)], weights, problem)
        return replace(made, down=replace(made.down, order=None))


def _rows_moved(weights: ExpertWeights[Any]) -> ExpertWeights[Any]:
    """Return weights whose first product writes its columns in the order in which the second one reads them."""
    order = column_order(with_part(weights.down))

    def moved(tensor: Tensor) -> Tensor:
        return torch.stack([own.index_select(1, at) for own, at in zip(tensor, order, strict=True)])

    gate_up, bias = weights.gate_up, weights.gate_up_bias
    gate_up = replace(gate_up, **{name: moved(getattr(gate_up, name)) for name in gate_up.by_row})
    return replace(weights, gate_up=gate_up, gate_up_bias=None if bias is None else moved(bias))


class TritonW8A16(TritonW4A16):
    """The same for integers of eight bits."""

    name = "triton_w8a16"
    layouts_of: ClassVar[dict[str, Callable[..., Layout]]] = {
        "int8_affine": partial(Int8Lanes, zeroed=True),
        "int8_ordered": partial(Int8Lanes, zeroed=True),
    }
