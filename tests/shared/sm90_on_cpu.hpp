// The functions of sm90.cu in C++, so that the kernels of large batches run on a CPU: one cluster, its threads as coroutines that
// take turns where they wait. Copies and numbers that are sent arrive late and in any order. Shared memory begins as NaN.
// Sums are float32, in the order of columns, which is not the tensor core's.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <ucontext.h>
#include <unordered_map>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr bool FEW_REGISTERS = false;

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __cluster_dims__(...)
#define __launch_bounds__(...)

struct Index { int x; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint4 { u32 x, y, z, w; };
#ifndef BLOCKS
#define BLOCKS 2  // of the cluster
#endif
static Index threadIdx, blockIdx, gridDim{BLOCKS};
using std::max;
using std::min;

// --- threads ---

#ifndef BLOCK_THREADS
#define BLOCK_THREADS 512
#endif
constexpr int IN_BLOCK = BLOCK_THREADS, BLOCK_BYTES = 227 * 1024;
struct Thread { ucontext_t context; std::vector<char> stack; int block, index; bool ended; };
struct Group { int inside = 0; u64 round = 0; };

static ucontext_t main_context;
static std::vector<Thread> threads;
static Thread* current;
static u64 events;
static u8* memory[BLOCKS];
static Group warps[BLOCKS][IN_BLOCK / 32], groups[BLOCKS][IN_BLOCK / 128], cluster;
static u64 slots[BLOCKS][IN_BLOCK / 32][32][5];
static std::vector<std::function<void()>> late;
static std::mt19937 chance;

static void pause_thread() {
    Thread* own = current;
    swapcontext(&own->context, &main_context);
}

static void meet(Group& group, int members) {
    u64 round = group.round;
    if (++group.inside == members) group.inside = 0, group.round++, events++;
    while (group.round == round) pause_thread();
}

static int own_lane() { return threadIdx.x % 32; }
static void meet_group(int group) { meet(groups[blockIdx.x][group], 128); }

// Two groups take turns: half of a barrier's threads wait, and the other half arrives.
struct Turn { int waiting = 0, arrived = 0; u64 round = 0; };
static Turn turns[BLOCKS][2];
static void look(Turn& turn) {
    if (turn.arrived > 128) std::fprintf(stderr, "a turn was passed twice\n"), std::abort();
    if (turn.waiting == 128 && turn.arrived == 128) turn.waiting = turn.arrived = 0, turn.round++, events++;
}
static void wait_turn(int group) {
    Turn& turn = turns[blockIdx.x][group];
    u64 round = turn.round;
    turn.waiting++, look(turn);
    while (turn.round == round) pause_thread();
}
static void pass_turn(int group) {
    Turn& turn = turns[blockIdx.x][1 - group];
    turn.arrived++, look(turn);
}

static bool elected() { return own_lane() == 0; }
static void __syncwarp() { meet(warps[blockIdx.x][threadIdx.x / 32], 32); }

template <class T> static T shuffled(T value, int from) {
    auto& own = slots[blockIdx.x][threadIdx.x / 32];
    std::memcpy(own[own_lane()], &value, sizeof value);
    __syncwarp();
    T found;
    std::memcpy(&found, own[from], sizeof found);
    __syncwarp();
    return found;
}

template <class T> static T __shfl_sync(u32, T value, int from) { return shuffled(value, from); }
template <class T> static T __shfl_xor_sync(u32, T value, int by) { return shuffled(value, own_lane() ^ by); }
template <class T> static T __ldg(const T* p) { return *p; }
static int atomicAdd(int* p, int more) { return (*p += more) - more; }

template <class To, class From> static To as(From value) {
    To r;
    std::memcpy(&r, &value, sizeof r);
    return r;
}
static float __uint_as_float(u32 x) { return as<float>(x); }
static float __int_as_float(int x) { return as<float>(x); }
static u32 __float_as_uint(float x) { return as<u32>(x); }

// --- shared memory, barriers and copies ---

struct Barrier { int arrivals, left; i64 bytes; u32 round; };
// Of rows in swizzled boxes, or of an array of elements of ``size`` bytes, up to five dimensions, the innermost first.
// swizzle: bytes of the innermost side of a box whose pieces of 16 bytes change places; 0: none do.
struct Map {
    const u8* rows; i64 row_bytes, count, stride; int box, size, swizzle; i64 shape[5], steps[5]; int sides[5];
};

static u8* shared_memory() { return memory[blockIdx.x]; }
template <class T> static T* in(u32 rank, T* p) { return (T*)(memory[rank] + ((u8*)p - memory[blockIdx.x])); }

static void init(Barrier* b, int count) { *b = {count, count, 0, 0}; }
static void show_barriers() {}
static void wait_for_previous() {}
static void meet_cluster() { meet(cluster, BLOCKS * IN_BLOCK); }

static void look(Barrier* b) {
    if (b->left < 0) std::fprintf(stderr, "a barrier got more arrivals than it waits for\n"), std::abort();
    if (b->left == 0 && b->bytes == 0) b->left = b->arrivals, b->round++, events++;
}

static void arrive(Barrier* b) { b->left--, look(b); }
static void arrive_at(u32 rank, Barrier* b) { arrive(in(rank, b)); }
static void arrive_at_both(u32 peer, Barrier* b) { arrive(b), arrive_at(peer, b); }
static void expect(Barrier* b, int bytes) { b->bytes += bytes, b->left--, look(b); }
static void wait(Barrier* b, u32 parity) { while ((b->round & 1) == parity) pause_thread(); }
static void wait_at_most(Barrier* b, u32 parity) { wait(b, parity); }
static void came(Barrier* b, int bytes) { b->bytes -= bytes, look(b); }

static void send(u32 rank, u32* to, u32 value, Barrier* b) {
    to = in(rank, to), b = in(rank, b);
    late.push_back([=] { *to = value, came(b, 4); });
}
static void send(u32 rank, int* to, u32 value, Barrier* b) { send(rank, (u32*)to, value, b); }

static void send_four(u32 rank, void* to, int a, int b, int c, int d, Barrier* barrier) {
    int* there = (int*)in(rank, (u8*)to);
    barrier = in(rank, barrier);
    late.push_back([=] { there[0] = a, there[1] = b, there[2] = c, there[3] = d, came(barrier, 16); });
}

static void copy_array(u8* to, const Map& map, std::vector<i64> start, Barrier* b) {
    int bytes = 0;
    start.resize(5, 0);
    for (int e = 0; e < map.sides[4]; e++)
        for (int d = 0; d < map.sides[3]; d++)
            for (int c = 0; c < map.sides[2]; c++)
                for (int r = 0; r < map.sides[1]; r++)
                    for (int i = 0; i < map.sides[0]; i++, bytes += map.size) {
                        i64 at[5] = {start[0] + i, start[1] + r, start[2] + c, start[3] + d, start[4] + e}, from = 0;
                        bool inside = true;
                        for (int k = 0; k < 5; k++) inside &= at[k] < map.shape[k], from += at[k] * map.steps[k];
                        u64 place = (u64)(to + bytes);
                        if (map.swizzle) place ^= (place >> 7 & (map.swizzle / 16 - 1)) << 4;
                        if (inside) std::memcpy((u8*)place, map.rows + from, map.size);
                        else std::memset((u8*)place, 0, map.size);
                    }
    came(b, bytes);
}
static void copy_4d(void* to, const Map& map, int a, int b, int c, int d, Barrier* barrier) {
    late.push_back([=, &map] { copy_array((u8*)to, map, {a, b, c, d}, barrier); });
}
static void copy_5d(void* to, const Map& map, int a, int b, int c, int d, int e, Barrier* barrier) {
    late.push_back([=, &map] { copy_array((u8*)to, map, {a, b, c, d, e}, barrier); });
}

static void copy_box(u8* to, const Map& map, int x, int y, Barrier* b, int step) {
    for (int r = 0; r < map.box; r++)
        for (int c = 0; c < 128; c++) {
            i64 column = (i64)x * step + c, row = (i64)y + r;
            bool inside = column < map.row_bytes && row < map.count;
            to[r * 128 + ((c / 16) ^ (r % 8)) * 16 + c % 16] = inside ? map.rows[row * map.stride + column] : 0;
        }
    came(b, map.box * 128);
}

constexpr int SIZE = OPERAND ? 2 : 1;
static void copy(void* to, const Map& map, int x, int y, Barrier* b) {
    late.push_back([=, &map] { copy_box((u8*)to, map, x, y, b, SIZE); });
}
static void copy_to(void* to, const Map& map, int x, int y, Barrier* b, u32 blocks) {
    for (u32 rank = 0; rank < BLOCKS; rank++)
        if (blocks >> rank & 1) copy(in(rank, (u8*)to), map, x, y, in(rank, b));
}
static void copy_to_both(void* to, const Map& map, int x, int y, Barrier* b) { copy_to(to, map, x, y, b, 3); }

template <int COUNT> static void need_registers() {}
template <int COUNT> static void take_registers() {}

// --- numbers and products ---

static float from_e4m3(u8 x) {
    int exponent = x >> 3 & 15, part = x & 7;
    float v = exponent ? std::ldexp(8.0f + part, exponent - 10) : std::ldexp((float)part, -9);
    if (exponent == 15 && part == 7) v = NAN;
    return x & 128 ? -v : v;
}
static float from_half(u16 x) { return (float)as<_Float16>(x); }

static u16 to_bfloat(float x) {
    u32 v = as<u32>(x);
    return std::isnan(x) ? 0x7FFF : (u16)((v + 0x7FFF + (v >> 16 & 1)) >> 16);
}
static u32 pair(float low, float high) {
    if (OUT == 2) return as<u16>((_Float16)low) | (u32)as<u16>((_Float16)high) << 16;
    return to_bfloat(low) | (u32)to_bfloat(high) << 16;
}

static u8 to_e4m3(float x) {
    if (std::isnan(x)) return 0x7F;
    u8 sign = std::signbit(x) ? 128 : 0, best = 0;
    x = std::min(std::fabs(x), 448.0f);
    int low = 0, high = 126;  // codes order like numbers
    while (high - low > 1) (from_e4m3((low + high) / 2) <= x ? low : high) = (low + high) / 2;
    float under = x - from_e4m3(low), above = from_e4m3(high) - x;
    best = under < above || (under == above && low % 2 == 0) ? low : high;
    return sign | best;
}
static u16 codes_of(float low, float high) { return to_e4m3(low) | to_e4m3(high) << 8; }

static void begin_products() {}
static void commit_products() {}
template <int LEFT> static void await_products() {}

static float number_at(const u8* rows, int r, int i) {
    static std::vector<float> codes = [] {
        std::vector<float> all(256);
        for (int c = 0; c < 256; c++) all[c] = from_e4m3(c);
        return all;
    }();
    int byte = i * SIZE;
    const u8* p = rows + r * 128 + ((byte / 16) ^ (r % 8)) * 16 + byte % 16;
    if (OPERAND == 0) return codes[*p];
    u16 v;
    std::memcpy(&v, p, 2);
    return OPERAND == 1 ? as<float>((u32)v << 16) : from_half(v);
}

static void multiply(float (&d)[64], const u8* x, const u8* w, int k, bool added) {
    constexpr int COLUMNS = 32 / SIZE;
    int lane = own_lane(), first = threadIdx.x / 32 % 4 * 16 + lane / 4;
    float rows[2][COLUMNS];
    for (int h = 0; h < 2; h++)
        for (int i = 0; i < COLUMNS; i++) rows[h][i] = number_at(x, first + 8 * h, k * COLUMNS + i);
    for (int j = 0; j < 16; j++)
        for (int e = 0; e < 2; e++) {
            float sum[2] = {0, 0};
            for (int i = 0; i < COLUMNS; i++) {
                float v = number_at(w, 8 * j + lane % 4 * 2 + e, k * COLUMNS + i);
                sum[0] += rows[0][i] * v, sum[1] += rows[1][i] * v;
            }
            for (int h = 0; h < 2; h++) d[4 * j + 2 * h + e] = (added ? d[4 * j + 2 * h + e] : 0.0f) + sum[h];
        }
}

// The first operand is in registers: 64 rows of 32 bytes, of which a lane has four words.
template <int R> static void multiply_registers(
    float (&d)[R], u32 a0, u32 a1, u32 a2, u32 a3, const u8* tokens, int k, bool added
) {
    auto& own = slots[blockIdx.x][threadIdx.x / 32];
    int lane = own_lane();
    own[lane][1] = a0, own[lane][2] = a1, own[lane][3] = a2, own[lane][4] = a3;
    __syncwarp();
    constexpr int COLUMNS = 32 / SIZE, IN_WORD = 4 / SIZE;
    float rows[2][COLUMNS];
    for (int h = 0; h < 2; h++)
        for (int i = 0; i < COLUMNS; i++) {
            u32 word = (u32)own[lane / 4 * 4 + i / IN_WORD % 4][1 + h + i / (COLUMNS / 2) * 2];
            u32 bits = word >> i % IN_WORD * 8 * SIZE;
            rows[h][i] = OPERAND ? as<float>(bits << 16) : from_e4m3(bits & 255);
        }
    __syncwarp();
    for (int j = 0; j < R / 4; j++)
        for (int e = 0; e < 2; e++) {
            float sum[2] = {0, 0};
            for (int i = 0; i < COLUMNS; i++) {
                float v = number_at(tokens, 8 * j + lane % 4 * 2 + e, k * COLUMNS + i);
                sum[0] += rows[0][i] * v, sum[1] += rows[1][i] * v;
            }
            for (int h = 0; h < 2; h++) d[4 * j + 2 * h + e] = (added ? d[4 * j + 2 * h + e] : 0.0f) + sum[h];
        }
}

static u32 select_bytes(u32 low, u32 high, u32 selector) {
    u32 r = 0;
    for (int i = 0; i < 4; i++) {
        u32 digit = selector >> 4 * i & 15, byte = ((digit & 4 ? high : low) >> 8 * (digit & 3)) & 255;
        r |= (digit & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
    }
    return r;
}
static void get_matrices(const u8* row, u32 flipped, u32 (&m)[4]) {
    auto& own = slots[blockIdx.x][threadIdx.x / 32];
    int lane = own_lane();
    own[lane][1] = (u64)row ^ flipped;
    __syncwarp();
    for (int i = 0; i < 4; i++) std::memcpy(&m[i], (const u8*)own[8 * i + lane / 4][1] + lane % 4 * 4, 4);
    __syncwarp();
}

static u32 times_plus(u32 x, u32 y, u32 z) {
    u32 r = 0;
    for (int i = 0; i < 32; i += 16) {
        float v = (float)((double)as<float>(x >> i << 16) * as<float>(y >> i << 16) + as<float>(z >> i << 16));
        r |= (u32)to_bfloat(v) << i;
    }
    return r;
}
static u32 times(u32 x, u32 y) { return times_plus(x, y, 0x80008000u); }

static void store_streaming(uint4* to, const uint4& value) { *to = value; }

static void put_transposed(u8* row, u32 a, u32 b, u32 c, u32 d) {
    auto& own = slots[blockIdx.x][threadIdx.x / 32];
    int lane = own_lane();
    own[lane][1] = a, own[lane][2] = b, own[lane][3] = c, own[lane][4] = d;
    __syncwarp();
    for (int i = 0; i < 8; i++) {
        u16 number = (u16)(own[i * 4 + lane % 8 / 2][1 + lane / 8] >> lane % 2 * 16);
        std::memcpy(row + 2 * i, &number, 2);
    }
    __syncwarp();
}

static void put_matrices(u8* row, u32 a, u32 b, u32 c, u32 d) {
    auto& own = slots[blockIdx.x][threadIdx.x / 32];
    int lane = own_lane();
    own[lane][1] = a, own[lane][2] = b, own[lane][3] = c, own[lane][4] = d;
    __syncwarp();
    for (int i = 0; i < 4; i++) {
        u32 two = (u32)own[lane % 8 * 4 + i][1 + lane / 8];
        std::memcpy(row + 4 * i, &two, 4);
    }
    __syncwarp();
}

static float near_exp2(float x) { return std::exp2(x); }
static float near_tanh(float x) { return std::tanh(x); }
static float flushed_inverse(float x) { return 1.0f / x; }
static float near_inverse(float x) { return 1.0f / x; }
static float over(float x, float y) { return x / y; }

// --- the cluster ---

// Runs the threads until all have ended; ends the process where they wait for each other.
static void run_cluster(std::function<void()> body) {
    static std::function<void()> what;
    what = body;
    for (int block = 0; block < BLOCKS; block++) {
        memory[block] = (u8*)std::aligned_alloc(1024, BLOCK_BYTES);
        std::memset(memory[block], 0xFF, BLOCK_BYTES);
    }
    threads = std::vector<Thread>(BLOCKS * IN_BLOCK);
    for (int i = 0; i < BLOCKS * IN_BLOCK; i++) {
        Thread& t = threads[i];
        t.stack.resize(1 << 16), t.block = i / IN_BLOCK, t.index = i % IN_BLOCK, t.ended = false;
        getcontext(&t.context);
        t.context.uc_stack.ss_sp = t.stack.data(), t.context.uc_stack.ss_size = t.stack.size();
        t.context.uc_link = &main_context;
        makecontext(&t.context, +[] { what(); current->ended = true, events++; }, 0);
    }
    int idle = 0;
    for (bool some = true; some;) {
        some = false;
        u64 before = events;
        for (Thread& t : threads) {
            if (t.ended) continue;
            some = true, current = &t;
            threadIdx.x = t.index, blockIdx.x = t.block;
            swapcontext(&main_context, &t.context);
        }
        // Some of what is on its way arrives, whichever was sent first; all of it where nothing else moves.
        for (u64 i = late.size(); i-- > 0;)
            if (events == before || chance() % 2) {
                auto arrives = late[i];
                late.erase(late.begin() + (i64)i), arrives(), events++;
            }
        idle = events == before ? idle + 1 : 0;
        if (idle > 2) std::fprintf(stderr, "all threads wait\n"), std::abort();
    }
    for (u8* each : memory) std::free(each);
    for (auto& block : turns)
        for (Turn& turn : block)
            if (turn.arrived) std::fprintf(stderr, "a turn was not taken\n"), std::abort();
}
