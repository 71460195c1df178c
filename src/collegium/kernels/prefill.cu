// The product of a large batch in CUDA for sm_90a: rows of one expert times its weights, then bias and activation. The
// contract, the K loop, its blocks and its rounding are those of grouped_gemm.py: the bits are equal.
//
// A block of threads takes output tiles in turn: up to three units of 64 tokens by 128 weight rows: gate and up of the
// same 64 channels, or 128 neighbours. An expert's units are spread evenly over its tiles. The two blocks of a cluster
// take neighbouring weights; each copies half of the tokens, and the tensor memory accelerator writes them to both.
// One thread copies, two warps load factors, and three groups of four warps multiply a unit each: one scales its
// product while the others' run. A tile is drawn when the one before it is nearly copied, so tiles that follow each
// other, and read the same weights, begin at about the same time, and weights come from memory once.
//
// x [rows, K] and w [E * PROJECTIONS * n_out, TERMS * K] come by tensor maps; both read zero beyond their ends.
// x_scale: float32 [rows, k_blocks] (X_SCALE 1) or [rows, 1] (2). scale: float32 [E, PROJECTIONS, scale_rows,
// k_blocks], a factor of 128 weight rows and a K block (SCALE 1), or [E, PROJECTIONS, k_blocks, n_out] (SCALE 4: of
// decoded weights, whose second TERMS of a group of columns lie behind its first). row_scale, bias: [E, PROJECTIONS,
// n_out]. counters: two zeros, which it leaves so. CODES: the result is E4M3 with a float32 scale for each row and 128
// columns; ROUND: what is quantised is rounded to bfloat16 first. Rows from expert_offsets[E] on are not written.
// HAS_ROW_OFFSETS: row r is written to element row_offsets[r] of the result, which may be in a peer's memory, or
// nowhere.
//
// The compiler's options give these and OPERAND (0 E4M3, 1 bfloat16, 2 float16), OUT (1 bfloat16, 2 float16, 3
// float32), ROW_SCALE, ACTIVATION, FAST, HAS_LIMIT (kernels/enums.py), BIAS (0 none, 1 bfloat16, 2 float16, 3 float32),
// ALIGNED: 16-bit results are stored in pieces of 16 bytes. The functions that are no C++ are those of sm90.cu, which
// comes before this text.

constexpr int WORKERS = 3, WARPS = 4 * WORKERS, STAGES = 5, STEP = 128, UNIT = 64, RING = 16;
constexpr int WEIGHT_BYTES = 2 * UNIT * STEP, UNIT_BYTES = UNIT * STEP;
constexpr int STAGE_BYTES = WEIGHT_BYTES + WORKERS * UNIT_BYTES;
constexpr int STEP_K = OPERAND ? STEP / 2 : STEP, SPAN = PROJECTIONS == 2 ? 128 : 256;
// Registers of a thread: as many for all at first, then few for those that copy and more for the others.
constexpr int THREADS = 32 * WARPS + 128, FIRST = 65536 / THREADS, COPYING = 56, MULTIPLYING = 152;
static_assert(128 * COPYING + 32 * WARPS * MULTIPLYING <= THREADS * FIRST, "more than the block was given");
constexpr bool GROUPS = SCALE == 4, PROMOTED = SCALE || X_SCALE == 1;
constexpr int STEPS = GROUPS ? 2 : 1;  // stages whose product is scaled at once
constexpr int CHUNKS = PROJECTIONS == 2 ? 1 : 2;  // results of a unit: 64 columns each
constexpr i64 NOWHERE = -(1LL << 62);

struct Tile { int expert, column, row, count; };

struct Shared {
    u8 stage[STAGES][STAGE_BYTES];
    alignas(16) u8 staging[WARPS][1024];
    alignas(16) float weight[STAGES][2 * UNIT];
    float token[STAGES][WORKERS * UNIT];
    u32 amax[WARPS][2][16];
    Tile tile[RING];
    int place[RING];
    Barrier full[STAGES], empty[STAGES], ready[RING], tile_written[RING], amax_arrived[WARPS][2];
};

static_assert(sizeof(Shared) + 1023 <= 227 * 1024, "more than a block may have");

struct Sizes { int n_out, steps, k_blocks, scale_rows, group_t; float limit, alpha, gate_bound, up_bound; };
struct Lists { const i64* expert_offsets; const int* tile_expert; const i64* tile_row; const int* tiles_used; };
struct ScalesAndBias { const float *x_scale, *scale, *row_scale; const void* bias; };
struct Out { void* rows; const i64* row_offsets; float* scale; };
struct Place { int stage; u32 parity; };

