// Tiles, copies and the sum over K of w4_prefill.cu.

constexpr int GROUPS = 2;           // of four warps, which multiply
constexpr int WARPS = 4 * GROUPS;
constexpr int ROW_TILES = 2;        // of a group: 64 weight rows each, with separate operands and sums
constexpr int BLOCK_TILES = GROUPS * ROW_TILES;
constexpr int BLOCK_ROWS = BLOCK_TILES * ROW_TILE;
constexpr int MAX_TOKENS_OF_TWO = 80;  // of a tile whose products of two row tiles fit in registers next to the sums
constexpr int TOKEN_STEP = 16;      // widths of tiles are its multiples
constexpr int WIDTHS = MAX_TOKENS / TOKEN_STEP;
constexpr int OF_LANE = (MAX_TOKENS + 31) / 32;  // tokens of a tile, of a lane that loads their scales
constexpr int BOX_COLUMNS = OPERAND ? 64 : 128;  // of tokens, 128 bytes
constexpr int BOXES = K_BLOCK / BOX_COLUMNS;     // of tokens in a stage, one after the other
constexpr int BOX_BYTES = MAX_TOKENS * 128;
constexpr int TOKEN_BYTES = BOXES * BOX_BYTES;
constexpr int WEIGHT_BYTES = BLOCK_TILES * (CODE_BYTES + SCALE_BYTES);
constexpr int STAGE_BYTES = TOKEN_BYTES + WEIGHT_BYTES;
constexpr int STEPS = ROW_TILES * PASSES;        // of a group and stage: the row tiles take turns
constexpr int MAX_STAGES = (227 - 24) * 1024 / STAGE_BYTES;  // next to 24 KB of results and factors
constexpr int STAGES = MAX_STAGES < 6 ? MAX_STAGES : 6;
constexpr int OUT_TOKENS = 32;      // that the epilogue stores at once
constexpr int OUT_COLUMNS = ROW_TILES * ROW_TILE / PROJECTIONS;  // results of a group for one token
constexpr int OUT_PITCH = 2 * OUT_COLUMNS + 16;            // bytes, so that eight rows begin in different banks
constexpr int RING = 8;             // tiles that were drawn and are not finished
// Warps after those that multiply, one task each.
constexpr int COPY_WARP = WARPS, DRAW_WARP = WARPS + 1, FACTOR_WARP = WARPS + 2, SCALE_WARP = WARPS + 3;
constexpr int THREADS = 32 * WARPS + 128;
// Registers of a thread that multiplies, and of the others; at first all have the same number.
constexpr int FIRST = 65536 / THREADS / 8 * 8, MULTIPLYING = 232, COPYING = 40;
static_assert(32 * WARPS * MULTIPLYING + 128 * COPYING <= THREADS * FIRST, "more registers than a block has");
static_assert(STAGE_BYTES % 1024 == 0, "tokens are swizzled from multiples of 1024 on");
static_assert(OUT_TOKENS * OUT_PITCH >= 16 * 4 * OUT_COLUMNS, "float32 results of 16 tokens do not fit");
static_assert(STAGES + 2 <= RING, "a tile might be replaced before it is finished");

// Tokens row to row + count - 1 of one expert and a column of weights; width: tokens that are multiplied. No tokens: the
// end. The two blocks of a cluster have the same tile: row tiles of weights 2 * column * BLOCK_TILES on.
struct alignas(16) Tile { int expert, column, row, count_and_width; };

__device__ __forceinline__ int tokens_of(const Tile& t) { return t.count_and_width & 0xFFFF; }
__device__ __forceinline__ int width_of(const Tile& t) { return t.count_and_width >> 16; }

// What the epilogue multiplies and adds: of each weight row of the block and of each token, where they have it.
constexpr bool X_SCALED = OPERAND == 0 && !X_GROUPS;
struct Factors { float row_scale[BLOCK_ROWS], bias[BLOCK_ROWS], x_scale[32 * OF_LANE]; };

