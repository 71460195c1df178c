"""Grouped matrix product over rows sorted by expert, for every weight format but the four-bit words of ``w4a8.py``.

A program computes BLOCK_N output columns of one expert (of gate and of up, where there are both) for one token tile of
at most BLOCK_T rows. Weights are the first operand: the tensor core multiplies weights [BLOCK_N, K] by tokens
[K, BLOCK_T], so a tile of few tokens needs little padding. The K loop always runs forward in steps of one K block with
one accumulator, whatever BLOCK_T is, so the bits of a row do not depend on the other rows of a batch. All addresses
start from 64-bit bases.

``TILE.fuse_k_block`` multiplies a K block of decoded weights as one operand if its four quarters have a common factor:
the products follow each other without a wait, for more registers. They are added in the same order.

``TILE.interleave_gate_up`` halves the columns of a program and multiplies gate and up as rows of one operand, for
products with too few programs. Eight rows of gate and eight of up alternate, so that one thread has both values of a
column.

With PDL a program may start while the previous kernel still runs, and waits for it before it reads anything; with
EARLY anything but its token tile, which was complete before that kernel started. With adapters the previous kernel is
``low_rank_kernel``, which has waited for everything else, and a program waits for it behind the K loop. The next kernel
may start after the K loop: earlier, its programs would take resources that programs of this kernel still need.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from . import enums
from .activation import activate
from .decode import (
    decode_block,
    has_minima,
    has_one_factor,
    has_running_scale,
    integer_divisor,
    join_quarters,
    load_tables,
    look_up,
    rescale_sum,
    wait_for_products,
)
from .low_bits import (
    block_factor,
    decode_half,
    has_low_bits,
    load_factors,
    position_columns,
    word_of_number,
    words_of_rows,
)
from .low_rank import adapter_at, add_changes, add_low_rank, first_ranks
from .tiles import dot, split_gate_up, store_rows, tile_prologue, token_at

__all__ = ["grouped_gemm_kernel", "grouped_tile"]

E4M3_LANES = tl.constexpr(enums.E4M3_LANES)
E2M1_LANES = tl.constexpr(enums.E2M1_LANES)
INT8_LANES = tl.constexpr(enums.INT8_LANES)
TABLE_LANES = tl.constexpr(enums.TABLE_LANES)
TWO_BIT_LANES = tl.constexpr(enums.TWO_BIT_LANES)
THREE_BIT_LANES = tl.constexpr(enums.THREE_BIT_LANES)

BLOCK_SCALE = tl.constexpr(enums.BLOCK_SCALE)
GROUP_SCALE = tl.constexpr(enums.GROUP_SCALE)
X_BLOCK_SCALE = tl.constexpr(enums.X_BLOCK_SCALE)
X_ROW_SCALE = tl.constexpr(enums.X_ROW_SCALE)

NO_ACTIVATION = tl.constexpr(enums.NO_ACTIVATION)


class _WeightRows(NamedTuple):
    """The weight rows of a tile: matrix (expert and first projection), and each row's projection and column."""

    matrix: Any
    projection: Any
    column: Any


class _Pointers(NamedTuple):
    """Where a step of the K loop reads: tokens, their scales and sums, and weights with their scales and steps.

    Products with one accumulator (one projection, or interleaved ones) read ``up`` alone.
    """

    x: Any
    x_scale: Any
    sums: Any
    gate: Any
    gate_scale: Any
    gate_steps: Any
    up: Any
    up_scale: Any
    up_steps: Any


class _Block(NamedTuple):
    """One K block of both operands.

    w: ``[BLOCK_N, .]``, codes or numbers. w1, w2: the second halves of lanes of two codes, or further lanes of codes of
    two and three bits, otherwise ``w``. scale: pointers to the first words of the weights' scales, and scale_stride the
    elements between words. steps: ``[BLOCK_N, 4]``, pointers to words of steps, for codes of two and three bits. x: a
    tuple of ``[., BLOCK_T]``, one for each operand of weights. x_scale: of the tokens. sums: ``[32, BLOCK_T]``, of the
    tokens' columns, for weights with minima. tables: of ``load_tables``, for codes that index a table.
    """

    w: Any
    w1: Any
    w2: Any
    scale: Any
    scale_stride: Any
    steps: Any
    x: Any
    x_scale: Any
    sums: Any
    tables: Any


