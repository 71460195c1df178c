"""Dense layers in bfloat16 on a CPU that has no instructions for it."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["WideLinear", "widen"]

# From here on torch takes longer in bfloat16 than in float32, with the conversion, on a CPU with AVX2 alone, at 512
# rows more than five times as long (benchmarks/results/cpu-dense.csv).
_ROWS = 12
_TILE = 1 << 22  # weights that are converted at once


class WideLinear(nn.Linear):
    """Multiply many rows of bfloat16 in float32, and round the results once, as torch does."""

    def forward(self, input: Tensor) -> Tensor:
        """Return ``[..., N]`` in the dtype of ``input [..., K]``."""
        if input.dtype != torch.bfloat16 or input.numel() < _ROWS * self.in_features:
            return super().forward(input)
        x, step, bias = input.float(), max(1, _TILE // max(1, self.in_features)), cast("Tensor | None", self.bias)
        weights = self.weight.split(step)
        biases = [None] * len(weights) if bias is None else bias.float().split(step)
        pairs = zip(weights, biases, strict=True)
        return torch.cat([functional.linear(x, own.float(), more).to(input.dtype) for own, more in pairs], dim=-1)


def widen(model: nn.Module) -> None:
    """Have the plain dense layers of ``model`` on a CPU with AVX2 alone multiply as ``WideLinear`` does."""
    if torch.backends.cpu.get_cpu_capability() != "AVX2":
        return
    for module in model.modules():
        if type(module) is nn.Linear and (module.weight.device.type, module.weight.dtype) == ("cpu", torch.bfloat16):
            module.__class__ = WideLinear
