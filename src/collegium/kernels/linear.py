"""Rows of tokens times one weight, where a row's bits follow from that row and the weight alone.

As in grouped_gemm.py the tensor core sees weights [BLOCK_N, K] times tokens [K, BLOCK_T]: a token is a column that
meets no other, and tiles of any number of tokens multiply in the same instructions. A float32 operand is cut into
three bfloat16 terms that add up to it. Products of terms are added smallest first, those without weight in a float32
sum (below 2**-25 of the largest) not at all.

The order of a sum follows from N and K alone. The tensor core, which cuts a sum off where it should round, adds up no
more than a block of BLOCK_K columns. Blocks are added in float32, EACH of them to a part, and parts in order:
by ``add_parts_kernel`` or ``gate_rows_kernel`` where a program makes one PART, otherwise by the program that makes
them all.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .tiles import dot, pdl_wait

__all__ = ["add_parts_kernel", "gate_rows_kernel", "linear_kernel"]


@triton.jit
def _term(value):
    """Return the bfloat16 nearest to float32 ``value``, and the rest, which is exact."""
    term = value.to(tl.bfloat16)
    return term, value - term.to(tl.float32)


@triton.jit
def _product(w, x, TERMS: tl.constexpr, ASM: tl.constexpr):
    """Return ``w [BLOCK_N, BLOCK_K]`` times ``x [BLOCK_K, BLOCK_T]`` in float32.

    TERMS: how many bfloat16 terms make up x, where w is float32; 0 where both are of one 16-bit dtype.
    """
    acc = tl.zeros((w.shape[0], x.shape[1]), dtype=tl.float32)
    if TERMS == 0:
        return dot(w, x, acc, ASM)
    w0, rest = _term(w)
    w1, rest = _term(rest)
    w2 = rest.to(tl.bfloat16)
    if TERMS == 1:
        acc = dot(w2, x, acc, ASM)
        acc = dot(w1, x, acc, ASM)
        return dot(w0, x, acc, ASM)
    x0, rest = _term(x.to(tl.float32))
    x1, rest = _term(rest)
    if TERMS == 3:
        acc = dot(w0, rest.to(tl.bfloat16), acc, ASM)
    acc = dot(w1, x1, acc, ASM)
    acc = dot(w2, x0, acc, ASM)
    acc = dot(w0, x1, acc, ASM)
    acc = dot(w1, x0, acc, ASM)
    return dot(w0, x0, acc, ASM)


@triton.jit(do_not_specialize=["tokens"])
def linear_kernel(
    x, weight, added, out, tokens, n_out, k_in, x_stride, added_stride,
    TERMS: tl.constexpr, PART: tl.constexpr, EACH: tl.constexpr, STEPS: tl.constexpr, ADDED: tl.constexpr,
    ASM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write ``out [tokens, n_out]``, ``x [tokens, k_in]`` times ``weight [n_out, k_in]`` plus ``added``.

    added: its rows are ``added_stride`` elements apart, 0 for one row that all tokens get. STEPS: blocks of K that a
    program multiplies. PART: they are one part, out is float32 ``[parts, tokens, n_out]``, and nothing is added.
    """
    if PDL:
        gdc_wait()
    t_first = tl.program_id(0).to(tl.int64) * BLOCK_T
    n_first = tl.program_id(1).to(tl.int64) * BLOCK_N
    part_number = tl.program_id(2).to(tl.int64)
    t = tl.arange(0, BLOCK_T)
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    valid = (t < tokens - t_first)[None, :]
    k_first = tl.program_id(2) * (STEPS * BLOCK_K)
    # Rows of the weight beyond its end are the last one again; nothing of them is stored.
    row = n_first + tl.minimum(n, n_out - 1 - n_first)
    x_ptr = x + (t_first + t)[None, :] * x_stride + (k_first + k)[:, None]
    w_ptr = weight + row[:, None] * k_in + (k_first + k)[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    part = total
    for step in tl.range(0, STEPS, num_stages=STAGES):
        left = k_in - k_first - step * BLOCK_K
        x_block = tl.load(x_ptr, mask=valid & (k < left)[:, None], other=0.0)
        w_block = tl.load(w_ptr, mask=(k < left)[None, :], other=0.0)
        product = _product(w_block, x_block, TERMS, ASM)
        starts = step % EACH == 0
        if not PART:
            total = tl.where(starts, total + part, total)
        part = tl.where(starts, product, part + product)
        x_ptr += BLOCK_K
        w_ptr += BLOCK_K
    if PDL:
        gdc_launch_dependents()
    total += part
    inside = valid & (n < n_out - n_first)[:, None]
    column = (n_first + n)[:, None]
    if ADDED:
        place = added + (t_first + t)[None, :] * added_stride + column
        total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    place = out + (part_number * tokens + t_first + t)[None, :] * n_out + column
    tl.store(place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def add_parts_kernel(
    sums, added, out, tokens, n_out, added_stride,
    PARTS: tl.constexpr, ADDED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write ``out [tokens, n_out]``: of ``sums [PARTS, tokens, n_out]`` the parts in order, then ``added``."""
    pdl_wait(PDL)
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < n_out
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(sums + (token + tl.cast(tokens, tl.int64) * part) * n_out + column, mask=inside, other=0.0)
    if ADDED:
        total += tl.load(added + token * added_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * n_out + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def gate_rows_kernel(
    sums, rows, out, tokens, width, row_stride,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write ``out [tokens, width]`` float32: each of ``rows`` times the sigmoid of its logit.

    A logit is the parts of ``sums [PARTS, tokens]`` added in order. The sigmoid is evaluated in float64 and rounded
    once to float32, as ``ops/linear.py`` defines it. A program owns BLOCK columns of one token.
    """
    pdl_wait(PDL)
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    logit = tl.load(sums + token)
    for part in tl.static_range(1, PARTS):
        logit += tl.load(sums + token + tl.cast(tokens, tl.int64) * part)
    factor = (1.0 / (1.0 + tl.exp(-logit.to(tl.float64)))).to(tl.float32)
    value = tl.load(rows + token * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, factor * value, mask=inside)
