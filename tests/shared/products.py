"""What a grouped product and its columns are, expert by expert in float32.

Shape letters: T tokens, R rows, E experts, P parts (2: gate and up; 1), N outputs of a part, K inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from collegium.ops.activation import activate

if TYPE_CHECKING:
    from torch import Tensor

    from collegium import ActivationSpec


def grouped_gemm_reference(
    x: Tensor,
    weight: Tensor,
    expert_offsets: Tensor,
    *,
    source: Tensor | None = None,
    bias: Tensor | None = None,
    activation: ActivationSpec | None = None,
) -> Tensor:
    """Return ``[R, N]`` float32: row r of expert e is ``activation(x[source[r]] @ weight[e].T + bias[e])``.

    x ``[T, K]`` and weight ``[E, P, N, K]`` floating, multiplied in float32; bias ``[E, P, N]``. Without an
    activation P is 1. Rows no expert owns are zero. Reads the offsets on the host.
    """
    experts, parts, n_out, k_in = weight.shape
    index = torch.arange(x.shape[0], device=x.device) if source is None else source
    out = torch.zeros(index.numel(), n_out, device=x.device)
    offsets: list[int] = expert_offsets.tolist()
    for expert in range(experts):
        span = slice(offsets[expert], offsets[expert + 1])
        product = x[index[span]].float() @ weight[expert].float().reshape(parts * n_out, k_in).T
        product = product.view(-1, parts, n_out)
        if bias is not None:
            product = product + bias[expert].float()
        out[span] = product[:, 0] if activation is None else activate(product, activation)
    return out


def in_columns_reference(x: Tensor, order: Tensor, experts: Tensor, source: Tensor) -> Tensor:
    """Return ``[R, K]``: row r is ``x[source[r]]`` at columns ``order[experts[r]]``."""
    return x.index_select(0, source).gather(1, order.index_select(0, experts).long())
