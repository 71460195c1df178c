"""Products with four-bit weights on a CPU, as machine code that Numba makes at the first use and keeps on disk.

Shape letters: E experts, N output rows, K input columns, r rows of x, G groups.

Sixteen rows of weights lie side by side: byte ``[N / 16, K / 2, 16]`` holds columns 2k (low nibble) and 2k + 1 of one
row. Four such panels are a task. They are decoded whole into bfloat16 pairs ``[K / 2, 16]`` that stay in the
second-level cache, then multiplied by all rows of x of their expert, sixteen at a time with AMX or a few at a time with
fused multiply-adds. Either way a sum runs over k in order and sees no other row, so a row's bits are its own.

Tasks are shared out by a counter to threads of the OpenMP runtime that torch itself uses: a second pool would wait for
torch's threads, which spin for a while after each of its operations.
"""

import ctypes
from functools import cache
from pathlib import Path

import llvmlite.binding as llvm
import llvmlite.ir as ir
import numpy as np
import torch
from numba import cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["FIELDS", "LANES", "PANELS", "SCALES", "has_tiles", "run"]

LANES = 16  # rows of a panel: 32-bit lanes of a register
PANELS = 4  # panels of a task: four sums that do not wait for each other hide the latency of a product
SCALES = ("e8m0", "e4m3", "bf16", "fp32", "zeros")  # what scales are; zeros: float32, and bytes of zero points
_PIECE = 64  # pairs of columns, 16 KiB of a task in bfloat16
_TILE_ROWS = 16  # of x
_FEW, _MORE = 1, 6  # rows of x at a time without AMX: 32 registers hold six by four sums

# What a call is told, 64-bit numbers; addresses are of contiguous tensors. task, thread: counters that threads share.
# experts, bounds: int64, the experts that have rows, the first row of each, and the end. blocks: tasks of an expert.
# kind: place in SCALES. values: float32 [16], what a code means. group: pairs of columns of a scale. factors, bias:
# float32 [E, N], or 0. x: bfloat16 with tiles, else float32; its stride and scratch's, of a thread, in bytes. out:
# float32 [r, N], zeros without tiles. shapes: 64 bytes for each count of rows, what AMX is told of its tiles.
FIELDS = (
    "task", "thread", "tasks", "experts", "bounds", "blocks", "codes", "scales", "zeros", "kind", "values", "group",
    "groups", "pairs", "factors", "bias", "x", "x_stride", "out", "scratch", "scratch_stride", "tiles", "shapes",
)  # fmt: skip
(
    TASK, THREAD, TASKS, EXPERTS, BOUNDS, BLOCKS, CODES, SCALES_AT, ZEROS, KIND, VALUES, GROUP, GROUPS, PAIRS,
    FACTORS, BIAS, X, X_STRIDE, OUT, SCRATCH, SCRATCH_STRIDE, TILES, SHAPES,
) = range(len(FIELDS))  # fmt: skip

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32 = ir.FloatType()
_BYTES, _WORDS, _FLOATS = (ir.VectorType(kind, LANES) for kind in (_I8, _I32, _F32))


def _host(feature):
    """Return whether this CPU has ``feature``; what is compiled, and kept on disk, depends on nothing else."""
    return bool(llvm.get_host_cpu_features().get(feature))


@cache
def has_tiles():
    """Return whether this CPU multiplies tiles of bfloat16 (AMX) and the system lets this process do it."""
    return _host("amx-bf16") and bool(torch.cpu._init_amx())


def _at(builder, address, kind):
    return builder.inttoptr(address, kind.as_pointer())


def _load(builder, address, kind):
    found = builder.load(_at(builder, address, kind))
    found.align = 1
    return found


def _store(builder, value, address):
    builder.store(value, _at(builder, address, value.type)).align = 1


def _word(number):
    return ir.Constant(_WORDS, [number] * LANES)


def _number(number):
    return ir.Constant(_I64, number)


def _call(builder, name, result, *arguments):
    kind = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _instruction(emit):
    """Make an intrinsic of ``emit(builder, *numbers)``, which emits code and returns a 64-bit number or nothing."""

    def make(context, builder, signature, arguments):
        found = emit(builder, *arguments)
        return _number(0) if found is None else found

    names = emit.__code__.co_varnames[1 : emit.__code__.co_argcount]
    found = types.intp(*[types.intp] * len(names)), make
    # Numba reads how many arguments there are from the signature.
    return intrinsic(eval(f"lambda {', '.join(('typing', *names))}: found", {"found": found}))


