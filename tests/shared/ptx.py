"""The few PTX instructions that decode codes, run step by step over the lanes of a warp."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["LANES", "WORD", "halves", "paired", "run"]

LANES, WORD = 32, 0xFFFFFFFF


def paired(low: Tensor, high: Tensor) -> Tensor:
    """Return words whose halves are 16-bit numbers or integers, int64."""
    low, high = ((one if one.dtype.is_floating_point else one.to(torch.int16)).view(torch.int16) for one in (low, high))
    return (low.long() & 0xFFFF) | (high.long() & 0xFFFF) << 16


def halves(words: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the lower and the upper halves of words as numbers of ``dtype``."""
    low, high = (((words >> by & 0xFFFF) + 0x8000 & 0xFFFF) - 0x8000 for by in (0, 16))
    return low.to(torch.int16).view(dtype), high.to(torch.int16).view(dtype)


def _permuted(a: Tensor, b: Tensor, select: Tensor | int) -> Tensor:
    both = a | (b << 32)
    return sum(((both >> (8 * (select >> 4 * at & 7))) & 255) << (8 * at) for at in range(4))


def _logic(a: Tensor, b: Tensor, c: Tensor, table: int) -> Tensor:
    """Return bit 4 * a + 2 * b + c of ``table`` for each bit."""
    chosen = torch.zeros_like(a)
    for index in range(8):
        if table >> index & 1:
            chosen |= (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
    return chosen & WORD


def _asked(a: Tensor, lane: Tensor, bound: int, mask: int) -> Tensor:
    assert (bound, mask) == (31, WORD), "lanes of a whole warp"
    return a[lane & 31]


def _on_pairs(compute: Callable[..., Tensor], dtype: torch.dtype) -> Callable[..., Tensor]:
    def step(*words: Tensor) -> Tensor:
        split = [[half.double() for half in halves(word, dtype)] for word in words]
        return paired(*(compute(*own).float().to(dtype) for own in zip(*split, strict=True)))

    return step


_STEPS: dict[str, Callable[..., Tensor]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shl.b32": lambda a, by: a << by & WORD,
    "shr.u32": lambda a, by: a >> by,
    "lop3.b32": _logic,
    "prmt.b32": _permuted,
    "shfl.sync.idx.b32": _asked,
    "fma.rn.f16x2": _on_pairs(lambda a, b, c: a * b + c, torch.float16),
    "add.rn.f16x2": _on_pairs(lambda a, b: a + b, torch.float16),
    "mul.rn.f16x2": _on_pairs(lambda a, b: a * b, torch.float16),
    "fma.rn.bf16x2": _on_pairs(lambda a, b, c: a * b + c, torch.bfloat16),
}


def run(text: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the registers of all lanes after the steps of ``text``; other steps than these few are a KeyError."""
    registers = dict(inputs)
    for line in re.sub(r"//.*|[{}\n]|\.reg [^;]*;", "", text).split(";")[:-1]:
        step, into, *given = re.split(r"[ ,]+", line.strip())
        values: list[Any] = [registers[one] if one in registers else int(one, 0) for one in given]
        if step in ("lop3.b32", "mov.b32"):
            values = [torch.full((LANES,), one) if isinstance(one, int) else one for one in values[:3]] + values[3:]
        registers[into] = _STEPS[step](*values)
    return registers
