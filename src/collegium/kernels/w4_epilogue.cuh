// What follows the sum over K in w4_prefill.cu: factors, bias, activation, and rows of results.
//
// A thread has sums of weight rows row and row + 8 of its warp's 16 and of tokens 8 j + 2 (lane % 4) and the next one, as
// d[4 j] to d[4 j + 3], row by row. With gate and up, row is a channel's gate and row + 8 its up.

struct Out { void* rows; const i64* row_offsets; };

constexpr i64 NOWHERE = -(1LL << 62);

// Scaled in the order of w4a8.py and grouped_gemm.py: by the weight row, then by the token (unless its K blocks were
// scaled), then the bias. The last factor and the bias are one operation with one rounding there, too.
__device__ __forceinline__ float scaled(float sum, float row_scale, float x_scale, float bias) {
    float v = X_SCALED ? sum * row_scale * x_scale : sum * row_scale;
    return BIAS ? v + bias : v;
}

// Factors of a thread's two weight rows in each row tile.
struct RowFactors { float scale[ROW_TILES][2], bias[ROW_TILES][2]; };

__device__ __forceinline__ RowFactors row_factors(const Factors& f, const Units& units) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    RowFactors r;
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = (warp / 4 * ROW_TILES + m) * ROW_TILE + warp % 4 * 16 + h * 8 + lane / 4;
            // Integers were decoded over 64.
            r.scale[m][h] = RUNNING_UNIT ? units.of[m][h] * 64.0f : f.row_scale[row];
            r.bias[m][h] = BIAS ? f.bias[row] : 0.0f;
        }
    return r;
}

// Results of row tile m for two tokens, from four sums d: first those of row, then (without gate and up) those of row + 8.
__device__ __forceinline__ void results_of(
    float (&result)[2][2], const float* d, const RowFactors& r, int m, float2 x_scale, const Sizes& z
) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
        float of_token = e ? x_scale.y : x_scale.x;
        float low = scaled(d[e], r.scale[m][0], of_token, r.bias[m][0]);
        float high = scaled(d[2 + e], r.scale[m][1], of_token, r.bias[m][1]);
        if (PROJECTIONS == 2) {
            result[0][e] = activated(low, high, z);
        } else {
            result[0][e] = activated(low, low, z);
            result[1][e] = activated(high, high, z);
        }
    }
}

// Where row r of the results begins, in elements, or NOWHERE.
__device__ __forceinline__ i64 begins(const Out& o, int row, int n_out) {
    return HAS_ROW_OFFSETS ? __ldg(o.row_offsets + row) : (i64)row * n_out;
}

// Stores tokens first to first + 15 from a group's room, which has float32 numbers, one after the other.
__device__ __forceinline__ void store_floats(
    const float* room, const Tile& t, int first, int first_channel, const Out& o, const Sizes& z
) {
#pragma unroll 1
    for (int i = threadIdx.x % 128; i < 16 * OUT_COLUMNS; i += 128) {
        int token = first + i / OUT_COLUMNS, channel = first_channel + i % OUT_COLUMNS;
        if (token >= tokens_of(t) || channel >= z.n_out) continue;
        i64 to = begins(o, t.row + token, z.n_out);
        if (to == NOWHERE) continue;
        if (OUT == 3) ((float*)o.rows)[to + channel] = room[i];
        else ((u16*)o.rows)[to + channel] = (u16)pair(room[i], room[i]);
    }
}

