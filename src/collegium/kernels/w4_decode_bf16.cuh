// Decoding of four-bit weights to bfloat16 operands in registers. The layout is that of packing/interleave.py: a word has
// two neighbouring columns of each quarter of a K block, so it becomes one register of each quarter. The bits and numbers
// are those of kernels/decode_ptx.py.
//
// The tensor core reads 64 weight rows by 16 columns as four registers a thread: with row = lane / 4 of a warp's 16 rows
// and column = lane % 4 * 2, those of (row, column), (row + 8, column), (row, column + 8) and (row + 8, column + 8), two
// columns each. ldmatrix brings words to threads in this order. Columns are multiplied in their order.
//
// Factors of integers: the sum is in units of the factor that came last, as in kernels/grouped_gemm.py.
//
// tensor maps: codes [E, PROJECTIONS, k_blocks, n_out, K_BLOCK / 2] bytes, swizzled by that size, scales [E,
// PROJECTIONS, k_blocks, WORDS, n_out] words, both as (within eight rows, part, eight rows) for gate and up to
// alternate.

constexpr bool SPLIT = false;                // no weight is the sum of two operands
constexpr bool INTEGERS = WEIGHT == 4;        // INT4_LANES of kernels/enums.py, otherwise E2M1_LANES
constexpr bool E4M3_SCALES = SCALE == 3;      // of NVFP4's groups of 16
constexpr bool SCALE_PAIRS = SCALE == 5;      // two bfloat16 in a word
constexpr bool ZERO_POINTS = SCALE == 6;      // in the low bytes of words
constexpr bool RUNNING_UNIT = INTEGERS;
constexpr bool BY_QUARTER = INTEGERS && WORDS > 1;   // each quarter of a K block has a factor
constexpr int ROW_TILE = 64;
constexpr int K_BLOCK = E4M3_SCALES ? 64 : 128;      // columns of a stage
constexpr int OF_QUARTER = K_BLOCK / 64;             // instructions for a quarter of them
// Instructions whose operands are decoded at once.
constexpr int PRODUCTS = BY_QUARTER || (OF_QUARTER == 2 && FEW_REGISTERS) ? OF_QUARTER : 4;
constexpr int PASSES = K_BLOCK / 16 / PRODUCTS;      // over a row tile and K block
constexpr int ROW_BYTES = K_BLOCK / 2;               // of a row's codes
constexpr int CODE_BYTES = ROW_TILE * ROW_BYTES, SCALE_BYTES = ROW_TILE * 4 * WORDS;  // of a row tile and K block

// What a thread reads of 64 weight rows in one pass: the registers of each instruction of a quarter, with the codes of all
// quarters, and the word of scales of each of its two rows.
struct Codes { u32 words[OF_QUARTER][4]; u32 scales[2]; };

// Where a thread of a group of four warps begins to read in a row tile, in bytes from the first code and scale of a stage.
__device__ __forceinline__ int first_code(int warp, int lane) {
    int row = lane / 8 % 2 * 8 + lane % 8, piece = lane / 16;
    int swizzled = piece ^ (OF_QUARTER == 2 ? row / 2 % 4 : row / 4 % 2);
    return (warp * 16 + row) * ROW_BYTES + swizzled * 16;
}
__device__ __forceinline__ int first_scale(int warp, int lane) { return warp * 64 + lane / 4 * 4; }
// From a row tile's scales to those of the next; another word of the rows is BLOCK_TILES times as far.
constexpr int NEXT_SCALES = ROW_TILE * 4;
constexpr int NEXT_WORD = 4 * NEXT_SCALES;

__device__ __forceinline__ Codes load_codes(const u8* codes, const u8* scales, int pass) {
    Codes c;
    get_matrices(codes, 0, c.words[0]);
    // The pieces of 16 bytes two further on: their numbers differ in one bit, swizzled or not.
    if (OF_QUARTER == 2) get_matrices(codes, 32, c.words[OF_QUARTER - 1]);
    const u8* word = scales + (WORDS == 1 ? 0 : WORDS == 2 ? pass / 2 : pass) * NEXT_WORD;
    c.scales[0] = *(const u32*)word, c.scales[1] = *(const u32*)(word + 32);
    return c;
}

