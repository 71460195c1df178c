"""Grouped matrix product for many rows of each expert, tiles copied by the tensor memory accelerator.

A program takes output tiles in turn, each 128 tokens by two bands of 128 weight rows: gate and up of the same
channels, or 256 neighbours. On Hopper the compiler splits it into one group of warps that copies and two that
multiply 64 tokens each, so one multiplies while the other scales its product. The K loop, its blocks and its
rounding are those of ``grouped_gemm.py``: a row has the same bits through either kernel.

Weights that ``expand.py`` decoded can have a factor for each row and group of columns. They are then the first operand,
so that a thread holds two rows of a band and loads two factors, not one for each of 32 columns.
"""

import triton
import triton.language as tl
from triton import set_allocator

from . import numbers
from .activation import activate
from .scales import scaled
from .tiles import NOWHERE, dot, place_at, tile_of

__all__ = ["prefill_kernel", "set_allocator"]

NO_ACTIVATION = tl.constexpr(numbers.NO_ACTIVATION)
ROWS = tl.constexpr(numbers.ROWS)
POWER_CODES = tl.constexpr(numbers.POWER_CODES)

GROUP_SCALE = tl.constexpr(numbers.GROUP_SCALE)


def _forget_text(count: int) -> tl.constexpr:
    dead = "".join(f"@p mbarrier.inval.shared::cta.b64 [global_smem+{8 * each}];\n" for each in range(count))
    return tl.constexpr(
        "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;\n"
        + dead
        + "fence.proxy.async.shared::cta; mov.b32 $0, $1; }"
    )


_FORGET_TWO_ASM, _FORGET_THREE_ASM, _FORGET_FOUR_ASM = _forget_text(2), _forget_text(3), _forget_text(4)


