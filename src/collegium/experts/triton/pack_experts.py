"""Packing of both matrices of a layer's experts."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...formats.int_affine import Int4Ordered, Int8Ordered
from ...problem import ExpertsProblem
from ...runtime.machine import machine_at
from ...types import ExpertWeights
from ..base import require_expert_reach
from .matrix import PackedMatrix, RangeReport
from .packed import PackedExperts
from .packing import add_projection_dim, column_order
from .tiling import operand_format

__all__ = ["Packer", "pack_both"]

Packer = Callable[[Any, Tensor | None], PackedMatrix]  # of a payload [E, P, N, K] and its bias


def pack_both(packers: tuple[Packer, Packer], weights: ExpertWeights[Any], problem: ExpertsProblem) -> PackedExperts:
    """Return the experts of ``problem``, packed by the packers of gate_up and down."""
    if isinstance(weights.gate_up, Int4Ordered | Int8Ordered):
        weights = _reorder_middle(weights)
    half = problem.activation_format == "fp16"

    def pack(packer: Packer, payload: Any, bias: Tensor | None) -> PackedMatrix:
        matrix = packer(payload, None if bias is None else bias.contiguous())
        return replace(matrix, layout=replace(matrix.layout, half=half))

    gate_up = pack(packers[0], weights.gate_up, weights.gate_up_bias)
    down = pack(packers[1], add_projection_dim(weights.down), weights.down_bias)
    form = operand_format(problem.activation_format)
    scales = None
    if form is not None and form.by_expert:
        require_expert_reach(weights, form)
        assert weights.expert_reach is not None
        reach = weights.expert_reach.to(weights.down.device)
        scales = form.expert_scales(reach[:, 0]), form.expert_scales(reach[:, 1])
    return PackedExperts(
        gate_up=gate_up,
        down=replace(down, order=None),
        activation=problem.activation,
        machine=machine_at(weights.down.device),
        activations=form,
        forced=problem.tiles,
        input_reach=weights.input_reach if form is not None and form.static else None,
        expert_scales=scales,
        report=_combine_reports(gate_up.report, down.report),
    )


def _reorder_middle(weights: ExpertWeights[Any]) -> ExpertWeights[Any]:
    """Return weights whose first product writes its columns in the order in which the second one reads them."""
    order = column_order(add_projection_dim(weights.down))

    def reorder(tensor: Tensor) -> Tensor:
        return torch.stack([expert.index_select(1, index) for expert, index in zip(tensor, order, strict=True)])

    gate_up, bias = weights.gate_up, weights.gate_up_bias
    gate_up = replace(gate_up, **{name: reorder(getattr(gate_up, name)) for name in gate_up.by_row})
    return replace(weights, gate_up=gate_up, gate_up_bias=None if bias is None else reorder(bias))


def _combine_reports(first: RangeReport | str | None, second: RangeReport | str | None) -> RangeReport | str | None:
    if isinstance(first, RangeReport) and isinstance(second, RangeReport):
        return first + second
    lines = [f"{name} {report}" for name, report in (("gate_up", first), ("down", second)) if report is not None]
    return ", ".join(lines) or None