@_instruction
def _field(builder, job, index):
    return _load(builder, builder.add(job, builder.mul(index, _number(8))), _I64)


@_instruction
def _next(builder, address):
    return builder.atomic_rmw("add", _at(builder, address, _I64), _number(1), "monotonic")


def _scale(builder, kind, scales):
    """Return sixteen scales as float32."""
    if kind == "bf16":
        stored = _load(builder, scales, ir.VectorType(_I16, LANES))
        return builder.bitcast(builder.shl(builder.zext(stored, _WORDS), _word(16)), _FLOATS)
    if kind in ("fp32", "zeros"):
        return _load(builder, scales, _FLOATS)
    code = builder.zext(_load(builder, scales, _BYTES), _WORDS)
    if kind == "e8m0":
        return builder.bitcast(builder.shl(code, _word(23)), _FLOATS)
    # Exponent biases 127 and 7. Subnormal numbers are counted in steps of 2^-9: as bits they would be subnormal here
    # too, which costs many cycles each and is zero where a caller has torch flush them.
    normal = builder.add(builder.shl(code, _word(20)), _word(120 << 23))
    small = builder.fmul(builder.uitofp(code, _FLOATS), ir.Constant(_FLOATS, [2.0**-9] * LANES))
    return builder.select(builder.icmp_unsigned("<", code, _word(8)), small, builder.bitcast(normal, _FLOATS))


class _BFloats(ir.Type):
    """Thirty-two bfloat16, a type that the builder of instructions does not know."""

    def _to_string(self):
        return "<32 x bfloat>"


