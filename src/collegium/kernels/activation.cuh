// Activations, with the formulas of kernels/activation.py. ACTIVATION, FAST and HAS_LIMIT are as in prefill.cu.

__device__ __forceinline__ float sigmoid(float x) {
    if (FAST) return 0.5f * near_tanh(0.5f * x) + 0.5f;
    return over(1.0f, 1.0f + near_exp2(-x * 1.4426950408889634f));
}

__device__ __forceinline__ float tangent(float x) { return FAST ? near_tanh(x) : 2.0f * sigmoid(2.0f * x) - 1.0f; }
__device__ __forceinline__ float below(float x, float limit) { return x > limit ? limit : x; }
__device__ __forceinline__ float within(float x, float limit) { return x < -limit ? -limit : below(x, limit); }
__device__ __forceinline__ float gelu(float x) { return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f)); }

// z: anything with limit, alpha, gate_bound and up_bound.
template <class Bounds> __device__ __forceinline__ float activated(float gate, float up, const Bounds& z) {
    if (ACTIVATION < 0) return gate;
    if (HAS_LIMIT && ACTIVATION != 2) gate = below(gate, z.limit), up = within(up, z.limit);
    if (ACTIVATION == 0) return gate * sigmoid(gate) * up;
    if (ACTIVATION == 1) return (up + z.gate_bound) * (gate * sigmoid(z.alpha * gate));
    if (ACTIVATION == 2) {
        gate *= sigmoid(gate);
        return HAS_LIMIT ? below(gate, z.limit) * within(up, z.limit) : gate * up;
    }
    if (ACTIVATION == 3) {
        float bounded = z.gate_bound * tangent(over(gate, z.gate_bound)) * sigmoid(gate);
        return bounded * (z.up_bound * tangent(over(up, z.up_bound)));
    }
    if (ACTIVATION == 4) return gelu(gate) * up;
    if (ACTIVATION == 5) return gate * sigmoid(1.5957691216057308f * (gate + 0.044715f * gate * gate * gate)) * up;
    if (ACTIVATION == 6) return (up < 0.0f ? 0.0f : up) * (up < 0.0f ? 0.0f : up);
    if (ACTIVATION == 7) return up * sigmoid(up);
    return gelu(up);
}

