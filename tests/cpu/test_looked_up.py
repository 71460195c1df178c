"""What the device runs for codes that look numbers up, step by step over the 32 lanes of a warp."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("triton")

from collegium.kernels import decode

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

LANES, WORD = 32, 0xFFFFFFFF


def permuted(a: Tensor, b: Tensor, select: int) -> Tensor:
    both = a | (b << 32)
    return sum(((both >> (8 * (select >> 4 * at & 7))) & 255) << (8 * at) for at in range(4))


def logic(a: Tensor, b: Tensor, c: Tensor, table: int) -> Tensor:
    """Return bit 4 * a + 2 * b + c of ``table`` for each bit."""
    chosen = torch.zeros_like(a)
    for index in range(8):
        if table >> index & 1:
            chosen |= (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
    return chosen & WORD


def asked(a: Tensor, lane: Tensor, bound: int, mask: int) -> Tensor:
    assert (bound, mask) == (31, WORD), "lanes of a whole warp"
    return a[lane & 31]


STEPS: dict[str, Callable[..., Tensor]] = {
    "shr.u32": lambda a, by: a >> by,
    "lop3.b32": logic,
    "prmt.b32": permuted,
    "shfl.sync.idx.b32": asked,
}


def run(text: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the registers of all lanes after the steps of ``text``; other steps than these few are a KeyError."""
    registers = dict(inputs)
    for line in re.sub(r"[{}\n]|\.reg [^;]*;", "", text).split(";")[:-1]:
        step, into, *given = re.split(r"[ ,]+", line.strip())
        values: list[Any] = [registers[one] if one in registers else int(one, 0) for one in given]
        if step == "lop3.b32":
            values = [torch.full((LANES,), one) if isinstance(one, int) else one for one in values[:-1]] + values[-1:]
        registers[into] = STEPS[step](*values)
    return registers


@pytest.mark.parametrize("quarter", range(4))
def test_every_code_of_both_parts_finds_its_number(quarter: int) -> None:
    made, met = torch.Generator().manual_seed(quarter), set()
    for _ in range(40):
        words = torch.randint(0, WORD + 1, (LANES,), generator=made)
        lanes = torch.randint(0, 1 << 16, (2, LANES), generator=made)
        parts = torch.randint(0, 2, (2, LANES), generator=made)
        both, flags = lanes[0] | lanes[1] << 16, (parts[0] | parts[1] << 16) * 0x1010
        found = run(decode._look_up_text(quarter), {"$2": both, "$3": flags, "$4": words, "$5": words})
        codes = lanes >> (4 * quarter) & 15
        wanted = words[codes + 16 * parts]
        assert torch.equal(found["$0"], wanted[0] >> 16 | wanted[1] >> 16 << 16)
        assert torch.equal(found["$1"], wanted[0] & 0xFFFF | (wanted[1] & 0xFFFF) << 16)
        met |= set(zip(codes.flatten().tolist(), parts.flatten().tolist(), strict=True))
    assert len(met) == 32
