"""Tokens that arrive as E4M3 codes with scales, as engines quantise them before the experts.

Shape letters: T tokens, H width, G groups of columns that share a scale.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import InputError
from ..parallel import Local, Partial

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from ..experts import PackedWeights
    from ..parallel import Dispatcher
    from ..types import Routing

__all__ = ["check_quantized", "run_quantized"]


def check_quantized(codes: Tensor, dispatcher: Dispatcher, width: int, *, weight_on_input: bool) -> None:
    """Raise InputError unless ``codes`` are ``[T, H]`` and the layer can multiply codes of the caller."""
    if codes.dim() != 2 or codes.shape[1] != width:
        raise InputError(f"run_quantized: x is {tuple(codes.shape)} {codes.dtype}, allowed: (T, {width})")
    if not isinstance(dispatcher, Local | Partial):
        raise InputError(
            f"run_quantized: the dispatcher is {type(dispatcher).__name__}, which quantises tokens itself before it "
            "sends them; pass them unquantised, or plan with Overrides(dispatcher='partial')"
        )
    if weight_on_input:
        raise InputError(
            "run_quantized: router weights multiply the experts' input before it is quantised, and x is quantised; "
            "pass tokens, or plan with RoutingSpec(weight_on_input=False)"
        )


def run_quantized(
    experts: PackedWeights,
    dispatcher: Local | Partial,
    tokens: tuple[Tensor, Tensor, torch.dtype],
    routing: Routing,
    out: Tensor,
    *,
    middle_scale: Tensor | None = None,
    after_expert: Callable[[Tensor], Tensor] | None = None,
    shared: Tensor | None = None,
) -> None:
    """Write ``out [T, H]``: the weighted sums for ``tokens``, plus ``shared [T, H]``, rounded once.

    tokens: codes ``[T, H]`` float8_e4m3fn, their scales ``[T, G]`` float32, and the dtype they stand for.
    middle_scale: as in ``ContiguousBatch``. The memory is fresh.
    """
    codes, scale, dtype = tokens
    rows = dispatcher.rows(*routing.topk_ids.shape)
    block_t = experts.tiling.block_t(rows) if codes.is_cuda else ()
    batch, handle = dispatcher.dispatch(codes, routing, block_t=block_t)
    result = experts.run(replace(batch, scale=scale, dtype=dtype, middle_scale=middle_scale))
    if after_expert is not None:
        result = after_expert(result)
    dispatcher.combine(result, handle, dtype=out.dtype, shared=shared, out=out)
