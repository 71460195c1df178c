"""Scales of FP8 activations that the caller of ``moe`` gives: for x, and for the rows between the products.

Shape letters: T tokens (E, M: experts and rows of room, where rows are packed by expert), H columns of x, I columns of
the rows between the products, G groups of 128 of those columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from ..ops.quantize import activation_format
from ..runtime.packed_module import check_tensors

__all__ = ["GivenScales", "Scale", "given_scales"]

Scale = Tensor | float
_TOKEN, _GROUP, _STATIC = "fp8_token", "fp8_group128", "fp8_static"


class GivenScales(NamedTuple):
    """How a layer for one call quantises, and its input.

    activation_format: of the plan; None: the default. codes, scale: x as ``run_quantized`` takes it; None: x is passed
    as it is. middle_scale: of the rows between the products, by token; None: they are quantised as planned.
    reach: as in ``ExpertWeights``, for static formats.
    """

    activation_format: str | None = None
    codes: Tensor | None = None
    scale: Tensor | None = None
    middle_scale: Tensor | None = None
    reach: tuple[float, float] | None = None


def given_scales(
    x: Tensor, first: Scale | None, second: Scale | None, *, intermediate_size: int, format_name: str | None
) -> GivenScales:
    """Return how ``x [..., H]``, unquantised or float8_e4m3fn, and the rows between the products are quantised.

    first: of x. second: of the rows between the products. Both: one number, ``[...]`` or ``[..., 1]`` (one per token),
    or ``[..., G]``; of x ``[E, M, H]`` also ``[E, 1, 1]``. None: computed from the rows. format_name: the activation
    format that was forced, or None. Two numbers for all rows are those of a static format and are read on the host.
    Raises InputError for float8_e4m3fn without ``first``, and for a forced format that has no such scales.
    """
    is_codes = x.dtype == torch.float8_e4m3fn
    if is_codes and first is None:
        raise InputError("moe: x is float8_e4m3fn and a1_scale is missing; pass its scales")
    if first is None and second is None:
        return GivenScales()
    check_tensors(x.device, **{name: s for name, s in (("a1_scale", first), ("a2_scale", second)) if _is_tensor(s)})
    grouped = _is_grouped(x, first) or _is_grouped(x, second)
    if _is_number(second) and not grouped and (is_codes or _is_number(first)):
        return _static(first, second, x if is_codes else None, format_name)
    name = format_name or (_GROUP if grouped else _TOKEN)
    form = activation_format(name)
    if not form.e4m3 or form.static:
        raise InputError(
            f"moe: a1_scale and a2_scale were passed for activation format {name}; allowed: fp8_token for scales per "
            "token, fp8_group128 for groups of columns, fp8_static for two numbers. Leave out activation_format"
        )
    scale = _by_row("a1_scale", first, x, x.shape[-1], form.group)
    middle_scale = _by_row("a2_scale", second, x, intermediate_size, form.group)
    if is_codes:
        return GivenScales(name, x, scale, middle_scale)
    rows = x.reshape(-1, x.shape[-1])
    given = form if scale is None else form.with_row_scales(scale.reshape(len(rows), -1))
    quantized = given.quantize(rows)
    assert quantized.scales is not None
    return GivenScales(name, quantized.codes.view(x.shape), quantized.scales.view(*x.shape[:-1], -1), middle_scale)


def _static(first: Scale | None, second: Scale | None, codes: Tensor | None, format_name: str | None) -> GivenScales:
    """Return a static format for one number for each product; codes: x, whose scales may be one per token."""
    assert first is not None
    assert second is not None
    form = activation_format(format_name or _STATIC)
    middle = float(second) * form.max_value
    if codes is None:
        return GivenScales(form.name, reach=(float(first) * form.max_value, middle))
    scale = first if isinstance(first, Tensor) else torch.tensor(first, dtype=torch.float32, device=codes.device)
    # The first number is for tokens that are not quantised yet, so any would do.
    return GivenScales(_STATIC, codes, scale, reach=(middle, middle))


def _is_tensor(scale: Scale | None) -> bool:
    return isinstance(scale, Tensor)


def _is_number(scale: Scale | None) -> bool:
    return scale is not None and (not isinstance(scale, Tensor) or scale.numel() == 1)


def _is_grouped(x: Tensor, scale: Scale | None) -> bool:
    """Whether there are several scales in a row."""
    return isinstance(scale, Tensor) and scale.dim() == x.dim() and scale.shape[-1] > 1


def _by_row(name: str, scale: Scale | None, x: Tensor, columns: int, group: int) -> Tensor | None:
    """Return scales ``[..., G]`` float32, repeated over tokens and groups; raises InputError for other shapes."""
    if scale is None:
        return None
    rows = tuple(x.shape[:-1])
    groups = -(-columns // group) if group else 1
    given = scale if isinstance(scale, Tensor) else torch.tensor(scale, dtype=torch.float32, device=x.device)
    if given.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu):
        raise InputError(f"moe: {name} is {given.dtype}; allowed: float32, bfloat16, float16, float8_e8m0fnu")
    shape = tuple(given.shape)
    if given.numel() == 1:
        given = given.reshape((1,) * (len(rows) + 1))
    elif shape == rows:
        given = given.unsqueeze(-1)
    elif shape not in ((*rows, 1), (*rows, groups)) and (len(rows) != 2 or shape != (rows[0], 1, 1)):
        each = f", {(rows[0], 1, 1)}" if len(rows) == 2 else ""
        raise InputError(
            f"moe: {name} is {shape}; allowed: one number{each}, {rows} or {(*rows, 1)}, one per token, or "
            f"{(*rows, -(-columns // 128))}, one for every 128 of {columns:,} columns"
        )
    return given.float().expand(*rows, groups).contiguous()