class _Output(NamedTuple):
    """The result, the row map of ``RowOrder.row_map``, and the rows that ``RowOrder.gather`` reads."""

    out: Any
    row_map: Any
    source: Any


# These take numbers, not the named tuples: Triton passes a tuple to such a function without the names of its fields.
@triton.constexpr_function
def _is_decoded(WEIGHT):
    """Return whether weights are decoded, a K block as four operands."""
    return WEIGHT not in (enums.PLAIN, enums.E4M3_E4M3)


@triton.constexpr_function
def _is_fused(FUSE, WEIGHT, SCALE, WORDS):
    """Return whether the four operands of a K block are multiplied as one."""
    separate = WEIGHT in (enums.PLAIN, enums.E4M3_E4M3, enums.TWO_BIT_LANES, enums.THREE_BIT_LANES)
    return FUSE and not separate and has_one_factor(SCALE, WORDS)


@triton.constexpr_function
def _x_columns(FUSED, WEIGHT, BLOCK_K):
    """Return the columns of tokens that one operand of weights multiplies."""
    return BLOCK_K if FUSED or WEIGHT in (enums.PLAIN, enums.E4M3_E4M3) else BLOCK_K // 4


@triton.constexpr_function
def _w_columns(WEIGHT, BLOCK_K):
    """Return the columns of ``Weights.packed`` that a K block is read from at a time: lanes, or numbers."""
    if has_low_bits(WEIGHT):
        return BLOCK_K // 16
    return BLOCK_K if WEIGHT in (enums.PLAIN, enums.E4M3_E4M3) else BLOCK_K // 4