def _pair(builder, low, high, rounded):
    """Return bfloat16 of two vectors side by side in 32-bit lanes: rounded to nearest even, or cut."""
    if rounded and _host("avx512bf16"):
        apart = _call(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", _BFloats(), high, low)
        apart = builder.bitcast(apart, ir.VectorType(_I16, 2 * LANES))
        order = [lane for own in range(LANES) for lane in (own, LANES + own)]
        mask = ir.Constant(ir.VectorType(_I32, 2 * LANES), order)
        return builder.bitcast(builder.shuffle_vector(apart, apart, mask), _WORDS)

    def upper(number):
        bits = builder.bitcast(number, _WORDS)
        if not rounded:
            return bits
        odd = builder.and_(builder.lshr(bits, _word(16)), _word(1))
        return builder.add(builder.add(bits, _word(0x7FFF)), odd)

    return builder.or_(builder.lshr(upper(low), _word(16)), builder.and_(upper(high), _word(0xFFFF0000)))


def _decoder(kind):
    def decode(builder, codes, count, values, scales, zeros, out):
        """Decode ``count`` pairs of columns of sixteen rows under one row of scales."""
        table, scale = _load(builder, values, _FLOATS), _scale(builder, kind, scales)
        zero = builder.uitofp(_load(builder, zeros, _BYTES), _FLOATS) if kind == "zeros" else None

        def weights(code):
            found = _call(builder, "llvm.x86.avx512.permvar.sf.512", _FLOATS, table, code)
            return builder.fmul(found if zero is None else builder.fsub(found, zero), scale)

        with cgutils.for_range(builder, count) as loop:
            place = builder.add(codes, builder.mul(loop.index, _number(LANES)))
            code = builder.zext(_load(builder, place, _BYTES), _WORDS)
            low, high = weights(code), weights(builder.lshr(code, _word(4)))
            pair = _pair(builder, low, high, rounded=kind not in ("e8m0", "e4m3"))
            _store(builder, pair, builder.add(out, builder.mul(loop.index, _number(4 * LANES))))

    return _instruction(decode)


_decode_e8m0, _decode_e4m3, _decode_bf16, _decode_fp32, _decode_zeros = (_decoder(kind) for kind in SCALES)


def _tile(builder, name, *arguments):
    """Call an AMX instruction, where the CPU has it: numbers are tiles, the rest addresses and strides."""
    if not _host("amx-bf16"):
        return
    given = [ir.Constant(_I8, own) if isinstance(own, int) else own for own in arguments]
    _call(builder, f"llvm.x86.{name}", ir.VoidType(), *given)


@_instruction
def _configure(builder, shapes):
    _tile(builder, "ldtilecfg", _at(builder, shapes, _I8))


@_instruction
def _release(builder):
    _tile(builder, "tilerelease")


@_instruction
def _clear_tiles(builder):
    for own in range(PANELS):
        _tile(builder, "tilezero", own)


@_instruction
def _add_tiles(builder, x, x_stride, weights, panel, steps):
    """Add the product of a tile of rows with ``steps`` times 32 columns of four panels, ``panel`` bytes apart."""
    apart = [builder.add(weights, builder.mul(panel, _number(own))) for own in range(PANELS)]
    with cgutils.for_range(builder, steps) as loop:
        columns = builder.add(x, builder.mul(loop.index, _number(64)))
        _tile(builder, "tileloadd64", 4, _at(builder, columns, _I8), x_stride)
        for own, start in enumerate(apart):
            rows, room = builder.add(start, builder.mul(loop.index, _number(1024))), 5 + own % 3
            _tile(builder, "tileloadd64", room, _at(builder, rows, _I8), _number(64))
            _tile(builder, "tdpbf16ps", own, 4, room)


@_instruction
def _store_tiles(builder, out, out_stride):
    for own in range(PANELS):
        _tile(builder, "tilestored64", own, _at(builder, builder.add(out, _number(64 * own)), _I8), out_stride)


def _adder(rows):
    def add(builder, x, x_stride, weights, panel, pairs, out, out_stride):
        """Add the product of float32 rows with ``pairs`` columns of four panels, ``panel`` bytes apart, to ``out``."""
        nothing = ir.Constant(_FLOATS, [0.0] * LANES)
        starts = [builder.add(out, builder.mul(out_stride, _number(row))) for row in range(rows)]
        places = [[builder.add(start, _number(64 * own)) for own in range(PANELS)] for start in starts]
        sums = [[cgutils.alloca_once(builder, _FLOATS) for _ in own] for own in places]
        pairs_of = [pair for one, two in zip(places, sums, strict=True) for pair in zip(one, two, strict=True)]
        for place, room in pairs_of:
            builder.store(_load(builder, place, _FLOATS), room)
        with cgutils.for_range(builder, pairs) as loop:
            halves = []
            for own in range(PANELS):
                start = builder.add(weights, builder.mul(panel, _number(own)))
                words = _load(builder, builder.add(start, builder.mul(loop.index, _number(4 * LANES))), _WORDS)
                kept = (builder.shl(words, _word(16)), builder.and_(words, _word(0xFFFF0000)))
                halves.append([builder.bitcast(bits, _FLOATS) for bits in kept])
            for row, rooms in enumerate(sums):
                start = builder.add(x, builder.mul(x_stride, _number(row)))
                for half in range(2):
                    place = builder.add(start, builder.add(builder.mul(loop.index, _number(8)), _number(4 * half)))
                    one = builder.insert_element(nothing, _load(builder, place, _F32), ir.Constant(_I32, 0))
                    spread = builder.shuffle_vector(one, nothing, _word(0))
                    for own, room in enumerate(rooms):
                        given = (spread, halves[own][half], builder.load(room))
                        builder.store(_call(builder, "llvm.fma.v16f32", _FLOATS, *given), room)
        for place, room in pairs_of:
            _store(builder, builder.load(room), place)

    return _instruction(add)


_add_row, _add_rows = _adder(_FEW), _adder(_MORE)


@_instruction
def _finish(builder, out, factors, bias):
    """Multiply sixteen sums by ``factors`` and add ``bias``, where their addresses are not 0."""
    for address, change in ((factors, builder.fmul), (bias, builder.fadd)):
        with builder.if_then(builder.icmp_signed("!=", address, _number(0))):
            _store(builder, change(_load(builder, out, _FLOATS), _load(builder, address, _FLOATS)), out)


def _work(job):
    scratch = _field(job, SCRATCH) + _next(job + 8 * THREAD) * _field(job, SCRATCH_STRIDE)
    pairs, group, groups, blocks = _field(job, PAIRS), _field(job, GROUP), _field(job, GROUPS), _field(job, BLOCKS)
    kind, values, tiles = _field(job, KIND), _field(job, VALUES), _field(job, TILES)
    wide = 1 if kind < 2 else 2 if kind == 2 else 4
    width = blocks * PANELS * LANES
    x_stride, out_stride = _field(job, X_STRIDE), width * 4
    configured = 0
    while True:
        task = _next(job + 8 * TASK)
        if task >= _field(job, TASKS):
            break
        place = task // blocks
        block = task - place * blocks
        expert = _field(_field(job, EXPERTS), place)
        first, stop = _field(_field(job, BOUNDS), place), _field(_field(job, BOUNDS), place + 1)
        column = block * PANELS * LANES * 4
        # Few rows take the columns in pieces that stay in the first-level cache between decoding and product.
        piece = pairs if stop - first > _TILE_ROWS else min(pairs, _PIECE)
        panel = piece * 4 * LANES
        for begin in range(0, pairs, piece):
            end = min(begin + piece, pairs)
            for own in range(PANELS):
                number = (expert * blocks + block) * PANELS + own
                codes = _field(job, CODES) + number * pairs * LANES
                decoded = scratch + own * panel
                done = begin
                while done < end:
                    at = done // group
                    count = min((at + 1) * group, end) - done
                    start, room = codes + done * LANES, decoded + (done - begin) * 4 * LANES
                    line = (number * groups + at) * LANES
                    scales, zeros = _field(job, SCALES_AT) + line * wide, _field(job, ZEROS) + line
                    if kind == 0:
                        _decode_e8m0(start, count, values, scales, zeros, room)
                    elif kind == 1:
                        _decode_e4m3(start, count, values, scales, zeros, room)
                    elif kind == 2:
                        _decode_bf16(start, count, values, scales, zeros, room)
                    elif kind == 3:
                        _decode_fp32(start, count, values, scales, zeros, room)
                    else:
                        _decode_zeros(start, count, values, scales, zeros, room)
                    done += count
            row = first
            while row < stop:
                x, out = _field(job, X) + row * x_stride, _field(job, OUT) + row * out_stride + column
                if tiles:
                    rows = min(_TILE_ROWS, stop - row)
                    if rows != configured:
                        _configure(_field(job, SHAPES) + 64 * rows)
                        configured = rows
                    if begin == 0:
                        _clear_tiles()
                    _add_tiles(x + begin * 4, x_stride, scratch, panel, (end - begin) // 16)
                    if end == pairs:
                        _store_tiles(out, out_stride)
                elif stop - row >= _MORE:
                    rows = _MORE
                    _add_rows(x + begin * 8, x_stride, scratch, panel, end - begin, out, out_stride)
                else:
                    rows = _FEW
                    _add_row(x + begin * 8, x_stride, scratch, panel, end - begin, out, out_stride)
                row += rows
        factors, bias = _field(job, FACTORS), _field(job, BIAS)
        if factors or bias:
            after = expert * out_stride + column
            for row in range(first, stop):
                out = _field(job, OUT) + row * out_stride + column
                for own in range(0, PANELS * LANES * 4, LANES * 4):
                    _finish(out + own, factors + after + own if factors else 0, bias + after + own if bias else 0)
    if configured:
        _release()


@cache
def _shapes():
    """Return what AMX is told of its tiles for each count of rows: 0 to 3 sums, 4 rows of x, 5 to 7 weights."""
    found = np.zeros((_TILE_ROWS + 1, 64), dtype=np.uint8)
    found[:, 0] = 1
    found[:, 16:32:2] = 64
    found[:, 48:53] = np.arange(_TILE_ROWS + 1)[:, None]
    found[:, 53:56] = _TILE_ROWS
    return found


@cache
def _compiled():
    """Return the compiled ``_work``, from the disk where it was kept."""
    try:
        return cfunc(types.void(types.intp), cache=True)(_work)
    except RuntimeError:  # no folder that can be written
        return cfunc(types.void(types.intp))(_work)


@cache
def _parallel():
    """Return ``GOMP_parallel`` of the OpenMP runtime in this process, or None."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split()[-1] for line in lines if any(name in line for name in ("libgomp", "libiomp5", "libomp"))}
    for path in sorted(paths):
        found = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
        if found is not None:
            found.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
            found.restype = None
            return found
    return None


def run(job, threads):
    """Run ``job``, int64 numbers in the order of ``FIELDS``, in ``threads`` threads; returns when it is done."""
    parallel, work = _parallel(), _compiled()
    job[SHAPES] = _shapes().ctypes.data
    if threads > 1 and parallel is not None:
        parallel(work.address, job.ctypes.data, threads, 0)
    else:
        work.ctypes(job.ctypes.data)
