"""Blocks of transformers without an experts interface: a whole layer of Collegium in their place."""

from typing import Any

import torch
from torch import Tensor, nn

from ...errors import InputError
from ...layer import MoELayer

__all__ = ["BLOCKS", "Block", "blocks_of", "described_layer", "replace_blocks"]

# Family: class of the block, and whether it returns its router's logits beside the output.
BLOCKS = {"llama4": ("Llama4TextMoe", True), "dbrx": ("DbrxFFN", False), "step3p7": ("Step3p7SparseMoeBlock", False)}


def described_layer(layer: MoELayer) -> str:
    """Return one line for ``print(model)``: kernel, formats, experts and packed bytes of a layer."""
    spec, plan = layer.spec, layer.plan
    return (
        f"Collegium: kernel={plan.kernel}, weight_format={spec.weight_format}, "
        f"activation_format={plan.activation_format}, experts={spec.num_experts}, bytes={layer.nbytes:,}"
    )


class Block(nn.Module):
    """A layer with router, experts and shared expert where a block of transformers was.

    layer: a ``MoELayer``, given after the model is loaded. pair: also return router logits, which are None.
    """

    def __init__(self, *, pair: bool) -> None:
        """Hold no layer yet."""
        super().__init__()
        self.pair = pair
        # No submodule: the packed weights are not in the model's state.
        vars(self)["_layer"] = None

    @property
    def layer(self) -> MoELayer:
        """The layer; raises InputError while there is none."""
        if vars(self)["_layer"] is None:
            raise InputError("this block has no layer yet; use load_model(), which gives it one")
        return vars(self)["_layer"]

    def hold(self, layer: MoELayer) -> None:
        """Let the layer run here."""
        vars(self)["_layer"] = layer
        # What a state_dict names in its place, as the parameters of experts are named there.
        self.layer_packed = nn.Parameter(torch.empty(0, device="meta"), requires_grad=False)

    def extra_repr(self) -> str:
        """Show what runs the layer."""
        layer: MoELayer | None = vars(self)["_layer"]
        return "" if layer is None else described_layer(layer)

    def forward(self, x: Tensor, *_: object, **__: object) -> Any:
        """Return what the layer makes of ``x [..., D]``; raises InputError without a layer."""
        out = self.layer(x)
        return (out, None) if self.pair else out


def blocks_of(model: nn.Module) -> dict[int, Block]:
    """Return the replaced blocks of a model by layer index."""
    named = ((name, module) for name, module in model.named_modules() if isinstance(module, Block))
    return {next(int(piece) for piece in name.split(".") if piece.isdigit()): block for name, block in named}


def replace_blocks(model: nn.Module) -> None:
    """Put a ``Block`` in the place of every block that has no experts interface."""
    pairs = dict(BLOCKS.values())
    for name, module in list(model.named_modules()):
        pair = pairs.get(type(module).__name__)
        if pair is not None:
            above, _, last = name.rpartition(".")
            setattr(model.get_submodule(above), last, Block(pair=pair))
