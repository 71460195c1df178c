"""Float32 arithmetic for bfloat16 dense layers on a CPU without bfloat16 instructions."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["WideLinear", "widen"]

# From this number of rows on, torch's bfloat16 product is slower than conversion and float32 product on a CPU with AVX2
# alone; at 512 rows by more than a factor of five (benchmarks/results/cpu-dense.csv).
_ROWS = 12
_TILE = 1 << 22  # weights that are converted at once


class WideLinear(nn.Linear):
    """A linear layer that multiplies many bfloat16 rows in float32 and rounds the result once, as torch does."""

    @classmethod
    def sharing(cls, linear: nn.Linear) -> "WideLinear":
        """Return a module with the attributes of ``linear`` (parameters, hooks, training mode), not copies of them."""
        module = cls.__new__(cls)
        vars(module).update(vars(linear))
        return module

    def forward(self, input: Tensor) -> Tensor:
        """Return ``[..., N]`` in the dtype of ``input [..., K]``."""
        if input.dtype != torch.bfloat16 or input.numel() < _ROWS * self.in_features:
            return super().forward(input)
        x = input.float()
        rows_per_tile = max(1, _TILE // max(1, self.in_features))
        bias = cast("Tensor | None", self.bias)
        weight_tiles = self.weight.split(rows_per_tile)
        bias_tiles = [None] * len(weight_tiles) if bias is None else bias.float().split(rows_per_tile)
        outputs = [
            functional.linear(x, weight_tile.float(), bias_tile).to(input.dtype)
            for weight_tile, bias_tile in zip(weight_tiles, bias_tiles, strict=True)
        ]
        return torch.cat(outputs, dim=-1)


def widen(model: nn.Module) -> None:
    """Replace the bfloat16 ``nn.Linear`` submodules of ``model`` by ``WideLinear`` on a CPU with AVX2 alone.

    Subclasses of ``nn.Linear`` are left alone. A module that occurs in several places is replaced by one module.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX2":
        return
    replacements: dict[nn.Module, WideLinear] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and _is_cpu_bfloat16(child):
                if child not in replacements:
                    replacements[child] = WideLinear.sharing(child)
                setattr(parent, name, replacements[child])


def _is_cpu_bfloat16(linear: nn.Linear) -> bool:
    return linear.weight.device.type == "cpu" and linear.weight.dtype == torch.bfloat16