struct Shared {
    u8 stage[STAGES][STAGE_BYTES];
    alignas(16) float x_scale[X_GROUPS ? STAGES : 1][X_GROUPS ? 32 * OF_LANE : 4];
    alignas(16) u8 out[GROUPS][OUT_TOKENS * OUT_PITCH];
    alignas(16) Factors factors[2];
    Tile tile[RING];
    Barrier full[STAGES], empty[STAGES], ready[RING], nearly_copied[RING], factors_full[2], factors_empty[2];
};

static_assert(sizeof(Shared) + 1023 <= 227 * 1024, "more shared memory than a block may have");

struct TokenMaps { Map of_width[WIDTHS]; };  // boxes of half of the tokens of a tile
struct Sizes { int n_out, row_tiles, k_blocks, group_t, sixteen, scale_stride; float limit, alpha, gate_bound, up_bound; };
struct Lists { const i64* expert_offsets; const int* tile_expert; const i64* tile_row; const int* tiles_used; };
struct Parameters { const float *x_scale, *row_scale; const void* bias; };

// A stage, and the parity of its barriers.
struct Cursor { int stage; u32 parity; };

__device__ __forceinline__ void next(Cursor& c) { if (++c.stage == STAGES) c.stage = 0, c.parity ^= 1; }

// --- tiles ---

// The tile at a place of the grid of token tiles and weight columns; group_t token tiles of one expert share a pass over
// its weights. The tokens of an expert are spread evenly over its tiles.
__device__ __forceinline__ Tile tile_at(int place, int columns, int group_t, const Lists& lists) {
    int listed = place / columns;
    int expert = __ldg(lists.tile_expert + listed);
    int start = (int)__ldg(lists.expert_offsets + expert);
    int rows = (int)__ldg(lists.expert_offsets + expert + 1) - start;
    int first_listed = listed - ((int)__ldg(lists.tile_row + listed) - start) / MAX_TOKENS;
    int index = place - first_listed * columns;
    int tiles = (rows + MAX_TOKENS - 1) / MAX_TOKENS;
    int group = index / (group_t * columns);
    int group_tiles = min(tiles - group * group_t, group_t);
    index -= group * group_t * columns;
    int tile = group * group_t + index % group_tiles;
    int steps = (rows + TOKEN_STEP - 1) / TOKEN_STEP;
    int quotient = steps / tiles, rest = steps % tiles;
    int first = (tile * quotient + min(tile, rest)) * TOKEN_STEP;
    int width = (quotient + (tile < rest)) * TOKEN_STEP;
    return {expert, index / group_tiles, start + first, min(rows - first, width) | width << 16};
}

// Draws tiles for the cluster, each when the copies of the one before are nearly complete: tiles that follow each other,
// and read the same weights, begin at about the same time, and weights come from memory once. One thread of the first
// block of the cluster.
__device__ __forceinline__ void draw_tiles(Shared& s, const Lists& lists, const Sizes& z, int* counters) {
    int columns = (z.row_tiles + 2 * BLOCK_TILES - 1) / (2 * BLOCK_TILES);
    int places = __ldg(lists.tiles_used) * columns, clusters = gridDim.x / 2;
#pragma unroll 1
    for (u32 turn = 0;; turn++) {
        int slot = turn % RING, place = blockIdx.x / 2;
        if (turn) {
            u32 before = turn - 1;
            wait_at_most(&s.nearly_copied[before % RING], before / RING % 2);
            place = clusters + atomicAdd(counters, 1);
        }
        Tile t{0, 0, 0, 0};
        if (place < places) t = tile_at(place, columns, z.group_t, lists);
        for (u32 rank = 0; rank < 2; rank++)
            send_four(rank, &s.tile[slot], t.expert, t.column, t.row, t.count_and_width, &s.ready[slot]);
        if (tokens_of(t) == 0) break;
    }
    // The last cluster leaves the counters as it found them.
    if (atomicAdd(counters + 1, 1) == clusters - 1) counters[0] = counters[1] = 0;
}

// --- copies ---

