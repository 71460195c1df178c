"""What the device runs for codes that look numbers up, step by step over the 32 lanes of a warp."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from collegium.kernels import decode_ptx
from ptx import LANES, WORD, run


@pytest.mark.parametrize("quarter", range(4))
def test_every_code_looks_up_its_value(quarter: int) -> None:
    made, met = torch.Generator().manual_seed(quarter), set()
    for _ in range(40):
        words = torch.randint(0, WORD + 1, (LANES,), generator=made)
        lanes = torch.randint(0, 1 << 16, (2, LANES), generator=made)
        parts = torch.randint(0, 2, (2, LANES), generator=made)
        both, flags = lanes[0] | lanes[1] << 16, (parts[0] | parts[1] << 16) * 0x1010
        found = run(decode_ptx.LOOK_UP[quarter], {"$2": both, "$3": flags, "$4": words, "$5": words})
        codes = lanes >> (4 * quarter) & 15
        wanted = words[codes + 16 * parts]
        assert torch.equal(found["$0"], wanted[0] >> 16 | wanted[1] >> 16 << 16)
        assert torch.equal(found["$1"], wanted[0] & 0xFFFF | (wanted[1] & 0xFFFF) << 16)
        met |= set(zip(codes.flatten().tolist(), parts.flatten().tolist(), strict=True))
    assert len(met) == 32
