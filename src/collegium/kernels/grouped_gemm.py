"""Grouped matrix product over rows packed by expert, weights as the first operand, one kernel for every format.

A program owns BLOCK_N output columns of one expert (of gate and of up, when there are both) and one token tile of at
most BLOCK_T rows; the tensor core sees weights [BLOCK_N, K] times tokens [K, BLOCK_T], so few tokens cost little
padding. The K loop always runs forward in steps of BLOCK_K with one accumulator, whatever BLOCK_T is: a row's
bits do not depend on the rows beside it. All addresses start from 64-bit bases.

JOINED tiles multiply a K block of decoded weights as one operand where no quarter of it has a factor of its own:
products follow each other without a wait, for more registers. They add in the same order.

STACKED tiles hold half as many columns, gate and up as rows of one operand, for products with too few programs. Eight
rows of gate and eight of up take turns, so that both values of a column are in one thread.

With PDL a program may start while the last ones of the kernel before it still run, and waits for them before it reads
anything; EARLY: anything but its token tile, which was there before that kernel began. The next kernel is let in
after the K loop: earlier, its programs would crowd where this kernel leaves room.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from . import enums
from .activation import activate
from .decode import decoded, divisor, epilogue, has_minima, in_units, is_running, is_whole, joined, look_up, words_of
from .tiles import dot, halves, store_rows, tile_prologue, token_at

__all__ = ["grouped_gemm_kernel", "grouped_tile"]

PLAIN = tl.constexpr(enums.PLAIN)
E4M3_LANES = tl.constexpr(enums.E4M3_LANES)
E4M3_E4M3 = tl.constexpr(enums.E4M3_E4M3)
E2M1_LANES = tl.constexpr(enums.E2M1_LANES)
INT8_LANES = tl.constexpr(enums.INT8_LANES)
TABLE_LANES = tl.constexpr(enums.TABLE_LANES)

BLOCK_SCALE = tl.constexpr(enums.BLOCK_SCALE)

NO_ACTIVATION = tl.constexpr(enums.NO_ACTIVATION)


@triton.jit
def _load(pointers, mask, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _load_rows(pointers, valid, inside, EVEN: tl.constexpr):
    # A mask costs instructions, and a tall tile has few rows beyond its end: there they read a neighbour again.
    if pointers.shape[1] > 64:
        return _load(pointers, inside, EVEN)
    else:
        return _load(pointers, valid if EVEN else valid & inside, False)


@triton.jit
def _load_weights(pointers, k, left, WIDTH: tl.constexpr, WEIGHT: tl.constexpr, EVEN: tl.constexpr):
    w0 = _load(pointers, k < left, EVEN)
    return w0, tl.load(pointers + WIDTH) if (WEIGHT == E4M3_LANES) or (WEIGHT == INT8_LANES) else w0


@triton.jit
def _multiply(
    acc, unit, w, w1, scale, scale_step, x, sums, x_scale,
    WEIGHT: tl.constexpr, SCALE: tl.constexpr, WORDS: tl.constexpr, X_SCALED: tl.constexpr, STACKED: tl.constexpr,
    PART: tl.constexpr, WHOLE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Add one K block: weights ``w [BLOCK_N, .]`` times tokens ``x``, a tensor or one a quarter, scaled as SCALE says.

    Returns the sum and its unit, where it has one (``is_running``). WHOLE: the quarters are one product.

    x_scale: of the tokens if X_SCALED. sums ``[32, BLOCK_T]``: of the tokens' columns, where weights have minima; where
    codes look numbers up, those (``words_of``).
    """
    none = tl.zeros_like(acc)
    QUARTERS: tl.constexpr = WEIGHT != PLAIN and WEIGHT != E4M3_E4M3
    if QUARTERS:
        HALF: tl.constexpr = x[0].dtype == tl.float16
        a, f, m = decoded(w, w1, scale, scale_step, WEIGHT, SCALE, WORDS, HALF, ASM)
        FOLDED: tl.constexpr = (WEIGHT == E2M1_LANES or WEIGHT == E4M3_LANES) and SCALE != BLOCK_SCALE
        RUNNING: tl.constexpr = is_running(WEIGHT)
        if has_minima(SCALE, WORDS):
            acc, unit = dot(m[0], sums, in_units(acc, unit, m[1], ASM), ASM), m[1]
        if is_whole(SCALE, WORDS):
            product = in_units(acc, unit, f[0], ASM) if RUNNING else acc if FOLDED else none
            if WHOLE:
                product = dot(joined(a[0], a[1], a[2], a[3]), x[0], product, ASM)
            else:
                for quarter in tl.static_range(4):
                    product = dot(a[quarter], x[quarter], product, ASM)
            if RUNNING:
                acc, unit = epilogue(product, ASM), f[0]
            elif FOLDED:
                acc = epilogue(product, ASM)
            else:
                factor = tl.load(scale)
                acc += product * (factor[:, None] if STACKED else factor)
        elif WEIGHT == TABLE_LANES:
            # The columns of a scale at a time: operands of the whole block would take too many registers.
            EACH: tl.constexpr = 4 // WORDS
            for first in tl.static_range(0, 4, EACH):
                terms = ()
                for quarter in tl.static_range(first, first + EACH):
                    terms += (look_up(w, sums, PART, STACKED, quarter, HALF, ASM),)
                product = none
                for term in tl.static_range(2):
                    for at in tl.static_range(EACH):
                        product = dot(terms[at][term], x[first + at], product, ASM)
                acc += product * f[first]
        else:
            for quarter in tl.static_range(4):
                acc = dot(a[quarter], x[quarter], in_units(acc, unit, f[quarter], ASM), ASM)
                unit = f[quarter]
            acc = epilogue(acc, ASM)
    else:
        if SCALE == BLOCK_SCALE:
            # One number for the whole tile: with the tokens' scales it is a row of factors, not a matrix.
            factor = tl.load(scale)
            if X_SCALED:
                factors = factor[:, None] * x_scale[None, :] if STACKED else (factor * x_scale)[None, :]
            else:
                factors = factor[:, None] if STACKED else factor
            acc += dot(w, x[0], none, ASM) * factors
        elif X_SCALED:
            acc += dot(w, x[0], none, ASM) * x_scale[None, :]
        else:
            acc = dot(w, x[0], acc, ASM)
    return acc, unit