// Copies the operands of tile after tile: the block's own weights, and half of the tokens for both blocks. One thread.
__device__ __forceinline__ void copy_operands(
    Shared& s, u32 rank, const TokenMaps& tokens, const Map& codes, const Map& scales, const Sizes& z
) {
    Cursor c{0, 0};
#pragma unroll 1
    for (u32 turn = 0;; turn++) {
        int slot = turn % RING;
        expect(&s.ready[slot], sizeof(Tile));
        wait_at_most(&s.ready[slot], turn / RING % 2);
        Tile t = s.tile[slot];
        if (tokens_of(t) == 0) break;
        int width = width_of(t), half = width / 2 * rank;
        int row_tile = (2 * t.column + rank) * BLOCK_TILES;
        const Map& box = tokens.of_width[width / TOKEN_STEP - 1];
#pragma unroll 1
        for (int block = 0; block < z.k_blocks; block++, next(c)) {
            if (block == max(0, z.k_blocks - (STAGES - 1))) arrive_at(0, &s.nearly_copied[slot]);
            wait_at_most(&s.empty[c.stage], c.parity ^ 1);
            u8* to = s.stage[c.stage];
            Barrier* full = &s.full[c.stage];
            expect(full, WEIGHT_BYTES + width * (BOXES * 128));
            copy_weights<BLOCK_TILES>(to + TOKEN_BYTES, codes, scales, block, row_tile, t.expert, z.k_blocks, full);
            int column = block * K_BLOCK, row = t.row + half;
#pragma unroll
            for (int i = 0; i < BOXES; i++)
                copy_to_both(to + i * BOX_BYTES + half * 128, box, column + i * BOX_COLUMNS, row, full);
        }
    }
}

// --- factors of the epilogue ---

__device__ __forceinline__ float bias_at(const void* bias, i64 i) {
    if (BIAS == 1) return __uint_as_float((u32)__ldg((const u16*)bias + i) << 16);
    if (BIAS == 3) return __ldg((const float*)bias + i);
    return from_half(__ldg((const u16*)bias + i));
}

// The part (gate or up) and channel of row r of all row tiles of an expert: eight rows of each part alternate.
__device__ __forceinline__ int part_of(int r) { return PROJECTIONS == 2 ? r / 8 % 2 : 0; }
__device__ __forceinline__ int channel_of(int r) { return PROJECTIONS == 2 ? r / 16 * 8 + r % 8 : r; }

// Loads the factors of tile after tile. One warp.
__device__ __forceinline__ void load_factors(Shared& s, u32 rank, const Parameters& p, const Sizes& z) {
    int lane = threadIdx.x % 32;
#pragma unroll 1
    for (u32 turn = 0;; turn++) {
        int slot = turn % RING, side = turn % 2;
        wait_at_most(&s.ready[slot], turn / RING % 2);
        Tile t = s.tile[slot];
        if (tokens_of(t) == 0) break;
        Factors& f = s.factors[side];
        int first = (2 * t.column + rank) * BLOCK_ROWS;
        float scale[BLOCK_ROWS / 32], of_token[OF_LANE];
        if (!RUNNING_UNIT) {
#pragma unroll
            for (int i = 0; i < BLOCK_ROWS / 32; i++)
                scale[i] = row_scale_of(p.row_scale, t.expert, first + 32 * i + lane, z.row_tiles, z.n_out);
        }
        if (X_SCALED) {
#pragma unroll
            for (int i = 0; i < OF_LANE; i++)
                of_token[i] = __ldg(p.x_scale + t.row + min(32 * i + lane, tokens_of(t) - 1));
        }
        wait_at_most(&s.factors_empty[side], turn / 2 % 2 ^ 1);
        if (!RUNNING_UNIT) {
#pragma unroll
            for (int i = 0; i < BLOCK_ROWS / 32; i++) f.row_scale[32 * i + lane] = scale[i];
        }
        if (X_SCALED) {
#pragma unroll
            for (int i = 0; i < OF_LANE; i++) f.x_scale[32 * i + lane] = of_token[i];
        }
        if (BIAS) {
#pragma unroll 2
            for (int i = 0; i < BLOCK_ROWS / 32; i++) {
                int row = first + 32 * i + lane, channel = channel_of(row);
                i64 at_bias = ((i64)t.expert * PROJECTIONS + part_of(row)) * z.n_out + channel;
                f.bias[32 * i + lane] = channel < z.n_out ? bias_at(p.bias, at_bias) : 0.0f;
            }
        }
        __syncwarp();
        if (lane == 0) arrive(&s.factors_full[side]);
    }
}

