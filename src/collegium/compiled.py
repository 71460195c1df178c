"""The layer as one operation of torch.library, so that torch.compile sees a single opaque step.

In the operation a layer is a name: its packed weights are no arguments, because every kernel packs them as it likes.
A name lives as long as its layer, in one process.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Protocol

import torch

from .errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Computes", "announce", "moe_layer"]


class Computes(Protocol):
    """A layer whose forward pass writes to a given output."""

    def compute(
        self,
        x: Tensor,
        router_logits: Tensor | None,
        topk_ids: Tensor | None,
        topk_weights: Tensor | None,
        token_ids: Tensor | None,
        out: Tensor,
    ) -> None:
        """Write ``out [T, D]`` for ``x [T, D]``; the arguments are those of ``MoELayer.forward``."""
        ...


_layers: weakref.WeakValueDictionary[str, Computes] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def announce(layer: Computes) -> str:
    """Return the name under which ``torch.ops.collegium.moe_layer`` finds ``layer``."""
    name = f"layer_{next(_numbers)}"
    _layers[name] = layer
    return name


@torch.library.custom_op(
    "collegium::moe_layer",
    mutates_args=("out",),
    schema=(
        "(Tensor x, Tensor? router_logits, Tensor? topk_ids, Tensor? topk_weights, Tensor? token_ids, str layer, "
        "Tensor(a!) out) -> ()"
    ),
)
def moe_layer(
    x: Tensor,
    router_logits: Tensor | None,
    topk_ids: Tensor | None,
    topk_weights: Tensor | None,
    token_ids: Tensor | None,
    layer: str,
    out: Tensor,
) -> None:
    """Write ``out [T, D]``, the output of the layer announced as ``layer`` for ``x [T, D]``."""
    found = _layers.get(layer)
    if found is None:
        raise InputError(
            f"torch.ops.collegium.moe_layer: no layer {layer!r} lives in this process; a compiled graph cannot "
            "outlive its layers or move to another process, compile it again"
        )
    found.compute(x, router_logits, topk_ids, topk_weights, token_ids, out)


@moe_layer.register_fake
def _moe_layer_fake(*_: object) -> None:
    return None