@triton.jit
def grouped_tile(
    x, x_scale, sums, weight, scale, row_scale, bias, expert, n_first, token, row_count,
    n_out, k_in, x_stride, n_step, k_step, part_step, scale_rows, limit, alpha, gate_bound, up_bound,
    WEIGHT: tl.constexpr, SCALE: tl.constexpr, WORDS: tl.constexpr, X_SCALE: tl.constexpr, ROW_SCALE: tl.constexpr,
    BIAS: tl.constexpr, PARTS: tl.constexpr, KIND: tl.constexpr, HAS_LIMIT: tl.constexpr, K_BLOCKS: tl.constexpr,
    EVEN_K: tl.constexpr, ASM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    DEPTH: tl.constexpr, STAGES: tl.constexpr, STACKED: tl.constexpr, JOINED: tl.constexpr, LAUNCH: tl.constexpr,
):  # fmt: skip
    """Return ``[columns, BLOCK_T]`` float32: rows ``token [BLOCK_T]`` of x times weights of an expert from n_first on.

    row_count: of the rows those that exist; the others may be any of x, and nothing of them counts. DEPTH: blocks of
    weights as stored that a step of the loop multiplies, one operand each; it divides K_BLOCKS. LAUNCH: the next
    kernel may start once the products are done. The rest is as in ``grouped_gemm_kernel``; there are BLOCK_N columns,
    or half as many where a tile is stacked.
    """
    # Accumulators: gate and up of a stacked tile share one.
    SETS: tl.constexpr = 1 if STACKED else PARTS
    n = tl.arange(0, BLOCK_N)
    if STACKED:
        channel = n // 16 * 8 + n % 8
        part = n // 8 % 2
    else:
        channel = n
        part = tl.zeros((BLOCK_N,), dtype=tl.int32)
    # Rows and columns beyond the end read a neighbour again; nothing of them is stored.
    column = tl.minimum(channel, n_out - 1 - n_first)
    matrix = expert * PARTS
    w_row = weight + matrix * part_step + n_first.to(tl.int64) * n_step + column * n_step
    if STACKED:
        w_row += part.to(tl.int64) * part_step

    t = tl.arange(0, BLOCK_T)
    QUARTERS: tl.constexpr = WEIGHT != PLAIN and WEIGHT != E4M3_E4M3
    WIDTH: tl.constexpr = BLOCK_K // 4 if QUARTERS else BLOCK_K
    k = tl.arange(0, WIDTH)
    # Rows beyond the end are not read: every program asks for the same few rows at the same time.
    valid = (t < row_count)[None, :]
    WHOLE: tl.constexpr = JOINED and QUARTERS and is_whole(SCALE, WORDS)
    PIECES: tl.constexpr = 4 if QUARTERS and not WHOLE else 1
    PIECE: tl.constexpr = BLOCK_K // PIECES
    x_k = tl.arange(0, PIECE)
    x_ptr = x + token[None, :] * x_stride + x_k[:, None]
    w_ptr = w_row[:, None] + k[None, :]
    if SCALE == BLOCK_SCALE:
        s_ptr = scale + (matrix * scale_rows + n_first // 128) * K_BLOCKS
        s_part = tl.cast(scale_rows, tl.int64) * K_BLOCKS
        s_k = 1
    else:
        s_k = n_out * WORDS
        s_part = tl.cast(s_k, tl.int64) * K_BLOCKS
        s_ptr = scale + matrix * s_part + n_first + column
    if STACKED:
        s_ptr += part * s_part
    if X_SCALE == 1:
        xs_ptr = x_scale + token * K_BLOCKS
    if has_minima(SCALE, WORDS):
        sums_ptr = sums + token[None, :] * (32 * K_BLOCKS) + tl.arange(0, 32)[:, None]

    RUNNING: tl.constexpr = is_running(WEIGHT)
    up_unit = tl.zeros((BLOCK_N, 1), dtype=tl.float32) if RUNNING else 0.0
    gate_unit = up_unit
    up = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    if SETS == 2:
        gate = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    up_ptr = w_ptr + (SETS - 1) * part_step
    us_ptr = s_ptr + (SETS - 1) * s_part
    tables = words_of(row_scale + matrix * 16, PARTS, ASM) if WEIGHT == TABLE_LANES else sums
    if DEPTH > 1:
        for step in tl.range(0, K_BLOCKS // DEPTH, num_stages=STAGES):
            # All are read before the first is multiplied.
            blocks = ()
            for at in tl.static_range(DEPTH):
                left = k_in - (step * DEPTH + at) * BLOCK_K
                tokens = (_load_rows(x_ptr + at * BLOCK_K, valid, x_k[:, None] < left, EVEN_K),)
                xs = tl.load(xs_ptr + step * DEPTH + at) if X_SCALE == 1 else 0.0
                w = _load(up_ptr + at * k_step, k[None, :] < left, EVEN_K)
                blocks += ((tokens, xs, w),)
            for at in tl.static_range(DEPTH):
                tokens, xs, w = blocks[at]
                up, up_unit = _multiply(
                    up, up_unit, w, w, us_ptr + at * s_k, n_out, tokens, tables, xs, WEIGHT, SCALE, WORDS, X_SCALE == 1,
                    STACKED, 0, WHOLE, ASM,
                )  # fmt: skip
            up_ptr += DEPTH * k_step
            us_ptr += DEPTH * s_k
            x_ptr += DEPTH * BLOCK_K
    else:
        for block in tl.range(0, K_BLOCKS, num_stages=STAGES):
            left = k_in - block * BLOCK_K
            tokens = ()
            for piece in tl.static_range(PIECES):
                at = piece * PIECE
                tokens += (_load_rows(x_ptr + at, valid, x_k[:, None] < left - at, EVEN_K),)
            xs = tl.load(xs_ptr + block) if X_SCALE == 1 else 0.0
            added = _load_rows(sums_ptr + block * 32, valid, valid, True) if has_minima(SCALE, WORDS) else tables
            if SETS == 2:
                w0, w1 = _load_weights(w_ptr, k[None, :], left, WIDTH, WEIGHT, EVEN_K or QUARTERS)
                if WHOLE:
                    # Read before gate is multiplied, and decoded while the tensor core is busy.
                    u0, u1 = _load_weights(up_ptr, k[None, :], left, WIDTH, WEIGHT, EVEN_K or QUARTERS)
                gate, gate_unit = _multiply(
                    gate, gate_unit, w0, w1, s_ptr, n_out, tokens, added, xs, WEIGHT, SCALE, WORDS, X_SCALE == 1,
                    STACKED, 0, WHOLE, ASM,
                )  # fmt: skip
                w_ptr += k_step
                s_ptr += s_k
            if SETS == 1 or not WHOLE:
                u0, u1 = _load_weights(up_ptr, k[None, :], left, WIDTH, WEIGHT, EVEN_K or QUARTERS)
            up, up_unit = _multiply(
                up, up_unit, u0, u1, us_ptr, n_out, tokens, added, xs, WEIGHT, SCALE, WORDS, X_SCALE == 1, STACKED,
                SETS - 1, WHOLE, ASM,
            )  # fmt: skip
            up_ptr += k_step
            us_ptr += s_k
            x_ptr += BLOCK_K

    if LAUNCH:
        gdc_launch_dependents()
    vector = (matrix + part) * n_out + n_first + column
    last = vector + (SETS - 1) * n_out
    if RUNNING:
        WHOLE_NUMBER: tl.constexpr = divisor(x.dtype.element_ty == tl.float16)
        up *= up_unit * WHOLE_NUMBER
        if SETS == 2:
            gate *= gate_unit * WHOLE_NUMBER
    if X_SCALE == 2:
        per_token = tl.load(x_scale + token)[None, :]
        up *= per_token
        if SETS == 2:
            gate *= per_token
    if ROW_SCALE:
        up *= tl.load(row_scale + last)[:, None]
        if SETS == 2:
            gate *= tl.load(row_scale + vector)[:, None]
    if BIAS:
        up += tl.load(bias + last).to(tl.float32)[:, None]
        if SETS == 2:
            gate += tl.load(bias + vector).to(tl.float32)[:, None]
    if STACKED:
        gate, up = halves(up, BLOCK_N, BLOCK_T)
    if KIND == NO_ACTIVATION:
        return up
    else:
        return activate(gate if PARTS == 2 else up, up, KIND, HAS_LIMIT, limit, alpha, gate_bound, up_bound)


@triton.jit
def _write_tile(
    expert, row_first, row_count, n_first,
    x, x_scale, sums, weight, scale, row_scale, bias, out, row_places, source,
    n_out, k_in, x_stride, n_step, k_step, part_step, scale_rows, limit, alpha, gate_bound, up_bound,
    WEIGHT: tl.constexpr, SCALE: tl.constexpr, WORDS: tl.constexpr, X_SCALE: tl.constexpr, ROW_SCALE: tl.constexpr,
    BIAS: tl.constexpr, GATHER: tl.constexpr, PARTS: tl.constexpr, KIND: tl.constexpr, HAS_LIMIT: tl.constexpr,
    K_BLOCKS: tl.constexpr, EVEN_K: tl.constexpr, ASM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DEPTH: tl.constexpr, STAGES: tl.constexpr, STACKED: tl.constexpr, JOINED: tl.constexpr, PLACED: tl.constexpr,
    TOP_K: tl.constexpr, PDL: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Multiply and store ``row_count`` rows, up to BLOCK_T, by an expert's weight rows from n_first on."""
    COLUMNS: tl.constexpr = BLOCK_N // 2 if STACKED else BLOCK_N
    t = tl.arange(0, BLOCK_T)
    row = row_first + tl.where(t < row_count, t, 0)
    token = token_at(row, source, GATHER, TOP_K)
    result = grouped_tile(
        x, x_scale, sums, weight, scale, row_scale, bias, expert, n_first, token, row_count,
        n_out, k_in, x_stride, n_step, k_step, part_step, scale_rows, limit, alpha, gate_bound, up_bound,
        WEIGHT, SCALE, WORDS, X_SCALE, ROW_SCALE, BIAS, PARTS, KIND, HAS_LIMIT, K_BLOCKS, EVEN_K, ASM, BLOCK_N, BLOCK_T,
        BLOCK_K, DEPTH, STAGES, STACKED, JOINED, PDL and not TOP_K,
    )  # fmt: skip
    store_rows(result, out, row_places, row, t < row_count, n_first, tl.arange(0, COLUMNS), n_out, PLACED)


@triton.jit(
    do_not_specialize=["token_tiles"],
    do_not_specialize_on_alignment=["row_places", "source", "expert_offsets", "tile_expert", "tile_row"],
)
def grouped_gemm_kernel(
    x, x_scale, sums, weight, scale, row_scale, bias, out, row_places, source, expert_offsets, tile_expert, tile_row,
    n_out, k_in, x_stride, n_step, k_step, part_step, scale_rows, token_tiles, experts, limit, alpha, gate_bound,
    up_bound,
    WEIGHT: tl.constexpr, SCALE: tl.constexpr, WORDS: tl.constexpr, X_SCALE: tl.constexpr, ROW_SCALE: tl.constexpr,
    BIAS: tl.constexpr, GATHER: tl.constexpr, PARTS: tl.constexpr, KIND: tl.constexpr, HAS_LIMIT: tl.constexpr,
    K_BLOCKS: tl.constexpr, EVEN_K: tl.constexpr, ASM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_T: tl.constexpr, NARROW: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    STACKED: tl.constexpr, JOINED: tl.constexpr, PLACED: tl.constexpr, TOP_K: tl.constexpr, EARLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write ``out [R, n_out]``: rows of one expert times its weights, then bias and activation.

    x [T or R, x_stride], read at row source[r] (GATHER) or r. x_scale: float32 [., K_BLOCKS] (X_SCALE 1) or [., 1]
    (2), 0: none. sums: of the rows' columns for weights with minima, float16 [., 32 * K_BLOCKS] (``halves_kernel``).
    weight: expert and part ``part_step`` elements apart, rows ``n_step``, K blocks ``k_step``. scale: per (expert,
    part, K block): WORDS x n_out words, or for BLOCK_SCALE [ceil(n_out / 128), K_BLOCKS]. row_scale, bias: [expert,
    part, n_out]; for TABLE_LANES row_scale is [expert, part, 16] int32. Rows from expert_offsets[E] on are not written.
    PLACED: row r is written to element row_places[r] of out, which may be in a peer's memory (``place_at``).
    NARROW: a tile of few rows is multiplied as one of half or a quarter of BLOCK_T.
    """
    expert, row_first, row_count, n_first = tile_prologue(
        n_out, token_tiles, tile_expert, tile_row, expert_offsets, experts, BLOCK_N // 2 if STACKED else BLOCK_N,
        BLOCK_T, GROUP_T, TOP_K, EARLY, PDL,
    )  # fmt: skip
    if expert < 0:
        return

    arguments = (
        expert, row_first, row_count, n_first, x, x_scale, sums, weight, scale, row_scale, bias, out, row_places,
        source, n_out, k_in, x_stride, n_step, k_step, part_step, scale_rows, limit, alpha, gate_bound, up_bound,
    )  # fmt: skip
    HALVED: tl.constexpr = 2 if NARROW else 0
    for halved in tl.static_range(HALVED + 1):
        if row_count <= BLOCK_T >> halved and (halved == HALVED or row_count > BLOCK_T >> (halved + 1)):
            _write_tile(
                *arguments, WEIGHT, SCALE, WORDS, X_SCALE, ROW_SCALE, BIAS, GATHER, PARTS, KIND, HAS_LIMIT, K_BLOCKS,
                EVEN_K, ASM, BLOCK_N, BLOCK_K, DEPTH, STAGES, STACKED, JOINED, PLACED, TOP_K, PDL, BLOCK_T >> halved,
            )  # fmt: skip
