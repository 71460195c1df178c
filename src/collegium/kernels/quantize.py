"""Quantise rows to codes and scales in one pass over memory, bit for bit as ``ops/quantize.py`` defines them.

Rows may be gathered and weighted in the same pass. ``None`` stands for an optional input that is absent.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from . import enums
from .activation import activate
from .arguments import CodeRows, InputRows
from .scales import INFINITY, scaled
from .tiles import pdl_wait, pdl_wait_unless_ready

__all__ = [
    "activated_words_kernel",
    "cast_kernel",
    "copy_to_slots_kernel",
    "e4m3_kernel",
    "e4m3_to_slots_kernel",
    "load_rows",
    "mxfp8_decoded_kernel",
    "nvfp4_decoded_kernel",
    "nvfp4_kernel",
    "store_codes",
]


NO_ACTIVATION = tl.constexpr(enums.NO_ACTIVATION)


@triton.jit
def load_rows(source: InputRows, row, column):
    """Return rows ``row [R]``, columns ``column [C]``, as float32: weighted and rounded to their dtype, 0 outside."""
    row_inside = row < source.rows
    x_row = row
    if source.index is not None:
        x_row = tl.load(source.index + row, mask=row_inside, other=0)
    inside = row_inside[:, None] & (column < source.columns)[None, :]
    stored = tl.load(source.x + x_row[:, None] * source.stride + column[None, :], mask=inside, other=0.0)
    if source.weights is not None:
        weight = tl.load(source.weights + row, mask=row_inside, other=0.0)
        stored = (stored.to(tl.float32) * weight[:, None]).to(stored.dtype)
    return stored.to(tl.float32)


@triton.jit
def store_codes(value, out: CodeRows, row, column, column_block, static_scale, FORMAT: tl.constexpr):
    """Write the codes and scales of ``value [R, C]`` float32, which has whole groups of columns.

    row ``[R]``, column ``[C]``: where value belongs in ``out``. column_block: ``column[0] / C``. static_scale: the
    scale of all groups, None where each has the scale of its largest magnitude. FORMAT: a ``CodeFormat``.
    """
    BLOCK_GROUPS: tl.constexpr = value.shape[1] // FORMAT.group
    codes, stored_scale = _encode(value, out.codes.dtype.element_ty, static_scale, FORMAT)
    inside = (row < out.rows)[:, None] & (column < out.columns)[None, :]
    position = _position(column, FORMAT)
    tl.store(out.codes + row[:, None] * out.columns + position[None, :], codes, mask=inside)
    group = column_block * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    if FORMAT.words:
        _store_words(tl.where((group < out.groups)[None, :], stored_scale, 0), out, row, column_block)
    else:
        group_inside = (row < out.rows)[:, None] & (group < out.groups)[None, :]
        tl.store(out.scales + _offsets(row, group, out.groups, out.scale_stride), stored_scale, mask=group_inside)


@triton.jit
def _store_words(scale_bytes, out: CodeRows, row, column_block):
    """Write E8M0 bytes ``[R, G]``, a multiple of four for a row, four in a word, the first in the lowest byte."""
    ROWS: tl.constexpr = scale_bytes.shape[0]
    WORDS: tl.constexpr = scale_bytes.shape[1] // 4
    even, odd = tl.split(tl.reshape(scale_bytes.to(tl.int32), [ROWS, WORDS, 2, 2]))
    byte0, byte2 = tl.split(even)
    byte1, byte3 = tl.split(odd)
    words = byte0 | (byte1 << 8) | (byte2 << 16) | (byte3 << 24)
    word = column_block * WORDS + tl.arange(0, WORDS)
    inside = (row < out.rows)[:, None] & (word * 4 < out.groups)[None, :]
    tl.store(out.scales + _offsets(row, word, out.groups, out.scale_stride), words, mask=inside)


@triton.jit
def _encode(value, dtype: tl.constexpr, static_scale, FORMAT: tl.constexpr):
    """Return codes ``[R, C]`` and stored scales ``[R, C / group]`` of ``value``; arguments as in ``store_codes``."""
    BLOCK_R: tl.constexpr = value.shape[0]
    BLOCK_C: tl.constexpr = value.shape[1]
    value = tl.reshape(value, [BLOCK_R, BLOCK_C // FORMAT.group, FORMAT.group])
    within, scale, finite = scaled(value, static_scale, FORMAT.power_of_two)
    codes = _to_e4m3(tl.reshape(within, [BLOCK_R, BLOCK_C]), dtype, FORMAT.software_rounding)
    exponent = tl.where(finite, scale.to(tl.int32, bitcast=True) >> 23, 255).to(tl.uint8)
    stored_scale = exponent if FORMAT.e8m0 else tl.where(finite, scale, float("nan"))
    return codes, stored_scale


@triton.jit
def _position(column, FORMAT: tl.constexpr):
    """Return where the code of each ``column`` is stored in its row."""
    position = column
    if FORMAT.reorder:
        # t (32), s (8), half (4), i (1) to half (64), s (16), t (4), i (1).
        half, s, t = column // 4 % 2, column // 8 % 4, column // 32 % 4
        position = column // 128 * 128 + half * 64 + s * 16 + t * 4 + column % 4
    return position


@triton.jit
def _offsets(row, column, columns, column_stride):
    """Return the offsets ``[R, C]`` of elements in ``[., columns]``, or transposed, in ``[., column_stride]``."""
    if column_stride is None:
        return row[:, None] * columns + column[None, :]
    else:
        return row[:, None] + column[None, :] * column_stride


@triton.jit
def _to_e4m3(value, dtype: tl.constexpr, SOFTWARE_ROUNDING: tl.constexpr):
    """Convert float32 magnitudes of at most 448 to the nearest E4M3 number, ties to even."""
    if SOFTWARE_ROUNDING:
        bits = value.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        # To three bits of mantissa, and below 2^-6 to a multiple of 2^-9, by adding and subtracting 1.5 * 2^14.
        normal = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) & -0x100000
        subnormal = ((tl.abs(value) + 24576.0) - 24576.0).to(tl.int32, bitcast=True)
        rounded = tl.where(magnitude < 0x3C800000, subnormal, normal) | (bits & -0x80000000)
        value = rounded.to(tl.float32, bitcast=True)
    return value.to(dtype)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["valid_rows"])
def cast_kernel(
    x,
    index,
    weights,
    valid_rows,
    codes,
    rows,
    columns,
    x_stride,
    column_stride,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the rows of ``InputRows`` in the dtype of codes ``[rows, columns]``.

    valid_rows: int64 ``[1]``, how many rows are written; None: all. column_stride: codes are
    ``[columns, column_stride]``, transposed; None: they are not.
    """
    pdl_wait(PDL)
    if valid_rows is not None:
        rows = tl.minimum(tl.load(valid_rows), rows)
        if tl.program_id(0) * BLOCK_R >= rows:
            return
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    source = InputRows(x=x, index=index, weights=weights, rows=rows, columns=columns, stride=x_stride)
    value = load_rows(source, row, column)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    pointers = codes + _offsets(row, column, columns, column_stride)
    tl.store(pointers, value.to(codes.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "x_ready"], do_not_specialize_on_alignment=["valid_rows"])