// Copies the codes and scales of a block's row tiles, row_tile and the following ones.
template <int TILES> __device__ __forceinline__ void copy_weights(
    u8* to, const Map& codes, const Map& scales, int block, int row_tile, int expert, int k_blocks, Barrier* full
) {
    int eight_rows = row_tile * (8 / PROJECTIONS), matrix = expert * PROJECTIONS * k_blocks + block;
    copy_5d(to, codes, 0, 0, 0, eight_rows, matrix, full);
    copy_5d(to + TILES * CODE_BYTES, scales, 0, 0, eight_rows, 0, matrix, full);
}

// E2M1 codes of a quarter as numbers: code times 2^-126.
__device__ __forceinline__ u32 e2m1_of(u32 word, int quarter) {
    if (quarter < 3) return word << 3 * quarter & 0x81C081C0u;
    return (word >> 5 & 0x01000100u) | (word >> 4 & 0x00C000C0u) | (word << 1 & 0x80008000u);
}

// A quarter's byte of a word of scales, twice: E8M0 bytes are exponents, E4M3 numbers are multiplied by 2^117.
__device__ __forceinline__ u32 scale_pair(u32 word, int quarter) {
    u32 bytes = select_bytes(word, 0, 0x4040 + quarter * 0x0101);
    if (!E4M3_SCALES) return bytes << 7;
    return times(times(bytes << 4, 0x7B807B80u), 0x7A007A00u);
}

// Codes of integers of a quarter, minus their zero point, over 64; minus_zero: that of the zero point.
__device__ __forceinline__ u32 integers_of(u32 word, int quarter, u32 minus_zero) {
    u32 bytes = quarter < 2 ? word : word >> 8;
    if (quarter % 2 == 0) return times_plus(bytes & 0x000F000Fu, 0x7F007F00u, minus_zero);  // 2^127
    return times_plus(bytes & 0x00F000F0u, 0x7D007D00u, minus_zero);                        // 2^123
}

__device__ __forceinline__ u32 minus_zero_of(u32 word) {
    return ZERO_POINTS ? times(select_bytes(word, 0, 0x4040), 0xFF00FF00u) : 0xBE00BE00u;  // -2^127; -8 / 64
}

// Operands of the instructions of a pass, a[4 k] to a[4 k + 3] those of instruction k.
__device__ __forceinline__ void decode(const Codes& codes, int pass, u32, u32, u32 (&a)[4 * PRODUCTS]) {
#pragma unroll
    for (int k = 0; k < PRODUCTS; k += OF_QUARTER) {
        int quarter = (pass * PRODUCTS + k) / OF_QUARTER;
        u32 of_row[2];
#pragma unroll
        for (int h = 0; h < 2; h++)
            of_row[h] = INTEGERS ? minus_zero_of(codes.scales[h]) : scale_pair(codes.scales[h], quarter);
#pragma unroll
        for (int i = 0; i < OF_QUARTER; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 word = codes.words[i][j];
                a[4 * (k + i) + j] = INTEGERS ? integers_of(word, quarter, of_row[j % 2])
                                              : times(e2m1_of(word, quarter), of_row[j % 2]);
            }
    }
}

__device__ __forceinline__ u32 scale_selector(int) { return 0; }

// The factor of integers of a row in a pass.
__device__ __forceinline__ float factor_of(const Codes& codes, int h, int pass) {
    u32 word = codes.scales[h];
    if (SCALE_PAIRS) return __uint_as_float(pass % 2 ? word & 0xFFFF0000u : word << 16);
    return __uint_as_float(ZERO_POINTS ? word & 0xFFFFFF00u : word);
}

__device__ __forceinline__ float row_scale_of(const float* row_scale, int expert, int row, int, int n_out) {
    int channel = min(PROJECTIONS == 2 ? row / 16 * 8 + row % 8 : row, n_out - 1);
    return __ldg(row_scale + ((i64)expert * PROJECTIONS + (PROJECTIONS == 2 ? row / 8 % 2 : 0)) * n_out + channel);
}