__device__ __forceinline__ void next(Place& p) { if (++p.stage == STAGES) p.stage = 0, p.parity ^= 1; }

// --- which tile ---

// What is at a place of the grid; token tiles that share a pass over the weights are all of one expert.
__device__ __forceinline__ Tile tile_of(int place, int columns, int group_t, const Lists& lists) {
    int listed = place / columns;
    int expert = __ldg(lists.tile_expert + listed), start = (int)__ldg(lists.expert_offsets + expert);
    int rows = (int)__ldg(lists.expert_offsets + expert + 1) - start;
    int before = listed - ((int)__ldg(lists.tile_row + listed) - start) / (WORKERS * UNIT);
    int inside = place - before * columns, units = (rows + UNIT - 1) / UNIT, tiles = (units + WORKERS - 1) / WORKERS;
    int group = inside / (group_t * columns), width = min(tiles - group * group_t, group_t);
    inside -= group * group_t * columns;
    int tile = group * group_t + inside % width, each = units / tiles, more = units % tiles;
    int first = (tile * each + min(tile, more)) * UNIT, wide = (each + (tile < more)) * UNIT;
    return {expert, inside / width, start + first, min(rows - first, wide)};
}

__device__ __forceinline__ int units_of(const Tile& t) { return (t.count + UNIT - 1) / UNIT; }

// Copies the operands of tile after tile; the first block of a cluster draws them. One thread.
__device__ __forceinline__ void copies(
    Shared& s, u32 rank, const Map& x, const Map& w, const Lists& lists, const Sizes& z, int* counters
) {
    Place p{0, 0};
    int columns = (z.n_out + SPAN - 1) / SPAN, places = __ldg(lists.tiles_used) * columns;
    int second = PROJECTIONS == 2 ? z.n_out : UNIT, place = blockIdx.x / 2;
    u32 parity = 0;
#pragma unroll 1
    for (int turn = 0;;) {
        Tile t{0, 0, 0, 0};
        if (place < places) t = tile_of(place, columns, z.group_t, lists);
        s.tile[turn] = t;
        if (PROMOTED) arrive(&s.tile_written[turn]);
        if (t.count == 0) break;
        expect(&s.ready[turn], 4);
        int row = t.expert * PROJECTIONS * z.n_out + t.column * SPAN + SPAN / 2 * rank, units = units_of(t);
#pragma unroll 1
        for (int step = 0; step < z.steps; step++, next(p)) {
            if (rank == 0 && step == max(0, z.steps - 2)) {
                int after = gridDim.x / 2 + atomicAdd(counters, 1);
                send(0, &s.place[turn], after, &s.ready[turn]);
                send(1, &s.place[turn], after, &s.ready[turn]);
            }
            wait(&s.empty[p.stage], p.parity ^ 1);
            u8* to = s.stage[p.stage];
            Barrier* full = &s.full[p.stage];
            expect(full, WEIGHT_BYTES + units * UNIT_BYTES);
            copy(to, w, step * STEP_K, row, full);
            copy(to + UNIT_BYTES, w, step * STEP_K, row + second, full);
#pragma unroll 1
            for (int unit = 0; unit < units; unit++) {
                int half = UNIT * unit + UNIT / 2 * rank;
                copy_to_both(to + WEIGHT_BYTES + half * STEP, x, step / TERMS * STEP_K, t.row + half, full);
            }
        }
        wait(&s.ready[turn], parity);
        place = s.place[turn];
        if (++turn == RING) turn = 0, parity ^= 1;
    }
    wait(&s.empty[p.stage], p.parity ^ 1);
    expect(&s.full[p.stage], 0);
    // The last cluster leaves the counters as it found them.
    if (rank == 0 && atomicAdd(counters + 1, 1) == gridDim.x / 2 - 1) counters[0] = counters[1] = 0;
}

