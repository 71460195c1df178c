"""Products with quantised weights on a CPU, as machine code that Numba makes at the first use and keeps on disk.

Shape letters: E experts, N output rows, K input columns, r rows of x, G groups, b bits of a code.

Sixteen rows of weights lie side by side, a panel: ``[N / 16, K / 2, 4 b]`` bytes. A pair of columns is 32 codes in the
order of the bfloat16 numbers they become: row 0 of columns 2k and 2k + 1, row 1 of both, and so on. Codes of up to six
bits are 16 bytes, the first half in the low nibbles and the second in the high ones, then for each further bit four
bytes with one bit of each; codes of eight bits, integers or E4M3, are 32 bytes. Codes of sixteen bits are bfloat16
numbers in rows as they are published, ``[N, K]``, and are turned where others are decoded.

Four panels are a task. They are decoded whole into bfloat16 pairs ``[K / 2, 16]`` that stay in the second-level cache,
then multiplied by all rows of x of their expert, sixteen at a time with AMX or a few at a time with products of pairs
or fused multiply-adds. Either way a sum runs over k in order and reads no other row, so the bits of a row do not depend
on the batch.

Tasks are shared out by a counter to threads of the OpenMP runtime that torch itself uses: a second pool would wait for
torch's threads, which spin for a while after each of its operations. Where that runtime is not found, threads of
Python's are started for each call.
"""

import ctypes
import inspect
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import llvmlite.binding as llvm
import llvmlite.ir as ir
import numpy as np
import torch
from numba import cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

__all__ = ["FIELDS", "LANES", "PAIR_BYTES", "PANELS", "SCALES", "SHIFTS", "has_tiles", "run"]

LANES = 16  # rows of a panel: 32-bit lanes of a register
PANELS = 4  # panels of a task: four sums that do not wait for each other hide the latency of a product
SCALES = ("e8m0", "e4m3", "int8", "bf16", "fp16", "fp32")  # what scales are; int8: times a float16 for 256 columns
# What lies behind sixteen scales: zeros, which are subtracted from codes, or offsets, which are added to products.
SHIFTS = ("none", "zeros", "offsets")
_SPAN = 128  # pairs of columns of a float16 that int8 scales are multiplied by
_PIECE, _SHORT = 64, 32  # pairs of columns, 16 KiB of a task in bfloat16, and those of rows that are turned
_TILE_ROWS = 16  # of x
_MOST = 4  # rows of x at a time without AMX: with more, LLVM keeps sums in memory, though registers would hold them

# Arguments of a call, 64-bit numbers; addresses are of contiguous tensors.
FIELDS = (
    "task",  # the next task; threads increment it
    "thread",  # the number of the next thread; threads increment it
    "tasks",
    "experts",  # int64, the experts that have rows
    "bounds",  # int64, the first row of each of these experts, and the end
    "blocks",  # tasks of an expert
    "codes",
    "bits",
    "floats",  # whether codes of eight bits are E4M3 numbers, which are read times 2^-8
    "scales",
    "supers",
    "kind",  # index in SCALES
    "shift",  # index in SHIFTS
    "line",  # bytes of a row of scales
    "values",  # float32 [E, 16]: the value of the lower four bits of a code; the first is added to codes of eight bits
    "group",  # pairs of columns that share a scale
    "groups",
    "pairs",
    "factors",  # float32 [E, N], or 0
    "bias",  # float32 [E, N], or 0
    "x",  # bfloat16 [r, K], or float32 where PAIR_BYTES is 8
    "out",  # float32 [r, N], zeros without tiles
    "scratch",  # a task in bfloat16 for each thread
    "tiles",
    "shapes",  # 64 bytes for each count of rows: the configuration of AMX tiles
)
(
    TASK,
    THREAD,
    TASKS,
    EXPERTS,
    BOUNDS,
    BLOCKS,
    CODES,
    BITS,
    FLOATS,
    SCALES_AT,
    SUPERS,
    KIND,
    SHIFT,
    LINE,
    VALUES,
    GROUP,
    GROUPS,
    PAIRS,
    FACTORS,
    BIAS,
    X,
    OUT,
    SCRATCH,
    TILES,
    SHAPES,
) = range(len(FIELDS))