@triton.jit
def _promoted(product, scale, acc, ASM: tl.constexpr):
    if ASM:
        # As an opaque instruction it stays in its place. The compiler moves its own behind the next product, and
        # the registers cannot hold two products beside two sums.
        return tl.inline_asm_elementwise(
            "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [product, scale, acc], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return acc + product * scale


@triton.jit
def _add_block(acc, x, w, x_scale, scale, SCALE: tl.constexpr, X_SCALE: tl.constexpr, ASM: tl.constexpr):
    """Add one K block: tokens ``x [BLOCK_T, BLOCK_K]`` times weights ``w [128, BLOCK_K]``."""
    if SCALE or X_SCALE == 1:
        factor = scale if X_SCALE != 1 else (scale * x_scale)[:, None] if SCALE else x_scale[:, None]
        return _promoted(dot(x, w.T, tl.zeros_like(acc), ASM), factor, acc, ASM)
    else:
        return dot(x, w.T, acc, ASM)


@triton.jit
def _add_group(acc, x, weight, row, block, factors, TERMS: tl.constexpr, ASM: tl.constexpr):
    """Add a group of columns: 128 rows of weights times tokens ``x [BLOCK_T, BLOCK_K]``, to their transpose.

    factors: addresses of a factor for each weight row. Weights are sums of two TERMS where the second ones of a group
    lie behind its first.
    """
    w = weight.load([row, block * (TERMS * x.shape[1])])
    factor = tl.load(factors)[:, None]
    product = dot(w, x.T, tl.zeros_like(acc), ASM)
    if TERMS == 2:
        product = dot(weight.load([row, (2 * block + 1) * x.shape[1]]), x.T, product, ASM)
    return _promoted(product, factor, acc, ASM)


@triton.jit
def _finished(
    acc, per_token, row_scale, bias, at, inside, X_SCALE: tl.constexpr, ROW_SCALE: tl.constexpr, BIAS: tl.constexpr
):
    if X_SCALE == 2:
        acc *= per_token[:, None]
    if ROW_SCALE:
        acc *= tl.load(row_scale + at, mask=inside, other=0.0)[None, :]
    if BIAS:
        acc += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def _store_codes(value, at, at_scale, inside, kept, ROUND: tl.constexpr, CODES: tl.constexpr):
    if ROUND:
        value = value.to(tl.bfloat16).to(tl.float32)
    value = tl.where(inside[None, :], value, 0.0)
    within, scale, finite = scaled(value, None, CODES == POWER_CODES)
    tl.store(at, within.to(at.dtype.element_ty), mask=kept[:, None] & inside[None, :])
    tl.store(at_scale, tl.where(finite, scale, float("nan")), mask=kept)


@triton.jit
def _expert_at(place, n_tiles, tile_expert, tile_row, expert_offsets, BLOCK_T: tl.constexpr):
    """Return the expert at a place of the grid, its first row, its count of rows, how many tiles are before it, and the
    place among its own.

    Token tiles that share a pass over the weights are all of one expert: if a pass went on with the next expert, the
    weights of the one it ends in would be read from memory once more.
    """
    tile = place // n_tiles
    expert = tl.load(tile_expert + tile)
    start = tl.load(expert_offsets + expert).to(tl.int32)
    rows = tl.load(expert_offsets + expert + 1).to(tl.int32) - start
    before = tile - (tl.load(tile_row + tile).to(tl.int32) - start) // BLOCK_T
    return expert, start, rows, before, place - before * n_tiles


@triton.jit
def _write_tile(
    place, x, weight, x_scale, scale, row_scale, bias, out, row_places, out_scale, expert_offsets,
    tile_expert, tile_row, n_out, k_in, scale_rows, limit, alpha, gate_bound, up_bound,
    SCALE: tl.constexpr, TERMS: tl.constexpr, X_SCALE: tl.constexpr, ROW_SCALE: tl.constexpr, BIAS: tl.constexpr,
    PARTS: tl.constexpr, KIND: tl.constexpr, HAS_LIMIT: tl.constexpr, CODES: tl.constexpr, ROUND: tl.constexpr,
    K_BLOCKS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_T: tl.constexpr, STAGES: tl.constexpr,
    PLACED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Multiply and store one place of the grid: GROUP_T token tiles of an expert by all columns, then the next."""
    BAND: tl.constexpr = 128
    SPAN: tl.constexpr = BAND if PARTS == 2 else 2 * BAND
    t = tl.arange(0, BLOCK_T)
    n = tl.arange(0, BAND)
    columns = tl.cdiv(n_out, SPAN)
    expert, start, rows, before, inside = _expert_at(place, columns, tile_expert, tile_row, expert_offsets, BLOCK_T)
    tile, n_tile = tile_of(inside, columns, tl.cdiv(rows, BLOCK_T), GROUP_T)
    n_first = n_tile * SPAN
    count = tl.minimum(rows - tile * BLOCK_T, BLOCK_T)
    corner = start + tile * BLOCK_T
    # The same number, from the list: the compiler moves where the second half of a tile is copied from by its 64 rows,
    # and would move everything else computed from that number too.
    row_first = tl.load(tile_row + before + tile).to(tl.int32)

    first = expert * PARTS * n_out + n_first
    second = first + (n_out if PARTS == 2 else BAND)
    # Rows beyond the end read a neighbour's scale; nothing of them is stored.
    row = row_first + tl.where(t < count, t, 0)
    band = n_first // BAND
    GROUPS: tl.constexpr = SCALE == GROUP_SCALE
    if GROUPS:
        factors = scale + (expert * PARTS).to(tl.int64) * K_BLOCKS * n_out + n_first
        end = n_out - 1 - n_first
        s_first = factors + tl.minimum(n, end)
        s_second = s_first + tl.cast(n_out, tl.int64) * K_BLOCKS if PARTS == 2 else factors + tl.minimum(n + BAND, end)
        a = tl.zeros((BAND, BLOCK_T), dtype=tl.float32)
        b = tl.zeros((BAND, BLOCK_T), dtype=tl.float32)
    else:
        s_first = scale + ((expert * PARTS).to(tl.int64) * scale_rows + band) * K_BLOCKS
        if PARTS == 2:
            s_second = s_first + scale_rows * K_BLOCKS
        else:
            s_second = s_first + (tl.minimum(band + 1, scale_rows - 1) - band) * K_BLOCKS
        a = tl.zeros((BLOCK_T, BAND), dtype=tl.float32)
        b = tl.zeros((BLOCK_T, BAND), dtype=tl.float32)
    xs = x_scale + row.to(tl.int64) * K_BLOCKS
    # A loop that the compiler knows to run once is taken apart, and then it cannot give copies warps of their own.
    for block in tl.range(0, tl.cdiv(k_in, BLOCK_K) if K_BLOCKS == 1 and ASM else K_BLOCKS, num_stages=STAGES):
        tokens = x.load([corner, block * BLOCK_K])
        if GROUPS:
            a = _add_group(a, tokens, weight, first, block, s_first + block * n_out, TERMS, ASM)
            b = _add_group(b, tokens, weight, second, block, s_second + block * n_out, TERMS, ASM)
        else:
            # Loaded before the products, so that their wait covers it.
            token_scale = tl.load(xs + block) if X_SCALE == 1 else 1.0
            scale_a = tl.load(s_first + block) if SCALE else 1.0
            scale_b = tl.load(s_second + block) if SCALE else 1.0
            w_a = weight.load([first, block * BLOCK_K])
            a = _add_block(a, tokens, w_a, token_scale, scale_a, SCALE, X_SCALE, ASM)
            w_b = weight.load([second, block * BLOCK_K])
            b = _add_block(b, tokens, w_b, token_scale, scale_b, SCALE, X_SCALE, ASM)
    if GROUPS:
        a = tl.trans(a)
        b = tl.trans(b)

    per_token = tl.load(x_scale + row) if X_SCALE == 2 else 1.0
    last = n_out - n_first
    columns_b = n if PARTS == 2 else n + BAND
    vector = (expert * PARTS).to(tl.int64) * n_out + n_first
    a = _finished(a, per_token, row_scale, bias, vector + n, n < last, X_SCALE, ROW_SCALE, BIAS)
    at_b = vector + (n_out if PARTS == 2 else BAND) + n
    b = _finished(b, per_token, row_scale, bias, at_b, columns_b < last, X_SCALE, ROW_SCALE, BIAS)
    kept = (t < count)[:, None]
    if PLACED:
        begins = place_at(row_places, row, PLACED)[:, None]
        at = out + begins + (n_first + n)[None, :]
        kept &= begins != NOWHERE
    else:
        at = out + (row_first + t).to(tl.int64)[:, None] * n_out + (n_first + n)[None, :]
    if PARTS == 2:
        a = activate(a, b, KIND, HAS_LIMIT, limit, alpha, gate_bound, up_bound)
    elif KIND != NO_ACTIVATION:
        a = activate(a, a, KIND, HAS_LIMIT, limit, alpha, gate_bound, up_bound)
        b = activate(b, b, KIND, HAS_LIMIT, limit, alpha, gate_bound, up_bound)
    if CODES == ROWS:
        tl.store(at, a.to(out.dtype.element_ty), mask=kept & (n < last)[None, :])
        if PARTS == 1:
            tl.store(at + BAND, b.to(out.dtype.element_ty), mask=kept & (columns_b < last)[None, :])
    else:
        groups = tl.cdiv(n_out, BAND)
        at_scale = out_scale + (row_first + t).to(tl.int64) * groups + band
        _store_codes(a, at, at_scale, n < last, t < count, ROUND, CODES)
        if PARTS == 1:
            _store_codes(b, at + BAND, at_scale + 1, columns_b < last, (t < count) & (last > BAND), ROUND, CODES)


@triton.jit
def _forget_barriers(number, STAGES: tl.constexpr):
    """Return number, after the barriers at the start of shared memory are invalid and ordered before any copy.

    Triton 3.6.0 makes barriers there that nothing uses and gives their bytes to the first weights. The hardware
    holds a barrier until it is invalidated and may write it back over what was copied there since.
    """
    tl.static_assert(STAGES >= 2 and STAGES <= 4)
    TEXT: tl.constexpr = _FORGET_TWO_ASM if STAGES == 2 else _FORGET_THREE_ASM if STAGES == 3 else _FORGET_FOUR_ASM
    return tl.inline_asm_elementwise(TEXT, "=r,r", [number], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["row_places", "expert_offsets"])
def prefill_kernel(
    x, weight, x_scale, scale, row_scale, bias, out, row_places, out_scale, expert_offsets, tile_expert, tile_row,
    tiles_used, rows, n_out, k_in, x_stride, n_step, weight_rows, scale_rows, limit, alpha, gate_bound,
    up_bound,
    SCALE: tl.constexpr, TERMS: tl.constexpr, X_SCALE: tl.constexpr, ROW_SCALE: tl.constexpr, BIAS: tl.constexpr,
    PARTS: tl.constexpr, KIND: tl.constexpr, HAS_LIMIT: tl.constexpr, CODES: tl.constexpr, ROUND: tl.constexpr,
    K_BLOCKS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_T: tl.constexpr, STAGES: tl.constexpr,
    SPECIALIZE: tl.constexpr, PLACED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Write ``out [R, n_out]``: rows of one expert times its weights, then bias and activation.

    x ``[rows, x_stride]``; weight ``[weight_rows, n_step]``, the rows of all experts and parts; both hold k_in
    numbers a row, weights of two TERMS as many of each, and read zero beyond them. x_scale: float32 ``[R, K_BLOCKS]``
    (X_SCALE 1) or ``[R, 1]`` (2). scale: float32 ``[E, PARTS, scale_rows, K_BLOCKS]``, a factor of 128 weight rows and
    a K block (BLOCK_SCALE), or ``[E, PARTS, K_BLOCKS, n_out]`` (GROUP_SCALE).
    row_scale, bias: ``[E, PARTS, n_out]``. tiles_used: one number, how many tiles there
    are. CODES: out is E4M3 and out_scale float32 ``[R, ceil(n_out / 128)]``; ROUND: what is quantised is rounded to
    bfloat16 first. Rows from expert_offsets[E] on are not written. PLACED: row r is written to element row_places[r] of
    out, which may be in a peer's memory (``place_at``).
    """
    if SPECIALIZE and ASM:
        # On a number that only the group that copies needs, so the others do without.
        rows = _forget_barriers(rows, STAGES)
    # Made here, not by the host: the compiler halves the block of tokens for the two groups, and only a descriptor it
    # sees being made shrinks with it.
    x_blocks = tl.make_tensor_descriptor(x, [rows, k_in], [x_stride, 1], [BLOCK_T, BLOCK_K])
    w_blocks = tl.make_tensor_descriptor(weight, [weight_rows, TERMS * k_in], [n_step, 1], [128, BLOCK_K])
    places = tl.load(tiles_used) * tl.cdiv(n_out, 128 if PARTS == 2 else 256)
    # Numbers known to the compiler cannot be in it: in a variable they would no longer be.
    given = (
        x_blocks, w_blocks, x_scale, scale, row_scale, bias, out, row_places, out_scale,
        expert_offsets, tile_expert, tile_row, n_out, k_in, scale_rows, limit, alpha, gate_bound, up_bound,
    )  # fmt: skip
    for place in tl.range(tl.program_id(0), places, tl.num_programs(0), warp_specialize=SPECIALIZE):
        _write_tile(
            place, *given, SCALE, TERMS, X_SCALE, ROW_SCALE, BIAS, PARTS, KIND, HAS_LIMIT, CODES, ROUND,
            K_BLOCKS, BLOCK_T, BLOCK_K, GROUP_T, STAGES, PLACED, ASM,
        )  # fmt: skip
