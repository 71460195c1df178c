"""Blocks that hold one stack of matrices per product (JetMoE), rewritten with an experts module as other classes have.

The rewritten block has the class's router and bias; it is compared with the class on random numbers before it is used.
"""

import copy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...errors import ConfigError
from .exchangeable import ExchangeableExperts, replace_modules

__all__ = ["ParallelExperts", "ParallelExpertsBlock", "check_parallel_experts", "replace_parallel_experts"]

_CLASSES = ("JetMoeMoE",)
_HIDDEN, _INTERMEDIATE, _TOKENS = 16, 12, 32
_TOLERANCE = 2e-5  # float32 sums in another order


class ParallelExperts(ExchangeableExperts):
    """Experts of such a block. file_names: of the parameters, below the block."""

    file_names: ClassVar = {"gate_up_proj": "input_linear.weight", "down_proj": "output_linear.weight"}

    def __init__(self, block: Any, config: Any) -> None:
        """Take the experts of the class's ``block``; config: of the text model."""
        super().__init__(block.input_linear.weight, block.output_linear.weight, block.activation, config)

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Return the weighted sum ``[T, H]`` of experts for ``x [T, H]``, ids and weights ``[T, K]``."""
        output = torch.zeros_like(x)
        for expert in topk_ids.unique().tolist():
            rows, slots = torch.where(topk_ids == expert)
            out = self._apply_gate(x[rows] @ self.gate_up_proj[expert].T) @ self.down_proj[expert].T
            output.index_add_(0, rows, out * topk_weights[rows, slots, None])
        return output


class ParallelExpertsBlock(nn.Module):
    """The class's router, experts in a module, and a bias that is added to their sum."""

    def __init__(self, block: Any, experts: ParallelExperts) -> None:
        """Take the place of the class's ``block``."""
        super().__init__()
        self.class_name = type(block).__name__
        self.router = block.router
        self.bias = block.bias
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., H]`` for ``x [..., H]``."""
        flat = x.reshape(-1, x.shape[-1])
        logits = self.router(flat)[-1]
        chosen, ids = logits.topk(self.router.top_k, dim=-1)
        weights = torch.softmax(chosen, dim=-1).type_as(x)
        return self.experts(flat, ids, weights).view(x.shape) + self.bias


def replace_parallel_experts(model: Any, experts: type[ParallelExperts] = ParallelExperts) -> None:
    """Replace every block of ``model`` that has a stack of matrices for each product; experts: class of its experts."""

    def replacement(module: Any) -> nn.Module | None:
        if type(module).__name__ not in _CLASSES:
            return None
        return ParallelExpertsBlock(module, experts(module, model.config.get_text_config()))

    replace_modules(model, replacement)


def check_parallel_experts(model: Any) -> None:
    """Raise ConfigError if a small block of the class computes something else than its replacement."""
    block = next((module for module in model.modules() if type(module).__name__ in _CLASSES), None)
    if block is None:
        return
    config = copy.deepcopy(model.config.get_text_config())
    config.hidden_size, config.intermediate_size = _HIDDEN, _INTERMEDIATE
    generator = torch.Generator(device="cpu").manual_seed(0)
    with torch.no_grad(), torch.device("cpu"):
        original: Any = type(block)(config).eval()
        for parameter in original.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        replacement = ParallelExpertsBlock(original, ParallelExperts(original, config))
        replacement.experts.gate_up_proj = original.input_linear.weight
        replacement.experts.down_proj = original.output_linear.weight
        x = torch.randn(1, _TOKENS, _HIDDEN, generator=generator)
        wanted = original(x)
        difference = float("inf")
        if isinstance(wanted, Tensor):  # not output and router logits
            difference = float((replacement(x) - wanted).abs().max() / wanted.abs().max())
    if not difference <= _TOLERANCE:
        raise ConfigError(
            f"transformers' class {type(block).__name__} differs from top-k, softmax, experts and a bias by "
            f"{difference:.2e} of the largest value, allowed are {_TOLERANCE:.0e}; install a release of transformers "
            "with another version of it"
        )
