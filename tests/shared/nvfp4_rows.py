"""NVFP4 rows by plain arithmetic that shares nothing with the library: codes, scales, and a layer of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from collegium.types import Routing

__all__ = ["emulated_experts", "quantized", "round_trip"]

NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def quantized(x: Tensor, scale: Tensor | float | None = None) -> tuple[Tensor, Tensor]:
    """Return ``code * group scale`` ``[R, K]`` and the global scale ``[R, 1]``, both float32, of finite rows ``x``.

    scale: the global scale, one number or one per row; None: that of each row.
    """
    rows, columns = x.shape
    padded = torch.zeros(rows, -(-columns // 16) * 16)
    padded[:, :columns] = x.float()
    groups = padded.view(rows, -1, 16)
    if scale is None:
        scale = (groups.abs().amax((1, 2)) / 2688.0).clamp(min=2.0**-117)
    scales = torch.as_tensor(scale, dtype=torch.float32).reshape(-1, 1).expand(rows, 1)
    group_scales = (groups.abs().amax(2) / (6.0 * scales)).clamp(2.0**-9, 448.0).to(torch.float8_e4m3fn).float()
    within = groups * (1.0 / (group_scales * scales)).unsqueeze(2)
    distance = (within.abs().clamp(max=6.0).unsqueeze(-1) - NUMBERS).abs()
    # Of two numbers as near, the one with an even code.
    distance += torch.tensor([0.0, 1e-7] * 4)
    numbers = torch.copysign(NUMBERS[distance.argmin(-1)], within) * group_scales.unsqueeze(2)
    return numbers.flatten(1)[:, :columns], scales.contiguous()


def round_trip(x: Tensor, scale: Tensor | float | None = None) -> Tensor:
    """Return what a product reads of rows ``x``, in float64."""
    numbers, scales = quantized(x, scale)
    return numbers.double() * scales.double()


def emulated_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    routing: Routing,
    *,
    scales: tuple[Tensor | float | None, Tensor | float | None] = (None, None),
) -> Tensor:
    """Return ``[T, H]`` float64 of SwiGLU experts whose rows are quantised before both products.

    scales: global scales before gate_up and before down, one number or one per expert ``[E]``, or those of each row.
    Sums are float64.
    """

    def of_expert(scale: Tensor | float | None, expert: int) -> Tensor | float | None:
        return scale[expert] if isinstance(scale, torch.Tensor) and scale.numel() > 1 else scale

    out = torch.zeros(x.shape[0], down.shape[1], dtype=torch.float64)
    for token in range(x.shape[0]):
        for slot, expert in enumerate(routing.topk_ids[token].tolist()):
            if not 0 <= expert < down.shape[0]:
                continue
            row = round_trip(x[token : token + 1], of_expert(scales[0], expert))[0]
            gate, up = gate_up[expert].double() @ row
            between = (gate / (1 + torch.exp(-gate)) * up).float()
            inner = round_trip(between[None], of_expert(scales[1], expert))[0]
            out[token] += routing.topk_weights[token, slot].double() * (down[expert].double() @ inner)
    return out