// Loads the factors of tokens and weights, K block by K block. Two warps, which ask for some blocks at a time.
__device__ __forceinline__ void factors(Shared& s, u32 rank, const ScalesAndBias& n, const Sizes& z) {
    constexpr int AHEAD = GROUPS ? 2 : 4, ROWS = X_SCALE == 1 ? WORKERS : 1, OWN = GROUPS ? 2 : 1;
    int lane = threadIdx.x - (WARPS + 1) * 32;
    Place p{0, 0};
    u32 parity = 0;
#pragma unroll 1
    for (int turn = 0;;) {
        wait(&s.tile_written[turn], parity);
        Tile t = s.tile[turn];
        if (t.count == 0) break;
        if (++turn == RING) turn = 0, parity ^= 1;
        int row[ROWS], units = units_of(t);
#pragma unroll
        for (int i = 0; i < ROWS; i++) row[i] = (t.row + min(lane + 64 * i, t.count - 1)) * z.k_blocks;
        // Of blocks one factor a part, lanes 0 and 1; of groups one a weight row, two a lane.
        i64 weight[OWN];
        int by = GROUPS ? z.n_out : 1;
        if (GROUPS) {
#pragma unroll
            for (int h = 0; h < OWN; h++) {
                int column = t.column * SPAN + SPAN / 2 * rank + lane + (PROJECTIONS == 2 ? 0 : UNIT * h);
                i64 part = (i64)t.expert * PROJECTIONS + (PROJECTIONS == 2 ? h : 0);
                weight[h] = part * z.k_blocks * z.n_out + min(column, z.n_out - 1);
            }
        } else {
            int band = PROJECTIONS == 2 ? t.column : min(2 * t.column + (int)rank, z.scale_rows - 1);
            i64 matrix = (i64)t.expert * PROJECTIONS + (PROJECTIONS == 2 && lane == 1);
            weight[0] = (matrix * z.scale_rows + band) * z.k_blocks;
        }
#pragma unroll 1
        for (int block = 0; block < z.k_blocks; block += AHEAD) {
            float of_token[AHEAD][ROWS], of_weight[AHEAD][OWN];
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                bool here = block + k < z.k_blocks;
#pragma unroll
                for (int i = 0; i < ROWS; i++)
                    of_token[k][i] = X_SCALE == 1 && here && i < units ? __ldg(n.x_scale + row[i] + block + k) : 1.0f;
#pragma unroll
                for (int h = 0; h < OWN; h++)
                    of_weight[k][h] = SCALE && here && (GROUPS || lane < 2)
                        ? __ldg(n.scale + weight[h] + (i64)(block + k) * by) : 1.0f;
            }
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                if (block + k >= z.k_blocks) break;
                wait(&s.empty[p.stage], p.parity ^ 1);
#pragma unroll
                for (int i = 0; i < ROWS && !GROUPS; i++) s.token[p.stage][lane + 64 * i] = of_token[k][i];
#pragma unroll
                for (int h = 0; h < OWN; h++)
                    if (GROUPS || lane < 2) s.weight[p.stage][lane + UNIT * h] = of_weight[k][h];
                arrive(&s.full[p.stage]);
                next(p);
                if (STEPS == 2) {
                    wait(&s.empty[p.stage], p.parity ^ 1);
                    arrive(&s.full[p.stage]);
                    next(p);
                }
            }
        }
    }
    wait(&s.empty[p.stage], p.parity ^ 1);
    arrive(&s.full[p.stage]);
}

// --- products ---

__device__ __forceinline__ void multiply_stage(float (&d)[64], const u8* x, const u8* w, bool added) {
#pragma unroll
    for (int k = 0; k < 4; k++) multiply(d, x, w, k, added || k > 0);
}

// The factors of a thread's two rows, for its columns of both operands; with a factor for each group, columns have separate ones.
struct Factors { float low[2], high[2]; };

__device__ __forceinline__ Factors factors_of(const float* token, const float* weight) {
    Factors f;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float of_token = X_SCALE == 1 ? token[8 * h] : 1.0f;
        f.low[h] = weight[0] * of_token;
        f.high[h] = PROJECTIONS == 2 ? weight[1] * of_token : f.low[h];
    }
    return f;
}

// acc += d, scaled. A thread holds rows h of 2 and columns 8 j + e of 2.
__device__ __forceinline__ void promote(float (&acc)[64], const float (&d)[64], const Factors& f, const float* weight) {
#pragma unroll
    for (int j = 0; j < 16; j++) {
        float2 of_column = GROUPS ? *(const float2*)(weight + 8 * j) : float2{};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float factor = j < 8 ? f.low[h] : f.high[h];
            int i = 4 * j + 2 * h;
            acc[i] = fmaf(d[i], GROUPS ? of_column.x : factor, acc[i]);
            acc[i + 1] = fmaf(d[i + 1], GROUPS ? of_column.y : factor, acc[i + 1]);
        }
    }
}

