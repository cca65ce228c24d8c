// Greedy pick: the token with the largest logit of each row, the lowest id among equals. Value and token are one key of
// which the largest wins, so the order of the search does not matter; NaN has no key.
#include "include/rows.cuh"

namespace {

constexpr i32 WARPS = 32;
constexpr i32 THREADS = WARPS * 32;

// Orders by value, then by the lower token. 0 is below every key.
__device__ __forceinline__ u64 key(float value, u32 token) {
    if (value != value) return 0;
    return static_cast<u64>(ordered_bits(value)) << 32 | static_cast<u64>(~token);
}

__device__ __forceinline__ u64 warp_largest(u64 best) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) best = max(best, __shfl_xor_sync(0xffffffffu, best, offset));
    return best;
}

} // namespace

KERNEL(THREADS, argmax_f32)(const i32* header, i32 count, const f32* logits, i32 stride, i32 vocabulary, u32* out) {
    KSHARED(u64, warp_best, [WARPS]);
    const i32 rows = header[count];
    for (i32 row = blockIdx.x; row < rows; row += gridDim.x) {
        const f32* values = logits + static_cast<size_t>(row) * stride;
        u64 best = 0;
        i32 vectors = 0;
        if (stride % 4 == 0) {
            vectors = vocabulary / 4;
#pragma unroll 4
            for (i32 index = threadIdx.x; index < vectors; index += THREADS) {
                const float4 four = load_constant_f32x4(values + index * 4);
                const u32 token = static_cast<u32>(index) * 4;
                best = max(best, max(max(key(four.x, token), key(four.y, token + 1)),
                                     max(key(four.z, token + 2), key(four.w, token + 3))));
            }
        }
        for (i32 token = vectors * 4 + threadIdx.x; token < vocabulary; token += THREADS) {
            best = max(best, key(__ldg(values + token), token));
        }
        best = warp_largest(best);
        if (threadIdx.x % 32 == 0) warp_best[threadIdx.x / 32] = best;
        __syncthreads();
        if (threadIdx.x < 32) {
            best = warp_largest(warp_best[threadIdx.x]);
            if (threadIdx.x == 0) out[row] = best == 0 ? 0 : ~static_cast<u32>(best);
        }
        __syncthreads();
    }
}
KERNEL_EXPORT(argmax_f32)
