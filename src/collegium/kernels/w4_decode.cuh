// Decoding of MXFP4 and NVFP4 weights to E4M3 operands in registers. The layout is that of experts/triton/packing/w4a8.py.
//
// The tensor core reads 64 weight rows by 32 columns as four registers a thread: with row = lane / 4 of a warp's 16 rows,
// those of (row, first 16 columns), (row + 8, first), (row, last) and (row + 8, last). A thread has 32 columns of a row's
// 128, 16 bytes of codes, for both of its rows: enough for four such instructions, in an order of columns that tokens have
// too (REORDERED of ops/quantize.py). All codes of a row then share one scale (MXFP4) or two (NVFP4).
//
// A weight of NVFP4 is the sum of two E4M3 numbers (kernels/w4a8.py), which two passes over a K block multiply.
//
// tensor maps: codes [E, row_tiles, k_blocks, 64, 64] bytes, scales [E, row_tiles, k_blocks, WORDS, 64] words.

constexpr bool SPLIT = WEIGHT == 8;  // into two numbers: E2M1_E4M3 of kernels/enums.py, otherwise E2M1_E8M0
constexpr bool RUNNING_UNIT = false, BY_QUARTER = false;  // no sum is in units of a factor
constexpr int ROW_TILE = 64;   // weight rows that are packed together
constexpr int K_BLOCK = 128;   // columns of a stage
constexpr int PRODUCTS = 4;    // instructions whose operands are decoded at once
constexpr int PASSES = SPLIT ? 2 : 1;  // over a row tile and K block
constexpr int CODE_BYTES = ROW_TILE * 64, SCALE_BYTES = ROW_TILE * 4 * WORDS;  // of a row tile and K block

// What a thread reads of 64 weight rows by 128 columns: codes of its two rows, and a word of scales of each.
struct Codes { uint4 low, high; u32 low_scales, high_scales; };

// Where a thread of a group of four warps begins to read in a row tile, in bytes from the first code and scale of a stage.
__device__ __forceinline__ int first_code(int warp, int lane) { return warp * (CODE_BYTES / 4) + lane * 16; }
__device__ __forceinline__ int first_scale(int warp, int lane) {
    return warp * 64 + lane / 4 * 4 + (SPLIT ? lane % 4 / 2 * (ROW_TILE * 4) : 0);
}
// From a row tile's scales to those of the next.
constexpr int NEXT_SCALES = SCALE_BYTES;

__device__ __forceinline__ Codes load_codes(const u8* codes, const u8* scales, int) {
    const int eight_rows = CODE_BYTES / 8, eight_scales = 32;
    return {
        *(const uint4*)codes, *(const uint4*)(codes + eight_rows),
        *(const u32*)scales, *(const u32*)(scales + eight_scales),
    };
}

// Copies the codes and scales of a block's row tiles, row_tile and the following ones.
template <int TILES> __device__ __forceinline__ void copy_weights(
    u8* to, const Map& codes, const Map& scales, int block, int row_tile, int expert, int, Barrier* full
) {
    copy_5d(to, codes, 0, 0, block, row_tile, expert, full);
    copy_4d(to + TILES * CODE_BYTES, scales, 0, block, row_tile, expert, full);
}

// The eight E4M3 magnitudes of one group, as bytes 0 to 7 of two words.
struct Magnitudes { u32 low, high; };

// E2M1 code c above 1 times 2^d is the byte 4 c + 8 d - 48 for d from -5 to 6; code 1, 0.5, is 8 d + 48 - 48. scale: the
// byte 8 d + 48. Split, with an E4M3 number as the byte: the first number is a magnitude without its mantissa bit, 2^e,
// times the scale, the second what is left, 2^(e - 1) times the scale or zero.
__device__ __forceinline__ Magnitudes magnitudes_of(u32 scale, int pass) {
    if (!SPLIT) return {scale * 0x01010100u + 0x0C080000u, scale * 0x01010101u + 0x1C181410u};
    if (pass == 0) return {scale * 0x01010100u + 0x08080000u, scale * 0x01010101u + 0x18181010u};
    return {scale * 0x01000000u, scale * 0x01000100u + 0x10000800u};
}

// The E4M3 numbers of the eight codes of a word. Magnitudes select bytes of the table, whose sign bits are zero; signs of
// the first four codes are the upper bits of the bytes of the word, those of the others the upper bits of the digits below.
// sixteen: 16, which the compiler must not know: the multiplier then shifts, and not the busier pipe of logic.
__device__ __forceinline__ void decode_word(u32 word, const Magnitudes& table, u32 sixteen, u32& first, u32& second) {
    u32 selector = word & 0x77777777u;
    first = select_bytes(table.low, table.high, selector) | (word & 0x80808080u);
    second = select_bytes(table.low, table.high, selector >> 16) | ((word * sixteen) & 0x80808080u);
}

// Operands of four instructions of 32 columns, a[4 k] to a[4 k + 3] those of instruction k. selector: of the byte of a
// word of scales that is the one of this thread's columns, or of the first half of them.
__device__ __forceinline__ void decode(const Codes& codes, int pass, u32 selector, u32 sixteen, u32 (&a)[4 * PRODUCTS]) {
    const u32 words[2][4] = {
        {codes.low.x, codes.low.y, codes.low.z, codes.low.w},
        {codes.high.x, codes.high.y, codes.high.z, codes.high.w},
    };
#pragma unroll
    for (int row = 0; row < 2; row++) {
        u32 scales = row ? codes.high_scales : codes.low_scales;
        Magnitudes table = magnitudes_of(select_bytes(scales, 0, selector), pass);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (SPLIT && i == 2) table = magnitudes_of(select_bytes(scales, 0, selector + 1), pass);
            int at_first = 4 * (i / 2) + 2 * (i % 2) + row;
            decode_word(words[row][i], table, sixteen, a[at_first], a[8 + at_first]);
        }
    }
}

__device__ __forceinline__ u32 scale_selector(int lane) { return 0x4440 + (SPLIT ? lane % 2 * 2 : lane % 4); }

__device__ __forceinline__ float factor_of(const Codes&, int, int) { return 1.0f; }

__device__ __forceinline__ float row_scale_of(const float* row_scale, int expert, int row, int row_tiles, int) {
    int rows = row_tiles * ROW_TILE;
    return __ldg(row_scale + (i64)expert * rows + min(row, rows - 1));
}