def e4m3_kernel(
    x,
    index,
    weights,
    valid_rows,
    codes,
    scales,
    rows,
    columns,
    x_stride,
    groups,
    padded_cols,
    x_ready,
    static_scale,
    scale_stride,
    FORMAT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write codes ``[rows, padded_cols]``, zeros beyond ``columns``, and scales (``CodeRows``) of the ``InputRows``.

    A group with NaN or infinity gets zero codes and a NaN scale. BLOCK_C is whole groups. valid_rows: int64 ``[1]``,
    how many rows are written; None: all. x_ready: 1 where the previous kernel writes nothing that this one reads, which
    then waits for it at the end; always 0 with valid_rows. static_scale, FORMAT: as in ``store_codes``.
    """
    pdl_wait_unless_ready(x_ready, PDL)
    if valid_rows is not None:
        rows = tl.minimum(tl.load(valid_rows), rows)
        if tl.program_id(0) * BLOCK_R >= rows:
            return
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column_block = tl.program_id(1)
    column = column_block * BLOCK_C + tl.arange(0, BLOCK_C)
    source = InputRows(x=x, index=index, weights=weights, rows=rows, columns=columns, stride=x_stride)
    out = CodeRows(codes=codes, scales=scales, rows=rows, columns=padded_cols, groups=groups, scale_stride=scale_stride)
    value = load_rows(source, row, column)
    store_codes(value, out, row, column, column_block, static_scale, FORMAT)
    if PDL:
        # The next kernel waits for this one only, and needs what both wrote.
        gdc_wait()


@triton.jit(do_not_specialize=["rows"])
def activated_words_kernel(
    x,
    codes,
    scales,
    bounds,
    rows,
    columns,
    x_stride,
    up_offset,
    groups,
    scale_stride,
    PROJ: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write codes ``[rows, columns]`` and words of E8M0 scales (``CodeRows``) of the activation of rows.

    x: ``[rows, x_stride]``, gate in its first ``columns``, up from ``up_offset`` on; both are the same without a gate.
    bounds: ``ActivationBounds``. PROJ: ``Projections``, whose activation may be NO_ACTIVATION. FORMAT: ``CodeFormat``
    with words. BLOCK_C: whole words.
    """
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column_block = tl.program_id(1)
    column = column_block * BLOCK_C + tl.arange(0, BLOCK_C)
    source = InputRows(x=x, index=None, weights=None, rows=rows, columns=columns, stride=x_stride)
    value = load_rows(source, row, column)
    if PROJ.activation != NO_ACTIVATION:
        gate = value
        if PROJ.count == 2:
            up = InputRows(x=x + up_offset, index=None, weights=None, rows=rows, columns=columns, stride=x_stride)
            value = load_rows(up, row, column)
        value = activate(gate, value, bounds, PROJ)
    # The activation of zero may not be zero, and columns beyond the end take no part in a scale.
    value = tl.where((column < columns)[None, :], value, 0.0)
    out = CodeRows(codes=codes, scales=scales, rows=rows, columns=columns, groups=groups, scale_stride=scale_stride)
    store_codes(value, out, row, column, column_block, None, FORMAT)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["valid_rows"])