@triton.constexpr_function
def _blocks_of_scale(BLOCK_K):
    """Return how many K blocks share a scale of the tokens, which is for 128 columns."""
    return max(1, 128 // BLOCK_K)


@triton.jit
def _load(pointers, mask, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _load_rows(pointers, valid, inside, EVEN: tl.constexpr):
    # A mask costs instructions, and a large tile has few rows past its end: they read an existing row again.
    if pointers.shape[1] > 64:
        return _load(pointers, inside, EVEN)
    else:
        return _load(pointers, valid if EVEN else valid & inside, False)


@triton.jit
def _load_weights(pointers, left, FORMAT: tl.constexpr):
    """Return a K block of weights, and its second and third lanes where there are any (otherwise the first again)."""
    COLUMNS: tl.constexpr = _w_columns(FORMAT.weight, FORMAT.block_k)
    k = tl.arange(0, COLUMNS)[None, :]
    w = _load(pointers, k < left, FORMAT.even_k or _is_decoded(FORMAT.weight))
    if (FORMAT.weight == E4M3_LANES) or (FORMAT.weight == INT8_LANES) or (FORMAT.weight == TWO_BIT_LANES):
        return w, tl.load(pointers + COLUMNS), w
    elif FORMAT.weight == THREE_BIT_LANES:
        return w, tl.load(pointers + COLUMNS), tl.load(pointers + 2 * COLUMNS)
    else:
        return w, w, w


@triton.jit
def _token_columns(COLUMNS: tl.constexpr, WEIGHT: tl.constexpr):
    """Return the columns of a K block that the first operand of weights multiplies, in its order."""
    if has_low_bits(WEIGHT):
        return position_columns(COLUMNS)
    else:
        return tl.arange(0, COLUMNS)


@triton.jit
def _load_tokens(pointers, valid, left, FORMAT: tl.constexpr, TILE: tl.constexpr):
    """Return a K block of tokens as a tuple, one tensor for each operand of weights."""
    FUSED: tl.constexpr = _is_fused(TILE.fuse_k_block, FORMAT.weight, FORMAT.scale, FORMAT.words)
    COLUMNS: tl.constexpr = _x_columns(FUSED, FORMAT.weight, FORMAT.block_k)
    STRIDE: tl.constexpr = 4 if has_low_bits(FORMAT.weight) else COLUMNS
    k = _token_columns(COLUMNS, FORMAT.weight)[:, None]
    x = ()
    for chunk in tl.static_range(FORMAT.block_k // COLUMNS):
        first = chunk * STRIDE
        x += (_load_rows(pointers + first, valid, k < left - first, FORMAT.even_k),)
    return x


@triton.jit
def _add_block(acc, unit, block, FORMAT: tl.constexpr, TILE: tl.constexpr, PROJECTION: tl.constexpr, ASM: tl.constexpr):
    """Return ``acc [BLOCK_N, BLOCK_T]`` plus the product of a K block, scaled by FORMAT, and the unit of the sum.

    block: ``_Block``. unit: what 1 in ``acc`` stands for, ``[BLOCK_N, 1]``, where the sum has a running scale
    (``has_running_scale``). PROJECTION: 1 for up if gate has another accumulator, otherwise 0.
    """
    if _is_decoded(FORMAT.weight):
        return _add_decoded(acc, unit, block, FORMAT, TILE, PROJECTION, ASM)
    else:
        return _add_stored(acc, block, FORMAT, TILE, ASM), unit


@triton.jit
def _add_decoded(
    acc, unit, block, FORMAT: tl.constexpr, TILE: tl.constexpr, PROJECTION: tl.constexpr, ASM: tl.constexpr
):
    """Add a K block of weights that are decoded; see ``_add_block``."""
    if has_low_bits(FORMAT.weight):
        return _add_low_bits(acc, block, FORMAT, ASM), unit
    else:
        return _add_quarters(acc, unit, block, FORMAT, TILE, PROJECTION, ASM)


@triton.jit
def _add_quarters(
    acc, unit, block, FORMAT: tl.constexpr, TILE: tl.constexpr, PROJECTION: tl.constexpr, ASM: tl.constexpr
):
    """Add a K block of weights in four quarters; see ``_add_block``."""
    HALF: tl.constexpr = block.x[0].dtype == tl.float16
    quarters, factors, minima = decode_block(
        block.w, block.w1, block.scale, block.scale_stride, FORMAT.weight, FORMAT.scale, FORMAT.words, HALF, ASM
    )
    if has_minima(FORMAT.scale, FORMAT.words):
        operand, factor = minima
        acc, unit = dot(operand, block.sums, rescale_sum(acc, unit, factor, ASM), ASM), factor
    if has_one_factor(FORMAT.scale, FORMAT.words):
        return _add_with_one_factor(acc, unit, quarters, factors[0], block, FORMAT, TILE, ASM)
    elif FORMAT.weight == TABLE_LANES:
        return _add_table_lanes(acc, factors, block, FORMAT, TILE, PROJECTION, ASM), unit
    elif FORMAT.weight == E4M3_LANES:
        return _add_groups(acc, quarters, block, FORMAT, ASM), unit
    else:
        for quarter in tl.static_range(4):
            acc = dot(quarters[quarter], block.x[quarter], rescale_sum(acc, unit, factors[quarter], ASM), ASM)
            unit = factors[quarter]
        return wait_for_products(acc, ASM), unit


@triton.jit
def _add_low_bits(acc, block, FORMAT: tl.constexpr, ASM: tl.constexpr):
    """Add a K block of codes of two or three bits."""
    words = tl.load(block.scale)
    multipliers, offsets, offsets1 = load_factors(words, block.steps, FORMAT.scale, ASM)
    first = decode_half(block.w, block.w1, block.w2, multipliers, offsets, FORMAT.weight, 0, ASM)
    product = dot(first[0], block.x[0], tl.zeros_like(acc), ASM)
    product = dot(first[1], block.x[1], product, ASM)
    second = decode_half(block.w, block.w1, block.w2, multipliers, offsets1, FORMAT.weight, 1, ASM)
    product = dot(second[0], block.x[2], product, ASM)
    product = dot(second[1], block.x[3], product, ASM)
    return acc + product * block_factor(words, FORMAT.scale)


@triton.jit
def _add_with_one_factor(
    acc, unit, quarters, factor, block, FORMAT: tl.constexpr, TILE: tl.constexpr, ASM: tl.constexpr
):
    """Add a K block whose four operands have one factor, or none besides those inside the operands."""
    SCALED_OPERAND: tl.constexpr = FORMAT.weight == E2M1_LANES or FORMAT.weight == E4M3_LANES
    RUNNING_SCALE: tl.constexpr = has_running_scale(FORMAT.weight)
    # A product without a factor continues the sum.
    SCALED_PRODUCT: tl.constexpr = FORMAT.scale == BLOCK_SCALE or FORMAT.scale == GROUP_SCALE
    CONTINUES: tl.constexpr = SCALED_OPERAND and not SCALED_PRODUCT
    if RUNNING_SCALE:
        product = rescale_sum(acc, unit, factor, ASM)
    elif CONTINUES:
        product = acc
    else:
        product = tl.zeros_like(acc)
    if _is_fused(TILE.fuse_k_block, FORMAT.weight, FORMAT.scale, FORMAT.words):
        fused = join_quarters(quarters[0], quarters[1], quarters[2], quarters[3])
        product = dot(fused, block.x[0], product, ASM)
    else:
        for quarter in tl.static_range(4):
            product = dot(quarters[quarter], block.x[quarter], product, ASM)
    if RUNNING_SCALE:
        return wait_for_products(product, ASM), factor
    elif CONTINUES:
        return wait_for_products(product, ASM), unit
    else:
        block_scale = tl.load(block.scale)
        BY_ROW: tl.constexpr = TILE.interleave_gate_up or FORMAT.scale == GROUP_SCALE
        return acc + product * (block_scale[:, None] if BY_ROW else block_scale), unit


@triton.jit
def _add_groups(acc, quarters, block, FORMAT: tl.constexpr, ASM: tl.constexpr):
    """Add a K block of E4M3 codes whose quarters or halves have float32 scales, the columns of one scale at a time."""
    WORDS: tl.constexpr = FORMAT.words
    COUNT: tl.constexpr = 4 // WORDS
    for word in tl.static_range(WORDS):
        product = tl.zeros_like(acc)
        for quarter in tl.static_range(COUNT):
            product = dot(quarters[word * COUNT + quarter], block.x[word * COUNT + quarter], product, ASM)
        acc += product * tl.load(block.scale + word * block.scale_stride)[:, None]
    return acc


@triton.jit
def _add_table_lanes(
    acc, factors, block, FORMAT: tl.constexpr, TILE: tl.constexpr, PROJECTION: tl.constexpr, ASM: tl.constexpr
):
    """Add a K block of codes that index a table, the columns of one scale at a time.

    Operands of a whole K block would take too many registers.
    """
    HALF: tl.constexpr = block.x[0].dtype == tl.float16
    COUNT: tl.constexpr = 4 // FORMAT.words
    for first in tl.static_range(0, 4, COUNT):
        terms = ()
        for quarter in tl.static_range(first, first + COUNT):
            terms += (look_up(block.w, block.tables, PROJECTION, TILE.interleave_gate_up, quarter, HALF, ASM),)
        product = tl.zeros_like(acc)
        for term in tl.static_range(2):
            for quarter in tl.static_range(COUNT):
                product = dot(terms[quarter][term], block.x[first + quarter], product, ASM)
        acc += product * factors[first]
    return acc


@triton.jit
def _add_stored(acc, block, FORMAT: tl.constexpr, TILE: tl.constexpr, ASM: tl.constexpr):
    """Add a K block of weights that the tensor core multiplies as they are stored."""
    if FORMAT.scale == BLOCK_SCALE:
        # One number for the whole tile: with the tokens' scales it is a row of factors, not a matrix.
        scale = tl.load(block.scale)
        if FORMAT.x_scale == X_BLOCK_SCALE:
            if TILE.interleave_gate_up:
                factors = scale[:, None] * block.x_scale[None, :]
            else:
                factors = (scale * block.x_scale)[None, :]
        else:
            factors = scale[:, None] if TILE.interleave_gate_up else scale
        return acc + dot(block.w, block.x[0], tl.zeros_like(acc), ASM) * factors
    elif FORMAT.scale == GROUP_SCALE:
        factors = tl.load(block.scale)[:, None]
        if FORMAT.x_scale == X_BLOCK_SCALE:
            factors = factors * block.x_scale[None, :]
        return acc + dot(block.w, block.x[0], tl.zeros_like(acc), ASM) * factors
    elif FORMAT.x_scale == X_BLOCK_SCALE:
        return acc + dot(block.w, block.x[0], tl.zeros_like(acc), ASM) * block.x_scale[None, :]
    else:
        return dot(block.w, block.x[0], acc, ASM)


@triton.jit
def _weight_rows(expert, n_first, n_out, PROJ: tl.constexpr, TILE: tl.constexpr):
    """Return the ``_WeightRows`` of a tile; rows past the end read the last row again, and are not stored."""
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
    """Return the ``_Pointers`` of the first K block. rows: ``_WeightRows``."""
    ACCUMULATORS: tl.constexpr = 1 if TILE.interleave_gate_up else PROJ.count
    FUSED: tl.constexpr = _is_fused(TILE.fuse_k_block, FORMAT.weight, FORMAT.scale, FORMAT.words)
    W_COLUMNS: tl.constexpr = _w_columns(FORMAT.weight, FORMAT.block_k)
    X_COLUMNS: tl.constexpr = _x_columns(FUSED, FORMAT.weight, FORMAT.block_k)
    w_row = weights.packed + rows.matrix * strides.matrix + n_first.to(tl.int64) * strides.row
    w_row += rows.column * strides.row
    if TILE.interleave_gate_up:
        w_row += rows.projection.to(tl.int64) * strides.matrix
    w_ptr = w_row[:, None] + tl.arange(0, W_COLUMNS)[None, :]
    if FORMAT.scale == BLOCK_SCALE:
        scale_ptr = weights.scale + (rows.matrix * strides.scale_rows + n_first // 128) * FORMAT.k_blocks
        scale_matrix = tl.cast(strides.scale_rows, tl.int64) * FORMAT.k_blocks
    else:
        scale_matrix = tl.cast(_scale_step(n_out, FORMAT), tl.int64) * FORMAT.k_blocks
        scale_ptr = weights.scale + rows.matrix * scale_matrix
        if has_low_bits(FORMAT.weight):
            scale_ptr += word_of_number(n_first + rows.column, n_out, FORMAT.scale)
        else:
            # Scalars first: a tile with an address for each row needs 16 more registers otherwise.
            scale_ptr = scale_ptr + n_first + rows.column
    if TILE.interleave_gate_up:
        scale_ptr += rows.projection * scale_matrix
    steps_ptr = scale_ptr
    if has_low_bits(FORMAT.weight):
        row = (n_first + rows.column) * 4
        steps_ptr = (weights.scale + rows.matrix * scale_matrix + row)[:, None] + tl.arange(0, 4)[None, :]
        if TILE.interleave_gate_up:
            steps_ptr += (rows.projection * scale_matrix)[:, None]
    x_ptr = tokens.x + token[None, :] * tokens.stride + _token_columns(X_COLUMNS, FORMAT.weight)[:, None]
    x_scale_ptr = tokens.scale
    if FORMAT.x_scale == X_BLOCK_SCALE:
        x_scale_ptr = tokens.scale + token * tl.cdiv(FORMAT.k_blocks, _blocks_of_scale(FORMAT.block_k))
    sums_ptr = tokens.sums
    if has_minima(FORMAT.scale, FORMAT.words):
        sums_ptr = tokens.sums + token[None, :] * (32 * FORMAT.k_blocks) + tl.arange(0, 32)[:, None]
    return _Pointers(
        x=x_ptr,
        x_scale=x_scale_ptr,
        sums=sums_ptr,
        gate=w_ptr,
        gate_scale=scale_ptr,
        gate_steps=steps_ptr,
        up=w_ptr + (ACCUMULATORS - 1) * strides.matrix,
        up_scale=scale_ptr + (ACCUMULATORS - 1) * scale_matrix,
        up_steps=steps_ptr + (ACCUMULATORS - 1) * scale_matrix,
    )


@triton.jit
def _scale_step(n_out, FORMAT: tl.constexpr):
    """Return the elements from the scales of a K block to those of the next."""
    if FORMAT.scale == BLOCK_SCALE:
        return 1
    elif has_low_bits(FORMAT.weight):
        return words_of_rows(n_out, FORMAT.scale)
    else:
        return n_out * FORMAT.words


@triton.jit
def _sum_in_steps_of_depth(
    pointers,
    strides,
    unit,
    row_count,
    n_out,
    k_in,
    FORMAT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return the sum over K, ``TILE.depth`` K blocks of weights as stored in a step of the loop; unit is unused."""
    BLOCK_N: tl.constexpr = TILE.block_n
    DEPTH: tl.constexpr = TILE.depth
    valid = (tl.arange(0, BLOCK_T) < row_count)[None, :]
    scale_step = _scale_step(n_out, FORMAT)
    x_ptr, x_scale_ptr = pointers.x, pointers.x_scale
    w_ptr, scale_ptr = pointers.up, pointers.up_scale
    acc = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    for step in tl.range(0, FORMAT.k_blocks // DEPTH, num_stages=TILE.stages):
        # All are read before the first is multiplied. (In a tuple of tuples, Triton forgets the names of fields.)
        operands = ()
        for index in tl.static_range(DEPTH):
            left = k_in - (step * DEPTH + index) * FORMAT.block_k
            x = _load_tokens(x_ptr + index * FORMAT.block_k, valid, left, FORMAT, TILE)
            x_block = (step * DEPTH + index) // _blocks_of_scale(FORMAT.block_k)
            x_scale = tl.load(x_scale_ptr + x_block) if FORMAT.x_scale == X_BLOCK_SCALE else 0.0
            w, _, _ = _load_weights(w_ptr + index * strides.k_block, left, FORMAT)
            operands += ((x, x_scale, w),)
        for index in tl.static_range(DEPTH):
            x, x_scale, w = operands[index]
            scale = scale_ptr + index * scale_step
            block = _Block(w, w, w, scale, n_out, scale, x, x_scale, pointers.sums, pointers.sums)
            acc, unit = _add_block(acc, unit, block, FORMAT, TILE, 0, ASM)
        w_ptr += DEPTH * strides.k_block
        scale_ptr += DEPTH * scale_step
        x_ptr += DEPTH * FORMAT.block_k
    return acc


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
    """Return the sums over K of gate and up and their units, a K block in a step; gate only with two accumulators."""
    BLOCK_N: tl.constexpr = TILE.block_n
    ACCUMULATORS: tl.constexpr = 1 if TILE.interleave_gate_up else PROJ.count
    FUSED: tl.constexpr = _is_fused(TILE.fuse_k_block, FORMAT.weight, FORMAT.scale, FORMAT.words)
    # Rows past the end are not read: every program would read the same few rows at the same time.
    valid = (tl.arange(0, BLOCK_T) < row_count)[None, :]
    scale_step = _scale_step(n_out, FORMAT)
    x_ptr, x_scale_ptr, sums_ptr = pointers.x, pointers.x_scale, pointers.sums
    gate_ptr, gate_scale_ptr = pointers.gate, pointers.gate_scale
    up_ptr, up_scale_ptr = pointers.up, pointers.up_scale
    gate_steps, up_steps = pointers.gate_steps, pointers.up_steps
    gate_unit = unit
    up_unit = unit
    up = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    gate = up
    if ACCUMULATORS == 2:
        gate = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    for k_block in tl.range(0, FORMAT.k_blocks, num_stages=TILE.stages):
        left = k_in - k_block * FORMAT.block_k
        x = _load_tokens(x_ptr, valid, left, FORMAT, TILE)
        x_scale = (
            tl.load(x_scale_ptr + k_block // _blocks_of_scale(FORMAT.block_k))
            if FORMAT.x_scale == X_BLOCK_SCALE
            else 0.0
        )
        sums = sums_ptr
        if has_minima(FORMAT.scale, FORMAT.words):
            sums = _load_rows(sums_ptr + k_block * 32, valid, valid, True)
        if ACCUMULATORS == 2:
            gate_w, gate_w1, gate_w2 = _load_weights(gate_ptr, left, FORMAT)
            if FUSED:
                # Read before gate is multiplied, and decoded while the tensor core is busy.
                up_w, up_w1, up_w2 = _load_weights(up_ptr, left, FORMAT)
            block = _Block(gate_w, gate_w1, gate_w2, gate_scale_ptr, n_out, gate_steps, x, x_scale, sums, tables)
            gate, gate_unit = _add_block(gate, gate_unit, block, FORMAT, TILE, 0, ASM)
            gate_ptr += strides.k_block
            gate_scale_ptr += scale_step
            gate_steps += scale_step
        if ACCUMULATORS == 1 or not FUSED:
            up_w, up_w1, up_w2 = _load_weights(up_ptr, left, FORMAT)
        block = _Block(up_w, up_w1, up_w2, up_scale_ptr, n_out, up_steps, x, x_scale, sums, tables)
        up, up_unit = _add_block(up, up_unit, block, FORMAT, TILE, ACCUMULATORS - 1, ASM)
        up_ptr += strides.k_block
        up_scale_ptr += scale_step
        up_steps += scale_step
        x_ptr += FORMAT.block_k
    return gate, gate_unit, up, up_unit


@triton.jit
def _scale_and_add_bias(acc, unit, tokens, weights, token, offset, FORMAT: tl.constexpr):
    """Return a sum ``[BLOCK_N, BLOCK_T]`` times its unit and the scales of rows, plus bias.

    offset: ``[BLOCK_N]``, of each row's scale and bias.
    """
    if has_running_scale(FORMAT.weight):
        DIVISOR: tl.constexpr = integer_divisor(tokens.x.dtype.element_ty == tl.float16)
        acc *= unit * DIVISOR
    if FORMAT.x_scale == X_ROW_SCALE:
        acc *= tl.load(tokens.scale + token)[None, :]
    if FORMAT.row_scale:
        acc *= tl.load(weights.row_scale + offset)[:, None]
    if FORMAT.bias:
        acc += tl.load(weights.bias + offset).to(tl.float32)[:, None]
    return acc


@triton.jit
def _column_of_row(n_first, TILE: tl.constexpr):
    """Return the column of the result of each row of a tile; gate and up alternate eight by eight if interleaved."""
    n = tl.arange(0, TILE.block_n)
    if TILE.interleave_gate_up:
        return n_first + n // 16 * 8 + n % 8
    else:
        return n_first + n


@triton.jit
def _first_ranks(adapters, adapter, expert, n_first, n_out, PROJ: tl.constexpr, TILE: tl.constexpr):
    """Return ``first_ranks`` of up and gate; gate's are used only where it has another accumulator."""
    column = _column_of_row(n_first, TILE)
    if TILE.interleave_gate_up or PROJ.count == 1:
        ranks = first_ranks(adapters, adapter, expert, column, n_out, 0, PROJ, TILE.interleave_gate_up)
        return ranks, ranks
    else:
        up = first_ranks(adapters, adapter, expert, column, n_out, 1, PROJ, False)
        return up, first_ranks(adapters, adapter, expert, column, n_out, 0, PROJ, False)


@triton.jit
def grouped_tile(
    tokens,
    weights,
    strides,
    bounds,
    adapters,
    adapter,
    expert,
    n_first,
    row,
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
    LATE: tl.constexpr,
    UNSORTED: tl.constexpr,
):
    """Return ``[columns, BLOCK_T]`` float32: rows ``token [BLOCK_T]`` times weights of an expert from n_first on.

    tokens to adapters, FORMAT to TILE: as in ``grouped_gemm_kernel``. adapter: of each row (``adapter_at``); it and
    ``row`` are read where ``PROJ.adapter_rank`` is not 0. There are ``TILE.block_n`` columns, or half as many where
    gate and up are interleaved. row_count: how many of the rows exist; the others may be any of ``tokens``, and
    their results mean nothing. ``TILE.depth`` divides the K blocks and is 1 for weights that are decoded. LAUNCH_NEXT:
    the next kernel may start once the products are done. LATE: the adapters' kernel is waited for after them. UNSORTED:
    there are few programs, so B is read before the K loop, which takes longer, in spite of the registers.
    """
    BLOCK_N: tl.constexpr = TILE.block_n
    ACCUMULATORS: tl.constexpr = 1 if TILE.interleave_gate_up else PROJ.count
    rows = _weight_rows(expert, n_first, n_out, PROJ, TILE)
    pointers = _first_pointers(tokens, weights, strides, rows, n_first, token, n_out, FORMAT, PROJ, TILE)
    unit = tl.zeros((BLOCK_N, 1), dtype=tl.float32) if has_running_scale(FORMAT.weight) else 0.0
    tables = tokens.sums
    if FORMAT.weight == TABLE_LANES:
        tables = load_tables(weights.row_scale + rows.matrix * 16, PROJ.count, ASM)
    ranks, gate_ranks = row, row
    if PROJ.adapter_rank and UNSORTED and not PROJ.stored_changes:
        ranks, gate_ranks = _first_ranks(adapters, adapter, expert, n_first, n_out, PROJ, TILE)
    if TILE.depth > 1:
        up = _sum_in_steps_of_depth(pointers, strides, unit, row_count, n_out, k_in, FORMAT, TILE, BLOCK_T, ASM)
        gate, gate_unit, up_unit = up, unit, unit
    else:
        gate, gate_unit, up, up_unit = _sum_over_k(
            pointers, strides, tables, unit, row_count, n_out, k_in, FORMAT, PROJ, TILE, BLOCK_T, ASM
        )
    if LAUNCH_NEXT:
        gdc_launch_dependents()
    if PROJ.adapter_rank and not UNSORTED and not PROJ.stored_changes:
        ranks, gate_ranks = _first_ranks(adapters, adapter, expert, n_first, n_out, PROJ, TILE)
    offset = (rows.matrix + rows.projection) * n_out + n_first + rows.column
    up_offset = offset + (ACCUMULATORS - 1) * n_out
    up = _scale_and_add_bias(up, up_unit, tokens, weights, token, up_offset, FORMAT)
    if ACCUMULATORS == 2:
        gate = _scale_and_add_bias(gate, gate_unit, tokens, weights, token, offset, FORMAT)
    if PROJ.adapter_rank:
        column = _column_of_row(n_first, TILE)
        LAST: tl.constexpr = ACCUMULATORS - 1
        INTERLEAVED: tl.constexpr = TILE.interleave_gate_up
    if PROJ.stored_changes:
        up = add_changes(up, adapters, adapter, expert, row, column, n_out, LAST, PROJ, INTERLEAVED, LATE)
        if ACCUMULATORS == 2:
            gate = add_changes(gate, adapters, adapter, expert, row, column, n_out, 0, PROJ, False, False)
    elif PROJ.adapter_rank:
        up = add_low_rank(up, ranks, adapters, adapter, expert, row, column, n_out, LAST, PROJ, INTERLEAVED, ASM, LATE)
        if ACCUMULATORS == 2:
            gate = add_low_rank(
                gate, gate_ranks, adapters, adapter, expert, row, column, n_out, 0, PROJ, False, ASM, False
            )
    if TILE.interleave_gate_up:
        gate, up = split_gate_up(up, TILE.block_n, BLOCK_T)
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
    adapters,
    output,
    rows,
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
    """Multiply and store up to BLOCK_T rows. output: ``_Output``. rows: ``TileRows``."""
    COLUMNS: tl.constexpr = TILE.block_n // 2 if TILE.interleave_gate_up else TILE.block_n
    t = tl.arange(0, BLOCK_T)
    row = rows.first + tl.where(t < rows.count, t, 0)
    token = token_at(row, output.source, ROWS.gather, ROWS.top_k)
    adapter = row
    if PROJ.adapter_rank:
        adapter = adapter_at(adapters, row, rows.count, ROWS.top_k)
    result = grouped_tile(
        tokens,
        weights,
        strides,
        bounds,
        adapters,
        adapter,
        rows.expert,
        rows.n_first,
        row,
        token,
        rows.count,
        n_out,
        k_in,
        FORMAT,
        PROJ,
        TILE,
        BLOCK_T,
        ASM,
        PDL and not ROWS.top_k,
        PDL and PROJ.adapter_rank > 0,
        ROWS.top_k > 0,
    )
    n = tl.arange(0, COLUMNS)
    store_rows(result, output.out, output.row_map, row, t < rows.count, rows.n_first, n, n_out, ROWS.row_map)


@triton.jit(
    do_not_specialize=["token_tiles"],
    do_not_specialize_on_alignment=["row_map", "source", "expert_offsets", "tile_expert", "tile_row"],
)
def grouped_gemm_kernel(
    tokens,
    weights,
    strides,
    bounds,
    adapters,
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
    ``WeightStrides``. bounds: ``ActivationBounds``. adapters: ``AdapterRows`` where ``PROJ.adapter_rank`` is not 0,
    otherwise None. Rows from expert_offsets[E] on are not written. row_map: with ``ROWS.row_map``, row r is written to
    element row_map[r] of out, which may be in a peer's memory (``output_row_at``). FORMAT: ``OperandFormat``. PROJ:
    ``Projections``. TILE: ``Tile``. ROWS: ``RowOrder``.
    """
    COLUMNS: tl.constexpr = TILE.block_n // 2 if TILE.interleave_gate_up else TILE.block_n
    rows = tile_prologue(
        n_out,
        token_tiles,
        tile_expert,
        tile_row,
        expert_offsets,
        experts,
        COLUMNS,
        TILE,
        ROWS.top_k,
        EARLY,
        PDL and PROJ.adapter_rank > 0,
        PDL,
    )
    if rows.expert < 0:
        return
    output = _Output(out, row_map, source)
    # A narrow tile with few rows is multiplied as one of half or a quarter of its size.
    HALVINGS: tl.constexpr = 2 if TILE.narrow else 0
    for halving in tl.static_range(HALVINGS + 1):
        if rows.count <= TILE.block_t >> halving and (
            halving == HALVINGS or rows.count > TILE.block_t >> (halving + 1)
        ):
            _write_tile(
                tokens,
                weights,
                strides,
                bounds,
                adapters,
                output,
                rows,
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
