"""Replace MoE blocks of transformers that have no experts interface by whole Collegium layers."""

from typing import Any

import torch
from torch import Tensor, nn

from ...errors import InputError
from ...layer import MoELayer
from ...models.derived import replace_modules
from .adapters import adapter_ids_for

__all__ = ["BLOCKS", "Block", "blocks_of", "layer_summary", "replace_blocks"]

# By family: the class of the block, and whether it returns (output, router logits).
BLOCKS = {"llama4": ("Llama4TextMoe", True), "dbrx": ("DbrxFFN", False), "step3p7": ("Step3p7SparseMoeBlock", False)}


def layer_summary(layer: MoELayer) -> str:
    """Return one line for ``print(model)``: kernel, formats, number of experts and packed bytes of a layer."""
    spec, plan = layer.spec, layer.plan
    return (
        f"Collegium: kernel={plan.kernel}, weight_format={spec.weight_format}, "
        f"activation_format={plan.activation_format}, experts={spec.num_experts}, bytes={layer.nbytes:,}"
    )


class Block(nn.Module):
    """Replacement of a block of transformers: a layer with router, experts and shared expert.

    layer: a ``MoELayer``, set after the model is loaded. pair: return (output, None) instead of the output.
    """

    def __init__(self, *, pair: bool) -> None:
        """Create a block without a layer."""
        super().__init__()
        self.pair = pair
        # Not a submodule: packed weights are not part of the model's state.
        vars(self)["_layer"] = None

    @property
    def layer(self) -> MoELayer:
        """The layer; raises InputError before it is set."""
        if vars(self)["_layer"] is None:
            raise InputError("this block has no layer yet; use load_model(), which sets one")
        return vars(self)["_layer"]

    def set_layer(self, layer: MoELayer) -> None:
        """Run ``layer`` in place of the block."""
        vars(self)["_layer"] = layer
        # A placeholder in the state_dict, as for the parameters of experts.
        self.layer_packed = nn.Parameter(torch.empty(0, device="meta"), requires_grad=False)

    def extra_repr(self) -> str:
        """Return a summary of the layer."""
        layer: MoELayer | None = vars(self)["_layer"]
        return "" if layer is None else layer_summary(layer)

    def forward(self, x: Tensor, *_: object, **__: object) -> Any:
        """Return the layer's output for ``x [..., D]``; raises InputError without a layer."""
        out = self.layer(x, adapter_ids=adapter_ids_for(self, x.numel() // x.shape[-1]))
        return (out, None) if self.pair else out


def blocks_of(model: nn.Module) -> dict[int, Block]:
    """Return the replaced blocks of a model by layer index."""
    blocks = ((name, module) for name, module in model.named_modules() if isinstance(module, Block))
    return {next(int(piece) for piece in name.split(".") if piece.isdigit()): block for name, block in blocks}


def replace_blocks(model: nn.Module) -> None:
    """Replace every block without an experts interface by a ``Block``."""
    pairs = dict(BLOCKS.values())

    def replacement(module: nn.Module) -> Block | None:
        pair = pairs.get(type(module).__name__)
        return None if pair is None else Block(pair=pair)

    replace_modules(model, replacement)
