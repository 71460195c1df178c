"""Grouped matrix product over rows packed by expert, weights as the first operand, one kernel for every format.

A program owns BLOCK_N output columns of one expert (of gate and of up, when there are both) and one token tile of at
most BLOCK_T rows; the tensor core sees weights [BLOCK_N, K] times tokens [K, BLOCK_T], so few tokens cost little
padding. The K loop always runs forward in steps of BLOCK_K with one accumulator, whatever BLOCK_T is: a row's
bits do not depend on the rows beside it. All addresses start from 64-bit bases.

Tiles with ``fuse_k_block`` multiply a K block of decoded weights as one operand where no quarter of it has a factor of
its own: products follow each other without a wait, for more registers. They add in the same order.

Tiles with ``interleave_gate_up`` hold half as many columns, gate and up as rows of one operand, for products with too
few programs. Eight rows of gate and eight of up alternate, so that both values of a column are in one thread.

With PDL a program may start while the last ones of the kernel before it still run, and waits for them before it reads
anything; EARLY: anything but its token tile, which was there before that kernel began. The next kernel is let in
after the K loop: earlier, its programs would crowd where this kernel leaves room.
"""

from typing import Any, NamedTuple

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
X_BLOCK_SCALE = tl.constexpr(enums.X_BLOCK_SCALE)
X_ROW_SCALE = tl.constexpr(enums.X_ROW_SCALE)

NO_ACTIVATION = tl.constexpr(enums.NO_ACTIVATION)


class _WeightRows(NamedTuple):
    """The weight rows of a tile: matrix (expert and first projection), and each row's projection and column."""

    matrix: Any
    projection: Any
    column: Any


class _Pointers(NamedTuple):
    """Where a step of the K loop reads: tokens, their scales and sums, and weights with their scales.

    gate: of interleaved projections and of products with one, the only weights are ``up``.
    """

    x: Any
    x_scale: Any
    sums: Any
    gate: Any
    gate_scale: Any
    up: Any
    up_scale: Any


@triton.constexpr_function
def _in_quarters(WEIGHT):
    """Return whether a K block of weights is decoded as four operands."""
    return WEIGHT not in (enums.PLAIN, enums.E4M3_E4M3)


