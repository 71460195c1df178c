"""Rows of tokens times one weight; the bits of a row follow from that row and the weight alone.

As in grouped_gemm.py the tensor core multiplies weights [BLOCK_N, K] by tokens [K, BLOCK_T]: each token is a separate
column, and tiles of any number of tokens use the same instructions. A float32 operand is split into three bfloat16
terms that add up to it. Products of terms are added smallest first; those below 2**-25 of the largest do not change a
float32 sum and are left out.

The order of a sum follows from N and K alone. The tensor core truncates where it should round, so it sums no more than
one block of BLOCK_K columns. Blocks are added in float32 to parts of ``SumOrder.part_blocks`` blocks, and parts in
order: by ``add_parts_kernel`` or ``gate_rows_kernel`` where a program computes one part, otherwise by the program,
which computes them all.
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
    x,
    weight,
    addend,
    out,
    tokens,
    n_out,
    k_in,
    TERMS: tl.constexpr,
    ADDED: tl.constexpr,
    ORDER: tl.constexpr,
    TILE: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write ``out [tokens, n_out]``, ``x [tokens, k_in]`` times ``weight [n_out, k_in]`` plus ``addend``.

    x, addend: ``MatrixRows``. ADDED: whether there is an addend. With ``ORDER.split`` a program computes one part, out
    is float32 ``[parts, tokens, n_out]``, and nothing is added. TERMS: as in ``_product``. ORDER: ``SumOrder``. TILE:
    ``LinearTile``.
    """
    if PDL:
        gdc_wait()
    t_first = tl.program_id(0).to(tl.int64) * TILE.block_t
    n_first = tl.program_id(1).to(tl.int64) * TILE.block_n
    part_number = tl.program_id(2).to(tl.int64)
    t = tl.arange(0, TILE.block_t)
    n = tl.arange(0, TILE.block_n)
    k_first = tl.program_id(2) * (ORDER.program_blocks * TILE.block_k)
    k = k_first + tl.arange(0, TILE.block_k)
    valid = (t < tokens - t_first)[None, :]
    # Rows past the end of the weight read its last row again; they are not stored.
    row = n_first + tl.minimum(n, n_out - 1 - n_first)
    x_ptr = x.rows + (t_first + t)[None, :] * x.stride + k[:, None]
    w_ptr = weight + row[:, None] * k_in + k[None, :]
    total, part = _sum_over_k(x_ptr, w_ptr, valid, k_in - k_first, TERMS, ORDER, TILE, ASM)
    if PDL:
        gdc_launch_dependents()
    total += part
    inside = valid & (n < n_out - n_first)[:, None]
    column = (n_first + n)[:, None]
    if ADDED:
        addend_ptr = addend.rows + (t_first + t)[None, :] * addend.stride + column
        total += tl.load(addend_ptr, mask=inside, other=0.0).to(tl.float32)
    out_ptr = out + (part_number * tokens + t_first + t)[None, :] * n_out + column
    tl.store(out_ptr, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sum_over_k(
    x_ptr,
    w_ptr,
    valid,
    columns,
    TERMS: tl.constexpr,
    ORDER: tl.constexpr,
    TILE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return the sum of all parts of a program but the last, and the last part, both ``[BLOCK_N, BLOCK_T]``.

    x_ptr, w_ptr: the first blocks, ``[BLOCK_K, BLOCK_T]`` and ``[BLOCK_N, BLOCK_K]``. valid: ``[1, BLOCK_T]``, tokens
    that exist. columns: of K from the first block on.
    """
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_T: tl.constexpr = TILE.block_t
    k = tl.arange(0, TILE.block_k)
    total = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    part = total
    for block in tl.range(0, ORDER.program_blocks, num_stages=TILE.stages):
        left = columns - block * TILE.block_k
        x_block = tl.load(x_ptr, mask=valid & (k < left)[:, None], other=0.0)
        w_block = tl.load(w_ptr, mask=(k < left)[None, :], other=0.0)
        product = _product(w_block, x_block, TERMS, ASM)
        starts_part = block % ORDER.part_blocks == 0
        if not ORDER.split:
            total = tl.where(starts_part, total + part, total)
        part = tl.where(starts_part, product, part + product)
        x_ptr += TILE.block_k
        w_ptr += TILE.block_k
    return total, part


@triton.jit(do_not_specialize=["tokens"])
def add_parts_kernel(
    sums,
    addend,
    out,
    tokens,
    n_out,
    PARTS: tl.constexpr,
    ADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write ``out [tokens, n_out]``: the parts of ``sums [PARTS, tokens, n_out]`` in order, then ``addend``.

    addend: ``MatrixRows``. ADDED: whether there is an addend. A program computes BLOCK columns of one token.
    """
    pdl_wait(PDL)
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < n_out
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(sums + (token + tl.cast(tokens, tl.int64) * part) * n_out + column, mask=inside, other=0.0)
    if ADDED:
        total += tl.load(addend.rows + token * addend.stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * n_out + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def gate_rows_kernel(
    sums,
    rows,
    out,
    tokens,
    width,
    row_stride,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write ``out [tokens, width]`` float32: each of ``rows`` times the sigmoid of its logit.

    A logit is the parts of ``sums [PARTS, tokens]`` added in order. The sigmoid is evaluated in float64 and rounded
    once to float32, as ``ops/linear.py`` defines it. A program computes BLOCK columns of one token.
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