// Stores float32 results, and rows that are not aligned to 16 bytes, 16 tokens at a time.
template <int N> __device__ __forceinline__ void store_singly(
    Shared& s, const float (&acc)[ROW_TILES][N / 2], const Tile& t, int first_channel, const Factors& f,
    const Units& units, const Out& o, const Sizes& z
) {
    int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    float* room = (float*)s.out[group];
    RowFactors r = row_factors(f, units);
#pragma unroll
    for (int j = 0; j < N / 8; j += 2) {
        if (j) meet_group(group);
#pragma unroll
        for (int next = 0; next < 2; next++) {
            int token = 8 * next + lane % 4 * 2;
            float2 x_scale = *(const float2*)(f.x_scale + 8 * j + token);
#pragma unroll
            for (int m = 0; m < ROW_TILES; m++) {
                float result[2][2];
                results_of(result, acc[m] + 4 * (j + next), r, m, x_scale, z);
                float* to = room + token * OUT_COLUMNS + (m * ROW_TILE + warp * 16) / PROJECTIONS + lane / 4;
#pragma unroll
                for (int h = 0; h < 3 - PROJECTIONS; h++)
#pragma unroll
                    for (int e = 0; e < 2; e++) to[e * OUT_COLUMNS + 8 * h] = result[h][e];
            }
        }
        meet_group(group);
        store_floats(room, t, 8 * j, first_channel, o, z);
    }
    meet_group(group);
}

// Puts 16 tokens of a group's results into its room, as 16-bit numbers, a row for each token.
template <int N> __device__ __forceinline__ void put_results(
    u8* room, const float (&acc)[ROW_TILES][N / 2], int j, const RowFactors& r, const float* x_scale, const Sizes& z
) {
    int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    // Lane i of the four matrices of eight tokens has the address of token i % 8; the last two are of the next tokens.
    u8* row = room + (lane / 16 * 8 + lane % 8) * OUT_PITCH;
    float2 of_token[2] = {*(const float2*)x_scale, *(const float2*)(x_scale + 8)};
    u32 packed[ROW_TILES][2][2];
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
        for (int next = 0; next < 2; next++) {
            float result[2][2];
            results_of(result, acc[m] + 4 * (j + next), r, m, of_token[next], z);
            packed[m][next][0] = pair(result[0][0], result[0][1]);
            if (PROJECTIONS == 1) packed[m][next][1] = pair(result[1][0], result[1][1]);
        }
    if (PROJECTIONS == 2) {
        u8* to = row + lane / 8 % 2 * 64 + warp * 16;
        put_transposed(to, packed[0][0][0], packed[1][0][0], packed[0][1][0], packed[1][1][0]);
    } else {
        u8* to = row + warp * 32 + lane / 8 % 2 * 16;
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
            put_transposed(to + m * 128, packed[m][0][0], packed[m][0][1], packed[m][1][0], packed[m][1][1]);
    }
}

// Stores 16-bit results through shared memory, OUT_TOKENS at a time, 16 bytes of a token a thread.
template <int N> __device__ __forceinline__ void store_rows(
    Shared& s, const float (&acc)[ROW_TILES][N / 2], const Tile& t, int first_channel, const Factors& f,
    const Units& units, const Out& o, const Sizes& z
) {
    constexpr int PIECES = OUT_COLUMNS / 8, AT_ONCE = 128 / PIECES;
    int group = threadIdx.x / 128, thread = threadIdx.x % 128, lane = threadIdx.x % 32;
    int of_thread = thread / PIECES, channel = first_channel + thread % PIECES * 8;
    u8* room = s.out[group];
    RowFactors r = row_factors(f, units);
#pragma unroll
    for (int first = 0; first < N; first += OUT_TOKENS) {
        if (first) meet_group(group);
#pragma unroll
        for (int token = 0; token < OUT_TOKENS && first + token < N; token += 16)
            put_results<N>(
                room + token * OUT_PITCH, acc, (first + token) / 8, r, f.x_scale + first + token + lane % 4 * 2, z
            );
        meet_group(group);
#pragma unroll
        for (int token = 0; token < OUT_TOKENS && first + token < N; token += AT_ONCE) {
            int in_room = token + of_thread;
            if (first + in_room >= tokens_of(t) || channel >= z.n_out) continue;
            i64 to = begins(o, t.row + first + in_room, z.n_out);
            if (to == NOWHERE) continue;
            const uint4* piece = (const uint4*)(room + in_room * OUT_PITCH + thread % PIECES * 16);
            store_streaming((uint4*)((u16*)o.rows + to + channel), *piece);
        }
    }
    meet_group(group);
}

