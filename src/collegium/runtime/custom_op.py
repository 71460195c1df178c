"""The layer as one operation of torch.library, so that torch.compile sees a single opaque step.

Packed weights are not arguments, because every kernel packs them differently. The argument is the layer's handle, a
tensor: the compiler treats it like any other input, so compiled code can serve several layers with the handle of each.
The handle's address identifies the layer, within one process and as long as the layer lives.
"""

import operator
import sys
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..errors import InputError

__all__ = ["announce", "moe_layer", "moe_layer_apart", "uncompiled_call"]


_layers: WeakValueDictionary[int, Any] = WeakValueDictionary()  # by the address of the handle


def announce(layer: Any) -> None:
    """Register ``layer``, which has ``MoELayer.compute``, for ``torch.ops.collegium.moe_layer`` under its handle."""
    _layers[layer.handle.data_ptr()] = layer


def _layer_of(handle: Tensor) -> Any:
    address = handle.data_ptr()
    layer = _layers.get(address)
    if layer is None or layer.handle.data_ptr() != address:
        raise InputError(
            "torch.ops.collegium.moe_layer: no layer of this process has this handle; a compiled graph cannot "
            "outlive its layers or move to another process, compile it again"
        )
    return layer


@torch.library.custom_op(
    "collegium::moe_layer",
    mutates_args=("out",),
    schema="(Tensor x, Tensor? router_logits, Tensor? topk_ids, Tensor? topk_weights, Tensor? token_ids, "
    "Tensor? router_input, Tensor? adapter_ids, Tensor handle, Tensor(a!) out) -> ()",
)
def moe_layer(*inputs: Any) -> None:
    """Write ``out [T, D]``, the output for ``x [T, D]`` of the layer that has ``handle``."""
    *tensors, handle, out = inputs
    _layer_of(handle).compute((*tensors, out))


@torch.library.custom_op(
    "collegium::moe_layer_apart",
    mutates_args=("outputs",),
    schema="(Tensor x, Tensor? router_logits, Tensor? topk_ids, Tensor? topk_weights, Tensor? token_ids, "
    "Tensor? router_input, Tensor? adapter_ids, Tensor handle, Tensor(a!)[] outputs) -> ()",
)
def moe_layer_apart(*inputs: Any) -> None:
    """Write ``outputs``: the routed experts' sums and the shared expert's output, which are not added."""
    *tensors, handle, outputs = inputs
    _layer_of(handle).compute((*tensors, *outputs))


@moe_layer.register_fake
@moe_layer_apart.register_fake
def _moe_layer_fake(*_: object) -> None:
    return None


_uncompiled: list[Any] = []  # ``operator.call`` wrapped by torch.compiler.disable, created when it is first needed


def uncompiled_call() -> Any:
    """Return ``operator.call``, wrapped in a process that compiles so that torch does not compile the called function.

    Once a compiled call has raised, torch no longer compiles any layer's ``forward``, and would compile the functions
    that it calls. The compiler takes a second to import; a process that has not imported it compiles nothing.
    """
    if "torch._dynamo" not in sys.modules:
        return operator.call
    if not _uncompiled:
        _uncompiled.append(torch.compiler.disable(operator.call))
    return _uncompiled[0]