// Sums of all K blocks of this group's unit; without one it only lets stages go.
template <bool HERE> __device__ __forceinline__ void products(
    Shared& s, Place& p, int steps, int group, u32 peer, float (&acc)[64]
) {
    int lane = threadIdx.x % 32, of_thread = group * UNIT + threadIdx.x / 32 % 4 * 16 + lane / 4;
    const u8* first = s.stage[0] + WEIGHT_BYTES + group * UNIT_BYTES;
    if (PROMOTED) {
#pragma unroll 1
        for (int step = 0; step < steps; step += STEPS) {
            Place q = p;
            wait(&s.full[p.stage], p.parity);
            next(q);
            if (STEPS == 2) wait(&s.full[q.stage], q.parity);
            const float *weight = s.weight[p.stage] + (GROUPS ? lane % 4 * 2 : 0);
            float d[64];
            Factors f;
            if (HERE) {
                begin_products();
                multiply_stage(d, first + p.stage * STAGE_BYTES, s.stage[p.stage], false);
                if (STEPS == 2) multiply_stage(d, first + q.stage * STAGE_BYTES, s.stage[q.stage], true);
                commit_products();
                f = factors_of(s.token[p.stage] + of_thread, weight);
                await_products<0>();
            }
            // Nothing reads the stage any more, but the factors of groups.
            if (!GROUPS && lane == 0) arrive_at_both(peer, &s.empty[p.stage]);
            if (HERE) promote(acc, d, f, weight);
            if (GROUPS) {
                __syncwarp();
                if (lane == 0) arrive_at_both(peer, &s.empty[p.stage]), arrive_at_both(peer, &s.empty[q.stage]);
            }
            next(p);
            if (STEPS == 2) next(p);
        }
    } else {
        int before = -1;
#pragma unroll 1
        for (int step = 0; step < steps; step++, next(p)) {
            wait(&s.full[p.stage], p.parity);
            if (HERE) {
                begin_products();
                multiply_stage(acc, first + p.stage * STAGE_BYTES, s.stage[p.stage], step > 0);
                commit_products();
                await_products<1>();
            }
            if (before >= 0 && lane == 0) arrive_at_both(peer, &s.empty[before]);
            before = p.stage;
        }
        if (HERE) await_products<0>();
        if (lane == 0) arrive_at_both(peer, &s.empty[before]);
    }
}

// --- what follows the last K block ---

__device__ __forceinline__ float bias_at(const void* bias, i64 i) {
    if (BIAS == 1) return __uint_as_float((u32)__ldg((const u16*)bias + i) << 16);
    if (BIAS == 3) return __ldg((const float*)bias + i);
    return from_half(__ldg((const u16*)bias + i));
}

// column: of this thread's first number of a part, in the part.
__device__ __forceinline__ void finish(
    float (&d)[64], int expert, int column, const float (&per_token)[2], const ScalesAndBias& n, const Sizes& z
) {
    if (X_SCALE != 2 && !ROW_SCALE && !BIAS) return;
#pragma unroll
    for (int j = 0; j < 16; j++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int part = PROJECTIONS == 2 ? j / 8 : 0, c = column + (PROJECTIONS == 2 ? j % 8 : j) * 8 + e;
            i64 i = ((i64)expert * PROJECTIONS + part) * z.n_out + c;
            bool inside = c < z.n_out;
            float factor = ROW_SCALE && inside ? __ldg(n.row_scale + i) : 0.0f;
            float more = BIAS && inside ? bias_at(n.bias, i) : 0.0f;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float v = d[4 * j + 2 * h + e];
                if (X_SCALE == 2) v *= per_token[h];
                if (ROW_SCALE) v *= factor;
                if (BIAS) v += more;
                d[4 * j + 2 * h + e] = v;
            }
        }
    }
}

// Where row r of the results begins, in elements, or NOWHERE.
__device__ __forceinline__ i64 begins(const Out& o, int row, int n_out) {
    return HAS_ROW_OFFSETS ? __ldg(o.row_offsets + row) : (i64)row * n_out;
}

