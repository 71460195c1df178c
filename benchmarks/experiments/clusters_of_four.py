"""An experiment: the kernel of large batches in clusters of four blocks, which share weights too.

Copies alone take two thirds of the time of a large batch in FP8, most of it from the L2 cache, and an expert of four to
six units reads its weights there for each of two tiles. Here two blocks multiply each tile of a pair: all four get
their tokens from one neighbour and their weights from another, so a step of 5 units by 256 weight rows is 576 rows and
not 832. An expert of up to three units gives its tokens to all four, and each has columns of its own.

``bench_prefill.py --four`` measures it. The library does not use it. Its text is that of ``prefill.cu`` with other
pieces, so nothing else can differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from collegium.experts.triton import prefill
from collegium.experts.triton.tile_choice import TileChoice

if TYPE_CHECKING:
    from collections.abc import Mapping

    from collegium.runtime.machine import Machine

__all__ = ["changed", "source_of", "tile_for"]

_ROWS = 384  # of a pair of tiles

# Beside the functions of sm90.cu.
_INSTRUCTIONS = """
__device__ __forceinline__ void arrive_at(u32 rank, Barrier* b) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(in(rank, b)) : "memory");
}

__device__ __forceinline__ void copy_to(void* to, const Map& map, int x, int y, Barrier* b, u32 blocks) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                 " [%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(at(to)), "l"(&map), "r"(x), "r"(y), "r"(at(b)), "h"((u16)blocks) : "memory");
}
"""

_WHICH = """
// What a cluster multiplies at a place of the grid: a pair of tiles by one span of columns after the other, or one tile
// (wide) by two at once. tile: of the block of this rank.
struct Work { Tile tile; int passes; bool wide; };

__device__ __forceinline__ void tell(Shared& s, int draw, int place) {
    for (u32 r = 0; r < 4; r++) send(r, &s.place[draw], place, &s.ready[draw]);
}

__device__ __forceinline__ Work work_of(int place, int columns, int group_t, u32 rank, const Lists& lists) {
    int spans = (columns + 1) / 2, listed = place / spans, half = rank / 2;
    int expert = __ldg(lists.tile_expert + listed), start = (int)__ldg(lists.expert_offsets + expert);
    int rows = (int)__ldg(lists.expert_offsets + expert + 1) - start;
    int before = listed - ((int)__ldg(lists.tile_row + listed) - start) / (2 * WORKERS * UNIT);
    int inside = place - before * spans, units = (rows + UNIT - 1) / UNIT;
    if (units <= WORKERS) return {{expert, 2 * inside + half, start, rows}, 1, true};
    int pairs = (units + 2 * WORKERS - 1) / (2 * WORKERS), tiles = 2 * pairs;
    int group = inside / (group_t * spans), width = min(pairs - group * group_t, group_t);
    inside -= group * group_t * spans;
    int tile = 2 * (group * group_t + inside % width) + half, span = inside / width;
    int each = units / tiles, more = units % tiles;
    int first = (tile * each + min(tile, more)) * UNIT, tall = (each + (tile < more)) * UNIT;
    return {{expert, 2 * span, start + first, min(rows - first, tall)}, min(2, columns - 2 * span), false};
}
"""

_COPIES = """
    Place p{0, 0};
    int columns = (z.n_out + SPAN - 1) / SPAN, places = __ldg(lists.tiles_used) * ((columns + 1) / 2);
    int second = PARTS == 2 ? z.n_out : UNIT, half = rank / 2, turn = 0, draw = 0;
    u32 parity = 0;
    // The first place is drawn too: of 33 clusters one may begin when the others are done.
    expect(&s.ready[draw], 4);
    if (rank == 0) tell(s, draw, atomicAdd(counters, 1));
