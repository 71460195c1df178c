// What prefill.cu asks of a GPU of sm_90a, one function an instruction. OPERAND and OUT are as there.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

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

// Sends a number to a block of the cluster, and its four bytes to the barrier that waits for them there.
__device__ __forceinline__ void send(u32 rank, void* to, u32 value, Barrier* b) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];"
                 ::"r"(in(rank, to)), "r"(value), "r"(in(rank, b)) : "memory");
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