// Where the scale of a token is in a stage: a thread's four tokens of 16 follow each other.
__device__ __forceinline__ int scale_place(int token) {
    return token / 16 * 16 + token / 2 % 4 * 4 + token / 8 % 2 * 2 + token % 2;
}

// Loads the scales of tokens of each K block of tile after tile, some blocks ahead. One warp.
__device__ __forceinline__ void load_token_scales(Shared& s, const Parameters& p, const Sizes& z) {
    constexpr int AHEAD = 2;
    int lane = threadIdx.x % 32;
    Cursor c{0, 0};
#pragma unroll 1
    for (u32 turn = 0;; turn++) {
        int slot = turn % RING;
        wait_at_most(&s.ready[slot], turn / RING % 2);
        Tile t = s.tile[slot];
        if (tokens_of(t) == 0) break;
        const float* first = p.x_scale + t.row + lane;
#pragma unroll 1
        for (int block = 0; block < z.k_blocks; block += AHEAD) {
            float scale[AHEAD][OF_LANE];
#pragma unroll
            for (int k = 0; k < AHEAD; k++)
#pragma unroll
                for (int i = 0; i < OF_LANE; i++)
                    scale[k][i] = block + k < z.k_blocks ? __ldg(first + (i64)(block + k) * z.scale_stride + 32 * i) : 0.0f;
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                if (block + k >= z.k_blocks) break;
                wait_at_most(&s.empty[c.stage], c.parity ^ 1);
#pragma unroll
                for (int i = 0; i < OF_LANE; i++) s.x_scale[c.stage][scale_place(32 * i + lane)] = scale[k][i];
                __syncwarp();
                if (lane == 0) arrive(&s.full[c.stage]);
                next(c);
            }
        }
    }
}

// --- the sum over K ---

// Where a thread of a warp that multiplies reads.
struct Reader {
    int codes, scales;  // bytes from the start of a stage
    u32 selector, sixteen;
    u32 peer;
    bool releases;
};

__device__ __forceinline__ Reader reader_of(u32 rank, const Sizes& z) {
    int warp = threadIdx.x / 32, group = warp / 4, lane = threadIdx.x % 32;
    Reader r;
    r.codes = TOKEN_BYTES + group * ROW_TILES * CODE_BYTES + first_code(warp % 4, lane);
    r.scales = TOKEN_BYTES + BLOCK_TILES * CODE_BYTES + group * ROW_TILES * NEXT_SCALES + first_scale(warp % 4, lane);
    r.selector = scale_selector(lane);
    r.sixteen = z.sixteen;
    r.peer = rank ^ 1;
    r.releases = lane == 0;
    return r;
}

__device__ __forceinline__ Codes load_codes(const u8* stage, const Reader& r, int step) {
    int row_tile = step % ROW_TILES;
    const u8* scales = stage + r.scales + row_tile * NEXT_SCALES;
    return load_codes(stage + r.codes + row_tile * CODE_BYTES, scales, step / ROW_TILES);
}

// d = the product of 64 weight rows and N tokens of a pass, plus d where added.
template <int N> __device__ __forceinline__ void multiply_pass(
    float (&d)[N / 2], const u32 (&a)[4 * PRODUCTS], const u8* tokens, int pass, bool added
) {
    begin_products();
#pragma unroll
    for (int k = 0; k < PRODUCTS; k++) {
        int column = (pass * PRODUCTS + k) % (4 * BOXES);  // in units of 32 bytes; two passes may have the same
        const u8* box = tokens + column / 4 * BOX_BYTES;
        multiply_registers(
            d, a[4 * k], a[4 * k + 1], a[4 * k + 2], a[4 * k + 3], box, column % 4, added || k > 0
        );
    }
    commit_products();
}

