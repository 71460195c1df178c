"""Experts modules that stand for those of a class, with the attributes of transformers' exchangeable experts."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["ExchangeableExperts", "replace_modules"]


class ExchangeableExperts(nn.Module):
    """Experts with gate rows before up rows, no biases, and parameters on the meta device."""

    is_concatenated, is_transposed = True, False
    has_bias, has_gate = False, True
    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter

    def __init__(self, gate_up: Tensor, down: Tensor, activation: Callable[[Tensor], Tensor], config: Any) -> None:
        """Take shapes and dtypes of ``gate_up [E, 2I, H]`` and ``down [E, H, I]``; config: of the text model."""
        super().__init__()
        self.config = config
        self.act_fn = activation
        for name, source in (("gate_up_proj", gate_up), ("down_proj", down)):
            stack = torch.empty(source.shape, dtype=source.dtype, device="meta")
            setattr(self, name, nn.Parameter(stack, requires_grad=False))

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up


def replace_modules(model: Any, replacement: Callable[[Any], nn.Module | None]) -> None:
    """Replace each module of ``model`` by what ``replacement`` returns for it; None: it stays."""
    for name, module in list(model.named_modules()):
        new = replacement(module)
        if new is not None:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, new)