// Stores 16 rows of 64 columns. row: the first of the warp; left: how many rows there are from it.
__device__ __forceinline__ void store_rows(
    u8* room, const float* d, int row, int left, int column, const Out& o, const Sizes& z
) {
    int lane = threadIdx.x % 32;
    if (!ALIGNED) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int r = lane / 4 + 8 * h;
            if (r >= left) continue;
            i64 to = begins(o, row + r, z.n_out);
            if (to == NOWHERE) continue;
#pragma unroll
            for (int i = 0; i < 16; i++) {
                int c = column + lane % 4 * 2 + i / 2 * 8 + i % 2;
                float v = d[i / 2 * 4 + 2 * h + i % 2];
                if (c >= z.n_out) continue;
                if (OUT != 3) ((u16*)o.rows)[to + c] = (u16)pair(v, v);
                else ((float*)o.rows)[to + c] = v;
            }
        }
        return;
    }
    // Eight rows after the other through shared memory, 16 bytes of a row where the row turns them, so that no two
    // lanes ask one bank.
    int own = lane % 8, at_column = column + 8 * own;
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int j = 0; j < 8; j += 4) {
            const float* v = d + 4 * j + 2 * h;
            u8* to = room + own * 128 + ((j + lane / 8) ^ own) * 16;
            put_matrices(to, pair(v[0], v[1]), pair(v[4], v[5]), pair(v[8], v[9]), pair(v[12], v[13]));
        }
        __syncwarp();
#pragma unroll
        for (int i = lane / 8; i < 8; i += 4) {
            int r = 8 * h + i;
            if (r >= left || at_column >= z.n_out) continue;
            i64 to = begins(o, row + r, z.n_out);
            const uint4* piece = (const uint4*)(room + i * 128 + (own ^ i) * 16);
            if (to != NOWHERE) *(uint4*)((u16*)o.rows + to + at_column) = *piece;
        }
        __syncwarp();
    }
}

// Rounded as div.rn does, for magnitudes and for normal numbers; a division of the compiler's would be a call.
__device__ __forceinline__ float over_448(float x) {
    constexpr float near = 1.0f / 448.0f;
    float q = x * near;
    return fmaf(fmaf(-448.0f, q, x), near, q);
}

__device__ __forceinline__ float inverse_of(float x) {
    float r = near_inverse(x);
    return fmaf(fmaf(-x, r, 1.0f), r, r);
}

__device__ __forceinline__ float scale_of(u32 amax) {
    if (CODES == 2)
        return __int_as_float(max((int)(amax >> 23) - 8 + ((amax & 0x7FFFFFu) > 0x600000u), 1) << 23);
    return fmaxf(over_448(__uint_as_float(amax)), 1.1754943508222875e-38f);
}

__device__ __forceinline__ u16 code_pair(float low, float high, float inverse, bool finite) {
    low = finite ? fminf(fmaxf(low * inverse, -448.0f), 448.0f) : 0.0f;
    high = finite ? fminf(fmaxf(high * inverse, -448.0f), 448.0f) : 0.0f;
    return codes_of(low, high);
}

// Stores codes of 16 rows of 64 or 128 columns. Where gate and up are in one tile, the other half of a row's
// group is in the other block, and its largest magnitude comes from there; the blocks meet turn after turn.
__device__ __forceinline__ void store_codes(
    Shared& s, float* d, int row, int left, int column, u32 peer, u32 turn, const Out& o, const Sizes& z
) {
    constexpr int PAIRS = 8 * CHUNKS;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = column + lane % 4 * 2;
    u32 amax[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 4 * PAIRS; i++) {
        float v = d[i];
        if (ROUND) v = __uint_as_float(pair(v, v) << 16);
        d[i] = v = first + i / 4 * 8 + i % 2 < z.n_out ? v : 0.0f;
        amax[i / 2 % 2] = max(amax[i / 2 % 2], __float_as_uint(v) & 0x7FFFFFFFu);
    }
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int by = 1; by < 4; by *= 2) amax[h] = max(amax[h], __shfl_xor_sync(0xFFFFFFFFu, amax[h], by));
    if (PROJECTIONS == 2) {
        Barrier* amax_arrived = &s.amax_arrived[warp][turn % 2];
        u32* peer_amax = s.amax[warp][turn % 2] + lane / 4;
        if (lane == 0) expect(amax_arrived, 64);
        __syncwarp();
        if (lane % 4 < 2) send(peer, peer_amax + 8 * (lane % 4), lane % 4 ? amax[1] : amax[0], amax_arrived);
        wait(amax_arrived, turn / 2 % 2);
        amax[0] = max(amax[0], peer_amax[0]), amax[1] = max(amax[1], peer_amax[8]);
    }
    constexpr int WIDE = ALIGNED ? 16 : 1, ACROSS = 64 * CHUNKS / WIDE;
    int groups = (z.n_out + 127) / 128;
    u8* room = s.staging[warp];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        bool finite = amax[h] < 0x7F800000u;
        float scale = scale_of(finite ? amax[h] : 0), inverse = inverse_of(scale);
