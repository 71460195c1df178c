// Decoding of MXFP4 weights to E4M3 operands in registers. The layout is that of experts/triton/packing/w4a8.py.
//
// The tensor core reads 64 weight rows by 32 columns as four registers a thread: with row = lane / 4 of a warp's 16 rows,
// those of (row, first 16 columns), (row + 8, first), (row, last) and (row + 8, last). A thread has the 32 columns of one
// group of a row's 128, 16 bytes of codes, for both of its rows: enough for four such instructions, in an order of
// columns that tokens have too (REORDERED of ops/quantize.py). All codes of a row then share one scale.

// What a thread reads of 64 weight rows by 128 columns: codes of its two rows, and the four scales of each.
struct Codes { uint4 low, high; u32 low_scales, high_scales; };

constexpr int ROW_TILE = 64;  // weight rows that are packed together
constexpr int CODE_BYTES = ROW_TILE * 64, SCALE_BYTES = ROW_TILE * 4;  // of a row tile and K block

__device__ __forceinline__ Codes load_codes(const u8* codes, const u8* scales) {
    const int eight_rows = CODE_BYTES / 8, eight_scales = SCALE_BYTES / 8;
    return {
        *(const uint4*)codes, *(const uint4*)(codes + eight_rows),
        *(const u32*)scales, *(const u32*)(scales + eight_scales),
    };
}

// Bytes of codes and of scales, in a row tile, where a thread of a group of four warps begins to read.
__device__ __forceinline__ int first_code(int warp, int lane) { return warp * (CODE_BYTES / 4) + lane * 16; }
__device__ __forceinline__ int first_scale(int warp, int lane) { return warp * (SCALE_BYTES / 4) + lane / 4 * 4; }

// The eight E4M3 magnitudes of one group, as bytes 0 to 7 of two words. E2M1 code c above 1 times 2^d is the byte
// 4 c + 8 d - 48 for d from -5 to 6; code 1, 0.5, is 8 d + 48 - 48. scale: the byte 8 d + 48.
struct Magnitudes { u32 low, high; };

__device__ __forceinline__ Magnitudes magnitudes_of(u32 scale) {
    return {scale * 0x01010100u + 0x0C080000u, scale * 0x01010101u + 0x1C181410u};
}

// The E4M3 numbers of the eight codes of a word. Magnitudes select bytes of the table, whose sign bits are zero; signs of
// the first four codes are the upper bits of the bytes of the word, those of the others the upper bits of the digits below.
// sixteen: 16, which the compiler must not know: the multiplier then shifts, and not the busier pipe of logic.
__device__ __forceinline__ void decode_word(u32 word, const Magnitudes& table, u32 sixteen, u32& first, u32& second) {
    u32 selector = word & 0x77777777u;
    first = select_bytes(table.low, table.high, selector) | (word & 0x80808080u);
    second = select_bytes(table.low, table.high, selector >> 16) | ((word * sixteen) & 0x80808080u);
}

// Operands of four instructions of 32 columns, a[4 k] to a[4 k + 3] those of instruction k. selector: of the scale of
// this thread's group, of the four of a row.
__device__ __forceinline__ void decode(const Codes& codes, u32 selector, u32 sixteen, u32 (&a)[16]) {
    const u32 words[2][4] = {
        {codes.low.x, codes.low.y, codes.low.z, codes.low.w},
        {codes.high.x, codes.high.y, codes.high.z, codes.high.w},
    };
#pragma unroll
    for (int row = 0; row < 2; row++) {
        Magnitudes table = magnitudes_of(select_bytes(row ? codes.high_scales : codes.low_scales, 0, selector));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int at_first = 4 * (i / 2) + 2 * (i % 2) + row;
            decode_word(words[row][i], table, sixteen, a[at_first], a[8 + at_first]);
        }
    }
}

__device__ __forceinline__ u32 scale_selector(int lane) { return 0x4440 + lane % 4; }