_ROWS = range(LANES)
_I1, _I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
_BYTES, _SHORTS, _WORDS, _HALVES, _FLOATS = (
    ir.VectorType(kind, LANES) for kind in (_I8, _I16, _I32, ir.HalfType(), ir.FloatType())
)


@cache
def _host(feature):
    """Return whether this CPU has ``feature``; what is compiled, and kept on disk, depends on nothing else."""
    return bool(llvm.get_host_cpu_features().get(feature))


@cache
def has_tiles():
    """Return whether this CPU multiplies tiles of bfloat16 (AMX) and the system lets this process do it."""
    return _host("amx-bf16") and _host("avx512bf16") and bool(torch.cpu._init_amx())


# Bytes of two columns of x: a pair that one instruction multiplies, or two numbers widened to float32 beforehand.
PAIR_BYTES = 4 if _host("avx512bf16") else 8


def _at(builder, address, kind):
    return builder.inttoptr(address, kind.as_pointer())


def _load(builder, address, kind):
    loaded = builder.load(_at(builder, address, kind))
    loaded.align = 1
    return loaded


def _store(builder, value, address):
    builder.store(value, _at(builder, address, value.type)).align = 1


def _word(number, kind=_WORDS):
    return ir.Constant(kind, [number] * LANES)


def _number(number):
    return ir.Constant(_I64, number)


def _call(builder, name, result, *arguments):
    kind = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _fetch(builder, address):
    """Prefetch ``address`` into the second-level cache; an invalid address is ignored.

    Rows that are a power of two apart have few places in the first-level cache.
    """
    how = (ir.Constant(_I32, value) for value in (0, 2, 1))
    _call(builder, "llvm.prefetch.p0i8", ir.VoidType(), _at(builder, address, _I8), *how)


def _instruction(emit):
    """Make an intrinsic of ``emit(builder, *numbers)``, which emits code and returns a 64-bit number or nothing."""

    def generate(context, builder, signature, arguments):
        result = emit(builder, *arguments)
        return _number(0) if result is None else result

    names = list(inspect.signature(emit).parameters)[1:]

    def typed(typing_context, *argument_types):
        return types.intp(*[types.intp] * len(names)), generate

    # Numba counts an intrinsic's arguments by its signature.
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    typed.__signature__ = inspect.Signature(
        [inspect.Parameter(name, positional) for name in ("typing_context", *names)]
    )
    return intrinsic(typed)


@_instruction
def _field(builder, job, index):
    return _load(builder, builder.add(job, builder.mul(index, _number(8))), _I64)


@_instruction
def _next(builder, address):
    return builder.atomic_rmw("add", _at(builder, address, _I64), _number(1), "monotonic")


def _is(builder, number, wanted):
    return builder.icmp_signed("==", number, _number(wanted))


def _scale(builder, kind, scales, supers):
    """Return sixteen scales, or what lies behind them, as float32."""
    if kind == "bf16":
        return builder.bitcast(builder.shl(builder.zext(_load(builder, scales, _SHORTS), _WORDS), _word(16)), _FLOATS)
    if kind == "fp16":
        return builder.fpext(_load(builder, scales, _HALVES), _FLOATS)
    if kind == "fp32":
        return _load(builder, scales, _FLOATS)
    stored = _load(builder, scales, _BYTES)
    if kind == "int8":
        return builder.fmul(builder.sitofp(stored, _FLOATS), builder.fpext(_load(builder, supers, _HALVES), _FLOATS))
    if kind == "e8m0":
        return builder.bitcast(builder.shl(builder.zext(stored, _WORDS), _word(23)), _FLOATS)
    # Exponent biases 7 and 15; subnormal halves convert fast and exactly, even where a caller has torch flush others.
    code = builder.shl(builder.zext(stored, _SHORTS), _word(7, _SHORTS))
    return builder.fmul(builder.fpext(builder.bitcast(code, _HALVES), _FLOATS), _word(2.0**8, _FLOATS))


