// The instructions of sm_90a that prefill.cu and w4_prefill.cu use, one function each. OPERAND and OUT are as there.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// NVRTC from 13.2 on keeps more values in registers, and lets every product wait for the one before where it has too few.
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1302
constexpr bool FEW_REGISTERS = true;
#else
constexpr bool FEW_REGISTERS = false;
#endif

struct alignas(64) Map { u8 bytes[128]; };
typedef u64 Barrier;

__device__ __forceinline__ u32 at(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// The shared memory of this block, from a multiple of 1024 on.
__device__ __forceinline__ u8* shared_memory() {
    extern __shared__ u8 raw[];
    return raw + (1024 - at(raw) % 1024) % 1024;
}

// The same address in the shared memory of a block of this cluster.
__device__ __forceinline__ u32 in(u32 rank, const void* p) {
    u32 r;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(at(p)), "r"(rank));
    return r;
}

__device__ __forceinline__ void init(Barrier* b, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at(b)), "r"(count));
}

__device__ __forceinline__ void show_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}

// Waits until the kernels before this one in the stream have ended, and what they wrote can be read. Every thread calls
// it, before the first read or write of global memory: the kernel starts earlier than that (runtime/nvrtc.py).
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Arrivals and waits name no wider scope: that of the cluster would flush caches at every one of them.
__device__ __forceinline__ void arrive(Barrier* b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at(b)) : "memory");
}

__device__ __forceinline__ void arrive_at_both(u32 peer, Barrier* b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [%1];" ::"r"(at(b)), "r"(in(peer, b)) : "memory");
}

__device__ __forceinline__ void expect(Barrier* b, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at(b)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait(Barrier* b, u32 parity) {
    asm volatile("{ .reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again; }" ::"r"(at(b)), "r"(parity) : "memory");
}

// The same with a limit of about ten seconds, after which a store to an invalid address ends the kernel with an error.
// It is no trap: with one in the kernel, ptxas ignores setmaxnreg and lets every product wait for the one before.
__device__ __forceinline__ bool try_wait(Barrier* b, u32 parity) {
    u32 done;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(at(b)), "r"(parity) : "memory");
    return done;
}

__device__ __forceinline__ u64 nanoseconds() {
    u64 time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}

__device__ __forceinline__ void wait_at_most(Barrier* b, u32 parity) {
    if (try_wait(b, parity)) return;
    u64 start = nanoseconds();
    while (!try_wait(b, parity))
        if (nanoseconds() - start > 10000000000ull)
            asm volatile("st.global.u32 [%0], %1;" ::"l"(16ull), "r"(parity) : "memory");
}

// Whether this is the one lane that the warp elects. The compiler knows that there is one, so it does not loop over
// lanes at every copy.
__device__ __forceinline__ bool elected() {
    u32 chosen;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xFFFFFFFF; selp.b32 %0, 1, 0, p; }" : "=r"(chosen));
    return chosen;
}

// Waits until all four warps of a group have come; groups have numbers from 0 on.
__device__ __forceinline__ void meet_group(int group) {
    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}

// Two groups take turns: each waits until the other one has passed the turn to it, which all of its threads do.
__device__ __forceinline__ void wait_turn(int group) { asm volatile("bar.sync %0, 256;" ::"r"(group + 3) : "memory"); }
__device__ __forceinline__ void pass_turn(int group) { asm volatile("bar.arrive %0, 256;" ::"r"(4 - group) : "memory"); }

__device__ __forceinline__ void arrive_at(u32 rank, Barrier* b) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(in(rank, b)) : "memory");
}

// Sends a number to a block of the cluster, and its four bytes to the barrier that waits for them there.
__device__ __forceinline__ void send(u32 rank, void* to, u32 value, Barrier* b) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];"
                 ::"r"(in(rank, to)), "r"(value), "r"(in(rank, b)) : "memory");
}

// The same with four numbers.
__device__ __forceinline__ void send_four(u32 rank, void* to, int a, int b, int c, int d, Barrier* barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
                 ::"r"(in(rank, to)), "r"(a), "r"(b), "r"(c), "r"(d), "r"(in(rank, barrier)) : "memory");
}