#pragma unroll
        for (int j = 0; j < PAIRS; j++) {
            const float* two = d + 4 * j + 2 * h;
            *(u16*)(room + lane / 4 * 128 + 8 * j + lane % 4 * 2) = code_pair(two[0], two[1], inverse, finite);
        }
        int own = lane / 4 + 8 * h;
        if (own < left && column < z.n_out && column % 128 + lane % 4 == 0)
            o.scale[(i64)(row + own) * groups + column / 128] = finite ? scale : __int_as_float(0x7FFFFFFF);
        __syncwarp();
#pragma unroll 1
        for (int i = lane; i < 8 * ACROSS; i += 32) {
            int r = i / ACROSS + 8 * h, c = i % ACROSS * WIDE;
            if (r >= left || column + c >= z.n_out) continue;
            u8 *to = (u8*)o.rows + (i64)(row + r) * z.n_out + column + c, *from = room + i / ACROSS * 128 + c;
            if (ALIGNED) *(uint4*)to = *(const uint4*)from;
            else *to = *from;
        }
        __syncwarp();
    }
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1) prefill(
    const __grid_constant__ Map x, const __grid_constant__ Map w, int* counters,
    const __grid_constant__ ScalesAndBias n, const __grid_constant__ Out o, const __grid_constant__ Lists lists,
    const __grid_constant__ Sizes z
) {
    Shared& s = *(Shared*)shared_memory();
    int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    u32 rank = blockIdx.x % 2, peer = rank ^ 1;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) init(&s.full[i], PROMOTED ? 65 : 1), init(&s.empty[i], 2 * WARPS);
        for (int i = 0; i < RING; i++) init(&s.ready[i], 1), init(&s.tile_written[i], 1);
        for (int i = 0; i < WARPS; i++) init(&s.amax_arrived[i][0], 1), init(&s.amax_arrived[i][1], 1);
        show_barriers();
    }
    meet_cluster();
    wait_for_previous();
    if (warp >= WARPS) {
        need_registers<COPYING>();
        if (warp == WARPS && lane == 0) copies(s, rank, x, w, lists, z, counters);
        if (PROMOTED && (warp == WARPS + 1 || warp == WARPS + 2)) factors(s, rank, n, z);
        __syncwarp();
    } else {
        take_registers<MULTIPLYING>();
        int group = warp / 4, of_warp = UNIT * group + 16 * (warp % 4);
        u32 exchanges = 0;
        Place p{0, 0};
#pragma unroll 1
        for (int turn = 0;; turn = (turn + 1) % RING) {
            wait(&s.full[p.stage], p.parity);
            Tile t = s.tile[turn];
            if (t.count == 0) break;
            float d[64];
#pragma unroll
            for (int i = 0; i < 64; i++) d[i] = 0.0f;
            if (group >= units_of(t)) {
                products<false>(s, p, z.steps, group, peer, d);
                continue;
            }
            products<true>(s, p, z.steps, group, peer, d);
            int column = t.column * SPAN + SPAN / 2 * rank, row = t.row + of_warp, left = t.count - of_warp;
            float per_token[2];
#pragma unroll
            for (int h = 0; h < 2; h++)
                per_token[h] = X_SCALE == 2 ? __ldg(n.x_scale + row + min(8 * h + lane / 4, left - 1)) : 1.0f;
            finish(d, t.expert, column + lane % 4 * 2, per_token, n, z);
#pragma unroll
            for (int i = 0; i < 32 * CHUNKS; i++) d[i] = activated(d[i], d[PROJECTIONS == 2 ? i + 32 : i], z);
            if (CODES) {
                store_codes(s, d, row, left, column, peer, exchanges++, o, z);
            } else {
                store_rows(s.staging[warp], d, row, left, column, o, z);
                if (PROJECTIONS == 1) store_rows(s.staging[warp], d + 32, row, left, column + UNIT, o, z);
            }
        }
    }
    // Neither block leaves while the other may still write to it.
    meet_cluster();
}