@triton.constexpr_function
def _in_one(FUSE, WEIGHT, SCALE, WORDS):
    """Return whether the four operands of a K block are multiplied as one."""
    return FUSE and WEIGHT not in (enums.PLAIN, enums.E4M3_E4M3) and is_whole(SCALE, WORDS)


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
def _load_weights(pointers, k, left, FORMAT: tl.constexpr):
    """Return a K block of weights, and the second halves of lanes of two (otherwise the same again)."""
    QUARTERS: tl.constexpr = _in_quarters(FORMAT.weight)
    w0 = _load(pointers, k < left, FORMAT.even_k or QUARTERS)
    if (FORMAT.weight == E4M3_LANES) or (FORMAT.weight == INT8_LANES):
        return w0, tl.load(pointers + FORMAT.block_k // 4)
    else:
        return w0, w0


@triton.jit
def _add_decoded(
    acc,
    unit,
    w,
    w1,
    scale,
    scale_step,
    x,
    sums,
    FORMAT: tl.constexpr,
    TILE: tl.constexpr,
    PROJECTION: tl.constexpr,
    ASM: tl.constexpr,
):
    """Add a K block of weights that are decoded: ``w [BLOCK_N, .]`` times tokens ``x``, a tensor or one a quarter.

    Returns the sum and its unit, where it has one (``is_running``). sums ``[32, BLOCK_T]``: of the tokens' columns,
    where weights have minima; where codes index a table, that table (``words_of``).
    """
    HALF: tl.constexpr = x[0].dtype == tl.float16
    a, f, m = decoded(w, w1, scale, scale_step, FORMAT.weight, FORMAT.scale, FORMAT.words, HALF, ASM)
    if has_minima(FORMAT.scale, FORMAT.words):
        acc, unit = dot(m[0], sums, in_units(acc, unit, m[1], ASM), ASM), m[1]
    if is_whole(FORMAT.scale, FORMAT.words):
        return _add_with_one_factor(acc, unit, a, f, x, scale, FORMAT, TILE, ASM)
    elif FORMAT.weight == TABLE_LANES:
        return _add_table_lanes(acc, f, w, x, sums, FORMAT, TILE, PROJECTION, HALF, ASM), unit
    else:
        for quarter in tl.static_range(4):
            acc = dot(a[quarter], x[quarter], in_units(acc, unit, f[quarter], ASM), ASM)
            unit = f[quarter]
        return epilogue(acc, ASM), unit


@triton.jit
def _add_with_one_factor(acc, unit, a, f, x, scale, FORMAT: tl.constexpr, TILE: tl.constexpr, ASM: tl.constexpr):
    """Add a K block whose four operands ``a`` have one factor, or none besides what is in the operands."""
    SCALED_OPERAND: tl.constexpr = FORMAT.weight == E2M1_LANES or FORMAT.weight == E4M3_LANES
    CONTINUES: tl.constexpr = SCALED_OPERAND and FORMAT.scale != BLOCK_SCALE
    RUNNING_SCALE: tl.constexpr = is_running(FORMAT.weight)
    if RUNNING_SCALE:
        product = in_units(acc, unit, f[0], ASM)
    elif CONTINUES:
        product = acc
    else:
        product = tl.zeros_like(acc)
    if _in_one(TILE.fuse_k_block, FORMAT.weight, FORMAT.scale, FORMAT.words):
        product = dot(joined(a[0], a[1], a[2], a[3]), x[0], product, ASM)
    else:
        for quarter in tl.static_range(4):
            product = dot(a[quarter], x[quarter], product, ASM)
    if RUNNING_SCALE:
        return epilogue(product, ASM), f[0]
    elif CONTINUES:
        return epilogue(product, ASM), unit
    else:
        factor = tl.load(scale)
        return acc + product * (factor[:, None] if TILE.interleave_gate_up else factor), unit


@triton.jit
def _add_table_lanes(
    acc,
    f,
    w,
    x,
    tables,
    FORMAT: tl.constexpr,
    TILE: tl.constexpr,
    PROJECTION: tl.constexpr,
    HALF: tl.constexpr,
    ASM: tl.constexpr,
):
    """Add a K block of codes that index a table, the columns of a scale at a time.

    Operands of the whole block would take too many registers.
    """
    COUNT: tl.constexpr = 4 // FORMAT.words
    for first in tl.static_range(0, 4, COUNT):
        terms = ()
        for quarter in tl.static_range(first, first + COUNT):
            terms += (look_up(w, tables, PROJECTION, TILE.interleave_gate_up, quarter, HALF, ASM),)
        product = tl.zeros_like(acc)
        for term in tl.static_range(2):
            for quarter in tl.static_range(COUNT):
                product = dot(terms[quarter][term], x[first + quarter], product, ASM)
        acc += product * f[first]
    return acc


@triton.jit
def _add_stored(acc, w, scale, x, x_scale, FORMAT: tl.constexpr, INTERLEAVED: tl.constexpr, ASM: tl.constexpr):
    """Add a K block of weights that the tensor core takes as they are stored."""
    if FORMAT.scale == BLOCK_SCALE:
        # One number for the whole tile: with the tokens' scales it is a row of factors, not a matrix.
        factor = tl.load(scale)
        if FORMAT.x_scale == X_BLOCK_SCALE:
            factors = factor[:, None] * x_scale[None, :] if INTERLEAVED else (factor * x_scale)[None, :]
        else:
            factors = factor[:, None] if INTERLEAVED else factor
        return acc + dot(w, x, tl.zeros_like(acc), ASM) * factors
    elif FORMAT.x_scale == X_BLOCK_SCALE:
        return acc + dot(w, x, tl.zeros_like(acc), ASM) * x_scale[None, :]
    else:
        return dot(w, x, acc, ASM)


@triton.jit
def _add_block(
    acc,
    unit,
    w,
    w1,
    scale,
    scale_step,
    x,
    sums,
    x_scale,
    FORMAT: tl.constexpr,
    TILE: tl.constexpr,
    PROJECTION: tl.constexpr,
    ASM: tl.constexpr,
):
    """Add one K block: weights ``w [BLOCK_N, .]`` times tokens ``x``, scaled as FORMAT says; x_scale: of the tokens.

    Returns the sum and its unit; see ``_add_decoded``. PROJECTION: 0 for the first of the weights, 1 for up beside it.
    """
    if _in_quarters(FORMAT.weight):
        return _add_decoded(acc, unit, w, w1, scale, scale_step, x, sums, FORMAT, TILE, PROJECTION, ASM)
    else:
        return _add_stored(acc, w, scale, x[0], x_scale, FORMAT, TILE.interleave_gate_up, ASM), unit


@triton.jit
def _weight_rows(expert, n_first, n_out, PROJ: tl.constexpr, TILE: tl.constexpr):
    """Return the rows that a tile multiplies; those beyond the end are a neighbour again, and nothing is stored."""
    BLOCK_N: tl.constexpr = TILE.block_n
    n = tl.arange(0, BLOCK_N)
    if TILE.interleave_gate_up:
        channel = n // 16 * 8 + n % 8
        projection = n // 8 % 2
    else:
        channel = n
        projection = tl.zeros((BLOCK_N,), dtype=tl.int32)
    column = tl.minimum(channel, n_out - 1 - n_first)
    return _WeightRows(matrix=expert * PROJ.count, projection=projection, column=column)


@triton.jit
def _first_pointers(
    tokens,
    weights,
    strides,
    rows,
    n_first,
    token,
    n_out,
    FORMAT: tl.constexpr,
    PROJ: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the pointers of the first K block; ``_WeightRows`` rows."""
    QUARTERS: tl.constexpr = _in_quarters(FORMAT.weight)
    WIDTH: tl.constexpr = FORMAT.block_k // 4 if QUARTERS else FORMAT.block_k
    ONE: tl.constexpr = _in_one(TILE.fuse_k_block, FORMAT.weight, FORMAT.scale, FORMAT.words)
    CHUNK: tl.constexpr = FORMAT.block_k // 4 if QUARTERS and not ONE else FORMAT.block_k
    SETS: tl.constexpr = 1 if TILE.interleave_gate_up else PROJ.count
    w_row = weights.packed + rows.matrix * strides.matrix + n_first.to(tl.int64) * strides.row
    w_row += rows.column * strides.row
    if TILE.interleave_gate_up:
        w_row += rows.projection.to(tl.int64) * strides.matrix
    w_ptr = w_row[:, None] + tl.arange(0, WIDTH)[None, :]
    if FORMAT.scale == BLOCK_SCALE:
        s_ptr = weights.scale + (rows.matrix * strides.scale_rows + n_first // 128) * FORMAT.k_blocks
        s_matrix = tl.cast(strides.scale_rows, tl.int64) * FORMAT.k_blocks
    else:
        s_matrix = tl.cast(n_out * FORMAT.words, tl.int64) * FORMAT.k_blocks
        s_ptr = weights.scale + rows.matrix * s_matrix + n_first + rows.column
    if TILE.interleave_gate_up:
        s_ptr += rows.projection * s_matrix
    x_ptr = tokens.x + token[None, :] * tokens.stride + tl.arange(0, CHUNK)[:, None]
    xs_ptr = tokens.scale
    if FORMAT.x_scale == X_BLOCK_SCALE:
        xs_ptr = tokens.scale + token * FORMAT.k_blocks
    sums_ptr = tokens.sums
    if has_minima(FORMAT.scale, FORMAT.words):
        sums_ptr = tokens.sums + token[None, :] * (32 * FORMAT.k_blocks) + tl.arange(0, 32)[:, None]
    return _Pointers(
        x=x_ptr,
        x_scale=xs_ptr,
        sums=sums_ptr,
        gate=w_ptr,
        gate_scale=s_ptr,
        up=w_ptr + (SETS - 1) * strides.matrix,
        up_scale=s_ptr + (SETS - 1) * s_matrix,
    )


@triton.jit
def _scale_step(n_out, FORMAT: tl.constexpr):
    """Return the elements from the scales of a K block to those of the next."""
    if FORMAT.scale == BLOCK_SCALE:
        return 1
    else:
        return n_out * FORMAT.words


@triton.jit
def _sum_in_steps_of_depth(
    pointers,
    strides,
    tables,
    up_unit,
    row_count,
    n_out,
    k_in,
    FORMAT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return the sum over K and its unit, ``TILE.depth`` K blocks of weights as stored in a step of the loop."""
    BLOCK_N: tl.constexpr = TILE.block_n
    DEPTH: tl.constexpr = TILE.depth
    valid = (tl.arange(0, BLOCK_T) < row_count)[None, :]
    k = tl.arange(0, FORMAT.block_k)
    scale_step = _scale_step(n_out, FORMAT)
    x_ptr, xs_ptr, up_ptr, us_ptr = pointers.x, pointers.x_scale, pointers.up, pointers.up_scale
    up = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    for step in tl.range(0, FORMAT.k_blocks // DEPTH, num_stages=TILE.stages):
        # All are read before the first is multiplied.
        blocks = ()
        for at in tl.static_range(DEPTH):
            left = k_in - (step * DEPTH + at) * FORMAT.block_k
            tokens = (_load_rows(x_ptr + at * FORMAT.block_k, valid, k[:, None] < left, FORMAT.even_k),)
            xs = tl.load(xs_ptr + step * DEPTH + at) if FORMAT.x_scale == X_BLOCK_SCALE else 0.0
            w = _load(up_ptr + at * strides.k_block, k[None, :] < left, FORMAT.even_k)
            blocks += ((tokens, xs, w),)
        for at in tl.static_range(DEPTH):
            tokens, xs, w = blocks[at]
            up, up_unit = _add_block(
                up, up_unit, w, w, us_ptr + at * scale_step, n_out, tokens, tables, xs, FORMAT, TILE, 0, ASM
            )
        up_ptr += DEPTH * strides.k_block
        us_ptr += DEPTH * scale_step
        x_ptr += DEPTH * FORMAT.block_k
    return up, up_unit


@triton.jit
def _load_tokens(x_ptr, valid, left, FORMAT: tl.constexpr, CHUNK: tl.constexpr):
    """Return a K block of tokens in chunks of CHUNK columns, one for each operand of weights."""
    k = tl.arange(0, CHUNK)
    tokens = ()
    for chunk in tl.static_range(FORMAT.block_k // CHUNK):
        first = chunk * CHUNK
        tokens += (_load_rows(x_ptr + first, valid, k[:, None] < left - first, FORMAT.even_k),)
    return tokens


@triton.jit
def _sum_over_k(
    pointers,
    strides,
    tables,
    unit,
    row_count,
    n_out,
    k_in,
    FORMAT: tl.constexpr,
    PROJ: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return the sums over K of gate and up and their units, a K block in a step; without gate, up twice."""
    QUARTERS: tl.constexpr = _in_quarters(FORMAT.weight)
    WIDTH: tl.constexpr = FORMAT.block_k // 4 if QUARTERS else FORMAT.block_k
    ONE: tl.constexpr = _in_one(TILE.fuse_k_block, FORMAT.weight, FORMAT.scale, FORMAT.words)
    CHUNK: tl.constexpr = FORMAT.block_k // 4 if QUARTERS and not ONE else FORMAT.block_k
    SETS: tl.constexpr = 1 if TILE.interleave_gate_up else PROJ.count
    BLOCK_N: tl.constexpr = TILE.block_n
    # Rows beyond the end are not read: every program asks for the same few rows at the same time.
    valid = (tl.arange(0, BLOCK_T) < row_count)[None, :]
    k = tl.arange(0, WIDTH)[None, :]
    scale_step = _scale_step(n_out, FORMAT)
    x_ptr, xs_ptr, sums_ptr = pointers.x, pointers.x_scale, pointers.sums
    w_ptr, s_ptr, up_ptr, us_ptr = pointers.gate, pointers.gate_scale, pointers.up, pointers.up_scale
    gate_unit = unit
    up_unit = unit
    up = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    gate = up
    if SETS == 2:
        gate = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    for block in tl.range(0, FORMAT.k_blocks, num_stages=TILE.stages):
        left = k_in - block * FORMAT.block_k
        tokens = _load_tokens(x_ptr, valid, left, FORMAT, CHUNK)
        xs = tl.load(xs_ptr + block) if FORMAT.x_scale == X_BLOCK_SCALE else 0.0
        added = tables
        if has_minima(FORMAT.scale, FORMAT.words):
            added = _load_rows(sums_ptr + block * 32, valid, valid, True)
        if SETS == 2:
            w0, w1 = _load_weights(w_ptr, k, left, FORMAT)
            if ONE:
                # Read before gate is multiplied, and decoded while the tensor core is busy.
                u0, u1 = _load_weights(up_ptr, k, left, FORMAT)
            gate, gate_unit = _add_block(gate, gate_unit, w0, w1, s_ptr, n_out, tokens, added, xs, FORMAT, TILE, 0, ASM)
            w_ptr += strides.k_block
            s_ptr += scale_step
        if SETS == 1 or not ONE:
            u0, u1 = _load_weights(up_ptr, k, left, FORMAT)
        up, up_unit = _add_block(up, up_unit, u0, u1, us_ptr, n_out, tokens, added, xs, FORMAT, TILE, SETS - 1, ASM)
        up_ptr += strides.k_block
        us_ptr += scale_step
        x_ptr += FORMAT.block_k
    return gate, gate_unit, up, up_unit


@triton.jit
def _finished(
    acc,
    unit,
    tokens,
    weights,
    token,
    vector,
    FORMAT: tl.constexpr,
):
    """Return a sum ``[BLOCK_N, BLOCK_T]`` times its unit and the scales of rows, plus the bias at ``vector``."""
    if is_running(FORMAT.weight):
        WHOLE_NUMBER: tl.constexpr = divisor(tokens.x.dtype.element_ty == tl.float16)
        acc *= unit * WHOLE_NUMBER
    if FORMAT.x_scale == X_ROW_SCALE:
        acc *= tl.load(tokens.scale + token)[None, :]
    if FORMAT.row_scale:
        acc *= tl.load(weights.row_scale + vector)[:, None]
    if FORMAT.bias:
        acc += tl.load(weights.bias + vector).to(tl.float32)[:, None]
    return acc


@triton.jit
def grouped_tile(
    tokens,
    weights,
    strides,
    bounds,
    expert,
    n_first,
    token,
    row_count,
    n_out,
    k_in,
    FORMAT: tl.constexpr,
    PROJ: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ASM: tl.constexpr,
    LAUNCH_NEXT: tl.constexpr,
):
    """Return ``[columns, BLOCK_T]`` float32: rows ``token [BLOCK_T]`` times weights of an expert from n_first on.

    tokens to bounds, FORMAT to TILE: as in ``grouped_gemm_kernel``. row_count: of the rows those that exist; the others
    may be any of tokens, and nothing of them counts. ``TILE.depth`` divides the K blocks and is 1 for weights that are
    decoded. LAUNCH_NEXT: the next kernel may start once the products are done. There are ``TILE.block_n`` columns, or
    half as many where gate and up are interleaved.
    """
    SETS: tl.constexpr = 1 if TILE.interleave_gate_up else PROJ.count
    BLOCK_N: tl.constexpr = TILE.block_n
    rows = _weight_rows(expert, n_first, n_out, PROJ, TILE)
    pointers = _first_pointers(tokens, weights, strides, rows, n_first, token, n_out, FORMAT, PROJ, TILE)
    unit = tl.zeros((BLOCK_N, 1), dtype=tl.float32) if is_running(FORMAT.weight) else 0.0
    tables = tokens.sums
    if FORMAT.weight == TABLE_LANES:
        tables = words_of(weights.row_scale + rows.matrix * 16, PROJ.count, ASM)
    if TILE.depth > 1:
        up, up_unit = _sum_in_steps_of_depth(
            pointers, strides, tables, unit, row_count, n_out, k_in, FORMAT, TILE, BLOCK_T, ASM
        )
        gate, gate_unit = up, up_unit
    else:
        gate, gate_unit, up, up_unit = _sum_over_k(
            pointers, strides, tables, unit, row_count, n_out, k_in, FORMAT, PROJ, TILE, BLOCK_T, ASM
        )
    if LAUNCH_NEXT:
        gdc_launch_dependents()
    vector = (rows.matrix + rows.projection) * n_out + n_first + rows.column
    up = _finished(up, up_unit, tokens, weights, token, vector + (SETS - 1) * n_out, FORMAT)
    if SETS == 2:
        gate = _finished(gate, gate_unit, tokens, weights, token, vector, FORMAT)
    if TILE.interleave_gate_up:
        gate, up = halves(up, TILE.block_n, BLOCK_T)
    if PROJ.activation == NO_ACTIVATION:
        return up
    else:
        return activate(gate if PROJ.count == 2 else up, up, bounds, PROJ)


@triton.jit
def _write_tile(
    tokens,
    weights,
    strides,
    bounds,
    out,
    row_map,
    source,
    expert,
    row_first,
    row_count,
    n_first,
    n_out,
    k_in,
    FORMAT: tl.constexpr,
    PROJ: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply and store ``row_count`` rows, up to BLOCK_T, by an expert's weight rows from n_first on."""
    COLUMNS: tl.constexpr = TILE.block_n // 2 if TILE.interleave_gate_up else TILE.block_n
    t = tl.arange(0, BLOCK_T)
    row = row_first + tl.where(t < row_count, t, 0)
    token = token_at(row, source, ROWS.gather, ROWS.top_k)
    result = grouped_tile(
        tokens,
        weights,
        strides,
        bounds,
        expert,
        n_first,
        token,
        row_count,
        n_out,
        k_in,
        FORMAT,
        PROJ,
        TILE,
        BLOCK_T,
        ASM,
        PDL and not ROWS.top_k,
    )
    store_rows(result, out, row_map, row, t < row_count, n_first, tl.arange(0, COLUMNS), n_out, ROWS.row_map)


@triton.jit(
    do_not_specialize=["token_tiles"],
    do_not_specialize_on_alignment=["row_map", "source", "expert_offsets", "tile_expert", "tile_row"],
)
def grouped_gemm_kernel(
    tokens,
    weights,
    strides,
    bounds,
    out,
    row_map,
    source,
    expert_offsets,
    tile_expert,
    tile_row,
    n_out,
    k_in,
    token_tiles,
    experts,
    FORMAT: tl.constexpr,
    PROJ: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    ASM: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write ``out [R, n_out]``: rows of one expert times its weights, then bias and activation.

    tokens: ``Tokens``, read at row source[r] (``ROWS.gather``) or r. weights: ``Weights``; scale: for each expert,
    projection and K block words x n_out words, or for BLOCK_SCALE [ceil(n_out / 128), K blocks]; row_scale, bias:
    [expert, projection, n_out]; for TABLE_LANES row_scale is [expert, projection, 16] int32. strides:
    ``WeightStrides``. bounds: ``ActivationBounds``. Rows from expert_offsets[E] on are not written. row_map: with
    ``ROWS.row_map``, row r is written to element row_map[r] of out, which may be in a peer's memory
    (``output_row_at``). FORMAT: ``OperandFormat``. PROJ: ``Projections``. TILE: ``Tile``. ROWS: ``RowOrder``.
    """
    COLUMNS: tl.constexpr = TILE.block_n // 2 if TILE.interleave_gate_up else TILE.block_n
    expert, row_first, row_count, n_first = tile_prologue(
        n_out, token_tiles, tile_expert, tile_row, expert_offsets, experts, COLUMNS, TILE, ROWS.top_k, EARLY, PDL
    )
    if expert < 0:
        return
    HALVINGS: tl.constexpr = 2 if TILE.narrow else 0
    for halving in tl.static_range(HALVINGS + 1):
        if row_count <= TILE.block_t >> halving and (halving == HALVINGS or row_count > TILE.block_t >> (halving + 1)):
            _write_tile(
                tokens,
                weights,
                strides,
                bounds,
                out,
                row_map,
                source,
                expert,
                row_first,
                row_count,
                n_first,
                n_out,
                k_in,
                FORMAT,
                PROJ,
                TILE,
                ROWS,
                TILE.block_t >> halving,
                ASM,
                PDL,
            )