// acc += d, each token with its scale, for W tokens from FIRST on; scales: of this thread's tokens, as scale_place orders
// them.
template <int FIRST, int N, int W> __device__ __forceinline__ void add_scaled(
    float (&acc)[N / 2], const float (&d)[W / 2], const float* scales
) {
    float of_token[W / 8][2];
#pragma unroll
    for (int j = 0; j < W / 8; j++) {
        const int eights = FIRST / 8 + j, second = eights % 2;
        if (second == 0 && j + 1 < W / 8) {  // four tokens at once
            float4 four = *(const float4*)(scales + 8 * eights);
            of_token[j][0] = four.x, of_token[j][1] = four.y, of_token[j + 1][0] = four.z, of_token[j + 1][1] = four.w;
        } else if (second == 0 || j == 0) {
            float2 two = *(const float2*)(scales + 8 * eights - 6 * second);
            of_token[j][0] = two.x, of_token[j][1] = two.y;
        }
    }
#pragma unroll
    for (int i = 0; i < W / 2; i++) acc[FIRST / 2 + i] = fmaf(d[i], of_token[i / 4][i % 2], acc[FIRST / 2 + i]);
}

// One K block where tokens have a scale for each, with few tokens: registers have room for the operands and the products
// of both row tiles, and one is decoded while the other is multiplied.
template <int N> __device__ __forceinline__ void add_scaled_block(
    const u8* stage, const float* scales, const Reader& r, float (&acc)[ROW_TILES][N / 2]
) {
    u32 a[ROW_TILES][4 * PRODUCTS];
    float d[ROW_TILES][N / 2];
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) {
        decode(load_codes(stage, r, m), 0, r.selector, r.sixteen, a[m]);
        multiply_pass<N>(d[m], a[m], stage, 0, false);
    }
    await_products<1>();
    add_scaled<0, N, N>(acc[0], d[0], scales);
    await_products<0>();
    add_scaled<0, N, N>(acc[1], d[1], scales);
}

// Otherwise a tile of N tokens is multiplied in pieces of so many: registers have room for the sums, one row tile's
// operands and the products of two pieces, of which one is added while the other is multiplied.
constexpr int piece_of(int tokens) {
    int most = tokens > 144 ? 32 : tokens > 128 || (SPLIT && tokens <= 96) ? 48 : 64;
    int pieces = (tokens + most - 1) / most;
    while (tokens % (8 * pieces)) pieces++;
    return tokens / pieces;
}

using Operands = u32[PASSES][4 * PRODUCTS];

// d = the product of a row tile and W tokens from FIRST on.
template <int FIRST, int W> __device__ __forceinline__ void multiply_piece(
    float (&d)[W / 2], const Operands& a, const u8* stage
) {
    begin_products();
#pragma unroll
    for (int i = 0; i < PASSES * PRODUCTS; i++) {
        int k = i % PRODUCTS;
        const u32(&o)[4 * PRODUCTS] = a[i / PRODUCTS];
        multiply_registers(d, o[4 * k], o[4 * k + 1], o[4 * k + 2], o[4 * k + 3], stage + FIRST * 128, k, i > 0);
    }
    commit_products();
}

// Adds the pieces from FIRST on, of which d has the first one; e is free.
template <int FIRST, int N> __device__ __forceinline__ void add_pieces(
    float (&acc)[N / 2], float (&d)[piece_of(N) / 2], float (&e)[piece_of(N) / 2], const Operands& a, const u8* stage,
    const float* scales, int group
) {
    constexpr int NEXT = FIRST + piece_of(N), PIECE = piece_of(N);
    if constexpr (NEXT < N) multiply_piece<NEXT, PIECE>(e, a, stage);
    constexpr bool LAST = NEXT < N ? NEXT + PIECE == N : FIRST == 0;  // was just multiplied
    if (LAST) pass_turn(group);
    await_products<(NEXT < N)>();
    add_scaled<FIRST, N, PIECE>(acc, d, scales);
    if constexpr (NEXT < N) add_pieces<NEXT, N>(acc, e, d, a, stage, scales, group);
}

// Adds a row tile's product. The groups take turns to multiply: one decodes and adds while the tensor core has the
// other's products. Without turns both do so at the same time, since both wait for the same stage.
template <int N> __device__ __forceinline__ void add_scaled_tile(
    const u8* stage, const float* scales, const Reader& r, int row_tile, float (&acc)[N / 2]
) {
    constexpr int PIECE = piece_of(N);
    int group = threadIdx.x / 128;
    Operands a;
    float d[PIECE / 2], e[PIECE / 2];
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++)
        decode(load_codes(stage, r, row_tile), pass, r.selector, r.sixteen, a[pass]);
    wait_turn(group);
    multiply_piece<0, PIECE>(d, a, stage);
    add_pieces<0, N>(acc, d, e, a, stage, scales, group);
}