class _BFloats(ir.Type):
    """Thirty-two bfloat16, a type that the builder of instructions does not know."""

    def _to_string(self):
        return "<32 x bfloat>"


_PAIRS = _BFloats()


def _rounded(builder, first, second):
    """Return thirty-two numbers, rounded to nearest even, as bfloat16 in 32-bit lanes of two."""
    if _host("avx512bf16"):
        name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        return builder.bitcast(_call(builder, name, _PAIRS, second, first), _WORDS)

    def upper(number):
        bits = builder.bitcast(number, _WORDS)
        odd = builder.and_(builder.lshr(bits, _word(16)), _word(1))
        return builder.bitcast(builder.add(builder.add(bits, _word(0x7FFF)), odd), ir.VectorType(_I16, 2 * LANES))

    order = ir.Constant(ir.VectorType(_I32, 2 * LANES), list(range(1, 4 * LANES, 2)))
    return builder.bitcast(builder.shuffle_vector(upper(first), upper(second), order), _WORDS)


def _look_up(builder, table, code):
    """Return sixteen numbers of ``table``, which the lower four bits of ``code`` name."""
    if _host("avx512f"):
        return _call(builder, "llvm.x86.avx512.permvar.sf.512", _FLOATS, table, code)
    orders = [ir.Constant(ir.VectorType(_I32, 8), list(range(start, start + 8))) for start in (0, 8)]
    tables, codes = ([builder.shuffle_vector(vector, vector, order) for order in orders] for vector in (table, code))
    halves = [
        [_call(builder, "llvm.x86.avx2.permps", vector.type, vector, eight) for eight in codes] for vector in tables
    ]
    low, high = (builder.shuffle_vector(*both, ir.Constant(_WORDS, list(range(LANES)))) for both in halves)
    return builder.select(builder.trunc(builder.lshr(code, _word(3)), ir.VectorType(_I1, LANES)), high, low)


def _numbers(builder, place, bits, floats, table):
    """Return both halves of 32 codes as float32: up to six bits by ``table``, eight bits directly."""
    if bits == 8:
        both = [_load(builder, builder.add(place, _number(at)), _BYTES) for at in (0, LANES)]
        if not floats:
            return [builder.sitofp(builder.zext(half_codes, _WORDS), _FLOATS) for half_codes in both]
        # A sign fills the upper byte, and is in the way once more above the exponent.
        codes = [builder.shl(builder.sext(half_codes, _SHORTS), _word(7, _SHORTS)) for half_codes in both]
        codes = [builder.bitcast(builder.and_(half_codes, _word(-0x4080, _SHORTS)), _HALVES) for half_codes in codes]
        return [builder.fpext(half_codes, _FLOATS) for half_codes in codes]
    low, numbers = builder.zext(_load(builder, place, _BYTES), _WORDS), []
    for half, code in enumerate((low, builder.lshr(low, _word(4)))):
        number = _look_up(builder, table, code)
        for plane in range(4, bits):
            at = builder.add(place, _number(LANES + 4 * (plane - 4) + 2 * half))
            more = builder.bitcast(_load(builder, at, _I16), ir.VectorType(_I1, LANES))
            number = builder.select(more, builder.fadd(number, _word(2.0**plane, _FLOATS)), number)
        numbers.append(number)
    return numbers


