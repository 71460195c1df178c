// The grouped product of a large batch with four-bit weights and E4M3 or bfloat16 tokens, in CUDA for sm_90a:
//
//     out[r, n] = activation(x_scale[r] * row_scale[e, n] * sum over k of w[e, n, k] * x[r, k] + bias[e, n])
//
// for the rows r of expert e. With X_GROUPS a row has a scale for each K block: x_scale[r, k / 128] then multiplies the
// K block's product before it is added to the sum. Weights, order of K, rounding and so the bits are those of w4a8.py (E4M3
// tokens) and of grouped_gemm.py (bfloat16 tokens, which have no x_scale).
//
// Weights are the first operand of the tensor core and are decoded in registers (w4_decode.cuh, w4_decode_bf16.cuh); tokens
// are the second operand, in shared memory: 16 to MAX_TOKENS of them in steps of 16, so a tile has the width of its
// expert's tokens. A block of threads multiplies 256 weight rows at a time: two groups of four warps have 128 each, and one
// decodes while the other multiplies. The two blocks of a cluster take neighbouring weights and the same tokens, of which
// each copies a half for both. One warp copies, one draws tiles, one loads the factors of the epilogue, one those of K
// blocks (w4_pipeline.cuh, w4_epilogue.cuh).
//
// tokens: tensor maps of x [rows, K] for tiles of each width. codes, scales: tensor maps of the weights, which the
// parts that decode describe; of row tiles of 64, in which gate and up alternate, eight rows each. Maps read zero
// beyond their ends. x_scale: float32 [rows], or [k_blocks, scale_stride] with X_GROUPS. row_scale: float32 factors of
// weight rows; integers have none. bias: [E, PROJECTIONS, n_out]. counters: two zeros, which the kernel leaves zero.
// Lists: as prefill.cu takes them, of tiles of MAX_TOKENS tokens. Rows from expert_offsets[E] on are not written.
// HAS_ROW_OFFSETS: row r is written to element row_offsets[r] of the result, which may be in a peer's memory, or
// nowhere.
//
// The compiler's options define MAX_TOKENS, OPERAND (tokens: 0 E4M3, 1 bfloat16), X_GROUPS, WEIGHT, SCALE
// (kernels/enums.py), WORDS (of scales of a row and K block), PROJECTIONS, HAS_ROW_OFFSETS, OUT (1
// bfloat16, 2 float16, 3 float32), ACTIVATION, FAST, HAS_LIMIT, BIAS (0 none, 1 bfloat16, 2 float16, 3 float32) and
// ALIGNED: rows of results begin at multiples of 16 bytes. The text follows sm90.cu, activation.cuh and the parts named
// above.

// A tile of N tokens.
template <int N> __device__ __forceinline__ void run_tile(
    Shared& s, Cursor& c, const Tile& t, u32 rank, u32 turn, const Reader& r, const Out& o, const Sizes& z
) {
    float acc[ROW_TILES][N / 2];
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
        for (int i = 0; i < N / 2; i++) acc[m][i] = 0.0f;
    Units units{};
    if constexpr (X_GROUPS) sum_scaled_blocks<N>(s, c, z.k_blocks, r, acc);
    else sum_over_k<N>(s, c, z.k_blocks, r, acc, units);
    int group = threadIdx.x / 128;
    int first_channel = ((2 * t.column + rank) * BLOCK_TILES + group * ROW_TILES) * (ROW_TILE / PROJECTIONS);
    wait_at_most(&s.factors_full[turn % 2], turn / 2 % 2);
    const Factors& f = s.factors[turn % 2];
    if (ALIGNED) store_rows<N>(s, acc, t, first_channel, f, units, o, z);
    else store_singly<N>(s, acc, t, first_channel, f, units, o, z);
}

// Each width is a loop with separate registers: sums that met after the branches would be copied.
template <int N> __device__ __forceinline__ void run_tile_of_width(
    Shared& s, Cursor& c, const Tile& t, u32 rank, u32 turn, const Reader& r, const Out& o, const Sizes& z
) {
    if constexpr (N <= MAX_TOKENS) {
        if (width_of(t) == N) run_tile<N>(s, c, t, rank, turn, r, o, z);
        else run_tile_of_width<N + TOKEN_STEP>(s, c, t, rank, turn, r, o, z);
    }
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1) w4_prefill(
    const __grid_constant__ TokenMaps tokens, const __grid_constant__ Map codes, const __grid_constant__ Map scales,
    int* counters, const __grid_constant__ Parameters parameters, const __grid_constant__ Out o,
    const __grid_constant__ Lists lists, const __grid_constant__ Sizes z
) {
    Shared& s = *(Shared*)shared_memory();
    int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    u32 rank = blockIdx.x % 2;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) init(&s.full[i], 1 + X_GROUPS), init(&s.empty[i], 2 * WARPS);
        for (int i = 0; i < RING; i++) init(&s.ready[i], 1), init(&s.nearly_copied[i], 2);
        for (int i = 0; i < 2; i++) init(&s.factors_full[i], 1), init(&s.factors_empty[i], WARPS);
        show_barriers();
    }
    meet_cluster();
    wait_for_previous();
    if (warp >= WARPS) {
        need_registers<COPYING>();
        if (warp == COPY_WARP && elected()) copy_operands(s, rank, tokens, codes, scales, z);
        if (warp == DRAW_WARP && rank == 0 && elected()) draw_tiles(s, lists, z, counters);
        if (warp == FACTOR_WARP) load_factors(s, rank, parameters, z);
        if (X_GROUPS && warp == SCALE_WARP) load_token_scales(s, parameters, z);
        __syncwarp();
    } else {
        take_registers<MULTIPLYING>();
        Reader r = reader_of(rank, z);
        Cursor c{0, 0};
        // The first turn is group 0's, as is the one that is left over at the end.
        if (X_GROUPS && warp / 4 == 1) pass_turn(1);
#pragma unroll 1
        for (u32 turn = 0;; turn++) {
            int slot = turn % RING;
            wait_at_most(&s.ready[slot], turn / RING % 2);
            if (tokens_of(s.tile[slot]) == 0) break;
            run_tile_of_width<TOKEN_STEP>(s, c, s.tile[slot], rank, turn, r, o, z);
            __syncwarp();
            if (lane == 0) arrive(&s.factors_empty[turn % 2]);
        }
        if (X_GROUPS && warp / 4 == 0) wait_turn(0);
    }
    // Neither block leaves while the other may still write to it.
    meet_cluster();
}
