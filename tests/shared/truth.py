"""The truth of a layer: plain float64 code that shares nothing with the library, one assignment at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from collegium.testing.compare import activate_float64

if TYPE_CHECKING:
    from torch import Tensor

    from collegium.types import ActivationSpec

__all__ = ["moe_truth"]


def moe_truth(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    activation: ActivationSpec,
    biases: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the routed experts' output in float64, one assignment at a time: ``gate_up [E, P, I, H]``."""
    out = torch.zeros(x.shape[0], down.shape[1], dtype=torch.float64)
    for token in range(x.shape[0]):
        for slot in range(topk_ids.shape[1]):
            expert = int(topk_ids[token, slot])
            if not 0 <= expert < down.shape[0]:
                continue
            both = gate_up[expert].double() @ x[token].double()
            if biases is not None:
                both = both + biases[0][expert].double()
            row = down[expert].double() @ activate_float64(both, activation)
            if biases is not None:
                row = row + biases[1][expert].double()
            out[token] += topk_weights[token, slot].double() * row
    return out