// Sums of all K blocks where tokens have a scale for each.
template <int N> __device__ __forceinline__ void sum_scaled_blocks(
    Shared& s, Cursor& c, int k_blocks, const Reader& r, float (&acc)[ROW_TILES][N / 2]
) {
#pragma unroll 1
    for (int block = 0; block < k_blocks; block++, next(c)) {
        wait_at_most(&s.full[c.stage], c.parity);
        const u8* stage = s.stage[c.stage];
        const float* scales = s.x_scale[c.stage] + threadIdx.x % 4 * 4;
        if constexpr (!SPLIT && N <= MAX_TOKENS_OF_TWO) {
            add_scaled_block<N>(stage, scales, r, acc);
        } else {
#pragma unroll
            for (int m = 0; m < ROW_TILES; m++) add_scaled_tile<N>(stage, scales, r, m, acc[m]);
        }
        __syncwarp();
        if (r.releases) arrive_at_both(r.peer, &s.empty[c.stage]);
    }
}

// What 1 in the sums of a thread's two rows of each row tile stands for, where that changes.
struct Units { float of[ROW_TILES][2]; };

// Decodes a step's weights, and brings the sum that they are added to into the units of their factors.
template <int N> __device__ __forceinline__ void prepare(
    const Codes& codes, int step, const Reader& r, u32 (&a)[4 * PRODUCTS], float (&acc)[ROW_TILES][N / 2], Units& units
) {
    int row_tile = step % ROW_TILES, pass = step / ROW_TILES;
    decode(codes, pass, r.selector, r.sixteen, a);
    if constexpr (RUNNING_UNIT) {
        if (pass && !BY_QUARTER) return;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float factor = factor_of(codes, h, pass), ratio = units.of[row_tile][h] * flushed_inverse(factor);
            units.of[row_tile][h] = factor;
#pragma unroll
            for (int i = h * 2; i < N / 2; i += 4) acc[row_tile][i] *= ratio, acc[row_tile][i + 1] *= ratio;
        }
    }
}

// Sums of all K blocks for N tokens and a group's two row tiles. One row tile is decoded while the other is multiplied.
// No product is left running at the end of a stage: ptxas would keep the registers it reads from all other uses. Every sum
// has the same order, whatever N is: instructions of 32 bytes of a token, in the order of K.
template <int N> __device__ __forceinline__ void sum_over_k(
    Shared& s, Cursor& c, int k_blocks, const Reader& r, float (&acc)[ROW_TILES][N / 2], Units& units
) {
    u32 a[4 * PRODUCTS];
    wait_at_most(&s.full[c.stage], c.parity);
    Codes codes = load_codes(s.stage[c.stage], r, 0);
    prepare<N>(codes, 0, r, a, acc, units);
#pragma unroll 1
    for (int block = 0; block < k_blocks; block++) {
        u32 b[4 * PRODUCTS];
        const u8* stage = s.stage[c.stage];
        Barrier* empty = &s.empty[c.stage];
#pragma unroll
        for (int step = 0; step + 1 < STEPS; step++) {
            constexpr bool LATE = FEW_REGISTERS && PASSES > 1;
            if (!LATE) codes = load_codes(stage, r, step + 1);
            multiply_pass<N>(acc[step % ROW_TILES], step % 2 ? b : a, stage, step / ROW_TILES, true);
            if (LATE) codes = load_codes(stage, r, step + 1);
            // What the next step changes was multiplied in the step before this one.
            if (step) await_products<1>();
            prepare<N>(codes, step + 1, r, step % 2 ? a : b, acc, units);
        }
        multiply_pass<N>(acc[ROW_TILES - 1], b, stage, PASSES - 1, true);
        next(c);
        bool more = block + 1 < k_blocks;
        if (more) {
            wait_at_most(&s.full[c.stage], c.parity);
            codes = load_codes(s.stage[c.stage], r, 0);
        }
        await_products<1>();
        if (more) prepare<N>(codes, 0, r, a, acc, units);
        await_products<0>();
        if (r.releases) arrive_at_both(r.peer, empty);
    }
}
