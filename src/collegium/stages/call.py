"""One call of a layer: the tensors that the caller passed, checked and reshaped to rows."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..adapters import PackedAdapters
from ..errors import InputError
from ..runtime.packed_module import check_tensors
from ..types import MoESpec, Routing
from .checks import check_rows

__all__ = ["Call", "PassedInputs", "checked_adapter_ids", "checked_call"]


class PassedInputs(NamedTuple):
    """Which optional inputs a call has; ``routing`` stands for ids and weights."""

    router_logits: bool
    routing: bool
    token_ids: bool
    router_input: bool


class Call(NamedTuple):
    """The tensors of a call, in the order of ``torch.ops.collegium.moe_layer``.

    A named tuple, because recorded launches are looked up by these tensors in every call (``runtime/replay.py``).

    x: ``[T, D]``. router_logits: ``[T, E]``. topk_ids, topk_weights: ``[T, K]``. token_ids: ``[T]``, for hash routing.
    router_input: ``[T, D]``, what the router reads instead of x. adapter_ids: ``[T]``, the adapter of each token. out:
    ``[T, D]``, or ``[T, H]`` where the routed sums are not projected back; None if only a routing is computed.
    shared_out: ``[T, D]``, where the shared expert's output is written instead of being added to ``out``; None: it is
    added.
    """

    x: Tensor
    router_logits: Tensor | None = None
    topk_ids: Tensor | None = None
    topk_weights: Tensor | None = None
    token_ids: Tensor | None = None
    router_input: Tensor | None = None
    adapter_ids: Tensor | None = None
    out: Tensor | None = None
    shared_out: Tensor | None = None

    @property
    def passed(self) -> PassedInputs:
        """Which optional inputs the call has."""
        return PassedInputs(
            router_logits=self.router_logits is not None,
            routing=self.topk_ids is not None,
            token_ids=self.token_ids is not None,
            router_input=self.router_input is not None,
        )

    @property
    def needs_router(self) -> bool:
        """Whether the layer's router, or its ``choose``, has to choose the experts without logits."""
        return self.router_logits is None and (self.topk_ids is None or self.topk_weights is None)

    def chunk(self, rows: slice, routing: Routing) -> "Call":
        """Return the call for ``rows`` of the tokens; routing: of those rows."""
        assert self.out is not None
        return Call(
            self.x[rows],
            topk_ids=routing.topk_ids,
            topk_weights=routing.topk_weights,
            adapter_ids=None if self.adapter_ids is None else self.adapter_ids[rows],
            out=self.out[rows],
            shared_out=None if self.shared_out is None else self.shared_out[rows],
        )


def checked_call(
    spec: MoESpec,
    device: torch.device,
    x: Tensor,
    *,
    router_logits: Tensor | None = None,
    routing: Routing | None = None,
    token_ids: Tensor | None = None,
    router_input: Tensor | None = None,
    out: Tensor | None = None,
) -> Call:
    """Return the call with all tensors as rows; ``check_input`` and ``output_for`` have checked x, routing and out.

    Raises InputError for both logits and a routing, and for a router input that is not like x.
    """
    if router_logits is not None and routing is not None:
        raise InputError("router_logits and routing were passed, and each determines the experts; pass one of them")
    if router_logits is not None or router_input is not None:
        check_tensors(
            device,
            router_logits=x if router_logits is None else router_logits,
            router_input=x if router_input is None else router_input,
        )
    hidden_size = spec.hidden_size
    router_rows = None
    if router_input is not None and routing is None and router_logits is None:
        router_rows = router_input.reshape(-1, hidden_size)
        check_rows("router_input", router_rows, (x.numel() // hidden_size, hidden_size))
    return Call(
        x if x.dim() == 2 else x.reshape(-1, hidden_size),
        router_logits,
        None if routing is None else routing.topk_ids,
        None if routing is None else routing.topk_weights,
        token_ids,
        router_rows,
        out=None if out is None else out.view(-1, out.shape[-1]),
    )


def checked_adapter_ids(
    adapter_ids: Tensor, tokens: int, adapters: PackedAdapters | None, device: torch.device
) -> Tensor:
    """Return ``adapter_ids [T]`` as contiguous memory; raises InputError for other shapes and dtypes.

    adapters: of the layer, which must have some.
    """
    if adapters is None:
        raise InputError("forward: adapter_ids were passed, and the layer has no adapters; call set_adapters first")
    check_tensors(device, adapter_ids=adapter_ids)
    if tuple(adapter_ids.shape) != (tokens,) or adapter_ids.dtype not in (torch.int32, torch.int64):
        raise InputError(
            f"forward: adapter_ids is {tuple(adapter_ids.shape)} {adapter_ids.dtype}, this call needs ({tokens},) "
            f"int32 or int64: for each token 0 to {adapters.count - 1}, or -1 for none"
        )
    return adapter_ids.contiguous()