#pragma unroll 1
    for (;;) {
        wait(&s.ready[draw], parity);
        int place = s.place[draw];
        if (++draw == RING) draw = 0, parity ^= 1;
        Work found{{0, 0, 0, 0}, 0, false};
        if (place < places) found = work_of(place, columns, z.group_t, rank, lists);
        if (found.passes == 0) break;
        expect(&s.ready[draw], 4);
        int units = units_of(found.tile);
#pragma unroll 1
        for (int pass = 0; pass < found.passes; pass++) {
            Tile t = found.tile;
            t.column += pass;
            s.tile[turn] = t;
            if (PROMOTED) arrive(&s.told[turn]);
            if (++turn == RING) turn = 0;
            int row = t.expert * PARTS * z.n_out + t.column * SPAN + SPAN / 2 * (rank % 2);
#pragma unroll 1
            for (int step = 0; step < z.steps; step++, next(p)) {
                if (rank == 0 && pass == found.passes - 1 && step == max(0, z.steps - 2))
                    tell(s, draw, atomicAdd(counters, 1));
                wait(&s.empty[p.stage], p.parity ^ 1);
                u8* to = s.stage[p.stage];
                Barrier* full = &s.full[p.stage];
                expect(full, WEIGHT_BYTES + units * UNIT_BYTES);
                if (found.wide) {
                    copy(to, w, step * STEP_K, row, full);
                    copy(to + UNIT_BYTES, w, step * STEP_K, row + second, full);
                } else {
                    copy_to(to + half * UNIT_BYTES, w, step * STEP_K, row + half * second, full, 5 << rank % 2);
                }
#pragma unroll 1
                for (int unit = 0; unit < units; unit++) {
                    if (found.wide && unit % 2 != half) continue;
                    int mine = UNIT * unit + UNIT / 2 * (rank % 2);
                    u32 blocks = found.wide ? 15 : 3 << 2 * half;
                    copy_to(to + WEIGHT_BYTES + mine * STEP, x, step / TERMS * STEP_K, t.row + mine, full, blocks);
                }
            }
        }
    }
    s.tile[turn] = {0, 0, 0, 0};
    if (PROMOTED) arrive(&s.told[turn]);
    wait(&s.empty[p.stage], p.parity ^ 1);
    expect(&s.full[p.stage], 0);
    // The last cluster leaves the counters as it found them.
    if (rank == 0 && atomicAdd(counters + 1, 1) == gridDim.x / 4 - 1) counters[0] = counters[1] = 0;
}
"""

_PIECES = (
    ("__cluster_dims__(2, 1, 1)", "__cluster_dims__(4, 1, 1)"),
    ("u32 rank = blockIdx.x % 2, peer = rank ^ 1;", "u32 all = blockIdx.x % 4, rank = all % 2, peer = all ^ 1;"),
    ("copies(s, rank, x, w,", "copies(s, all, x, w,"),
    ("init(&s.empty[i], 2 * WARPS)", "init(&s.empty[i], 4 * WARPS)"),
    ("if (!GROUPS && lane == 0) arrive_at_both(peer, ", "if (!GROUPS && lane < 4) arrive_at(lane, "),
    (
        "if (lane == 0) arrive_at_both(peer, &s.empty[p.stage]), arrive_at_both(peer, &s.empty[q.stage]);",
        "if (lane < 4) arrive_at(lane, &s.empty[p.stage]), arrive_at(lane, &s.empty[q.stage]);",
    ),
    (
        "if (before >= 0 && lane == 0) arrive_at_both(peer, &s.empty[before]);",
        "if (before >= 0 && lane < 4) arrive_at(lane, &s.empty[before]);",
    ),
    ("if (lane == 0) arrive_at_both(peer, &s.empty[before]);", "if (lane < 4) arrive_at(lane, &s.empty[before]);"),
    ("int band = PARTS == 2 ? t.column :", "int band = PARTS == 2 ? min(t.column, z.scale_rows - 1) :"),
)


def changed(text: str) -> str:
    """Return the kernel's text for clusters of four."""
    for piece, instead in _PIECES:
        assert text.count(piece) == 1, piece
        text = text.replace(piece, instead)
    for begins, ends, instead in (
        ("// What is at a place of the grid;", "__device__ __forceinline__ int units_of", _WHICH.lstrip() + "\n"),
        ("    Place p{0, 0};\n    int columns", "// Loads the factors of tokens", _COPIES.lstrip("\n") + "\n"),
    ):
        start = text.index(begins)
        text = text[:start] + instead + text[text.index(ends, start) :]
    return text


def source_of(constants: Mapping[str, int]) -> str:
    """Return the text for a GPU."""
    text = changed(prefill.source_of(constants))
    head = text.index("// The product of a large batch")
    return text[:head] + _INSTRUCTIONS + text[head:]


def tile_for(machine: Machine) -> TileChoice:
    """Return the tile whose list names pairs."""
    programs = machine.sms // 4 * 4
    return TileChoice(block_n=128, block_t=_ROWS, warps=12, stages=5, group_t=8, programs=programs)