@_instruction
def _decode(builder, kind, bits, floats, shift, codes, count, ahead, values, scales, supers, out):
    """Decode ``count`` pairs of columns of sixteen rows under one row of scales; fetch what is ``ahead``."""
    rooms = [cgutils.alloca_once(builder, _FLOATS) for _ in range(2)]
    _fetch(builder, builder.add(scales, _number(256)))
    builder.store(_word(0.0, _FLOATS), rooms[1])
    for place, (name, words) in enumerate(zip(SCALES, (1, 1, 1, 2, 2, 4), strict=True)):
        with builder.if_then(_is(builder, kind, place)):
            builder.store(_scale(builder, name, scales, supers), rooms[0])
            with builder.if_then(builder.icmp_signed("!=", shift, _number(0))):
                behind = builder.add(scales, _number(LANES * words)), builder.add(supers, _number(2 * LANES))
                builder.store(_scale(builder, name, *behind), rooms[1])
    (scale, behind), table = (builder.load(room) for room in rooms), _load(builder, values, _FLOATS)
    zeros = _is(builder, shift, SHIFTS.index("zeros"))
    first = builder.select(_is(builder, bits, 8), builder.shuffle_vector(table, table, _word(0)), _word(0.0, _FLOATS))
    start = builder.select(zeros, builder.fsub(first, behind), first)
    offset = builder.select(zeros, _word(0.0, _FLOATS), behind)
    # A scale of at most 18 bits times a zero is exact, and subtracting it later costs nothing.
    is_exact = builder.and_(zeros, _is(builder, kind, SCALES.index("fp32")))
    offset = builder.select(is_exact, offset, _call(builder, "llvm.fma.v16f32", _FLOATS, start, scale, offset))

    def halves(vector):
        orders = ([lane // 2 + start for lane in range(LANES)] for start in (0, LANES // 2))
        return [builder.shuffle_vector(vector, vector, ir.Constant(_WORDS, order)) for order in orders]

    lines = list(zip(halves(start), halves(scale), halves(offset), strict=True))
    how = builder.add(builder.zext(is_exact, _I64), builder.mul(floats, _number(2)))
    for width, mode in ((4, 0), (5, 0), (6, 0), (8, 0), (4, 1), (8, 1), (8, 2)):
        taken = builder.and_(_is(builder, bits, width), _is(builder, how, mode))
        with builder.if_then(taken), cgutils.for_range(builder, count) as loop:
            pair, place = [], builder.add(codes, builder.mul(loop.index, _number(4 * width)))
            _fetch(builder, builder.add(place, ahead))
            for number, (begin, *line) in zip(_numbers(builder, place, width, mode == 2, table), lines, strict=True):
                number = builder.fadd(number, begin) if mode == 1 else number
                pair.append(_call(builder, "llvm.fma.v16f32", _FLOATS, number, *line))
            _store(builder, _rounded(builder, *pair), builder.add(out, builder.mul(loop.index, _number(4 * LANES))))


def _turned(row, bit):
    """Return which lanes of two rows, ``bit`` apart, are in ``row`` once a bit of rows and columns has changed."""
    first, second = (bit, 0) if row & bit else (0, bit)
    return ir.Constant(_WORDS, [LANES + (lane ^ second) if lane & bit else lane | first for lane in _ROWS])


@_instruction
def _turn(builder, rows, stride, count, ahead, out):
    """Copy ``count`` pairs of columns of sixteen rows of bfloat16, ``stride`` bytes apart; fetch what is ``ahead``."""
    with cgutils.for_range(builder, builder.sdiv(count, _number(LANES))) as loop:
        at, words = builder.add(rows, builder.mul(loop.index, _number(4 * LANES))), []
        for row in _ROWS:
            place = builder.add(at, builder.mul(stride, _number(row)))
            _fetch(builder, builder.add(place, ahead))
            words.append(_load(builder, place, _WORDS))
        for bit in (1, 2, 4, 8):  # of the number of a row and of a column, which change places
            words = [builder.shuffle_vector(words[row & ~bit], words[row | bit], _turned(row, bit)) for row in _ROWS]
        for row, word in enumerate(words):
            place = builder.mul(builder.add(builder.mul(loop.index, _number(LANES)), _number(row)), _number(4 * LANES))
            _store(builder, word, builder.add(out, place))


def _tile(builder, name, *arguments):
    """Call an AMX instruction, where the CPU has it: numbers are tiles, the rest addresses and strides."""
    if not _host("amx-bf16"):
        return
    operands = [ir.Constant(_I8, row) if isinstance(row, int) else row for row in arguments]
    _call(builder, f"llvm.x86.{name}", ir.VoidType(), *operands)


@_instruction
def _configure(builder, shapes):
    _tile(builder, "ldtilecfg", _at(builder, shapes, _I8))


@_instruction
def _release(builder):
    _tile(builder, "tilerelease")


@_instruction
def _clear_tiles(builder):
    for tile in range(PANELS):
        _tile(builder, "tilezero", tile)


@_instruction
def _add_tiles(builder, x, x_stride, weights, panel, steps):
    """Add the product of a tile of rows with ``steps`` times 32 columns of four panels, ``panel`` bytes apart."""
    apart = [builder.add(weights, builder.mul(panel, _number(tile))) for tile in range(PANELS)]
    with cgutils.for_range(builder, steps) as loop:
        columns = builder.add(x, builder.mul(loop.index, _number(64)))
        _tile(builder, "tileloadd64", 4, _at(builder, columns, _I8), x_stride)
        for tile, start in enumerate(apart):
            rows, room = builder.add(start, builder.mul(loop.index, _number(1024))), 5 + tile % 3
            _tile(builder, "tileloadd64", room, _at(builder, rows, _I8), _number(64))
            _tile(builder, "tdpbf16ps", tile, 4, room)


@_instruction
def _store_tiles(builder, out, out_stride):
    for tile in range(PANELS):
        _tile(builder, "tilestored64", tile, _at(builder, builder.add(out, _number(64 * tile)), _I8), out_stride)


def _products(builder, words, places, rooms):
    """Add the products of ``words``, sixteen pairs of columns, with the two at each of ``places``, to ``rooms``."""
    steps = [words]
    if PAIR_BYTES == 8:
        first = [builder.shl(word, _word(16)) for word in words]
        second = [builder.and_(word, _word(0xFFFF0000)) for word in words]
        steps = [first, second]
    for column, halves in enumerate(steps):
        for place, row_sums in zip(places, rooms, strict=True):
            one = _load(builder, builder.add(place, _number(4 * column)), _I32)
            one = builder.insert_element(ir.Constant(_WORDS, None), one, ir.Constant(_I32, 0))
            one = builder.shuffle_vector(one, one, _word(0))
            for half, room in zip(halves, row_sums, strict=True):
                _add_product(builder, one, half, room)


def _add_product(builder, one, half, room):
    """Add ``one`` times ``half`` to the sums in ``room``: numbers in float32, or pairs in bfloat16."""
    if PAIR_BYTES == 8:
        numbers = [builder.bitcast(operand, _FLOATS) for operand in (one, half)]
        total = _call(builder, "llvm.fma.v16f32", _FLOATS, *numbers, builder.load(room))
    else:
        pairs = [builder.bitcast(operand, _PAIRS) for operand in (one, half)]
        total = _call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _FLOATS, builder.load(room), *pairs)
    builder.store(total, room)


@_instruction
def _add_rows(builder, count, x, x_stride, weights, panel, pairs, out, out_stride):
    """Add the product of ``count`` rows with ``pairs`` columns of four panels, ``panel`` bytes apart, to ``out``."""
    addresses = x, x_stride, weights, panel, pairs, out, out_stride
    for rows in range(1, _MOST + 1):
        with builder.if_then(_is(builder, count, rows)):
            # Sixteen sums are one register of 32, or two of 16.
            together = PANELS if _host("avx512f") else {1: 4, 2: 2}.get(rows, 1)
            for first in range(0, PANELS, together):
                _add_panels(builder, rows, range(first, first + together), *addresses)


def _add_panels(builder, count, panels, x, x_stride, weights, panel, pairs, out, out_stride):
    starts = [builder.add(out, builder.mul(out_stride, _number(row))) for row in range(count)]
    places = [builder.add(start, _number(64 * index)) for start in starts for index in panels]
    sums = [cgutils.alloca_once(builder, _FLOATS) for _ in places]
    for place, room in zip(places, sums, strict=True):
        builder.store(_load(builder, place, _FLOATS), room)
    with cgutils.for_range(builder, pairs) as loop:
        apart = [builder.add(weights, builder.mul(panel, _number(index))) for index in panels]
        weight_offset, x_offset = (builder.mul(loop.index, _number(size)) for size in (4 * LANES, PAIR_BYTES))
        words = [_load(builder, builder.add(start, weight_offset), _WORDS) for start in apart]
        rows = [builder.add(builder.add(x, builder.mul(x_stride, _number(row))), x_offset) for row in range(count)]
        _products(builder, words, rows, [sums[len(panels) * row : len(panels) * (row + 1)] for row in range(count)])
    for place, room in zip(places, sums, strict=True):
        _store(builder, builder.load(room), place)


@_instruction
def _finish(builder, out, factors, bias):
    """Multiply sixteen sums by ``factors`` and add ``bias``, where their addresses are not 0."""
    for address, change in ((factors, builder.fmul), (bias, builder.fadd)):
        with builder.if_then(builder.icmp_signed("!=", address, _number(0))):
            _store(builder, change(_load(builder, out, _FLOATS), _load(builder, address, _FLOATS)), out)


@register_jitable(inline="always")
def _decode_piece(job, expert, block, begin, end, panel, ahead, scratch):
    """Decode columns ``begin`` to ``end`` of a task's panels into ``scratch``, ``panel`` bytes a panel."""
    pairs, blocks = _field(job, PAIRS), _field(job, BLOCKS)
    group, groups = _field(job, GROUP), _field(job, GROUPS)
    kind, bits = _field(job, KIND), _field(job, BITS)
    shift, line = _field(job, SHIFT), _field(job, LINE)
    floats = _field(job, FLOATS)
    values = _field(job, VALUES) + expert * 4 * LANES
    spans = (pairs + _SPAN - 1) // _SPAN
    super_line = 4 * LANES if shift else 2 * LANES
    for panel_index in range(PANELS):
        number = (expert * blocks + block) * PANELS + panel_index
        codes = _field(job, CODES) + number * pairs * 4 * bits
        decoded = scratch + panel_index * panel
        if bits == 16:
            _turn(codes + begin * 4, pairs * 4, end - begin, ahead, decoded)
            continue
        done, group_index = begin, begin // group
        while done < end:
            count = min((group_index + 1) * group, end) - done
            start = codes + done * 4 * bits
            room = decoded + (done - begin) * 4 * LANES
            scales = _field(job, SCALES_AT) + (number * groups + group_index) * line
            supers = _field(job, SUPERS) + (number * spans + done // _SPAN) * super_line
            _decode(kind, bits, floats, shift, start, count, ahead, values, scales, supers, room)
            done += count
            group_index += 1


@register_jitable(inline="always")
def _finish_rows(job, expert, column, first, stop):
    """Multiply the sums of a task's rows ``first`` to ``stop`` by factors and add biases, where there are any."""
    factors, bias = _field(job, FACTORS), _field(job, BIAS)
    out_stride = _field(job, BLOCKS) * PANELS * LANES * 4
    if factors or bias:
        after = expert * out_stride + column
        for row in range(first, stop):
            out = _field(job, OUT) + row * out_stride + column
            for offset in range(0, PANELS * LANES * 4, LANES * 4):
                row_factors = factors + after + offset if factors else 0
                _finish(out + offset, row_factors, bias + after + offset if bias else 0)


def _work(job):
    """Run tasks of ``job`` until none is left; in each thread."""
    pairs, blocks = _field(job, PAIRS), _field(job, BLOCKS)
    bits, tiles = _field(job, BITS), _field(job, TILES)
    scratch = _field(job, SCRATCH) + _next(job + 8 * THREAD) * pairs * PANELS * LANES * 4
    x_stride, out_stride = pairs * PAIR_BYTES, blocks * PANELS * LANES * 4
    configured = 0
    upcoming = _next(job + 8 * TASK)
    while upcoming < _field(job, TASKS):
        task, upcoming = upcoming, _next(job + 8 * TASK)
        place = task // blocks
        block = task - place * blocks
        expert = _field(_field(job, EXPERTS), place)
        first, stop = _field(_field(job, BOUNDS), place), _field(_field(job, BOUNDS), place + 1)
        column = block * PANELS * LANES * 4
        # Few rows take the columns in pieces that stay in the first-level cache between decoding and product.
        short = _SHORT if bits == 16 else _PIECE
        piece = pairs if stop - first > _TILE_ROWS else min(pairs, short)
        panel = piece * 4 * LANES
        for begin in range(0, pairs, piece):
            end = min(begin + piece, pairs)
            # The next piece is fetched, and at the end the first one of the task after.
            apart = 4 if bits == 16 else 4 * bits
            ahead = apart * short
            if end == pairs and upcoming < _field(job, TASKS):
                other = upcoming // blocks
                tasks = (_field(_field(job, EXPERTS), other) - other - expert) * blocks + upcoming - block
                ahead = tasks * PANELS * pairs * 4 * bits - begin * apart
            _decode_piece(job, expert, block, begin, end, panel, ahead, scratch)
            row = first
            while row < stop:
                x, out = _field(job, X) + row * x_stride, _field(job, OUT) + row * out_stride + column
                rows = min(_TILE_ROWS if tiles else _MOST, stop - row)
                row += rows
                if not tiles:
                    _add_rows(rows, x + begin * PAIR_BYTES, x_stride, scratch, panel, end - begin, out, out_stride)
                    continue
                if rows != configured:
                    _configure(_field(job, SHAPES) + 64 * rows)
                    configured = rows
                if begin == 0:
                    _clear_tiles()
                _add_tiles(x + begin * PAIR_BYTES, x_stride, scratch, panel, (end - begin) // 16)
                if end == pairs:
                    _store_tiles(out, out_stride)
        _finish_rows(job, expert, column, first, stop)
    if configured:
        _release()


@cache
def _shapes():
    """Return the AMX tile configuration for each number of rows: tiles 0 to 3 sums, 4 rows of x, 5 to 7 weights."""
    shapes = np.zeros((_TILE_ROWS + 1, 64), dtype=np.uint8)
    shapes[:, 0] = 1
    shapes[:, 16:32:2] = 64
    shapes[:, 48:53] = np.arange(_TILE_ROWS + 1)[:, None]
    shapes[:, 53:56] = _TILE_ROWS
    return shapes


@cache
def _compiled():
    """Return the compiled ``_work``, from the disk where it was kept."""
    try:
        return cfunc(types.void(types.intp), cache=True)(_work)
    except RuntimeError:  # no folder that can be written
        return cfunc(types.void(types.intp))(_work)


@cache
def _parallel():
    """Return ``GOMP_parallel`` of the OpenMP runtime in this process, or None where there is none."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {
        line.split(maxsplit=5)[-1] for line in lines if any(name in line for name in ("libgomp", "libiomp5", "libomp"))
    }
    for path in sorted(paths):
        try:
            function = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
        except OSError:  # replaced on the disk since, or a file of another kind
            continue
        if function is not None:
            function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
            return function
    return None


def run(job, threads):
    """Run ``job``, int64 numbers in the order of ``FIELDS``, in ``threads`` threads; returns when it is done."""
    shapes, parallel, work = _shapes(), _parallel(), _compiled()
    job[SHAPES] = shapes.ctypes.data
    if threads == 1:
        work.ctypes(job.ctypes.data)
    elif parallel is not None:
        parallel(work.address, job.ctypes.data, threads, 0)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work.ctypes, [job.ctypes.data] * threads))