def mxfp8_decoded_kernel(
    x,
    index,
    weights,
    valid_rows,
    numbers,
    rows,
    columns,
    x_stride,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the ``InputRows`` rounded to MXFP8: bfloat16 ``[rows, columns]``, E4M3 numbers times powers of two.

    A group of 32 columns with NaN or infinity becomes NaN. Codes are rounded by integer arithmetic, since sm_80 has no
    conversion. valid_rows: as in ``cast_kernel``.
    """
    pdl_wait(PDL)
    if valid_rows is not None:
        rows = tl.minimum(tl.load(valid_rows), rows)
        if tl.program_id(0) * BLOCK_R >= rows:
            return
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    source = InputRows(x=x, index=index, weights=weights, rows=rows, columns=columns, stride=x_stride)
    value = tl.reshape(load_rows(source, row, column), [BLOCK_R, BLOCK_C // 32, 32])
    within, scale, finite = scaled(value, None, True)
    number = _to_e4m3(within, tl.float32, True) * tl.where(finite, scale, float("nan"))[:, :, None]
    number = tl.reshape(number, [BLOCK_R, BLOCK_C]).to(numbers.dtype.element_ty)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(numbers + row[:, None] * columns + column[None, :], number, mask=inside)


@triton.jit
def _slots_of(slots, token, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the rows ``[BLOCK_K]`` of a token's assignments, negative where there is none.

    The kernel that wrote them may have run on this multiprocessor after this one started, so they are read through the
    L2 cache (.cg).
    """
    k = tl.arange(0, BLOCK_K)
    return tl.load(slots + token * TOP_K + k, mask=k < TOP_K, other=-1, cache_modifier=".cg")


@triton.jit
def _slot_at(rows, k, BLOCK_K: tl.constexpr):
    """Return element ``k`` of ``rows [BLOCK_K]``."""
    return tl.sum(tl.where(tl.arange(0, BLOCK_K) == k, rows, 0), 0)


@triton.jit
def _scale_offset(row, group, groups, scale_stride):
    """Return the offsets of a row's scales in ``[., groups]``, or transposed, in ``[groups, scale_stride]``."""
    if scale_stride is None:
        return row * groups + group
    else:
        return row + group * scale_stride


@triton.jit(do_not_specialize=["x_ready"], do_not_specialize_on_alignment=["slots"])
def e4m3_to_slots_kernel(
    x,
    slots,
    codes,
    scales,
    columns,
    x_stride,
    groups,
    padded_cols,
    x_ready,
    static_scale,
    scale_stride,
    FORMAT: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantise each row of ``x`` once, and write its codes and scales to the rows of its assignments.

    slots: int64 ``[T, TOP_K]``, the row of each assignment; negative: none. codes ``[rows, padded_cols]``, zeros beyond
    ``columns``; scales ``[rows, groups]``, or with a scale_stride transposed; rows of no slot are not written. Other
    arguments as in ``e4m3_kernel``. A program takes BLOCK_C columns of a token; BLOCK_C is whole groups. BLOCK_K:
    TOP_K, rounded up to a power of two.
    """
    pdl_wait_unless_ready(x_ready, PDL)
    BLOCK_GROUPS: tl.constexpr = BLOCK_C // FORMAT.group
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    source = InputRows(x=x, index=None, weights=None, rows=token + 1, columns=columns, stride=x_stride)
    value = load_rows(source, token + tl.arange(0, 1), column)
    code, scale = _encode(value, codes.dtype.element_ty, static_scale, FORMAT)
    code, scale = tl.reshape(code, [BLOCK_C]), tl.reshape(scale, [BLOCK_GROUPS])
    position = _position(column, FORMAT)
    group = tl.program_id(1) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    if PDL:
        # Slots come from the previous kernel, and the next one needs what both wrote.
        gdc_wait()
    rows = _slots_of(slots, token, TOP_K, BLOCK_K)
    # Masks, not branches: codes are brought into the layout of the stores once, not in every branch.
    for k in tl.static_range(TOP_K):
        row = _slot_at(rows, k, BLOCK_K)
        tl.store(codes + row * padded_cols + position, code, mask=column < tl.where(row >= 0, padded_cols, 0))
        tl.store(
            scales + _scale_offset(row, group, groups, scale_stride), scale, mask=group < tl.where(row >= 0, groups, 0)
        )


@triton.jit(do_not_specialize_on_alignment=["slots"])
def copy_to_slots_kernel(
    x,
    scales,
    slots,
    out,
    out_scales,
    columns,
    x_stride,
    groups,
    scale_stride,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy each row of ``x [T, columns]`` to the rows of its assignments in ``out [rows, columns]``, and its scales.

    scales: ``[T, groups]`` float32, contiguous, or None where rows have none; out_scales: ``[rows, groups]``, or
    with a scale_stride transposed. slots,
    TOP_K, BLOCK_K: as in ``e4m3_to_slots_kernel``. A program takes BLOCK_C columns of a token; BLOCK_G: at least
    ``groups``.
    """
    pdl_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    rows = _slots_of(slots, token, TOP_K, BLOCK_K)
    # Tokens of other ranks' experts alone are not read.
    wanted = tl.max(rows, 0) >= 0
    value = tl.load(x + token * x_stride + column, mask=column < tl.where(wanted, columns, 0), other=0)
    for k in tl.static_range(TOP_K):
        row = _slot_at(rows, k, BLOCK_K)
        tl.store(out + row * columns + column, value, mask=column < tl.where(row >= 0, columns, 0))
    if scales is not None:
        group = tl.arange(0, BLOCK_G)
        # The program of the first columns copies the scales.
        group_count = tl.where(wanted & (tl.program_id(1) == 0), groups, 0)
        scale = tl.load(scales + token * groups + group, mask=group < group_count, other=0)
        for k in tl.static_range(TOP_K):
            row = _slot_at(rows, k, BLOCK_K)
            offset = _scale_offset(row, group, groups, scale_stride)
            tl.store(out_scales + offset, scale, mask=group < tl.where(row >= 0, group_count, 0))


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["valid_rows"])
def nvfp4_kernel(
    x,
    index,
    weights,
    valid_rows,
    codes,
    scales,
    global_scales,
    rows,
    columns,
    x_stride,
    groups,
    static_scale,
    BLOCK_C: tl.constexpr,
    SOFTWARE_ROUNDING: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write E2M1 codes, two a byte, E4M3 scales of 16 columns and a float32 scale for each of the ``InputRows``.

    A program computes one row, of at most BLOCK_C columns. codes: ``[rows, ceil(columns / 2)]``; scales:
    ``[rows, groups]``; global_scales: ``[rows]``. valid_rows: int64 ``[1]``, how many rows are written; None: all.
    static_scale: the global scale of every row, None where each has the scale of its largest magnitude.
    """
    pdl_wait(PDL)
    if valid_rows is not None:
        rows = tl.minimum(tl.load(valid_rows), rows)
        if tl.program_id(0) >= rows:
            return
    row = tl.program_id(0).to(tl.int64)
    source = InputRows(x=x, index=index, weights=weights, rows=rows, columns=columns, stride=x_stride)
    value = load_rows(source, row + tl.arange(0, 1), tl.arange(0, BLOCK_C))
    value = tl.reshape(value, [BLOCK_C // 16, 16])
    within, scale, global_scale, finite = _nvfp4_scaled(value, static_scale, scales.dtype.element_ty, SOFTWARE_ROUNDING)
    low, high = tl.split(tl.reshape(_to_e2m1(within), [BLOCK_C // 2, 2]))
    byte = tl.arange(0, BLOCK_C // 2)
    row_bytes = (columns + 1) // 2
    tl.store(codes + row * row_bytes + byte, (low | (high << 4)).to(tl.uint8), mask=byte < row_bytes)
    group = tl.arange(0, BLOCK_C // 16)
    tl.store(scales + row * groups + group, scale, mask=group < groups)
    tl.store(global_scales + row, tl.where(finite, global_scale, float("nan")))


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["valid_rows"])
def nvfp4_decoded_kernel(
    x,
    index,
    weights,
    valid_rows,
    numbers,
    global_scales,
    rows,
    columns,
    x_stride,
    static_scale,
    expert_scales,
    expert_offsets,
    experts,
    BLOCK_C: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write what ``nvfp4_kernel`` quantises, decoded but for the global scale: bfloat16 ``[rows, columns]``, exactly.

    expert_scales ``[experts]``: global scales of the rows of each expert, which end at ``expert_offsets[e + 1]`` int64;
    None: by ``static_scale``. Other arguments as there. Scales of groups are rounded to E4M3 by integer
    arithmetic, since sm_80 has no conversion.
    """
    pdl_wait(PDL)
    if valid_rows is not None:
        rows = tl.minimum(tl.load(valid_rows), rows)
        if tl.program_id(0) >= rows:
            return
    row = tl.program_id(0).to(tl.int64)
    source = InputRows(x=x, index=index, weights=weights, rows=rows, columns=columns, stride=x_stride)
    column = tl.arange(0, BLOCK_C)
    value = tl.reshape(load_rows(source, row + tl.arange(0, 1), column), [BLOCK_C // 16, 16])
    if expert_scales is not None:
        expert = tl.arange(0, BLOCK_E)
        end = tl.load(expert_offsets + 1 + expert, mask=expert < experts, other=0x7FFFFFFFFFFFFFFF)
        owner = tl.minimum(tl.sum((end <= row).to(tl.int32), 0), experts - 1)
        static_scale = tl.load(expert_scales + owner)
    within, scale, global_scale, finite = _nvfp4_scaled(value, static_scale, tl.float32, True)
    number = _e2m1_number(_to_e2m1(within)) * scale[:, None]
    number = tl.reshape(number, [BLOCK_C]).to(numbers.dtype.element_ty)
    tl.store(numbers + row * columns + column, number, mask=column < columns)
    tl.store(global_scales + row, tl.where(finite, global_scale, float("nan")))


@triton.jit
def _nvfp4_scaled(value, static_scale, dtype: tl.constexpr, SOFTWARE_ROUNDING: tl.constexpr):
    """Return a row ``value [GROUPS, 16]`` divided by its scales, the scales ``[GROUPS]`` and of the row, and if finite.

    A row with NaN or infinity gets zeros. dtype: of the scales of groups.
    """
    GROUPS: tl.constexpr = value.shape[0]
    group_max = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    row_max = tl.max(group_max, 0)
    finite = row_max < INFINITY
    group_amax = tl.where(finite, group_max, 0).to(tl.float32, bitcast=True)
    row_amax = tl.where(finite, row_max, 0).to(tl.float32, bitcast=True)
    # 2688 is 6 * 448; the floor times the smallest E4M3 number is the smallest normal float32.
    global_scale = tl.maximum(tl.div_rn(row_amax, 2688.0), 6.018531076210112e-36)
    if static_scale is not None:
        global_scale = tl.where(finite, static_scale, global_scale)
    scale = tl.div_rn(group_amax, tl.full([GROUPS], 6.0, tl.float32) * global_scale)
    scale = _to_e4m3(tl.minimum(tl.maximum(scale, 0.001953125), 448.0), dtype, SOFTWARE_ROUNDING)
    multiplier = tl.div_rn(1.0, scale.to(tl.float32) * global_scale)
    return tl.where(finite, value * multiplier[:, None], 0.0), scale, global_scale, finite


@triton.jit
def _to_e2m1(value):
    """Return the E2M1 codes 0 to 15 of float32 values, as int32: the nearest number, ties to even."""
    magnitude = tl.abs(value)
    # Midpoints between 0, 0.5, 1, 1.5, 2, 3, 4 and 6; a midpoint with an even code above it rounds up.
    code = (magnitude > 0.25).to(tl.int32) + (magnitude >= 0.75).to(tl.int32) + (magnitude > 1.25).to(tl.int32)
    code += (magnitude >= 1.75).to(tl.int32) + (magnitude > 2.5).to(tl.int32) + (magnitude >= 3.5).to(tl.int32)
    code += (magnitude > 5.0).to(tl.int32)
    return code | ((value.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def _e2m1_number(code):
    """Return the float32 numbers of E2M1 codes 0 to 15, as int32."""
    magnitude = code & 7
    # The exponent field is that of float32 minus 126; codes 0 and 1 are the subnormals 0 and 0.5.
    normal = ((magnitude << 22) + (126 << 23)).to(tl.float32, bitcast=True)
    number = tl.where(magnitude < 2, 0.5 * magnitude.to(tl.float32), normal)
    return (number.to(tl.int32, bitcast=True) | ((code & 8) << 28)).to(tl.float32, bitcast=True)