// Copies a box of the tensor, from column x and row y on; copy_to_both to both blocks of the cluster.
__device__ __forceinline__ void copy(void* to, const Map& map, int x, int y, Barrier* b) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(at(to)), "l"(&map), "r"(x), "r"(y), "r"(at(b)) : "memory");
}

__device__ __forceinline__ void copy_to_both(void* to, const Map& map, int x, int y, Barrier* b) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                 " [%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(at(to)), "l"(&map), "r"(x), "r"(y), "r"(at(b)), "h"((u16)3) : "memory");
}

// Copies a box of a tensor of four or five dimensions; a to e: where it begins, the innermost dimension first.
__device__ __forceinline__ void copy_4d(void* to, const Map& map, int a, int b, int c, int d, Barrier* barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3, %4, %5}], [%6];"
                 ::"r"(at(to)), "l"(&map), "r"(a), "r"(b), "r"(c), "r"(d), "r"(at(barrier)) : "memory");
}

__device__ __forceinline__ void copy_5d(void* to, const Map& map, int a, int b, int c, int d, int e, Barrier* barrier) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3, %4, %5, %6}], [%7];"
                 ::"r"(at(to)), "l"(&map), "r"(a), "r"(b), "r"(c), "r"(d), "r"(e), "r"(at(barrier)) : "memory");
}

// From here on a warp has so many registers a thread: fewer than it began with, or more.
template <int COUNT> __device__ __forceinline__ void need_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void await_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// A tile of rows of 128 bytes, the K dimension inside, swizzled by 128 bytes, at a multiple of 1024.
__device__ __forceinline__ u64 operand(const u8* p) {
    return (u64)((at(p) & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
}

__device__ __forceinline__ void multiply_operands(float (&d)[64], u64 x, u64 w, bool added) { MULTIPLY }

// d = 64 rows of x times 128 rows of w, of piece k of 32 bytes of a row, plus d where added.
__device__ __forceinline__ void multiply(float (&d)[64], const u8* x, const u8* w, int k, bool added) {
    multiply_operands(d, operand(x) + 2 * k, operand(w) + 2 * k, added);
}

// Four matrices of 8 x 8 16-bit numbers; each lane has the address of one row.
__device__ __forceinline__ void put_matrices(u8* row, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(at(row)), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// The same with every matrix transposed.
__device__ __forceinline__ void put_transposed(u8* row, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(at(row)), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Reads four matrices of 8 x 8 16-bit numbers; lane i has the address of row i % 8 of matrix i / 8, in which the bits
// flipped are changed. A lane gets two numbers of row lane / 4 of each.
__device__ __forceinline__ void get_matrices(const u8* row, u32 flipped, u32 (&m)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(at(row) ^ flipped) : "memory");
}

// Two bfloat16 numbers times two others, and plus two others.
__device__ __forceinline__ u32 times_plus(u32 x, u32 y, u32 z) {
    u32 r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(y), "r"(z));
    return r;
}
// Adding -0 changes no number, zeros included.
__device__ __forceinline__ u32 times(u32 x, u32 y) { return times_plus(x, y, 0x80008000u); }

// Selects bytes: digit i of the selector is the number of the byte of low (0 to 3) or high (4 to 7) that becomes byte i.
__device__ __forceinline__ u32 select_bytes(u32 low, u32 high, u32 selector) {
    u32 r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(low), "r"(high), "r"(selector));
    return r;
}

// Stores what is not read again soon.
__device__ __forceinline__ void store_streaming(uint4* to, const uint4& value) { __stcs(to, value); }

__device__ __forceinline__ float near_exp2(float x) {
    float y;
    asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float near_tanh(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float near_inverse(float x) {
    float y;
    asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The same with subnormal numbers as zero.
__device__ __forceinline__ float flushed_inverse(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float over(float x, float y) {
    float z;
    asm("div.full.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

__device__ __forceinline__ float from_half(u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}

// Two results as 16-bit numbers, and two as codes; the first is the lower one.
__device__ __forceinline__ u32 pair(float low, float high) {
    u32 r;
    if (OUT == 2)
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    else
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

__device__ __forceinline__ u16 codes_of(float low, float high) {
    u16 r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
    return r;
}
